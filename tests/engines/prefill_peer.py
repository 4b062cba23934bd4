"""`kvx prefill` in a process of its own, forked from one that imported it all.

With KVX_TEST_FLIP=1 a byte of what it offers changes after its digest was made, once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvx.cli import prefill
from kvx.cli.held import Held, hold
from kvx.cli.main import main
from kvx.wires.choose import puller_from
from kvx.wires.secret import read_or_make_secret
from kvx.wires.wire import Deadline
from tests.engines.forked import fork_server
from tests.engines.wires import free_port

_PRELOAD = (
    "torch", "gguf", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.modeling_gguf_pytorch_utils", "tests.engines.prefill_peer",
)  # fmt: skip
_START_S = 300.0


class PrefillCommand:
    """In that process."""

    def run(self, options: list[str]) -> None:
        """As if it was typed. It ends when the process does."""
        prefill.hold = _hold_and_flip
        sys.argv = ["kvx", "prefill", *options]
        main()


class Prefill:
    def __init__(self, port: int, *options: str, flip: bool = False, tls: str = "") -> None:
        self.address = f"127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory()
        self.secret_file = Path(self._folder.name) / "secret"
        self.secret, _ = read_or_make_secret(self.secret_file)
        env = ({"KVX_TEST_FLIP": "1"} if flip else {}) | ({"UCX_TLS": tls} if tls else {})
        self._session = fork_server(sys.executable, _PRELOAD, {"OMP_NUM_THREADS": "1"}).session(
            f"{__name__}:PrefillCommand", env=env
        )
        self.pid = self._session.pid
        told = ["--json", "--device", "cpu", *options, "--listen", self.address, "--secret-file", str(self.secret_file)]
        self._session.tell("run", options=told)
        said = self._first_line()
        assert said["listening"] == self.address
        self.model = str(said["model"])

    def _first_line(self) -> dict[str, Any]:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self.is_alive():
            lines = [line for line in self._session.log.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
            if lines:
                return dict(json.loads(lines[0]))
            time.sleep(0.02)
        raise AssertionError(self._session.log)

    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """Until it is gone, and its port free."""
        os.kill(self.pid, signal.SIGKILL)
        while self.is_alive():
            time.sleep(0.005)

    def status(self, wire: str = "nixl") -> dict[str, Any]:
        """What is in use there."""
        deadline = Deadline(20)
        with puller_from(wire, self.address, self.secret, deadline) as puller:
            return dict(puller.ask({"ask": "status"}, deadline).about)


@contextmanager
def prefill_at(*options: str, port: int = 0, **more: Any) -> Iterator[Prefill]:
    one = Prefill(port or free_port(), *options, **more)
    try:
        yield one
    finally:
        if one.is_alive():
            one.kill()
        one._session.close()
        one._folder.cleanup()


def _hold_and_flip(*args: Any, **options: Any) -> Held:
    held = hold(*args, **options)
    if os.environ.pop("KVX_TEST_FLIP", ""):
        held.buffers[0][-1].view(-1)[4321] ^= 1
    return held
