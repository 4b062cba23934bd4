"""Rows of ggml's types as float32 and back, and the rotation that llama.cpp turns K and V by before it quantises them.

q8_0 and q4_0 store 32 elements as one f16 factor and their integers. Values are those that ggml's own routines make.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvx.errors import BadArgument, Unsupported

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# ggml_type -> name, elements of a block, bytes of a block
_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    20: ("iq4_nl", 32, 18),
    30: ("bf16", 1, 2),
}
CONVERTED = ("f32", "f16", "bf16", "q8_0", "q4_0")  # between any two; the others are kept as they are
QUANTISED = tuple(name for name, block, _ in _TYPES.values() if block > 1)


def type_name(number: int) -> str:
    return _TYPES[number][0] if number in _TYPES else f"ggml type {number}"


def type_number(name: str) -> int:
    for number, (known, _, _) in _TYPES.items():
        if known == name:
            return number
    raise BadArgument(f"K/V type {name!r} is none of llama.cpp's; KVX knows {', '.join(n for n, _, _ in _TYPES.values())}.")


def row_bytes(name: str, elements: int) -> int:
    _, block, size = _TYPES[type_number(name)]
    if elements % block:
        raise Unsupported(
            f"rows of {elements} elements cannot be {name}: its blocks have {block}. llama.cpp does not make them either."
        )
    return elements // block * size


def row_elements(name: str, size: int) -> int:
    """How many are in a row of so many bytes; 0 where no row has that many."""
    _, block, block_bytes = _TYPES[type_number(name)]
    return size // block_bytes * block if size % block_bytes == 0 else 0


def decode_rows(rows: Bytes, name: str) -> Floats:
    """`rows` is [n, bytes]; exact."""
    n = len(rows)
    if name in ("f32", "f16"):
        return np.ascontiguousarray(rows).view("<f4" if name == "f32" else "<f2").astype(np.float32)
    if name == "bf16":
        return (np.ascontiguousarray(rows).view("<u2").astype(np.uint32) << 16).view(np.float32)
    if name in ("q8_0", "q4_0"):
        blocks = np.ascontiguousarray(rows).reshape(n, -1, 34 if name == "q8_0" else 18)
        scale = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
        if name == "q8_0":
            values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
        else:  # low halves of the bytes are the first 16 elements
            nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
            values = nibbles.astype(np.float32) - 8
        return (values * scale).reshape(n, -1)
    raise _unsupported(name)


def encode_rows(values: Floats, name: str) -> Bytes:
    """[n, elements] as [n, bytes]: rounded as ggml rounds."""
    n = len(values)
    values = np.ascontiguousarray(values, np.float32)
    if name == "f32":
        return values.view(np.uint8).reshape(n, -1)
    if name == "f16":
        with np.errstate(over="ignore"):  # infinity, as in ggml
            return values.astype("<f2").view(np.uint8).reshape(n, -1)
    if name == "bf16":
        words = values.view(np.uint32)
        rounded = (words + (0x7FFF + ((words >> 16) & 1))) >> 16
        rounded = np.where(np.isnan(values), (words >> 16) | 64, rounded)
        return rounded.astype("<u2").view(np.uint8).reshape(n, -1)
    if name == "q8_0":
        blocks = values.reshape(n, -1, 32)
        scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
        quants = np.rint(blocks * _inverse(scale)).astype(np.int8).view(np.uint8)
        return _joined(scale, quants)
    if name == "q4_0":
        blocks = values.reshape(n, -1, 32)
        at = np.abs(blocks).argmax(-1)[..., None]
        scale = np.take_along_axis(blocks, at, -1) / np.float32(-8)
        quants = np.minimum(15, (blocks * _inverse(scale) + np.float32(8.5)).astype(np.int8)).astype(np.uint8)
        return _joined(scale, quants[..., :16] | (quants[..., 16:] << 4))
    raise _unsupported(name)


def rotate(values: Floats, size: int) -> Floats:
    """Each `size` elements of [n, elements] by the Hadamard matrix: its own inverse. 0: as they are."""
    if not size:
        return values
    n, elements = values.shape
    if size & (size - 1) or elements % size:
        raise Unsupported(f"a rotation of {size} in rows of {elements} elements; it must be a power of two that divides them.")
    out, half = values.reshape(n, -1, size).copy(), 1
    while half < size:
        pairs = out.reshape(n, -1, 2, half)
        out = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        half *= 2
    return (out / np.float32(np.sqrt(np.float32(size)))).reshape(n, elements).astype(np.float32)


def rotation_of(name: str, head_dim: int, *, is_k: bool) -> int:
    """By what llama.cpp rotates rows of this type: 0 unless they are quantised and the heads are of 64, 128, ..."""
    if name not in QUANTISED or not head_dim or head_dim % 64:
        return 0
    return head_dim & -head_dim if is_k else 64


def _inverse(scale: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)


def _joined(scale: Floats, quants: Bytes) -> Bytes:
    parts = [scale.astype("<f2").view(np.uint8), quants]
    return np.concatenate(parts, axis=-1).reshape(len(scale), -1)


def _unsupported(name: str) -> Unsupported:
    return Unsupported(
        f"rows of {name} are kept as they are; KVX converts {', '.join(CONVERTED)}. Run the server with one of those."
    )
