"""Tiny GGUF models of random weights, of any architecture that llama.cpp of the xllamacpp wheel loads.

Only the metadata is written by hand: the loader itself says which tensors it misses and which shapes it expects. Tokens are bytes.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CONTEXT = 4096


def _common(layers: int, *, kv: int | list[int] = 1) -> dict[str, Any]:
    return {
        "block_count": layers, "context_length": CONTEXT, "embedding_length": 128, "feed_forward_length": 96,
        "attention.head_count": 2, "attention.head_count_kv": kv, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }  # fmt: skip


_HEADS_64 = {"attention.key_length": 64, "attention.value_length": 64}
_WINDOW = {"attention.sliding_window": 32}
_GDN = {
    "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
    "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 8, "full_attention_interval": 4,
    "rope.dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
_LATENT = {
    "attention.q_lora_rank": 48, "attention.kv_lora_rank": 64, "attention.key_length": 96, "attention.value_length": 64,
    "attention.key_length_mla": 64, "attention.value_length_mla": 32, "rope.dimension_count": 32, "leading_dense_block_count": 2,
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "expert_weights_scale": 1.0, "expert_gating_func": 2,
}  # fmt: skip
_SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 32, "ssm.time_step_rank": 8, "ssm.group_count": 1}
METADATA: dict[str, dict[str, Any]] = {
    "llama": _common(2) | _HEADS_64,
    "gemma3": _common(6) | _HEADS_64 | _WINDOW,  # every sixth layer sees all, the others the last 32 tokens
    "lfm2": _common(3, kv=[0, 1, 0]) | {"shortconv.l_cache": 3},  # convolutions, and attention in the middle
    "falcon-h1": _common(2) | _HEADS_64 | _SSM,  # attention and a matrix in every layer
    "qwen35": _common(4) | _GDN,  # linear attention, and one layer of attention with positions of several axes
    "deepseek2": _common(2) | _LATENT,  # a latent row in place of K, and no V
    "mamba2": _common(2, kv=0) | _SSM | {"attention.head_count": 0, "feed_forward_length": 0},  # no attention
}
# Tensors that the loader takes for optional, and that its graph then needs.
_SEEDS = {
    "falcon-h1": [f"blk.{i}.ssm_conv1d.bias" for i in range(2)],
    "qwen35": [f"blk.{i}.{name}.weight" for i in range(3) for name in ("attn_qkv", "attn_gate")],
}


class _Params(c.Structure):
    _fields_ = [("words", c.c_uint32 * 256)]  # larger than any of the engine's: by reference, or copied from its beginning


def make_gguf(architecture: str, path: Path) -> Path:
    """The same bytes each time. In a process of its own: what is logged there would else wait for a server's threads here."""
    done = subprocess.run([sys.executable, "-m", __name__, architecture, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


def _make(architecture: str, path: Path) -> None:
    lib, log = _library()
    shapes: dict[str, list[int]] = {name: [1] for name in _SEEDS.get(architecture, ())}
    for _ in range(400):
        _write(path, architecture, shapes)
        log.clear()
        model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if model:
            return
        said = "".join(log)
        wrong = re.search(r"tensor '([^']+)' has wrong shape; expected ([\d, ]+), got", said)
        missing = re.search(r"missing tensor '([^']+)'|tensor '([^']+)' not found", said)
        if wrong:
            shapes[wrong[1]] = [int(n) for n in wrong[2].split(",")]
        else:
            assert missing, said[-2000:]
            shapes[missing[1] or missing[2]] = [1]
    raise AssertionError(f"{architecture} did not load after 400 tensors")


def byte_symbols() -> list[str]:
    """GPT-2's letter of each byte: a printable one is itself."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def add_value(writer: gguf.GGUFWriter, name: str, value: int | float | list[Any]) -> None:
    add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
    add(name, value)  # type: ignore[operator]


def _write(path: Path, architecture: str, shapes: dict[str, list[int]]) -> None:
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    symbols = byte_symbols()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*symbols, "<end>", "th"])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(False)
    for name, value in METADATA[architecture].items():
        add_value(writer, f"{architecture}.{name}", value)
    for name, sizes in shapes.items():
        shape = tuple(reversed(sizes))
        if "norm" in name:
            x = np.ones(shape)
        elif name.endswith("ssm_a"):
            x = -np.exp(rng.uniform(-2, 0, shape))
        else:
            x = rng.normal(0, 1.0 if name == "token_embd.weight" else 0.15, shape)
        writer.add_tensor(name, np.ascontiguousarray(x, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _library() -> tuple[Any, list[str]]:
    """libllama's C calls, out of the wheel, and what it logs."""
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    lib, log = c.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so"))), []  # type: ignore[var-annotated]
    keep = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(
        lambda _, text, __: log.append((text or b"").decode("utf8", "replace"))
    )
    lib.keep = keep  # called for as long as the library is there
    lib.llama_log_set.argtypes = [type(keep), c.c_void_p]
    lib.llama_log_set(keep, None)
    lib.llama_model_default_params.restype = _Params
    lib.llama_model_load_from_file.argtypes, lib.llama_model_load_from_file.restype = [c.c_char_p, _Params], c.c_void_p
    return lib, log


if __name__ == "__main__":
    _make(sys.argv[1], Path(sys.argv[2]))
