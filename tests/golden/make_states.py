"""Golden bytes of recurrent states: what llama.cpp and Transformers keep of the same weights after the same tokens.

    python tests/golden/make_states.py      writes tests/golden/states.json

Models are tiny and random: Qwen3-Next, Mamba2, Mamba and LFM2, whose first layer has the same weights in both engines (LFM2: all of
them), so that its states are the same numbers up to rounding, each in its engine's own order. Needs xllamacpp, gguf and
transformers; no KVX. llama.cpp's C calls are taken out of the wheel by ctypes, on aarch64, where large structs go by reference.
"""

from __future__ import annotations

import base64
import ctypes as c
import importlib.util
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import DynamicCache

VOCAB, NUM_TOKENS = 64, 20
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Arrays = dict[str, np.ndarray]

# ---- llama.cpp


class Params(c.Structure):
    _fields_ = [("words", c.c_uint32 * 256)]


class Batch(c.Structure):
    _fields_ = [("n", c.c_int32)] + [(name, c.c_void_p) for name in ("token", "embd", "pos", "n_seq", "seq", "logits")]


spec = importlib.util.find_spec("xllamacpp")
assert spec is not None
assert spec.origin is not None
LIB = c.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so")))
LOG: list[str] = []
keep_log = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(
    lambda _, text, __: LOG.append((text or b"").decode("utf8", "replace"))
)
LIB.llama_log_set(keep_log, None)
LIB.llama_model_default_params.restype = LIB.llama_context_default_params.restype = Params
LIB.llama_model_load_from_file.argtypes, LIB.llama_model_load_from_file.restype = [c.c_char_p, Params], c.c_void_p
LIB.llama_init_from_model.argtypes, LIB.llama_init_from_model.restype = [c.c_void_p, Params], c.c_void_p
LIB.llama_decode.argtypes = [c.c_void_p, Batch]
LIB.llama_state_seq_get_size_ext.argtypes = [c.c_void_p, c.c_int32, c.c_uint32]
LIB.llama_state_seq_get_size_ext.restype = LIB.llama_state_seq_get_data_ext.restype = c.c_size_t
LIB.llama_state_seq_get_data_ext.argtypes = [c.c_void_p, c.c_void_p, c.c_size_t, c.c_int32, c.c_uint32]


def llama_state(arch: str, meta: dict[str, Any], weights: Arrays, seeds: list[str], tokens: list[int], flags: int) -> bytes:
    """The state of a sequence. The loader itself says which tensors it wants; those without weights are random."""
    shapes: dict[str, list[int]] = {name: [1] for name in seeds}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for _ in range(400):
            _write_gguf(path, arch, meta, shapes, weights)
            LOG.clear()
            model = LIB.llama_model_load_from_file(str(path).encode(), LIB.llama_model_default_params())
            if model:
                break
            text = "".join(LOG)
            wrong = re.search(r"tensor '([^']+)' has wrong shape; expected ([\d, ]+), got", text)
            missing = re.search(r"missing tensor '([^']+)'|tensor '([^']+)' not found", text)
            if wrong:
                shapes[wrong[1]] = [int(n) for n in wrong[2].split(",")]
            else:
                assert missing, text[-2000:]
                shapes[missing[1] or missing[2]] = [1]
        for name, x in weights.items():
            assert x.size == np.prod(shapes[name]), (name, x.shape, shapes[name])
        params = LIB.llama_context_default_params()
        params.words[0:4] = [256, 256, 256, 2]
        context, n = LIB.llama_init_from_model(model, params), len(tokens)
        arrays = [(c.c_int32 * n)(*values) for values in (tokens, range(n), [1] * n)]
        one = (c.c_int32 * 1)(0)
        seqs = (c.POINTER(c.c_int32) * n)(*[c.cast(one, c.POINTER(c.c_int32))] * n)
        logits = (c.c_int8 * n)(*[0] * (n - 1), 1)
        at = [c.cast(x, c.c_void_p) for x in (*arrays, seqs, logits)]
        assert LIB.llama_decode(context, Batch(n, at[0], None, *at[1:])) == 0
        size = LIB.llama_state_seq_get_size_ext(context, 0, flags)
        data = c.create_string_buffer(size)
        written = LIB.llama_state_seq_get_data_ext(context, data, size, 0, flags)
        return data.raw[:written]


def _write_gguf(path: Path, arch: str, meta: dict[str, Any], shapes: dict[str, list[int]], weights: Arrays) -> None:
    writer, rng = gguf.GGUFWriter(path, arch), np.random.default_rng(0)
    writer.add_tokenizer_model("no_vocab")
    for name, value in meta.items():
        key = f"{arch}.{name}"
        kind = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        kind[type(value)](key, value)
    for name, sizes in shapes.items():
        shape, given = tuple(reversed(sizes)), weights.get(name)
        is_ready = given is not None and given.size == np.prod(shape)
        x = given.reshape(shape) if is_ready else rng.normal(0, 0.1, shape)
        writer.add_tensor(name, np.ascontiguousarray(x, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def common(layers: int, hidden: int, heads: int, kv: int | list[int], wide: int) -> dict[str, Any]:
    fields = {"block_count": layers, "context_length": 512, "embedding_length": hidden, "feed_forward_length": wide}
    fields |= {"attention.head_count": heads, "attention.head_count_kv": kv, "vocab_size": VOCAB}
    return fields | {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}


# ---- models


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
            elif "A_log" not in name and "dt" not in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model.eval()


def numpy_of(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().numpy()


def qwen3_next() -> tuple[Any, str, dict[str, Any], Arrays, list[str]]:
    keys, values, dim, hidden = 2, 4, 16, 32
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": hidden, "intermediate_size": 32}
    delta = {
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    layers = ["linear_attention"] * 3 + ["full_attention"]
    sizes = heads | delta | experts | TOKENS
    config = transformers.Qwen3NextConfig(num_hidden_layers=4, layer_types=layers, rms_norm_eps=1e-5, **sizes)
    model = randomized(transformers.Qwen3NextForCausalLM(config))
    layer = model.model.layers[0]
    x, ratio = layer.linear_attn, values // keys
    q, k, v, z = np.split(numpy_of(x.in_proj_qkvz.weight).reshape(keys, -1, hidden), [dim, 2 * dim, (2 + ratio) * dim], 1)
    weights = {
        "token_embd.weight": numpy_of(model.model.embed_tokens.weight),
        "blk.0.attn_norm.weight": numpy_of(layer.input_layernorm.weight) + 1,
        "blk.0.attn_qkv.weight": np.concatenate([part.reshape(-1, hidden) for part in (q, k, v)]),
        "blk.0.attn_gate.weight": z.reshape(-1, hidden),
        "blk.0.ssm_conv1d.weight": numpy_of(x.conv1d.weight),
        "blk.0.ssm_dt.bias": numpy_of(x.dt_bias),
        "blk.0.ssm_a": -np.exp(numpy_of(x.A_log)),
        "blk.0.ssm_ba.weight": numpy_of(x.in_proj_ba.weight),
    }
    meta = common(4, hidden, 2, 1, 32) | {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 4}
    meta |= {"ssm.conv_kernel": 4, "ssm.state_size": dim, "ssm.group_count": keys, "ssm.time_step_rank": values}
    meta |= {"ssm.inner_size": values * dim, "full_attention_interval": 4, "expert_count": 2, "expert_used_count": 1}
    meta |= {"expert_feed_forward_length": 16, "expert_shared_feed_forward_length": 16}
    return model, "qwen3next", meta, weights, [f"blk.{i}.{n}.weight" for i in range(3) for n in ("attn_qkv", "attn_gate")]


def mamba2() -> tuple[Any, str, dict[str, Any], Arrays, list[str]]:
    sizes = {
        "hidden_size": 16,
        "expand": 2,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 8,
        "conv_kernel": 4,
    }
    config = transformers.Mamba2Config(num_hidden_layers=2, layer_norm_epsilon=1e-5, **sizes, **TOKENS)
    model = randomized(transformers.Mamba2ForCausalLM(config))
    weights = _mamba_weights(model)
    meta = common(2, 16, 0, 0, 0) | {"ssm.conv_kernel": 4, "ssm.inner_size": 32, "ssm.state_size": 16}
    return model, "mamba2", meta | {"ssm.time_step_rank": 4, "ssm.group_count": 1}, weights, []


def mamba() -> tuple[Any, str, dict[str, Any], Arrays, list[str]]:
    sizes = {"hidden_size": 16, "expand": 2, "state_size": 16, "conv_kernel": 4, "time_step_rank": 4}
    config = transformers.MambaConfig(num_hidden_layers=2, layer_norm_epsilon=1e-5, **sizes, **TOKENS)
    model = randomized(transformers.MambaForCausalLM(config))
    x = model.backbone.layers[0].mixer
    weights = _mamba_weights(model)
    weights |= {"blk.0.ssm_x.weight": numpy_of(x.x_proj.weight), "blk.0.ssm_dt.weight": numpy_of(x.dt_proj.weight)}
    meta = common(2, 16, 0, 0, 0) | {"ssm.conv_kernel": 4, "ssm.inner_size": 32, "ssm.state_size": 16, "ssm.time_step_rank": 4}
    return model, "mamba", meta, weights, []


def _mamba_weights(model: Any) -> Arrays:
    layer = model.backbone.layers[0]
    x = layer.mixer
    return {
        "token_embd.weight": numpy_of(model.backbone.embeddings.weight),
        "blk.0.attn_norm.weight": numpy_of(layer.norm.weight),
        "blk.0.ssm_in.weight": numpy_of(x.in_proj.weight),
        "blk.0.ssm_conv1d.weight": numpy_of(x.conv1d.weight),
        "blk.0.ssm_conv1d.bias": numpy_of(x.conv1d.bias),
        "blk.0.ssm_dt.bias": numpy_of(x.dt_bias if hasattr(x, "dt_bias") else x.dt_proj.bias),
        "blk.0.ssm_a": -np.exp(numpy_of(x.A_log)),
        "blk.0.ssm_d": numpy_of(x.D),
    }


def lfm2() -> tuple[Any, str, dict[str, Any], Arrays, list[str]]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "conv_L_cache": 3}
    kinds = ["conv", "full_attention", "conv"]
    sizes |= {"norm_eps": 1e-5, "rope_theta": 10000.0, "block_auto_adjust_ff_dim": False} | TOKENS
    config = transformers.Lfm2Config(num_hidden_layers=3, layer_types=kinds, **sizes)
    model = randomized(transformers.Lfm2ForCausalLM(config))
    weights = {"token_embd.weight": model.model.embed_tokens.weight, "token_embd_norm.weight": model.model.embedding_norm.weight}
    for i, layer in enumerate(model.model.layers):
        found = {"attn_norm": layer.operator_norm, "ffn_norm": layer.ffn_norm, "ffn_gate": layer.feed_forward.w1}
        found |= {"ffn_down": layer.feed_forward.w2, "ffn_up": layer.feed_forward.w3}
        if kinds[i] == "conv":
            x = layer.conv
            found |= {"shortconv.conv": x.conv, "shortconv.in_proj": x.in_proj, "shortconv.out_proj": x.out_proj}
        else:
            x = layer.self_attn
            found |= {"attn_q": x.q_proj, "attn_k": x.k_proj, "attn_v": x.v_proj, "attn_output": x.out_proj}
            found |= {"attn_q_norm": x.q_layernorm, "attn_k_norm": x.k_layernorm}
        weights |= {f"blk.{i}.{name}.weight": module.weight for name, module in found.items()}
    meta = common(3, 32, 2, [0, 1, 0], 48) | {"shortconv.l_cache": 3}
    return model, "lfm2", meta, {name: numpy_of(x) for name, x in weights.items()}, []


def case(name: str, make: Any) -> dict[str, Any]:
    model, arch, meta, weights, seeds = make()
    tokens = np.random.default_rng(3).integers(3, VOCAB, NUM_TOKENS).tolist()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        key = "cache_params" if name.startswith("mamba") else "past_key_values"
        model(torch.tensor([tokens]), use_cache=True, **{key: cache})
    layers = []
    for layer in cache.layers if name == "lfm2" else cache.layers[:1]:  # the others have other weights
        states = {"conv": getattr(layer, "conv_states", {}), "recurrent": getattr(layer, "recurrent_states", {})}
        tensors = {kind: found[0] for kind, found in states.items() if found.get(0) is not None}
        layers.append({kind: {"shape": list(t.shape), "f32": text(numpy_of(t).tobytes())} for kind, t in tensors.items()})
    state = llama_state(arch, meta, weights, seeds, tokens, 0 if name == "lfm2" else 1)
    return {"name": name, "tokens": tokens, "transformers": layers, "llama_cpp": text(state)}


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    made_by = f"transformers {transformers.__version__} and llama.cpp of xllamacpp 2026.10.11549, on aarch64"
    cases = [case(make.__name__, make) for make in (qwen3_next, mamba2, mamba, lfm2)]
    path = Path(__file__).with_name("states.json")
    path.write_text(json.dumps({"made_by": made_by, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
