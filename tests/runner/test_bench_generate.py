"""kvx bench generate compares texts, and counts what it says it counts."""

from __future__ import annotations

from dataclasses import asdict

from kvx.bench import generate as bench
from tests.runner import smollm


@smollm.needs_weights
def test_a_row():
    prompts = smollm.prompts(2)
    row = bench._row("two", smollm.engine(), smollm.reference(), prompts, new_tokens=3, repeats=1)
    assert (row.equal_texts, row.num_texts, row.new_tokens) == (2, 2, 6)
    assert row.prompt_tokens == sum(map(len, prompts))
    assert 0 < row.reused_tokens < len(prompts[0]), "of this batch alone: the cache is emptied before each run"
    assert row.ours.median_us > row.ours_first.median_us
    text = bench.show({"load_s": 1.0, "first_token_s": 2.0, "dtype": "f32", "rows": [{**asdict(row), "ratio": row.ratio}]})
    assert "2 of 2 texts are the same" in text
    assert f"{row.ratio:.2f}x;" in text
