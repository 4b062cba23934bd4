"""Scales that nobody set: the first write through one says so, and names the way to set it."""

from __future__ import annotations

import warnings

import pytest
import torch

import kvx

SLOTS = torch.arange(8)


def written(format: str, *, has_scales: bool = True, prepare=lambda storage, k: None, backend: str = "auto") -> list[str]:
    """What is said of writing 0.3 randn, twice."""
    spec = kvx.CacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=32, format=format)
    storage, k = kvx.allocate(spec), 0.3 * torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(0))
    prepare(storage, k)
    scales = storage.scales() if has_scales else {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            kvx.write(storage.cache, k, k, slot_mapping=SLOTS, spec=spec, backend=backend, **scales)
    assert all(w.category is kvx.KvxWarning for w in said)
    assert all(w.filename == __file__ for w in said)
    return [str(w.message) for w in said]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "int8_per_head", "fp8_e4m3_per_block_head"])
def test_allocates_scales_of_one_are_said_once(format, backend):
    (words,) = written(format, backend=backend)
    assert f'kvx.scale_from_amax(kvx.amax(k), "{format}")' in words
    assert words.startswith("write(): the k_scale")


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
def test_none_at_all(format):
    (words,) = written(format, has_scales=False)
    assert ("448" if "fp8" in format else "under 0.5 become 0") in words


def set_scales(storage, k):
    for scale in (storage.k_scale, storage.v_scale):
        scale.copy_(kvx.scale_from_amax(kvx.amax(k), "int8"))


def test_scales_that_were_set():
    assert written("int8", prepare=set_scales) == []
    assert written("int8", prepare=lambda s, k: [x.fill_(1) for x in (s.k_scale, s.v_scale)]) == []


@pytest.mark.parametrize("format", ["bf16", "f32", "int8_per_token_head", "fp8_e4m3_per_token_head_inline", "mxfp8", "fp8_e5m2"])
def test_formats_that_need_none(format):
    assert written(format) == []


def test_an_append_says_it_too():
    spec = kvx.CacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=16, format="int8")
    storage = kvx.allocate(spec)
    with pytest.warns(kvx.KvxWarning, match="the k_scale of format int8 was never set"):
        kvx.qkv_norm_rope_append(None, storage.cache, torch.randn(8, 6 * 16), slot_mapping=SLOTS, spec=spec, **storage.scales())
