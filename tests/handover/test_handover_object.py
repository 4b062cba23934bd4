"""Handover and Part: what they refuse to be, what they refuse to do, and what write() leaves alone."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvx
from kvx.handover import Handover, Part, export_blocks, from_manifest, join, load, model_name
from kvx.handover.memory import moved, new_buffers
from kvx.handover.part import NEUTRAL, NEUTRAL_LATENT
from kvx.layout.buffers import bytes_of
from tests.handover.caches import LATENT, MODEL, PLAIN, Engine, same, small


@pytest.fixture
def rng():
    return random.Random(0)


def refuse(call, words, kind=kvx.BadArgument):
    with pytest.raises(kind, match=words):
        call()


# ---- Part and Handover


def a_part(**fields) -> dict:
    spec = kvx.CacheSpec(2, 4, 2, 8, layout=NEUTRAL, format="f32", num_layers=2, model=MODEL)
    return {"spec": spec, "layers": (0, 1), "window": 0, "first_block": 0, "buffers": new_buffers(spec), **fields}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": (0, 1, 2)}, "for 3 layers of the model"),
        ({"layers": (1, 0)}, "layers are"),
        ({"layers": (0, 0)}, "layers are"),
        ({"layers": (-1, 0)}, "layers are"),
        ({"layers": "01"}, "whole numbers"),
        ({"layers": (0.0, 1.0)}, "whole numbers"),
        ({"window": -1}, "window is -1"),
        ({"window": 2.5}, "whole numbers"),
        ({"first_block": -2}, "first_block is -2"),
        ({"first_block": 1}, "without a window"),
        ({"window": 4, "first_block": 1, "first_token": 3}, "first_token is 3"),
        ({"window": 4, "first_block": 2**31}, "first_block is"),
        ({"buffers": ()}, "0 buffers; its spec makes 2"),
        ({"buffers": (torch.zeros(1023, dtype=torch.uint8),) * 2}, "has 1024 bytes"),
        ({"buffers": (torch.zeros(1024, 2, dtype=torch.uint8)[:, 0],) * 2}, "in a row"),
        ({"buffers": (b"x" * 1024,) * 2}, "is bytes"),
    ],
)
def test_no_part(fields, words):
    refuse(lambda: Part(**a_part(**fields)), words)


@pytest.mark.parametrize(
    "changed", [{"layout": PLAIN}, {"model": ""}, {"layout": NEUTRAL_LATENT, "num_kv_heads": 1, "layer_start": 1}]
)
def test_no_spec_of_a_part(changed):
    spec = replace(a_part()["spec"], **changed)
    refuse(lambda: Part(**a_part(spec=spec, buffers=tuple(kvx.allocate_buffers(spec)))), "Part: ")


def test_numbers_of_numpy_become_plain():
    part = Part(**a_part(layers=np.array([3, 5]), window=np.int64(0)))
    assert part.layers == (3, 5)
    assert type(part.layers[0]) is int
    Handover([1] * 8, (part.sealed(8),)).to_json()


@pytest.mark.parametrize(
    "tokens", [[], [[1, 2]], [1.5] * 8, [-1] * 8, [2**31] * 8, np.full(8, 2**40), ["a"] * 8, [True] * 8, [[1], [2, 3]], None]
)
def test_no_tokens(tokens):
    refuse(lambda: Handover(tokens, (Part(**a_part()),)), "row of int32 ids")


def test_tokens_are_its_own():
    given = np.arange(8, dtype=np.int32)
    h = Handover(given, (Part(**a_part()),))
    given[0] = 99
    assert h.tokens[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        h.tokens[0] = 1


def test_parts_that_are_not_of_one_handover():
    part = Part(**a_part())
    refuse(lambda: Handover([1] * 8, ()), "0 parts")
    refuse(lambda: Handover([1] * 8, (part, part)), "each layer is in one part")
    refuse(lambda: Handover([1] * 9, (part,)), "9 tokens after block 0 make 3")
    other = Part(**a_part(layers=(2, 3), spec=replace(part.spec, model="other")))
    refuse(lambda: Handover([1] * 8, (part, other)), "'other'")
    spec = replace(part.spec, block_size=8, num_blocks=1)
    smaller = Part(**a_part(layers=(2, 3), spec=spec, buffers=new_buffers(spec)))
    refuse(lambda: Handover([1] * 8, (part, smaller)), "blocks of 8")
    spec = replace(part.spec, num_blocks=1)
    behind = Part(spec, (0, 1), 5, 1, new_buffers(spec))
    assert Handover([1] * 8, (behind,)).parts[0].first_token == 4
    refuse(lambda: Handover([1] * 8, (replace(behind, window=6),)), "see from token 3 .*from 4")
    refuse(lambda: Handover([1] * 8, (part,), (part.content,) * 2), "2 digests of wholes")


def test_what_it_says_of_itself(rng):
    h = small(rng, num_tokens=10, window=0)
    assert h.num_tokens == 10
    assert h.model == MODEL
    assert h.block_size == 4
    assert h.num_bytes == 3 * 4 * 3 * 2 * 4 * 32 * 2
    assert "tokens: 10 in blocks of 4, model: 'small', layers: 3 layers bf16" in repr(h)
    one, two = Part(**a_part()), Part(**a_part(layers=(2, 3)))
    refuse(lambda: Handover([1] * 8, (one, two)).spec, "2 parts, each with a spec")


def test_require(rng):
    h = small(rng, num_tokens=10)
    h.require(model=MODEL, num_layers=3, num_kv_heads=4, head_dim=32, v_head_dim=32, head_start=0, format="bf16", window=0)
    h.require(v_format="bf16")
    fields = {"model": "x", "num_layers": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 1, "head_start": 1, "format": "f16",
              "v_format": "f16", "window": 9}  # fmt: skip
    for name, value in fields.items():
        refuse(lambda name=name, value=value: h.require(**{name: value}), f"handover: {name} is .* here it is", kvx.Incompatible)
    refuse(lambda: h.require(size=1), "no field of a handover")
    refuse(lambda: h.require(1, model=MODEL), "part is 1; the handover has 1")


def test_model_name():
    fields = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576, "vocab_size": 49152}
    assert model_name("llama", **fields) == "llama-30x576-kv3x64-v49152"


# ---- export_blocks


def test_what_is_not_exported(rng):
    spec = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format="f32", num_layers=2, model=MODEL)
    e = Engine.new(spec, 10, rng)
    (s,) = e.sources()

    def export(*sources, tokens=range(10), **fields):
        return lambda: export_blocks(tokens, list(sources), **fields)

    refuse(export(), "0 sources")
    refuse(export(s, None), "a source is None; it must be a Source")
    refuse(export(s, block_size=0), "blocks of 0")
    refuse(export(s, block_size="a"), "blocks of 'a'")
    refuse(export(replace(s, spec=replace(s.spec, model=""))), r"the model has no name, .*\. Give one: model=\.$")
    refuse(export(s, tokens=range(13)), r"3 blocks of 4 for 13 tokens; they take 4\.$")
    refuse(export(s, tokens=[0.5] * 10), "row of int32 ids")
    refuse(
        export(s, tokens=[1] * 7 + [-5, -1, 3]),
        r"export_blocks\(\): tokens\[7\] is -5; ids are 0 to 2147483647: ",
    )
    refuse(export(replace(s, layers=(1,))), "2 layers for 1 of the model")
    refuse(export(replace(s, layers=(1, 0))), "in their order")
    refuse(export(replace(s, first_token=4)), "window of 0 and tokens from 4")
    refuse(export(replace(s, window=4, first_token=10)), "tokens from 10 of 10")
    refuse(export(replace(s, window=4, first_token=-1)), "behind a window")
    refuse(export(replace(s, blocks=[0, -1, 1])), "no block for 4 to 7")
    refuse(export(replace(s, blocks=[-1, 0, 1])), "window of 0")
    refuse(export(replace(s, blocks=[0, 1, -1], window=2, first_token=8)), "no block for 8 to 11")
    refuse(export(replace(s, window=8, first_token=4)), "see from token 3 .*from 4")
    refuse(export(replace(s, blocks=[0, 1, 99])), r"export_blocks\(\): a source's blocks has 99", kvx.OutOfRange)
    refuse(export(replace(s, blocks=[0, 1, 2**40])), "has 1099511627776; the cache has", kvx.OutOfRange)
    refuse(export(replace(s, blocks=[0, 1, -(2**40)])), "no block for 8 to 11")
    refuse(export(s, format="bf17"), "bf17")
    other = replace(s, layers=(2, 3), spec=replace(s.spec, model="other"))
    refuse(export(s, other), "models 'other' and 'small'", kvx.Incompatible)
    refuse(export(replace(s, buffers=s.buffers[:1])), "buffers")
    half = replace(s, spec=replace(s.spec, head_start=4))
    refuse(export(s, half), "heads 2..3 of dst are in no src")


def test_leading_holes_are_behind_the_window(rng):
    spec = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format="f32", num_layers=2, model=MODEL)
    e = Engine.new(spec, 18, rng, first_token=8).fill(rng)
    a = export_blocks(range(18), e.sources(window=7), block_size=16)  # the blocks say what is there
    b = export_blocks(range(18), e.sources(window=7, first_token=8), block_size=16)
    assert a.to_json() == b.to_json()
    assert a.parts[0].first_token == 8
    assert a.parts[0].first_block == 0


def test_rows_before_the_first_token_are_blank(rng):
    """What an engine has there is nobody's: it neither travels nor counts."""
    spec = kvx.CacheSpec(1, 8, 2, 32, layout=PLAIN, format="int8_per_token_head", num_layers=2, model=MODEL)
    e = Engine.new(spec, 20, rng).fill(rng)
    a = export_blocks(range(20), e.sources(window=5, first_token=13), block_size=8)
    for t in e.buffers[0][:4]:
        t.view(-1, 8, 2 * 32)[e.blocks[1], :5] = 77  # tokens 8 to 12
    b = export_blocks(range(20), e.sources(window=5, first_token=13), block_size=8)
    assert a.to_json() == b.to_json()
    assert all(torch.equal(bytes_of(x), bytes_of(y)) for x, y in zip(a.parts[0].buffers, b.parts[0].buffers, strict=True))


def test_two_kinds_of_layers(rng):
    full = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format="f32", num_layers=2, model=MODEL)
    sliding = replace(full, num_layers=3)
    a, b = Engine.new(full, 19, rng).fill(rng), Engine.new(sliding, 19, rng, first_token=12).fill(rng)
    sources = [*a.sources(layers=(2, 4)), *b.sources(layers=(0, 1, 3), window=8, first_token=12)]
    h = join(export_blocks(range(19), sources, block_size=8).convert(block_size=4).shard(2))
    assert [(p.layers, p.window, p.first_block) for p in h.parts] == [((2, 4), 0, 0), ((0, 1, 3), 8, 3)]
    for part, e, first in ((0, a, 0), (1, b, 12)):
        there = Engine.new(replace(e.specs[0], block_size=8), 19, rng)
        h.write(part, there.buffers[0], there.specs[0], there.blocks)
        same(e.rows(19, first), there.rows(19, first))
    h.require(num_layers=5)
    h.require(1, window=8)


def test_a_tensors_scale_is_one(rng):
    """Ranks that each have a scale for their tensor are not joined under one of them."""
    spec = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format="fp8_e4m3", num_layers=2, model=MODEL)
    e = Engine.new(spec, 6, rng, tp=2).fill(rng)
    export_blocks(range(6), e.sources())
    e.buffers[1][-1][0] = 0.25
    refuse(lambda: export_blocks(range(6), e.sources()), "different scales for one tensor of fp8_e4m3")
    ranks = [export_blocks(range(6), [s]) for s in e.sources()]
    assert [r.spec.head_start for r in ranks] == [0, 1]
    refuse(lambda: join(ranks), "different scales for one tensor")
    whole = export_blocks(range(6), e.sources(), format="f32")  # each read under its own
    for r in (0, 1):
        assert ranks[r].convert(format="f32").parts[0].content == whole.shard(2)[r].parts[0].content


# ---- write


def test_write_changes_nothing_else(rng):
    """Other sequences' blocks, rows behind the last token, and blocks that are skipped."""
    h = small(rng, num_tokens=14, block_size=8)
    spec = kvx.CacheSpec(8, 4, 4, 32, layout=PLAIN, format="bf16", num_layers=3, model=MODEL)
    buffers = [torch.full_like(t, 9) for t in kvx.allocate_buffers(spec)]
    h.write(0, buffers, spec, [5, -1, 0, 2])
    for t in buffers:
        blocks = t.view(8, 4, -1)
        assert all((blocks[b] == 9).all() for b in (1, 3, 4, 6, 7))
        assert (blocks[2, 2:] == 9).all()
        assert not (blocks[2, :2] == 9).all()
        assert not (blocks[5] == 9).all()


def test_write_of_what_was_changed_on_the_way(rng):
    """A handover whose bytes came from elsewhere: a bit that flipped there reaches no engine."""
    h = small(rng, num_tokens=14, block_size=4)
    came = [[t.clone() for t in p.buffers] for p in h.parts]
    came[0][0].view(-1)[5] ^= 1
    spec = kvx.CacheSpec(4, 4, 4, 32, layout=PLAIN, format="bf16", num_layers=3, model=MODEL)
    buffers = kvx.allocate_buffers(spec)
    with pytest.raises(kvx.Damaged, match="its manifest says"):
        from_manifest(h.to_json(), came).write(0, buffers, spec, [0, 1, 2, 3])
    assert not any(t.any() for t in buffers)
    came[0][0].view(-1)[5] ^= 1
    from_manifest(h.to_json(), came).write(0, buffers, spec, [0, 1, 2, 3])
    assert all(t.any() for t in buffers)


def test_write_into_ranks(rng):
    """A spec with some of the heads is a rank's, and gets those."""
    h = small(rng, num_tokens=14, block_size=4)
    spec = kvx.CacheSpec(4, 4, 4, 32, layout=PLAIN, format="bf16", num_layers=3)
    specs = [replace(spec, num_kv_heads=n, head_start=at) for at, n in ((0, 2), (2, 1), (3, 1))]
    ranks = Engine(specs, [kvx.allocate_buffers(s) for s in specs], [2, 0, 3, 1])
    whole = Engine([spec], [kvx.allocate_buffers(spec)], ranks.blocks)
    h.write(0, whole.buffers[0], spec, whole.blocks)
    for s, buffers in zip(specs, ranks.buffers, strict=True):
        h.write(0, buffers, s, ranks.blocks)
    same(ranks.rows(14), whole.rows(14))


def test_write_of_a_middle(rng):
    h = small(rng, num_tokens=30, block_size=4)
    spec = replace(kvx.CacheSpec(8, 8, 4, 32, layout=PLAIN, format="bf16", num_layers=3), model=MODEL)
    whole, pieces = kvx.allocate_buffers(spec), kvx.allocate_buffers(spec)
    h.write(0, whole, spec, [3, 1, 7, 0])
    h.write(0, pieces, spec, [3, 1], num_tokens=13)
    h.write(0, pieces, spec, [1, 7, 0], first_token=8)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    h.write(0, pieces, spec, [], first_token=8, num_tokens=8)


def test_write_of_a_window_skips_what_is_not_there(rng):
    h = small(rng, num_tokens=30, block_size=8, window=6)  # from token 25
    assert h.parts[0].first_token == 25
    assert h.parts[0].first_block == 3
    spec = kvx.CacheSpec(9, 4, 4, 32, layout=PLAIN, format="bf16", num_layers=3)
    buffers = [torch.full_like(t, 9) for t in kvx.allocate_buffers(spec)]
    h.write(0, buffers, spec, list(range(8)))
    for t in buffers:
        assert (t.view(9, -1)[:6] == 9).all()
        assert not (t.view(9, -1)[6] == 9).all()


def test_what_is_not_written(rng):
    h = small(rng, num_tokens=14, block_size=4)
    spec = kvx.CacheSpec(8, 4, 4, 32, layout=PLAIN, format="bf16", num_layers=3)
    buffers = kvx.allocate_buffers(spec)

    def write(part=0, spec=spec, blocks=(0, 1, 2, 3), **fields):
        return lambda: h.write(part, buffers, spec, list(blocks), **fields)

    refuse(write(part=1), "part is 1")
    refuse(write(part=-1), "part is -1")
    refuse(write(part="a"), "part is 'a'")
    refuse(write(spec=None), "spec is None; it must be the CacheSpec")
    refuse(write(spec=replace(spec, model="other")), "model 'small'; here it is 'other'", kvx.Incompatible)
    refuse(write(first_token=2), "multiple of both")
    refuse(write(first_token=16), "tokens 16 to 14 of 14")
    refuse(write(num_tokens=15), "tokens 0 to 15 of 14")
    refuse(write(blocks=(0, 1)), "14 tokens take 4")
    refuse(write(blocks=(0, 1, 2, 8)), r"write\(\): blocks has 8; the cache has 8 blocks", kvx.OutOfRange)
    refuse(write(blocks=(0, 1, 1, 2)), "twice")
    refuse(write(blocks=("a", 1, 2, 3)), "whole numbers")
    refuse(write(spec=replace(spec, head_dim=64)), "head_dim is 32")
    refuse(write(spec=replace(spec, num_layers=4)), "in no src")
    refuse(write(spec=replace(spec, head_start=1)), "in no src")
    refuse(write(spec=replace(spec, layout=LATENT)), "MLA")
    assert all(not t.any() for t in buffers)


def test_write_under_the_engines_own_scale(rng):
    """A scale that other sequences are stored under stays: rows are quantised anew under it."""
    for format in ("fp8_e4m3", "fp8_e4m3_per_head", "int8"):
        spec = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format=format, num_layers=2, model=MODEL)
        e = Engine.new(spec, 6, rng)
        plain = kvx.CacheSpec(2, 4, 2, 16, layout=PLAIN, format="f32", num_layers=2)
        x = kvx.allocate_buffers(plain)
        for t in x:
            t.view(torch.float32).copy_(torch.rand(t.numel() // 4) * 40 - 20)
        kvx.convert(x, e.buffers[0], plan=kvx.plan(plain, spec_with(e)), src_blocks=[0, 1], dst_blocks=e.blocks)
        h = export_blocks(range(6), e.sources())
        there = Engine.new(spec, 6, rng)
        for t in there.buffers[0][4:]:
            t *= 0.5
        kept = [t.clone() for t in there.buffers[0][4:]]
        h.write(0, there.buffers[0], there.specs[0], there.blocks)
        assert all(torch.equal(a, b) for a, b in zip(kept, there.buffers[0][4:], strict=True))
        back = kvx.allocate_buffers(plain)
        kvx.convert(there.buffers[0], back, plan=kvx.plan(spec_with(there), plain), src_blocks=there.blocks, dst_blocks=[0, 1])
        for a, b in zip(x, back, strict=True):
            a, b = (t.view(torch.float32).view(8, -1)[:6] for t in (a, b))
            assert torch.all((a - b).abs() <= 2.5 + 0.15 * a.abs())


def spec_with(e: Engine) -> kvx.CacheSpec:
    return replace(e.specs[0], model="")


def test_rope_pairs(rng):
    """llama.cpp's pairs side by side, ours half a row apart; V is as it is."""
    spec = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format="f32", num_layers=2, model=MODEL)
    e = Engine.new(spec, 6, rng).fill(rng)
    h = export_blocks(range(6), e.sources(rope="interleaved"))
    there, turned = Engine.new(spec, 6, rng), Engine.new(spec, 6, rng)
    h.write(0, there.buffers[0], there.specs[0], there.blocks, rope="interleaved")
    same(e.rows(6), there.rows(6))
    h.write(0, turned.buffers[0], turned.specs[0], turned.blocks)
    for (plane, head), rows in e.rows(6).items():
        want = rows.reshape(2, 6, 8, 2, 4).transpose(0, 1, 3, 2, 4).reshape(2, 6, 64) if plane == 0 else rows
        assert np.array_equal(turned.rows(6)[plane, head], want)
    refuse(lambda: export_blocks(range(6), e.sources(rope="pairs")), "rope is")


# ---- cut, convert, shard, join


def test_cut(rng):
    spec = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format="f32", num_layers=2, model=MODEL)
    e = Engine.new(spec, 30, rng).fill(rng)
    h = export_blocks(range(30), e.sources(), block_size=8)
    for n in (1, 7, 8, 9, 29):
        c = h.cut(n)
        c.check()
        assert c.to_json() == export_blocks(range(n), e.sources(), block_size=8).to_json()
    assert h.cut(30) is h
    for n in (0, -1, 31):
        refuse(lambda n=n: h.cut(n), f"num_tokens is {n}")


def test_cut_of_a_window(rng):
    """Not to where the next token would see what is not there, be it in a block that is."""
    spec = kvx.CacheSpec(1, 4, 2, 16, layout=PLAIN, format="f32", num_layers=2, model=MODEL)
    e = Engine.new(spec, 30, rng, first_token=16).fill(rng)
    h = export_blocks(range(30), e.sources(window=8, first_token=16), block_size=32)  # one block, half of it there
    assert h.parts[0].first_block == 0
    assert h.cut(23).parts[0].content == export_blocks(range(23), e.sources(window=8, first_token=16)).parts[0].content
    refuse(lambda: h.cut(22), "see from token 15; the handover has them from 16")
    refuse(lambda: h.cut(5), "has them from 16")


def test_damage_is_not_sealed_again(rng):
    """Every way to another handover looks first."""
    h = small(rng, num_tokens=14)
    h.parts[0].buffers[0][5] ^= 1
    for call in (lambda: h.cut(9), lambda: h.convert(block_size=8), lambda: h.shard(2), lambda: join([h])):
        refuse(call, "part 0", kvx.Damaged)


def test_convert_keeps_a_shards_whole(rng):
    h = small(rng, num_tokens=14)
    shards = [s.convert(block_size=8) for s in h.shard(2)]
    refuse(lambda: join(shards[:1]), "A shard is missing", kvx.Damaged)
    assert join(shards).parts[0].content == h.parts[0].content
    assert all(not s.convert(format="f32").whole for s in shards)
    for size in (-1, 0, 2.0):
        refuse(lambda size=size: h.convert(block_size=size), rf"block_size is {size}; .* keep blocks of 4\.$")
    refuse(lambda: h.convert(block_size=2**29), r"handover: 1 blocks take .* GB; cpu has .* Make the blocks smaller\.")
    assert h.convert().to_json() == h.convert(block_size=None).to_json() == h.to_json()
    refuse(lambda: h.shard(0), "tp_size is 0")
    refuse(lambda: h.shard("2"), "tp_size is '2'")
    refuse(lambda: h.cut("2"), "num_tokens is '2'")
    uneven = h.shard(3)  # of four heads
    assert [(s.spec.head_start, s.spec.num_kv_heads) for s in uneven] == [(0, 2), (2, 1), (3, 1)]
    assert join(uneven[::-1]).to_json() == h.to_json()


def test_more_ranks_than_heads(rng):
    h = small(rng, num_tokens=14, heads=2)
    shards = h.shard(8)
    assert [s.spec.head_start for s in shards] == [0] * 4 + [1] * 4
    assert join(shards).to_json() == h.to_json() == join([shards[2], shards[7]]).to_json()
    latent = small(rng, num_tokens=14, heads=1, planes=1)
    assert join(latent.shard(4)).to_json() == latent.to_json()


def test_what_is_not_joined(rng):
    h, other = small(rng, num_tokens=14), small(rng, num_tokens=14)
    a, b = h.shard(2)
    refuse(lambda: join([]), "no shards")
    refuse(lambda: join([a, 5]), "shard 1 is an int; it must be a Handover")
    refuse(lambda: join([a, a]), "Shard 1 has the same heads as shard 0, and one with others is missing", kvx.Damaged)
    refuse(lambda: join([b]), "A shard is missing", kvx.Damaged)
    refuse(lambda: join([a, other.shard(2)[1]]), "shard 1 is of other tokens or of another handover", kvx.Incompatible)

    def bare(s, **fields):
        return Handover(s.tokens, tuple(replace(p, **fields) for p in s.parts))

    refuse(lambda: join([bare(a), bare(b, layers=(0, 1, 3))]), "other layers", kvx.Incompatible)
    refuse(lambda: join([bare(a), bare(b.convert(block_size=8))]), "num_blocks 2; shard 0 has 4", kvx.Incompatible)
    renamed = from_manifest(b.to_json(), [b.parts[0].buffers]).parts[0]
    refuse(
        lambda: join([bare(a), Handover(b.tokens, (replace(renamed, spec=replace(renamed.spec, model="x")),))]),
        "model 'x'; shard 0 has 'small'",
        kvx.Incompatible,
    )
    quarters = [bare(s) for s in h.shard(4)]
    refuse(lambda: join([quarters[0], quarters[2]]), "some are missing", kvx.Incompatible)
    refuse(lambda: join([bare(a), quarters[1]]), "some are there twice", kvx.Incompatible)
    assert join(quarters[1:3]).spec.head_start == 1  # nothing says that there are more


def test_buffers_move_as_one():
    spec = kvx.CacheSpec(5, 4, 2, 32, layout=NEUTRAL, format="int8_per_token_head", num_layers=2, model=MODEL)
    made = new_buffers(spec)
    assert len({t.untyped_storage().data_ptr() for t in made[:5]}) == 1
    assert all(a is b for a, b in zip(moved(made, torch.device("cpu")), made, strict=True))
    meta = moved(made, torch.device("meta"))
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in made]
    assert len({t._base is not None for t in meta[:5]}) == 1


def test_the_document_names_the_call_that_has_max_bytes():
    """docs/handover.md says who refuses a large manifest: it is the call that takes the limit."""
    text = (Path(__file__).parents[2] / "docs" / "handover.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| a manifest that asks for more than `max_bytes`")]
    assert "`from_manifest(text, max_bytes=...)`" in row
    assert "`load` maps its files" in row
    assert "max_bytes" in inspect.signature(from_manifest).parameters
    assert "max_bytes" not in inspect.signature(load).parameters
    h = small(random.Random(0), num_tokens=14)
    refuse(lambda: from_manifest(h.to_json(), max_bytes=h.num_bytes - 1), f"speaks of {h.num_bytes:,} bytes; max_bytes is")
    from_manifest(h.to_json(), max_bytes=h.num_bytes)
