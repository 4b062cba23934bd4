"""What is asked for, and one answer as it grows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument
from kvx.runner.sample import Draw


@dataclass(frozen=True)
class Params:
    """How a request is answered."""

    max_tokens: int = 64
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    seed: int = 0
    n: int = 1  # answers
    ignore_eos: bool = False
    snapshot_at: tuple[int, ...] = ()  # of a model with states: lengths of the prompt that others share, as its system prompt's

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "over 0, up to 1"),
            ("n", self.n >= 1, "1 or more"),
            ("snapshot_at", _are_lengths(self.snapshot_at), "a tuple of numbers of tokens, each 0 or more"),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "a tuple of texts, none of them empty"),
        )
        for name, is_right, takes in rules:
            if not is_right:
                raise BadArgument(f"Params(): {name} is {getattr(self, name)!r}; it must be {takes}.")


@dataclass(frozen=True)
class Piece:
    """What a step adds to one answer."""

    request: int
    index: int  # of the request's n answers
    token: int
    text: str  # may be "": within a character, or while a stop string may be coming
    finish: str  # "", or why it is the last: stop, length. A cancelled request has no last one


@dataclass(eq=False)
class Completion:
    """One answer to one request: tokens so far, and its place in the cache while it has one."""

    request: int
    index: int
    tokens: list[int]  # prompt, then what was generated
    num_prompt: int
    params: Params
    limit: int  # length at which it ends
    siblings: list[Completion] = field(default_factory=list)  # that start when this one's prompt is in the cache
    seq: Sequence | None = None
    num_cached: int = -1  # prompt tokens that were found in the cache when it was first admitted; -1: not yet
    text: str = ""
    finish: str = ""

    def __post_init__(self) -> None:
        self._random = random.Random(self.params.seed * 1_000_003 + self.index)
        self._held = ""

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_left(self) -> int:
        """Tokens whose K and V are still to be computed."""
        return len(self.tokens) - (self.seq.length if self.seq is not None else 0)

    def draw(self) -> Draw:
        p = self.params
        return Draw(p.temperature, p.top_k, p.top_p, self._random.random() if p.temperature > 0 else 0.0)

    def push(self, text: str, *, is_last: bool) -> str:
        """Text that may go out now: not past a stop string, nor into what may become one."""
        stop = self.params.stop
        self._held += text
        found = [at for s in stop if (at := self._held.find(s)) >= 0]
        if found:
            out, self._held, self.finish = self._held[: min(found)], "", "stop"
        else:
            longest = 0 if is_last else max((_overlap(self._held, s) for s in stop), default=0)
            out, self._held = self._held[: len(self._held) - longest], self._held[len(self._held) - longest :]
        self.text += out
        return out


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of text that stop begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _are_lengths(given: object) -> bool:
    return isinstance(given, tuple) and all(type(n) is int and n >= 0 for n in given)
