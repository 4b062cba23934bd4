"""Blocks in Mooncake's store: in the memory of all who joined it, gone when its owner goes. The store evicts by rules of its own.

An object's name holds the kind of its block, so a block of another kind is not found; its last bytes are a checksum of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from kvx.errors import Unsupported
from kvx.tiers.block import Block, BlockKind
from kvx.tiers.block_file import CHECKSUMS, checksum
from kvx.tiers.tier import Tier, TierEvent
from kvx.wires.mooncake.store import MooncakeStore
from kvx.wires.wire import WireError

_TAIL = 17  # the checksum's number, and the checksum


class MooncakeTier(Tier):
    """The store is the caller's: it stays open when the tier closes."""

    is_shared = is_remote = True

    def __init__(
        self,
        store: MooncakeStore,
        kind: BlockKind,
        *,
        max_pending: int = 64,
        on_event: Callable[[TierEvent], None] | None = None,
    ) -> None:
        super().__init__(kind, threads=1, max_pending=max_pending, on_event=on_event)  # one: the staging memory is its own
        self._objects = store
        self._put_here: set[bytes] = set()
        self._staging = torch.zeros(kind.num_bytes + _TAIL, dtype=torch.uint8)
        store.register([self._staging])

    @property
    def num_blocks(self) -> int:
        """That this tier put and did not drop; the store may have evicted some."""
        return len(self._put_here)

    def has(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Which are there, without reading them: get() may still refuse one. None where the store cannot be reached."""
        return self._submit("has", self._has, self._checked("has", keys))

    def has_now(self, keys: Sequence[bytes]) -> list[bool]:
        """One question for all."""
        return self._has(self._checked("has_now", keys))

    def close(self) -> None:
        super().close()
        self._objects.release([self._staging])

    def _has(self, keys: list[bytes]) -> list[bool]:
        try:
            return self._objects.has([self._name(key) for key in keys])
        except WireError as error:
            for key in keys[:1]:
                self._tell("failed", key, str(error), errors=1)
            return [False] * len(keys)

    def _store(self, key: bytes, block: Block) -> bool:
        if self._objects.has([self._name(key)])[0]:
            return False
        torch.cat(block.buffers, out=self._staging[:-_TAIL])
        self._staging[-_TAIL:] = torch.frombuffer(bytearray(_tail(self._staging, max(CHECKSUMS))), dtype=torch.uint8)
        self._objects.put_from(self._name(key), self._staging)
        self._put_here.add(key)
        return True

    def _fetch(self, key: bytes, into: Block | None) -> Block | None:
        try:
            size = self._objects.get_into(self._name(key), self._staging)
            if not size:
                return None
            tail = bytes(self._staging[-_TAIL:].tolist())
            is_whole = size == self._staging.numel() and tail[0] in (1, 3) and _tail(self._staging, tail[0]) == tail
        except (WireError, Unsupported) as error:
            self._tell("failed", key, str(error), errors=1)
            return None
        if not is_whole:
            self._remove(key)
            self._tell("refused", key, "its bytes are not those that were written: the checksum differs.", refused=1)
            return None
        block, at = into or self.kind.empty(), 0
        for t in block.buffers:
            t.copy_(self._staging[at : at + t.numel()])
            at += t.numel()
        return block

    def _holds(self, key: bytes) -> bool:
        return self._has([key])[0]

    def _remove(self, key: bytes) -> bool:
        self._put_here.discard(key)
        return self._objects.remove(self._name(key))

    def _name(self, key: bytes) -> str:
        return f"kvx/{self.kind.digest.hex()}/{key.hex()}"


def _tail(row: torch.Tensor, number: int) -> bytes:
    return bytes([number]) + checksum(number, [row[:-_TAIL].numpy().data])
