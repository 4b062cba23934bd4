"""Quantised checkpoints: which `quantization_config` the runner turns back into numbers, and how. The others are refused by name.

Weights in FP8 (e4m3) with scales for blocks, rows or whole tensors: number = code x scale, in f32, then rounded to the model's
type, as Transformers dequantises them. Activations are not quantised here, so their scales are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, Unsupported

SCALE_NAMES = ("weight_scale_inv", "weight_scale")  # both are factors, also the one that is called inverse
# Scales of activations and of a quantised KV cache, which this runner does not have.
NOT_READ = ("input_scale", "input_scale_ub", "activation_scale", "output_scale", "k_scale", "v_scale", "kv_scale")
_ADVICE = "Take the model's unquantised weights, or a .gguf file."
_TAKES = (
    "the runner reads FP8 weights of quant_method fp8 (blocks or tensors), fbgemm_fp8, modelopt (FP8) and compressed-tensors "
    f"(float-quantized). {_ADVICE}"
)


@dataclass(frozen=True)
class Quantised:
    """How a checkpoint's FP8 matrices are scaled."""

    method: str
    block: tuple[int, int] | None = None  # rows and columns of a scale; None: a scale for each tensor or row

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """What a matrix's scales may look like."""
        rows, columns = shape
        if self.block is not None:
            return ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        return ((), (1,), (1, 1), (rows, 1), (rows,))

    def dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        """[rows, columns] f32."""
        values, factors = codes.float(), scales.float()
        if self.block is not None:
            rows, columns = codes.shape
            factors = factors.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        elif factors.dim() == 1 and factors.numel() > 1:
            factors = factors[:, None]
        return values * factors


def quantised_of(fields: Mapping[str, Any] | None) -> Quantised | None:
    """Of a config's quantization_config; None where there is none."""
    if not fields:
        return None
    if not isinstance(fields, Mapping):
        raise BadArgument(f"quantization_config is {fields!r}; it must be an object.")
    method = str(fields.get("quant_method", "")).lower()
    if method == "fp8":
        return _fp8(fields)
    if method == "fbgemm_fp8":
        return Quantised(method)
    if method == "modelopt":
        algorithm = str(fields.get("quant_algo", "")).upper()
        if algorithm != "FP8":
            raise Unsupported(f"quantization_config: quant_method modelopt with quant_algo {algorithm or 'none'}; {_TAKES}")
        return Quantised(method)
    if method == "compressed-tensors":
        return _compressed(fields)
    kind = f"quant_method is {method!r}" if method else "it has no quant_method"
    raise Unsupported(f"quantization_config: {kind}; {_TAKES}")


def _fp8(fields: Mapping[str, Any]) -> Quantised:
    code = fields.get("fmt", "e4m3")
    if code not in ("e4m3", "float8_e4m3fn"):
        raise Unsupported(f"quantization_config: fmt is {code!r}; the runner reads e4m3. {_ADVICE}")
    return Quantised("fp8", _block(fields.get("weight_block_size"), "weight_block_size"))


def _compressed(fields: Mapping[str, Any]) -> Quantised:
    for name in ("sparsity_config", "transform_config"):
        extra = fields.get(name)
        if extra and dict(extra).get("format") != "dense":
            raise Unsupported(f"quantization_config: compressed-tensors with {name}; {_TAKES}")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise Unsupported(f"quantization_config: compressed-tensors without config_groups; {_TAKES}")
    found = set()
    for name, group in groups.items():
        format = group.get("format") or fields.get("format")
        w = group.get("weights") or {}
        kind = f"{w.get('num_bits')}-bit {w.get('type')} by {w.get('strategy')}, format {format}"
        is_read = (
            (w.get("num_bits"), w.get("type")) == (8, "float")
            and w.get("strategy") in ("tensor", "channel", "block")
            and w.get("symmetric", True)
            and format in ("float-quantized", "naive-quantized")
        )
        if not is_read:
            raise Unsupported(f"quantization_config: compressed-tensors, {name}: {kind}; {_TAKES}")
        found.add(_block(w.get("block_structure"), "block_structure") if w["strategy"] == "block" else None)
    if len(found) > 1:
        raise Unsupported("quantization_config: compressed-tensors with groups of different blocks; the runner reads one kind.")
    return Quantised("compressed-tensors", found.pop())


def _block(value: Any, name: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise BadArgument(f"quantization_config: {name} is {value!r}; it must be two whole numbers, like [128, 128].")


def is_code(dtype: torch.dtype) -> bool:
    return dtype == torch.float8_e4m3fn
