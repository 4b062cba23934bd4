"""kvx bench sglang: pages of SGLang's host pools to a disk and back by KvxStorage, beside SGLang's own `file` backend.

Both do what SGLang's controller has them do: `file` is handed flat pages that the pool makes, KvxStorage indices. Both write files
without a sync, and read them twice: out of the system's cache, and after they were dropped from it. They take turns. KvxStorage
keeps a checksum of every page and checks it; `file` has none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvx.bench.harness import Timing, machine, summarise
from kvx.errors import Unsupported

LAYERS, HEADS, DIM, PAGE = 32, 8, 128, 64  # 8 MiB a page
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
# In the store: as the pool has it, canonical, and in half the bits.
KEPT: dict[str, dict[str, str]] = {
    "as written": {},
    "canonical": {"layout": "canonical"},
    "fp8": {"format": "fp8_e4m3_per_token_head_inline"},
}
WAYS = ("set", "get, cached", "get, cold")


@dataclass(frozen=True)
class SglangRow:
    layout: str  # of the host pool
    backend: str  # "file", or how KvxStorage keeps a page
    way: str
    bytes: int  # of the pool's pages
    ours: Timing
    file: Timing

    @property
    def times(self) -> float:
        return self.file.median_us / self.ours.median_us

    def __str__(self) -> str:
        us = self.ours.median_us
        return (
            f" {self.layout:<17} {self.backend:<10} {self.way:<11} | {us / 1e3:7.1f} ms ({self.ours.p10_us / 1e3:.1f}-"
            f"{self.ours.p90_us / 1e3:.1f}) | {self.bytes / us / 1e3:5.2f} GB/s | {self.times:4.2f}x file's "
            f"{self.bytes / self.file.median_us / 1e3:.2f} GB/s"
        )


def measure(
    folder: Path | None = None,
    repeats: int = 7,
    num_pages: int = 32,
    say: Callable[[str], object] = lambda line: None,  # each row, as soon as it is measured
) -> dict[str, Any]:
    rows = []
    for layout in LAYOUTS:
        samples: dict[tuple[str, str], list[float]] = {}
        with tempfile.TemporaryDirectory(dir=folder) as path:
            pool = _pool(layout, num_pages)
            backends = {name: _backend(pool, name, Path(path) / name) for name in ("file", *KEPT)}
            for turn in range(repeats + 1):
                for name, backend in backends.items():
                    for way, us in _once(pool, name, backend, Path(path) / name, num_pages).items():
                        if turn:  # the first is to warm up
                            samples.setdefault((name, way), []).append(us)
            for name in KEPT:
                backends[name].close()
        size = num_pages * 2 * LAYERS * PAGE * HEADS * DIM * 2
        for name in KEPT:
            for way in WAYS:
                rows.append(
                    SglangRow(layout, name, way, size, summarise(samples[name, way]), summarise(samples["file", way]))
                )  # fmt: skip
                say(str(rows[-1]))
    import sglang

    named = [{**asdict(r), "times_file": r.times} for r in rows]
    return {"bench": "sglang", "machine": machine("cpu"), "sglang": sglang.__version__, "rows": named}


def show(result: dict[str, Any]) -> str:
    least = min(result["rows"], key=lambda r: r["times_file"])
    return (
        f" beside sglang {result['sglang']}'s file backend, at least {least['times_file']:.2f}x of its speed "
        f"({least['layout']}, {least['backend']}, {least['way']})"
    )


def _pool(layout: str, num_pages: int) -> Any:
    """A host pool with numbers in it, twice as large as what goes out: pages come back elsewhere."""
    try:
        from sglang.srt.mem_cache import memory_pool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    except ImportError as error:
        raise Unsupported(f"kvx bench sglang needs SGLang: {error}. Run it where SGLang is installed.") from error
    device = memory_pool.MHATokenToKVPool(
        size=PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    made = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 1.0, 0, PAGE, layout, pin_memory=False, device="cpu",
        device_capacity_tokens=PAGE, start_layer=0, end_layer=LAYERS - 1, host_token_capacity=(2 * num_pages + 1) * PAGE,
    )  # fmt: skip
    made.kv_buffer.view(torch.int16).random_(0, 1 << 14)
    return made


def _backend(pool: Any, name: str, path: Path) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    told: dict[str, Any] = {"file_storage_path": str(path)}
    if name != "file":
        told = {
            "backend_name": "kvx", "module_path": "kvx.adapters.sglang.storage", "class_name": "KvxStorage", "interface_v1": 1,
            "tiers": [f"disk:{path}"], "model": "bench-sglang", "timeout_s": 600, **KEPT[name],
        }  # fmt: skip
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="bench", extra_config=told,
    )  # fmt: skip
    made = StorageBackendFactory.create_backend("file" if name == "file" else "dynamic", config, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def _once(pool: Any, name: str, backend: Any, path: Path, num_pages: int) -> dict[str, float]:
    """Microseconds of each way."""
    keys = [f"{n:064x}" for n in range(num_pages)]
    there = torch.arange(num_pages * PAGE)
    here = there + num_pages * PAGE

    def put() -> bool:
        if name != "file":
            return all(backend.batch_set_v1(keys, there))
        return bool(backend.batch_set(keys, [pool.get_data_page(int(i)) for i in there[::PAGE]]))

    def get() -> bool:
        if name != "file":
            return all(backend.batch_get_v1(keys, here))
        pages = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for i, page in zip(here[::PAGE].tolist(), pages, strict=True):
            pool.set_from_flat_data_page(i, page)
        return True

    found = {}
    for way, call in zip(WAYS, (put, get, get), strict=True):
        if way == "get, cold":
            _drop(path)
        begin = perf_counter()
        done = call()
        found[way] = (perf_counter() - begin) * 1e6
        if not done:
            raise AssertionError(f"{name}: a page of {pool.layout} was not kept or not found")
    if name in ("file", "as written", "canonical"):
        _check(pool, there, here)
    for file in path.rglob("*.bin" if name == "file" else "*.kvx"):
        file.unlink()
    return found


def _check(pool: Any, there: torch.Tensor, here: torch.Tensor) -> None:
    for a, b in ((there[0], here[0]), (there[-PAGE], here[-PAGE])):
        if not torch.equal(pool.get_data_page(int(a)), pool.get_data_page(int(b))):
            raise AssertionError("a page did not come back as it was")


def _drop(path: Path) -> None:
    """Files out of memory: what is read next comes from the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
