"""CacheSpec: what a cache is, without where it is. Frozen, checked when made, hashable, two-way with JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Self

from kvx.errors import BadArgument, Unsupported
from kvx.layout.axes import Layout, layout_text
from kvx.spec.formats import Format, format_name
from kvx.spec.manifest import to_json


class Share(NamedTuple):
    """Some of an axis that ranks share out, in the model's numbering."""

    first: int
    size: int
    unit: int = 1  # ranks get whole ones of these: the channels of a head, or of a group


@dataclass(frozen=True)
class PlaneSpec:
    """One kind of rows in a cache's blocks: K or V, a latent, a convolution's state."""

    name: str  # "k", "v", or that of the layout's plane[...]
    axes: tuple[tuple[str, int], ...]  # what a block of one layer has of it, axis by axis; the last is the elements of a row
    format: Format
    shard_axis: str = "head"  # what tensor parallel ranks share out
    shares: tuple[Share, ...] = ()  # what is here of it, in the order of memory: parts that ranks share out one by one. (): all

    def __post_init__(self) -> None:
        size = self.sizes.get(self.shard_axis, 0)
        object.__setattr__(self, "shares", tuple(Share(*share) for share in self.shares) or (Share(0, size),))
        if size < 1 or sum(share.size for share in self.shares) != size:
            raise BadArgument(
                f"PlaneSpec {self.name!r}: its shares have {sum(s.size for s in self.shares)} {self.shard_axis}s; its axes are "
                f"{dict(self.axes)}. Name an axis of it, and shares that make up its size."
            )

    def local(self, index: int) -> int:
        """Where the model's `index` of the shared axis stands here."""
        at = 0
        for share in self.shares:
            if share.first <= index < share.first + share.size:
                return at + index - share.first
            at += share.size
        raise BadArgument(f"PlaneSpec {self.name!r}: {self.shard_axis} {index} of the model is not here.")

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def row_axis(self) -> str:
        return self.axes[-1][0]

    @property
    def row_elements(self) -> int:
        return self.axes[-1][1]

    @property
    def head_dim(self) -> int:
        """`row_elements`, as ops on K and V call them."""
        return self.axes[-1][1]

    @property
    def num_rows(self) -> int:
        """In a block of one layer."""
        return prod(size for _, size in self.axes[:-1])

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of the cache tensor's row axis: an element, or a byte where elements are not whole ones."""
        return 1 if self.format.is_in_bytes else self.format.element.bits // 8

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.row_elements)

    @property
    def row_units(self) -> int:
        return self.row_bytes // self.unit_bytes

    def pack(self, factor: str) -> int:
        """Elements of one pack of a split axis; `x` is 16 bytes of them."""
        return 128 // self.format.element.bits if factor == "x" else int(factor)


class Spec:
    """A cache in blocks, or a shard of one: planes, their layout, and which layers. What conversions, digests and files read.

    `CacheSpec` is the one of K and V. A block is the unit of allocation, and a plane says what it holds.
    """

    num_blocks: int
    block_size: int  # tokens in a block; 1 where planes have none
    layout: str
    num_layers: int
    layer_start: int
    model: str
    block_bytes: int
    planes: tuple[PlaneSpec, ...]
    positions: tuple[int, ...] = ()  # of states: tokens that each block has seen, where that is said

    def plane(self, index: int) -> PlaneSpec:
        return self.planes[index]

    @property
    def num_planes(self) -> int:
        return len(self.planes)

    def manifest_fields(self) -> dict[str, str | int]:
        """What travels: kvx/spec/manifest.py."""
        raise NotImplementedError

    def replaced(self, **fields: Any) -> Self:
        """With other values of these fields: dataclasses.replace, for every kind of spec."""
        return replace(self, **fields)  # type: ignore[type-var]

    @property
    def cache_bytes(self) -> int:
        """All of it, with what pads the blocks."""
        raise NotImplementedError

    @property
    def of_kv(self) -> CacheSpec:
        """This spec, where it is of K and V. Unsupported where its planes are others."""
        if isinstance(self, CacheSpec):
            return self
        raise Unsupported(f"this takes a cache of K and V; the planes here are {', '.join(p.name for p in self.planes)}.")

    @property
    def plain_layout(self) -> str:
        """The layout with every plane apart and its rows in one piece, as its axes say."""
        names = [p.name for p in self.planes]
        if names in (["k", "v"], ["k"]):
            return "layer kv | block token head dim" if len(names) == 2 else "layer | block token head dim"
        inner = "; ".join(f"{p.name}: | block {' '.join(axis for axis, _ in p.axes)}" for p in self.planes)
        return f"layer plane[{inner}]"

    @property
    def _layers_in_block(self) -> int:
        names = [axis.name for axis in Layout.parse(self.layout).first.order]
        inside = "layer" in names and ("block" not in names or names.index("layer") > names.index("block"))
        return self.num_layers if inside else 1

    def content_bytes(self, index: int = 0) -> int:
        """Bytes of one block in a plane's buffer, or in the one all share: what `block_bytes` pads."""
        apart = Layout.parse(self.layout).num_buffers > 1
        planes = self.planes[index : index + 1] if apart else self.planes
        return self._layers_in_block * sum(p.num_rows * p.row_bytes for p in planes)

    def scale_shape(self, index: int) -> tuple[int, ...] | None:
        """The shape of a plane's scale tensor; None when there is none or it is inline."""
        return None


@dataclass(frozen=True)
class CacheSpec(Spec):
    """A paged KV cache, or a shard of one: geometry, layout and format.

    `layout` is a string of axes (kvx/layout/axes.py), "NHD" or "HND"; `format` and `v_format` are names of rows
    (kvx/spec/formats.py), or what torch and engines call them: "fp8" becomes fp8_e4m3.
    Ops work on one layer's tensors, whose strides they honour: they read neither `num_layers`, where the shard starts, nor
    `block_bytes`. Conversions read all of it.
    """

    num_blocks: int
    block_size: int  # tokens in a block
    num_kv_heads: int
    head_dim: int  # elements of one K head
    layout: str = "kv | block token head dim"
    format: str = "bf16"
    v_head_dim: int = 0  # 0: as K
    v_format: str = ""  # "": as K
    num_layers: int = 1
    layer_start: int = 0  # this cache's first layer in the model: pipeline stages
    head_start: int = 0  # this cache's first KV head in the model: tensor parallel ranks
    model: str = ""  # the model that K and V belong to; "": not named
    block_bytes: int = 0  # from block to block where an engine pads its blocks; 0: as large as their content
    manifest_text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from kvx.spec.validate import validate  # which reads specs, so it cannot be imported above them

        for name, canonical in (("layout", layout_text), ("format", format_name), ("v_format", format_name)):
            object.__setattr__(self, name, canonical(getattr(self, name)))
        validate(self)
        object.__setattr__(self, "manifest_text", to_json(self))  # once: compiled graphs carry it as a constant
        if len(self.planes) == 2:
            self.kv  # noqa: B018 - found now: torch.compile does not trace a cached property's lock (Python 3.11)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: its fields, without what ops keep on it."""
        return _with_fields, ({f.name: getattr(self, f.name) for f in fields(self) if f.init},)

    def manifest_fields(self) -> dict[str, str | int]:
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        if not self.block_bytes:  # younger than manifests that travel: absent where it says nothing, so their digests hold
            del found["block_bytes"]
        return found

    @cached_property
    def planes(self) -> tuple[PlaneSpec, ...]:  # type: ignore[override]
        """K and V; K alone where the layout has no kv axis."""
        k = Format.named(self.format)
        v = Format.named(self.v_format) if self.v_format else k
        rows = {"k": (self.head_dim, k), "v": (self.v_head_dim or self.head_dim, v)}
        outside = ("token", self.block_size), ("head", self.num_kv_heads)
        return tuple(
            PlaneSpec(name, (*outside, ("dim", rows[name][0])), rows[name][1], shares=(Share(self.head_start, self.num_kv_heads),))
            for name in Layout.parse(self.layout).planes
        )

    @cached_property
    def kv(self) -> tuple[PlaneSpec, PlaneSpec]:
        """K and V, for ops that need both. Unsupported where the layout has no kv axis."""
        if len(self.planes) != 2:
            raise Unsupported(
                f"layout {self.layout!r} has no kv axis; ops that address tokens do not take it. "
                "Convert to one they do, such as kvx.NHD: kvx.convert(...)."
            )
        return self.planes[0], self.planes[1]

    @cached_property
    def tensor_units(self) -> tuple[int, int]:
        """Bytes of one unit of dim in the tensors that ops take, for K and for V.

        One tensor that holds rows kept in bytes is a tensor of bytes for both: so the 656-byte MLA record, whose V is bf16.
        """
        layout = Layout.parse(self.layout)
        shared = layout.num_buffers == 1 and layout.has_kv
        units = [1 if shared and any(p.format.is_in_bytes for p in self.planes) else p.unit_bytes for p in self.planes]
        return units[0], units[-1]

    def shard(self, tp_size: int, tp_rank: int) -> CacheSpec:
        """One tensor-parallel rank's part. With more ranks than heads, heads are held by several ranks in a row."""
        heads = self.num_kv_heads
        if not 0 <= tp_rank < tp_size:
            raise BadArgument(f"shard(): tp_rank is {tp_rank} of tp_size {tp_size}.")
        if heads % tp_size and tp_size % heads:
            raise BadArgument(
                f"shard(): {heads} KV heads over {tp_size} ranks: neither divides the other. "
                "Give each rank's spec its own num_kv_heads and head_start."
            )
        if self.block_bytes and tp_size > 1:
            raise BadArgument(
                f"shard(): block_bytes is {self.block_bytes} for {heads} heads; what a rank's blocks are padded to is the engine's "
                "to say. Shard replace(spec, block_bytes=0), then give each rank its own."
            )
        mine = max(1, heads // tp_size)
        return replace(self, num_kv_heads=mine, head_start=self.head_start + tp_rank * heads // tp_size)

    @property
    def num_slots(self) -> int:
        """Tokens that all blocks hold together."""
        return self.num_blocks * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in one layer, K and V, with the scales stored per token."""
        return self.num_kv_heads * sum(
            p.format.row_bytes(p.head_dim) + (0 if p.format.is_inline else p.format.scale_bytes(p.head_dim)) for p in self.planes
        )

    @property
    def cache_bytes(self) -> int:
        """All of it: elements, scales stored per token, and what pads the blocks."""
        content = self.num_layers * self.num_slots * self.token_bytes
        if not self.block_bytes:
            return content
        blocks, buffers = self.num_blocks * self.num_layers // self._layers_in_block, Layout.parse(self.layout).num_buffers
        return content + blocks * sum(self.block_bytes - self.content_bytes(i) for i in range(buffers))

    def scale_shape(self, index: int) -> tuple[int, ...] | None:
        """The shape of K's (0) or V's (1) scale tensor; None when there is none or it is inline."""
        plane = self.plane(index)
        if plane.format.scale is None or plane.format.is_inline:
            return None
        b, n, h, g = self.num_blocks, self.block_size, self.num_kv_heads, plane.format.num_groups(plane.head_dim)
        return ((), (), (b,), (h,), (b, h), (b, n, h), (b, n, h, g))[plane.format.granularity]


def _with_fields(values: dict[str, Any]) -> CacheSpec:
    return CacheSpec(**values)
