"""qk_norm_rope and qkv_norm_rope: RMSNorm and rotation of Q and K rows. The torch bodies below are the definition.

All arithmetic is f32, each step rounded once, in an order that every backend keeps, so that results are the same bits:
squares of eight neighbours add up as a tree of neighbours; those sums, padded with zeros to a power of two, by halves; the
mean is the sum times f32(1 / head_dim); a row is multiplied by 1 / sqrt(mean + eps), then by weight + weight_offset; a pair
rotates to (lo*c - hi*s, hi*c + lo*s); the row is rounded to its own type at the end, once, and every NaN is then the one NaN.
Rows that are neither normed nor rotated are copied, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import compiled, native
from kvx.ops.structs import AppendArgs
from kvx.quant.numbers import one_nan

STYLES = {"none": 0, "half": 1, "interleaved": 2}
_IO = (torch.float16, torch.bfloat16, torch.float32)
_call, _call_usual = native.entry("kvx_door_norm_rope"), native.entry("kvx_door_norm_rope_usual")
_is_compiling = torch.compiler.is_compiling


class NormRope(NamedTuple):
    """What happens to a row of Q or K."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    style: str  # a key of STYLES
    eps: float
    weight_offset: float

    def checked(self, call: str) -> NormRope:
        """As given by a caller, refused or made plain: without tables nothing rotates, and without rotation there are none."""
        if self.style not in STYLES:
            raise BadArgument(f'{call}(): rope is "{self.style}"; it must be half, interleaved or none.')
        given = [x is not None for x in (self.cos, self.sin, self.positions)]
        if any(given) and not all(given):
            raise BadArgument(f"{call}(): cos, sin and positions come together; give all three, or none for no rotation.")
        if any(given) and self.style != "none":
            return self
        return self._replace(cos=None, sin=None, positions=None, style="none")

    def tensors(self) -> dict[str, Tensor | None]:
        return {
            "q_weight": self.q_weight,
            "k_weight": self.k_weight,
            "cos": self.cos,
            "sin": self.sin,
            "positions": self.positions,
        }

    def numbers(self) -> dict[str, float]:
        return {"style": STYLES[self.style], "eps": self.eps, "weight_offset": self.weight_offset}

    def weight(self, kind: int) -> Tensor | None:
        return (self.q_weight, self.k_weight, None)[kind]


# Its fields in the schema of a custom op.
SCHEMA = "Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, Tensor? positions, str rope, float eps, float weight_offset"
PLAIN = NormRope(None, None, None, None, None, "none", 0.0, 0.0)  # a copy


def qk_norm_rope(
    x: Tensor,  # [num_tokens, heads, head_dim] f16, bf16 or f32, any strides
    *,
    weight: Tensor | None = None,  # [head_dim]; None: no norm
    eps: float = 1e-6,
    weight_offset: float = 0.0,  # added to the weight: 1 for models that store it less one (Gemma, Qwen3-Next)
    rope: str = "half",  # half: pairs (i, i + rotary_dim / 2); interleaved: (2i, 2i + 1); none
    cos: Tensor | None = None,  # [max_positions, rotary_dim / 2] f32 or x's type; None: no rotation
    sin: Tensor | None = None,
    positions: Tensor | None = None,  # [num_tokens] int32 or int64: row of cos and sin
    out: Tensor | None = None,  # like x, any strides (head-major: a transposed [heads, num_tokens, head_dim]); may be x
    errors: Tensor | None = None,  # one int64 on the device: bad positions are added to it
    backend: str = "auto",
) -> Tensor:
    """RMSNorm of each row, then rotation of its first rotary_dim elements by the token's position. Neither: a copy.

    A position outside the tables raises OutOfRange on the host before anything is written; on a device the token is left
    out and counted in `errors`.
    """
    call = "qk_norm_rope"
    if out is None and isinstance(x, Tensor):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if backend == "auto" and errors is None and is_usual(x, out, weight, cos, sin, positions) and isinstance(out, Tensor):
        # The short way: ids instead of a struct. What it refuses, the long way refuses too, and better.
        status = _call_usual(
            b"qk_norm_rope()", id(out), id(x), id_of(weight), id_of(cos), id_of(sin), id_of(positions),
            STYLES.get(rope, -1) if cos is not None else 0, eps, weight_offset, native.stream_of(x),
        )  # fmt: skip
        if status == 0:
            return out
        if status != 1:
            native.raise_status(status)
    how = NormRope(weight, None, cos, sin, positions, rope, eps, weight_offset).checked(call)
    x = backends.as_tensor(call, "x", x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_rope(call, (out,), (x,), how, errors, backend)
    return out


def qkv_norm_rope(
    qkv: Tensor | tuple[Tensor, Tensor, Tensor],  # [num_tokens, (Hq + Hkv) * head_dim + Hkv * v_head_dim], or (q, k, v)
    *,
    num_heads: int = 0,  # query heads; a tuple says it itself
    num_kv_heads: int = 0,
    head_dim: int = 0,
    v_head_dim: int = 0,  # 0: head_dim
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rope: str = "half",
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,  # q, k, v: [num_tokens, heads, dim], any strides
    errors: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused QKV; Q and K as in qk_norm_rope, V copied."""
    call = "qkv_norm_rope"
    how = NormRope(q_weight, k_weight, cos, sin, positions, rope, eps, weight_offset).checked(call)
    rows = split(call, qkv, num_heads, num_kv_heads, head_dim, v_head_dim or head_dim)
    if out is None:
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in rows)
        out = q, k, v
    norm_rope(call, out, rows, how, errors, backend)
    return out


def is_usual(first: object, *others: object) -> bool:
    """Whether a call may go by ids: tensors (or nothing), on a device with a native backend, no debugging."""
    if not (native.IS_EXCHANGED and isinstance(first, Tensor)) or _is_compiling():
        return False
    is_here = native.HAS_CPU if first.is_cpu else first.is_cuda and native.HAS_CUDA and not backends.is_debug()
    if not is_here or not all(x is None or isinstance(x, Tensor) for x in others):
        return False
    return not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in (first, *others))  # type: ignore[attr-defined]


def id_of(x: Tensor | None) -> int | None:
    return None if x is None else id(x)


def split(
    call: str, qkv: Tensor | tuple[Tensor, ...], num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views [num_tokens, heads, dim] of Q, K and V."""
    if isinstance(qkv, (tuple, list)):
        if len(qkv) != 3:
            raise BadArgument(f"{call}(): qkv is a tuple of {len(qkv)}; it must be (q, k, v), or one fused tensor.")
        q, k, v = (backends.as_tensor(call, name, x) for name, x in zip("qkv", qkv, strict=True))
        return q, k, v
    qkv = backends.as_tensor(call, "qkv", qkv)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_head_dim)
    if min(sizes) < 1 or qkv.dim() != 2 or qkv.shape[1] != sum(sizes):
        raise BadArgument(
            f"{call}(): qkv is {list(qkv.shape)}; {num_heads} + {num_kv_heads} heads of {head_dim} and {num_kv_heads} of "
            f"{v_head_dim} make it [num_tokens, {sum(sizes)}]."
        )
    q, k, v = qkv.split(sizes, dim=1)
    return q.unflatten(1, (num_heads, -1)), k.unflatten(1, (num_kv_heads, -1)), v.unflatten(1, (num_kv_heads, -1))


def norm_rope(
    call: str, outs: tuple[Tensor, ...], rows: tuple[Tensor, ...], how: NormRope, errors: Tensor | None, backend: str
) -> None:
    """Q, or Q, K and V, from rows to rows."""
    if _is_compiling():
        torch.ops.kvx.norm_rope(list(outs), list(rows), *how, errors, call, backend)
        return
    for name, out, x in zip(("q_out", "k_out", "v_out"), outs, rows, strict=False):
        if out.shape != x.shape or out.dtype != x.dtype:
            raise BadArgument(f"{call}(): {name} is {list(out.shape)} {out.dtype}; it must be {list(x.shape)} {x.dtype}.")
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(call, backend, rows=rows, out=outs, norm_and_rope=how[:5], errors=errors)
    if backends.choose(call, backend, rows[0]) == "torch":
        check(call, rows, how)
        check_apart(call, out=outs)
        kept = keep_positions(call, how, rows[0], errors)
        for kind, (out, x) in enumerate(zip(outs, rows, strict=True)):
            out[kept] = change(x[kept], how, kind, kept)
        return
    if rows[0].is_cuda and backends.is_debug() and errors is None:
        with backends.ErrorCounter(call, rows[0].device) as count:
            return norm_rope(call, outs, rows, how, count, backend)
    tensors = dict(zip(("q", "k", "v"), rows, strict=False)) | dict(zip(("q_out", "k_out", "v_out"), outs, strict=False))
    args, keep = fill_args({**tensors, **how.tensors()}, **how.numbers())
    (counter,), kept_too = native.handles(errors)
    status = _call(native.name_of(call), native.address_of(args), counter, native.stream_of(rows[0]))
    del keep, kept_too
    if status:
        native.raise_status(status)


@compiled.register("norm_rope", "Tensor(a!)[] outs, Tensor[] rows", SCHEMA, "Tensor(b!)? errors, str call, str backend")
def _norm_rope_compiled(outs: list[Tensor], rows: list[Tensor], *rest: Any) -> None:
    *how, errors, call, backend = rest
    norm_rope(call, tuple(outs), tuple(rows), NormRope(*how).checked(call), errors, backend)


def fill_args(tensors: dict[str, Tensor | None], **numbers: float) -> tuple[AppendArgs, list[Any]]:
    """The struct of a call, and what must stay alive during it."""
    handles, keep = native.handles(*tensors.values())
    return AppendArgs(**dict(zip(tensors, handles, strict=True)), **numbers), keep


def check(call: str, rows: tuple[Tensor, ...], how: NormRope) -> None:
    """What the native lowering checks, for the torch body."""
    tokens, dim = rows[0].shape[0] if rows[0].dim() else -1, rows[0].shape[-1]
    for name, x in zip(("q", "k", "v"), rows, strict=False):
        if x.dim() != 3 or x.dtype not in _IO or x.dtype != rows[0].dtype or x.shape[0] != tokens:
            raise BadArgument(
                f"{call}(): {name} is {list(x.shape)} {x.dtype}; rows are [num_tokens, heads, head_dim] of one type: "
                "f16, bf16 or f32."
            )
    if len(rows) > 1 and rows[1].shape[2] != dim:
        raise BadArgument(f"{call}(): k has head_dim {rows[1].shape[2]} and q {dim}; they must agree.")
    for name, w in (("q_weight", how.q_weight), ("k_weight", how.k_weight)):
        if w is not None and (tuple(w.shape) != (dim,) or w.dtype not in _IO):
            raise BadArgument(f"{call}(): {name} is {list(w.shape)} {w.dtype}; it must be [head_dim] = [{dim}] f16, bf16 or f32.")
    if how.cos is None or how.sin is None or how.positions is None:
        return
    for name, t in (("cos", how.cos), ("sin", how.sin)):
        if (
            t.dim() != 2
            or t.dtype not in (torch.float32, rows[0].dtype)
            or not 0 < t.shape[1] <= dim // 2
            or t.shape != how.cos.shape
        ):
            raise BadArgument(
                f"{call}(): {name} is {list(t.shape)} {t.dtype}; cos and sin are [max_positions, rotary_dim / 2] f32 or "
                f"{rows[0].dtype}, at most {dim // 2} columns."
            )
    if tuple(how.positions.shape) != (tokens,) or how.positions.dtype not in (torch.int32, torch.int64):
        raise BadArgument(
            f"{call}(): positions is {list(how.positions.shape)} {how.positions.dtype}; it must be [{tokens}] int32 or int64."
        )


def keep_positions(call: str, how: NormRope, x: Tensor, errors: Tensor | None) -> Tensor:
    """Tokens whose position is inside the tables, as a mask."""
    if how.positions is None or how.cos is None:
        return torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    at = how.positions.to(torch.int64)
    bad = (at < 0) | (at >= how.cos.shape[0])
    if bool(bad.any()):
        if x.is_cpu or backends.is_debug():
            first = int(bad.nonzero()[0])
            raise OutOfRange(
                f"{call}(): positions[{first}] is {int(at[first])}; cos and sin have {how.cos.shape[0]} rows. Nothing was written."
            )
        if errors is not None:
            errors += bad.sum()
    return ~bad


def change(x: Tensor, how: NormRope, kind: int, kept: Tensor) -> Tensor:
    """Rows [T, H, D] of kind 0 (Q), 1 (K) or 2 (V), normed and rotated. `kept` picks the positions that belong to them."""
    weight = how.weight(kind)
    if kind == 2 or (weight is None and how.style == "none"):
        return x
    y = x.to(torch.float32)
    if weight is not None:
        y = rms_norm(y, weight.to(torch.float32) + how.weight_offset, how.eps)
    if how.cos is not None and how.sin is not None and how.positions is not None:
        at = how.positions.to(torch.int64)[kept]
        y = _rotate(y, how.cos[at].to(torch.float32)[:, None], how.sin[at].to(torch.float32)[:, None], how.style)
    return one_nan(y.to(x.dtype, copy=True), torch.isnan(y))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dim = x.shape[-1]
    m = 1 << max(0, (-(-dim // 8) - 1).bit_length())
    s = torch.nn.functional.pad(x * x, (0, 8 * m - dim)).unflatten(-1, (m, 8))
    for _ in range(3):
        s = s[..., 0::2] + s[..., 1::2]
    s = s.squeeze(-1)
    while m > 1:
        m //= 2
        s = s[..., :m] + s[..., m:]
    mean = s * torch.tensor(1.0 / dim, dtype=torch.float32, device=x.device)
    root = _sqrt(mean + torch.tensor(eps, dtype=torch.float32, device=x.device))
    return x * (torch.ones_like(root) / root) * weight


def _sqrt(x: Tensor) -> Tensor:
    """The nearest f32. torch's own is a bit off where MKL computes it (x86); through f64 the last bit is right: no root of an
    f32 comes nearer than 2^-51 to a midpoint of two. Metal has no f64."""
    return torch.sqrt(x) if x.device.type == "mps" else torch.sqrt(x.double()).float()


def _rotate(x: Tensor, c: Tensor, s: Tensor, style: str) -> Tensor:
    """c and s [T, 1, rotary_dim / 2]; elements past rotary_dim pass."""
    half = c.shape[-1]
    y = x.clone()
    lo, hi = (x[..., :half], x[..., half : 2 * half]) if style == "half" else (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
    first, second = lo * c - hi * s, hi * c + lo * s
    if style == "half":
        y[..., :half], y[..., half : 2 * half] = first, second
    else:
        y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2] = first, second
    return y
