"""What the tests of wires share."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def mooncake_master() -> Iterator[str]:
    """HOST:PORT of one that answers."""
    import mooncake

    port, program = free_port(), Path(mooncake.__file__).parent / "mooncake_master"
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={free_port()}", "--rpc_address=0.0.0.0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 10
        while True:
            try:
                MooncakeStore(f"127.0.0.1:{port}", timeout_s=1).close()
                break
            except TierError:
                assert time.monotonic() < end
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
