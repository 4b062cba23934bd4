"""kvx bench tiers: blocks out of a cache into a tier and back, converted on the way, beside the same bytes moved as they are.

Of host memory the plain transfer is a copy: on a GPU cudaMemcpyAsync between it and pinned memory, which is the link; on a CPU
the tier's own. Of a disk it is the tier's own put and get of blocks that nobody converts; files are synced, and read after their
pages are dropped from the system's cache. The two take turns. Medians count; the best of both, which what else runs on a machine
touches least, stand beside them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.bench.harness import Timing, machine, summarise
from kvx.handover import NEUTRAL
from kvx.tiers import Block, BlockKind, DiskTier, HostTier, Mover, Tier, block_spec
from kvx.tiers.block_file import file_bytes
from kvx.tiers.memory import HostMemory

FORMATS = ("bf16", "fp8_e4m3_per_token_head_inline")
BLOCK_SIZES = {"cpu": (16,), "cuda": (16, 64)}
BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # of the cache
MOST_DISK_BYTES = 512 << 20  # of it that go to a disk
IN_FLIGHT = {"cpu": 128 << 20, "cuda": 256 << 20}  # half of the cache at most


@dataclass(frozen=True)
class TierRow:
    tier: str
    way: str  # "offload" or "onboard"
    format: str  # in the tier; the cache is bf16
    block_size: int
    tokens: int
    bytes: int  # as the tier keeps them
    ours: Timing
    plain: Timing

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.ours.median_us * 1e6

    @property
    def share(self) -> float:
        """Of the plain transfer's speed."""
        return self.plain.median_us / self.ours.median_us

    @property
    def best_share(self) -> float:
        return self.plain.p10_us / self.ours.p10_us

    def __str__(self) -> str:
        us, plain_us = self.ours.median_us, self.plain.median_us
        return (
            f" {self.tier} {self.way} bf16 -> {self.format:<30} block={self.block_size} | {us / 1e3:7.1f} ms "
            f"({self.ours.p10_us / 1e3:.1f}-{self.ours.p90_us / 1e3:.1f}) | {self.tokens_per_s / 1e6:6.3f} M tokens/s | "
            f"{self.bytes / us / 1e3:6.2f} GB/s | {self.share:4.0%} of plain {self.bytes / plain_us / 1e3:.2f} GB/s, "
            f"best {self.best_share:.0%}"
        )


def measure(
    device: str = "cpu",
    folder: Path | None = None,
    repeats: int = 11,
    num_bytes: int = 0,
    say: Callable[[str], object] = lambda line: None,  # each row, as soon as it is measured
) -> dict[str, Any]:
    """Every tier, way, format and block size; and how many times the tokens fp8 moves."""
    rows: list[TierRow] = []
    for block_size in BLOCK_SIZES[device]:
        spec = kvx.CacheSpec(
            1, block_size, 8, 128, num_layers=32, layout="layer kv | block token head dim", format="bf16", model="bench"
        )
        spec = replace(spec, num_blocks=max(4, (num_bytes or BYTES[device]) // BlockKind.of(spec).num_bytes))
        cache = kvx.allocate_buffers(spec, device)
        for t in cache:
            t.view(torch.bfloat16).normal_()
        for format in FORMATS:
            for tier in ("host", "disk"):
                for row in _rows(tier, cache, spec, format, folder, repeats, device):
                    rows.append(row)
                    say(str(row))
    times = {}
    for tier, way, block_size in dict.fromkeys((r.tier, r.way, r.block_size) for r in rows):
        plain, fp8 = (r for r in rows if (r.tier, r.way, r.block_size) == (tier, way, block_size))
        times[f"{tier} {way} block={block_size}"] = fp8.tokens_per_s / plain.tokens_per_s
    named = [{**asdict(r), "tokens_per_s": r.tokens_per_s, "share": r.share, "best_share": r.best_share} for r in rows]
    return {"bench": "tiers", "machine": machine(device), "rows": named, "fp8_times_bf16": times}


def show(result: dict[str, Any]) -> str:
    """What all rows together say. measure() said each."""
    times = ", ".join(f"{k} {v:.2f}x" for k, v in result["fp8_times_bf16"].items())
    return f" fp8 moves as many times the tokens of bf16: {times}"


def _rows(
    name: str, cache: list[Tensor], spec: kvx.CacheSpec, format: str, folder: Path | None, repeats: int, device: str
) -> Iterator[TierRow]:
    kept = block_spec(replace(spec, layout=NEUTRAL, format=format))
    kind = BlockKind.of(kept)
    n = spec.num_blocks if name == "host" else max(2, min(spec.num_blocks, MOST_DISK_BYTES // kind.num_bytes))
    names, blocks = [i.to_bytes(8, "little") for i in range(n)], list(range(n))
    with _open(name, kind, n, folder, device) as tier:
        mover = Mover(cache, spec, [tier], kept=kept, max_in_flight_bytes=IN_FLIGHT[device])
        with mover:
            _check(mover, cache, spec, names)
            plain = _plain(name, tier, mover, names, cache[0].device)
            sync = torch.cuda.synchronize if device == "cuda" else _nothing

            def offload() -> None:
                assert mover.offload(names, blocks).result() == n

            def onboard() -> None:
                assert mover.onboard(names, blocks) == n

            ours: dict[str, Callable[[], object]] = {"offload": offload, "onboard": onboard}
            samples: dict[tuple[str, str], list[float]] = {(a, b): [] for a in ("ours", "plain") for b in ours}
            for turn in range(repeats + 1):
                for whose, calls in (("plain", plain), ("ours", ours)):
                    for way, call in calls.items():  # out, then back
                        _cool(tier)
                        sync()
                        begin = perf_counter()
                        call()
                        sync()
                        if turn:  # the first is to warm up
                            samples[whose, way].append((perf_counter() - begin) * 1e6)
                    tier.drop(names).result()
    for way in ours:
        timings = (summarise(samples[whose, way]) for whose in ("ours", "plain"))
        yield TierRow(name, way, format, spec.block_size, n * spec.block_size, n * kind.num_bytes, *timings)


def _plain(name: str, tier: Tier, mover: Mover, names: list[bytes], device: torch.device) -> dict[str, Callable[[], object]]:
    """The same bytes, as they are, either way."""
    n = len(names)
    if name == "host" and device.type == "cuda":
        size = n * tier.kind.num_bytes
        there = torch.empty(size, dtype=torch.uint8, device=device)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return {
            "offload": lambda: here.copy_(there, non_blocking=True),
            "onboard": lambda: there.copy_(here, non_blocking=True),
        }
    memory = HostMemory(tier.kind)  # not the tier's own: it copies
    held = memory.take(n)
    for block in held:
        block.buffers[0].random_()
    step = mover.area_blocks

    def parts() -> Iterator[tuple[list[bytes], list[Block]]]:
        for start in range(0, n, step):
            yield names[start : start + step], held[start : start + step]

    def put() -> None:
        waits = [tier.put(keys, blocks) for keys, blocks in parts()]
        assert sum(sum(w.result()) for w in waits) == n

    def get() -> None:
        waits = [tier.get(keys, blocks) for keys, blocks in parts()]
        assert all(block is not None for w in waits for block in w.result())

    return {"offload": put, "onboard": get}


def _check(mover: Mover, cache: list[Tensor], spec: kvx.CacheSpec, names: list[bytes]) -> None:
    """Half the blocks go out and come back in the place of the other half: the same bytes, or as near as the format is."""
    half = len(names) // 2
    layers = [t.view(torch.bfloat16).view(spec.num_blocks, -1, spec.head_dim) for t in (cache[0], cache[-1])]
    assert mover.offload(names[:half], range(half)).result() == half
    assert mover.onboard(names[:half], range(half, 2 * half)) == half
    mover.settle()
    for t in layers:
        for n in range(0, half, max(1, half // 8)):
            a, b = t[n].float(), t[half + n].float()
            most = a.abs().amax(-1, keepdim=True)
            near = 0.0 if mover.kept.of_kv.format == spec.format else 2.0**-4  # half a step of e4m3's three bits
            if not bool(((a - b).abs() <= near * most).all()):
                raise AssertionError(f"block {n} did not come back as it was")
    mover.tiers[0].drop(names[:half]).result()


@contextmanager
def _open(name: str, kind: BlockKind, n: int, folder: Path | None, device: str) -> Iterator[Tier]:
    if name == "host":
        with HostTier(kind, n * kind.num_bytes, pin_memory=device == "cuda") as tier:
            yield tier
        return
    room = (n + 16) * file_bytes(kind)  # files that are being written count twice for a moment
    with tempfile.TemporaryDirectory(dir=folder) as path, DiskTier(path, kind, room, fsync=True) as disk:
        yield disk


def _cool(tier: Tier) -> None:
    """Files out of memory: what is read next comes from the disk."""
    if isinstance(tier, DiskTier) and tier.fsync and hasattr(os, "posix_fadvise"):
        for path in tier.path.glob("??/*.kvx"):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _nothing() -> None:
    return None
