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
        return 1 if self.format.is_inline or self.format.element.bits < 8 else self.format.element.bits // 8

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
    Ops work on one layer's tensors and read neither `num_layers` nor where the shard starts; conversions read all of it.
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
    def cache_bytes(self) -> int:
        return self.num_layers * self.num_slots * self.token_bytes

    def scale_shape(self, index: int) -> tuple[int, ...] | None:
        """The shape of K's (0) or V's (1) scale tensor; None when there is none or it is inline."""
        plane = self.plane(index)
        if plane.format.scale is None or plane.format.is_inline:
            return None
        b, n, h, g = self.num_blocks, self.block_size, self.num_kv_heads, plane.format.num_groups(plane.head_dim)
        return ((), (), (b,), (h,), (b, h), (b, n, h), (b, n, h, g))[plane.format.granularity]
