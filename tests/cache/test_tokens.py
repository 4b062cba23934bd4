"""Token ids are taken exactly, whatever they come in, and the names made of them begin with one root."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvx import BadArgument
from kvx.cache import PrefixCache
from kvx.cache.names import naming
from kvx.cache.tokens import token_ids
from kvx.handover.in_tiers import names

IDS = [0, 5, 2**31 - 1]
ARRAY = np.array(IDS)


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        [np.int64(i) for i in IDS],
        np.array(IDS),
        np.array(IDS, np.uint32),
        np.array(IDS, np.int32),
        torch.tensor(IDS),
    ],
    ids=["list", "tuple", "numbers-of-numpy", "int64", "uint32", "int32", "tensor"],
)
def test_ids_are_an_own_row_of_int32(tokens):
    ids = token_ids("f()", tokens)
    assert (ids.dtype, ids.tolist(), ids.flags.writeable) == (np.int32, IDS, False)
    assert not isinstance(tokens, np.ndarray) or not np.shares_memory(ids, tokens)


@pytest.mark.parametrize("tokens", [[], (), range(0), np.zeros(0), torch.zeros(0)], ids=str)
def test_no_ids(tokens):
    assert token_ids("f()", tokens).shape == (0,)
    with pytest.raises(BadArgument, match=r"^f\(\): there are 0 tokens; tokens are one row of int32 ids, 1 or more\.$"):
        token_ids("f()", tokens, least=1)


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        ([1, 1.5], r"tokens\[1\] is 1\.5; ids are 0 to 2147483647: tokens are one row of int32 ids"),
        ((1, "2"), r"tokens\[1\] is '2'; "),
        ([3, 2**31], r"tokens\[1\] is 2147483648; "),
        ([3, 2**31 - 1, -1], r"tokens\[2\] is -1; "),
        ([True, False], r"tokens\[0\] is True; "),
        ([[1, 2]], r"tokens\[0\] is \[1, 2\]; "),
        ([1, -(2**20000)], r"tokens\[1\] is a number of 20001 bits; "),
        (np.array([1, 2**31]), r"tokens\[1\] is 2147483648; "),
        (np.array([-(2**40), 3]), r"tokens\[0\] is -1099511627776; "),
        (torch.tensor([2, -7, -8], dtype=torch.int32), r"tokens\[1\] is -7; "),
        (np.zeros((2, 2), int), r"tokens are int64 of shape \[2, 2\]; they must be one row of int32 ids"),
        (np.array([0.5]), r"tokens are float64 of shape \[1\]"),
        (None, r"tokens are object of shape \[\]"),
        ("ab", r"tokens are <U2 of shape \[\]"),
        (torch.zeros(3, dtype=torch.int32, device="meta"), "tokens are a meta tensor, which holds no ids"),
    ],
)
def test_what_is_no_id_is_refused_with_its_place(tokens, what):
    with pytest.raises(BadArgument, match=rf"^f\(\): {what}"):
        token_ids("f()", tokens)


def test_caches_and_handovers_begin_at_one_root():
    """So that what a runner named is found by a handover of the same tokens."""
    root = naming("blake2b").root(b"m")
    assert PrefixCache([], 2, salt=b"m").root() == root
    assert names([1, 2, 3], 2, "m") == PrefixCache([], 2, salt=b"m").hashes(np.array([1, 2], np.int32))
    assert naming("blake2b").root(b"m", b"lora") == PrefixCache([], 2, salt=b"m").root(b"lora") != root
    assert naming("blake2b").root(b"ml", b"ora") != naming("blake2b").root(b"m", b"lora")
