"""The worker's side: blocks between the engine's memory and the tiers, converted on the way.

A part's blocks in the tiers have all its layers; an engine may have them in several groups with a table each, and each of those in
several runs of layers. Each run is a conversion of its own into, or out of, the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvx.connector.groups import PartGroups, Segment
from kvx.connector.jobs import SKIP, Job, Tables, complete, needed, tables
from kvx.connector.tier_stack import TierStack
from kvx.layout.buffers import allocate_buffers
from kvx.layout.plan import Plan, plan
from kvx.ops.move.convert import convert
from kvx.spec import CacheSpec
from kvx.tiers import Block

Rule = Callable[[Tables, int, int], list[bool]]
_AT_ONCE = 64  # blocks of the tiers that are in memory together


@dataclass(frozen=True, eq=False)
class LayerRun:
    """Layers of a group, with their memory."""

    segment: Segment
    buffers: Sequence[Tensor]


class PartMover:
    """One part's blocks there and back."""

    def __init__(self, part: PartGroups, spec: CacheSpec, stack: TierStack, runs: Sequence[LayerRun]) -> None:
        self.part, self.spec, self.stack, self.runs = part, spec, stack, list(runs)
        self._device = runs[0].buffers[0].device
        self._plans: dict[tuple[int, int, bool], Plan] = {}

    def save(self, job: Job) -> int:
        """Blocks that are new in the tiers."""
        whole = self._places(job, complete, all)
        if self.part.window:  # the engine gave back what this step's tokens do not see
            seen = self.part.groups[0].first_seen(job.computed)
            whole = [ok and (job.first_name(self.spec.block_size) + n) * self.spec.block_size >= seen for n, ok in enumerate(whole)]
        wanted = [n for n, ok in enumerate(whole) if ok]
        there = self.stack.has([job.names[n] for n in wanted])
        wanted = [n for n, has in zip(wanted, there, strict=True) if not has]
        for start in range(0, len(wanted), _AT_ONCE):
            self._save(job, wanted[start : start + _AT_ONCE])
        return len(wanted)

    def _save(self, job: Job, places: list[int]) -> None:
        made = allocate_buffers(replace(self.spec, num_blocks=len(places)), self._device)
        self._convert(job, places, made, is_load=False)
        host = [t.cpu() for t in made]  # waits for the device
        self.stack.put([job.names[n] for n in places], [self.stack.kind.block([t]) for t in host])

    def load(self, job: Job) -> list[int]:
        """Places of the job's names that were not to be had: what they were for is as it was, or partly written."""
        wanted = [n for n, ok in enumerate(self._places(job, needed, any)) if ok]
        failed = []
        for start in range(0, len(wanted), _AT_ONCE):
            places = wanted[start : start + _AT_ONCE]
            found = self.stack.get([job.names[n] for n in places])
            came = [(n, block) for n, block in zip(places, found, strict=True) if block is not None]
            failed += [n for n, block in zip(places, found, strict=True) if block is None]
            if came:
                self._load(job, [n for n, _ in came], [block for _, block in came])
        return failed

    def _load(self, job: Job, places: list[int], blocks: list[Block]) -> None:
        self._convert(job, places, [block.buffers[0].to(self._device) for block in blocks], is_load=True)

    def _places(self, job: Job, rule: Rule, over: Callable[[Iterable[bool]], bool]) -> list[bool]:
        """For each of the job's names, whether the rule holds in any, or in all, of the part's groups."""
        answers: list[list[bool]] = [[] for _ in job.names]
        for group in self.part.groups:
            t = tables(job, group.index, engine_size=group.block_size, tier_size=self.spec.block_size)
            for place, ok in zip(t.tier, rule(t, group.block_size, self.spec.block_size), strict=True):
                if place != SKIP:
                    answers[place].append(ok)
        return [over(found) for found in answers]

    def _convert(self, job: Job, places: list[int], blocks: Sequence[Tensor], *, is_load: bool) -> None:
        at = {place: n for n, place in enumerate(places)}
        for n, run in enumerate(self.runs):
            group, pieces = run.segment.group, run.segment.pieces
            t = tables(job, group.index, engine_size=group.block_size, tier_size=self.spec.block_size)
            engine = [i * pieces + k if i != SKIP else SKIP for i in t.engine for k in range(pieces)]
            mine = [at.get(place, SKIP) for place in t.tier]
            p = self._plan(n, len(places), is_load)
            if is_load:
                convert(list(blocks), list(run.buffers), plan=p, src_blocks=mine, dst_blocks=engine)
            else:
                convert(list(run.buffers), list(blocks), plan=p, src_blocks=engine, dst_blocks=mine)

    def _plan(self, run: int, num_blocks: int, is_load: bool) -> Plan:
        key = run, num_blocks, is_load
        if key not in self._plans:
            tier, engine = replace(self.spec, num_blocks=num_blocks), self.runs[run].segment.spec
            # Heads are counted as the rank has them on both sides; layers as the part has them, or the pipeline's stage.
            engine = engine.replaced(head_start=tier.head_start, layer_start=tier.layer_start + engine.layer_start)
            here = engine.layer_start, engine.layer_start + engine.num_layers
            self._plans[key] = plan(tier, engine, partial=True) if is_load else plan(engine, tier, layers=here)
        return self._plans[key]


def runs_of(
    segments: Sequence[Segment],
    caches: Mapping[str, Tensor],
    scales: Mapping[str, tuple[float, float]] | None = None,  # of K and V, in a format with a scale for each tensor
) -> list[LayerRun]:
    """With the tensors that the engine registered, by the names of their layers."""
    found = []
    for s in segments:
        names = s.group.layer_names[s.first : s.first + len(s.layers)]
        tensors = [caches[name] for name in names]
        buffers = [_from_first_to_last(tensors)] if s.is_whole else [_in_memory_order(t) for t in tensors]
        if scales is not None:
            device = tensors[0].device
            buffers += [torch.tensor([scales[name][plane] for name in names], dtype=torch.float32).to(device) for plane in range(2)]
        found.append(LayerRun(s, buffers))
    return found


def _in_memory_order(t: Tensor) -> Tensor:
    """Engines show memory permuted. The segment's spec says what the memory holds, and a permuted view of as many heads as
    tokens could be read either way."""
    return t.permute(sorted(range(t.dim()), key=t.stride, reverse=True))


def _from_first_to_last(tensors: Sequence[Tensor]) -> Tensor:
    """The memory of layers that stand inside blocks: from the first one's start to the last one's end."""
    first, last = tensors[0], tensors[-1]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(last.shape, last.stride(), strict=True))
    return first.as_strided((last.storage_offset() - first.storage_offset() + reach,), (1,))
