"""The rules of a CacheSpec, one function a rule. Each returns a sentence when it is broken."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from kvx.errors import BadArgument
from kvx.layout.axes import Layout, PlaneLayout
from kvx.spec.cache_spec import CacheSpec

Rule = Callable[[CacheSpec], str | None]

_LIMIT = 2**30  # of every axis but num_blocks; the C core holds them in 32 bits
_MOST = 2**64  # of any number: rules after it multiply and print them
_MOST_CHARACTERS = 4096  # of a name: a path and more
MOST_ALLOCATIONS = 2**22  # as a plan has; whoever reads a spec may list them


def fields_are_ints(spec: CacheSpec) -> str | None:
    sizes = ("num_blocks", "block_size", "num_kv_heads", "head_dim", "v_head_dim", "num_layers")
    for name in (*sizes, "layer_start", "head_start", "block_bytes"):
        value = getattr(spec, name)
        if type(value) is not int:
            return f"{name} is {repr(value)[:200]}; it must be an int."
        if abs(value) > _MOST:
            return f"{name} is a number of {value.bit_length()} bits; addresses end at 2**60."
    return None


def names_are_strings(spec: CacheSpec) -> str | None:
    for name in ("layout", "format", "v_format", "model"):
        value = getattr(spec, name)
        if not isinstance(value, str):
            return f"{name} is {repr(value)[:200]}; it must be a string."
        if len(value) > _MOST_CHARACTERS:
            return f"{name} has {len(value):,} characters; it has at most {_MOST_CHARACTERS:,}."
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{name} is {value[:200]!r}, with half a character; it must be text that UTF-8 can hold."
    return None


def geometry_is_positive(spec: CacheSpec) -> str | None:
    for name in ("num_blocks", "block_size", "num_kv_heads", "head_dim", "num_layers"):
        value = getattr(spec, name)
        if value < 1 or (name != "num_blocks" and value >= _LIMIT):
            return f"{name} is {value}; it must be 1 or more{'' if name == 'num_blocks' else f' and under {_LIMIT}'}."
    if not 0 <= spec.v_head_dim < _LIMIT:
        return f"v_head_dim is {spec.v_head_dim}; it must be 1 or more, or 0 for head_dim."
    for name in ("layer_start", "head_start"):
        if not 0 <= getattr(spec, name) < _LIMIT:
            return f"{name} is {getattr(spec, name)}; it must be 0 or more and under {_LIMIT}."
    if spec.block_bytes < 0:
        return f"block_bytes is {spec.block_bytes}; it must be 0 or more."
    return None


def formats_exist(spec: CacheSpec) -> str | None:
    spec.planes  # noqa: B018 - raises with the near names
    return None


def layout_reads(spec: CacheSpec) -> str | None:
    layout = Layout.parse(spec.layout)
    if not set(layout.planes) <= {"k", "v"}:
        return f"layout {spec.layout!r} names the planes {', '.join(layout.planes)}; a CacheSpec has K and V. Write `kv`."
    if spec.num_layers > 1 and not layout.has_layer:
        return f"num_layers is {spec.num_layers} and layout {spec.layout!r} has no layer axis. Write `layer` where it stands."
    return None


def splits_divide(spec: CacheSpec) -> str | None:
    layout = Layout.parse(spec.layout)
    for plane, where in zip(spec.planes, layout.planes.values(), strict=True):
        for name, size in (("token", spec.block_size), ("head", spec.num_kv_heads)):
            factor = where.split_of(name)
            if factor and size % plane.pack(factor):
                field = "block_size" if name == "token" else "num_kv_heads"
                return f"{field} {size} is not a multiple of the {plane.pack(factor)} that layout {spec.layout!r} splits {name} by."
    k, v = spec.planes[0], spec.planes[-1]
    for name in ("token", "head"):  # `x` counts elements of 16 bytes: one number for both only where K and V have one size
        if layout.num_buffers == 1 and layout.first.split_of(name) == "x" and k.format.element.bits != v.format.element.bits:
            return (
                f"layout {spec.layout!r} splits {name} by x, which is {k.pack('x')} for K and {v.pack('x')} for V. Write a number."
            )
    return None


def padding_holds_a_block(spec: CacheSpec) -> str | None:
    if not spec.block_bytes:
        return None
    layout = Layout.parse(spec.layout)
    for where in layout.planes.values():
        outside = [axis.name for dim in where.dims[: _block_dim(where)] for axis in dim]
        if _block_dim(where) < 0 or any(name != "layer" for name in outside):
            return (
                f"block_bytes is {spec.block_bytes} and layout {spec.layout!r} has no blocks to pad: right of `|`, block stands "
                "alone with nothing but layer outside it. Set 0."
            )
    for i, plane in enumerate(spec.planes):
        content = spec.content_bytes(i)
        if spec.block_bytes < content:
            return f"block_bytes is {spec.block_bytes}; a block of this cache has {content}. Set 0 where blocks are not padded."
        scale = plane.format.scale.bits // 8 if plane.format.is_inline and plane.format.scale is not None else 1
        unit = max(plane.unit_bytes, scale)
        if spec.block_bytes % unit:
            return f"block_bytes is {spec.block_bytes}; it must be a multiple of the {unit} bytes of {plane.format}."
    return None


def _block_dim(where: PlaneLayout) -> int:
    """Which dimension is `block`, alone; -1 where it is fused or chooses an allocation."""
    return next((i for i, dim in enumerate(where.dims) if [axis.name for axis in dim] == ["block"]), -1)


def allocations_are_few(spec: CacheSpec) -> str | None:
    sizes = {"layer": spec.num_layers, "kv": 2, "block": spec.num_blocks}
    count = prod(sizes[axis.name] for axis in Layout.parse(spec.layout).left)
    if count > MOST_ALLOCATIONS:
        return (
            f"layout {spec.layout!r} makes {count:,} allocations; at most {MOST_ALLOCATIONS:,}. Fewer axes left of `|` make fewer."
        )
    return None


def cache_fits_addresses(spec: CacheSpec) -> str | None:
    if spec.cache_bytes >= 2**60:
        return f"the cache would have {spec.cache_bytes} bytes; addresses end at 2**60."
    return None


def rows_are_whole_bytes(spec: CacheSpec) -> str | None:
    for plane in spec.planes:
        if plane.head_dim * plane.format.element.bits % 8:
            return f"{plane.name} head_dim {plane.head_dim} is odd, and {plane.format} stores two elements a byte."
    return None


def groups_divide_dim(spec: CacheSpec) -> str | None:
    for plane in spec.planes:
        group = plane.format.group_size
        if group and plane.head_dim % group:
            return f"{plane.name} head_dim {plane.head_dim} is not a multiple of {plane.format}'s group of {group}."
    return None


def packs_divide_dim(spec: CacheSpec) -> str | None:
    layout = Layout.parse(spec.layout)
    for plane, where in zip(spec.planes, layout.planes.values(), strict=True):
        for axis in (axis for axis in where.order if axis.part and axis.name == "dim"):
            pack = plane.pack(axis.factor)
            if plane.head_dim % pack:
                return f"{plane.name} head_dim {plane.head_dim} is not a multiple of the layout's pack of {pack}."
            if plane.format.element.bits * pack % 8:
                return f"the layout's pack of {pack} cuts a byte of {plane.format} in two."
            if plane.format.is_inline:
                return f"{plane.format} keeps its scales behind whole rows; layout {spec.layout!r} splits them."
    return None


def bytes_of_a_row_are_adjacent(spec: CacheSpec) -> str | None:
    layout = Layout.parse(spec.layout)
    for plane, where in zip(spec.planes, layout.planes.values(), strict=True):
        if plane.format.is_in_bytes and where.order[-1].name != "dim":
            why = "keeps its scales behind the row" if plane.format.is_inline else "stores two elements a byte"
            return f"{plane.name} format {plane.format} {why}, so dim must be the last axis; layout {spec.layout!r} ends otherwise."
    return None


def shared_tensors_share_a_type(spec: CacheSpec) -> str | None:
    k, v = spec.planes[0], spec.planes[-1]
    layout = Layout.parse(spec.layout)
    if layout.num_buffers == 1 and layout.has_kv and k.format.element.torch_name != v.format.element.torch_name:
        if spec.tensor_units != (1, 1):
            return f"layout {spec.layout!r} puts K and V in one tensor; format {k.format} and v_format {v.format} differ in type."
        for plane, where in zip(spec.planes, layout.planes.values(), strict=True):
            if plane.unit_bytes > 1 and (where.order[-1].name != "dim" or where.split_of("dim")):
                return (
                    f"layout {spec.layout!r} puts K and V in one tensor of bytes, since {k.format} and {v.format} differ; "
                    "dim must be whole and the last axis there."
                )
    return None


def shared_tensors_have_one_row_size(spec: CacheSpec) -> str | None:
    layout = Layout.parse(spec.layout)
    if layout.num_buffers == 2 or not layout.has_kv:
        return None
    names = [axis.name for axis in layout.first.order]
    dim_inside = layout.first.is_area and "dim" in names[names.index("kv") :] and "dim" not in names[: names.index("kv")]
    sizes = [p.format.row_bytes(p.head_dim) // unit for p, unit in zip(spec.planes, spec.tensor_units, strict=True)]
    if dim_inside or sizes[0] == sizes[1]:
        return None
    together = any([axis.name for axis in dim][-2:] == ["kv", "dim"] for dim in layout.first.dims)
    if together:
        return None
    return (
        f"layout {spec.layout!r} gives K and V rows of one size; K's has {sizes[0]} units and V's {sizes[1]}. "
        "Fuse them, `(kv dim)`, or keep them apart, `kv | ...`."
    )


def inline_scales_are_aligned(spec: CacheSpec) -> str | None:
    for plane in spec.planes:
        fmt = plane.format
        if fmt.is_inline and fmt.scale is not None and (plane.head_dim * fmt.element.bits // 8) % (fmt.scale.bits // 8):
            return f"{plane.name} rows of {plane.head_dim} {fmt.element} leave {fmt}'s inline scale unaligned."
    k, v = spec.planes[0], spec.planes[-1]
    layout = Layout.parse(spec.layout)
    if layout.num_buffers == 1 and layout.has_kv:
        before, cell = k.format.row_bytes(k.head_dim), sum(p.format.row_bytes(p.head_dim) for p in spec.planes)
        for plane in spec.planes:
            scale = plane.format.scale if plane.format.is_inline else None
            size = scale.bits // 8 if scale is not None else plane.unit_bytes
            if cell % size or (plane is v and before % size):
                what = f"{plane.format}'s inline scale" if scale is not None else f"{plane.format} of {plane.name}"
                return f"K rows of {before} bytes in cells of {cell} leave {what} unaligned."
    return None


RULES: tuple[Rule, ...] = (
    fields_are_ints,
    names_are_strings,
    geometry_is_positive,
    layout_reads,
    formats_exist,
    splits_divide,
    rows_are_whole_bytes,
    groups_divide_dim,
    packs_divide_dim,
    bytes_of_a_row_are_adjacent,
    shared_tensors_share_a_type,
    shared_tensors_have_one_row_size,
    inline_scales_are_aligned,
    padding_holds_a_block,
    cache_fits_addresses,
    allocations_are_few,
)


def validate(spec: CacheSpec) -> None:
    """Raise BadArgument with the sentence of the first broken rule."""
    for rule in RULES:
        sentence = rule(spec)
        if sentence:
            raise BadArgument(f"CacheSpec: {sentence}")
