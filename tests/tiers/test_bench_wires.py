"""kvx bench wires, in small and without a wire: what it moves is what it says."""

from __future__ import annotations

import pytest
import torch

import kvx
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
    shown = show({"rows": [r.__dict__ for r in rows], "not_installed": ["nixl"]})
    assert "disk read" in shown
    assert "nixl is not installed" in shown


def test_blocks_come_in_chunks():
    with pytest.raises(kvx.BadArgument, match="12 blocks"):
        measure(num_blocks=12)
