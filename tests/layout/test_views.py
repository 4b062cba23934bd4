"""layer_views: what is written through a view lands at the byte the place says, in every layout; describe reads it back."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

import kvx
from kvx.layout import ENGINES, Layout
from kvx.layout.place import buffer_bytes, num_cache_buffers, places
from tests.ops.layouts import random_layout

SIZES = {"num_layers": 2, "num_blocks": 2, "block_size": 32, "num_kv_heads": 2, "head_dim": 32}


def spec_of(name: str, **changes: object) -> kvx.CacheSpec:
    row = ENGINES[name]
    return row.spec(**{**SIZES, "num_kv_heads": row.num_kv_heads or 2, **changes})  # type: ignore[arg-type]


def where(spec: kvx.CacheSpec) -> list[object]:
    """Places without the axes of one element, which have no stride to be seen by."""
    return [(sorted(d for d in p.digits if d.size > 1), p.buffer, p.offset, p.unit_bytes) for p in places(spec)]


def bare(layout: str) -> str:
    return layout.replace("(", "").replace(")", "")


def coordinates(spec: kvx.CacheSpec, plane: int, rng: random.Random) -> list[dict[str, int]]:
    """The corners of every axis, and some inside."""
    sizes = {
        "block": spec.num_blocks,
        "token": spec.block_size,
        "head": spec.num_kv_heads,
        "dim": spec.plane(plane).row_units,
    }
    corners = [dict(zip(sizes, index, strict=True)) for index in product(*((0, n - 1) for n in sizes.values()))]
    return corners + [{axis: rng.randrange(n) for axis, n in sizes.items()} for _ in range(12)]


def pick(view: kvx.PlaneView, at: dict[str, int]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The tensor and index of one element, by the names of the axes alone."""
    tensor = view.tensor[at["block"]] if isinstance(view.tensor, list) else view.tensor
    sizes = dict(zip(view.axes, tensor.shape, strict=True))
    index = []
    for axis in view.axes:
        name, inner = axis.split("/")[0].split("%")[0], axis.replace("/", "%")
        i = at[name]
        index.append(i // sizes[inner] if "/" in axis else i % sizes[axis] if "%" in axis else i)
    return tensor, tuple(index)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head_inline"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_write_through_a_view_lands_where_the_place_says(name, fmt):
    layout = Layout.parse(ENGINES[name].layout)
    if "inline" in fmt and ("%" in layout.text or any(p.order[-1].name != "dim" for p in layout.planes.values())):
        pytest.skip("inline scales stand behind whole rows")
    spec, rng = spec_of(name, format=fmt), random.Random(0)
    buffers = kvx.allocate_buffers(spec)
    views = kvx.layer_views(buffers, spec)
    caches = buffers[: num_cache_buffers(spec)]
    assert [[v.plane for v in layer] for layer in views] == [["k", "v"][: spec.num_planes]] * 2
    for layer, plane in product(range(2), range(spec.num_planes)):
        view, place = views[layer][plane], places(spec)[plane]
        for at in coordinates(spec, plane, rng):
            tensor, index = pick(view, at)
            tensor[index] = 1
            buffer, byte = place.locate(layer=layer, **at)
            hit = [(n, i) for n, b in enumerate(caches) for i in b.nonzero()[:, 0].tolist()]
            assert hit, "written to a copy"
            assert all(n == buffer and byte <= i < byte + place.unit_bytes for n, i in hit)
            tensor[index] = 0


@pytest.mark.parametrize("name", ENGINES)
def test_views_of_engines_name_the_layout_again(name):
    spec = spec_of(name)
    found = kvx.describe(kvx.layer_views(kvx.allocate_buffers(spec), spec))
    assert where(found) == where(spec)
    assert buffer_bytes(found) == buffer_bytes(spec)
    if spec.num_kv_heads > 1:  # a single head has no stride to be seen by
        assert bare(found.layout) == bare(spec.layout)
        assert replace(found, layout=spec.layout) == spec


@pytest.mark.parametrize("seed", range(40))
def test_views_of_random_layouts_name_them_again(seed):
    spec = kvx.CacheSpec(3, 8, 4, 8, num_layers=2, layer_start=5, layout=random_layout(random.Random(seed)), format="f32")
    found = kvx.describe(kvx.layer_views(kvx.allocate_buffers(spec), spec))
    assert (where(found), buffer_bytes(found), found.layer_start) == (where(spec), buffer_bytes(spec), 5)


@pytest.mark.parametrize("fmt", ["int4_per_token_head_inline", "nvfp4", "fp8_e4m3_per_token_head"])
def test_formats_that_are_not_whole_elements(fmt):
    spec = spec_of("vllm.0.26.hnd", format=fmt)
    views = kvx.layer_views(kvx.allocate_buffers(spec), spec)  # scales that stand apart are left out
    assert views[0][0].first.shape == (2, 32, 2, spec.plane(0).row_units)
    assert kvx.describe(views, format=fmt) == spec


def test_rows_of_two_lengths():
    spec = spec_of("vllm.0.26.nhd", v_head_dim=8)
    assert kvx.describe(kvx.layer_views(kvx.allocate_buffers(spec), spec)) == spec


def test_blocks_of_their_own_are_a_list():
    spec = spec_of("dynamo.block_stack.nhd")
    buffers = kvx.allocate_buffers(spec)
    view = kvx.layer_views(buffers, spec)[1][0]
    assert (view.layer, view.plane, view.axes, view.buffer, view.block_step) == (1, "k", ("token", "head", "dim"), 2, 4)
    assert [t.data_ptr() for t in view.tensor] == [buffers[2].data_ptr(), buffers[6].data_ptr()]


def test_a_split_axis_is_its_two_parts():
    spec = spec_of("vllm.cpu.amx")
    (k, v), _ = kvx.layer_views(kvx.allocate_buffers(spec), spec)
    assert k.axes == ("block", "token/16", "token%16", "head", "dim/2", "dim%2")
    assert v.axes == ("block", "token/2", "token%2", "head", "dim/16", "dim%16")
    assert k.first.shape == (2, 2, 16, 2, 16, 2)


def test_an_engines_own_tensors():
    """Permuted, as vLLM registers NHD memory; what a view shows is what the engine's tensor does."""
    spec = kvx.engine("vllm.0.26.nhd").spec(num_layers=2, num_blocks=3, block_size=4, num_kv_heads=2, head_dim=8)
    cache = [torch.randn(3, 4, 2, 16).to(torch.bfloat16) for _ in range(2)]
    views = kvx.layer_views([t.transpose(1, 2) for t in cache], spec)
    for t, (k, v) in zip(cache, views, strict=True):
        assert torch.equal(k.first, t[..., :8])
        assert torch.equal(v.first, t[..., 8:])
    assert kvx.describe(views) == spec


def test_packed_rows_come_out_whole():
    spec = spec_of("tgi.paged")
    k, v = torch.randn(2, 2, 32, 2, 32, dtype=torch.float32).to(torch.bfloat16)  # of one layer: [block, token, head, dim]
    buffers = kvx.allocate_buffers(spec)
    views = kvx.layer_views(buffers, spec)[1]
    for view, x in zip(views, (k, v), strict=True):
        view.first.copy_(x.reshape(view.first.shape))
    plain = replace(spec, layout="layer kv | block token head dim")
    out = kvx.allocate_buffers(plain)
    kvx.convert(buffers, out, plan=kvx.plan(spec, plain))
    assert torch.equal(out[2].view(torch.bfloat16).view(k.shape), k)
    assert torch.equal(out[3].view(torch.bfloat16).view(v.shape), v)


def test_refused():
    spec = spec_of("vllm.0.26.nhd")
    buffers = kvx.allocate_buffers(spec)
    with pytest.raises(kvx.BadArgument, match=r"layer_views\(\): buffers has 1 buffers; the specs make 2"):
        kvx.layer_views(buffers[:1], spec)
    odd = torch.zeros(buffers[0].numel() + 1, dtype=torch.uint8)[1:]
    with pytest.raises(kvx.BadArgument, match=r"buffer 0 is not aligned to the 2 bytes of bf16\. Clone it"):
        kvx.layer_views([odd, buffers[1]], spec)
    views = kvx.layer_views(buffers, spec)
    with pytest.raises(kvx.BadArgument, match="leave it out"):
        kvx.describe(views, "layer | block token head (kv dim)")
    with pytest.raises(kvx.BadArgument, match="layout is missing"):
        kvx.describe(buffers)
    with pytest.raises(kvx.BadArgument, match="give format="):
        kvx.describe(kvx.layer_views(kvx.allocate_buffers(s := replace(spec, format="int4_per_token_head_inline")), s))
    flat = kvx.allocate_buffers(whole := replace(spec, layout="layer block token head (kv dim)", num_layers=3))
    layers = kvx.layer_views(flat, whole)
    with pytest.raises(kvx.Unsupported, match=r"k of layer 2 is .* not where 'layer block token head .*Describe groups"):
        kvx.describe(layers[::2])
