"""attention_varlen(fp8_products=True): what it may round, against float64; and what it changes nothing of.

Where the kernel takes a call, queries are rounded to e4m3 as here (exactly: rows are divided by a power of two). Then, with
weights e and the rounded ones e':
  |e' - e| <= e / 16, e4m3's rounding; of weights under 2^-13 of the row's largest, which is at least 2^7 then, 2^-17 of that
  out      is sum(e' v) / sum(e'), so it is wrong by (sum(|e' - e| |v|) + |out| sum(|e' - e|)) / sum(e')
  sums     of a tensor core keep 13 bits: 4 steps of a row of scores, and of a tile's values, each 2^-13 of what is summed
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kvx
from kvx.ops import backend as backends
from kvx.ops.attention.kernels import attention_kernel
from tests.ops.attention_cases import Case, Made
from tests.ops.test_attention_prefill import check_each_as_alone, many

NO_CUDA = backends.reason_missing("cuda")
on_hopper = pytest.mark.skipif(
    NO_CUDA is not None or torch.cuda.get_device_capability() != (9, 0),
    reason=f"the kernel is Hopper's: {NO_CUDA or 'another GPU'}",
)


def case(**more: object) -> Case:
    given = {"lens": (301, 129, 640), "queries": (70, 129, 200), "heads": 4, "dim": 128, "format": "fp8_e4m3", "io": "bf16", **more}
    return Case(**given)


TAKEN = [
    case(),
    case(io="f16", format="fp8_e4m3_per_head"),
    *(case(block=b, layout=y) for b, y in ((8, "NHD"), (32, "HND"), (64, "fused_NHD"), (128, "fused_HND"), (256, "stacked"))),
    *(case(dim=d, v_dim=v) for d, v in ((80, 0), (96, 0), (112, 0), (128, 64), (16, 96))),
    *(case(heads=h, kv_heads=k) for h, k in ((2, 2), (6, 2), (12, 4), (32, 1))),
    *(case(window=w) for w in (1, 100, 300)),
    case(causal=False),
    case(soft_cap=20.0),
    case(soft_cap=5.0, window=150, sinks=True, io="f16"),
    case(sinks=True, scale=0.4),
    case(scale=2.0, note="peaks"),
    case(scale=1e-30, note="all_alike"),
    case(lens=(2000,), queries=(300,), heads=16, note="laps"),
    case(lens=(200, 0, 33), queries=(80, 40, 60), note="more_queries_than_tokens"),
]
NOT_TAKEN = [
    case(dim=64),
    case(dim=192),
    case(block=12),
    case(block=1),
    case(format="fp8_e4m3_per_token_head"),
    case(format="int8"),
    case(format="fp8_e5m2"),
    case(format="bf16"),
    case(queries=(1, 2, 3)),
]


def rounded(q: Tensor) -> Tensor:
    """Rows as e4m3 times a power of two, in float64."""
    largest = q.double().abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    step = torch.ldexp(torch.ones_like(largest), (exponent - 9 + (mantissa > 0.875).int()).clamp(min=-100))
    return (q.double() / step).float().to(torch.float8_e4m3fn).double() * step


def check(made: Made, out: Tensor, lse: Tensor) -> None:
    c, first = made.case, 0
    scale = c.scale or c.dim**-0.5
    for s, (length, n) in enumerate(zip(c.lens, c.counts, strict=True)):
        rows = slice(first, first + n)
        first += n
        if length == 0:
            assert bool((out[rows] == 0).all() & (lse[rows] == -math.inf).all())
            continue
        q, k, v = rounded(made.q[rows].cpu()), made.k[s, :length].double(), made.v[s, :length].double()
        k, v = (x.repeat_interleave(c.heads // c.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("nhd,phd->hnp", q, k) * scale
        slack = float(torch.einsum("nhd,phd->hnp", q.abs(), k.abs()).max()) * scale * 4 * 2**-13
        if c.soft_cap:
            scores = c.soft_cap * torch.tanh(scores / c.soft_cap)
        position, last = torch.arange(length), torch.arange(length - n, length)[:, None]
        hidden = position > (last if c.causal else length - 1)
        if c.window:
            hidden = hidden | (position <= last - c.window)
        scores = scores.masked_fill(hidden, -math.inf)
        want_lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - want_lse[..., None]).nan_to_num(0)  # a row that sees nothing has none
        off = torch.maximum(weights / 16, torch.minimum(weights, weights.amax(-1, keepdim=True) * 2**-17))
        off_sum = off.sum(-1)
        if made.sinks is not None:
            shrink = torch.sigmoid(want_lse - made.sinks.cpu().double()[:, None])
            weights, off = weights * shrink[..., None], off * shrink[..., None]
        want = torch.einsum("hnp,phd->nhd", weights, v)
        size = torch.einsum("hnp,phd->nhd", weights, v.abs())
        bound = (torch.einsum("hnp,phd->nhd", off, v.abs()) + want.abs() * off_sum.T[..., None]) / (1 - off_sum.T[..., None])
        bound = bound + size * (2 * slack + 4 * 2**-13) + want.abs() * torch.finfo(out.dtype).eps / 2 + 1e-30
        worst = float(((out[rows].cpu().double() - want).abs() / bound).max())
        assert worst <= 1, f"sequence {s}: out is off by {worst:.2f} times what rounding can do"
        got_lse, sees = lse[rows].cpu().double(), torch.isfinite(want_lse.T)
        assert bool((got_lse[~sees] == -math.inf).all()), f"sequence {s}: a row that sees nothing has an lse"
        away = (got_lse - want_lse.T).abs()[sees] + torch.log1p(-off_sum.T)[sees]
        assert float(away.max()) <= slack + 1e-5, f"sequence {s}: lse is off by {float(away.max()):.4f} more than rounding can do"


@on_hopper
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_rounds_as_it_says(case, generator):
    made = case.make("cuda", generator)
    out, lse = made.run("cuda", fp8_products=True)
    exact, exact_lse = made.run("cuda")
    assert not (torch.equal(out, exact) and torch.equal(lse, exact_lse)), "the call was not taken: nothing was tested"
    check(made, out, lse)


@pytest.mark.parametrize("case", TAKEN + NOT_TAKEN, ids=str)
def test_changes_nothing_where_no_kernel_takes_it(backend, case, generator):
    if backend.name == "cuda" and case in TAKEN:
        pytest.skip("a kernel takes it")
    made = case.make(backend.device, generator)
    with_it, without = made.run(backend.name, fp8_products=True), made.run(backend.name)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


@on_hopper
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dim", [80, 128])
def test_many_prompts_are_each_as_alone(dim, window):
    check_each_as_alone(many(dim=dim, format="fp8_e4m3"), window, count=60, fp8_products=True)


@on_hopper
def test_errors_do_not_grow_with_the_number_of_keys(generator):
    """Sums of a tensor core alone would lose 2^-13 of a long one at every step: 0.04 or more of what is asserted here."""
    found = []
    for length in (1024, 65536):
        made = case(lens=(length,), queries=(64,), scale=1e-30, note="all_alike").make("cuda", generator)
        out = torch.empty(64, 4, 128, device="cuda")
        made.run("cuda", fp8_products=True, out=out)
        want = made.v[0, :length].double().mean(0).repeat_interleave(2, 0)
        found.append(float((out[-1].cpu().double() - want).abs().max() / made.v.double().std()) * math.sqrt(length))
    assert found[1] <= 2 * found[0] + 0.005, found


@on_hopper
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_query_that_is_no_number_is_none(poison, generator):
    made = case().make("cuda", generator)
    clean, _ = made.run("cuda", fp8_products=True)
    made.q[80, 1, 5] = poison
    out, lse = made.run("cuda", fp8_products=True)
    assert bool(out[80, 1].isnan().all())
    assert bool(lse[80, 1].isnan())
    out[80, 1] = clean[80, 1]
    assert torch.equal(out, clean)


@on_hopper
def test_a_key_that_is_no_number_reaches_who_sees_it(generator):
    made = case(lens=(300,), queries=(300,), kv_heads=1, dim=128).make("cuda", generator)
    block, inside = divmod(200, made.case.block)
    k, v = (torch.full((1, 1, 128), x, device="cuda", dtype=torch.bfloat16) for x in (math.nan, 1.0))
    slots = made.cache.block_table[0, block : block + 1].long() * made.case.block + inside
    kvx.write(made.cache.cache, k, v, slot_mapping=slots, spec=made.cache.spec, **made.cache.scales)
    out, _ = made.run("cuda", fp8_products=True)
    assert bool(out[200:].isnan().all())
    assert not bool(out[:100].isnan().any())


@on_hopper
@pytest.mark.parametrize("block", [16, 128])
def test_bad_ids_are_counted(block, generator):
    made = case(block=block, lens=(640,), queries=(200,)).make("cuda", generator)
    errors = torch.zeros(1, dtype=torch.int64, device="cuda")
    made.cache.block_table[0, 1] = -1
    out, _ = made.run("cuda", fp8_products=True, errors=errors)
    assert int(errors) >= block
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("given", ["no", "e4m3", 0, None])
def test_what_is_neither_true_nor_false_is_refused(given, generator):
    made = case(lens=(40,), queries=(30,)).make("cpu", generator)
    with pytest.raises(kvx.BadArgument, match=r"attention_varlen\(\): fp8_products is .*; it must be True or False\."):
        made.run("cpu", fp8_products=given)


def test_compiles_with_it(generator):
    made = case(lens=(40,), queries=(30,)).make("cpu", generator)
    given = {"cu_seqlens": made.cu, "fp8_products": True, **made.given}
    want = kvx.attention_varlen(made.q, made.cache.cache, made.table, **given)
    step = torch.compile(lambda q: kvx.attention_varlen(q, made.cache.cache, made.table, **given), fullgraph=True, backend="eager")
    assert all(torch.equal(a, b) for a, b in zip(step(made.q), want, strict=True))


@pytest.mark.parametrize("case", TAKEN + NOT_TAKEN[:-1], ids=str)
def test_the_kernel_that_is_named_is_the_one_that_runs(case):
    """NOT_TAKEN's last is one of its calls, not of its spec."""
    layout = {"NHD": kvx.NHD, "HND": kvx.HND}.get(case.layout)
    if layout is None:
        pytest.skip("tests name layouts by themselves")
    spec = kvx.CacheSpec(4, case.block, 2, case.dim, v_head_dim=case.v_dim, format=case.format, layout=layout)
    kernel = attention_kernel(spec, "prefill", queries=case.io)
    assert kernel.takes_fp8_products == (case in TAKEN)
    assert ("fp8_products" in str(kernel)) == (case in TAKEN)
    assert not attention_kernel(spec, "prefill", queries=case.io, arch=80).takes_fp8_products
    assert not attention_kernel(spec, "decode", queries=case.io).takes_fp8_products
