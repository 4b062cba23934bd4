"""PackTier: several blocks to a file. What is put comes back, whoever reads, is killed, or damages a file."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest

from kvx.errors import BadArgument, Incompatible, TierError
from kvx.tiers import Block, BlockKind, DiskTier, PackTier, TierOption
from kvx.tiers.pack_file import pack_bytes
from tests.tiers.blocks import KIND, block, files, found, is_right, key, put
from tests.tiers.test_disk_processes import exit_code, in_child, said_until_killed

PAGES = BlockKind({"model": "small", "layout": "pages"}, (8192,))  # whole pages, which can go past the system's cache


def open_packs(path: Path, num_packs: int = 1000, of: int = 16, kind: BlockKind = KIND, **options) -> PackTier:
    """Room for so many packs of so many blocks."""
    return PackTier(path, kind, num_packs * pack_bytes(kind, of), **options)


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_what_is_put_comes_back_in_one_file(tmp_path, direct):
    keys = [key(n) for n in range(20)]
    with open_packs(tmp_path, kind=PAGES, direct=direct) as tier:
        assert tier.put(keys, [block(k, PAGES) for k in keys]).result() == [True] * 20
        assert len(files(tmp_path)) == 1
        assert tier.put(keys, [block(k, PAGES) for k in keys]).result() == [False] * 20
        assert len(files(tmp_path)) == 1
        for wanted in (keys, keys[::-1], keys[3:4], keys[::3], [keys[5], keys[5]]):
            got = tier.get(wanted).result()
            assert all(
                b is not None and bytes(b.buffers[0]) == bytes(block(k, PAGES).buffers[0]) for k, b in zip(wanted, got, strict=True)
            )
        assert tier.get([key(99), keys[1]]).result()[0] is None
        assert tier.has([keys[0], key(99)]).result() == [True, False]
        assert tier.stats.hits == 20 + 20 + 1 + 7 + 2 + 1


def test_random_calls_match_a_dict(tmp_path):
    """Blocks with padding between them; opened anew now and then. Dropping takes a pack's other blocks along, and nothing else."""
    rng, packs, tier = random.Random(3), list[set[int]](), open_packs(tmp_path)
    for _ in range(300):
        match rng.choice("ppggdo"):
            case "p":
                there = set().union(*packs)
                wanted = list(dict.fromkeys(rng.randrange(60) for _ in range(rng.randrange(1, 9))))
                assert put(tier, *wanted) == [n not in there for n in wanted]
                if new := set(wanted) - there:
                    packs.append(new)
            case "g":
                wanted = [rng.randrange(60) for _ in range(6)]
                assert found(tier, *wanted) == [any(n in pack for pack in packs) for n in wanted]
            case "d":
                n = rng.randrange(60)
                mine = [pack for pack in packs if n in pack]
                assert tier.drop([key(n)]).result() == [bool(mine)]
                packs = [pack for pack in packs if n not in pack]
            case "o":
                tier.close()
                tier = open_packs(tmp_path)
        assert tier.num_blocks == sum(map(len, packs))
    tier.close()
    assert len(files(tmp_path)) == len(packs)


def test_the_pack_used_longest_ago_leaves_first(tmp_path):
    with open_packs(tmp_path, 4 * 4, of=1, threads=1) as tier:  # packs of up to 4 blocks: 3 of them, or 2 and what is coming
        room = tier.capacity_bytes
        for n in range(0, 40, 4):
            put(tier, *range(n, n + 4))
            assert sum(f.stat().st_size for f in files(tmp_path)) <= room
            assert found(tier, 0, 1, 2, 3) == [True] * 4
        assert not any(found(tier, 4, 5, 6, 7))
        assert found(tier, 36, 37, 38, 39) == [True] * 4
        assert tier.stats.evicted % 4 == 0
    with pytest.raises(BadArgument, match="one block takes"):
        PackTier(tmp_path / "small", KIND, 100)


@pytest.mark.parametrize("at", [3, 70, 200, -1, -5000, None], ids=str)
def test_a_damaged_pack_is_never_handed_out(tmp_path, at):
    """Changed while it is open, and before it is opened."""
    for is_open in (True, False):
        with open_packs(tmp_path / str(is_open)) as tier:
            put(tier, *range(3))
            put(tier, *range(10, 13))
            file = tier._directory.path_of(tier._where[key(1)])
            data = bytearray(file.read_bytes())
            if at is None:
                del data[-1:]
            else:
                data[at] ^= 1
            file.write_bytes(data)
            if is_open:
                assert found(tier, 0, 1, 2, 10, 11, 12)[3:] == [True] * 3  # found() judges each byte that comes
        with open_packs(tmp_path / str(is_open)) as tier:
            assert found(tier, 0, 1, 2, 10, 11, 12)[3:] == [True] * 3
            if at in (3, 70, 200, None):  # of the header, or the length: seen when it is opened
                assert found(tier, 0, 1, 2) == [False] * 3
            put(tier, 0, 1, 2)
            assert found(tier, 0, 1, 2) == [True] * 3


def test_another_tier_learns_of_it_and_of_what_is_gone(tmp_path):
    with open_packs(tmp_path, refresh_s=0) as mine, open_packs(tmp_path, refresh_s=0) as theirs:
        put(theirs, 1, 2)
        assert found(mine, 2, 1, 3) == [True, True, False]
        mine.drop([key(1)]).result()
        assert theirs.has_now([key(2)]) == [False]
        assert found(theirs, 2) == [False]
        assert put(theirs, 2) == [True]
        assert mine.stats.errors == theirs.stats.errors == mine.stats.refused == theirs.stats.refused == 0


def test_packs_and_files_of_one_block_do_not_meet(tmp_path):
    with open_packs(tmp_path) as tier:
        put(tier, 1)
    with pytest.raises(Incompatible, match="file"):
        DiskTier(tmp_path, KIND, 1 << 20)
    with (
        TierOption.parse(f"disk:{tmp_path}/kv:1GB").open(KIND, packed=True) as tier,
        TierOption.parse(f"disk:{tmp_path}/kv:1GB").open(KIND) as other,
    ):
        assert type(tier) is PackTier
        assert type(other) is DiskTier
        assert tier.path != other.path
    large = BlockKind({"model": "small"}, (8 << 20,))
    with TierOption.parse(f"disk:{tmp_path}/kv:1GB").open(large, packed=True) as tier:
        assert type(tier) is DiskTier


@pytest.mark.parametrize("packed", [False, True], ids=["a file each", "packs"])
def test_memory_that_was_taken_back_is_not_kept(tmp_path, packed):
    with TierOption.parse(f"disk:{tmp_path}:1GB").open(KIND, packed=packed) as tier:
        lent = Block(KIND, block(key(1)).buffers, lambda: False)
        with pytest.raises(TierError, match="taken back"):
            tier.put([key(1)], [lent]).result()
        assert found(tier, 1) == [False]
        assert not [f for f in tier.path.rglob("*") if f.is_file() and f.name != "manifest.json"]
        tier.put([key(1)], [Block(KIND, block(key(1)).buffers, lambda: True)]).result()
        assert found(tier, 1) == [True]


def test_kill_at_100_random_moments(tmp_path):
    """What a child said was kept is found, whole; nothing else is ever read but right."""
    rng, done = random.Random(1), set()
    for trial in range(100):

        def work(say, trial=trial):
            with open_packs(tmp_path, threads=1, of=1000) as tier:
                for n in count(trial << 20, 10):
                    put(tier, *range(n, n + 10))
                    say(n)

        done |= {n + k for n in said_until_killed(work, rng.random() * 0.006) for k in range(10)}
    killed_writing = len(list(tmp_path.glob("??/.*.partial")))
    with open_packs(tmp_path, of=1000) as tier:
        keys = tier.names()
        assert all(b is not None and is_right(k, b) for k, b in zip(keys, tier.get(keys).result(), strict=True))
        assert {key(n) for n in done} <= set(keys)
        assert tier.stats.refused == tier.stats.errors == 0
    assert len(done) >= 1000
    assert killed_writing, "no child was killed in the middle of a file: the test shows nothing"


def test_two_processes_at_once(tmp_path):
    """They put, get, drop and evict the same blocks. Neither ever reads a wrong one."""

    def work(seed: int) -> None:
        rng = random.Random(seed)
        with open_packs(tmp_path, 8, of=1, refresh_s=0, threads=2) as tier:
            for _ in range(150):
                put(tier, *{rng.randrange(12) for _ in range(3)})
                found(tier, *(rng.randrange(12) for _ in range(3)))
                tier.drop([key(rng.randrange(12))]).result()
            assert (tier.stats.refused, tier.stats.errors) == (0, 0)
            assert tier.stats.hits

    pids = [in_child(lambda seed=seed: work(seed)) for seed in (1, 2)]
    assert [exit_code(pid) for pid in pids] == [0, 0]
