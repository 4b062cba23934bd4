"""gather_sequence: K and V of one sequence, in order. A face of gather for one row of a block table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.ops.append.gather import gather
from kvx.spec.cache_spec import CacheSpec
from kvx.tables import PackedTable


def gather_sequence(
    cache: Tensor | Sequence[Tensor],  # as in write
    blocks: Tensor,  # [max_blocks] int32 or int64: the sequence's row of a block table
    num_tokens: int,
    *,
    spec: CacheSpec,
    dtype: torch.dtype | None = None,  # of the output; None: the cache's, or bfloat16 for a quantised one
    out: tuple[Tensor, Tensor] | None = None,  # K and V to fill: [num_tokens, num_kv_heads, dim], any strides
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    errors: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(k, v), each [num_tokens, num_kv_heads, dim], dequantised; a bad block id is what it is in gather."""
    if blocks.dim() != 1 or blocks.dtype not in (torch.int32, torch.int64):
        raise BadArgument(
            f"gather_sequence(): blocks is {list(blocks.shape)} {blocks.dtype}; it must be [max_blocks] int32 or int64."
        )
    if num_tokens < 1 or num_tokens > blocks.shape[0] * spec.block_size:
        raise BadArgument(
            f"gather_sequence(): num_tokens is {num_tokens}; {blocks.shape[0]} blocks of {spec.block_size} hold 1 to "
            f"{blocks.shape[0] * spec.block_size}."
        )
    length = torch.full((1,), num_tokens, dtype=blocks.dtype, device=blocks.device)
    k, v = gather(
        cache, PackedTable(blocks[None], length), spec=spec, max_seq_len=num_tokens, dtype=dtype, out=out, k_scale=k_scale,
        v_scale=v_scale, k_tensor_scale=k_tensor_scale, v_tensor_scale=v_tensor_scale, errors=errors, backend=backend,
    )  # fmt: skip
    return (k, v) if out is not None else (k[0], v[0])
