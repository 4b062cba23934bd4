"""Conversions between a device and pinned host memory: by a kernel that reads or writes the host, or by the copy engine."""

from __future__ import annotations

import pytest
import torch

import kvx
from kvx.ops import backend as backends

pytestmark = pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"cuda: {backends.reason_missing('cuda')}")
BLOCKS, NHD, HND = "block | layer kv token head dim", "layer kv | block token head dim", "layer kv | block head token dim"


def make(layout: str, **change) -> kvx.CacheSpec:
    return kvx.CacheSpec(
        **{"num_blocks": 6, "block_size": 16, "num_kv_heads": 8, "head_dim": 128, "num_layers": 8, "layout": layout} | change
    )


def filled(spec: kvx.CacheSpec, device: str, pin: bool = False) -> list[torch.Tensor]:
    buffers = kvx.allocate_buffers(spec, device, pin_memory=pin)
    for i, b in enumerate(buffers):
        b.copy_(torch.arange(b.numel(), dtype=torch.int32).mul_(i + 7).to(torch.uint8))
    return buffers


@pytest.mark.parametrize(("src", "dst"), [(BLOCKS, BLOCKS), (NHD, HND), ("block layer kv head token dim",) * 2, (HND, BLOCKS)])
@pytest.mark.parametrize("to_host", [True, False])
def test_there_and_back(src, dst, to_host):
    a, b = make(src), make(dst, num_blocks=9)
    plan = kvx.plan(a, b, blocks=([4, 1, 2, 3], [8, 0, 1, 2]))
    source = filled(a, "cuda" if to_host else "cpu", not to_host)
    target = kvx.allocate_buffers(b, "cpu" if to_host else "cuda", pin_memory=to_host)
    want = kvx.allocate_buffers(b)
    kvx.convert([t.cpu() for t in source], want, plan=plan, backend="torch")
    kvx.convert(source, target, plan=plan)
    torch.cuda.synchronize()
    assert all(torch.equal(x.cpu(), y) for x, y in zip(target, want, strict=True))


def test_plain_copies_are_captured_and_replayed():
    spec = make(BLOCKS)  # 512 KiB a block: the copy engine's
    source, target = filled(spec, "cuda"), kvx.allocate_buffers(spec, pin_memory=True)
    bound = kvx.bind(kvx.plan(spec, spec), source, target)
    bound.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.run()
    for b in source:
        b.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y.cpu()) for x, y in zip(target, source, strict=True))


def test_unpinned_memory_is_refused():
    spec = make(NHD)
    with pytest.raises(kvx.BadArgument, match="not pinned"):
        kvx.convert(filled(spec, "cuda"), kvx.allocate_buffers(spec), plan=kvx.plan(spec, spec))
