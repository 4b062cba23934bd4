"""The C structs of the hybrid ops (include/kvx_abi.h), filled from tensors. Python calls the same entries a C program does."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.ops import native
from kvx.ops.native import ABI_VERSION, Array
from kvx.ops.step import Step
from kvx.quant.rows import RowPages
from kvx.spec.dtypes import DTYPES

_P, _I32, _I64, _U32, _U64, _F32 = (
    ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float,
)  # fmt: skip
_CODE = {
    torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float8_e4m3fn: 4, torch.int32: 6, torch.int64: 7, torch.uint8: 10,
}  # fmt: skip
_ROUND_FIRST, _POWER_SCALE, _TIES_DOWN = 1, 2, 4
_HEAD: list[tuple[str, Any]] = [("version", _U32), ("struct_bytes", _U32), ("flags", _U64)]
_TAIL: list[tuple[str, Any]] = [("errors", _P), ("memory", _I32), ("device", _I32), ("reserved", _U64 * 4)]


class Rows(ctypes.Structure):
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


class Finish(ctypes.Structure):
    _fields_ = [*((name, Array) for name in ("weight", "cos", "sin")), ("eps", _F32), ("reserved32", _U32)]


class AppendSwaArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("window", Rows), ("positions", Array), ("x", Array), ("finish", Finish), ("step", StepArgs), *_TAIL]


class CompressArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        *((name, Array) for name in ("state", "kv", "score", "bias")),
        ("finish", Finish),
        ("entries", Rows),
        ("block_table", Array),
        ("num_shared", Array),
        ("step", StepArgs),
        ("ratio", _I64),
        *_TAIL,
    ]


class IndexScoresArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD, ("q", Array), ("weights", Array), ("keys", Rows), ("block_table", Array), ("scores", Array), ("step", StepArgs),
        ("ratio", _I64), *_TAIL,
    ]  # fmt: skip


class TopkArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD, ("scores", Array), ("lengths", Array), ("indices", Array), ("workspace", _P), ("workspace_bytes", _U64), *_TAIL[1:],
    ]  # fmt: skip


class SparseArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        *((name, Array) for name in ("q", "out", "lse", "sinks")),
        ("window", Rows),
        ("positions", Array),
        ("fresh", Rows),
        ("entries", Rows),
        *((name, Array) for name in ("block_table", "selected", "cos", "sin")),
        ("step", StepArgs),
        *((name, _I64) for name in ("ratio", "window_tokens", "max_entries")),
        ("scale", _F32),
        ("reserved32", _U32),
        ("workspace", _P),
        ("workspace_bytes", _U64),
        *_TAIL,
    ]


def fill(array: Array, name: str, x: Tensor | None, like: Tensor) -> None:
    """Describe a tensor; None stays absent. `like` says where it must live."""
    if x is None:
        return
    if x.device != like.device:
        raise BadArgument(
            f"{name} is on {x.device}, the cache on {like.device}. Every tensor of a call lives where the cache lives."
        )
    if x.dim() == 0:  # to the library an array without dimensions is absent
        raise BadArgument(
            f"{name} is one {x.dtype} without dimensions; hybrid ops take arrays. Leave it out, or give it its shape."
        )
    code = _CODE.get(x.dtype)
    if code is None or x.dim() > 5:
        raise BadArgument(f"{name} is {list(x.shape)} {x.dtype}, which no hybrid op takes.")
    array.data, array.ndim, array.dtype = x.data_ptr(), x.dim(), code
    array.data_bytes = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    array.shape[: x.dim()], array.stride[: x.dim()] = x.shape, x.stride()


def fill_rows(to: Rows, name: str, rows: RowPages | None, like: Tensor) -> None:
    if rows is None:
        return
    codec, f = rows.codec, rows.codec.format
    fill(to.pages, name, rows.pages, like)
    to.rows, to.dim, to.rope_dim, to.group, to.scale_bytes = rows.rows, codec.dim, codec.rope_dim, codec.group, codec.scale_bytes
    to.dtype = DTYPES[f.element].code
    to.scale_dtype = DTYPES[f.scale].code if f.scale else 0
    to.least_amax, to.least_scale = f.least_amax, f.least_scale
    to.flags = _ROUND_FIRST * f.rounds_first | _POWER_SCALE * f.has_power_scale | _TIES_DOWN * f.ties_down


def fill_step(to: StepArgs, step: Step, like: Tensor) -> None:
    fill(to.slots, "step.slots", step.slots, like)
    fill(to.cu_seqlens, "step.cu_seqlens", step.cu_seqlens, like)
    fill(to.starts, "step.starts", step.starts, like)


def fill_finish(to: Finish, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, like: Tensor) -> None:
    fill(to.weight, "weight", weight, like)
    fill(to.cos, "cos", cos, like)
    fill(to.sin, "sin", sin, like)
    to.eps = eps


def start(args: Any, like: Tensor, errors: Tensor | None = None) -> Any:
    """Head and memory of a struct of arguments."""
    args.version, args.struct_bytes = ABI_VERSION, ctypes.sizeof(args)
    args.memory, args.device = (2, like.device.index or 0) if like.is_cuda else (1, -1)
    check_errors(errors, like)
    if errors is not None:
        args.errors = errors.data_ptr()
    return args


def check_errors(errors: Tensor | None, like: Tensor) -> None:
    if errors is not None and (errors.dtype != torch.int64 or errors.numel() != 1 or errors.device != like.device):
        raise BadArgument("errors must be one int64 where the cache lives.")


def call(entry: str, args: ctypes.Structure, like: Tensor) -> None:
    status = _entry(entry)(ctypes.addressof(args), native.stream_of(like))
    if status:
        native.raise_status(status)


def check_workspace(call: str, workspace: Tensor | None, like: Tensor) -> None:
    if workspace is None:
        return
    if workspace.dtype != torch.uint8 or not workspace.is_contiguous() or workspace.device != like.device:
        raise BadArgument(
            f"{call}(): workspace is {list(workspace.shape)} {workspace.dtype} on {workspace.device}, strides "
            f"{list(workspace.stride())}; it is adjacent uint8 on {like.device}, as many as {call}_workspace_bytes() says."
        )


def workspace_bytes(entry: str, args: ctypes.Structure) -> int:
    size = _U64(0)
    status = _entry(entry)(ctypes.addressof(args), ctypes.addressof(size))
    if status:
        native.raise_status(status)
    return size.value


_entries: dict[str, Any] = {}


def _entry(name: str) -> Any:
    if name not in _entries:
        function = getattr(native.LIB, name)
        function.argtypes = [_P, _P]
        _entries[name] = function
    return _entries[name]
