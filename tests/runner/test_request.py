"""Parameters are checked, and text stops where it should."""

from __future__ import annotations

import pytest

from kvx import BadArgument
from kvx.runner.request import Completion, Params


def answer(*stop: str) -> Completion:
    return Completion(0, 0, [1], 1, Params(stop=stop), limit=100)


def feed(c: Completion, *pieces: str) -> list[str]:
    return [c.push(p, is_last=i == len(pieces) - 1) for i, p in enumerate(pieces)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("n", 0),
        ("stop", ("",)),
    ],
    ids=str,
)
def test_wrong_parameters_are_named(name, value):
    with pytest.raises(BadArgument, match=rf"Params\(\): {name} is "):
        Params(**{name: value})


def test_stop_string_within_one_piece():
    c = answer("END")
    assert feed(c, "one END two", "") == ["one ", ""]
    assert (c.text, c.finish) == ("one ", "stop")


def test_stop_string_over_pieces_is_never_shown():
    c = answer("\n\nQ:")
    assert feed(c, "yes.", "\n", "\nQ", ": more", "")[:4] == ["yes.", "", "", ""]
    assert (c.text, c.finish) == ("yes.", "stop")


def test_what_looked_like_a_stop_string_comes_out():
    c = answer("abc")
    assert feed(c, "xab", "d", "ab") == ["x", "abd", "ab"]
    assert (c.text, c.finish) == ("xabdab", "")


def test_the_first_of_several_wins():
    c = answer("two", "one")
    feed(c, "zero one two", "")
    assert c.text == "zero "
