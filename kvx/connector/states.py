"""The worker's side of states: a request's running state goes to the tiers where it stands at a block's end, and comes back there.

A state is not made of tokens: an engine has it after the last token of a step, in one block of each of the part's groups. So it is
kept where a step ends at the end of a block of the tiers, under that block's name, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvx.connector.groups import Group, PartGroups
from kvx.connector.jobs import NULL, Job
from kvx.connector.tier_stack import TierStack
from kvx.connector.worker import LayerRun
from kvx.layout.buffers import allocate_buffers
from kvx.layout.plan import Plan, plan
from kvx.ops.move.convert import convert
from kvx.spec import StateSpec


class StateMover:
    """One part's states there and back: what PartMover is for K and V."""

    def __init__(self, part: PartGroups, spec: StateSpec, stack: TierStack, runs: Sequence[LayerRun]) -> None:
        self.part, self.spec, self.stack, self.runs = part, spec, stack, list(runs)
        self._device = runs[0].buffers[0].device
        self._plans: dict[tuple[int, bool], Plan] = {}

    def save(self, job: Job) -> int:
        """States that are new in the tiers: 1 or 0."""
        places = [_standing(job, run.segment.group) for run in self.runs]
        if NULL in places or all(self.stack.has([job.names[-1]])):
            return 0
        made = allocate_buffers(self.spec, self._device)
        for n, (run, block) in enumerate(zip(self.runs, places, strict=True)):
            convert(list(run.buffers), made, plan=self._plan(n, is_load=False), src_blocks=[block], dst_blocks=[0])
        self.stack.put([job.names[-1]], [self.stack.kind.block([t.cpu() for t in made])])
        return 1

    def load(self, job: Job) -> list[int]:
        """Places of the job's names that were not to be had: the last, or none."""
        (found,) = self.stack.get([job.names[-1]])
        if found is None:
            return [len(job.names) - 1]
        here = [t.to(self._device) for t in found.buffers]
        for n, run in enumerate(self.runs):
            for block in _running(job, run.segment.group):
                convert(here, list(run.buffers), plan=self._plan(n, is_load=True), src_blocks=[0], dst_blocks=[block])
        return []

    def _plan(self, run: int, *, is_load: bool) -> Plan:
        key = run, is_load
        if key not in self._plans:
            engine = self.runs[run].segment.spec
            here = engine.layer_start, engine.layer_start + engine.num_layers
            self._plans[key] = plan(self.spec, engine, partial=True) if is_load else plan(engine, self.spec, layers=here)
        return self._plans[key]


def _standing(job: Job, group: Group) -> int:
    """The block with the state after the job's last token; NULL where there is none, or it has gone on."""
    # With async scheduling a token has no name before the step after it. By then only a state that stays is still there.
    if job.end != job.reached and not (group.keeps_states and job.end == job.computed):
        return NULL
    return _block(job, group, job.end)


def _running(job: Job, group: Group) -> set[int]:
    """Where a step that goes on after the job's tokens reads its state: at their end, and where it will stand after the step.

    An engine may have copied the one to the other before it calls its connector (vLLM 0.32, with prefix caching).
    """
    return {_block(job, group, job.end), _block(job, group, job.reached)} - {NULL}


def _block(job: Job, group: Group, num_tokens: int) -> int:
    ids, n = job.blocks[group.index], (num_tokens - 1) // group.block_size
    return ids[n] if 0 <= n < len(ids) else NULL
