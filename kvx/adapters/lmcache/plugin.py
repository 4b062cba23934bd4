"""LMCache's storage on KVX's tiers, in its engine mode: a storage plugin. docs/lmcache.md has the config.

storage_plugins: ["kvx"]
extra_config: {"storage_plugin.kvx.module_path": "kvx.adapters.lmcache", "storage_plugin.kvx.class_name": "KvxStoragePlugin",
  "kvx.tiers": ["disk:/var/kv"], "kvx.model": "..."}

LMCache's calls in ours. Nothing here raises once LMCache runs: what fails is logged, and a miss.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from kvx.adapters.lmcache.chunks import WHOLE, ChunkForm, LmcacheStore, memory_of
from kvx.adapters.lmcache.config import StoreConfig
from kvx.adapters.lmcache.engine_chunks import EngineChunks
from kvx.connector.store_calls import StoreCalls, steps

LOGGER = logging.getLogger("kvx")
_OURS = "kvx."  # before our names in LMCache's extra_config, which all its parts share


class KvxStoragePlugin(StoragePluginInterface):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        extra = {k.removeprefix(_OURS): v for k, v in (self.config.extra_config or {}).items() if k.startswith(_OURS)}
        self._store_config = StoreConfig.read(extra)
        self._chunks = EngineChunks(self.config, self.metadata, self._store_config)
        self._calls = StoreCalls(timeout_s=self._store_config.timeout_s, logger=LOGGER)
        self._lock = threading.Lock()
        self._putting: set[Any] = set()
        self._puts, self._gets = (ThreadPoolExecutor(1, thread_name_prefix=f"kvx-lmcache-{what}") for what in ("put", "get"))
        self._is_silent = False  # that a chunk was not kept was said
        if self.metadata.role != "scheduler":
            self._chunks.store(self._chunks.form(WHOLE))  # what cannot work is said now, while LMCache starts

    # --- which are there ---------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[Any]) -> list[bool]:
        def look() -> list[bool]:
            found = [False] * len(keys)
            for store, at, names in self._chunks.by_form(keys):
                for n, has in zip(at, self._calls.has(store, names), strict=True):
                    found[n] = has
            return found

        return self._calls.safely("contains", look, [False] * len(keys)) if keys else []

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self._has([key])[0]

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        found = self._has(keys)
        return found.index(False) if False in found else len(found)

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._gets, self.batched_contains, keys)

    def pin(self, key: Any) -> bool:
        """The store has no pins: what leaves between being found and being read is a miss."""
        return self.contains(key)

    def unpin(self, key: Any) -> bool:
        return self.contains(key)

    # --- put ---------------------------------------------------------------------------------------------------------------

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self._lock:
            return key in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
        **more: Any,
    ) -> list[Future[None]] | None:
        """LMCache's memory is held until the store has its copy, on a thread of our own."""
        wanted = []
        with self._lock:
            for key, obj in zip(keys, objs, strict=True):
                if key not in self._putting and self._is_kept(key, obj):
                    self._putting.add(key)
                    obj.ref_count_up()
                    wanted.append((key, obj))
        if not wanted:
            return None
        try:
            return [self._puts.submit(self._put, wanted, on_complete_callback)]
        except RuntimeError:  # closed
            self._release(wanted)
            return None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        for future in self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback) or ():
            await asyncio.wrap_future(future)

    def _is_kept(self, key: Any, obj: Any) -> bool:
        form = self._chunks.form(getattr(key, "layer_id", WHOLE))
        meta = obj.metadata
        shapes = [tuple(s) for s in (meta.shapes or [meta.shape])]
        is_same = (shapes, meta.fmt.name, obj.get_size()) == ([*form.shapes], form.format, form.num_bytes)
        if not is_same and not self._is_silent:
            self._is_silent = True
            LOGGER.warning(
                "KVX does not keep a chunk of %s %s, nor others like it: a full one is %s %s, and only full ones have names.",
                meta.fmt.name, shapes, form.format, [*form.shapes],
            )  # fmt: skip
        return is_same

    def _put(self, wanted: list[tuple[Any, Any]], on_complete: Callable[[Any], None] | None) -> None:
        """What the store still reads, since it did not answer in time, is released when it has."""
        groups = self._calls.safely("put", partial(self._chunks.by_form, [key for key, _ in wanted]), None)
        if groups is None:
            self._release(wanted)
        for store, at, names in groups or ():
            for few in steps(store, len(at), store.form.num_bytes):
                some = [wanted[n] for n in at[few]]
                stage = store.stager([memory_of(obj) for _, obj in some], is_lent=True)

                def release(which: Sequence[int], some: list[tuple[Any, Any]] = some) -> None:
                    self._release([some[n] for n in which])

                put = partial(self._calls.put, store, names[few], stage, release)
                done = self._calls.safely("put", put, None)
                if done is None:
                    release(range(len(some)))
                    continue
                release([n for n, is_kept in enumerate(done) if is_kept])
                for (key, _), is_kept in zip(some, done, strict=True):
                    if is_kept and on_complete is not None:
                        self._calls.safely("put's callback", partial(on_complete, key), None)

    def _release(self, wanted: list[tuple[Any, Any]]) -> None:
        for _, obj in wanted:
            obj.ref_count_down()
        with self._lock:
            self._putting -= {key for key, _ in wanted}

    # --- get ---------------------------------------------------------------------------------------------------------------

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        found: list[Any] = [None] * len(keys)

        def load() -> None:
            for store, at, names in self._chunks.by_form(keys):
                for few in steps(store, len(at), store.form.num_bytes):
                    for n, obj in zip(at[few], self._get(store, names[few]), strict=True):
                        found[n] = obj

        if self.local_cpu_backend is not None:  # the scheduler's: it only looks
            self._calls.safely("get", load, None)
        return found

    def _get(self, store: LmcacheStore, names: Sequence[bytes]) -> list[Any]:
        """Objects of LMCache's, which the store reads into where it keeps chunks as they are."""
        objects = self._allocate(store.form, len(names))
        memory = [memory_of(obj) for obj in objects]

        def release(which: Sequence[int]) -> None:
            for n in which:
                objects[n].ref_count_down()

        found = self._calls.fetch(store, names[: len(objects)], store.lent(memory), release)
        here = {n: block for n, block in enumerate(found) if block is not None}
        try:
            store.load(list(here.values()), [memory[n] for n in here])
        except Exception:
            release(list(here))
            raise
        return [objects[n] if n in here else None for n in range(len(names))]

    def _allocate(self, form: ChunkForm, count: int) -> list[Any]:
        """Memory of LMCache's: less where it has less in time. Its own way is to wait without end."""
        until, made = time.monotonic() + self._store_config.timeout_s, list[Any]()
        shapes, format_ = [torch.Size(s) for s in form.shapes], MemoryFormat[form.format]
        while len(made) < count:
            obj = self.local_cpu_backend.allocate(shapes, list(form.dtypes), fmt=format_, busy_loop=False)
            if obj is not None:
                made.append(obj)
            elif time.monotonic() > until:
                LOGGER.warning("KVX get: LMCache has memory for %d of %d chunks, and the others count as misses.", len(made), count)
                break
            else:
                time.sleep(0.01)
        return made

    def get_blocking(self, key: Any) -> Any:
        return self.batched_get_blocking([key])[0]

    def get_non_blocking(self, key: Any, location: str | None = None) -> Future[Any] | None:
        return self._gets.submit(self.get_blocking, key) if self.contains(key) else None

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
        """Those from the first on that are there: LMCache pairs them with the keys from the first on."""
        found = await asyncio.get_running_loop().run_in_executor(self._gets, self.batched_get_blocking, keys)
        end = found.index(None) if None in found else len(found)
        for obj in found[end:]:
            if obj is not None:
                obj.ref_count_down()
        return found[:end]

    # --- the rest ----------------------------------------------------------------------------------------------------------

    def remove(self, key: Any, force: bool = True) -> bool:
        return self.batched_remove([key]) == 1

    def batched_remove(self, keys: list[Any], force: bool = True) -> int:
        """Chunks that LMCache wrote in this form. What other engines wrote of the same tokens stays."""

        def drop() -> int:
            return sum(sum(self._calls.drop(store, names)) for store, _, names in self._chunks.by_form(keys))

        return self._calls.safely("remove", drop, 0)

    def clear(self) -> int:
        """Others find their blocks in the same store, so none is removed."""
        LOGGER.warning("KVX: clear() removes nothing, the store is shared. Remove its directory, or let it evict.")
        return 0

    def touch_cache(self) -> None:
        """A block that is read is the newest."""

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        self._puts.shutdown(wait=True)  # each of its calls is bounded
        self._gets.shutdown(wait=True)
        self._calls.close(self._chunks.stores.values())
