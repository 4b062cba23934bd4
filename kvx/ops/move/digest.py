"""digest: a number for the content of a cache, equal in every layout and sharding. The torch body below is the definition.

Format and head size go into every row's key, so that the same bits under another meaning have another digest. A change of one word
of 16 bytes, or of one in each of several rows, escapes with one chance in 2**64 (native/move/digest.h says why). Not cryptographic:
it tells a lost head, a swapped block or a flipped bit from the real thing, not an attacker's work.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.layout.box import Box, fold
from kvx.layout.buffers import allocate_buffers, bytes_of
from kvx.layout.coordinates import WORD, content_number, coordinate_bytes, coordinate_plan, has_whole_words
from kvx.layout.gate import check_buffers
from kvx.layout.place import num_buffers
from kvx.layout.plan import plan
from kvx.layout.shards import held_twice
from kvx.ops import backend as backends
from kvx.ops import native
from kvx.ops.move import convert as conversion
from kvx.ops.move.block_ids import as_table, blocks_of
from kvx.ops.move.sides import Buffers, SideArrays, flat, memory_of, new_args
from kvx.spec.cache_spec import Spec

_plan_load, _plan_free = native.entry("kvx_plan_load"), native.entry("kvx_plan_free")
_digest = native.entry("kvx_digest", keeps_lock=False)
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(frozen=True)
class Digest:
    """Two sums modulo 2**64. Digests of shards add up to the digest of the whole."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.first + other.first & _MASK, self.second + other.second & _MASK)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"


def digest(
    cache: Buffers,  # every buffer, shard by shard
    spec: Spec | Sequence[Spec],  # one a shard; shards must not hold the same heads twice
    *,
    blocks: Tensor | Sequence[int] | None = None,  # [n], or [num_seqs, columns]; None: all of them, in order
    seq_lens: Tensor | None = None,  # [num_seqs]
    backend: str = "auto",
) -> Digest:
    """The digest of these blocks, read as sequences: a token's position counts, its block's id does not.

    Waits for the device. Block size, layout, sharding and whether scales are inline make no difference; format and head size do.
    """
    shards = [spec] if isinstance(spec, Spec) else list(spec)
    tensors = list(flat("cache", cache, "digest"))
    check_buffers("digest", "cache", tensors, shards)
    twice = held_twice(shards)
    if twice:
        raise BadArgument(f"digest(): {twice[0]} are in more than one shard and would count twice. Give each head once.")
    total = Digest()
    for shard in shards:
        mine, tensors = tensors[: num_buffers(shard)], tensors[num_buffers(shard) :]
        total += _shard(mine, shard, blocks, seq_lens, backend)
    return total


def _shard(
    tensors: list[Tensor], spec: Spec, blocks: Tensor | Sequence[int] | None, seq_lens: Tensor | None, backend: str
) -> Digest:
    ids = blocks_of("digest", "blocks", blocks, spec.num_blocks)
    if not has_whole_words(spec):
        return _staged(tensors, spec, ids, seq_lens, backend)
    if backends.choose("digest", backend, tensors[0]) == "torch":
        return _digest_torch(tensors, coordinate_plan(spec).boxes, spec, ids, seq_lens)
    return _digest_native(tensors, spec, ids, seq_lens)


def _staged(tensors: list[Tensor], spec: Spec, ids: Tensor, seq_lens: Tensor | None, backend: str) -> Digest:
    """Rows that no word of which stands together (transposed V, packed CPU tiles): sequence by sequence through a plain layout."""
    table = as_table(ids)
    plain = spec.replaced(layout=spec.plain_layout, num_blocks=table.shape[1], block_bytes=0)
    stage = allocate_buffers(plain, tensors[0].device)
    total = Digest()
    for s in range(table.shape[0]):
        lens = None if seq_lens is None else seq_lens[s : s + 1]
        here = torch.arange(table.shape[1], dtype=ids.dtype, device=ids.device).view(1, -1)
        conversion.convert(
            tensors, stage, plan=plan(spec, plain), src_blocks=table[s : s + 1], dst_blocks=here, seq_lens=lens, backend=backend
        )
        part = torch.full((s + 1, table.shape[1]), -1, dtype=ids.dtype, device=ids.device)  # the sequence's number counts
        part[s] = here
        part_lens = None
        if seq_lens is not None:
            part_lens = torch.zeros(s + 1, dtype=seq_lens.dtype, device=seq_lens.device)
            part_lens[s] = seq_lens[s]
        total += _shard(stage, plain, part, part_lens, backend)
    return total


def _digest_native(tensors: list[Tensor], spec: Spec, ids: Tensor, seq_lens: Tensor | None) -> Digest:
    out = torch.zeros(2, dtype=torch.int64, device=tensors[0].device)
    add_digest(out, tensors, spec, ids, seq_lens)
    return Digest(*(int(x) & _MASK for x in out.tolist()))


def add_digest(out: Tensor, tensors: list[Tensor], spec: Spec, ids: Tensor, seq_lens: Tensor | None) -> None:
    """Add one shard's two sums to `out` [2] int64, on the current stream of its device, without waiting."""
    args = new_args(tensors[0].device)
    args.dst_memory, args.table_memory = memory_of(tensors), memory_of([ids])
    source = SideArrays(tensors)
    source.fill(args, "src")
    native.fill_array(args.src_blocks, ids)
    if seq_lens is not None:
        native.fill_array(args.seq_lens, seq_lens)
    data, plan_handle = coordinate_bytes(spec), ctypes.c_void_p()
    status = _plan_load(data, len(data), ctypes.addressof(plan_handle))
    if status:
        native.raise_status(status, call="digest()")
    status = _digest(plan_handle, ctypes.addressof(args), out.data_ptr(), native.stream_of(out))
    message = native.last_error()  # before the next call changes it
    _plan_free(plan_handle)
    del source  # it must live as long as the call
    if status:
        native.raise_status(status, message, call="digest()")


# ---- the definition


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _digest_torch(tensors: list[Tensor], boxes: tuple[Box, ...], spec: Spec, ids: Tensor, seq_lens: Tensor | None) -> Digest:
    flat = [bytes_of(t) for t in tensors]
    rows = as_table(ids).tolist()
    lens = [len(row) * spec.block_size for row in rows] if seq_lens is None else seq_lens.tolist()
    bad = [b for row, n in zip(rows, lens, strict=True) for b in row[: -(-n // spec.block_size)] if b >= spec.num_blocks]
    if bad:
        raise OutOfRange(f"digest(): blocks has {bad[0]}; the cache has {spec.num_blocks} blocks.")
    first, second, content = 0, 0, content_number(spec)
    for box in map(fold, boxes):
        for seq, (row, length) in enumerate(zip(rows, lens, strict=True)):
            for position in range(0, length, spec.block_size):
                block = row[position // spec.block_size]
                if block < 0:
                    continue
                for index in product(*(range(d.size) for d in box.digits)):
                    at = list(zip(index, box.digits, strict=True))
                    token = position + sum(i * d.token for i, d in at)
                    if token >= length:
                        continue
                    coordinate = box.dst.offset + sum(i * d.dst for i, d in at)
                    buffer = box.src.buffer + block * box.src.block_step + sum(i * d.src_step for i, d in at)
                    start = box.src.offset + block * box.src.block + sum(i * d.src for i, d in at)
                    keys = _row_keys(coordinate, seq, token, content)
                    a, b = _row_terms(flat[buffer][start : start + box.run_bytes], keys, coordinate)
                    first, second = first + a, second + b
    return Digest(first & _MASK, second & _MASK)


def _row_keys(coordinate: int, seq: int, position: int, content: int) -> list[int]:
    """Six of 32 bits, low halves first."""
    seed = (coordinate >> 24) + (position << 33) + (seq + 1) * _GOLDEN + content * 0xD1342543DE82EF95
    pairs = [first := _mix(seed & _MASK)]
    for flip, factor in ((0xA0761D6478BD642F, 0xD6E8FEB86659FD93), (0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3)):
        product = (first ^ flip) * factor & _MASK
        pairs.append(product ^ product >> 32)
    return [half & 0xFFFFFFFF for pair in pairs for half in (pair, pair >> 32)]


def _row_terms(run: Tensor, keys: list[int], coordinate: int) -> tuple[int, int]:
    data = bytes(run.tolist())
    first = second = 0
    for n in range(0, len(data), WORD):
        word, index = data[n : n + WORD].ljust(WORD, b"\0"), (coordinate & 0xFFFFFF) // WORD + n // WORD
        numbers = struct.unpack("<4I", word)
        x, y = ([a + (2 * index + 1) * k & 0xFFFFFFFF for a, k in zip(numbers, part, strict=True)] for part in (keys[:4], keys[2:]))
        first, second = first + x[0] * x[1] + x[2] * x[3], second + y[0] * y[1] + y[2] * y[3]
    return first, second
