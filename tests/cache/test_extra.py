"""What the content hangs on besides token ids: two images under the same placeholders never share a block, whenever they come."""

from __future__ import annotations

import random

import numpy as np
import pytest

import kvx
from kvx.cache.names import python_chain
from kvx.cache.prefix import _begun
from tests.cache.test_paged import BS, make

TEXT, PLACE = list(range(1, 11)), 99  # ten tokens, then an image in the middle of the third block


def commit(cache: kvx.PagedCache, seq) -> list[bytes]:
    """All its tokens have room and are computed: the names of its blocks."""
    if seq.length < seq.num_tokens:
        cache.extend(seq, seq.num_tokens - seq.length)
    cache.commit(seq)
    cache.check()
    return list(seq.hashes)


def with_image(cache: kvx.PagedCache, image: bytes, by: str = "append", num_tokens: int = 7):
    """A text, then an image that comes after it was admitted, then more text."""
    seq = cache.admit(TEXT)
    if by == "append":
        cache.append(seq, [PLACE] * num_tokens, extra=image)
    else:
        cache.extend(seq, len(TEXT) - seq.length)
        cache.extend(seq, [PLACE] * num_tokens, extra=image)
    cache.append(seq, [5, 6, 7, 8])
    return seq


@pytest.mark.parametrize("by", ["append", "extend"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_two_images_do_not_share(by, num_tokens):
    cache = make()
    one, two, same, none = (commit(cache, with_image(cache, image, by, num_tokens)) for image in (b"cat", b"dog", b"cat", b""))
    before = len(TEXT) // BS
    assert one[:before] == two[:before] == none[:before]  # the text before it is shared
    assert one == same
    for i in range(before, len(one)):
        assert len({one[i], two[i], none[i]}) == 3


def test_a_later_request_finds_its_own_image_only():
    cache = make()
    tokens = [*TEXT, *[PLACE] * 7, 5, 6, 7, 8]
    commit(cache, with_image(cache, b"cat"))
    assert cache.admit(tokens).length == 8
    assert cache.admit(tokens, extras=[(10, b"dog")]).length == 8
    assert cache.admit(tokens, extras=[(9, b"cat")]).length == 8  # the same image, a token earlier
    assert cache.admit(tokens, extra=b"cat").length == 0
    assert cache.admit(tokens, extras=[(10, b"cat")]).length == 20
    cache.check()


def test_several_in_a_block_and_their_order():
    cache = make(64)
    tokens = list(range(40))
    some = [(), ((1, b"a"),), ((1, b"a"), (2, b"b")), ((1, b"b"), (2, b"a")), ((1, b"ab"),), ((1, b"a"), (30, b"b")), ((30, b"b"),)]
    names = []
    for extras in some:
        seq = cache.admit(tokens, extras=extras)
        names.append(commit(cache, seq))
        cache.release(seq)
    assert len({tuple(n) for n in names}) == len(names)
    assert names[0][:7] == names[6][:7]
    assert names[1][:7] == names[5][:7]
    back = cache.admit(tokens, extras=[some[2][1], some[2][0]])  # the order that they are given in does not count
    assert back.length == 36


def test_in_parts_or_at_once_the_names_are_the_same():
    """Random sequences: grown by append and extend, committed in between, cut back, forked; against one chain over all of it."""
    rng = random.Random(3)
    for _ in range(60):
        cache = make(64, max_seq_len=100)
        seq = cache.admit([rng.randrange(3) for _ in range(rng.randrange(1, 20))])
        extras: list[tuple[int, bytes]] = []
        for _ in range(8):
            extra = rng.choice([b"", b"x", b"y"])
            tokens = [rng.randrange(3) for _ in range(rng.randrange(0, 9))]
            if seq.num_tokens + len(tokens) > 100:
                break
            if extra and tokens:
                extras.append((seq.num_tokens, extra))
            if rng.random() < 0.5:
                cache.append(seq, tokens, extra=extra)
            else:
                cache.extend(seq, seq.num_tokens - seq.length)
                cache.extend(seq, tokens, extra=extra)
            if rng.random() < 0.5:
                commit(cache, seq)
            if rng.random() < 0.3 and seq.length == seq.num_tokens:
                length = rng.randrange(seq.length + 1)
                cache.truncate(seq, length)
                extras = [e for e in extras if e[0] < length]
            if rng.random() < 0.3:
                other = cache.fork(seq)
                cache.release(seq)
                seq = other
        names = commit(cache, seq)
        want = cache.prefix.chain(seq.tokens[: len(names) * BS].tobytes(), cache.prefix.root(), extras)
        assert names == want


def test_the_chain_is_what_the_text_says():
    """Hashed one by one, by the file's own words."""
    cache = make()
    hash_ = cache.prefix._naming.hash
    tokens, extras = np.arange(20, dtype="<i4"), [(5, b"a"), (6, b"b"), (17, b"c")]
    want, parent = [], cache.prefix.root()
    for i in range(5):
        for at, extra in extras:
            if at // BS == i:
                parent = hash_(_begun(parent, at, extra))
        parent = python_chain(hash_)(tokens[i * BS : (i + 1) * BS].tobytes(), parent, BS)[0]
        want.append(parent)
    assert cache.prefix.chain(tokens.tobytes(), cache.prefix.root(), extras) == want
    assert cache.prefix.chain(tokens[8:].tobytes(), want[1], extras, 8) == want[2:]


def test_what_begins_in_a_block_that_is_not_full_waits():
    prefix = make().prefix
    root = prefix.root()
    assert prefix.chain(bytes(4 * 3), root, [(1, b"cat")]) == []
    assert prefix.chain(bytes(4 * (BS + 2)), root, [(BS + 1, b"cat")]) == prefix.chain(bytes(4 * BS), root)


def test_many_of_them():
    """A film has an image for every few tokens."""
    cache = make(3000, max_seq_len=10_000)
    extras = [(at, at.to_bytes(4, "little")) for at in range(0, 10_000, 3)]
    seq = cache.admit([PLACE] * 10_000, extras=extras)
    names = commit(cache, seq)
    assert len(set(names)) == 2500
    cache.release(seq)
    assert cache.admit([PLACE] * 10_000, extras=extras).length == 9_996


def test_an_extra_cannot_pass_for_tokens():
    """Whatever bytes it has, what is hashed with it is no name and tokens."""
    for size in range(70):
        assert len(_begun(b"p" * 16, 3, b"e" * size)) % 4 == 1
    assert _begun(b"p" * 16, 3, b"e") != _begun(b"p" * 16, 3, b"e\0")


@pytest.mark.parametrize("wrong", ["cat", 3, None, ["cat"], bytearray(b"cat")])
def test_an_extra_that_is_no_bytes_is_refused_and_leaves_nothing(wrong):
    cache = make()
    seq = cache.admit([1, 2, 3])
    cache.extend(seq, 3)
    for call in (
        lambda: cache.admit([1, 2, 3], extra=wrong),
        lambda: cache.admit([1, 2, 3], extras=[(1, wrong)]),
        lambda: cache.append(seq, [4], extra=wrong),
        lambda: cache.extend(seq, [4], extra=wrong),
    ):
        with pytest.raises(kvx.BadArgument, match=r"extra is .*it must be bytes"):
            call()
        assert cache.num_seqs == 1
        assert (seq.num_tokens, seq.length, seq.extras) == (3, 3, [])
        cache.check()


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ([(3, b"x")], "at token 3; tokens 0 to 2"),
        ([(-1, b"x")], "at token -1"),
        ([b"x"], "it must be .position"),
        ([(1.0, b"x")], "position"),
    ],
)
def test_extras_that_fit_no_token_are_refused(extras, words):
    cache = make()
    with pytest.raises(kvx.BadArgument, match=words):
        cache.admit([1, 2, 3], extras=extras)
    assert cache.num_seqs == 0


def test_an_extra_belongs_to_new_tokens():
    cache = make(3)
    seq = cache.admit([1, 2, 3])
    with pytest.raises(kvx.BadArgument, match="extra belongs to new tokens"):
        cache.extend(seq, 3, extra=b"cat")
    cache.extend(seq, 3)
    with pytest.raises(kvx.OutOfBlocks):
        cache.extend(seq, [PLACE] * 20, extra=b"cat")
    cache.extend(seq, [4, 5, 6, 7, 8])  # text after all
    names = commit(cache, seq)
    assert names == cache.prefix.hashes(np.arange(1, 9, dtype=np.int32))
    cache.append(seq, [], extra=b"cat")  # of no token
    cache.extend(seq, [9, 10, 11, 12])
    assert commit(cache, seq) == cache.prefix.hashes(np.arange(1, 13, dtype=np.int32))


def test_a_handover_of_more_than_tokens_is_refused():
    """A handover is found by model and tokens: it would be given to another image's request."""
    from kvx.handover.paged_cache import read_sequence

    cache = make()
    plain, image, lora = cache.admit(TEXT), with_image(cache, b"cat"), cache.admit(TEXT, extra=b"lora")
    for seq in (plain, image, lora):
        cache.extend(seq, seq.num_tokens - seq.length)
    assert read_sequence(cache, plain, model="small", block_size=4).num_tokens == 10
    for seq in (image, lora):
        with pytest.raises(kvx.Unsupported, match="another sequence of the same tokens would be given these"):
            read_sequence(cache, seq, model="small", block_size=4)


@pytest.mark.parametrize("states", [0, 4], ids=["plain", "states"])
def test_an_image_stays_where_a_step_was_abandoned(states):
    """Its tokens are known still. Without it their blocks would have the names of other images' blocks."""
    cache = make(states=states)
    tokens = [*TEXT, *[PLACE] * 7, 5, 6, 7, 8]
    want = commit(cache, cache.admit(tokens, extras=[(10, b"cat")]))
    seq = cache.admit(tokens, extra=b"lora", extras=[(10, b"cat")])
    before = seq.length, seq.num_tokens
    cache.extend(seq, 12)
    cache.abandon(seq, *before)
    assert (seq.length, seq.tokens.tolist()) == (0, tokens)
    commit(cache, seq)
    cache.release(seq)
    assert cache.admit(tokens, extra=b"lora").length == (0 if states else 8), "the text before it, where no state was left there"
    seq = cache.admit(tokens, extras=[(10, b"cat")])
    assert seq.hashes == want
    cache.extend(seq, 1)
    cache.abandon(seq, 20, 21)
    assert commit(cache, seq) == want


@pytest.mark.parametrize("num_tokens", [8, 10], ids=["at a block's end", "inside a block"])
@pytest.mark.parametrize("ends_by", [kvx.OutOfBlocks, KeyboardInterrupt])
def test_an_image_that_found_no_room_is_not_there(monkeypatch, ends_by, num_tokens):
    """The next token is text: in the place where the image would have begun, and named so."""

    def fail(*_):
        raise ends_by("no")

    cache, plain = make(4), make(4)
    seq, other = cache.admit(TEXT[:num_tokens]), plain.admit(TEXT[:num_tokens])
    for c, s in ((cache, seq), (plain, other)):
        c.extend(s, num_tokens)
    monkeypatch.setattr(cache, "_grow", fail)
    with pytest.raises(ends_by):
        cache.extend(seq, [PLACE], extra=b"cat")
    monkeypatch.undo()
    assert seq.extras == [] or ends_by is KeyboardInterrupt, "OutOfBlocks changes nothing"
    for token in (PLACE, 5, 6, 7):
        for c, s in ((cache, seq), (plain, other)):
            c.extend(s, [token])
            c.commit(s)
    assert seq.hashes == other.hashes
    assert len(seq.hashes) == 3
    cache.check()
