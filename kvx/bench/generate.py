"""kvx bench generate: a real model's texts beside transformers' `generate`, same weights, type and prompts, batch of 8.

Texts are compared first. Both go on past the end of a text, so that both compute the same number of tokens; the prefix cache
is emptied before every run, so that what is reused is reused within one batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvx.bench.generate_transformers import Prompts, greedy, model_of
from kvx.bench.harness import Timing, machine, summarise
from kvx.runner import Engine, Params, small_model
from kvx.runner.model import Model


@dataclass(frozen=True)
class GenerateRow:
    case: str
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int  # of the whole batch
    equal_texts: int
    num_texts: int
    ours: Timing
    transformers: Timing
    ours_first: Timing  # until every prompt has its first token
    transformers_first: Timing

    @property
    def ratio(self) -> float:
        return self.transformers.median_us / self.ours.median_us

    def __str__(self) -> str:
        a, b, texts = self.ours, self.transformers, self.num_texts
        after = (b.median_us - self.transformers_first.median_us) / (a.median_us - self.ours_first.median_us)
        return (
            f" {self.case}: {self.prompt_tokens} prompt tokens, {self.reused_tokens} of them reused; {self.new_tokens} new ones\n"
            f"   kvx          {_rate(self.new_tokens, a)} | {texts} first tokens {self.ours_first.median_us / 1e6:5.2f} s\n"
            f"   transformers {_rate(self.new_tokens, b)} | {texts} first tokens {self.transformers_first.median_us / 1e6:5.2f} s\n"
            f"   {self.ratio:.2f}x; {after:.2f}x after the first tokens; {self.equal_texts} of {self.num_texts} texts are the same"
        )


def _rate(tokens: int, t: Timing) -> str:
    return f"{tokens / t.median_us * 1e6:6.1f} tokens/s | {t.median_us / 1e6:6.2f} s ({t.p10_us / 1e6:.2f}-{t.p90_us / 1e6:.2f})"


def measure(
    cases: Mapping[str, tuple[Sequence[str], str]],  # name: questions, and what is said before each of them
    *,
    dtype: str,
    device: str = "cpu",
    new_tokens: int = 48,  # an answer
    repeats: int = 3,
) -> dict[str, Any]:
    begin = time.perf_counter()
    engine = Engine.load(small_model(), dtype=dtype, device=device)
    load_s, first_s = time.perf_counter() - begin, 0.0
    assert isinstance(engine.model, Model)
    theirs = model_of(engine.model)
    rows: list[GenerateRow] = []
    for name, (questions, system) in cases.items():
        assert engine.tokenizer is not None
        prompts = [engine.tokenizer.chat(q, system) for q in questions]
        if not rows:
            begin = time.perf_counter()
            next(iter(engine.stream(prompts, Params(max_tokens=1))))
            first_s = load_s + time.perf_counter() - begin
        rows.append(_row(name, engine, theirs, prompts, new_tokens, repeats))
    return {
        "bench": "generate",
        "model": "SmolLM2-135M-Instruct",
        "dtype": dtype,
        "machine": machine(device),
        "load_s": load_s,
        "first_token_s": first_s,
        "rows": [{**asdict(r), "ratio": r.ratio} for r in rows],
    }


def _row(name: str, engine: Engine, theirs: Any, prompts: Prompts, new_tokens: int, repeats: int) -> GenerateRow:
    before = engine.scheduler.counts.reused_tokens
    want, got = _their_tokens(theirs, prompts, new_tokens), _our_tokens(engine, prompts, new_tokens)
    reused = engine.scheduler.counts.reused_tokens - before
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):  # by turns, so that a busy machine is busy for both
        for n in (new_tokens, 1):
            for who, call, model in (("ours", _our_tokens, engine), ("theirs", _their_tokens, theirs)):
                begin = time.perf_counter()
                call(model, prompts, n)
                seconds.setdefault(f"{who} {n}", []).append((time.perf_counter() - begin) * 1e6)
    ours, transformers, ours_first, transformers_first = (
        summarise(seconds[f"{who} {n}"]) for n in (new_tokens, 1) for who in ("ours", "theirs")
    )
    return GenerateRow(
        name, sum(map(len, prompts)), reused, len(prompts) * new_tokens, sum(a == b for a, b in zip(want, got, strict=True)),
        len(prompts), ours, transformers, ours_first, transformers_first,
    )  # fmt: skip


def _our_tokens(engine: Engine, prompts: Prompts, n: int) -> list[list[int]]:
    engine.reset()
    answers = engine.generate(prompts, Params(max_tokens=n, ignore_eos=True))
    return [list(a[0].tokens) for a in answers]


def _their_tokens(model: Any, prompts: Prompts, n: int) -> list[list[int]]:
    return greedy(model, prompts, n, eos_id=None)


def show(result: dict[str, Any]) -> str:
    lines = [f" opened in {result['load_s']:.1f} s, first token {result['first_token_s']:.1f} s from there, {result['dtype']}"]
    for r in result["rows"]:
        times = {k: Timing(**v) for k, v in r.items() if isinstance(v, dict)}
        lines.append(str(GenerateRow(**{k: v for k, v in {**r, **times}.items() if k != "ratio"})))
    return "\n".join(lines)
