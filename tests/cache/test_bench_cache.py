"""kvx bench cache with states, in small: a trace is the same every time, and policies find of it what they kept."""

from __future__ import annotations

import pytest

from kvx.bench import cache, cache_states
from kvx.bench.cache_states import POLICIES, measure, run_trace, show, trace


@pytest.fixture
def one_layer(monkeypatch):
    """Of 36, and few steps: no more than the test needs."""
    monkeypatch.setattr(cache_states, "LAYERS", 1)
    monkeypatch.setattr(cache_states, "copy_ceiling_gbps", lambda device: 10.0)


def test_a_trace_is_the_same_every_time():
    requests = trace(60)
    assert requests == trace(60) == trace()[:60]
    assert len({len(r.prompt) for r in requests}) > 40
    later = [r for n, r in enumerate(requests) if any(r.prompt[: len(b.prompt)] == b.prompt for b in requests[:n])]
    assert len(later) > 10, "turns that have the prompt and the answer of an earlier one in theirs"


def test_policies_find_what_they_kept():
    requests = trace(40)
    rows = {policy: run_trace(policy, requests, 4000) for policy in POLICIES}
    most, none = rows["no states: the most there is"], rows["no snapshots"]
    assert (none.hits, none.computed_tokens, none.snapshots) == (0, none.prompt_tokens, 0)
    assert rows["every block"].computed_tokens == most.computed_tokens < rows["every 8 blocks"].computed_tokens
    assert rows["every 8 blocks"].computed_tokens < rows["every 32 blocks"].computed_tokens < none.computed_tokens
    assert rows["default, and where asked"].computed_tokens < rows["default"].computed_tokens
    assert rows["default"].computed_tokens < min(rows[p].computed_tokens for p in ("every 32 blocks", "at a prompt's end"))
    assert rows["default"].snapshots < rows["every 8 blocks"].snapshots < rows["every block"].snapshots
    few = run_trace("every block", requests, 9)
    assert (few.kept, few.computed_tokens > most.computed_tokens) == (9, True)


def test_every_row_is_a_line(one_layer):
    result = measure("cpu", requests=5, steps=16)
    lines = cache.show({"rows": [], "vllm": None, "states": result}).split("\n")
    assert len(lines) == len(show(result)) + 1 == 2 * len(POLICIES) - 1 + 3 + 2
    copies = result["copies"][0]
    assert copies["state_bytes"] == 8192 * 3 * 2 + 32 * 128 * 128 * 4
    assert copies["copies_per_step"] == 64 / (32 * 16)
