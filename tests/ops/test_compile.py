"""torch.compile(fullgraph=True) across the ops; eager calls do not go through the dispatcher."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases, compare
from tests.ops import attention_cases


def test_write_and_gather_compile_without_graph_breaks(native_backend, generator):
    made = cases.Case(format="bf16").make(native_backend.device, generator)
    want = made.clone()
    want.write(native_backend.name)
    wanted = want.gather(native_backend.name, max_seq_len=12)
    spec, k_cache, v_cache = made.spec, *made.cache

    def step(k, v, slots, table, lens):
        kvx.write((k_cache, v_cache), k * 2, v + 1, slot_mapping=slots, spec=spec)
        out_k, out_v = kvx.gather((k_cache, v_cache), kvx.PackedTable(table, lens), spec=spec, max_seq_len=12)
        return out_k.float() / 2, out_v - 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = compiled(made.k / 2, made.v - 1, made.slots, made.block_table, made.seq_lens)
    compare.bitwise(got[0], wanted[0].float() / 2)
    compare.bitwise(
        got[1],
        (
            ((made.v - 1) + 1).new_zeros(())
            + kvx.gather(made.cache, kvx.PackedTable(made.block_table, made.seq_lens), spec=spec, max_seq_len=12)[1]
        )
        - 1,
    )


def test_quantised_write_compiles(native_backend, generator):
    made = cases.Case(format="int8_per_token_head", io="f32").make(native_backend.device, generator)
    want = made.clone()
    want.write(native_backend.name)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(cache, k, v, slots, k_scale, v_scale):
        kvx.write(cache, k, v, slot_mapping=slots, spec=made.spec, k_scale=k_scale, v_scale=v_scale)
        return k_scale.sum()

    step(made.cache, made.k, made.v, made.slots, made.scales["k_scale"], made.scales["v_scale"])
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor, want.tensors()[name], name)


def test_amax_compiles(native_backend, generator):
    x = cases.values(50, 3, 16, torch.bfloat16, generator, odd=True).to(native_backend.device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return kvx.amax(x * 2, "head") / 2

    compare.bitwise(step(x), kvx.amax(x * 2, "head") / 2)


def test_inductor_runs_it():
    """Once through the real compiler: the op is opaque, what surrounds it is fused."""
    if not torch.cuda.is_available():
        pytest.skip("inductor's first C++ compile takes half a minute; it is exercised where a GPU is")
    spec = kvx.CacheSpec(4, 4, 2, 16, format="f32")
    cache = kvx.allocate(spec, "cuda").cache
    k = torch.randn(3, 2, 16, device="cuda")
    slots = torch.tensor([1, 5, 9], device="cuda")

    @torch.compile(fullgraph=True)
    def step(k):
        kvx.write(cache, k + 1, k - 1, slot_mapping=slots, spec=spec)
        return k * 2

    step(k)
    compare.bitwise(cache[0][1, 1], (k + 1)[1])


def test_eager_calls_do_not_pay(monkeypatch, generator):
    def refuse(*_):
        raise AssertionError("an eager call went through the custom op")

    monkeypatch.setattr(torch.ops.kvx, "write", refuse)
    monkeypatch.setattr(torch.ops.kvx, "gather", refuse)
    made = cases.Case().make("cpu", generator)
    made.write("auto")
    made.gather("auto")


def test_gather_under_compile_needs_a_length(generator):
    made = cases.Case().make("cpu", generator)

    @torch.compile(fullgraph=True, backend="eager")
    def step(table, lens):
        return kvx.gather(made.cache, kvx.PackedTable(table, lens), spec=made.spec)

    with pytest.raises(Exception, match="max_seq_len"):
        step(made.block_table, made.seq_lens)


def test_a_plan_compiles_with_the_attention_it_is_for(native_backend, generator):
    made = attention_cases.Case(lens=(300, 1, 90), format="bf16", io="bf16", dim=128).make(native_backend.device, generator)
    want = made.run(native_backend.name)
    spec, cache = made.cache.spec, made.cache.cache
    size = kvx.attention_workspace_bytes(made.q, cache, made.table, spec=spec)
    workspace = torch.empty(size, dtype=torch.uint8, device=native_backend.device) if size else None

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, ids, lens):
        table = kvx.PackedTable(ids, lens)
        kvx.attention_plan(q, cache, table, workspace=workspace, spec=spec)
        return kvx.attention_decode(q, cache, table, workspace=workspace, planned=workspace is not None, **made.given)

    for got, wanted in zip(step(made.q, made.table.block_table, made.table.seq_lens), want, strict=True):
        compare.bitwise(got, wanted)


def test_a_workspace_is_measured_outside(generator):
    made = attention_cases.Case().make("cpu", generator)

    @torch.compile(fullgraph=True, backend="eager")
    def step(q):
        return q + kvx.attention_workspace_bytes(q, made.cache.cache, made.table, spec=made.cache.spec)

    with pytest.raises(Exception, match=r"outside of torch\.compile"):
        step(made.q)


def test_a_spec_that_nothing_has_looked_at_compiles(generator):
    """Its planes are found when it is made, not while a graph is traced."""
    spec = kvx.CacheSpec(4, 4, 1, 8, v_head_dim=16, format="f32")
    cache = tuple(torch.zeros(4, 4, 1, n) for n in (8, 16))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(qkv, slots):
        return kvx.qkv_norm_rope_append(None, cache, qkv, slot_mapping=slots, spec=spec)

    qkv = torch.randn(2, 8 + 8 + 16, generator=generator)
    assert step(qkv, torch.tensor([3, 9])).shape == (2, 1, 8)
    compare.bitwise(cache[1][2, 1, 0], qkv[1, 16:])


def test_tables_and_slots_are_made_in_the_graph():
    ids, lens = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    positions, seqs = torch.tensor([4, -1, 7]), torch.tensor([0, 1, 1])

    def step(ids, lens, positions, seqs):
        return kvx.slot_mapping(ids, positions, seqs, 4), kvx.cu_seqlens(lens)

    given = (ids, lens, positions, seqs)
    for got, want in zip(torch.compile(step, fullgraph=True, backend="eager")(*given), step(*given), strict=True):
        compare.bitwise(got, want)
