"""Tables: find() by hand, the encodings against each other, lengths, slots and offsets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvx
from kvx.tables import Found

HEADER = (Path(__file__).parents[1] / "include" / "kvx_abi.h").read_text()
HUGE = 2**30  # stands in entries that must not be read
BAD = None
INDEX = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["i32", "i64"])


def ints(*values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def ask(table: kvx.Table, seq: int, positions: range | list[int], block_size: int, num_blocks: int) -> list[int | None]:
    """Block of each position, BAD where find() says so; the four fields of Found agree."""
    pos = ints(*positions)
    found: Found = table.find(torch.full_like(pos, seq), pos, block_size, num_blocks)
    assert torch.equal(found.is_found, ~found.is_bad)
    assert torch.equal(found.k_block, found.v_block)
    assert found.k_block.dtype == torch.int64
    assert not found.k_block[found.is_bad].any(), "a bad position must not carry an id to be read by accident"
    return [int(b) if ok else BAD for b, ok in zip(found.k_block, found.is_found, strict=True)]


# ---- find, by hand. Block size 4, 9 blocks.


@INDEX
def test_packed_find(index):
    table = kvx.PackedTable(ints([5, 2, HUGE], [7, -1, 9], [8, 0, 8], dtype=index), ints(7, 3, 12, dtype=index))
    assert ask(table, 0, range(8), 4, 9) == [5, 5, 5, 5, 2, 2, 2, 2]
    assert ask(table, 0, [8, 11], 4, 9) == [BAD, BAD]  # an entry that was never filled
    assert ask(table, 1, [3, 4, 8], 4, 9) == [7, BAD, BAD]  # -1 and num_blocks are no blocks
    assert ask(table, 1, [8], 4, 10) == [9]
    assert ask(table, 2, range(0, 13, 4), 4, 9) == [8, 0, 8, BAD]  # past the width
    assert ask(table, 2, [2**40], 4, 9) == [BAD]
    assert ask(table, 0, [0, 1, 2], 1, 9) == [5, 2, BAD]


@INDEX
def test_packed_find_takes_sequences_in_any_order(index):
    table = kvx.PackedTable(ints([5, 2], [7, 1], dtype=index), ints(8, 8, dtype=index))
    found = table.find(ints(1, 0, 1, 0), ints(4, 4, 0, 0), 4, 9)
    assert found.k_block.tolist() == [1, 2, 7, 5]


def test_packed_find_in_a_table_of_no_blocks():
    table = kvx.PackedTable(torch.zeros(2, 0, dtype=torch.int32), ints(0, 3))
    assert ask(table, 1, [0, 2], 4, 9) == [BAD, BAD]


def test_packed_find_honours_strides():
    wide = torch.full((4, 6), HUGE)
    wide[::2, ::3] = ints([5, 2], [7, 1])
    table = kvx.PackedTable(wide[::2, ::3], ints(8, 8))
    assert ask(table, 1, [0, 4], 4, 9) == [7, 1]


@INDEX
def test_ragged_find(index):
    indices = ints(5, 5, 5, 5, 2, 7, 7, -1, 9, dtype=index)
    table = kvx.RaggedTable(indices, ints(0, 5, 5, 9, dtype=index), ints(5, 0, 4, dtype=index))
    assert ask(table, 0, range(6), 4, 9) == [5, 5, 5, 5, 2, BAD]  # position 5 is the next sequence's
    assert ask(table, 1, [0], 4, 9) == [BAD]
    assert ask(table, 2, range(5), 4, 9) == [7, 7, BAD, BAD, BAD]
    assert ask(table, 2, [3], 4, 10) == [9]
    assert ask(table, 2, [0, 1], 1, 9) == [7, 7]  # one id a token, whatever the block size


@INDEX
def test_page_csr_find(index):
    table = kvx.PageCsrTable(ints(5, 2, 7, -1, 9, dtype=index), ints(0, 2, 2, 5, dtype=index), ints(1, 0, 4, dtype=index))
    assert ask(table, 0, range(9), 4, 9) == [5, 5, 5, 5, 2, 2, 2, 2, BAD]  # position 8 is the next sequence's
    assert ask(table, 1, [0], 4, 9) == [BAD]
    assert ask(table, 2, [0, 4, 8, 12], 4, 9) == [7, BAD, BAD, BAD]
    assert ask(table, 2, [8], 4, 10) == [9]
    assert table.lengths(4).tolist() == [5, 0, 12]


@pytest.mark.parametrize("kind", [kvx.RaggedTable, kvx.PageCsrTable])
@pytest.mark.parametrize(
    ("indptr", "want"),
    [
        ([0, 3], [5, 2, 7, BAD]),
        ([1, 3], [2, 7, BAD, BAD]),
        ([0, 99], [5, 2, 7, BAD]),  # past the indices
        ([-1, 3], [BAD, BAD, BAD, BAD]),
        ([2, 1], [BAD, BAD, BAD, BAD]),
        ([50, 99], [BAD, BAD, BAD, BAD]),
        ([0, 0], [BAD, BAD, BAD, BAD]),
    ],
)
def test_csr_with_a_lying_indptr(kind, indptr, want):
    table = kind(ints(5, 2, 7), ints(*indptr), ints(3))
    assert ask(table, 0, range(4), 1, 9) == want


@pytest.mark.parametrize("kind", [kvx.RaggedTable, kvx.PageCsrTable])
def test_csr_of_no_indices(kind):
    assert ask(kind(ints(), ints(0, 4), ints(4)), 0, [0, 3], 4, 9) == [BAD, BAD]


def test_kv_offsets_rows():
    """[batch 2, beams 2, K and V, 3 blocks]: the value is its own place, so that an axis mixed up is seen."""
    offsets = torch.arange(24, dtype=torch.int32).view(2, 2, 2, 3)
    table = kvx.KvOffsetsTable(offsets, ints(9, 4))
    assert (table.num_seqs, table.beam_width) == (4, 2)
    k, v, inside = table.rows(ints(0, 1, 2, 3, 3), ints(0, 4, 8, 11, 12), 4)
    assert k.tolist()[:4] == [0, 7, 14, 20]
    assert v.tolist()[:4] == [3, 10, 17, 23]
    assert inside.tolist() == [True, True, True, True, False]
    assert k.dtype == v.dtype == torch.int64


def test_kv_offsets_keep_the_pool_bit():
    """Bit 31 is the secondary pool and -1 is no block: both arrive as they were."""
    offsets = torch.tensor([[[[5, -(2**31) + 3, -1]], [[6, -(2**31) + 4, 0]]]], dtype=torch.int32).view(1, 1, 2, 3)
    k, v, inside = kvx.KvOffsetsTable(offsets, ints(12)).rows(ints(0, 0, 0), ints(0, 4, 8), 4)
    assert [x & 0x7FFFFFFF for x in k.tolist()[:2]] == [5, 3]
    assert [x < 0 for x in k.tolist()] == [False, True, True]
    assert v.tolist() == [6, -(2**31) + 4, 0]
    assert k[2] == -1
    assert inside.all()


def test_kv_offsets_of_no_blocks_are_outside():
    table = kvx.KvOffsetsTable(torch.zeros(1, 1, 2, 0, dtype=torch.int32), ints(3))
    assert table.rows(ints(0), ints(0), 4)[2].tolist() == [False]


# ---- lengths


def test_lengths_are_int64_and_as_given():
    lens = ints(7, 0, -3, dtype=torch.int32)
    packed = kvx.PackedTable(torch.zeros(3, 2, dtype=torch.int32), lens)
    ragged = kvx.RaggedTable(ints(), ints(0, 0, 0, 0), lens)
    for table in (packed, ragged):
        assert table.num_seqs == 3
        assert table.lengths(4).dtype == torch.int64
        assert table.lengths(4).tolist() == [7, 0, -3]


def test_beams_share_their_sequences_length():
    table = kvx.KvOffsetsTable(torch.zeros(3, 2, 2, 4, dtype=torch.int32), ints(7, 0, 4))
    assert table.lengths(4).tolist() == [7, 7, 0, 0, 4, 4]
    assert table.num_seqs == 6


@INDEX
@pytest.mark.parametrize(
    ("pages", "last", "length"),
    [
        (1, 1, 1),
        (1, 4, 4),
        (3, 1, 9),
        (3, 4, 12),
        (0, 0, 0),
        (0, 3, 0),  # no pages: how full the last is says nothing
        (1, 0, -1),
        (3, 0, -1),
        (1, 5, -1),
        (2, -1, -1),
        (-1, 1, -1),
        (-2, 0, -1),
    ],
)
def test_page_csr_lengths(pages, last, length, index):
    table = kvx.PageCsrTable(ints(*range(9), dtype=index), ints(3, 3 + pages, dtype=index), ints(last, dtype=index))
    assert table.lengths(4).tolist() == [length]
    assert table.lengths(4).dtype == torch.int64


def test_page_csr_lengths_follow_the_block_size():
    table = kvx.PageCsrTable(ints(1, 2, 3), ints(0, 2, 3), ints(3, 3))
    assert table.lengths(4).tolist() == [7, 3]
    assert table.lengths(3).tolist() == [6, 3]
    assert table.lengths(2).tolist() == [-1, -1]


def test_codes_are_the_headers():
    codes = dict(re.findall(r"^\s*KVX_BLOCK_TABLE_(\w+) = (\d+)", HEADER, re.M))
    tables = {
        "PACKED": kvx.PackedTable,
        "RAGGED": kvx.RaggedTable,
        "KV_OFFSETS": kvx.KvOffsetsTable,
        "PAGE_CSR": kvx.PageCsrTable,
    }
    assert {name: table.code for name, table in tables.items()} == {name: int(codes[name]) for name in tables}


# ---- what is refused when made

I32 = torch.zeros(3, dtype=torch.int32)
OFFSETS = torch.zeros(3, 1, 2, 4, dtype=torch.int32)
REFUSED = [
    (kvx.PackedTable, ([[7, 3]], I32), "block_table is a list; it takes a torch tensor of int32 or int64: torch.tensor(...)."),
    (kvx.PackedTable, (I32, I32), "block_table is [3]; it takes 2 dimensions."),
    (kvx.PackedTable, (torch.zeros(3, 2), I32), "block_table is torch.float32; it must be int32 or int64."),
    (kvx.PackedTable, (I32[:, None], I32[:, None]), "seq_lens is [3, 1]; it takes 1 dimension."),
    (kvx.PackedTable, (I32[:, None], I32.to(torch.int16)), "seq_lens is torch.int16; it must be int32 or int64."),
    (kvx.PackedTable, (I32[:2, None], I32), "seq_lens has 3 sequences; block_table has 2."),
    (kvx.RaggedTable, (I32[None], I32, I32[:2]), "indices is [1, 3]; it takes 1 dimension."),
    (kvx.RaggedTable, (I32.float(), I32, I32[:2]), "indices is torch.float32; it must be int32 or int64."),
    (kvx.RaggedTable, (I32, I32[None], I32[:2]), "indptr is [1, 3]; it takes 1 dimension."),
    (kvx.RaggedTable, (I32, I32, I32[:2].bool()), "seq_lens is torch.bool; it must be int32 or int64."),
    (kvx.RaggedTable, (I32, I32, I32), "indptr has 3 entries; 3 sequences make it one more."),
    (kvx.PageCsrTable, (I32[None], I32, I32[:2]), "indices is [1, 3]; it takes 1 dimension."),
    (kvx.PageCsrTable, (I32, I32.to(torch.uint8), I32), "indptr is torch.uint8; it must be int32 or int64."),
    (kvx.PageCsrTable, (I32, I32, I32[0]), "last_page_len is []; it takes 1 dimension."),
    (kvx.PageCsrTable, (I32, I32, I32), "indptr has 3 entries; 3 sequences make it one more."),
    (kvx.KvOffsetsTable, (OFFSETS.long(), I32), "offsets is torch.int64; KVCacheIndex is int32."),
    (kvx.KvOffsetsTable, (OFFSETS[0], I32), "offsets is [1, 2, 4]; it takes 4 dimensions."),
    (kvx.KvOffsetsTable, (OFFSETS[:, :, :1], I32), "offsets is [3, 1, 1, 4]; its third dimension must be K and V."),
    (kvx.KvOffsetsTable, (OFFSETS[:, :0], I32), "offsets is [3, 0, 2, 4]; there is one beam or more."),
    (kvx.KvOffsetsTable, (OFFSETS, I32[:2]), "seq_lens has 2 sequences; offsets has 3."),
    (kvx.KvOffsetsTable, (OFFSETS, I32.float()), "seq_lens is torch.float32; it must be int32 or int64."),
]


@pytest.mark.parametrize(("table", "args", "message"), REFUSED, ids=[f"{r[0].__name__}-{r[2]}" for r in REFUSED])
def test_malformed_tables_are_refused(table, args, message):
    with pytest.raises(kvx.BadArgument) as refused:
        table(*args)
    assert str(refused.value) == f"{table.__name__}: {message}"


# ---- the encodings against each other


@dataclass(frozen=True)
class Sequences:
    """Lists of block ids, the plainest encoding: what every table must agree with."""

    block_size: int
    num_blocks: int
    blocks: tuple[tuple[int, ...], ...]  # of each sequence
    lens: tuple[int, ...]
    spare: int  # columns of the packed table that nobody fills

    def packed(self, dtype: torch.dtype) -> kvx.PackedTable:
        width = max((len(b) for b in self.blocks), default=0) + self.spare
        table = torch.full((len(self.lens), width), HUGE, dtype=dtype)
        for row, blocks in zip(table, self.blocks, strict=True):
            row[: len(blocks)] = ints(*blocks)
        return kvx.PackedTable(table, ints(*self.lens, dtype=dtype))


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    block_size = draw(st.integers(1, 5))
    lens = draw(st.lists(st.integers(0, 4 * block_size), max_size=4))
    counts = [-(-n // block_size) for n in lens]
    num_blocks = max(1, sum(counts)) + draw(st.integers(0, 3))
    free = iter(draw(st.permutations(range(num_blocks))))
    blocks = tuple(tuple(next(free) for _ in range(n)) for n in counts)
    return Sequences(block_size, num_blocks, blocks, tuple(lens), draw(st.integers(0, 2)))


@given(sequences(), st.sampled_from([torch.int32, torch.int64]))
def test_encodings_agree(case, dtype):
    packed = case.packed(dtype)
    tables = (packed, kvx.to_ragged(packed, case.block_size), kvx.to_page_csr(packed, case.block_size))
    for table in tables:
        assert table.num_seqs == len(case.lens)
        assert table.lengths(case.block_size).tolist() == list(case.lens)
        for seq, (blocks, length) in enumerate(zip(case.blocks, case.lens, strict=True)):
            want = [blocks[pos // case.block_size] for pos in range(length)]
            assert ask(table, seq, range(length), case.block_size, case.num_blocks) == want
    for table in tables[1:]:  # past the last page there is nothing, although indices go on
        for seq, blocks in enumerate(case.blocks):
            assert ask(table, seq, [len(blocks) * case.block_size], case.block_size, case.num_blocks) == [BAD]


@given(sequences())
def test_slot_mapping_agrees_with_find(case):
    packed = case.packed(torch.int32)
    where = [(seq, pos) for seq, n in enumerate(case.lens) for pos in range(n)]
    if not where:
        where, packed = [(0, 0)], kvx.PackedTable(ints([0], dtype=torch.int32), ints(1))
    seq, pos = (ints(*column) for column in zip(*where, strict=True))
    slots = kvx.slot_mapping(packed.block_table, pos, seq, case.block_size)
    found = packed.find(seq, pos, case.block_size, case.num_blocks)
    assert slots.tolist() == (found.k_block * case.block_size + pos % case.block_size).tolist()
    assert len(set(slots.tolist())) == len(where), "no two tokens share a slot"


def test_to_page_csr_by_hand():
    table = kvx.PackedTable(ints([5, 2, HUGE], [HUGE, HUGE, HUGE], [7, 8, 6]), ints(5, 0, 12))
    got = kvx.to_page_csr(table, 4)
    assert (got.indices.tolist(), got.indptr.tolist()) == ([5, 2, 7, 8, 6], [0, 2, 2, 5])
    assert got.last_page_len.tolist() == [1, 0, 4]
    assert got.indptr.dtype == got.last_page_len.dtype == torch.int32  # as FlashInfer takes them


def test_to_ragged_by_hand():
    table = kvx.PackedTable(ints([5, 2, HUGE], [HUGE, HUGE, HUGE], [7, 8, HUGE]), ints(5, 0, 6))
    got = kvx.to_ragged(table, 4)
    assert got.indices.tolist() == [5, 5, 5, 5, 2, 7, 7, 7, 7, 8, 8]
    assert got.indptr.tolist() == [0, 5, 5, 11]
    assert got.seq_lens.tolist() == [5, 0, 6]


def test_conversions_of_no_sequences():
    table = kvx.PackedTable(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    assert kvx.to_ragged(table, 4).indptr.tolist() == kvx.to_page_csr(table, 4).indptr.tolist() == [0]


def test_to_page_csr_of_a_length_past_the_table_is_refused():
    """Sequence 0 claims two pages and names one; the second must not become sequence 1's block."""
    table = kvx.PackedTable(ints([5], [6]), ints(8, 4))
    assert ask(table, 0, [4], 4, 9) == [BAD]
    with pytest.raises(kvx.KvxError):
        kvx.to_page_csr(table, 4)


def test_to_ragged_of_a_length_past_the_table_raises_ours():
    table = kvx.PackedTable(ints([5], [6]), ints(8, 4))
    with pytest.raises(kvx.KvxError):
        kvx.to_ragged(table, 4)


def test_to_page_csr_keeps_a_bad_id_bad():
    table = kvx.PackedTable(ints([2**32 + 3]), ints(4))
    assert ask(table, 0, [0], 4, 9) == [BAD]
    assert ask(kvx.to_page_csr(table, 4), 0, [0], 4, 9) == [BAD]


@pytest.mark.parametrize("length", [-1, -5])
def test_to_page_csr_of_a_negative_length_is_refused(length):
    table = kvx.PackedTable(ints([5], [6]), ints(length, 4))
    with pytest.raises(kvx.KvxError):
        kvx.to_page_csr(table, 4)


# ---- slots and offsets


@INDEX
def test_slot_mapping_by_hand(index):
    table = ints([5, 2, HUGE], [7, 0, HUGE], dtype=index)
    positions = ints(0, 3, 4, 7, -1, 0, 5, -9, dtype=index)
    seq_ids = ints(0, 0, 0, 0, 0, 1, 1, 1, dtype=index)
    slots = kvx.slot_mapping(table, positions, seq_ids, 4)
    assert slots.tolist() == [20, 23, 8, 11, -1, 28, 1, -1]
    assert slots.dtype == torch.int64


def test_slot_mapping_passes_an_unfilled_entry_on_as_out_of_range():
    """Not a slot of the cache: write() refuses it, and no block is guessed. A slot under 0 would be skipped in silence."""
    assert kvx.slot_mapping(ints([5, HUGE, -1]), ints(4, -1), ints(0, 0), 4).tolist() == [HUGE * 4, -1]
    with pytest.raises(kvx.OutOfRange, match="token 1 is at position 8 of sequence 0, for which the table has -1: no block"):
        kvx.slot_mapping(ints([5, HUGE, -1]), ints(4, 8), ints(0, 0), 4)


def test_slot_mapping_does_not_wrap_in_32_bits():
    table = ints([2**30], dtype=torch.int32)
    assert kvx.slot_mapping(table, ints(15, dtype=torch.int32), ints(0, dtype=torch.int32), 16).tolist() == [2**34 + 15]


def test_slot_mapping_of_no_tokens():
    none = torch.zeros(0, dtype=torch.int64)
    assert kvx.slot_mapping(ints([5]), none, none, 4).shape == (0,)


def test_slot_mapping_past_the_table_is_an_index_error():
    with pytest.raises(IndexError):  # torch's own on the host; kvx.OutOfRange is an IndexError too
        kvx.slot_mapping(ints([5, 2]), ints(8), ints(0), 4)


@INDEX
@pytest.mark.parametrize(
    ("lens", "want"),
    [([], [0]), ([3], [0, 3]), ([5, 0, 12, 1], [0, 5, 5, 17, 18])],
)
def test_cu_seqlens(lens, want, index):
    got = kvx.cu_seqlens(ints(*lens, dtype=index))
    assert got.tolist() == want
    assert got.dtype == torch.int32


def test_cu_seqlens_past_32_bits_is_refused():
    with pytest.raises(kvx.KvxError):
        kvx.cu_seqlens(ints(2**31 - 1, 1, dtype=torch.int32))
