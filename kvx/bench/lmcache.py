"""kvx bench lmcache: LMCache's chunks to a disk and back by KvxStoragePlugin, beside LMCache's own local disk backend.

Both are made by LMCache's own launcher and called as its storage manager calls them: a batch of chunks at once, into memory of
LMCache's CPU backend. Both write files without a sync, and read them three times: out of the system's cache, again, and after they
were dropped from it. They take turns. KvxStoragePlugin keeps a checksum of every chunk and checks it, but not again while the file
is cached and unchanged; and another process finds it. The local disk backend does neither: its index is in memory. What the
checksums alone take is measured too.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

from kvx.bench.harness import Timing, machine, summarise
from kvx.errors import Unsupported
from kvx.tiers.block_file import CHECKSUMS, checksum

LAYERS, HEADS, DIM, CHUNK = 32, 8, 128, 256  # 32 MiB a chunk, LMCache's default of 256 tokens
# In the store: as LMCache has it, canonical, and in half the bits.
KEPT: dict[str, dict[str, str]] = {
    "as written": {},
    "canonical": {"kvx.layout": "canonical"},
    "fp8": {"kvx.format": "fp8_e4m3_per_token_head_inline"},
}
DISK = "local disk"
WAYS = ("put", "get, cached", "get, again", "get, cold")


@dataclass(frozen=True)
class LmcacheRow:
    backend: str  # how KvxStoragePlugin keeps a chunk
    way: str
    bytes: int  # of LMCache's chunks
    ours: Timing
    disk: Timing  # LMCache's own

    @property
    def times(self) -> float:
        return self.disk.median_us / self.ours.median_us

    def __str__(self) -> str:
        us, disk_us = self.ours.median_us, self.disk.median_us
        return (
            f" {self.backend:<10} {self.way:<11} | {us / 1e3:7.1f} ms ({self.ours.p10_us / 1e3:.1f}-"
            f"{self.ours.p90_us / 1e3:.1f}) | {self.bytes / us / 1e3:5.2f} GB/s | {self.times:4.2f}x local disk's "
            f"{self.bytes / disk_us / 1e3:.2f} GB/s"
        )


def measure(
    folder: Path | None = None,
    repeats: int = 7,
    num_chunks: int = 8,
    say: Callable[[str], object] = lambda line: None,  # each row, as soon as it is measured
) -> dict[str, Any]:
    samples: dict[tuple[str, str], list[float]] = {}
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with tempfile.TemporaryDirectory(dir=folder) as path:
        made = {name: _backends(name, Path(path) / name, num_chunks, loop) for name in (DISK, *KEPT)}
        for turn in range(repeats + 1):
            for name, backends in made.items():
                for way, us in _once(name, backends, Path(path) / name, num_chunks).items():
                    if turn:  # the first is to warm up
                        samples.setdefault((name, way), []).append(us)
        for backends in made.values():
            for backend in backends.values():
                backend.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    size, rows = num_chunks * 2 * LAYERS * CHUNK * HEADS * DIM * 2, []
    for name in KEPT:
        for way in WAYS:
            rows.append(LmcacheRow(name, way, size, summarise(samples[name, way]), summarise(samples[DISK, way])))
            say(str(rows[-1]))
    from importlib.metadata import version

    named = [{**asdict(r), "times_disk": r.times} for r in rows]
    checks = asdict(summarise(samples[DISK, "checksums"]))
    return {"bench": "lmcache", "machine": machine("cpu"), "lmcache": version("lmcache"), "checksums": checks, "rows": named}


def show(result: dict[str, Any]) -> str:
    least = min(result["rows"], key=lambda r: r["times_disk"])
    return (
        f" beside lmcache {result['lmcache']}'s local disk backend, at least {least['times_disk']:.2f}x of its speed "
        f"({least['backend']}, {least['way']}). Checksums of the same bytes take {result['checksums']['median_us'] / 1e3:.1f} ms."
    )


def _backends(name: str, path: Path, num_chunks: int, loop: Any) -> Any:
    try:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend import CreateStorageBackends
    except ImportError as error:
        raise Unsupported(f"kvx bench lmcache needs LMCache: {error}. Run it where LMCache is installed.") from error
    room_gb = (2 * num_chunks + 2) * 2 * LAYERS * CHUNK * HEADS * DIM * 2 / 2**30
    told: dict[str, Any] = {"chunk_size": CHUNK, "local_cpu": False, "max_local_cpu_size": room_gb}
    if name == DISK:
        told |= {"local_disk": str(path), "max_local_disk_size": 100.0}
    else:
        told |= {
            "storage_plugins": ["kvx"],
            "extra_config": {
                "storage_plugin.kvx.module_path": "kvx.adapters.lmcache", "storage_plugin.kvx.class_name": "KvxStoragePlugin",
                "kvx.tiers": [f"disk:{path}"], "kvx.model": "bench-lmcache", "kvx.timeout_s": 600, **KEPT[name],
            },
        }  # fmt: skip
    metadata = LMCacheMetadata(
        model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, CHUNK, HEADS, DIM), chunk_size=CHUNK,
    )  # fmt: skip
    return CreateStorageBackends(LMCacheEngineConfig.from_defaults(**told), metadata, loop, "cpu")


def _once(name: str, backends: Any, path: Path, num_chunks: int) -> dict[str, float]:
    """Microseconds of each way."""
    from lmcache.utils import CacheEngineKey

    cpu, backend = backends["LocalCPUBackend"], backends["LocalDiskBackend" if name == DISK else "kvx"]
    keys = [CacheEngineKey("bench", 1, 0, n + 1, torch.bfloat16) for n in range(num_chunks)]
    shape = torch.Size([2, LAYERS, CHUNK, HEADS * DIM])
    objects = [cpu.allocate(shape, torch.bfloat16) for _ in keys]
    for obj in objects:
        obj.tensor.view(torch.int16).random_(0, 1 << 14)
    found = {}
    for way in WAYS:
        if way == "get, cold":
            _drop(path)
        begin = perf_counter()
        came = _put(backend, keys, objects) if way == "put" else backend.batched_get_blocking(keys)
        found[way] = (perf_counter() - begin) * 1e6
        if None in came:
            raise AssertionError(f"{name}: a chunk was not kept or not found")
        if way != "put":
            if name != "fp8" and not all(torch.equal(a.tensor, b.tensor) for a, b in zip(came, objects, strict=True)):
                raise AssertionError(f"{name}: a chunk did not come back as it was")
            for obj in came:
                obj.ref_count_down()
    if name == DISK:
        parts = [obj.raw_data[: obj.get_size()].numpy().data for obj in objects]
        with ThreadPoolExecutor(4) as threads:  # as many as read and write
            begin = perf_counter()
            list(threads.map(lambda part: checksum(max(CHECKSUMS), [part]), parts))
            found["checksums"] = (perf_counter() - begin) * 1e6
    for obj in objects:
        obj.ref_count_down()
    backend.batched_remove(keys)
    return found


def _put(backend: Any, keys: list[Any], objects: list[Any]) -> list[Any]:
    """Until all of them are written."""
    for future in backend.batched_submit_put_task(keys, objects) or ():
        future.result()
    while any(map(backend.exists_in_put_tasks, keys)):
        sleep(0.0002)
    return [backend.contains(key) or None for key in keys]


def _drop(path: Path) -> None:
    """Files out of memory: what is read next comes from the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
