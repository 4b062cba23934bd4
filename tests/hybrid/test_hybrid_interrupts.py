"""Ctrl-C at every point of a hybrid cache's calls, and calls from several threads: check() passes and nothing is lost."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import kvx
from kvx.cache import admitted, blocks, group_table, guard, paged, prefix, recall, resuming, sequence, state_table
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema, Projected
from kvx.cache.hybrid import cache as cache_module
from tests.hybrid.hybrids import same, state_of
from tests.interrupts import signalled_at_every_point

MODULES = (admitted, blocks, group_table, guard, paged, prefix, recall, resuming, sequence, state_table, cache_module)
F32 = {"window_rows": "f32", "entry_rows": "f32"}
SCHEMA = HybridSchema((LayerSchema(4, overlap=True, head_dim=8, rope_dim=0, window=4, **F32),), block_tokens=8, max_drafts=2)
TOKENS, OTHERS, TEXT = list(range(20)), list(range(50, 70)), list(range(80, 100))
STATES = 6  # four sequences and two snapshots


def fed(cache: HybridCache, work) -> None:
    """A step of these sequences, with projections that hang on positions."""
    step = cache.prepare_forward(work)
    at = torch.cat([torch.arange(seq.length - n, seq.length) for seq, n in work]).float()
    x = at[:, None].expand(-1, 16).contiguous()
    cache.acquire(0, step).flush(Projected(x, x / 7))
    cache.acquire(0, step).write_swa(x[:, :8].contiguous())


def made() -> tuple[HybridCache, list]:
    """`first` left snapshots at 8 and 16, and has three tokens more; the last step of `second` can be taken back; `third` has
    computed two blocks whose commit will leave a snapshot, and then stands on it."""
    cache = HybridCache(SCHEMA, num_blocks=9, max_seqs=4, max_seq_len=48, prefix=True, num_snapshots=2)
    first, second, third = (cache.admit(tokens) for tokens in (TOKENS, OTHERS, TEXT))
    for n in (8, 8, 3):
        fed(cache, [(first, n)])
        cache.commit(first)
    for n in (9, 2):
        fed(cache, [(second, n)])
    fed(cache, [(third, 16)])
    return cache, [first, second, third]


def committed() -> tuple[HybridCache, list]:
    cache, seqs = made()
    cache.commit(seqs[2])
    return cache, seqs


def forked() -> tuple[HybridCache, list]:
    cache, seqs = made()
    return cache, [*seqs, cache.fork(seqs[1])]


def replaying() -> tuple[HybridCache, list]:
    """Of the first text entries are there, and no states: a sequence that was found computes some of it again."""
    cache = HybridCache(SCHEMA, num_blocks=9, max_seqs=4, max_seq_len=48, prefix=True, num_snapshots=2, snapshot_every=0)
    first = cache.admit(TOKENS)
    fed(cache, [(first, 17)])
    cache.commit(first)
    second = cache.admit(OTHERS)
    fed(cache, [(second, 3)])
    return cache, [first, second, cache.admit(TOKENS)]


class Memory:
    """A backing: what was offered, by group and name."""

    def __init__(self, cache: HybridCache) -> None:
        self.planes = [list(cache.planes(0, group).planes.values()) for group in (0, 1)]
        self.kept: dict[tuple[int, bytes], list[torch.Tensor]] = {}

    def offer(self, group, names, ids) -> None:
        for name, block in zip(names, ids.tolist(), strict=True):
            self.kept[group, name] = [plane[block].clone() for plane in self.planes[group]]

    def find(self, group, names) -> list[bool]:
        return [(group, name) in self.kept for name in names]

    def load(self, group, names, ids) -> int:
        for name, block in zip(names, ids.tolist(), strict=True):
            for plane, content in zip(self.planes[group], self.kept[group, name], strict=True):
                plane[block].copy_(content)
        return len(names)


def backed() -> tuple[HybridCache, list]:
    """A text of which all is in the backing, entries and a snapshot, and a sequence that was admitted without it."""
    cache, (first, second, third) = made()
    cache.attach(memory := Memory(cache))
    for seq in (first, third):
        cache.release(seq)
    for group in (0, 1):
        memory.offer(group, *cache.prefix.named(group))
    cache.prefix.clear()
    return cache, [second, cache.admit(TOKENS, is_brought_back=False)]


# What it begins with, the call, and whether it makes a sequence: then nobody has the new one.
CALLS = {
    "admit": (made, lambda c, s: c.admit(TEXT[::-1]), True),
    "admit_on_a_snapshot": (made, lambda c, s: c.admit(TOKENS), True),
    "admit_to_replay": (replaying, lambda c, s: c.admit(TOKENS), True),
    "admit_from_a_backing": (backed, lambda c, s: c.admit(TOKENS), True),
    "bring_back": (backed, lambda c, s: c.bring_back(s[1]), False),
    "fork": (made, lambda c, s: c.fork(s[1]), True),
    "prepare_forward": (made, lambda c, s: c.prepare_forward([(s[0], 1), (s[1], 9), (s[2], 4)]), False),
    "prepare_forward_in_a_copy": (committed, lambda c, s: c.prepare_forward([(s[2], 1), (s[1], 1)]), False),
    "prepare_forward_of_forks": (forked, lambda c, s: c.prepare_forward([(s[1], 1), (s[3], 2)]), False),
    "prepare_forward_of_a_replay": (replaying, lambda c, s: c.prepare_forward([(s[1], 1), (s[2], 8)]), False),
    "extend_in_a_copy": (committed, lambda c, s: c.extend(s[2], 4), False),
    "extend_all": (forked, lambda c, s: c.extend_all([(s[3], 9), (s[1], 1)]), False),
    "take_back": (made, lambda c, s: c.take_back([(s[1], 9), (s[0], 17)]), False),
    "truncate": (made, lambda c, s: c.truncate(s[1], 10), False),
    "forget": (made, lambda c, s: c.truncate(s[0], 0), False),
    "commit": (made, lambda c, s: c.commit(s[1]), False),
    "commit_that_leaves_a_snapshot": (made, lambda c, s: c.commit(s[2]), False),
    "release": (made, lambda c, s: c.release(s[0]), False),
    "release_on_a_snapshot": (committed, lambda c, s: c.release(s[2]), False),
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_every_point_of_a_call(name):
    begin, call, is_new = CALLS[name]
    is_naming = name.startswith("commit") or begin is backed

    def standing(cache, seqs):
        seen = [s.is_released or (s.length, s.num_tokens, s.num_ahead, len(cache.block_ids(s))) for s in seqs]
        names = [sorted(cache.prefix.named(group)[0]) for group in (0, 1)]
        return seen, cache.num_seqs, cache.allocators[1].num_used, names

    def content(cache, seqs):
        """Windows and tails of each that has some."""
        return [None if s.is_released or cache.slot(s) < 0 else state_of(cache, cache.slot(s)) for s in seqs]

    before, after = begin(), begin()
    call(*after)
    may = [standing(*before), standing(*after)]
    contents = [content(*before), content(*after)]

    def prepare():
        state = begin()
        return state, lambda: call(*state)

    count = 0
    for cache, seqs in signalled_at_every_point(prepare, *MODULES):
        cache.check()
        got = standing(cache, seqs)
        if is_naming:  # of two groups one may have its names, and the other not yet
            assert got[:3] in [m[:3] for m in may]
            assert all(got[3][group] in (may[0][3][group], may[1][3][group]) for group in (0, 1))
        else:
            assert got in may
        if is_new:
            assert got[:3] == may[0][:3], "nobody has the new sequence"
        elif is_naming and got != may[1]:
            call(cache, seqs)
            assert standing(cache, seqs) == may[1], "the same call again does the rest"
        for now, *either in zip(content(cache, seqs), *contents, strict=True):
            if now is not None:
                assert any(want is not None and same(now, want) for want in either), "a state is as before, or as after"
        if name in ("take_back", "truncate"):  # all of it or nothing, as the lengths say
            assert all(same(a, b) for a, b in zip(content(cache, seqs), contents[may.index(got)], strict=True))
        if cache.num_seqs < 4:
            cache.release(cache.admit([]))
        for seq in seqs:
            if not seq.is_released:
                cache.commit(seq)
                cache.release(seq)
        cache.check()
        assert [a.num_used for a in cache.allocators] == [0, 0]
        cache.prefix.clear()
        assert [a.num_free for a in cache.allocators] == [STATES, 9]
        count += 1
    assert count > 3


@pytest.mark.parametrize("every", [0, 1])
def test_from_several_threads(every):
    cache = HybridCache(SCHEMA, num_blocks=24, max_seqs=16, max_seq_len=48, prefix=True, snapshot_every=every, num_snapshots=1)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng, mine = random.Random(number), []
        try:
            for _ in range(30):
                try:
                    mine.append(cache.admit(TOKENS[: rng.randint(1, 20)]))
                    if rng.random() < 0.3:
                        mine.append(cache.fork(mine[0]))
                    for seq in mine:
                        cache.prepare_forward([(seq, rng.choice((1, min(8, seq.num_tokens - seq.length))))])
                        cache.commit(seq)
                    cache.check()
                except kvx.OutOfBlocks:
                    pass
                finally:
                    while mine:
                        cache.release(mine.pop())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    cache.check()
    assert [a.num_used for a in cache.allocators] == [0, 0]
    assert cache.num_seqs == 0
