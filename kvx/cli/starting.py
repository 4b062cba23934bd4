"""While the command line is still importing: Ctrl-C ends it quietly, with a shell's 130, and not with a trace out of torch; a torch
that is not there or a library of another machine is a sentence.

kvx/__main__.py imports this first, and kvx/cli/main.py asks it around the imports of a verb. What runs after has a say of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType


def begin() -> None:
    """From here on Ctrl-C ends the process at once, unless somebody else has a say in it."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _quit)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook


def end() -> None:
    """Ctrl-C is KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _quit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.excepthook is _hook:
        sys.excepthook = sys.__excepthook__


def say(error: BaseException) -> None:
    """Why the command cannot start, in a sentence."""
    name = getattr(error, "name", None)
    is_absent = isinstance(error, ModuleNotFoundError) and name
    mend = f"pip install {name}" if is_absent else "reinstall kvx, or `make build` in a source checkout"
    kind = type(error).__name__
    sys.stderr.write(f"kvx cannot start: {kind}: {error}. Fix: {mend}. `python -c 'from kvx import *'` shows where.\n")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    say(error)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(130)  # nothing is open yet
