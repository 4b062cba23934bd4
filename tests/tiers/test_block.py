"""Kinds of blocks: another manifest is refused by name, and a cache that went out comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvx
from kvx.tiers import BlockKind, DiskTier, HostTier, block_spec
from tests.tiers.blocks import key

NHD = "layer kv | block token head dim"
SPEC = kvx.CacheSpec(num_blocks=64, block_size=16, num_kv_heads=8, head_dim=16, num_layers=2, model="small", layout=NHD)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": "other"}),
        ("layout", {"layout": "layer kv | block head token dim"}),
        ("format", {"format": "f16"}),
        ("block_size", {"block_size": 32}),
        ("head_start", {"num_kv_heads": 4, "head_start": 4}),
        ("layer_start", {"layer_start": 2}),
    ],
)
def test_another_manifest_is_refused_by_name(field, change):
    mine, theirs = BlockKind.of(SPEC), BlockKind.of(replace(SPEC, **change))
    with pytest.raises(kvx.Incompatible, match=field if field != "head_start" else "num_kv_heads|head_start"):
        mine.require_same(theirs, "put")


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3_per_token_head", "int8_per_head"])
def test_a_cache_goes_out_and_comes_back(tmp_path, format):
    """Converted on the way, scales included: the content digest is the one of the cache as it was."""
    spec = replace(SPEC, num_blocks=6, format=format)
    kept = block_spec(replace(spec, layout="block | layer kv head token dim"))
    kind, cache, back = BlockKind.of(kept), kvx.allocate_buffers(spec), kvx.allocate_buffers(spec)
    generator = torch.Generator().manual_seed(0)
    for t in cache:
        if t.dtype == torch.uint8:
            t.random_(0, 64, generator=generator)
    keys = [key(n) for n in range(6)]
    with HostTier(kind, 1 << 22) as host, DiskTier(tmp_path, kind, 1 << 22) as disk:
        for i, k in enumerate(keys):
            stage = kvx.allocate_buffers(kept)
            kvx.convert(cache, stage, plan=kvx.plan(spec, kept), src_blocks=[i], dst_blocks=[0])
            host.put([k], [kind.block(stage)]).result()
        disk.put(keys, [b for b in host.get(keys).result() if b is not None]).result()
        for i, got in enumerate(disk.get(keys).result()):
            stage = kvx.allocate_buffers(kept)
            for to, t in zip(kind.block(stage).buffers, got.buffers, strict=True):
                to.copy_(t)
            kvx.convert(stage, back, plan=kvx.plan(kept, spec), src_blocks=[0], dst_blocks=[i])
    assert kvx.digest(back, spec) == kvx.digest(cache, spec) != kvx.digest(kvx.allocate_buffers(spec), spec)


def test_blocks_of_other_pool_sizes_and_padding_are_the_same_kind():
    padded = replace(SPEC, num_blocks=7, block_bytes=SPEC.content_bytes() + 64)
    assert BlockKind.of(SPEC) == BlockKind.of(padded)
