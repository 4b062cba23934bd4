"""transpose_heads: [tokens, heads, dim] to [heads, tokens, dim], or back. The torch body below is the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops.append.norm_rope import PLAIN, norm_rope


def transpose_heads(
    x: Tensor,  # [a, b, head_dim] f16, bf16 or f32, any strides
    *,
    out: Tensor | None = None,  # [b, a, head_dim], any strides; not x's memory
    backend: str = "auto",
) -> Tensor:
    """x with its first two dimensions exchanged, as memory. Bits are copied; natively it is qk_norm_rope without either."""
    call = "transpose_heads"
    x = backends.as_tensor(call, "x", x)
    if x.dim() != 3:
        raise BadArgument(
            f"{call}(): x is {list(x.shape)}; it must be [num_tokens, heads, head_dim] or [heads, num_tokens, head_dim]."
        )
    shape = (x.shape[1], x.shape[0], x.shape[2])
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if tuple(out.shape) != shape or out.dtype != x.dtype:
        raise BadArgument(f"{call}(): out is {list(out.shape)} {out.dtype}; it must be {list(shape)} {x.dtype}.")
    check_memory(call, backend, x=x, out=out)
    if backends.choose(call, backend, x) == "torch":
        check_apart(call, out=out)
        out.copy_(x.transpose(0, 1))
    elif x.numel():
        norm_rope(call, (out.transpose(0, 1),), (x,), PLAIN, None, backend)
    return out
