"""LMCache's own parts on a CPU, with KVX's store behind them: its backends, storage managers, memory and keys."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends

MODEL = "weights-of-a-test"
LAYERS, HEADS, DIM, CHUNK = 3, 4, 8, 16
PLUGIN = {"storage_plugin.kvx.module_path": "kvx.adapters.lmcache", "storage_plugin.kvx.class_name": "KvxStoragePlugin"}
# How LMCache is asked for each of its formats.
FORMATS: dict[str, dict[str, Any]] = {
    "KV_2LTD": {},
    "KV_T2D": {"use_layerwise": True},
    "KV_2TD": {"use_layerwise": True, "enable_blending": True},
    "KV_MLA_FMT": {"mla": True},
    "KV_MLA_FMT by layer": {"mla": True, "use_layerwise": True},
}


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


class Lmcache:
    """One process of LMCache: what its engine makes of a config and of an inference engine's facts."""

    def __init__(
        self, folder: str | Path, loop: Any, *, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16,
        worker: tuple[int, int] = (0, 1), mla: bool = False, extra: dict[str, Any] | None = None,
        kv_shape: tuple[int, ...] | None = None, **config: Any,
    ) -> None:  # fmt: skip
        shape = (LAYERS, 1, CHUNK, 1, DIM * HEADS) if mla else (LAYERS, 2, CHUNK, heads, DIM)
        shape = kv_shape or shape  # layers, K and V, tokens of a chunk, heads, dim
        told = {"kvx.tiers": [f"disk:{folder}"], "kvx.model": MODEL, **PLUGIN, **(extra or {})}
        self.config = LMCacheEngineConfig.from_defaults(**{
            "chunk_size": shape[2], "local_cpu": False, "max_local_cpu_size": 0.02, "storage_plugins": ["kvx"],
            "extra_config": {k: v for k, v in told.items() if v is not None}, **config,
        })  # fmt: skip
        rank, size = worker
        self.metadata = LMCacheMetadata(
            model_name="tiny", world_size=size, local_world_size=size, worker_id=rank, local_worker_id=rank, kv_dtype=dtype,
            kv_shape=shape, use_mla=mla, chunk_size=shape[2],
        )  # fmt: skip
        self.loop = loop
        self.backends = CreateStorageBackends(self.config, self.metadata, loop, "cpu")
        self.cpu, self.kvx = self.backends["LocalCPUBackend"], self.backends.get("kvx")
        self.format = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_2LTD
        if self.config.use_layerwise and not mla:
            self.format = MemoryFormat.KV_2TD if self.config.enable_blending else MemoryFormat.KV_T2D

    def keys(self, tokens: list[int], **request: Any) -> list[Any]:
        """As LMCache's engine makes them: of every chunk, or of every chunk and layer."""
        from lmcache.v1.token_database import ChunkedTokenDatabase

        found = ChunkedTokenDatabase(self.config, self.metadata).process_tokens(tokens, request_configs=request or None)
        made = [key for _, _, key in found]
        return [k for key in made for k in key.split_layers(LAYERS)] if self.config.use_layerwise else made

    def shape(self, tokens: int | None = None) -> tuple[int, ...]:
        (one,) = self.metadata.get_shapes(tokens)
        _, _, t, row = one
        by_layer = {MemoryFormat.KV_T2D: (t, 2, row), MemoryFormat.KV_2TD: (2, t, row), MemoryFormat.KV_MLA_FMT: (t, row)}
        return by_layer[self.format] if self.config.use_layerwise else tuple(one)

    def objects(self, count: int, tokens: int | None = None) -> list[Any]:
        """Memory of LMCache's, with numbers in it."""
        made = [self.cpu.allocate(torch.Size(self.shape(tokens)), self.metadata.kv_dtype, fmt=self.format) for _ in range(count)]
        for obj in made:
            obj.tensor.copy_(torch.randn(obj.tensor.shape))
        return made

    def put(self, keys: list[Any], objects: list[Any]) -> None:
        for future in self.kvx.batched_submit_put_task(keys, objects) or ():
            future.result(60)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close()


def a_key(chunk_hash: int, dtype: torch.dtype = torch.bfloat16, worker: tuple[int, int] = (0, 1)) -> Any:
    return CacheEngineKey("tiny", worker[1], worker[0], chunk_hash, dtype)


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return [(n * 7919 + seed * 104729) % 49000 for n in itertools.islice(itertools.count(), count)]
