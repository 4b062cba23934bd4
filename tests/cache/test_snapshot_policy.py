"""Where snapshots of states stand: every so many blocks, at a prompt's end, where the caller asks; and what is found by them."""

from __future__ import annotations

import numpy as np
import pytest

import kvx
from kvx.cache import Sequence
from kvx.cache.kinds import State
from kvx.spec import StateSpec, state_plane
from tests.cache.test_paged import BS, assert_content, spec, write_step

PLANES = (state_plane("conv", "f32", channel=2, tap=3), state_plane("delta", "f32", head=1, row=2, column=2))


def cache_of(kind: State, *, states: int = 12, **options) -> kvx.PagedCache:
    groups = [kvx.LayerGroup("full", (0,), spec(64)), kvx.LayerGroup("states", (1,), StateSpec(states, PLANES), kind=kind)]
    return kvx.PagedCache(groups, max_seqs=5, max_seq_len=120, **options)


def run(cache: kvx.PagedCache, tokens: list[int], step: int = 1000, **options) -> tuple[Sequence, list[int]]:
    """All of its tokens computed, in steps that end where snapshots are due: the sequence, and where the steps ended."""
    seq, ends = cache.admit(tokens, **options), []
    go_on(cache, seq, tokens, ends, step)
    return seq, ends


def go_on(cache: kvx.PagedCache, seq: Sequence, tokens: list[int], ends: list[int], step: int = 1000) -> None:
    while seq.length < len(tokens):
        n = cache.until_snapshot(seq, min(step, len(tokens) - seq.length))
        cache.extend(seq, n)
        write_step(cache, seq, n, tokens)
        cache.commit(seq)
        cache.check()
        ends.append(seq.length)
    assert_content(cache, seq, tokens)


def found(cache: kvx.PagedCache, tokens: list[int]) -> int:
    seq = cache.admit(tokens)
    n = seq.num_cached
    assert_content(cache, seq, tokens)
    cache.release(seq)
    return n


PROMPT = list(range(39))


@pytest.mark.parametrize(
    ("kind", "asked", "ends", "hit"),
    [
        (State(), (), [36, 39], 36),  # the last block's end that leaves a token to compute
        (State(4), (), [16, 32, 36, 39], 36),
        (State(4, snapshot_at_end=False), (), [16, 32, 39], 32),
        (State(0), (), [36, 39], 36),
        (State(0), (22,), [20, 36, 39], 36),
        (State(0, snapshot_at_end=False), (22, 9), [8, 20, 39], 20),
        (State(0, snapshot_at_end=False), (3,), [39], 0),  # before the first block's end
        (State(0, snapshot_at_end=False), (), [39], 0),
    ],
    ids=str,
)
def test_where_steps_end_and_what_is_found(kind, asked, ends, hit):
    cache = cache_of(kind)
    seq, ended = run(cache, PROMPT, snapshot_at=asked)
    assert ended == ends
    assert found(cache, PROMPT) == hit
    assert found(cache, [*PROMPT, 7, 7]) == hit
    cache.release(seq)


def test_a_system_prompt_is_found_where_the_caller_asked():
    cache, system = cache_of(State()), list(range(22))
    for question in ([90, 91, 92], [93] * 14, [94]):
        seq, _ = run(cache, system + question, snapshot_at=[len(system)])
        assert seq.num_cached == (0 if question[0] == 90 else 20)
        cache.release(seq)


def test_the_next_turn_goes_on_where_the_last_prompt_ended():
    cache = cache_of(State())
    seq, ends = run(cache, PROMPT)
    answer = [*PROMPT, 50, 51, 52]
    for token in answer[len(PROMPT) :]:
        cache.extend(seq, [token])
        write_step(cache, seq, 1, answer)
        cache.commit(seq)
    more = [*answer, *range(60, 75)]
    cache.append(seq, more[len(answer) :])  # another turn of the same sequence
    go_on(cache, seq, more, ends)
    assert ends == [36, 39, 56, 57]
    cache.release(seq)
    assert found(cache, more) == 56
    assert found(cache, answer) == 36


def test_snapshots_are_evicted_by_their_age_and_sequences_go_first():
    cache = cache_of(State(1), states=4)
    seq, ends = run(cache, PROMPT)
    assert ends == [*range(4, 40, 4), 39]
    assert cache.allocators[1].num_used + cache.allocators[1].num_idle == 4  # the newest three, and the one that it runs in
    assert found(cache, PROMPT) == 36
    others = [cache.admit([200 + i]) for i in range(3)]
    for i, other in enumerate(others):
        cache.extend(other, 1)
        write_step(cache, other, 1, [200 + i])
    assert cache.prefix.num_blocks == 9  # K and V; no state is left but those in use
    assert found(cache, PROMPT) == 0
    assert_content(cache, seq, PROMPT)


def test_a_fork_keeps_them_too():
    cache = cache_of(State(0))
    seq = cache.admit(PROMPT, snapshot_at=[13])
    cache.extend(seq, 5)
    write_step(cache, seq, 5, PROMPT)
    other = cache.fork(seq)
    cache.release(seq)
    go_on(cache, other, PROMPT, ends := [])
    assert ends == [12, 36, 39]


def test_a_cache_without_states_or_names_has_no_stops():
    plain = kvx.PagedCache([kvx.LayerGroup("full", (0,), spec(64))], max_seqs=4, max_seq_len=120)
    assert plain.until_snapshot(plain.admit(PROMPT, snapshot_at=[9]), 39) == 39
    nameless = cache_of(State(1), prefix=False)
    assert nameless.until_snapshot(nameless.admit(PROMPT), 39) == 39


def test_a_prompt_that_comes_in_pieces_has_one_end():
    cache = cache_of(State())
    seq = cache.admit(PROMPT[:1])
    for token in PROMPT[1:]:
        cache.append(seq, [token])
    go_on(cache, seq, PROMPT, ends := [])
    assert ends == [36, 39]
    cache.truncate(seq, 0)
    cache.append(seq, [5] * 20)
    assert seq.snapshots == (19 // BS,)  # nothing of the tokens that are forgotten


def test_an_abandoned_step_keeps_its_ends():
    cache = cache_of(State())
    seq = cache.admit(PROMPT, snapshot_at=[9])
    cache.extend(seq, 39)
    cache.abandon(seq, 0, 39)
    go_on(cache, seq, PROMPT, ends := [])
    assert ends == [8, 36, 39]


@pytest.mark.parametrize("wrong", [{"snapshot_every": True}, {"snapshot_at_end": "no"}, {"max_cut": -5}, {"replay": "x"}], ids=str)
def test_policies_that_are_none(wrong):
    with pytest.raises(kvx.BadArgument, match=f"State: {next(iter(wrong))} is"):
        State(**wrong)


@pytest.mark.parametrize("wrong", [(-1,), (121,), (2.5,), (True,), ("9",), 5, None], ids=str)
def test_places_that_are_none(wrong):
    cache = cache_of(State())
    with pytest.raises(kvx.BadArgument, match=r"admit\(\): snapshot_at (has|is)"):
        cache.admit(PROMPT, snapshot_at=wrong)
    assert not cache.num_seqs


def test_numbers_that_are_none():
    cache = cache_of(State())
    seq = cache.admit(PROMPT, snapshot_at=np.array([22]))
    assert seq.snapshots == (22 // BS, 38 // BS)
    assert cache.until_snapshot(seq, np.int64(39)) == 20
    for n in (-1, 1.5, True):
        with pytest.raises(kvx.BadArgument, match=r"until_snapshot\(\): n is"):
            cache.until_snapshot(seq, n)
