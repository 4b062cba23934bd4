"""Sequence -> blocks, in the four encodings engines use, and token -> slot.

A table is frozen tensors and a few numbers. `find(seq, pos)` is its meaning; the ops and the native code follow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange, a_type
from kvx.layout.pointers import CachePointers


class Found(NamedTuple):
    """Where positions lie: block ids (K's and V's), and whether there is a block and whether that is an error."""

    k_block: Tensor
    v_block: Tensor
    is_found: Tensor
    is_bad: Tensor


def _check_devices(call: str, **tensors: Tensor) -> None:
    """All in one place."""
    if len({t.device for t in tensors.values()}) > 1:
        where = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise BadArgument(f"{call}(): {where}. Move them to one device.")


def _check_index(name: str, t: Tensor, ndim: int) -> None:
    if not isinstance(t, Tensor):
        raise BadArgument(f"{name} is {a_type(t)}; it takes a torch tensor of int32 or int64: torch.tensor(...).")
    if t.dtype not in (torch.int32, torch.int64):
        raise BadArgument(f"{name} is {t.dtype}; it must be int32 or int64.")
    if t.dim() != ndim:
        raise BadArgument(f"{name} is {list(t.shape)}; it takes {ndim} dimension{'s' if ndim > 1 else ''}.")
    if t.is_meta:
        raise BadArgument(f"{name} is on the meta device and has no memory. Make it on the cache's device.")


def _is_readable(t: Tensor) -> bool:
    """Values can be looked at: nobody waits for a device, and nothing is traced by torch.compile, which has no values."""
    return t.is_cpu and t.numel() > 0 and not torch.compiler.is_compiling()


@dataclass(frozen=True, eq=False)
class PackedTable:
    """vLLM's and most others': [batch, max_blocks] block ids; entries past a sequence's blocks are never read."""

    block_table: Tensor  # [batch, max_blocks] int32 or int64
    seq_lens: Tensor  # [batch]
    code: ClassVar[int] = 1  # kvx_block_table_format_t

    def __post_init__(self) -> None:
        _check_index("PackedTable: block_table", self.block_table, 2)
        _check_index("PackedTable: seq_lens", self.seq_lens, 1)
        if self.seq_lens.shape[0] != self.block_table.shape[0]:
            raise BadArgument(
                f"PackedTable: seq_lens has {self.seq_lens.shape[0]} sequences; block_table has {self.block_table.shape[0]}."
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.block_table, self.seq_lens

    @property
    def num_seqs(self) -> int:
        return self.block_table.shape[0]

    def lengths(self, block_size: int) -> Tensor:
        return self.seq_lens.to(torch.int64)

    def find(self, seq: Tensor, pos: Tensor, block_size: int, num_blocks: int) -> Found:
        logical, width = pos // block_size, self.block_table.shape[1]
        inside = (pos >= 0) & (logical < width)
        if width == 0:
            return _all_bad(pos)
        ids = self.block_table[seq, logical.clamp(0, width - 1)].to(torch.int64)
        return _plain(ids, inside & (ids >= 0) & (ids < num_blocks))


@dataclass(frozen=True, eq=False)
class RaggedTable:
    """One block id per token; sequence s owns indices[indptr[s]:indptr[s+1]]."""

    indices: Tensor  # [total tokens] int32 or int64
    indptr: Tensor  # [batch + 1]
    seq_lens: Tensor  # [batch]
    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check_index("RaggedTable: indices", self.indices, 1)
        _check_index("RaggedTable: indptr", self.indptr, 1)
        _check_index("RaggedTable: seq_lens", self.seq_lens, 1)
        if self.indptr.shape[0] != self.seq_lens.shape[0] + 1:
            raise BadArgument(
                f"RaggedTable: indptr has {self.indptr.shape[0]} entries; {self.seq_lens.shape[0]} sequences make it one more."
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.indices, self.indptr, self.seq_lens

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    def lengths(self, block_size: int) -> Tensor:
        return self.seq_lens.to(torch.int64)

    def find(self, seq: Tensor, pos: Tensor, block_size: int, num_blocks: int) -> Found:
        return _find_csr(self.indices, self.indptr, seq, pos, num_blocks)


@dataclass(frozen=True, eq=False)
class PageCsrTable:
    """FlashInfer's: one block id per block, indptr over blocks, and how full each last block is."""

    indices: Tensor  # [total blocks] int32 or int64
    indptr: Tensor  # [batch + 1]
    last_page_len: Tensor  # [batch]
    code: ClassVar[int] = 4

    def __post_init__(self) -> None:
        _check_index("PageCsrTable: indices", self.indices, 1)
        _check_index("PageCsrTable: indptr", self.indptr, 1)
        _check_index("PageCsrTable: last_page_len", self.last_page_len, 1)
        if self.indptr.shape[0] != self.last_page_len.shape[0] + 1:
            raise BadArgument(
                f"PageCsrTable: indptr has {self.indptr.shape[0]} entries; {self.last_page_len.shape[0]} sequences "
                "make it one more."
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.indices, self.indptr, self.last_page_len

    @property
    def num_seqs(self) -> int:
        return self.last_page_len.shape[0]

    def lengths(self, block_size: int) -> Tensor:
        """Follows from the pages; -1 where pages or last_page_len are impossible."""
        pages = self.indptr.to(torch.int64).diff()
        last = self.last_page_len.to(torch.int64)
        length = torch.where(pages > 0, (pages - 1) * block_size + last, torch.zeros_like(pages))
        bad = (pages < 0) | ((pages > 0) & ((last < 1) | (last > block_size)))
        return length.masked_fill(bad, -1)

    def find(self, seq: Tensor, pos: Tensor, block_size: int, num_blocks: int) -> Found:
        return _find_csr(self.indices, self.indptr, seq, pos // block_size, num_blocks)


@dataclass(frozen=True, eq=False)
class KvOffsetsTable:
    """TensorRT-LLM's: [batch, beams, 2, max_blocks] KVCacheIndex. Bit 31 is the secondary pool, -1 no block.

    K and V have rows of their own. Beams share their sequence's length and give batch * beams output sequences.
    """

    offsets: Tensor  # [batch, beams, 2, max_blocks] int32
    seq_lens: Tensor  # [batch]
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int32:
            raise BadArgument(f"KvOffsetsTable: offsets is {self.offsets.dtype}; KVCacheIndex is int32.")
        _check_index("KvOffsetsTable: offsets", self.offsets, 4)
        _check_index("KvOffsetsTable: seq_lens", self.seq_lens, 1)
        if self.offsets.shape[2] != 2:
            raise BadArgument(f"KvOffsetsTable: offsets is {list(self.offsets.shape)}; its third dimension must be K and V.")
        if self.offsets.shape[1] < 1:
            raise BadArgument(f"KvOffsetsTable: offsets is {list(self.offsets.shape)}; there is one beam or more.")
        if self.seq_lens.shape[0] != self.offsets.shape[0]:
            raise BadArgument(
                f"KvOffsetsTable: seq_lens has {self.seq_lens.shape[0]} sequences; offsets has {self.offsets.shape[0]}."
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.offsets, self.seq_lens

    @property
    def beam_width(self) -> int:
        return self.offsets.shape[1]

    @property
    def num_seqs(self) -> int:
        return self.offsets.shape[0] * self.offsets.shape[1]

    def lengths(self, block_size: int) -> Tensor:
        return self.seq_lens.to(torch.int64).repeat_interleave(self.beam_width)

    def rows(self, seq: Tensor, pos: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """K's and V's raw values, and whether the position is inside the table."""
        logical, width = pos // block_size, self.offsets.shape[3]
        if width == 0:
            return torch.zeros_like(pos), torch.zeros_like(pos), torch.zeros_like(pos, dtype=torch.bool)
        values = self.offsets.flatten(0, 1)[seq, :, logical.clamp(max=max(width - 1, 0))].to(torch.int64)
        return values[..., 0], values[..., 1], logical < width


Table = PackedTable | RaggedTable | PageCsrTable | KvOffsetsTable
TABLES: dict[int, type[Table]] = {t.code: t for t in (PackedTable, RaggedTable, PageCsrTable, KvOffsetsTable)}


def _plain(ids: Tensor, good: Tensor) -> Found:
    ids = torch.where(good, ids, torch.zeros_like(ids))
    return Found(ids, ids, good, ~good)


def _all_bad(pos: Tensor) -> Found:
    none = torch.zeros_like(pos, dtype=torch.bool)
    return Found(torch.zeros_like(pos), torch.zeros_like(pos), none, ~none)


def _find_csr(indices: Tensor, indptr: Tensor, seq: Tensor, step: Tensor, num_blocks: int) -> Found:
    if indices.shape[0] == 0:
        return _all_bad(step)
    first, end = indptr.to(torch.int64)[seq], indptr.to(torch.int64)[seq + 1]
    at = first + step
    inside = (step >= 0) & (first >= 0) & (at < end) & (at < indices.shape[0])
    ids = indices[at.clamp(0, indices.shape[0] - 1)].to(torch.int64)
    return _plain(ids, inside & (ids >= 0) & (ids < num_blocks))


def cache_table(
    caches: CachePointers,
    seq_lens: Tensor,  # [batch] int32 or int64
    *,
    cache_ids: Tensor | None = None,  # [batch] int32 or int64: the cache of each sequence; None: sequence s has cache s
) -> PackedTable:
    """Sequences that have a contiguous cache each: a table of one block, which is as long as the cache."""
    _check_index("seq_lens", seq_lens, 1)
    if cache_ids is not None:
        _check_index("cache_ids", cache_ids, 1)
    elif seq_lens.shape[0] > len(caches.caches):
        raise BadArgument(
            f"cache_table(): seq_lens has {seq_lens.shape[0]} sequences for {len(caches.caches)} caches; give cache_ids, or a "
            "cache for each."
        )
    ids = caches.ids[: seq_lens.shape[0]] if cache_ids is None else cache_ids
    return PackedTable(ids[:, None], seq_lens)


def slot_mapping(
    block_table: Tensor | PackedTable,  # [batch, max_blocks] block ids, or a table, which knows its lengths and needs no positions
    positions: Tensor | None = None,  # [num_tokens] position of each token in its sequence; a negative one gives slot -1 (skipped)
    seq_ids: Tensor | None = None,  # [num_tokens] row of block_table of each token
    block_size: int = 0,  # tokens per block; required
    *,
    new: int
    | Tensor
    | None = None,  # with a table alone: only the last `new` tokens of each sequence, or [batch] of them; None: all
) -> Tensor:
    """The slot of each token, block * block_size + offset, as [num_tokens] int64: what `write` takes.

    Give a PackedTable, for all tokens of its sequences or the last `new` of each, one sequence after the other; or a block table
    with a position and a sequence for each token. For a table on a GPU, `new` as one int does not synchronise with the device.
    """
    if isinstance(block_table, PackedTable):
        table, block_table = block_table, block_table.block_table
        if positions is None and seq_ids is None:
            positions, seq_ids = _last_positions(table, new)
            new = None
    if positions is None or seq_ids is None or new is not None:
        raise BadArgument(
            "slot_mapping(): it takes a PackedTable alone (new= for its last tokens), or positions and seq_ids for each token; it "
            f"got {type(block_table).__name__}, positions {_given(positions)}, seq_ids {_given(seq_ids)}, new {_given(new)}."
        )
    return _slots(block_table, positions, seq_ids, block_size)


def _given(value: object) -> str:
    return "none" if value is None else "given"


def _last_positions(table: PackedTable, new: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions and sequence ids of the last tokens of each sequence. Where one has fewer, positions are negative: skipped."""
    lens = table.seq_lens.to(torch.int64)
    seqs = torch.arange(table.num_seqs, device=lens.device)
    if isinstance(new, int):
        if new < 0:
            raise BadArgument(f"slot_mapping(): new is {new}; it must be 0 or more.")
        ahead = torch.arange(new, device=lens.device) - new
        return (lens[:, None] + ahead).flatten(), seqs.repeat_interleave(new)
    if new is None:
        new = lens
    _check_index("slot_mapping(): new", new, 1)
    _check_devices("slot_mapping", seq_lens=lens, new=new)
    if new.shape != lens.shape:
        raise BadArgument(f"slot_mapping(): new has {new.shape[0]} numbers; the table has {lens.shape[0]} sequences.")
    if _is_readable(new) and bool(((new < 0) | (new > lens)).any()):
        at = int(((new < 0) | (new > lens)).nonzero()[0])
        raise OutOfRange(f"slot_mapping(): new[{at}] is {int(new[at])}; sequence {at} has {int(lens[at])} tokens.")
    counts = new.to(torch.int64)
    ids = seqs.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return torch.arange(ids.shape[0], device=lens.device) - starts[ids] + (lens - counts)[ids], ids


def _slots(block_table: Tensor, positions: Tensor, seq_ids: Tensor, block_size: int) -> Tensor:
    for name, t, ndim in (("block_table", block_table, 2), ("positions", positions, 1), ("seq_ids", seq_ids, 1)):
        _check_index(f"slot_mapping(): {name}", t, ndim)
    _check_devices("slot_mapping", block_table=block_table, positions=positions, seq_ids=seq_ids)
    if positions.shape != seq_ids.shape:
        raise BadArgument(
            f"slot_mapping(): {positions.shape[0]} positions and {seq_ids.shape[0]} seq_ids; each token has one of both."
        )
    if block_size < 1:
        raise BadArgument(
            f"slot_mapping(): block_size is {block_size}; it takes the tokens per block, 1 or more: block_size=spec.block_size."
        )
    if _is_readable(seq_ids) and not (int(seq_ids.min()) >= 0 and int(seq_ids.max()) < block_table.shape[0]):
        token = int(((seq_ids < 0) | (seq_ids >= block_table.shape[0])).nonzero()[0])
        raise OutOfRange(
            f"slot_mapping(): seq_ids[{token}] is {int(seq_ids[token])}; the table has {block_table.shape[0]} sequences, from 0 on."
        )
    pos = positions.to(torch.int64)
    at = pos.clamp(min=0)
    if _is_readable(at) and int(at.max()) >= block_table.shape[1] * block_size:
        raise OutOfRange(
            f"slot_mapping(): position {int(at.max())} is past the table, "
            f"which holds {block_table.shape[1]} blocks of {block_size}."
        )
    blocks = block_table[seq_ids.to(torch.int64), at // block_size].to(torch.int64)
    if _is_readable(blocks) and bool(((blocks < 0) & (pos >= 0)).any()):
        bad = int(((blocks < 0) & (pos >= 0)).nonzero()[0])
        raise OutOfRange(
            f"slot_mapping(): token {bad} is at position {int(pos[bad])} of sequence {int(seq_ids[bad])}, for which the table has "
            f"{int(blocks[bad])}: no block. Grow the table first, or give position -1 to skip the token."
        )
    return torch.where((pos < 0) | (blocks < 0), torch.full_like(pos, -1), blocks * block_size + at % block_size)


def cu_seqlens(seq_lens: Tensor) -> Tensor:
    """[batch + 1] int32 ragged offsets of `seq_lens`."""
    _check_index("cu_seqlens(): seq_lens", seq_lens, 1)
    total = seq_lens.to(torch.int64).cumsum(0)
    if _is_readable(total) and int(total[-1]) >= 2**31:
        raise BadArgument(f"cu_seqlens(): the lengths add up to {int(total[-1])}; int32 offsets end at {2**31 - 1}.")
    return torch.cat([torch.zeros(1, dtype=torch.int32, device=seq_lens.device), total.to(torch.int32)])


def _pages(call: str, table: PackedTable, block_size: int) -> tuple[Tensor, Tensor]:
    """Lengths and pages of each sequence, refused where the table does not hold them."""
    _check_devices(call, block_table=table.block_table, seq_lens=table.seq_lens)
    lens = table.lengths(block_size)
    pages = (lens + block_size - 1) // block_size
    width = table.block_table.shape[1]
    bad = (lens < 0) | (pages > width)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise OutOfRange(f"{call}(): sequence {at} has length {int(lens[at])}; the table has {width} blocks of {block_size}.")
    return lens, pages


def to_page_csr(table: PackedTable, block_size: int) -> PageCsrTable:
    """The same blocks as FlashInfer names them."""
    lens, pages = _pages("to_page_csr", table, block_size)
    keep = torch.arange(table.block_table.shape[1], device=lens.device) < pages[:, None]
    last = torch.where(lens > 0, (lens - 1) % block_size + 1, torch.zeros_like(lens))
    return PageCsrTable(table.block_table[keep], cu_seqlens(pages), last.to(torch.int32))


def to_ragged(table: PackedTable, block_size: int) -> RaggedTable:
    """The same blocks, named once per token."""
    lens, _ = _pages("to_ragged", table, block_size)
    seq = torch.repeat_interleave(torch.arange(table.num_seqs, device=lens.device), lens)
    offsets = cu_seqlens(lens)
    pos = torch.arange(seq.shape[0], device=lens.device) - offsets.to(torch.int64)[seq]
    return RaggedTable(table.block_table[seq, pos // block_size], offsets, table.seq_lens)
