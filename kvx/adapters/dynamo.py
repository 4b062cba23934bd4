"""Dynamo's four conversions of KV blocks, as its Python bindings have them: block stacks, universal and operational blocks.

Chunks are [nt, nh, hd] (NHD) or [nh, nt, hd] (HND), one for each layer and outer index of a block; universals are
[nh, nl, no, nt, hd]; operationals [nl, no, inner]. What differs from theirs is in docs/dynamo.md.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvx.adapters import kvbm
from kvx.adapters.blocks import DTYPES, Blocks, Wholes, check_chunks, check_wholes
from kvx.errors import BadArgument, InternalError, Unsupported
from kvx.layout.buffers import bytes_of
from kvx.layout.plan import Plan, plan
from kvx.ops.move.convert import convert
from kvx.spec.cache_spec import CacheSpec

_BACKENDS = {
    "auto": kvbm.CopyBackend.AUTO,
    "vectorized": kvbm.CopyBackend.VECTORIZED,
    "vectorized_kernel": kvbm.CopyBackend.VECTORIZED,
    "kernel": kvbm.CopyBackend.KERNEL_ONLY,
    "kernel_only": kvbm.CopyBackend.KERNEL_ONLY,
    "async": kvbm.CopyBackend.MEMCPY_ASYNC,
    "memcpy_async": kvbm.CopyBackend.MEMCPY_ASYNC,
    "cuda_memcpy_async": kvbm.CopyBackend.MEMCPY_ASYNC,
    "batch": kvbm.CopyBackend.MEMCPY_BATCH,
    "memcpy_batch": kvbm.CopyBackend.MEMCPY_BATCH,
    "cuda_memcpy_batch": kvbm.CopyBackend.MEMCPY_BATCH,
}


def block_to_universal(
    blocks: Blocks,
    universals: Wholes,  # nb of [nh, nl, no, nt, hd], changed in place; a tensor alone is a batch of one
    layout: str,  # NHD or HND: the chunks'
) -> None:
    """Each block's chunks as one universal tensor. Enqueued on the current stream; nothing waits."""
    _permute("block_to_universal", blocks, universals, layout, to_universal=True)


def universal_to_block(
    universals: Wholes,
    blocks: Blocks,  # changed in place
    layout: str,
) -> None:
    """The inverse of block_to_universal."""
    _permute("universal_to_block", blocks, universals, layout, to_universal=False)


def block_to_operational(
    blocks: Blocks,
    operationals: Wholes,  # nb of [nl, no, inner], changed in place; a tensor alone is a batch of one
    backend: str | None = None,  # auto, vectorized, kernel, async or batch; CPU tensors have one way only
) -> None:
    """Each block's chunks one after another in one tensor, bytes as they are. Enqueued on the current stream; nothing waits."""
    _copy("block_to_operational", blocks, operationals, backend, to_operational=True)


def operational_to_block(
    operationals: Wholes,
    blocks: Blocks,  # changed in place
    backend: str | None = None,
) -> None:
    """The inverse of block_to_operational."""
    _copy("operational_to_block", blocks, operationals, backend, to_operational=False)


# ---- the two shapes of work


def _permute(call: str, blocks: Blocks, universals: Wholes, layout: str, *, to_universal: bool) -> None:
    name = layout.upper() if isinstance(layout, str) else layout
    if name not in kvbm.BlockLayout.__members__:
        raise BadArgument(f"{call}(): layout is {layout!r}; it must be NHD or HND.")
    wholes = check_wholes(call, "universals", universals, "[nh, nl, no, nt, hd]", 5)
    if not wholes:
        return
    nh, nl, no, nt, hd = wholes[0].shape
    shape = (nt, nh, hd) if name == "NHD" else (nh, nt, hd)
    chunks = check_chunks(call, blocks, wholes, nl * no, shape)
    if wholes[0].numel() == 0:
        return
    if wholes[0].is_cuda:
        tables = _Tables(wholes, chunks)
        sizes = (len(wholes), nh, nl, no, nt, hd, DTYPES[wholes[0].element_size()], kvbm.BlockLayout[name])
        step = "universal_from_block" if to_universal else "block_from_universal"
        tables.launch(call, f"kvbm_kernels_launch_{step}", tables.device_wholes, tables.device_chunks, *sizes)
    elif hd * wholes[0].element_size() % 2:
        order = (2, 0, 1, 3) if name == "NHD" else (1, 0, 2, 3)  # [nl * no, chunk] -> [nh, nl * no, nt, hd]
        _move_by_torch([w.view(nh, nl * no, nt, hd) for w in wholes], chunks, order, to_universal)
    else:
        inside = "token head dim" if name == "NHD" else "head token dim"
        pair = (f"block layer | {inside}", "block | head layer token dim")
        _move_by_plan(pair, wholes, chunks, (nl * no, nt, nh, hd * wholes[0].element_size()), to_universal)


def _copy(call: str, blocks: Blocks, operationals: Wholes, backend: str | None, *, to_operational: bool) -> None:
    word = "auto" if backend is None else backend.strip().lower() if isinstance(backend, str) else backend
    if word not in _BACKENDS:
        raise BadArgument(f"{call}(): backend is {backend!r}; it must be one of {', '.join(_BACKENDS)}.")
    wholes = check_wholes(call, "operationals", operationals, "[nl, no, inner]", 3)
    if not wholes:
        return
    nl, no, inner = wholes[0].shape
    chunks = check_chunks(call, blocks, wholes, nl * no, None)
    if wholes[0].numel() == 0:
        return
    size = wholes[0].element_size()
    if wholes[0].is_cuda:
        chosen = _BACKENDS[word]
        if chosen == kvbm.CopyBackend.VECTORIZED and inner * size % 8:
            raise BadArgument(
                f"{call}(): backend is {backend!r} and a chunk has {inner * size} bytes, no multiple of 8. Use kernel."
            )
        tables = _Tables(wholes, chunks)
        direction = kvbm.Direction.BLOCK_TO_OPERATIONAL if to_operational else kvbm.Direction.OPERATIONAL_TO_BLOCK
        pointers = (tables.host_chunks, tables.device_chunks, tables.host_wholes, tables.device_wholes)
        sizes = (len(wholes), nl, no, inner, size, DTYPES[size])
        tables.launch(call, "kvbm_kernels_launch_operational_copy", *pointers, *sizes, direction, chosen)
    elif inner * size % 2:
        _move_by_torch([w.view(nl * no, inner) for w in wholes], [[c.view(-1) for c in g] for g in chunks], (0, 1), to_operational)
    else:
        pair = ("block layer | token head dim", "block | layer token head dim")
        _move_by_plan(pair, wholes, chunks, (nl * no, 1, 1, inner * size), to_operational)


# ---- on a device


class _Tables:
    """Both pointer tables, in one pinned tensor and one on the device.

    Neither needs waiting for: torch's host allocator keeps pinned memory until the copy from it is done, and its device allocator
    gives the table's memory only to later work of the same stream.
    """

    def __init__(self, wholes: list[Tensor], chunks: list[list[Tensor]]):
        values = [t.data_ptr() for t in wholes] + [t.data_ptr() for group in chunks for t in group]
        self.device = wholes[0].device
        self.host = torch.tensor(values, dtype=torch.int64, pin_memory=True)
        with torch.cuda.device(self.device):
            self.copy = self.host.to(self.device, non_blocking=True)
        self.host_wholes, self.device_wholes = self.host.data_ptr(), self.copy.data_ptr()
        self.host_chunks, self.device_chunks = (p + 8 * len(wholes) for p in (self.host_wholes, self.device_wholes))

    def launch(self, call: str, function: str, *args: int) -> None:
        with torch.cuda.device(self.device):
            result = getattr(kvbm.load(), function)(*args, torch.cuda.current_stream(self.device).cuda_stream)
        if result == kvbm.NOT_SUPPORTED:
            raise Unsupported(
                f"{call}(): the tensors are on a GPU, and libkvbm_kernels was built without CUDA. Install kvx-cu13; in a source "
                "checkout run `KVX_CUDA=ON make build` with nvcc on PATH."
            )
        if result:
            raise InternalError(f"{call}(): {function} returned CUDA error {result}.")


# ---- on the CPU


def _move_by_plan(
    layouts: tuple[str, str], wholes: list[Tensor], chunks: list[list[Tensor]], sizes: tuple[int, int, int, int], to_whole: bool
) -> None:
    made = _plan(layouts if to_whole else layouts[::-1], len(wholes), *sizes)
    # Words of a row, whatever its elements are: the plan is of f32 or bf16 and the memory is given as bytes.
    flat, whole = [bytes_of(t) for group in chunks for t in group], [bytes_of(t) for t in wholes]
    convert(flat if to_whole else whole, whole if to_whole else flat, plan=made)


@lru_cache(maxsize=64)  # engines come with a few geometries and many batch sizes
def _plan(layouts: tuple[str, str], num_blocks: int, layers: int, tokens: int, heads: int, row_bytes: int) -> Plan:
    """The outer axis counts as layers, whatever its size: both sides have it right after them."""
    word, size = ("f32", 4) if row_bytes % 4 == 0 else ("bf16", 2)
    src, dst = (
        CacheSpec(
            num_blocks=num_blocks, num_layers=layers, block_size=tokens, num_kv_heads=heads, head_dim=row_bytes // size,
            format=word, layout=layout,
        )
        for layout in layouts
    )  # fmt: skip
    return plan(src, dst)


def _move_by_torch(views: list[Tensor], chunks: list[list[Tensor]], order: tuple[int, ...], to_whole: bool) -> None:
    """Rows of an odd number of bytes, which no format without scales has."""
    for view, group in zip(views, chunks, strict=True):
        if to_whole:
            view.copy_(torch.stack(list(group)).permute(order))
        else:
            back = [order.index(i) for i in range(len(order))]
            for chunk, part in zip(group, view.permute(back), strict=True):
                chunk.copy_(part)
