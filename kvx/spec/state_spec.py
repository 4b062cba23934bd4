"""StateSpec: recurrent states in blocks. One block holds one sequence at one position; no plane has a token axis.

A convolution keeps its last inputs, `channel` by `tap`; a linear attention or state space layer a matrix a head, `head` by `row` by
`column` (key by value, or head dim by state size), or `channel` by `column` where it has no heads. Which position a state belongs
to is not in its bytes: `positions` says it, or whoever moves it beside them (a handover by its tokens, a tier by the block's name).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Self

from kvx.errors import BadArgument, Unsupported
from kvx.layout.axes import STATE_AXES, Layout
from kvx.spec.cache_spec import CacheSpec, PlaneSpec, Share, Spec
from kvx.spec.formats import Format, Granularity

_AXES = ("head", *STATE_AXES)
_LIMIT = 2**30


@dataclass(frozen=True)
class StateSpec(Spec):
    """Blocks of states, each of one sequence at one position: what recurrent and convolution layers keep in place of K and V."""

    num_blocks: int
    planes: tuple[PlaneSpec, ...]
    layout: str = ""  # "": every plane apart, `plain_layout`
    num_layers: int = 1
    layer_start: int = 0  # of the model's layers that have states, counted by themselves
    model: str = ""  # whose states they are; "" says nothing
    block_bytes: int = 0  # from block to block where an engine pads its pages; 0: as large as their content
    positions: tuple[int, ...] = ()  # tokens that the state of each block has seen; (): says nothing
    block_size: int = field(default=1, init=False)  # a block is one position

    def __post_init__(self) -> None:
        planes = tuple(self.planes)
        if all(isinstance(p, PlaneSpec) for p in planes):  # in one order, whatever that of memory: digests count planes
            planes = tuple(sorted(planes, key=lambda p: p.name))
        object.__setattr__(self, "planes", planes)
        object.__setattr__(self, "positions", tuple(self.positions) if isinstance(self.positions, list) else self.positions)
        if not self.layout and _planes_are_planes(self) is None:
            object.__setattr__(self, "layout", self.plain_layout)
        for rule in RULES:
            sentence = rule(self)
            if sentence:
                raise BadArgument(f"StateSpec: {sentence}")

    @property
    def block_content_bytes(self) -> int:
        """Of one sequence's states, in all layers: what a request takes."""
        return self.num_layers * sum(p.num_rows * p.row_bytes for p in self.planes)

    def manifest_fields(self) -> dict[str, str | int]:
        """Its planes as text: a manifest's values are strings and integers."""
        planes = [
            {
                "name": p.name, "format": p.format.name, "axes": [list(axis) for axis in p.axes], "shard_axis": p.shard_axis,
                "shares": [list(share) for share in p.shares],
            }
            for p in self.planes
        ]  # fmt: skip
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name != "positions"}
        if self.positions:  # younger than manifests that travel: absent where it says nothing, so their digests hold
            found["positions"] = " ".join(map(str, self.positions))
        return found | {"planes": json.dumps(planes, separators=(",", ":"))}

    def replaced(self, **fields: Any) -> Self:
        """Other blocks are at other positions: those of these are not kept for them."""
        if fields.get("num_blocks", self.num_blocks) != self.num_blocks:
            fields = {"positions": (), **fields}
        return super().replaced(**fields)

    @property
    def block_layout(self) -> str:
        """The layout with a block in one run, layer after layer: how tiers and handovers keep it."""
        inner = "; ".join(f"{p.name}: {' '.join(axis for axis, _ in p.axes)}" for p in self.planes)
        return f"block | layer plane[{inner}]"

    @property
    def cache_bytes(self) -> int:
        """All of it, with what pads the blocks."""
        return max(self.block_bytes * self.num_layers, self.block_content_bytes) * self.num_blocks

    def __getattr__(self, name: str) -> Any:
        """What only a cache of K and V has: whoever asks for it takes no states, and says so."""
        if name.startswith("_") or (name not in CacheSpec.__dataclass_fields__ and not hasattr(CacheSpec, name)):
            raise AttributeError(f"StateSpec has no {name!r}.")
        raise Unsupported(
            f"StateSpec has no {name}: what was called takes a CacheSpec, of K and V. States are taken by plan, convert, digest, "
            "allocate_buffers, layer_views, save and load, handovers, PagedCache and tiers."
        )

    def shard(self, tp_size: int, tp_rank: int) -> StateSpec:
        """One tensor-parallel rank's part: of every share its own whole units, or those of ranks in a row where there are fewer."""
        if not isinstance(tp_size, int) or not isinstance(tp_rank, int) or not 0 <= tp_rank < tp_size:
            raise BadArgument(f"shard(): tp_rank is {tp_rank} of tp_size {tp_size}.")
        if self.block_bytes and tp_size > 1:
            raise BadArgument(
                f"shard(): block_bytes is {self.block_bytes}; what a rank's pages are padded to is the engine's to say. "
                "Shard replace(spec, block_bytes=0), then give each rank its own."
            )
        return replace(self, planes=tuple(_shard(p, tp_size, tp_rank) for p in self.planes))


def state_plane(
    name: str,  # conv, state, or what else a layer keeps
    format: str,  # bf16, f16 or f32, or one with inline scales
    *,
    shares: tuple[tuple[int, int], ...] = (),  # (size, unit) of parts that ranks share out one by one, such as q, k and v; (): one
    **axes: int,  # channel=, tap=, head=, row=, column=: the first is what ranks share out
) -> PlaneSpec:
    """A plane of a state, whole: state_plane("conv", "bf16", channel=8192, tap=3)."""
    if not axes:
        raise BadArgument(f"state_plane(): {name!r} has no axes; give sizes, such as channel=8192, tap=3.")
    first = next(iter(axes))
    found, at = [], 0
    for size, unit in shares or ((axes[first], 1),):
        found.append(Share(at, size, unit))
        at += size
    if len(axes) == 1:  # a vector: one row a channel
        axes = {**axes, "column": 1}
    return PlaneSpec(name, tuple(axes.items()), Format.named(format), first, tuple(found))


def _shard(plane: PlaneSpec, tp_size: int, tp_rank: int) -> PlaneSpec:
    mine = []
    for share in plane.shares:
        units = share.size // share.unit
        if units % tp_size and tp_size % units:
            raise BadArgument(
                f"shard(): {plane.name} has {units} units of {share.unit} {plane.shard_axis}s over {tp_size} ranks: neither "
                "divides the other."
            )
        count = max(1, units // tp_size) * share.unit
        mine.append(Share(share.first + tp_rank * units // tp_size * share.unit, count, share.unit))
    axes = {**plane.sizes, plane.shard_axis: sum(share.size for share in mine)}
    return replace(plane, axes=tuple(axes.items()), shares=tuple(mine))


# ---- rules, each a sentence when it is broken


def _planes_are_planes(spec: StateSpec) -> str | None:
    if not spec.planes or not all(isinstance(p, PlaneSpec) for p in spec.planes):
        return f"planes is {str(spec.planes)[:200]}; it must be one PlaneSpec or more: kvx.spec.state_plane() makes them."
    names = [p.name for p in spec.planes]
    if len(set(names)) < len(names):
        return f"planes are named {', '.join(names)}; each has a name of its own."
    return None


def _sizes_are_positive(spec: StateSpec) -> str | None:
    fields = {name: getattr(spec, name) for name in ("num_blocks", "num_layers")}
    fields |= {f"{axis} of {p.name}": size for p in spec.planes for axis, size in p.axes}
    for name, value in fields.items():
        if type(value) is not int or not 1 <= value < (2**62 if name == "num_blocks" else _LIMIT):
            return f"{name} is {value!r}; it must be an int of 1 or more."
    for name in ("layer_start", "block_bytes"):
        value = getattr(spec, name)
        if type(value) is not int or not 0 <= value < 2**62:
            return f"{name} is {value!r}; it must be an int of 0 or more."
    return None


def _positions_are_of_blocks(spec: StateSpec) -> str | None:
    said = spec.positions
    if not isinstance(said, tuple) or any(type(n) is not int or not 0 <= n < 2**62 for n in said):
        return f"positions is {str(said)[:100]}; it must be the number of tokens that each block's state has seen, in a tuple."
    if said and len(said) != spec.num_blocks:
        return f"positions has {len(said)} of {spec.num_blocks} blocks; it has one for each, or () says nothing."
    return None


def _names_are_strings(spec: StateSpec) -> str | None:
    for name in ("layout", "model"):
        value = getattr(spec, name)
        if not isinstance(value, str) or len(value) > 4096:
            return f"{name} is {str(value)[:100]!r}; it must be a string of at most 4,096 characters."
    return None


def _axes_are_those_of_states(spec: StateSpec) -> str | None:
    for p in spec.planes:
        other = next((axis for axis in p.sizes if axis not in _AXES), "")
        if other or len(p.axes) < 2 or p.shard_axis == p.row_axis:
            return (
                f"plane {p.name} has the axes {' '.join(p.sizes)}, shared out by {p.shard_axis}; a state has two or more of "
                f"{', '.join(_AXES)}, and its last is not shared out."
            )
        if p.format.element.is_moved_only or not (p.format.granularity is Granularity.NONE or p.format.is_inline):
            return f"plane {p.name} is {p.format}; states are bf16, f16 or f32, or a format with inline scales."
        if p.format.is_inline and p.format.scale is not None and p.row_bytes % (p.format.scale.bits // 8):
            return (
                f"plane {p.name} is {p.format}, scales of {p.format.scale.bits // 8} bytes behind rows of {p.row_elements} "
                "elements, where they are not aligned. Rows have a multiple of 4 elements; give such a plane bf16, f16 or f32."
            )
        if p.format.group_size and p.row_elements % p.format.group_size:
            return (
                f"plane {p.name} is {p.format}, a scale for {p.format.group_size} elements; its rows have {p.row_elements}, "
                "which is no multiple. int8_per_token_head_inline has one scale a row."
            )
        if any(share.size % share.unit for share in p.shares):
            return f"plane {p.name} has shares {[tuple(s) for s in p.shares]} that are no whole units."
    return None


def _layout_has_the_planes(spec: StateSpec) -> str | None:
    layout, mine = Layout.parse(spec.layout), [p.name for p in spec.planes]
    if set(layout.planes) != set(mine):
        return f"layout {spec.layout!r} names the planes {', '.join(layout.planes)}; the spec has {', '.join(mine)}."
    if spec.num_layers > 1 and not layout.has_layer:
        return f"num_layers is {spec.num_layers} and layout {spec.layout!r} has no layer axis. Write `layer` where it stands."
    for p in spec.planes:
        where = layout.planes[p.name]
        named = {axis.name for axis in (*where.left, *where.order)} - {"layer", "block", "plane"}
        if named != set(p.sizes):
            there, here = (" ".join(sorted(axes)) for axes in (named, p.sizes))
            return f"layout {spec.layout!r} gives {p.name} the axes {there}; the plane has {here}."
        for axis in p.sizes:
            factor = where.split_of(axis)
            if factor and p.sizes[axis] % p.pack(factor):
                return (
                    f"layout {spec.layout!r} splits {axis} of {p.name} by {p.pack(factor)}, which does not divide {p.sizes[axis]}."
                )
    return None


def _areas_are_aligned(spec: StateSpec) -> str | None:
    layout, unit = Layout.parse(spec.layout), max(_alignment(p) for p in spec.planes)
    sizes = {"layer": spec.num_layers, "block": spec.num_blocks}
    for p in spec.planes:
        where = layout.planes[p.name]
        if not where.is_area:
            continue
        names = [axis.name for axis in where.order]
        inside = where.order[names.index("plane") + 1 :]
        here = sizes | p.sizes | {p.row_axis: p.row_units}
        area = p.unit_bytes * prod(here[a.name] + a.unused for a in inside if a.part != "/")  # a split one once
        if area % unit:
            return f"layout {spec.layout!r} puts {area} bytes of {p.name} before or behind elements of {unit} bytes, not aligned."
    if spec.block_bytes % unit:
        return f"block_bytes is {spec.block_bytes}; elements have {unit} bytes."
    return None


def _alignment(plane: PlaneSpec) -> int:
    """Bytes that its elements, and scales between them, are a multiple of."""
    scale = plane.format.scale
    return max(plane.unit_bytes, scale.bits // 8 if scale is not None else 1)


def _padding_holds_a_block(spec: StateSpec) -> str | None:
    if not spec.block_bytes:
        return None
    layout = Layout.parse(spec.layout)
    for p in spec.planes:
        where = layout.planes[p.name]
        names = [[axis.name for axis in dim] for dim in where.dims]
        if ["block"] not in names or any(n != ["layer"] for n in names[: names.index(["block"])]):
            return f"block_bytes is {spec.block_bytes} and layout {spec.layout!r} has no blocks to pad for {p.name}. Set 0."
        content = spec.content_bytes(spec.planes.index(p))
        if spec.block_bytes < content:
            return f"block_bytes is {spec.block_bytes}; a block of these states has {content}. Set 0 where blocks are not padded."
    return None


def _fits_addresses(spec: StateSpec) -> str | None:
    size = spec.cache_bytes
    if size >= 2**60:
        return f"the states would have {size} bytes; addresses end at 2**60."
    layout = Layout.parse(spec.layout)
    sizes = {"layer": spec.num_layers, "plane": spec.num_planes, "block": spec.num_blocks}
    count = prod(sizes[axis.name] for axis in layout.left)
    return f"layout {spec.layout!r} makes {count:,} allocations; at most {2**22:,}." if count > 2**22 else None


RULES: tuple[Callable[[StateSpec], str | None], ...] = (
    _names_are_strings,
    _planes_are_planes,
    _sizes_are_positive,
    _positions_are_of_blocks,
    _axes_are_those_of_states,
    _layout_has_the_planes,
    _fits_addresses,
    _padding_holds_a_block,
    _areas_are_aligned,
)
