"""Tails: what a compressor keeps of tokens whose entry is not complete, for each request. This is the definition of its arithmetic.

An entry is, for each channel, the mean of its tokens' kv weighed by a softmax over their scores. Tokens come in chunks of any
length; entries come out as their last token goes in, as if all tokens had come at once. What is kept, in f32:

    overlap    of the open window both projections, of the one before the first: [slot, (before, ovl, cur), ratio, (kv, score), dim]
    ring       of the open window its tokens: [slot, 1, ratio, (kv, score), dim]
    running    of the open window the largest score, the sum of weights, and the mean: [slot, 3, dim]

Scores have their bias when they come. Places that no token has are kv 0 and score -inf, which weighs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument

TAILS = ("running", "ring")  # of layers without overlap: maximum, sum and mean so far; or all tokens of the open window
BEFORE, OVL, CUR = range(3)
KV, SCORE = range(2)


def tail_shape(ratio: int, dim: int, *, overlap: bool, kind: str) -> tuple[int, ...]:
    """Of one request's."""
    if kind == "running" and not overlap:
        return 3, dim
    return 3 if overlap else 1, ratio, 2, dim


class Tail:
    def __init__(
        self,
        ratio: int,
        dim: int,
        num_slots: int,
        *,
        overlap: bool = False,
        kind: str = "running",
        device: str | torch.device = "cpu",
        state: Tensor | None = None,  # f32, of as many numbers: where it is kept; None: memory of its own
    ) -> None:
        if ratio < 1 or dim < 1 or num_slots < 1 or kind not in TAILS:
            raise BadArgument(
                f'Tail: ratio {ratio}, dim {dim}, {num_slots} slots, kind "{kind}": numbers are 1 or more, kinds '
                f"{' and '.join(TAILS)}."
            )
        self.ratio, self.dim, self.overlap = ratio, dim, overlap
        self.is_running = kind == "running" and not overlap
        shape = (num_slots, *tail_shape(ratio, dim, overlap=overlap, kind=kind))
        self.state = torch.empty(shape, dtype=torch.float32, device=device) if state is None else state.view(shape)
        self.reset()

    def reset(self, slot: int | slice = slice(None)) -> None:
        """As before the first token. A slot that goes to another request needs it: its places are read."""
        state = self.state[slot]
        state.zero_()
        scores = state[..., 0, :] if self.is_running else state[..., SCORE, :]
        scores.fill_(-torch.inf)

    @property
    def num_parts(self) -> int:
        """Projections of a token: with overlap (ovl, cur), what it gives to the next entry and to its own."""
        return 2 if self.overlap else 1

    def take(self, slot: int, start: int, kv: Tensor, score: Tensor) -> Tensor:
        """Tokens from position `start` on, [tokens, num_parts * dim] each. What they complete: [entries, dim], not normed."""
        want = [len(kv), self.num_parts * self.dim]
        if list(kv.shape) != want or kv.shape != score.shape:
            raise BadArgument(f"Tail.take(): kv is {list(kv.shape)}, score {list(score.shape)}; {len(kv)} tokens take {want}.")
        kv, score = kv.to(torch.float32), score.to(torch.float32)
        tokens = torch.stack((kv, score), 1).view(len(kv), 2, self.num_parts, self.dim)
        taken = self._take_running if self.is_running else self._take_tokens
        return taken(self.state[slot], start % self.ratio, tokens)

    def _take_tokens(self, state: Tensor, num_open: int, tokens: Tensor) -> Tensor:
        """All windows side by side: the one before, those that close now, and the one that stays open."""
        streams = [torch.cat((state[-self.num_parts + i, :num_open], tokens[:, :, i])) for i in range(self.num_parts)]
        closed = len(streams[0]) // self.ratio
        cur = streams[-1][: closed * self.ratio].view(closed, self.ratio, 2, self.dim)
        slots = cur
        if self.overlap:
            ovl = streams[0][: closed * self.ratio].view(closed, self.ratio, 2, self.dim)
            slots = torch.cat((torch.cat((state[BEFORE : BEFORE + 1], ovl))[:closed], cur), 1)
        pooled = (slots[:, :, SCORE].softmax(1) * slots[:, :, KV]).sum(1)
        if self.overlap and closed:
            state[BEFORE] = ovl[-1]
        left = len(streams[0]) - closed * self.ratio
        for i, stream in enumerate(streams):
            window = state[-self.num_parts + i]
            window[:, KV], window[:, SCORE] = 0.0, -torch.inf
            window[:left] = stream[closed * self.ratio :]
        return pooled

    def _take_running(self, state: Tensor, num_open: int, tokens: Tensor) -> Tensor:
        pooled, at = [], 0
        while at < len(tokens):
            part = tokens[at : at + self.ratio - num_open, :, 0]
            top = torch.maximum(state[0], part[:, SCORE].amax(0))
            kept, added = state[1] * (state[0] - top).exp(), (part[:, SCORE] - top).exp()
            total = kept + added.sum(0)
            mean = (state[2] * kept + (part[:, KV] * added).sum(0)) / total
            state[0], state[1], state[2] = top, total, mean
            at, num_open = at + len(part), num_open + len(part)
            if num_open == self.ratio:
                pooled.append(mean)
                state[0], state[1:], num_open = -torch.inf, 0.0, 0
        return torch.stack(pooled) if pooled else tokens.new_zeros(0, self.dim)
