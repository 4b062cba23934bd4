"""Generating under torch.compile(fullgraph=True): a small decoder whose step appends and attends in one graph, against eager.

Every way a model keeps K and V: blocks, quantised blocks with their scales, latents, and one cache a sequence behind pointers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import kvx
from tests import compare

HEADS, KV_HEADS, DIM, ROTARY, VOCAB, LAYERS, BLOCK, LONGEST = 4, 2, 16, 8, 61, 2, 4, 40
PROMPTS, NEW_TOKENS = (5, 3), 24


@dataclass
class Step:
    """Where a step's tokens stand."""

    positions: Tensor
    seq_ids: Tensor
    lens: Tensor  # of the sequences, with these tokens
    cu: Tensor  # tokens of sequence s are cu[s] to cu[s + 1]


class Decoder:
    """Attention layers and a vocabulary. What differs is how `attend` keeps K and V."""

    def __init__(self, backend, format: str = "f32"):
        g = torch.Generator().manual_seed(3)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(backend.device)

        self.backend, self.device, self.format = backend.name, backend.device, format
        self.embedding, self.head = randn(VOCAB, HEADS * DIM), randn(HEADS * DIM, VOCAB)
        self.qkv = [randn(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM) * 0.2 for _ in range(LAYERS)]
        self.back = [randn(HEADS * DIM, HEADS * DIM) * 0.3 for _ in range(LAYERS)]
        self.norms = [(randn(DIM), randn(DIM)) for _ in range(LAYERS)]
        angles = torch.arange(LONGEST)[:, None] * torch.exp(-torch.arange(DIM // 2) / 3)
        self.cos, self.sin = angles.cos().to(backend.device), angles.sin().to(backend.device)
        self.table = torch.randperm(20, generator=g).to(torch.int32).view(2, 10).to(backend.device)
        self.make(randn)

    def make(self, randn: Any) -> None:
        self.spec = kvx.CacheSpec(20, BLOCK, KV_HEADS, DIM, format=self.format)
        self.stored = [kvx.allocate(self.spec, self.device) for _ in range(LAYERS)]
        self.scales = [
            {n: x for n, x in (("k_scale", s.k_scale), ("v_scale", s.v_scale)) if x is not None} for s in self.stored
        ]  # fmt: skip

    def norm(self, layer: int, at: Step) -> dict[str, Any]:
        q_weight, k_weight = self.norms[layer]
        return {"q_weight": q_weight, "k_weight": k_weight, "cos": self.cos, "sin": self.sin, "positions": at.positions}

    def attend(self, layer: int, x: Tensor, at: Step) -> Tensor:
        stored, given = self.stored[layer], {"spec": self.spec, **self.scales[layer], "backend": self.backend}
        slots = kvx.slot_mapping(self.table, at.positions, at.seq_ids, BLOCK)
        qkv = x @ self.qkv[layer]
        q = kvx.qkv_norm_rope_append(None, stored.cache, qkv, slot_mapping=slots, **self.norm(layer, at), **given)
        out, _ = kvx.attention_varlen(q, stored.cache, kvx.PackedTable(self.table, at.lens), cu_seqlens=at.cu, window=30, **given)
        return out.flatten(1)

    def step(self, ids: Tensor, positions: Tensor, seq_ids: Tensor, lens: Tensor, cu: Tensor) -> Tensor:
        at, x = Step(positions, seq_ids, lens, cu), self.embedding[ids]
        for layer in range(LAYERS):
            x = x + torch.tanh(self.attend(layer, x, at)) @ self.back[layer]
        return x @ self.head


class Merged(Decoder):
    """The first block of a sequence, which all of its tokens see, and what follows it: attended apart and merged."""

    def attend(self, layer: int, x: Tensor, at: Step) -> Tensor:
        cache, given = self.stored[layer].cache, {"spec": self.spec, "backend": self.backend}
        width = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
        q, k, v = (y.unflatten(1, (-1, DIM)) for y in (x @ self.qkv[layer]).split(width, 1))
        how = {"cos": self.cos, "sin": self.sin, "positions": at.positions}
        q, k = (kvx.qk_norm_rope(y, weight=w, **how) for y, w in zip((q, k), self.norms[layer], strict=True))
        kvx.write(cache, k, v, slot_mapping=kvx.slot_mapping(self.table, at.positions, at.seq_ids, BLOCK), **given)
        first = kvx.PackedTable(self.table, at.lens.clamp(max=BLOCK))
        rest = kvx.PackedTable(self.table[:, 1:], (at.lens - BLOCK).clamp(min=0))
        parts = [
            kvx.attention_varlen(q, cache, first, cu_seqlens=at.cu, causal=False, **given),
            kvx.attention_varlen(q, cache, rest, cu_seqlens=at.cu, **given),
        ]
        outs, lses = (torch.stack(y) for y in zip(*parts, strict=True))
        return kvx.merge_attention(outs, lses)[0].flatten(1)


class Latent(Decoder):
    def make(self, randn: Any) -> None:
        self.spec = kvx.CacheSpec(
            20, BLOCK, 1, DIM, v_head_dim=ROTARY, layout="block token (head kv dim)", format=self.format
        )  # fmt: skip
        self.stored = [kvx.allocate(self.spec, self.device) for _ in range(LAYERS)]
        self.down = [randn(HEADS * DIM, DIM + ROTARY) * 0.2 for _ in range(LAYERS)]
        self.up = [randn(HEADS * DIM, HEADS * (DIM + ROTARY)) * 0.2 for _ in range(LAYERS)]

    def attend(self, layer: int, x: Tensor, at: Step) -> Tensor:
        cache, given = self.stored[layer].cache, {"spec": self.spec, "backend": self.backend}
        slots = kvx.slot_mapping(self.table, at.positions, at.seq_ids, BLOCK)
        latent, rotary = (x @ self.down[layer])[:, None].split([DIM, ROTARY], -1)
        kvx.write(cache, latent.contiguous(), rotary.contiguous(), slot_mapping=slots, **given)
        q = (x @ self.up[layer]).unflatten(1, (HEADS, DIM + ROTARY))
        table = kvx.PackedTable(self.table, at.lens)
        return kvx.attention_mla(q, cache, table, cu_seqlens=at.cu, scale=DIM**-0.5, **given)[0].flatten(1)


class Pointers(Decoder):
    """One cache a sequence. Steps are of one token a sequence."""

    def make(self, randn: Any) -> None:
        shape = (KV_HEADS, LONGEST, DIM)
        self.caches = [[tuple(torch.zeros(shape, device=self.device) for _ in "kv") for _ in PROMPTS] for _ in range(LAYERS)]
        self.pointers = [kvx.cache_pointers(c) for c in self.caches]

    def attend(self, layer: int, x: Tensor, at: Step) -> Tensor:
        pointers, qkv = self.pointers[layer], x @ self.qkv[layer]
        how = {"slot_mapping": at.seq_ids * LONGEST + at.positions, "backend": self.backend}
        if layer == 0:
            q = kvx.qkv_norm_rope_append(None, pointers, qkv, spec=pointers.spec, **self.norm(layer, at), **how)
        else:
            width = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
            q, k, v = (y.unflatten(1, (-1, DIM)).contiguous() for y in qkv.split(width, 1))
            kvx.append_batched(pointers, k, v, **how)
        return kvx.attention_decode_batched(q, pointers, seq_lens=at.lens, backend=self.backend)[0].flatten(1)


def generate(made: Decoder, step: Any) -> tuple[Tensor, Tensor]:
    """Tokens, greedily, and the last step's logits."""
    counts, device = torch.tensor(PROMPTS, dtype=torch.int32), made.device
    both = torch.arange(2, device=device)
    if isinstance(made, Pointers):  # a token of each prompt at a time, of the shorter one its last again and again
        ids, lens = torch.tensor([1, 2], device=device), torch.zeros(2, dtype=torch.int32, device=device)
    else:
        cu = kvx.cu_seqlens(counts).to(device)
        positions, seq_ids = torch.cat([torch.arange(n) for n in PROMPTS]), torch.repeat_interleave(torch.arange(2), counts)
        lens = counts.to(device)
        logits = step(torch.arange(8, device=device), positions.to(device), seq_ids.to(device), lens, cu)
        ids = logits[cu[1:].long() - 1].argmax(-1)
    cu, told = torch.tensor([0, 1, 2], dtype=torch.int32, device=device), []
    for _ in range(NEW_TOKENS):
        lens = lens + 1
        logits = step(ids, lens.long() - 1, both, lens, cu)
        ids = logits.argmax(-1)
        told.append(ids)
    return torch.stack(told), logits


MODELS = {
    "blocks": Decoder,
    "int8": lambda backend: Decoder(backend, "int8_per_token_head"),
    "nvfp4": lambda backend: Decoder(backend, "nvfp4"),
    "merged": Merged,
    "latent": Latent,
    "pointers": Pointers,
}


@pytest.mark.parametrize("model", MODELS)
def test_a_compiled_step_generates_what_eager_does(backend, model):
    want, want_logits = generate(made := MODELS[model](backend), made.step)
    assert len(want.unique()) > 5, "tokens that say nothing of what was attended"
    torch._dynamo.reset()
    counters.clear()
    graphs = CompileCounterWithBackend("aot_eager")
    made = MODELS[model](backend)
    got, got_logits = generate(made, torch.compile(made.step, fullgraph=True, backend=graphs))
    compare.bitwise(got, want, "tokens")
    compare.bitwise(got_logits, want_logits, "logits")
    assert not counters["graph_break"]
    # One graph for the first number of tokens and one for any number: a sequence that grows is no new one.
    assert graphs.frame_count <= 2
