"""HybridCache: windows, tails and blocks of entries for every layer, and the requests that have them.

A request has a slot: its window and tails in each layer. Its entries are in blocks, the same block ids in every layer. Blocks are
given out by `prepare_forward`, before a step, so that nothing is allocated while it runs; what a step computes only fills them.
Tables, views and the step's own tensors are made once: a captured graph finds them where they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx.cache.blocks import BlockAllocator, BlockIds
from kvx.cache.guard import Guard, whole
from kvx.cache.hybrid.drafts import AcceptedTokens
from kvx.cache.hybrid.handle import LayerHandle, LayerViews
from kvx.cache.hybrid.schema import HybridSchema
from kvx.cache.hybrid.store import LayerStore
from kvx.errors import BadArgument, InternalError, OutOfBlocks
from kvx.ops import backend as backends
from kvx.ops.entry.step import Step


class Request:
    """A slot and what is in it."""

    def __init__(self, cache: HybridCache, slot: int) -> None:
        self.cache, self.slot = cache, slot
        self.length = 0  # tokens that steps were prepared for
        self.num_blocks = 0
        self.num_shared = 0  # tokens whose entries came with the request: they are not written again
        self.draft_start = 0  # tokens from here on can be taken back
        self.names: list[bytes] = []  # of its blocks, where a HybridPrefix has named them
        self.root = b""  # the name before the first block
        self.extras: list[tuple[int, bytes]] = []  # what begins at which token, and is not in its id
        self.is_exact = True  # False: a bounded replay left something out of its windows
        self.is_released = False

    def __repr__(self) -> str:
        return f"Request({self.slot}, {'released' if self.is_released else f'length={self.length}'})"


class HybridCache:
    """Its calls may come from several threads, and Ctrl-C in one leaves it whole (kvx/cache/guard.py); a step is one thread's."""

    def __init__(
        self, schema: HybridSchema, *, num_blocks: int, max_requests: int, max_context: int, device: str | torch.device = "cpu"
    ) -> None:
        for name, value in (("max_requests", max_requests), ("max_context", max_context)):
            if not isinstance(value, int) or value < 1:
                raise BadArgument(f"HybridCache: {name} is {value!r}; it is 1 or more.")
        self.schema, self.max_context, self.device = schema, max_context, torch.device(device)
        self._guard = Guard()
        self.allocator = BlockAllocator(num_blocks, guard=self._guard)
        self.allocator.count_refs = self._count_refs
        width = max(1, -(-max_context // schema.block_tokens))
        # Entry b of a row: the block of tokens [b * block_tokens, ...). -1: none yet. The host has a copy to write from.
        self._host_table = torch.full((max_requests, width), -1, dtype=torch.int32)
        self.block_table = self._host_table.to(self.device, copy=True)
        self.num_shared = torch.zeros(max_requests, dtype=torch.int32, device=self.device)
        # slots, ends and starts of the step in one piece: one copy for each step.
        self._host_step = torch.zeros(3 * max_requests + 1, dtype=torch.int32)
        self._step_ints = self._host_step.to(self.device, copy=True)
        ints, n = self._step_ints, max_requests
        self.step = Step(ints[:n], ints[n : 2 * n + 1], ints[2 * n + 1 :])  # of prepare_forward
        self.layers: list[LayerStore] = []
        for s in schema.layers:
            self.layers.append(
                LayerStore.make(
                    s, block_tokens=schema.block_tokens, num_blocks=num_blocks, num_slots=max_requests,
                    max_drafts=schema.max_drafts, device=self.device, owner=self.layers[s.owner] if s.owner >= 0 else None,
                )
            )  # fmt: skip
        self._views = [LayerViews.make(store, self.block_table, self.num_shared) for store in self.layers]
        self._free_slots = list(range(max_requests))[::-1]
        self._live: dict[int, Request] = {}  # slot -> who has it
        self._truncating: Sequence[tuple[Request, int]] = ()  # drafts that are being taken back: half of it is wrong
        self._guard.mended_by(self._mend)
        self._set_step([], [], [])

    # --- requests --------------------------------------------------------------------------------------------------------

    def admit_request(self) -> Request:
        """A slot, as before the first token."""
        guard, request = self._guard, None
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                request = self._admit()
            return request
        except BaseException:  # nobody has it
            if request is not None:
                guard.is_torn = request.is_released = True
                self._mend_now()
            raise

    def _admit(self) -> Request:
        if not self._free_slots:
            raise OutOfBlocks(
                f"admit_request(): all {len(self.block_table)} requests are in use (max_requests). Release one first."
            )
        request = Request(self, self._free_slots[-1])
        del self._free_slots[-1]
        self._live[request.slot] = request
        return request

    @whole
    def prepare_forward(self, work: Sequence[tuple[Request, int]]) -> Step:
        """The next tokens of these requests will be computed: give them their blocks. OutOfBlocks changes nothing.

        The step has a place for each of max_requests sequences: these in their order, then slots of -1. Its tensors are the same
        ones at every call, with other contents: nothing is allocated on the device, and a captured step can be replayed.
        """
        self._check_work("prepare_forward", work)
        starts, before = [request.length for request, _ in work], _standing(work)
        try:
            self._give_blocks("prepare_forward", work)
            for (request, tokens), start in zip(work, starts, strict=True):
                request.draft_start = start if tokens <= self.schema.max_drafts + 1 and self.schema.max_drafts else request.length
            self._set_step([request.slot for request, _ in work], [tokens for _, tokens in work], starts)
        except BaseException:
            _stand_again(before)
            raise
        return self.step

    def acquire(self, layer: int, step: Step | None = None, *, backend: str = "auto") -> LayerHandle:
        """The layer during a step; None: the one prepared last. Nothing is allocated on the device."""
        if not isinstance(layer, int) or not 0 <= layer < len(self._views):
            raise BadArgument(f"acquire(): layer is {layer!r}; the schema has {len(self._views)}, from 0 on.")
        return LayerHandle(self._views[layer], self.step if step is None else step, backend)

    @whole
    def truncate(self, work: Sequence[tuple[Request, int]], *, backend: str = "auto") -> None:
        """Take back the tokens behind these lengths: drafts of the last step that were not accepted.

        A schema with max_drafts has room for it: a step of at most max_drafts + 1 tokens can be taken back, whole or in part.
        """
        block, backend = self.schema.block_tokens, backends.choose("truncate", backend, self.block_table)
        self._check_work("truncate", work)
        work = [(request, length) for request, length in work if length != request.length]
        if not work:
            return
        for request, length in work:
            if not max(request.draft_start, len(request.names) * block) <= length <= request.length:
                raise BadArgument(
                    f"truncate(): {request} to {length}; tokens from {request.draft_start} on can be taken back (max_drafts is "
                    f"{self.schema.max_drafts}), and {len(request.names) * block} are named. Nothing changed."
                )
        self._truncating = work  # from here on it happens: what is broken off is done again, which gives the same
        self._truncate(work, backend)

    def _truncate(self, work: Sequence[tuple[Request, int]], backend: str) -> None:
        limits = np.full(len(self.block_table), np.iinfo(np.int32).max, np.int32)
        for request, length in work:
            limits[request.slot] = length
        lengths = torch.from_numpy(limits).to(self.device)
        slots, starts = [r.slot for r, _ in work], [r.draft_start for r, _ in work]
        accepted = AcceptedTokens.of(slots, starts, [length - r.draft_start for r, length in work], self.device)
        for store in self.layers:
            store.window.truncate(lengths)
            for drafts, pages in ((store.drafts, store.entries), (store.index_drafts, store.index)):
                if drafts is not None and pages is not None:
                    drafts.take_back(accepted, pages, self.block_table, backend=backend)
        for request, length in work:
            left = self.schema.blocks(length)
            ids = self.block_ids(request)[left:].copy()
            request.length, request.num_blocks = length, left
            self._set_blocks(request, left, np.full(len(ids), -1, np.int32))
            self.allocator.release_checked(ids)
        self._truncating = ()

    @whole
    def release_request(self, request: Request) -> None:
        """Give everything back. The slot is as before the first token when the next request gets it."""
        self.check_live("release_request", request)
        ids = self.block_ids(request).copy()
        request.is_released = True
        self.allocator.release_checked(ids)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self.reset_slot(request.slot)
        del self._live[request.slot]
        self._free_slots.append(request.slot)

    def reset_slot(self, slot: int) -> None:
        """As before the first token: positions -1, scores of tails -inf, no blocks."""
        self._host_table[slot] = -1
        self.block_table[slot] = -1
        self.num_shared[slot] = 0
        for store in self.layers:
            store.reset(slot)

    # --- what requests are made of ---------------------------------------------------------------------------------------

    @whole
    def give_blocks(self, call: str, work: Sequence[tuple[Request, int]]) -> None:
        """Blocks for so many tokens more. OutOfBlocks changes nothing."""
        self._check_work(call, work)
        before = _standing(work)
        try:
            self._give_blocks(call, work)
        except BaseException:
            _stand_again(before)
            raise

    def _give_blocks(self, call: str, work: Sequence[tuple[Request, int]]) -> None:
        growing, needed, block = [], 0, self.schema.block_tokens  # most steps of a decode fit into blocks that are there
        for request, tokens in work:
            length = request.length + tokens
            if tokens < 0 or length > self.max_context:
                raise BadArgument(
                    f"{call}(): {request} would have {length} tokens; it takes 0 or more, and "
                    f"max_context is {self.max_context}. Nothing changed."
                )
            if length > request.num_blocks * block and (count := self.schema.blocks(length) - request.num_blocks) > 0:
                growing.append((request, count))
                needed += count
        if needed > self.allocator.num_available:
            raise self.allocator.out_of_blocks(needed, call)
        ids, at = self.allocator.allocate_checked(needed), 0
        for request, count in growing:
            self._set_blocks(request, request.num_blocks, ids[at : at + count])
            request.num_blocks, at = request.num_blocks + count, at + count
        for request, tokens in work:
            request.length += tokens
            request.draft_start = request.length

    @whole
    def share_blocks(self, request: Request, ids: BlockIds, tokens: int) -> None:
        """A new request starts with blocks that have their entries: those of its first tokens."""
        self.check_live("share_blocks", request)
        if request.num_blocks or len(ids) > self._host_table.shape[1]:
            raise BadArgument(
                f"share_blocks(): {len(ids)} blocks for {request}, which has {request.num_blocks}; it is called once, and a "
                f"request has up to {self._host_table.shape[1]}."
            )
        self._set_blocks(request, 0, ids)
        request.num_blocks, request.num_shared = len(ids), tokens
        self.num_shared[request.slot] = tokens

    def blocks(self, request: Request) -> Tensor:
        """[num_blocks] int32: a view of the table."""
        self.check_live("blocks", request)
        return self.block_table[request.slot, : request.num_blocks]

    def block_ids(self, request: Request) -> BlockIds:
        """The same from the host's copy: nothing waits for the device."""
        self.check_live("block_ids", request)
        ids: BlockIds = self._host_table[request.slot, : request.num_blocks].numpy()
        return ids

    def check_live(self, call: str, request: Request) -> None:
        """A slot of another cache, or one that was given back, is somebody else's here."""
        if not isinstance(request, Request):
            raise BadArgument(f"{call}(): {request!r} is no request; admit_request() gives one.")
        if request.cache is not self:
            raise BadArgument(f"{call}(): {request} is of another cache. Nothing changed.")
        if request.is_released:
            raise BadArgument(f"{call}(): {request} was released. Nothing changed.")

    def _check_work(self, call: str, work: Sequence[tuple[Request, int]]) -> None:
        for request, n in work:
            if type(request) is not Request or request.is_released or request.cache is not self:
                self.check_live(call, request)
            if type(n) is not int and (isinstance(n, bool) or not isinstance(n, int | np.integer)):
                raise BadArgument(f"{call}(): {request} with {n!r} tokens; that is a whole number. Nothing changed.")
        if len({id(request) for request, _ in work}) != len(work):
            raise BadArgument(f"{call}(): a request is there twice. Nothing changed.")

    def _set_blocks(self, request: Request, first: int, ids: BlockIds) -> None:
        if len(ids):
            host = self._host_table[request.slot, first : first + len(ids)]
            host.copy_(torch.from_numpy(ids))
            self.block_table[request.slot, first : first + len(ids)].copy_(host, non_blocking=True)

    def _set_step(self, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int]) -> None:
        # From memory that is not pinned: the driver has read it when the copy returns, so the next step may write it.
        ints, n, room = self._host_step.numpy(), len(slots), len(self.block_table)
        ints[:room], ints[2 * room + 1 :] = -1, 0
        ints[:n], ints[2 * room + 1 : 2 * room + 1 + n] = slots, starts
        ends = ints[room : 2 * room + 1]
        ends[0], ends[1 : n + 1] = 0, np.cumsum(np.asarray(counts, np.int32))
        ends[n + 1 :] = ends[n]
        self._step_ints.copy_(self._host_step, non_blocking=True)

    # --- what holds after a call was broken off --------------------------------------------------------------------------

    def _count_refs(self) -> NDArray[np.int64]:
        """Of every block: the requests that have it, and its pins."""
        refs = np.zeros(self.allocator.num_blocks, np.int64)
        for request in self._live.values():
            np.add.at(refs, self._host_table[request.slot, : request.num_blocks].numpy(), 1)
        for block, pins in self.allocator.pins().items():
            refs[block] += pins
        return refs

    def _mend(self) -> None:
        """What follows from which requests live, and from their blocks; what can only be finished is finished."""
        if self._truncating:
            self._truncate(self._truncating, backends.choose("truncate", "auto", self.block_table))
        for request in [r for r in self._live.values() if r.is_released]:
            self._leave(request)
        self._free_slots[:] = [slot for slot in range(len(self._host_table) - 1, -1, -1) if slot not in self._live]
        for request in self._live.values():
            self._host_table[request.slot, request.num_blocks :] = -1
        self.block_table.copy_(self._host_table)

    def _mend_now(self) -> None:
        with self._guard.lock:
            self._guard.mend()

    def check(self) -> None:
        """Recount blocks and slots; InternalError names the first thing that does not agree."""
        with self._guard.lock:
            if self._guard.is_torn:
                self._guard.mend()
            slots = sorted([*self._free_slots, *self._live])
            if slots != list(range(len(self._host_table))):
                raise InternalError(f"HybridCache.check(): slots are {slots}; each is free or one request's.")
            for slot, request in self._live.items():
                row, held = self._host_table[slot].numpy(), request.num_blocks
                if (row[:held] < 0).any() or (row[held:] != -1).any() or request.slot != slot or request.is_released:
                    raise InternalError(f"HybridCache.check(): {request} has {held} blocks; its row is {row.tolist()}.")
                if held < self.schema.blocks(request.length):
                    raise InternalError(f"HybridCache.check(): {request} has {held} blocks for {request.length} tokens.")
            if any((self._host_table[slot] != -1).any() for slot in self._free_slots):
                raise InternalError("HybridCache.check(): a slot that is free has blocks.")
            wrong = np.flatnonzero(self._count_refs() != self.allocator.counts())
            if len(wrong):
                raise InternalError(f"HybridCache.check(): block {int(wrong[0])} has other owners than references.")
            self.allocator._check()

    @property
    def memory_bytes(self) -> int:
        """Of all layers: schema.memory_bytes(num_blocks, max_requests).allocated, and with drafts one more tail of each, for
        sequences that are skipped. Tables come beside it: 4 bytes for each request and block of max_context, and with drafts for
        each tail."""
        return sum(layer.memory_bytes for layer in self.layers)


def _standing(work: Sequence[tuple[Request, int]]) -> list[tuple[Request, int, int, int]]:
    return [(request, request.length, request.num_blocks, request.draft_start) for request, _ in work]


def _stand_again(before: list[tuple[Request, int, int, int]]) -> None:
    """As if nothing had been given: the blocks are counted again after this."""
    for request, length, num_blocks, draft_start in before:
        request.length, request.num_blocks, request.draft_start = length, num_blocks, draft_start
