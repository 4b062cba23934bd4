"""kvx bench attention: queries over scattered blocks, against torch SDPA on the same cache gathered into contiguous memory.

Bytes are K and V, read once, and q and out; a share is of what the machine can read. Prefill also carries its operations: 4 a
query head, element and position seen. SDPA's time leaves out the gather, which is shown apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvx
from kvx.bench.harness import COLD_BYTES, LAYOUTS, Row, Timing, time_calls

CEILING = "read"
_SKEWED = (65536, *(2048,) * 63)  # one long conversation among short ones


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...]
    heads: int
    kv_heads: int
    layout: str = "NHD"
    format: str = "bf16"
    io: str = "bf16"
    dim: int = 128
    block: int = 16
    is_prefill: bool = False

    @property
    def label(self) -> dict[str, Any]:
        same = len(set(self.lens)) == 1
        return {
            "kind": "prefill" if self.is_prefill else "decode",
            "format": self.format,
            "layout": self.layout,
            "batch": len(self.lens),
            "length": self.lens[0] if same else f"{max(self.lens)}+{len(self.lens) - 1}x{min(self.lens)}",
            "heads": f"{self.heads}/{self.kv_heads}",
            "dim": self.dim,
            "block": self.block,
        }

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[self.io]

    @property
    def spec(self) -> kvx.CacheSpec:
        blocks = sum(-(-n // self.block) for n in self.lens) + 8
        return kvx.CacheSpec(blocks, self.block, self.kv_heads, self.dim, layout=LAYOUTS[self.layout], format=self.format)

    @property
    def num_queries(self) -> int:
        return sum(self.lens) if self.is_prefill else len(self.lens)

    @property
    def bytes(self) -> int:
        return sum(self.lens) * self.spec.token_bytes + 2 * self.num_queries * self.heads * self.dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of q.k and weight * v, causal: half of the square."""
        return sum(4 * self.heads * self.dim * n * (n + 1) // 2 for n in self.lens) if self.is_prefill else 0


def cases(device: str) -> Iterator[Case]:
    if device == "cpu":
        for fmt in ("f32", "bf16"):
            for layout in ("NHD", "HND"):
                yield Case((4096,) * 8, 32, 8, layout, fmt, fmt)
        for fmt in ("f16", "fp8_e4m3", "int8_per_token_head"):
            yield Case((4096,) * 8, 32, 8, "NHD", fmt, "f16" if fmt == "f16" else "bf16")
        yield Case((16384, *(512,) * 7), 32, 8, "NHD")
        yield Case((512,) * 2, 32, 8, "NHD", "f32", "f32", is_prefill=True)
        return
    shapes = (((8192,) * 64, 64), ((32768,) * 8, 64), ((1024,) * 256, 32))
    for lens, heads in shapes:
        for layout in ("NHD", "HND", "fused"):
            yield Case(lens, heads, 8, layout)
        for fmt in ("fp8_e4m3", "int8_per_token_head"):
            yield Case(lens, heads, 8, "NHD", fmt)
    for layout in ("NHD", "HND"):
        yield Case(_SKEWED, 64, 8, layout)
    yield Case((8192,) * 4, 32, 8, "NHD", is_prefill=True)
    yield Case((8192,) * 4, 32, 8, "NHD", block=8192, is_prefill=True)  # contiguous: what paging costs


@dataclass
class Batch:
    """One cache with its queries. Several of them are rotated through, so that nothing is warm."""

    q: Tensor
    storage: kvx.Storage
    table: kvx.PackedTable
    cu: Tensor
    out: Tensor
    lse: Tensor
    workspace: Tensor | None


def make(case: Case, device: str, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    spec, batch = case.spec, len(case.lens)
    storage = kvx.allocate(spec, device)
    _fill(storage, spec)
    pages = [-(-n // case.block) for n in case.lens]
    ids = torch.randperm(spec.num_blocks, generator=g).to(torch.int32)
    table = torch.zeros(batch, max(pages), dtype=torch.int32)
    first = 0
    for s, n in enumerate(pages):
        table[s, :n] = ids[first : first + n]
        first += n
    lens = torch.tensor(case.lens, dtype=torch.int32)
    packed = kvx.PackedTable(table.to(device), lens.to(device))
    cu = kvx.cu_seqlens(lens if case.is_prefill else torch.ones_like(lens)).to(device)
    q = torch.randn(case.num_queries, case.heads, case.dim, generator=g).to(case.dtype).to(device)
    made = Batch(q, storage, packed, cu, torch.empty_like(q), torch.empty(q.shape[:2], device=device), None)
    more: dict[str, Any] = {"cu_seqlens": cu, "max_query_len": max(case.lens)} if case.is_prefill else {}
    size = kvx.attention_workspace_bytes(q, storage.cache, packed, spec=spec, max_seq_len=max(case.lens), **more)
    made.workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    return made


def _fill(storage: kvx.Storage, spec: kvx.CacheSpec) -> None:
    """Numbers near 1 in every format: what is read matters to nobody but the check."""
    tensors = (storage.cache,) if isinstance(storage.cache, Tensor) else storage.cache
    for t in tensors:
        if t.dtype in (torch.float32, torch.float16, torch.bfloat16):
            t.normal_()
        elif spec.plane(0).format.element.name == "int8":
            t.view(torch.int8).random_(-127, 128)
        else:
            t.view(torch.uint8).random_(0, 0x50)
    for scale in storage.scales().values():
        if scale is not None:
            scale.fill_(1 / 64)


def attend(case: Case, b: Batch, backend: str = "auto") -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {
        "spec": case.spec, "out": b.out, "lse": b.lse, "workspace": b.workspace, "max_seq_len": max(case.lens), "backend": backend,
        **b.storage.scales(),
    }  # fmt: skip
    if case.is_prefill:
        given |= {"cu_seqlens": b.cu, "max_query_len": max(case.lens)}
        return kvx.attention_varlen(b.q, b.storage.cache, b.table, **given)
    return kvx.attention_decode(b.q, b.storage.cache, b.table, **given)


def check(case: Case, b: Batch) -> None:
    """The first two sequences (the last queries of a prefill) beside the definition."""
    attend(case, b)
    ends = b.cu.tolist()
    for s in range(min(2, len(case.lens))):
        rows = slice(max(ends[s], ends[s + 1] - 32), ends[s + 1])
        table = kvx.PackedTable(b.table.block_table[s : s + 1], b.table.seq_lens[s : s + 1])
        want, want_lse = kvx.attention_decode(
            b.q[rows].float(), b.storage.cache, table, spec=case.spec, backend="torch", **b.storage.scales()
        )
        for name, got, expected in (("out", b.out[rows], want), ("lse", b.lse[rows], want_lse)):
            most = 0.02 * float(expected.abs().max()) if case.io != "f32" or name == "out" else 1e-3
            if not float((got.float() - expected).abs().max()) <= most:
                raise AssertionError(f"attention differs from the definition in {name} for {case}; nothing was timed")


def gathered(case: Case, b: Batch) -> tuple[Tensor, Tensor]:
    return kvx.gather(b.storage.cache, b.table, spec=case.spec, max_seq_len=max(case.lens), dtype=case.dtype, **b.storage.scales())


def sdpa(case: Case, b: Batch, kv: tuple[Tensor, Tensor]) -> Tensor:
    """torch's attention over [batch, heads, length, dim]; every sequence as long as the longest."""
    batch = len(case.lens)
    q = b.q.view(batch, -1, case.heads, case.dim).transpose(1, 2)
    return F.scaled_dot_product_attention(q, *kv, is_causal=case.is_prefill, enable_gqa=True)


def peers(case: Case, batches: list[Batch], device: str) -> dict[str, Timing]:
    """SDPA by each of its backends, and the gather it needs first."""
    if len(set(case.lens)) > 1 or case.format not in ("f32", "bf16", "f16"):
        return {}
    some = batches[:2]
    found = {"gather": time_calls([partial(gathered, case, b) for b in some], device)}
    contiguous = [tuple(x.transpose(1, 2).contiguous() for x in gathered(case, b)) for b in some]
    which = {"sdpa": None} if device == "cpu" else {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, kind in which.items():

        def call(b: Batch, kv: Any, kind: Any = kind) -> None:
            if kind is None:
                sdpa(case, b, kv)
            else:
                with sdpa_kernel(kind):
                    sdpa(case, b, kv)

        calls: list[Callable[[], None]] = [partial(call, b, kv) for b, kv in zip(some, contiguous, strict=True)]
        try:
            found[name] = time_calls(calls, device)
        except RuntimeError:  # a backend of torch that does not take the shape
            continue
    if device == "cuda" and find_spec("flashinfer") is not None and not case.is_prefill:
        found |= _flashinfer(case, some)
    return found


def _flashinfer(case: Case, batches: list[Batch]) -> dict[str, Timing]:
    flashinfer = import_module("flashinfer")

    if case.layout == "fused":
        return {}
    calls = []
    for b in batches:
        csr = kvx.to_page_csr(b.table, case.block)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(512 << 20, dtype=torch.uint8, device="cuda"), case.layout, use_tensor_cores=True
        )
        wrapper.plan(
            csr.indptr, csr.indices, csr.last_page_len, case.heads, case.kv_heads, case.dim, case.block, q_data_type=case.dtype,
            kv_data_type=case.dtype,
        )  # fmt: skip
        calls.append(partial(wrapper.run, b.q, b.storage.cache))
    return {"flashinfer": time_calls(calls, "cuda")}


def run(case: Case, device: str, ceiling_gbps: float) -> Row:
    count = min(4, max(2, COLD_BYTES // case.bytes)) if device == "cuda" else 2
    batches = [make(case, device, seed) for seed in range(count)]
    check(case, batches[0])
    ours = time_calls([partial(attend, case, b) for b in batches], device)
    others = peers(case, batches, device)
    label = case.label
    if case.flops:
        label = {**label, "tflops": round(case.flops / ours.median_us / 1e6, 3)}
    return Row("attention", label, case.bytes, ours, None, ceiling_gbps, others, ceiling="read")
