"""HybridCache: a model's layers through windows, tails and blocks, in chunks, requests beside each other, against transformers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument, OutOfBlocks
from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema, Request
from kvx.cache.hybrid.attention import attention_sparse, every_entry, num_visible, topk
from tests.hybrid import golden, models

F32 = {"entry_rows": "f32", "window_rows": "f32", "index_rows": "f32"}


def attend(hybrid: HybridModel, index: int, request: Request, x: torch.Tensor) -> torch.Tensor:
    """One layer's next tokens, x [tokens, hidden]: what it hands on."""
    start = request.length
    hybrid.cache.prepare_forward([(request, len(x))])
    positions, rotary = torch.arange(start, start + len(x))[None], hybrid.model.model.rotary_emb
    turns = {kind: rotary(x[None], position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
    return hybrid.attend(index, request, start, x[None], turns, positions)[0][0]


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
            hybrid = HybridModel(model, cache_of(model, F32))
            request, ends = hybrid.cache.admit_request(), cuts(random.Random(f"{tiny}{index}"), total, how)
            got = [attend(hybrid, index, request, of.x[a:b]) for a, b in itertools.pairwise(ends)]
            torch.testing.assert_close(torch.cat(got), of.out[:total], rtol=0, atol=1e-5)


@models.one_thread()
def test_requests_beside_each_other_and_after(generator):
    """Three requests take turns in one cache; one leaves, another gets its slot and blocks. Each is as if it were alone."""
    model, run = models.make(models.FLASH), models.whole(models.FLASH, 260)
    cache = cache_of(model, F32, num_blocks=5)
    hybrid, rng = HybridModel(model, cache), random.Random(3)
    with torch.no_grad():
        for index, of in enumerate(run.layers):
            live = {cache.admit_request(): (length, []) for length in (30, 140, 131)}
            left = [129, 5]
            while live:
                request = rng.choice(list(live))
                total, got = live[request]
                stop = min(total, request.length + rng.choice((1, 3, 40)))
                got.append(attend(hybrid, index, request, of.x[request.length : stop]))
                if stop == total:
                    torch.testing.assert_close(torch.cat(got), of.out[:total], rtol=0, atol=1e-5)
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
            hybrid = HybridModel(model, cache_of(model, kept))
            got = attend(hybrid, index, hybrid.cache.admit_request(), of.x)
            off = (got - of.out).norm() / of.out.norm()
            assert 0 < float(off) < bound
            codec = hybrid.cache.layers[index].window.codec
            window = codec.decode(*codec.encode(of.window))
            entries = of.entries if of.entries is None else codec.decode(*codec.encode(of.entries))
            visible = num_visible(torch.arange(140), of.ratio) if of.ratio else None
            selected = of.selected if of.selected is not None or of.entries is None else every_entry(visible, len(entries))
            sinks = model.model.layers[index].self_attn.sinks
            want = golden.attend(of.q, window, entries, selected, sinks=sinks, num_window=models.FLASH.window)
            # Entries that differ in their last bit may round to another code: one step of a row's scale.
            torch.testing.assert_close(got, models.finish(model, index, want), rtol=0, atol=2e-5 if of.ratio == 0 else 5e-3)


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
