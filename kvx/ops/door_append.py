"""The door of norm, rotation and append: their tensors as one struct (native/door.cpp, kvx_door_append_t)."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from kvx.errors import Incompatible
from kvx.layout.pointers import CachePointers
from kvx.ops import library, native

_P, _I64, _F64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
TENSORS = (
    "q", "k", "v", "q_out", "k_out", "v_out",
    "q_weight", "k_weight", "cos", "sin", "positions",
    "slots", "k_pointers", "v_pointers",
)  # fmt: skip


class AppendArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in TENSORS),
        *((name, _I64) for name in ("style", "num_q_heads", "num_kv_heads", "k_head_dim", "v_head_dim")),
        ("eps", _F64),
        ("weight_offset", _F64),
    ]


norm_rope_call: Any = None
norm_rope_usual: Any = None
append_call: Any = None
append_usual: Any = None
if native.LIB is not None:
    native.LIB.kvx_door_append_bytes.restype = _I64
    if native.LIB.kvx_door_append_bytes() != ctypes.sizeof(AppendArgs):
        raise Incompatible(f"{library.library_path()} is of another build. Rebuild: `make build`.")
    norm_rope_call, append_call = native.LIB.kvx_door_norm_rope, native.LIB.kvx_door_append
    norm_rope_call.argtypes = [ctypes.c_char_p, _P, _P, _P]
    append_call.argtypes = [ctypes.c_char_p, *[_P] * 6]
    norm_rope_usual, append_usual = native.LIB.kvx_door_norm_rope_usual, native.LIB.kvx_door_append_usual
    norm_rope_usual.argtypes = [ctypes.c_char_p, *[_P] * 6, _I64, _F64, _F64, _P]
    append_usual.argtypes = [ctypes.c_char_p, *[_P] * 5, _I64, *[_P] * 6, _I64, _F64, _F64, _P]


def fill(tensors: dict[str, Tensor | None], **numbers: float) -> tuple[AppendArgs, list[Any]]:
    """The struct, and what must stay alive during the call."""
    handles, keep = native.handles(*tensors.values())
    return AppendArgs(**dict(zip(tensors, handles, strict=True)), **numbers), keep


_names: dict[str, bytes] = {}


def name_of(call: str) -> bytes:
    """The call's name as C reads it. Kept: the library holds on to it until the thread's next call."""
    return _names.setdefault(call, f"{call}()".encode())


def pointer_spec(pointers: CachePointers) -> int:
    """Address of the spec of caches behind a table: strides of one cache, no address. Made once, kept with the pointers."""
    kept = pointers.__dict__
    if "_door_struct" not in kept:
        struct = native.pooled_door_spec(pointers.spec)
        for plane, x in zip((struct.cache.k, struct.cache.v), pointers.caches[0], strict=True):
            # Axes block, token, head, dim. Blocks are never stepped over; past the last element, they do not overlap.
            reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
            plane.data.stride[:4] = (reach, x.stride(1), x.stride(0), x.stride(2))
        kept["_door_struct"] = struct
    return native.address_of(kept["_door_struct"])
