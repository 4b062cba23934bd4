"""The protocol of tiers: put, get, has, drop; in batches, each a future. A tier of its own kind fills in four methods of one block.

Batches run on the tier's threads, several at once; two that are in flight together may finish in any order.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, ParamSpec, Self, TypeVar

from kvx.errors import BadArgument, TierError, a_type
from kvx.identity import has_identity, require_identity
from kvx.tiers.block import Block, BlockKind, Take, check_block, check_kind, hand_on

P = ParamSpec("P")
R = TypeVar("R")
MOST_KEY_BYTES = 64


class TierEvent(NamedTuple):
    """What happened to one block."""

    kind: str  # "stored", "evicted", "dropped", "refused" (damaged, or of another kind: never handed out) or "failed"
    key: bytes
    detail: str = ""  # why, of "refused" and "failed"
    block: Block | None = None  # what was evicted, where it is still at hand: a mover hands it on


@dataclass
class TierStats:
    """Counts of blocks since the tier was opened, and of their bytes."""

    hits: int = 0
    misses: int = 0  # with the refused
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    errors: int = 0  # calls of the system that failed
    bytes_in: int = 0
    bytes_out: int = 0


class Tier(ABC):
    """Blocks of one kind by their names. Thread-safe. Use it in a `with`: leaving waits for what is in flight."""

    is_lasting = False  # what it keeps is found again by the next process
    medium = "STORAGE"  # as vLLM's KV events call it: "CPU" is host memory, "STORAGE" all that is slower
    is_remote = False  # asking it goes over a network
    is_shared = False  # others find what it keeps, at once or later: its kind has to name the weights, not only the geometry

    def __init__(
        self,
        kind: BlockKind,
        *,
        threads: int,
        max_pending: int,  # batches in flight; a call with more waits until one is done
        on_event: Callable[[TierEvent], None] | None,  # called on the tier's threads; it must not wait for the tier
    ) -> None:
        self.check(kind)
        if threads < 1 or max_pending < 1:
            raise BadArgument(f"{type(self).__name__}: threads is {threads}, max_pending {max_pending}; both are 1 or more.")
        self.kind = kind
        self._listeners: tuple[Callable[[TierEvent], None], ...] = () if on_event is None else (on_event,)
        self._stats, self._stats_lock = TierStats(), threading.Lock()
        self._pending = threading.BoundedSemaphore(max_pending)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=type(self).__name__)
        self._is_closed = False
        self._cache: weakref.ref[object] | None = None  # whose blocks it keeps, where its kind does not tell models apart

    @classmethod
    def check(cls, kind: BlockKind) -> None:
        """Raise unless a tier like this may keep such blocks."""
        check_kind(cls.__name__, kind)
        if cls.is_shared:
            require_identity(cls.__name__, kind.manifest.get("model"))

    def keep_for(self, cache: object) -> None:
        """A tier whose kind does not name the weights is one cache's: another's blocks may have the same names."""
        if has_identity(self.kind.manifest.get("model")):
            return
        if self._cache is not None and self._cache() is not cache:
            raise BadArgument(
                f"CacheTiers: this {type(self).__name__} keeps another cache's blocks, and its kind does not say of which model: "
                "one of the two would be given the other's K and V. Give each a tier, or name the weights, CacheSpec(model=...)."
            )
        self._cache = weakref.ref(cache)

    def put(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> Future[list[bool]]:
        """Keep these blocks. False where a block was there already: the first of a name stays.

        Their bytes are read until it is done. Where one cannot be kept, TierError says which; those before it are.
        """
        keys = self._checked("put", keys)
        self._check_blocks("put", keys, blocks)
        return self._submit("put", self._put, keys, list(blocks))

    def get(self, keys: Sequence[bytes], into: Sequence[Block] | None = None) -> Future[list[Block | None]]:
        """The blocks of these names, None where there is none. They are shared with the tier: read only, unless `into` was given.

        `into` has a block to fill for each. One whose answer is None has any bytes.
        """
        keys = self._checked("get", keys)
        if into is not None:
            self._check_blocks("get", keys, into)
        return self._submit("get", self._get, keys, [None] * len(keys) if into is None else list(into))

    def has(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Which are there, without reading them: get() may still refuse one."""
        return self._submit("has", self._has, self._checked("has", keys))

    def has_now(self, keys: Sequence[bytes]) -> list[bool]:
        """has() on the caller's thread: it does not wait behind what is in flight."""
        return self._has(self._checked("has_now", keys))

    def put_now(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> list[bool]:
        """put() on the caller's thread, of blocks that are surely of this kind: for those that need no copying."""
        return self._put(self._checked("put_now", keys), list(blocks))

    def get_now(self, keys: Sequence[bytes], into: Sequence[Block] | None = None) -> list[Block | None]:
        """get() on the caller's thread. `into` has blocks that are surely of this kind."""
        return self._get(self._checked("get_now", keys), [None] * len(keys) if into is None else list(into))

    def read_now(self, keys: Sequence[bytes], take: Take) -> list[bool]:
        """Hand blocks on piece by piece, as they come, on the caller's thread. False where there is none, or a damaged one, of
        which `take` may have been given something already.
        """
        return self._read_to(self._checked("read_now", keys), take)

    def drop(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Forget these blocks. False where there was none."""
        return self._submit("drop", self._drop, self._checked("drop", keys))

    def listen(self, on_event: Callable[[TierEvent], None]) -> None:
        """Call this too from now on, as `on_event`."""
        self._listeners = (*self._listeners, on_event)

    def unlisten(self, on_event: Callable[[TierEvent], None]) -> None:
        self._listeners = tuple(call for call in self._listeners if call != on_event)

    @property
    def stats(self) -> TierStats:
        """A copy."""
        with self._stats_lock:
            return replace(self._stats)

    def names(self) -> list[bytes]:
        """Of all its blocks, as far as this process knows; none where it cannot list them."""
        return []

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    def close(self) -> None:
        """Wait for what is in flight, then take no more."""
        self._is_closed = True
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def _store(self, key: bytes, block: Block) -> bool: ...

    @abstractmethod
    def _fetch(self, key: bytes, into: Block | None) -> Block | None: ...

    @abstractmethod
    def _holds(self, key: bytes) -> bool: ...

    @abstractmethod
    def _remove(self, key: bytes) -> bool: ...

    def _has(self, keys: list[bytes]) -> list[bool]:
        return [self._holds(k) for k in keys]

    def _put(self, keys: list[bytes], blocks: list[Block]) -> list[bool]:
        new: list[bool] = []
        try:
            for n, (key, block) in enumerate(zip(keys, blocks, strict=True)):
                try:
                    new.append(self._store(key, block))
                except OSError as error:
                    self._tell("failed", key, str(error), errors=1)
                    raise TierError(f"put(): block {n} of {len(keys)}, {key.hex()}: {error}. Earlier ones were stored.") from error
                if new[-1] and self._listeners:
                    self._tell("stored", key)
        finally:
            self._count(stored=sum(new), bytes_in=sum(new) * self.kind.num_bytes)
        return new

    def _get(self, keys: list[bytes], into: list[Block | None]) -> list[Block | None]:
        found = [self._fetch(key, to) for key, to in zip(keys, into, strict=True)]
        self._count_read(sum(b is not None for b in found), len(keys))
        return found

    def _read_to(self, keys: list[bytes], take: Take) -> list[bool]:
        found = self._get(keys, [None] * len(keys))
        for n, block in enumerate(found):
            if block is not None:
                hand_on(n, block, take)
        return [block is not None for block in found]

    def _drop(self, keys: list[bytes]) -> list[bool]:
        out = []
        for key in keys:
            out.append(self._remove(key))
            if out[-1]:
                self._tell("dropped", key)
        return out

    def _count_read(self, hits: int, asked: int) -> None:
        self._count(hits=hits, misses=asked - hits, bytes_out=hits * self.kind.num_bytes)

    def _count(self, **counts: int) -> None:
        with self._stats_lock:
            for name, n in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + n)

    def _tell(self, kind: str, key: bytes, detail: str = "", block: Block | None = None, **counts: int) -> None:
        """Count, and call back. Never under a lock: the callback may take its time."""
        self._count(**counts)
        for call in self._listeners:
            call(TierEvent(kind, key, detail, block))

    def _checked(self, call: str, keys: Sequence[bytes]) -> list[bytes]:
        try:
            names = list(keys)
        except TypeError:
            raise BadArgument(f"{call}(): keys is {str(keys)[:100]}; it must be a list of names, one per block.") from None
        for key in names:
            if not isinstance(key, bytes) or not 0 < len(key) <= MOST_KEY_BYTES:
                raise BadArgument(f"{call}(): a key is {key!r}; the name of a block is 1 to {MOST_KEY_BYTES} bytes.")
        return names

    def _check_blocks(self, call: str, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        try:
            count = len(blocks)
        except TypeError:
            raise BadArgument(f"{call}(): blocks is {a_type(blocks)}; it must be a list of them, one a key.") from None
        if len(keys) != count:
            raise BadArgument(f"{call}(): {len(keys)} keys and {count} blocks; there is one block a key.")
        for block in blocks:
            check_block(call, self.kind, block)

    def _submit(self, call: str, run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        self._pending.acquire()
        try:
            future = self._pool.submit(run, *args, **kwargs)
        except RuntimeError:
            self._pending.release()
            if not self._is_closed:
                raise
            raise BadArgument(f"{call}(): this {type(self).__name__} is closed.") from None
        future.add_done_callback(lambda _: self._pending.release())
        return future


def blocks_in(tier: str, capacity_bytes: int, block_bytes: int) -> int:
    """How many blocks a capacity has room for; at least one."""
    if not isinstance(capacity_bytes, int):
        raise BadArgument(f"{tier}: capacity_bytes is {capacity_bytes!r}; it must be a whole number of bytes, like {2 * 10**9}.")
    if capacity_bytes < block_bytes:
        raise BadArgument(f"{tier}: capacity_bytes is {capacity_bytes}; one block takes {block_bytes}. Give more, such as 2GB.")
    return capacity_bytes // block_bytes
