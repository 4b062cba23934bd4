"""Transformers' deepseek_v4 on a HybridCache: its weights and everything between layers; windows, entries and attention are ours.

hybrid = HybridModel(model, HybridCache(HybridSchema.of(model.config), num_blocks=64, max_requests=4, max_context=4096))
request = hybrid.cache.admit_request()
logits = hybrid.forward(request, prompt)   # any number of tokens at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx.cache.hybrid.attention import attention_sparse, every_entry, index_scores, num_visible, topk
from kvx.cache.hybrid.cache import EntryPool, HybridCache, LayerStore, Request
from kvx.cache.hybrid.tail import Tail
from kvx.errors import BadArgument


class HybridModel:
    def __init__(self, model: Any, cache: HybridCache) -> None:
        layers = model.model.layers
        if getattr(model.config, "model_type", "") != "deepseek_v4" or len(layers) != len(cache.layers):
            raise BadArgument(
                f"HybridModel: a {getattr(model.config, 'model_type', '?')} of {len(layers)} layers on a cache of "
                f"{len(cache.layers)}; it takes a deepseek_v4, and HybridSchema.of(model.config) has its layers."
            )
        self.model, self.cache = model, cache

    @torch.inference_mode()
    def forward(self, request: Request, ids: Tensor) -> Tensor:
        """[tokens, vocab]: the request's next tokens, put into the cache on the way. OutOfBlocks changes nothing."""
        start = request.length
        self.cache.prepare_forward([(request, len(ids))])
        positions = torch.arange(start, start + len(ids), device=ids.device)
        with self._attending(request, start):
            logits: Tensor = self.model(ids[None], position_ids=positions[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def _attending(self, request: Request, start: int) -> Iterator[None]:
        """Each layer's attention is ours meanwhile."""
        attentions = [layer.self_attn for layer in self.model.model.layers]
        before = [vars(attn).get("forward") for attn in attentions]  # others may have put theirs there, as accelerate does
        try:
            for i, attn in enumerate(attentions):
                attn.forward = partial(self.attend, i, request, start)
            yield
        finally:
            for attn, forward in zip(attentions, before, strict=True):
                vars(attn).pop("forward", None)
                if forward is not None:
                    attn.forward = forward

    def attend(
        self, layer: int, request: Request, start: int, hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]], position_ids: Tensor, *_: Any, **__: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """In place of DeepseekV4Attention.forward, for a batch of one: tokens from position `start` on."""
        attn, store = self.model.model.layers[layer].self_attn, self.cache.layers[layer]
        x, positions = hidden_states[0], position_ids[0]
        cos, sin = position_embeddings[attn.rope_layer_type][0][0], position_embeddings[attn.rope_layer_type][1][0]
        latent = attn.q_a_norm(attn.q_a_proj(x))
        q = attn.q_b_norm(attn.q_b_proj(latent).view(len(x), -1, attn.head_dim))
        q, new = _rotate(q, cos, sin), _rotate(attn.kv_norm(attn.kv_proj(x)), cos, sin)
        # The ring is written after: this chunk's first tokens still see rows that its last will stand in place of.
        codec = store.window.codec
        old, old_positions = store.window.before(request.slot, start)
        rows = torch.cat((old, codec.decode(*codec.encode(new))))
        row_positions = torch.cat((old_positions, positions))
        entries, selected = self._entries(attn, store, request, start, x, latent, cos, sin)
        store.window.write(request.slot, start, new)
        out, _lse = attention_sparse(
            q, positions, rows, row_positions, store.schema.window, entries, selected, sinks=attn.sinks, scale=attn.scaling
        )
        plain = _rotate(out.to(x.dtype), cos, -sin)
        grouped = attn.o_a_proj(plain.reshape(1, len(x), attn.config.o_groups, -1)).flatten(2)
        return attn.o_b_proj(grouped), None

    def _entries(
        self, attn: Any, store: LayerStore, request: Request, start: int, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All entries of the request, those that close now too, and which of them each token reads."""
        ratio, stop = store.schema.ratio, start + len(x)
        if store.entries is None or store.tail is None:
            return x.new_zeros(0, attn.head_dim), torch.full((len(x), 1), -1, device=x.device)
        blocks, count = self.cache.blocks(request), store.schema.entries(stop)
        visible = num_visible(torch.arange(start, stop, device=x.device), ratio)
        self._close(attn.compressor, store.tail, store.entries, request, start, x)
        entries = store.entries.read(blocks, count)
        if store.index is None or store.index_tail is None:
            return entries, every_entry(visible, count)
        indexer = attn.compressor.indexer
        self._close(indexer, store.index_tail, store.index, request, start, x)
        q = _rotate(indexer.q_b_proj(latent).view(len(x), -1, indexer.head_dim), cos, sin)
        weights = indexer.scorer.weights_proj(x).float() * indexer.scorer.weights_scaling * indexer.scorer.softmax_scale
        return entries, topk(index_scores(q, weights, store.index.read(blocks, count), visible), indexer.index_topk)

    def _close(self, compressor: Any, tail: Tail, pool: EntryPool, request: Request, start: int, x: Tensor) -> None:
        ratio = tail.ratio
        bias = compressor.position_bias[torch.arange(start, start + len(x), device=x.device) % ratio]
        pooled = tail.take(request.slot, start, compressor.kv_proj(x), compressor.gate_proj(x) + bias).to(x.dtype)
        first = start // ratio
        at = torch.arange(first, first + len(pooled), device=x.device)[None] * ratio
        cos, sin = compressor.rotary_emb(x, position_ids=at, layer_type=compressor.rope_layer_type)
        entries = _rotate(compressor.kv_norm(pooled), cos[0], sin[0])
        self.cache.write_entries(request, pool, ratio, first, entries)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of the last dims of x [rows, dim] or [rows, heads, dim]; cos and sin [rows, pairs]."""
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    split = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., split::2].float(), x[..., split + 1 :: 2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :split], turned.to(x.dtype)), -1)
