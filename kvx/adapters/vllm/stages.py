"""Stages of vLLM's pipeline: which layers each has, and what the stages before one lost.

A stage keeps blocks of its own layers, of a kind that says which: `layer_start` and `num_layers`. Engines with other stages, or
with one, find them as they find other ranks' heads (kvx/connector/store_kinds.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices

from kvx.connector.groups import PartGroups
from kvx.connector.lost import Agree
from kvx.errors import Unsupported

_TAG = 0x4B5658  # vLLM sends what a stage computed over the same group, with tag 0


class Stages:
    """Of one engine. Its scheduler sees the first stage's groups alone, and the others' layers follow from vLLM's own rule."""

    def __init__(self, config: Any, parts: Sequence[PartGroups]) -> None:
        count = config.parallel_config.pipeline_parallel_size
        self._spans: list[tuple[int, int]] = []  # first layer, and one past the last; [] of one stage
        if count == 1:
            return
        if len(parts) != 1 or parts[0].is_state or parts[0].window:
            kinds = ["states" if p.is_state else f"a window of {p.window} tokens" if p.window else "a full view" for p in parts]
            raise Unsupported(
                f"KvxConnector: pipeline_parallel_size is {count}, and layers have {', '.join(kinds)}. With several stages it "
                "takes models all of whose layers see all tokens. Run this model with pipeline_parallel_size=1."
            )
        layers = config.model_config.hf_text_config.num_hidden_layers
        self._spans = [get_pp_indices(layers, n, count) for n in range(count)]

    def of(self, part: PartGroups) -> list[PartGroups]:
        """The part's layers in every stage."""
        return [part.stage(*span) for span in self._spans] or [part]

    def here(self, part: PartGroups) -> PartGroups:
        """This worker's. Unsupported where vLLM gave it other layers than its rule says."""
        if not self._spans:
            return part
        mine = part.stage(*self._spans[get_pp_group().rank_in_group])
        if mine.layers != part.layers:
            raise Unsupported(
                f"KvxConnector: stage {get_pp_group().rank_in_group} of the pipeline has layers {list(part.layers)}; by vLLM's "
                f"rule it has {list(mine.layers)}. It was not read. Run this model with pipeline_parallel_size=1."
            )
        return mine


class LeastSoFar:
    """For each number the least that any tensor parallel rank of this stage has, or a stage before it.

    Stages after it are not asked: they run later, and what they lost is in nothing that this one computes. Waiting for them would
    never end, since they wait for what it computes. Numbers are on the host, and nobody waits for a device.
    """

    def __init__(self) -> None:
        self._sent: Any = None

    def __call__(self, numbers: list[int]) -> list[int]:
        found, stages = torch.tensor(_least_of_ranks(numbers), dtype=torch.int64), get_pp_group()
        if not stages.is_first_rank:
            before = torch.empty_like(found)
            torch.distributed.recv(before, stages.prev_rank, group=stages.cpu_group, tag=_TAG)
            found = torch.minimum(found, before)
        if not stages.is_last_rank:
            if self._sent is not None:
                self._sent.wait()  # the next stage took it before it began the step in which it was sent
            self._sent = torch.distributed.isend(found, stages.next_rank, group=stages.cpu_group, tag=_TAG)
        return [int(n) for n in found]


def agreement(config: Any) -> Agree:
    """How this worker and the others come to the same numbers."""
    if config.parallel_config.pipeline_parallel_size > 1:
        return LeastSoFar()
    return _least_of_ranks if config.parallel_config.tensor_parallel_size > 1 else list


def _least_of_ranks(numbers: list[int]) -> list[int]:
    found, ranks = torch.tensor(numbers, dtype=torch.int64), get_tp_group()
    if ranks.world_size > 1:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=ranks.cpu_group)
    return [int(n) for n in found]
