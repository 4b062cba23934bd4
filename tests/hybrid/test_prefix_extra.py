"""Prefixes of a hybrid cache: what the content hangs on besides token ids keeps blocks and snapshots apart."""

from __future__ import annotations

import pytest

from kvx.cache.hybrid import HybridCache
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument
from tests.hybrid.test_drafts import run_step, small_cache

TOKENS = list(range(30))  # of blocks of 8


@pytest.fixture
def cache(backend) -> HybridCache:
    return small_cache(backend.device, prefix=True, num_snapshots=4)


def compute(cache: HybridCache, backend, seq: Sequence, end: int = 24) -> None:
    """Up to `end`, then commit and leave."""
    run_step(cache, backend, seq, end - seq.length)
    cache.commit(seq)
    cache.release(seq)


def shared(cache: HybridCache, tokens=TOKENS, **extra) -> tuple[int, int]:
    """Where a request would begin to compute, and the tokens whose entries are there."""
    seq = cache.admit(tokens, **extra)
    found = seq.length, max(seq.length, seq.num_ahead * 8)
    cache.release(seq)
    return found


def test_an_adapter_keeps_everything_apart(cache, backend):
    compute(cache, backend, cache.admit(TOKENS, extra=b"lora 1"))
    assert shared(cache, extra=b"lora 1") == (24, 24)
    assert shared(cache, extra=b"lora 2") == (0, 0)
    assert shared(cache) == (0, 0)


@pytest.mark.parametrize("when", ["admit", "append"])
def test_two_images_under_the_same_ids_do_not_share(cache, backend, when):
    """Said when the request comes, or with the tokens that come later."""
    if when == "admit":
        seq = cache.admit(TOKENS, extras=[(10, b"cat")])
    else:
        seq = cache.admit(TOKENS[:10])
        cache.append(seq, TOKENS[10:], extra=b"cat")
    compute(cache, backend, seq)
    assert shared(cache, extras=[(10, b"cat")]) == (24, 24)
    for other in ({"extras": [(10, b"dog")]}, {"extras": [(9, b"cat")]}, {}):
        assert shared(cache, **other) == (0, 8), "the text before it, of which there is no snapshot"


def test_snapshots_are_apart_too(cache, backend):
    for image in (b"cat", b"dog"):
        compute(cache, backend, cache.admit(TOKENS, extras=[(10, image)]))
    seqs = []
    for image in (b"cat", b"dog"):
        seq = cache.admit(TOKENS, extras=[(10, image)])
        assert (seq.length, seq.num_ahead) == (24, 0)
        seqs.append((seq.hashes[-1], cache.slot(seq), cache.block_ids(seq).tolist()))
        cache.release(seq)
    (name, slot, blocks), (other, other_slot, other_blocks) = seqs
    assert name != other
    assert slot != other_slot
    assert blocks[0] == other_blocks[0]
    assert not set(blocks[1:]) & set(other_blocks[1:])
    cache.check()


def test_in_parts_the_names_are_the_same(cache, backend):
    seq = cache.admit(TOKENS[:10])
    run_step(cache, backend, seq, 8)
    cache.commit(seq)
    cache.append(seq, TOKENS[10:17], extra=b"cat")
    run_step(cache, backend, seq, 8)
    cache.commit(seq)
    cache.append(seq, TOKENS[17:], extra=b"dog")
    compute(cache, backend, seq)
    assert shared(cache, extras=[(10, b"cat"), (17, b"dog")]) == (24, 24)
    assert shared(cache, extras=[(10, b"cat")]) == (16, 16)
    assert shared(cache) == (8, 8)


def test_a_fork_carries_it(cache, backend):
    """Another with an image does not become one without, also in blocks that it fills itself."""
    cache = small_cache(backend.device, max_seqs=2, prefix=True, num_snapshots=4)
    seq = cache.admit(TOKENS, extra=b"lora", extras=[(10, b"cat")])
    run_step(cache, backend, seq, 7)
    fork = cache.fork(seq)
    cache.release(seq)
    compute(cache, backend, fork)
    assert shared(cache) == (0, 0)
    assert shared(cache, extra=b"lora", extras=[(10, b"cat")]) == (24, 24)


def test_what_is_no_extra_is_refused(cache, backend):
    seq = cache.admit(TOKENS)
    run_step(cache, backend, seq, 24)
    cache.commit(seq)
    with pytest.raises(BadArgument, match="it must be bytes"):
        cache.append(seq, [1], extra="cat")
    cache.release(seq)
    for wrong in ({"extra": "cat"}, {"extras": [(10, "cat")]}):
        with pytest.raises(BadArgument, match="it must be bytes"):
            cache.admit(TOKENS, **wrong)
    with pytest.raises(BadArgument, match=r"extras has one at token 30; tokens 0 to 29 can have one"):
        cache.admit(TOKENS, extras=[(30, b"cat")])
    assert [a.num_used for a in cache.allocators] == [0, 0]
    assert shared(cache, [1, 2, 3, 4, 5], extras=[(3, b"cat")]) == (0, 0)  # less than a block
