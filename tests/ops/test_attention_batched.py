"""attention_decode_batched: one contiguous cache a sequence behind a table of addresses, as near the answer as attention_decode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvx
from tests import cases, compare
from tests.ops import attention_cases
from tests.ops.attention_cases import Case, Made

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch saying it has no bf16 instructions
PLAIN = Case(block=96, lens=(33, 1, 70, 96), layout="HND")
CASES = [
    PLAIN,
    *(replace(PLAIN, format=f, io=f, dim=d) for f in ("bf16", "f16") for d in (64, 128, 80)),
    replace(PLAIN, lens=(0, 5), format="bf16", io="bf16"),
    replace(PLAIN, lens=(1500, 3, 700), block=1600, format="bf16", io="bf16", dim=128, note="long"),
    replace(PLAIN, queries=3, window=20, sinks=True, format="bf16", io="bf16", dim=128),
    replace(PLAIN, queries=2, soft_cap=5.0, causal=False, format="f16", io="f16", heads=16),
    replace(PLAIN, heads=40, format="bf16", io="bf16", dim=128, note="group20"),
    replace(PLAIN, v_dim=32, window=7),
    *(replace(PLAIN, format=f, io="bf16", dim=128) for f in ("int8_per_token_head", "fp8_e4m3", "fp8_e4m3_per_head")),
]


def split(made: Made, device: str) -> tuple[kvx.CachePointers, Tensor]:
    """The blocks of a case as caches of their own, rows wider than they need be, and which of them each sequence has."""
    each = []
    for pair in zip(*made.cache.cache, strict=True):
        own = []
        for x in pair:
            heads, capacity, dim = x.shape
            wide = torch.empty(heads, capacity + 3, dim + 16, dtype=x.dtype, device=device)
            cases.poison(wide)
            wide[:, :capacity, :dim] = x
            own.append(wide[:, :capacity, :dim])
        each.append(tuple(own))
    return kvx.cache_pointers(each, format=made.case.format), made.table.block_table[:, 0]


def run(made: Made, pointers: kvx.CachePointers, ids: Tensor | None, backend: str, **more: object) -> tuple[Tensor, Tensor]:
    given = {n: x for n, x in made.given.items() if n != "spec"} | {"seq_lens": made.table.seq_lens, **more}
    return kvx.attention_decode_batched(made.q, pointers, cache_ids=ids, backend=backend, **given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_sequence_reads_its_cache(backend, case, generator):
    made = case.make(backend.device, generator)
    pointers, ids = split(made, backend.device)
    made.check(*run(made, pointers, ids, backend.name))
    made.check(*run(made, pointers, ids.long(), backend.name, seq_lens=made.table.seq_lens.long()))


def test_without_ids_sequence_s_has_cache_s(backend, generator):
    made = replace(PLAIN, format="bf16", io="bf16").make(backend.device, generator)
    pointers, ids = split(made, backend.device)
    ordered = kvx.cache_pointers([pointers.caches[int(i)] for i in ids] + [pointers.caches[0]])
    want = run(made, pointers, ids, backend.name)
    for got, expected in zip(run(made, ordered, None, backend.name), want, strict=True):
        compare.bitwise(got, expected)


def test_an_appended_token_is_seen(backend, generator):
    """The pair: what append_batched wrote is what is read."""
    made = replace(PLAIN, lens=(5, 9), format="bf16", io="bf16").make(backend.device, generator)
    pointers, ids = split(made, backend.device)
    k, v = (torch.randn(2, 2, 64, generator=generator).bfloat16().to(backend.device) for _ in "kv")
    slots = ids.long() * 96 + made.table.seq_lens
    kvx.append_batched(pointers, k, v, slot_mapping=slots, backend=backend.name)
    out, _ = run(made, pointers, ids, backend.name, seq_lens=made.table.seq_lens + 1, window=1)
    compare.bitwise(out, v.repeat_interleave(4, 1))


def test_tables_can_be_refilled(backend, generator):
    if backend.name == "torch":
        pytest.skip("the definition reads the tensors it was made with")
    made = replace(PLAIN, format="bf16", io="bf16", dim=128).make(backend.device, generator)
    pointers, ids = split(made, backend.device)
    others, _ = split(made, backend.device)
    for pair in pointers.caches:
        for x in pair:
            x.fill_(math.nan)
    pointers.k.copy_(others.k), pointers.v.copy_(others.v)
    made.check(*run(made, pointers, ids, backend.name))


@pytest.mark.parametrize("dim", [80, 128])  # of the general and of the fast kernel
@pytest.mark.parametrize("what", ["no_k", "no_v", "id", "negative_id"])
def test_a_cache_that_is_not_there(backend, dim, what, generator):
    made = replace(PLAIN, format="bf16", io="bf16", dim=dim).make(backend.device, generator)
    pointers, ids = split(made, backend.device)
    ids = ids.clone()
    if what == "no_k":
        pointers.k[int(ids[2])] = 0
    elif what == "no_v":
        pointers.v[int(ids[2])] = 0
    else:
        ids[2] = -1 if what == "negative_id" else len(pointers.caches)
    if backend.device == "cpu":
        with pytest.raises(kvx.OutOfRange, match=r"attention_decode_batched\(\): .*sequence 2"):
            run(made, pointers, ids, backend.name)
        return
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    out, lse = run(made, pointers, ids, backend.name, errors=errors)
    assert int(errors) > 0
    assert (out[2] == 0).all()
    assert (lse[2] == -math.inf).all()
    want, want_lse, _ = made.answer()
    keep = [0, 1, 3]
    attention_cases.close("out", out[keep].cpu(), want[keep], 1e-2)
    attention_cases.close("lse", lse[keep].cpu(), want_lse[keep], 1e-2)


def test_impossible_lengths(backend, generator):
    made = replace(PLAIN, format="bf16", io="bf16").make(backend.device, generator)
    pointers, ids = split(made, backend.device)
    for n in (97, -1, 2**20):
        lens = made.table.seq_lens.clone()
        lens[1] = n
        if backend.device == "cpu":
            with pytest.raises(kvx.OutOfRange, match="sequence 1"):
                run(made, pointers, ids, backend.name, seq_lens=lens)
        else:  # unspecified, and nothing outside the caches is read
            run(made, pointers, ids, backend.name, seq_lens=lens)
            torch.cuda.synchronize()


def test_workspace_and_plan(native_backend, generator):
    made = replace(PLAIN, lens=(300, 1, 90), block=300, format="bf16", io="bf16", dim=128).make(native_backend.device, generator)
    pointers, ids = split(made, native_backend.device)
    want = run(made, pointers, ids, native_backend.name)
    table = kvx.cache_table(pointers, made.table.seq_lens, cache_ids=ids)
    size = kvx.attention_workspace_bytes(made.q, pointers, table, spec=pointers.spec)
    assert (size > 0) == (native_backend.device == "cuda")
    workspace = torch.empty(size, dtype=torch.uint8, device=native_backend.device) if size else None
    kvx.attention_plan(made.q, pointers, table, workspace=workspace, spec=pointers.spec)
    got = run(made, pointers, ids, native_backend.name, workspace=workspace, planned=workspace is not None)
    for x, y in zip(got, want, strict=True):
        compare.bitwise(x, y)


def test_graph_replay_follows_addresses_and_lengths(generator):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = replace(PLAIN, lens=(300, 200, 90), block=300, format="bf16", io="bf16", dim=128).make("cuda", generator)
    pointers, ids = split(made, "cuda")
    ids, lens = ids.clone(), made.table.seq_lens.clone()
    table = kvx.cache_table(pointers, lens, cache_ids=ids)
    size = kvx.attention_workspace_bytes(made.q, pointers, table, spec=pointers.spec)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    out, lse = torch.empty_like(made.q), torch.empty(made.q.shape[:2], device="cuda")
    given = {"seq_lens": lens, "workspace": workspace, "out": out, "lse": lse}

    def step():
        run(made, pointers, ids, "cuda", **given)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for round_ in range(3):
        others, _ = split(made, "cuda")
        pointers.k.copy_(others.k), pointers.v.copy_(others.v)
        lens.copy_(made.table.seq_lens - 7 * round_), made.q.copy_(torch.randn(made.q.shape, generator=generator))
        graph.replay()
        eager = run(made, others, ids, "cuda", seq_lens=lens)
        compare.bitwise(out, eager[0], f"out of round {round_}")
        compare.bitwise(lse, eager[1], f"lse of round {round_}")


def test_wrong_inputs_are_refused_by_name(backend, generator):
    made = replace(PLAIN, format="bf16", io="bf16").make(backend.device, generator)
    pointers, ids = split(made, backend.device)
    lens = made.table.seq_lens
    many = lens.new_ones(len(pointers.caches) + 1)
    wrong = [
        ({"seq_lens": many, "cache_ids": None}, f"{len(many)} sequences for {len(pointers.caches)} caches"),
        ({"seq_lens": lens.float()}, "seq_lens is"),
        ({"cache_ids": ids[:3]}, "4 sequences; block_table has 3"),
        ({"cache_ids": ids.float()}, "cache_ids is"),
        ({"q": made.q[..., :32]}, "64"),
        ({"k_scale": lens.float()}, "takes no scales"),
    ]
    for more, words in wrong:
        given = {"q": made.q, "cache_ids": ids, "seq_lens": lens, **more}
        with pytest.raises(kvx.BadArgument, match=words):
            kvx.attention_decode_batched(given.pop("q"), pointers, backend=backend.name, **given)
    table = kvx.cache_table(pointers, lens, cache_ids=ids)
    with pytest.raises(kvx.BadArgument, match=r"pointers\.spec"):
        kvx.attention_plan(made.q, pointers, table, workspace=None, spec=made.cache.spec, backend=backend.name)
    with pytest.raises(kvx.BadArgument, match="cache_table"):
        kvx.attention_plan(
            made.q, pointers, kvx.to_ragged(table, 96), workspace=None, spec=pointers.spec, backend=backend.name
        )  # fmt: skip
