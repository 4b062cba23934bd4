"""What happens to a row of a hybrid cache before it is coded: RMSNorm, rotation of its last elements, a Hadamard rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.ops.norm_rope import rms_norm


def finish_rows(
    x: Tensor,  # [rows, dim] f32
    positions: Tensor,  # [rows]
    weight: Tensor | None = None,  # [dim]; None: no norm
    cos: Tensor | None = None,  # [max_positions, rope_dim / 2] f32; None: no rotation
    sin: Tensor | None = None,
    eps: float = 1e-6,
    *,
    has_hadamard: bool = False,
) -> Tensor:
    """[rows, dim] f32. Every operation is rounded once and in this order, so that backends agree bit for bit."""
    if weight is not None:
        x = rms_norm(x, weight.to(torch.float32), eps)
    if cos is not None and sin is not None:
        x = turn(x, cos[positions.long()], sin[positions.long()])
    return hadamard(x) if has_hadamard else x


def turn(x: Tensor, c: Tensor, s: Tensor, *, back: bool = False) -> Tensor:
    """Pairs (2i, 2i + 1) of the last dims of x [rows, ..., dim] by c and s [rows, pairs]; back: the other way."""
    c, s = (t.view(len(x), *([1] * (x.dim() - 2)), t.shape[-1]) for t in (c, -s if back else s))
    split = x.shape[-1] - 2 * c.shape[-1]
    lo, hi = x[..., split::2], x[..., split + 1 :: 2]
    y = x.clone()
    y[..., split::2], y[..., split + 1 :: 2] = lo * c - hi * s, hi * c + lo * s
    return y


def hadamard(x: Tensor) -> Tensor:
    """x [..., dim] through the orthonormal Walsh-Hadamard matrix: neighbours first, then pairs, fours, ...; then times dim^-0.5."""
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise BadArgument(f"hadamard(): {dim} elements; a Walsh-Hadamard matrix takes a power of two.")
    y, width = x.to(torch.float32), 1
    while width < dim:
        pairs = y.unflatten(-1, (dim // (2 * width), 2, width))
        y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        width *= 2
    return y * torch.tensor(dim**-0.5, dtype=torch.float32, device=x.device)
