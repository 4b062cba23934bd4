"""The first cases of tests/fuzz/attention.py, in every run of the tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvx
from tests.fuzz import attention
from tests.ops import mla_cases
from tests.ops.attention_cases import Case

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch saying it has no bf16 instructions


def test_random_shapes_are_near_the_answer(backend):
    counts = attention.run(120, 0, backend.name)
    assert min(counts["decode"], counts["varlen"], counts["latent"]) > 5
    assert not counts["wrong"]


@pytest.mark.parametrize("number", [1000930, 1001479])
def test_shapes_that_were_wrong_once(backend, number):
    """lse of f32 queries where V has a scale per row, which joins the exponents of softmax weights on a device."""
    device = "cuda" if backend.name == "cuda" else "cpu"
    assert attention.run_case(attention.random_case(number), backend.name, device, number) < 1


def test_cases_reach_everything_that_is_asked_for():
    cases = [attention.random_case(number) for number in range(2000)]
    plain = [a.case for a in cases if not isinstance(a.case, mla_cases.Case)]
    assert {c.format for c in plain} == set(attention.FORMATS)
    assert {c.layout for c in plain} == set(attention.cases.LAYOUTS)
    assert {(c.format, c.io) for c in plain} == {(f, io) for f in attention.FORMATS for io in ("f16", "bf16", "f32")}
    assert min(c.dim for c in plain) == 1
    assert max(c.dim for c in plain) == 512
    assert sum(c.v_dim not in (0, c.dim) for c in plain) > 300
    assert len({c.heads // c.kv_heads for c in plain}) > 8
    assert {a.table for a in cases} == {"packed", "int64", "ragged", "page_csr"}
    assert sum(not c.causal for c in plain) > 200
    assert sum(c.window > 0 for c in plain) > 300
    assert sum(c.soft_cap > 0 and c.sinks for c in plain) > 50
    assert (
        sum(isinstance(c.queries, tuple) and 1 in c.queries and max(c.queries) > 16 for c in plain) > 50
    )  # decodes beside prompts


@pytest.mark.parametrize("io", ["f32", "bf16"])
def test_a_wrong_answer_is_found(io, generator):
    """Results that are a tenth too large, another query's, or of a narrower window."""
    made = Case(lens=(60, 33), queries=(20, 1), io=io, format=io).make("cpu", generator)
    out, lse = made.run("torch")
    attention.check(made, out, lse)
    for wrong in ((out * 1.1, lse), (out, lse * 1.1), (out.roll(1, 0), lse), (out, lse.roll(1, 0))):
        with pytest.raises(AssertionError, match="are off by more than"):
            attention.check(made, *wrong)
    short = replace(made.case, window=19)
    with pytest.raises(AssertionError, match="are off by more than"):
        attention.check(replace(made, case=short), out, lse)


def test_the_answer_is_that_of_the_other_reference(generator):
    """Two float64 references, one by sequence and one of the whole batch."""
    made = Case(lens=(60, 0, 33), queries=(20, 2, 1), window=9, soft_cap=4.0, sinks=True).make("cpu", generator)
    want, want_lse, _ = made.answer()
    out, lse, _, _ = attention.answer(made, torch.float64)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=1e-12)
    assert kvx.FORMATS.keys() - set(attention.FORMATS) == {"f64"}
