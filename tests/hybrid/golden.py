"""The attention of DeepSeek-V4 restated in plain torch: one small function a step, no cache, whole sequences in.

Row t of every per-token tensor is position t. Any float dtype: float64 judges float32. Weights are [out, in], as torch.nn.Linear
keeps them. `cur` is what a token gives to the entry of its own window, `ovl` what it gives to the next one: two projections, never
copies of each other. In a fused projection `ovl` is the first half of the channels and `cur` the second.
tests/hybrid/models.py has the weights, and transformers' word on every tensor here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # of every norm
INF = float("inf")


class Projected(NamedTuple):
    """What the pool reads of each token."""

    kv: Tensor  # [num_tokens, dim]
    score: Tensor  # [num_tokens, dim], the slot's bias added


@dataclass(frozen=True)
class Layer:
    """All tensors of one layer's attention over one sequence. None where the kind of layer has no such thing."""

    ratio: int  # 0: window only, 4: CSA, 128: HCA
    x: Tensor  # [num_tokens, hidden], normed
    q: Tensor  # [num_tokens, num_heads, head_dim], rotated
    window: Tensor  # [num_tokens, head_dim], rotated: K and V of the tokens themselves
    entries: Tensor | None  # [num_entries, head_dim], rotated
    index_q: Tensor | None  # [num_tokens, index_heads, index_dim], rotated
    index_keys: Tensor | None  # [num_entries, index_dim], rotated
    index_scores: Tensor | None  # [num_tokens, num_entries], nothing masked
    selected: Tensor | None  # [num_tokens, topk] int64, -1 behind the last. CSA: best first; HCA: all it may read
    attended: Tensor  # [num_tokens, num_heads, head_dim], still rotated
    out: Tensor  # [num_tokens, hidden]


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return normed if weight is None else normed * weight


def frequencies(dim: int, theta: float) -> Tensor:
    """Radians a position for each pair, float64. Layers without a compressor use this with theta 10000."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_range(dim: int, theta: float, *, original: int, beta_fast: float, beta_slow: float) -> tuple[int, int]:
    """The pairs between which YaRN goes over from the plain frequency to the divided one."""

    def pair_with(turns: float) -> float:  # the pair that turns so often over the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair_with(beta_fast)), 0), min(math.ceil(pair_with(beta_slow)), dim - 1)


def yarn(dim: int, theta: float, *, factor: float, original: int, beta_fast: float = 32, beta_slow: float = 1) -> Tensor:
    """Frequencies of layers that have a compressor. Cos and sin are not scaled: V4 leaves YaRN's mscale out."""
    low, high = yarn_range(dim, theta, original=original, beta_fast=beta_fast, beta_slow=beta_slow)
    plain = frequencies(dim, theta)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def rotate(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """Turn the pairs (0, 1), (2, 3), ... of the last 2 * len(freqs) dims of x [num_rows, ..., dim] by position times frequency."""
    plain, turned = x.split([x.shape[-1] - 2 * len(freqs), 2 * len(freqs)], dim=-1)
    angle = positions.to(x.dtype)[:, None] * freqs.to(x.dtype)
    angle = angle.view(len(positions), *[1] * (x.dim() - 2), len(freqs))
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()]
    return torch.cat([plain, torch.stack(pairs, dim=-1).flatten(-2)], dim=-1)


def unrotate(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """K is V, so what was attended carries the keys' rotation; turning back by the query's position leaves the distance."""
    return rotate(x, -positions, freqs)


def rows(x: Tensor) -> Tensor:
    return torch.arange(len(x))


def window_kv(x: Tensor, w_kv: Tensor, norm: Tensor, freqs: Tensor) -> Tensor:
    return rotate(rms(F.linear(x, w_kv), norm), rows(x), freqs)


def query_latent(x: Tensor, w_a: Tensor, norm: Tensor) -> Tensor:
    """What the queries and the index queries are both made from."""
    return rms(F.linear(x, w_a), norm)


def queries(latent: Tensor, w_b: Tensor, freqs: Tensor, *, head_dim: int) -> Tensor:
    return rotate(rms(F.linear(latent, w_b).unflatten(-1, (-1, head_dim))), rows(latent), freqs)


def project_hca(x: Tensor, w_kv: Tensor, w_gate: Tensor, bias: Tensor) -> Projected:
    """bias [ratio, dim]: one row a slot of the window."""
    return Projected(F.linear(x, w_kv), F.linear(x, w_gate) + bias[rows(x) % len(bias)])


def project_csa(x: Tensor, w_kv: Tensor, w_gate: Tensor, bias: Tensor) -> tuple[Projected, Projected]:
    """(ovl, cur)."""
    both = project_hca(x, w_kv, w_gate, bias)
    (ovl_kv, cur_kv), (ovl_score, cur_score) = both.kv.chunk(2, dim=-1), both.score.chunk(2, dim=-1)
    return Projected(ovl_kv, ovl_score), Projected(cur_kv, cur_score)


def pool_windows(cur: Projected, ratio: int, ovl: Projected | None = None) -> Tensor:
    """One row for each whole window: a softmax over its slots, each channel its own, weighs their kv.

    With `ovl` the slots of the window before come first; window 0 has none before it.
    """
    pooled = []
    for end in range(ratio, len(cur.kv) + 1, ratio):
        slots = [(cur, end - ratio, end)]
        if ovl is not None and end > ratio:
            slots.insert(0, (ovl, end - 2 * ratio, end - ratio))
        kv = torch.cat([p.kv[a:b] for p, a, b in slots])
        score = torch.cat([p.score[a:b] for p, a, b in slots])
        pooled.append((score.softmax(0) * kv).sum(0))
    return torch.stack(pooled) if pooled else cur.kv[:0]


def pool_online(cur: Projected, ratio: int) -> Tensor:
    """pool_windows without overlap, one token at a time: three rows of state in place of `ratio` tokens."""
    pooled = []
    for t, (kv, score) in enumerate(zip(*cur, strict=True)):
        if t % ratio == 0:
            top, total, mean = torch.full_like(score, -INF), torch.zeros_like(score), torch.zeros_like(kv)
        new_top = torch.maximum(top, score)
        kept, added = total * (top - new_top).exp(), (score - new_top).exp()
        mean = (mean * kept + kv * added) / (kept + added)
        top, total = new_top, kept + added
        if (t + 1) % ratio == 0:
            pooled.append(mean)
    return torch.stack(pooled) if pooled else cur.kv[:0]


def finish_entries(pooled: Tensor, norm: Tensor, freqs: Tensor, *, ratio: int) -> Tensor:
    """An entry is rotated to the first token of its own window, overlap or not."""
    return rotate(rms(pooled, norm), rows(pooled) * ratio, freqs)


def index_keys(ovl: Projected, cur: Projected, norm: Tensor, freqs: Tensor, *, ratio: int) -> Tensor:
    """The indexer has a small CSA compressor of its own."""
    return finish_entries(pool_windows(cur, ratio, ovl), norm, freqs, ratio=ratio)


def index_queries(latent: Tensor, w_q: Tensor, freqs: Tensor, *, index_dim: int) -> Tensor:
    """Rotated, not normed."""
    return rotate(F.linear(latent, w_q).unflatten(-1, (-1, index_dim)), rows(latent), freqs)


def head_weights(x: Tensor, w: Tensor, *, index_dim: int) -> Tensor:
    """[num_tokens, index_heads], with both scales of the score in it."""
    return F.linear(x, w) * index_dim**-0.5 * len(w) ** -0.5


def index_scores(index_q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("th,thj->tj", weights, torch.einsum("thd,jd->thj", index_q, keys).relu())


def num_visible(positions: Tensor, ratio: int) -> Tensor:
    """Entries that a token may read. The token that closes a window reads its entry: (t + 1) // ratio, not t // ratio."""
    return (positions + 1) // ratio


def select(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """[num_tokens, topk]: the visible entries of the highest scores, best first, ties to the lower index, then -1."""
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    order = scores.masked_fill(hidden, -INF).argsort(dim=-1, descending=True, stable=True)[:, :topk]
    order = F.pad(order, (0, topk - order.shape[1]), value=-1)
    return order.masked_fill(torch.arange(topk) >= visible[:, None], -1)


def select_all(visible: Tensor, num_entries: int) -> Tensor:
    """HCA's choice: [num_tokens, num_entries], every visible entry, then -1."""
    entry = torch.arange(num_entries)
    return torch.where(entry < visible[:, None], entry, -1)


def attend(
    q: Tensor, window: Tensor, entries: Tensor | None = None, selected: Tensor | None = None, *, sinks: Tensor, num_window: int
) -> Tensor:
    """Each token reads itself, the num_window - 1 before it, and its selected entries. A sink takes weight and gives nothing."""
    out = []
    for t, heads in enumerate(q):
        keys = window[max(0, t + 1 - num_window) : t + 1]
        if entries is not None:
            keys = torch.cat([keys, entries[selected[t][selected[t] >= 0]]])
        logits = torch.cat([heads @ keys.T * q.shape[-1] ** -0.5, sinks[:, None]], dim=-1)
        out.append(logits.softmax(-1)[:, :-1] @ keys)
    return torch.stack(out)


def project_out(attended: Tensor, w_a: Tensor, w_b: Tensor, *, groups: int) -> Tensor:
    """attended [num_tokens, num_heads, head_dim], turned back. Each group of heads is narrowed alone, then all are mixed."""
    narrow = torch.einsum("tgi,goi->tgo", attended.reshape(len(attended), groups, -1), w_a.unflatten(0, (groups, -1)))
    return F.linear(narrow.flatten(1), w_b)
