"""topk: the entries of the highest scores. The torch body below is the definition."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import native
from kvx.ops.entry import fill
from kvx.ops.structs import HEAD, TAIL, Array


class TopkArgs(ctypes.Structure):
    """kvx_topk_args_t: the arguments of kvx_topk, as a C program fills them."""

    _fields_ = [
        *HEAD,
        *((name, Array) for name in ("scores", "lengths", "indices")),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
        *TAIL[1:],
    ]


def topk(
    scores: Tensor,  # [num_tokens, entries] f32, columns adjacent
    k: int,
    *,
    lengths: Tensor | None = None,  # [num_tokens] int32: scores from here on are not read; None: all are
    out: Tensor | None = None,  # [num_tokens, k] int32 to fill
    workspace: Tensor | None = None,  # uint8, topk_workspace_bytes; None: made
    backend: str = "auto",
) -> Tensor:
    """[num_tokens, k] int32: highest first, ties to the lower index, -1 where no score above -inf is left. NaN counts as -inf."""
    call = "topk"
    if scores.dim() != 2 or scores.dtype != torch.float32 or k < 1:
        raise BadArgument(
            f"{call}(): scores are {list(scores.shape)} {scores.dtype}, k {k}; [num_tokens, entries] float32, and k 1 or more."
        )
    if out is None:
        out = torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)
    if list(out.shape) != [len(scores), k] or out.dtype != torch.int32:
        raise BadArgument(f"{call}(): out is {list(out.shape)} {out.dtype}; it must be [{len(scores)}, {k}] int32.")
    check_memory(call, backend, scores=scores, lengths=lengths, out=out, workspace=workspace)
    fill.check_workspace(call, workspace, scores)
    chosen = backends.choose(call, backend, scores)
    if chosen != "torch":
        args = _args(scores, lengths, out)
        if chosen == "cuda":
            if workspace is None:
                size = fill.workspace_bytes("kvx_topk_workspace", args)
                workspace = torch.empty(size, dtype=torch.uint8, device=scores.device)
            args.workspace, args.workspace_bytes = workspace.data_ptr(), workspace.numel()
        native.call_struct("kvx_topk", args, native.stream_of(scores))
        return out
    if scores.shape[1] > 1 and scores.stride(1) != 1:
        raise BadArgument(
            f"{call}(): scores have strides {list(scores.stride())}; they must be [num_tokens, entries], columns adjacent."
        )
    if lengths is not None and (list(lengths.shape) != [len(scores)] or lengths.dtype != torch.int32):
        raise BadArgument(f"{call}(): lengths are {list(lengths.shape)} {lengths.dtype}; they must be [{len(scores)}] int32.")
    check_apart(call, out=out)
    live = scores.masked_fill(torch.isnan(scores), -torch.inf)
    if lengths is not None:
        live = live.masked_fill(torch.arange(scores.shape[1], device=scores.device) >= lengths[:, None], -torch.inf)
    order = live.argsort(dim=-1, descending=True, stable=True)[:, :k]
    out.fill_(-1)
    out[:, : order.shape[1]] = order.masked_fill(live.gather(1, order) == -torch.inf, -1).to(torch.int32)
    return out


def topk_workspace_bytes(num_tokens: int, entries: int, k: int, device: torch.device | str = "cuda") -> int:
    """Of a call with these shapes, whatever is in them; 0 on the host."""
    if torch.device(device).type != "cuda" or backends.reason_missing("cuda") is not None:
        return 0
    scores = torch.empty(entries, device=device).expand(num_tokens, entries)  # only described: rows share their memory
    out = torch.empty(num_tokens, k, dtype=torch.int32, device=device)
    return fill.workspace_bytes("kvx_topk_workspace", _args(scores, None, out))


def _args(scores: Tensor, lengths: Tensor | None, out: Tensor) -> TopkArgs:
    args: TopkArgs = fill.start(TopkArgs(), scores)
    for name, x in (("scores", scores), ("lengths", lengths), ("indices", out)):
        fill.array(getattr(args, name), name, x, scores)
    return args
