"""Blocks in Mooncake's store: in the memory of all who joined it, gone when its owner goes. The store evicts by rules of its own.

An object's name holds the kind of its block, so a block of another kind is not found; its last bytes are a checksum of the others.
A master that is gone is a miss of get and a TierError of put; it is asked again after `retry_s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from kvx.errors import Unsupported
from kvx.tiers.block import Block, BlockKind
from kvx.tiers.block_file import CHECKSUMS, checksum
from kvx.tiers.tier import Tier, TierEvent
from kvx.wires.mooncake.store import NO_ANSWER, MooncakeStore, StoreError
from kvx.wires.wire import WireError

_TAIL = 17  # the checksum's number, and the checksum
AGAIN_S = 10.0  # an engine that lost its master asks for it again after so long


class _Share:
    """What this process is in the store of one master: all its tiers share that, and the last one leaves."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        self.store, self.num_tiers = MooncakeStore(master, segment_bytes=segment_bytes), 0


_JOINING = threading.Lock()
_SHARES: dict[tuple[str, int], _Share] = {}
_REFUSED: dict[tuple[str, int], tuple[float, WireError]] = {}  # until when it is not tried again, and why


class MooncakeTier(Tier):
    """The store is the caller's: it stays open when the tier closes."""

    is_shared = is_remote = True

    def __init__(
        self,
        store: MooncakeStore,
        kind: BlockKind,
        *,
        group: str = "",  # tells layer groups apart whose blocks look alike
        retry_s: float = 1.0,  # after a failure of the master, calls fail at once for so long
        max_pending: int = 64,
        on_event: Callable[[TierEvent], None] | None = None,
    ) -> None:
        super().__init__(kind, threads=1, max_pending=max_pending, on_event=on_event)  # one: the staging memory is its own
        self._objects, self.retry_s = store, retry_s
        # What others have put into the store stays when this process goes; what is in this process's memory goes with it.
        self.is_lasting = not store.segment_bytes
        self._folder = "-".join(filter(None, (kind.digest.hex(), group)))
        self._put_here: set[bytes] = set()
        self._share: tuple[str, int] | None = None  # of `join`: where its store is
        self._down_until_s = 0.0
        self._lock = threading.Lock()  # of the staging memory: get_now and put_now run on threads of the caller
        self._staging = torch.zeros(kind.num_bytes + _TAIL, dtype=torch.uint8)
        store.register([self._staging])

    @classmethod
    def join(cls, master: str, kind: BlockKind, *, segment_bytes: int = 0, group: str = "") -> MooncakeTier:
        """In the store of this master, which the process joins with its first tier and leaves with its last.

        A master that did not answer is not waited for again at once: an engine opens a tier for each kind of its blocks.
        """
        cls.check(kind)
        at = master, segment_bytes
        with _JOINING:
            until_s, why = _REFUSED.get(at, (0.0, None))
            if why is not None and time.monotonic() < until_s:
                raise WireError(str(why))
            try:
                share = _SHARES[at] if at in _SHARES else _SHARES.setdefault(at, _Share(master, segment_bytes))
            except WireError as error:
                _REFUSED[at] = time.monotonic() + AGAIN_S, error
                raise
            tier = cls(share.store, kind, group=group, retry_s=AGAIN_S)
            share.num_tiers, tier._share = share.num_tiers + 1, at
            return tier

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
        with _JOINING:
            at, self._share = self._share, None
            if at is not None:
                _SHARES[at].num_tiers -= 1
                if not _SHARES[at].num_tiers:
                    _SHARES.pop(at).store.close()

    @contextmanager
    def _asked(self) -> Iterator[MooncakeStore]:
        """The store, for one exchange at a time."""
        with self._lock:
            if time.monotonic() < self._down_until_s:
                raise WireError(f"the master of the store failed less than {self.retry_s:g} s ago.")
            try:
                yield self._objects
            except StoreError as error:
                if error.code in NO_ANSWER:
                    self._down_until_s = time.monotonic() + self.retry_s
                raise

    def _has(self, keys: list[bytes]) -> list[bool]:
        try:
            with self._asked() as store:
                return store.has([self._name(key) for key in keys])
        except WireError as error:
            for key in keys[:1]:
                self._tell("failed", key, str(error), errors=1)
            return [False] * len(keys)

    def _store(self, key: bytes, block: Block) -> bool:
        with self._asked() as store:
            if store.has([self._name(key)])[0]:
                return False
            torch.cat(block.buffers, out=self._staging[:-_TAIL])
            self._staging[-_TAIL:] = torch.frombuffer(bytearray(_tail(self._staging, max(CHECKSUMS))), dtype=torch.uint8)
            store.put_from(self._name(key), self._staging)
            self._put_here.add(key)
        return True

    def _fetch(self, key: bytes, into: Block | None) -> Block | None:
        try:
            with self._asked() as store:
                size = store.get_into(self._name(key), self._staging)
                if not size:
                    return None
                tail = bytes(self._staging[-_TAIL:].tolist())
                is_whole = size == self._staging.numel() and tail[0] in (1, 3) and _tail(self._staging, tail[0]) == tail
                if is_whole:
                    return self._filled(into or self.kind.empty())
        except (WireError, Unsupported) as error:
            self._tell("failed", key, str(error), errors=1)
            return None
        self._remove(key)
        self._tell("refused", key, "its bytes are not those that were written: the checksum differs.", refused=1)
        return None

    def _filled(self, block: Block) -> Block:
        at = 0
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
        return f"kvx/{self._folder}/{key.hex()}"


def _tail(row: torch.Tensor, number: int) -> bytes:
    return bytes([number]) + checksum(number, [row[:-_TAIL].numpy().data])
