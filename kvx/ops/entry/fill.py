"""The C structs of the hybrid ops (include/kvx_abi.h), filled from tensors. Python calls the same entries a C program does."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.ops import native
from kvx.ops.entry.step import Step
from kvx.ops.structs import ABI_VERSION, Array, FinishArgs, RowsArgs, StepArgs
from kvx.quant.rows import RowPages

_CODE = {
    torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float8_e4m3fn: 4, torch.int32: 6, torch.int64: 7, torch.uint8: 10,
}  # fmt: skip


def array(to: Array, name: str, x: Tensor | None, like: Tensor) -> None:
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
    to.data, to.ndim, to.dtype = x.data_ptr(), x.dim(), code
    to.data_bytes = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    to.shape[: x.dim()], to.stride[: x.dim()] = x.shape, x.stride()


def rows(to: RowsArgs, name: str, rows: RowPages | None, like: Tensor) -> None:
    if rows is None:
        return
    codec, f = rows.codec, rows.codec.format
    array(to.pages, name, rows.pages, like)
    to.rows, to.dim, to.rope_dim, to.group, to.scale_bytes = rows.rows, codec.dim, codec.rope_dim, codec.group, codec.scale_bytes
    to.dtype, to.scale_dtype = f.element.code, f.scale.code if f.scale is not None else 0
    to.least_amax, to.least_scale, to.flags = codec.rule.least_amax, codec.rule.least_scale, codec.rule.flags


def step(to: StepArgs, step: Step, like: Tensor) -> None:
    array(to.slots, "step.slots", step.slots, like)
    array(to.cu_seqlens, "step.cu_seqlens", step.cu_seqlens, like)
    array(to.starts, "step.starts", step.starts, like)


def finish(to: FinishArgs, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, like: Tensor) -> None:
    array(to.weight, "weight", weight, like)
    array(to.cos, "cos", cos, like)
    array(to.sin, "sin", sin, like)
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


def check_workspace(call: str, workspace: Tensor | None, like: Tensor) -> None:
    if workspace is None:
        return
    if workspace.dtype != torch.uint8 or not workspace.is_contiguous() or workspace.device != like.device:
        raise BadArgument(
            f"{call}(): workspace is {list(workspace.shape)} {workspace.dtype} on {workspace.device}, strides "
            f"{list(workspace.stride())}; it must be adjacent uint8 on {like.device}, as many as {call}_workspace_bytes() says."
        )


def workspace_bytes(entry: str, args: ctypes.Structure) -> int:
    size = ctypes.c_uint64(0)
    native.call_struct(entry, args, ctypes.addressof(size))
    return size.value
