"""SGLang's third tier on KVX's: its `dynamic` storage backend. docs/sglang.md has the command.

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvx", "interface_v1": 1,
  "module_path": "kvx.adapters.sglang.storage", "class_name": "KvxStorage", "tiers": ["disk:/var/kv"], "model": "..."}'

SGLang's calls in ours: page_store.py does the work. Nothing here raises once SGLang runs: what fails is logged, and a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from torch import Tensor

from kvx.adapters.sglang.names import name_of
from kvx.adapters.sglang.page_store import PageStore
from kvx.adapters.sglang.pools import Ranks, read_pool
from kvx.connector.settings import Settings
from kvx.connector.store_calls import StoreCalls, steps
from kvx.errors import BadArgument
from kvx.handover.model_parts import model_parts

LOGGER = logging.getLogger("kvx")
# Names in the same dict that are SGLang's, and those that are read here.
_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path", "tp_lcm_size")
_OURS = ("timeout_s", "layout", "num_kv_heads", "config")


class KvxStorage(HiCacheStorage):
    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self.settings = Settings.read(extra, foreign=_SGLANG, ours=_OURS)
        if not self.settings.model:
            raise BadArgument(
                'extra config: "model" is not given; '
                "it must be a name that only these weights have, since others find their K and V by "
                'it: kvx.weights_identity(folder, dtype="bf16") makes one of the weight files.'
            )
        if self.settings.block_size:
            raise BadArgument("extra config: block_size is SGLang's own, --page-size; it keeps whole pages.")
        heads = extra.get("num_kv_heads", 0)
        if type(heads) is not int or heads < 0:
            raise BadArgument(f"extra config: num_kv_heads is {heads!r}; it must be the KV heads of the whole model.")
        self._layout, self._ranks = str(extra.get("layout") or ""), Ranks.of(storage_config, heads)
        self._parts = model_parts(extra["config"]) if extra.get("config") else ()
        self._calls = StoreCalls(timeout_s=extra.get("timeout_s", 5.0), logger=LOGGER)
        self._pools: dict[str, Any] = {}
        self._stores: dict[str, PageStore] = {}
        self._lock = threading.Lock()  # SGLang looks, reads and writes on a thread each

    # --- pools -------------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def on_host_pools_registered(self) -> None:
        """What cannot work is said now, while SGLang starts."""
        for name in self._pools:
            self._store(name)
        alone = [name for name, store in self._stores.items() if "group" in store.kind.manifest]
        if alone and len(self._pools) > 1:
            why = 'give the folder of the model as "config" in the extra config, since SGLang does not say which layers a pool has'
            if self._parts:
                why = "a pipeline's stage, a draft model's layers, or memory that the model's config does not say"
            LOGGER.warning("KVX: pages of the pools %s are found by SGLang alone: %s.", ", ".join(alone), why)

    def _register(self, name: Any, pool: Any) -> None:
        if self._pools.get(str(name)) is not pool:
            self._pools[str(name)] = pool
            self._stores.pop(str(name), None)

    def _store(self, name: Any) -> PageStore:
        """Made when it is first asked for: by then SGLang has registered all pools, which share the capacity."""
        key = str(name)
        if key in self._stores:
            return self._stores[key]
        with self._lock:
            return self._open(key)

    def _open(self, key: str) -> PageStore:
        if key not in self._stores:
            if key not in self._pools:
                raise BadArgument(f"the pool {key!r} was not registered; there are {', '.join(self._pools) or 'none'}.")
            ranks = replace(self._ranks, has_groups=len(self._pools) > 1)
            size = int(getattr(self._pools.get(PoolName.KV.value), "page_size", 0) or 0)
            pool = read_pool(
                key, self._pools[key], model=self.settings.model, ranks=ranks, parts=self._parts, page_size=size
            )  # fmt: skip
            parts = len(self._pools) * (1 if self._ranks.is_replicated else self._ranks.tp_size)
            options = [option.share(1, parts) for option in self.settings.tiers]
            self._stores[key] = PageStore(
                pool, options, model=self.settings.model, layout=self._layout, format=self.settings.format
            )  # fmt: skip
        return self._stores[key]

    # --- several pages of one pool -----------------------------------------------------------------------------------------

    def _has(self, pool: Any, keys: Sequence[str]) -> list[bool]:
        def look() -> list[bool]:
            return self._calls.has(self._store(pool), list(map(name_of, keys)))

        return self._calls.safely("exists", look, [False] * len(keys)) if keys else []

    def _get(self, pool: Any, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
        def load() -> list[bool]:
            store, names = self._store(pool), list(map(name_of, keys))
            pages, done = store.pool.pages(host_indices, len(keys)), []
            for few in steps(store, len(keys), store.pool.page_bytes):
                done += store.load(self._calls.fetch(store, names[few]), pages[few])
            return done

        return self._calls.safely("get", load, [False] * len(keys))

    def _set(self, pool: Any, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
        def save() -> list[bool]:
            store, names = self._store(pool), list(map(name_of, keys))
            pages, done = store.pool.pages(host_indices, len(keys)), []
            for few in steps(store, len(keys), store.pool.page_bytes):
                done += self._calls.put(store, names[few], partial(_stage, store, pages[few]))
            return done

        return self._calls.safely("set", save, [False] * len(keys))

    # --- v1: pages of the one pool of K and V ------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        found = self._has(PoolName.KV, keys)
        return found.index(False) if False in found else len(found)

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        return self._set(PoolName.KV, keys, host_indices)

    # --- v2: several pools -------------------------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> PoolTransferResult:
        """The lengths at which every pool can go on: of a state one page, of a window its last ones, of others all."""
        end = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: end} if end else {}
        lengths = list(range(1, end + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:  # a second form of the same pages, which decides nothing
                hits[transfer.name] = _groups(self._has(transfer.name, transfer.keys or []), transfer)
                continue
            has = self._has(transfer.name, keys[:end])
            last = len(transfer.keys or ()) or 1
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                mine = [n for n in range(1, end + 1) if all(has[max(0, n - last) : n])]
            else:
                mine = list(range(1, 1 + (has.index(False) if False in has else len(has))))
            if mine:
                hits[transfer.name] = mine[-1]
            lengths = [n for n in lengths if n in set(mine)]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._get(t.name, t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._set(t.name, t.keys or [], t.host_indices) for t in transfers}

    # --- flat pages: what SGLang calls without interface_v1 ----------------------------------------------------------------

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Tensor | None]:
        def load() -> list[Tensor | None]:
            store = self._store(PoolName.KV)
            places = target_locations or [store.pool.pool.get_dummy_flat_data_page() for _ in keys]
            found: list[Tensor | None] = []
            for page, place in zip(self._calls.fetch(store, list(map(name_of, keys))), places, strict=True):
                if page is not None:
                    store.load_flat(page, place)
                found.append(None if page is None else place)
            return found

        return self._calls.safely("get", load, [None] * len(keys))

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        def save() -> bool:
            store = self._store(PoolName.KV)
            names = list(map(name_of, keys))
            return all(self._calls.put(store, names, lambda wanted: store.stage_flat([values[n] for n in wanted])))

        return self._calls.safely("set", save, False)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # --- the end -----------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Others find their blocks in the same store, so none is removed."""
        LOGGER.warning("KVX: clear() removes nothing, the store is shared. Remove its directory, or let it evict.")

    def close(self) -> None:
        self._calls.close(self._stores.values())


def _stage(store: PageStore, pages: list[int], wanted: list[int]) -> Any:
    return store.stage([pages[n] for n in wanted])


def _groups(has: Sequence[bool], transfer: Any) -> int:
    """Pages that the leading complete groups cover."""
    size = transfer.group_pages or 1
    complete = next((n for n in range(len(has) // size) if not all(has[n * size : (n + 1) * size])), len(has) // size)
    return int(complete * transfer.block_pages)
