"""Whole caches at the gate: views that are the memory of the spec are taken in any shape; all else is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvx
from kvx.layout.engines import ENGINES
from kvx.layout.gate import grids, refusal
from kvx.layout.place import buffer_bytes

SPEC = kvx.CacheSpec(3, 8, 2, 16, num_layers=2, layout="layer | block kv token head dim")
GRID = grids(SPEC)[0][1]
X = torch.arange(3 * 2 * 8 * 2 * 16).to(torch.bfloat16).view(3, 2, 8, 2, 16)
RAW = X.view(torch.uint8)
HND = X.transpose(2, 3).contiguous()


@pytest.mark.parametrize(
    "t",
    [
        X,
        X[None],  # a dimension of 1 says nothing
        X.flatten(),
        X.view(3, 2, 16, 16),  # tokens and heads as one axis
        X.view(6, 8, 32),
        X.permute(1, 0, 2, 3, 4),  # as vLLM has it: [2, num_blocks, ...] over blocks that hold K and V
        RAW,
        RAW.flatten(),
        RAW.view(3, -1),
        RAW.view(2, -1),  # two dimensions of bytes are raw memory
        torch.zeros(RAW.numel() + 100, dtype=torch.uint8),
    ],
    ids=lambda t: f"{list(t.shape)} {t.stride()}",
)
def test_memory_that_is_the_specs(t):
    assert refusal(t, GRID) == ""


@pytest.mark.parametrize(
    ("t", "why"),
    [
        (X.to(torch.float16), "is [3, 2, 8, 2, 16] float16; format bf16 in the spec makes it bfloat16, or raw bytes"),
        (X.to(torch.float32), "float32; format bf16 in the spec makes it bfloat16"),
        (X.view(torch.int16), "int16; format bf16"),
        (HND.transpose(2, 3), "Its strides have them in another order: give its .contiguous(), or the layout its memory has"),
        (HND, "bytes are neither token nor whole axes"),
        (HND.view(torch.uint8), "bytes are neither token nor whole axes"),
        (X[:2], "2048 bytes of memory; the spec makes 3072"),
        (torch.cat([X, X]), "are more than block has"),
        (torch.stack([X, X]), "its 2 of 3072 bytes are no axis of it"),
        (X[..., :8], "bytes of memory; the spec makes"),
        (X[:1].expand(3, -1, -1, -1, -1), "its elements overlap in memory"),
        (torch.zeros(3, 2, 8, 2, 20, dtype=torch.bfloat16)[..., :16], "its memory has holes. Where they pad blocks, say so"),
        (torch.zeros(6, 2, 8, 2, 16, dtype=torch.bfloat16)[::2], "its memory has holes"),
        (X.to("meta"), "is on the meta device and has no memory"),
        (X.float().requires_grad_().to(torch.bfloat16), "requires grad, and no gradient comes back out of a cache"),
        (X[:0], "the spec makes"),
        (X.view(3, 2, 8, 2, 16).to_sparse(), "without strides"),
        (X.view(4, -1, 16), "neither"),
        (X.view(3, 2, 4, 2, 2, 4, 4), "its 4 of 128 bytes are neither token nor whole axes"),  # axes in parts
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_memory_that_is_not(t, why):
    assert why in refusal(t, GRID)
    if not t.is_meta:  # two devices are told before
        with pytest.raises(kvx.BadArgument, match=r"^digest\(\): cache buffer 1 "):
            kvx.digest([X, t], SPEC)


def test_a_permuted_view_with_axes_of_one_size_has_two_readings():
    """8 tokens and 8 heads: an engine's view of HND memory and a transposed NHD tensor look the same, and mean the opposite."""
    spec = replace(SPEC, num_kv_heads=8, block_size=8)
    x = torch.zeros(3, 2, 8, 8, 16, dtype=torch.bfloat16).transpose(2, 3)
    grid = grids(spec)[0][1]
    assert "If its memory is, give its .permute(0, 1, 3, 2, 4); if its shape is, its .contiguous()" in refusal(x, grid)
    assert refusal(x.permute(0, 1, 3, 2, 4), grid) == refusal(x.contiguous(), grid) == ""


def test_two_readings_with_axes_merged():
    """vLLM's HND view of as many heads as tokens, K beside V in one row, and a transposed NHD tensor of the same sizes."""
    spec = replace(SPEC, num_kv_heads=8, block_size=8, layout="layer | block token head (kv dim)")
    x = torch.zeros(3, 8, 8, 32, dtype=torch.bfloat16)
    grid = grids(spec)[0][1]
    assert refusal(x, grid) == refusal(x.view(3, 8, 8, 2, 16), grid) == ""
    assert "give its .permute(0, 2, 1, 3); if its shape is, its .contiguous()" in refusal(x.transpose(1, 2), grid)
    other = torch.zeros(3, 4, 8, 32, dtype=torch.bfloat16).transpose(1, 2)  # 4 heads: the shape alone is the spec's
    assert "Its strides have them in another order" in refusal(other, grids(replace(spec, num_kv_heads=4))[0][1])
    engine = torch.zeros(3, 4, 8, 32, dtype=torch.bfloat16).transpose(1, 2)  # and here the memory alone
    assert refusal(engine, grids(replace(spec, num_kv_heads=4, layout="layer | block head token (kv dim)"))[0][1]) == ""


def test_more_elements_than_32_bits_count():
    spec = kvx.CacheSpec(2**16 + 1, 64, 8, 128, layout="kv | block token head dim")
    grid = grids(spec)[0][1]
    x = torch.empty(2**16 + 1, 64, 8, 128, dtype=torch.bfloat16)  # not touched
    assert x.numel() > 2**32
    assert refusal(x, grid) == refusal(x.flatten(), grid) == ""
    assert "neither" in refusal(x.view(2**16 + 1, 8, 64, 128), grid)


@pytest.mark.parametrize("name", sorted(ENGINES))
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3_per_token_head", "nvfp4", "int8_per_token_head_inline", "f16"])
def test_every_engine_layout_takes_its_own_buffers_and_no_others(name, fmt):
    row = ENGINES[name]
    try:
        spec = row.spec(num_layers=2, num_blocks=3, block_size=32, head_dim=64, format=fmt, num_kv_heads=row.num_kv_heads or 2)
    except kvx.KvxError as error:
        pytest.skip(f"the layout does not take this format: {error}")
    each = [grid for count, grid in grids(spec) for _ in range(count)]
    assert tuple(grid.bytes for grid in each) == buffer_bytes(spec)
    for grid, t in zip(each, kvx.allocate_buffers(spec), strict=True):
        assert refusal(t, grid) == ""
        if grid.dtype is None or grid.dtype is torch.uint8 or t.numel() * t.element_size() != grid.bytes:
            continue
        typed = t.view(torch.uint8).flatten().view(grid.dtype)
        assert refusal(typed.view([s.size for s in grid.steps] or [1]), grid) == ""
        assert "in the spec makes it" in refusal(typed.view(torch.int16 if typed.element_size() > 1 else torch.bool), grid)


def test_convert_and_save_do_not_read_memory_order_where_the_strides_say_otherwise(tmp_path):
    plan = kvx.plan(SPEC, replace(SPEC, layout="layer | block token head (kv dim)"))
    out = kvx.allocate_buffers(plan.dst[0])
    with pytest.raises(kvx.BadArgument, match=r"convert\(\): src buffer 0 .* another order"):
        kvx.convert([HND.transpose(2, 3)] * 2, out, plan=plan)
    with pytest.raises(kvx.BadArgument, match=r"convert\(\): dst buffer 1 .* float32; format bf16"):
        kvx.convert([X, X], [out[0], out[1].to(torch.float32)], plan=plan)
    with pytest.raises(kvx.BadArgument, match=r"save\(\): cache buffer 0 .* float16; format bf16"):
        kvx.save(tmp_path / "c.kvx", [X.half(), X.half()], SPEC)
    assert not list(tmp_path.iterdir())
    permuted = [X.permute(1, 0, 2, 3, 4), X.permute(1, 0, 2, 3, 4)]
    kvx.convert(permuted, out, plan=plan)
    want = kvx.allocate_buffers(plan.dst[0])
    kvx.convert([X, X], want, plan=plan)
    assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))


def test_one_element_and_none():
    spec = kvx.CacheSpec(1, 1, 1, 2, format="fp8_e4m3_per_head", layout="kv | block token head dim")
    cache, scale = grids(spec)[0][1], grids(spec)[1][1]
    assert refusal(torch.ones(1, 1), scale) == refusal(torch.ones(1), scale) == ""
    assert "the spec makes" in refusal(torch.ones(0), scale)
    assert refusal(torch.zeros(1, 1, 1, 2, dtype=torch.float8_e4m3fn), cache) == ""
    assert "int8; format fp8_e4m3_per_head" in refusal(torch.zeros(1, 1, 1, 2, dtype=torch.int8), cache)
