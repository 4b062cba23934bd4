"""The recurrent part of llama.cpp's sequence state: convolutions (R) and matrices (S) of one sequence, and where it stands.

    u32 cells                             1
    i32 position                          of the last token: a state after n tokens says n - 1
    u32 sequences, u32 S transposed       0 and 0
    u32 layers                            of the model, those without a state too
    layers with a state x {i32 type, u64 bytes, R}
    layers with a state x {i32 type, u64 bytes, S}      of no bytes where there is no matrix (LFM2)

All numbers are little endian, elements f32. It stands last in the state of a hybrid model, behind K and V; flags 1 of
`llama_state_seq_get_data_ext` gives it alone. Buffers are those of `state_row("llama_cpp")`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.adapters.llama_cpp.state import MAGIC
from kvx.errors import BadArgument, Incompatible, Unsupported, a_type
from kvx.layout.buffers import bytes_of
from kvx.layout.place import buffer_bytes
from kvx.layout.state_rows import state_row
from kvx.spec import StateSpec

_HEAD, _PLANE = struct.Struct("<IiIII"), struct.Struct("<iQ")
_F32 = 0  # ggml's number of it


class RecurrentState(NamedTuple):
    num_tokens: int  # that the state has seen
    buffers: list[Tensor]  # uint8: R and S of each layer, as its spec says


def read_recurrent(data: bytes | memoryview, spec: StateSpec, *, num_model_layers: int) -> RecurrentState:
    """Of a state with K and V before it or without. `spec`: state_row("llama_cpp") of one block, and of the layers with a state."""
    sizes = _sizes("read_recurrent", spec)
    need = _HEAD.size + sum(_PLANE.size + size for size in sizes)
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) < need:
        what = f"{len(data)} bytes" if isinstance(data, bytes | bytearray | memoryview) else type(data).__name__
        raise BadArgument(f"read_recurrent(): data is {what}; these states take {need}. It was cut off, or is of another model.")
    tail = bytearray(data[len(data) - need :])  # torch.frombuffer wants memory that may be written
    cells, position, sequences, transposed, layers = _HEAD.unpack_from(tail)
    if (cells, sequences, transposed, layers) != (1, 0, 0, num_model_layers) or position < 0:
        raise Incompatible(
            f"read_recurrent(): {need} bytes before the end it says {cells} cells, position {position}, {sequences} sequences, S "
            f"transposed {transposed}, {layers} layers; a state of this model has 1 cell, a position from 0 up, 0, 0 and "
            f"{num_model_layers} layers. It is of another model, or of several sequences. It was not read."
        )
    found, at = [], _HEAD.size
    for n, size in enumerate(sizes):
        told = _PLANE.unpack_from(tail, at)
        if told != (_F32, size):
            raise Incompatible(
                f"read_recurrent(): {_name(n, spec)} is of ggml type {told[0]} and {told[1]} bytes; in this model it is f32 "
                f"({_F32}) and {size}. It was not read."
            )
        at += _PLANE.size
        found.append(
            torch.frombuffer(tail, dtype=torch.uint8, count=size, offset=at) if size else torch.empty(0, dtype=torch.uint8)
        )
        at += size
    return RecurrentState(position + 1, _by_layer(found, spec))


def write_recurrent(
    buffers: Sequence[Tensor],  # of the spec, as read_recurrent gives them
    spec: StateSpec,
    *,
    num_tokens: int,  # that the state has seen
    num_model_layers: int,
    before: bytes = b"",  # the state of K and V, with its magic, where the model has layers of attention; b"": flags 1
) -> bytes:
    """A state that the engine restores into any of its sequences."""
    sizes, count = _sizes("write_recurrent", spec), len(spec.planes)
    held = [bytes_of(t).cpu() for t in buffers]
    if [t.numel() for t in held] != list(buffer_bytes(spec)):
        raise BadArgument(
            f"write_recurrent(): buffers have {[t.numel() for t in held]} bytes; the spec makes {list(buffer_bytes(spec))}."
        )
    if not isinstance(num_tokens, int) or not 1 <= num_tokens < 2**31:
        raise BadArgument(f"write_recurrent(): num_tokens is {num_tokens!r}; a state has seen 1 token or more.")
    planes = [held[layer * count + plane] for plane in range(count) for layer in range(spec.num_layers)]
    planes += [torch.empty(0, dtype=torch.uint8)] * (len(sizes) - len(planes))
    out = [before or struct.pack("<Ii", MAGIC, 0), _HEAD.pack(1, num_tokens - 1, 0, 0, num_model_layers)]
    for t in planes:
        out += [_PLANE.pack(_F32, t.numel()), t.numpy().tobytes()]
    return b"".join(out)


def _sizes(call: str, spec: StateSpec) -> list[int]:
    """Bytes of R of every layer, then of S; S of no bytes where the model has no matrix."""
    if not isinstance(spec, StateSpec):
        raise BadArgument(f"{call}(): spec is {a_type(spec)}; it must be the StateSpec of state_row('llama_cpp').")
    names = [p.name for p in spec.planes]
    if names[0] != "conv" or len(names) > 2 or any(str(p.format) != "f32" for p in spec.planes):
        planes = ", ".join(f"{p.name} {p.format}" for p in spec.planes)
        raise Unsupported(f"{call}(): planes are {planes}; llama.cpp has conv (R) and at most one matrix (S), in f32.")
    if spec.num_blocks != 1 or spec.layout != state_row("llama_cpp").layout(spec.planes):
        raise BadArgument(
            f"{call}(): {spec.num_blocks} blocks of layout {spec.layout!r}; a state is one block of "
            f"{state_row('llama_cpp').layout(spec.planes)!r}. Convert to it with kvx.convert."
        )
    bytes_ = [p.num_rows * p.row_bytes for p in spec.planes]
    return [size for size in (*bytes_, 0)[:2] for _ in range(spec.num_layers)]


def _by_layer(found: list[Tensor], spec: StateSpec) -> list[Tensor]:
    """R of all layers and then S of all, as R and S of each."""
    return [found[plane * spec.num_layers + layer] for layer in range(spec.num_layers) for plane in range(len(spec.planes))]


def _name(n: int, spec: StateSpec) -> str:
    return f"{'RS'[n // spec.num_layers]} of layer {n % spec.num_layers} of those with a state"
