"""Quantised checkpoints: what is documented gives Transformers' numbers, the rest is refused by its name."""

from __future__ import annotations

import json
import re

import pytest
import torch

from kvx import BadArgument, KvxError, Unsupported
from kvx.runner.open import open_model
from kvx.runner.quantised import quantised_of
from tests.runner.test_config_fields import build, ours, theirs
from tests.runner.test_families import SHAPE

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
WIDE = {**SHAPE, "hidden_size": 128, "intermediate_size": 192}  # 192: a block of 128 and a half
BLOCK = 64


def fp8(folder, kind: str, *, name: str = "weight_scale", extra: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The folder's linear layers in e4m3, but for the head; returns the numbers they stand for."""
    path = folder / "model.safetensors"
    tensors, numbers = {}, {}
    for key, w in safetensors.load_file(path).items():
        if "_proj.weight" not in key:
            tensors[key] = w
            continue
        rows, columns = w.shape
        if kind == "block":
            grid = w.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = grid.abs().amax((1, 3)) / 448
            wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        else:
            scale = (w.abs().amax(1, keepdim=True) if kind == "channel" else w.abs().max()) / 448
            wide = scale
        tensors[key] = (w / wide).to(torch.float8_e4m3fn)
        tensors[key.removesuffix("weight") + name] = scale
        numbers[key] = tensors[key].float() * wide
        for other in extra:
            tensors[key.removesuffix("weight") + other] = torch.tensor(0.5)
    safetensors.save_file(tensors, path, metadata={"format": "pt"})
    return numbers


def say(folder, quantization: dict | None, file: str = "config.json") -> None:
    path = folder / file
    fields = json.loads(path.read_text()) if path.is_file() else {}
    key = "quantization_config" if file == "config.json" else "quantization"
    path.write_text(json.dumps({**fields, key: quantization}))


def compressed(strategy: str, **fields) -> dict:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    weights |= {"block_structure": [BLOCK, BLOCK]} if strategy == "block" else {}
    group = {"targets": ["Linear"], "weights": {**weights, **fields}, "input_activations": {"num_bits": 8, "type": "float"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


DOCUMENTED = {
    "deepseek": ("block", "weight_scale_inv", (), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}),
    "qwen3": (
        "block",
        "weight_scale_inv",
        (),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "fp8 tensor": ("tensor", "weight_scale", ("input_scale",), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 tensor inv": ("tensor", "weight_scale_inv", (), {"quant_method": "fp8", "weight_block_size": None}),
    "fbgemm": ("channel", "weight_scale", (), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt": ("tensor", "weight_scale", ("input_scale", "k_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "compressed tensor": ("tensor", "weight_scale", ("input_scale",), compressed("tensor")),
    "compressed channel": ("channel", "weight_scale", (), compressed("channel")),
    "compressed block": ("block", "weight_scale", (), compressed("block")),
}


@pytest.mark.parametrize("case", DOCUMENTED)
def test_documented_fp8_is_dequantised(case, tmp_path):
    """Logits are those of the model whose weights were put through the same codes and scales."""
    kind, name, extra, quantization = DOCUMENTED[case]
    model = build("llama", WIDE, tmp_path)
    numbers = fp8(tmp_path, kind, name=name, extra=extra)
    with torch.no_grad():
        for key, values in numbers.items():
            model.get_parameter(key).copy_(values)
    say(tmp_path, quantization)
    tensors = open_model(tmp_path).tensors
    assert all(torch.equal(tensors.read(key), values) for key, values in numbers.items())
    want = theirs(model)
    assert float((ours(tmp_path) - want).abs().max() / want.abs().max()) < 1e-4


def test_block_fp8_is_what_transformers_itself_reads(tmp_path):
    """The same folder, loaded by Transformers, which dequantises where there is no GPU."""
    pytest.importorskip("accelerate", reason="Transformers reads FP8 with accelerate: pip install accelerate")
    build("qwen3", {**WIDE, "head_dim": 64}, tmp_path)
    fp8(tmp_path, "block", name="weight_scale_inv")
    say(tmp_path, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]})
    quantization = transformers.FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=quantization
    ).eval()
    tensors = open_model(tmp_path).tensors
    for key, value in model.state_dict().items():
        assert torch.equal(tensors.read(key), value.float()), key
    want = theirs(model)
    assert float((ours(tmp_path) - want).abs().max() / want.abs().max()) < 1e-4


def test_blocks_need_not_divide_the_matrix():
    """DeepSeek's kernels: the last blocks are cut off."""
    q = quantised_of({"quant_method": "fp8", "weight_block_size": [128, 128]})
    codes, scales = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    assert q.scale_shapes((200, 300)) == ((2, 3),)
    got = q.dequantise(codes, scales)
    assert all(got[i, j] == codes[i, j].float() * scales[i // 128, j // 128] for i in range(0, 200, 27) for j in range(0, 300, 31))


def test_modelopt_s_own_file_is_read(tmp_path):
    build("llama", WIDE, tmp_path)
    fp8(tmp_path, "tensor")
    with pytest.raises(Unsupported, match=r"is F8_E4M3 and config\.json has no quantization_config"):
        open_model(tmp_path)
    say(tmp_path, {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, "hf_quant_config.json")
    open_model(tmp_path)
    say(tmp_path, {"quant_algo": "NVFP4"}, "hf_quant_config.json")
    with pytest.raises(Unsupported, match="modelopt with quant_algo NVFP4"):
        open_model(tmp_path)


REFUSED = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "torchao": {"quant_method": "torchao"},
    "e5m2": {"quant_method": "fp8", "fmt": "e5m2"},
    "int8": compressed("channel", type="int"),
    "int4": {**compressed("group", num_bits=4, type="int"), "format": "pack-quantized"},
    "asymmetric": compressed("channel", symmetric=False),
    "sparse": {**compressed("tensor"), "sparsity_config": {"format": "sparse-24-bitmask"}},
    "nothing": {"bits": 8},
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_rest_is_refused_by_name(case, tmp_path):
    build("llama", WIDE, tmp_path)
    say(tmp_path, REFUSED[case])
    with pytest.raises(Unsupported, match="quantization_config: ") as error:
        open_model(tmp_path)
    assert REFUSED[case].get("quant_method", "no quant_method") in str(error.value) or case == "e5m2"
    assert "unquantised weights" in str(error.value)


def change(folder, edit) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    edit(tensors)
    safetensors.save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGED = {
    "missing": (lambda t: t.pop(Q), f"have no {Q}"),
    "shape": (lambda t: t.update({Q: t[Q][:32]}), r"q_proj.weight is \[32, 64\]; by config.json it is \[64, 64\]"),
    "type": (lambda t: t.update({Q: t[Q].to(torch.int8)}), "q_proj.weight is I8 and config.json has no quantization_config"),
    "left over": (
        lambda t: t.update({"model.layers.1.self_attn.sinks": torch.ones(4)}),
        "does not read: model.layers.1.self_attn.sinks",
    ),
    "bias": (lambda t: t.update({Q.replace("weight", "bias"): torch.ones(64)}), "does not read: .*q_proj.bias"),
    "more layers": (lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.ones(64)}), "does not read: model.layers.3"),
    "scales alone": (lambda t: t.update({Q + "_scale": torch.ones(())}), "is F32 and has .*weight_scale"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_tensors_that_are_not_the_model_s_are_refused_before_any_is_read(case, tmp_path, monkeypatch):
    edit, words = DAMAGED[case]
    build("llama", SHAPE, tmp_path)
    change(tmp_path, edit)
    monkeypatch.setattr("kvx.runner.engine.load_weights", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(KvxError, match=words):
        ours(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    model = build("llama", SHAPE, tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    open_model(tmp_path)
    both = {
        **safetensors.load_file(shards[1]),
        "model.norm.weight": torch.ones(64),
        "model.embed_tokens.weight": torch.ones(128, 64),
    }
    safetensors.save_file(both, shards[1], metadata={"format": "pt"})
    with pytest.raises(BadArgument, match=r"is in model-.*safetensors and in model-.*; a tensor is in one file"):
        open_model(tmp_path)


def test_scales_of_a_wrong_shape_are_refused(tmp_path):
    build("llama", WIDE, tmp_path)
    fp8(tmp_path, "channel")
    say(tmp_path, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    with pytest.raises(BadArgument, match=re.escape("weight_scale is [128, 1] of F32; for model.layers.0")):
        open_model(tmp_path)
    change(tmp_path, lambda t: [t.pop(k) for k in list(t) if k.endswith("weight_scale")])
    with pytest.raises(BadArgument, match="is FP8 and has 0 of weight_scale_inv, weight_scale"):
        open_model(tmp_path)


def test_harmless_leftovers_are_read_over(tmp_path):
    model = build("llama", SHAPE, tmp_path)
    change(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    want = theirs(model)
    assert float((ours(tmp_path) - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_with_a_head_of_its_own(same, tmp_path):
    """Transformers ties them where they are equal, and keeps the head where it differs."""
    build("llama", {**SHAPE, "tie_word_embeddings": True}, tmp_path)
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone() * (1 if same else -1)}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    want = theirs(model)
    assert float((ours(tmp_path) - want).abs().max() / want.abs().max()) < 1e-4


def test_a_broken_tokenizer_is_found_before_weights(tmp_path, monkeypatch):
    build("llama", SHAPE, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr("kvx.runner.engine.load_weights", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(BadArgument, match="tokenizer cannot be read"):
        ours(tmp_path)
