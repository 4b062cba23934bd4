"""describe: shapes give sizes, strides give the order of bytes; what they cannot tell is asked for by name."""

from __future__ import annotations

import pytest
import torch

import kvx


def test_strides_tell_what_a_shape_hides():
    """vLLM registers [block, head, token, (kv dim)] views for NHD and HND memory alike."""
    hnd = [torch.zeros(5, 2, 16, 128, dtype=torch.bfloat16) for _ in range(3)]
    nhd = [torch.zeros(5, 16, 2, 128, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    assert nhd[0].shape == hnd[0].shape
    a, b = (kvx.describe(t, "layer | block head token (kv dim)") for t in (hnd, nhd))
    assert a.layout == "layer | block head token (kv dim)"
    assert b.layout == "layer | block token head (kv dim)"
    assert (a.num_layers, a.num_blocks, a.block_size, a.num_kv_heads, a.head_dim, a.format) == (3, 5, 16, 2, 64, "bf16")
    assert kvx.plan(b, a).unit_bytes == 3 * 16 * 2 * 128 * 2


def test_described_caches_convert():
    nhd = [torch.randn(5, 16, 2, 32).to(torch.float16) for _ in range(2)]
    src = kvx.describe([t.transpose(1, 2) for t in nhd], "layer | block head token (kv dim)")
    dst = kvx.engine("tensorrt_llm").spec(num_layers=2, num_blocks=5, block_size=16, num_kv_heads=2, head_dim=16, format="f16")
    out = kvx.allocate_buffers(dst)
    kvx.convert([t.transpose(1, 2) for t in nhd], out, plan=kvx.plan(src, dst))  # the views themselves: their bytes count
    pool = out[0].view(torch.float16).view(5, 2, 2, 2, 16, 16)  # block layer kv head token dim
    want = torch.stack([t.view(5, 16, 2, 2, 16).permute(0, 3, 2, 1, 4) for t in nhd], dim=1)
    assert torch.equal(pool, want)


@pytest.mark.parametrize(
    ("shape", "layout", "sizes", "field", "value"),
    [
        ((80, 4, 32), "kv layer | (block token) head dim", {"block_size": 16}, "num_blocks", 5),
        ((80, 4, 32), "kv layer | (block token) head dim", {"num_blocks": 5}, "block_size", 16),
        ((5, 16, 4, 40), "layer | block token head (kv dim)", {"head_dim": 32, "v_head_dim": 8}, "v_head_dim", 8),
        ((5, 4, 4, 16, 8), "kv | block head dim/8 token dim%8", {}, "head_dim", 32),
        ((5, 16, 1, 576), "layer | block token head dim", {}, "head_dim", 576),
    ],
)
def test_sizes(shape, layout, sizes, field, value):
    count = 2 if "kv " in layout.split("|")[0] else 1
    spec = kvx.describe([torch.zeros(shape, dtype=torch.float16) for _ in range(count)], layout, **sizes)
    assert getattr(spec, field) == value


@pytest.mark.parametrize(
    ("tensors", "layout", "sizes", "error", "said"),
    [
        (
            [torch.zeros(80, 4, 32)] * 2,
            "kv layer | (block token) head dim",
            {},
            kvx.BadArgument,
            "block from token; give num_blocks=",
        ),
        ([torch.zeros(5, 16, 4)], "layer | block token head dim", {}, kvx.BadArgument, "names 4 dimensions: block token head dim"),
        ([torch.zeros(5, 16, 4, 8)] * 3, "layer kv | block token head dim", {}, kvx.BadArgument, "3 tensors"),
        (
            [torch.zeros(5, 16, 4, 8)[:, ::2]],
            "layer | block token head dim",
            {},
            kvx.Unsupported,
            "stride 64, and 32 would be dense",
        ),
        ([torch.zeros(5, 16, 4, 8, dtype=torch.uint8)], "layer | block token head dim", {}, kvx.BadArgument, "give format="),
        (
            [torch.zeros(5, 16, 4, 8)],
            "layer | block token head dim",
            {"head_dim": 9},
            kvx.BadArgument,
            "makes head_dim 8, but it was given .* as 9",
        ),
        ([torch.zeros(5, 2, 4, 8), torch.zeros(5, 3, 4, 8)], "layer | block token head dim", {}, kvx.BadArgument, "tensor 1 is"),
        ([], "layer | block token head dim", {}, kvx.BadArgument, "empty"),
    ],
)
def test_refused(tensors, layout, sizes, error, said):
    with pytest.raises(error, match=said):
        kvx.describe(tensors, layout, **sizes)
