"""Mover: blocks of one layer group between a cache and its tiers, converted on the way.

    cache --offload--> [converted, over the link] --> tiers[0] --what it evicts--> tiers[1] --> ...
    cache <--onboard-- [over the link, converted] <-- whichever has it; what came from a slow tier goes to the fast one too

Names are the caller's business, and which block is to be read or written when.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Self

from torch import Tensor

from kvx.errors import BadArgument, KvxError, TierError
from kvx.layout.place import num_buffers
from kvx.spec.cache_spec import Spec
from kvx.tiers.block import Block, BlockKind, block_spec
from kvx.tiers.chunks import Chunk, aligned_blocks, chunks_of, unknown
from kvx.tiers.demotion import Demotion, DemotionQueue
from kvx.tiers.fetch import Fetch
from kvx.tiers.host import HostTier
from kvx.tiers.memory import HostMemory
from kvx.tiers.mover_stats import MoverEvent, MoverStats
from kvx.tiers.room import Room
from kvx.tiers.tier import Tier, TierEvent
from kvx.tiers.transfer import HostTransfer, StagedTransfer, Transfer, Wait

NUM_AREAS = 8  # chunks that what is in flight is cut into: one is converted, one on the link, and a tier's threads have one each


class Mover:
    """Use it in a `with`: leaving waits for what is in flight. The tiers are the caller's to close, after it."""

    def __init__(
        self,
        buffers: Sequence[Tensor],  # the cache's, as `spec` orders them
        spec: Spec | Sequence[Spec],  # several: shards of it, such as one a layer
        tiers: Sequence[Tier],  # fastest first
        *,
        kept: Spec,  # of the tiers' blocks: other layout, format and block size, and a block in one run
        max_in_flight_bytes: int = 256 << 20,  # of blocks being offloaded; a call with more waits. As much may be on its way down
        on_event: Callable[[MoverEvent], None] | None = None,  # on any thread; it must not wait for the mover or a tier
        is_staged: bool | None = None,  # through areas of the device's memory; None: where there is a device
    ) -> None:
        self.specs = (spec,) if isinstance(spec, Spec) else tuple(spec)
        self.kept, self.kind = block_spec(kept), BlockKind.of(kept)
        self.tiers = tuple(tiers)
        self._check()
        self._on_event = on_event
        self._stats, self._stats_lock = MoverStats(hits=[0] * len(self.tiers)), threading.Lock()
        most = max_in_flight_bytes // self.kind.num_bytes
        if most < 1:
            raise BadArgument(f"Mover: max_in_flight_bytes is {max_in_flight_bytes}; one block takes {self.kind.num_bytes}.")
        # Aligned blocks follow each other in their tokens: `_ids` blocks of the cache are `_names` of the tiers.
        a, b = self.specs[0].block_size, self.kept.block_size
        self._ids, self._names = max(1, b // a), max(1, a // b)
        # That are converted together, and cross the link together where they are neighbours.
        self.area_blocks = max(self._names, most // NUM_AREAS // self._names * self._names)
        self._room = Room(max(most, self.area_blocks))
        first = self.tiers[0]
        is_cuda = buffers[0].is_cuda
        # Blocks land where they stay: in the fastest tier's own memory, if it is the host's.
        self.memory = first.memory if isinstance(first, HostTier) else HostMemory(self.kind, pin_memory=is_cuda)
        if is_cuda and not self.memory.is_pinned:
            raise BadArgument("Mover: the cache is on a GPU and the host tier's memory is not pinned: HostTier(pin_memory=True).")
        self._transfer: Transfer = HostTransfer(buffers, self.specs, self.kept)
        if is_cuda if is_staged is None else is_staged:
            self._transfer = StagedTransfer(
                buffers, self.specs, self.kept, self.memory, area_blocks=self.area_blocks, num_areas=NUM_AREAS
            )
        self._coming: dict[bytes, Future[int]] = {}  # offloaded, and in no tier yet
        self._promoting: set[Future[list[bool]]] = set()
        self._call_lock = threading.Lock()  # one call of offload or onboard at a time
        self._landing = ThreadPoolExecutor(1, thread_name_prefix="Mover")
        self._demotions = DemotionQueue(most, self._was_demoted)
        self._listeners = [(t, partial(self._evicted, below)) for t, below in zip(self.tiers, self.tiers[1:], strict=False)]
        for tier, listener in self._listeners:
            tier.listen(listener)
        self._is_closed = False

    def _check(self) -> None:
        if not self.tiers:
            raise BadArgument("Mover: tiers is empty; give one or more, the fastest first.")
        for tier in self.tiers:
            tier.kind.require_same(self.kind, "Mover")
        a, b = self.specs[0].block_size, self.kept.block_size
        if a % b and b % a:
            raise BadArgument(f"Mover: blocks of {a} tokens here and {b} in the tiers; one is a multiple of the other.")
        if len(self.kind.buffer_bytes) != 1 or num_buffers(self.kept.replaced(num_blocks=2)) != 2:
            raise BadArgument(
                f"Mover: kept is {self.kept.layout!r} in {_formats(self.kept)}: a block of it is not one run. Begin the layout "
                'with "block |", and take a format with inline scales, or none.'
            )

    # --- to the tiers -----------------------------------------------------------------------------------------------------

    def offload(self, names: Sequence[bytes], blocks: Sequence[int]) -> Future[int]:
        """Keep these blocks of the cache by these names. How many are new to the fastest tier, when all are in it.

        The blocks are read, in the order of the current stream, before it returns: they may be overwritten then.
        """
        return self._offload("offload", self.tiers[0], names, blocks)

    def save(self, names: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Put these blocks of the cache, and all that faster tiers in host memory have, into the last tier: how many are new there.

        It waits until they are. Where one cannot be kept TierError says which, and the others are tried all the same.
        """
        self.settle()
        last = self.tiers[-1]
        puts = [self._offload("save", last, names, blocks)]
        for tier in self.tiers[:-1]:
            keys = tier.names() if isinstance(tier, HostTier) else []
            keys = [k for k, h in zip(keys, last.has_now(keys), strict=True) if not h]
            for start in range(0, len(keys), self.area_blocks):
                puts.append(self._hand_down(tier, last, keys[start : start + self.area_blocks]))
        return _sum(puts).result()

    def _hand_down(self, tier: Tier, below: Tier, keys: list[bytes]) -> Future[int]:
        found = [(k, b) for k, b in zip(keys, tier.get(keys).result(), strict=True) if b is not None]
        done: Future[int] = Future()
        put = below.put([k for k, _ in found], [b for _, b in found])
        put.add_done_callback(partial(self._kept, "handed down", [k for k, _ in found], done))
        return done

    def _offload(self, call: str, tier: Tier, names: Sequence[bytes], blocks: Sequence[int]) -> Future[int]:
        aligned = aligned_blocks(call, names, blocks, self.specs[0], self.kept)
        with self._call_lock:
            self._check_open(call)
            has = self._ask(tier, names)
            known = {n for n, h in zip(names, has, strict=True) if h or n in self._coming}
            flights = [self._send(chunk, tier) for chunk in chunks_of(unknown(aligned, known), self.area_blocks)]
        return _sum(flights)

    def _send(self, chunk: Chunk, tier: Tier) -> Future[int]:
        n, done, wait = len(chunk.names), Future[int](), None
        try:
            self._room.take(done, n)
            held = self.memory.take(n)
            wait = self._transfer.send(chunk.ids, chunk.places, held)
            for name in chunk.names:
                self._coming[name] = done
            self._landing.submit(self._land, tier, chunk.names, held, wait, done)
        except BaseException:  # Ctrl-C, too: nothing stays in flight that nobody ends
            self._landed(chunk.names, done)
            if wait is not None:
                wait()
            raise
        return done

    def _land(self, tier: Tier, names: list[bytes], held: list[Block], wait: Wait, done: Future[int]) -> None:
        """On the mover's thread: when the bytes are in host memory, the tier may have them."""
        try:
            wait()
            self._put(tier, names, held).add_done_callback(partial(self._kept, "offloaded", names, done))
        except BaseException as error:
            self._lost(names, done, error)

    def _put(self, tier: Tier, names: list[bytes], held: list[Block]) -> Future[list[bool]]:
        """At once where the blocks lie in the tier's own memory: nothing is copied, and a thread more would only wait its turn."""
        if not isinstance(tier, HostTier) or tier.memory is not self.memory:
            return tier.put(names, held)
        done: Future[list[bool]] = Future()
        done.set_result(tier.put_now(names, held))
        return done

    def _kept(self, kind: str, names: list[bytes], done: Future[int], put: Future[list[bool]]) -> None:
        error = put.exception()
        if error is not None:
            self._lost(names, done, error)
            return
        self._landed(names, done)
        try:
            if kind == "offloaded":
                self._count(offloaded=len(names), offloaded_bytes=len(names) * self.kind.num_bytes)
            else:
                self._count(handed_down=len(names))
            self._tell(kind, names)
        except Exception as raised:  # of on_event
            done.set_exception(raised)
        else:
            done.set_result(sum(put.result()))

    def _lost(self, names: list[bytes], done: Future[int], error: BaseException) -> None:
        self._landed(names, done)
        try:
            self._count(failed=len(names))
            self._tell("failed", names, str(error))
        finally:
            if not isinstance(error, KvxError):
                error = TierError(f"offload(): {len(names)} blocks from {names[0].hex()} on: {error}")
            done.set_exception(error)

    def _landed(self, names: list[bytes], done: Future[int]) -> None:
        """It is in flight no more; once, however often it is called."""
        for name in names:
            if self._coming.get(name) is done:
                self._coming.pop(name, None)
        self._room.give(done)

    # --- from the tiers ---------------------------------------------------------------------------------------------------

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which are in a tier, or on their way to one."""
        found = [n in self._coming or self._demotions.get(n) is not None for n in names]
        for tier in self.tiers:
            missing = [i for i, h in enumerate(found) if not h]
            if not missing:
                break
            for i, h in zip(missing, self._ask(tier, [names[i] for i in missing]), strict=True):
                found[i] = h
        return found

    def _ask(self, tier: Tier, names: Sequence[bytes]) -> list[bool]:
        """Which a tier has; one that fails has none."""
        try:
            return tier.has_now(names)
        except (KvxError, OSError, RuntimeError) as error:
            self._tell("failed", names, f"has_now(): {error}")
            return [False] * len(names)

    def find(self, names: Sequence[bytes]) -> int:
        """How many of these there are: the longest beginning that the tiers have together."""
        has = self.has(names)
        return has.index(False) if False in has else len(has)

    def onboard(self, names: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Put the blocks of these names into these of the cache: how many of the first came. Those after have any bytes.

        They are there in the order of the current stream. What is damaged, or gone since find(), is a miss.
        """
        aligned, came = aligned_blocks("onboard", names, blocks, self.specs[0], self.kept), 0
        with self._call_lock:
            self._check_open("onboard")
            for name in names:
                if name in self._coming:
                    _settle(self._coming.get(name))
            chunks, fetches = chunks_of(aligned, self.area_blocks), deque[tuple[Chunk, Fetch]]()
            while True:
                for chunk in islice(chunks, 3 - len(fetches)):  # the tiers read the next ones while this is converted
                    fetches.append((chunk, Fetch(chunk.names, self.tiers, self.memory, self._demotions.get, self._ask)))
                if not fetches:
                    break
                chunk, fetch = fetches.popleft()
                n = self._receive(chunk, fetch)
                came += n
                if n < len(chunk.names):
                    self._count(missed=1)
                    break
        return came

    def _receive(self, chunk: Chunk, fetch: Fetch) -> int:
        found = fetch.result()
        n = found.index(None) if None in found else len(found)
        blocks, names = [b for b in found[:n] if b is not None], chunk.names[:n]
        if not n:
            return 0
        whole = -(-n // self._names)  # aligned blocks; of the last, names that did not come are skipped
        places = [p if p < n else -1 for p in chunk.places[: whole * self._names]]
        wait = None
        try:
            wait = self._transfer.receive(chunk.ids[: whole * self._ids], places, blocks)
            self._landing.submit(_hold, wait, blocks)
        except BaseException:
            if wait is not None:
                wait()
            raise
        with self._stats_lock:
            for source in fetch.sources[:n]:
                if source >= 0:
                    self._stats.hits[source] += 1
        self._count(onboarded=n, onboarded_bytes=n * self.kind.num_bytes)
        self._promote([(name, b) for name, b, source in zip(names, blocks, fetch.sources, strict=False) if source > 0])
        self._tell("onboarded", names)
        return n

    def _promote(self, slow: list[tuple[bytes, Block]]) -> None:
        if not slow:
            return
        names, blocks = [n for n, _ in slow], [b for _, b in slow]
        try:
            put = self._put(self.tiers[0], names, blocks)
        except (KvxError, OSError, RuntimeError) as error:
            self._tell("failed", names, f"promoted: {error}")
            return
        self._promoting.add(put)
        put.add_done_callback(partial(self._promoted, names))

    def _promoted(self, names: list[bytes], put: Future[list[bool]]) -> None:
        self._promoting.discard(put)
        error = put.exception()
        if error is None:
            self._count(promoted=len(names))
        self._tell("promoted" if error is None else "failed", names, "" if error is None else str(error))

    # --- between tiers ----------------------------------------------------------------------------------------------------

    def _evicted(self, below: Tier, event: TierEvent) -> None:
        if event.kind == "evicted" and event.block is not None:
            self._demotions.push(event.key, event.block, below)

    def _was_demoted(self, kind: str, demotion: Demotion, why: str) -> None:
        self._count(**{"handed_down" if kind == "handed down" else "dropped": 1})
        self._tell(kind, [demotion.key], why)

    def settle(self) -> None:
        """Wait for all that is in flight: to the fastest tier, and down from there. Errors stay in their futures."""
        self._landing.submit(lambda: None).result()
        for done in list(self._coming.values()):
            _settle(done)
        for put in list(self._promoting):
            _settle(put)
        self._demotions.drain()

    # --- all of it --------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> MoverStats:
        """A copy."""
        with self._stats_lock:
            return replace(self._stats, hits=list(self._stats.hits))

    def close(self) -> None:
        """Wait for what is in flight, then take no more."""
        with self._call_lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self.settle()
        finally:
            for tier, listener in self._listeners:
                tier.unlisten(listener)
            self._landing.shutdown(wait=True)
            self._demotions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise BadArgument(f"{call}(): this Mover is closed.")

    def _count(self, **counts: int) -> None:
        with self._stats_lock:
            for name, n in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + n)

    def _tell(self, kind: str, names: Sequence[bytes], detail: str = "") -> None:
        if self._on_event is not None:
            self._on_event(MoverEvent(kind, tuple(names), detail))


def _sum(futures: list[Future[int]]) -> Future[int]:
    """The sum of all; the first error, when all are done."""
    total: Future[int] = Future()
    left, lock = len(futures), threading.Lock()

    def one_is_done(_: Future[int]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        error = next((e for f in futures if (e := f.exception()) is not None), None)
        if error is not None:
            total.set_exception(error)
        else:
            total.set_result(sum(f.result() for f in futures))

    if not futures:
        total.set_result(0)
    for f in list(futures):
        f.add_done_callback(one_is_done)
    return total


def _settle(future: Future[int] | Future[list[bool]] | None) -> None:
    """Wait; what it raises is not ours."""
    if future is not None:
        future.exception()


def _hold(wait: Wait, blocks: list[Block]) -> None:
    """The blocks live until the link has read them."""
    wait()
    blocks.clear()


def _formats(spec: Spec) -> str:
    return ", ".join(dict.fromkeys(plane.format.name for plane in spec.planes))
