"""DecodeGraphs: decode steps as CUDA graphs, one for each size of batch, so that a step is one launch.

A graph reads the cache's batch buffers, whose addresses stay: a replay follows tokens, tables and lengths as they are then.
A batch runs on the smallest graph it fits; rows past it are padding, which writes nothing and attends to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvx.cache.sequence import Sequence
from kvx.runner.model import Model


@dataclass(frozen=True, eq=False)
class Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [bucket, vocab], of the last replay
    workspace: Tensor | None  # the graph knows its address only, so it is held here


class DecodeGraphs:
    def __init__(self, model: Model) -> None:
        self._model = model
        limit = min(model.cache.max_seqs, model.cache.max_tokens)
        self.buckets = [n for n in (1, 2, 4, *range(8, 257, 8)) if n < limit] + [limit]
        self._captured: dict[int, Captured] = {}
        self._pool: Any = None  # graphs never run at once, so they share their memory
        self.replays = 0

    @staticmethod
    def work_on(device: torch.device) -> bool:
        return device.type == "cuda"

    def forward(self, work: Listing[tuple[Sequence, int]]) -> Tensor:
        """Logits of one token a sequence. Good until the next call."""
        bucket = next(b for b in self.buckets if b >= len(work))
        batch = self._model.cache.plan(work, pad_seqs=bucket, pad_tokens=bucket)
        captured = self._captured.get(bucket)
        if captured is None:
            # Twice outside: libraries make their handles and the workspace its size. The same K and V are written again.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._model.forward(batch)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._model.forward(batch)
            self._pool = self._pool or graph.pool()
            captured = self._captured[bucket] = Captured(graph, logits, self._model.workspace)
        captured.graph.replay()
        self.replays += 1
        return captured.logits[: len(work)]

    def reset(self) -> None:
        """Forget all graphs, as one must when weights or cache are replaced."""
        torch.cuda.synchronize(self._model.cache.device)
        self._captured.clear()
        self._pool = None
