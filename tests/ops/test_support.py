"""kvx.supports: yes, or the sentence the call raises; auto says what it chose."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import kvx
from kvx.cli.main import app
from kvx.ops import backend as backends
from kvx.ops.registry import OPS

SPEC = kvx.CacheSpec(4, 16, 2, 64, format="bf16")
SPLIT = kvx.CacheSpec(4, 16, 2, 64, layout="kv | block token/4 head token%4 dim")
MOVED = kvx.CacheSpec(4, 16, 2, 64, format="f64")


@pytest.mark.parametrize("op", list(OPS))
def test_every_op_runs_on_torch_for_a_plain_cache(op):
    answer = kvx.supports(op, replace(SPEC, num_kv_heads=1) if op == "attention_mla" else SPEC, "torch")
    assert answer
    assert str(answer) == f"{op} runs on torch."
    assert hasattr(kvx, op)


def test_a_missing_backend_is_named_with_the_sentence_the_call_raises():
    for name in ("cpu", "cuda"):
        if backends.reason_missing(name) is None:
            continue
        answer = kvx.supports("gather", SPEC, name)
        assert not answer
        table = kvx.PackedTable(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
        with pytest.raises(kvx.Unsupported) as raised:
            kvx.gather(kvx.allocate(SPEC).cache, table, spec=SPEC, backend=name)
        assert str(raised.value) == str(answer)


@pytest.mark.parametrize("spec", [SPLIT, MOVED], ids=["split tokens", "f64"])
def test_specs_that_only_convert(spec):
    assert kvx.supports("convert", spec, "torch")
    table = kvx.PackedTable(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    for op, call in (
        ("gather", lambda: kvx.gather(torch.zeros(1), table, spec=spec, max_seq_len=1)),
        ("attention_decode", lambda: kvx.attention_decode(torch.zeros(1, 2, 64), torch.zeros(1), table, spec=spec)),
    ):
        answer = kvx.supports(op, spec, "torch")
        assert not answer
        with pytest.raises(kvx.Unsupported) as raised:
            call()
        assert str(raised.value) == str(answer)


def test_auto_says_what_it_chose(backend):
    cache = kvx.allocate(SPEC, backend.device).cache
    native = backend.device if backends.reason_missing(backend.device) is None else "torch"
    assert kvx.chosen_backend("attention_decode", cache, spec=SPEC) == native
    assert kvx.chosen_backend("attention_decode", cache, spec=SPEC, backend=backend.name) == backend.name


def test_wrong_questions():
    with pytest.raises(kvx.BadArgument, match="no op"):
        kvx.supports("attend", SPEC, "cpu")
    with pytest.raises(kvx.BadArgument, match="tpu"):
        kvx.supports("gather", SPEC, "tpu")


def test_inspect_support():
    done = CliRunner().invoke(app, ["inspect", "--support", "--json"])
    facts = json.loads(done.stdout)
    assert {row["op"] for row in facts["ops"]} == set(OPS)
    assert all(row["torch"] == "yes" for row in facts["ops"])
    assert any(row["what"] == "format f64" and row["op"] == "gather" for row in facts["refused"])
    assert CliRunner().invoke(app, ["inspect", "--support"]).exit_code == 0
