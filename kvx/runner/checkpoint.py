"""Checkpoints: a decoder's tensors by Transformers' names, from safetensors or GGUF, and the check before they are loaded.

The check reads headers alone: every tensor the model needs is there, in its shape and in a type that is understood, and nothing
is left over that nobody would read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, Unsupported
from kvx.runner.config import ModelConfig
from kvx.runner.gguf_file import GgufFile
from kvx.runner.quantised import NOT_READ, SCALE_NAMES, Quantised

# Transformers' names, and GGUF's where they differ.
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# llama.cpp stores these families' Q and K rows for pairs (2i, 2i + 1); we rotate (i, i + head_dim / 2), as Transformers does.
_INTERLEAVED = ("llama", "mistral", "smollm3")
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FP8 = "F8_E4M3"
_BUFFERS = ("rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq")  # computed, and stored by old versions of Transformers
_HEAD = "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model reads, by Transformers' name."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (c.hidden_size,),
            at + "self_attn.q_proj.weight": (q, c.hidden_size),
            at + "self_attn.k_proj.weight": (kv, c.hidden_size),
            at + "self_attn.v_proj.weight": (kv, c.hidden_size),
            at + "self_attn.o_proj.weight": (c.hidden_size, q),
            at + "post_attention_layernorm.weight": (c.hidden_size,),
            at + "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            at + "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            at + "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
        if c.has_qkv_bias:
            shapes |= {f"{at}self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
        if c.has_qk_norm:
            shapes |= {f"{at}self_attn.{x}_norm.weight": (c.head_dim,) for x in "qk"}
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.is_tied:
        shapes[_HEAD] = (c.vocab_size, c.hidden_size)
    return shapes


class SafetensorsFolder:
    """Reads tensors by Transformers' names, from one file or many; FP8 matrices as their numbers."""

    def __init__(self, folder: Path, quantised: Quantised | None = None) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder, self._quantised = folder, quantised
        index = folder / "model.safetensors.index.json"
        files = _indexed_files(index) if index.is_file() else ["model.safetensors"]
        missing = [f for f in files if not (folder / f).is_file()]
        if missing:
            raise BadArgument(f"{folder} has no {missing[0]}; a model folder has model.safetensors, or the files its index names.")
        self._files = []
        for name in files:
            try:
                self._files.append(safe_open(str(folder / name), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise BadArgument(f"{folder / name} cannot be read as safetensors: {error}. Fetch it again.") from error
        self._at: dict[str, int] = {}
        for i, file in enumerate(self._files):
            for name in file.keys():  # noqa: SIM118
                if name in self._at:
                    raise BadArgument(f"{folder}: {name} is in {files[self._at[name]]} and in {files[i]}; a tensor is in one file.")
                self._at[name] = i
        self.names = frozenset(self._at)

    def check(self, config: ModelConfig) -> None:
        """Raise unless this model can be read from here, whole and with nothing left over."""
        wanted = tensor_shapes(config)
        read = set(wanted)
        if config.is_tied and _HEAD in self.names:  # as old files have it; a head of its own is kept, as Transformers keeps it
            wanted |= {_HEAD: wanted["model.embed_tokens.weight"]}
            read.add(_HEAD)
        for name, shape in wanted.items():
            self._check(name, shape)
            read |= {scale for scale in self._scales(name) if self._type(name) == _FP8}
        spare = [n for n in sorted(self.names - read) if not n.endswith(_BUFFERS) and not self._is_activation_scale(n)]
        if spare:
            raise Unsupported(
                f"{self._folder} has {len(spare)} tensors that the runner's {config.family} does not read: "
                f"{', '.join(spare[:3])}{', ...' if len(spare) > 3 else ''}. They may change the answer."
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        got, kind = self._shape(name), self._type(name)
        if got != shape:
            raise BadArgument(f"{self._folder}: {name} is {list(got)}; by config.json it is {list(shape)}.")
        scales = self._scales(name)
        if kind in _TYPES:
            if scales:
                raise Unsupported(f"{self._folder}: {name} is {kind} and has {scales[0]}; the runner knows scales of FP8 alone.")
            return
        if kind != _FP8 or self._quantised is None:
            why = " and config.json has no quantization_config that says what it means" if self._quantised is None else ""
            raise Unsupported(f"{self._folder}: {name} is {kind}{why}; the runner reads {', '.join(_TYPES)}, and FP8 with scales.")
        if len(scales) != 1:
            raise BadArgument(f"{self._folder}: {name} is FP8 and has {len(scales)} of {', '.join(SCALE_NAMES)}; it takes one.")
        got, allowed = self._shape(scales[0]), self._quantised.scale_shapes(shape)
        if got not in allowed or self._type(scales[0]) not in (*_TYPES, "F8_E8M0"):
            raise BadArgument(
                f"{self._folder}: {scales[0]} is {list(got)} of {self._type(scales[0])}; for {name}, {list(shape)}, it takes "
                f"{' or '.join(str(list(s)) for s in allowed)} ({self._quantised.method})."
            )

    def read(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        if tensor.dtype != torch.float8_e4m3fn or self._quantised is None:
            return tensor
        return self._quantised.dequantise(tensor, self._tensor(self._scales(name)[0]))

    def _scales(self, name: str) -> list[str]:
        base = name.removesuffix("weight")
        return [base + s for s in SCALE_NAMES if base != name and base + s in self.names]

    def _is_activation_scale(self, name: str) -> bool:
        return self._quantised is not None and name.rsplit(".", 1)[-1] in NOT_READ

    def _tensor(self, name: str) -> Tensor:
        self._require(name)
        found: Tensor = self._files[self._at[name]].get_tensor(name)
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        self._require(name)
        return tuple(self._files[self._at[name]].get_slice(name).get_shape())

    def _type(self, name: str) -> str:
        return str(self._files[self._at[name]].get_slice(name).get_dtype())

    def _require(self, name: str) -> None:
        if name not in self._at:
            raise BadArgument(f"the model's files have no {name}.")


def _indexed_files(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadArgument(f"{index} is no index of safetensors files: {error!r}. Fetch it again.") from error


class GgufWeights:
    """Reads tensors of a GGUF file by Transformers' names."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file, self._config = file, config
        self.names = frozenset(file.tensors)

    def check(self, config: ModelConfig) -> None:
        """Raise unless this model can be read from here, whole and with nothing left over."""
        wanted = {_gguf_name(name): shape for name, shape in tensor_shapes(config).items()}
        for name, shape in wanted.items():
            if name not in self._file.tensors:
                raise BadArgument(f"{self._file.path} has no {name}.")
            got = self._file.tensors[name].shape
            if got != shape:
                raise BadArgument(f"{self._file.path}: {name} is {list(got)}; by its metadata it is {list(shape)}.")
            self._file.check_type(name)
        spare = sorted(self.names - set(wanted) - {"rope_freqs.weight"})
        if spare:
            raise Unsupported(
                f"{self._file.path} has {len(spare)} tensors that the runner's {config.family} does not read: "
                f"{', '.join(spare[:3])}{', ...' if len(spare) > 3 else ''}. They may change the answer."
            )

    def read(self, name: str) -> Tensor:
        theirs, base = _gguf_name(name), name.rsplit(".", 1)[0]
        if theirs not in self._file.tensors:
            raise BadArgument(f"{self._file.path} has no {theirs}.")
        values = torch.from_numpy(self._file.read(theirs))
        end = base.split(".", 3)[-1]
        heads = {"self_attn.q_proj": self._config.num_heads, "self_attn.k_proj": self._config.num_kv_heads}.get(end, 0)
        if heads and self._config.family in _INTERLEAVED:
            values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        return values

    def inverse_frequencies(self) -> Tensor:
        """Llama 3's scaling is a tensor here: what each frequency is divided by."""
        freq = self._config.inverse_frequencies()
        if "rope_freqs.weight" in self._file.tensors:
            divisors = torch.from_numpy(self._file.read("rope_freqs.weight"))
            if divisors.shape != freq.shape:
                raise BadArgument(f"{self._file.path}: rope_freqs.weight is {list(divisors.shape)}; it must be {list(freq.shape)}.")
            freq = freq / divisors
        return freq


def _gguf_name(name: str) -> str:
    base, kind = name.rsplit(".", 1)
    prefix = ""
    if base.startswith("model.layers."):
        number, base = base.removeprefix("model.layers.").split(".", 1)
        prefix = f"blk.{number}."
    return f"{prefix}{_GGUF_NAMES[base]}.{kind}"


def head_of(source: SafetensorsFolder | GgufWeights, config: ModelConfig, embed: Any) -> Tensor | None:
    """The head's rows; None where they are the embedding's. A tied model's own head counts where it differs, as in Transformers."""
    if config.is_tied and _HEAD not in source.names:
        return None
    head = source.read(_HEAD)
    return None if config.is_tied and torch.equal(head, embed) else head
