"""A handover as an engine would hold it: in that engine's layout, cut into its tensor parallel ranks. And back, checked.

neutral blocks --hold--> N ranks in one layout --a wire, or nothing--> neutral blocks --gather--> ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvx.errors import BadArgument
from kvx.handover import Handover, from_manifest
from kvx.handover.part import rank_specs
from kvx.layout.buffers import allocate_buffers
from kvx.layout.plan import Plan, plan
from kvx.ops.convert import convert
from kvx.spec import CacheSpec


@dataclass(frozen=True, eq=False)
class Held:
    """Of each part its ranks' specs, and all their buffers, rank by rank."""

    handover: Handover
    specs: tuple[tuple[CacheSpec, ...], ...]
    buffers: tuple[tuple[Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for part in self.buffers for t in part)


def hold(handover: Handover, *, layout: str = "", tp_size: int = 1) -> Held:
    """`layout` "": neutral, as it is."""
    specs = tuple(rank_specs(replace(p.spec, layout=layout or p.spec.layout), tp_size) for p in handover.parts)
    buffers = tuple(tuple(t for s in part for t in allocate_buffers(s)) for part in specs)
    for p, part, into in zip(handover.parts, specs, buffers, strict=True):
        convert(list(into), list(p.buffers), plan=plan(p.spec, part))
    return Held(handover, specs, buffers)


def gather(held: Held) -> Handover:
    """The handover again. Damaged where the ranks' bytes are not those that the manifest says."""
    made = from_manifest(held.handover.to_json())
    for p, way, buffers in zip(made.parts, plans(made, held.specs), held.buffers, strict=True):
        convert(list(p.buffers), list(buffers), plan=way)
    made.check()
    return made


def plans(handover: Handover, specs: Sequence[Sequence[CacheSpec]]) -> list[Plan]:
    """From the ranks to the neutral blocks, part by part."""
    if len(specs) != len(handover.parts):
        raise BadArgument(f"plans(): ranks of {len(specs)} parts; the handover has {len(handover.parts)}.")
    return [plan(list(part), p.spec) for p, part in zip(handover.parts, specs, strict=True)]
