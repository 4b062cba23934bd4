"""CONTRIBUTING.md's list for a kind of layer group: every kind is in each of its places, and a toy one works on the one cache."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvx
from kvx.cache import kinds
from kvx.cache.kinds import Blocks, GroupKind
from kvx.handover.paged_cache import read_sequence
from tests.cache.test_paged import BS, admitted, make, random_calls, spec
from tests.tiers.test_cache_tiers import close, on_host

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class TwoChunks(GroupKind):
    """The toy: a token sees its own chunk of tokens and the one before it. No file of kvx/ knows it."""

    chunk: int
    gives_back = True

    def first_token(self, length: Blocks) -> Blocks:
        return (length // self.chunk - (length >= self.chunk)) * self.chunk

    def first_block(self, length: Blocks, block_size: int) -> Blocks:
        return self.first_token(length) // block_size


@pytest.mark.parametrize("others", [{}, {"window": 6}, {"states": 20}], ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_random_calls_match_the_model(chunk, others):
    rng = random.Random(chunk)
    random_calls(make(rng.choice([6, 14, 40]), kind=TwoChunks(chunk), **others), rng)


def test_it_gives_back_what_no_later_token_sees_and_a_prefix_needs_no_more():
    cache = make(kind=TwoChunks(8))
    tokens = list(range(31))
    seq = admitted(cache, tokens)
    cache.extend(seq, [99])
    cache.extend(seq, [98])  # the token at position 32 sees from 24 on
    assert cache.blocks(seq, 1).tolist()[:6] == [-1] * 6
    found = cache.admit([*tokens, 99, 98])
    assert found.length == 32 - BS  # the last block was not committed
    assert (cache.blocks(found, 1) >= 0).sum() == (28 - 16) // BS
    cache.check()


def test_tiers_bring_its_blocks_back():
    cache = make(14, kind=TwoChunks(8))
    backing = on_host(cache, 200)
    random_calls(cache, random.Random(3))
    assert cache.stats().prefix.tokens_brought > 0
    assert all(mover.stats.onboarded for mover in backing.movers)
    close(backing)


def test_a_handover_of_what_is_no_window_is_refused():
    """A part says its window: a kind that gives back by another rule is not told as if it were full."""
    cache = make(kind=TwoChunks(4))
    seq = admitted(cache, list(range(30)))
    assert read_sequence(cache, seq, model="small").num_tokens == 30  # nothing was given back yet
    cache.extend(seq, [1, 2, 3])
    with pytest.raises(kvx.Unsupported, match=r"group .other. is TwoChunks\(chunk=4\) and has given blocks back"):
        read_sequence(cache, seq, model="small")
    cache.check()


def test_a_group_takes_a_kind_or_a_window():
    with pytest.raises(kvx.BadArgument, match="Give one"):
        kvx.LayerGroup("toy", (0,), spec(4), window=4, kind=TwoChunks(4))


def kinds_that_exist() -> dict[str, type[GroupKind]]:
    """By their files."""
    found = [getattr(kinds, name) for name in kinds.__all__]
    return {k.__module__.rpartition(".")[2]: k for k in found if isinstance(k, type) and k is not GroupKind}


def test_every_kind_is_in_each_place_of_the_list():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a kind of layer group")[2].partition("\n## ")[0]
    places = re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)
    assert len(places) == 5
    assert "Five places" in text
    files = {path.stem for path in (ROOT / "kvx/cache/kinds").glob("*.py")} - {"__init__", "kind"}
    assert set(kinds_that_exist()) == files, "a kind is one file, and kvx/cache/kinds/__init__.py names it"
    assert len(files) >= 6
    for name in files:
        for place in places:
            path = ROOT / place.replace("/x.py", f"/{name}.py")
            assert path.exists(), f"{place} of CONTRIBUTING.md is no file"
            if path.suffix == ".md":
                row = rf"^\| .*\b{name.replace('_', ' ')}\b.*\|$"
                assert re.search(row, path.read_text(), re.MULTILINE), f"{place} has no row of {name}"
