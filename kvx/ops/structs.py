"""Structs of libkvx as Python fills them, where more than one op needs them: of include/kvx_abi.h, and of native/door.cpp.

Only shapes of memory: kvx/ops/registry.py says which call takes which, native.py calls. What one op needs alone stands beside it.
"""

from __future__ import annotations

import ctypes
from typing import Any

_P, _I32, _I64, _U32, _U64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
_F32, _F64 = ctypes.c_float, ctypes.c_double
ABI_VERSION = 1 << 16 | 2
# How the structs of hybrid ops begin and end.
HEAD: list[tuple[str, Any]] = [("version", _U32), ("struct_bytes", _U32), ("flags", _U64)]
TAIL: list[tuple[str, Any]] = [("errors", _P), ("memory", _I32), ("device", _I32), ("reserved", _U64 * 4)]


class Array(ctypes.Structure):
    _fields_ = [
        ("data", _P),
        ("data_bytes", _U64),
        ("shape", _I64 * 5),
        ("stride", _I64 * 5),
        ("ndim", _U32),
        ("dtype", _I32),
    ]


class PlaneArgs(ctypes.Structure):
    _fields_ = [
        ("data", Array),
        ("scale", Array),
        ("tensor_scale", _P),
        ("layout", _I32),
        ("granularity", _I32),
        ("group_size", _U32),
        ("flags", _U32),
        ("scale_offset", _I64),
        ("scale_dtype", _I32),
        ("reserved32", _U32),
        ("reserved", _U64 * 2),
    ]


class CacheArgs(ctypes.Structure):
    _fields_ = [
        ("version", _U32),
        ("struct_bytes", _U32),
        ("flags", _U64),
        ("num_blocks", _I64),
        ("block_size", _I64),
        ("num_kv_heads", _I64),
        ("k_head_dim", _I64),
        ("v_head_dim", _I64),
        ("memory", _I32),
        ("device", _I32),
        ("k", PlaneArgs),
        ("v", PlaneArgs),
        ("pool_primary", _P),
        ("pool_secondary", _P),
        ("bytes_per_block", _U64),
        ("secondary_blocks", _I64),
        ("primary_bytes", _U64),
        ("secondary_bytes", _U64),
        ("reserved", _U64 * 4),
    ]


class ConvertArgs(ctypes.Structure):
    _fields_ = [
        ("version", _U32),
        ("struct_bytes", _U32),
        ("flags", _U64),
        ("src_memory", _I32),
        ("dst_memory", _I32),
        ("table_memory", _I32),
        ("device", _I32),
        ("src_buffers", _P),
        ("dst_buffers", _P),
        ("src_bytes", _P),
        ("dst_bytes", _P),
        ("src_blocks", Array),
        ("dst_blocks", Array),
        ("seq_lens", Array),
        ("errors", _P),
        ("reserved", _U64 * 4),
    ]


# ---- native/door.cpp: a cache, a table and optional tensors as objects


class DoorPlane(ctypes.Structure):
    _fields_ = [
        ("tensor", _I32),
        ("ndim", _I32),
        ("num_axes", _I32),
        ("raw", _I32),
        ("shape", _I64 * 8),
        ("axis_size", _I64 * 5),
        ("dim", _I32 * 5),
        ("offset_dim", _I32),
        ("mul", _I64 * 5),
        ("offset_mul", _I64),
    ]


class DoorSpec(ctypes.Structure):
    _fields_ = [("cache", CacheArgs), ("plane", DoorPlane * 2), ("reserved", _I64 * 2)]


class Extra(ctypes.Structure):
    """Optional tensors of a call; NULL = absent."""

    _fields_ = [
        (name, _P)
        for name in (
            "k_scale",
            "v_scale",
            "k_tensor_scale",
            "v_tensor_scale",
            "k_token_scale",
            "v_token_scale",
            "errors",
        )
    ]


class TableArgs(ctypes.Structure):
    _fields_ = [
        *(
            (name, _P)
            for name in (
                "indices",
                "indptr",
                "last_page_len",
                "seq_lens",
                "cu_seqlens",
                "pool_primary",
                "pool_secondary",
                "k_pointers",
                "v_pointers",
            )
        ),
        *((name, _I64) for name in ("format", "beam_width", "max_seq_len", "bytes_per_block")),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("q", "out", "lse", "sinks", "workspace")),
        *((name, _I64) for name in ("step", "flags", "window", "max_query_len", "bytes")),
        *((name, _F32) for name in ("softmax_scale", "soft_cap")),
    ]


APPEND_TENSORS = (
    "q", "k", "v", "q_out", "k_out", "v_out",
    "q_weight", "k_weight", "cos", "sin", "positions",
    "slots", "k_pointers", "v_pointers",
)  # fmt: skip


class AppendArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in APPEND_TENSORS),
        *((name, _I64) for name in ("style", "num_q_heads", "num_kv_heads", "k_head_dim", "v_head_dim")),
        ("eps", _F64),
        ("weight_offset", _F64),
    ]


# ---- parts of the structs of hybrid ops


class RowsArgs(ctypes.Structure):
    _fields_ = [
        ("pages", Array),
        *((name, _I64) for name in ("rows", "dim", "rope_dim", "group", "scale_bytes")),
        *((name, _I32) for name in ("dtype", "scale_dtype")),
        *((name, _F32) for name in ("least_amax", "least_scale")),
        ("flags", _U64),
        ("reserved", _U64 * 2),
    ]


class StepArgs(ctypes.Structure):
    _fields_ = [(name, Array) for name in ("slots", "cu_seqlens", "starts")]


class FinishArgs(ctypes.Structure):
    _fields_ = [*((name, Array) for name in ("weight", "cos", "sin")), ("eps", _F32), ("reserved32", _U32)]
