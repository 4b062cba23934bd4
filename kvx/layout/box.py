"""Boxes: rectangles of elements through which both sides of a conversion step evenly. Plain data, its folding, and its bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvx.errors import Unsupported
from kvx.spec.dtypes import DTYPES

MAX_DIGITS = 12
_BITS = {t.code: t.bits for t in DTYPES.values()}
_SIDE, _DIGIT, _FORMAT = struct.Struct("<qqqqqii"), struct.Struct("<qqqiiqqqq"), struct.Struct("<iiiIIIqqqqqqiiq")


class BoxDigit(NamedTuple):
    size: int
    src: int  # bytes from one to the next
    dst: int
    src_step: int  # buffers from one to the next
    dst_step: int
    token: int = 0  # tokens from one to the next; 0 = not an axis of tokens
    layer: int = 0  # layers from one to the next; 0 = not an axis of layers
    src_scale: int = 0  # cells: bytes from one to the next among the scales
    dst_scale: int = 0


class Side(NamedTuple):
    offset: int
    block: int  # bytes from block to block
    token_split: int
    token_outer: int
    token_inner: int
    buffer: int
    block_step: int  # buffers from block to block


class CellFormat(NamedTuple):
    """One side of a row whose elements change their format; the fields of kvx_plan_format_t."""

    dtype: int
    granularity: int
    scale_dtype: int
    group_size: int
    pack: int
    is_inline: int
    dim_outer: int
    dim_inner: int
    scale_offset: int
    scale_block: int
    scale_token: int
    scale_group: int
    scale_buffer: int
    tensor_scale_buffer: int
    first_layer: int


class Cell(NamedTuple):
    src: CellFormat
    dst: CellFormat
    head_dim: int

    @property
    def row_bytes(self) -> int:
        """Of the elements of one row at the destination."""
        return self.head_dim * _BITS[self.dst.dtype] // 8

    @property
    def src_bytes(self) -> int:
        """Of the elements of one row at the source."""
        return self.head_dim * _BITS[self.src.dtype] // 8


class Box(NamedTuple):
    src: Side
    dst: Side
    run_bytes: int
    digits: tuple[BoxDigit, ...]
    cell: Cell | None = None  # None: bytes move as they are

    @property
    def bytes(self) -> int:
        """Moved for one unit of tokens."""
        count = self.run_bytes if self.cell is None else self.cell.row_bytes
        for d in self.digits:
            count *= d.size
        return count


def fold(box: Box) -> Box:
    """Digits that continue each other on both sides joined, and what is adjacent on both made part of the run; innermost first."""
    if box.cell is not None:
        return box
    run = box.run_bytes
    digits = [d._replace(layer=0) for d in box.digits if d.size > 1]
    digits.sort(key=lambda d: (bool(d.src_step or d.dst_step), d.dst, d.src))
    joined = True
    while joined:
        joined = False
        for a in digits:
            if (a.src, a.dst, a.src_step, a.dst_step) == (run, run, 0, 0):
                run *= a.size
                digits.remove(a)
                joined = True
                break
            after = [b for b in digits if b is not a and b[1:5] == tuple(x * a.size for x in a[1:5])]
            if after:
                digits[digits.index(after[0])] = a._replace(size=a.size * after[0].size)
                digits.remove(a)
                joined = True
                break
    digits.sort(key=lambda d: (bool(d.src_step or d.dst_step), d.dst, d.src))
    return box._replace(run_bytes=run, digits=tuple(digits))


def family(box: Box) -> str:
    """Which kernel moves a folded box: a copy, rows, tiles (elements change their order) or cells (they change their format)."""
    if box.cell is not None:
        return "cells"
    if not box.digits:
        return "flat copy"
    if box.run_bytes >= 16:
        return "row copy"
    across = any(d.src == box.run_bytes for d in box.digits) and any(d.dst == box.run_bytes for d in box.digits)
    return "transpose" if across else "row copy"


def walk(digits: tuple[BoxDigit, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(source bytes, destination bytes, source buffers, destination buffers) of every index, last digit slowest."""
    if not digits:
        yield 0, 0, 0, 0
        return
    d = digits[-1]
    for i in range(d.size):
        for src, dst, src_step, dst_step in walk(digits[:-1]):
            yield src + i * d.src, dst + i * d.dst, src_step + i * d.src_step, dst_step + i * d.dst_step


def pack_box(box: Box, cell: int) -> bytes:
    if len(box.digits) > MAX_DIGITS:
        raise Unsupported(f"plan(): a box has {len(box.digits)} digits; plans hold {MAX_DIGITS}.")
    digits = b"".join(_DIGIT.pack(*d) for d in box.digits) + bytes(_DIGIT.size * (MAX_DIGITS - len(box.digits)))
    return (
        _SIDE.pack(*box.src) + _SIDE.pack(*box.dst) + struct.pack("<qII", box.run_bytes, len(box.digits), cell) + digits + bytes(16)
    )


def pack_cell(cell: Cell) -> bytes:
    return _FORMAT.pack(*cell.src) + _FORMAT.pack(*cell.dst) + struct.pack("<II", cell.head_dim, 0)
