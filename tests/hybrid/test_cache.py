"""HybridCache: a model's layers through windows, tails and blocks, in chunks, requests beside each other, against transformers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvx import BadArgument, OutOfBlocks
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema, Request
from kvx.cache.hybrid.attention import attention_sparse, every_entry, index_scores, num_visible, topk
from tests.hybrid import golden, models
from tests.hybrid.golden import Layer

F32 = {"entry_rows": "f32", "window_rows": "f32", "index_rows": "f32"}


class Runner:
    """One layer of a model on a cache: tensors of the whole text in, what each chunk attends out."""

    def __init__(self, model, cache: HybridCache, index: int, of: Layer) -> None:
        self.cache, self.store, self.of = cache, cache.layers[index], of
        self.attn, self.freqs = model.model.layers[index].self_attn, models.frequencies(model, index)
        self.topk = model.config.index_topk
        compressor = self.attn.compressor
        self.parts = None if compressor is None else models.projections(compressor, of.x)
        indexer = getattr(compressor, "indexer", None)
        self.index_parts = None if indexer is None else models.projections(indexer, of.x)
        self.weights = None
        if indexer is not None:
            self.weights = golden.head_weights(of.x, indexer.scorer.weights_proj.weight, index_dim=indexer.head_dim)

    def step(self, request: Request, start: int, stop: int) -> torch.Tensor:
        """Tokens [start, stop): entries first, so that those who close a window read it; the window last, it is written over."""
        store, slot, positions = self.store, request.slot, torch.arange(start, stop)
        q, rows, row_positions = self.of.q[start:stop], *store.window.before(slot, start)
        fresh = store.window.codec.decode(*store.window.codec.encode(self.of.window[start:stop]))
        rows, row_positions = torch.cat((rows, fresh)), torch.cat((row_positions, positions))
        entries, selected = q.new_zeros(0, q.shape[-1]), torch.full((len(q), 1), -1)
        if store.schema.ratio:
            visible, count = num_visible(positions, store.schema.ratio), store.schema.entries(stop)
            self.close(request, start, stop)
            entries, selected = store.entries.read(self.cache.blocks(request), count), every_entry(visible, count)
            if store.index is not None:
                keys = store.index.read(self.cache.blocks(request), count)
                scores = index_scores(self.of.index_q[start:stop], self.weights[start:stop], keys, visible)
                selected = topk(scores, self.topk)
        store.window.write(slot, start, self.of.window[start:stop])
        sinks, window = self.attn.sinks, store.schema.window
        return attention_sparse(q, positions, rows, row_positions, window, entries, selected, sinks=sinks)[0]

    def close(self, request: Request, start: int, stop: int) -> None:
        store, ratio = self.store, self.store.schema.ratio
        made = [(store.tail, store.entries, self.parts, self.attn.compressor)]
        if store.index is not None:
            made.append((store.index_tail, store.index, self.index_parts, self.attn.compressor.indexer))
        for tail, pool, parts, module in made:
            whole = [p for p in parts if p is not None]
            kv, score = (torch.cat([p[i][start:stop] for p in whole], 1) for i in range(2))
            pooled, first = tail.take(request.slot, start, kv, score), start // ratio
            normed = golden.rms(pooled, module.kv_norm.weight)
            x = golden.rotate(normed, torch.arange(first, first + len(pooled)) * ratio, self.freqs)
            pool.write(self.cache.blocks(request), first, x)


def cache_of(model, rows: dict[str, str], *, num_blocks: int = 24, max_requests: int = 3, block_tokens: int = 128) -> HybridCache:
    schema = HybridSchema.of(model.config, block_tokens=block_tokens, **rows)
    return HybridCache(schema, num_blocks=num_blocks, max_requests=max_requests, max_context=512)


def cuts(rng: random.Random, total: int, how: str) -> list[int]:
    """Ends of the chunks."""
    ends = [0]
    while ends[-1] < total:
        n = {"whole": total, "one_by_one": 1, "random": rng.choice((1, 1, 2, 5, 15, 16, 17, 60, 129))}[how]
        ends.append(min(ends[-1] + n, total))
    return ends


@pytest.mark.parametrize("how", ["whole", "one_by_one", "random"])
@pytest.mark.parametrize("tiny", models.MODELS, ids=str)
@models.one_thread()
def test_layers_attend_as_transformers_do(tiny, how):
    total = 140 if how == "one_by_one" else 260
    model, run = models.make(tiny), models.whole(tiny, 260)
    with torch.no_grad():
        for index, of in enumerate(run.layers):
            cache = cache_of(model, F32)
            runner, request = Runner(model, cache, index, of), cache.admit_request()
            ends, got = cuts(random.Random(f"{tiny}{index}"), total, how), []
            for start, stop in itertools.pairwise(ends):
                cache.prepare_forward([(request, stop - start)])
                got.append(runner.step(request, start, stop))
            torch.testing.assert_close(torch.cat(got), of.attended[:total], rtol=0, atol=1e-5)


@models.one_thread()
def test_requests_beside_each_other_and_after(generator):
    """Three requests take turns in one cache; one leaves, another gets its slot and blocks. Each is as if it were alone."""
    model, run = models.make(models.FLASH), models.whole(models.FLASH, 260)
    cache = cache_of(model, F32, num_blocks=5)
    rng = random.Random(3)
    with torch.no_grad():
        for index, of in enumerate(run.layers):
            runner = Runner(model, cache, index, of)
            live = {cache.admit_request(): (length, []) for length in (30, 140, 131)}
            left = [129, 5]
            while live:
                request = rng.choice(list(live))
                total, got = live[request]
                start = request.length
                stop = min(total, start + rng.choice((1, 3, 40)))
                cache.prepare_forward([(request, stop - start)])
                got.append(runner.step(request, start, stop))
                if stop == total:
                    torch.testing.assert_close(torch.cat(got), of.attended[:total], rtol=0, atol=1e-5)
                    cache.release_request(request)
                    del live[request]
                    if left:
                        live[cache.admit_request()] = (left.pop(), [])
    cache.allocator.check()
    assert cache.allocator.num_used == 0


@pytest.mark.parametrize(("rows", "bound"), [("bf16", 2.0**-7), ("fp8_entry", 0.12)])
@models.one_thread()
def test_rows_of_fewer_bits(rows, bound):
    """The answer is the same attention over rows as they are kept; beside the exact one it is off by what the rows are."""
    model, run = models.make(models.FLASH), models.whole(models.FLASH, 140)
    kept = {"entry_rows": rows, "window_rows": rows, "index_rows": "f32"}
    with torch.no_grad():
        for index, of in enumerate(run.layers):
            cache = cache_of(model, kept)
            runner, request = Runner(model, cache, index, of), cache.admit_request()
            cache.prepare_forward([(request, 140)])
            got = runner.step(request, 0, 140)
            off = (got - of.attended).norm() / of.attended.norm()
            assert 0 < float(off) < bound
            codec = cache.layers[index].window.codec
            window = codec.decode(*codec.encode(of.window))
            entries = of.entries if of.entries is None else codec.decode(*codec.encode(of.entries))
            visible = num_visible(torch.arange(140), of.ratio) if of.ratio else None
            selected = of.selected if of.selected is not None or of.entries is None else every_entry(visible, len(entries))
            want = golden.attend(of.q, window, entries, selected, sinks=runner.attn.sinks, num_window=models.FLASH.window)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5 if of.ratio == 0 else 5e-3)


def test_drafts_are_taken_back():
    """A ring with room for drafts: what they wrote over was out of every window."""
    layer = LayerSchema(window=8, head_dim=16, rope_dim=4, window_rows="f32")
    cache = HybridCache(HybridSchema((layer,), max_drafts=3), num_blocks=0, max_requests=1, max_context=64)
    window = cache.layers[0].window
    rows = torch.randn(30, 16)
    window.write(0, 0, rows[:20])
    window.write(0, 20, torch.randn(3, 16))
    window.truncate(0, 20)
    got, positions = window.before(0, 20)
    assert positions.tolist() == list(range(13, 20))
    assert torch.equal(got, rows[13:20])
    window.write(0, 20, rows[20:])
    assert torch.equal(window.before(0, 30)[0], rows[23:30])


def test_blocks_come_with_positions():
    schema = HybridSchema(
        (LayerSchema(4, overlap=True, index_dim=32, head_dim=64, rope_dim=16, **F32), LayerSchema(128, head_dim=64, **F32))
    )
    cache = HybridCache(schema, num_blocks=3, max_requests=2, max_context=400)
    a, b = cache.admit_request(), cache.admit_request()
    for tokens, blocks in ((3, 0), (1, 1), (124, 1), (3, 1), (1, 2)):
        cache.prepare_forward([(a, tokens)])
        assert a.num_blocks == blocks
    assert len(set(cache.blocks(a).tolist())) == 2
    with pytest.raises(OutOfBlocks) as error:
        cache.prepare_forward([(a, 1), (b, 200)])
    assert (error.value.needed, error.value.free) == (2, 1)
    assert (a.length, b.length, cache.allocator.num_free) == (132, 0, 1), "nothing was half done"
    with pytest.raises(OutOfBlocks, match="max_requests"):
        cache.admit_request()
    cache.release_request(a)
    assert cache.allocator.num_free == 3
    assert cache.block_table.eq(-1).all()


def test_memory_is_what_the_schema_says():
    schema = HybridSchema.of("DeepSeek-V4-Flash")
    small = HybridSchema(schema.layers[:4])
    cache = HybridCache(small, num_blocks=2, max_requests=3, max_context=256)
    positions = sum(layer.window.positions.numel() * 4 for layer in cache.layers)
    assert cache.memory_bytes - positions == small.memory_bytes(2, 3).allocated


def test_layers_that_read_anothers_entries():
    own = LayerSchema(2, head_dim=64, rope_dim=16, **F32)
    other = LayerSchema(2, head_dim=64, rope_dim=16, owner=0, **F32)
    cache = HybridCache(HybridSchema((own, other)), num_blocks=2, max_requests=1, max_context=128)
    assert cache.layers[1].entries is cache.layers[0].entries
    assert cache.layers[1].tail is None


def test_wrong_calls_are_refused():
    cache = HybridCache(HybridSchema((LayerSchema(4, head_dim=64, **F32),)), num_blocks=4, max_requests=1, max_context=100)
    request = cache.admit_request()
    with pytest.raises(BadArgument, match="max_context is 100"):
        cache.prepare_forward([(request, 101)])
    with pytest.raises(BadArgument, match="twice"):
        cache.prepare_forward([(request, 1), (request, 1)])
    cache.release_request(request)
    for call in (cache.release_request, lambda r: cache.prepare_forward([(r, 1)])):
        with pytest.raises(BadArgument, match="was released"):
            call(request)
    with pytest.raises(BadArgument, match="both are 1 or more"):
        HybridCache(HybridSchema((LayerSchema(),)), num_blocks=1, max_requests=0, max_context=5)


def test_choices(generator):
    """Ties go to the lower index, nothing is chosen that is not there, and a sink alone leaves zeros."""
    scores = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [-torch.inf] * 4])
    assert topk(scores, 3).tolist() == [[1, 2, 0], [-1, -1, -1]]
    assert topk(scores, 6).tolist()[0] == [1, 2, 0, -1, -1, -1]
    q = torch.randn(1, 2, 8, generator=generator)
    nothing = (torch.zeros(0, 8), torch.zeros(0), 4, torch.zeros(0, 8), torch.full((1, 2), -1))
    out, lse = attention_sparse(q, torch.tensor([5]), *nothing, sinks=torch.zeros(2))
    assert not out.any()
    assert lse.eq(-torch.inf).all()
    assert not attention_sparse(q, torch.tensor([5]), *nothing)[0].any()
