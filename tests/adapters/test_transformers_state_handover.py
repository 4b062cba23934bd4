"""Caches of transformers with states handed over: a text begun on one cache goes on with another, token for token."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from transformers.models.auto import modeling_auto  # noqa: E402

import kvx  # noqa: E402
from kvx import BadArgument, Damaged, Incompatible, Unsupported  # noqa: E402
from kvx.adapters.llama_cpp import (  # noqa: E402
    StateKind,
    StateModel,
    export_state,
    import_state,
    read_recurrent,
    write_recurrent,
)
from kvx.adapters.transformers import KvxCache, export_cache, import_cache  # noqa: E402
from kvx.adapters.transformers.handover import name_of  # noqa: E402
from kvx.cache.kinds import State  # noqa: E402
from kvx.handover import Handover, join, load, save  # noqa: E402
from kvx.handover.paged_cache import read_sequence, write_sequence  # noqa: E402
from kvx.layout.buffers import allocate_buffers  # noqa: E402
from kvx.layout.state_rows import state_row  # noqa: E402
from kvx.spec import StateSpec  # noqa: E402
from kvx.spec.layer_specs import layer_specs  # noqa: E402
from tests.adapters.tiny_models import tiny_config, tiny_model  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "LinearAttentionLayer"),
    reason="before transformers 5 states were kept by classes of the models",
)
ROOT = Path(__file__).resolve().parents[2]
# Mamba 1 and 2, the delta rules, convolutions alone, several of them, states beside K and V, latents beside states, and a MoE's.
MODELS = (
    *("bamba", "falcon_h1", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lfm2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_text", "qwen3_next", "zamba2", "zaya"),
)


@functools.cache
def model(name: str) -> Any:
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    config = tiny_config(name)
    if name == "granitemoehybrid":
        config = type(config)(
            **{**config.to_dict(), "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16}
        )
    return tiny_model(getattr(transformers, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]), config)


def prompt(n: int = 23, batch: int = 1) -> torch.Tensor:
    return torch.randint(2, 100, (batch, n), generator=torch.Generator().manual_seed(3))


def run(made: Any, cache: Any, ids: torch.Tensor, **more: Any) -> None:
    with torch.no_grad():
        made(ids, past_key_values=cache, use_cache=True, **more)


def go_on(made: Any, ids: torch.Tensor, cache: Any) -> list[int]:
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        out = made.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False, eos_token_id=None)
    return out[0, ids.shape[1] :].tolist()


def empty(kind: str, made: Any) -> Any:
    return KvxCache(made.config, block_size=4) if kind == "kvx" else transformers.DynamicCache(config=made.config)


@functools.cache
def prefilled(name: str, kind: str = "kvx") -> Any:
    made = model(name)
    cache = empty(kind, made)
    run(made, cache, prompt()[:, :-1])
    return cache


def handed_over(name: str, kind: str = "kvx", **options: Any) -> Handover:
    return export_cache(prefilled(name, kind), prompt()[0, :-1], model=model(name).config, **{"block_size": 8, **options})


@functools.cache
def alone(name: str) -> list[int]:
    return go_on(model(name), prompt(), copy.deepcopy(prefilled(name)))


def contents(handover: Handover) -> list[str]:
    return [str(p.content) for p in handover.parts]


# ---- one after the other


@pytest.mark.parametrize("name", MODELS)
def test_goes_on_as_if_alone(name):
    """Out of KvxCache and DynamicCache the same; into both."""
    made, handover = model(name), handed_over(name)
    states = [p for p in handover.parts if isinstance(p.spec, StateSpec)]
    assert [p.spec.positions for p in states] == [(22,)]
    assert contents(handed_over(name, "dynamic")) == contents(handover)
    for kind in ("kvx", "dynamic"):
        cache = import_cache(handover, empty(kind, made), model=made.config, tokens=prompt()[0])
        assert int(cache.get_seq_length()) == 22
        assert contents(export_cache(cache, prompt()[0, :-1], model=made.config, block_size=8)) == contents(handover)
        assert go_on(made, prompt(), cache) == alone(name)
    for into in (made.config, KvxCache(made.config)):
        again = import_cache(join(handover.shard(2)) if name != "zaya" else handover, into, model=made.config)
        assert go_on(made, prompt(), again) == alone(name)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
def test_in_bf16(name):
    """Convolutions are the model's type, matrices f32; other types are refused by name, and convert() makes them."""
    made = copy.deepcopy(model(name)).to(torch.bfloat16)
    cache = KvxCache(made.config)
    run(made, cache, prompt()[:, :-1])
    handover = export_cache(cache, prompt()[0, :-1], model=made.config)
    other = import_cache(handover, KvxCache(made.config), dtype=torch.bfloat16)
    assert go_on(made, prompt(), other) == go_on(made, prompt(), cache)
    wide = handover.convert(state_format="f32")
    with pytest.raises(Incompatible, match=r"plane conv is conv f32 .* there, conv bf16 .* here; handover.convert\(state_format"):
        import_cache(wide, KvxCache(made.config), dtype=torch.bfloat16)
    back = import_cache(wide.convert(state_format={"conv": "bf16"}), KvxCache(made.config), dtype=torch.bfloat16)
    assert contents(export_cache(back, prompt()[0, :-1], model=made.config)) == contents(handover)


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "lfm2", "zamba2"])
def test_one_of_a_padded_batch(name):
    made = copy.deepcopy(model(name))
    made.set_attn_implementation("kvx")  # where padding is known, and not stored
    ids, mask = prompt(19, 3), torch.ones(3, 19, dtype=torch.long)
    ids[1, :5], mask[1, :5] = 0, 0
    options = {"do_sample": False, "eos_token_id": None}
    cache, single = KvxCache(made.config), KvxCache(made.config)
    with torch.inference_mode():
        made.generate(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, max_new_tokens=1, **options)
        handover = export_cache(cache, ids[1, 5:-1], model=made.config, sequence=1)
        want = made.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, **options)[1, 19:].tolist()
    assert go_on(made, ids[1:2, 5:], import_cache(handover, single, tokens=ids[1, 5:])) == want
    with pytest.raises(BadArgument, match="sequence is 3; the cache has 3"):
        export_cache(cache, ids[1], model=made.config, sequence=3)


_CHILD = """
import json, sys, torch
torch.set_num_threads(1)
from kvx.adapters.transformers import KvxCache, import_cache
from kvx.handover import load
from tests.adapters.test_transformers_state_handover import go_on, model, prompt
made = model(sys.argv[2])
cache = import_cache(load(sys.argv[1]), KvxCache(made.config), tokens=prompt()[0])
print(json.dumps(go_on(made, prompt(), cache)))
"""


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_another_process_goes_on(tmp_path, name):
    save(tmp_path / "handover", handed_over(name))
    command = [sys.executable, "-c", _CHILD, str(tmp_path / "handover"), name]
    done = subprocess.run(
        command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[-2] == str(alone(name))


def paged(name: str, row: str) -> kvx.PagedCache:
    """Groups of the model's layers, states in an engine's row."""
    specs = layer_specs(model(name).config.to_dict(), "f32", num_blocks=16, block_size=4, num_states=4)
    groups = {}
    for i, layer in enumerate(specs):
        if layer.kv is not None:
            groups.setdefault(("kv", layer.window), (replace(layer.kv, layer_start=0), None, []))[2].append(i)
        if layer.state is not None:
            spec = state_row(row).spec(layer.state.planes, num_blocks=4)
            groups.setdefault(("state", spec), (spec, State(snapshot_every=1), []))[2].append(i)
    made = [
        kvx.LayerGroup(str(n), tuple(layers), spec, kind=kind, window=0 if kind else key[1])
        for n, (key, (spec, kind, layers)) in enumerate(groups.items())
    ]
    return kvx.PagedCache(made, max_seqs=2, max_seq_len=64)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "nemotron_h", "zamba2", "granitemoehybrid"])
def test_through_a_paged_cache_and_back(name):
    made, handover = model(name), handed_over(name)
    cache = paged(name, "vllm.sd")
    seq = cache.admit(prompt()[0].tolist())
    write_sequence(cache, seq, handover, model=name_of(made.config))
    assert seq.length == 22
    cache.check()
    back = read_sequence(cache, seq, model=name_of(made.config), block_size=8)
    assert contents(back) == contents(handover)
    assert go_on(made, prompt(), import_cache(back, KvxCache(made.config), tokens=prompt()[0])) == alone(name)


# ---- what is and is not in it


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_the_oldest_column_does_not_count(name):
    cache = copy.deepcopy(prefilled(name))
    for layer in cache.state_layers:
        layer.conv_states[0][..., 0] = float("nan")
    assert contents(export_cache(cache, prompt()[0, :-1], model=model(name).config, block_size=8)) == contents(handed_over(name))
    assert go_on(model(name), prompt(), cache) == alone(name)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_a_cache_that_records_its_past(name):
    """Its convolutions are longer until the next crop, and are computed in another order of numbers."""
    made, cache = model(name), KvxCache(model(name).config)
    cache.activate_past_recording()
    run(made, cache, prompt()[:, :-1])
    assert cache.state_layers[0].conv_states[0].shape[-1] > cache.state_layers[0].conv_kernel_size[0]
    other = import_cache(export_cache(cache, prompt()[0, :-1], model=made.config), KvxCache(made.config), tokens=prompt()[0])
    a, b = (c.state_layers[0].conv_states[0] for c in (cache, other))
    assert torch.equal(a[..., 1 - b.shape[-1] :], b[..., 1:])
    assert go_on(made, prompt(), other) == alone(name)


def refused(name: str, why: str) -> Any:
    made, ids, handover = model(name), prompt()[0], handed_over(name)
    config = made.config
    kv = [p for p in handover.parts if not isinstance(p.spec, StateSpec)]
    other = tiny_config("llama")
    calls = {
        "fewer tokens out": (lambda: export_cache(prefilled(name), ids[:15], model=config), BadArgument, "after 22, and cannot be"),
        "fewer tokens in": (
            lambda: import_cache(handover, KvxCache(config), tokens=ids[:18]), Incompatible, "the model would go on after 17",
        ),
        "no states": (lambda: import_cache(Handover(handover.tokens, kv), KvxCache(config)), Incompatible,
                      "this cache has a state of layer .*, and the handover does not"),
        "another model": (lambda: import_cache(handover, KvxCache(other)), Incompatible, "model is"),
        "a model without states": (
            lambda: import_cache(handover, KvxCache(other), model=name_of(config)), Incompatible, "layer",
        ),
        "not empty": (lambda: import_cache(handover, copy.deepcopy(prefilled(name))), BadArgument, "with tokens in it"),
        "a rank's": (lambda: import_cache(handover.shard(2)[0], KvxCache(config)), Incompatible, "num_kv_heads|shares|plane"),
        "a flipped bit": (lambda: import_cache(flipped(handover), KvxCache(config)), Damaged, "changed on the way"),
        "no config": (
            lambda: export_cache(prefilled(name, "dynamic"), ids[:-1], model="mine"), BadArgument, "whose planes its config says",
        ),
    }  # fmt: skip
    return calls[why]


def flipped(handover: Handover) -> Handover:
    parts = [replace(p, buffers=tuple(t.clone() for t in p.buffers)) for p in handover.parts]
    parts[-1].buffers[0][5] ^= 16
    return Handover(handover.tokens, tuple(parts))


WHY = ("fewer tokens out", "fewer tokens in", "no states", "another model", "a model without states", "not empty", "a rank's",
       "a flipped bit", "no config")  # fmt: skip


@pytest.mark.parametrize("why", WHY)
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_what_is_refused(name, why):
    call, kind, words = refused(name, why)
    with pytest.raises(kind, match=words):
        call()


def test_a_text_of_another_position_is_refused():
    """One token more or less, and nothing else changed."""
    handover = handed_over("lfm2")
    for tokens in (prompt()[0, :-2], prompt()[0]):
        with pytest.raises(BadArgument, match=r"one after 22 tokens; the handover has 2[13]"):
            Handover(tokens.numpy(), handover.parts[1:])


# ---- to other engines


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "bamba"])
def test_into_vllms_pages_and_llama_cpps_state(name):
    """What a handover has of a KvxCache, in the engines' rows: those are held against the engines' own bytes elsewhere."""
    handover = handed_over(name)
    n, part = next((n, p) for n, p in enumerate(handover.parts) if isinstance(p.spec, StateSpec))
    page = 64 + sum(p.num_rows * p.row_bytes for p in part.spec.planes)
    pages = state_row("vllm.sd").spec(part.spec.planes, num_blocks=3, num_layers=len(part.layers), block_bytes=page)
    tensors = allocate_buffers(pages)
    handover.write_planes(n, tensors, pages, [2])
    conv = prefilled(name).layers[part.layers[1]].conv_states[0]
    assert torch.equal(tensors[1].view(3, page)[2].view(torch.float32)[: 4 * conv.shape[1]][: conv.shape[1]], conv[0, :, 1])
    row = state_row("llama_cpp").spec(part.spec.planes, num_blocks=1, num_layers=len(part.layers))
    buffers = allocate_buffers(row)
    handover.write_planes(n, buffers, row, [0])
    count = len(model(name).config.layer_types)
    data = write_recurrent(buffers, row, num_tokens=handover.num_tokens, num_model_layers=count)
    found = read_recurrent(data, row, num_model_layers=count)
    assert found.num_tokens == 22
    back = Handover(handover.tokens, (replace(part, buffers=_neutral(found.buffers, row, part)).sealed(22),))
    assert contents(back) == [str(part.content)]


def test_a_whole_state_of_llama_cpp():
    """K and V as that engine has them, and the states behind: what LFM2's own state is made of, in this order."""
    made, handover = model("lfm2"), handed_over("lfm2", format="f16")
    kind = StateKind(num_streams=2)
    told = StateModel(handover.model, 2, 2, 16, rope="half")
    with pytest.raises(Unsupported, match=r"a state .* of layers 0, 2, not only K and V: import K and V alone"):
        import_state(handover, model=told, like=kind)
    kv, state = handover.parts
    before = import_state(Handover(handover.tokens, (kv,)), model=told, like=kind)
    row = state_row("llama_cpp").spec(state.spec.planes, num_blocks=1, num_layers=2)
    buffers = allocate_buffers(row)
    handover.write_planes(1, buffers, row, [0])
    data = write_recurrent(buffers, row, num_tokens=22, num_model_layers=4, before=before)
    assert read_recurrent(data, row, num_model_layers=4).num_tokens == 22
    again = export_state(before, handover.tokens, model=told)
    assert again.parts[0].spec.of_kv.format == "f16"
    cache = prefilled("lfm2")
    assert torch.equal(buffers[0].view(torch.float32).view(64, 2), cache.layers[0].conv_states[0][0, :, 1:])
    assert made.config.num_hidden_layers == 4


def _neutral(buffers: list[torch.Tensor], row: StateSpec, part: Any) -> tuple[torch.Tensor, ...]:
    made = [torch.zeros_like(t) for t in part.buffers]
    kvx.convert(buffers, made, plan=kvx.plan(row, part.spec))
    return tuple(made)


def test_a_folder_keeps_it(tmp_path):
    handover = handed_over("qwen3_next", format="bf16")
    save(tmp_path / "it", handover)
    assert load(tmp_path / "it", model=handover.model).to_json() == handover.to_json()


# --- states that are elsewhere, or were ------------------------------------------------------------------------------------


def test_a_recurrent_state_that_transformers_left_ahead_is_refused():
    """DynamicCache.crop() takes back K, V and convolutions, and no recurrence: where that stands, nobody knows."""
    made, ids = model("qwen3_next"), prompt()
    cache = empty("dynamic", made)
    run(made, cache, ids[:, :16])
    cache.activate_past_recording()
    run(made, cache, ids[:, 16:])
    cache.crop(-4)
    with pytest.raises(Unsupported, match="leaves the recurrent state where it was"):
        export_cache(cache, ids[0, :-4], model=made.config)


@pytest.mark.parametrize("kind", ["kvx", "dynamic"])
def test_a_recorded_convolution_that_saw_one_token(kind):
    made, ids = model("lfm2"), prompt()
    cache, plain = empty(kind, made), empty(kind, made)
    cache.activate_past_recording()
    for one in (cache, plain):
        run(made, one, ids[:, :1])
    handovers = [export_cache(one, ids[0, :1], model=made.config) for one in (cache, plain)]
    assert contents(handovers[0]) == contents(handovers[1])


@pytest.mark.parametrize("kind", ["kvx", "dynamic"])
def test_a_cache_that_was_reset_is_empty(kind):
    made, ids = model("qwen3_next"), prompt()
    cache = empty(kind, made)
    run(made, cache, ids)
    cache.reset()
    if cache.get_seq_length():  # transformers before 5.22: a DynamicCache keeps its tokens, as zeros
        with pytest.raises(BadArgument, match="with tokens in it"):
            import_cache(handed_over("qwen3_next"), cache, model=made.config)
        return
    import_cache(handed_over("qwen3_next"), cache, model=made.config)
    assert int(cache.get_seq_length()) == ids.shape[1] - 1


def test_what_is_no_handover_and_no_padding():
    made, ids = model("lfm2"), prompt()
    with pytest.raises(BadArgument, match=r"import_cache\(\): handover is None"):
        import_cache(None, made.config)
    with pytest.raises(BadArgument, match=r"export_cache\(\): padding is '4'"):
        export_cache(prefilled("lfm2"), ids[0], model=made.config, padding="4")
