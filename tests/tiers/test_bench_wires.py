"""kvx bench wires, in small and without a wire: what it moves is what it says."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext

import pytest
import torch

import kvx
from kvx.bench import wires
from kvx.bench.wires import RING, Ring, fill, measure, show, spec_of, to_disk


def test_the_ring_holds_the_cache_and_gives_it_back():
    spec = spec_of(8 * (RING + 1))
    cache = fill(spec)
    want = [t.clone() for t in cache]
    ring = Ring(cache, spec, "bf16")
    for k in range(RING + 1):
        ring.convert(k)
        for t in cache:
            t.view(spec.num_blocks, -1)[8 * k : 8 * k + 8] = 0
        ring.restore(k)
    assert all(torch.equal(a, b) for a, b in zip(cache, want, strict=True))


def test_disk_rows(tmp_path):
    rows = to_disk(tmp_path, 16, ("bf16",), 1)
    assert [(r.path, r.num_tokens, r.raw_bytes, r.bytes) for r in rows] == [
        ("disk write, bf16 -> bf16", 256, 16 << 20, 16 << 20),
        ("disk read, bf16 -> bf16", 256, 16 << 20, 16 << 20),
    ]
    assert all(min(*r.raw_s, *r.converted_s) > 0 for r in rows)
    assert not list(tmp_path.iterdir())
    assert show({"not_installed": ["nixl", "mooncake"]}) == " nixl is not installed\n mooncake is not installed"


def test_rows_are_said_as_they_are_measured(tmp_path, monkeypatch):
    rows = to_disk(tmp_path, 8, ("bf16",), 1)
    events: list[str] = []

    class Pool:  # in place of another process
        def submit(self, call, *args):
            future: Future[list[wires.Row]] = Future()
            future.set_result(rows)
            return future

    monkeypatch.setattr(wires, "ProcessPoolExecutor", lambda *args: nullcontext(Pool()))
    monkeypatch.setattr(wires.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(wires, "over_wire", lambda wire, *args: events.append(wire) or [])
    measure(num_blocks=8, repeats=1, folder=tmp_path, say=events.append)
    assert [e.split(",")[0].strip() for e in events] == ["disk write", "disk read", "nixl", "mooncake"]


def test_blocks_come_in_chunks():
    with pytest.raises(kvx.BadArgument, match="12 blocks"):
        measure(num_blocks=12)
