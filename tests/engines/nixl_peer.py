"""A NIXL arena in a process of its own, for tests that kill, stop or corrupt it. Each is forked from one that imported it all."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engines.forked import fork_server
from tests.engines.wires import SECRET, free_port
from tests.tiers.blocks import KIND

_PRELOAD = ("torch", "kvx.tiers.nixl_server", "tests.engines.nixl_peer")


class ServedArena:
    """In that process."""

    def __init__(self, port: int, num_blocks: int, lease_s: float) -> None:
        from kvx.tiers.nixl_server import NixlServer

        self._server = NixlServer("127.0.0.1", port, KIND, num_blocks * KIND.num_bytes, secret=SECRET, lease_s=lease_s)
        (self._arena,) = self._server.arenas.values()

    def flip(self, slot: int, byte: int) -> None:
        """One bit of the arena."""
        self._arena.memory[slot, byte] ^= 1

    def leases(self) -> int:
        self._arena.slots.check()
        return self._server.num_leases


class Peer:
    def __init__(self, port: int, num_blocks: int, lease_s: float) -> None:
        server = fork_server(sys.executable, _PRELOAD)
        self._session = server.session(f"{__name__}:ServedArena", port=port, num_blocks=num_blocks, lease_s=lease_s)
        self.port, self.pid = port, self._session.pid

    def flip(self, slot: int, byte: int) -> None:
        self._session.ask("flip", slot=slot, byte=byte)

    def leases(self) -> int:
        return int(self._session.ask("leases"))

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Until it is gone, and its port free."""
        self._session.close()
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.005)


@contextmanager
def peer(num_blocks: int = 8, lease_s: float = 5.0, port: int = 0) -> Iterator[Peer]:
    one = Peer(port or free_port(), num_blocks, lease_s)
    try:
        yield one
    finally:
        one.kill()
