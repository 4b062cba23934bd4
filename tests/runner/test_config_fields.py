"""Every field of every family's config, changed one at a time: the runner's logits are Transformers', or it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from kvx import BadArgument, KvxError, Unsupported
from kvx.runner import Engine, Params
from kvx.runner.config import ACTIVATIONS, FAMILIES, config_of_json
from tests.runner.test_families import LLAMA3, SHAPE

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

BASE = {
    "llama": SHAPE,
    "mistral": {**SHAPE, "sliding_window": None},
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 16},
    "smollm3": SHAPE,
}
TYPE = {"rope_theta": 5000.0}
# Other values of a field; a dict sets several fields at once.
FLIPS = {
    "vocab_size": [144],
    "hidden_size": [96],
    "intermediate_size": [112],
    "num_hidden_layers": [2],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [32, 8],
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu", "swish", "gelu_new", "quick_gelu", "relu2", "tanh", "mish", "linear"],
    "max_position_embeddings": [64],
    "initializer_range": [0.1],
    "rms_norm_eps": [0.05],
    "use_cache": [False],
    "pad_token_id": [7, None],
    "bos_token_id": [9],
    "eos_token_id": [11, [3, 4], None],
    "pretraining_tp": [2],
    "tie_word_embeddings": [True, False],
    "rope_parameters": [
        {**TYPE, "rope_type": "default"},
        {**TYPE, "rope_type": "linear", "factor": 4.0},
        {**TYPE, "rope_type": "dynamic", "factor": 4.0},
        {**TYPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {**TYPE, "rope_type": "longrope", "factor": 4.0, "short_factor": [2.0] * 8, "long_factor": [3.0] * 8},
        {**TYPE, **LLAMA3},
        {**TYPE, "rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    "attention_bias": [True],
    "mlp_bias": [True],
    "attention_dropout": [0.5],
    "sliding_window": [4, {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}],
    "use_sliding_window": [True, {"use_sliding_window": True, "sliding_window": 4}],
    "max_window_layers": [1, {"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 4}],
    "layer_types": [{"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 4}],
    "no_rope_layers": [[1, 0, 1], [0, 0, 0], [1, 1, 1, 1]],
    "no_rope_layer_interval": [2],
    "chunk_size_feed_forward": [1],
    "is_encoder_decoder": [True],
    "output_hidden_states": [True],
    "return_dict": [False],
    "dtype": ["bfloat16"],
    "architectures": [["OtherForCausalLM"]],
    "transformers_version": ["4.0"],
    "id2label": [{0: "a"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
}
# Refused here because Transformers computes something else with them; everything not listed has to be equal.
MAY_REFUSE = {
    *("hidden_act", "rope_parameters", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("layer_types", "is_encoder_decoder"),
}
PROMPT = [(7 * i + 5) % 120 + 3 for i in range(40)]


def build(family: str, fields: dict, folder):
    """A tiny random model of these fields, saved. Far from uniform answers, so that what is left out shows."""
    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[family](**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for w in model.parameters():
            if w.dim() == 1:
                w.add_(0.1 * torch.randn_like(w))
            else:
                w.normal_(std=0.1)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def theirs(model) -> torch.Tensor:
    model.config.return_dict = True  # with false, Transformers 5.22's own forward breaks
    return model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].float()


def ours(folder) -> torch.Tensor:
    engine = Engine.load(folder, num_blocks=16, block_size=8, max_seqs=1, max_batch_tokens=64)
    seq = engine.cache.admit(PROMPT)
    engine.cache.extend(seq, len(PROMPT))
    return engine.model.logits(engine.model.hidden(engine.cache.plan([(seq, len(PROMPT))])))


def cases() -> list:
    found = []
    every = {f.name for f in dataclasses.fields(transformers.PreTrainedConfig)}  # the same code for all: once is enough
    for family in FAMILIES:
        for field in dataclasses.fields(transformers.CONFIG_MAPPING[family]):
            if field.name in every and family != "llama":
                continue
            for i, value in enumerate(FLIPS.get(field.name, ["no case"])):
                found.append(pytest.param(family, field.name, value, id=f"{family}-{field.name}-{i}"))
    return found


@pytest.mark.parametrize(("family", "name", "value"), cases())
def test_a_changed_field_gives_transformers_logits_or_is_refused(family, name, value, tmp_path):
    assert name in FLIPS, f"{family}'s config has a field {name} that no case changes: add one to FLIPS"
    changed = value if isinstance(value, dict) and name in value else {name: value}
    try:
        model = build(family, {**BASE[family], **changed}, tmp_path)
    except Exception as error:  # Transformers refuses it too: there is nothing to compare
        pytest.skip(f"Transformers does not build it: {type(error).__name__}")
    is_rope = isinstance(value, dict) and value.get("rope_type") in ("default", "llama3") and "partial_rotary_factor" not in value
    try:
        got = ours(tmp_path)
    except KvxError:
        if name not in MAY_REFUSE or value in list(ACTIVATIONS) or is_rope:
            raise
        return
    want = theirs(model)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_left_out_has_transformers_default(family, tmp_path):
    """Each field of config.json taken away in turn: what Transformers reads from the same folder, or a refusal."""
    build(family, BASE[family], tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    num_equal = 0
    for name in [n for n in whole if n != "model_type"]:
        path.write_text(json.dumps({k: v for k, v in whole.items() if k != name}))
        try:
            got = ours(tmp_path)
        except KvxError:
            continue
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        except AssertionError:  # SmolLM3's default pad_token_id is past this vocabulary
            continue
        want = theirs(model)
        assert float((got - want).abs().max() / want.abs().max()) < 1e-4, name
        num_equal += 1
    assert num_equal > 8


def test_smollm3_takes_its_defaults(tmp_path):
    """No no_rope_layers, no tie_word_embeddings: every fourth layer goes without rotation, and the head is the embedding."""
    model = build("smollm3", {**SHAPE, "num_hidden_layers": 5}, tmp_path)
    path = tmp_path / "config.json"
    kept = {
        k: v for k, v in json.loads(path.read_text()).items() if k not in ("no_rope_layers", "tie_word_embeddings", "layer_types")
    }
    path.write_text(json.dumps(kept))
    engine = Engine.load(tmp_path, num_blocks=16, block_size=8)
    assert engine.model.config.rotates == (True, True, True, False, True)
    assert engine.model.config.is_tied
    want = theirs(model)
    assert float((ours(tmp_path) - want).abs().max() / want.abs().max()) < 1e-4


WHOLE = {
    **{k: v for k, v in SHAPE.items() if not k.startswith(("bos", "pad"))},
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def test_without_transformers_what_is_left_out_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert config_of_json(WHOLE).rope_theta == 10000.0
    for name in WHOLE:
        if name != "model_type":
            with pytest.raises(Unsupported, match=rf"has no .*{name}.*pip install transformers"):
                config_of_json({k: v for k, v in WHOLE.items() if k != name})
    for family, name in (("smollm3", "no_rope_layers"), ("qwen3", "head_dim"), ("mistral", "sliding_window")):
        with pytest.raises(Unsupported, match=rf"has no .*{name}"):
            config_of_json({**WHOLE, "model_type": family})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; the runner's llama does not compute that"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "per_layer_config is"),
        ({"hidden_act": "xielu"}, "hidden_act is 'xielu'; the runner has silu, swish, gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type is "yarn"; the runner has default and llama3'),
        ({"attention_bias": True}, "attention_bias is true"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_computed_is_refused_by_its_name(fields, words):
    with pytest.raises(Unsupported, match=words):
        config_of_json({**WHOLE, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 3}, "4 query heads and 3 KV heads"),
        ({"num_attention_heads": 0}, "Transformers does not take this config.json"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"head_dim": 5}, "even"),
    ],
)
def test_impossible_shapes_are_refused_before_weights(fields, words):
    with pytest.raises(BadArgument, match=words):
        config_of_json({**WHOLE, **fields})


def generated(model, n: int) -> tuple[int, ...]:
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    return tuple(out[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("kind", ["int", "list", "none"])
def test_ends_of_text_are_those_of_generation_config(kind, tmp_path):
    model = build("llama", SHAPE, tmp_path)
    model.generation_config.eos_token_id = None
    free = generated(model, 12)
    end = free[5]
    eos = {"int": end, "list": [2, end], "none": None}[kind]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos} if eos is not None else {}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 2 if eos is not None else end}))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if eos is None:
        again.generation_config.eos_token_id = end  # what config.json says, where the other says nothing
    engine = Engine.load(tmp_path, num_blocks=16, block_size=8)
    answer = engine.generate([PROMPT], Params(max_tokens=12))[0][0]
    assert answer.tokens == generated(again, 12) == free[: free.index(end) + 1]
    assert answer.finish == "stop"
