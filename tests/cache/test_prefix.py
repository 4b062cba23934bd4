"""PrefixCache: names are the hashes they are said to be, and find the blocks that hold their tokens."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

import kvx

BS = 4


def make(num_blocks: int = 64, groups: int = 1, **options):
    allocators = [kvx.BlockAllocator(num_blocks) for _ in range(groups)]
    return kvx.PrefixCache(allocators, BS, **{"max_events": 8, **options}), allocators


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50000, n, dtype=np.int32)


@pytest.mark.parametrize("name", ["blake2b", "sha256", "xxh3_128"])
@pytest.mark.parametrize("n", [0, 3, 4, 5, 63, 64, 65, 131])
def test_hashes_are_the_chain(name, n):
    if name == "xxh3_128":
        xxhash = pytest.importorskip("xxhash")
    digest = {
        "blake2b": lambda d: hashlib.blake2b(d, digest_size=16).digest(),
        "sha256": lambda d: hashlib.sha256(d).digest(),
        "xxh3_128": lambda d: xxhash.xxh3_128_digest(d),
    }[name]
    p, _ = make(salt=b"pepper", hash_name=name)
    t = tokens(n)
    h = digest(len(b"pepper").to_bytes(8, "little") + b"pepper" + b"lora 3")
    want = []
    for i in range(n // BS):
        h = digest(h + t[i * BS : (i + 1) * BS].astype("<i4").tobytes())
        want.append(h)
    assert p.hashes(t, b"lora 3") == want
    cut = n // BS // 2
    if cut:
        assert p.hashes(t[cut * BS :], parent=want[cut - 1]) == want[cut:]
    assert all(len(h) >= 16 for h in want)


def test_salt_and_extra_part_the_names():
    one, two = make(salt=b"a")[0], make(salt=b"ab")[0]
    names = [one.hashes(tokens(4)), two.hashes(tokens(4)), one.hashes(tokens(4), b"b"), two.hashes(tokens(4), b"")]
    assert len({n[0] for n in names}) == 3  # the last is the second again


def test_events_are_bounded_and_none_unless_asked_for():
    p, (a,) = make(max_events=2)
    quiet, (b,) = make(max_events=0)
    for seed in range(4):
        stored(p, a, tokens(8, seed))
        stored(quiet, b, tokens(8, seed))
    assert len(p.events) == 2
    assert not quiet.events


def stored(p: kvx.PrefixCache, a: kvx.BlockAllocator, t: np.ndarray, group: int = 0) -> tuple[list[bytes], np.ndarray]:
    hashes = p.hashes(t)
    ids = a.allocate(len(hashes))
    p.put(group, hashes, ids)
    return hashes, ids


def test_put_lookup_take_release():
    p, (a,) = make()
    hashes, ids = stored(p, a, tokens(40))
    assert p.lookup(hashes, (0,)) == 10
    other = p.hashes(np.concatenate((tokens(20), tokens(20, 1))))
    assert p.lookup(other, (0,)) == 5
    (got,) = p.take(other, 5, (0,))
    assert got.tolist() == ids[:5].tolist()
    assert [a.refs(int(b)) for b in ids] == [2] * 5 + [1] * 5
    with pytest.raises(kvx.BadArgument, match="of these hashes 5 are there"):
        p.take(other, 6, (0,))
    a.release(got)
    a.release(ids)
    assert (a.num_idle, a.num_free) == (10, 54)
    assert (p.stats.queries, p.stats.hits, p.stats.tokens_asked, p.stats.tokens_hit) == (2, 2, 80, 60)
    p.check()


def test_a_name_keeps_its_first_block():
    p, (a,) = make()
    hashes, ids = stored(p, a, tokens(8))
    again = a.allocate(2)
    p.put(0, hashes, again)
    p.put(0, hashes, ids)  # the same once more
    a.release(again)
    assert a.num_free == 62
    assert p.take(hashes, 2, (0,))[0].tolist() == ids.tolist()
    assert p.stats.stored == 2
    p.check()


def test_eviction_forgets_names_tail_first_and_never_what_is_used():
    p, (a,) = make(num_blocks=8)
    old, old_ids = stored(p, a, tokens(16, 1))
    new, new_ids = stored(p, a, tokens(16, 2))
    a.release(old_ids)
    assert len(a.allocate(2)) == 2
    assert p.lookup(old, (0,)) == 2
    assert p.lookup(new, (0,)) == 4
    with pytest.raises(kvx.OutOfBlocks):
        a.allocate(3)
    p.check()
    assert [e.kind for e in p.events] == ["stored", "stored", "evicted"]
    assert p.events[-1] == ("evicted", 0, old[:1:-1], old_ids.tolist()[:1:-1])
    assert p.stats.evicted == 2
    assert new_ids.tolist() == p.take(new, 4, (0,))[0].tolist()


def test_pins_hold_and_nest():
    p, (a,) = make(num_blocks=4)
    hashes, ids = stored(p, a, tokens(8))
    a.release(ids)
    assert p.pin(hashes) == 2
    assert p.pin(hashes[:1]) == 1
    assert a.num_pinned == 2
    with pytest.raises(kvx.OutOfBlocks, match="2 of them pinned") as error:
        a.allocate(3)
    assert error.value.pinned == 2
    p.unpin(hashes)
    assert (a.num_pinned, a.num_idle) == (1, 1)
    with pytest.raises(kvx.BadArgument, match="is not pinned"):
        p.unpin(hashes)
    p.unpin(hashes[:1])
    p.check()
    assert a.allocate(4) is not None


def test_clear():
    p, (a,) = make()
    hashes, ids = stored(p, a, tokens(16))
    a.release(ids[2:])
    p.pin(hashes[3:])
    p.clear()
    p.check()
    assert p.lookup(hashes, (0,)) == 0
    assert (a.num_used, a.num_idle) == (2, 0)
    assert p.events[-1].kind == "removed"
    a.release(ids[:2])
    assert a.num_free == 64


@pytest.mark.parametrize("seed", range(20))
def test_lookup_with_windows_is_what_a_loop_finds(seed):
    rng = random.Random(seed)
    windows = [rng.choice([0, 1, 3, 4, 5, 9, 30]) for _ in range(3)]
    p, allocators = make(groups=3)
    hashes = p.hashes(tokens(4 * 12))
    have = []
    for g, a in enumerate(allocators):
        mine = [i for i in range(12) if rng.random() < (0.97 if not windows[g] else 0.7)]
        have.append(set(mine))
        p.put(g, [hashes[i] for i in mine], a.allocate(len(mine)))

    def fits(n: int) -> bool:
        seen = [range(max(0, n * BS - w + 1) // BS if w else 0, n) for w in windows]
        return all(set(s) <= h for s, h in zip(seen, have, strict=True))

    want = max(n for n in range(13) if fits(n))
    assert p.lookup(hashes, windows) == want
    for ids, w in zip(p.take(hashes, want, windows), windows, strict=True):
        assert [i for i, b in enumerate(ids) if b >= 0] == list(range(max(0, want * BS - w + 1) // BS if w else 0, want))
    p.check()


def test_unknown_hashes_are_refused():
    with pytest.raises(kvx.BadArgument, match="hash_name is 'md5'; it must be \"blake2b\""):
        make(hash_name="md5")


def test_check_finds_what_is_wrong():
    p, (a,) = make()
    stored(p, a, tokens(8))
    p._block_of[0].popitem()
    with pytest.raises(kvx.InternalError, match="names known"):
        p.check()
