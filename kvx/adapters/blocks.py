"""Batches of blocks as Dynamo's bindings take them, checked: whole tensors, one a block, and each block's chunks.

Wrong types raise TypeError and everything else BadArgument, a ValueError: the kinds their bindings raise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvx.adapters.kvbm import KvbmDType
from kvx.errors import BadArgument, a_type

# Bytes are moved, not numbers: any type of the same size will do.
DTYPES = {1: KvbmDType.FP8, 2: KvbmDType.BF16, 4: KvbmDType.F32, 8: KvbmDType.F64}
Blocks = Sequence[Sequence[Tensor]]  # nb groups of nl * no chunks, outer index fastest
Wholes = Sequence[Tensor] | Tensor  # nb tensors; one alone is a batch of one


def check_wholes(call: str, name: str, wholes: Wholes, shape: str, ndim: int) -> list[Tensor]:
    if not isinstance(wholes, (Tensor, list, tuple)):
        raise TypeError(f"{call}(): {name} is {a_type(wholes)}; it must be a tensor, or a list of them.")
    out: list[Tensor] = []
    for i, x in enumerate([wholes] if isinstance(wholes, Tensor) else wholes):
        t = _check_tensor(call, f"{name}[{i}]", x, out[0] if out else None)
        if t.dim() != ndim:
            raise BadArgument(f"{call}(): {name}[{i}] is {list(t.shape)}; it has {ndim} dimensions, {shape}.")
        if out and t.shape != out[0].shape:
            raise BadArgument(
                f"{call}(): {name}[{i}] is {list(t.shape)} and {name}[0] {list(out[0].shape)}; they must be the same."
            )
        out.append(t)
    return out


def check_chunks(call: str, blocks: Blocks, wholes: list[Tensor], count: int, shape: tuple[int, ...] | None) -> list[list[Tensor]]:
    """The chunks, group by group. `shape` None: only their number of elements is checked."""
    if not isinstance(blocks, (list, tuple)):
        raise TypeError(f"{call}(): blocks is {a_type(blocks)}; it must be a list of lists of tensors, one list a block.")
    if len(blocks) != len(wholes):
        raise BadArgument(f"{call}(): blocks has {len(blocks)} groups for {len(wholes)} whole tensors; there is one each.")
    numel = wholes[0].numel() // max(count, 1)
    out = []
    for b, group in enumerate(blocks):
        if not isinstance(group, (list, tuple)):
            raise TypeError(f"{call}(): blocks[{b}] is {a_type(group)}; it must be a list of nl * no tensors.")
        if len(group) != count:
            raise BadArgument(f"{call}(): blocks[{b}] has {len(group)} chunks; nl * no is {count}.")
        out.append([_check_tensor(call, f"blocks[{b}][{i}]", x, wholes[0]) for i, x in enumerate(group)])
        for i, t in enumerate(out[-1]):
            if shape is not None and tuple(t.shape) != shape:
                raise BadArgument(f"{call}(): blocks[{b}][{i}] is {list(t.shape)}; expected {list(shape)}.")
            if t.numel() != numel:
                raise BadArgument(f"{call}(): blocks[{b}][{i}] has {t.numel()} elements; inner is {numel}.")
    return out


def _check_tensor(call: str, name: str, x: object, like: Tensor | None) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{call}(): {name} is {a_type(x)}; it must be a torch tensor.")
    if x.device.type not in ("cuda", "cpu"):
        raise BadArgument(f"{call}(): {name} is on {x.device}; it must be on a CUDA device or the CPU.")
    if not x.is_contiguous():
        raise BadArgument(f"{call}(): {name} is {list(x.shape)} with strides {list(x.stride())}; it must be contiguous.")
    if x.element_size() not in DTYPES:
        raise TypeError(f"{call}(): {name} is {x.dtype}, {x.element_size()} bytes per element; 1, 2, 4 and 8 are supported.")
    if like is not None and x.dtype != like.dtype:
        raise TypeError(f"{call}(): {name} is {x.dtype} and the first whole tensor {like.dtype}; they must be the same.")
    if like is not None and x.device != like.device:
        raise BadArgument(
            f"{call}(): {name} is on {x.device} and the first whole tensor on {like.device}; they must be on one device."
        )
    return x
