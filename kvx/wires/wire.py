"""What wires have in common: the error of a peer that is gone or late, a deadline, and how a missing package is named.

A wire moves bytes between processes. KVX brings none of its own: NIXL and Mooncake do, each where it is installed.
"""

from __future__ import annotations

import importlib
import time
from types import ModuleType

from kvx.errors import TierError, Unsupported

PAUSE_S = 0.0005  # between two looks at something that a peer or a library does meanwhile


class WireError(TierError):
    """A peer is gone, late or not understood. What it was to bring is not to be read."""


class Deadline:
    """How long all of a call may take together."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def check(self, what: str, hint: str = "") -> None:
        """Raise once the time is up: what did not happen by then, and what to do."""
        if not self.left_s:
            raise WireError(f"{what} within {self.timeout_s:g} s.{hint and ' '}{hint}")

    def pause(self, what: str, seconds: float = PAUSE_S, hint: str = "") -> None:
        """Wait a moment, or raise."""
        self.check(what, hint)
        time.sleep(min(seconds, self.left_s))


def need(module: str, package: str, how: str) -> ModuleType:
    """The module of an optional package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise Unsupported(f"the package {package} needs {error.name}, which is not there: pip install it.") from None
        raise Unsupported(f"this needs the package {package}: {how}") from None
    except (ImportError, OSError) as error:
        raise Unsupported(f"the package {package} is there and cannot be loaded: {error}. {how}") from None
