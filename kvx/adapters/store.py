"""One store for engines that have the tokens: whatever any of them, or of the others, wrote of a text is found. docs/store.md.

with HandoverStore("disk:/var/kv:200GB", spec) as store:     # Transformers, llama.cpp: sequences as handovers
    found = store.find(tokens)
    store.keep(handover)

with CacheTiers(cache, disk="/var/kv", model=name) as tiers, share(tiers): ...     # a PagedCache
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from numpy.typing import ArrayLike

from kvx.adapters.engine_names import namer_of
from kvx.cache.tokens import token_ids
from kvx.connector.neighbours import CacheNeighbours, Neighbours
from kvx.connector.tier_stack import TierStack
from kvx.errors import BadArgument, a_type
from kvx.handover import NEUTRAL, NEUTRAL_LATENT, Handover, find, keep, names, part_kind
from kvx.handover.model_parts import ModelPart, model_parts
from kvx.handover.part import neutral
from kvx.spec import CacheSpec, Spec, StateSpec
from kvx.tiers import BlockKind, CacheTiers, TierOption


def share(tiers: CacheTiers) -> CacheNeighbours:
    """From now on the cache also finds blocks that other engines wrote: of other sizes, ranks and names. Close it before the tiers.

    The cache needs the model as its salt, or nobody finds what it writes: PagedCache(..., salt=model.encode()).
    """
    return CacheNeighbours(tiers, namer_of=namer_of)


class StorePart(NamedTuple):
    """Layers of a model that are kept together: those that see all tokens, those of one window, or states."""

    spec: Spec  # of its blocks in the store: block size, format, heads of this rank, model. Its layout is not looked at
    layers: Sequence[int]  # of the model
    window: int = 0


def store_parts(
    config: str | Path | Mapping[str, Any],  # of the model: its folder, config.json, fields or Transformers config
    *,
    model: str,  # a name that only these weights have
    block_size: int,
    dtype: str = "bf16",  # in which the engine has its K and V, and its convolutions
    format: str = "",  # of K and V in the store; "": the same
    state_format: str = "",  # of recurrent matrices; "": as Transformers keeps them, mostly f32
) -> list[StorePart]:
    """The parts of a model as engines keep them: what a HandoverStore takes of one with windows or states."""

    def spec(part: ModelPart) -> Spec:
        count = len(part.layers)
        if part.planes:
            return StateSpec(1, tuple(p.spec(dtype, state_format) for p in part.planes), num_layers=count, model=model)
        return CacheSpec(
            1, block_size, part.num_kv_heads, part.head_dim, v_head_dim=part.v_head_dim, format=format or dtype, num_layers=count,
            layout=NEUTRAL_LATENT if part.is_latent else NEUTRAL, model=model,
        )  # fmt: skip

    return [StorePart(spec(part), part.layers, part.window) for part in model_parts(config)]


class HandoverStore:
    """Handovers in a directory that engines share, in blocks of one size and format: of one model, and one tensor parallel rank."""

    def __init__(self, tier: str | TierOption, parts: CacheSpec | Sequence[StorePart]) -> None:
        option = TierOption.parse(tier) if isinstance(tier, str) else tier
        if isinstance(parts, CacheSpec):
            parts = [StorePart(parts, range(parts.num_layers))]
        if option.is_host or not parts:
            takes = "disk:DIR, nixl:HOST:PORT:SIZE or mooncake:HOST:PORT, and a part or more"
            raise BadArgument(f"HandoverStore: tier is {tier!r} for {len(parts)} parts; it takes {takes}.")
        self._parts = [StorePart(_kept(p.spec), tuple(p.layers), p.window) for p in parts]
        specs = [p.spec for p in self._parts]
        sizes = {spec.block_size for spec in specs if isinstance(spec, CacheSpec)}
        if len(sizes) != 1:
            raise BadArgument(f"HandoverStore: parts have blocks of {sorted(sizes)} tokens; parts of a model share one size.")
        self.block_size, self.model = sizes.pop(), specs[0].model
        kinds = [BlockKind.of(p.spec) if len(parts) == 1 else part_kind(*p) for p in self._parts]
        whole = sum(kind.num_bytes for kind in kinds)
        self._tiers = [option.share(kind.num_bytes, whole).open(kind) for kind in kinds]
        self._neighbours = [
            Neighbours([option], TierStack(kind, [tier]), part.spec, namer_of=namer_of, block_size=self.block_size)
            for kind, tier, part in zip(kinds, self._tiers, self._parts, strict=True)
        ]

    def find(self, tokens: ArrayLike) -> Handover | None:
        """The longest beginning of these tokens that the store has, whoever wrote it; None where there is none.

        Whole blocks, in the store's format: `convert(format=...)` for an engine that takes another. Whoever goes on from `tokens`
        asks for all but the last, which is left to compute.
        """
        ids = token_ids("HandoverStore.find()", tokens).tolist()
        own = names(ids, self.block_size, self.model)
        for one in self._neighbours if own else ():
            one.take_over(ids, own)
        return find(ids, self._tiers, parts=[(p.layers, p.window) for p in self._parts])

    def keep(self, handover: Handover) -> int:
        """Keep its full blocks, converted to the store's size and format: how many there are. Other engines find them."""
        if not isinstance(handover, Handover):
            raise BadArgument(f"HandoverStore.keep(): handover is {a_type(handover)}; it must be a kvx.handover.Handover.")
        format = next(p.spec.of_kv.format for p in self._parts if isinstance(p.spec, CacheSpec))
        of_kv = [p.spec.of_kv for p in handover.parts if isinstance(p.spec, CacheSpec)]
        if any(spec.block_size != self.block_size or (spec.format, spec.v_format) != (format, "") for spec in of_kv):
            handover = handover.convert(block_size=self.block_size, format=format)
        count = keep(self._in_order(handover), self._tiers)
        ids = handover.tokens.tolist()
        for one in self._neighbours:
            one.lead(ids, names(ids, self.block_size, self.model))
        return count

    def _in_order(self, handover: Handover) -> Handover:
        """With its parts in the store's order: engines have different ones."""
        order = {(p.layers, isinstance(p.spec, StateSpec)): n for n, p in enumerate(self._parts)}
        places = [order.get((p.layers, isinstance(p.spec, StateSpec)), -1) for p in handover.parts]
        if sorted(places) != list(range(len(order))) or places == sorted(places):
            return handover  # keep() says what differs
        return replace(handover, parts=tuple(p for _, p in sorted(zip(places, handover.parts, strict=True), key=itemgetter(0))))

    def close(self) -> None:
        for one in self._neighbours:
            one.close()
        for tier in self._tiers:
            tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _kept(spec: Spec) -> Spec:
    """One block of it, as engines keep it."""
    if isinstance(spec, StateSpec):
        return spec.replaced(num_blocks=1, layer_start=0, layout=spec.block_layout)
    return neutral(spec.of_kv, num_blocks=1, block_size=spec.block_size).replaced(layer_start=0)
