"""Out of one engine, through every form of a handover, into another: the same rows, by plain indexing, and the same digest."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import kvx
from kvx.handover import Source, export_blocks, from_manifest, join, load, save
from kvx.spec import FORMATS, Granularity
from tests.handover.caches import LATENT, MODEL, PLAIN, Engine, same
from tests.ops.layouts import random_layout

BY_BLOCK = [n for n, f in FORMATS.items() if f.granularity in (Granularity.BLOCK, Granularity.BLOCK_HEAD)]
OTHERS = [n for n in FORMATS if n not in BY_BLOCK and not n.startswith("fp8_e4m3_per_128")]
SIZES = (1, 3, 4, 8, 16)


def spec_of(rng: random.Random, format: str, *, heads: int, layers: int, block_size: int, planes: int) -> kvx.CacheSpec:
    """Any layout that the format can have."""
    for _ in range(20):
        layout = random_layout(rng, kv=planes == 2, block_size=block_size, heads=heads, dim=32)
        try:
            return kvx.CacheSpec(1, block_size, heads, 32, layout=layout, format=format, num_layers=layers, model=MODEL)
        except kvx.BadArgument:
            continue
    layout = PLAIN if planes == 2 else LATENT
    return kvx.CacheSpec(1, block_size, heads, 32, layout=layout, format=format, num_layers=layers, model=MODEL)


def sharded(spec: kvx.CacheSpec, tp: int) -> bool:
    try:
        return all(spec.shard(tp, r) for r in range(tp))
    except kvx.BadArgument:  # the layout splits heads otherwise
        return False


@given(st.data())
def test_every_way_through(data):
    draw = data.draw
    rng = random.Random(draw(st.integers(0, 2**32)))
    format = draw(st.sampled_from(OTHERS))
    planes = draw(st.sampled_from((1, 2, 2)))
    heads, layers = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 3))
    n = draw(st.integers(1, 40))
    window = draw(st.sampled_from((0, 0, 1, 2, 7, 16, 100)))
    first = max(0, min(n - 1, n + 1 - window)) if window else 0
    first = draw(st.integers(0, first))  # an engine may hold more than it must
    geometry = {"heads": heads, "layers": layers, "planes": planes}
    a = spec_of(rng, format, block_size=draw(st.sampled_from(SIZES)), **geometry)
    b = spec_of(rng, format, block_size=draw(st.sampled_from(SIZES)), **geometry)
    tp_a, tp_b, tp = (draw(st.sampled_from((1, 2, 4, 8))) for _ in range(3))
    assume(sharded(a, tp_a) and sharded(b, tp_b))
    size, other = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))

    here = Engine.new(a, n, rng, tp=tp_a, first_token=first).fill(rng)
    tokens = [rng.randrange(2**31) for _ in range(n)]
    handover = export_blocks(tokens, here.sources(window=window, first_token=first), block_size=size)
    handover.check()
    content, whole = handover.parts[0].content, handover

    shards = handover.convert(block_size=other).shard(tp)
    with tempfile.TemporaryDirectory() as folder:
        for rank, shard in enumerate(shards):
            save(Path(folder) / str(rank), shard)
        shards = [load(Path(folder) / str(rank), model=MODEL) for rank in range(tp)]
        shards = [from_manifest(s.to_json(), [p.buffers for p in s.parts]) for s in shards]
        rng.shuffle(shards)
        handover = join([s.convert(block_size=size) for s in shards])
    handover.check()
    assert handover.parts[0].content == content
    assert handover.tokens.tolist() == tokens
    assert handover.parts[0].first_token == first

    there = Engine.new(b, n, rng, tp=tp_b, first_token=first)
    for spec, buffers in zip(there.specs, there.buffers, strict=True):
        handover.write(0, buffers, spec, there.blocks)
    same(here.rows(n, first), there.rows(n, first))
    again = export_blocks(tokens, there.sources(window=window, first_token=first), block_size=size)
    assert again.parts[0].content == content
    assert again.to_json() == whole.to_json()


@given(st.data())
def test_scales_of_blocks(data):
    """Blocks whose rows share a scale stay as large as they are."""
    draw = data.draw
    rng = random.Random(draw(st.integers(0, 2**32)))
    format, n = draw(st.sampled_from(BY_BLOCK)), draw(st.integers(1, 30))
    spec = kvx.CacheSpec(1, 4, 4, 32, layout=PLAIN, format=format, num_layers=2, model=MODEL)
    here = Engine.new(spec, n, rng).fill(rng)
    handover = export_blocks(range(n), here.sources(), block_size=4)
    joined = join(handover.shard(draw(st.sampled_from((1, 2, 4)))))
    assert joined.parts[0].content == handover.parts[0].content
    there = Engine.new(replace(spec, layout="block | layer head kv token dim"), n, rng)
    joined.write(0, there.buffers[0], there.specs[0], there.blocks)
    same(here.rows(n), there.rows(n))
    with pytest.raises(kvx.Unsupported, match="scales belong to blocks"):
        handover.convert(block_size=8)


@pytest.mark.parametrize(
    ("format", "relative"),
    # Half a step of the largest element: of 2^-7 in bf16, of 2^-3 in e4m3, of 2 in 6 in e2m1, whose scale is e4m3 too.
    [("f32", 0), ("bf16", 2**-8), ("f16", 2**-11), ("fp8_e4m3_per_token_head", 2**-4), ("int8_per_token_head_inline", 0.5 / 127),
     ("fp8_e4m3_per_head", 2**-4), ("fp8_e4m3", 2**-4), ("int4_per_token_head", 0.5 / 7), ("nvfp4", 1 / 6 + 2**-4),
     ("mxfp8", 2**-4), ("int8_per_block_head", 0.5 / 127)],
)  # fmt: skip
@pytest.mark.parametrize("window", [0, 9])
def test_numbers_by_gather(format, relative, window, generator):
    """float32 in, another format on the way, float32 out: kvx.gather reads the numbers, layer by layer."""
    n, first = 21, 13 if window else 0
    spec = kvx.CacheSpec(8, 4, 2, 32, layout=PLAIN, format="f32", num_layers=2, model=MODEL)
    buffers = kvx.allocate_buffers(spec)
    for t in buffers:
        t.view(torch.float32).copy_(torch.randn(t.numel() // 4, generator=generator))
    blocks = [-1 if window and i < 3 else b for i, b in enumerate([7, 0, 3, 5, 1, 2])]
    source = Source(buffers, spec, blocks, layers=(4, 9), window=window, first_token=first)
    handover = export_blocks(range(n), [source], block_size=8, format=format)
    handover.check()
    assert handover.spec.format == format
    assert handover.parts[0].layers == (4, 9)
    x = [t.view(torch.float32).view(8, 4, 2, 32) for t in buffers]
    for layer in range(2):
        one = kvx.CacheSpec(6, 4, 2, 32, format="f32", layer_start=layer)
        there = kvx.allocate(one)
        handover.write(0, list(there.cache), one, [5, 4, 3, 2, 1, 0])
        table = kvx.PackedTable(torch.tensor([[5, 4, 3, 2, 1, 0]], dtype=torch.int32), torch.tensor([n], dtype=torch.int32))
        got = kvx.gather(there.cache, table, spec=one)
        for plane in range(2):
            want = torch.stack([x[2 * layer + plane][blocks[t // 4], t % 4] for t in range(first, n)])
            out = got[plane].reshape(-1, 2, 32)[first:n]
            # What shares a scale with others may be smaller than they are.
            largest = x[2 * layer + plane].abs().amax() if "per_block" in format else want.abs().amax(-1, keepdim=True)
            assert torch.all((out - want).abs() <= 1.001 * relative * largest + (2**-10 if format.startswith("fp8") else 0))


def test_groups_with_tables_of_their_own():
    """Layers of one kind in several groups, each with a block table: as engines with hybrid caches have them."""
    rng = random.Random(0)
    spec = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format="f32", num_layers=2, model=MODEL)
    groups = {(0, 3): 0, (1, 4): 0, (2, 5): 0}
    engines = {layers: Engine.new(spec, 10, rng).fill(rng) for layers in groups}
    sources = [s for layers, e in engines.items() for s in e.sources(layers=layers)]
    handover = export_blocks(range(10), sources, block_size=8)
    assert [p.layers for p in handover.parts] == [(0, 1, 2, 3, 4, 5)]
    for layers, e in engines.items():
        rows = e.rows(10)
        for i, layer in enumerate(layers):
            one = Engine.new(replace(spec, num_layers=1), 10, rng)
            handover.write(0, one.buffers[0], replace(one.specs[0], layer_start=layer), one.blocks)
            got = one.rows(10)
            assert all(np.array_equal(got[key][0], rows[key][i]) for key in rows)


def test_stages_and_ranks_together():
    rng = random.Random(1)
    spec = kvx.CacheSpec(1, 4, 4, 16, layout=PLAIN, format="f32", num_layers=4, model=MODEL)
    whole = Engine.new(spec, 10, rng).fill(rng)
    handover = export_blocks(range(10), whole.sources())
    sources = []
    for stage in range(2):
        for rank in range(2):
            part = replace(whole.specs[0], layer_start=2 * stage, num_layers=2).shard(2, rank)
            buffers = kvx.allocate_buffers(part)
            ids = list(range(part.num_blocks))
            kvx.convert(
                whole.buffers[0], buffers, plan=kvx.plan(whole.specs[0], part, partial=True), src_blocks=ids, dst_blocks=ids
            )
            sources.append(Source(buffers, part, whole.blocks))
    rng.shuffle(sources)
    assert export_blocks(range(10), sources).to_json() == handover.to_json()


def test_layers_without_an_axis_are_joined():
    rng = random.Random(2)
    spec = kvx.CacheSpec(1, 4, 2, 16, layout="kv | block token head dim", format="f32", model=MODEL, block_bytes=2048)
    engines = [Engine.new(replace(spec, layer_start=n), 9, random.Random(7)).fill(rng) for n in range(3)]
    handover = export_blocks(range(9), [s for e in engines for s in e.sources()])
    for n, e in enumerate(engines):
        there = Engine.new(replace(spec, block_bytes=0, layer_start=n), 9, rng)
        handover.write(0, there.buffers[0], there.specs[0], there.blocks)
        same(e.rows(9), there.rows(9))
