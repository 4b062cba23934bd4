"""Host memory in pieces of a block's size, neighbours where it can be, so that many blocks cross a link in one copy.

A piece comes back by itself when nobody holds its block any more, in whatever thread that is.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right, insort
from collections import deque
from typing import Any

import torch
from torch import Tensor

from kvx.tiers.block import Block, BlockKind

SLAB_BYTES = 64 << 20
_ALIGN = 256  # of a block's beginning: a cache line, and whatever a copy engine likes


class HostMemory:
    """Room for blocks of one kind. It grows by slabs and never shrinks: as large as the most that was held at once."""

    def __init__(self, kind: BlockKind, *, pin_memory: bool = False, slab_bytes: int = SLAB_BYTES) -> None:
        self.kind, self.is_pinned = kind, pin_memory
        self.pitch = -(-kind.num_bytes // _ALIGN) * _ALIGN  # bytes from a block to its neighbour
        self._per_slab = max(1, slab_bytes // self.pitch)
        self._piece = _piece_of(kind.num_bytes)
        self._slabs: list[Tensor] = []
        self._by_address: list[tuple[int, int]] = [(-1 << 64, -1)]  # slabs, by where they begin; the first ends every search
        self._lock = threading.Lock()
        self._free: list[int] = []  # pieces, the lowest at the end
        # A piece may come back while this very thread has the lock: a deque takes it without one.
        self._returned: deque[int] = deque()

    def take(self, n: int) -> list[Block]:
        """Room for `n` blocks, with any bytes in it. Neighbours as far as there are some."""
        with self._lock:
            if self._returned:
                while self._returned:
                    self._free.append(self._returned.popleft())
                self._free.sort(reverse=True)
            while len(self._free) < n:
                slab = torch.empty(self._per_slab * self.pitch, dtype=torch.uint8, pin_memory=self.is_pinned)
                first = len(self._slabs) * self._per_slab
                self._slabs.append(slab)
                insort(self._by_address, (slab.data_ptr(), len(self._slabs) - 1))
                self._free[:0] = range(first + self._per_slab - 1, first - 1, -1)
            left = len(self._free) - n
            pieces = self._free[left:]
            del self._free[left:]
        return [self._block(p) for p in reversed(pieces)]

    def _block(self, number: int) -> Block:
        slab, place = divmod(number, self._per_slab)
        piece = self._piece.from_address(self._slabs[slab].data_ptr() + place * self.pitch)
        piece.number, piece.slab, piece.returned = number, self._slabs[slab], self._returned
        memory = torch.frombuffer(piece, dtype=torch.uint8)
        sizes = self.kind.buffer_bytes
        return Block(self.kind, (memory,) if len(sizes) == 1 else torch.split(memory, list(sizes)))

    def place(self, block: Block) -> tuple[int, int] | None:
        """The number of its slab and its place there; None of memory from elsewhere."""
        address = block.buffers[0].data_ptr()
        base, slab = self._by_address[bisect_right(self._by_address, (address, len(self._slabs))) - 1]
        place = (address - base) // self.pitch
        return (slab, place) if 0 <= place < self._per_slab else None

    def run(self, slab: int, first: int, n: int) -> Tensor:
        """The bytes of `n` neighbours."""
        return self._slabs[slab][first * self.pitch : (first + n) * self.pitch]

    @property
    def num_held(self) -> int:
        """Pieces that are not here."""
        with self._lock:
            return len(self._slabs) * self._per_slab - len(self._free) - len(self._returned)


def _piece_of(size: int) -> Any:
    """The type of a piece: a tensor holds the object whose memory it shows, so this one goes when the last tensor does."""

    class _Piece(ctypes.c_ubyte * size):  # type: ignore[misc]  # a class made by an expression
        number: int
        slab: Tensor
        returned: deque[int]

        def __del__(self) -> None:
            self.returned.append(self.number)

    return _Piece
