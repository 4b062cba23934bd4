"""Steps of fixed shape: sequences that are not there are skipped, and a step captured once is replayed with other positions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.ops import backend as backends
from tests import compare
from tests.conftest import Backend
from tests.hybrid import models
from tests.hybrid.hybrids import DEVICE_CLOSE, F32, hybrid_on, tokens

ROOM, HIDDEN, STEPS = 4, 64, 12
BF16 = {"entry_rows": "bf16", "window_rows": "bf16", "index_rows": "bf16"}


def through_layers(hybrid: HybridModel, x: Tensor) -> Tensor:
    """Each layer's attention on what the one before gave, one token a sequence, of whatever step is prepared."""
    batch = hybrid.decode_batch(ROOM)
    for i in range(len(hybrid.cache.layers)):
        x = x + hybrid.attend(i, batch, x[None])[0][0]
    return x


def filled(backend: Backend, rows: dict[str, str]) -> tuple[HybridModel, list]:
    """Requests of 1, 126 and 203 tokens in a cache for four. Windows of 4 and 128 close within a few steps."""
    hybrid = hybrid_on(backend, models.FLASH, rows, max_seqs=ROOM)
    requests = [hybrid.cache.admit([]) for _ in range(3)]
    hybrid.forward(requests, [tokens(backend, n, seed) for seed, n in enumerate((1, 126, 203))])
    return hybrid, requests


@models.one_thread()
@torch.no_grad()
def test_sequences_that_are_not_there_are_skipped(backend):
    """Rows of nobody are NaN: they reach nothing. The rest is as in steps of the requests alone."""
    (padded, many), (plain, few) = filled(backend, F32), filled(backend, F32)
    rng, g = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        chosen = rng.sample(range(3), rng.randint(1, 3))
        x = torch.full((ROOM, HIDDEN), torch.nan)
        x[: len(chosen)] = torch.randn(len(chosen), HIDDEN, generator=g)
        x = x.to(backend.device)
        padded.cache.prepare_forward([(many[i], 1) for i in chosen])
        got = through_layers(padded, x)[: len(chosen)]
        batch, want = plain.prepare([few[i] for i in chosen], [1] * len(chosen)), x[: len(chosen)]
        for i in range(len(plain.cache.layers)):
            want = want + plain.attend(i, batch, want[None])[0][0]
        if backend.device == "cpu":
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        else:
            assert float((got - want).norm() / want.norm()) < DEVICE_CLOSE


def through_model(hybrid: HybridModel, ids: Tensor) -> Tensor:
    return hybrid.run(ids, hybrid.decode_batch(ROOM))


@pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"graphs: {backends.reason_missing('cuda')}")
@pytest.mark.parametrize("rows", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("what", ["layers", "model"])
@torch.no_grad()
def test_a_captured_step_replays_with_other_positions(what, rows):
    """Bit for bit what the same calls give one by one, and the caches are the same afterwards."""
    backend, through = Backend("cuda", "cuda"), through_layers if what == "layers" else through_model
    (captured, ours), (eager, theirs) = filled(backend, rows), filled(backend, rows)
    x = torch.zeros(ROOM, HIDDEN, device="cuda") if what == "layers" else torch.zeros(ROOM, dtype=torch.int64, device="cuda")
    captured.cache.prepare_forward([])  # nobody: the warm-up writes nothing
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            through(captured, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = through(captured, x)
    rng, g = random.Random(2), torch.Generator().manual_seed(2)
    for step in range(STEPS):
        chosen = rng.sample(range(3), rng.randint(1, 3))
        new = torch.randn(ROOM, HIDDEN, generator=g) if what == "layers" else torch.randint(models.VOCAB, (ROOM,), generator=g)
        x.copy_(new)
        captured.cache.prepare_forward([(ours[i], 1) for i in chosen])
        before = torch.cuda.memory_allocated()
        graph.replay()
        assert torch.cuda.memory_allocated() == before
        eager.cache.prepare_forward([(theirs[i], 1) for i in chosen])
        want = through(eager, x)
        compare.bitwise(out[: len(chosen)], want[: len(chosen)], f"step {step}")
    for a, b in zip(captured.cache.layers, eager.cache.layers, strict=True):
        for s, t in zip(a.tensors, b.tensors, strict=True):
            compare.bitwise(s, t, "a layer")
