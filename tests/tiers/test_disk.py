"""DiskTier: damage is never read, restarts find what was there, the capacity holds, errors are clear."""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvx
from kvx.tiers import Block, BlockKind, DiskTier, TierError, block_file, block_io, disk
from tests.tiers.blocks import KIND, block, files, found, key, open_tier, put


def test_damage_is_never_read(tmp_path):
    rng, events = random.Random(0), []
    with open_tier("disk", tmp_path, 64, on_event=events.append) as tier:
        put(tier, *range(4))
        paths = [tier._directory.path_of(key(n)) for n in range(4)]
        good = [p.read_bytes() for p in paths]
        other = replace(KIND, manifest={**KIND.manifest, "head_start": 4})
        for trial in range(1000):
            n, kind = rng.randrange(4), ["bit", "bit", "cut", "swap", "longer", "kind"][trial % 6]
            data = bytearray(good[n])
            if kind == "bit":
                # Half of them where there is something to hit: most of the header is padding.
                at = rng.randrange(len(data)) if trial % 12 else rng.choice([*range(400), *range(4096, len(data))])
                data[at] ^= 1 << rng.randrange(8)
            elif kind == "cut":
                del data[rng.randrange(len(data)) :]
            elif kind == "longer":
                data += bytes(rng.randrange(1, 99))
            elif kind == "swap":
                data = good[(n + 1) % 4]
            else:
                with paths[n].open("wb") as file:
                    block_file.write_block(file, key(n), block(key(n), other))
                data = paths[n].read_bytes()
            paths[n].write_bytes(data)
            del events[:]
            assert tier.get([key(n)]).result() == [None], kind
            assert [e.kind for e in events] == ["refused"], kind
            assert kind != "kind" or "head_start: 0 here, 4 there" in events[0].detail
            assert not paths[n].exists()
            paths[n].write_bytes(good[n])
        assert tier.stats.refused == 1000
        assert found(tier, *range(4)) == [True] * 4


def test_put_replaces_a_file_of_a_wrong_size(tmp_path):
    with open_tier("disk", tmp_path, 4) as tier:
        put(tier, 1)
        os.truncate(tier._directory.path_of(key(1)), 100)
        assert tier.has([key(1)]).result() == [False]
        assert put(tier, 1) == [True]
        assert found(tier, 1) == [True]
        assert tier.num_blocks == 1


@pytest.mark.parametrize("name", ["model", "head_start"])
def test_a_directory_of_another_kind_is_refused(tmp_path, name):
    open_tier("disk", tmp_path, 4).close()
    other = replace(KIND, manifest={**KIND.manifest, name: 7})
    with pytest.raises(kvx.Incompatible, match=f"{name}: 7 here"):
        disk.DiskTier(tmp_path, other, 1 << 20)
    claim = tmp_path / "manifest.json"
    for damaged in (b"{", b"\xff", b"[]", b""):
        claim.write_bytes(damaged)
        with pytest.raises(kvx.BadArgument, match=f"DiskTier: {claim} is damaged: .*[^.]\\. Remove it, or give another directory"):
            open_tier("disk", tmp_path, 4)


def test_restart_finds_the_same_blocks_in_the_same_order(tmp_path):
    with open_tier("disk", tmp_path, 5) as tier:
        put(tier, *range(5))
        found(tier, 0, 3)  # used longest ago: 1, 2, 4, 0, 3
    events = []
    with open_tier("disk", tmp_path, 5, on_event=events.append) as tier:
        assert tier.num_blocks == 5
        put(tier, 10, 11, 12, 13)
    assert [e.key for e in events if e.kind == "evicted"] == [key(n) for n in (1, 2, 4, 0)]
    with open_tier("disk", tmp_path, 2) as tier:  # a smaller one: room is made by the next put
        put(tier, 14)
        assert tier.num_blocks == 2 == len(files(tmp_path))
        assert found(tier, 13, 14) == [True, True]


def test_capacity_holds_at_every_moment(tmp_path, monkeypatch):
    counts, real = [], block_file.write_block

    def count(*args):
        real(*args)
        counts.append(len(files(tmp_path)))  # unfinished ones too

    monkeypatch.setattr(block_io, "write_block", count)
    with open_tier("disk", tmp_path, 4) as tier:
        for f in [tier.put([key(n)], [block(key(n))]) for n in range(60)]:
            f.result()
        assert len(files(tmp_path)) == 4
    assert len(counts) == 60
    assert max(counts) <= 5


def test_hits_of_another_tier_keep_a_block(tmp_path):
    with open_tier("disk", tmp_path, 3) as one, open_tier("disk", tmp_path, 3) as two:
        put(one, 1, 2, 3)
        assert found(two, 1) == [True]
        put(one, 4)
        assert found(one, 1, 2, 3, 4) == [True, False, True, True]


def test_what_another_tier_wrote_and_removed_is_learnt(tmp_path):
    with open_tier("disk", tmp_path, 8, refresh_s=0) as one, open_tier("disk", tmp_path, 8, refresh_s=0) as two:
        for n in range(0, 40, 2):
            put(one, n)
            put(two, n + 1)
            assert len(files(tmp_path)) <= 8
        one.drop([key(n) for n in range(40)]).result()
        put(two, 50)
        assert two.num_blocks == 1


def test_leftovers_of_killed_writers_go_after_a_grace_time(tmp_path):
    with open_tier("disk", tmp_path, 4) as tier:
        put(tier, 1)
    old, young, claim = (tmp_path / n for n in ("ab/.ab12.9.1.partial", "ab/.ab12.9.2.partial", ".manifest.json.9.1.partial"))
    # Not a tier's names: somebody else's.
    names = "report.partial", ".1.partial", "ab/download.partial", "ab/.cd12.9.1.partial", "ab/.ab12.partial"
    others = [tmp_path / name for name in names]
    (tmp_path / "ab").mkdir(exist_ok=True)
    for path in (old, young, claim, *others):
        path.write_bytes(b"half")
    for path in (old, claim, *others):
        os.utime(path, (time.time() - 700,) * 2)
    folder = tmp_path / "ab/.ab12.9.3.partial"
    folder.mkdir()
    os.utime(folder, (time.time() - 700,) * 2)
    with open_tier("disk", tmp_path, 4) as tier:
        assert found(tier, 1) == [True]
    assert not old.exists()
    assert not claim.exists()
    assert all(path.exists() for path in (young, folder, *others))


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(file, *_):
        file.write(b"part of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    events = []
    with open_tier("disk", tmp_path, 4, on_event=events.append) as tier:
        put(tier, 1)
        monkeypatch.setattr(block_io, "write_block", full)
        with pytest.raises(TierError, match=rf"block 1 of 2, {key(2).hex()}: .*No space left"):
            put(tier, 1, 2)
        monkeypatch.undo()
        assert tier.stats.errors == 1
        assert [e.kind for e in events] == ["stored", "failed"]
        assert len(files(tmp_path)) == 1
        assert found(tier, 1, 2) == [True, False]
        assert put(tier, 2) == [True]


def test_an_unreadable_file_is_a_miss_with_an_event(tmp_path):
    events = []
    with open_tier("disk", tmp_path, 4, on_event=events.append) as tier:
        path = tier._directory.path_of(key(1))
        path.mkdir(parents=True)  # root may read any file, but no folder as one
        assert tier.get([key(1)]).result() == [None]
        assert tier.stats.errors == 1
        assert [e.kind for e in events] == ["failed"]
    with pytest.raises(TierError, match="cannot be used"):
        open_tier("disk", tmp_path / "manifest.json", 4)


def test_fsync_and_both_checksums(tmp_path, monkeypatch):
    with open_tier("disk", tmp_path, 8, fsync=True) as tier:
        put(tier, 1)
        every = dict(block_file.CHECKSUMS)
        monkeypatch.setattr(block_file, "CHECKSUMS", {1: every[1]})  # as without xxhash
        put(tier, 2)
        assert found(tier, 2) == [True]
        assert found(tier, 1) == [max(every) == 1]
        monkeypatch.undo()
        assert found(tier, 1, 2) == [True, True]


@pytest.mark.parametrize("refresh_s", [0, 1])
def test_filled_to_exactly_its_capacity_nothing_is_evicted(tmp_path, refresh_s):
    """A file that is being written counts once, whoever looks meanwhile."""
    with open_tier("disk", tmp_path, 100, fsync=True, refresh_s=refresh_s, threads=4) as tier:
        for wait in [tier.put([key(n)], [block(key(n))]) for n in range(100)]:
            wait.result()
        assert tier.stats.evicted == 0
        assert tier.num_blocks == 100


def test_a_spec_is_no_kind_of_block(tmp_path):
    spec = kvx.CacheSpec(4, 8, 2, 16)
    with pytest.raises(kvx.BadArgument, match="DiskTier"):
        disk.DiskTier(tmp_path, spec, 1 << 20)


ALIGNED = BlockKind({"model": "small", "layout": "pages"}, (8192, 4096))


def _aligned(content: bytes = b"\0") -> Block:
    memory = torch.frombuffer(mmap.mmap(-1, ALIGNED.num_bytes), dtype=torch.uint8)
    memory.fill_(content[0])
    return Block(ALIGNED, (memory[:8192], memory[8192:]))


@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)], ids=str)
def test_past_the_system_s_cache_the_files_are_the_same(tmp_path, ways):
    """What one way wrote the other reads, and damage is found by both."""
    with DiskTier(tmp_path, ALIGNED, "1MB", direct=ways[0]) as tier:
        tier.put([key(1), key(2)], [_aligned(b"a"), _aligned(b"b")]).result()
    with DiskTier(tmp_path, ALIGNED, "1MB", direct=ways[1]) as tier:
        into = _aligned()
        assert tier.get([key(1)], [into]).result()[0] is not None
        assert bool((into.buffers[1] == ord("a")).all())
        assert tier.get([key(2)]).result()[0] is not None  # into memory that does not begin on a page
        (path,) = (p for p in files(tmp_path) if key(1).hex() in p.name)
        data = path.read_bytes()
        for wrong in (data[:-4096], data[:-1] + b"x", b"y" + data[1:], data + bytes(4096), data[:100]):
            path.write_bytes(wrong)
            assert tier.get([key(1)], [into]).result() == [None]
            assert not path.exists()


LONG = BlockKind({"model": "small", "layout": "long"}, (8192, (5 << 20) + 4096))  # more than comes in one call


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_a_block_is_handed_on_in_pieces(tmp_path, direct):
    """Into memory that is used again for each; damage in the last of them is a miss, whatever was handed on before."""
    rng = np.random.default_rng(4)
    want = [Block(LONG, tuple(torch.from_numpy(rng.integers(0, 256, n, np.uint8)) for n in LONG.buffer_bytes)) for _ in range(2)]
    whole = [b"".join(bytes(t.numpy()) for t in block.buffers) for block in want]
    with DiskTier(tmp_path, LONG, "100MB", direct=direct) as tier:
        tier.put([key(1), key(2)], want).result()
        for _ in range(2):  # checked, and known
            came, calls = [bytearray(LONG.num_bytes) for _ in range(3)], []

            def take(which, start, rows, came=came, calls=calls):
                calls.append((*which, start))
                for n, row in zip(which, rows, strict=True):
                    came[n][start : start + len(row)] = row.tobytes()

            assert tier.read_now([key(1), key(9), key(2)], take) == [True, False, True]
            assert [bytes(came[0]), bytes(came[2])] == whole
            assert len(calls) > 4
            assert calls == sorted(calls)
        (path,) = (p for p in files(tmp_path) if key(1).hex() in p.name)
        data = path.read_bytes()
        for wrong in (data[:-1] + bytes([data[-1] ^ 1]), data[:-4096]):
            path.write_bytes(wrong)
            assert tier.read_now([key(1), key(2)], take) == [False, True]
            assert not path.exists()
        assert tier.stats.refused == 2


def test_a_file_system_that_cannot_go_past_its_cache(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(block_io, "write_direct", cannot)
    with DiskTier(tmp_path, ALIGNED, "1MB", direct=True) as tier:
        assert tier.put([key(1), key(2)], [_aligned(b"a"), _aligned(b"b")]).result() == [True, True]
    monkeypatch.setattr(block_io, "read_pieces", cannot)
    with DiskTier(tmp_path, ALIGNED, "1MB", direct=True) as tier:
        assert tier.get([key(1)], [_aligned()]).result()[0] is not None
    assert len(files(tmp_path)) == 2


def test_a_file_is_checked_again_unless_it_is_cached_and_as_it_was(tmp_path, monkeypatch):
    checked: list[int] = []

    def count(number, parts, real=block_file.checksum):
        checked.append(number)
        return real(number, parts)

    def is_checked(tier):
        checked.clear()
        assert found(tier, 1) == [True]
        return bool(checked)

    def not_cached(*_):
        raise BlockingIOError

    with open_tier("disk", tmp_path, 8) as tier, open_tier("disk", tmp_path, 8) as other:
        put(tier, 1)
        monkeypatch.setattr(block_file, "checksum", count)
        assert is_checked(tier)  # the first read, though it wrote it
        can_skip = not is_checked(tier)
        assert is_checked(other)
        assert is_checked(tier)  # another used it
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", not_cached)
            assert is_checked(tier)
        assert is_checked(tier) is not can_skip
        (file,) = files(tmp_path)
        before, data = file.stat(), bytearray(file.read_bytes())
        data[-1] ^= 1
        with open(file, "r+b") as changed:  # the same inode
            changed.write(data)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert found(tier, 1) == [False]
        assert tier.stats.refused == 1
    if not can_skip:
        pytest.skip("this file system cannot say what is cached (RWF_NOWAIT)")
