"""HybridCache: a model's layers through windows, tails and blocks, in chunks, requests beside each other, against transformers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument, OutOfBlocks
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema
from tests.hybrid import golden, models
from tests.hybrid.hybrids import DEVICE_CLOSE, F32, attend, cuts, hybrid_on

LAYER_CLOSE = 1e-5  # float32, rows as they come


@pytest.mark.parametrize("how", ["whole", "one_by_one", "random"])
@pytest.mark.parametrize("tiny", models.MODELS, ids=str)
@models.one_thread()
def test_layers_attend_as_transformers_do(backend, tiny, how):
    total, run = 140 if how == "one_by_one" else 260, models.whole(tiny, 260)
    with torch.no_grad():
        for index, of in enumerate(run.layers):
            hybrid, x = hybrid_on(backend, tiny), of.x.to(backend.device)
            request, ends = hybrid.cache.admit([]), cuts(random.Random(f"{tiny}{index}"), total, how)
            got = [attend(hybrid, index, request, x[a:b]) for a, b in itertools.pairwise(ends)]
            check_layer(backend, torch.cat(got), of.out[:total])


def check_layer(backend, got, want):
    if backend.device == "cpu":
        torch.testing.assert_close(got, want, rtol=0, atol=LAYER_CLOSE)
    else:
        assert float((got.cpu() - want).norm() / want.norm()) < DEVICE_CLOSE


@models.one_thread()
def test_requests_beside_each_other_and_after(backend):
    """Three requests take turns in one cache; one leaves, another gets its slot and blocks. Each is as if it were alone."""
    run, hybrid, rng = models.whole(models.FLASH, 260), hybrid_on(backend, models.FLASH, num_blocks=5), random.Random(3)
    cache = hybrid.cache
    with torch.no_grad():
        for index, of in enumerate(run.layers):
            live = {cache.admit([]): (length, []) for length in (30, 140, 131)}
            left = [129, 5]
            while live:
                request = rng.choice(list(live))
                total, got = live[request]
                stop = min(total, request.length + rng.choice((1, 3, 40)))
                got.append(attend(hybrid, index, request, of.x[request.length : stop].to(backend.device)))
                if stop == total:
                    check_layer(backend, torch.cat(got), of.out[:total])
                    cache.release(request)
                    del live[request]
                    if left:
                        live[cache.admit([])] = (left.pop(), [])
    cache.check()
    assert [a.num_used for a in cache.allocators] == [0, 0]


@pytest.mark.parametrize(("rows", "bound"), [("bf16", 2.0**-7), ("fp8_entry", 0.12)])
@models.one_thread()
def test_rows_of_fewer_bits(backend, rows, bound):
    """The answer is the same attention over rows as they are kept; beside the exact one it is off by what the rows are."""
    model, run = models.make(models.FLASH), models.whole(models.FLASH, 140)
    kept = {"entry_rows": rows, "window_rows": rows, "index_rows": "f32"}
    with torch.no_grad():
        for index, of in enumerate(run.layers):
            hybrid = hybrid_on(backend, models.FLASH, kept)
            got = attend(hybrid, index, hybrid.cache.admit([]), of.x.to(backend.device)).cpu()
            off = (got - of.out).norm() / of.out.norm()
            assert 0 < float(off) < bound
            codec = hybrid.cache.layers[index].window.codec
            window = codec.decode(*codec.encode(of.window))
            entries = of.entries if of.entries is None else codec.decode(*codec.encode(of.entries))
            visible = golden.num_visible(torch.arange(140), of.ratio) if of.ratio else None
            selected = of.selected if of.selected is not None or of.entries is None else golden.select_all(visible, len(entries))
            sinks = model.model.layers[index].self_attn.sinks
            want = golden.attend(of.q, window, entries, selected, sinks=sinks, num_window=models.FLASH.window)
            # Entries that differ in their last bit may round to another code: one step of a row's scale.
            torch.testing.assert_close(got, models.finish(model, index, want), rtol=0, atol=2e-5 if of.ratio == 0 else 5e-3)


def test_blocks_come_with_positions():
    schema = HybridSchema(
        (LayerSchema(4, overlap=True, index_dim=32, head_dim=64, rope_dim=16, **F32), LayerSchema(128, head_dim=64, **F32))
    )
    cache = HybridCache(schema, num_blocks=3, max_seqs=2, max_seq_len=400)
    a, b = cache.admit([]), cache.admit([])
    for tokens, blocks in ((3, 0), (1, 1), (124, 1), (3, 1), (1, 2)):
        cache.prepare_forward([(a, tokens)])
        assert len(cache.block_ids(a)) == blocks
    assert len(set(cache.block_ids(a).tolist())) == 2
    with pytest.raises(OutOfBlocks) as error:
        cache.prepare_forward([(a, 1), (b, 200)])
    assert (error.value.needed, error.value.free) == (2, 1)
    assert (a.length, b.length, cache.slot(b), *(a.num_free for a in cache.allocators)) == (132, 0, -1, 1, 1), (
        "nothing was half done"
    )
    with pytest.raises(OutOfBlocks, match="max_seqs"):
        cache.admit([])
    cache.release(a)
    assert [a.num_free for a in cache.allocators] == [2, 3]
    cache.check()


def test_memory_is_what_the_schema_says():
    schema = HybridSchema.of("DeepSeek-V4-Flash")
    small = HybridSchema(schema.layers[:4])
    cache = HybridCache(small, num_blocks=2, max_seqs=3, max_seq_len=256)
    assert cache.memory_bytes == small.memory_bytes(2, 3).allocated
    # With drafts there is one tail more, for sequences that are skipped.
    guessing = HybridSchema(schema.layers[:4], max_drafts=3)
    cache = HybridCache(guessing, num_blocks=2, max_seqs=3, max_seq_len=256)
    spare = sum(layer.request_bytes(3).payload - 131 * 584 - 4 * layer.tail_floats() for layer in guessing.layers)
    assert cache.memory_bytes == guessing.memory_bytes(2, 3).allocated + spare


def test_snapshots_are_states_more():
    """Whatever a snapshot costs is what a request does."""
    small = HybridSchema(HybridSchema.of("DeepSeek-V4-Flash").layers[:4])
    cache = HybridCache(small, num_blocks=2, max_seqs=3, max_seq_len=256, prefix=True, num_snapshots=4)
    assert cache.memory_bytes == small.memory_bytes(2, 3 + 4).allocated
    assert [(g.name, g.num_blocks) for g in cache.stats().groups] == [("windows", 7), ("entries", 2)]


def test_layers_that_read_anothers_entries():
    own = LayerSchema(2, head_dim=64, rope_dim=16, **F32)
    other = LayerSchema(2, head_dim=64, rope_dim=16, owner=0, **F32)
    cache = HybridCache(HybridSchema((own, other)), num_blocks=2, max_seqs=1, max_seq_len=128)
    assert cache.layers[1].entries is cache.layers[0].entries
    assert cache.layers[1].tail is None


def test_wrong_calls_are_refused():
    cache = HybridCache(HybridSchema((LayerSchema(4, head_dim=64, **F32),)), num_blocks=4, max_seqs=1, max_seq_len=100)
    request = cache.admit([])
    with pytest.raises(BadArgument, match="max_seq_len is 100"):
        cache.prepare_forward([(request, 101)])
    with pytest.raises(BadArgument, match="twice"):
        cache.prepare_forward([(request, 1), (request, 1)])
    cache.release(request)
    for call in (cache.release, lambda r: cache.prepare_forward([(r, 1)])):
        with pytest.raises(BadArgument, match="was released"):
            call(request)
    with pytest.raises(BadArgument, match="max_seqs is 0; it must be 1 or more"):
        HybridCache(HybridSchema((LayerSchema(),)), num_blocks=1, max_seqs=0, max_seq_len=5)


def test_requests_of_another_cache_are_refused():
    """Its slot is somebody else's here, or nobody's."""
    schema = HybridSchema((LayerSchema(4, head_dim=64, **F32),), max_drafts=1)
    ours, theirs = (HybridCache(schema, num_blocks=4, max_seqs=1, max_seq_len=100) for _ in range(2))
    request, other = ours.admit([]), theirs.admit([])
    for cache, mine in ((ours, request), (theirs, other)):
        cache.prepare_forward([(mine, 7)])
    calls = [
        ours.release,
        lambda r: ours.prepare_forward([(r, 1)]),
        lambda r: ours.extend(r, 1),
        lambda r: ours.extend_all([(r, 1)]),
        lambda r: ours.take_back([(r, 7)]),
        lambda r: ours.truncate(r, 6),
        ours.fork,
        ours.slot,
        ours.blocks,
        ours.block_ids,
        ours.commit,
        ours.bring_back,
        ours.room,
    ]
    for call in calls:
        with pytest.raises(BadArgument, match="of another cache"):
            call(other)
    assert (request.length, other.length, ours.num_seqs, *(a.num_used for a in ours.allocators)) == (7, 7, 1, 1, 1)
