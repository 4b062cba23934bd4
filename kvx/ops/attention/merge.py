"""merge_attention: partial attention results into one, by their log-sum-exps. The torch body below is the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import compiled, native
from kvx.quant.numbers import cast

_IO = (torch.float16, torch.bfloat16, torch.float32)
_call = native.entry("kvx_door_merge")


def merge_attention(
    outs: Tensor,  # [parts, num_tokens, num_heads, head_dim] f16, bf16 or f32
    lses: Tensor,  # [parts, num_tokens, num_heads] f32: natural log of the sum of exponentials; -inf: nothing seen
    *,
    sinks: Tensor | None = None,  # [num_heads] f32: a logit without a value, which enters the sum once
    dtype: torch.dtype | None = None,  # of the result; None: that of outs
    out: tuple[Tensor, Tensor] | None = None,  # (out, lse) to fill, any strides
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out [num_tokens, num_heads, head_dim], lse [num_tokens, num_heads]) of all parts together.

    With m the largest of the lses and the sink, and w = exp(lse - m): out = sum(w * outs) / (sum(w) + exp(sink - m)) and
    lse = m + log(sum(w)), which leaves the sink out, so that results can be merged again. Parts of lse -inf are not read; where
    all are, out is 0 and lse -inf. f32, products and sums rounded one by one in the order of the parts. exp and log are each
    library's own, within two ulp: results agree within 8 + 2 * parts ulp of f32 of the largest part, then one rounding.
    """
    call = "merge_attention"
    outs, lses = backends.as_tensor(call, "outs", outs), backends.as_tensor(call, "lses", lses)
    if outs.dim() != 4 or outs.dtype not in _IO or outs.shape[0] < 1:
        raise BadArgument(
            f"{call}(): outs is {list(outs.shape)} {outs.dtype}; "
            "it must be [parts, num_tokens, num_heads, head_dim] f16, bf16 or f32."
        )
    if lses.shape != outs.shape[:3] or lses.dtype != torch.float32:
        raise BadArgument(f"{call}(): lses is {list(lses.shape)} {lses.dtype}; outs makes it {list(outs.shape[:3])} float32.")
    if sinks is not None and (tuple(sinks.shape) != (outs.shape[2],) or sinks.dtype != torch.float32):
        raise BadArgument(
            f"{call}(): sinks is {list(sinks.shape)} {sinks.dtype}; it must be [num_heads] = [{outs.shape[2]}] float32."
        )
    if out is None:
        out = (
            torch.empty(outs.shape[1:], dtype=dtype or outs.dtype, device=outs.device),
            torch.empty(outs.shape[1:3], dtype=torch.float32, device=outs.device),
        )
    merged, lse = out
    if merged.shape != outs.shape[1:] or lse.shape != outs.shape[1:3] or merged.dtype not in _IO or lse.dtype != torch.float32:
        raise BadArgument(
            f"{call}(): out is {list(merged.shape)} {merged.dtype} and {list(lse.shape)} {lse.dtype}; "
            f"it must be {list(outs.shape[1:])} "
            f"f16, bf16 or f32 and {list(outs.shape[1:3])} float32."
        )
    if torch.compiler.is_compiling():
        torch.ops.kvx.merge_attention(merged, lse, outs, lses, sinks, backend)
        return out
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(call, backend, outs=outs, lses=lses, sinks=sinks, out=out)
    if backends.choose(call, backend, outs) == "torch":
        check_apart(call, out=out)
        _merge_torch(merged, lse, outs, lses, sinks)
        return out
    handles, keep = native.handles(merged, lse, outs, lses, sinks)
    status = _call(*handles, native.stream_of(outs))
    del keep
    if status:
        native.raise_status(status)
    return out


@compiled.register("merge_attention", "Tensor(a!) out, Tensor(b!) lse, Tensor outs, Tensor lses, Tensor? sinks, str backend")
def _merge_compiled(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, sinks: Tensor | None, backend: str) -> None:
    merge_attention(outs, lses, sinks=sinks, out=(out, lse), backend=backend)


def _merge_torch(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, sinks: Tensor | None) -> None:
    none = -torch.inf
    sink = torch.full_like(lses[0], none) if sinks is None else sinks.expand_as(lses[0])
    most = torch.maximum(lses.amax(0), sink)
    total, sums = torch.zeros_like(most), torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    for part, part_lse in zip(outs, lses, strict=True):
        is_seen = part_lse != none
        w = torch.where(is_seen, torch.exp(part_lse - most), 0.0)
        sums = sums + torch.where(is_seen[..., None], w[..., None] * part.to(torch.float32), 0.0)
        total = total + w
    divisor = total + torch.where(sink == none, 0.0, torch.exp(sink - most))
    out.copy_(cast(torch.where(divisor[..., None] == 0, sums, sums / divisor[..., None]), out.dtype))
    lse.copy_(torch.where(total == 0, none, most + torch.log(total)))
