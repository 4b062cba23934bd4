"""Planes: every element of K and V lies at the offset that a slow formula, written here by hand, says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvx
from kvx.layout import planes
from kvx.layout.place import axis_spans, places
from kvx.layout.planes import cache_shapes, cache_tensors, plane_maps, strided_views
from tests import cases

N, B, H = 3, 4, 2  # num_blocks, block_size, num_kv_heads


@dataclass(frozen=True)
class Row:
    """One plane's row, by hand: units of the cache tensor (bytes where elements are not whole ones)."""

    dim: int  # units of elements in a row
    all: int  # units of a row: elements and inline scales
    unit_bytes: int
    per_byte: int = 1  # elements a unit


# head_dim 32.
ROWS = {
    "bf16": Row(32, 32, 2),
    "f32": Row(32, 32, 4),
    "fp8_e4m3": Row(32, 32, 1),
    "int8_per_token_head": Row(32, 32, 1),
    "int8_per_token_head_inline": Row(32, 36, 1),
    "fp8_e5m2_per_token_head_inline": Row(32, 36, 1),
    "int4_per_token_head_inline": Row(16, 20, 1, 2),
    "int4_per_group": Row(16, 16, 1, 2),
    "nvfp4": Row(16, 16, 1, 2),
    "mxfp8": Row(32, 32, 1),
}


@dataclass(frozen=True)
class At:
    """One unit of one plane: its block, token, head, unit of the row; the row of this plane and of both."""

    b: int
    t: int
    h: int
    d: int
    v: int  # 0 for K, 1 for V
    row: Row
    k_row: Row
    v_row: Row

    @property
    def fused(self) -> int:
        """Units into a cell that holds K's row and then V's."""
        return self.v * self.k_row.all + self.d

    @property
    def fused_all(self) -> int:
        return self.k_row.all + self.v_row.all

    def packed(self, pack: int) -> int:
        """[block, head, dim/pack, token, pack] with `pack` in units."""
        return (((self.b * H + self.h) * (self.row.all // pack) + self.d // pack) * B + self.t) * pack + self.d % pack


OFFSETS: dict[str, Callable[[At], int]] = {  # units from the start of the plane's tensor
    "NHD": lambda a: ((a.b * B + a.t) * H + a.h) * a.row.all + a.d,
    "HND": lambda a: ((a.b * H + a.h) * B + a.t) * a.row.all + a.d,
    "packed8": lambda a: a.packed(8 // a.row.per_byte),
    "fused_NHD": lambda a: ((a.b * B + a.t) * H + a.h) * a.fused_all + a.fused,
    "fused_HND": lambda a: ((a.b * H + a.h) * B + a.t) * a.fused_all + a.fused,
    "stacked": lambda a: (((a.b * 2 + a.v) * B + a.t) * H + a.h) * a.row.all + a.d,
    "flat": lambda a: ((a.b * B + a.t) * H + a.h) * a.row.all + a.d,
    "old_vllm": lambda a: a.packed(16 // a.row.unit_bytes) if a.v == 0 else ((a.b * H + a.h) * a.row.all + a.d) * B + a.t,
}


def shapes_by_hand(layout: str, k: Row, v: Row) -> tuple[tuple[int, ...], ...]:
    def packed(row: Row, pack: int) -> tuple[int, ...]:
        return (N, H, row.all // pack, B, pack)

    return {
        "NHD": ((N, B, H, k.all), (N, B, H, v.all)),
        "HND": ((N, H, B, k.all), (N, H, B, v.all)),
        "packed8": (packed(k, 8 // k.per_byte), packed(v, 8 // v.per_byte)),
        "fused_NHD": ((N, B, H, k.all + v.all),),
        "fused_HND": ((N, H, B, k.all + v.all),),
        "stacked": ((N, 2, B, H, k.all),),
        "flat": ((N * B, H, k.all), (N * B, H, v.all)),
        "old_vllm": (packed(k, 16 // k.unit_bytes), (N, H, v.all, B)),
    }[layout]


def make(layout: str, fmt: str, v_format: str = "", **more: int) -> kvx.CacheSpec:
    return kvx.CacheSpec(N, B, H, 32, layout=cases.LAYOUTS.get(layout, layout), format=fmt, v_format=v_format, **more)


def any_views(cache, spec):
    """kvx.views, of tensors of any type: numbered ones show where each element lies."""
    return strided_views((cache,) if isinstance(cache, torch.Tensor) else tuple(cache), spec)


def numbered(shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Tensors whose every unit holds its own offset."""
    return tuple(torch.arange(prod(shape)).view(shape) for shape in shapes)


def unit(view: Tensor, b: int, t: int, h: int, d: int) -> Tensor:
    """Unit d of a row, in a whole or a split view."""
    return view[b, t, h, d] if view.dim() == 4 else view[b, h, d // view.shape[4], t, d % view.shape[4]]


def everywhere(row: Row) -> Iterator[tuple[int, int, int, int]]:
    return product(range(N), range(B), range(H), range(row.dim))


def is_possible(layout: str, fmt: str) -> bool:
    row = kvx.FORMATS[fmt]
    return not ((row.is_inline and layout in ("packed8", "old_vllm")) or (row.element.bits < 8 and layout == "old_vllm"))


# (layout, format, V's format): every layout with every row above, then unlike pairs where K and V may differ.
PAIRS = [
    *((layout, fmt, fmt) for layout in cases.LAYOUTS for fmt in ROWS if is_possible(layout, fmt)),
    ("NHD", "bf16", "nvfp4"),
    ("HND", "nvfp4", "f32"),
    ("packed8", "f32", "int4_per_group"),
    ("flat", "int8_per_token_head_inline", "bf16"),
    ("old_vllm", "nvfp4", "bf16"),
    ("fused_NHD", "fp8_e4m3", "nvfp4"),
    ("fused_HND", "nvfp4", "mxfp8"),
    ("fused_HND", "int4_per_token_head_inline", "int8_per_token_head_inline"),
    ("fused_NHD", "int8_per_token_head_inline", "int8_per_token_head"),
]


@pytest.mark.parametrize(("layout", "fmt", "v_format"), PAIRS)
def test_shapes_and_every_offset_by_hand(layout, fmt, v_format):
    spec, k_row, v_row = make(layout, fmt, v_format), ROWS[fmt], ROWS[v_format]
    shapes = shapes_by_hand(layout, k_row, v_row)
    assert cache_shapes(spec) == shapes
    planes = any_views(numbered(shapes), spec)
    for v, (view, row) in enumerate(zip(planes, (k_row, v_row), strict=True)):
        assert view.numel() == N * B * H * row.dim
        got = [int(unit(view, *at)) for at in everywhere(row)]
        assert got == [OFFSETS[layout](At(*at, v, row, k_row, v_row)) for at in everywhere(row)]


@pytest.mark.parametrize(("layout", "fmt", "v_format"), PAIRS)
def test_addresses_of_allocated_caches(layout, fmt, v_format):
    """The same offsets in bytes, as data_ptr() of what allocate() makes."""
    spec, rows = make(layout, fmt, v_format), (ROWS[fmt], ROWS[v_format])
    cache = kvx.allocate(spec).cache
    tensors = (cache,) if isinstance(cache, Tensor) else cache
    assert sum(t.nbytes for t in tensors) == N * B * H * sum(row.all * row.unit_bytes for row in rows)
    for v, (view, row) in enumerate(zip(kvx.views(cache, spec), rows, strict=True)):
        tensor = tensors[min(v, len(tensors) - 1)]
        assert view.element_size() == row.unit_bytes
        for at in ((0, 0, 0, 0), (1, 2, 1, 3), (2, 3, 0, row.dim // 2), (N - 1, B - 1, H - 1, row.dim - 1)):
            want = OFFSETS[layout](At(*at, v, row, *rows)) * row.unit_bytes
            assert unit(view, *at).data_ptr() - tensor.data_ptr() == want


def test_k_and_v_share_no_byte_and_miss_only_inline_scales():
    for layout, fmt, v_format in PAIRS:
        spec, rows = make(layout, fmt, v_format), (ROWS[fmt], ROWS[v_format])
        tensors = [torch.zeros(shape, dtype=torch.int32) for shape in cache_shapes(spec)]
        for view in any_views(tensors, spec):
            view.add_(1)
        touched = torch.cat([t.flatten() for t in tensors])
        assert touched.max() == 1, f"{layout} {fmt}: K and V overlap"
        assert int((touched == 0).sum()) == N * B * H * sum(row.all - row.dim for row in rows)


@pytest.mark.parametrize("layout", ["fused_NHD", "fused_HND"])
@pytest.mark.parametrize(
    ("fmt", "head_dim", "v_head_dim", "k_row", "v_row"),
    [
        ("bf16", 24, 16, Row(24, 24, 2), Row(16, 16, 2)),
        ("f32", 5, 7, Row(5, 5, 4), Row(7, 7, 4)),
        ("int8_per_token_head_inline", 8, 32, Row(8, 12, 1), Row(32, 36, 1)),
        ("nvfp4", 48, 16, Row(24, 24, 1, 2), Row(8, 8, 1, 2)),
    ],
)
def test_fused_with_uneven_head_dims(layout, fmt, head_dim, v_head_dim, k_row, v_row):
    spec = kvx.CacheSpec(N, B, H, head_dim, layout=cases.LAYOUTS[layout], format=fmt, v_head_dim=v_head_dim)
    (shape,) = cache_shapes(spec)
    assert shape == shapes_by_hand(layout, k_row, v_row)[0]
    planes = any_views(numbered((shape,)), spec)
    for v, (view, row) in enumerate(zip(planes, (k_row, v_row), strict=True)):
        assert view.shape == (N, B, H, row.dim)
        for at in everywhere(row):
            assert int(unit(view, *at)) == OFFSETS[layout](At(*at, v, row, k_row, v_row))


@pytest.mark.parametrize(
    ("text", "shape", "k_offset", "v_offset"),
    [
        # Where (block 2, token 3, head 1, dim 5) lies, worked out on paper: N 3, B 4, H 2, D 32.
        ("(kv head) block token dim", (4, 3, 4, 32), ((1 * 3 + 2) * 4 + 3) * 32 + 5, ((3 * 3 + 2) * 4 + 3) * 32 + 5),
        ("(head kv) block token dim", (4, 3, 4, 32), ((2 * 3 + 2) * 4 + 3) * 32 + 5, ((3 * 3 + 2) * 4 + 3) * 32 + 5),
        ("block token (head kv dim)", (3, 4, 128), (2 * 4 + 3) * 128 + 64 + 5, (2 * 4 + 3) * 128 + 96 + 5),
        ("block token (kv head dim)", (3, 4, 128), (2 * 4 + 3) * 128 + 32 + 5, (2 * 4 + 3) * 128 + 96 + 5),
        ("(block kv token) head dim", (24, 2, 32), ((2 * 8 + 3) * 2 + 1) * 32 + 5, ((2 * 8 + 7) * 2 + 1) * 32 + 5),
        ("kv | block (token head dim)", (3, 256), 2 * 256 + 3 * 64 + 32 + 5, 2 * 256 + 3 * 64 + 32 + 5),
    ],
)
def test_fusions_on_paper(text, shape, k_offset, v_offset):
    spec = kvx.CacheSpec(N, B, H, 32, layout=text)
    shapes = cache_shapes(spec)
    assert shapes[0] == shape
    k, v = any_views(numbered(shapes), spec)
    assert (int(k[2, 3, 1, 5]), int(v[2, 3, 1, 5])) == (k_offset, v_offset)


def test_fused_heads_with_uneven_dims_alternate():
    spec = kvx.CacheSpec(N, B, H, 8, v_head_dim=4, layout="block token (head kv dim)")
    assert cache_shapes(spec) == ((3, 4, 24),)
    k, v = any_views(numbered(((3, 4, 24),)), spec)
    assert k[0, 0].tolist() == [list(range(8)), list(range(12, 20))]
    assert v[0, 0].tolist() == [list(range(8, 12)), list(range(20, 24))]


@st.composite
def any_layout(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """(text, its axes outermost first): any order, neighbours fused at random, dim split or whole."""
    split = draw(st.booleans())
    axes = ["block", "token", "head", *(["dim/4", "dim%4"] if split else ["dim"])]
    axes = list(draw(st.permutations([*axes, "kv"] if draw(st.booleans()) else axes)))
    if split and axes.index("dim%4") < axes.index("dim/4"):
        i, j = axes.index("dim%4"), axes.index("dim/4")
        axes[i], axes[j] = axes[j], axes[i]
    dims: list[list[str]] = []
    for axis in axes:
        may_fuse = dims and not dims[-1][-1].startswith("dim") and not (split and axis.startswith("dim"))
        if may_fuse and draw(st.booleans()):
            dims[-1].append(axis)
        else:
            dims.append([axis])
    text = " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] for dim in dims)
    return ("" if "kv" in axes else "kv | ") + text, tuple(axes)


@given(any_layout())
def test_any_layout_is_row_major_over_its_axes(case):
    """Fusing moves nothing: the offset is a number whose digits are the axes, outermost first."""
    text, axes = case
    spec = kvx.CacheSpec(N, B, H, 8, layout=text, format="f32")
    planes = any_views(numbered(cache_shapes(spec)), spec)
    size = {"block": N, "token": B, "head": H, "dim": 8, "dim/4": 2, "dim%4": 4, "kv": 2}
    for v, view in enumerate(planes):
        for b, t, h, d in product(range(N), range(B), range(H), range(8)):
            digit = {"block": b, "token": t, "head": h, "dim": d, "dim/4": d // 4, "dim%4": d % 4, "kv": v}
            want = 0
            for axis in axes:
                want = want * size[axis] + digit[axis]
            assert int(unit(view, b, t, h, d)) == want


def test_one_layer_cut_out_of_a_pool_of_all_layers():
    """vLLM's cross-layer pool: the block stride of a layer's view spans the other layers."""
    spec = kvx.CacheSpec(N, B, H, 8, v_head_dim=4, layout="block layer head token (kv dim)", format="f32")
    pool = torch.arange(N * 5 * H * B * 12).view(N, 5, H, B, 12)
    k, v = any_views(pool[:, 3], spec)
    for b, t, h in product(range(N), range(B), range(H)):
        start = (((b * 5 + 3) * H + h) * B + t) * 12
        assert k[b, t, h].tolist() == list(range(start, start + 8))
        assert v[b, t, h].tolist() == list(range(start + 8, start + 12))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_strides_and_storage_offset_are_honoured(layout):
    """A cache whose dimensions are stored in reverse, behind 7 units of something else."""
    spec = make(layout, "bf16")
    shapes = cache_shapes(spec)
    plain = numbered(shapes)
    moved = []
    for x in plain:
        flat = torch.full((7 + x.numel(),), -1)
        back = flat[7:].view(x.shape[::-1]).permute(*reversed(range(x.dim())))
        moved.append(back.copy_(x))
    assert all(m.storage_offset() == 7 for m in moved)
    for got, want in zip(any_views(moved, spec), any_views(plain, spec), strict=True):
        assert torch.equal(got, want)


def test_views_write_through():
    spec = make("fused_HND", "f32")
    cache = kvx.allocate(spec).cache
    k, v = kvx.views(cache, spec)
    k.fill_(1)
    v.fill_(2)
    assert cache[..., :32].eq(1).all()
    assert cache[..., 32:].eq(2).all()


def test_maps_name_their_axes():
    whole, split = plane_maps(make("HND", "nvfp4"))[0], plane_maps(make("packed8", "nvfp4"))[1]
    assert (whole.buffer, whole.axes) == (0, ("block", "token", "head", "dim"))
    assert (whole.sizes, whole.units) == ((N, B, H, 32), (N, B, H, 16))
    assert (split.buffer, split.axes) == (1, ("block", "head", "dim/", "token", "dim%"))
    assert (split.sizes, split.units) == ((N, H, 4, B, 8), (N, H, 4, B, 4))


@pytest.mark.parametrize(("layout", "index"), [("NHD", 0), ("HND", 1), ("packed8", 0), ("flat", 1), ("old_vllm", 1)])
def test_a_wrong_shape_is_refused(layout, index):
    spec = make(layout, "bf16")
    tensors = list(numbered(cache_shapes(spec)))
    want = list(tensors[index].shape)
    tensors[index] = tensors[index][:-1]
    got = list(tensors[index].shape)
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.views([t.to(torch.bfloat16) for t in tensors], spec)
    assert str(refused.value) == f"cache is {got}; the spec makes it {want}."


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((N, B, H, 32), "[3, 4, 2, 32]"),  # K only
        ((N, H, B, 64), "[3, 2, 4, 64]"),  # HND, as many bytes
        ((N * B, H, 64), "[12, 2, 64]"),  # flat, the same bytes
        ((), "[]"),
    ],
)
def test_a_fused_cache_of_another_shape_is_refused(shape, said):
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.views(torch.zeros(shape, dtype=torch.bfloat16), make("fused_NHD", "bf16"))
    assert str(refused.value) == f"cache is {said}; the spec makes it [3, 4, 2, 64]."


def test_the_number_of_tensors_is_checked():
    one = torch.zeros(N, B, H, 64)
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.views(one, make("NHD", "bf16"))
    assert str(refused.value) == ("cache has 1 tensors; layout 'kv | block token head dim' has 2. Pass (k_cache, v_cache).")
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.views((one, one), make("fused_NHD", "bf16"))
    assert str(refused.value) == (
        "cache has 2 tensors; layout 'block token head (kv dim)' has 1. Pass one tensor that holds K and V."
    )
    with pytest.raises(kvx.BadArgument, match="cache has 0 tensors"):
        kvx.views((), make("NHD", "bf16"))


def test_one_tensor_may_stand_in_a_list():
    spec, one = make("fused_NHD", "bf16"), torch.zeros(N, B, H, 64)
    assert cache_tensors([one], spec) == cache_tensors(one, spec) == (one,)


@pytest.mark.parametrize(
    ("fmt", "dtype", "scale", "one"),
    [
        ("bf16", torch.bfloat16, None, None),
        ("fp8_e4m3", torch.float8_e4m3fn, torch.float32, 1.0),
        ("fp8_e5m2_per_head", torch.float8_e5m2, torch.float32, 1.0),
        ("int8_per_token_head", torch.int8, torch.float32, 1.0),
        ("int8_per_token_head_f16", torch.int8, torch.float16, 1.0),
        ("int8_per_token_head_inline", torch.uint8, None, None),
        ("nvfp4", torch.uint8, torch.uint8, 0x38),
        ("mxfp8", torch.float8_e4m3fn, torch.uint8, 127),
    ],
)
def test_allocate(fmt, dtype, scale, one):
    spec = make("NHD", fmt)
    storage = kvx.allocate(spec)
    for tensor, shape in zip(storage.cache, cache_shapes(spec), strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
        assert not tensor.view(torch.uint8).any()
    for tensor in (storage.k_scale, storage.v_scale):
        assert (None if tensor is None else tensor.dtype) == scale
        assert tensor is None or (tuple(tensor.shape) == spec.scale_shape(0) and bool(tensor.eq(one).all()))
    assert storage.scales() == {"k_scale": storage.k_scale, "v_scale": storage.v_scale}


@pytest.mark.parametrize("v_format", ["nvfp4", "fp8_e5m2", "int8_per_token_head_inline"])
def test_one_tensor_of_two_types_is_bytes(v_format):
    assert kvx.allocate(make("fused_NHD", "fp8_e4m3", v_format)).cache.dtype == torch.uint8


def test_strides_come_from_place(monkeypatch):
    """One derivation: what kvx/layout/place.py says of an axis is what a view of a dense tensor has, and there is no second one."""
    texts = (
        "kv | block token head dim",
        "block head token (kv dim)",
        "kv | block head dim/x token dim%x",
        "block (token kv head) dim",
    )
    for text, fmt in product(texts, ("bf16", "int8_per_token_head", "nvfp4")):
        spec = kvx.CacheSpec(3, 8, 2, 64, layout=text, format=fmt)
        for view, m, place in zip(any_views(numbered(cache_shapes(spec)), spec), plane_maps(spec), places(spec), strict=True):
            digits = [d for name in m.axes for d in place.of(name.rstrip("/%")) if (d.divisor > 1) == name.endswith("/")]
            assert [s * spec.plane(0).unit_bytes for s in view.stride()] == [d.stride for d in digits], (text, fmt)
            assert view.storage_offset() * spec.plane(0).unit_bytes == place.offset
    asked = []
    monkeypatch.setattr(planes, "axis_spans", lambda spec, i: asked.append(i) or axis_spans(spec, i))
    plane_maps.__wrapped__(spec)
    assert asked == [0, 1]
