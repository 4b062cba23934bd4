"""The first cases of tests/fuzz/conversions.py, in every run of the tests."""

from __future__ import annotations

from tests.fuzz import conversions


def test_random_conversions_and_tensors():
    counts = conversions.run(1200, 0)
    assert counts["converted"] > 400
    assert counts["refused"] > 300
    assert counts["taken, rightly"] > 20


def test_the_reading_of_the_language_is_one_of_its_own():
    """By hand, from docs/layouts.md: vLLM's and the old packed K."""
    n = {"layer": 1, "block": 2, "kv": 2, "token": 4, "head": 2, "dim": 8}
    buffer, byte = conversions.places("layer | block kv token head dim", n, 2)
    assert (buffer[0, 1, 1, 2, 1, 3], byte[0, 1, 1, 2, 1, 3]) == (0, 2 * (128 + 64 + 2 * 16 + 8 + 3))
    packed = "layer kv[K: | block head dim/4 token dim%4; V: | block head dim token]"
    buffer, byte = conversions.places(packed, n, 2)
    assert (buffer[0, 1, 0, 2, 1, 7], byte[0, 1, 0, 2, 1, 7]) == (0, 2 * (64 + 32 + 16 + 2 * 4 + 3))
    assert (buffer[0, 1, 1, 2, 1, 7], byte[0, 1, 1, 2, 1, 7]) == (1, 2 * (64 + 32 + 7 * 4 + 2))
