"""attention_decode, attention_varlen: queries over cached keys and values. body.py is what they do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvx.errors import Unsupported
from kvx.layout.pointers import CachePointers
from kvx.ops import backend as backends
from kvx.ops.attention import body
from kvx.ops.attention.body import Options, Queries
from kvx.ops.cache_view import CacheView, scales_of
from kvx.spec.cache_spec import CacheSpec
from kvx.tables import Table


def attention_decode(
    q: Tensor,  # [num_tokens, num_heads, head_dim] f16, bf16 or f32; num_tokens / sequences of them each
    cache: Tensor | Sequence[Tensor],  # as in gather
    table: Table,
    *,
    spec: CacheSpec,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    scale: float | None = None,  # multiplies q.k; None: 1 / sqrt(head_dim)
    causal: bool = True,  # a query sees positions up to its own. False: the whole sequence; a window is then refused
    window: int = 0,  # positions a query sees, its own the last of them; 0: all up to its own
    soft_cap: float = 0.0,  # c > 0: c * tanh(score / c)
    sinks: Tensor | None = None,  # [num_heads] f32: a logit each, part of the sum and without a value
    out: Tensor | None = None,  # [num_tokens, num_heads, v_head_dim]; None: made, of q's type
    lse: Tensor | None = None,  # [num_tokens, num_heads] f32
    max_seq_len: int = 0,  # bound of the lengths, by which work is shared out; 0: as the table allows
    workspace: Tensor | None = None,  # attention_workspace_bytes(...) bytes on the device; None: allocated. The host needs none
    planned: bool = False,  # attention_plan has run on this workspace for these lengths
    errors: Tensor | None = None,  # one int64 on the device: bad block ids are added to it
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one or a few query tokens a sequence.

    `lse` is the natural logarithm of the sum of exponentials, without the sink: kvx.merge_attention combines parts by it. A
    query that sees nothing gives 0 and -inf. A block id outside the cache, at a position some query sees, raises OutOfRange on
    the host; on a device the position is not seen and is counted in `errors`. In a CUDA graph give `workspace` (and run
    attention_plan in it once a step): one allocated here lives in the graph's own pool.
    """
    options = Options(default_scale(scale, q), causal, window, soft_cap, 0, max_seq_len, planned)
    view = CacheView.of("attention_decode", cache, spec, scales_of(k_scale, v_scale, k_tensor_scale, v_tensor_scale), errors)
    queries = Queries(q, None, out, lse, sinks, workspace)
    return body.attend("attention_decode", queries, view, table, options, backend)


def attention_varlen(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    cache: Tensor | Sequence[Tensor],
    table: Table,
    *,
    cu_seqlens: Tensor,  # [batch + 1] int32 or int64: queries of sequence s are rows cu_seqlens[s] to cu_seqlens[s + 1]
    spec: CacheSpec,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_query_len: int = 0,  # bound of the queries of one sequence; 0: num_tokens
    max_seq_len: int = 0,
    workspace: Tensor | None = None,
    planned: bool = False,
    fp8_products: bool = False,  # allow rounding queries and softmax weights to fp8 e4m3 where that is faster
    errors: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) of prefill chunks and decodes in one call; everything else as in attention_decode.

    `fp8_products` is a permission: prefill of long prompts over an fp8 e4m3 cache on Hopper is then 1.4 times as fast and
    less exact (docs/attention.md has the error). Everything else computes as without it. kvx.supports says which specs it changes.

    Of rows of q that are in no sequence's range, `out` and `lse` are left alone where the caller gave them, so that a graph can be
    captured for more tokens than a step has; where they are made here, such rows are 0 and -inf.
    """
    options = Options(
        default_scale(scale, q), causal, window, soft_cap, max_query_len, max_seq_len, planned, fp8_products=fp8_products
    )
    view = CacheView.of("attention_varlen", cache, spec, scales_of(k_scale, v_scale, k_tensor_scale, v_tensor_scale), errors)
    queries = Queries(q, cu_seqlens, out, lse, sinks, workspace)
    return body.attend("attention_varlen", queries, view, table, options, backend)


def attention_workspace_bytes(
    q: Tensor, cache: Tensor | Sequence[Tensor] | CachePointers, table: Table, *, spec: CacheSpec, cu_seqlens: Tensor | None = None,
    causal: bool = True, window: int = 0, max_query_len: int = 0, max_seq_len: int = 0, latent: bool = False,
    backend: str = "auto",
) -> int:  # fmt: skip
    """Bytes of workspace calls of these shapes need: by sequences, heads and max_query_len, not by lengths. 0 on the host.

    `latent`: for attention_mla.
    """
    if torch.compiler.is_compiling():
        raise Unsupported(
            "attention_workspace_bytes(): a number that the library finds cannot be traced. Call it outside of torch.compile, and "
            "give attention the workspace; without one it allocates its own."
        )
    options = Options(1.0, causal, window, 0.0, max_query_len, max_seq_len, latent=latent)
    view = CacheView.of("attention_workspace_bytes", cache, spec)
    body.check_cache("attention_workspace_bytes", q, view, table, options)
    if backends.choose("attention_workspace_bytes", backend, view.first) == "torch":
        return 0
    return body.workspace_bytes(Queries(q, cu_seqlens), view, table, options)


def attention_plan(
    q: Tensor, cache: Tensor | Sequence[Tensor] | CachePointers, table: Table, *, workspace: Tensor | None, spec: CacheSpec,
    cu_seqlens: Tensor | None = None, causal: bool = True, window: int = 0, max_query_len: int = 0, max_seq_len: int = 0,
    latent: bool = False, errors: Tensor | None = None, backend: str = "auto",
) -> None:  # fmt: skip
    """Share out the work of a step by the lengths on the device, into the workspace; each layer's call then says planned=True.

    One plan serves every layer of the same shapes, types, formats, mask and table. `latent`: for attention_mla. Nothing waits. On
    the host, and on torch, there is nothing to plan.
    """
    options = Options(1.0, causal, window, 0.0, max_query_len, max_seq_len, latent=latent)
    view = CacheView.of("attention_plan", cache, spec, errors=errors)
    body.plan(Queries(q, cu_seqlens, workspace=workspace), view, table, options, backend)


def default_scale(scale: float | None, q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1] or 1) if scale is None else float(scale)
