"""Several blocks of one kind in one file, a pack: a header with their names and checksums, then their bytes. docs/tiers.md has
the table.

It is written whole and never changed. Every byte is under a checksum: those of the header under its own, those of a block under the
block's, so that one block is read and checked without the others.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvx.errors import Damaged
from kvx.tiers.block import Block, BlockKind, Take
from kvx.tiers.block_file import CHECKSUMS, checked_header, checksum, require_kind

PACK_BYTES = 8 << 20  # of a pack's blocks: by then its file costs little beside its bytes
MAGIC, VERSION = b"KVXPACK\0", 1
# magic, version, checksum's number, header bytes, manifest bytes, number of blocks, bytes from a block to the next, manifest digest
_HEAD = struct.Struct("<8sHHIIIQ16s")
_ENTRY = struct.Struct("<I64s16s")  # bytes of a block's name, the name, checksum of the block
_CHECK_BYTES = 16  # the header's checksum, its last bytes
_MOST_HEADER_BYTES = 1 << 20  # a file that claims more is not read
_FIRST_READ = 16384  # as long as nearly every header
_ALIGN = 4096
_MOST_PIECES = 1000  # of memory in one call of the system, which takes 1024
_ZEROS = bytes(_ALIGN)


class PackTable(NamedTuple):
    """What a pack has in it."""

    names: tuple[bytes, ...]  # in the order of the blocks
    checks: tuple[bytes, ...]
    number: int  # of the checksum
    start: int  # byte of the first block
    stride: int  # bytes from a block to the next

    @property
    def num_bytes(self) -> int:
        return self.start + self.stride * len(self.names)


def stride_bytes(kind: BlockKind) -> int:
    """Each block begins on a page, so that it can be read past the system's cache."""
    return -(-kind.num_bytes // _ALIGN) * _ALIGN


def pack_bytes(kind: BlockKind, count: int) -> int:
    return _header_bytes(kind, count) + count * stride_bytes(kind)


def most_blocks(kind: BlockKind) -> int:
    """Of one pack."""
    return max(1, min(PACK_BYTES // stride_bytes(kind), _MOST_PIECES // (len(kind.buffer_bytes) + 1)))


def write_pack(fd: int, room: Any, keys: Sequence[bytes], blocks: Sequence[Block]) -> PackTable:
    """In one call of the system. `room` is pack_bytes() less the blocks, on a page: memory for the header."""
    kind, number = blocks[0].kind, max(CHECKSUMS)
    payloads = [_payload(block) for block in blocks]
    checks = tuple(checksum(number, payload) for payload in payloads)
    table = PackTable(tuple(keys), checks, number, _header_bytes(kind, len(keys)), stride_bytes(kind))
    room[:] = _head(kind, table)
    fill = [_ZEROS[: table.stride - kind.num_bytes]] if table.stride != kind.num_bytes else []
    wrote = os.writev(fd, [room, *(part for payload in payloads for part in (*payload, *fill))])
    if wrote != table.num_bytes:
        raise OSError(errno.ENOSPC, f"{wrote} of {table.num_bytes} bytes were written")
    return table


def read_table(fd: int, kind: BlockKind) -> PackTable:
    """What is in the pack. Damaged or Incompatible unless its header is as it was written, for this kind, and the file as long."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, _FIRST_READ, 0)
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise Damaged(f"it has {size} bytes and begins with {data[:8]!r}; a pack begins with {MAGIC!r}.")
    _, version, number, length, text_bytes, count, stride, digest = _HEAD.unpack_from(data)
    if version != VERSION:
        raise Damaged(f"its version is {version}; this library reads {VERSION}.")
    needed = _HEAD.size + text_bytes + count * _ENTRY.size + _CHECK_BYTES
    if not needed <= length <= min(size, _MOST_HEADER_BYTES) or length + count * stride != size:
        raise Damaged(f"it has {size} bytes; its header makes {length} + {count} x {stride}. It is cut short or changed.")
    if length > len(data):
        data += os.pread(fd, length - len(data), len(data))
    head = checked_header(data[:length], number)
    if digest != kind.digest:
        require_kind(head[_HEAD.size : _HEAD.size + text_bytes], kind)
    if stride != stride_bytes(kind):
        raise Damaged(f"its blocks are {stride} bytes apart; those of its kind are {stride_bytes(kind)}.")
    first = _HEAD.size + text_bytes
    entries = list(_ENTRY.iter_unpack(head[first : first + count * _ENTRY.size]))
    if any(not 0 < key_bytes <= len(key) for key_bytes, key, _ in entries):
        raise Damaged("the name of a block in it has no length that a name can have.")
    names = tuple(key[:key_bytes] for key_bytes, key, _ in entries)
    return PackTable(names, tuple(want for *_, want in entries), number, length, stride)


def read_blocks(fd: int, table: PackTable, kind: BlockKind, wanted: Sequence[tuple[int, int]], room: Any, take: Take) -> None:
    """Hand on blocks by their places in the pack and their numbers in the caller's list. They come by way of `room`, as many
    neighbours in one call as it has space for. Damaged unless every byte is the one that was written.
    """
    for run in _runs(wanted, max(1, len(room) // table.stride)):
        size = len(run) * table.stride
        came = os.preadv(fd, [room[:size]], table.start + run[0][0] * table.stride)
        if came != size:
            raise Damaged(f"it ends {size - came} bytes early.")
        for n, (place, _) in enumerate(run):
            block = room[n * table.stride : n * table.stride + kind.num_bytes]
            if checksum(table.number, [block]) != table.checks[place]:
                raise Damaged("its bytes are not those that were written: the checksum differs.")
        take([n for _, n in run], 0, np.frombuffer(room[:size], np.uint8).reshape(-1, table.stride)[:, : kind.num_bytes])


def _runs(wanted: Sequence[tuple[int, int]], most: int) -> Iterable[list[tuple[int, int]]]:
    """Those whose places follow each other, as far as one call takes them."""
    run: list[tuple[int, int]] = []
    for place, n in sorted(wanted):
        if run and (place != run[-1][0] + 1 or len(run) >= most):
            yield run
            run = []
        run.append((place, n))
    if run:
        yield run


def _payload(block: Block) -> list[Any]:
    return [t.numpy().data for t, size in zip(block.buffers, block.kind.buffer_bytes, strict=True) if size]


def _header_bytes(kind: BlockKind, count: int) -> int:
    size = _HEAD.size + len(kind.text.encode()) + count * _ENTRY.size + _CHECK_BYTES
    return -(-size // _ALIGN) * _ALIGN


def _head(kind: BlockKind, table: PackTable) -> bytes:
    text = kind.text.encode()
    head = _HEAD.pack(MAGIC, VERSION, table.number, table.start, len(text), len(table.names), table.stride, kind.digest) + text
    head += b"".join(_ENTRY.pack(len(k), k, check) for k, check in zip(table.names, table.checks, strict=True))
    head = head.ljust(table.start - _CHECK_BYTES, b"\0")
    return head + checksum(table.number, [head])
