"""Blocks in host memory: the least recently used leaves first. Pinned where a device is to read them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch

from kvx.errors import BadArgument
from kvx.layout.device_memory import host_bytes
from kvx.spec.byte_size import parse_bytes
from kvx.tiers.block import Block, BlockKind, check_kind
from kvx.tiers.memory import SLAB_BYTES, HostMemory
from kvx.tiers.tier import Tier, TierEvent, blocks_in


class HostTier(Tier):
    """At most `capacity_bytes` of blocks. A block that was handed out lives as long as its reader holds it, evicted or not."""

    medium = "CPU"

    def __init__(
        self,
        kind: BlockKind,
        capacity_bytes: int | str,  # bytes, or "2GB"
        *,
        pin_memory: bool = False,  # where CUDA is; elsewhere memory is as ever, and `is_pinned` says so
        threads: int = 2,
        max_pending: int = 64,
        on_event: Callable[[TierEvent], None] | None = None,
    ) -> None:
        check_kind("HostTier", kind)
        if isinstance(capacity_bytes, str):
            capacity_bytes = parse_bytes(capacity_bytes, "HostTier: capacity_bytes")
        self.capacity_blocks = blocks_in("HostTier", capacity_bytes, kind.num_bytes)
        if capacity_bytes > host_bytes():  # it grows as blocks come: the process would be ended late, and without a word
            raise BadArgument(
                f"HostTier: capacity_bytes is {capacity_bytes / 1e9:.1f} GB; the host has {host_bytes() / 1e9:.1f} GB. Give less."
            )
        # A thread holds room for one block while it copies: more threads than blocks would pass the capacity.
        super().__init__(kind, threads=min(threads, self.capacity_blocks), max_pending=max_pending, on_event=on_event)
        self.is_pinned = pin_memory and torch.cuda.is_available()
        # Where its blocks lie. A block that is put and lies here already is kept as it is: nobody writes to it from then on.
        self.memory = HostMemory(kind, pin_memory=self.is_pinned, slab_bytes=min(SLAB_BYTES, capacity_bytes))
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # the least recently used first
        self._coming = 0  # blocks being copied, whose room is taken

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def names(self) -> list[bytes]:
        """Of all its blocks, the least recently used first."""
        with self._lock:
            return list(self._blocks)

    def _store(self, key: bytes, block: Block) -> bool:
        needs_copy = self.memory.place(block) is None
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return False
            room = self.capacity_blocks - self._coming - 1
            # put_now() runs beside the threads: all of a small tier may be on its way.
            count = min(len(self._blocks), len(self._blocks) - room)
            evicted = [self._blocks.popitem(last=False) for _ in range(count)]
            if needs_copy:
                self._coming += 1
            else:
                self._blocks[key] = block
        try:
            for old, content in evicted:
                self._tell("evicted", old, block=content, evicted=1)
            if not needs_copy:
                return True
            kept = _copy(block, self.memory.take(1)[0])
            block.require_held()
            with self._lock:
                return self._blocks.setdefault(key, kept) is kept
        finally:
            if needs_copy:
                with self._lock:
                    self._coming -= 1

    def _fetch(self, key: bytes, into: Block | None) -> Block | None:
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
        return block if block is None or into is None else _copy(block, into)

    def _holds(self, key: bytes) -> bool:
        with self._lock:
            return key in self._blocks

    def _remove(self, key: bytes) -> bool:
        with self._lock:
            return self._blocks.pop(key, None) is not None


def _copy(block: Block, into: Block) -> Block:
    for to, t in zip(into.buffers, block.buffers, strict=True):
        to.copy_(t)
    return into
