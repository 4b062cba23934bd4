"""Random calls on a PagedCache with K and V, windows and states, against what its blocks must hold (tests/fuzz/paged_model.py).

    python -m tests.fuzz.paged_states --cases 1000000 --seed 1

After every call check() recounts everything, every sequence's K, V and states are compared, every block that has a name holds what
the name says, and blocks that nobody has are filled with garbage, so that whoever still reads one is seen. A cache lives for CALLS
calls; the number of its first makes it again, but for what the threads of tiers have a say in.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import kvx
from kvx.cache import Sequence
from kvx.cache.kinds import State
from tests.fuzz.paged_caches import Backing, host_tiers, make_cache
from tests.fuzz.paged_model import Contents, Text

CALLS = 500  # of one cache
Prompt = list[tuple[int, bytes]]  # a token, and what begins with it


class Held:
    """A sequence, and the texts after each of its tokens: those known, with room or without."""

    def __init__(self, seq: Sequence, path: list[Text], asked: frozenset[int], end: int) -> None:
        self.seq, self.path = seq, path
        self.asked = asked  # after how many tokens its states are to be kept, besides every so many blocks
        self.end = end  # and where its newest known tokens end, but for one
        self.num_learned = 0  # names

    @property
    def known(self) -> Prompt:
        return [(t.token, t.extra) for t in self.path[1:]]


class Run:
    """One cache and its calls."""

    def __init__(self, rng: random.Random, seen: Counter[str]) -> None:
        self.rng, self.seen, self.cache = rng, seen, make_cache(rng)
        self.contents = Contents(self.cache)
        self.block_size, self.max_len = self.cache.block_size, self.cache.max_seq_len
        assert self.cache.prefix is not None
        self.prefix = self.cache.prefix
        self.is_backed, self.tiers = rng.random() < 0.5, ExitStack()
        if self.is_backed and rng.random() < 0.1:
            host_tiers(self.cache, self.tiers, rng.choice([3, 12, 60]))
        elif self.is_backed:
            self.cache.attach(Backing(self.contents, rng, rng.choice([3, 12, 60]), rng.choice([0.0, 0.0, 0.2])))
        self.vocab = rng.choice([2, 5, 1000])
        self.held: list[Held] = []
        self.pinned: list[bytes] = []
        self.prompts = [self.tokens(self.max_len) for _ in range(3)]  # what others begin with
        for prompt in self.prompts[: rng.randint(0, 2)]:
            at = rng.randrange(self.max_len)
            prompt[at] = (prompt[at][0], rng.choice([b"image", b"another"]))
        self.states = [(g, self.cache.kinds[g.index]) for g in self.contents.groups if g.has_state]
        self.calls = [getattr(self, name) for name, weight in CALLED.items() for _ in range(weight)]

    def tokens(self, n: int, extra: float = 0.0) -> Prompt:
        return [(self.rng.randrange(self.vocab), b"image" if self.rng.random() < extra else b"") for _ in range(n)]

    def paths(self, start: Text, prompt: Prompt) -> list[Text]:
        path = [start]
        for token, extra in prompt:
            path.append(self.contents.after(path[-1], token, extra))
        return path[1:]

    # --- one call, and what must hold after it --------------------------------------------------------------------------------

    def call(self) -> None:
        rng = self.rng
        what = rng.choice(self.calls) if self.held else self.admit
        before = self.standing()
        try:
            what(rng.choice(self.held) if self.held else None)
        except kvx.OutOfBlocks:
            self.seen["out of blocks"] += 1
            assert self.standing() == before, "OutOfBlocks changed something"
            if self.held:
                self.release(rng.choice(self.held))
            elif self.pinned:
                self.unpin(None)
        self.examine()

    def standing(self) -> Any:
        """Of all that a refused call must leave as it was."""
        fields = ("id", "length", "num_tokens", "limit", "num_stored", "starts", "extras", "snapshot_at")
        seqs = [str([getattr(held.seq, name) for name in fields]) for held in self.held]
        counts = [(a.counts().tolist(), a.num_free, a.num_idle) for a in self.cache.allocators]
        return seqs, counts, self.prefix.num_blocks, [t.table.tobytes() for t in self.cache._tables]

    def examine(self) -> None:
        cache, contents = self.cache, self.contents
        cache.check()
        for held in self.held:
            self.examine_sequence(held)
        for group, allocator in zip(contents.groups, cache.allocators, strict=True):
            names, blocks = self.prefix.named(group.index)
            contents.assert_named(group, names, blocks)
            free = allocator.counts() == 0
            free[blocks] = False
            group.fill_garbage(np.flatnonzero(free))

    def examine_sequence(self, held: Held) -> None:
        seq, path, size = held.seq, held.path, self.block_size
        assert seq.num_tokens == len(path) - 1
        assert seq.tokens.tolist() == [t.token for t in path[1:]]
        held.num_learned = min(held.num_learned, len(seq.hashes))
        for n in range(held.num_learned, len(seq.hashes)):
            self.contents.learn(seq.hashes[n], path, (n + 1) * size)
        held.num_learned = len(seq.hashes)
        if not seq.length:
            return
        rows = np.array([t.row for t in path[1 : seq.length + 1]])
        for group in self.contents.groups:
            blocks = self.cache.blocks(seq, group.index).astype(np.int64)
            if group.has_state:
                group.assert_states(blocks, path[seq.length].state[None], seq)
            else:
                at = np.arange(self.contents.first_seen(group, seq.length), seq.length)
                assert len(blocks) == -(-seq.length // size)
                assert not len(at) or blocks[at // size].min() >= 0, (
                    f"group {group.index}, {seq}: it sees a block that was given back"
                )
                group.assert_rows(blocks[at // size] * size + at % size, rows[at], seq)

    # --- a step ---------------------------------------------------------------------------------------------------------------

    def compute(self, work: list[tuple[Held, int]]) -> None:
        """The last n tokens of each, as a model does it: by the tables and slots of the batch, and on from the states there."""
        cache, contents, size = self.cache, self.contents, self.block_size
        pads = {"pad_seqs": cache.max_seqs, "pad_tokens": cache.max_tokens} if self.rng.random() < 0.1 else {}
        batch = cache.plan([(held.seq, n) for held, n in work], **pads)
        at = [np.arange(held.seq.length - n, held.seq.length) for held, n in work]
        num_tokens, num_seqs = sum(n for _, n in work), len(work)
        assert batch.positions[:num_tokens].tolist() == np.concatenate(at).tolist()
        assert batch.tokens[:num_tokens].tolist() == [
            held.path[p + 1].token for (held, _), ps in zip(work, at, strict=True) for p in ps
        ]
        assert batch.seq_lens[:num_seqs].tolist() == [held.seq.length for held, _ in work]
        ends = np.cumsum([n for _, n in work]).tolist()
        assert batch.cu_seqlens[: num_seqs + 1].tolist() == [0, *ends]
        assert batch.last[:num_seqs].tolist() == [e - 1 for e in ends]
        for group in contents.groups:
            if group.has_state:
                where = batch.state_blocks(group.index).tolist()[:num_seqs]
                assert len(set(where)) == num_seqs, "two sequences go on in one state"
                for (held, n), block in zip(work, where, strict=True):
                    start, state = held.seq.length - n, group.state(block)
                    want = held.path[start].state[group.all_lanes]
                    assert (state == want).all(), (
                        f"{held.seq} goes on from {state.tolist()}; after {start} tokens it is {want.tolist()}"
                    )
                    for text in held.path[start + 1 : start + n + 1]:
                        state = contents.step(state, text.number, group.all_lanes)
                    group.put_state(block, state)
                continue
            slots = batch.slot_mapping(group.index).numpy()
            tables = [cache.blocks(held.seq, group.index).astype(np.int64) for held, _ in work]
            want = np.concatenate([t[ps // size] * size + ps % size for t, ps in zip(tables, at, strict=True)])
            assert (slots[:num_tokens] == want).all()
            assert (want >= 0).all()
            assert (slots[num_tokens:] == -1).all()
            group.put_rows(want, np.array([held.path[p + 1].row for (held, _), ps in zip(work, at, strict=True) for p in ps]))
        self.seen["tokens computed"] += num_tokens

    def written(self, held: Held, n: int) -> None:
        """n tokens have room: they are computed, and most times others may find them."""
        self.compute([(held, n)])
        if self.rng.random() < 0.8:
            self.commit(held)

    def chunk(self, held: Held, n: int) -> int:
        """Of n tokens: some, or as many as there are before a snapshot is due."""
        n = self.rng.randint(1, n)
        m, start = self.cache.until_snapshot(held.seq, n), held.seq.length
        due = [p for p in range(start + 1, start + n + 1) if any(self.is_due(held, kind, p) for _, kind in self.states)]
        assert start + m == min(due, default=start + n), f"{held.seq}: {m} of {n} tokens; snapshots are due at {due}"
        return m if self.rng.random() < 0.8 else n

    def is_due(self, held: Held, kind: State, position: int) -> bool:
        every = kind.snapshot_every * self.block_size
        return position > 0 and (bool(every and position % every == 0) or position in held.asked or position == held.end)

    def end_of(self, num_tokens: int) -> int:
        """Where a text of so many tokens is found again; 0: nowhere."""
        is_kept = any(kind.snapshot_at_end for _, kind in self.states)
        return max(0, num_tokens - 1) // self.block_size * self.block_size if is_kept else 0

    def more(self, held: Held, new: Prompt) -> None:
        """append() of these, of which the first may begin something."""
        num_tokens = held.seq.num_tokens + len(new)
        self.cache.append(held.seq, [t for t, _ in new], extra=new[0][1])
        held.path += self.paths(held.path[-1], new)
        held.end = self.end_of(num_tokens)

    # --- the calls ------------------------------------------------------------------------------------------------------------

    def admit(self, _: Held | None, prompt: Prompt | None = None, lora: bytes = b"") -> None:
        rng, cache = self.rng, self.cache
        if prompt is None:
            prompt = self.prompts[rng.randrange(len(self.prompts))][: rng.randint(0, self.max_len)]
            prompt = prompt + self.tokens(rng.choice([0, 0, 1, 3]), 0.05)
            lora = b"lora" if rng.random() < 0.1 else b""
        prompt = prompt[: self.max_len]
        extras = [(at, extra) for at, (_, extra) in enumerate(prompt) if extra]
        points = [rng.randint(0, len(prompt)) for _ in range(rng.choice([0, 0, 1, 2]))]
        has = self.names()
        is_late = self.is_backed and rng.random() < 0.3
        options = {"snapshot_at": points} if points else {}
        seq = cache.admit([t for t, _ in prompt], extra=lora, extras=extras, is_brought_back=not is_late, **options)
        root = self.contents.root(lora)
        asked = frozenset(at // self.block_size * self.block_size for at in points)
        held = Held(seq, [root, *self.paths(root, prompt)], asked, self.end_of(len(prompt)))
        self.held.append(held)
        self.admitted(held, has)
        if is_late:
            self.examine_sequence(held)
            length = seq.length
            assert cache.bring_back(seq) == seq.length - length
            self.admitted(held, has)

    def names(self) -> list[set[bytes]]:
        return [set(self.prefix.named(g.index)[0]) for g in self.contents.groups]

    def admitted(self, held: Held, has: list[set[bytes]]) -> None:
        """A hit is as deep as what was there lets it be, and never all of the prompt. Its contents are seen by examine()."""
        seq, size = held.seq, self.block_size
        names = seq.hashes[: max(0, seq.num_tokens - 1) // size]
        least = self.contents.deepest(names, has) * size
        assert seq.length == seq.num_cached <= max(0, seq.num_tokens - 1)
        if not self.is_backed:
            assert seq.length == least, f"{seq} is found {seq.length} deep; it could be {least}"
        else:
            assert seq.length >= least, f"{seq} is found {seq.length} deep; it could be {least}"
            self.seen["brought back"] += seq.length > least
        self.seen["admitted"] += 1
        self.seen["hits"] += seq.length > 0

    def extend(self, held: Held) -> None:
        seq = held.seq
        left = seq.num_tokens - seq.length
        if not left:
            self.say(held)
            return
        n, room = self.chunk(held, left), self.cache.room(seq)
        try:
            self.cache.extend(seq, n)
        except kvx.OutOfBlocks:
            assert n > room, f"room() said {room}, and {n} have none"
            raise
        assert n <= room, f"room() said {room}, and {n} have some"
        self.written(held, n)

    def say(self, held: Held) -> None:
        """New tokens: one, as a decode step has it, or more."""
        seq, rng = held.seq, self.rng
        n = min(self.max_len - seq.num_tokens, rng.choice([1, 1, 1, 2, 5]))
        if n < 1:
            self.release(held)
            return
        new = self.tokens(n, 0.02)
        extra = new[0][1]
        new[1:] = [(t, b"") for t, _ in new[1:]]
        if seq.length < seq.num_tokens:
            self.more(held, new)
        else:
            self.cache.extend(seq, [t for t, _ in new], extra=extra)
            held.path += self.paths(held.path[-1], new)
            self.written(held, n)

    def append(self, held: Held) -> None:
        seq, new = held.seq, self.tokens(1, 0.1)
        new += self.tokens(self.rng.randint(0, 3))
        if seq.num_tokens + len(new) <= self.max_len:
            self.more(held, new)

    def extend_all(self, _: Held) -> None:
        """A step of several: each decodes one token, or goes on with its prompt."""
        cache, work = self.cache, []
        for held in self.rng.sample(self.held, self.rng.randint(1, len(self.held))):
            if held.seq.length == held.seq.num_tokens < self.max_len:
                self.more(held, self.tokens(1))
            left = held.seq.num_tokens - held.seq.length
            if left:
                work.append((held, self.chunk(held, left)))
        if not work:
            return
        size, ends = self.block_size, [(held.seq.length, held.seq.length + n) for held, n in work]
        most = len(work) + sum(-(-end // size) - -(-start // size) for start, end in ends)  # where each last block is copied too
        needs = [len(work) if group.has_state else most for group in self.contents.groups]
        is_enough = all(a.num_available >= need for a, need in zip(cache.allocators, needs, strict=True))
        before = self.standing()
        try:
            cache.extend_all([(held.seq, n) for held, n in work])
        except kvx.OutOfBlocks:
            assert not is_enough, f"blocks of each group are enough: {needs} at most"
            assert self.standing() == before, "OutOfBlocks changed something"
            self.seen["out of blocks, several"] += 1
            self.release(self.rng.choice(self.held))
            return
        self.compute(work)
        for held, _ in work:
            if self.rng.random() < 0.8:
                self.commit(held)

    def commit(self, held: Held) -> None:
        """Full blocks get names; a state where it is due, and nowhere else."""
        seq, size = held.seq, self.block_size
        is_new = seq.length - seq.num_stored >= size
        has = [self.prefix.named(group.index)[0] for group, _ in self.states]
        self.cache.commit(seq)
        for (group, kind), before in zip(self.states, has, strict=True):
            now = self.prefix.named(group.index)[0]
            if is_new and seq.length % size == 0 and self.is_due(held, kind, seq.length):
                assert seq.hashes[seq.length // size - 1] in now, f"{seq}: group {group.index} has no snapshot here"
                self.seen["snapshots"] += now != before
            else:
                assert now == before, f"{seq}: group {group.index} has a snapshot that nobody asked for"

    def fork(self, held: Held) -> Held:
        other = Held(self.cache.fork(held.seq), list(held.path), held.asked, held.end)
        self.held.append(other)
        return other

    def draft(self, held: Held) -> None:
        """Tokens tried on a fork; then one of the two is gone on with."""
        if held.seq.length < held.seq.num_tokens or not 0 < held.seq.length < self.max_len - 4:
            return
        other = self.fork(held)
        self.examine()
        new = self.tokens(self.rng.randint(1, 4))
        try:
            self.cache.extend(other.seq, [t for t, _ in new])
        except kvx.OutOfBlocks:
            self.release(other)
            self.seen["out of blocks, drafts"] += 1
            return
        other.path += self.paths(other.path[-1], new)
        self.compute([(other, len(new))])
        if self.rng.random() < 0.5:
            self.commit(other)
        self.examine()
        self.release(self.rng.choice([held, other]))
        self.seen["drafts"] += 1

    def truncate(self, held: Held) -> None:
        seq = held.seq
        length = self.rng.choice([0, seq.length, self.rng.randint(0, seq.length)])
        if 0 < length < seq.length:
            before = self.standing()
            with pytest.raises(kvx.BadArgument, match=r"cannot go back|were freed"):
                self.cache.truncate(seq, length)
            assert self.standing() == before
            self.seen["truncate refused"] += 1
            return
        self.cache.truncate(seq, length)
        del held.path[length + 1 :]
        held.asked, held.end = frozenset(at for at in held.asked if at <= length), min(held.end, self.end_of(length))

    def abandon(self, held: Held) -> None:
        """An extend whose step never ran: the state is where nobody knows."""
        seq = held.seq
        length, num_tokens = seq.length, seq.num_tokens
        if length == num_tokens:
            return
        self.cache.extend(seq, self.chunk(held, num_tokens - length))
        self.cache.abandon(seq, length, num_tokens)
        assert (seq.length, seq.num_tokens) == (0, num_tokens)

    def release(self, held: Held) -> None:
        self.cache.release(held.seq)
        self.held.remove(held)

    def preempt(self, held: Held) -> None:
        """Its blocks are given back, and it is admitted again: at once, or as what later ones begin with."""
        known = held.known
        self.release(held)
        if self.rng.random() < 0.5:
            self.admit(None, known, held.path[0].lora)
        else:
            self.prompts[self.rng.randrange(len(self.prompts))] = known + self.tokens(2)

    def pin(self, held: Held) -> None:
        there = [h for h in held.seq.hashes if any(h in names for names in self.names())]
        if there and len(self.pinned) < 2:
            self.pinned.append(self.rng.choice(there))
            assert self.prefix.pin(self.pinned[-1:]) > 0

    def unpin(self, _: Held | None) -> None:
        if self.pinned:
            self.prefix.unpin([self.pinned.pop()])

    def clear(self, _: Held) -> None:
        """Every name is forgotten, now and then."""
        if self.rng.random() < 0.2:
            self.prefix.clear()
            self.pinned.clear()

    def room(self, _: Held) -> None:
        """A new sequence has as much room as it was told."""
        n = self.cache.room()
        if n:
            prompt = [(5000 + i, b"") for i in range(n)]
            seq = self.cache.admit([t for t, _ in prompt])
            self.cache.extend(seq, n)
            self.cache.check()
            self.cache.release(seq)


# How often each is called, of their sum.
CALLED = {
    "admit": 12, "extend": 24, "say": 16, "append": 2, "extend_all": 10, "commit": 4, "fork": 4, "draft": 5, "truncate": 3,
    "abandon": 2, "release": 5, "preempt": 5, "pin": 2, "unpin": 2, "clear": 1, "room": 2,
}  # fmt: skip


def case(number: int, calls: int, seen: Counter[str]) -> None:
    run = Run(random.Random(number), seen)
    with run.tiers:
        for n in range(calls):
            try:
                run.call()
            except BaseException as error:
                raise AssertionError(f"call {n} of the cache that begins with {number}: {type(error).__name__}: {error}") from error
            seen["calls"] += 1
        while run.held:
            run.release(run.held[0])
        while run.pinned:
            run.unpin(None)
        run.examine()
    assert all(a.num_used == 0 for a in run.cache.allocators)
    seen["evicted"] += run.prefix.stats.evicted


def run(cases: int, seed: int, *, say: bool = False) -> Counter[str]:
    """So many calls, on as many caches as it takes. What they came to; AssertionError at the first that ends otherwise."""
    seen: Counter[str] = Counter()
    begin = time.perf_counter()
    for first in range(0, cases, CALLS):
        case(seed + first, min(CALLS, cases - first), seen)
        if say and first // CALLS % 50 == 49:
            print(f"{seen['calls']:,} calls, {time.perf_counter() - begin:.0f} s: {dict(seen)}", flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="calls")
    parser.add_argument("--seed", type=int, default=0, help="of the first cache; each is made by its number alone")
    options = parser.parse_args()
    begin = time.perf_counter()
    seen = run(options.cases, options.seed, say=True)
    print(f"{options.cases:,} calls in {time.perf_counter() - begin:.0f} s: {dict(sorted(seen.items()))}")


if __name__ == "__main__":
    main()
