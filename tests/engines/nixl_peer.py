"""A process that serves a NIXL arena, for tests that kill, stop or corrupt it: nixl_peer.py PORT BLOCKS LEASE_S.

Lines on stdin: `flip SLOT BYTE` changes a byte of the arena, `leases` prints how many there are, `quit` ends it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvx.tiers.nixl_server import NixlServer
from tests.engines.wires import SECRET, free_port
from tests.tiers.blocks import KIND


class Peer:
    def __init__(self, port: int, num_blocks: int, lease_s: float) -> None:
        command = [sys.executable, "-m", "tests.engines.nixl_peer", str(port), str(num_blocks), str(lease_s)]
        self.port = port
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def say(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def peer(num_blocks: int = 8, lease_s: float = 5.0, port: int = 0) -> Iterator[Peer]:
    one = Peer(port or free_port(), num_blocks, lease_s)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def main(port: int, num_blocks: int, lease_s: float) -> None:
    with NixlServer("127.0.0.1", port, KIND, num_blocks * KIND.num_bytes, secret=SECRET, lease_s=lease_s) as server:
        print("ready", flush=True)
        for line in sys.stdin:
            match line.split():
                case ["flip", slot, byte]:
                    server.arena[int(slot), int(byte)] ^= 1
                    print("done", flush=True)
                case ["leases"]:
                    server.slots.check()
                    print(server.num_leases, flush=True)
                case _:
                    break


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
