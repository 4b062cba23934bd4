"""LayerStore: one layer's memory. A window for each request; rows of entries in blocks, and the tails that entries are made of.

A cache has two groups of blocks for it (kvx/cache/kinds): `entries`, whose blocks have the pages of every layer's entries, and
`windows`, whose blocks are states: a request's ring of rows and its tails, in every layer. What a plane holds is rows as a codec
codes them, or numbers of a tail: to a conversion they are words.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kvx.cache.groups import LayerGroup, Member, PlanesLayer
from kvx.cache.hybrid.drafts import Drafts
from kvx.cache.hybrid.schema import HybridSchema, LayerSchema
from kvx.cache.hybrid.window import Window
from kvx.cache.kinds import Entries, State
from kvx.errors import Unsupported
from kvx.ops.entry.tail import Tail, tail_shape
from kvx.quant.rows import RowPages
from kvx.spec.cache_spec import PlaneSpec
from kvx.spec.state_spec import StateSpec, state_plane

ENTRIES, WINDOWS = "entries", "windows"  # the groups


@dataclass(frozen=True)
class LayerStore:
    """A layer that reads another's entries has that one's pages."""

    schema: LayerSchema
    window: Window
    tail: Tail | None = None
    index_tail: Tail | None = None
    entries: RowPages | None = None  # a page for each block
    index: RowPages | None = None
    drafts: Drafts | None = None
    index_drafts: Drafts | None = None

    @staticmethod
    def make(
        s: LayerSchema,
        schema: HybridSchema,
        states: PlanesLayer,  # of this layer, in the group of windows
        pages: PlanesLayer | None,  # and in that of entries; None: it has none of its own
        owner: LayerStore | None,  # whose entries it reads
    ) -> LayerStore:
        window = Window(s.window_codec, s.window, _bytes(states.planes["window"]), _words(states.planes["positions"]))
        if not s.ratio:
            return LayerStore(s, window)
        if owner is not None:
            return LayerStore(s, window, entries=owner.entries, index=owner.index)
        assert pages is not None
        rows, slots = schema.block_tokens // s.ratio, len(window.pages)

        def tail(dim: int, name: str) -> Tail:
            return Tail(s.ratio, dim, slots, overlap=s.overlap, kind=s.tail, state=states.planes[name])

        def drafts(of: Tail | None) -> Drafts | None:
            return Drafts(of, schema.max_drafts) if of is not None and schema.max_drafts else None

        main, index = tail(s.head_dim, "tail"), tail(s.index_dim, "index_tail") if s.index_dim else None
        entries = RowPages(s.entry_codec, _bytes(pages.planes["entries"]), rows)
        keys = RowPages(s.index_codec, _bytes(pages.planes["index"]), rows) if s.index_dim else None
        return LayerStore(s, window, main, index, entries, keys, drafts(main), drafts(index))

    def reset(self, slot: int) -> None:
        """As before the first token."""
        self.window.reset(slot)
        for tail in (self.tail, self.index_tail):
            if tail is not None:
                tail.reset(slot)
        self.reset_drafts(slot)

    def reset_drafts(self, slot: int) -> None:
        """What was put aside is of whoever had the slot before."""
        for drafts in (self.drafts, self.index_drafts):
            if drafts is not None:
                drafts.reset(slot)

    @property
    def tensors(self) -> list[Tensor]:
        """Of its own."""
        tensors = [self.window.pages, self.window.positions]
        tensors += [t.state for t in (self.tail, self.index_tail) if t is not None]
        tensors += self.draft_tensors
        if self.schema.has_entries:
            tensors += [p.pages for p in (self.entries, self.index) if p is not None]
        return tensors

    @property
    def draft_tensors(self) -> list[Tensor]:
        """What it takes to go back, which is no part of a request's state."""
        return [t for d in (self.drafts, self.index_drafts) if d is not None for t in (d.saved, d.tokens)]


def groups_of(schema: HybridSchema, num_blocks: int, num_states: int, states: State, model: str) -> list[LayerGroup]:
    """The groups of a cache of this schema: states first, and entries where a layer has some."""
    found = [_group(WINDOWS, schema, num_states, states, model, range(len(schema.layers)))]
    with_entries = [i for i, layer in enumerate(schema.layers) if layer.has_entries]
    if with_entries:
        ratios = tuple(sorted({schema.layers[i].ratio for i in with_entries}))
        found.append(_group(ENTRIES, schema, num_blocks, Entries(ratios), model, with_entries))
    return found


def _group(
    name: str, schema: HybridSchema, num_blocks: int, kind: Entries | State, model: str, layers: range | list[int]
) -> LayerGroup:  # fmt: skip
    planes_of = _entry_planes if name == ENTRIES else _state_planes
    alike: dict[tuple[PlaneSpec, ...], list[int]] = {}
    for i in layers:
        alike.setdefault(planes_of(schema, schema.layers[i]), []).append(i)
    members = [Member(tuple(same), StateSpec(num_blocks, planes, model=model)) for planes, same in alike.items()]
    return LayerGroup(name, members[0].layers, members[0].spec, kind=kind, others=tuple(members[1:]))


def _state_planes(schema: HybridSchema, s: LayerSchema) -> tuple[PlaneSpec, ...]:
    ring = s.window + schema.max_drafts
    planes = [_plane("window", s.window_codec.page_bytes(ring)), _plane("positions", 4 * ring)]
    if s.has_entries:
        dims = {"tail": s.head_dim, **({"index_tail": s.index_dim} if s.index_dim else {})}
        planes += [_plane(n, 4 * prod(tail_shape(s.ratio, d, overlap=s.overlap, kind=s.tail))) for n, d in dims.items()]
    return tuple(planes)


def _entry_planes(schema: HybridSchema, s: LayerSchema) -> tuple[PlaneSpec, ...]:
    rows = schema.block_tokens // s.ratio
    codecs = {"entries": s.entry_codec, **({"index": s.index_codec} if s.index_dim else {})}
    return tuple(_plane(name, codec.page_bytes(rows)) for name, codec in codecs.items())


def _plane(name: str, num_bytes: int) -> PlaneSpec:
    """So many bytes of a block, in the widest words that they are."""
    if num_bytes % 2:
        raise Unsupported(f"HybridCache: {name} has {num_bytes} bytes per block; it must be an even number. Use other rows.")
    words, size = ("f32", 4) if num_bytes % 4 == 0 else ("bf16", 2)
    return state_plane(name, words, row=1, column=num_bytes // size)


def _bytes(plane: Tensor) -> Tensor:
    return plane.view(torch.uint8).flatten(1)


def _words(plane: Tensor) -> Tensor:
    return plane.view(torch.int32).flatten(1)
