"""append_batched: many contiguous caches behind tables of addresses, the same bytes as a write into each."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases, compare
from tests.ops import rope

HEADS, CAPACITY, DIM = 2, 11, 64
SLOTS = [0, 10, 11 + 4, -1, 22 + 7, 33 + 10, 33, -9]  # cache * CAPACITY + position


def caches(n: int, device: str, dtype: torch.dtype, dim: int = DIM) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows wider than they need be: strides have to be honoured."""
    made = []
    for _ in range(n):
        wide = [torch.empty(HEADS, CAPACITY + 3, dim + 16, dtype=dtype, device=device) for _ in "kv"]
        for w in wide:
            cases.poison(w)
        made.append((wide[0][:, :CAPACITY, :dim], wide[1][:, :CAPACITY, :dim]))
    return made


def rows(n: int, dtype: torch.dtype, g: torch.Generator, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, HEADS, dim, generator=g).to(dtype), torch.randn(n, HEADS, dim, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 24])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_each_token_goes_to_its_cache(backend, dtype, dim, index, generator):
    k, v = (x.to(backend.device) for x in rows(len(SLOTS), dtype, generator, dim))
    each = caches(4, backend.device, dtype, dim)
    pointers = kvx.cache_pointers(each)
    slots = torch.tensor(SLOTS, dtype=index, device=backend.device)
    kvx.append_batched(pointers, k, v, slot_mapping=slots, backend=backend.name)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            compare.bitwise(each[slot // CAPACITY][0][:, slot % CAPACITY], k[token])
            compare.bitwise(each[slot // CAPACITY][1][:, slot % CAPACITY], v[token])
    good = sum(slot >= 0 for slot in SLOTS)
    assert sum(int((~c[0].isnan()).any(-1).sum()) for c in each) == good * HEADS, "other rows were touched"


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8_per_token_head", "fp8_e4m3_per_head"])
def test_quantised(native_backend, fmt, generator):
    k, v = rows(len(SLOTS), torch.bfloat16, generator)
    spec = kvx.CacheSpec(4, CAPACITY, HEADS, DIM, layout=kvx.HND, format=fmt)
    storage = kvx.allocate(spec)
    if storage.k_scale is not None and storage.k_scale.dim() < 2:
        storage.k_scale.fill_(0.03), storage.v_scale.fill_(0.05)
    results = []
    for name, device in (("torch", "cpu"), (native_backend.name, native_backend.device)):
        each = [tuple(x.to(device).clone() for x in (a, b)) for a, b in zip(*storage.cache, strict=True)]
        scales = {
            n: None if s is None else s.to(device).clone() for n, s in (("k_scale", storage.k_scale), ("v_scale", storage.v_scale))
        }
        slots = torch.tensor(SLOTS, device=device)
        pointers = kvx.cache_pointers(each, format=fmt)
        kvx.append_batched(pointers, k.to(device), v.to(device), slot_mapping=slots, backend=name, **scales)
        results.append([x.cpu() for pair in each for x in pair] + [s.cpu() for s in scales.values() if s is not None])
    for got, want in zip(results[1], results[0], strict=True):
        compare.bitwise(got, want)


def test_with_norm_and_rope(native_backend, generator):
    args = rope.Rope().make(len(SLOTS), DIM, torch.bfloat16, generator)
    q = torch.randn(len(SLOTS), 4, DIM, generator=generator).bfloat16()
    k, v = rows(len(SLOTS), torch.bfloat16, generator)
    results = []
    for name, device in (("torch", "cpu"), (native_backend.name, native_backend.device)):
        each = caches(4, device, torch.bfloat16)
        pointers = kvx.cache_pointers(each)
        given = rope.to(device, args | {"slot_mapping": torch.tensor(SLOTS)})
        qkv = rope.fuse(q, k, v).to(device)
        q_out = kvx.qkv_norm_rope_append(None, pointers, qkv, spec=pointers.spec, backend=name, **given)
        results.append([q_out.cpu(), *(x.cpu() for pair in each for x in pair)])
    for got, want in zip(results[1], results[0], strict=True):
        compare.bitwise(got, want)


def test_tables_can_be_refilled(backend, generator):
    """The launch reads addresses from the table: a captured graph reaches whatever caches it then names."""
    k, v = (x.to(backend.device) for x in rows(2, torch.float32, generator))
    if backend.name == "torch":
        pytest.skip("the definition writes the tensors it was made with")
    first, second = caches(2, backend.device, torch.float32), caches(2, backend.device, torch.float32)
    pointers, others = kvx.cache_pointers(first), kvx.cache_pointers(second)
    pointers.k.copy_(others.k), pointers.v.copy_(others.v)
    kvx.append_batched(pointers, k, v, slot_mapping=torch.tensor([3, CAPACITY + 5], device=backend.device), backend=backend.name)
    compare.bitwise(second[0][0][:, 3], k[0])
    compare.bitwise(second[1][1][:, 5], v[1])
    assert all(x.isnan().all() for pair in first for x in pair)


def test_wrong_inputs_are_refused_by_name(backend, generator):
    k, v = (x.to(backend.device) for x in rows(2, torch.float32, generator))
    each = caches(2, backend.device, torch.float32)
    pointers, slots = kvx.cache_pointers(each), torch.tensor([0, 1], device=backend.device)
    with pytest.raises(kvx.BadArgument, match="V of cache 1"):
        kvx.cache_pointers([each[0], (each[1][0], each[1][1][:, 1:])])
    with pytest.raises(kvx.BadArgument, match="empty"):
        kvx.cache_pointers([])
    with pytest.raises(kvx.BadArgument, match="16 bytes"):
        kvx.cache_pointers([(each[0][0][:, :, 1:17], each[0][1])])
    with pytest.raises(kvx.BadArgument, match=r"k is|k ends|k has"):
        kvx.append_batched(pointers, k[:, :1], v, slot_mapping=slots, backend=backend.name)
    if backend.device == "cpu":
        with pytest.raises(kvx.OutOfRange, match=r"append_batched\(\): slot_mapping\[1\] is 22; the cache has 22 slots"):
            kvx.append_batched(pointers, k, v, slot_mapping=torch.tensor([0, 22]), backend=backend.name)
