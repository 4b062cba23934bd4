"""Cases of attention, and what their answer is: float64 over the gathered cache, position by position as the op describes it.

A backend may be wrong by twice what torch is in the inputs' own type, plus a floor no f32 computation can go under:
  out  half a step of the output's type at the largest answer, since the answer is rounded to it once, and 4 * 2^-24 of the
       largest value: exp and the sum of weights are each good to a step or two of f32, and their error is a share of values
  lse  the score's own rounding: q.k has head_dim products, each and each sum rounded to f32, which a random walk brings to
       sqrt(head_dim) * 2^-24 of the sum of magnitudes; and 4 * 2^-24 of the answer for exp, sum and log
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

import kvx
from kvx.ops.attention import body
from kvx.ops.cache_view import CacheView, scales_of
from tests import cases

EPS = 2.0**-24


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...] = (33, 1, 70, 16)
    queries: tuple[int, ...] | int = 1  # of each sequence; a number: attention_decode
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 0
    block: int = 16
    layout: str = "NHD"
    format: str = "f32"
    v_format: str = ""
    io: str = "f32"
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    scale: float = 0.0  # 0: the default
    note: str = ""

    def __str__(self) -> str:
        base = Case()
        changed = [f for f in fields(self) if getattr(self, f.name) != getattr(base, f.name)]
        parts = [str(v) if isinstance(v := getattr(self, f.name), str) else f"{f.name}={v}".replace(" ", "") for f in changed]
        return "-".join(parts) or "plain"

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.queries,) * len(self.lens) if isinstance(self.queries, int) else self.queries

    def make(self, device: str, generator: torch.Generator) -> Made:
        pages = sum(-(-n // self.block) for n in self.lens)
        case = cases.Case(
            layout=self.layout, format=self.format, v_format=self.v_format, io="f32", num_blocks=pages + 3, block_size=self.block,
            num_kv_heads=self.kv_heads, head_dim=self.dim, v_head_dim=self.v_dim, lens=self.lens, index=torch.int32,
        )  # fmt: skip
        made = case.make("cpu", generator)
        for x in (made.k, made.v):
            x.copy_(torch.randn(x.shape, generator=generator))
        made.write("torch")
        q = torch.randn(sum(self.counts), self.heads, self.dim, generator=generator).to(cases.IO[self.io])
        sinks = torch.randn(self.heads, generator=generator) if self.sinks else None
        # What is compared with: positions as the cache holds them, dequantised.
        k, v = made.gather("torch", dtype=torch.float32, max_seq_len=max((*self.lens, 1)))
        cu = kvx.cu_seqlens(torch.tensor(self.counts, dtype=torch.int32))
        return Made(self, made.to(device), q.to(device), sinks if sinks is None else sinks.to(device), cu.to(device), k, v)


@dataclass
class Made:
    case: Case
    cache: cases.Made
    q: Tensor
    sinks: Tensor | None
    cu: Tensor
    k: Tensor  # on the host: [batch, longest, kv_heads, dim]
    v: Tensor

    @property
    def table(self) -> kvx.PackedTable:
        return kvx.PackedTable(self.cache.block_table, self.cache.seq_lens)

    @property
    def given(self) -> dict[str, object]:
        c = self.case
        return {
            "spec": self.cache.spec, "causal": c.causal, "window": c.window, "soft_cap": c.soft_cap, "sinks": self.sinks,
            "scale": c.scale or None, **self.cache.scales,
        }  # fmt: skip

    def run(self, backend: str, **more: object) -> tuple[Tensor, Tensor]:
        table = more.pop("table", None) or self.table
        if self.case.window and not self.case.causal:
            return self._run_below(backend, table)
        given = {**self.given, "backend": backend, **more}
        if isinstance(self.case.queries, int) and "cu_seqlens" not in given:
            return kvx.attention_decode(self.q, self.cache.cache, table, **given)
        given.setdefault("cu_seqlens", self.cu)
        return kvx.attention_varlen(self.q, self.cache.cache, table, **given)

    def _run_below(self, backend: str, table: kvx.PackedTable) -> tuple[Tensor, Tensor]:
        """A window without `causal`, which Python's calls refuse and the C ABI has: queries see the last `window` positions."""
        c, q = self.case, self.q
        cu = None if isinstance(c.queries, int) else self.cu
        out = q.new_empty(*q.shape[:2], c.v_dim or c.dim)
        lse = torch.empty(q.shape[:2], device=q.device)
        options = body.Options(c.scale or c.dim**-0.5, c.causal, c.window, c.soft_cap, 0, 0)
        view = CacheView.of("attention_varlen", self.cache.cache, self.cache.spec, scales_of(**self.cache.scales))
        queries = body.Queries(q, cu, out, lse, self.sinks)
        if backend == "torch":
            body._attention_torch("attention_varlen", queries, view, table, options)
            return out, lse
        workspace = torch.empty(body.workspace_bytes(queries, view, table, options), dtype=torch.uint8, device=q.device)
        body.call_native(body.RUN, queries._replace(workspace=workspace if q.is_cuda else None), view, table, options)
        return out, lse

    def answer(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, float]:
        """out, lse, and the largest sum of magnitudes behind a score; computed in `dtype`."""
        c, q = self.case, self.q.cpu()
        outs, sums, reach, first = [], [], 0.0, 0
        for s, (length, n) in enumerate(zip(c.lens, c.counts, strict=True)):
            seen = torch.zeros(n, length, dtype=torch.bool)
            for i in range(n):
                last = length - n + i if c.causal else length - 1
                low = last - c.window + 1 if c.window else 0
                seen[i, max(low, 0) : max(last + 1, 0)] = True
            out, lse, most = attend(q[first : first + n], self.k[s, :length], self.v[s, :length], seen, c, self.sinks, dtype)
            outs.append(out), sums.append(lse)
            reach, first = max(reach, most), first + n
        return torch.cat(outs), torch.cat(sums), reach

    def check(self, out: Tensor, lse: Tensor) -> None:
        want, want_lse, reach = self.answer()
        theirs, their_lse, _ = self.answer(self.q.dtype)
        step = torch.finfo(out.dtype).eps / 2
        largest = float(self.v.abs().nan_to_num().max()) if self.v.numel() else 0.0
        floor = step * magnitude(want) + 4 * EPS * largest
        close("out", out.cpu(), want, 2 * error(theirs, want) + floor)
        floor = math.sqrt(self.case.dim) * EPS * reach + 4 * EPS * max(1.0, magnitude(want_lse))
        close("lse", lse.cpu(), want_lse, 2 * error(their_lse, want_lse) + floor)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, c: Case, sinks: Tensor | None, dtype: torch.dtype):
    k, v = (x.to(dtype).repeat_interleave(c.heads // c.kv_heads, dim=1) for x in (k, v))
    scale = c.scale or c.dim**-0.5
    scores = multiply("nhd,phd->hnp", q.to(dtype), k) * scale
    reach = multiply("nhd,phd->hnp", q.to(dtype).abs(), k.abs()) * abs(scale)
    if c.soft_cap:
        scores = c.soft_cap * torch.tanh(scores / c.soft_cap)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        scores = torch.cat([scores, sinks.cpu().to(dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0)[..., : k.shape[0]].masked_fill(~seen, 0)
    return multiply("hnp,phd->nhd", weights, v), lse.T, magnitude(reach)


def multiply(how: str, a: Tensor, b: Tensor) -> Tensor:
    """16-bit products as torch has them: summed in f32 and rounded once. torch's own take 30 times as long on a CPU without such
    instructions, and sum in an order of each machine's."""
    if a.dtype in (torch.bfloat16, torch.float16):
        return torch.einsum(how, a.float(), b.float()).to(a.dtype)
    return torch.einsum(how, a, b)


def magnitude(x: Tensor) -> float:
    x = x[torch.isfinite(x)]
    return float(x.abs().max()) if x.numel() else 0.0


def error(x: Tensor, want: Tensor) -> float:
    return magnitude(x.double() - want.double())


def close(what: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Infinities and NaN in the same places, and everything else within the bound."""
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    got, want = got.double(), want.double()
    odd = ~torch.isfinite(want)
    wrong = torch.where(odd, got != want, (got - want).abs() > bound) | torch.isnan(got)
    if not bool(wrong.any()):
        return
    away = torch.where(wrong, (got - want).abs().nan_to_num(math.inf, math.inf), torch.zeros_like(got))
    at = tuple(int(i) for i in torch.unravel_index(away.argmax(), away.shape))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} are off by more than {bound:.3g}; worst at {list(at)}: "
        f"got {got[at].item():.8g}, expected {want[at].item():.8g}"
    )


DECODE = [
    Case(),
    *(Case(lens=(n, 3), note="length") for n in (0, 1, 15, 16, 17, 31, 32, 33)),
    Case(lens=(0, 0), note="nothing"),
    *(Case(queries=n, lens=(40, 17, 3)) for n in (2, 3, 7)),
    Case(queries=5, lens=(3, 9, 0), note="more_queries_than_tokens"),
    *(Case(window=w) for w in (1, 2, 16, 17, 1000, 2**40)),
    *(Case(window=w, queries=4) for w in (1, 5, 1000)),
    Case(causal=False, queries=3),
    Case(causal=False, window=5, queries=3),
    *(Case(heads=g * h, kv_heads=h, note="group") for g, h in ((1, 3), (4, 2), (7, 2), (8, 1), (16, 1))),
    *(Case(dim=d) for d in (80, 96, 128, 192, 256)),
    *(Case(dim=d, format="bf16", io="bf16") for d in (64, 80, 96, 128, 192, 256)),
    *(Case(dim=d, format=f, io=f, note="few_lines") for f in ("f32", "bf16") for d in (16, 32)),  # of 64 bytes, in a row
    Case(dim=192, v_dim=128),
    Case(dim=64, v_dim=96, format="f16", io="f16"),
    Case(dim=7, v_dim=5, note="odd_dims"),
    *(Case(block=b, lens=(33, 5, 129)) for b in (1, 2, 5, 32, 64, 128, 256)),
    Case(block=512, lens=(300, 512, 7), layout="HND", note="contiguous"),
    Case(lens=(1500, 3, 700), format="bf16", io="bf16", dim=128, note="long"),
    Case(lens=(1025, 2050), heads=4, note="long"),
    # Heads side by side, as many as share out evenly over a GPU's workers; or fewer, or none.
    *(Case(lens=(300, 40, 1), heads=h, kv_heads=h, format="bf16", io="bf16", note="lines") for h in (8, 100, 541)),
    Case(lens=(900, 30, 400), heads=32, kv_heads=8, format="int8_per_token_head", io="bf16", dim=128, note="lines"),
    Case(soft_cap=2.0),
    Case(soft_cap=3e38, format="bf16", io="bf16"),
    Case(soft_cap=30.0, window=9, queries=2),
    Case(sinks=True),
    Case(sinks=True, lens=(0, 1, 40), queries=2, note="sink_alone"),
    Case(sinks=True, soft_cap=5.0, window=20, format="bf16", io="bf16"),
    Case(scale=0.3),
    Case(scale=-0.3),
    Case(lens=(60,), note="one"),
]
# Rows wider than a GPU's warp has registers for, rows that end before the next tile does, and K wider or narrower than V; groups
# of up to 8 query rows and of up to 16.
_THREE = (("bf16", "bf16"), ("fp8_e4m3_per_token_head", "bf16"), ("int8_per_token_head", "f16"))
WIDE = [
    *(
        Case(lens=(700, 33, 1, 0), heads=h, dim=d, v_dim=v, format=f, io=io)
        for d, v in ((192, 0), (192, 128), (256, 0), (512, 0))
        for f, io in (*_THREE, ("f16", "f16"), ("fp8_e4m3_per_head", "f16"))
        for h in (4, 32)
    ),
    *(Case(lens=(300, 33, 1), dim=d, format="bf16", io="bf16") for d in (8, 40, 72, 88, 112, 136, 160, 200, 224, 264, 320, 504)),
    *(Case(lens=(300, 33, 1), dim=d, format=f, io=io) for d in (16, 48, 80, 112, 144, 160, 208, 336) for f, io in _THREE[1:]),
    *(
        Case(lens=(300, 33, 1), dim=d, v_dim=v, format=f, io=io)
        for d, v in ((128, 64), (64, 128), (48, 112), (160, 112), (96, 192), (256, 64), (64, 512))
        for f, io in _THREE
    ),
    *(
        Case(lens=(900, 70, 5), queries=4, heads=h, dim=d, v_dim=v, format=f, io=io, window=w, soft_cap=9.0, sinks=True)
        for d, v, h, w in ((256, 0, 4, 0), (192, 128, 8, 100), (160, 0, 8, 33), (512, 0, 4, 500))
        for f, io in _THREE
    ),
    *(Case(lens=(300, 33), dim=256, causal=False, queries=3, heads=6, layout=y, format=f, io=io)
      for y in ("HND", "fused_NHD", "fused_HND", "stacked") for f, io in _THREE),
    *(Case(lens=(300, 33, 129), dim=d, block=b, format="bf16", io="bf16") for d, b in ((256, 1), (192, 5), (512, 64), (320, 256))),
    *(
        Case(lens=(700, 33, 1), heads=h, dim=d, v_dim=v, format=f, io="bf16")
        for f in ("f16", "fp8_e5m2", "fp8_e5m2_per_head", "int8", "int8_per_head")
        for d, v, h in ((64, 0, 8), (128, 0, 32), (192, 128, 8), (256, 0, 32))
    ),
    Case(lens=(5000, 3, 700), heads=16, dim=256, format="bf16", io="bf16", note="long"),
    Case(lens=(3000, 40, 700), queries=(1, 2, 3), heads=8, dim=256, format="bf16", io="bf16", note="varlen"),
    Case(lens=(3000, 40, 700), queries=(1, 20, 3), heads=8, dim=192, v_dim=128, format="bf16", io="bf16", note="both"),
]  # fmt: skip
FORMATS = [
    *(Case(format=f, io=io) for f, io in (("f16", "f16"), ("bf16", "bf16"), ("f32", "bf16"), ("bf16", "f32"), ("f16", "bf16"))),
    Case(format="bf16", io="f16", dim=128),
    *(
        Case(format=f, io=io, dim=128)
        for f in ("fp8_e4m3", "fp8_e4m3_per_head", "fp8_e4m3_per_token_head", "fp8_e4m3_per_token_head_inline", "fp8_e5m2")
        for io in ("bf16", "f32")
    ),
    *(
        Case(format=f, io="bf16", dim=64)
        for f in ("int8_per_token_head", "int8_per_token_head_inline", "int8_per_token_head_f16", "int8", "int8_per_head")
    ),
    *(Case(format=f, io="f32", dim=64) for f in ("int8_per_block", "int8_per_block_head", "int4_per_token_head", "nvfp4", "mxfp8")),
    Case(format="bf16", v_format="int8_per_token_head", io="bf16", note="mixed"),
    Case(format="fp8_e4m3_per_token_head", v_format="f16", v_dim=80, io="f32", note="mixed"),
]
# What a GPU's general kernel takes: numbers of one, two and three parts, few rows and many, scales of rows, groups and inline.
GENERAL = [
    *(
        Case(lens=(33, 1, 270), format=f, io=io, dim=d)
        for f, io, d in (
            ("f32", "f32", 64), ("nvfp4", "f32", 64), ("int4_per_group", "f32", 64), ("fp8_e5m2", "f32", 72), ("f32", "f32", 512),
        )
    ),
    *(
        Case(lens=(90, 33), queries=(40, 1), format=f, io=io, dim=d)
        for f, io, d in (
            ("mxfp8", "f16", 64), ("fp8_e5m2_per_token_head", "f32", 64), ("int8_per_token_head_inline", "f32", 40),
            ("mxfp4", "f16", 256), ("bf16", "f16", 72), ("nvfp4", "bf16", 512),
        )
    ),
    Case(lens=(90, 33), queries=(40, 1), format="int4_per_token_head", io="f32", dim=128, window=20),
]  # fmt: skip
# Few queries over rows of four bits, over rows with scales along them, and in f16 over bf16: a GPU's decode kernel, in tiles that
# rows may end before, with groups of up to 8 query rows and of up to 16.
_GROUPED = ("nvfp4", "mxfp4", "mxfp8", "int4_per_group")
SMALL = [
    *(
        Case(lens=(700, 33, 1, 0), heads=h, dim=d, v_dim=v, format=f, io=io)
        for f in (*_GROUPED, "int4_per_token_head")
        for d, v, h, io in (
            (64, 0, 32, "f16"), (128, 0, 8, "bf16"), (128, 0, 32, "f16"), (96, 32, 8, "bf16"), (32, 128, 8, "f16"),
            (256, 0, 8, "bf16"), (192, 128, 32, "f16"), (512, 0, 8, "f16"), (160, 0, 8, "bf16"), (96, 320, 32, "bf16"),
        )
    ),
    *(
        Case(
            lens=(900, 70, 5), queries=4, heads=h, dim=128, format=f, io="bf16", window=w, soft_cap=9.0, sinks=True, layout=y,
            block=b,
        )
        for f, h, w, y, b in (
            ("nvfp4", 4, 0, "HND", 16), ("mxfp4", 8, 100, "NHD", 5), ("mxfp8", 4, 33, "fused_NHD", 64),
            ("int4_per_group", 8, 500, "HND", 1), ("int4_per_token_head", 8, 0, "fused_HND", 16),
        )
    ),
    *(Case(lens=(3000, 40, 700), queries=(1, 20, 3), heads=8, dim=128, format=f, io="bf16", note="both") for f in _GROUPED),
    *(
        Case(lens=(700, 33, 1, 0), heads=h, dim=d, v_dim=v, format="bf16", io="f16")
        for d, v in ((64, 0), (72, 0), (128, 0), (128, 64), (192, 0), (192, 128), (256, 0), (512, 0))
        for h in (8, 32)
    ),
    Case(lens=(900, 70, 5), queries=4, dim=128, format="bf16", io="f16", window=100, soft_cap=9.0, sinks=True),
]  # fmt: skip
# What a GPU's decode kernel takes in groups of 16 query rows alone: rows at multiples of 8 and of 4 bytes, scales of f16, a scale
# per row beside one per head; and queries in f32.
ODD = [
    *(
        Case(lens=(700, 33, 1), heads=h, dim=d, format=f, io=io)
        for f, d, h, io in (
            ("bf16", 100, 4, "bf16"), ("f16", 36, 32, "f16"), ("bf16", 66, 4, "f16"), ("fp8_e4m3", 72, 4, "bf16"),
            ("fp8_e5m2", 100, 32, "f16"), ("int8_per_token_head", 40, 4, "bf16"), ("int8_per_token_head", 200, 4, "bf16"),
            ("int4_per_token_head", 40, 4, "f16"), ("int4_per_token_head", 72, 32, "bf16"), ("nvfp4", 80, 4, "bf16"),
            ("nvfp4", 112, 32, "f16"), ("nvfp4", 208, 4, "bf16"), ("fp8_e4m3_per_token_head_inline", 128, 4, "bf16"),
            ("int8_per_token_head_inline", 256, 32, "f16"), ("int4_per_token_head_inline", 64, 4, "bf16"),
            ("int8_per_token_head_f16", 128, 4, "bf16"), ("int8_per_token_head_f16", 512, 32, "bf16"),
            ("fp8_e5m2_per_token_head", 128, 4, "f16"), ("fp8_e5m2_per_block", 192, 32, "bf16"),
            ("bf16", 64, 4, "f32"), ("bf16", 256, 16, "f32"), ("bf16", 100, 4, "f32"), ("f16", 128, 16, "f32"),
            ("f16", 512, 4, "f32"), ("fp8_e4m3", 128, 4, "f32"), ("fp8_e4m3_per_token_head", 256, 16, "f32"),
            ("int8_per_token_head", 128, 16, "f32"), ("int8_per_token_head_f16", 72, 4, "f32"),
        )
    ),
    *(
        Case(lens=(700, 33, 1), heads=8, dim=d, format=f, v_format=v, io=io, note="scales")
        for f, v, d, io in (
            ("fp8_e4m3_per_token_head", "fp8_e4m3", 128, "bf16"), ("fp8_e4m3_per_head", "fp8_e4m3_per_block", 256, "f16"),
            ("int8", "int8_per_token_head_f16", 64, "bf16"), ("fp8_e5m2_per_token_head", "fp8_e5m2_per_head", 72, "bf16"),
            ("int8_per_token_head", "int8", 128, "f32"),
        )
    ),
    Case(lens=(900, 70, 5), queries=4, heads=4, dim=128, format="fp8_e4m3", io="f32", window=100, soft_cap=9.0, sinks=True),
    Case(lens=(900, 70, 5), queries=2, heads=8, dim=72, format="int8_per_token_head_inline", io="bf16", window=33, sinks=True),
    Case(lens=(3000, 40, 700), queries=(1, 20, 3), heads=4, dim=128, format="bf16", io="f32", note="both"),
]  # fmt: skip
LAYOUTS = [
    *(Case(layout=layout, format="bf16", io="bf16") for layout in cases.LAYOUTS if layout != "NHD"),
    *(Case(layout=layout, format="f32") for layout in ("HND", "fused_NHD", "fused_HND", "packed8", "old_vllm")),
    *(Case(layout=layout, format="int8_per_token_head", io="bf16") for layout in ("HND", "fused_HND", "packed8")),
    *(Case(layout=layout, format="fp8_e4m3_per_token_head_inline", io="bf16") for layout in ("HND", "fused_NHD")),
    Case(layout="old_vllm", format="fp8_e4m3", io="bf16"),
]
VARLEN = [
    Case(lens=(40, 17, 3, 64), queries=(40, 1, 3, 20)),
    Case(lens=(130, 5, 90), queries=(130, 1, 0), format="bf16", io="bf16", dim=128),
    Case(lens=(33, 50, 16), queries=(10, 1, 16), window=6, format="bf16", io="bf16"),
    Case(lens=(33, 50, 16), queries=(33, 50, 16), heads=14, kv_heads=2, dim=80, note="group7"),
    Case(lens=(20, 9), queries=(25, 9), sinks=True, soft_cap=4.0, note="more_queries_than_tokens"),
    Case(lens=(70, 41), queries=(70, 5), causal=False),
    Case(lens=(70, 41), queries=(33, 5), format="int8_per_token_head", io="bf16"),
    Case(lens=(70, 41), queries=(33, 5), format="fp8_e4m3", io="bf16", layout="fused_HND", dim=128),
    Case(lens=(70, 41), queries=(33, 5), format="f16", io="f16", layout="packed8", dim=96, v_dim=64),
    Case(lens=(300, 1), queries=(300, 1), heads=4, kv_heads=4, block=7, note="prefill"),
    # Long decodes beside chunks of prompts: on a GPU each goes to its own kernel.
    *(
        Case(lens=(3000, 40, 700, 200, 5000), queries=(1, 40, 3, 200, 1), heads=h, format="bf16", io="bf16", dim=128, note="both")
        for h in (8, 16)
    ),
    Case(lens=(900, 40, 33, 64), queries=(0, 1, 33, 0), format="f16", io="f16", window=20, sinks=True, note="both"),
    Case(lens=(50, 900, 70), queries=(50, 16, 17), heads=4, kv_heads=4, format="bf16", io="bf16", dim=128, note="both"),
    Case(lens=(700, 40, 90), queries=(2, 40, 0), format="int8_per_token_head", io="bf16", dim=128, soft_cap=9.0, note="both"),
    Case(lens=(700, 40, 90), queries=(1, 9, 1), heads=40, kv_heads=2, format="bf16", io="bf16", dim=128, note="group20"),
]
# Prompts over eight-bit caches: on Hopper, blocks of 128 query rows against tiles of 128 keys, bytes widened on their way.
_BYTES = ("fp8_e4m3", "fp8_e4m3_per_head", "fp8_e4m3_per_token_head", "int8_per_token_head")
BYTES = [
    *(
        Case(lens=(130, 257, 40), queries=(130, 129, 40), format=f, io=io, dim=d)
        for f in _BYTES
        for io in ("bf16", "f16")
        for d in (64, 128)
    ),
    *(Case(lens=(300, 17), queries=(140, 9), causal=False, format=f, io="bf16", dim=128) for f in _BYTES[1:]),
    *(Case(lens=(400, 70), queries=(200, 70), window=w, format=f, io="bf16", dim=128) for f in _BYTES[1:] for w in (1, 100, 129)),
    *(Case(lens=(300, 90), queries=(60, 90), window=40, causal=False, format=f, io="bf16") for f in _BYTES[1:]),
    *(Case(lens=(200, 0, 33), queries=(80, 5, 40), sinks=True, format=f, io=io) for f in _BYTES[1:] for io in ("bf16", "f16")),
    *(Case(lens=(200, 33), queries=(80, 33), soft_cap=c, format=f, io="bf16", dim=128) for f in _BYTES[1:] for c in (0.5, 30.0)),
    Case(lens=(300, 33), queries=(80, 33), soft_cap=4.0, sinks=True, window=70, format="fp8_e4m3", io="f16"),
    Case(lens=(300, 33), queries=(80, 33), soft_cap=4.0, sinks=True, window=70, format="int8_per_token_head", io="f16"),
    *(
        Case(lens=(260, 40), queries=(131, 40), heads=g * h, kv_heads=h, format=f, io="bf16", dim=128, note="group")
        for f in _BYTES[1:]
        for g, h in ((1, 3), (4, 2), (7, 2), (8, 1))
    ),
    *(
        Case(lens=(n, 20), queries=(20, 20), format="int8_per_token_head", io="bf16", note="length")
        for n in (127, 128, 129, 255, 256, 257, 513)
    ),
    *(
        Case(lens=(n, 20), queries=(n, 20), format="fp8_e4m3_per_head", io="f16", dim=128, note="length")
        for n in (31, 32, 33, 127, 128, 129)
    ),
    *(Case(lens=(150, 64, 63), queries=(50, 64, 7), block=b, format=f, io="bf16", dim=128) for f in _BYTES[1:] for b in (1, 7, 64)),
    *(
        Case(lens=(150, 64), queries=(50, 64), layout=layout, format=f, io="bf16", dim=128)
        for f in ("fp8_e4m3", "int8_per_token_head")
        for layout in ("HND", "fused_NHD", "fused_HND", "stacked", "flat")
    ),
    # Long decodes beside chunks of prompts: on a GPU each goes to its own kernel.
    *(
        Case(lens=(1500, 40, 700, 200, 900), queries=(1, 40, 3, 130, 0), heads=h, format=f, io="bf16", dim=128, note="both")
        for f in _BYTES[1:]
        for h in (8, 16)
    ),
    Case(lens=(900, 40, 33, 64), queries=(0, 1, 33, 0), format="fp8_e4m3", io="f16", window=20, sinks=True, note="both"),
    Case(lens=(300, 40), queries=(90, 40), format="int8_per_token_head", io="f32", dim=128, note="general"),
]
