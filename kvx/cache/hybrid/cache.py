"""HybridCache: windows, tails and blocks of entries for every layer, and the requests that have them.

A request has a slot: its window and tails in each layer. Its entries are in blocks, the same block ids in every layer. Blocks are
given out by `prepare_forward`, before a step, so that nothing is allocated while it runs; what a step computes only fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvx.cache.blocks import BlockAllocator
from kvx.cache.hybrid.rows import RowCodec
from kvx.cache.hybrid.schema import HybridSchema, LayerSchema
from kvx.cache.hybrid.tail import Tail
from kvx.cache.hybrid.window import Window
from kvx.errors import BadArgument, OutOfBlocks


class EntryPool:
    """Rows of entries, or of their keys, in blocks: [num_blocks, page_bytes] of bytes."""

    def __init__(self, codec: RowCodec, rows: int, num_blocks: int, device: torch.device) -> None:
        self.codec, self.rows = codec, rows
        self.pages = torch.zeros(num_blocks, codec.page_bytes(rows), dtype=torch.uint8, device=device)

    def slots(self, blocks: Tensor, entries: Tensor) -> Tensor:
        """Where entries of a request stand whose blocks these are."""
        return blocks[entries // self.rows].long() * self.rows + entries % self.rows

    def write(self, blocks: Tensor, first: int, x: Tensor) -> None:
        """Entries from number `first` on."""
        entries = torch.arange(first, first + len(x), device=x.device)
        self.codec.write(self.pages, self.rows, self.slots(blocks, entries), x)

    def read(self, blocks: Tensor, count: int) -> Tensor:
        """The first `count` entries, [count, dim] f32."""
        return self.codec.read(self.pages, self.rows, self.slots(blocks, torch.arange(count, device=blocks.device)))


@dataclass(frozen=True)
class LayerStore:
    """One layer's memory. A layer that reads another's entries has that one's pools."""

    schema: LayerSchema
    window: Window
    tail: Tail | None
    index_tail: Tail | None
    entries: EntryPool | None
    index: EntryPool | None

    @property
    def memory_bytes(self) -> int:
        """Of its own."""
        tensors = [self.window.pages, self.window.positions]
        tensors += [t.state for t in (self.tail, self.index_tail) if t is not None]
        if self.schema.has_entries:
            tensors += [p.pages for p in (self.entries, self.index) if p is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


class Request:
    """A slot and what is in it."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.length = 0  # tokens that steps were prepared for
        self.num_blocks = 0
        self.num_shared = 0  # tokens whose entries came with the request: they are not written again
        self.names: list[bytes] = []  # of its blocks, where a HybridPrefix has named them
        self.is_released = False

    def __repr__(self) -> str:
        return f"Request({self.slot}, {'released' if self.is_released else f'length={self.length}'})"


class HybridCache:
    def __init__(
        self, schema: HybridSchema, *, num_blocks: int, max_requests: int, max_context: int, device: str | torch.device = "cpu"
    ) -> None:
        if max_requests < 1 or max_context < 1:
            raise BadArgument(f"HybridCache: max_requests {max_requests}, max_context {max_context}: both are 1 or more.")
        self.schema, self.max_context, self.device = schema, max_context, torch.device(device)
        self.allocator = BlockAllocator(num_blocks)
        width = max(1, -(-max_context // schema.block_tokens))
        # Entry b of a row: the block of tokens [b * block_tokens, ...). -1: none yet.
        self.block_table = torch.full((max_requests, width), -1, dtype=torch.int32, device=self.device)
        self.layers: list[LayerStore] = []
        for layer in schema.layers:
            self.layers.append(self._store(layer, num_blocks, max_requests))
        self._free_slots = list(range(max_requests))[::-1]

    def _store(self, s: LayerSchema, num_blocks: int, max_requests: int) -> LayerStore:
        window = Window(s.window_codec, s.window, max_requests, max_drafts=self.schema.max_drafts, device=self.device)
        if not s.ratio:
            return LayerStore(s, window, None, None, None, None)
        if s.owner >= 0:
            owner = self.layers[s.owner]
            return LayerStore(s, window, None, None, owner.entries, owner.index)
        rows = self.schema.block_tokens // s.ratio

        def tail(dim: int) -> Tail:
            return Tail(s.ratio, dim, max_requests, overlap=s.overlap, kind=s.tail, device=self.device)

        return LayerStore(
            s,
            window,
            tail(s.head_dim),
            tail(s.index_dim) if s.index_dim else None,
            EntryPool(s.entry_codec, rows, num_blocks, self.device),
            EntryPool(s.index_codec, rows, num_blocks, self.device) if s.index_dim else None,
        )

    # --- requests --------------------------------------------------------------------------------------------------------

    def admit_request(self) -> Request:
        """A slot, as before the first token."""
        if not self._free_slots:
            raise OutOfBlocks(
                f"admit_request(): all {len(self.block_table)} requests are in use (max_requests). Release one first."
            )
        return Request(self._free_slots.pop())

    def prepare_forward(self, work: Sequence[tuple[Request, int]]) -> None:
        """The next tokens of these requests will be computed: give them their blocks. OutOfBlocks changes nothing."""
        lengths = []
        for request, tokens in work:
            self.check_live("prepare_forward", request)
            if tokens < 0 or request.length + tokens > self.max_context:
                raise BadArgument(
                    f"prepare_forward(): {request} would have {request.length + tokens} tokens; it takes 0 or more, and "
                    f"max_context is {self.max_context}. Nothing changed."
                )
            lengths.append(request.length + tokens)
        if len({id(request) for request, _ in work}) != len(work):
            raise BadArgument("prepare_forward(): a request is there twice. Nothing changed.")
        counts = [max(0, self.schema.blocks(n) - r.num_blocks) for n, (r, _) in zip(lengths, work, strict=True)]
        ids = torch.from_numpy(self.allocator.allocate(sum(counts))).to(self.device)
        at = 0
        for (request, _), length, count in zip(work, lengths, counts, strict=True):
            self.block_table[request.slot, request.num_blocks : request.num_blocks + count] = ids[at : at + count]
            request.length, request.num_blocks, at = length, request.num_blocks + count, at + count

    def release_request(self, request: Request) -> None:
        """Give everything back. The slot is as before the first token when the next request gets it."""
        self.check_live("release_request", request)
        row = self.block_table[request.slot]
        self.allocator.release(row[: request.num_blocks].cpu().numpy())
        row.fill_(-1)
        for layer in self.layers:
            layer.window.reset(request.slot)
            for tail in (layer.tail, layer.index_tail):
                if tail is not None:
                    tail.reset(request.slot)
        request.is_released = True
        self._free_slots.append(request.slot)

    def check_live(self, call: str, request: Request) -> None:
        if request.is_released:
            raise BadArgument(f"{call}(): {request} was released. Nothing changed.")

    def write_entries(self, request: Request, pool: EntryPool, ratio: int, first: int, x: Tensor) -> None:
        """Entries from number `first` on, those that are shared left out."""
        skip = min(len(x), max(0, request.num_shared // ratio - first))
        pool.write(self.blocks(request), first + skip, x[skip:])

    def blocks(self, request: Request) -> Tensor:
        """[num_blocks] int32: a view of the table."""
        return self.block_table[request.slot, : request.num_blocks]

    @property
    def memory_bytes(self) -> int:
        return sum(layer.memory_bytes for layer in self.layers)
