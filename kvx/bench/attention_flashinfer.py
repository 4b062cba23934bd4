"""FlashInfer beside our attention, where it is installed: the same caches, tables and queries, planned ahead of what is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

import kvx
from kvx.bench.harness import Timing, time_calls

if TYPE_CHECKING:
    from kvx.bench.attention import AttentionBatch, AttentionCase

_WORKSPACE = 512 << 20
_DIMS = (64, 128, 256)  # others it compiles for minutes when it is called, refuses, or (80) reads past their end


def flashinfer(case: AttentionCase, batches: list[AttentionBatch], softmax_scale: float | None) -> dict[str, Timing]:
    """{} where it is not installed or has no such cache: fused K|V, scales other than one a tensor, 656-byte records, other
    head sizes."""
    is_fp8 = case.format == "fp8_e4m3" and case.io != "f32" and not case.is_prefill and not case.rope
    is_one_type = is_fp8 or (case.format in ("bf16", "f16") and case.format == case.io)
    has_dims = case.rope > 0 or (case.dim in _DIMS and not case.v_dim)
    if find_spec("flashinfer") is None or case.layout == "fused" or not (is_one_type and has_dims):
        return {}
    plan = _mla if case.rope else _prefill if case.is_prefill else _decode
    try:
        calls = [plan(import_module("flashinfer"), case, b, softmax_scale) for b in batches]
        return {"flashinfer": time_calls(calls, "cuda")}
    except (RuntimeError, ValueError, NotImplementedError) as error:  # how it says that it does not take a shape
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"flashinfer does not take {case.label}: {why}", file=sys.stderr)  # --json has stdout
        return {}


def _types(case: AttentionCase) -> dict[str, torch.dtype]:
    return {"q_data_type": case.dtype, "kv_data_type": torch.float8_e4m3fn if case.format == "fp8_e4m3" else case.dtype}


def _workspace() -> torch.Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")


def _decode(library: Any, case: AttentionCase, b: AttentionBatch, _scale: float | None) -> Callable[[], Any]:
    csr = kvx.to_page_csr(b.table, case.block)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(_workspace(), case.layout, use_tensor_cores=True)
    wrapper.plan(
        csr.indptr, csr.indices, csr.last_page_len, case.heads, case.kv_heads, case.dim, case.block, **_types(case)
    )  # fmt: skip
    cache = tuple(c.view(_types(case)["kv_data_type"]) for c in b.storage.cache)
    return partial(wrapper.run, b.q, cache)


def _prefill(library: Any, case: AttentionCase, b: AttentionBatch, _scale: float | None) -> Callable[[], Any]:
    csr = kvx.to_page_csr(b.table, case.block)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(), case.layout)
    wrapper.plan(
        b.cu, csr.indptr, csr.indices, csr.last_page_len, case.heads, case.kv_heads, case.dim, case.block, causal=True,
        **_types(case),
    )  # fmt: skip
    return partial(wrapper.run, b.q, tuple(b.storage.cache))


def _mla(library: Any, case: AttentionCase, b: AttentionBatch, scale: float | None) -> Callable[[], Any]:
    csr = kvx.to_page_csr(b.table, case.block)
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(_workspace())
    wrapper.plan(
        b.cu, csr.indptr, csr.indices, b.table.seq_lens, case.heads, case.dim, case.rope, case.block, True, scale, case.dtype,
        case.dtype,
    )  # fmt: skip
    cache = b.storage.cache if isinstance(b.storage.cache, torch.Tensor) else b.storage.cache[0]
    rows = cache.view(cache.shape[0], case.block, case.dim + case.rope)
    return partial(wrapper.run, b.q[..., : case.dim], b.q[..., case.dim :], rows[..., : case.dim], rows[..., case.dim :])
