"""`kvx prefill` as a child of the tests. With KVX_TEST_FLIP=1 a byte of what it offers changes after its digest was made, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
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
from tests.engines.wires import free_port


class Prefill:
    def __init__(self, port: int, *options: str, flip: bool = False, tls: str = "") -> None:
        self.address = f"127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory()
        self.secret_file = Path(self._folder.name) / "secret"
        self.secret, _ = read_or_make_secret(self.secret_file)
        env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"KVX_TEST_FLIP": "1"} if flip else {}) | ({"UCX_TLS": tls} if tls else {})
        command = [sys.executable, "-m", "tests.engines.prefill_peer", "prefill", "--json", "--device", "cpu", *options]
        command += ["--listen", self.address, "--secret-file", str(self.secret_file)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        said = self.said()
        assert said["listening"] == self.address
        self.model = str(said["model"])

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

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
        one.process.kill()
        one.process.wait()
        one._folder.cleanup()


def _hold_and_flip(*args: Any, **options: Any) -> Held:
    held = hold(*args, **options)
    if os.environ.pop("KVX_TEST_FLIP", ""):
        held.buffers[0][-1].view(-1)[4321] ^= 1
    return held


if __name__ == "__main__":
    prefill.hold = _hold_and_flip
    main()
