"""copy_blocks: whole blocks inside one layer's cache, scales included. The torch body below is the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.layout.gate import check_apart, check_memory
from kvx.layout.planes import cache_tensors, views
from kvx.ops import backend as backends
from kvx.ops import native, scales, structs
from kvx.ops.door_spec import door_spec
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.formats import Granularity

_CALL = "copy_blocks"
_WITH_BLOCKS = (Granularity.BLOCK, Granularity.BLOCK_HEAD, Granularity.TOKEN_HEAD, Granularity.GROUP)
_call = native.entry("kvx_door_copy_blocks")


def copy_blocks(
    cache: Tensor | Sequence[Tensor],  # as in write; changed in place
    pairs: Tensor | Sequence[tuple[int, int]],  # [num_pairs, 2] int32 or int64: source, destination; negative skips
    *,
    spec: CacheSpec,
    k_scale: Tensor | None = None,  # copied where they have a block axis
    v_scale: Tensor | None = None,
    errors: Tensor | None = None,  # one int64 on the device: pairs outside the cache are added to it
    backend: str = "auto",
) -> None:
    """Copy block `source` to block `destination`, for each pair: the copy of copy-on-write.

    No block may be a destination twice, or a source and a destination. Pairs on the host are checked for that and for range
    before anything is copied (and sent to the device, where the cache is on one); pairs on a device are skipped and counted in
    `errors` when out of range.
    """
    tensors = cache_tensors(
        cache if isinstance(cache, Tensor) else tuple(backends.as_tensor(_CALL, "cache", c) for c in cache), spec
    )
    if not isinstance(pairs, Tensor):
        pairs = torch.tensor(list(pairs), dtype=torch.int64).reshape(-1, 2)
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype not in (torch.int32, torch.int64):
        raise BadArgument(
            f"{_CALL}(): pairs is {list(pairs.shape)} {pairs.dtype}; it is [num_pairs, 2] int32 or int64: source, destination."
        )
    extra = (k_scale, v_scale, None, None, None, None, errors)
    scales.require(_CALL, spec, extra)
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(_CALL, cache=tensors, pairs=pairs, scales=extra)
    chosen = backends.choose(_CALL, backend, tensors[0])
    if pairs.is_cpu and (chosen == "torch" or tensors[0].is_cuda):
        _check(pairs, spec.num_blocks)
    if pairs.device != tensors[0].device and pairs.is_cpu:
        pairs = pairs.to(tensors[0].device)
    if chosen == "torch":
        check_apart(_CALL, cache=tensors)
        _copy_torch(tensors, pairs, spec, k_scale, v_scale, errors)
    elif tensors[0].is_cuda and backends.is_debug() and errors is None:
        with backends.ErrorCounter(_CALL, tensors[0].device) as count:
            _copy_native(tensors, pairs, spec, (*extra[:-1], count))
    else:
        _copy_native(tensors, pairs, spec, extra)


def _check(pairs: Tensor, num_blocks: int) -> None:
    kept = pairs[(pairs >= 0).all(1)].to(torch.int64)
    bad = (kept >= num_blocks).any(1)
    if bool(bad.any()):
        first = int(((pairs >= num_blocks).any(1) & (pairs >= 0).all(1)).nonzero()[0])
        source, destination = pairs[first].tolist()
        raise OutOfRange(
            f"{_CALL}(): pairs[{first}] is ({source}, {destination}); the cache has {num_blocks} blocks. Nothing was copied."
        )
    kept = kept[kept[:, 0] != kept[:, 1]]
    destinations, counts = kept[:, 1].unique(return_counts=True)
    if bool((counts > 1).any()):
        raise BadArgument(f"{_CALL}(): block {int(destinations[counts > 1][0])} is a destination twice.")
    both = destinations[torch.isin(destinations, kept[:, 0])]
    if both.numel():
        raise BadArgument(f"{_CALL}(): block {int(both[0])} is a source and a destination; copy in two calls.")


def _copy_native(tensors: tuple[Tensor, ...], pairs: Tensor, spec: CacheSpec, extra: tuple[Tensor | None, ...]) -> None:
    second = tensors[1] if len(tensors) > 1 else None
    (c0, c1, hp, *rest), keep = native.handles(tensors[0], second, pairs, *extra)
    more = structs.Extra(*rest)
    status = _call(door_spec(spec), c0, c1, hp, native.address_of(more), native.stream_of(tensors[0]))
    del keep
    if status:
        native.raise_status(status)


def _copy_torch(
    tensors: tuple[Tensor, ...],
    pairs: Tensor,
    spec: CacheSpec,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    errors: Tensor | None,
) -> None:
    inside = ((pairs >= 0) & (pairs < spec.num_blocks)).all(1)
    if errors is not None:
        errors += ((pairs >= 0).all(1) & ~inside).sum()
    source, destination = pairs[inside].to(torch.int64).unbind(1)
    for i, (view, scale) in enumerate(zip(views(tensors, spec), (k_scale, v_scale), strict=True)):
        fmt = spec.plane(i).format
        arrays = [view]
        if fmt.is_inline:
            arrays.append(scales.inline_view(tensors, spec, i))
        elif scale is not None and fmt.granularity in _WITH_BLOCKS:
            arrays.append(scale)
        for x in arrays:
            raw = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
            raw[destination] = raw[source]
