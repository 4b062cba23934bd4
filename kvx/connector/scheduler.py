"""The scheduler's side: which beginning of a prompt the tiers have, and which blocks are to be loaded and saved in a step.

It has no cache: requests are told to it as ids, tokens and block tables.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from kvx.connector.groups import PartGroups
from kvx.connector.jobs import Job
from kvx.connector.lost import WrongBlocks
from kvx.connector.neighbours import Neighbours
from kvx.connector.tier_stack import TierStack
from kvx.handover import names as names_of

Blocks = Sequence[Sequence[int]]  # for each group, a table or what is new in it


@dataclass
class _Request:
    tokens: Sequence[int]  # grows with the request
    blocks: list[list[int]] = field(default_factory=list)  # a table for each group
    names: list[bytes] = field(default_factory=list)  # of the full blocks of its tokens, in the tiers' size
    looked_up: int = -1  # how many tokens it had when it was last looked up
    found: int = 0  # how many of them the tiers have
    external: int = 0  # tokens to load in this step, the last of those that it counts as computed
    saved: int = 0  # tokens that were told to the worker


class StepJobs(NamedTuple):
    """Of one request in one step."""

    load: Job | None = None
    save: Job | None = None


class SchedulerSide:
    def __init__(
        self,
        parts: Sequence[PartGroups],
        stacks: Sequence[Sequence[TierStack]],  # for each part, one for each tensor parallel rank and each stage
        *,
        block_size: int,  # of the tiers
        model: str,
        neighbours: Sequence[Sequence[Neighbours]] = (),  # as the stacks; (): what others wrote is left alone
        is_decode_only: bool = False,  # several new tokens are computed without those before them: load only where one is left
    ) -> None:
        self.parts, self.stacks, self.block_size, self.model = list(parts), stacks, block_size, model
        self.is_decode_only, self.neighbours = is_decode_only, neighbours
        self.align = lcm(*(g.block_size for part in parts for g in part.groups if not g.planes or g.keeps_states))
        if any(part.is_state for part in parts):  # a state has the name of a block that ends where it stands
            self.align = lcm(self.align, block_size)
        self._requests: dict[str, _Request] = {}
        self._wrong = WrongBlocks(next(g.block_size for part in parts for g in part.groups if g.index == 0))
        self._heard: set[int] = set()
        self._step = 0
        self._ended: list[tuple[int, list[int]]] = []  # the step before, and the first group's table, of requests that ended lately

    def add(self, request: str, tokens: Sequence[int]) -> None:
        """`tokens` is the request's own list, which grows."""
        self._requests.setdefault(request, _Request(tokens))

    def drop(self, request: str) -> None:
        ended = self._requests.pop(request, None)
        if ended is not None and ended.names:  # what it computed is in the tiers by now
            for every in self.neighbours:
                every[0].lead(ended.tokens, ended.names)  # records are of tokens, for all ranks
        if ended is not None and ended.blocks:
            self._ended.append((self._step, ended.blocks[0]))

    def lost(self, failed: Collection[int]) -> None:
        """The engine was told that these blocks did not come."""
        self._heard.update(failed)
        tables = [r.blocks[0] for r in self._requests.values() if r.blocks]
        self._wrong.lost(failed, [*tables, *(table for _, table in self._ended)])

    def begin_step(self) -> frozenset[int]:
        """Another step is scheduled. What the worker is told with it: the losses that are known since the last one."""
        self._step += 1
        # With async scheduling two steps are under way, and a loss is known before the third is scheduled.
        self._ended = [(step, table) for step, table in self._ended if step >= self._step - 1]
        heard, self._heard = frozenset(self._heard), set()
        return heard

    def matched(self, request: str, num_computed: int) -> int:
        """Tokens beyond `num_computed` that the tiers have: whole blocks of the engine's. A token or more is left to compute."""
        r = self._requests[request]
        if r.looked_up != len(r.tokens):  # the engine asks again at every step that has no room for the request
            r.looked_up, r.found = len(r.tokens), self._look_up(r)
        if self.is_decode_only and len(r.tokens) - r.found > 1:
            return 0
        return max(0, r.found - num_computed)

    def _look_up(self, r: _Request) -> int:
        self._name(r, len(r.tokens))
        for one in (one for every in self.neighbours for one in every):
            one.take_over(r.tokens, r.names)
        end = (len(r.tokens) - 1) // self.align * self.align
        while end:
            there = end
            for part, ranks in zip(self.parts, self.stacks, strict=True):
                for stack in ranks:
                    there = min(there, self._reach(part, stack, r.names, there))
            if there == end:
                return end
            end = there // self.align * self.align
        return 0

    def _reach(self, part: PartGroups, stack: TierStack, names: Sequence[bytes], end: int) -> int:
        """How many of these tokens the part can go on after, as far as this rank's tiers have them."""
        size = self.block_size
        if not part.is_state:
            first = part.groups[0].first_seen(end) // size
            return min(end, (first + stack.beginning(names[first : -(-end // size)])) * size)
        ends = range(end // self.align * self.align, 0, -self.align)
        there = stack.has_any([names[n // size - 1] for n in ends])
        return next((n for n, has in zip(ends, there, strict=True) if has and stack.beginning([names[n // size - 1]])), 0)

    def _name(self, r: _Request, num_tokens: int) -> None:
        if len(r.names) < num_tokens // self.block_size:
            r.names = names_of(r.tokens[:num_tokens], self.block_size, self.model)

    def allocated(self, request: str, blocks: Blocks, num_external: int) -> None:
        """The engine has blocks for a request, so many tokens of which are to be loaded."""
        r = self._requests.get(request)
        if r is not None:
            r.blocks = [list(ids) for ids in blocks]
            r.external = num_external
            r.looked_up = -1  # if the engine asks again, the request was preempted

    def scheduled(self, request: str, blocks: Blocks | None, *, is_whole: bool, num_computed: int, num_new: int) -> StepJobs:
        """A request takes part in a step: after tokens that have K and V, or will be loaded, and with new ones.

        `blocks` are its tables, or what was added to them.
        """
        r = self._requests.get(request)
        if r is None:
            return StepJobs()
        if blocks is not None:
            r.blocks = [list(ids) for ids in blocks] if is_whole else [[*a, *b] for a, b in zip(r.blocks, blocks, strict=True)]
        external, r.external = r.external, 0
        load = num_computed - external, num_computed
        is_right = self._wrong.is_right(r.blocks[0], load[0], num_computed + num_new)
        # A step that starts before what was saved computes it again: the request was preempted, or blocks were lost.
        r.saved = min(r.saved, load[0] // self.block_size * self.block_size)
        # Drafted tokens may be refused and sampled ones may not be known yet: only what has a name is saved.
        save = r.saved, min(num_computed + num_new, len(r.tokens)) // self.block_size * self.block_size
        if external and not load[0]:
            save = max(save[0], load[1] // self.block_size * self.block_size), save[1]
        self._name(r, max(load[1], save[1]))
        r.saved = max(r.saved, save[1])
        steps = num_computed, num_computed + num_new
        first, second = (self._job(request, r, *span, *steps) if span[0] < span[1] else None for span in (load, save))
        return StepJobs(first, second if is_right else None)

    def _job(self, request: str, r: _Request, first: int, end: int, computed: int, reached: int) -> Job:
        names = r.names[first // self.block_size : -(-end // self.block_size)]
        return Job(request, first, end, tuple(names), tuple(map(tuple, r.blocks)), computed, reached)
