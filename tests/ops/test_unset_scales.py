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


def converted(format: str, *, store: bool = False, prepare=lambda buffers: None, src_format: str = "bf16") -> list[str]:
    """What is said of converting into this format: the first time, and once more."""
    src, dst = (kvx.CacheSpec(4, 4, 2, 32, format=f, layout=layout) for f, layout in ((src_format, "NHD"), (format, "HND")))
    buffers = kvx.allocate(dst).tensors() if store else kvx.allocate_buffers(dst)
    given = kvx.allocate_buffers(src)
    for scale in given[2:]:
        scale.fill_(1)
    prepare(buffers)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kvx.convert(given, buffers, plan=kvx.plan(src, dst))
        kvx.bind(kvx.plan(src, dst), given, buffers)
    assert all(w.category is kvx.KvxWarning for w in said)
    assert all(w.filename == __file__ for w in said)
    return [str(w.message) for w in said]


@pytest.mark.parametrize("store", [False, True], ids=["buffers", "store"])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "int8_per_head"])
def test_a_conversion_says_it_too(format, store):
    words = converted(format, store=store)
    assert len(words) == 2  # convert, and bind
    assert words[0].startswith(f"convert(): the k_scale of format {format} was never set: 1 is used.")


@pytest.mark.parametrize("format", ["int8", "int8_per_head"])
def test_a_conversion_into_scales_that_were_set(format):
    assert converted(format, prepare=lambda buffers: [b.fill_(0.01) for b in buffers[2:]]) == []


@pytest.mark.parametrize("format", ["bf16", "int8_per_token_head", "fp8_e4m3_per_block_head", "fp8_e5m2", "mxfp8"])
def test_a_conversion_that_needs_none(format):
    assert converted(format) == []


def test_scales_that_a_conversion_brings_are_set():
    """The same format on both sides: codes and scales are copied, which torch does not see."""
    src, dst = (kvx.CacheSpec(4, 4, 2, 32, format="int8", layout=layout) for layout in ("NHD", "HND"))
    given, store = kvx.allocate_buffers(src), kvx.allocate(dst)
    for scale in given[2:]:
        scale.fill_(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvx.convert(given, store.tensors(), plan=kvx.plan(src, dst))
        assert float(store.k_scale) == float(given[2])
        store.write(torch.ones(8, 2, 32), torch.ones(8, 2, 32), SLOTS)
