"""kvx bench hybrid: the ops of a hybrid cache in DeepSeek-V4's geometry, beside torch's own steps on the same numbers.

Where rows go in (append_swa, compress: kvx/bench/hybrid_rows.py) bytes are inputs once, rows and state written, and shares are of a
copy. Where they are read (index_scores, topk, attention_sparse: kvx/bench/hybrid_reads.py) shares are of reading. Calls of one
token a sequence are too small for a share to mean much; their time does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvx.bench.harness import COLD_BYTES, Row, time_calls
from kvx.bench.hybrid_reads import IndexScores, Sparse, Topk
from kvx.bench.hybrid_rows import AppendSwa, Compress

CEILINGS = ("copy", "read")
Case = AppendSwa | Compress | IndexScores | Topk | Sparse
MAX_SETS = 16  # that rotate; together they exceed L2


def cases(device: str) -> Iterator[Case]:
    yield from _flash() if device == "cuda" else _small()


def _flash() -> Iterator[Case]:
    yield AppendSwa(512, 128)
    for batch in (64, 256):
        yield AppendSwa(batch, 1)
    for io in ("f32", "bf16"):
        yield Compress("csa", 1, 8192, io)
    for io in ("f32", "bf16"):
        yield Compress("index", 1, 8192, io)
    for io in ("f32", "bf16"):
        yield Compress("hca", 1, 8192, io)
    for kind in ("csa", "hca"):
        for io in ("f32", "bf16"):
            yield Compress(kind, 4, 8192, io)
    for kind in ("csa", "index", "hca"):
        for batch in (64, 256):
            yield Compress(kind, batch, 1, "f32")
    yield IndexScores(8, 262144, "index_fp8", "e4m3")
    yield IndexScores(8, 262144, "index_mxfp4", "bf16")
    for k in (512, 1024):
        yield Topk(8, 262144, k)
    yield Sparse(128, 64, 512)
    yield Sparse(128, 128, 1024)
    yield Sparse(16, 64, 0, entries=8192, ratio=128)
    yield Sparse(16, 128, 0, entries=8192, ratio=128)


def _small() -> Iterator[Case]:
    """The same ops where a call takes milliseconds on a few cores."""
    yield AppendSwa(32, 128)
    yield AppendSwa(64, 1)
    for kind in ("csa", "index", "hca"):
        yield Compress(kind, 1, 1024, "f32")
        yield Compress(kind, 64, 1, "f32")
    yield IndexScores(2, 8192, "index_fp8", "e4m3")
    yield IndexScores(2, 8192, "index_mxfp4", "bf16")
    yield Topk(8, 65536, 512)
    yield Sparse(4, 64, 512, entries=1024)
    yield Sparse(2, 64, 0, entries=512, ratio=128)


def run(case: Case, device: str, ceiling_gbps: float) -> Row:
    count = min(MAX_SETS, max(2, COLD_BYTES // case.bytes)) if device == "cuda" else 2
    sets = [case.make(device, seed) for seed in range(count)]
    sets[0].check()
    ours = time_calls([s.call for s in sets], device)
    peers = [s.peer for s in sets if s.peer is not None]
    label: dict[str, Any] = case.label
    if case.flops:
        label = {**label, "tflops": round(case.flops / ours.median_us / 1e6, 3)}
    peer = time_calls(peers, device) if peers else None
    return Row(case.op, label, case.bytes, ours, peer, ceiling_gbps, ceiling=case.ceiling)
