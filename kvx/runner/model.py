"""Model: a decoder over a PagedCache. KVX's ops do what touches the cache; torch and Triton (fused.py, few_rows.py) the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, rms_norm, silu

from kvx.cache.batch import Batch
from kvx.cache.groups import LayerGroup
from kvx.cache.paged import PagedCache
from kvx.errors import BadArgument
from kvx.ops.append.append import qkv_norm_rope_append
from kvx.ops.attention.attention import attention_decode, attention_plan, attention_varlen, attention_workspace_bytes
from kvx.runner.config import ModelConfig
from kvx.runner.gemm import gemm, gemm_add
from kvx.runner.weights import Weights
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.formats import FORMATS

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Short names of those that need no calibration: each row of a head has its own scale.
KV_FORMATS = {"int8": "int8_per_token_head", "fp8": "fp8_e4m3_per_token_head", "fp8_e4m3": "fp8_e4m3_per_token_head"}

_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {  # by the names of config.ACTIVATIONS
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


def kv_format_of(name: str, dtype: str) -> str:
    """A format's full name; "auto" is the model's own type."""
    full = dtype if name == "auto" else KV_FORMATS.get(name, name)
    short = ", ".join(("auto", "f32", "bf16", "f16", "int8", "fp8"))
    if full not in FORMATS:
        raise BadArgument(f'KV format "{name}" does not exist. Short names: {short}; `kvx inspect --formats` lists all.')
    f = FORMATS[full]
    if f.has_tensor_scale or (f.scale is not None and not f.granularity.is_stored_per_token):
        raise BadArgument(f'KV format "{name}" needs scales measured beforehand; the runner takes formats without: {short}.')
    return full


def layer_groups(config: ModelConfig, *, num_blocks: int, block_size: int, kv_format: str) -> list[LayerGroup]:
    """The cache this model needs: one group of full layers."""
    spec = CacheSpec(num_blocks, block_size, config.num_kv_heads, config.head_dim, format=kv_format)
    return [LayerGroup("full", tuple(range(config.num_layers)), spec)]


def _kernels(name: str, device: torch.device) -> Any:
    """A module of Triton kernels; None on a host, on a device that they do not run on, and without Triton or with an old one."""
    if device.type != "cuda":
        return None
    try:
        module = import_module(f"kvx.runner.{name}")
    except ImportError:
        return None
    return module if module.work_on(device) else None


class Model:
    is_one_pass = True

    def __init__(self, config: ModelConfig, weights: Weights, cache: PagedCache, dtype: torch.dtype) -> None:
        self.config, self.weights, self.cache, self.dtype = config, weights, cache, dtype
        angles = torch.arange(cache.max_seq_len, device=cache.device, dtype=torch.float32)[:, None] * weights.inverse_frequencies
        # Transformers rounds them to the model's type; so do we, that texts agree. f32 holds any of these values.
        self._cos, self._sin = (f(angles).to(dtype).float() for f in (torch.cos, torch.sin))
        self._is_mixed = weights.embed.dtype != dtype
        self.workspace: Tensor | None = None
        self._fused, self._few_rows = _kernels("fused", cache.device), _kernels("few_rows", cache.device)

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """[num_tokens, hidden]: this step's tokens, put into the cache on the way."""
        c, w, tokens = self.config, self.weights, batch.num_tokens
        h = w.embed[batch.tokens].to(self.dtype)  # a new tensor, changed in place from here on
        q = torch.empty(tokens, c.num_heads, c.head_dim, dtype=self.dtype, device=h.device)
        attended, lse = torch.empty_like(q), torch.empty(tokens, c.num_heads, dtype=torch.float32, device=h.device)
        attend, how = self.attention(batch, q)
        rotation: dict[str, Any] = {"cos": self._cos, "sin": self._sin, "positions": batch.positions}
        norms = (*(layer.norm for layer in w.layers[1:]), w.norm)  # what follows each layer
        x = rms_norm(h, (c.hidden_size,), w.layers[0].norm, c.norm_eps)
        for i, layer in enumerate(w.layers):
            handle = self.cache.layer(i)
            qkv = self.gemm(x, layer.qkv, layer.qkv_bias)
            qkv_norm_rope_append(
                q, handle.cache, qkv, slot_mapping=batch.slot_mapping(handle.group), spec=handle.spec, q_weight=layer.q_norm,
                k_weight=layer.k_norm, eps=c.norm_eps, **(rotation if c.does_rotate(i) else {}), **handle.scales,
            )  # fmt: skip
            attend(q, handle.cache, batch.table(handle.group), spec=handle.spec, out=attended, lse=lse, **how, **handle.scales)
            x = self._add_norm(h, attended.view(tokens, -1), layer.out, layer.mlp_norm)
            x = self._add_norm(h, self.gated(x, layer.gate_up), layer.down, norms[i])
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] f32."""
        return self.gemm(hidden, self.weights.head).float()

    def forward(self, batch: Batch) -> Tensor:
        """Logits after each sequence's last token of this step."""
        hidden = self.hidden(batch)
        return self.logits(hidden if batch.num_tokens == batch.num_seqs else hidden[batch.last])

    def attention(self, batch: Batch, q: Tensor) -> tuple[Any, dict[str, Any]]:
        """The op for this batch and what all layers give it. On a device the work is shared out once, for every layer."""
        is_decode = batch.num_tokens == batch.num_seqs
        how: dict[str, Any] = {} if is_decode else {"cu_seqlens": batch.cu_seqlens, "max_query_len": batch.max_query_len}
        if q.is_cuda:
            handle = self.cache.layer(0)
            shape = (q, handle.cache, batch.table(handle.group))
            need = attention_workspace_bytes(*shape, spec=handle.spec, **how)
            if self.workspace is None or self.workspace.numel() < need:
                self.workspace = torch.empty(need, dtype=torch.uint8, device=q.device)
            attention_plan(*shape, workspace=self.workspace, spec=handle.spec, **how)
            how |= {"workspace": self.workspace, "planned": True}
        return (attention_decode if is_decode else attention_varlen), how

    def gemm(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """[rows, out] of x [rows, in]."""
        if self._few_rows is not None and self._few_rows.takes(x, w):
            few: Tensor = self._few_rows.gemm(x, w, bias)
            return few
        if self._is_mixed:
            x = x.to(w.dtype)
        y = gemm(x, w, bias)
        return y.to(self.dtype) if self._is_mixed else y

    def gemm_parts(self, x: Tensor, w: Tensor) -> Tensor:
        """The same, or [parts, rows, out] in f32 that add up to it."""
        if self._few_rows is not None and self._few_rows.takes(x, w):
            parts: Tensor = self._few_rows.gemm_parts(x, w)
            return parts
        return self.gemm(x, w)

    def _add_norm(self, h: Tensor, x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        """h += x @ w; then its norm. 16-bit sums round the product first, as Transformers' do."""
        if self._fused is not None:
            normed: Tensor = self._fused.add_rms_norm(h, self.gemm_parts(x, w), norm, self.config.norm_eps)
            return normed
        if self.dtype == torch.float32:
            gemm_add(h, x, w)
        else:
            h.add_(self.gemm(x, w))
        return rms_norm(h, norm.shape, norm, self.config.norm_eps)

    def gated(self, x: Tensor, w: Tensor) -> Tensor:
        """[rows, out]: the activation of gate, times up, of x times [in, (gate, up)]."""
        is_silu = self.config.activation == "silu"
        if is_silu and self._few_rows is not None and self._few_rows.takes(x, w):
            few: Tensor = self._few_rows.gemm_silu_mul(x, w)
            return few
        gate_up = self.gemm(x, w)
        if is_silu and self._fused is not None:
            gated: Tensor = self._fused.silu_mul(gate_up)
            return gated
        gate, up = gate_up.chunk(2, -1)
        return _ACTIVATIONS[self.config.activation](gate).mul_(up)
