"""Tiny random deepseek_v4 models of transformers, what transformers computes in each layer, and golden.py with the same weights.

Attention sees every weight: biases and sinks, zero in a fresh model, are random, and scores are spread so that no softmax is flat.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.hybrid import golden
from tests.hybrid.golden import Layer, Projected

VOCAB = 97
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}


@dataclass(frozen=True)
class Tiny:
    """The sizes of one model; prints as a readable id."""

    name: str
    ratios: tuple[int, ...]  # a layer each: 0 window only, 4 CSA, 128 HCA
    window: int = 16
    topk: int = 8  # fewer than the entries of 300 tokens, so that the choice matters
    rope_dim: int = 16
    index_dim: int = 32
    heads: int = 4
    head_dim: int = 64
    hash_layers: int = 0  # first layers whose experts a token's id chooses
    seed: int = 0

    def __str__(self) -> str:
        return self.name


# Flash starts with window layers, Pro has none; `wide` has the real window.
FLASH = Tiny("flash", (0, 4, 128, 4))
PRO = Tiny("pro", (128, 4, 128), topk=12, rope_dim=32, index_dim=64)
WIDE = Tiny("wide", (0, 4, 128), window=128)
MODELS = (FLASH, PRO, WIDE)
HASHED = Tiny("hashed", (0, 4), hash_layers=1)
# Attention as DeepSeek-V4-Flash has it, in a narrow model: rows of 512 with 64 rotary, 64 heads, keys of 128.
REAL = Tiny("real", (0, 4, 128), window=128, topk=16, rope_dim=64, index_dim=128, heads=64, head_dim=512)


def config_of(tiny: Tiny) -> Any:
    return library().DeepseekV4Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=len(tiny.ratios),
        compress_ratios=list(tiny.ratios),
        sliding_window=tiny.window,
        num_attention_heads=tiny.heads,
        head_dim=tiny.head_dim,
        qk_rope_head_dim=tiny.rope_dim,
        q_lora_rank=48,
        o_groups=2,
        o_lora_rank=24,
        index_n_heads=64,  # with few heads ReLU leaves many scores at exactly 0, and the order of ties is nobody's promise
        index_head_dim=tiny.index_dim,
        index_topk=tiny.topk,
        rope_parameters=dict(YARN),
        moe_intermediate_size=16,
        n_routed_experts=2,
        num_experts_per_tok=2,  # every expert: no routing that rounding could flip
        num_hash_layers=tiny.hash_layers,
        hc_mult=2,
        hc_sinkhorn_iters=4,
    )


def library() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of DeepSeek-V4")
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 22):
        pytest.skip(f"transformers {transformers.__version__}: its deepseek_v4 is missing, or wrong, before 5.22")
    return transformers


@functools.cache
def make(tiny: Tiny) -> Any:
    made = library().DeepseekV4ForCausalLM(config_of(tiny)).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(tiny.seed)
    for name, p in made.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if "norm" in name:
            p.copy_(1 + 0.5 * noise.clamp(-1, 1))
        elif "gate_proj" in name and "compressor" in name:
            p.copy_(noise * 2 * p.shape[-1] ** -0.5)
        elif p.dim() > 1 and "position_bias" not in name and "embed" not in name:
            p.copy_(noise * p.shape[-1] ** -0.5)
        else:
            p.copy_(noise)
    for name, chosen in made.named_buffers():
        if name.endswith("tid2eid"):
            chosen.copy_(torch.randint(2, chosen.shape, generator=g))
    return made


def tokens(num_tokens: int, seed: int = 0) -> Tensor:
    """The first ids of one long random text, so that texts of two lengths share a prefix."""
    return torch.randint(VOCAB, (512,), generator=torch.Generator().manual_seed(seed))[:num_tokens]


def frequencies(model: Any, layer: int) -> Tensor:
    """Radians a position in this layer, from transformers' table, so that float32 rounds alike; a test judges the table."""
    rotary = model.model.rotary_emb
    return rotary.main_inv_freq if model.config.layer_types[layer] == "sliding_attention" else rotary.compress_inv_freq


@dataclass(frozen=True)
class Run:
    """What transformers computed over one text."""

    layers: list[Layer]
    logits: Tensor  # [num_tokens, VOCAB]
    cache: Any  # None when the text went through whole
    seen: list[Tensor] | None  # a layer each: [num_tokens, num_tokens + num_entries] bool, who reads what; whole text only


@contextmanager
def one_thread() -> Iterator[None]:
    """On tensors this small a second thread is only waited for: on two busy cores these tests took 40 s with it, 23 s without."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def run(model: Any, ids: Tensor, chunks: Sequence[int] | None = None) -> Run:
    """Send ids through transformers whole and without a cache, or in chunks of these lengths through its cache."""
    from transformers import DynamicCache

    cache = None if chunks is None else DynamicCache(config=model.config)
    logits = []
    with spied(model) as seen, torch.no_grad():
        for part in [ids] if chunks is None else ids.split(list(chunks)):
            logits.append(model(part[None], past_key_values=cache, use_cache=cache is not None).logits[0])
    layers = [_joined(seen[i], model.model.layers[i].self_attn) for i in range(len(model.model.layers))]
    masks = [seen[i]["mask"][0] == 0 for i in range(len(layers))] if chunks is None else None
    return Run(layers, torch.cat(logits), cache, masks)


@functools.cache
def whole(tiny: Tiny, num_tokens: int) -> Run:
    """run() without a cache, remembered: not to be written to."""
    return run(make(tiny), tokens(num_tokens))


@contextmanager
def spied(model: Any) -> Iterator[dict[int, dict[str, list[Tensor]]]]:
    """For each layer and tensor, what transformers makes: one item a forward. Some of it no module returns: see `attention`."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as source

    seen: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    eager, hooks = source.eager_attention_forward, []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        out = eager(module, query, key, value, mask, **options)
        mine = seen[module.layer_idx]
        num_entries = mine["entries"][-1].shape[0] if mine["entries"] else 0
        mine["q"].append(query[0].transpose(0, 1))
        mine["window"].append(key[0, 0, : key.shape[2] - num_entries][-query.shape[2] :])
        mine["mask"].append(mask[0, 0])
        mine["attended"].append(out[0][0])
        return out

    def keep(index: int, **pick: Any) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            for name, what in pick.items():
                seen[index][name].append(what(args, out)[0])

        return hook

    for i, block in enumerate(model.model.layers):
        attn = block.self_attn
        hooks.append(attn.register_forward_hook(keep(i, x=lambda args, out: args[0], out=lambda args, out: out[0])))
        if attn.compressor is not None:
            hooks.append(attn.compressor.register_forward_hook(keep(i, entries=lambda args, out: out[0][0])))
        if (indexer := getattr(attn.compressor, "indexer", None)) is not None:
            scorer = {
                "index_q": lambda args, out: args[0],
                "index_keys": lambda args, out: args[1],
                "scores": lambda args, out: out,
            }
            hooks.append(indexer.scorer.register_forward_hook(keep(i, **scorer)))
            hooks.append(indexer.register_forward_hook(keep(i, selected=lambda args, out: out)))
    try:
        with mock.patch.object(source, "eager_attention_forward", attention):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _joined(seen: dict[str, list[Tensor]], attn: Any) -> Layer:
    """The pieces of all chunks as one layer. Entries and keys grow in the cache, so that the last piece has them all.

    transformers lists no entries for HCA: `selected` is CSA's alone.
    """

    def wide(pieces: list[Tensor], fill: float) -> Tensor:
        width = max(p.shape[1] for p in pieces)
        return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in pieces])

    indexed = bool(seen["scores"])
    return Layer(
        ratio=attn.compressor.compress_rate if attn.compressor is not None else 0,
        entries=seen["entries"][-1] if seen["entries"] else None,
        index_q=torch.cat(seen["index_q"]) if indexed else None,
        index_keys=seen["index_keys"][-1] if indexed else None,
        index_scores=wide(seen["scores"], float("nan")) if indexed else None,
        selected=wide(seen["selected"], -1) if indexed else None,
        **{name: torch.cat(seen[name]) for name in ("x", "q", "window", "attended", "out")},
    )


def projections(compressor: Any, x: Tensor) -> tuple[Projected | None, Projected]:
    """(ovl, cur) with the weights of a compressor or an indexer; HCA's has no ovl."""
    w = [p.to(x.dtype) for p in (compressor.kv_proj.weight, compressor.gate_proj.weight, compressor.position_bias)]
    overlaps = len(w[0]) == 2 * compressor.head_dim
    return golden.project_csa(x, *w) if overlaps else (None, golden.project_hca(x, *w))


@one_thread()
def restate(model: Any, layer: int, x: Tensor) -> Layer:
    """golden.py's layer on x [num_tokens, hidden], in the dtype of x."""
    attn, freqs = model.model.layers[layer].self_attn, frequencies(model, layer)
    dim, c = attn.head_dim, attn.compressor
    indexer = getattr(c, "indexer", None)
    w = {name: p.to(x.dtype) for name, p in attn.named_parameters()}

    latent = golden.query_latent(x, w["q_a_proj.weight"], w["q_a_norm.weight"])
    q = golden.queries(latent, w["q_b_proj.weight"], freqs, head_dim=dim)
    window = golden.window_kv(x, w["kv_proj.weight"], w["kv_norm.weight"], freqs)
    entries = index_q = keys = scores = selected = None
    if c is not None:
        ovl, cur = projections(c, x)
        pooled = golden.pool_windows(cur, c.compress_rate, ovl)
        entries = golden.finish_entries(pooled, w["compressor.kv_norm.weight"], freqs, ratio=c.compress_rate)
        visible = golden.num_visible(torch.arange(len(x)), c.compress_rate)
        selected = golden.select_all(visible, len(entries))
    if indexer is not None:
        sizes = {"index_dim": indexer.head_dim}
        index_q = golden.index_queries(latent, w["compressor.indexer.q_b_proj.weight"], freqs, **sizes)
        norm = w["compressor.indexer.kv_norm.weight"]
        keys = golden.index_keys(*projections(indexer, x), norm, freqs, ratio=c.compress_rate)
        weights = golden.head_weights(x, w["compressor.indexer.scorer.weights_proj.weight"], **sizes)
        scores = golden.index_scores(index_q, keys, weights)
        selected = golden.select(scores, visible, indexer.index_topk)
    attended = golden.attend(q, window, entries, selected, sinks=w["sinks"], num_window=attn.sliding_window)
    out = finish(model, layer, attended)
    return Layer(c.compress_rate if c is not None else 0, x, q, window, entries, index_q, keys, scores, selected, attended, out)


def finish(model: Any, layer: int, attended: Tensor) -> Tensor:
    """From what was attended to the layer's output."""
    attn = model.model.layers[layer].self_attn
    plain = golden.unrotate(attended, torch.arange(len(attended)), frequencies(model, layer))
    w_a, w_b = (p.to(plain.dtype) for p in (attn.o_a_proj.weight, attn.o_b_proj.weight))
    return golden.project_out(plain, w_a, w_b, groups=model.config.o_groups)
