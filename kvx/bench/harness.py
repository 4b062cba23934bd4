"""Timing, ceilings and result files. One bench file an op supplies cases; everything about measuring stands here.

On a GPU a graph of 20 or more calls is replayed over rotating buffers several times the size of L2, so that launches do not
count and caches are cold; ceilings are a plain device copy measured the same way in the same run. On the CPU the ceiling is
memcpy by as many threads as the op may use.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.ops import native

LAYOUTS = {"NHD": kvx.NHD, "HND": kvx.HND, "fused": "block token head (kv dim)", "latent": "block token (head kv dim)"}
COLD_BYTES = 512 << 20  # footprint of the rotating buffers; an H200 has 60 MB of L2
GRAPH_CALLS = 20


@dataclass(frozen=True)
class Timing:
    median_us: float
    p10_us: float
    p90_us: float
    repeats: int


@dataclass(frozen=True)
class Row:
    """One line of a bench."""

    op: str
    case: dict[str, Any]
    bytes: int  # read and written, each once
    ours: Timing
    torch: Timing | None
    ceiling_gbps: float
    others: dict[str, Timing] = field(default_factory=dict)
    ceiling: str = "copy"  # or "read": what the share is of

    @property
    def gbps(self) -> float:
        return self.bytes / self.ours.median_us / 1e3

    @property
    def share(self) -> float:
        return self.gbps / self.ceiling_gbps

    def __str__(self) -> str:
        case = " ".join(f"{k}={v}" for k, v in self.case.items())
        t = self.ours
        text = f" {self.op} {case} | {t.median_us:9.2f} us ({t.p10_us:.2f}-{t.p90_us:.2f})"
        text += f" | {self.gbps / 1e3:5.3g} TB/s | {self.share:4.0%} of {self.ceiling}"
        if self.torch is not None:
            text += f" | torch {self.torch.median_us:.1f} us"
        return text + "".join(f" | {name} {t.median_us:.1f} us" for name, t in self.others.items())


def summarise(samples_us: Sequence[float]) -> Timing:
    ordered = sorted(samples_us)
    n = len(ordered)
    return Timing(statistics.median(ordered), ordered[n // 10], ordered[min(n - 1, n * 9 // 10)], n)


def time_cuda(calls: Sequence[Callable[[], object]], repeats: int = 30) -> Timing:
    """Microseconds a call. `calls` do the same work on different buffers; together they exceed L2."""
    rounds = max(1, -(-GRAPH_CALLS // len(calls)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return summarise(samples)


def time_host(call: Callable[[], object], *, seconds: float = 1.0, inner: int = 1) -> Timing:
    """Microseconds a call, over about `seconds`; `inner` calls between two readings of the clock."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 5:
        start = time.perf_counter()
        for _ in range(inner):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / inner)
    return summarise(samples)


def time_calls(calls: Sequence[Callable[[], object]], device: str) -> Timing:
    if device == "cuda":
        return time_cuda(calls)
    turn = iter(range(10**9))
    return time_host(lambda: calls[next(turn) % len(calls)]())


def copy_ceiling_gbps(device: str) -> float:
    """A plain copy, bytes read plus bytes written: 1 GiB on a device, 256 MiB by all threads on the host."""
    if device == "cuda":
        a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        b = torch.empty_like(a)
        # Not through a graph: a captured copy becomes a memcpy node, which runs on a slower engine.
        samples = []
        for _ in range(20):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            b.copy_(a)
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
        return 2 * a.numel() / summarise(samples).median_us / 1e3
    a, b = torch.ones(256 << 20, dtype=torch.uint8), torch.ones(256 << 20, dtype=torch.uint8)
    times = [
        time_host(call).median_us for call in (lambda: memcpy_threads(b, a), lambda: b.copy_(a))
    ]  # libc's and torch's: the faster
    return 2 * a.numel() / min(times) / 1e3


def read_ceiling_gbps(device: str) -> float:
    """Reading alone: torch's sum and amax over 1 GiB on a device, or those and libc's memchr over 512 MiB by all threads of the
    host, whichever is fastest.

    On the host the tenth percentile: a call lasts as long as its slowest thread, and other programs take time from threads."""
    x = torch.ones((1 << 30) // (8 if device == "cuda" else 16), dtype=torch.float64, device=device)
    if device == "cuda":
        calls = (x.view(torch.float32).sum, x.view(torch.float32).amax, x.view(torch.bfloat16).amax)
        best = min(time_cuda([call]).median_us for call in calls)
    else:
        best = min(time_host(call).p10_us for call in (x.sum, x.amax, lambda: memchr_threads(x)))
    return x.numel() * x.element_size() / best / 1e3


_pool: dict[int, ThreadPoolExecutor] = {}


def memcpy_threads(dst: Tensor, src: Tensor) -> None:
    """libc's memcpy on equal slices, one a thread (ctypes lets go of the interpreter lock)."""
    _each_slice(src, 1, lambda at, size: ctypes.memmove(dst.data_ptr() + at, src.data_ptr() + at, size))


def memchr_threads(x: Tensor) -> None:
    """libc's memchr for a byte that is not in x, on several slices a thread: all of it is read, and nothing is written."""
    memchr = ctypes.CDLL(None).memchr
    memchr.restype, memchr.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    _each_slice(x, 4, lambda at, size: memchr(x.data_ptr() + at, 0x55, size))


def _each_slice(x: Tensor, slices: int, f: Callable[[int, int], object]) -> None:
    """f(first byte, bytes) on equal slices of x's memory, `slices` a thread."""
    threads = native.INFO.max_threads if native.INFO else 1
    pool = _pool.setdefault(threads, ThreadPoolExecutor(threads))
    size = x.numel() * x.element_size()
    step = -(-size // (threads * slices)) // 4096 * 4096 + 4096
    list(pool.map(lambda at: f(at, min(step, size - at)), range(0, size, step)))


def machine(device: str) -> dict[str, Any]:
    info = native.INFO
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cpu": cpu,
        "threads": info.max_threads if info else 1,
        "simd": info.simd if info else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_archs": info.cuda_archs if info else "",
        "python": platform.python_version(),
        "kvx": kvx.__version__,
        "commit": _commit(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def headline(device: str) -> str:
    m = machine(device)
    where = m["gpu"] or f"{m['cpu']} x {m['threads']} threads, {m['simd']}"
    cold = "L2 cold, graphs of 20 calls" if device == "cuda" else "buffers past the caches"
    return f"{where} · torch {m['torch']} · kvx {m['commit']} · {cold} · median (p10-p90)"


def result(name: str, device: str, rows: Sequence[Row], ceilings_gbps: dict[str, float]) -> dict[str, Any]:
    """What a result file holds."""
    return {
        "bench": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"kvx bench {name} --device {device}",
        "machine": machine(device),
        **{f"{kind}_ceiling_gbps": gbps for kind, gbps in ceilings_gbps.items()},
        "rows": [{**asdict(r), "gbps": r.gbps, f"share_of_{r.ceiling}": r.share} for r in rows],
    }
