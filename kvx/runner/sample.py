"""Next tokens from logits, on the device: greedy, temperature, top-k, top-p, each row by its own parameters.

One number drawn on the host decides a row, so a seed gives the same text in any company. Only ids come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """How one row's token is chosen."""

    temperature: float = 0.0  # 0: the likeliest
    top_k: int = 0  # of the k likeliest; 0: all
    top_p: float = 1.0  # of the likeliest that together have this share
    uniform: float = 0.0  # in [0, 1): where in the row's distribution


@torch.inference_mode()
def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """[rows] int64 ids of [rows, vocab] logits."""
    greedy = logits.max(-1).indices  # a third of the time of argmax on a CPU
    hot = [i for i, d in enumerate(draws) if d.temperature > 0]
    if not hot:
        return greedy
    rows = torch.tensor(hot, device=logits.device)
    greedy[rows] = _sample_rows(logits[rows], [draws[i] for i in hot])
    return greedy


def _sample_rows(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    vocab = logits.shape[1]
    numbers = torch.tensor([(d.temperature, d.top_k or vocab, d.top_p, d.uniform) for d in draws], device=logits.device)
    temperature, top_k, top_p, uniform = numbers[:, :, None].unbind(1)
    width = min(vocab, max(d.top_k or vocab for d in draws))  # nothing past the largest k can be drawn
    values, ids = torch.topk(logits.float(), width) if width < vocab else logits.float().sort(descending=True)
    # The largest is taken away first: a small temperature then cannot overflow.
    weights = ((values - values[:, :1]) / temperature).exp()
    weights = weights.masked_fill(torch.arange(width, device=logits.device) >= top_k, 0.0)
    before = weights.cumsum(-1) - weights  # of those likelier
    kept = weights.masked_fill(before >= top_p * weights.sum(-1, keepdim=True), 0.0)
    kept[:, 0] = weights[:, 0]
    edges = kept.cumsum(-1)
    drawn = torch.searchsorted(edges, uniform * edges[:, -1:], right=True)
    # Rounding may point past the last that is kept.
    drawn = drawn.minimum((kept > 0).sum(-1, keepdim=True) - 1)
    return ids.gather(1, drawn)[:, 0]
