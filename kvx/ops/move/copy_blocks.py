"""copy_blocks: whole blocks inside one layer's cache, scales included. The torch body below is the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.layout.gate import check_apart, check_memory
from kvx.layout.planes import cache_tensors, views
from kvx.ops import backend as backends
from kvx.ops import native, scales
from kvx.ops.cache_view import CacheView, scales_of
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
            f"{_CALL}(): pairs is {list(pairs.shape)} {pairs.dtype}; it must be [num_pairs, 2] int32 or int64: source, destination."
        )
    view = CacheView(tensors, spec, scales_of(k_scale, v_scale), errors)
    scales.require(_CALL, view)
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(_CALL, backend, cache=tensors, pairs=pairs, scales=view.optional)
    chosen = backends.choose(_CALL, backend, view.first)
    if pairs.is_cpu and (chosen == "torch" or view.first.is_cuda):
        _check(pairs, spec.num_blocks)
    if pairs.device != view.first.device and pairs.is_cpu:
        pairs = pairs.to(view.first.device)
    if chosen == "torch":
        if pairs.device != view.first.device:
            raise BadArgument(f"{_CALL}(): pairs is on {pairs.device}, cache on {view.first.device}; all are on one device.")
        check_apart(_CALL, cache=tensors)
        _copy_torch(view, pairs)
    elif view.first.is_cuda and backends.is_debug() and errors is None:
        with backends.ErrorCounter(_CALL, view.first.device) as count:
            _copy_native(view._replace(errors=count), pairs)
    else:
        _copy_native(view, pairs)


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


def _copy_native(view: CacheView, pairs: Tensor) -> None:
    (c0, c1, hp, *rest), keep = native.handles(view.first, view.second, pairs, *view.optional)
    extra = native.extra(rest)
    status = _call(door_spec(view.spec), c0, c1, hp, native.address_of(extra), native.stream_of(view.first))
    del keep
    if status:
        native.raise_status(status)


def _copy_torch(view: CacheView, pairs: Tensor) -> None:
    spec, errors = view.spec, view.errors
    inside = ((pairs >= 0) & (pairs < spec.num_blocks)).all(1)
    if errors is not None:
        errors += ((pairs >= 0).all(1) & ~inside).sum()
    source, destination = pairs[inside].to(torch.int64).unbind(1)
    for i, rows in enumerate(views(view.tensors, spec)):
        fmt, scale = spec.plane(i).format, view.scales.plane(i)[0]
        arrays = [rows]
        if fmt.is_inline:
            arrays.append(scales.inline_view(view, i))
        elif scale is not None and fmt.granularity in _WITH_BLOCKS:
            arrays.append(scale)
        for x in arrays:
            raw = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
            raw[destination] = raw[source]
