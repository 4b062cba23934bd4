"""Rows that stand for no token: before a window's first and behind the last. As new memory is, so that a digest knows them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvx.handover.memory import new_buffers
from kvx.layout.buffers import bytes_of
from kvx.layout.place import num_cache_buffers
from kvx.spec import Granularity, Spec


def padding_block(spec: Spec, buffers: Sequence[Tensor], block: int) -> tuple[list[Tensor], Spec]:
    """A block without tokens, as a cache of one, under the scales that this block shares with others or has for all its rows."""
    one = spec.replaced(num_blocks=1)
    made = list(new_buffers(one))
    at, mine = num_cache_buffers(spec), num_cache_buffers(one)
    for n, granularity in enumerate(_granularities(spec)):
        if granularity.is_stored_per_token:
            continue
        stored = bytes_of(buffers[at + n])
        if granularity in (Granularity.BLOCK, Granularity.BLOCK_HEAD):
            stored = stored.view(spec.num_layers, spec.num_blocks, -1)[:, block].flatten()
        made[mine + n] = stored.clone()
    return made, one


def _granularities(spec: Spec) -> list[Granularity]:
    """Of every buffer of scales, in order; tensor scales last."""
    planes = spec.planes
    scales = [p.format.granularity for i, p in enumerate(planes) if spec.scale_shape(i) is not None]
    return scales + [Granularity.TENSOR for p in planes if p.format.has_tensor_scale]
