"""CacheSpec: what a cache is, without where it is. Frozen, checked when made, hashable, two-way with JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from kvx.errors import BadArgument
from kvx.layout.axes import Layout
from kvx.spec.formats import Format


@dataclass(frozen=True)
class PlaneSpec:
    """K or V of a spec."""

    name: str  # "k" or "v"
    head_dim: int
    format: Format

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of the cache tensor's dim axis: an element, or a byte where elements are not whole ones."""
        return 1 if self.format.is_in_bytes else self.format.element.bits // 8

    @property
    def row_units(self) -> int:
        return self.format.row_bytes(self.head_dim) // self.unit_bytes

    def pack(self, factor: str) -> int:
        """Elements of one pack of a split dim; `x` is 16 bytes of them."""
        return 128 // self.format.element.bits if factor == "x" else int(factor)


@dataclass(frozen=True)
class CacheSpec:
    """A paged KV cache, or a shard of one: geometry, layout and format.

    `layout` is a string of axes (kvx/layout/axes.py); `format` and `v_format` are names of rows (kvx/spec/formats.py).
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
    model: str = ""  # whose KV it is; "" says nothing
    block_bytes: int = 0  # from block to block where an engine pads its blocks; 0: as large as their content
    manifest_text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Both read specs, so neither can be imported above them.
        from kvx.spec.manifest import to_json
        from kvx.spec.validate import validate

        validate(self)
        object.__setattr__(self, "manifest_text", to_json(self))  # once: compiled graphs carry it as a constant

    @cached_property
    def planes(self) -> tuple[PlaneSpec, PlaneSpec]:
        k = Format.named(self.format)
        v = Format.named(self.v_format) if self.v_format else k
        return PlaneSpec("k", self.head_dim, k), PlaneSpec("v", self.v_head_dim or self.head_dim, v)

    def plane(self, index: int) -> PlaneSpec:
        return self.planes[index]

    @cached_property
    def tensor_units(self) -> tuple[int, int]:
        """Bytes of one unit of dim in the tensors that ops take, for K and for V.

        One tensor that holds rows kept in bytes is a tensor of bytes for both: so the 656-byte MLA record, whose V is bf16.
        """
        layout = Layout.parse(self.layout)
        shared = layout.num_buffers == 1 and layout.has_kv
        k, v = (1 if shared and any(p.format.is_in_bytes for p in self.planes) else p.unit_bytes for p in self.planes)
        return k, v

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
    def num_planes(self) -> int:
        """2, K and V; 1 where the layout has no kv axis."""
        return 2 if Layout.parse(self.layout).has_kv else 1

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in one layer, K and V, with the scales stored per token."""
        return self.num_kv_heads * sum(
            p.format.row_bytes(p.head_dim) + (0 if p.format.is_inline else p.format.scale_bytes(p.head_dim))
            for p in self.planes[: self.num_planes]
        )

    @property
    def _layers_in_block(self) -> int:
        names = [axis.name for axis in Layout.parse(self.layout).k.order]
        inside = "layer" in names and ("block" not in names or names.index("layer") > names.index("block"))
        return self.num_layers if inside else 1

    def content_bytes(self, index: int = 0) -> int:
        """Bytes of one block in K's (0) or V's (1) buffer, or in the one both share: what `block_bytes` pads."""
        apart = Layout.parse(self.layout).num_buffers == 2
        planes = self.planes[index : index + 1] if apart else self.planes[: self.num_planes]
        return self._layers_in_block * self.block_size * self.num_kv_heads * sum(p.format.row_bytes(p.head_dim) for p in planes)

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
