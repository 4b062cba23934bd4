"""A handover as an engine would hold it: in that engine's layout, cut into its tensor parallel ranks. And back, checked.

neutral blocks --hold--> N ranks in one layout --a wire, or nothing--> neutral blocks --gather--> ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import typer
from torch import Tensor

from kvx.errors import BadArgument, KvxError
from kvx.handover import NEUTRAL, Handover, from_manifest
from kvx.handover.part import rank_specs
from kvx.layout.buffers import allocate_buffers
from kvx.layout.plan import Plan, plan
from kvx.ops.move.convert import convert
from kvx.runner.config import ModelConfig
from kvx.spec import CacheSpec, Spec


@dataclass(frozen=True, eq=False)
class Held:
    """Of each part its ranks' specs, and all their buffers, rank by rank."""

    handover: Handover
    specs: tuple[tuple[Spec, ...], ...]
    buffers: tuple[tuple[Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for part in self.buffers for t in part)


def check_held(config: ModelConfig, *, layout: str, tp_size: int, block_size: int, format: str, least_piece_bytes: int = 0) -> None:
    """Raise, by the option's name, where hold() could hold no handover of this model so. No weights are needed.

    `least_piece_bytes`: what a wire takes that wants a descriptor for each piece.
    """
    heads = config.num_kv_heads
    if tp_size < 1 or (tp_size > heads and tp_size % heads):
        raise typer.BadParameter(
            f"{tp_size} ranks; the model has {heads} KV heads. It is 1 to {heads}, or a multiple of {heads}", param_hint="--tp"
        )
    spec = CacheSpec(1, block_size, heads, config.head_dim, num_layers=config.num_layers, layout=NEUTRAL, format=format)
    try:
        ranks = rank_specs(replace(spec, layout=layout or NEUTRAL), tp_size)
        plan(spec, ranks)
        piece_bytes = next(iter(plan(ranks, spec).runs())).bytes if least_piece_bytes else 0
    except KvxError as error:
        raise BadArgument(f"--layout: {error} `kvx layouts` lists names.") from None
    if piece_bytes < least_piece_bytes:
        raise BadArgument(
            f"--layout: {layout!r} lies in pieces of {piece_bytes} bytes, and this wire takes {least_piece_bytes} or more. "
            "Choose one that keeps rows together, or --wire mooncake."
        )


def hold(handover: Handover, *, layout: str = "", tp_size: int = 1) -> Held:
    """`layout` "": neutral, as it is."""
    specs = tuple(rank_specs(p.kv.replaced(layout=layout or p.spec.layout), tp_size) for p in handover.parts)
    buffers = tuple(tuple(t for s in part for t in allocate_buffers(s)) for part in specs)
    for p, part, into in zip(handover.parts, specs, buffers, strict=True):
        convert(list(p.buffers), list(into), plan=plan(p.spec, part, partial=True))  # one rank after the other
    return Held(handover, specs, buffers)


def gather(held: Held) -> Handover:
    """The handover again. Damaged where the ranks' bytes are not those that the manifest says."""
    made = from_manifest(held.handover.to_json())
    for p, way, buffers in zip(made.parts, plans(made, held.specs), held.buffers, strict=True):
        convert(list(buffers), list(p.buffers), plan=way)
    made.check()
    return made


def plans(handover: Handover, specs: Sequence[Sequence[Spec]]) -> list[Plan]:
    """From the ranks to the neutral blocks, part by part."""
    if len(specs) != len(handover.parts):
        raise BadArgument(f"plans(): ranks of {len(specs)} parts; the handover has {len(handover.parts)}.")
    return [plan(list(part), p.spec) for p, part in zip(handover.parts, specs, strict=True)]
