"""What the tests of wires share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvx.tiers import TierError
from kvx.wires.mooncake.store import MooncakeStore
from kvx.wires.secret import Secret


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


SECRET = Secret(b"the secret of the engines' tests, which is long enough")


def own_address() -> str:
    """Of this machine, as its neighbours see it; loopback where it has no other. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("198.51.100.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(s.getsockname()[0])


class StoreServer:
    """A store in memory of other processes than the test's, which can be killed, stopped and started again at its address."""

    def __init__(self, wire: str, home: Path) -> None:
        self.wire, self.home, self.port = wire, home, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.tier = f"nixl:{self.address}:8MB" if wire == "nixl" else f"mooncake:{self.address}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        if self.wire == "nixl":
            self._run([sys.executable, "-m", "kvx", "store", "--listen", self.address, "--size", "64MB"])
        else:
            self.processes.append(_master(self.port))
            _wait_for_master(self.address)
            self._run([sys.executable, "-c", _OWNER, self.address])  # who gives memory: without one nothing can be kept

    def _run(self, command: list[str]) -> None:
        env = {**os.environ, "HOME": str(self.home)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)
        if number == signal.SIGKILL:
            for process in self.processes:
                process.wait()
            self.processes.clear()


_OWNER = """
import sys
from kvx.wires.mooncake.store import MooncakeStore
store = MooncakeStore(sys.argv[1], segment_bytes=64 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def store_server(wire: str, home: Path) -> Iterator[StoreServer]:
    """`home` has the secret of the wire. Skipped where the wire's package is not here, or does not load."""
    pytest.importorskip(
        {"nixl": "nixl._api", "mooncake": "mooncake.store"}[wire], exc_type=ImportError,
        reason=f"{wire} is not installed here, or a library of the system that it needs is not (apt install libibverbs1)",
    )  # fmt: skip
    server = StoreServer(wire, home)
    try:
        server.start()
        yield server
    finally:
        server.signal(signal.SIGKILL)


@contextmanager
def mooncake_master() -> Iterator[str]:
    """HOST:PORT of one that answers."""
    port = free_port()
    process = _master(port)
    try:
        _wait_for_master(f"127.0.0.1:{port}")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _master(port: int) -> subprocess.Popen[str]:
    import mooncake

    program = Path(mooncake.__file__).parent / "mooncake_master"
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={free_port()}", "--rpc_address=0.0.0.0"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)


def _wait_for_master(address: str) -> None:
    end = time.monotonic() + 10
    while True:
        try:
            MooncakeStore(address, timeout_s=1).close()
            return
        except TierError:
            assert time.monotonic() < end
            time.sleep(0.1)
