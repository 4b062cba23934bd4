"""kvx bench cache: what a cache's decisions cost on the host, for requests and for lookups of prompts that are cached.

No tensor of any size moves. Where vLLM is installed its KVCacheManager does the same work beside, with the same hash function.
With states: kvx/bench/cache_states.py. On a GPU only that part is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np

import kvx
from kvx.bench import cache_states
from kvx.bench.harness import Timing, machine, summarise

BLOCK_SIZE = 16
NUM_BLOCKS = 16384
PROMPT, NEW, LOOKUP = 2048, 64, 4096
HASHES = ("", "sha256", "xxh3_128")  # "": no prefix cache


@dataclass(frozen=True)
class CacheRow:
    case: str
    hash: str
    ours: Timing
    vllm: Timing | None

    def __str__(self) -> str:
        t = self.ours
        name = f"{self.case} {self.hash or 'no prefix cache'}"
        text = f" cache {name:<42} | {t.median_us:8.1f} us ({t.p10_us:.1f}-{t.p90_us:.1f})"
        if self.vllm is not None:
            text += f" | vllm {self.vllm.median_us:8.1f} us | {self.vllm.median_us / t.median_us:4.1f}x"
        return text


def measure(requests: int = 1000, lookups: int = 200, hashes: Sequence[str] = HASHES, device: str = "cpu") -> dict[str, Any]:
    """Microseconds a request, a token and a lookup; then what states cost."""
    other = _vllm() if device == "cpu" else None
    rows = _measure_requests(requests, lookups, hashes, other) if device == "cpu" else []
    version = other.VERSION if other else None
    found = {"bench": "cache", "machine": machine(device), "vllm": version, "rows": [asdict(r) for r in rows]}
    return found | {"states": cache_states.measure(device)}


def _measure_requests(requests: int, lookups: int, hashes: Sequence[str], other: Any) -> list[CacheRow]:
    rows = []
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50000, (requests, PROMPT)).tolist()
    long = rng.integers(0, 50000, LOOKUP + 1).tolist()
    for name in hashes:
        if name == "xxh3_128" and find_spec("xxhash") is None:
            continue
        ours, theirs = Ours(name), other(name) if other else None

        def row(case: str, run: Callable[[Any], list[float]], name: str = name, pair: Any = (ours, theirs)) -> None:
            rows.append(CacheRow(case, name, summarise(run(pair[0])), summarise(run(pair[1])) if pair[1] else None))

        row(f"request of {PROMPT} tokens + {NEW}", lambda m: _times(m.request, prompts))
        row("one of its tokens", lambda m: [t / NEW for t in _times(m.decode, prompts[:lookups])])
        if name:
            row(f"lookup of {LOOKUP} tokens", lambda m: _times(m.lookup, [long] * lookups))
            row("the same, its hashes known", lambda m: _times(m.lookup_hashed, [long] * lookups))
        ours.cache.check()
    return rows


def _times(call: Callable[[list[int]], float], prompts: Sequence[list[int]]) -> list[float]:
    """Microseconds of each, as the call measures itself. Objects of before are left out of garbage collections."""
    gc.collect()
    gc.freeze()
    try:
        call(prompts[0])
        return [call(p) * 1e6 for p in prompts]
    finally:
        gc.unfreeze()


class Ours:
    def __init__(self, hash_name: str) -> None:
        spec = kvx.CacheSpec(NUM_BLOCKS, BLOCK_SIZE, 1, 1, format="f32")
        self.cache = kvx.PagedCache(
            [kvx.LayerGroup("all", (0,), spec)], max_seqs=64, max_seq_len=8192, prefix=bool(hash_name),
            hash_name=hash_name or "blake2b",
        )  # fmt: skip

    def request(self, prompt: list[int]) -> float:
        cache, start = self.cache, perf_counter()
        seq = cache.admit(prompt)
        cache.extend(seq, PROMPT - seq.length)
        cache.commit(seq)
        for token in range(NEW):
            cache.extend(seq, [token])
            cache.commit(seq)
        cache.release(seq)
        return perf_counter() - start

    def decode(self, prompt: list[int]) -> float:
        cache = self.cache
        seq = cache.admit(prompt)
        cache.extend(seq, PROMPT - seq.length)
        cache.commit(seq)
        start = perf_counter()
        for token in range(NEW):
            cache.extend(seq, [token])
            cache.commit(seq)
        seconds = perf_counter() - start
        cache.release(seq)
        return seconds

    def lookup(self, prompt: list[int]) -> float:
        """Hash, find and hold: what admit does."""
        cache, start = self.cache, perf_counter()
        seq = cache.admit(prompt)
        seconds = perf_counter() - start
        if seq.length != LOOKUP:  # the first time
            cache.extend(seq, LOOKUP + 1 - seq.length)
            cache.commit(seq)
        cache.release(seq)
        return seconds

    def lookup_hashed(self, prompt: list[int]) -> float:
        prefix = self.cache.prefix
        assert prefix is not None
        hashes = prefix.hashes(np.array(prompt, np.int32))
        start = perf_counter()
        n, ids = prefix.match(hashes, (0,))
        seconds = perf_counter() - start
        assert n == LOOKUP // BLOCK_SIZE
        self.cache.allocators[0].release(ids[0])
        return seconds


def _vllm() -> Any:
    if find_spec("vllm") is None:
        return None
    from kvx.bench.cache_vllm import Vllm

    return Vllm


def show(result: dict[str, Any]) -> str:
    def timing(t: dict[str, Any] | None) -> Timing | None:
        return Timing(**t) if t else None

    lines = [str(CacheRow(r["case"], r["hash"], Timing(**r["ours"]), timing(r["vllm"]))) for r in result["rows"]]
    beside = f" beside vllm {result['vllm']}" if result["vllm"] else " vllm is not installed here: ours alone"
    return "\n".join([*lines, *([beside] if lines else []), *cache_states.show(result["states"])])
