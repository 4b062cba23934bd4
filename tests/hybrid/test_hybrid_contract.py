"""What an engine relies on, one promise a test, at the sizes of DeepSeek-V4: schema, pools, requests, rows, the flush."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvx import OutOfBlocks
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema, Projected
from kvx.ops.entry.finish import finish_rows
from kvx.ops.entry.tail import BEFORE, CUR, KV, OVL, SCORE
from tests import compare

CSA, HCA, SWA = LayerSchema(4, overlap=True, bias=True, index_dim=128), LayerSchema(128, bias=True), LayerSchema()
SCHEMA = HybridSchema((SWA, CSA, HCA))
RINGS = HybridSchema((SWA, CSA, LayerSchema(128, bias=True, tail="ring")))
# The largest error of a group, of its largest magnitude: powers of two lose half a step more than a scale of their own.
BOUNDS = {"fp8_v4": 1 / 17, "fp8_entry": 16 / 448}


def cache_on(backend, schema: HybridSchema = SCHEMA, *, num_blocks: int = 8, max_seqs: int = 3, **options) -> HybridCache:
    return HybridCache(schema, num_blocks=num_blocks, max_seqs=max_seqs, max_seq_len=600, device=backend.device, **options)


def randn(backend, *shape: int, seed: int = 0) -> Tensor:
    """Of numbers that bf16 has: formats that round first then round nothing."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float().to(backend.device)


def turns(backend) -> tuple[Tensor, Tensor]:
    angles = torch.arange(600)[:, None] * 160000.0 ** (-torch.arange(32) / 32)
    return angles.cos().to(backend.device), angles.sin().to(backend.device)


def rows_at(cache: HybridCache, pool, request, numbers) -> Tensor:
    """Entries or keys of a request by their numbers."""
    at = torch.as_tensor(numbers, device=cache.device)
    return pool.read(cache.block_ids(request).to(cache.device).long()[at // pool.rows] * pool.rows + at % pool.rows)


def window_row(cache: HybridCache, layer: int, request, position: int) -> Tensor:
    window = cache.layers[layer].window
    return window.rows.read(torch.tensor([cache.slot(request) * window.ring + position % window.ring], device=cache.device))[0]


# --- schema, allocator, pools ----------------------------------------------------------------------------------------------


def test_schema_of_each_kind():
    rows = [128 // layer.ratio if layer.ratio else 0 for layer in (CSA, HCA, SWA)]
    assert rows == [32, 1, 0]
    assert [layer.index_dim for layer in (CSA, HCA, SWA)] == [128, 0, 0]
    # Of CSA both projections of the open window and one of the window before, kv and score; of keys as well.
    assert [layer.tail_floats() for layer in (CSA, HCA, SWA)] == [12 * 2 * (512 + 128), 3 * 512, 0]
    assert [layer.kind for layer in (CSA, HCA, SWA)] == ["CSA", "HCA", "SWA"]
    assert SCHEMA.block_tokens == 128


def test_allocator_gives_takes_and_refuses(backend):
    cache = cache_on(backend, num_blocks=2, max_seqs=2)
    a, b = cache.admit([]), cache.admit([])
    cache.prepare_forward([(a, 128)])
    cache.prepare_forward([(b, 128)])
    assert sorted(cache.block_ids(a).tolist() + cache.block_ids(b).tolist()) == [0, 1]
    before = [t.clone() for t in (cache.block_table, *cache.step)]
    with pytest.raises(OutOfBlocks) as error:
        cache.prepare_forward([(a, 1), (b, 4)])
    assert (error.value.needed, error.value.free) == (1, 0)
    for now, then in zip((cache.block_table, *cache.step), before, strict=True):
        compare.bitwise(now, then, "table or step")
    assert (a.length, b.length) == (128, 128)
    cache.release(a)
    cache.prepare_forward([(b, 4)])
    assert cache.allocators[1].num_free == 0
    cache.check()


def test_pools_have_the_shapes_of_the_schema(backend):
    cache = cache_on(backend)
    swa, csa, hca = cache.layers
    assert [(s.entries and s.entries.pages.shape) for s in (swa, csa, hca)] == [None, (8, 19008), (8, 1152)]
    assert (csa.entries.rows, csa.index.rows, hca.entries.rows) == (32, 32, 1)
    assert csa.index.pages.shape == (8, 32 * 68)
    assert hca.index is None
    assert csa.tail.state.shape == (3, 3, 4, 2, 512)
    assert csa.index_tail.state.shape == (3, 3, 4, 2, 128)
    assert hca.tail.state.shape == (3, 3, 512)
    assert swa.tail is None
    assert all(s.window.pages.shape == (3, 74880) and s.window.positions.shape == (3, 128) for s in cache.layers)
    assert cache.memory_bytes == SCHEMA.memory_bytes(8, 3).allocated


def test_slots_begin_empty_and_begin_so_again(backend):
    """Kv 0 and scores -inf, after the first request as before it; and its rows are nobody's."""
    cache = cache_on(backend, RINGS)
    fresh = [t.clone() for s in cache.layers for t in s.tensors]
    scores = cache.layers[1].tail.state[..., SCORE, :]
    assert scores.eq(-torch.inf).all()
    assert not cache.layers[1].tail.state[..., KV, :].any()
    request = cache.admit([])
    step = cache.prepare_forward([(request, 7)])
    for i in range(3):
        cache.acquire(i, step, backend=backend.name).write_swa(randn(backend, 7, 512))
    flush(cache, 1, backend, randn(backend, 7, 1024), randn(backend, 7, 1024), randn(backend, 7, 256))
    flush(cache, 2, backend, randn(backend, 7, 512), randn(backend, 7, 512))
    assert not all(torch.equal(a, b) for a, b in zip(fresh, (t for s in cache.layers for t in s.tensors), strict=True))
    pools, slot = [cache.layers[1].entries.pages, cache.layers[1].index.pages], cache.slot(request)
    cache.release(request)
    other = cache.admit([])
    cache.prepare_forward([(other, 3)])
    assert cache.slot(other) == slot
    for pool in pools:
        pool.zero_()  # blocks are free, and what is in them is nobody's
    for now, then in zip((t for s in cache.layers for t in s.tensors), fresh, strict=True):
        compare.bitwise(now, then, "a layer")


def test_requests_come_and_go(backend):
    cache = cache_on(backend, max_seqs=2, prefix=True, snapshot_every=0)
    first, b = cache.admit([7] * 130), cache.admit([])
    with pytest.raises(OutOfBlocks, match="max_seqs"):
        cache.admit([])
    cache.prepare_forward([(first, 130)])
    cache.commit(first)
    cache.append(b, [1])
    cache.prepare_forward([(b, 1)])
    cache.release(first)
    a = cache.admit([7] * 130)
    assert (a.length, a.num_ahead, cache.slot(a)) == (0, 1, -1), "nothing is computed again until there is a step"
    cache.prepare_forward([(a, 5)])
    slot = cache.slot(a)
    assert cache.num_shared.tolist() == [128 if s == slot else 0 for s in range(2)]
    cache.release(a)
    again = cache.admit([8] * 9)
    assert (again.length, again.num_ahead, len(cache.block_ids(again))) == (0, 0, 0)
    cache.prepare_forward([(again, 9)])
    assert cache.slot(again) == slot != cache.slot(b)
    assert not cache.num_shared.any(), "the next one in the slot writes all of its entries"


# --- handles ---------------------------------------------------------------------------------------------------------------


def test_a_handle_is_memory_that_was_there(backend):
    """0 bytes on the device, counted there; and everywhere: the same tensors at the same places, step after step."""
    cache = cache_on(backend)
    request = cache.admit([])

    def addresses() -> list[int]:
        found = []
        for i in range(3):
            handle = cache.acquire(i, backend=backend.name)
            swa, entries, keys = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()
            tensors = [swa.rows.pages, swa.positions, *handle.step]
            for view in (entries, keys):
                tensors += [view.rows.pages, view.block_table, view.num_shared] if view is not None else []
            found += [t.data_ptr() for t in tensors]
        return found

    cache.prepare_forward([(request, 3)])
    first = addresses()
    if backend.device == "cuda":
        torch.cuda.synchronize()
        before, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    cache.prepare_forward([(request, 130)])
    handles = [cache.acquire(i, backend=backend.name) for i in range(3)]
    if backend.device == "cuda":
        assert torch.cuda.memory_allocated() == before, f"{peak} before"
        assert torch.cuda.max_memory_allocated() == before
    assert addresses() == first
    store = cache.layers[1]
    assert handles[1].read_classical_view().rows is store.entries
    assert handles[1].read_indexer_view().rows is store.index
    assert handles[0].read_classical_view() is handles[0].read_indexer_view() is None
    assert first[0] == cache.layers[0].window.pages.data_ptr()


def test_a_layer_without_entries_does_not_flush(backend):
    cache = cache_on(backend)
    cache.prepare_forward([(cache.admit([]), 1)])
    x = randn(backend, 1, 512)
    with pytest.raises(ValueError, match="no entries of its own"):
        cache.acquire(0).flush(Projected(x, x))
    with pytest.raises(ValueError, match="has an indexer"):
        cache.acquire(1).flush(Projected(randn(backend, 1, 1024), randn(backend, 1, 1024)))


# --- rows of windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", BOUNDS)
def test_rows_stand_by_position_within_their_error(backend, rows):
    """Every row at position mod window; coded elements within the format's bound, rotary ones exact."""
    cache = cache_on(backend, HybridSchema((LayerSchema(window_rows=rows),)))
    a, b = cache.admit([]), cache.admit([])
    x, (cos, sin) = randn(backend, 130, 512), turns(backend)
    cache.prepare_forward([(a, 100), (b, 30)])
    weight = randn(backend, 512, seed=1)
    cache.acquire(0, backend=backend.name).write_swa(x, weight=weight, cos=cos, sin=sin)
    at = torch.cat((torch.arange(100), torch.arange(30))).to(backend.device)
    want = finish_rows(x, at, weight, cos, sin)
    positions = cache.layers[0].window.positions
    assert positions[cache.slot(a)].tolist() == [*range(100), *[-1] * 28]
    assert positions[cache.slot(b)].tolist() == [*range(30), *[-1] * 98]
    got = torch.stack([window_row(cache, 0, a, p) for p in range(100)] + [window_row(cache, 0, b, p) for p in range(30)])
    compare.bitwise(got[:, 448:], want[:, 448:].bfloat16().float(), "the rotary part")
    group = 64 if rows == "fp8_v4" else 448
    tiles, exact = (t[:, :448].unflatten(1, (-1, group)) for t in (got, want))
    off = (tiles - exact).abs().amax(-1) / exact.abs().amax(-1)
    assert float(off.max()) <= BOUNDS[rows] + 2.0**-8  # and bf16's half step
    assert float(off.max()) > BOUNDS[rows] / 2, "the bound is near"


def test_windows_wrap(backend):
    """The last 128 stay, wherever they come from; of a chunk that is longer, its last."""
    cache = cache_on(backend, HybridSchema((LayerSchema(window_rows="f32"),)))
    request, x = cache.admit([]), randn(backend, 500, 512)
    at = 0
    for n in (128, 1, 70, 300, 1):
        cache.prepare_forward([(request, n)])
        cache.acquire(0, backend=backend.name).write_swa(x[at : at + n])
        at += n
        first = max(0, at - 128)
        positions = cache.layers[0].window.positions[cache.slot(request)].tolist()
        assert sorted(p for p in positions if p >= 0) == list(range(first, at))
        assert all(p < 0 or p % 128 == i for i, p in enumerate(positions))
        for p in (first, at - 1):
            compare.bitwise(window_row(cache, 0, request, p), x[p], f"position {p} of {at}")


def test_requests_write_only_their_own(backend):
    cache = cache_on(backend)
    a, b = cache.admit([]), cache.admit([])
    cache.prepare_forward([(b, 1)])
    cache.prepare_forward([(a, 130)])
    window = cache.layers[1].window
    before = window.pages.clone()
    cache.acquire(1, backend=backend.name).write_swa(randn(backend, 130, 512))
    compare.bitwise(window.pages[cache.slot(b)], before[cache.slot(b)], "another's window")
    assert window.positions[[s for s in range(3) if s != cache.slot(a)]].eq(-1).all()
    assert not torch.equal(window.pages[cache.slot(a)], before[cache.slot(a)])


# --- flush -----------------------------------------------------------------------------------------------------------------


def flush(cache: HybridCache, layer: int, backend, kv: Tensor, score: Tensor, index: Tensor | None = None, **turn: Tensor) -> None:
    keys = None if index is None else Projected(index, index)
    cache.acquire(layer, backend=backend.name).flush(Projected(kv, score), keys, **turn)


def test_what_does_not_close_writes_nothing(backend):
    """Two requests in one step: one closes its window, the other's has a token to go. Slots of -1 are nobody."""
    cache = cache_on(backend)
    a, b = cache.admit([]), cache.admit([])
    cache.prepare_forward([(a, 127), (b, 126)])
    hca = cache.layers[2]
    flush(cache, 2, backend, randn(backend, 253, 512), randn(backend, 253, 512, seed=1))
    assert not hca.entries.pages.any()
    cache.prepare_forward([(a, 1), (b, 1)])
    others = hca.tail.state[2].clone()
    flush(cache, 2, backend, randn(backend, 2, 512, seed=2), randn(backend, 2, 512, seed=3))
    assert hca.entries.pages[int(cache.block_ids(a)[0])].any()
    assert not hca.entries.pages[int(cache.block_ids(b)[0])].any()
    compare.bitwise(hca.tail.state[2], others, "the slot of nobody")


@pytest.mark.parametrize("rows", BOUNDS)
def test_entries_are_pooled_rotated_and_coded(backend, rows):
    """HCA: entry j turns as position 128 j. Rotary part as bf16 has it, the rest within the format's bound."""
    cache = cache_on(backend, HybridSchema((LayerSchema(128, entry_rows=rows),)))
    request, (cos, sin) = cache.admit([]), turns(backend)
    kv, score = randn(backend, 300, 512), 3 * randn(backend, 300, 512, seed=1)
    cache.prepare_forward([(request, 300)])
    flush(cache, 0, backend, kv, score, cos=cos, sin=sin)
    pooled = [(score[i : i + 128].double().softmax(0) * kv[i : i + 128].double()).sum(0) for i in (0, 128)]
    want = finish_rows(torch.stack(pooled).float(), torch.tensor([0, 128], device=backend.device), None, cos, sin)
    got = rows_at(cache, cache.layers[0].entries, request, [0, 1])
    # The softmax is within a few ulp, so a number may round to bf16's next.
    torch.testing.assert_close(got[:, 448:], want[:, 448:], rtol=2.0**-8, atol=1e-6)
    tiles, exact = (t[:, :448].unflatten(1, (-1, 64 if rows == "fp8_v4" else 448)) for t in (got, want))
    off = (tiles - exact).abs().amax(-1) / exact.abs().amax(-1)
    assert float(off.max()) <= BOUNDS[rows] + 2.0**-8


def test_keys_of_the_indexer_are_written(backend):
    """MXFP4 beside each entry, within two of a group's steps of six; and of a window that is open, none."""
    cache = cache_on(backend)
    request = cache.admit([])
    cache.prepare_forward([(request, 11)])
    index = randn(backend, 11, 256, seed=4)
    flush(cache, 1, backend, randn(backend, 11, 1024), randn(backend, 11, 1024, seed=1), index)
    cur, ovl = index[:, 128:].double(), index[:, :128].double()
    slots = [cur[:4], torch.cat((ovl[:4], cur[4:8]))]
    want = torch.stack([(s.softmax(0) * s).sum(0) for s in slots]).float()
    got = rows_at(cache, cache.layers[1].index, request, [0, 1])
    tiles, exact = (t.unflatten(1, (4, 32)) for t in (got, want))
    assert float(((tiles - exact).abs().amax(-1) / exact.abs().amax(-1)).max()) <= 1 / 5
    assert not rows_at(cache, cache.layers[1].index, request, [2]).any()
    assert rows_at(cache, cache.layers[1].entries, request, [1]).any()


def test_a_closed_csa_window_hands_on_what_it_gives_to_the_next(backend):
    """before <- ovl. Not <- cur: those are other weights' numbers, and entries after the first would be all wrong."""
    cache = cache_on(backend)
    request, tail = cache.admit([]), cache.layers[1].tail
    kv, score = randn(backend, 8, 1024), randn(backend, 8, 1024, seed=1)
    cache.prepare_forward([(request, 3)])
    flush(cache, 1, backend, kv[:3], score[:3], randn(backend, 3, 256))
    state = tail.state[cache.slot(request)]
    compare.bitwise(state[OVL, :3, KV], kv[:3, :512], "ovl")
    compare.bitwise(state[CUR, :3, KV], kv[:3, 512:], "cur")
    assert state[BEFORE, :, SCORE].eq(-torch.inf).all()
    cache.prepare_forward([(request, 1)])
    flush(cache, 1, backend, kv[3:4], score[3:4], randn(backend, 1, 256))
    compare.bitwise(state[BEFORE, :, KV], kv[:4, :512], "what the next entry gets")
    compare.bitwise(state[BEFORE, :, SCORE], score[:4, :512], "its scores")
    for part in (OVL, CUR):
        assert not state[part, :, KV].any(), "the open window is empty"
        assert state[part, :, SCORE].eq(-torch.inf).all()
    cache.prepare_forward([(request, 4)])
    flush(cache, 1, backend, kv[4:], score[4:], randn(backend, 4, 256))
    weigh = torch.cat((score[:4, :512], score[4:, 512:])).double().softmax(0)
    want = (weigh * torch.cat((kv[:4, :512], kv[4:, 512:])).double()).sum(0).float()
    wrong = (torch.cat((score[:4, 512:], score[4:, 512:])).double().softmax(0) * torch.cat((kv[:4, 512:], kv[4:, 512:]))).sum(0)
    got = rows_at(cache, cache.layers[1].entries, request, [1])[0]
    assert float((got - want).norm() / want.norm()) < 0.05
    assert float((wrong - want).norm() / want.norm()) > 0.5


@pytest.mark.parametrize("schema", [SCHEMA, RINGS], ids=["running", "ring"])
def test_a_closed_hca_window_leaves_nothing(backend, schema):
    cache = cache_on(backend, schema)
    request, tail = cache.admit([]), cache.layers[2].tail
    fresh = tail.state.clone()
    cache.prepare_forward([(request, 100)])
    flush(cache, 2, backend, randn(backend, 100, 512), randn(backend, 100, 512, seed=1))
    assert not torch.equal(tail.state, fresh)
    cache.prepare_forward([(request, 28)])
    flush(cache, 2, backend, randn(backend, 28, 512, seed=2), randn(backend, 28, 512, seed=3))
    compare.bitwise(tail.state, fresh, "tail")


# --- prepare_forward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "tokens", "blocks"),
    [(0, 3, 0), (0, 4, 1), (3, 1, 1), (4, 123, 1), (127, 1, 1), (128, 3, 1), (128, 4, 2), (131, 1, 2), (0, 600, 5), (255, 0, 2)],
)
def test_blocks_follow_from_positions(backend, start, tokens, blocks):
    """CSA's first entry of a block comes with its fourth token; HCA's with its last."""
    cache = cache_on(backend)
    request = cache.admit([])
    if start:
        cache.prepare_forward([(request, start)])
    step = cache.prepare_forward([(request, tokens)])
    ids = cache.block_ids(request)
    assert len(ids) == blocks
    assert cache.block_table[cache.slot(request), :blocks].tolist() == ids.tolist()
    assert (step.slots.tolist(), step.starts.tolist()) == ([cache.slot(request), -1, -1], [start, 0, 0])
    assert step.cu_seqlens.tolist() == [0, tokens, tokens, tokens]


def test_a_step_knows_its_tokens(backend):
    cache = cache_on(backend)
    a, b = cache.admit([]), cache.admit([])
    cache.prepare_forward([(b, 5)])
    step = cache.prepare_forward([(a, 2), (b, 3)])
    assert step.slots.tolist() == [cache.slot(a), cache.slot(b), -1]
    assert step.positions(7).tolist() == [0, 1, 5, 6, 7, 0, 0]
    seqs, places, is_there = step.places(7)
    assert seqs.tolist()[:5] == [0, 0, 1, 1, 1]
    assert places.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert is_there.tolist() == [True] * 5 + [False] * 2
