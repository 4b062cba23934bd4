"""attention_mla: queries over a latent cache (MLA). body.py is what it does.

A latent cache holds one row a token: the latent, which is the value of every head and most of its key, and the rotary part, the
rest of the key. In a spec it is one KV head whose K is the latent (head_dim) and whose V is the rotary part (v_head_dim), in one
tensor or two; write, gather, copy_blocks, convert and digest take it as any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvx.ops.attention import body
from kvx.ops.attention.body import Options, Queries
from kvx.ops.cache_view import CacheView, scales_of
from kvx.spec.cache_spec import CacheSpec
from kvx.tables import Table


def attention_mla(
    q: Tensor,  # [num_tokens, num_heads, head_dim + v_head_dim] f16, bf16 or f32: through the latent's weights, then rotary
    cache: Tensor | Sequence[Tensor],  # as in gather
    table: Table,
    *,
    spec: CacheSpec,  # num_kv_heads 1
    scale: float,  # multiplies q.k: 1 / sqrt(head dim of the model's own q), which the latent does not tell
    cu_seqlens: Tensor | None = None,  # as in attention_varlen; None: as many queries for every sequence
    k_scale: Tensor | None = None,  # of the latent
    v_scale: Tensor | None = None,  # of the rotary part
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,  # [num_tokens, num_heads, head_dim]: in the latent's space; None: made, of q's type
    lse: Tensor | None = None,
    max_query_len: int = 0,
    max_seq_len: int = 0,
    workspace: Tensor | None = None,  # attention_workspace_bytes(..., latent=True)
    planned: bool = False,  # attention_plan(..., latent=True) has run on this workspace for these lengths
    errors: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) of decodes and prefill chunks over a latent cache; every argument not described here as in attention_varlen.

    Keys are latent and rotary part, one after the other, and values the latent: what the model's weights make of q before and of
    out after is the caller's.
    """
    options = Options(float(scale), causal, window, soft_cap, max_query_len, max_seq_len, planned, latent=True)
    view = CacheView.of("attention_mla", cache, spec, scales_of(k_scale, v_scale, k_tensor_scale, v_tensor_scale), errors)
    queries = Queries(q, cu_seqlens, out, lse, sinks, workspace)
    return body.attend("attention_mla", queries, view, table, options, backend)
