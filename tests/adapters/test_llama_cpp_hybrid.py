"""Hybrid models' states of llama.cpp to and from handovers, without the engine: what is kept, widened and refused.

tests/engines/test_hybrid_pairs.py has the engines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kvx
from kvx.adapters.llama_cpp import LayerRows, StateKind, StateModel, export_slot_file, export_state, import_slot_file, import_state
from kvx.adapters.llama_cpp.checkpoints import read_checkpoints
from kvx.adapters.llama_cpp.memory import GgmlRows, KvCache, KvKind, Memory, Recurrent, read_memory, write_memory
from kvx.adapters.llama_cpp.slot_file import read_slot_file, write_slot_file
from kvx.handover import Handover

_COMMON = {"embedding_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1, "vocab_size": 256}
_SSM = {"ssm.inner_size": 64, "ssm.time_step_rank": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.conv_kernel": 4}
_WINDOWS = {
    "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32, "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False] * 3, "attention.shared_kv_layers": 2,
}  # fmt: skip
_FILES: dict[str, dict[str, Any]] = {
    "lfm2": _COMMON | {"block_count": 4, "attention.head_count_kv": [0, 1, 0, 0], "shortconv.l_cache": 3},
    "falcon-h1": _COMMON | {"block_count": 2, "attention.key_length": 32, "attention.value_length": 32} | _SSM,
    "gemma4": _COMMON | {"block_count": 6} | _WINDOWS,
}
NUM_TOKENS = 40


def metadata(kind: str, **more: Any) -> dict[str, Any]:
    return {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in (_FILES[kind] | more).items()}


def model(kind: str) -> StateModel:
    return StateModel.of_gguf(metadata(kind), "m")


def memory(of: StateModel, *, type: str = "f32", num_tokens: int = NUM_TOKENS) -> Memory:
    """As the engine would have it, of random numbers."""
    rng = np.random.default_rng(0)
    caches = []
    for rows in of.rows:
        positions = np.arange(max(0, num_tokens - rows.window) if rows.window else 0, num_tokens, dtype=np.int32)
        size = rows.num_kv_heads * rows.head_dim
        k, v = (
            tuple(GgmlRows("f32", rng.normal(size=(len(positions), size)).astype("<f4").view(np.uint8)) for _ in rows.layers)
            for _ in range(2)
        )
        cache = KvCache(KvKind("f32", "f32"), positions, np.zeros((len(positions), 0), np.int32), k, v)
        caches.append(cache.to(KvKind(type, type)))
    planes = [p.num_rows * p.row_bytes for p in of.planes]
    data = [rng.normal(size=n // 4).astype("<f4").tobytes() for n in (*planes, 0)[:2] for _ in of.state_layers]
    recurrent = Recurrent(num_tokens - 1, of.num_layers, tuple((0, x) for x in data)) if planes else None
    return Memory(4, tuple(caches), recurrent)


def handed_over(kind: str, **how: Any) -> Handover:
    return export_state(write_memory(memory(model(kind), **how), is_file=False), list(range(NUM_TOKENS)), model=model(kind))


def test_what_a_file_says():
    lfm2, falcon, gemma = map(model, _FILES)
    assert (lfm2.rows, lfm2.state_layers, lfm2.rope) == ((LayerRows((1,), 1, 32),), (0, 2, 3), "half")
    assert [(p.name, p.sizes) for p in lfm2.planes] == [("conv", {"channel": 64, "tap": 2})]
    assert (falcon.rows, falcon.state_layers) == ((LayerRows((0, 1), 1, 32),), (0, 1))
    assert [p.name for p in falcon.planes] == ["conv", "ssm"]
    assert gemma.rows == (LayerRows((1, 3), 1, 64), LayerRows((0, 2), 1, 32, 8))  # the last two layers read others' K and V
    assert not gemma.planes
    assert StateModel.of_gguf(metadata("lfm2")).name == "lfm2-4x64-kv1x32-v256"
    with pytest.raises(kvx.BadArgument, match="l_cache'; the metadata of a lfm2 has it"):
        StateModel.of_gguf({k: v for k, v in metadata("lfm2").items() if "l_cache" not in k})
    with pytest.raises(kvx.Unsupported, match=r"a gemma4 with 3 kinds of K and V"):
        StateModel.of_gguf(metadata("gemma4", **{"attention.head_count_kv": [1, 1, 2, 1, 1, 1]}))
    with pytest.raises(kvx.BadArgument, match="layers with states have planes"):
        StateModel("m", 2, 1, 32, state_layers=(0,))


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("kind", _FILES)
def test_there_and_back_is_the_same(kind, type):
    told, before = model(kind), memory(model(kind), type=type)
    handover = handed_over(kind, type=type)
    like = StateKind(type, is_v_transposed=True, num_streams=2)
    after, _ = read_memory(import_state(handover, model=told, like=like))
    assert [c.kind.is_v_transposed for c in after.caches] == [True] * len(told.rows)
    for a, b, rows in zip(before.caches, after.caches, told.rows, strict=True):
        # A server looks for one cell before the window's: it is there, and every later token masks it.
        assert (b.positions[0], b.positions[-1]) == (NUM_TOKENS - rows.window - 1 if rows.window else 0, NUM_TOKENS - 1)
        for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True):
            assert (x.data == y.data[-len(x.data) :]).all()
            assert not y.data[: -len(x.data)].any()
    assert (after.recurrent and after.recurrent.planes) == (before.recurrent and before.recurrent.planes)
    again = import_state(handover, model=told, like=write_memory(before, is_file=False))
    assert read_memory(again)[0].kind == before.kind


@pytest.mark.parametrize("kind", _FILES)
def test_slot_files(kind):
    told, tokens = model(kind), list(range(NUM_TOKENS))
    file = write_slot_file(tokens, write_memory(memory(told)))
    handover = export_slot_file(file, model=told)
    made = read_slot_file(import_slot_file(handover, model=told, like=file))
    assert made.tokens.tolist() == tokens
    taken = read_memory(made.state)[1]
    assert not read_checkpoints(made.state[taken:], version=4)
    again = export_slot_file(import_slot_file(handover, model=told, like=StateKind("f32")), model=told)
    assert [p.content for p in again.parts if not p.window] == [p.content for p in handover.parts if not p.window]


def test_a_window_that_reaches_the_beginning_comes_with_a_checkpoint():
    told = model("gemma4")
    short = export_state(write_memory(memory(told, num_tokens=6), is_file=False), list(range(6)), model=told)
    made = read_slot_file(import_slot_file(short, model=told, like=StateKind("f32")))
    (point,) = read_checkpoints(made.state[read_memory(made.state)[1] :], version=4)
    assert (point.num_tokens, point.memory.caches[0].positions.tolist()) == (6, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("kind", ["lfm2", "falcon-h1"])
def test_states_of_16_bits_are_widened(kind):
    """Every bf16 is an f32; the other way is refused where it would round."""
    told, narrow = model(kind), handed_over(kind).convert(state_format="bf16")
    after = read_memory(import_state(narrow, model=told, like=StateKind("f32")))[0]
    wide = export_state(write_memory(after, is_file=False), narrow.tokens, model=told)
    assert wide.parts[-1].content == narrow.convert(state_format="f32").parts[-1].content


def test_quantised_k_and_v_are_handed_over_as_f32():
    handover = handed_over("lfm2", type="q8_0")
    exact = handed_over("lfm2")
    a, b = (torch.cat([t.view(torch.float32) for t in h.parts[0].buffers]) for h in (handover, exact))
    assert 0 < float((a - b).abs().max()) < 0.03
    assert handover.parts[1].content == exact.parts[1].content


def of_other_planes() -> Handover:
    told = replace(model("lfm2"), planes=StateModel.of_gguf(metadata("lfm2", **{"shortconv.l_cache": 4}), "m").planes)
    return export_state(write_memory(memory(told), is_file=False), list(range(NUM_TOKENS)), model=told)


REFUSED = {
    "another model": (lambda: handed_over("falcon-h1"), "lfm2", "num_layers of the handover is 2; here it is 1"),
    "no state": (lambda: Handover(range(NUM_TOKENS), handed_over("lfm2").parts[:1]), "lfm2", "the model has a state of layer 0"),
    "other planes": (of_other_planes, "lfm2", "plane conv is .* tap 3 there, .* tap 2 here"),
    "another name": (lambda: handed_over("lfm2").convert(), "gemma4", "num_layers of the handover is 1; here it is 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_on_the_way_in(case):
    make, kind, why = REFUSED[case]
    with pytest.raises(kvx.Incompatible, match=why):
        import_state(make(), model=model(kind), like=StateKind("f32"))


def test_what_is_refused_on_the_way_out():
    told, tokens = model("lfm2"), list(range(NUM_TOKENS))
    good = memory(told)
    wrong = {
        "1 K/V caches and no recurrent state": replace(good, recurrent=None),
        "a recurrent state at position 20 of 4 layers": replace(good, recurrent=replace(good.recurrent, position=20)),
        "of 7 layers": replace(good, recurrent=replace(good.recurrent, num_model_layers=7)),
        "planes have": replace(good, recurrent=replace(good.recurrent, planes=((0, b"1234"),) * 6)),
        r"positions have 4 axes \(M-RoPE\)": replace(
            good, caches=(replace(good.caches[0], extra=np.zeros((NUM_TOKENS, 3), np.int32)),)
        ),
    }
    for why, state in wrong.items():
        with pytest.raises(kvx.KvxError, match=why):
            export_state(write_memory(state, is_file=False), tokens, model=told)
    with pytest.raises(kvx.BadArgument, match="7 tokens; the state is one after 40"):
        export_state(write_memory(good, is_file=False), tokens[:7], model=told)
    with pytest.raises(kvx.BadArgument, match="4 bytes stand behind the state"):
        export_state(write_memory(good, is_file=False) + b"abcd", tokens, model=told)
    with pytest.raises(kvx.Incompatible, match=r"rows of \[32\] elements; model 'm' has 1 layers"):
        export_state(write_memory(good, is_file=False), tokens, model=replace(told, rows=(LayerRows((1,), 2, 32),)))
