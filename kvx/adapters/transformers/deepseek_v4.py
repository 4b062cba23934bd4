"""Transformers' deepseek_v4 on a HybridCache: its weights and everything between layers; windows, entries and attention are ours.

hybrid = HybridModel(model, HybridCache(HybridSchema.of(model.config), num_blocks=64, max_seqs=4, max_seq_len=4096))
request = hybrid.cache.admit([])
logits = hybrid.forward(request, prompt)                      # any number of tokens at a time
logits, others = hybrid.forward([request, other], [ids, ids])  # several requests, each with its own number of tokens

Tokens of all requests go through the model in one row: only attention looks at more than one token, and attention is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from kvx.cache.hybrid.cache import HybridCache
from kvx.cache.hybrid.handle import LayerHandle, Projected
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument
from kvx.ops.attention.sparse import attention_sparse
from kvx.ops.entry.finish import turn
from kvx.ops.entry.index_scores import index_scores
from kvx.ops.entry.step import Step
from kvx.ops.entry.topk import topk


class StepBatch(NamedTuple):
    """Tokens of a step, and what is known of them without a look at the device."""

    step: Step
    positions: Tensor  # [num_tokens] int64
    longest: int  # no request has more tokens, these included
    is_decode: bool  # one token a request


class HybridModel:
    def __init__(self, model: Any, cache: HybridCache, *, backend: str = "auto") -> None:
        layers = model.model.layers
        if getattr(model.config, "model_type", "") != "deepseek_v4" or len(layers) != len(cache.layers):
            raise BadArgument(
                f"HybridModel: a {getattr(model.config, 'model_type', '?')} of {len(layers)} layers on a cache of "
                f"{len(cache.layers)}; it takes a deepseek_v4, and HybridSchema.of(model.config) has its layers."
            )
        self.model, self.cache, self.backend = model, cache, backend
        with torch.no_grad():
            kinds = dict.fromkeys(layer.self_attn.rope_layer_type for layer in layers)
            self._turns = {kind: self._table(kind) for kind in kinds}
            self._sinks = [layer.self_attn.sinks.float() for layer in layers]

    def _table(self, kind: str) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [max_seq_len, rope_dim / 2] f32. The model's own would be rounded to its type."""
        like = torch.zeros(1, dtype=torch.float32, device=self.cache.device)
        positions = torch.arange(self.cache.max_seq_len, device=self.cache.device)[None]
        cos, sin = self.model.model.rotary_emb(like, position_ids=positions, layer_type=kind)
        return cos[0].contiguous(), sin[0].contiguous()

    # --- steps -----------------------------------------------------------------------------------------------------------

    @overload
    def forward(self, requests: Sequence, ids: Tensor) -> Tensor: ...
    @overload
    def forward(self, requests: Listing[Sequence], ids: Listing[Tensor]) -> list[Tensor]: ...
    @torch.inference_mode()
    def forward(self, requests: Sequence | Listing[Sequence], ids: Tensor | Listing[Tensor]) -> Tensor | list[Tensor]:
        """[tokens, vocab] of each request: its next tokens, put into the cache on the way. OutOfBlocks changes nothing.

        Where the cache finds prefixes, the ids are known from then on: the same come again, or are forgotten by truncate().
        """
        if isinstance(requests, Sequence):
            assert isinstance(ids, Tensor)
            self._know([requests], [ids])
            return self.run(ids, self.prepare([requests], [len(ids)]))
        if isinstance(ids, Tensor) or len(requests) != len(ids):
            raise BadArgument(f"forward(): {len(requests)} requests and ids of {len(ids)}. Nothing changed.")
        self._know(requests, ids)
        lengths = [len(part) for part in ids]
        return list(self.run(torch.cat(list(ids)), self.prepare(requests, lengths)).split(lengths))

    def _know(self, requests: Listing[Sequence], ids: Listing[Tensor]) -> None:
        """A cache that finds prefixes knows the ids of tokens before they are computed."""
        if self.cache.prefix is not None:
            if len({id(request) for request in requests}) != len(requests):
                raise BadArgument("forward(): a request is there twice. Nothing changed.")
            for request, part in zip(requests, ids, strict=True):
                known, given = request.tokens[request.length :].tolist(), part.tolist()
                if known[: len(given)] != given[: len(known)]:
                    raise BadArgument(
                        f"forward(): ids of {request} are {given[:8]}...; those known after its length are {known[:8]}... "
                        "cache.truncate(request, request.length) forgets them. Nothing changed."
                    )
            for request, part in zip(requests, ids, strict=True):
                known = request.num_tokens - request.length
                if known < len(part):
                    self.cache.append(request, part[known:].tolist())

    def prepare(self, requests: Listing[Sequence], lengths: Listing[int]) -> StepBatch:
        """The next tokens of these requests: what `run` needs beside their ids."""
        step = self.cache.prepare_forward(list(zip(requests, lengths, strict=True)))
        longest = max((request.length for request in requests), default=0)
        return StepBatch(step, step.positions(sum(lengths)), longest, all(n == 1 for n in lengths))

    def decode_batch(self, num_tokens: int) -> StepBatch:
        """One token a sequence of whatever prepare_forward prepared last, as many as max_seqs: for a step that is captured once
        and replayed. Make it within the capture: positions follow from the step."""
        return StepBatch(self.cache.step, self.cache.step.positions(num_tokens), self.cache.max_seq_len, True)

    def run(self, ids: Tensor, batch: StepBatch) -> Tensor:
        """[num_tokens, vocab]."""
        with self._attending(batch):
            # A mask that is given is not made: ours is in the step.
            given = {"input_ids": ids[None], "position_ids": batch.positions[None], "attention_mask": {"": None}}
            logits: Tensor = self.model(**given, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _attending(self, batch: StepBatch) -> Iterator[None]:
        """Each layer's attention is ours meanwhile."""
        attentions = [layer.self_attn for layer in self.model.model.layers]
        before = [vars(attn).get("forward") for attn in attentions]  # others may have put theirs there, as accelerate does
        try:
            for i, attn in enumerate(attentions):
                attn.forward = partial(self.attend, i, batch)
            yield
        finally:
            for attn, forward in zip(attentions, before, strict=True):
                vars(attn).pop("forward", None)
                if forward is not None:
                    attn.forward = forward

    # --- a layer ---------------------------------------------------------------------------------------------------------

    def attend(self, layer: int, batch: StepBatch, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """In place of DeepseekV4Attention.forward: hidden_states [1, num_tokens, hidden]."""
        attn, x = self.model.model.layers[layer].self_attn, hidden_states[0]
        handle = self.cache.acquire(layer, batch.step, backend=self.backend)
        cos, sin = self._turns[attn.rope_layer_type]
        latent = attn.q_a_norm(attn.q_a_proj(x))
        q = self._turned(attn.q_b_norm(attn.q_b_proj(latent).view(len(x), -1, attn.head_dim)), batch, cos, sin)

        new = attn.kv_proj(x)
        how = {"weight": attn.kv_norm.weight, "eps": attn.kv_norm.variance_epsilon, "cos": cos, "sin": sin}
        fresh = None if batch.is_decode else handle.fresh_rows(new, **how)
        if batch.is_decode:
            handle.write_swa(new, **how)
        swa, entries = handle.read_swa_view(), handle.read_classical_view()
        more: dict[str, Any] = {}
        if entries is not None:
            selected = self._entries(attn, handle, batch, x, latent, cos, sin)
            longest = max(1, batch.longest // entries.ratio)
            more = {"entries": entries.rows, "block_table": entries.block_table, "ratio": entries.ratio, "selected": selected}
            more |= {"max_entries": longest}
        out, _lse = attention_sparse(
            q, swa.rows, swa.positions, batch.step, window_tokens=swa.window, fresh=fresh, **more, sinks=self._sinks[layer],
            scale=attn.scaling, cos=cos, sin=sin, backend=self.backend,
        )  # fmt: skip
        if not batch.is_decode:
            handle.write_swa(new, **how)  # after: this chunk's first tokens still saw rows that its last now stand in place of
        grouped = attn.o_a_proj(out.reshape(1, len(x), attn.config.o_groups, -1)).flatten(2)
        return attn.o_b_proj(grouped), None

    def _entries(
        self, attn: Any, handle: LayerHandle, batch: StepBatch, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor | None:
        """Put the step's tokens into the tails, and say which entries each token reads. None: all it may."""
        view, keys = handle.read_classical_view(), handle.read_indexer_view()
        assert view is not None
        indexer = attn.compressor.indexer if keys is not None else None
        if handle.views.store.tail is not None:
            handle.flush(_projected(attn.compressor, x), _projected(indexer, x) if indexer is not None else None, cos=cos, sin=sin)
        longest = max(1, batch.longest // view.ratio)
        if keys is None or indexer is None or longest <= indexer.index_topk:
            return None
        q = self._turned(indexer.q_b_proj(latent).view(len(x), -1, indexer.head_dim), batch, cos, sin)
        weights = indexer.scorer.weights_proj(x).float() * indexer.scorer.weights_scaling * indexer.scorer.softmax_scale
        scores = index_scores(
            q, weights, keys.rows, keys.block_table, batch.step, ratio=keys.ratio, hadamard=keys.hadamard, max_entries=longest,
            backend=self.backend,
        )  # fmt: skip
        visible = ((batch.positions + 1) // keys.ratio).to(torch.int32)
        return topk(scores, indexer.index_topk, lengths=visible, backend=self.backend)

    def _turned(self, q: Tensor, batch: StepBatch, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(q.float(), cos[batch.positions], sin[batch.positions]).to(q.dtype)


def _projected(compressor: Any, x: Tensor) -> Projected:
    """By a compressor, or by the indexer, which has one of its own."""
    return Projected(
        compressor.kv_proj(x), compressor.gate_proj(x), compressor.position_bias.float(), compressor.kv_norm.weight,
        compressor.kv_norm.variance_epsilon,
    )  # fmt: skip
