"""kvx bench generate compares texts, and counts what it says it counts."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

from kvx.bench import generate as bench
from tests.runner import smollm


@smollm.needs_weights
def test_a_row(monkeypatch):
    prompts = smollm.prompts(2)
    made = dict.fromkeys(("_our_tokens", "_their_tokens"), 0)
    for name, call in [(name, getattr(bench, name)) for name in made]:

        def counted(model, prompts, n, *, name=name, call=call):
            answers = call(model, prompts, n)
            made[name] += sum(map(len, answers))
            return answers

        monkeypatch.setattr(bench, name, counted)
    # A second for each token of ours and ten for each of theirs: what is timed is then known exactly, on a busy machine too.
    clock = SimpleNamespace(perf_counter=lambda: made["_our_tokens"] + 10 * made["_their_tokens"])
    monkeypatch.setattr(bench, "time", clock)
    row = bench._row("two", smollm.engine(), smollm.reference(), prompts, new_tokens=3, repeats=1)
    assert (row.equal_texts, row.num_texts, row.new_tokens) == (2, 2, 6)
    assert row.prompt_tokens == sum(map(len, prompts))
    assert 0 < row.reused_tokens < len(prompts[0]), "of this batch alone: the cache is emptied before each run"
    timings = (row.ours, row.ours_first, row.transformers, row.transformers_first)
    assert [t.median_us for t in timings] == [6e6, 2e6, 60e6, 20e6]
    text = bench.show({"load_s": 1.0, "first_token_s": 2.0, "dtype": "f32", "rows": [{**asdict(row), "ratio": row.ratio}]})
    assert "2 of 2 texts are the same" in text
    assert f"{row.ratio:.2f}x;" in text
