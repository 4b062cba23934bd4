"""llama.cpp's sequence state, as `llama_state_seq_get_data` gives it and slot files hold it: bytes in, K and V out, and back.

    u32 0xaf143cd8, i32 sequence          not in files
    u32 streams, then for each:
      u32 cells                           0 ends a stream
      cells x {i32 position, u32 1, i32 sequence}
      u32 V transposed, u32 layers
      u32 K rotated by, u32 V rotated by  version 4; 0 unless quantised
      layers x {i32 type, u64 row bytes, cells x row}                                K
      layers x {i32 type, u64 row bytes, cells x row}                                V, or, transposed,
      layers x {i32 type, u32 element bytes, u32 elements, elements x cells x element}

All numbers are little endian. Models with windows or states of their own (iSWA, recurrent, hybrid) write more, and are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvx.adapters.llama_cpp.kinds import ITEM_BYTES, VERSIONS, StateKind, format_of, type_of
from kvx.adapters.llama_cpp.model import StateModel
from kvx.errors import BadArgument, Incompatible, Unsupported, a_type

MAGIC = 0xAF143CD8


@dataclass(frozen=True, eq=False)
class SequenceState:
    """Rows are in the order of positions."""

    kind: StateKind
    k: tuple[Tensor, ...]  # bytes of each layer, [cells, row_elements]
    v: tuple[Tensor, ...]  # as k, or transposed
    num_cells: int


def read_state(data: bytes | memoryview, *, model: StateModel, version: int = VERSIONS[-1]) -> SequenceState:
    """`version`: of the files that the engine writes; bytes do not say it themselves. With or without the leading magic."""
    if version not in VERSIONS:
        raise Unsupported(f"read_state(): version is {version}; KVX reads {', '.join(map(str, VERSIONS))}.")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise BadArgument(f"read_state(): data is {a_type(data)}; it must be a state's bytes, of llama_state_seq_get_data.")
    reader = _Reader(data)
    if reader.peek() == MAGIC:
        reader.read("Ii", "magic and sequence")
    streams = reader.one("I", "streams")
    if not 1 <= streams <= 4096:
        raise BadArgument(f"read_state(): begins with {streams:#x}; a state begins with its number of streams, or {MAGIC:#x}.")
    found: SequenceState | None = None
    for stream in range(streams):
        cells = reader.one("I", f"cells of stream {stream}")
        if cells and found:
            raise Unsupported(
                f"read_state(): stream {stream} has {cells} cells besides {found.num_cells} of another; one has some."
            )
        if cells:
            found = _read_stream(reader, cells, model, streams, version)
    if found is None:
        raise BadArgument("read_state(): no cells; the sequence is empty.")
    if reader.left:
        raise Unsupported(
            f"read_state(): {reader.left} bytes are left after {model.num_layers} layers of {found.num_cells} cells. Models with "
            "sliding windows or recurrent states write more than K and V of every token; they are not read."
        )
    return found


def write_state(
    k: Sequence[Tensor],  # bytes of each layer, in the kind's order
    v: Sequence[Tensor],
    *,
    num_cells: int,
    model: StateModel,
    kind: StateKind,
    is_file: bool = False,  # of a file: without the leading magic
) -> bytes:
    """A state that an engine of this kind reads into any of its sequences."""
    out = [] if is_file else [struct.pack("<Ii", MAGIC, 0)]
    cells = np.zeros((num_cells, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(num_cells), 1
    out += [struct.pack("<II", kind.num_streams, num_cells), cells.tobytes()]
    out.append(struct.pack("<II", kind.is_v_transposed, model.num_layers))
    if kind.version >= 4:
        out.append(struct.pack("<II", 0, 0))
    type_, item = type_of(kind.format), ITEM_BYTES[kind.format]
    head = struct.pack("<iQ", type_, model.row_elements * item)
    v_head = struct.pack("<iII", type_, item, model.row_elements) if kind.is_v_transposed else head
    for rows in k:
        out += [head, rows.numpy().tobytes()]
    for rows in v:
        out += [v_head, rows.numpy().tobytes()]
    # The engine takes the first stream with cells for the sequence it restores, whichever that one's own is.
    out.append(struct.pack(f"<{kind.num_streams - 1}I", *[0] * (kind.num_streams - 1)))
    return b"".join(out)


def _read_stream(reader: _Reader, cells: int, model: StateModel, streams: int, version: int) -> SequenceState:
    order = _read_cells(reader, cells)
    transposed, layers = reader.read("II", "V order and layers")
    if transposed > 1:
        raise BadArgument(f"read_state(): V order is {transposed}; it must be 0 (one row per cell) or 1 (transposed).")
    if layers != model.num_layers:
        raise Incompatible(f"read_state(): {layers} layers; model {model.name!r} has {model.num_layers}. It was not read.")
    if version >= 4:
        turned = reader.read("II", "rotations")
        if turned != (0, 0):
            raise Unsupported(
                f"read_state(): K and V were rotated by {turned[0]} and {turned[1]}, as before quantisation. "
                "Run the engine with cache_type_k and cache_type_v of f32, f16 or bf16."
            )
    k = [_read_rows(reader, cells, f"K of layer {i}", model) for i in range(layers)]
    v = [_read_rows(reader, cells, f"V of layer {i}", model, transposed=bool(transposed)) for i in range(layers)]
    formats = {format for format, _ in k + v}
    if len(formats) > 1:
        raise Unsupported(
            f"read_state(): K and V are {' and '.join(sorted(formats))}; they must be of one type. "
            "Run the engine with cache_type_k the same as cache_type_v."
        )
    kind = StateKind(formats.pop(), bool(transposed), streams, version)
    ks, vs = (tuple(rows for _, rows in x) for x in (k, v))
    if order is not None:  # cells are taken where there is room, so a sequence may lie in any order
        ks = tuple(rows.view(cells, -1)[order].flatten() for rows in ks)
        shape = (model.row_elements, cells, -1) if transposed else (1, cells, -1)
        vs = tuple(rows.view(shape)[:, order].flatten() for rows in vs)
    return SequenceState(kind, ks, vs, cells)


def _read_cells(reader: _Reader, cells: int) -> Tensor | None:
    """The cells in the order of positions; None where they are."""
    raw = np.frombuffer(reader.take(cells * 12, f"{cells} cells"), "<i4").reshape(cells, 3)
    if (raw[:, 1] != 1).any():
        n = int((raw[:, 1] != 1).argmax())
        raise Unsupported(
            f"read_state(): cell {n} is of {raw[n, 1]} sequences; in a state of one sequence that is 1. States of several, and "
            "of models with more than one position a token, are not read."
        )
    positions = raw[:, 0]
    if (positions == np.arange(cells)).all():
        return None
    order = np.argsort(positions, kind="stable")
    if (positions[order] != np.arange(cells)).any():
        raise Unsupported(
            f"read_state(): {cells} cells have positions {positions.min()} to {positions.max()}; they must be each of 0 to "
            f"{cells - 1}. A beginning that was shifted out cannot be handed over."
        )
    return torch.from_numpy(order)


def _read_rows(reader: _Reader, cells: int, what: str, model: StateModel, *, transposed: bool = False) -> tuple[str, Tensor]:
    type_, *sizes = reader.read("iII" if transposed else "iQ", what)
    format = format_of("read_state()", what, type_)
    item, elements = ITEM_BYTES[format], model.row_elements
    want = [item, elements] if transposed else [elements * item]
    if sizes != want:
        raise Incompatible(
            f"read_state(): {what} in {format} has sizes {sizes}; this model's are {want}"
            f"{' (element bytes, elements)' if transposed else ' (row bytes)'}. It was not read."
        )
    return format, torch.frombuffer(reader.take(cells * elements * item, what), dtype=torch.uint8)


class _Reader:
    def __init__(self, data: bytes | memoryview) -> None:
        self._bytes = bytearray(data)  # torch.frombuffer wants memory that may be written
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._bytes) - self._at

    def take(self, size: int, what: str) -> memoryview:
        if size > self.left:
            raise BadArgument(
                f"read_state(): ends inside {what}: {self.left} bytes of {size} are there. It was cut off, or another version "
                "wrote it."
            )
        self._at += size
        return memoryview(self._bytes)[self._at - size : self._at]

    def read(self, code: str, what: str) -> tuple[Any, ...]:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))

    def one(self, code: str, what: str) -> int:
        return int(self.read(code, what)[0])

    def peek(self) -> int:
        return int(struct.unpack_from("<I", self._bytes, self._at)[0]) if self.left >= 4 else 0
