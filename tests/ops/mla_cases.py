"""Cases of attention_mla: those of attention over one latent row a token. The answer is attention's, K and V taken from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

import kvx
from tests import cases
from tests.ops import attention_cases
from tests.ops.attention_cases import EPS, close, error, magnitude

RECORD = "fp8_e4m3_per_128_inline"
LAYOUTS = {"one": cases.LATENT, "two": "NHD", "hnd": "HND", "fused": "fused_NHD"}


@dataclass(frozen=True)
class Case(attention_cases.Case):
    heads: int = 16
    kv_heads: int = 1
    dim: int = 512  # of the latent
    v_dim: int = 64  # of the rotary part
    block: int = 64
    layout: str = "one"  # a name above: one tensor, or two
    format: str = "bf16"
    io: str = "bf16"
    scale: float = 192**-0.5  # a model of 128 + 64

    def __str__(self) -> str:
        base = Case()
        changed = [f for f in fields(self) if getattr(self, f.name) != getattr(base, f.name)]
        parts = [str(v) if isinstance(v := getattr(self, f.name), str) else f"{f.name}={v}".replace(" ", "") for f in changed]
        return "-".join(parts) or "plain"

    def make(self, device: str, generator: torch.Generator) -> Made:
        pages = sum(-(-n // self.block) for n in self.lens)
        case = cases.Case(
            layout=LAYOUTS[self.layout], format=self.format, v_format=self.v_format, io="f32", num_blocks=pages + 3,
            block_size=self.block, num_kv_heads=1, head_dim=self.dim, v_head_dim=self.v_dim, lens=self.lens, index=torch.int32,
        )  # fmt: skip
        made = case.make("cpu", generator)
        for x in (made.k, made.v):
            x.copy_(torch.randn(x.shape, generator=generator))
        made.write("torch")
        q = torch.randn(sum(self.counts), self.heads, self.dim + self.v_dim, generator=generator).to(cases.IO[self.io])
        sinks = torch.randn(self.heads, generator=generator) if self.sinks else None
        latent, rotary = made.gather("torch", dtype=torch.float32, max_seq_len=max((*self.lens, 1)))
        cu = kvx.cu_seqlens(torch.tensor(self.counts, dtype=torch.int32))
        keys = torch.cat((latent, rotary), -1)
        return Made(self, made.to(device), q.to(device), sinks if sinks is None else sinks.to(device), cu.to(device), keys, latent)


class Made(attention_cases.Made):
    """Keys and values as the cache holds them, dequantised: k is latent and rotary part, v the latent."""

    def run(self, backend: str, **more: object) -> tuple[Tensor, Tensor]:
        table = more.pop("table", None) or self.table
        given = {**self.given, "backend": backend, **more}
        if not isinstance(self.case.queries, int):
            given.setdefault("cu_seqlens", self.cu)
        return kvx.attention_mla(self.q, self.cache.cache, table, **given)

    def check(self, out: Tensor, lse: Tensor) -> None:
        """attention's bound, and what a score's own rounding makes of out: a score of 576 products is off by some 2 * 2^-24 of
        their magnitudes' sum (a random walk of rounded sums), which is a share of every weight."""
        want, want_lse, reach = self.answer()
        theirs, their_lse, _ = self.answer(self.q.dtype)
        largest = float(self.v.abs().nan_to_num().max()) if self.v.numel() else 0.0
        floor = torch.finfo(out.dtype).eps / 2 * magnitude(want) + (4 + 2 * reach) * EPS * largest
        close("out", out.cpu(), want, 2 * error(theirs, want) + floor)
        floor = math.sqrt(self.case.dim + self.case.v_dim) * EPS * reach + 4 * EPS * max(1.0, magnitude(want_lse))
        close("lse", lse.cpu(), want_lse, 2 * error(their_lse, want_lse) + floor)


def record(**fields_: object) -> Case:
    """The 656-byte record."""
    return Case(format=RECORD, v_format="bf16", **fields_)


DECODE = [
    Case(),
    *(Case(lens=(n, 3), note="length") for n in (0, 1, 63, 64, 65)),
    Case(lens=(0, 0), note="nothing"),
    *(Case(heads=n, lens=(70, 5)) for n in (1, 7, 128)),
    *(Case(lens=(600, 1, 129, 450), heads=n, note="long") for n in (16, 128)),
    *(Case(queries=n, lens=(200, 17, 3)) for n in (2, 3)),
    # Up to eight rows: decode's kernel on every GPU.
    Case(heads=8, lens=(2050, 1, 129, 33)),
    Case(heads=4, queries=2, window=50, lens=(200, 17, 3), layout="two"),
    Case(heads=5, sinks=True, soft_cap=5.0, block=16, lens=(70, 0, 33)),
    Case(queries=2, heads=128, lens=(300, 70)),
    Case(queries=5, lens=(3, 9, 0), note="more_queries_than_tokens"),
    *(Case(window=w, lens=(200, 17)) for w in (1, 64, 1000)),
    Case(window=50, queries=3, lens=(200, 17)),
    Case(causal=False, queries=3),
    Case(soft_cap=2.0),
    Case(sinks=True, lens=(0, 1, 40), queries=2),
    Case(sinks=True, soft_cap=5.0, window=20),
    Case(scale=-0.1),
    *(Case(block=b, lens=(33, 5, 129)) for b in (1, 16, 64, 128)),
    *(Case(layout=layout, lens=(200, 17, 64)) for layout in ("two", "hnd", "fused")),
    *(Case(format=f, io=io) for f, io in (("f32", "f32"), ("f16", "f16"), ("bf16", "f32"), ("f32", "bf16"))),
    *(Case(dim=d, v_dim=r, heads=7, lens=(70, 5), note="widths") for d, r in ((96, 32), (80, 16), (33, 7), (256, 64), (128, 128))),
    Case(dim=80, v_dim=16, format="f32", io="f32", layout="two", block=16, heads=3),
    Case(lens=(2050, 3, 1025), dim=64, v_dim=16, note="spans"),
]
FORMATS = [
    record(),
    *(record(lens=(n, 3), note="length") for n in (0, 1, 63, 64, 65)),
    *(record(lens=(600, 1, 129, 450), heads=n, note="long") for n in (16, 128)),
    record(heads=7, io="f32", block=16, lens=(70, 5)),
    record(queries=2, sinks=True, window=50),
    record(layout="two", lens=(70, 5)),
    Case(format="fp8_e4m3_per_128", v_format="bf16", layout="two", lens=(70, 5)),
    Case(format="fp8_e4m3", layout="two", lens=(70, 5)),
    Case(format="int8_per_token_head", layout="hnd", lens=(70, 5), dim=128),
    Case(format="nvfp4", v_format="f16", layout="two", lens=(70, 5), io="f32", dim=64, v_dim=16),
]
VARLEN = [
    Case(lens=(200, 17, 3, 64), queries=(200, 1, 3, 20)),
    Case(lens=(130, 5, 90, 0), queries=(130, 1, 0, 0), heads=4),
    Case(lens=(33, 150, 16), queries=(10, 1, 16), window=6, format="f32", io="f32"),
    Case(lens=(20, 9), queries=(25, 9), sinks=True, soft_cap=4.0, note="more_queries_than_tokens"),
    Case(lens=(70, 41), queries=(70, 5), causal=False, heads=7),
    record(lens=(150, 41), queries=(133, 5)),
    record(lens=(300, 64), queries=(3, 1), heads=128),
]
ALL = [*DECODE, *FORMATS, *VARLEN]
