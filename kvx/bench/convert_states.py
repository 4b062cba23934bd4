"""States of a hybrid model's requests from one engine's bytes to another's: rows of `kvx bench convert`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.layout.state_rows import state_row
from kvx.layout.views import layer_views
from kvx.spec import StateSpec
from kvx.spec.layer_specs import layer_specs

MODEL = "Qwen3-Next-80B-A3B"  # 36 layers with a convolution of 8,192 channels and 32 matrices of 128 by 128


@dataclass(frozen=True)
class StatesCase:
    src: str  # rows of kvx/layout/state_rows.py
    dst: str
    tp: str = "1:1"
    requests: int = 64
    layers: int = 36
    state_format: str = ""  # of the destination's matrices; "": f32, as the source's

    @property
    def label(self) -> dict[str, Any]:
        label = {"states": MODEL, "src": self.src, "dst": self.dst, "requests": self.requests, "layers": self.layers, "tp": self.tp}
        return label | ({"matrices": self.state_format} if self.state_format else {})

    def specs(self) -> tuple[list[StateSpec], list[StateSpec]]:
        sides = []
        for row, size, matrices in zip((self.src, self.dst), self.tp.split(":"), ("", self.state_format), strict=True):
            found = next(s.state for s in layer_specs(MODEL, state_format=matrices) if s.state is not None)
            whole = state_row(row).spec(found.planes, num_blocks=self.requests, num_layers=self.layers)
            sides.append([whole.shard(int(size), i) for i in range(int(size))])
        return sides[0], sides[1]

    @property
    def bytes(self) -> int:
        """Read and written, without columns that nobody reads."""
        specs = (spec for side in self.specs() for spec in side)
        return sum(p.num_rows * p.row_bytes for spec in specs for p in spec.planes) * self.requests * self.layers


def cases(device: str) -> Iterator[StatesCase]:
    less: dict[str, Any] = {} if device == "cuda" else {"requests": 16, "layers": 4}
    for src, dst in (
        ("transformers", "vllm.sd"),
        ("vllm.sd", "transformers"),
        ("vllm.sd", "vllm.ds"),
        ("vllm.sd", "sglang"),
        ("sglang", "sglang.host"),
        ("sglang.host", "vllm.sd"),
        ("transformers", "llama_cpp"),
        ("llama_cpp", "vllm.ds"),
    ):
        yield StatesCase(src, dst, **less)
    yield StatesCase("vllm.sd", "vllm.sd", tp="4:8", **less)
    yield StatesCase("transformers", "vllm.sd", tp="1:4", **less)
    yield StatesCase("vllm.sd", "vllm.sd", state_format="bf16", **less)
    yield StatesCase("transformers", "vllm.sd", state_format="bf16", **less)


def torch_peer(case: StatesCase, device: str) -> Callable[[], object] | None:
    """torch's way: every plane of every layer copied from view to view, all requests in their order."""
    if case.tp != "1:1":
        return None
    (src,), (dst,) = case.specs()
    pairs: list[tuple[Tensor, Tensor]] = []
    sides = [layer_views(kvx.allocate_buffers(spec, device), spec) for spec in (dst, src)]
    for there, here in zip(*sides, strict=True):
        from_plane = {view.plane: view.tensor for view in here}
        for view in there:
            a, b = view.tensor, from_plane[view.plane]
            assert isinstance(a, Tensor)
            assert isinstance(b, Tensor)
            pairs.append((a, b))

    def copy() -> None:
        for a, b in pairs:
            a.copy_(b)

    with torch.no_grad():
        copy()
    return copy
