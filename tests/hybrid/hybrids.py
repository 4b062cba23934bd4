"""Tiny models on hybrid caches, on any backend: what the tests of layers, models and requests share."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import torch
from torch import Tensor

from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridSchema
from kvx.cache.sequence import Sequence
from tests.conftest import Backend
from tests.hybrid import models

F32 = {"entry_rows": "f32", "window_rows": "f32", "index_rows": "f32"}
# Chunks change the order of sums; over four layers transformers differs from itself by up to 1e-5 of logits around 4.
CLOSE = {"rtol": 0, "atol": 5e-5}
# On the device products may be of bf16 numbers: errors of 2^-9 a layer, of whole logits by their norm.
DEVICE_CLOSE = 0.03


@functools.cache
def model_on(tiny: models.Tiny, device: str) -> Any:
    made = models.make(tiny)
    if device == "cpu":
        return made
    moved = copy.deepcopy(made).to(device)
    moved.set_experts_implementation("batched_mm")  # in float32, and without a look at what tokens chose: it can be captured
    return moved


def cache_of(model: Any, rows: dict[str, Any], *, block_tokens: int = 128, max_drafts: int = 0, **options: Any) -> HybridCache:
    """On the model's device."""
    schema = HybridSchema.of(model.config, block_tokens=block_tokens, max_drafts=max_drafts, **rows)
    options = {"num_blocks": 24, "max_seqs": 3, "max_seq_len": 512, **options}
    return HybridCache(schema, device=next(model.parameters()).device, **options)


def hybrid_on(backend: Backend, tiny: models.Tiny, rows: dict[str, Any] | None = None, **options: Any) -> HybridModel:
    model = model_on(tiny, backend.device)
    return HybridModel(model, cache_of(model, F32 if rows is None else rows, **options), backend=backend.name)


def feed(hybrid: HybridModel, request: Sequence, ids: Tensor, step: int = 64) -> Tensor:
    """The rest of `ids`, in steps that end where blocks do, each committed."""
    got = []
    while request.length < len(ids):
        stop = min(len(ids), (request.length // step + 1) * step)
        got.append(hybrid.forward(request, ids[request.length : stop]))
        hybrid.cache.commit(request)
    return torch.cat(got)


def state_of(cache: HybridCache, slot: int) -> list[Tensor]:
    """A copy of the windows and tails of a slot, in every layer, as bytes."""
    found = []
    for store in cache.layers:
        tails = [t.state for t in (store.tail, store.index_tail) if t is not None]
        found += [t[slot].contiguous().view(torch.uint8).clone() for t in (store.window.pages, store.window.positions, *tails)]
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def attend(hybrid: HybridModel, index: int, request: Sequence, x: Tensor) -> Tensor:
    """One layer's next tokens, x [tokens, hidden]: what it hands on."""
    return hybrid.attend(index, hybrid.prepare([request], [len(x)]), x[None])[0][0]


def tokens(backend: Backend, num_tokens: int, seed: int = 0) -> Tensor:
    return models.tokens(num_tokens, seed).to(backend.device)


@functools.cache
def answer(tiny: models.Tiny, num_tokens: int, seed: int = 0) -> Tensor:
    """Transformers' logits of a text, on the host."""
    return models.run(models.make(tiny), models.tokens(num_tokens, seed)).logits


def check(backend: Backend, got: Tensor, want: Tensor) -> None:
    """Against transformers' float32; on the device as near as its products are."""
    if backend.device == "cpu":
        torch.testing.assert_close(got, want, **CLOSE)
    else:
        off = float((got.cpu() - want).norm() / want.norm())
        assert off < DEVICE_CLOSE, f"off by {off:.4f} of the norm"


def cuts(rng: random.Random, total: int, how: str) -> list[int]:
    """Ends of the chunks."""
    ends = [0]
    while ends[-1] < total:
        n = {"whole": total, "one_by_one": 1, "random": rng.choice((1, 1, 2, 5, 15, 16, 17, 60, 129))}[how]
        ends.append(min(ends[-1] + n, total))
    return ends
