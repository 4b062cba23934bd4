"""Transfer of blocks between a cache and host memory, converted as they go: one kernel for many blocks, in either direction.

On the host the conversion is the transfer. From a device they go through a staging area of its memory: converted there, then copied
while the next area is converted. Both keep the order of the caller's stream.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kvx.layout.plan import Plan, plan
from kvx.ops.move.convert import bind, convert
from kvx.spec.cache_spec import Spec
from kvx.tiers.block import Block
from kvx.tiers.memory import HostMemory

OUT, BACK = 0, 1  # of the cache, or into it
Wait = Callable[[], None]  # until the memory of what was sent or received is free again; again is no harm


class Transfer(Protocol):
    """`ids` are blocks of the cache. The tokens of all of them are those of all `places`: where in `blocks` each goes; -1 skips."""

    def send(self, ids: Sequence[int], places: Sequence[int], blocks: Sequence[Block]) -> Wait:
        """The cache's blocks into these. They are read, in the order of the stream, when it returns."""

    def receive(self, ids: Sequence[int], places: Sequence[int], blocks: Sequence[Block]) -> Wait:
        """These into the cache's blocks. They are there, in the order of the stream, when it returns."""


class HostTransfer:
    """Of a cache in host memory."""

    def __init__(self, buffers: Sequence[Tensor], specs: Sequence[Spec], kept: Spec) -> None:
        self._buffers = list(buffers)

        @lru_cache(maxsize=64)  # by the number of blocks; each takes a millisecond to make
        def plans(n: int) -> tuple[Plan, Plan]:
            many = kept.replaced(num_blocks=n)
            return plan(specs, many), plan(many, specs)

        self._plans = plans

    def send(self, ids: Sequence[int], places: Sequence[int], blocks: Sequence[Block]) -> Wait:
        into = [b.buffers[0] for b in blocks]
        convert(self._buffers, into, plan=self._plans(len(blocks))[0], src_blocks=list(ids), dst_blocks=list(places))
        return _nothing

    def receive(self, ids: Sequence[int], places: Sequence[int], blocks: Sequence[Block]) -> Wait:
        source = [b.buffers[0] for b in blocks]
        convert(source, self._buffers, plan=self._plans(len(blocks))[1], src_blocks=list(places), dst_blocks=list(ids))
        return _nothing


def _nothing() -> None:
    return None


class StagedTransfer:
    """Of a cache on a device: staging areas of its memory, each with room for `area_blocks`, used one after the other."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        specs: Sequence[Spec],
        kept: Spec,
        memory: HostMemory,  # where the blocks lie: pinned
        *,
        area_blocks: int,
        num_areas: int,
    ) -> None:
        many = kept.replaced(num_blocks=area_blocks)
        self._memory = memory
        self._plans = plan(specs, many), plan(many, specs)
        self._device = buffers[0].device
        self._streams: Any = _CudaStreams(self._device) if self._device.type == "cuda" else _NoStreams()
        columns = area_blocks * kept.block_size // specs[0].block_size, area_blocks
        self._free: queue.SimpleQueue[_Area] = queue.SimpleQueue()
        for _ in range(num_areas):
            self._free.put(_Area(list(buffers), self._plans, memory, columns, self._device))
        self._streams.synchronize()  # the areas' memory may have had another use, which the link does not wait for

    def send(self, ids: Sequence[int], places: Sequence[int], blocks: Sequence[Block]) -> Wait:
        use = _Use(self._free)
        try:
            area = use.take()
            area.convert(OUT, ids, places)
            converted = self._streams.mark()
            with self._streams.link(OUT):
                self._streams.after(converted)
                for host, staged in self._runs(area, blocks):
                    host.copy_(staged, non_blocking=True)
                done = self._streams.mark()
            return use.until(done)
        except BaseException:
            self._abandon(use)
            raise

    def receive(self, ids: Sequence[int], places: Sequence[int], blocks: Sequence[Block]) -> Wait:
        use = _Use(self._free)
        try:
            area = use.take()
            with self._streams.link(BACK):
                for host, staged in self._runs(area, blocks):
                    staged.copy_(host, non_blocking=True)
                arrived = self._streams.mark()
            self._streams.after(arrived)
            area.convert(BACK, ids, places)
            done = self._streams.mark()
            return use.until(done)
        except BaseException:
            self._abandon(use)
            raise

    def _runs(self, area: _Area, blocks: Sequence[Block]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes on the host and in the area, neighbours as one."""
        places = [self._memory.place(b) for b in blocks]
        start = 0
        for n in range(1, len(places) + 1):
            slab, first = places[start] or (0, 0)
            if n < len(places) and places[n] == (slab, first + n - start):
                continue
            assert places[start] is not None, "a block is not in the memory of this transfer"
            pitch = self._memory.pitch
            yield self._memory.run(slab, first, n - start), area.staged[start * pitch : n * pitch]
            start = n

    def _abandon(self, use: _Use) -> None:
        """A step failed or was interrupted: what it began must end before the area is used again."""
        try:
            self._streams.synchronize()
        finally:
            use.end()


class _Use:
    """Of one area at most. It is given back once, however often that is tried, and wherever an interrupt came."""

    def __init__(self, free: queue.SimpleQueue[_Area]) -> None:
        self._free, self._areas = free, list[_Area]()

    def take(self) -> _Area:
        self._areas.append(self._free.get())
        return self._areas[0]

    def end(self) -> None:
        with suppress(IndexError):
            self._free.put(self._areas.pop())

    def until(self, done: Any) -> Wait:
        def wait() -> None:
            try:
                done.synchronize()
            finally:
                self.end()

        return wait


class _Area:
    """Memory on the device, with the tables of what is in it. On CUDA all is bound once: a kernel reads the tables anew."""

    def __init__(
        self, buffers: list[Tensor], plans: tuple[Plan, Plan], memory: HostMemory, columns: tuple[int, int], device: torch.device
    ) -> None:
        self._plans, self._cache, pitch, size = plans, buffers, memory.pitch, memory.kind.num_bytes
        self.staged = torch.empty(columns[1] * pitch, dtype=torch.uint8, device=device)
        self._blocks = [self.staged[i * pitch : i * pitch + size] for i in range(columns[1])]
        self._bound: tuple[Any, Any] | None = None
        if device.type == "cuda":
            self._columns = columns
            self._host_ids = torch.empty(sum(columns), dtype=torch.int32, pin_memory=True)
            self._ids = self._host_ids.to(device)
            cache, staged = self._ids[: columns[0]], self._ids[columns[0] :]
            self._bound = (
                bind(plans[0], buffers, self._blocks, src_blocks=cache, dst_blocks=staged),
                bind(plans[1], self._blocks, buffers, src_blocks=staged, dst_blocks=cache),
            )

    def convert(self, direction: int, ids: Sequence[int], places: Sequence[int]) -> None:
        """OUT of the cache into the area, or BACK."""
        if self._bound is not None:
            self._host_ids.fill_(-1)
            self._host_ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
            self._host_ids[self._columns[0] : self._columns[0] + len(places)] = torch.tensor(places, dtype=torch.int32)
            self._ids.copy_(self._host_ids, non_blocking=True)
            self._bound[direction].run()
            return
        pairs: list[tuple[list[Tensor], Sequence[int]]] = [(self._cache, list(ids)), (self._blocks, list(places))]
        (src, src_ids), (dst, dst_ids) = pairs if direction == OUT else pairs[::-1]
        convert(src, dst, plan=self._plans[direction], src_blocks=src_ids, dst_blocks=dst_ids)


class _CudaStreams:
    """Streams of its own for the link, one for each direction, beside the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._links = [torch.cuda.Stream(device) for _ in (OUT, BACK)]

    def link(self, direction: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._links[direction])

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def after(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class _NoStreams:
    """Of a host: what was called is done."""

    def link(self, direction: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Any:
        return self

    def after(self, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None
