"""Plans with their blocks: frozen, checked when planned, what convert, bind and runs take when nothing else is given."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

import kvx
from tests import compare
from tests.ops import layouts

SRC = kvx.CacheSpec(6, 4, 2, 8, num_layers=2, layout="layer | block token head (kv dim)")
DST = replace(SRC, num_blocks=5, layout="block layer kv head token dim")


def converted(plan: kvx.Plan, backend, **ids) -> list[torch.Tensor]:
    src, dst = layouts.random_buffers(plan.src[0], 0, backend.device), layouts.random_buffers(plan.dst[0], 1, backend.device)
    kvx.convert(src, dst, plan=plan, backend=backend.name, **ids)
    return [t.cpu() for t in dst]


@pytest.mark.parametrize("tokens", [(4, 4), (4, 8), (8, 4)])
def test_they_are_the_default(backend, tokens):
    src, dst = (replace(s, block_size=n) for s, n in zip((SRC, DST), tokens, strict=True))
    ids = [[5, 0, 3, 2][: 16 // tokens[0]], [4, 1, 0, 2][: 16 // tokens[1]]]
    plan = kvx.plan(src, dst, blocks=(ids[0], tuple(ids[1])))
    assert plan.blocks == (tuple(ids[0]), tuple(ids[1]))
    want = converted(kvx.plan(src, dst), backend, src_blocks=ids[0], dst_blocks=ids[1])
    for got, expected in zip(converted(plan, backend), want, strict=True):
        compare.bitwise(got, expected)
    given = {"src_blocks": ids[0][::-1], "dst_blocks": ids[1]}  # what a call gives comes first
    for got, expected in zip(converted(plan, backend, **given), converted(kvx.plan(src, dst), backend, **given), strict=True):
        compare.bitwise(got, expected)


def test_pairs_are_given_whole(backend):
    plan = kvx.plan(SRC, DST, blocks=([1], [2]))
    with pytest.raises(kvx.BadArgument, match="dst_blocks is given and src_blocks is not; the plan's blocks are pairs"):
        converted(plan, backend, dst_blocks=[1])
    with pytest.raises(kvx.BadArgument, match="one of src_blocks and dst_blocks is given"):
        list(plan.runs([1]))


def test_runs_are_theirs():
    plan, bare = kvx.plan(SRC, DST, blocks=([5, 0], [4, 1])), kvx.plan(SRC, DST)
    for strided in (False, True):
        assert list(plan.runs(strided=strided)) == list(bare.runs([5, 0], [4, 1], strided=strided))
        assert list(plan.runs([1], [2], strided=strided)) == list(bare.runs([1], [2], strided=strided))
    same = kvx.plan(SRC, SRC)
    assert list(same.runs()) == list(same.runs(range(6), range(6)))  # none planned: all of them, in order


def test_bytes_of_a_plan_hold_no_ids():
    assert kvx.plan(SRC, DST, blocks=([5, 0], [4, 1])).to_bytes() == kvx.plan(SRC, DST).to_bytes()


def test_explain_counts_them():
    plan = kvx.plan(SRC, DST, blocks=([5, 0], [4, 1]))
    text, runs, strided = plan.explain(), len(list(plan.runs())), len(list(plan.runs(strided=True)))
    assert f"{2 * plan.unit_bytes:,} bytes for 2 x 4 tokens" in text
    assert text.endswith(
        f"2 blocks (5, 0) -> 2 blocks (4, 1): {2 * plan.unit_bytes:,} bytes, {runs} descriptors, {strided} strided"
    )
    assert kvx.plan(SRC, DST).explain(2).splitlines() == text.splitlines()[:-1]
    coded = kvx.plan(SRC, replace(DST, format="int8_per_token_head"), blocks=([1], [1])).explain()
    assert "no descriptors: the formats differ" in coded
    many = kvx.plan(big := replace(SRC, num_blocks=64), big, blocks=(range(64), range(64))).explain()
    assert "64 blocks (0, 1, 2, 3, 4, ... 63)" in many


def test_they_are_frozen():
    ids = [[5, 0], [4, 1]]
    plan = kvx.plan(SRC, DST, blocks=(ids[0], ids[1]))
    ids[0][0] = 3
    assert plan.blocks == ((5, 0), (4, 1))
    assert hash(plan.blocks)
    with pytest.raises(FrozenInstanceError):
        plan.blocks = None


def test_ids_of_any_integer_kind():
    plan = kvx.plan(SRC, DST, blocks=(torch.tensor([5, 0]), range(2)))
    assert plan.blocks == ((5, 0), (0, 1))
    assert kvx.plan(SRC, DST, blocks=([], [])).blocks == ((), ())


@pytest.mark.parametrize(
    ("blocks", "error", "said"),
    [
        (([1, 2], [3]), kvx.BadArgument, "plan(): blocks has 2 ids at src, 8 tokens, and 1 at dst, 4 tokens; both hold as many."),
        (([6], [0]), kvx.OutOfRange, "plan(): blocks has 6 at src, whose blocks are 0 to 5."),
        (([5], [5]), kvx.OutOfRange, "plan(): blocks has 5 at dst, whose blocks are 0 to 4."),
        (([-1], [0]), kvx.OutOfRange, "plan(): blocks has -1 at src, whose blocks are 0 to 5."),
        (
            ([0, 1, 2], [3, 4, 3]),
            kvx.BadArgument,
            "plan(): blocks has 3 at dst twice, at 0 and 2; a block is written once. Drop one pair.",
        ),
        ([1, 2, 3], kvx.BadArgument, "plan(): blocks is [1, 2, 3]; it must be (ids at src, ids at dst), two sequences of ints"),
        (
            ([1.5], [0]),
            kvx.BadArgument,
            "plan(): blocks is ([1.5], [0]); it must be (ids at src, ids at dst), two sequences of ints",
        ),
        (7, kvx.BadArgument, "plan(): blocks is 7; it must be (ids at src, ids at dst), two sequences of ints"),
    ],
)
def test_refused_when_planned(blocks, error, said):
    with pytest.raises(error, match=re.escape(said)):
        kvx.plan(SRC, DST, blocks=blocks)


@pytest.mark.parametrize("specs", [None, 5, "ab", [], [SRC, None]], ids=["none", "number", "text", "empty", "one_is_none"])
def test_what_is_no_spec_is_refused(specs):
    for name, pair in (("src", (specs, DST)), ("dst", (SRC, specs))):
        with pytest.raises(
            kvx.BadArgument, match=re.escape(f"plan(): {name} is {specs!r}; it must be a CacheSpec or a list of them")
        ):
            kvx.plan(*pair)


WHOLE = kvx.CacheSpec(4, 4, 4, 8, num_layers=2, layout="layer kv | block token head dim")


@pytest.mark.parametrize(
    ("dst", "lost"),
    [
        ([WHOLE.shard(2, 0), WHOLE.shard(2, 0)], "layers 0..1, heads 2..3"),
        (replace(WHOLE, num_kv_heads=2), "layers 0..1, heads 2..3"),
        (replace(WHOLE, num_layers=1), "layers 1..1, heads 0..3"),
        (WHOLE.shard(4, 1), "layers 0..1, heads 0..0"),
    ],
    ids=["a rank twice", "half the heads", "half the layers", "one rank"],
)
def test_a_plan_that_loses_something_is_refused_unless_it_is_meant(dst, lost):
    with pytest.raises(kvx.BadArgument, match=f"{re.escape(lost)} of src are in no dst and would be lost.*partial=True"):
        kvx.plan(WHOLE, dst)
    plan = kvx.plan(WHOLE, dst, partial=True)
    assert f"left out: {lost}, which the source holds and the destination does not" in plan.explain()


def test_what_is_replicated_is_written_twice_and_said():
    ranks = [WHOLE.shard(8, i) for i in range(8)]
    plan = kvx.plan(WHOLE, ranks)
    assert plan.left_out == ()
    assert plan.explain().count("written twice: layers 0..1, heads") == 4
    back = kvx.plan(ranks, WHOLE)  # replicas agree; one of each is read
    assert back.left_out == back.written_twice == ()
    assert "left out" not in back.explain()


def test_layers_that_are_named_are_all_that_must_match():
    stage = replace(WHOLE, num_layers=1, layer_start=1)
    assert kvx.plan(WHOLE, stage, layers=(1, 2)).left_out == ()
    with pytest.raises(kvx.BadArgument, match=r"layers 0\.\.0, heads 0\.\.3 of src are in no dst"):
        kvx.plan(WHOLE, stage)
