"""One block in one file: a header that says what it is, then the bytes. docs/tiers.md has the table.

Every byte is under a checksum: those of the header under its own, those of the payload under the one in the header.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kvx.errors import BadArgument, Damaged, Unsupported
from kvx.tiers.block import Block, BlockKind, kind_from_text

MAGIC, VERSION = b"KVXBLOCK", 1
# magic, version, checksum's number, header bytes, manifest bytes, payload bytes, manifest digest, payload checksum, key bytes, key
_HEAD = struct.Struct("<8sHHIIQ16s16sI64s")
_CHECK_BYTES = 16  # the header's checksum, its last bytes
_MOST_HEADER_BYTES = 1 << 20  # a file that claims more is not read
_ALIGN = 4096  # the payload begins on a page, so that it can be mapped or read past the page cache


def _blake2b(data: Any = b"") -> Any:
    return hashlib.blake2b(data, digest_size=16)


TakePiece = Callable[[int, Any], None]  # from which of the block's bytes on, and those bytes: another's when it returns
CHECKSUMS: dict[int, Callable[..., Any]] = {1: _blake2b}  # the number is in the file; those of kvx_hash_t
try:  # faster, and optional
    from xxhash import xxh3_128

    CHECKSUMS[3] = xxh3_128
except ImportError:
    pass


def hasher(number: int, data: Any = b"") -> Any:
    if number not in CHECKSUMS:
        raise Unsupported(f"its checksum is number {number}, which needs the package xxhash. pip install xxhash reads it.")
    return CHECKSUMS[number](data)


def checksum(number: int, parts: Sequence[Any]) -> bytes:
    state = hasher(number, *parts[:1])
    for part in parts[1:]:
        state.update(part)
    digest: bytes = state.digest()
    return digest


def header_bytes(kind: BlockKind) -> int:
    size = _HEAD.size + len(kind.text.encode()) + _CHECK_BYTES
    return -(-size // _ALIGN) * _ALIGN


def file_bytes(kind: BlockKind) -> int:
    """The same for every block of a kind."""
    return header_bytes(kind) + kind.num_bytes


def open_file(path: str | Path, dir_fd: int | None = None, flags: int = 0) -> int:
    """A descriptor to read a file by. Damaged where something else has its name: a link is not followed, a pipe not waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket or a device without a driver
            raise Damaged("it is a symbolic link or a socket, no file.") from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        raise Damaged("it is a pipe or a device, no file.")
    return fd


def write_block(file: BinaryIO, key: bytes, block: Block) -> None:
    payload = _payload(block)
    file.write(_head(key, block.kind, payload))
    for part in payload:
        file.write(part)


def write_direct(fd: int, key: bytes, block: Block, room: Any) -> None:
    """The same in one call, past the system's cache. `room` is header_bytes() of memory for the header, on a page."""
    payload = _payload(block)
    room[:] = _head(key, block.kind, payload)
    size = file_bytes(block.kind)
    wrote = os.writev(fd, [room, *payload])
    if wrote != size:
        raise OSError(errno.ENOSPC, f"{wrote} of {size} bytes were written")


def is_aligned(block: Block) -> bool:
    """Whether it can be written past the system's cache: every buffer begins and ends on a page."""
    return has_whole_pages(block.kind) and all(t.data_ptr() % _ALIGN == 0 for t in block.buffers)


def has_whole_pages(kind: BlockKind) -> bool:
    return all(size % _ALIGN == 0 for size in kind.buffer_bytes)


def read_block(file: BinaryIO, key: bytes, into: Block) -> None:
    """Fill `into`, and raise unless every byte is the one that was written, for this key and this kind."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(_HEAD.size)
    length = _header_length(start, size)
    number, want = _check_head(start + file.read(length - _HEAD.size), key, into.kind)
    payload = _payload(into)
    for part in payload:
        _fill(file, part)
    if checksum(number, payload) != want:
        raise Damaged("its bytes are not those that were written: the checksum differs.")


def read_cached(fd: int, into: Block) -> bool:
    """Fill `into` without a check, from a file that was checked and is as it was then. False unless all of it is in the system's
    cache: what comes from the disk is checked.
    """
    return _read_cached(fd, _payload(into), header_bytes(into.kind)) == into.kind.num_bytes


def read_cached_pieces(fd: int, kind: BlockKind, room: Any, take: TakePiece) -> bool:
    """The same in pieces of `room`. False: what was handed on is to be handed on again."""
    at = 0
    while at < kind.num_bytes:
        came = _read_cached(fd, [room[: kind.num_bytes - at]], header_bytes(kind) + at)
        if not came:
            return False
        take(at, room[:came])
        at += came
    return True


def _read_cached(fd: int, into: Sequence[Any], start: int) -> int:
    try:
        return os.preadv(fd, into, start, os.RWF_NOWAIT) if hasattr(os, "RWF_NOWAIT") else 0
    except OSError:  # it would have to wait, or this file system cannot say so
        return 0


def read_pieces(fd: int, key: bytes, kind: BlockKind, room: Any, take: TakePiece) -> None:
    """Hand a block on in pieces of `room`, memory with space for a header and more, which begins on a page where `fd` goes past the
    system's cache. Each is checked while other threads' reads are under way: neither the disk nor the processor waits long.

    Damaged or Incompatible, at the latest after the last piece, unless every byte is the one that was written.
    """
    size, length = os.fstat(fd).st_size, header_bytes(kind)
    came = os.preadv(fd, [room], 0)
    head = bytes(room[: min(came, length)])
    if _header_length(head, size) != length:
        raise Damaged(f"it has {size} bytes; its kind makes {file_bytes(kind)}.")
    number, want = _check_head(head, key, kind)
    state, at, piece = hasher(number), 0, room[length:came]
    while at < kind.num_bytes and len(piece):
        piece = piece[: kind.num_bytes - at]
        state.update(piece)
        take(at, piece)
        at += len(piece)
        if at < kind.num_bytes:
            piece = room[: os.preadv(fd, [room[: len(room) - length]], length + at)]
    if at != kind.num_bytes:
        raise Damaged(f"it ends {kind.num_bytes - at} bytes early.")
    if state.digest() != want:
        raise Damaged("its bytes are not those that were written: the checksum differs.")


def _payload(block: Block) -> list[Any]:
    return [t.numpy().data for t in block.buffers if t.numel()]


def _head(key: bytes, kind: BlockKind, payload: Sequence[Any]) -> bytes:
    text, size, number = kind.text.encode(), header_bytes(kind), max(CHECKSUMS)
    head = _HEAD.pack(
        MAGIC, VERSION, number, size, len(text), kind.num_bytes, kind.digest, checksum(number, payload), len(key), key
    )
    head = (head + text).ljust(size - _CHECK_BYTES, b"\0")
    return head + checksum(number, [head])


def _header_length(start: bytes, size: int) -> int:
    """What a file of `size` bytes says of its header."""
    if len(start) < _HEAD.size or not start.startswith(MAGIC):
        raise Damaged(f"it has {size} bytes and begins with {start[:8]!r}; a block file begins with {MAGIC!r}.")
    _, version, _, length, text_bytes, payload_bytes, *_ = _HEAD.unpack_from(start)
    if version != VERSION:
        raise Damaged(f"its version is {version}; this library reads {VERSION}.")
    if not _HEAD.size + text_bytes + _CHECK_BYTES <= length <= min(size, _MOST_HEADER_BYTES) or length + payload_bytes != size:
        raise Damaged(f"it has {size} bytes; its header makes {length} + {payload_bytes}. It is cut short or changed.")
    return int(length)


def _check_head(data: bytes, key: bytes, kind: BlockKind) -> tuple[int, bytes]:
    """Raise unless this header is of this key and this kind. Gives the payload's checksum: its number, and itself."""
    _, _, number, _, text_bytes, payload_bytes, digest, want, key_bytes, name = _HEAD.unpack_from(data)
    head = checked_header(data, number)
    if name[:key_bytes] != key or len(key) != key_bytes:
        raise Damaged(f"it is the block {name[:key_bytes].hex()} under another's name.")
    if digest != kind.digest:
        require_kind(head[_HEAD.size : _HEAD.size + text_bytes], kind)
    if payload_bytes != kind.num_bytes:
        raise Damaged(f"its payload has {payload_bytes} bytes; its kind has {kind.num_bytes}.")
    return number, want


def checked_header(data: bytes, number: int) -> bytes:
    """A header less its checksum, which is its last bytes. Damaged unless that is right."""
    head, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if number not in (1, 3) or checksum(number, [head]) != check:
        raise Damaged("its header is not the one that was written: the checksum differs.")
    return head


def require_kind(manifest: bytes, kind: BlockKind) -> None:
    """Incompatible, and how, where a header's manifest is of another kind; Damaged where it cannot be read."""
    try:
        theirs = kind_from_text(manifest.decode())
    except (BadArgument, UnicodeDecodeError) as error:
        raise Damaged(f"it is of another kind, which cannot be read: {error}") from None
    kind.require_same(theirs, "get")


def _fill(file: BinaryIO, part: memoryview) -> None:
    at = 0
    while at < len(part):
        n = file.readinto(part[at:])  # type: ignore[attr-defined]  # of every binary file; BinaryIO does not say so
        if not n:
            raise Damaged(f"it ends {len(part) - at} bytes early.")
        at += n
