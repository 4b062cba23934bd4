"""Block ids and lengths of a conversion: what a caller gives, as tensors, or as the library takes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.gate import check_memory
from kvx.layout.plan import Plan
from kvx.ops import native

BlockIds = Tensor | Sequence[int] | None  # None: the plan's, or all in order


def blocks_of(call: str, name: str, ids: BlockIds, num_blocks: int) -> Tensor:
    if ids is None:
        return torch.arange(num_blocks, dtype=torch.int32)
    if isinstance(ids, int):
        raise BadArgument(f"{call}(): {name} is the number {ids}; it must be a row of block ids. For one block give [{ids}].")
    if not isinstance(ids, Tensor):
        try:
            ids = _ids_of(ids)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BadArgument(
                f"{call}(): {name} is {str(ids)[:100]}; it must be a row of block ids, whole numbers: {str(error)[:100]}."
            ) from None
    if ids.is_meta:
        raise BadArgument(f"{call}(): {name} is on the meta device and has no memory. Make it on the host or the caches' device.")
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() not in (1, 2):
        raise BadArgument(
            f"{call}(): {name} is {list(ids.shape)} {ids.dtype}; it must be [n] or [num_seqs, columns], int32 or int64."
        )
    return ids


def _ids_of(ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Whole numbers alone: nothing is rounded. A row by way of an array, in a quarter of what torch.tensor takes."""
    if hasattr(ids, "__dlpack__"):
        try:
            shared = torch.utils.dlpack.from_dlpack(ids)
            if shared.dtype in (torch.int32, torch.int64):
                return shared
        except (BufferError, RuntimeError, TypeError, ValueError):
            pass  # read-only, or of a type that torch does not have: copied
    if isinstance(ids, (list, tuple, range)) and ids:
        try:
            return torch.frombuffer(array("q", ids), dtype=torch.int64)
        except TypeError:
            pass  # rows of them, or no numbers
    table = torch.tensor(ids)
    if table.is_floating_point() and table.numel():
        raise TypeError("they have fractions")
    return table.to(torch.int64)


def as_table(ids: Tensor) -> Tensor:
    """[num_seqs, columns]: a list is one sequence."""
    return ids if ids.dim() == 2 else ids.unsqueeze(0)


def pairs_of(plan: Plan, src_blocks: BlockIds, dst_blocks: BlockIds) -> tuple[BlockIds, BlockIds]:
    """Those given, or the plan's own."""
    if plan.blocks is None or (src_blocks is not None and dst_blocks is not None):
        return src_blocks, dst_blocks
    if (src_blocks is None) != (dst_blocks is None):
        given, other = ("src_blocks", "dst_blocks") if dst_blocks is None else ("dst_blocks", "src_blocks")
        raise BadArgument(f"convert(): {given} is given and {other} is not; the plan's blocks are pairs. Give both, or neither.")
    kept: tuple[Tensor, Tensor] | None = plan.__dict__.get("_block_pairs")
    if kept is None:
        src, dst = (torch.tensor(ids, dtype=torch.int64) for ids in plan.blocks)
        kept = plan.__dict__["_block_pairs"] = (src, dst)
    return kept


def check_blocks(plan: Plan, src_blocks: BlockIds, dst_blocks: BlockIds, seq_lens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The ids as tensors, after what is asked of them and of the lengths whoever converts."""
    src_blocks, dst_blocks = pairs_of(plan, src_blocks, dst_blocks)
    src = blocks_of("convert", "src_blocks", src_blocks, plan.src[0].num_blocks)
    dst = blocks_of("convert", "dst_blocks", dst_blocks, plan.dst[0].num_blocks)
    if seq_lens is not None:
        check_lens(seq_lens)
        if tuple(seq_lens.shape) != tuple(as_table(src).shape[:1]):
            raise BadArgument(
                f"convert(): seq_lens is {list(seq_lens.shape)}; src_blocks has {len(as_table(src))} sequences, and "
                "each has a length."
            )
    return src, dst


def check_lens(seq_lens: object) -> None:
    if not isinstance(seq_lens, Tensor) or seq_lens.dtype not in (torch.int32, torch.int64):
        raise BadArgument(f"convert(): seq_lens is {str(seq_lens)[:100]}; it must be a tensor [num_seqs], int32 or int64.")
    check_memory("convert", seq_lens=seq_lens)


def check_together(*tables: Tensor | None) -> None:
    """The library takes tables of the host, or of the device."""
    devices = [str(t.device) for t in tables if t is not None]
    if len(set(devices)) > 1:
        raise BadArgument(f"convert(): block ids and seq_lens are on {', '.join(devices)}; keep them together.")


def as_numbers(
    plan: Plan, src_blocks: BlockIds, dst_blocks: BlockIds, seq_lens: Tensor | None
) -> tuple[tuple[int | None, ...], object]:
    """What kvx_door_convert takes: for either side an address and how many, or a tensor's handle and -1; the handle of the lengths.
    And what must live until then.

    It checks them, and says so in words of its own: a caller then asks `check_blocks` for those of Python.
    """
    src_blocks, dst_blocks = pairs_of(plan, src_blocks, dst_blocks)
    src, num_src, src_memory = _row_numbers("src_blocks", src_blocks, plan.src[0].num_blocks)
    dst, num_dst, dst_memory = _row_numbers("dst_blocks", dst_blocks, plan.dst[0].num_blocks)
    if seq_lens is None:
        return (src, num_src, dst, num_dst, None), (src_memory, dst_memory)
    check_lens(seq_lens)
    if seq_lens.numel() == 0:  # has no address, which the library takes for no lengths at all
        check_blocks(plan, src_blocks, dst_blocks, seq_lens)
    [lens], lens_memory = native.handles(seq_lens)
    return (src, num_src, dst, num_dst, lens), (src_memory, dst_memory, lens_memory)


def _row_numbers(name: str, ids: BlockIds, num_blocks: int) -> tuple[int | None, int, object]:
    if isinstance(ids, (list, tuple, range)):
        try:
            row = array("q", ids)
            return row.buffer_info()[0], len(row), row
        except (TypeError, OverflowError):
            pass  # rows of them, or no numbers
    if not isinstance(ids, Tensor) or not native.IS_EXCHANGED:
        ids = blocks_of("convert", name, ids, num_blocks)
    if native.IS_EXCHANGED:
        return id(ids), -1, ids
    [handle], keep = native.handles(ids)
    return handle, -1, keep
