"""The hybrids of small_models.py as GGUF files: the same float32 weights, under llama.cpp's names and in its orders.

Names are those of the gguf package. What llama.cpp's converter changes in numbers is done here too: Mamba-2's A is kept as -exp(A),
and Gemma 4's frequencies that do not turn are divided by a number without end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.engines.tiny_gguf import add_value

_ARCHITECTURES = {"lfm2": gguf.MODEL_ARCH.LFM2, "falcon_h1": gguf.MODEL_ARCH.FALCON_H1, "gemma4_text": gguf.MODEL_ARCH.GEMMA4}
END = 0  # the token that ends a text
_NO_TURN = 1e30  # a frequency divided by it is none


def write_hybrid(folder: Path, path: Path) -> Path:
    """Of a Transformers checkpoint of LFM2, Falcon-H1 or Gemma 4."""
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, name)
    _add_tokenizer(writer, config["vocab_size"])
    for key, value in _metadata(config).items():
        add_value(writer, f"{name}.{key}", value)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for theirs, x in load_file(folder / "model.safetensors").items():
        # The map has no row for the bias of a step's length, which is a parameter of its own in Transformers.
        stem = theirs.replace("mamba.dt_bias", "mamba.dt_proj.bias")
        ours = names.get_name(stem, try_suffixes=(".weight", ".bias"))
        assert ours is not None, f"no name for {theirs}"
        writer.add_tensor(_NAMES.get(ours.rpartition(".")[2], "{}").format(ours), _changed(theirs, x))
    if config["model_type"] == "gemma4_text":
        writer.add_tensor("rope_freqs.weight", _frequencies(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_NAMES = {"layer_output_scale": "{}.weight"}  # a buffer in Transformers, without the suffix that llama.cpp gives it


def _changed(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    if name.endswith("A_log"):
        x = -np.exp(x)
    if name.endswith(("A_log", ".D")):
        x = x[:, None]
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        x = x[:, 0]
    return np.ascontiguousarray(x, dtype=np.float32)


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    found = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"], "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
    }  # fmt: skip
    return found | {"lfm2": _lfm2, "falcon_h1": _falcon_h1, "gemma4_text": _gemma4}[config["model_type"]](config)


def _lfm2(config: dict[str, Any]) -> dict[str, Any]:
    kv = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in config["layer_types"]]
    return {
        "attention.head_count_kv": kv, "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"], "shortconv.l_cache": config["conv_L_cache"],
    }  # fmt: skip


def _falcon_h1(config: dict[str, Any]) -> dict[str, Any]:
    dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "attention.key_length": dim, "attention.value_length": dim, "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_d_ssm"], "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_n_heads"], "ssm.group_count": config["mamba_n_groups"],
    }  # fmt: skip


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    dim, wide = config["head_dim"], _full_head_dim(config)
    ropes = config["rope_parameters"]
    return {
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "attention.key_length": wide, "attention.value_length": wide,
        "attention.key_length_swa": dim, "attention.value_length_swa": dim, "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"], "rope.dimension_count": wide,
        "rope.dimension_count_swa": dim, "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }  # fmt: skip


def _full_head_dim(config: dict[str, Any]) -> int:
    full = str(config["layer_types"].index("full_attention"))
    return int(config["per_layer_config"][full]["head_dim"])


def _frequencies(config: dict[str, Any]) -> NDArray[np.float32]:
    """Of layers that see all: what each frequency is divided by. Only the first quarter of them turns."""
    half = _full_head_dim(config) // 2
    turning = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * half)
    return np.array([1.0] * turning + [_NO_TURN] * (half - turning), np.float32)


def _add_tokenizer(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    """Tests give ids: these are words to print."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(num_tokens)])
    writer.add_token_types([3] + [1] * (num_tokens - 1))
    writer.add_token_merges(["t h"])  # a file without one is refused
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
