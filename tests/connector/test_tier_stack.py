"""TierStack: several tiers as one."""

from __future__ import annotations

import threading

import pytest
import torch

from kvx.connector.tier_stack import TierStack
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, DiskTier, HostTier, TierError

SPEC = CacheSpec(1, 4, 1, 8, layout="block | kv layer token head dim", format="f32", num_layers=1, model="of a test")
KIND = BlockKind.of(SPEC)


@pytest.mark.parametrize("is_broken", [True, False], ids=["another tier fails", "none fails"])
def test_put_returns_when_no_tier_reads_the_blocks(tmp_path, monkeypatch, is_broken):
    host, disk = HostTier(KIND, 1 << 20), DiskTier(tmp_path, KIND, 1 << 20)
    block = KIND.block([torch.full((KIND.num_bytes,), 7, dtype=torch.uint8)])
    began, write = threading.Event(), disk._put

    def slow(*given):
        began.set()
        threading.Event().wait(0.3)  # long enough for a caller that does not wait to overwrite the block
        return write(*given)

    def broken(*given):
        began.wait()
        raise TierError("this tier is broken")

    monkeypatch.setattr(disk, "_put", slow)
    if is_broken:
        monkeypatch.setattr(host, "_put", broken)
        with pytest.raises(TierError, match="broken"):
            TierStack(KIND, [host, disk]).put([b"n" * 16], [block])
    else:
        TierStack(KIND, [host, disk]).put([b"n" * 16], [block])
    block.buffers[0].fill_(9)  # as the next block's bytes would
    kept = disk.get([b"n" * 16]).result()[0]
    assert kept is not None
    assert (kept.buffers[0] == 7).all()
