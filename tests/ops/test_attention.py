"""attention: every backend near the float64 answer, over lengths, tables, formats and layouts; what is not seen is poison."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.ops import backend as backends
from tests import compare
from tests.ops import attention_cases, mla_cases
from tests.ops.attention_cases import Case
from tests.ops.test_gather import kv_offsets

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch saying it has no bf16 instructions
ALL = [
    *attention_cases.DECODE, *attention_cases.WIDE, *attention_cases.FORMATS, *attention_cases.LAYOUTS, *attention_cases.VARLEN,
    *attention_cases.BYTES, *attention_cases.GENERAL, *attention_cases.SMALL, *attention_cases.ODD,
]  # fmt: skip


@pytest.mark.parametrize("case", ALL, ids=str)
def test_attention_is_near_the_answer(backend, case, generator):
    made = case.make(backend.device, generator)
    made.check(*made.run(backend.name))


# Of eight tokens the last three are queries: which keys each of them sees, as docs/attention.md shows it.
SEEN = {
    (True, 0): ("xxxxxx..", "xxxxxxx.", "xxxxxxxx"),
    (True, 1): (".....x..", "......x.", ".......x"),
    (True, 3): ("...xxx..", "....xxx.", ".....xxx"),
    (True, 100): ("xxxxxx..", "xxxxxxx.", "xxxxxxxx"),
    (False, 0): ("xxxxxxxx", "xxxxxxxx", "xxxxxxxx"),
}


@pytest.mark.parametrize("is_varlen", [False, True])
@pytest.mark.parametrize("mask", SEEN, ids=str)
def test_which_keys_a_query_sees(backend, mask, is_varlen):
    """Keys are all alike and values are unit vectors: out is the share of each position, and its places are what is seen."""
    causal, window = mask
    spec = kvx.CacheSpec(1, 8, 1, 8, format="f32")
    cache = kvx.allocate(spec, backend.device).cache
    cache[0].zero_(), cache[1].copy_(torch.eye(8)[None, :, None])
    table = kvx.PackedTable(*(torch.tensor(x, dtype=torch.int32, device=backend.device) for x in ([[0]], [8])))
    q = torch.ones(3, 1, 8, device=backend.device)
    given = {"spec": spec, "causal": causal, "window": window, "backend": backend.name}
    if is_varlen:
        cu = torch.tensor([0, 3], dtype=torch.int32, device=backend.device)
        out, lse = kvx.attention_varlen(q, cache, table, cu_seqlens=cu, **given)
    else:
        out, lse = kvx.attention_decode(q, cache, table, **given)
    assert tuple("".join("x" if w else "." for w in row) for row in (out[:, 0] > 0).tolist()) == SEEN[mask]
    counts = torch.tensor([float(row.count("x")) for row in SEEN[mask]])
    torch.testing.assert_close(lse[:, 0].cpu(), counts.log(), atol=1e-6, rtol=1e-6)


def test_a_window_without_causal_is_refused(backend, generator):
    """By every call that takes both, in the same words; and what they tell to pass is taken."""
    made = Case(queries=2).make(backend.device, generator)
    pointers = kvx.cache_pointers([tuple(torch.zeros(2, 8, 64, device=backend.device) for _ in "kv")])
    latent = mla_cases.Case().make(backend.device, generator)
    q, cache, table, spec = made.q, made.cache.cache, made.table, made.cache.spec
    lens = torch.tensor([8], dtype=torch.int32, device=backend.device)
    calls = {
        "attention_decode": lambda **m: kvx.attention_decode(q, cache, table, spec=spec, **m),
        "attention_varlen": lambda **m: kvx.attention_varlen(q, cache, table, spec=spec, cu_seqlens=made.cu, **m),
        "attention_decode_batched": lambda **m: kvx.attention_decode_batched(q[:1], pointers, seq_lens=lens, **m),
        "attention_mla": lambda **m: latent.run(**m),
        "attention_workspace_bytes": lambda **m: kvx.attention_workspace_bytes(q, cache, table, spec=spec, **m),
    }
    for name, call in calls.items():
        with pytest.raises(kvx.BadArgument, match=rf"{name}\(\): causal is False and window 5.*causal=True, window=5.*window=0"):
            call(causal=False, window=5, backend=backend.name)
        call(causal=True, window=5, backend=backend.name)
        call(causal=False, window=0, backend=backend.name)
        with pytest.raises(kvx.BadArgument, match=rf"{name}\(\): window is \(4, 0\); it must be one number"):
            call(window=(4, 0), backend=backend.name)
    with pytest.raises(kvx.BadArgument, match=r"attention_plan\(\): causal is False and window 5"):
        kvx.attention_plan(q, cache, table, workspace=None, spec=spec, causal=False, window=5, backend=backend.name)


def test_nothing_seen_gives_zero_and_minus_infinity(backend, generator):
    made = Case(lens=(0, 2), queries=4).make(backend.device, generator)
    out, lse = made.run(backend.name, out=torch.full((8, 8, 64), 7.0, device=backend.device))
    assert (out[:6] == 0).all()
    assert (lse[:6] == -math.inf).all()
    assert torch.isfinite(lse[6:]).all()


@pytest.mark.parametrize("case", [Case(), Case(lens=(130, 5, 90), queries=(60, 1, 7))], ids=str)
@pytest.mark.parametrize("kind", ["int64", "strided", "ragged", "page_csr"])
def test_tables_name_the_same_blocks(backend, case, kind, generator):
    made = case.make(backend.device, generator)
    packed, block = made.table, made.cache.spec.block_size
    ids, lens = packed.block_table, packed.seq_lens
    table = {
        "int64": lambda: kvx.PackedTable(ids.long(), lens.long()),
        "strided": lambda: kvx.PackedTable(torch.stack([ids, ids * 0 - 5], -1)[..., 0], lens),
        "ragged": lambda: kvx.to_ragged(packed, block),
        "page_csr": lambda: kvx.to_page_csr(packed, block),
    }[kind]()
    made.check(*made.run(backend.name, table=table))


@pytest.mark.parametrize("layout", [kvx.HND, kvx.NHD])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3_per_head"])
def test_kv_offsets(backend, layout, fmt, generator):
    """Beams are sequences, two pools, and a block that is missing is not seen and no error."""
    spec, pools, table = kv_offsets(generator, backend.device, fmt=fmt, layout=layout)
    scale = (torch.rand(2, generator=generator) + 0.5).to(backend.device)
    scales = {"k_scale": scale, "v_scale": scale} if fmt != "bf16" else {}
    q = torch.randn(8, 6, 16, generator=generator).to(backend.device)
    out, lse = kvx.attention_decode(q, pools, table, spec=spec, backend=backend.name, **scales)
    k, v = kvx.gather(pools, table, spec=spec, max_seq_len=12, dtype=torch.float32, backend="torch", **scales)
    case = Case(heads=6, kv_heads=2, dim=16)
    for s, n in enumerate((7, 7, 12, 12)):
        seen = torch.arange(n).expand(2, n) <= torch.tensor([[n - 2], [n - 1]])
        if s == 2:
            seen = seen & ~((torch.arange(n) >= 4) & (torch.arange(n) < 8))
        args = (q[2 * s : 2 * s + 2].cpu(), k[s, :n].cpu(), v[s, :n].cpu(), seen, case, None)
        want, want_lse, _ = attention_cases.attend(*args, torch.float64)
        attention_cases.close(f"out of {s}", out[2 * s : 2 * s + 2].cpu(), want, 1e-5)
        attention_cases.close(f"lse of {s}", lse[2 * s : 2 * s + 2].cpu(), want_lse, 1e-5)


ROW_FORMATS = ("fp8_e4m3_per_token_head", "int8_per_token_head")


def scaled(made, of_keys, of_values):
    """The case with every scale multiplied; scores stay as large as they were, values do not."""
    for name, by, want in (("k_scale", of_keys, made.k), ("v_scale", of_values, made.v)):
        made.cache.scales[name].mul_(by)
        want.mul_(by)
    made.case = replace(made.case, scale=made.case.dim**-0.5 / abs(of_keys))
    return made


@pytest.mark.parametrize("queries", [(1, 1), (150, 2)], ids=["decode", "prefill"])
@pytest.mark.parametrize("by", [(1e-6, 1e-6), (3e4, 1e6), (1e-12, 1e9), (-1.0, -3.0)], ids=str)
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e4m3_per_head", "fp8_e5m2_per_head", "int8_per_head", *ROW_FORMATS])
def test_scales_of_any_size(backend, fmt, by, queries, generator):
    if fmt in ROW_FORMATS and by[0] < 0:
        pytest.skip("scales of rows are sizes")
    made = scaled(Case(lens=(150, 40), queries=queries, format=fmt, io="bf16", dim=128).make(backend.device, generator), *by)
    out = torch.empty(made.q.shape, device=backend.device)  # f32: bf16's steps would hide what is asked
    made.check(*made.run(backend.name, out=out))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("fmt", ["fp8_e4m3_per_head", *ROW_FORMATS])
def test_scales_of_zero(backend, fmt, soft_cap, generator):
    """A head of zeros, or rows of them: weights are as even as the scores, and values are zeros."""
    case = Case(lens=(200, 40), queries=(150, 20), format=fmt, io="bf16", dim=128, soft_cap=soft_cap)
    made = case.make(backend.device, generator)
    k_scale, v_scale = made.cache.scales["k_scale"], made.cache.scales["v_scale"]
    if fmt in ROW_FORMATS:
        block = int(made.table.block_table[0, 3])  # positions 48..63 of sequence 0
        k_scale[block].fill_(0), v_scale[block].fill_(0)
        made.k[0, 48:64], made.v[0, 48:64] = 0, 0
    else:
        k_scale[1], v_scale[0] = 0, 0
        made.k[:, :, 1], made.v[:, :, 0] = 0, 0
    made.check(*made.run(backend.name))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4", "int4_per_group"])
def test_groups_of_any_size(backend, fmt, dim, generator):
    """Groups of a row and rows 2^12 apart, and rows of zeros: a group is as near as it would be alone."""
    made = Case(lens=(300, 40), format=fmt, io="bf16", dim=dim).make(backend.device, generator)
    rows = torch.exp2(-torch.randint(0, 12, (len(made.cache.k), 1, 1), generator=generator).float())
    groups = torch.exp2(-4.0 * (torch.arange(dim) // 32))
    for given, kept in ((made.cache.k, made.k), (made.cache.v, made.v)):
        given.copy_((torch.randn(given.shape, generator=generator) * groups * rows).to(given))
        given[5:9] = 0
        kept.zero_()
    made.cache.write("torch")
    for want, got in zip((made.k, made.v), made.cache.gather("torch", dtype=torch.float32, max_seq_len=300), strict=True):
        want.copy_(got)
    out = torch.empty(made.q.shape, device=backend.device)
    _, lse = made.run(backend.name, out=out)
    want, want_lse, _ = made.answer()
    theirs, their_lse, _ = made.answer(torch.bfloat16)
    for first in range(0, dim, 32):
        of = (..., slice(first, first + 32))
        bound = 2 * attention_cases.error(theirs[of], want[of]) + 2**-10 * attention_cases.magnitude(want[of])
        attention_cases.close(f"out[{first}:]", out[of].cpu(), want[of], bound)
    attention_cases.close("lse", lse.cpu(), want_lse, 2 * attention_cases.error(their_lse, want_lse) + 1e-5)


@pytest.mark.parametrize("size", [1e-12, 1e-3, 3e4])
@pytest.mark.parametrize("fmt", ["fp8_e4m3_per_head", "int8_per_head", "f16"])
@pytest.mark.parametrize("dim", [128, 192])
def test_bf16_queries_of_any_size(backend, dim, fmt, size, generator):
    """f16 and fixed point do not have bf16's range: what multiplies in them fits each row, and each slice that a warp has of it."""
    case = Case(lens=(200, 40), queries=(150, 1), format=fmt, io="bf16", dim=dim, scale=dim**-0.5 / size)
    made = case.make(backend.device, generator)
    made.q *= size
    made.q[::3] /= 64
    made.q[1::3, :, : dim // 2] /= 1024
    made.check(*made.run(backend.name))


@pytest.mark.parametrize("dim", [64, 128, 100])
@pytest.mark.parametrize(("fmt", "code"), [("fp8_e5m2", 0x7C), ("fp8_e5m2", 0xFF), ("fp8_e4m3", 0x7F), ("fp8_e5m2", 0x7B)])
def test_infinities_and_nan_of_fp8_values_stay(fmt, code, dim, generator):
    """The host's loops take every code for a number, and look for others first. 0x7c is infinity, 0x7b the largest number."""
    if (why := backends.reason_missing("cpu")) is not None:
        pytest.skip(f"backend cpu: {why}")
    made = Case(lens=(70,), format=fmt, io="bf16", dim=dim).make("cpu", generator)
    made.cache.scales["v_scale"].fill_(1.0)
    block, value = int(made.table.block_table[0, 2]), made.cache.cache[1]
    value.view(torch.uint8)[block, 3, 0, 7] = code
    out, _ = made.run("cpu")
    want, _ = made.run("torch")
    is_number = code == 0x7B
    assert torch.isfinite(want[0, :4, 7]).all() == is_number
    compare.bitwise(torch.isnan(out), torch.isnan(want))
    compare.bitwise(torch.isinf(out), torch.isinf(want))
    torch.testing.assert_close(out, want, atol=0.05, rtol=0.02, equal_nan=True)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3_per_head", "int8_per_head", "int8_per_token_head"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("lens", [(150, 40), (5000, 40)])  # by one worker of a GPU, and by several
@pytest.mark.parametrize("queries", [1, (40, 40)])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_is_no_number_spoils_its_own_row_alone(backend, bad, fmt, lens, queries, sinks, generator):
    made = Case(lens=lens, queries=queries, format=fmt, io="bf16", dim=128, sinks=sinks).make(backend.device, generator)
    out, lse = made.run(backend.name)
    made.q[0, 1, 5] = bad
    spoiled, spoiled_lse = made.run(backend.name)
    assert torch.isnan(spoiled[0, 1]).all()
    assert not torch.isfinite(spoiled_lse[0, 1])
    spoiled[0, 1], spoiled_lse[0, 1] = out[0, 1], lse[0, 1]
    compare.bitwise(spoiled, out)
    compare.bitwise(spoiled_lse, lse)


def test_strided_queries_and_outputs(backend, generator):
    made = Case(format="bf16", io="bf16", queries=2).make(backend.device, generator)
    wide = torch.full((8, 8, 100), 3.0, dtype=torch.float32, device=backend.device)
    sums = torch.full((8, 8, 2), 3.0, device=backend.device)
    made.q = made.q.transpose(0, 1).contiguous().transpose(0, 1)  # head-major underneath
    made.run(backend.name, out=wide[..., :64], lse=sums[..., 0])
    made.check(wide[..., :64], sums[..., 0])
    assert (wide[..., 64:] == 3).all()
    assert (sums[..., 1] == 3).all()
    flat = made.q.new_empty(8, 8, 64, 2)
    flat[..., 0] = made.q
    made.q = flat[..., 0]  # elements apart
    made.check(*made.run(backend.name))


def test_rows_of_no_sequence_are_left_alone(backend, generator):
    made = Case(lens=(20, 9), queries=(3, 1)).make(backend.device, generator)
    want = made.run(backend.name)
    made.q = torch.cat([made.q[:1] * math.nan, made.q, made.q[:2] * math.nan])
    out = torch.full((7, 8, 64), 5.0, device=backend.device)
    lse = torch.full((7, 8), 5.0, device=backend.device)
    made.run(backend.name, cu_seqlens=made.cu + 1, out=out, lse=lse)
    compare.bitwise(out[1:5], want[0])
    compare.bitwise(lse[1:5], want[1])
    assert (out[[0, 5, 6]] == 5).all()
    assert (lse[[0, 5, 6]] == 5).all()


@pytest.mark.parametrize("cases_of", [Case, mla_cases.Case], ids=["varlen", "mla"])
def test_rows_of_no_sequence_are_zero_where_outputs_are_made(backend, cases_of, generator, monkeypatch):
    made = cases_of(lens=(20, 9), queries=(3, 1)).make(backend.device, generator)
    want = made.run(backend.name)
    made.q = torch.cat([made.q[:1] * math.nan, made.q, made.q[:2] * math.nan])
    empty = torch.empty

    def poisoned(*args: object, **more: object) -> torch.Tensor:
        x = empty(*args, **more)
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)
    out, lse = made.run(backend.name, cu_seqlens=made.cu + 1)
    compare.bitwise(out[1:5], want[0])
    compare.bitwise(lse[1:5], want[1])
    assert (out[[0, 5, 6]] == 0).all()
    assert (lse[[0, 5, 6]] == -math.inf).all()


WINDOWED = [
    Case(lens=(70, 41), queries=2, window=10),
    *(
        Case(lens=(700, 300), queries=queries, window=100, format=f, io="bf16", dim=128)
        for f in ("bf16", "fp8_e4m3_per_token_head", "int8_per_token_head")
        for queries in (2, (40, 70))
    ),
]


@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_a_window_needs_only_its_own_blocks(backend, case, generator):
    """Engines free the blocks a window has left behind: their table entries are none, or blocks that are somebody else's now."""
    made = case.make(backend.device, generator)
    ids = made.table.block_table.clone()
    used = {int(i) for s, n in enumerate(case.lens) for i in ids[s, : -(-n // case.block)]}
    other = next(i for i in range(made.cache.spec.num_blocks) if i not in used)
    for tensor in (*made.cache.cache, *(t for t in made.cache.scales.values() if t is not None and t.dim() > 0)):
        tensor[other].view(torch.uint8).fill_(0xFF)  # NaN in all of these formats
    errors = {"errors": torch.zeros((), dtype=torch.int64, device="cuda")} if backend.name == "cuda" else {}
    for gone in (-1, 2**30, other):
        for s, (n, queries) in enumerate(zip(case.lens, case.counts, strict=True)):
            ids[s, : (n - queries - case.window + 1) // case.block] = gone
        made.check(*made.run(backend.name, table=kvx.PackedTable(ids, made.table.seq_lens), **errors))
    assert all(int(e) == 0 for e in errors.values())


def test_bad_block_ids(backend, generator):
    made = Case(lens=(40, 20)).make(backend.device, generator)
    for bad in (made.cache.spec.num_blocks, -1, 2**30):
        ids = made.table.block_table.clone()
        ids[0, 1] = bad  # positions 16..31 of sequence 0
        table = kvx.PackedTable(ids, made.table.seq_lens)
        if backend.device == "cpu":
            with pytest.raises(kvx.OutOfRange, match="sequence 0"):
                made.run(backend.name, table=table)
            continue
        errors = torch.zeros((), dtype=torch.int64, device="cuda")
        out, lse = made.run(backend.name, table=table, errors=errors)
        assert int(errors) > 0
        seen = torch.ones(1, 40, dtype=torch.bool)
        seen[:, 16:32] = False
        want = attention_cases.attend(made.q[:1].cpu(), made.k[0, :40], made.v[0, :40], seen, made.case, None, torch.float64)
        attention_cases.close("out", out[:1].cpu(), want[0], 1e-4)
        attention_cases.close("lse", lse[:1].cpu(), want[1], 1e-4)


def test_impossible_lengths_and_ranges(backend, generator):
    made = Case(lens=(33, 5), queries=(3, 1)).make(backend.device, generator)
    lens = made.table.seq_lens
    csr = kvx.to_page_csr(made.table, 16)
    ragged = kvx.to_ragged(made.table, 16)

    def changed(x, at, value):
        y = x.clone()
        y[at] = value
        return y

    wrong = [
        ({"table": kvx.PackedTable(made.table.block_table, changed(lens, 0, -3))}, "sequence 0"),
        ({"table": kvx.PackedTable(made.table.block_table, changed(lens, 1, 2**20))}, "sequence 1"),
        ({"table": kvx.PageCsrTable(csr.indices, csr.indptr, changed(csr.last_page_len, 0, 17))}, "sequence 0"),
        ({"table": kvx.RaggedTable(ragged.indices, changed(ragged.indptr, 1, 30), lens)}, "sequence 0"),
        ({"max_seq_len": 32}, "sequence 0"),
        ({"cu_seqlens": changed(made.cu, 2, 5)}, "cu_seqlens"),
        ({"cu_seqlens": changed(made.cu, 0, -1)}, "cu_seqlens"),
        ({"cu_seqlens": changed(made.cu, 1, 9)}, "cu_seqlens"),
        ({"max_query_len": 2}, "cu_seqlens"),
    ]
    for more, words in wrong:
        if backend.device == "cpu":
            with pytest.raises(kvx.OutOfRange, match=words):
                made.run(backend.name, **more)
        else:  # the result is unspecified, and nothing outside the tensors is touched: compute-sanitizer sees to that
            made.run(backend.name, **more)
            torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"q": lambda q: q[:3]}, "3 tokens for 4 sequences"),
        ({"q": lambda q: q[:, :7]}, "7 heads and the cache 2"),
        ({"q": lambda q: q[..., :32]}, "64"),
        ({"q": lambda q: q.double()}, "f16, bf16 or f32"),
        ({"q": lambda q: q[0]}, "num_tokens, num_heads, head_dim"),
        ({"out": torch.zeros(4, 8, 32)}, "64"),
        ({"lse": torch.zeros(4, 8, dtype=torch.float64)}, "lse"),
        ({"sinks": torch.zeros(7)}, r"\[8\]"),
        ({"sinks": torch.zeros(8, dtype=torch.bfloat16)}, "sinks"),
        ({"scale": 0.0}, "not 0"),
        ({"scale": math.nan}, "finite"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"window": -1}, "window"),
        ({"k_scale": torch.ones(2)}, "takes no scales"),
        ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, r"\[5\]"),
        ({"cu_seqlens": torch.zeros(5)}, "cu_seqlens"),
        ({"table": "blocks"}, "PackedTable"),
        ({"backend": "tpu"}, "auto, torch, cpu or cuda"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),  # not the values: a function's address differs in every process
)
def test_wrong_inputs_are_refused(backend, more, words, generator):
    made = Case().make(backend.device, generator)
    more = {n: x.to(backend.device) if isinstance(x, torch.Tensor) else x for n, x in more.items()}
    made.q = more.pop("q", lambda q: q)(made.q)
    given = {**made.given, "backend": backend.name, **more}
    call = kvx.attention_varlen if "cu_seqlens" in more else kvx.attention_decode
    with pytest.raises(kvx.BadArgument, match=rf"attention_\w+\(\): .*{words}|{words}"):
        call(made.q, made.cache.cache, given.pop("table", made.table), **given)


def test_missing_scales_are_named(backend, generator):
    made = Case(format="int8_per_token_head", io="bf16").make(backend.device, generator)
    with pytest.raises(kvx.BadArgument, match="needs k_scale"):
        made.run(backend.name, k_scale=None)


def test_empty_batch(backend):
    spec = kvx.CacheSpec(2, 4, 1, 8)
    cache = kvx.allocate(spec, backend.device).cache
    none = torch.zeros(0, dtype=torch.int32, device=backend.device)
    q = torch.zeros(0, 4, 8, device=backend.device)
    out, lse = kvx.attention_decode(q, cache, kvx.PackedTable(none.view(0, 3), none), spec=spec, backend=backend.name)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)


def test_parts_merge_by_lse(backend, generator):
    """What lse is for: two halves of a sequence, each attended alone, add up to the whole."""
    made = Case(lens=(48,), causal=False).make(backend.device, generator)
    want, want_lse = made.run(backend.name)
    ids = made.table.block_table
    parts = []
    for columns, n in ((ids[:, :1], 16), (ids[:, 1:], 32)):
        table = kvx.PackedTable(columns, torch.tensor([n], dtype=torch.int32, device=backend.device))
        parts.append(made.run(backend.name, table=table))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o * torch.exp(part - lse)[..., None] for o, part in parts)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_cache_beyond_two_to_the_31_elements(native_backend):
    """A block whose element offset passes 2^31: the cache is 4.3 GB of bytes, of which a few are touched."""
    if native_backend.device == "cpu":
        with open("/proc/meminfo") as f:
            if int(next(line for line in f if line.startswith("MemAvailable")).split()[1]) < 5 << 20:
                pytest.skip("less than 5 GB of memory")
    spec = kvx.CacheSpec(2**31 // (16 * 128) + 8, 16, 1, 128, format="int8", layout=kvx.HND)
    cache = tuple(torch.empty(spec.num_blocks, 1, 16, 128, dtype=torch.int8, device=native_backend.device) for _ in range(2))
    last = spec.num_blocks - 1
    for c in cache:
        c[last].random_(-100, 100)
    small = kvx.CacheSpec(1, 16, 1, 128, format="int8", layout=kvx.HND)
    one = torch.tensor(0.02, device=native_backend.device)
    q = torch.randn(1, 4, 128, device=native_backend.device)
    lens = torch.tensor([16], dtype=torch.int32, device=native_backend.device)
    outs = [
        kvx.attention_decode(q, c, kvx.PackedTable(torch.full_like(lens, at)[None], lens), spec=s, k_scale=one, v_scale=one)[0]
        for c, s, at in ((cache, spec, last), (tuple(c[last:] for c in cache), small, 0))
    ]
    compare.bitwise(outs[0], outs[1])


@pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"cuda: {backends.reason_missing('cuda')}")
def test_scales_2_gb_apart_are_refused_on_cuda():
    """The decode kernel counts a block's scales in 32 bits."""
    if torch.cuda.mem_get_info()[0] < 4 << 30:
        pytest.skip("needs 4 GB of free device memory")
    spec = kvx.CacheSpec(4, 16, 2, 64, format="int8_per_token_head")
    storage = kvx.allocate(spec, "cuda")
    far = torch.ones((1 << 29) + 64, device="cuda").as_strided((4, 16, 2), (16, 1, 1 << 29))
    table = kvx.PackedTable(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[0, 1]], [20])))
    q = torch.ones(1, 2, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(kvx.Unsupported, match="2 GB or more apart; make them contiguous"):
        kvx.attention_decode(q, storage.cache, table, spec=spec, backend="cuda", **(storage.scales() | {"k_scale": far}))


def test_workspace_and_plan(native_backend, generator):
    """A plan made once serves every layer of the step."""
    made = Case(lens=(300, 1, 90), format="bf16", io="bf16", dim=128).make(native_backend.device, generator)
    other = Case(lens=(300, 1, 90), format="bf16", io="bf16", dim=128).make(native_backend.device, torch.Generator().manual_seed(7))
    want = [layer.run(native_backend.name) for layer in (made, other)]
    size = kvx.attention_workspace_bytes(made.q, made.cache.cache, made.table, spec=made.cache.spec)
    assert size == 0 or native_backend.device == "cuda"
    workspace = torch.empty(size, dtype=torch.uint8, device=native_backend.device) if size else None
    kvx.attention_plan(made.q, made.cache.cache, made.table, workspace=workspace, spec=made.cache.spec)
    for layer, (out, lse) in zip((made, other), want, strict=True):
        got = layer.run(native_backend.name, workspace=workspace, planned=workspace is not None)
        compare.bitwise(got[0], out)
        compare.bitwise(got[1], lse)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("case", [
    Case(lens=(300, 1, 90, 512), format="bf16", io="bf16", dim=128),
    Case(lens=(300, 1, 90, 512), format="int8_per_token_head", io="bf16", dim=128),
    Case(lens=(300, 1, 90, 512), format="bf16", io="bf16", dim=256),
    Case(lens=(300, 1, 90, 512), format="fp8_e4m3_per_token_head", io="bf16", dim=320),
    Case(lens=(300, 1, 90, 512), queries=(40, 1, 3, 1), format="bf16", io="bf16", dim=128),
    Case(lens=(300, 1, 90, 512), queries=(40, 1, 3, 1), format="fp8_e4m3_per_token_head", io="bf16", dim=128),
    Case(lens=(40, 1, 33, 64), dim=80, heads=14),
], ids=str)  # fmt: skip
def test_graph_replay_follows_lengths_and_tables(case, is_planned, generator):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = case.make("cuda", generator)
    lens, ids, cu, q = (x.clone() for x in (made.table.seq_lens, made.table.block_table, made.cu, made.q))
    table = kvx.PackedTable(ids, lens)
    more = {} if isinstance(case.queries, int) else {"cu_seqlens": cu, "max_query_len": 64}
    shapes = {"spec": made.cache.spec, "max_seq_len": 1024, **more}
    size = kvx.attention_workspace_bytes(q, made.cache.cache, table, **shapes)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")

    def step():
        if is_planned:
            kvx.attention_plan(q, made.cache.cache, table, workspace=workspace, **shapes)
        call = kvx.attention_varlen if more else kvx.attention_decode
        given = {**made.given, **shapes, "workspace": workspace, "planned": is_planned}
        call(q, made.cache.cache, table, out=out, lse=lse, **given)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for round_ in range(4):
        keep = torch.randperm(4, generator=generator)
        new = torch.tensor([int(n) if round_ == 0 else max(0, int(n) - 7 * round_ * i) for i, n in enumerate(made.table.seq_lens)])
        lens.copy_(new.to(torch.int32)[keep].cuda()), ids.copy_(made.table.block_table[keep.cuda()])
        q.copy_(torch.randn(q.shape, generator=generator))
        graph.replay()
        eager = torch.empty_like(q), torch.empty_like(lse)
        call = kvx.attention_varlen if more else kvx.attention_decode
        call(q, made.cache.cache, table, out=eager[0], lse=eager[1], **{**made.given, **shapes})
        compare.bitwise(out, eager[0], f"out of round {round_}")
        compare.bitwise(lse, eager[1], f"lse of round {round_}")


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("heads", [4, 16])
def test_graph_replay_follows_sequences_that_grow_and_shrink(heads, is_planned, generator):
    """A sequence with one query in one step and a chunk in the next is taken by another kernel, and the graph is the same."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = Case(lens=(1500, 64, 700, 300), queries=(1, 40, 3, 1), heads=heads, format="bf16", io="bf16", dim=128)
    made = case.make("cuda", generator)
    q = torch.randn(64, heads, 128, generator=generator).bfloat16().cuda()
    cu, lens = made.cu.clone(), made.table.seq_lens.clone()
    table = kvx.PackedTable(made.table.block_table, lens)
    shapes = {"spec": made.cache.spec, "cu_seqlens": cu, "max_query_len": 64, "max_seq_len": 1500}
    size = kvx.attention_workspace_bytes(q, made.cache.cache, table, **shapes)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")

    def step():
        if is_planned:
            kvx.attention_plan(q, made.cache.cache, table, workspace=workspace, **shapes)
        more = {"workspace": workspace, "planned": is_planned, "out": out, "lse": lse}
        kvx.attention_varlen(q, made.cache.cache, table, **shapes, **more)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for counts in ((1, 40, 3, 1), (40, 1, 1, 3), (1, 1, 1, 1), (16, 16, 16, 16), (0, 64, 0, 0), (0, 0, 0, 0), (2, 0, 17, 5)):
        cu.copy_(kvx.cu_seqlens(torch.tensor(counts, dtype=torch.int32)))
        lens.copy_(made.table.seq_lens - torch.randint(0, 9, (4,), generator=generator).cuda())
        out.fill_(7), lse.fill_(7)
        graph.replay()
        eager = torch.full_like(out, 7), torch.full_like(lse, 7)
        kvx.attention_varlen(q, made.cache.cache, table, **shapes, out=eager[0], lse=eager[1])
        compare.bitwise(out, eager[0], f"out of {counts}")
        compare.bitwise(lse, eager[1], f"lse of {counts}")
        want = torch.full_like(out, 7), torch.full_like(lse, 7)
        kvx.attention_varlen(q, made.cache.cache, table, **shapes, out=want[0], lse=want[1], backend="torch")
        torch.testing.assert_close(out, want[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, want[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("case", [Case(sinks=True), Case(lens=(20, 9), queries=(5, 1), window=4)], ids=str)
def test_attention_compiles_without_graph_breaks(native_backend, case, generator):
    made = case.make(native_backend.device, generator)
    want = made.run(native_backend.name)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, ids, lens, cu):
        given = {**made.given, **({} if isinstance(case.queries, int) else {"cu_seqlens": cu})}
        call = kvx.attention_decode if isinstance(case.queries, int) else kvx.attention_varlen
        out, lse = call(q * 2, made.cache.cache, kvx.PackedTable(ids, lens), **given)
        return out + 1, lse

    got = step(made.q / 2, made.table.block_table, made.table.seq_lens, made.cu)
    compare.bitwise(got[0], want[0] + 1)
    compare.bitwise(got[1], want[1])


def test_torch_body_reads_what_gather_reads(generator):
    """An attention that sees one position returns that value row, dequantised, whatever the format."""
    for fmt in kvx.FORMATS:
        if kvx.FORMATS[fmt].element.is_moved_only:
            continue
        made = Case(format=fmt, lens=(9, 20), window=1, dim=128).make("cpu", generator)
        out, _ = made.run("torch")
        for s, n in enumerate((9, 20)):
            compare.bitwise(out[s], made.v[s, n - 1].repeat_interleave(4, 0), fmt)


@pytest.mark.parametrize("fmt", [f for f in kvx.FORMATS if f != "f64"])
def test_work_is_shared_out_without_scales(backend, fmt):
    """Planning reads none, so nobody has to give any."""
    spec = kvx.CacheSpec(8, 16, 2, 128, format=fmt)
    cache = kvx.allocate(spec, backend.device).cache
    table = kvx.PackedTable(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32))
    table = kvx.PackedTable(*(t.to(backend.device) for t in table.tensors))
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16, device=backend.device)
    size = kvx.attention_workspace_bytes(q, cache, table, spec=spec, backend=backend.name)
    assert (size > 0) <= (backend.name == "cuda")
    workspace = torch.zeros(size, dtype=torch.uint8, device=backend.device) if size else None
    kvx.attention_plan(q, cache, table, workspace=workspace, spec=spec, backend=backend.name)
