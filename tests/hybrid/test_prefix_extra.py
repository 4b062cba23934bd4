"""HybridPrefix: what the content hangs on besides token ids keeps blocks and checkpoints apart."""

from __future__ import annotations

import pytest

from kvx.cache.hybrid import HybridPrefix, put_state, take_state
from kvx.errors import BadArgument
from tests.hybrid.test_drafts import run_step, small_cache

TOKENS = list(range(30))  # of blocks of 8


def computed(prefix: HybridPrefix, backend, tokens=TOKENS, num_tokens: int = 24, *, later=(), **extra):
    """A request that is admitted, computed and committed; what it found."""
    resumed = prefix.admit(tokens, **extra)
    run_step(prefix.cache, backend, resumed.request, num_tokens - resumed.request.length)
    prefix.commit(resumed.request, tokens[:num_tokens], extras=later)
    prefix.cache.release(resumed.request)
    return resumed


@pytest.fixture
def prefix(backend) -> HybridPrefix:
    return HybridPrefix(small_cache(backend.device), policy="full")


def shared(prefix: HybridPrefix, tokens=TOKENS, **extra) -> int:
    resumed = prefix.admit(tokens, **extra)
    prefix.cache.release(resumed.request)
    return resumed.shared


def test_an_adapter_keeps_everything_apart(prefix, backend):
    computed(prefix, backend, extra=b"lora 1")
    assert shared(prefix, extra=b"lora 1") == 24
    assert shared(prefix, extra=b"lora 2") == 0
    assert shared(prefix) == 0


@pytest.mark.parametrize("when", ["admit", "commit"])
def test_two_images_under_the_same_ids_do_not_share(prefix, backend, when):
    """Said when the request comes, or with the tokens that came since."""
    image = {"extras": [(10, b"cat")]} if when == "admit" else {"later": [(10, b"cat")]}
    computed(prefix, backend, **image)
    assert shared(prefix, extras=[(10, b"cat")]) == 24
    assert shared(prefix, extras=[(10, b"dog")]) == 8  # the text before it
    assert shared(prefix, extras=[(9, b"cat")]) == 8
    assert shared(prefix) == 8


def test_checkpoints_are_apart_too(prefix, backend):
    computed(prefix, backend, extras=[(10, b"cat")])
    computed(prefix, backend, extras=[(10, b"dog")])
    resumed = prefix.admit(TOKENS, extras=[(10, b"cat")])
    assert (resumed.start, resumed.shared) == (24, 24)
    assert resumed.request.names[-1] in prefix.checkpoints
    prefix.cache.release(resumed.request)
    other = prefix.admit(TOKENS, extras=[(10, b"dog")])
    assert (other.start, other.shared) == (24, 24)
    assert other.request.names[-1] != resumed.request.names[-1]


def test_in_parts_the_names_are_the_same(prefix, backend):
    request = prefix.admit(TOKENS).request
    for end, later in ((8, ()), (16, [(10, b"cat")]), (24, [(10, b"cat"), (17, b"dog")])):  # said again, it is the same one
        run_step(prefix.cache, backend, request, end - request.length)
        prefix.commit(request, TOKENS[:end], extras=later)
    prefix.cache.release(request)
    assert shared(prefix, extras=[(10, b"cat"), (17, b"dog")]) == 24
    assert shared(prefix, extras=[(10, b"cat")]) == 16


def test_a_state_carries_it(prefix, backend):
    """Taken out and put back, a request with an image does not become one without."""
    resumed = prefix.admit(TOKENS, extra=b"lora", extras=[(10, b"cat")])
    run_step(prefix.cache, backend, resumed.request, 24)
    state = take_state(prefix.cache, resumed.request)
    prefix.cache.release(resumed.request)
    back = put_state(prefix.cache, state)
    prefix.commit(back, TOKENS[:24])
    prefix.cache.release(back)
    assert shared(prefix) == 0
    assert shared(prefix, extra=b"lora", extras=[(10, b"cat")]) == 24


def test_what_comes_too_late_is_refused(prefix, backend):
    request = prefix.admit(TOKENS).request
    run_step(prefix.cache, backend, request, 24)
    prefix.commit(request, TOKENS[:24])
    with pytest.raises(BadArgument, match=r"commit\(\): extras has one at token 10; tokens 24 to 29 can have one"):
        prefix.commit(request, TOKENS, extras=[(10, b"cat")])
    for wrong in ({"extra": "cat"}, {"extras": [(10, "cat")]}):
        with pytest.raises(BadArgument, match="it is bytes"):
            prefix.admit(TOKENS, **wrong)
    prefix.cache.release(request)
    assert prefix.cache.allocator.num_used == 0
    assert shared(prefix, [1, 2, 3, 4, 5], extras=[(3, b"cat")]) == 0  # less than a block
