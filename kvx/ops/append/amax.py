"""amax: the largest magnitude per tensor, head, block or block-head, from which a scale is made."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import compiled, native
from kvx.quant.scales import finite_amax
from kvx.spec.formats import Granularity

_call = native.entry("kvx_door_amax")
_NAMES = {
    "tensor": Granularity.TENSOR,
    "head": Granularity.HEAD,
    "block": Granularity.BLOCK,
    "block_head": Granularity.BLOCK_HEAD,
}


def amax(
    x: Tensor,  # [num_tokens, num_kv_heads, head_dim] f16, bf16 or f32
    per: str = "tensor",  # tensor, head, block or block_head
    *,
    slot_mapping: Tensor | None = None,  # [num_tokens]: block and block_head only
    num_blocks: int = 0,  # block and block_head only
    block_size: int = 0,
    out: Tensor | None = None,  # f32 maxima to raise; None: start at 0
    errors: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Largest finite |x| as f32: [], [num_kv_heads], [num_blocks] or [num_blocks, num_kv_heads].

    NaN and infinities do not count. `out` is raised, never lowered, so that maxima gather over calls.
    `kvx.scale_from_amax(amax, format)` turns the result into scales for `write`.
    """
    x = backends.as_tensor("amax", "x", x)
    if per not in _NAMES:
        raise BadArgument(f'amax(): per is "{per}"; it must be one of {", ".join(_NAMES)}.')
    if x.dim() != 3 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise BadArgument(
            f"amax(): x is {list(x.shape)} {x.dtype}; it must be [num_tokens, num_kv_heads, head_dim] f16, bf16 or f32."
        )
    by_block = "block" in per
    if by_block and (slot_mapping is None or num_blocks < 1 or block_size < 1):
        raise BadArgument(f'amax(): per="{per}" needs slot_mapping, num_blocks and block_size.')
    if not by_block and slot_mapping is not None:
        raise BadArgument(f'amax(): slot_mapping is given, but per="{per}" has no blocks.')
    if slot_mapping is not None and (
        tuple(slot_mapping.shape) != (len(x),) or slot_mapping.dtype not in (torch.int32, torch.int64)
    ):
        raise BadArgument(
            f"amax(): slot_mapping is {list(slot_mapping.shape)} {slot_mapping.dtype}; it must be [{len(x)}] int32 or int64."
        )
    shape = {"tensor": (), "head": (x.shape[1],), "block": (num_blocks,), "block_head": (num_blocks, x.shape[1])}[per]
    if out is None:
        out = torch.zeros(shape, dtype=torch.float32, device=x.device)
    elif tuple(out.shape) != shape or out.dtype != torch.float32:
        raise BadArgument(f"amax(): out is {list(out.shape)} {out.dtype}; it must be {list(shape)} float32.")
    if torch.compiler.is_compiling():
        torch.ops.kvx.amax(out, x, per, slot_mapping, num_blocks, block_size, errors, backend)
        return out
    if torch.is_grad_enabled() or backend == "torch":
        check_memory("amax", backend, x=x, slot_mapping=slot_mapping, out=out, errors=errors)
    chosen = backends.choose("amax", backend, x)
    if chosen == "torch":
        check_apart("amax", out=out)
        _amax_torch(out, x, slot_mapping, block_size, errors, by_block, "head" in per)
    elif chosen == "cuda" and backends.is_debug() and errors is None:
        with backends.ErrorCounter("amax", x.device) as count:
            _amax_native(out, x, slot_mapping, int(_NAMES[per]), block_size, count)
    else:
        _amax_native(out, x, slot_mapping, int(_NAMES[per]), block_size, errors)
    return out


@compiled.register(
    "amax",
    "Tensor(a!) out, Tensor x, str per, Tensor? slot_mapping, int num_blocks, int block_size, Tensor(b!)? errors, str backend",
)
def _amax_compiled(
    out: Tensor, x: Tensor, per: str, slots: Tensor | None, num_blocks: int, block_size: int, errors: Tensor | None, backend: str
) -> None:
    amax(x, per, slot_mapping=slots, num_blocks=num_blocks, block_size=block_size, out=out, errors=errors, backend=backend)


def _amax_native(out: Tensor, x: Tensor, slots: Tensor | None, granularity: int, block_size: int, errors: Tensor | None) -> None:
    (ho, hx, hs, he), keep = native.handles(out, x, slots, errors)
    status = _call(ho, hx, hs, granularity, block_size, he, native.stream_of(x))
    del keep
    if status:
        native.raise_status(status)


def _amax_torch(
    out: Tensor, x: Tensor, slots: Tensor | None, block_size: int, errors: Tensor | None, by_block: bool, by_head: bool
) -> None:
    rows = finite_amax(x, -1)  # [T, H]
    if not by_head:
        rows = rows.amax(1, keepdim=True) if rows.numel() else rows[:, :1]
    if not by_block:
        if rows.shape[0]:
            best = rows.amax(0)
            out.copy_(torch.maximum(out, best if by_head else best.reshape(out.shape)))
        return
    assert slots is not None
    slots = slots.to(torch.int64)
    bad = slots >= out.shape[0] * block_size
    if bool(bad.any()):
        if slots.is_cpu or backends.is_debug():
            at = int(bad.nonzero()[0])
            raise OutOfRange(f"amax(): slot_mapping[{at}] is {int(slots[at])}; amax covers {out.shape[0] * block_size} slots.")
        if errors is not None:
            errors += bad.sum()
    kept = (slots >= 0) & ~bad
    block = (slots[kept] // block_size)[:, None].expand(-1, rows.shape[1])
    target = out if by_head else out[:, None]
    target.scatter_reduce_(0, block, rows[kept], "amax", include_self=True)
