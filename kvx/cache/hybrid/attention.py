"""Attention over a hybrid cache, as it is defined: which entries a token chooses, and what it makes of them and of its window."""

from __future__ import annotations

import torch
from torch import Tensor


def num_visible(positions: Tensor, ratio: int) -> Tensor:
    """Entries a token may read: the token that closes a window reads its entry."""
    return (positions + 1) // ratio


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """[tokens, entries] f32 of q [tokens, heads, dim], weights [tokens, heads], keys [entries, dim]; -inf from `visible` on."""
    products = torch.einsum("thd,jd->thj", q.float(), keys.float()).relu()
    scores = torch.einsum("th,thj->tj", weights.float(), products)
    return scores.masked_fill(torch.arange(len(keys), device=keys.device) >= visible[:, None], -torch.inf)


def topk(scores: Tensor, k: int) -> Tensor:
    """[tokens, k] int32: the entries of the highest scores, best first, ties to the lower index, -1 where there are no more."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
    chosen = order.masked_fill(scores.gather(1, order) == -torch.inf, -1)
    padded = chosen.new_full((len(scores), k), -1)
    padded[:, : chosen.shape[1]] = chosen
    return padded.to(torch.int32)


def every_entry(visible: Tensor, num_entries: int) -> Tensor:
    """[tokens, num_entries] int32: all a token may read, then -1. For layers without an indexer."""
    entries = torch.arange(num_entries, dtype=torch.int32, device=visible.device)
    return torch.where(entries < visible[:, None], entries, -1)


def attention_sparse(
    q: Tensor,  # [tokens, heads, dim], rotated
    positions: Tensor,  # [tokens]
    rows: Tensor,  # [num_rows, dim]: keys and values of tokens, this chunk's too
    row_positions: Tensor,  # [num_rows]
    window: int,
    entries: Tensor,  # [num_entries, dim]
    selected: Tensor,  # [tokens, k], -1: none
    *,
    sinks: Tensor | None = None,  # [heads]: takes weight and gives nothing
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, dim] f32 and lse [tokens, heads], natural and without the sink. Keys are values."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    distance = positions[:, None] - row_positions[None, :]
    seen = (distance >= 0) & (distance < window)
    # One column for each entry: a token may choose it or not, and never twice.
    chosen = torch.zeros(len(q), len(entries) + 1, dtype=torch.bool, device=q.device)
    chosen.scatter_(1, torch.where(selected < 0, len(entries), selected).long(), True)
    keys = torch.cat((rows, entries)).float()
    scores = torch.einsum("thd,nd->thn", q.float(), keys) * scale
    scores = scores.masked_fill(~torch.cat((seen, chosen[:, :-1]), 1)[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.float().expand_as(lse))
    weights = (scores - total[..., None]).exp().nan_to_num(0.0)  # nothing seen, and no sink: zeros
    return torch.einsum("thn,nd->thd", weights, keys), lse
