"""A decode step of the hybrid ops in a CUDA graph: replayed with other slots, starts and rows it is the step called anew."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kvx.ops import backend as backends
from kvx.ops.attention.sparse import attention_sparse
from kvx.ops.entry.append_swa import append_swa
from kvx.ops.entry.compress import compress
from kvx.ops.entry.index_scores import index_scores
from kvx.ops.entry.step import Step
from kvx.ops.entry.tail import Tail
from kvx.ops.entry.topk import topk
from kvx.quant.rows import RowCodec
from tests import compare
from tests.hybrid.ops import hybrid_cases as cases

pytestmark = pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"cuda: {backends.reason_missing('cuda')}")
HEADS, INDEX_HEADS, RATIO, K, PAGES = 16, 8, 4, 64, 40
STEPS = [  # slots and positions of four sequences; the first is captured
    ((0, 1, 2, 3), (3, 100, 127, 512)),
    ((3, -1, 2, 0), (513, 0, 128, 4)),
    ((-1, -1, -1, -1), (0, 0, 0, 0)),
    ((5, 3, 1, 4), (1000, 514, 101, 7)),
]


class Layer:
    """A layer's memory, and a decode step on it with every tensor given."""

    def __init__(self, generator: torch.Generator) -> None:
        device = "cuda"
        self.window = cases.poisoned(RowCodec("fp8_v4", 512, 64), 6, 131, device)
        self.positions = torch.full((6, 131), -1, dtype=torch.int32, device=device)
        self.tails = [Tail(RATIO, dim, 6, overlap=True, device=device) for dim in (512, 128)]
        self.block_table = torch.arange(6 * PAGES, dtype=torch.int32, device=device).view(6, PAGES)
        self.entries = cases.poisoned(RowCodec("fp8_v4", 512, 64), 6 * PAGES, 16, device)
        self.keys = cases.poisoned(RowCodec("index_fp8", 128), 6 * PAGES, 16, device)
        every = torch.arange(6 * PAGES * 16, device=device)
        self.entries.write(every, cases.randn(generator, len(every), 512, device=device))
        self.keys.write(every, cases.randn(generator, len(every), 128, device=device))
        self.cos, self.sin = cases.tables(64, device)
        self.step = Step.of(STEPS[0][0], (1,) * 4, STEPS[0][1], device)
        widths = {
            "x": (512,), "q": (HEADS, 512), "kv": (1024,), "score": (1024,), "index_q": (INDEX_HEADS, 128), "index_kv": (256,),
            "index_score": (256,),
        }  # fmt: skip
        self.x = {name: cases.randn(generator, 4, *shape, dtype=torch.bfloat16, device=device) for name, shape in widths.items()}
        self.weights = cases.randn(generator, 4, INDEX_HEADS, device=device)
        self.scores = torch.zeros(4, PAGES * 16, device=device)
        self.selected = torch.zeros(4, K, dtype=torch.int32, device=device)
        self.out, self.lse = torch.zeros_like(self.x["q"]), torch.zeros(4, HEADS, device=device)

    def decode(self) -> None:
        x, turn = self.x, {"cos": self.cos, "sin": self.sin}
        append_swa(self.window, self.positions, x["x"], self.step, **turn)
        compress(self.tails[0], x["kv"], x["score"], self.entries, self.block_table, self.step, **turn)
        compress(self.tails[1], x["index_kv"], x["index_score"], self.keys, self.block_table, self.step, **turn, hadamard=True)
        index_scores(x["index_q"], self.weights, self.keys, self.block_table, self.step, ratio=RATIO, out=self.scores)
        topk(self.scores, K, out=self.selected)
        attention_sparse(
            x["q"], self.window, self.positions, self.step, window_tokens=128, entries=self.entries, block_table=self.block_table,
            selected=self.selected, ratio=RATIO, **turn, out=self.out, lse=self.lse,
        )  # fmt: skip

    def set(self, slots: tuple[int, ...], starts: tuple[int, ...], generator: torch.Generator) -> None:
        self.step.slots.copy_(torch.tensor(slots, dtype=torch.int32))
        self.step.starts.copy_(torch.tensor(starts, dtype=torch.int32))
        for x in self.x.values():
            x.copy_(torch.randn(x.shape, generator=generator))

    def everything(self) -> dict[str, Tensor]:
        states = {f"tail {i}": tail.state for i, tail in enumerate(self.tails)}
        pages = {"window": self.window.pages, "entries": self.entries.pages, "keys": self.keys.pages}
        rest = {"positions": self.positions, "scores": self.scores, "selected": self.selected, "out": self.out, "lse": self.lse}
        return states | pages | rest


def test_a_replayed_step_is_the_step(generator):
    captured = Layer(generator)
    warm = copy.deepcopy(captured)
    warm.decode()  # modules load before the capture
    torch.cuda.synchronize()
    eager = copy.deepcopy(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.decode()
    for slots, starts in STEPS:
        seed = int(torch.randint(0, 2**31, (), generator=generator))
        for layer in (captured, eager):
            layer.set(slots, starts, torch.Generator().manual_seed(seed))
        graph.replay()
        eager.decode()
        torch.cuda.synchronize()
        for name, got in captured.everything().items():
            compare.bitwise(got, eager.everything()[name], f"{name} of {slots}")
    assert (captured.selected[0] >= 0).any()
    assert torch.isfinite(captured.out).all()
