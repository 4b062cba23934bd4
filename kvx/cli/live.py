"""What `kvx generate` shows while it runs: a live view on a terminal, plain lines elsewhere, nothing for --json."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvx.runner import Engine

Answers = list[dict[str, Any]]


class View:
    """Called in this order: loading, start, show for each piece, finish."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def loading(self, done: int, total: int) -> None: ...

    def start(self, engine: Engine, answers: Answers, note: str = "") -> None: ...

    def show(self, answer: dict[str, Any]) -> None: ...

    def finish(self, answers: Answers) -> None: ...


class JsonView(View):
    """The object is printed when all is done."""


class PlainView(View):
    """A line when loading begins, and each answer when it is whole: lines of several would mix."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: set[int] = set()

    def loading(self, done: int, total: int) -> None:
        if done == 1:
            self._console.print(f"Loading {total} layers.")

    def start(self, engine: Engine, answers: Answers, note: str = "") -> None:
        spec = engine.cache.groups[0].spec.of_kv
        blocks = f"{_count(spec.num_blocks, 'block')} of {spec.block_size} tokens"
        self._console.print(f"{_count(len(answers), 'answer')}, a cache of {blocks}, KV format {spec.format}.")
        self._console.print(f"{note}\n" if note else "", markup=False, soft_wrap=True)

    def show(self, answer: dict[str, Any]) -> None:
        if answer["finish"]:
            self._print(answer)

    def finish(self, answers: Answers) -> None:
        for answer in answers:
            if id(answer) not in self._shown and answer["tokens"]:
                self._print(answer)  # cut off by Ctrl-C

    def _print(self, answer: dict[str, Any]) -> None:
        self._shown.add(id(answer))
        end = "" if answer["finish"] == "stop" else " ..."
        self._console.print(f"> {answer['prompt']}", markup=False, soft_wrap=True)
        self._console.print(f"{answer['text'].strip()}{end}", markup=False, soft_wrap=True)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


class LiveView(PlainView):
    """Texts as they grow under what the cache does. When it is over the view goes, and the answers stay."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._engine: Engine | None = None
        self._answers: Answers = []
        self._begin = time.perf_counter()
        self._loading = Text("Loading the model.")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def loading(self, done: int, total: int) -> None:
        self._loading = Text(f"Loading the model: {done} of {total} layers.")

    def start(self, engine: Engine, answers: Answers, note: str = "") -> None:
        if note:
            self._console.print(note, markup=False, soft_wrap=True)
        self._engine, self._answers, self._begin = engine, answers, time.perf_counter()

    def show(self, answer: dict[str, Any]) -> None:
        return None  # the live view looks by itself

    def _render(self) -> RenderableType:
        if self._engine is None:
            return self._loading
        # One line for each answer at least; what is left of the screen is shared.
        height, width = self._console.height - 6, self._console.width
        lines = max(1, height // max(1, len(self._answers)) - 1)
        texts = Table.grid(padding=(0, 1))
        for a in self._answers[: max(1, height // (lines + 1))]:
            tail = " ".join(a["text"].split())[-(width - 4) * lines :]
            texts.add_row(
                Text("■" if a["finish"] else "▶" if a["tokens"] else "·", "green" if a["finish"] else "yellow"),
                Text(a["prompt"], "bold"),
            )
            texts.add_row("", Text(tail))
        return Group(_facts(self._engine, time.perf_counter() - self._begin), texts)


def _facts(engine: Engine, seconds: float) -> RenderableType:
    stats, cache = engine.stats(), engine.cache.stats()
    group = cache.groups[0]
    share = stats["reused_tokens"] / stats["prompt_tokens"] if stats["prompt_tokens"] else 0.0
    scheduler = engine.scheduler
    width = 32
    used = round(group.num_used / group.num_blocks * width)
    idle = min(width - used, round(group.num_idle / group.num_blocks * width))
    bar = Text.assemble(("█" * used, "cyan"), ("▒" * idle, "blue"), ("░" * (width - used - idle), "dim"))
    grid = Table.grid(padding=(0, 2))
    grid.add_row("blocks", bar, f"{group.num_used} used, {group.num_idle} cached, {group.num_free} free")
    grid.add_row(
        "prefix", f"{stats['reused_tokens']} of {stats['prompt_tokens']} prompt tokens from the prefix cache ({share:.0%})", ""
    )
    grid.add_row("speed", f"{stats['generated_tokens'] / max(seconds, 1e-9):.1f} tokens/s", f"{stats['generated_tokens']} tokens")
    grid.add_row(
        "KV", f"{cache.used_bytes / 1e6:.1f} MB in use, {stats['kv_format']}",
        f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, {stats['preemptions']} preempted",
    )  # fmt: skip
    if (t := stats["tiers"]) is not None:
        grid.add_row(
            "tiers",
            f"{stats['brought_tokens']} tokens loaded from tiers",
            f"{t['offloaded']} blocks offloaded, {t['offloaded_bytes'] / 1e6:.1f} MB",
        )
    return grid
