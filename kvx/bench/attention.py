"""kvx bench attention: queries over scattered blocks, against torch SDPA on the same cache gathered into contiguous memory.

Bytes are K and V, read once, and q and out; a share is of what the machine can read. Prefill also carries its operations: 4 a
query head, element and position seen; so do latent caches (MLA), whose heads share one row a token. SDPA's time leaves out the
gather, which is shown apart. A step of a model plans once for all layers, so on a GPU plans are made before, ours and FlashInfer's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvx
from kvx.bench.attention_flashinfer import flashinfer
from kvx.bench.harness import COLD_BYTES, LAYOUTS, Row, Timing, time_calls
from kvx.quant.scales import round_scale

CEILINGS = ("read",)
_RECORD = "fp8_e4m3_per_128_inline"  # with bf16 beside it: 656 bytes a token
_SCALED_OR_SMALL = ("mxfp8", "int4_per_token_head", "int4_per_group", "nvfp4", "mxfp4")  # scales along rows, or 4 bits
_SMALLER = ("fp8_e4m3", "int8_per_token_head", *_SCALED_OR_SMALL)
_MLA_SCALE = 192**-0.5  # of a model whose own heads are 128 + 64
_SKEWED = (65536, *(2048,) * 63)  # one long conversation among short ones


@dataclass(frozen=True)
class AttentionCase:
    lens: tuple[int, ...]
    heads: int
    kv_heads: int
    layout: str = "NHD"
    format: str = "bf16"
    io: str = "bf16"
    dim: int = 128
    block: int = 16
    is_prefill: bool = False
    rope: int = 0  # of a latent cache: the rotary part's width; dim is the latent's
    v_format: str = ""
    v_dim: int = 0  # 0: as wide as K
    queries: int = 1  # of a sequence, where it is not a prefill: more are drafts
    fp8_products: bool = False

    @property
    def label(self) -> dict[str, Any]:
        same = len(set(self.lens)) == 1
        return {
            "kind": "prefill" if self.is_prefill else "mla" if self.rope else "decode",
            "format": self.format,
            **({} if self.io == self._usual_io else {"q": self.io}),
            "layout": self.layout,
            "batch": len(self.lens),
            "length": self.lens[0] if same else f"{max(self.lens)}+{len(self.lens) - 1}x{min(self.lens)}",
            "heads": f"{self.heads}/{self.kv_heads}",
            "dim": f"{self.dim}+{self.rope}" if self.rope else f"{self.dim}/{self.v_dim}" if self.v_dim else self.dim,
            "block": self.block,
            **({"queries": self.queries} if self.queries > 1 else {}),
            **({"products": "fp8"} if self.fp8_products else {}),
        }

    @property
    def _usual_io(self) -> str:
        return self.format if self.format in ("f32", "f16") else "bf16"

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[self.io]

    @cached_property  # a call is timed with it
    def spec(self) -> kvx.CacheSpec:
        blocks = sum(-(-n // self.block) for n in self.lens) + 8
        return kvx.CacheSpec(
            blocks, self.block, self.kv_heads, self.dim, layout=LAYOUTS[self.layout], format=self.format,
            v_head_dim=self.rope or self.v_dim, v_format=self.v_format,
        )  # fmt: skip

    @property
    def out_dim(self) -> int:
        return self.v_dim or self.dim

    @property
    def num_queries(self) -> int:
        return sum(self.lens) if self.is_prefill else len(self.lens) * self.queries

    @property
    def bytes(self) -> int:
        rows = self.num_queries * self.heads * (self.dim + self.rope + self.out_dim) * self.dtype.itemsize
        return sum(self.lens) * self.spec.token_bytes + rows

    @property
    def flops(self) -> int:
        """Multiplications and additions of q.k and weight * v, causal: half of the square."""
        if self.rope:
            return sum(2 * self.queries * self.heads * n * (2 * self.dim + self.rope) for n in self.lens)
        return sum(self.heads * (self.dim + self.out_dim) * n * (n + 1) for n in self.lens) if self.is_prefill else 0


def cases(device: str) -> Iterator[AttentionCase]:
    if device == "cpu":
        for fmt in ("f32", "bf16"):
            for layout in ("NHD", "HND"):
                yield AttentionCase((4096,) * 8, 32, 8, layout, fmt, fmt)
        for fmt in ("f16", *_SMALLER):
            yield AttentionCase((4096,) * 8, 32, 8, "NHD", fmt, "f16" if fmt == "f16" else "bf16")
        for dim in (72, 256):
            for fmt in ("bf16", "fp8_e4m3", "int8_per_token_head"):
                yield AttentionCase((4096,) * 4, 32, 8, "NHD", fmt, dim=dim)
        yield AttentionCase((16384, *(512,) * 7), 32, 8, "NHD")
        yield AttentionCase((512,) * 2, 32, 8, "NHD", "f32", "f32", is_prefill=True)
        for fmt in ("bf16", "fp8_e4m3", "int8_per_token_head"):
            yield AttentionCase((512,) * 2, 32, 8, "NHD", fmt, is_prefill=True)
        yield _latent((4096,) * 8, 16)
        yield _latent((4096,) * 8, 16, _RECORD)
        return
    shapes = (((8192,) * 64, 64), ((32768,) * 8, 64), ((1024,) * 256, 32))
    for lens, heads in shapes:
        for layout in ("NHD", "HND", "fused"):
            yield AttentionCase(lens, heads, 8, layout)
        for fmt in ("fp8_e4m3", "int8_per_token_head"):
            yield AttentionCase(lens, heads, 8, "NHD", fmt)
    for layout in ("NHD", "HND"):
        yield AttentionCase(_SKEWED, 64, 8, layout)
    for length in (512, 2048, 8192):
        yield AttentionCase((length,), 32, 8)
    yield from _formats()
    yield from _wide()
    yield AttentionCase((8192,) * 4, 32, 8, "NHD", is_prefill=True)
    yield AttentionCase((8192,) * 4, 32, 8, "NHD", block=8192, is_prefill=True)  # contiguous: what paging costs
    for fmt in ("fp8_e4m3", "fp8_e4m3_per_token_head", "int8_per_token_head"):
        yield AttentionCase((8192,) * 4, 32, 8, "NHD", fmt, is_prefill=True)
    for batch, length in ((2, 8192), (4, 8192), (1, 32768), (16, 2048)):
        yield AttentionCase((length,) * batch, 32, 8, "NHD", "fp8_e4m3", is_prefill=True, fp8_products=True)
    yield from _prompts()
    for heads in (8, 16, 128):
        for fmt in ("bf16", _RECORD):
            yield _latent((4096,) * 128, heads, fmt)
    for fmt in ("bf16", _RECORD):
        yield _latent((65536,), 128, fmt)
        yield _latent((8192,) * 32, 128, fmt, queries=2)
        yield _latent((4096,) * 16, 16, fmt)
        yield _latent((1024,) * 64, 128, fmt)


def _prompts() -> Iterator[AttentionCase]:
    """Prefill of one long prompt, of many short ones, and of other widths of a head."""
    for lens, heads in (((32768,), 32), ((2048,) * 16, 32), ((512,) * 32, 32), ((1024,) * 8, 64)):
        yield AttentionCase(lens, heads, 8, is_prefill=True)
    yield AttentionCase((4096,) * 4, 32, 8, io="f16", is_prefill=True)  # the kernel that other GPUs run
    for dim, v_dim, heads, kv_heads in ((64, 0, 32, 8), (256, 0, 16, 4), (192, 0, 16, 4), (192, 128, 32, 32), (512, 0, 8, 1)):
        yield AttentionCase((4096,) * 4, heads, kv_heads, dim=dim, v_dim=v_dim, is_prefill=True)
    for fmt in (*_SCALED_OR_SMALL, "fp8_e5m2_per_token_head", "int8_per_token_head_f16"):
        yield AttentionCase((4096,) * 4, 32, 8, format=fmt, is_prefill=True)
    for fmt in ("fp8_e4m3", "int8_per_token_head", *_SCALED_OR_SMALL):
        yield AttentionCase((4096,) * 4, 16, 4, format=fmt, dim=256, is_prefill=True)
    for fmt in ("fp8_e4m3", "int8_per_token_head"):
        yield AttentionCase((4096,) * 4, 8, 1, format=fmt, dim=512, is_prefill=True)


def _formats() -> Iterator[AttentionCase]:
    """Caches of another type than their queries, each kind of scale, and the formats of few bits."""
    for fmt, io in (("bf16", "bf16"), ("f16", "f16"), ("f16", "bf16"), ("bf16", "f16")):
        yield AttentionCase((4096,) * 16, 32, 8, format=fmt, io=io)
    for scales in ("", "_per_head", "_per_block", "_per_block_head", "_per_token_head"):
        yield AttentionCase((4096,) * 16, 32, 8, format=f"fp8_e4m3{scales}")
    yield AttentionCase((4096,) * 16, 32, 8, format="fp8_e5m2")
    for batch in (16, 64):
        for fmt in _SCALED_OR_SMALL:
            yield AttentionCase((4096,) * batch, 32, 8, format=fmt)
    for fmt in ("bf16", "f16", "fp8_e4m3", "int8_per_token_head"):
        yield AttentionCase((4096,) * 64, 32, 8, format=fmt, io="f32")
    for fmt in ("int8_per_token_head_f16", "fp8_e4m3_per_token_head_inline", "int4_per_token_head_inline"):
        yield AttentionCase((4096,) * 64, 32, 8, format=fmt)


def _wide() -> Iterator[AttentionCase]:
    """Other widths of a head: those of today's models, and some that run in the next tile."""
    for dim, v_dim, heads, kv_heads in ((256, 0, 16, 2), (192, 0, 16, 4), (192, 128, 32, 4), (512, 0, 8, 1)):
        for fmt in ("bf16", "fp8_e4m3", "fp8_e4m3_per_token_head", "int8_per_token_head"):
            yield AttentionCase((4096,) * 64, heads, kv_heads, "NHD", fmt, dim=dim, v_dim=v_dim)
        for fmt in _SCALED_OR_SMALL:
            yield AttentionCase((4096,) * 64, heads, kv_heads, "NHD", fmt, dim=dim, v_dim=v_dim)
    for dim in (40, 72, 112, 160, 224, 320):
        for fmt in ("bf16", "fp8_e4m3", "int4_per_token_head"):
            yield AttentionCase((4096,) * 64, 32, 8, "NHD", fmt, dim=dim)


def _latent(lens: tuple[int, ...], heads: int, fmt: str = "bf16", queries: int = 1) -> AttentionCase:
    return AttentionCase(lens, heads, 1, "latent", fmt, dim=512, block=64, rope=64, v_format="bf16", queries=queries)


@dataclass
class AttentionBatch:
    """One cache with its queries. Several of them are rotated through, so that nothing is warm."""

    q: Tensor
    storage: kvx.Storage
    table: kvx.PackedTable
    cu: Tensor
    out: Tensor
    lse: Tensor
    workspace: Tensor | None
    is_planned: bool = False


def make(case: AttentionCase, device: str, seed: int) -> AttentionBatch:
    g = torch.Generator().manual_seed(seed)
    spec, batch = case.spec, len(case.lens)
    storage = kvx.allocate(spec, device)
    _fill(storage, spec, g)
    pages = [-(-n // case.block) for n in case.lens]
    ids = torch.randperm(spec.num_blocks, generator=g).to(torch.int32)
    table = torch.zeros(batch, max(pages), dtype=torch.int32)
    first = 0
    for s, n in enumerate(pages):
        table[s, :n] = ids[first : first + n]
        first += n
    lens = torch.tensor(case.lens, dtype=torch.int32)
    packed = kvx.PackedTable(table.to(device), lens.to(device))
    cu = kvx.cu_seqlens(lens if case.is_prefill else torch.full_like(lens, case.queries)).to(device)
    q = torch.randn(case.num_queries, case.heads, case.dim + case.rope, generator=g).to(case.dtype).to(device)
    out = torch.empty(*q.shape[:2], case.out_dim, dtype=q.dtype, device=device)
    made = AttentionBatch(q, storage, packed, cu, out, torch.empty(q.shape[:2], device=device), None)
    more: dict[str, Any] = {"cu_seqlens": cu, "max_query_len": max(case.lens)} if case.is_prefill else {"latent": case.rope > 0}
    size = kvx.attention_workspace_bytes(q, storage.cache, packed, spec=spec, max_seq_len=max(case.lens), **more)
    if size:
        made.workspace = torch.empty(size, dtype=torch.uint8, device=device)
        made.is_planned = not case.is_prefill
    if made.is_planned:
        given: dict[str, Any] = {"spec": spec, "workspace": made.workspace, "max_seq_len": max(case.lens), "latent": case.rope > 0}
        kvx.attention_plan(q, storage.cache, packed, **given)
    return made


def _fill(storage: kvx.Storage, spec: kvx.CacheSpec, g: torch.Generator) -> None:
    """Normal numbers in every format, as a model's are: on a CPU rows with many subnormal numbers take longer."""
    if spec.plane(0).format.is_inline:  # scales among the elements: a block of rows, written over and over
        device, rows = storage.cache[0].device, 1 << 14
        k, v = (torch.randn(rows, spec.num_kv_heads, p.head_dim, generator=g).bfloat16().to(device) for p in spec.kv)
        for first in range(0, spec.num_slots, rows):
            slots = torch.arange(first, min(first + rows, spec.num_slots), device=device)
            kvx.write(storage.cache, k[: len(slots)], v[: len(slots)], slot_mapping=slots, spec=spec)
        return
    tensors = (storage.cache,) if isinstance(storage.cache, Tensor) else storage.cache
    for t in tensors:
        element = spec.plane(0).format.element
        if t.dtype in (torch.float32, torch.float16, torch.bfloat16):
            t.normal_()
        elif element.name.startswith("fp8"):
            some = (torch.randn(1 << 22, generator=g) * 64).to(getattr(torch, element.torch_name)).view(torch.uint8).to(t.device)
            for part in t.view(torch.uint8).view(-1).split(len(some)):
                part.copy_(some[: len(part)])
        elif element.name == "int8":
            t.view(torch.int8).random_(-127, 128)
        else:
            t.view(torch.uint8).random_(0, 0x50)
    for scale in storage.scales().values():
        if scale is not None:
            number, stored = torch.tensor(1 / 64, device=scale.device), spec.plane(0).format.scale
            if stored is not None and scale.dtype == torch.uint8:  # e4m3 or e8m0
                number = round_scale(number, stored)
            scale.copy_(number)


def attend(case: AttentionCase, b: AttentionBatch, backend: str = "auto") -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {
        "spec": case.spec, "out": b.out, "lse": b.lse, "workspace": b.workspace, "max_seq_len": max(case.lens), "backend": backend,
        "planned": b.is_planned, **b.storage.scales(),
    }  # fmt: skip
    if case.is_prefill:
        given |= {"cu_seqlens": b.cu, "max_query_len": max(case.lens), "fp8_products": case.fp8_products}
        return kvx.attention_varlen(b.q, b.storage.cache, b.table, **given)
    if case.rope:
        return kvx.attention_mla(b.q, b.storage.cache, b.table, scale=_MLA_SCALE, **given)
    return kvx.attention_decode(b.q, b.storage.cache, b.table, **given)


def check(case: AttentionCase, b: AttentionBatch) -> None:
    """The first two sequences (the last queries of a prefill) beside the definition."""
    attend(case, b)
    ends = b.cu.tolist()
    for s in range(min(2, len(case.lens))):
        rows = slice(max(ends[s], ends[s + 1] - 32), ends[s + 1])
        table = kvx.PackedTable(b.table.block_table[s : s + 1], b.table.seq_lens[s : s + 1])
        given: dict[str, Any] = {"spec": case.spec, "backend": "torch", **b.storage.scales()}
        definition = partial(kvx.attention_mla, scale=_MLA_SCALE) if case.rope else kvx.attention_decode
        want, want_lse = definition(b.q[rows].float(), b.storage.cache, table, **given)
        for name, got, expected in (("out", b.out[rows], want), ("lse", b.lse[rows], want_lse)):
            most = 0.02 * float(expected.abs().max()) if case.io != "f32" or name == "out" else 1e-3
            if case.fp8_products:  # weights are off by up to 1/16, and their sum
                most = 0.1 if name == "lse" else 0.08 * float(expected.abs().max())
            if not float((got.float() - expected).abs().max()) <= most:
                raise AssertionError(f"attention differs from the definition in {name} for {case}; nothing was timed")


def gathered(case: AttentionCase, b: AttentionBatch) -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {"spec": case.spec, "max_seq_len": max(case.lens), "dtype": case.dtype, **b.storage.scales()}
    k, v = kvx.gather(b.storage.cache, b.table, **given)
    return (torch.cat((k, v), -1), k) if case.rope else (k, v)


def sdpa(case: AttentionCase, b: AttentionBatch, kv: tuple[Tensor, Tensor]) -> Tensor:
    """torch's attention over [batch, heads, length, dim]; every sequence as long as the longest."""
    batch = len(case.lens)
    q = b.q.view(batch, -1, case.heads, case.dim + case.rope).transpose(1, 2)
    scale = _MLA_SCALE if case.rope else None
    return F.scaled_dot_product_attention(q, *kv, is_causal=case.is_prefill, enable_gqa=True, scale=scale)


def peers(case: AttentionCase, batches: list[AttentionBatch], device: str) -> dict[str, Timing]:
    """SDPA by each of its backends, and the gather it needs first. torch's flash backend is FlashAttention 2."""
    if len(set(case.lens)) > 1 or case.format not in ("f32", "bf16", "f16"):
        return {}
    some = batches[:2]
    found = {"gather": time_calls([partial(gathered, case, b) for b in some], device)}
    contiguous = [tuple(x.transpose(1, 2).contiguous() for x in gathered(case, b)) for b in some]
    which = {"sdpa": None} if device == "cpu" else {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, kind in which.items():

        def call(b: AttentionBatch, kv: Any, kind: Any = kind) -> None:
            if kind is None:
                sdpa(case, b, kv)
            else:
                with sdpa_kernel(kind):
                    sdpa(case, b, kv)

        calls: list[Callable[[], None]] = [partial(call, b, kv) for b, kv in zip(some, contiguous, strict=True)]
        try:
            with warnings.catch_warnings():  # torch says at length why a backend does not take a shape
                warnings.simplefilter("ignore")
                found[name] = time_calls(calls, device)
        except RuntimeError:  # that is how it says so in the end
            continue
    return found


def run(case: AttentionCase, device: str, ceiling_gbps: float) -> Row:
    count = min(4, max(2, COLD_BYTES // case.bytes)) if device == "cuda" else 2
    batches = [make(case, device, seed) for seed in range(count)]
    check(case, batches[0])
    ours = time_calls([partial(attend, case, b) for b in batches], device)
    others = peers(case, batches, device)
    if device == "cuda":
        others |= flashinfer(case, batches[:2], _MLA_SCALE if case.rope else None)
    label = case.label
    if case.flops:
        label = {**label, "tflops": round(case.flops / ours.median_us / 1e6, 3)}
    return Row("attention", label, case.bytes, ours, None, ceiling_gbps, others, ceiling="read")
