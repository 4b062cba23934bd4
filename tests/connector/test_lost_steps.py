"""A fake vLLM with two ranks that lose blocks at random, while requests share blocks, are preempted and end at any moment.

Memory says what is right: a token's K and V are, where all before it are on every rank. Nothing else may be saved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from kvx.connector.groups import parts_of
from kvx.connector.jobs import Job
from kvx.connector.lost import LostLoads
from kvx.connector.scheduler import SchedulerSide
from kvx.handover import names
from tests.connector.groups import a_group
from tests.connector.test_lost import Ranks

SIZE, BLOCKS, RANKS = 4, 50, 2
MOST = 9  # blocks of a request


@dataclass(eq=False)
class Request:
    id: str
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass(frozen=True)
class Part:
    """One request's in a step."""

    request: Request
    table: tuple[int, ...]
    first: int
    end: int


@dataclass
class Step:
    heard: frozenset[int]
    parts: list[Part] = field(default_factory=list)
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    begun: list[list[int]] = field(default_factory=list)  # tables of requests that were not in the step before


class FakeStack:
    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def beginning(self, names: Sequence[bytes]) -> int:
        return next((n for n, name in enumerate(names) if name not in self.names), len(names))


class FakeVllm:
    def __init__(self, seed: int, *, kept: int, policy: str, depth: int) -> None:
        self.random, self.kept, self.policy, self.depth = random.Random(seed), kept, policy, depth
        (part,) = parts_of([a_group(block_size=SIZE)])
        self.stacks = [FakeStack() for _ in range(RANKS)]
        self.side = SchedulerSide([part], [self.stacks], block_size=kept, model="fake")
        ranks = Ranks(RANKS)
        self.workers = [LostLoads(engine_size=SIZE, tier_size=kept, agree=ranks.agree(r)) for r in range(RANKS)]
        self.threads = ThreadPoolExecutor(RANKS)
        # For each rank and slot the tokens up to it, where K and V are right.
        self.memory: list[dict[int, tuple[int, ...]]] = [{} for _ in range(RANKS)]
        self.cache: dict[tuple[int, ...], int] = {}  # the prefix cache: tokens -> block
        self.users = [0] * BLOCKS  # of each block; 0 is the null block
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.steps: list[Step] = []  # under way
        self.given_back: list[tuple[int, list[int]]] = []  # blocks that steps under way may still write: how many of those
        self.losses = self.left_out = 0
        self.can_lose = True

    # ---- the scheduler

    def schedule(self) -> None:
        step = Step(self.side.begin_step())
        preempted = [r for r in self.running if self.random.random() < 0.05]
        for r in preempted:
            self.running.remove(r)
            self.give_back(r)
        for r in self.running:
            if r.computed < len(r.tokens):
                self.schedule_one(step, r, [], is_whole=False)
        while not preempted and self.waiting and not self.is_under_way(self.waiting[0]) and self.has_room():
            self.admit(step, self.waiting.pop(0))
        self.waiting = preempted + self.waiting
        self.steps.append(step)

    def admit(self, step: Step, r: Request) -> None:
        hits = []
        while (len(hits) + 1) * SIZE < len(r.tokens) and tuple(r.tokens[: (len(hits) + 1) * SIZE]) in self.cache:
            hits.append(self.cache[tuple(r.tokens[: (len(hits) + 1) * SIZE])])
        self.side.add(r.id, r.tokens)
        external = self.side.matched(r.id, len(hits) * SIZE)
        r.computed = len(hits) * SIZE + external
        for block in hits:
            self.users[block] += 1
        r.table = hits + self.take(external // SIZE)
        self.side.allocated(r.id, [r.table], external)
        self.running.append(r)
        self.schedule_one(step, r, r.table, is_whole=True)

    def schedule_one(self, step: Step, r: Request, blocks: list[int], *, is_whole: bool) -> None:
        first, end = r.computed, min(len(r.tokens), r.computed + self.random.choice([3, 8, 40]))
        new = self.take(-(-end // SIZE) - len(r.table))
        r.table = r.table + new
        work = self.side.scheduled(r.id, [blocks + new], is_whole=is_whole, num_computed=first, num_new=end - first)
        step.loads += [work.load] if work.load else []
        step.saves += [work.save] if work.save else []
        step.begun += [r.table] if is_whole else []
        step.parts.append(Part(r, tuple(r.table), first, end))
        for n in range(end // SIZE):
            self.cache.setdefault(tuple(r.tokens[: (n + 1) * SIZE]), r.table[n])
        r.computed = end

    def is_under_way(self, r: Request) -> bool:
        return any(p.request is r for step in self.steps for p in step.parts)

    def has_room(self) -> bool:
        """For one more, whatever those that run still need."""
        return self.users[1:].count(0) >= MOST * (len(self.running) + 1)

    def take(self, count: int) -> list[int]:
        free = [b for b in range(1, BLOCKS) if not self.users[b]]
        found = self.random.sample(free, max(0, count))
        for block in found:
            self.users[block] = 1
        self.cache = {tokens: b for tokens, b in self.cache.items() if b not in found}
        return found

    def give_back(self, r: Request) -> None:
        self.given_back.append((len(self.steps), r.table))
        r.table, r.computed = [], 0
        self.free()

    def free(self) -> None:
        for _, table in [x for x in self.given_back if not x[0]]:
            for block in table:
                self.users[block] -= 1
        self.given_back = [x for x in self.given_back if x[0]]

    def end(self, r: Request) -> None:
        (self.running if r in self.running else self.waiting).remove(r)
        self.side.drop(r.id)
        self.give_back(r)

    # ---- the workers

    def execute(self, step: Step) -> set[int]:
        gone = {(rank, job.request, n) for rank in range(RANKS) for job in step.loads for n in range(len(job.names)) if self.bad()}
        self.losses += bool(gone)
        list(self.threads.map(lambda rank: self.load(rank, step, gone), range(RANKS)))
        self.compute(step)
        for job in step.saves:
            tokens = next(p.request.tokens for p in step.parts if p.request.id == job.request)
            for rank, worker in enumerate(self.workers):
                if worker.is_wrong(job):
                    self.left_out += 1
                else:
                    self.save(rank, job, tokens)
        failed = [worker.take_failed() for worker in self.workers]
        assert failed[0] == failed[1]
        return failed[0]

    def bad(self) -> bool:
        return self.can_lose and self.random.random() < 0.05

    def load(self, rank: int, step: Step, gone: set[tuple[int, str, int]]) -> None:
        def load(job: Job) -> list[int]:
            missing = [n for n in range(len(job.names)) if (rank, job.request, n) in gone]
            self.stacks[rank].names -= {job.names[n] for n in missing}
            tokens = next(p.request.tokens for p in step.parts if p.request.id == job.request)
            for t in range(job.first, job.end):
                slot = job.blocks[0][t // SIZE] * SIZE + t % SIZE
                self.memory[rank].pop(slot, None)
                if t // self.kept - job.first // self.kept not in missing:
                    self.memory[rank][slot] = tuple(tokens[: t + 1])
            return missing

        self.workers[rank].heard(step.heard)
        self.workers[rank].load(step.loads, load, tables=step.begun)

    def compute(self, step: Step) -> None:
        """A layer's K and V of all requests are written before any is read: the order of requests does not matter."""
        for p in step.parts:
            for t in range(p.first, p.end):
                for memory in self.memory:
                    memory.pop(p.table[t // SIZE] * SIZE + t % SIZE, None)
        changed = True
        while changed:
            changed = False
            for p in step.parts:
                for t in range(p.first, p.end):
                    slot = p.table[t // SIZE] * SIZE + t % SIZE
                    if slot not in self.memory[0] and all(self.is_right(r, p.table, p.request.tokens, 0, t) for r in range(RANKS)):
                        changed = True
                        for memory in self.memory:
                            memory[slot] = tuple(p.request.tokens[: t + 1])

    def is_right(self, rank: int, table: Sequence[int], tokens: list[int], first: int, end: int) -> bool:
        slots = [table[t // SIZE] * SIZE + t % SIZE for t in range(first, end)]
        return all(self.memory[rank].get(slot) == tuple(tokens[: first + n + 1]) for n, slot in enumerate(slots))

    def save(self, rank: int, job: Job, tokens: list[int]) -> None:
        if not self.stacks[rank].names.issuperset(job.names):
            assert self.is_right(rank, job.blocks[0], tokens, job.first, job.end), f"wrong K and V under a right name: {job}"
        self.stacks[rank].names.update(job.names)

    # ---- the answer

    def update(self) -> None:
        """As vLLM 0.32 does it: Scheduler._update_requests_with_invalid_blocks, then the connector is told."""
        step = self.steps.pop(0)
        failed = self.execute(step)
        self.given_back = [(n - 1, table) for n, table in self.given_back]
        self.free()
        counts = {p.request.id: p.end - p.first for p in step.parts}
        marked: set[int] = set()
        for r in list(self.running) if failed else []:
            before = r.computed - counts.get(r.id, 0)
            bad = [n for n in range(min(-(-before // SIZE), len(r.table))) if r.table[n] in failed]
            mine = [n for n in bad if r.table[n] not in marked]
            marked |= {r.table[n] for n in bad}
            if self.policy == "fail":
                if mine:
                    self.cache = {tokens: b for tokens, b in self.cache.items() if b not in r.table[mine[0] :]}
                if bad:
                    self.end(r)
            elif bad:
                r.computed = mine[0] * SIZE if mine else before
        if failed:
            self.side.lost(failed)
        for r in [r for r in self.running if r.computed == len(r.tokens) and not self.is_under_way(r)]:
            self.end(r)

    def run(self, requests: Sequence[Request], *, ends: float) -> None:
        """All of them, some of which end on the way; several at a time."""
        self.waiting += requests
        while self.waiting or self.running:
            self.schedule()
            if self.running and self.random.random() < ends:
                self.end(self.random.choice(self.running))
            while len(self.steps) >= self.depth or (self.steps and not self.running):
                self.update()


def prompts(rng: random.Random, count: int) -> list[Request]:
    """That begin as others do. Their ids come again with the next ones."""
    stems = [[100 * stem + t for t in range(24)] for stem in range(3)]
    made: list[Request] = []
    for _ in range(count):
        tokens = rng.choice(stems)[: rng.choice([8, 16, 24])] + [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        made.append(Request(f"{len(made)}", tokens))
    return made


@pytest.mark.parametrize(("policy", "depth"), [("recompute", 1), ("fail", 1), ("fail", 2)], ids=str)
@pytest.mark.parametrize("kept", [2, 4, 8], ids=str)
def test_nothing_wrong_is_ever_saved(policy, depth, kept):
    losses = left_out = 0
    for seed in range(12):
        engine = FakeVllm(seed, kept=kept, policy=policy, depth=depth)
        for _ in range(6):
            engine.run(prompts(engine.random, 12), ends=0.05)
        losses, left_out = losses + engine.losses, left_out + engine.left_out
        engine.can_lose = False
        # All memory is written again: nothing remembers the losses, and everything is saved.
        last = [Request(f"{n}", [2000 + 100 * n + t for t in range(33)]) for n in range(12)]
        engine.run(last, ends=0)
        for rank, stack in enumerate(engine.stacks):
            assert all(stack.names.issuperset(names(r.tokens, kept, "fake")) for r in last), f"seed {seed}, rank {rank}"
        for _ in range(2):
            engine.schedule()
            engine.update()
        assert [engine.side._requests, engine.side._ended, *(w._unheard for w in engine.workers)] == [{}, [], [], []]
        engine.threads.shutdown()
    assert losses > 20
    assert left_out > 20
