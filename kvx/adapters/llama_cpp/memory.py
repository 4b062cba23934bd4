"""All that llama.cpp keeps of a sequence, as its states and slot files hold it: one or two K/V caches, and a recurrent state.

    plain models           K/V
    sliding windows        K/V of the layers that see all, then K/V of those with a window: its last tokens alone
    hybrids                K/V (one or two), then the recurrent state
    purely recurrent       the recurrent state

`state.py` has the bytes of K/V and `recurrent.py` those of a state; here they are read without knowing the model, because the
bytes say types and sizes themselves. Cells have 12 bytes, and more in models whose positions have several axes (M-RoPE): three
words since version 3, two before. Quantised rows are rotated in every version, and only since version 4 the bytes say by how much.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvx.adapters.llama_cpp.ggml_rows import (
    QUANTISED,
    decode_rows,
    encode_rows,
    rotate,
    row_bytes,
    row_elements,
    type_name,
    type_number,
)
from kvx.adapters.llama_cpp.kinds import VERSIONS
from kvx.errors import BadArgument, Incompatible, Unsupported

MAGIC = 0xAF143CD8
UNSAID = -1  # a rotation of quantised rows, in a version that does not say it
_EXTRA_WORDS = {2: (0, 2), 3: (0, 3), 4: (0, 3)}  # of a cell, by version
_MOST_STREAMS, _MOST_LAYERS = 4096, 4096


@dataclass(frozen=True, eq=False)
class GgmlRows:
    """K or V of one layer: a row a cell."""

    type: str
    data: NDArray[np.uint8]  # [cells, row bytes]

    def to(self, type: str, *, turned: int, turn: int) -> GgmlRows:
        """In another type, and rotated by `turn` where they were by `turned`."""
        if (type, turn) == (self.type, turned):
            return self
        if UNSAID in (turn, turned):
            raise Unsupported(
                f"a state of {self.type} and one of {type}: before version 4 (2026-10) llama.cpp rotates K and V before it "
                "quantises them, and its files do not say how. It is restored as it is; to convert it, run a newer server, or one "
                "with f16."
            )
        values = (
            rotate(rotate(decode_rows(self.data, self.type), turned), turn) if turned != turn else decode_rows(self.data, self.type)
        )
        row_bytes(type, values.shape[1])  # refused where rows are of no whole blocks
        return GgmlRows(type, encode_rows(values, type))


@dataclass(frozen=True)
class KvKind:
    """How a server keeps K and V; it restores no other."""

    k: str = "f16"  # cache_type_k
    v: str = "f16"
    is_v_transposed: bool = False  # it runs without flash attention
    k_rotation: int = 0  # elements that are rotated together before they are quantised; UNSAID where a file does not say it
    v_rotation: int = 0
    num_streams: int = 1  # slots, or 1 with a unified cache

    @property
    def name(self) -> str:
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@dataclass(frozen=True, eq=False)
class KvCache:
    """In the order of positions."""

    kind: KvKind
    positions: NDArray[np.int32]
    extra: NDArray[np.int32]  # [cells, 0, 2 or 3]: other axes of positions
    k: tuple[GgmlRows, ...]
    v: tuple[GgmlRows, ...]  # none of latent caches (MLA)

    def take(self, keep: Any) -> KvCache:  # a slice or an index of cells
        k, v = (tuple(GgmlRows(r.type, r.data[keep]) for r in rows) for rows in (self.k, self.v))
        return replace(self, positions=self.positions[keep], extra=self.extra[keep], k=k, v=v)

    def to(self, kind: KvKind) -> KvCache:
        k = tuple(r.to(kind.k, turned=self.kind.k_rotation, turn=kind.k_rotation) for r in self.k)
        v = tuple(r.to(kind.v, turned=self.kind.v_rotation, turn=kind.v_rotation) for r in self.v)
        return replace(self, kind=kind, k=k, v=v)


@dataclass(frozen=True, eq=False)
class Recurrent:
    position: int  # of the last token it has seen
    num_model_layers: int
    planes: tuple[tuple[int, bytes], ...]  # ggml type and bytes: R of each layer with a state, then S


@dataclass(frozen=True, eq=False)
class Memory:
    version: int
    caches: tuple[KvCache, ...]
    recurrent: Recurrent | None = None

    @property
    def kind(self) -> KvKind | None:
        return self.caches[0].kind if self.caches else None

    @property
    def num_tokens(self) -> int:
        last = [int(c.positions[-1]) for c in self.caches] + ([self.recurrent.position] if self.recurrent else [])
        return last[0] + 1

    @property
    def is_cuttable(self) -> bool:
        """Whether a beginning of it is a memory too: all its layers keep every token."""
        return len(self.caches) == 1 and self.recurrent is None and self.has_all_cells

    @property
    def has_all_cells(self) -> bool:
        """Of the first cache: from position 0 on, one each."""
        return bool(self.caches) and len(self.caches[0].positions) == self.num_tokens

    def rows(self, first: int, end: int) -> Memory:
        """The first cache's cells of these positions, the rest as it is."""
        if not self.has_all_cells or not 0 <= first < end <= self.num_tokens:
            raise BadArgument(f"Memory.rows(): cells {first} to {end} of {len(self.caches)} caches of {self.num_tokens} tokens.")
        return replace(self, caches=(self.caches[0].take(slice(first, end)), *self.caches[1:]))

    def cut(self, num_tokens: int) -> Memory:
        if not self.is_cuttable:
            raise Unsupported("Memory.cut(): sliding windows and recurrent states cannot be cut to a shorter prefix.")
        return self.rows(0, num_tokens)

    def to(self, kinds: Sequence[KvKind]) -> Memory:
        """Of each cache, as one of `kinds` says."""
        if len(kinds) != len(self.caches):
            raise Incompatible(f"a state of {len(self.caches)} K/V caches; the other has {len(kinds)}: it is of another model.")
        return replace(self, caches=tuple(c.to(k) for c, k in zip(self.caches, kinds, strict=True)))

    def require_fit(self, call: str, other: Memory) -> None:
        """Raise unless `other` is of a model of the same geometry."""
        ours, theirs = self.geometry, other.geometry
        if ours != theirs:
            raise Incompatible(f"{call}: the states are of different models: {ours} and {theirs}. Nothing was read.")

    @property
    def geometry(self) -> str:
        """What every state of one model has in common, whatever its K/V types."""
        caches = []
        for c in self.caches:
            sizes = [row_elements(r.type, r.data.shape[1]) for r in (*c.k, *c.v)]
            caches.append(f"{len(c.k)}+{len(c.v)} layers of {'/'.join(map(str, sorted(set(sizes))))}")
        if self.recurrent:
            sizes = sorted({len(p) for _, p in self.recurrent.planes})
            caches.append(f"{len(self.recurrent.planes)} planes of {'/'.join(map(str, sizes))} bytes")
        return ", ".join(caches)


def join_rows(pieces: Sequence[Memory]) -> Memory:
    """Memories of one chain of `rows`: the first caches one after the other, the rest as the last has it."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    caches = [p.caches[0] for p in pieces]
    k, v = (
        tuple(
            GgmlRows(rows[0].type, np.concatenate([r.data for r in rows]))
            for rows in zip(*(getattr(c, name) for c in caches), strict=True)
        )
        for name in ("k", "v")
    )
    positions, extra = (np.concatenate([getattr(c, name) for c in caches]) for name in ("positions", "extra"))
    return replace(last, caches=(replace(caches[-1], positions=positions, extra=extra, k=k, v=v), *last.caches[1:]))


def read_memory(data: bytes | memoryview, *, version: int = VERSIONS[-1]) -> tuple[Memory, int]:
    """With the bytes that it took. Files hold more behind it, a state nothing."""
    if version not in _EXTRA_WORDS:
        raise Incompatible(f"read_memory(): version is {version}; KVX reads {', '.join(map(str, VERSIONS))}. It was not read.")
    view = memoryview(data)
    begin = 8 if len(view) >= 8 and struct.unpack_from("<I", view)[0] == MAGIC else 0
    problems: list[Exception] = []
    for words in _EXTRA_WORDS[version]:
        reader = _Reader(view, begin)
        try:
            return _read(reader, version, words), reader.at
        except (BadArgument, Unsupported) as error:
            problems.append(error)
    raise problems[0]


def write_memory(memory: Memory, *, is_file: bool = True) -> bytes:
    """For llama_state_seq_set_data, or, without the leading magic, for a slot file."""
    out = [] if is_file else [struct.pack("<Ii", MAGIC, 0)]
    for cache in memory.caches:
        out += _write_cache(cache, memory.version)
    if memory.recurrent is not None:
        r = memory.recurrent
        out.append(struct.pack("<IiIII", 1, r.position, 0, 0, r.num_model_layers))
        for type_, plane in r.planes:
            out += [struct.pack("<iQ", type_, len(plane)), plane]
    return b"".join(out)


def _read(reader: _Reader, version: int, extra_words: int) -> Memory:
    caches: list[KvCache] = []
    while reader.left >= 16:
        first, _, _, fourth = reader.peek("IiII")
        if first == 1 and fourth == 0:  # a cell of the recurrent state is of no sequence, one of K/V of one
            return Memory(version, tuple(caches), _read_recurrent(reader))
        if caches and not 1 <= first <= _MOST_STREAMS:
            break  # what a file holds behind
        caches.append(_read_cache(reader, version, extra_words))
    if not caches:
        raise BadArgument(f"read_memory(): {reader.left} bytes; a state has more. It was cut off, or the sequence is empty.")
    return Memory(version, tuple(caches))


def _read_cache(reader: _Reader, version: int, extra_words: int) -> KvCache:
    streams = reader.one("I", "streams")
    if not 1 <= streams <= _MOST_STREAMS:
        raise BadArgument(f"read_memory(): begins with {streams:#x}; a state begins with its number of streams, or {MAGIC:#x}.")
    found: KvCache | None = None
    for stream in range(streams):
        cells = reader.one("I", f"cells of stream {stream}")
        if cells and found is not None:
            raise Unsupported(f"read_memory(): stream {stream} has {cells} cells besides another's; one sequence has one stream.")
        if cells:
            found = _read_stream(reader, cells, streams, version, extra_words)
    if found is None:
        raise BadArgument("read_memory(): no cells; the sequence is empty.")
    return found


def _read_stream(reader: _Reader, cells: int, streams: int, version: int, extra_words: int) -> KvCache:
    words = 3 + extra_words
    raw = np.frombuffer(reader.take(cells * words * 4, f"{cells} cells"), "<i4").reshape(cells, words)
    if (raw[:, 1] != 1).any():
        n = int((raw[:, 1] != 1).argmax())
        raise Unsupported(f"read_memory(): cell {n} is of {raw[n, 1]} sequences; in a state of one sequence that is 1.")
    transposed, layers = reader.read("II", "V order and layers")
    if transposed > 1 or not 1 <= layers <= _MOST_LAYERS:
        raise BadArgument(f"read_memory(): V order is {transposed} and there are {layers} layers; V order is 0 or 1.")
    turns = reader.read("II", "rotations") if version >= 4 else None
    k = tuple(_read_rows(reader, cells, f"K of layer {i}") for i in range(layers))
    v: tuple[GgmlRows, ...] = ()
    if not _is_latent(reader):
        v = tuple(_read_rows(reader, cells, f"V of layer {i}", bool(transposed)) for i in range(layers))
    positions, order = raw[:, 0], np.argsort(raw[:, 0], kind="stable")
    types = k[0].type, v[0].type if v else k[0].type
    k_turn, v_turn = turns or (UNSAID if type in QUANTISED else 0 for type in types)
    kind = KvKind(*types, bool(transposed), int(k_turn), int(v_turn), streams)
    found = KvCache(kind, positions.astype(np.int32), raw[:, 2:-1].astype(np.int32), k, v)
    ordered = found if (np.diff(positions) > 0).all() else found.take(order)
    at = ordered.positions
    if at[0] < 0 or (np.diff(at) != 1).any():
        raise Unsupported(
            f"read_memory(): {cells} cells have positions {at[0]} to {at[-1]}; they follow each other. A part that was shifted out "
            "cannot be restored: start the server without --context-shift, and compute the prompt again."
        )
    return ordered


def _is_latent(reader: _Reader) -> bool:
    """Whether no V follows, as in caches of latents (MLA): the end, a recurrent state, or what a file holds behind."""
    if reader.left < 20:
        return reader.left == 0
    first, _, third, fourth, fifth = reader.peek("IIIII")
    is_recurrent = (first, third, fourth) == (1, 0, 0) and 1 <= fifth <= _MOST_LAYERS
    return is_recurrent or type_name(first).startswith("ggml type")


def _read_rows(reader: _Reader, cells: int, what: str, transposed: bool = False) -> GgmlRows:
    type_, *sizes = reader.read("iII" if transposed else "iQ", what)
    name = type_name(type_)
    size = sizes[0] * sizes[1] if transposed else sizes[0]
    if name.startswith("ggml type") or not row_elements(name, size):
        raise Unsupported(f"read_memory(): {what} is of {name} and has rows of {size} bytes; KVX does not know such rows.")
    raw = np.frombuffer(reader.take(cells * size, what), np.uint8)
    if not transposed:
        return GgmlRows(name, raw.reshape(cells, size))
    by_element = raw.reshape(sizes[1], cells, sizes[0])
    return GgmlRows(name, np.ascontiguousarray(by_element.transpose(1, 0, 2)).reshape(cells, size))


def _read_recurrent(reader: _Reader) -> Recurrent:
    _, position, sequences, transposed, layers = reader.read("IiIII", "recurrent state")
    if position < 0 or sequences or transposed or not 1 <= layers <= _MOST_LAYERS:
        raise BadArgument(f"read_memory(): a recurrent state at position {position}, S order {transposed}, of {layers} layers.")
    planes: list[tuple[int, bytes]] = []
    while len(planes) < 2 * layers and reader.left >= 12:
        type_, size = reader.peek("iQ")
        if type_ not in (0, 1, 30):  # what a file holds behind
            break
        reader.read("iQ", "a plane")
        planes.append((type_, bytes(reader.take(size, f"plane {len(planes)} of the recurrent state"))))
    if not planes or len(planes) % 2:
        raise BadArgument(f"read_memory(): {len(planes)} planes of a recurrent state; there are two a layer. It was cut off.")
    return Recurrent(position, layers, tuple(planes))


def _write_cache(cache: KvCache, version: int) -> list[bytes]:
    kind, cells = cache.kind, len(cache.positions)
    raw = np.zeros((cells, 3 + cache.extra.shape[1]), "<i4")
    raw[:, 0], raw[:, 1], raw[:, 2:-1] = cache.positions, 1, cache.extra
    out = [struct.pack("<II", kind.num_streams, cells), raw.tobytes(), struct.pack("<II", kind.is_v_transposed, len(cache.k))]
    if version >= 4:
        out.append(struct.pack("<II", kind.k_rotation, kind.v_rotation))
    for rows in cache.k:
        out += [struct.pack("<iQ", type_number(rows.type), rows.data.shape[1]), rows.data.tobytes()]
    for rows in cache.v:
        number, size = type_number(rows.type), rows.data.shape[1]
        if kind.is_v_transposed:
            elements = row_elements(rows.type, size)
            item = size // elements
            out.append(struct.pack("<iII", number, item, elements))
            out.append(np.ascontiguousarray(rows.data.reshape(cells, elements, item).transpose(1, 0, 2)).tobytes())
        else:
            out += [struct.pack("<iQ", number, size), rows.data.tobytes()]
    # The engine takes the first stream with cells for the sequence it restores, whichever that one's own is.
    out.append(struct.pack(f"<{kind.num_streams - 1}I", *[0] * (kind.num_streams - 1)))
    return out


class _Reader:
    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self.at = data, at

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def take(self, size: int, what: str) -> memoryview:
        if size > self.left:
            raise BadArgument(
                f"read_memory(): ends inside {what}: {self.left} bytes of {size} are there. It was cut off, or another version "
                "wrote it."
            )
        self.at += size
        return self._data[self.at - size : self.at]

    def peek(self, code: str) -> tuple[Any, ...]:
        return struct.unpack_from("<" + code, self._data, self.at)

    def read(self, code: str, what: str) -> tuple[Any, ...]:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))

    def one(self, code: str, what: str) -> int:
        return int(self.read(code, what)[0])
