"""kvx bench wires: blocks converted on their way over a wire or to disk, beside the same bytes moved as they are, by turns.

Two processes. One has a paged cache in an engine's layout and converts it, some blocks at a time, into a ring of neutral blocks;
the other pulls them meanwhile. "Raw" is the same ring and the same words between them, without the conversion. Where no
wire is installed, the disk alone is measured.

    cache --convert--> ring [ chunk k+1 | chunk k ] --READ--> memory of the other process
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvx.bench.harness import machine
from kvx.errors import BadArgument, InternalError
from kvx.handover.facts import NEUTRAL
from kvx.handover.memory import new_buffers
from kvx.layout.buffers import allocate_buffers
from kvx.layout.plan import ByteRun, plan
from kvx.ops.move.convert import bind
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, DiskTier
from kvx.tiers.block_file import file_bytes
from kvx.wires.nixl.agent import NixlAgent, Remote
from kvx.wires.wire import Deadline

CHUNK = 8  # blocks that are converted and moved together
RING = 4  # chunks: as far as the conversion may be ahead
ENGINE = "layer kv | block token head dim"
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class WireRow:
    """One path: seconds of each turn."""

    path: str
    num_tokens: int
    raw_bytes: int
    bytes: int  # that moved, converted
    raw_s: list[float]
    converted_s: list[float]

    @property
    def share(self) -> float:
        """Of the raw transfer's tokens per second."""
        return statistics.median(self.raw_s) / statistics.median(self.converted_s)

    @property
    def best_share(self) -> float:
        return min(self.raw_s) / min(self.converted_s)

    def __str__(self) -> str:
        raw, converted = (statistics.median(s) for s in (self.raw_s, self.converted_s))
        return (
            f" {self.path:<24} | raw {self.raw_bytes / raw / 1e9:5.2f} GB/s {self.num_tokens / raw / 1e3:6.1f} ktok/s"
            f" | converted {self.bytes / converted / 1e9:5.2f} GB/s {self.num_tokens / converted / 1e3:6.1f} ktok/s"
            f" | {self.share:4.0%} of raw (best turns {self.best_share:4.0%})"
        )


def spec_of(num_blocks: int) -> CacheSpec:
    """16 layers of 8 heads of 128, bf16: 1 MiB a block of 16 tokens."""
    return CacheSpec(num_blocks, 16, 8, 128, layout=ENGINE, format="bf16", num_layers=16, model="bench")


def neutral(spec: CacheSpec, num_blocks: int, format: str) -> CacheSpec:
    return replace(spec, layout=NEUTRAL, num_blocks=num_blocks, format=format)


def short(format: str) -> str:
    return format.removesuffix("_e4m3_per_token_head_inline")


def fill(spec: CacheSpec) -> list[Tensor]:
    """The same numbers in every process."""
    generator = torch.Generator().manual_seed(7)
    cache = allocate_buffers(spec)
    for t in cache:
        t.view(torch.int16).random_(-(2**14), 2**14, generator=generator)  # bf16 without NaN
    return cache


class Ring:
    """Chunks of neutral blocks, one after the other in one allocation, and the conversion into each."""

    def __init__(self, cache: list[Tensor], spec: CacheSpec, format: str) -> None:
        self.spec = neutral(spec, RING * CHUNK, format)
        self.buffers = list(new_buffers(self.spec))
        self.arena = self.buffers[0].as_strided((sum(t.numel() for t in self.buffers),), (1,))
        self.chunk_bytes = self.arena.numel() // RING
        there, back = plan(spec, self.spec), plan(self.spec, spec)
        chunks = [(_ids(k * CHUNK), _ids(k % RING * CHUNK)) for k in range(spec.num_blocks // CHUNK)]
        self._there = [bind(there, cache, self.buffers, src_blocks=a, dst_blocks=b) for a, b in chunks]
        self._back = [bind(back, self.buffers, cache, src_blocks=b, dst_blocks=a) for a, b in chunks]

    def convert(self, k: int) -> None:
        """Blocks of the cache into chunk k's place."""
        self._there[k].run()

    def restore(self, k: int) -> None:
        """Back into the cache."""
        self._back[k].run()

    def blocks(self, k: int) -> list[Tensor]:
        at = k % RING * CHUNK
        return self.buffers[at : at + CHUNK]


def _ids(first: int) -> Tensor:
    return torch.arange(first, first + CHUNK, dtype=torch.int32)


# ---- over a wire


def export(pipe: Connection, wire: str, num_blocks: int, formats: Sequence[str]) -> None:
    """The process that has the cache."""
    spec = spec_of(num_blocks)
    cache = fill(spec)
    rings = [Ring(cache, spec, f) for f in formats]
    link: Any = NixlAgent() if wire == "nixl" else _mooncake()
    look = link.progress if wire == "nixl" else lambda: None
    link.register([r.arena for r in rings])
    pipe.send((link.name, link.metadata() if wire == "nixl" else b"", [r.arena.data_ptr() for r in rings]))

    def heard() -> Any:
        while not pipe.poll(0.0002):
            look()  # NIXL moves on while somebody looks
        return pipe.recv()

    while (order := heard()) is not None:
        ring, is_raw = rings[order[0]], order[1]
        for k in range(num_blocks // CHUNK):
            if k >= RING:
                heard()  # chunk k - RING is pulled: its place is free
            if not is_raw:
                ring.convert(k)
            pipe.send(k)
        for _ in range(min(RING, num_blocks // CHUNK)):
            heard()
    link.close()


def _mooncake() -> Any:
    from kvx.wires.mooncake.engine import MooncakeEngine

    return MooncakeEngine()


class Importer:
    """The process that pulls."""

    def __init__(self, wire: str, num_blocks: int, formats: Sequence[str]) -> None:
        spec = spec_of(num_blocks)
        self.wire, self.num_chunks = wire, num_blocks // CHUNK
        self.block_bytes = [BlockKind.of(neutral(spec, 1, f)).num_bytes for f in formats]
        self.arena = torch.zeros(num_blocks * max(self.block_bytes), dtype=torch.uint8)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=export, args=(theirs, wire, num_blocks, tuple(formats)), daemon=True)
        with one_thread():
            self._child.start()
        if not self._pipe.poll(60):
            raise InternalError("kvx bench wires: the other process did not start within 60 s.")
        peer, metadata, addresses = self._pipe.recv()
        self._link: Any = NixlAgent() if wire == "nixl" else _mooncake()
        if wire == "nixl":
            self._link.add_peer(metadata)
        self._link.register([self.arena])
        self._remotes = [Remote(peer, (address,)) for address in addresses]

    def pull(self, ring: int, is_raw: bool) -> float:
        """Seconds of the whole cache."""
        size = self.block_bytes[ring]
        begin = time.perf_counter()
        self._pipe.send((ring, is_raw))
        for k in range(self.num_chunks):
            if not self._pipe.poll(TIMEOUT_S):
                raise InternalError("kvx bench wires: the other process said nothing for 30 s.")
            self._pipe.recv()
            here, there = k * CHUNK * size, k % RING * CHUNK * size
            runs = [ByteRun(0, there + n * size, 0, here + n * size, size) for n in range(CHUNK)]
            if self.wire == "nixl":
                self._link.read([self.arena], self._remotes[ring], runs, Deadline(TIMEOUT_S))
            else:
                self._link.read([self.arena], self._remotes[ring], runs)
            self._pipe.send(k)
        return time.perf_counter() - begin

    def check(self, ring: int, spec: CacheSpec, format: str) -> None:
        """What was pulled last is the conversion of the whole cache."""
        want = neutral(spec, spec.num_blocks, format)
        buffers = list(new_buffers(want))
        bind(plan(spec, want), fill(spec), buffers).run()
        got = self.arena[: spec.num_blocks * self.block_bytes[ring]].view(spec.num_blocks, -1)
        _same(f"{self.wire} {format}", [torch.equal(a, b) for a, b in zip(got, buffers, strict=True)])

    def close(self) -> None:
        self._pipe.send(None)
        self._child.join(10)
        self._link.close()


def over_wire(wire: str, num_blocks: int, formats: Sequence[str], repeats: int) -> list[WireRow]:
    spec = spec_of(num_blocks)
    importer = Importer(wire, num_blocks, formats)
    try:
        for n, format in enumerate(formats):
            importer.pull(n, is_raw=False)  # the first is slow: it connects
            importer.check(n, spec, format)
        seconds: dict[tuple[int, bool], list[float]] = {}
        for _ in range(repeats):
            for n in range(len(formats)):
                for is_raw in (True, False):
                    if n == 0 or not is_raw:
                        seconds.setdefault((n, is_raw), []).append(importer.pull(n, is_raw))
    finally:
        importer.close()
    tokens, raw = num_blocks * spec.block_size, num_blocks * importer.block_bytes[0]
    return [
        WireRow(
            f"{wire}, bf16 -> {short(f)}", tokens, raw, num_blocks * importer.block_bytes[n], seconds[0, True], seconds[n, False]
        )
        for n, f in enumerate(formats)
    ]


# ---- to disk


def to_disk(folder: Path, num_blocks: int, formats: Sequence[str], repeats: int) -> list[WireRow]:
    """A DiskTier's files, checksums and all. Writes by one thread while the next chunk is converted; reads likewise."""
    spec = spec_of(num_blocks)
    cache = fill(spec)
    rows: list[WireRow] = []
    raw: dict[str, list[float]] = {}
    for format in formats:
        kind = BlockKind.of(neutral(spec, 1, format))
        ring = Ring(cache, spec, format)
        seconds: dict[str, list[float]] = {"write": [], "read": []}
        for n in range(repeats + 1):  # the first is not counted
            for is_raw in (True, False) if format == formats[0] else (False,):
                into = raw if is_raw else seconds
                with tempfile.TemporaryDirectory(dir=folder) as path:
                    tier = DiskTier(path, kind, 2 * num_blocks * file_bytes(kind), threads=1)
                    with tier:
                        for what, call in (("write", _write), ("read", _read)):
                            took = call(tier, ring, num_blocks // CHUNK, is_raw)
                            if n:
                                into.setdefault(what, []).append(took)
        tokens, bf16 = num_blocks * spec.block_size, num_blocks * spec.block_size * spec.token_bytes * spec.num_layers
        for what in ("write", "read"):
            rows.append(
                WireRow(
                    f"disk {what}, bf16 -> {short(format)}", tokens, bf16, num_blocks * kind.num_bytes, raw[what], seconds[what]
                )
            )
    return rows


def _write(tier: DiskTier, ring: Ring, num_chunks: int, is_raw: bool) -> float:
    begin = time.perf_counter()
    pending: list[Future[Any]] = []
    for k in range(num_chunks):
        if k >= RING:
            pending[k - RING].result()
        if not is_raw:
            ring.convert(k)
        pending.append(tier.put(_keys(k), [tier.kind.block([t]) for t in ring.blocks(k)]))
    for future in pending[-RING:]:
        future.result()
    return time.perf_counter() - begin


def _read(tier: DiskTier, ring: Ring, num_chunks: int, is_raw: bool) -> float:
    """Converted here means: back into the engine's layout, while the next chunk is read."""
    begin = time.perf_counter()
    pending = [tier.get(_keys(k), [tier.kind.block([t]) for t in ring.blocks(k)]) for k in range(min(RING, num_chunks))]
    for k in range(num_chunks):
        if any(b is None for b in pending[k].result()):
            raise InternalError("kvx bench wires: the disk tier lost a block.")
        if not is_raw:
            ring.restore(k)
        if k + RING < num_chunks:
            pending.append(tier.get(_keys(k + RING), [tier.kind.block([t]) for t in ring.blocks(k)]))
    return time.perf_counter() - begin


def _keys(k: int) -> list[bytes]:
    return [(k * CHUNK + n).to_bytes(16, "little") for n in range(CHUNK)]


def _same(what: str, equal: list[bool]) -> None:
    if not all(equal):
        raise InternalError(f"kvx bench wires: {what}: {equal.count(False)} of {len(equal)} blocks are wrong.")


# ---- all of it


def measure(
    *,
    num_blocks: int = 128,
    repeats: int = 7,
    folder: Path | None = None,
    say: Callable[[str], object] = lambda line: None,  # rows, as soon as they are measured
) -> dict[str, Any]:
    if num_blocks < CHUNK or num_blocks % CHUNK or repeats < 1:
        raise BadArgument(
            f"kvx bench wires: {num_blocks} blocks, {repeats} turns; it must be a multiple of {CHUNK}, and 1 or more."
        )
    formats = ("bf16", "fp8_e4m3_per_token_head_inline")
    rows: list[WireRow] = []

    def keep(measured: list[WireRow]) -> None:
        rows.extend(measured)
        for row in measured:
            say(str(row))

    missing = [wire for wire in ("nixl", "mooncake") if importlib.util.find_spec(wire) is None]
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as path, one_thread(), ProcessPoolExecutor(1, spawn) as other:
        keep(other.submit(to_disk, Path(path), num_blocks, formats, repeats).result())
    for wire in ("nixl", "mooncake"):
        if wire not in missing:
            keep(over_wire(wire, num_blocks, formats, repeats))
    return {
        "bench": "wires",
        "machine": machine("cpu"),
        "block_bytes": 1 << 20,
        "chunk_blocks": CHUNK,
        "ring_chunks": RING,
        "not_installed": missing,
        "rows": [{**asdict(r), "share_of_raw": r.share, "best_share_of_raw": r.best_share} for r in rows],
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Processes that start here convert by one thread: another one moves the bytes meanwhile, and waits for no third."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def show(result: dict[str, Any]) -> str:
    """What is left to say: measure() said each row."""
    return "\n".join(f" {wire} is not installed" for wire in result["not_installed"])
