"""What happens to a row of a hybrid cache before it is coded: RMSNorm, rotation of its last elements, a Hadamard rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.ops.append.norm_rope import rms_norm
from kvx.ops.entry.step import FLOATS


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


# What the library checks too, for the torch bodies: the same errors, before anything is written.


def check_turn(call: str, cos: Tensor | None, last: int) -> None:
    if cos is not None and last >= len(cos):
        raise OutOfRange(f"{call}(): position {last}: cos and sin have {len(cos)} rows. Nothing was written.")


def check_finish(call: str, dim: int, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float = 0.0) -> None:
    """Norm and rotation of rows of `dim` elements."""
    if (cos is None) != (sin is None):
        raise BadArgument(f"{call}(): cos and sin are given together or not at all.")
    if cos is not None and sin is not None:
        is_table = cos.dim() == 2 and cos.numel() > 0 and 2 * cos.shape[1] <= dim
        if not is_table or cos.shape != sin.shape or {cos.dtype, sin.dtype} != {torch.float32}:
            raise BadArgument(
                f"{call}(): cos is {list(cos.shape)} {cos.dtype}, sin {list(sin.shape)} {sin.dtype}; cos and sin are alike "
                f"[max_positions, rope_dim / 2] float32, and rope_dim at most {dim}."
            )
    if weight is None:
        return
    if list(weight.shape) != [dim] or weight.dtype not in FLOATS:
        raise BadArgument(f"{call}(): weight is {list(weight.shape)} {weight.dtype}; it must be [{dim}] f16, bf16 or f32.")
    if not eps >= 0:
        raise BadArgument(f"{call}(): eps is {eps}; it must be 0 or more.")
