"""Padded blocks, as vLLM's hybrid models have them: literal bytes, views with holes, ops, files, and what must be refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.layout.place import buffer_bytes, places
from tests.cli.test_cli import run
from tests.ops import layouts

# Two layers; blocks of 2 tokens x 1 head x (K 2, V 2) bf16 are 16 bytes, padded to 20.
TINY = kvx.CacheSpec(2, 2, 1, 2, num_layers=2, layout="layer | block token head (kv dim)", block_bytes=20)
DENSE = replace(TINY, layout="block layer kv head token dim", block_bytes=0)
# Elements are 16 * layer + 8 * block + 4 * kv + 2 * token + dim, in 16 bits; ee is what pads a block.
GOLDEN = [
    "0000 0100 0400 0500 0200 0300 0600 0700 eeeeeeee 0800 0900 0c00 0d00 0a00 0b00 0e00 0f00 eeeeeeee",
    "1000 1100 1400 1500 1200 1300 1600 1700 eeeeeeee 1800 1900 1c00 1d00 1a00 1b00 1e00 1f00 eeeeeeee",
]


def padded() -> list[torch.Tensor]:
    return [torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in GOLDEN]


def dense() -> list[torch.Tensor]:
    """block layer kv head token dim: [2, 2, 2, 1, 2, 2]"""
    block, layer, kv, token, dim = torch.meshgrid(*[torch.arange(2, dtype=torch.int16)] * 5, indexing="ij")
    return [(16 * layer + 8 * block + 4 * kv + 2 * token + dim).contiguous().view(torch.uint8).reshape(-1)]


def test_bytes_are_the_golden_ones_there_and_back(backend):
    out = [t.fill_(0xEE).to(backend.device) for t in kvx.allocate_buffers(TINY)]
    kvx.convert([t.to(backend.device) for t in dense()], out, plan=kvx.plan(DENSE, TINY), backend=backend.name)
    assert [bytes(t.tolist()).hex() for t in out] == [text.replace(" ", "") for text in GOLDEN]
    back = kvx.allocate_buffers(DENSE, backend.device)
    kvx.convert([t.to(backend.device) for t in padded()], back, plan=kvx.plan(TINY, DENSE), backend=backend.name)
    assert torch.equal(back[0].cpu(), dense()[0])
    assert kvx.digest(out, TINY, backend=backend.name) == kvx.digest(back, DENSE, backend=backend.name)


def test_an_engines_views_are_taken_as_they_are(backend):
    """A view of padded blocks ends with its last element: the last block's padding is not in it."""
    pools = [t.to(backend.device) for t in padded()]
    views = [t.view(torch.bfloat16).as_strided((2, 2, 1, 4), (10, 4, 4, 1)) for t in pools]
    assert kvx.describe(views, "layer | block token head (kv dim)") == TINY
    back = kvx.allocate_buffers(DENSE, backend.device)
    kvx.convert(views, back, plan=kvx.plan(TINY, DENSE), backend=backend.name)
    assert torch.equal(back[0].cpu(), dense()[0])
    assert kvx.digest(views, TINY, backend=backend.name) == kvx.digest(back, DENSE, backend=backend.name)
    for t in pools:
        t.fill_(0xEE)
    kvx.convert(back, views, plan=kvx.plan(DENSE, TINY), backend=backend.name)
    assert all(torch.equal(t.cpu(), want) for t, want in zip(pools, padded(), strict=True))
    with pytest.raises(kvx.BadArgument, match=r"its memory has holes\. Where they pad blocks, say so in the spec: block_bytes"):
        kvx.convert(views, back, plan=kvx.plan(replace(TINY, block_bytes=0), DENSE), backend=backend.name)


@pytest.mark.parametrize(
    ("layout", "content", "sizes"),
    [
        ("layer | block token head (kv dim)", 256, (556, 556)),
        ("layer block kv token head dim", 256, (1156,)),
        ("block layer head token (kv dim)", 512, (1112,)),
        ("layer kv | block token head dim", 128, (428, 428, 428, 428)),
        ("layer | block head kv[K: dim token; V: token dim]", 256, (556, 556)),
        ("layer kv[K: | block head dim/4 token dim%4; V: | block head dim token]", 128, (428, 428, 428, 428)),
    ],
)
def test_layouts_that_can_be_padded(backend, layout, content, sizes):
    spec = kvx.CacheSpec(2, 4, 2, 8, num_layers=2, layout=layout, block_bytes=600 if content == 512 else 300)
    assert (spec.content_bytes(), buffer_bytes(spec)) == (content, sizes)
    assert [t.numel() for t in kvx.allocate_buffers(spec)] == [-(-n // spec.block_bytes) * spec.block_bytes for n in sizes]
    assert spec.cache_bytes == sum(t.numel() for t in kvx.allocate_buffers(spec))
    assert all(p.of("block")[0].stride == spec.block_bytes for p in places(spec))
    assert kvx.from_json(kvx.to_json(spec)) == spec
    assert kvx.describe(kvx.layer_views(kvx.allocate_buffers(spec), spec)).block_bytes == spec.block_bytes
    a, other = layouts.random_buffers(spec, 1), kvx.CacheSpec(3, 4, 2, 8, num_layers=2, layout="block layer kv head token dim")
    for src, dst in ((spec, other), (other, spec)):
        a, b = layouts.random_buffers(src, 1), layouts.random_buffers(dst, 2)
        want = layouts.expected([src], [a], [dst], [b], [[1, 0]], [[0, 1]], [8])
        b = [t.to(backend.device) for t in b]
        kvx.convert([t.to(backend.device) for t in a], b, plan=kvx.plan(src, dst, blocks=([1, 0], [0, 1])), backend=backend.name)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(b, want[0], strict=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_bytes": 14}, "block_bytes is 14; a block of this cache has 16. Set 0 where blocks are not padded."),
        ({"block_bytes": 17}, "block_bytes is 17; it must be a multiple of the 2 bytes of bf16."),
        ({"block_bytes": -20}, "block_bytes is -20; it must be 0 or more."),
        ({"block_bytes": 20.0}, "block_bytes is 20.0; it must be an int."),
        ({"block_bytes": 2**60}, "the cache would have 4611686018427387904 bytes; addresses end at 2**60."),
        ({"layout": "layer | kv block token head dim"}, "has no blocks to pad"),
        ({"layout": "layer | (block token) head (kv dim)"}, "has no blocks to pad"),
        ({"layout": "layer block | token head (kv dim)"}, "has no blocks to pad"),
        ({"layout": "head layer block token (kv dim)"}, "has no blocks to pad"),
        (
            {"format": "int8_per_token_head_inline", "head_dim": 4, "block_bytes": 34},
            "block_bytes is 34; it must be a multiple of the 4 bytes of int8_per_token_head_inline.",
        ),
    ],
)
def test_refused(changes, said):
    with pytest.raises(kvx.BadArgument, match=re.escape(said)):
        replace(TINY, **changes)


def test_manifests_without_it_are_as_they_were():
    assert "block_bytes" not in replace(TINY, block_bytes=0).manifest_text
    assert '"block_bytes": 20' in TINY.manifest_text
    assert kvx.spec.digest(TINY) != kvx.spec.digest(replace(TINY, block_bytes=0))


def test_ranks_have_a_padding_of_their_own():
    spec = kvx.CacheSpec(2, 2, 4, 2, layout="block token head (kv dim)", block_bytes=100)
    assert spec.shard(1, 0) == spec
    with pytest.raises(kvx.BadArgument, match="block_bytes is 100 for 4 heads"):
        spec.shard(2, 0)


def test_ops_honour_it(backend):
    spec = kvx.CacheSpec(3, 4, 2, 8, layout="block token head (kv dim)", block_bytes=304)
    dense = replace(spec, block_bytes=0)
    caches = [kvx.allocate(s, backend.device).cache for s in (spec, dense)]
    assert caches[0].stride(0) == 152
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 6, 2, 8, generator=g).to(torch.bfloat16).to(backend.device)
    slots = torch.tensor([0, 5, 11, 3, 7, 8], device=backend.device)
    for cache, s in zip(caches, (spec, dense), strict=True):
        kvx.write(cache, k, v, slot_mapping=slots, spec=s, backend=backend.name)
    assert torch.equal(caches[0], caches[1])
    ids, lens = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([12])
    table = kvx.PackedTable(ids.to(backend.device), lens.to(backend.device))
    got, want = (
        kvx.gather(cache, table, spec=s, max_seq_len=12, backend=backend.name)
        for cache, s in zip(caches, (spec, dense), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_kv_offsets_do_not_know_it():
    spec = kvx.CacheSpec(3, 4, 2, 8, layout="block kv token head dim", block_bytes=304)
    table = kvx.KvOffsetsTable(torch.zeros(1, 1, 2, 1, dtype=torch.int32), torch.tensor([4]))
    with pytest.raises(kvx.Unsupported, match="KV_OFFSETS tables count blocks that are as large as their content"):
        kvx.gather(torch.zeros(912, dtype=torch.uint8), table, spec=spec, max_seq_len=4)


def test_files(tmp_path):
    path, out = tmp_path / "padded.safetensors", tmp_path / "dense.safetensors"
    kvx.save(path, padded(), TINY)
    assert kvx.load(path).spec == TINY
    run("convert", str(path), str(out), "--to", "tensorrt_llm")
    assert kvx.load(out).spec == DENSE
    assert torch.equal(kvx.load(out).buffers[0], dense()[0])
    assert kvx.load(out).content == kvx.load(path).content


def test_describe_tells_padding_from_other_holes():
    cache = torch.zeros(4, 6, 2, 8)
    with pytest.raises(kvx.Unsupported, match="dimension token has stride 32, and 16 would be dense: only blocks may be padded"):
        kvx.describe([cache[:, ::2]], "layer | block token head dim")
    assert kvx.describe([cache[:, :5]], "layer | block token head dim").block_bytes == 384
    assert kvx.describe([cache[:, :5]], "layer | block token head dim").content_bytes() == 320
    two = torch.zeros(2, 4, 6, 2, 8)[:, :, :5]
    assert kvx.describe([two], "layer block token head dim").block_bytes == 384
    with pytest.raises(kvx.Unsupported, match="dimension block"):
        kvx.describe([torch.zeros(2, 4, 6, 2, 8)[:, :, :5]], "kv block token head dim", num_layers=1)
