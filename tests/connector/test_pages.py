"""Pages as blocks of bytes, and the tiers that workers make and a manager finds. No vLLM here."""

from __future__ import annotations

import pytest
import torch

from kvx.connector.pages import Pages, PageTiers
from kvx.errors import BadArgument
from kvx.tiers import TierOption


def stacks(tmp_path, **facts) -> PageTiers:
    return PageTiers([TierOption("disk", 10**8, tmp_path)], {"model": "m", **facts}, num_ranks=2, group_ids=[3, 7])


def test_pages_of_a_block_are_one_run_of_bytes():
    a, b = torch.randint(-128, 128, (2, 5, 96), dtype=torch.int8)
    pages = Pages([(a, 96), (b, 64)])  # the second's pages are padded
    data, before = pages.read(3), b.clone()
    assert data.tolist() == torch.cat([a[3], b[3, :64]]).view(torch.uint8).tolist()
    pages.write(1, data)
    assert torch.equal(a[1], a[3])
    assert torch.equal(b[1, :64], b[3, :64])
    assert torch.equal(b[1, 64:], before[1, 64:])


def test_a_manager_finds_what_every_rank_has(tmp_path):
    """It never sees a page: how large one is, the workers' directory says."""
    manager = stacks(tmp_path)
    assert not manager.is_there(7, b"key")
    made = [stacks(tmp_path).make(rank, 1, 160) for rank in range(2)]  # group 7 is the second
    for rank, stack in enumerate(made):
        assert not manager.is_there(7, b"key")
        assert not manager.is_whole(7, b"key")
        stack.put([b"key"], [stack.kind.block([torch.full((160,), rank, dtype=torch.uint8)])])
    assert manager.is_there(7, b"key")
    assert manager.is_whole(7, b"key")
    assert not manager.is_there(3, b"key")
    assert [int(stack.get([b"key"])[0].buffers[0][0]) for stack in made] == [0, 1]


def test_a_damaged_page_is_a_miss(tmp_path):
    manager = stacks(tmp_path)
    for rank in range(2):
        stack = stacks(tmp_path).make(rank, 0, 160)
        stack.put([b"key"], [stack.kind.block([torch.zeros(160, dtype=torch.uint8)])])
    path = next(tmp_path.rglob("*.kvx"))
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)
    assert manager.is_there(3, b"key")
    assert not manager.is_whole(3, b"key")


def test_other_facts_are_other_folders(tmp_path):
    for rank in range(2):
        stack = stacks(tmp_path).make(rank, 0, 160)
        stack.put([b"key"], [stack.kind.block([torch.zeros(160, dtype=torch.uint8)])])
    assert stacks(tmp_path).is_whole(3, b"key")
    assert not stacks(tmp_path, ranks="tp4").is_whole(3, b"key")


def test_host_memory_is_shared_in_a_process():
    tiers = [TierOption("host", 10**6)]
    worker, manager = (PageTiers(tiers, {"model": "host"}, num_ranks=1, group_ids=[0]) for _ in range(2))
    stack = worker.make(0, 0, 64)
    assert not manager.is_whole(0, b"key")
    stack.put([b"key"], [stack.kind.block([torch.zeros(64, dtype=torch.uint8)])])
    assert manager.is_whole(0, b"key")


@pytest.mark.parametrize("tier", ["nixl:10.0.0.7:5700:1GB", "mooncake:10.0.0.7:50051"])
def test_a_store_without_folders_is_refused(tier):
    with pytest.raises(BadArgument, match=f"tier {tier.removesuffix(':1GB')}: pages .* go to host:SIZE or disk:DIR"):
        PageTiers([TierOption.parse(tier)], {"model": "m"}, num_ranks=1, group_ids=[0])
