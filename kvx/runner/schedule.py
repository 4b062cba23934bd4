"""Scheduler: which tokens of which requests the next step computes.

Decodes and prompts share a step, up to a budget of tokens; a prompt longer than what is left goes on in the next. Sequences are
served oldest first. When blocks run out the youngest gives its own back and waits: its full blocks stay in the prefix cache as
long as nobody needs the room, and in tiers after that, so coming back is often cheap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvx.cache.paged import PagedCache
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument, OutOfBlocks
from kvx.runner.request import Completion


class Work(NamedTuple):
    completion: Completion
    num_tokens: int  # the last of its sequence's are this step's
    found_at: int = 0  # the length at which others will find it next, with what it computes now or goes on with; 0: none

    @property
    def is_last(self) -> bool:
        """Nothing is left to compute: the step's logits give the next token."""
        return self.completion.num_left == 0


@dataclass
class Counts:
    """What scheduling did, in tokens unless said otherwise."""

    prompt_tokens: int = 0  # of prompts admitted, once each
    reused_tokens: int = 0  # of them found in the prefix cache, or shared by a fork
    brought_tokens: int = 0  # that tiers brought back, of prompts and of answers that had to wait
    computed_tokens: int = 0  # all that went through the model
    steps: int = 0
    mixed_steps: int = 0  # with a decode and a prompt
    chunks: int = 0  # prompts' parts that were not their end
    preemptions: int = 0
    forks: int = 0
    peak_blocks: int = 0


class Scheduler:
    def __init__(self, cache: PagedCache, max_batch_tokens: int, *, names_early: bool = True) -> None:
        if not 1 <= max_batch_tokens <= cache.max_tokens:
            raise BadArgument(
                f"Scheduler(): max_batch_tokens is {max_batch_tokens}; it must be 1 to the cache's {cache.max_tokens}."
            )
        self.cache, self.max_batch_tokens = cache, max_batch_tokens
        # Blocks are named before they are written: a sequence of the same step may read them, because every layer writes all
        # tokens before any attends. Not so a state: who goes on from one copies it beforehand.
        self.has_states = any(kind.has_state for kind in cache.kinds)
        self.names_early = names_early and not self.has_states
        self.reserve_blocks = 1  # for each running sequence, when another is admitted: it would be preempted again at once
        self.waiting: deque[Completion] = deque()
        self.running: list[Completion] = []  # oldest first
        self.counts = Counts()
        self.begun: list[Sequence] = []  # sequences on their way to a completion, or of a call's own: what is left is given back

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def step(self) -> list[Work]:
        """Work with room in the cache."""
        work: list[Work] = []
        budget, preempted = self.max_batch_tokens, self.counts.preemptions
        for c in list(self.running):
            if c.seq is None or not budget:
                continue
            budget -= self._work(c, budget, work)
        for c in list(self.waiting) if len(self.running) < self.cache.max_seqs else ():
            if not budget or preempted != self.counts.preemptions or len(self.running) >= self.cache.max_seqs:
                break
            if any(self._is_coming(c, w) for w in work):
                continue
            if not self._admit(c):
                break
            self.waiting.remove(c)
            budget -= self._work(c, budget, work)
        self._count(work)
        return work

    def _work(self, c: Completion, budget: int, work: list[Work]) -> int:
        """Put the next tokens of c into the step: how many."""
        assert c.seq is not None
        before, left, size = c.seq.length, c.num_left, self.cache.block_size
        until = self.cache.until_snapshot(c.seq, left) if self.has_states else left  # a state is kept only where a step ends
        n = self._extend(c, min(until, budget))
        if n:
            if self.has_states:
                found_at = before + until if until < left else 0
            else:
                found_at = (before + n) // size * size
            is_new = not self.names_early and self.cache.prefix is not None and found_at > before
            work.append(Work(c, n, found_at if is_new else 0))
        return n

    def _is_coming(self, c: Completion, w: Work) -> bool:
        """What w computes is what c would: it waits, and finds it."""
        n = w.found_at
        return n < len(c.tokens) and n > 0 and c.tokens[:n] == w.completion.tokens[:n]

    def commit(self, work: list[Work]) -> None:
        """After the step: what it wrote is found by others."""
        if not self.names_early:
            for w in work:
                if w.completion.seq is not None:
                    self.cache.commit(w.completion.seq)

    def _admit(self, c: Completion) -> bool:
        """False: not now."""
        # First see whether it may stay.
        seq = self.cache.admit(c.tokens, snapshot_at=c.params.snapshot_at, is_brought_back=False, out=self.begun)
        c.seq = seq
        self.begun.clear()
        left = len(c.tokens) - seq.length
        reserve = self.reserve_blocks * self.cache.block_size * (len(self.running) + 1)
        if self.running and self.cache.room(seq) < left + reserve:
            self._release(c)
            return False
        found = seq.num_cached
        self.counts.brought_tokens += self.cache.bring_back(seq)
        if c.num_cached < 0:
            c.num_cached = seq.num_cached
            self.counts.prompt_tokens += c.num_prompt
            self.counts.reused_tokens += found
        self.running.append(c)
        return True

    def _extend(self, c: Completion, n: int) -> int:
        """Room for up to `n` more tokens of c: how many. 0: c was preempted."""
        while c.seq is not None:
            seq = c.seq
            try:
                if seq.length == seq.num_tokens:
                    self.cache.extend(seq, c.tokens[seq.length : seq.length + n])
                else:
                    n = min(n, max(1, self.cache.room(seq)))
                    self.cache.extend(seq, n)
            except OutOfBlocks:
                if self.running == [c]:
                    raise
                self._preempt(self.running[-1])  # never one with work in this step: those stand before c
                continue
            if self.names_early and seq.length % self.cache.block_size < n:  # a block is full
                self.cache.commit(seq)
            return n
        return 0

    def _preempt(self, c: Completion) -> None:
        self._release(c, is_preempted=True)
        self.waiting.appendleft(c)  # first: Ctrl-C between the two finds it twice, not nowhere
        self.running.remove(c)
        self.counts.preemptions += 1

    def branch(self, c: Completion) -> list[Completion]:
        """c, and those that go on from the same tokens: forks, as far as there are sequences; others wait and find its blocks."""
        assert c.seq is not None
        out = [c]
        for other in c.siblings:
            if len(self.running) >= self.cache.max_seqs:
                self.waiting.appendleft(other)
                continue
            other.seq = self.cache.fork(c.seq, out=self.begun)
            self.begun.clear()
            other.num_cached = other.num_prompt
            self.running.append(other)
            self.counts.forks += 1
            self.counts.prompt_tokens += other.num_prompt
            self.counts.reused_tokens += other.num_prompt
            out.append(other)
        c.siblings = []
        return out

    def finish(self, c: Completion) -> None:
        self._release(c)
        self.running.remove(c)

    def reset(self) -> None:
        """Nothing runs or waits. What a broken step named may never have been written, so names go too."""
        self.drop(lambda c: True)
        if self.cache.prefix is not None:
            self.cache.prefix.clear()

    def drop_begun(self) -> None:
        """After a call: it has ended, or was broken off, and nobody goes on with these."""
        for seq in self.begun:
            if not seq.is_released:
                self.cache.release(seq)
        self.begun.clear()

    def drop(self, is_dropped: Callable[[Completion], bool]) -> int:
        """End some completions where they are, with those that wait for them: how many. Also what a broken step left half done."""
        dropped = [o for c in (*self.running, *self.waiting) if is_dropped(c) for o in (c, *c.siblings)]
        for c in dropped:
            c.finish = c.finish or "cancelled"
            self._release(c)
        self.running[:] = [c for c in self.running if not c.finish]
        self.waiting = deque(c for c in self.waiting if not c.finish)
        return len(dropped)

    def _release(self, c: Completion, *, is_preempted: bool = False) -> None:
        if c.seq is not None and not c.seq.is_released:
            self.cache.release(c.seq, is_preempted=is_preempted)
        c.seq = None

    def _count(self, work: list[Work]) -> None:
        k = self.counts
        prompts = [w for w in work if len(w.completion.tokens) == w.completion.num_prompt or w.num_tokens > 1]
        k.steps += 1
        k.computed_tokens += sum(w.num_tokens for w in work)
        k.mixed_steps += 0 < len(prompts) < len(work)
        k.chunks += sum(not w.is_last for w in work)
        k.peak_blocks = max(k.peak_blocks, *(a.num_used for a in self.cache.allocators))
