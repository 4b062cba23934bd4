"""Mover on a GPU: areas, streams and pinned memory. What it does besides is tested on the CPU, staged in the same way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.ops import backend as backends
from kvx.tiers import DiskTier, HostTier, Mover
from kvx.tiers.block_file import file_bytes
from tests.tiers.movers import KEPT, SPEC, content, filled, is_same, kind_of, names

pytestmark = pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason="needs a GPU and libkvx with CUDA")


def on_gpu() -> list[torch.Tensor]:
    return [t.cuda() for t in filled()]


@pytest.mark.parametrize("tier_name", ["host", "disk"])
def test_blocks_come_back_as_they_were(tmp_path, tier_name):
    kind, cache = kind_of(), on_gpu()
    tier = HostTier(kind, 1 << 20, pin_memory=True) if tier_name == "host" else DiskTier(tmp_path, kind, 24 * file_bytes(kind))
    with tier, Mover(cache, SPEC, [tier], kept=KEPT, max_in_flight_bytes=16 * kind.num_bytes) as mover:
        assert mover.memory.is_pinned
        rng = random.Random(0)
        for turn in range(20):
            numbers = [turn * 100 + n for n in range(20)]
            out, back = rng.sample(range(24), 20), rng.sample(range(24), 20)
            before = [content(cache, SPEC, b) for b in out]
            done = mover.offload(names(*numbers), out)
            for t in cache:  # at once: the stream has read the blocks by then
                t.view(torch.float32).fill_(float("nan"))
            assert mover.onboard(names(*numbers), back) == 20
            assert done.result(10) == 20
            assert all(is_same(want, content(cache, SPEC, b)) for want, b in zip(before, back, strict=True))
            tier.drop(names(*numbers)).result()
            for t in cache:
                t.view(torch.float32).nan_to_num_(nan=float(turn))


def test_quantised_on_the_way():
    kept = replace(KEPT, format="fp8_e4m3_per_token_head_inline")
    kind, cache = kind_of(kept), on_gpu()
    before = [t.clone() for t in cache]
    with HostTier(kind, 1 << 20, pin_memory=True) as tier, Mover(cache, SPEC, [tier], kept=kept) as mover:
        mover.offload(names(*range(24)), range(24)).result(10)
        for t in cache:
            t.zero_()
        assert mover.onboard(names(*range(24)), range(24)) == 24
    for t, was in zip(cache, before, strict=True):
        a, b = t.view(torch.float32).view(-1, 16), was.view(torch.float32).view(-1, 16)
        assert ((a - b).abs() <= 2**-4 * b.abs().amax(1, keepdim=True)).all()


def test_memory_that_is_not_pinned_is_refused():
    kind = kind_of()
    with HostTier(kind, 1 << 20) as tier, pytest.raises(kvx.BadArgument, match=r"HostTier\(pin_memory=True\)"):
        Mover(on_gpu(), SPEC, [tier], kept=KEPT)
