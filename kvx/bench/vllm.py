"""kvx bench vllm: chunks of vLLM's host memory to a disk and back by KvxTier, beside vLLM's own `fs` secondary tier.

Both are made by vLLM's factory and handed the jobs that its scheduler hands them, a job for each prompt, on the same bytes; they
take turns. Both write and read past the system's cache where the file system can (O_DIRECT), without a sync. KvxTier keeps a
checksum of every chunk and checks it, loads by way of memory of its own, and evicts; `fs` does none of these.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kvx.bench.harness import Timing, machine, summarise
from kvx.errors import Unsupported

TOTAL_BYTES = 128 << 20
CHUNKS = {"128 KiB": 128 << 10, "2 MiB": 2 << 20, "8 MiB": 8 << 20}  # 2 MiB: 16 tokens of a model of 8B in 16 bits
PROMPTS = (1, 8)
WAYS = ("store", "load")


@dataclass(frozen=True)
class VllmRow:
    chunk: str
    prompts: int  # that the chunks belong to, a job each
    way: str
    bytes: int
    ours: Timing
    fs: Timing

    @property
    def times(self) -> float:
        return self.fs.median_us / self.ours.median_us

    def __str__(self) -> str:
        us = self.ours.median_us
        return (
            f" {self.chunk:<8} {self.prompts} prompts  {self.way:<5} | {us / 1e3:7.1f} ms ({self.ours.p10_us / 1e3:.1f}-"
            f"{self.ours.p90_us / 1e3:.1f}) | {self.bytes / us / 1e3:5.2f} GB/s | {self.times:4.2f}x fs's "
            f"{self.bytes / self.fs.median_us / 1e3:.2f} GB/s"
        )


def measure(
    folder: Path | None = None,
    repeats: int = 7,
    total_bytes: int = TOTAL_BYTES,
    say: Callable[[str], object] = lambda line: None,  # each row, as soon as it is measured
) -> dict[str, Any]:
    rows = []
    for chunk, size in CHUNKS.items():
        for prompts in PROMPTS:
            samples = _samples(folder, repeats, size, total_bytes // size, prompts)
            for way in WAYS:
                ours, fs = (summarise(samples[name, way]) for name in ("kvx", "fs"))
                rows.append(VllmRow(chunk, prompts, way, total_bytes // size * size, ours, fs))
                say(str(rows[-1]))
    import vllm

    named = [{**asdict(r), "times_fs": r.times} for r in rows]
    load = f"{os.getloadavg()[0]:.1f} in the last minute, on {os.cpu_count()} cores"
    return {"bench": "vllm", "machine": machine("cpu"), "vllm": vllm.__version__, "load": load, "rows": named}


def show(result: dict[str, Any]) -> str:
    least = min(result["rows"], key=lambda r: r["times_fs"])
    return (
        f" beside vllm {result['vllm']}'s fs tier, at least {least['times_fs']:.2f}x of its speed "
        f"({least['chunk']}, {least['prompts']} prompts, {least['way']})"
    )


def _samples(folder: Path | None, repeats: int, size: int, num_chunks: int, prompts: int) -> dict[tuple[str, str], list[float]]:
    samples: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as path, _region(2 * num_chunks, size) as rows:
        rows[:num_chunks] = np.random.default_rng(7).integers(0, 256, (num_chunks, size), np.uint8)
        tiers = {name: make_tier(told, rows) for name, told in _settings(Path(path)).items()}
        for turn in range(repeats + 1):
            for name, tier in tiers.items():
                for way, us in _once(tier, rows, Path(path) / name, prompts).items():
                    if turn:  # the first is to warm up
                        samples.setdefault((name, way), []).append(us)
        for tier in tiers.values():
            tier.shutdown()
        tiers.clear()
    return samples


def _settings(path: Path) -> dict[str, dict[str, Any]]:
    kvx = {"type": "KvxTier", "module_path": "kvx.adapters.vllm.secondary_tier", "model": "bench-vllm"}
    return {
        "fs": {"type": "fs", "root_dir": f"{path}/fs"},
        "kvx": {**kvx, "tiers": [f"disk:{path}/kvx"], "timeout_s": 600},
    }


@contextmanager
def _region(num_chunks: int, size: int) -> Iterator[np.ndarray]:
    """As vLLM's shared region: it begins on a page, which O_DIRECT needs."""
    memory = mmap.mmap(-1, num_chunks * size)
    rows = np.frombuffer(memory, np.uint8).reshape(num_chunks, size)
    rows[:] = 0
    yield rows


def make_tier(tier: dict[str, Any], rows: np.ndarray) -> Any:
    """What vLLM's factory makes of a member of `secondary_tiers`."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
    except ImportError as error:
        raise Unsupported(f"kvx bench vllm needs vLLM 0.32: {error}. Run it where vLLM is installed.") from error
    spec = TieringOffloadingSpec(offloading_config(rows.shape[1]))
    return SecondaryTierFactory.create_secondary_tier(tier, memoryview(rows.view(np.int8).data), spec)


def offloading_config(chunk_bytes: int) -> Any:
    """As vLLM tells its tiers of a model with 32 layers, on one rank."""
    from vllm.v1.kv_offload import config as told

    parallel = told.OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0, data_parallel_size=1,
        data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    return told.OffloadingConfig(
        groups=(told.OffloadingGroupConfig(16, tuple(f"model.layers.{n}.self_attn.attn" for n in range(32)), 0),),
        worker_kv_bytes_per_block=chunk_bytes, enable_kv_cache_events=False, extra_config={"cpu_bytes_to_use": 1 << 30},
        engine_id="kvx-bench", model=told.OffloadingModelConfig("bench", "bfloat16"), cache=told.OffloadingCacheConfig(16, 1),
        parallel=parallel, kv_cache_layout="LBHNC",
    )  # fmt: skip


def _once(tier: Any, rows: np.ndarray, path: Path, prompts: int) -> dict[str, float]:
    """Microseconds of each way. The first half of the rows goes out, and comes back into the second."""
    half, found = len(rows) // 2, {}
    rows[half:] = 0
    begin = perf_counter()
    _run(tier, half, prompts, is_load=False)
    found["store"] = (perf_counter() - begin) * 1e6
    _drop(path)  # of a file system without O_DIRECT
    begin = perf_counter()
    _run(tier, half, prompts, is_load=True)
    found["load"] = (perf_counter() - begin) * 1e6
    if not np.array_equal(rows[:half], rows[half:]):
        raise AssertionError(f"{tier.tier_type}: a chunk did not come back as it was")
    for file in (*path.rglob("*.bin"), *path.rglob("*.kvx")):
        file.unlink()
    return found


def _run(tier: Any, num_chunks: int, prompts: int, *, is_load: bool) -> None:
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob

    waiting = set()
    for job, chunks in enumerate(np.array_split(np.arange(num_chunks, dtype=np.int32), min(prompts, num_chunks))):
        keys = [make_offload_key(int(n).to_bytes(32, "little"), 0) for n in chunks]
        ids = chunks + num_chunks if is_load else chunks
        waiting.add(job)
        (tier.submit_load if is_load else tier.submit_store)(TransferJob(job, keys, ids, is_load, ReqContext(str(job))))
    while waiting:
        for done in tier.get_finished_jobs():
            if not done.success:
                raise AssertionError(f"{tier.tier_type}: chunks were not kept or not found")
            waiting.remove(done.job_id)
        time.sleep(0.0005)  # as a scheduler's step: the threads need the interpreter too


def _drop(path: Path) -> None:
    """Files out of memory: what is read next comes from the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
