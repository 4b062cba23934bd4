"""Scales that more than one sequence is stored under: of a whole layer's tensor, or of a head of it.

A conversion within one format copies them along with the elements. Where two sides have different ones, elements must be
quantised anew instead, or what others have there would be read under a scale that is not theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, equal

from kvx.errors import BadArgument
from kvx.layout.buffers import bytes_of
from kvx.layout.place import scale_places, tensor_scale_buffers
from kvx.spec import CacheSpec, Granularity


class _Shared(NamedTuple):
    by_head: bool
    stored: Tensor  # [num_layers, num_kv_heads or 1, bytes], in host memory


def have_one_format(a: CacheSpec, b: CacheSpec) -> bool:
    """Whether elements move between the two as they are."""
    plain = [[replace(p.format, name="", is_inline=False) for p in s.planes] for s in (a, b)]
    return plain[0] == plain[1]


def differ(a: CacheSpec, a_buffers: Sequence[Tensor], b: CacheSpec, b_buffers: Sequence[Tensor]) -> bool:
    """Whether two caches of one format have different shared scales, in layers and heads that both have."""
    layer, head = max(a.layer_start, b.layer_start), max(a.head_start, b.head_start)
    layers = max(0, min(a.layer_start + a.num_layers, b.layer_start + b.num_layers) - layer)
    heads = max(0, min(a.head_start + a.num_kv_heads, b.head_start + b.num_kv_heads) - head)
    for mine, theirs in zip(_shared(a, a_buffers), _shared(b, b_buffers), strict=True):
        rows = []
        for spec, (by_head, stored) in ((a, mine), (b, theirs)):
            at = stored[layer - spec.layer_start :][:layers]
            rows.append(at[:, head - spec.head_start :][:, :heads] if by_head else at)
        if not equal(*rows):
            return True
    return False


def require_one_scale(call: str, ranks: Iterable[tuple[CacheSpec, Sequence[Tensor]]]) -> None:
    """BadArgument where ranks have scales of their own for what is one tensor when they are joined."""
    seen: dict[tuple[int, int], Tensor] = {}
    for spec, buffers in ranks:
        for n, (by_head, stored) in enumerate(_shared(spec, buffers)):
            for layer in range(0 if by_head else spec.num_layers):
                if not equal(seen.setdefault((n, spec.layer_start + layer), stored[layer]), stored[layer]):
                    raise BadArgument(
                        f"{call}(): ranks have different scales for one tensor of {spec.format}; joined, they would have one. "
                        'Give them another format first, such as format="bf16".'
                    )


def _shared(spec: CacheSpec, buffers: Sequence[Tensor]) -> list[_Shared]:
    """K's and V's where they have them, then their tensor scales."""
    found = [
        (plane.format.granularity == Granularity.HEAD, place.buffer)
        for place, plane in zip(scale_places(spec), spec.planes, strict=True)
        if place is not None and plane.format.granularity in (Granularity.TENSOR, Granularity.HEAD)
    ]
    found += [(False, n) for n in tensor_scale_buffers(spec) if n >= 0]
    out = []
    for by_head, n in found:
        heads = spec.num_kv_heads if by_head else 1
        data = bytes_of(buffers[n]).cpu()  # f32, all of them
        out.append(_Shared(by_head, data[: 4 * spec.num_layers * heads].view(spec.num_layers, heads, 4)))
    return out
