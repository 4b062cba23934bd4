"""Handovers with recurrent states: a sequence goes on exactly where its state stands, in any layout, sharding, process; or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvx
from kvx.cache.kinds import State
from kvx.handover import Handover, from_manifest, join, load, save
from kvx.handover.paged_cache import read_sequence, write_sequence
from kvx.layout.buffers import allocate_buffers
from kvx.layout.state_rows import state_row
from kvx.spec import StateSpec, state_plane
from tests.handover.hybrid_cache import MODEL, STATES, begun, contents, handed_over, hybrid, planes, run, states, tokens

ROOT = Path(__file__).resolve().parents[2]
ROWS = ["", "transformers", "vllm.sd", "vllm.ds", "sglang", "sglang.host", "llama_cpp"]


def went_on(handover: Handover, cache: kvx.PagedCache, end: int = 33) -> Handover:
    seq = cache.admit(tokens())
    write_sequence(cache, seq, handover, model=MODEL)
    assert seq.length == handover.num_tokens
    cache.check()
    run(cache, seq, end)
    return read_sequence(cache, seq, model=MODEL, block_size=4)


def refuse(call, words, kind=kvx.Incompatible):
    with pytest.raises(kind, match=words):
        call()


# ---- a sequence goes on


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("at", [1, 7, 16, 21])
def test_it_goes_on_where_the_state_stands(tmp_path, row, at):
    """Other blocks, another layout, states in two groups, and a sequence before it whose blocks lie in between."""
    handover = handed_over(at)
    assert [p.spec.positions for p in handover.parts if isinstance(p.spec, StateSpec)] == [(at,)]
    save(tmp_path / "handover", handover)
    there = hybrid(states(row, num_blocks=9), num_blocks=17, split=at % 2 == 0)
    begun(19, there, tokens(30, 5))
    got = went_on(load(tmp_path / "handover", model=MODEL), there)
    want = handed_over(33)
    assert contents(got)[:2] == contents(want)[:2]
    mine = {layer: _planes(got, layer) for layer in STATES}
    assert all(torch.equal(a, b) for layer in STATES for a, b in zip(mine[layer], _planes(want, layer), strict=True))


def _planes(handover: Handover, layer: int) -> list[torch.Tensor]:
    part = next(p for p in handover.parts if isinstance(p.spec, StateSpec) and layer in p.layers)
    views = kvx.layer_views(list(part.buffers), part.spec)[part.layers.index(layer)]
    return [view.first if isinstance(view.tensor, list) else view.tensor for view in views]


def test_back_and_forth_keeps_every_byte():
    """From two groups into one, into two: the same parts, whatever the groups are."""
    first = handed_over(21, hybrid(split=True))
    assert len(first.parts) == 4
    second = hybrid(states("vllm.sd"))
    got = went_on(first, second, 21)
    assert contents(got) == contents(handed_over(21))
    assert contents(went_on(got, hybrid(split=True), 21)) == contents(first)


_CHILD = """
import sys
from kvx.handover import load, save
from tests.handover.hybrid_cache import hybrid, states
from tests.handover.test_handover_states import went_on
save(sys.argv[2], went_on(load(sys.argv[1]), hybrid(states("vllm.ds"), num_blocks=20)))
"""


def test_another_process_goes_on(tmp_path):
    save(tmp_path / "a", handed_over(21))
    command = [sys.executable, "-c", _CHILD, str(tmp_path / "a"), str(tmp_path / "b")]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert contents(load(tmp_path / "b")) == contents(handed_over(33))


@pytest.mark.parametrize("kind", [State(snapshot_every=1), State(), State(snapshot_every=0, snapshot_at_end=False)])
def test_others_find_it_where_a_block_ends(kind):
    """K and V by their blocks; but none goes on without a snapshot exactly there, or in a cache that is told to keep none."""
    for at, found in ((16, 16 if kind.snapshot_at_end else 0), (21, 0)):
        cache = hybrid(kind=kind)
        seq = cache.admit(tokens())
        write_sequence(cache, seq, handed_over(at), model=MODEL)
        other = cache.admit(tokens())
        assert other.length == found
        if found:  # it goes on in a copy: the first is where it was
            run(cache, other, 33)
            assert contents(read_sequence(cache, seq, model=MODEL, block_size=4)) == contents(handed_over(16))
            assert contents(read_sequence(cache, other, model=MODEL, block_size=4)) == contents(handed_over(33))
        cache.check()


def test_it_comes_on_top_of_what_the_cache_has():
    """A snapshot at 16 is there already; the state of 21 goes into a block of its own, and 16 stays."""
    cache, seq = begun(16)
    other = cache.admit(tokens())
    assert other.length == 16
    write_sequence(cache, other, handed_over(21), model=MODEL)
    run(cache, other, 33)
    assert contents(read_sequence(cache, other, model=MODEL, block_size=4)) == contents(handed_over(33))
    assert contents(read_sequence(cache, seq, model=MODEL, block_size=4)) == contents(handed_over(16))
    cache.check()


def test_a_cache_without_snapshots_and_one_of_states_alone():
    cache = hybrid(kind=State(snapshot_every=0), prefix=False)
    assert contents(went_on(handed_over(16), cache)) == contents(handed_over(33))
    alone = [kvx.LayerGroup("states", (3, 5), states(), kind=State(snapshot_every=1))]
    made = [kvx.PagedCache(alone, max_seqs=2, max_seq_len=64, block_size=8) for _ in range(2)]
    seq = made[0].admit(tokens())
    made[0].extend(seq, 9)
    made[0].planes(5, 0).planes["delta"][made[0].blocks(seq)[0]] = 3
    handover = read_sequence(made[0], seq, model=MODEL)
    assert repr(handover) == (
        "Handover(tokens: 9, model: 'weights of a hybrid', layers: 2 layers a state (conv, delta), size: 1.79 KB, device: cpu)"
    )
    there = made[1].admit(tokens())
    write_sequence(made[1], there, handover, model=MODEL)
    assert (made[1].planes(5, 0).planes["delta"][made[1].blocks(there)[0]] == 3).all()


# ---- ranks


@pytest.mark.parametrize("row", ["", "vllm.sd"])
def test_ranks_of_one_two_and_four(row):
    """A group of B and C does not divide: both ranks have it. What ranks read is joined again, without what shard() knew."""
    handover = handed_over(21)
    for ranks in (2, 4, 2, 1):
        read = []
        for n, shard in enumerate(handover.shard(ranks)):
            cache = hybrid(states(row, rank=(ranks, n)), rank=(ranks, n))
            seq = cache.admit(tokens())
            write_sequence(cache, seq, shard, model=MODEL)
            read.append(read_sequence(cache, seq, model=MODEL, block_size=4))
            assert contents(read[-1]) == contents(shard)
            assert not read[-1].whole
        handover = join(read)
        assert contents(handover) == contents(handed_over(21))
    shards = handed_over(21).shard(4)
    assert contents(join(shards)) == contents(join([*shards[2:], *shards[:2]])) == contents(handover)
    assert [[s.size for s in x.parts[2].spec.planes[0].shares] for x in shards] == [[4, 8, 8]] * 4


def test_a_rank_that_is_missing_or_says_another_thing():
    shards = handed_over(21).shard(4)
    refuse(lambda: join([shards[0], shards[2], shards[3]]), "heads 0 to 0 and then 2 to 2: some are missing")
    parts = handed_over(21)
    alone = Handover(parts.tokens, parts.parts[2:]).shard(4)
    refuse(lambda: join([alone[0], alone[2], alone[3]]), "conv has no channel 4 to 7: a shard is missing")
    refuse(lambda: join([alone[0], alone[1], alone[2]]), "A shard is missing", kvx.Damaged)
    # What two ranks have, one of them has otherwise, under a seal of its own.
    told = [Handover(x.tokens, x.parts) for x in alone]
    other = told[1].parts[0]
    buffers = tuple(t.clone() for t in other.buffers)
    view = next(v for v in kvx.layer_views(list(buffers), other.spec)[0] if v.plane == "conv")
    (view.first if isinstance(view.tensor, list) else view.tensor[0])[-1] += 1  # of C
    told[1] = Handover(told[1].tokens, (replace(other, buffers=buffers).sealed(21),))
    refuse(lambda: join(told), "has other content in a share that another rank has too")


def test_a_shard_is_refused_where_another_or_the_whole_is_meant():
    shards = handed_over(21).shard(2)
    for cache, given in ((hybrid(), shards[0]), (hybrid(rank=(2, 0)), shards[1]), (hybrid(rank=(2, 0)), handed_over(21))):
        refuse(lambda cache=cache, given=given: went_on(given, cache), "num_kv_heads|head_start")
    alone = [kvx.LayerGroup("states", STATES, states(rank=(2, 0)), kind=State(snapshot_every=1))]
    cache = kvx.PagedCache(alone, max_seqs=2, max_seq_len=64, block_size=8)
    part = [Handover(x.tokens, x.parts[2:]) for x in (shards[1], handed_over(21))]
    refuse(lambda: went_on(part[0], cache), r"shares are channel 8 to 15, channel 16 to 23.* there, channel 0 to 7")
    refuse(lambda: went_on(part[1], cache), "conv f32 channel 32 x tap 3 there, conv f32 channel 24 x tap 3 here")


# ---- formats


@pytest.mark.parametrize("to", ["bf16", {"conv": "bf16"}, {"conv": "bf16", "delta": "f32"}])
def test_a_state_in_another_format(to):
    handover = handed_over(21)
    other = handover.convert(format="bf16", state_format=to, block_size=8)
    other.check()
    formats = [str(p.format) for p in other.parts[2].spec.planes]
    assert formats == (["bf16", "bf16"] if to == "bf16" else ["bf16", "f32"])
    assert other.parts[2].spec.positions == (21,)
    refuse(lambda: went_on(other, hybrid()), r"plane conv is conv bf16 .* there, conv f32 .* here; handover.convert\(state_format")
    cache = hybrid(states(of=planes(*formats)), format="bf16")
    got = went_on(other, cache, 21)
    assert contents(got)[2] == contents(other)[2]
    want = [t.to(torch.bfloat16).float() for t in _planes(handover, 2)]
    assert torch.equal(_planes(got, 2)[0].float(), want[0])
    assert torch.equal(_planes(got, 2)[1].float(), want[1] if to == "bf16" else _planes(handover, 2)[1])
    back = other.convert(state_format="f32")  # what was rounded stays so
    assert torch.equal(_planes(back, 2)[0], want[0])
    assert contents(handover.convert(state_format="f32", block_size=4)) == contents(handover)


def test_a_state_in_eight_bits():
    """A scale for each row, in the row: it goes to ranks and a folder as any other."""
    handover = handed_over(21)
    small = handover.convert(state_format={"delta": "int8_per_token_head_inline"})
    assert contents(join(small.shard(4))) == contents(small)
    assert small.num_bytes < handover.num_bytes
    back, want = _planes(small.convert(state_format="f32"), 2)[1], _planes(handover, 2)[1]
    assert 0 < float((back - want).abs().max()) <= float(want.abs().max()) / 254 * 1.01
    refuse(lambda: went_on(small, hybrid()), "plane delta is delta int8_per_token_head_inline .* there, delta f32 .* here")


def test_formats_that_are_none():
    handover = handed_over(21)
    refuse(lambda: handover.convert(state_format={"ssm": "bf16"}), "formats by planes: conv, delta", kvx.BadArgument)
    refuse(lambda: handover.convert(state_format="int8_per_token_head"), "states are bf16, f16 or f32", kvx.BadArgument)
    refuse(lambda: handover.convert(state_format=3), "state_format is 3", kvx.BadArgument)
    kv = Handover(handover.tokens, handover.parts[:2])
    refuse(lambda: kv.convert(state_format="bf16"), "the handover has no states", kvx.BadArgument)
    refuse(lambda: handover.cut(8), "a state stands where the handover ends", kvx.Unsupported)


# ---- what is refused by name


def other_planes(**sizes: int) -> kvx.PagedCache:
    made = {"head": 4, "row": 4, "column": 8, **sizes}
    return hybrid(states(of=(planes()[0], state_plane("delta", "f32", **made))))


def turned() -> kvx.PagedCache:
    """Value by key: the same plane with its axes in another order."""
    return hybrid(states(of=(planes()[0], state_plane("delta", "f32", head=4, column=8, row=4))))


REFUSED = {
    "another model": (lambda h: write_sequence(*begun(0), h, model="other"), "model is 'weights of a hybrid'"),
    "another dtype": (lambda h: went_on(h, hybrid(states(of=planes("f32", "bf16")))), "delta f32 .* there, delta bf16 .* here"),
    "another orientation": (lambda h: went_on(h, turned()), "head 4 x row 4 x column 8 there, .* head 4 x column 8 x row 4 here"),
    "other sizes": (lambda h: went_on(h, other_planes(row=8, column=4)), "row 4 x column 8 there, .* row 8 x column 4 here"),
    "other planes": (
        lambda h: went_on(h, hybrid(states(of=planes()[:1]))),
        "no part has conv of layers 0, 2, 4",
    ),
    "no states": (
        lambda h: went_on(h, kvx.PagedCache(hybrid().groups[:2], max_seqs=1, max_seq_len=64)),
        "conv, delta of layers 0, 2, 4, and this cache does not",
    ),
    "K and V alone": (lambda h: went_on(Handover(h.tokens, h.parts[:2]), hybrid()), "no part has conv, delta of layers 0, 2, 4"),
    "where it does not stand": (
        lambda h: write_sequence((c := hybrid()), c.admit(tokens()[:21]), h, model=MODEL), "stands after its 21 tokens",
    ),
    "other tokens": (lambda h: write_sequence((c := hybrid()), c.admit([7, *tokens()[1:]]), h, model=MODEL), "token 0 is 7"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_fit_is_refused(why):
    made, words = REFUSED[why]
    refuse(lambda: made(handed_over(21)), words)


def test_a_state_of_another_position():
    handover = handed_over(21)
    state = handover.parts[2]
    for ids in (tokens()[:20], tokens()[:22]):
        refuse(lambda ids=ids: Handover(ids, (state,)), "one after 21 tokens; the handover has 2[02]", kvx.BadArgument)
    there = replace(states("vllm.sd", num_blocks=2), num_layers=3, positions=(20, 21))
    buffers = allocate_buffers(there)
    refuse(lambda: handover.write_planes(2, buffers, there, [0]), "a state after 21 tokens; here it is one after 20")
    handover.write_planes(2, buffers, there, [1])
    refuse(lambda: handover.write_planes(2, buffers, replace(there, model="x"), [1]), "here it is 'x'")
    body = json.loads(handover.to_json())
    body["tokens"].append(5)
    refuse(lambda: from_manifest(json.dumps(body)), "changed on the way", kvx.Damaged)


def test_nothing_changes_where_there_is_no_room():
    cache = hybrid(states(num_blocks=1))
    begun(9, cache, tokens(30, 5))
    seq = cache.admit(tokens())
    refuse(lambda: write_sequence(cache, seq, handed_over(21), model=MODEL), "states", kvx.OutOfBlocks)
    assert seq.length == 0
    cache.check()


# ---- engines


@pytest.mark.parametrize("row", ["vllm.sd", "vllm.ds", "sglang", "llama_cpp"])
def test_into_an_engines_pages_and_out_again(row):
    """A part of states is what any row takes; vLLM's pages are padded."""
    handover = handed_over(21)
    state = handover.parts[2]
    page = 1152 if row.startswith("vllm") else 0
    there = state_row(row).spec(state.spec.planes, num_blocks=5, num_layers=3, block_bytes=page)
    buffers = allocate_buffers(there)
    handover.write_planes(2, buffers, there, [3])
    back = [torch.zeros_like(t) for t in state.buffers]
    kvx.convert(buffers, back, plan=kvx.plan(there, state.spec), src_blocks=[3], dst_blocks=[0])
    assert all(torch.equal(a, b) for a, b in zip(back, state.buffers, strict=True))
    rank = state_row(row).spec(replace(there, block_bytes=0).shard(2, 1).planes, num_blocks=5, num_layers=3)
    handover.write_planes(2, (mine := allocate_buffers(rank)), rank, [3])
    shard = handover.shard(2)[1].parts[2]
    back = [torch.zeros_like(t) for t in shard.buffers]
    kvx.convert(mine, back, plan=kvx.plan(rank, shard.spec), src_blocks=[3], dst_blocks=[0])
    assert all(torch.equal(a, b) for a, b in zip(back, shard.buffers, strict=True))
