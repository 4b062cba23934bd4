"""attn_implementation="kvx": transformers' attention function over a KvxCache, reading the blocks where they lie."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvx.adapters.transformers.latents import MANY_QUERIES, attend_latents, latents_of
from kvx.adapters.transformers.layer import KvxLayer
from kvx.adapters.transformers.mask import CausalMask, MaskStates, read_mask
from kvx.adapters.transformers.states import PagedStates, uncompiled
from kvx.errors import BadArgument, Unsupported
from kvx.ops.attention.attention import attention_decode, attention_varlen


@uncompiled
def attend(
    module: nn.Module,
    query: Tensor,  # [batch, heads, queries, dim]
    key: Tensor,  # a handle of a KvxCache, or [batch, kv heads, columns, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # of make_mask, or any of transformers'
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads]: sinks
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """([batch, queries, heads, dim], None), by the signature of transformers' AttentionInterface."""
    if dropout:
        raise Unsupported(f"attention 'kvx': dropout is {dropout}; it is for inference. Call model.eval(), or train with 'sdpa'.")
    if kwargs.get("position_bias") is not None:
        raise Unsupported("attention 'kvx': the model adds a position bias to its scores. Use attn_implementation='sdpa'.")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # make_mask's masks are causal, whatever a model concludes from there being one (GPT-2 of 4.56: is_causal=False).
    is_ours = isinstance(attention_mask, MaskStates) and attention_mask.causal is not None
    causal = is_ours or bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    handle = key if isinstance(key, PagedStates) and isinstance(value, PagedStates) and key.layer is value.layer else None
    window = sliding_window or (0 if handle is None else handle.layer.window)
    mask = read_mask(attention_mask, window, query.shape[0])
    sinks = None if s_aux is None else s_aux.to(torch.float32)
    window = mask.window if mask else 0
    no_later = causal or query.shape[2] == 1  # one query is the last token, and sees all there is either way
    options = {"scale": scale, "causal": no_later, "window": window, "soft_cap": softcap or 0.0, "sinks": sinks}
    if handle is not None and torch.is_grad_enabled() and (query.requires_grad or (sinks is not None and sinks.requires_grad)):
        raise Unsupported(
            "attention 'kvx': queries or sinks require gradients, and attention over blocks has none. Run the model under "
            "torch.no_grad() or torch.inference_mode(); train with use_cache=False or a DynamicCache."
        )
    if handle is not None and window and not no_later:
        raise Unsupported(
            f"attention 'kvx': {type(module).__name__} is not causal and has a window of {window} tokens, and no mask says which "
            "keys its queries see. Use attn_implementation='sdpa'."
        )
    if handle is not None and handle.layer.window and mask is not None and not 0 < mask.window <= handle.layer.window:
        # The cache keeps a window that the mask does not have (Moshi): queries see what is kept, from the first one's window on.
        options["window"] = handle.layer.window if query.shape[2] == 1 else 0
        is_kept = query.shape[2] == 1 or not handle.layer.first_visible
    else:
        is_kept = True
    if handle is not None and mask is not None and _has_pads(handle, mask, query.shape[0]) and is_kept:
        if latents := latents_of(module):
            if query.shape[2] <= MANY_QUERIES:
                return attend_latents(latents, query, handle.layer, options), None
        else:
            return _attend_blocks(query, handle.layer, options), None
    if handle is not None and (latents := latents_of(module)):
        key, value = latents.expand(key, value)

    dense = attention_mask if mask is None else None
    if isinstance(dense, MaskStates):
        dense = dense.read()
    elif dense is not None and dense.dim() == 2 and not dense.is_floating_point():  # holes in the padding, [batch, columns]
        seen = CausalMask(window, -1, None).dense(query.shape[2], key.shape[2], query.device, causal=causal)
        dense = seen & dense.to(torch.bool)[:, None, None, -key.shape[2] :]
    if mask is not None and (mask.pads is not None or (causal and (mask.window or 1 < query.shape[2] != key.shape[2]))):
        dense = mask.dense(query.shape[2], key.shape[2], query.device, causal=causal)
    is_square = dense is None and causal and query.shape[2] > 1
    return attend_dense(query, key, value, dense, scale, is_square, softcap, sinks).transpose(1, 2).contiguous(), None


def _has_pads(handle: PagedStates, mask: CausalMask, batch_size: int) -> bool:
    """Whether the cache holds the tokens that the mask shows, and no others. Tokens that wait are stored by it."""
    pads = mask.pads_of(batch_size)
    handle.cache.settle(handle.layer, pads)
    has = handle.cache.pads
    if has is None or (pads < has).any():
        raise BadArgument(
            f"attention 'kvx': the mask has {pads.tolist()} columns of padding; the first one had {has}, which were not stored. "
            "Give the attention_mask of the whole context at every step."
        )
    return bool((has == pads).all())


def _attend_blocks(query: Tensor, layer: KvxLayer, options: dict[str, Any]) -> Tensor:
    batch, heads, n, dim = query.shape
    q = query.detach().transpose(1, 2).reshape(batch * n, heads, dim)
    # Queries are the last n columns. Those of padding are before a sequence's first token: they see nothing, and give 0.
    options = dict(**options, spec=layer.spec, max_seq_len=layer.length, **layer.storage.scales())
    if n == 1:
        out, _ = attention_decode(q, layer.storage.cache, layer.blocks.table(), **options)
    else:
        ends = torch.arange(0, batch * n + 1, n, dtype=torch.int32, device=q.device)
        out, _ = attention_varlen(q, layer.storage.cache, layer.blocks.table(), cu_seqlens=ends, max_query_len=n, **options)
    return out.view(batch, n, heads, -1)


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """[batch, heads, queries, dim] of contiguous K and V: torch's own, or spelled out where it lacks soft caps and sinks."""
    if mask is not None:
        mask = mask[..., : key.shape[2]]
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    group = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).to(torch.float32) for x in (key, value))
    scores = query.to(torch.float32) @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    lowest = torch.finfo(torch.float32).min  # not -inf: rows that see nothing would be NaN
    if mask is not None:
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ v).to(query.dtype)
