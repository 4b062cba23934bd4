"""Drafts: tokens that were tried and not accepted leave no trace. What follows is what transformers says without them."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema, Projected
from kvx.ops.entry.compress import compress
from kvx.ops.entry.step import Step
from kvx.quant.rows import RowCodec, RowPages
from tests import compare
from tests.hybrid import models
from tests.hybrid.hybrids import F32, answer, check, hybrid_on, same, state_of, tokens

DRAFTS = 5


@pytest.mark.parametrize("tail", ["running", "ring"])
@models.one_thread()
def test_rejected_drafts_leave_no_trace(backend, tail):
    """Two requests guess in the same steps; each keeps some of its guesses. Windows, overlaps and blocks close within drafts."""
    hybrid = hybrid_on(backend, models.FLASH, {**F32, "tail": tail}, max_drafts=DRAFTS)
    cache, rng = hybrid.cache, random.Random(tail)
    texts = {cache.admit([]): (n, seed) for n, seed in ((150, 1), (275, 2))}
    got = {request: [] for request in texts}
    for (request, text), first in zip(texts.items(), (98, 240), strict=True):
        got[request].append(hybrid.forward(request, tokens(backend, *text)[:first]))
    live = list(texts)
    while live:
        steps, kept = [], []
        for request in live:
            ids = tokens(backend, *texts[request])[request.length :]
            right = rng.randint(1, min(len(ids), DRAFTS + 1))
            wrong = tokens(backend, DRAFTS + 1 - right, 99 + request.length)
            steps.append(torch.cat((ids[:right], (wrong + 1) % models.VOCAB)))
            kept.append(right)
        starts = [request.length for request in live]
        for request, logits, n in zip(live, hybrid.forward(live, steps), kept, strict=True):
            got[request].append(logits[:n])
        cache.take_back([(r, start + n) for r, start, n in zip(live, starts, kept, strict=True)], backend=backend.name)
        assert [cache.schema.blocks(r.length) for r in live] == [len(cache.block_ids(r)) for r in live]
        cache.check()
        live = [r for r in live if r.length < texts[r][0]]
    for request, text in texts.items():
        check(backend, torch.cat(got[request]), answer(models.FLASH, *text))
        cache.release(request)
    assert [a.num_used for a in cache.allocators] == [0, 0]


@pytest.mark.parametrize("kept", range(4))
def test_all_of_a_cache_is_as_it_was(backend, kept):
    """Tails bit for bit: they went over the same tokens alone. Positions and tables too."""
    layers = (
        LayerSchema(4, overlap=True, bias=True, window=8, head_dim=64, rope_dim=16, index_dim=32, **F32),
        LayerSchema(16, tail="ring", window=8, head_dim=64, rope_dim=16, **F32),
    )
    schema = HybridSchema(layers, block_tokens=16, max_drafts=3)
    caches = [HybridCache(schema, num_blocks=4, max_seqs=2, max_seq_len=64, device=backend.device) for _ in range(2)]
    requests = [cache.admit([]) for cache in caches]
    g = torch.Generator().manual_seed(kept)
    parts = [(14, 14), (4, kept), (2, 2)]  # tokens of a step, and those that stay

    def feed(cache: HybridCache, request, inputs: dict, rows: slice) -> None:
        cache.prepare_forward([(request, len(range(*rows.indices(100))))])
        for i in range(len(layers)):
            handle = cache.acquire(i, backend=backend.name)
            handle.write_swa(inputs["x"][rows])
            index = Projected(inputs["ikv"][rows], inputs["iscore"][rows]) if i == 0 else None
            width = 128 if i == 0 else 64
            handle.flush(Projected(inputs["kv"][rows, :width], inputs["score"][rows, :width], bias[i]), index)

    bias = [torch.randn(4, 128, generator=g).to(backend.device), torch.randn(16, 64, generator=g).to(backend.device)]
    for total, stay in parts:
        widths = {"x": 64, "kv": 128, "score": 128, "ikv": 64, "iscore": 64}
        inputs = {name: torch.randn(total, width, generator=g).to(backend.device) for name, width in widths.items()}
        start = requests[0].length
        feed(caches[0], requests[0], inputs, slice(0, total))
        caches[0].take_back([(requests[0], start + stay)], backend=backend.name)
        if stay:
            feed(caches[1], requests[1], inputs, slice(0, stay))
    a, b = caches
    assert requests[0].length == requests[1].length == 16 + kept
    for x, y in zip(a.layers, b.layers, strict=True):
        compare.bitwise(x.tail.state, y.tail.state, "tail")
        seen = y.window.positions > requests[0].length - x.schema.window  # by the next token; older rows may have gone
        compare.bitwise(x.window.positions[seen], y.window.positions[seen], "positions")
        assert int(x.window.positions.max()) == requests[0].length - 1
        numbers = torch.arange(requests[0].length // x.schema.ratio, device=backend.device)
        rows = []
        for cache, pool in ((a, x.entries), (b, y.entries)):
            assert cache.slot(requests[caches.index(cache)]) == 0
            rows.append(pool.read(cache.block_table[0, numbers // pool.rows].long() * pool.rows + numbers % pool.rows))
        compare.bitwise(*rows, "entries")
    compare.bitwise(a.layers[0].index_tail.state, b.layers[0].index_tail.state, "tail of keys")
    assert len(a.block_ids(requests[0])) == len(b.block_ids(requests[1]))


def test_what_cannot_be_taken_back_is_refused():
    schema = HybridSchema((LayerSchema(4, window=8, head_dim=64, rope_dim=16, **F32),), max_drafts=3)
    cache = HybridCache(schema, num_blocks=4, max_seqs=2, max_seq_len=300)
    request, other = cache.admit([]), cache.admit([])
    cache.prepare_forward([(request, 5)])
    with pytest.raises(BadArgument, match="tokens from 5 on"):
        cache.take_back([(request, 4)])
    with pytest.raises(BadArgument, match="tokens from 5 on"):
        cache.truncate(request, 4)
    cache.prepare_forward([(request, 4), (other, 1)])
    for length in (4, 10):
        with pytest.raises(BadArgument, match="tokens from 5 on"):
            cache.take_back([(other, 1), (request, length)])
    with pytest.raises(BadArgument, match="twice"):
        cache.take_back([(request, 6), (request, 7)])
    assert (request.length, other.length) == (9, 1), "nothing changed"
    cache.take_back([(request, 9)])
    cache.take_back([(request, 7)])
    cache.truncate(request, 6)
    assert request.length == 6
    cache.check()
    plain = HybridCache(HybridSchema(schema.layers), num_blocks=4, max_seqs=1, max_seq_len=300)
    request = plain.admit([])
    plain.prepare_forward([(request, 1)])
    with pytest.raises(BadArgument, match="max_drafts is 0"):
        plain.take_back([(request, 0)])
    plain.truncate(request, 0)  # all of it can always be forgotten
    assert (request.length, *(a.num_used for a in plain.allocators)) == (0, 0, 0)
    plain.check()


def test_named_blocks_stay():
    schema = HybridSchema((LayerSchema(4, window=8, head_dim=64, rope_dim=16, **F32),), block_tokens=4, max_drafts=3)
    cache = HybridCache(schema, num_blocks=4, max_seqs=1, max_seq_len=16, prefix=True, snapshot_every=0)
    request = cache.admit([1, 2, 3, 4, 5])
    cache.prepare_forward([(request, 4)])
    cache.commit(request)
    with pytest.raises(BadArgument, match="4 are named"):
        cache.take_back([(request, 3)])


def test_a_tail_that_goes_back_twice(generator):
    """What is kept of a step stays until the next: first some drafts go, then more."""
    from kvx.cache.hybrid.drafts import AcceptedTokens, Drafts
    from kvx.ops.entry.tail import Tail

    tail, entries = Tail(4, 16, 3, overlap=True), RowPages.zeros(RowCodec("f32", 16), 4, 8)
    drafts, table = Drafts(tail, 4), torch.arange(3, dtype=torch.int32)[:, None]
    kv, score = torch.randn(9, 32, generator=generator), torch.randn(9, 32, generator=generator)
    compress(tail, kv[:4], score[:4], entries, table, Step.of([1], [4], [0]))
    states = [tail.state.clone()]
    for i in range(5):
        compress(tail, kv[4 + i : 5 + i], score[4 + i : 5 + i], entries, table, Step.of([1], [1], [4 + i]))
        states.append(tail.state.clone())
    tail.state.copy_(states[0])
    step = Step.of([-1, 1, -1], [0, 5, 0], [0, 4, 0])
    drafts.keep(kv[4:], score[4:], step)
    compress(tail, kv[4:], score[4:], entries, table, step)
    for count in (5, 3, 1, 0):
        drafts.take_back(AcceptedTokens.of([1], [4], [count], torch.device("cpu")), entries, table)
        compare.bitwise(tail.state, states[count], f"{count} tokens stay")


def small_cache(device: str, max_seqs: int = 1, **options) -> HybridCache:
    layer = LayerSchema(4, overlap=True, window=8, head_dim=16, rope_dim=0, index_dim=32, **F32)
    schema = HybridSchema((layer,), block_tokens=8, max_drafts=2)
    return HybridCache(schema, num_blocks=8, max_seqs=max_seqs, max_seq_len=64, device=device, **options)


def run_step(cache: HybridCache, backend, request, num_tokens: int) -> None:
    def randn(width: int) -> torch.Tensor:
        return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(request.length)).to(backend.device)

    cache.prepare_forward([(request, num_tokens)])
    handle = cache.acquire(0, backend=backend.name)
    handle.write_swa(randn(16))
    handle.flush(Projected(randn(32), randn(32)), Projected(randn(64), randn(64)))


@pytest.mark.parametrize("kept", [0, 1])
def test_a_step_that_never_ran_is_taken_back(backend, kept):
    """Nothing was put aside for it. What is there is an earlier step's, or an earlier request's in the same slot."""
    cache = small_cache(backend.device)
    tails = [cache.layers[0].tail.state, cache.layers[0].index_tail.state]
    fresh = [t.clone() for t in tails]
    for num_steps in (2, 0):
        request = cache.admit([])
        for num_tokens in (5, 1)[:num_steps]:
            run_step(cache, backend, request, num_tokens)
        before, length = [t.clone() for t in tails] if num_steps else fresh, request.length
        cache.prepare_forward([(request, 2)])
        cache.take_back([(request, length + kept)], backend=backend.name)
        for now, then in zip(tails, before, strict=True):
            compare.bitwise(now, then, f"after {num_steps} steps")
        cache.release(request)


def test_a_backend_that_is_not_there_changes_nothing(backend):
    cache = small_cache(backend.device)
    request = cache.admit([])
    run_step(cache, backend, request, 3)
    before = [t.clone() for t in cache.layers[0].tensors]
    with pytest.raises(BadArgument, match=r"take_back\(\): backend is \"abacus\""):
        cache.take_back([(request, 1)], backend="abacus")
    assert request.length == 3
    for now, then in zip(cache.layers[0].tensors, before, strict=True):
        compare.bitwise(now, then, "a layer")


def test_nothing_to_take_back_while_a_request_replays(backend):
    """Its length is within blocks that have names; to stay there is no fault."""
    cache = small_cache(backend.device, prefix=True, snapshot_every=0)
    first = cache.admit(range(30))
    run_step(cache, backend, first, 24)
    cache.commit(first)
    cache.release(first)
    second = cache.admit(range(30))
    assert (second.length, second.num_ahead * 8) == (16, 24)
    cache.take_back([(second, 16)], backend=backend.name)
    assert second.length == 16
    run_step(cache, backend, second, 2)
    with pytest.raises(BadArgument, match="24 are named"):
        cache.take_back([(second, 17)], backend=backend.name)
    cache.check()


def test_drafts_are_not_taken_back_under_a_fork(backend):
    """Their state is both's: what one takes back the other would lose. When the other has left, or has gone on, it can be."""
    cache = small_cache(backend.device, max_seqs=2)
    request = cache.admit([])
    for num_tokens in (5, 3):
        run_step(cache, backend, request, num_tokens)
    fork = cache.fork(request)
    before = state_of(cache, cache.slot(fork))
    for seq in (request, fork):
        with pytest.raises(BadArgument, match="tokens from 8 on can be taken back"):
            cache.take_back([(seq, 6)], backend=backend.name)
    assert (request.length, fork.length) == (8, 8)
    assert same(state_of(cache, cache.slot(fork)), before)
    run_step(cache, backend, fork, 2)  # in a copy
    assert cache.slot(fork) != cache.slot(request)
    cache.take_back([(request, 6)], backend=backend.name)
    assert (request.length, fork.length) == (6, 10)
    cache.take_back([(fork, 9)], backend=backend.name)
    cache.check()


def test_tokens_that_no_step_had_are_not_taken_back():
    """extend() alone puts nothing aside."""
    cache = small_cache("cpu")
    seq = cache.admit([])
    cache.prepare_forward([(seq, 3)])
    cache.extend(seq, 5)
    for length in (6, 2):
        with pytest.raises(BadArgument, match="tokens from 8 on"):
            cache.take_back([(seq, length)])
    cache.check()


def test_an_error_while_drafts_are_taken_back_ends_with_them(monkeypatch):
    """Every later call would meet it again."""
    cache = small_cache("cpu")
    seq = cache.admit([])
    cache.prepare_forward([(seq, 5)])
    cache.prepare_forward([(seq, 2)])

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("kvx.cache.hybrid.drafts.Drafts.take_back", fail)
    with pytest.raises(torch.OutOfMemoryError):
        cache.take_back([(seq, 6)])
    assert seq.length == 0, "what is half taken back is nobody's"
    cache.check()
    cache.release(seq)
