"""LMCache's server on KVX's tiers: an L2 adapter, which it loads by its `plugin` type. docs/lmcache.md has the command.

lmcache server --l2-adapter '{"type": "plugin", "module_path": "kvx.adapters.lmcache", "class_name": "KvxL2Adapter",
  "adapter_params": {"tiers": ["disk:/var/kv"], "model": "...", "head_dim": 128}}'

Calls return at once and are answered by an event. Each is bounded in time; what fails is logged, and a miss. The server holds its
memory until a call is answered, and a call that was given up no longer touches it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvx.adapters.lmcache.chunks import ChunkForm, EngineStates, LmcacheStore, Worker, memory_of, part_of, read_chunk, read_states
from kvx.adapters.lmcache.config import StoreConfig, number
from kvx.adapters.lmcache.names import BLAKE3, CHUNK_SIZE, name_of, names_field
from kvx.connector.store_calls import StoreCalls, steps
from kvx.errors import BadArgument
from kvx.handover.model_parts import ModelPart, model_parts
from kvx.spec import Spec

LOGGER = logging.getLogger("kvx")
_OURS = ("head_dim", "chunk_size", "hash_algorithm", "config", "states")
_STORE, _LOOKUP, _LOAD = "store", "lookup", "load"
_Place = tuple[str, int, int]  # whose objects have a kind of their own: LMCache's model, rank and group


class KvxL2Adapter(L2AdapterInterface):
    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._config = StoreConfig.read(config, ours=_OURS)
        self._head_dim, self._chunk_size = number(config, "head_dim"), number(config, "chunk_size", CHUNK_SIZE)
        algorithm = str(config.get("hash_algorithm", BLAKE3))
        # By another hash the names have a root that the server does not tell: they are kept, and found by LMCache alone.
        self._names = names_field(algorithm) if algorithm == BLAKE3 else names_field("server", None) + f":{algorithm}"
        self._calls = StoreCalls(timeout_s=self._config.timeout_s, logger=LOGGER)
        self._lock = threading.Lock()
        self._model = ""  # LMCache's name of the model whose weights `model` names
        self._parts = model_parts(config["config"]) if config.get("config") else ()
        self._states = EngineStates.read(config["states"]) if config.get("states") else None
        if self._states is not None and len(self._parts) < 2:
            raise BadArgument("extra config: states is for a model whose config has layers with states; give its folder as config.")
        self._groups: dict[ModelPart, int] = {}  # LMCache's number of the group that holds a part
        self._stores: dict[tuple[_Place, ChunkForm], LmcacheStore] = {}
        self._next, self._answers = 0, {what: dict[int, Any]() for what in (_STORE, _LOOKUP, _LOAD)}
        self._events = {what: create_event_notifier() for what in self._answers}
        self._threads = {what: ThreadPoolExecutor(1, thread_name_prefix=f"kvx-l2-{what}") for what in self._answers}
        if not self._head_dim and len(self._parts) < 2:
            LOGGER.warning(
                "KVX: adapter_params has no head_dim, and LMCache does not say it. Chunks are kept whole, for LMCache alone; "
                "with the head_dim of the model other engines find them too."
            )

    # --- calls, and their answers ------------------------------------------------------------------------------------------

    def _submit(self, what: str, call: Callable[[], Any], miss: Any) -> int:
        with self._lock:
            task, self._next = self._next, self._next + 1

        def run() -> None:
            answer = self._calls.safely(what, call, miss)
            with self._lock:
                self._answers[what][task] = answer
            self._events[what].notify()

        self._threads[what].submit(run)
        return task

    def _answer(self, what: str, task: int) -> Any:
        with self._lock:
            return self._answers[what].pop(task, None)

    def get_store_event_fd(self) -> int:
        return int(self._events[_STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[_LOOKUP].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[_LOAD].fileno())

    # --- what an object is -------------------------------------------------------------------------------------------------

    def _store(self, place: _Place, form: ChunkForm) -> LmcacheStore:
        model, kv_rank, group = place
        with self._lock:
            self._model = self._model or model
            if model != self._model:
                raise BadArgument(
                    f"adapter_params: model {self._config.settings.model!r} names the weights of {self._model!r}, which LMCache "
                    f"asked for first; {model!r} is another. A server of several models has an adapter of KVX for one of them."
                )
            if (place, form) not in self._stores:
                size = kv_rank >> 24 & 0xFF or 1
                worker = Worker(kv_rank >> 16 & 0xFF, size, self._config.num_kv_heads)
                names, described = self._described(form, worker, group)
                self._stores[place, form] = self._config.open(
                    form, described, names=names, chunk_size=self._chunk_size, shares=size
                )  # fmt: skip
            return self._stores[place, form]

    def _described(self, form: ChunkForm, worker: Worker, group: int) -> tuple[str, tuple[Spec | None, dict[str, str | int]]]:
        """Under which names such objects are kept, and as what. Which layers a group has LMCache does not say."""
        told: dict[str, Any] = {"model": self._config.settings.model, "chunk_size": self._chunk_size}
        if len(self._parts) < 2 and not group:
            described = read_chunk(form, head_dim=self._head_dim, worker=worker, **told)
            if described[0] is None and self._head_dim:
                LOGGER.warning(
                    "KVX: objects %s are found by LMCache alone: their rows are not K and V of heads of %d elements. vLLM on a GPU "
                    "keeps K and V of a head side by side; with num_kv_heads in adapter_params that is read.",
                    _shapes(form), self._head_dim,
                )  # fmt: skip
            return self._names, described
        part = part_of(form, self._parts, worker.size)
        if part is not None and self._groups.setdefault(part, group) == group:
            worker = replace(worker, num_kv_heads=part.num_kv_heads)
            spec, facts = read_chunk(form, head_dim=part.head_dim, worker=worker, **told)
            return self._names, (spec, facts | part.fields())
        if self._states is not None:
            state = read_states(form, self._parts, self._states, model=told["model"], worker=worker)
            if state is not None and self._groups.setdefault(state[1], group) == group:
                return self._names, (state[0], state[1].fields())
        self._note(form, group)
        return f"{self._names}:group{group}", read_chunk(form, head_dim=0, worker=worker, **told)

    def _note(self, form: ChunkForm, group: int) -> None:
        why = 'give the folder of the model as "config" in adapter_params'
        if self._parts:
            why = 'they are not one part\'s K and V by the config, nor its states by "states" in adapter_params'
        LOGGER.warning(
            "KVX: objects %s of the group %d are found by LMCache alone, which does not say the layers of a group: %s.",
            _shapes(form), group, why,
        )  # fmt: skip

    def _by_store(self, keys: Sequence[Any], forms: Sequence[ChunkForm]) -> list[tuple[LmcacheStore, list[int], list[bytes]]]:
        places: dict[tuple[_Place, ChunkForm], list[int]] = {}
        for n, (key, form) in enumerate(zip(keys, forms, strict=True)):
            places.setdefault((_place(key), form), []).append(n)
        return [(self._store(*at), ns, [_name(keys[n]) for n in ns]) for at, ns in places.items()]

    # --- store -------------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(_STORE, partial(self._put, keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._answers[_STORE] = self._answers[_STORE], {}
        return done

    def _put(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        done = [False] * len(keys)
        for store, at, names in self._by_store(keys, list(map(_form_of, objects))):
            for few in steps(store, len(at), store.form.num_bytes):
                memory = [memory_of(objects[n]) for n in at[few]]
                for n, is_kept in zip(at[few], self._calls.put(store, names[few], store.stager(memory)), strict=True):
                    done[n] = is_kept
        sizes = {n: int(objects[n].get_size()) for n, is_kept in enumerate(done) if is_kept}
        self._notify_keys_stored([keys[n] for n in sizes], list(sizes.values()))
        return L2StoreResult(all(done), sum(sizes.values()))

    # --- lookup: nothing is locked, and what leaves before it is loaded is a miss ------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        return self._submit(_LOOKUP, partial(self._look, keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._answer(_LOOKUP, task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """There are no locks."""

    def _look(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> Any:
        found = Bitmap(len(keys))
        known = [n for n, key in enumerate(keys) if key.object_group_id in layouts]
        forms = [_form(layouts[keys[n].object_group_id].shapes, layouts[keys[n].object_group_id].dtypes) for n in known]
        for store, at, names in self._by_store([keys[n] for n in known], forms):
            for n, has in zip(at, self._calls.has(store, names), strict=True):
                if has:
                    found.set(known[n])
        return found

    # --- load --------------------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(_LOAD, partial(self._get, keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        return self._answer(_LOAD, task_id)

    def _get(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        found = Bitmap(len(keys))
        for store, at, names in self._by_store(keys, list(map(_form_of, objects))):
            for few in steps(store, len(at), store.form.num_bytes):
                came = self._calls.fetch(store, names[few])
                here = [(n, block) for n, block in zip(at[few], came, strict=True) if block is not None]
                store.load([block for _, block in here], [memory_of(objects[n]) for n, _ in here])
                for n, _ in here:
                    found.set(n)
        self._notify_keys_accessed([key for n, key in enumerate(keys) if found.test(n)])
        return found

    # --- the rest ----------------------------------------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Objects that LMCache wrote in this form. What other engines wrote of the same tokens stays."""
        for (place, form), store in list(self._stores.items()):
            mine = [key for key in keys if _place(key) == place]
            gone = self._calls.safely("delete", partial(self._calls.drop, store, list(map(_name, mine))), [False] * len(mine))
            left = [key for key, is_gone in zip(mine, gone, strict=True) if is_gone]
            if left:
                self._notify_keys_deleted(left, [form.num_bytes] * len(left))

    def report_status(self) -> dict[str, Any]:
        kept = Counter(store.kind.digest.hex() for store in self._stores.values())
        return {"is_healthy": True, "type": "KvxL2Adapter", "model": self._config.settings.model, "kinds": sorted(kept)}

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=True)  # each of their calls is bounded
        self._calls.close(self._stores.values())
        for event in self._events.values():
            event.close()


def _place(key: Any) -> _Place:
    return key.model_name, key.kv_rank, key.object_group_id


def _name(key: Any) -> bytes:
    return name_of(key.chunk_hash, *((key.cache_salt,) if key.cache_salt else ()))


def _shapes(form: ChunkForm) -> str:
    return " ".join(str(list(shape)) for shape in form.shapes)


def _form(shapes: Sequence[Any], dtypes: Sequence[torch.dtype]) -> ChunkForm:
    """The server's objects have no format of their own: K and V are two outermost, and a latent, or what has K and V of a head side
    by side, is one or has no such axis."""
    sizes = tuple(tuple(shape) for shape in shapes)
    is_latent = len(sizes[0]) == 3 or sizes[0][0] == 1
    return ChunkForm(sizes, tuple(dtypes), "KV_MLA_FMT" if is_latent else "KV_2LTD")


def _form_of(obj: Any) -> ChunkForm:
    meta = obj.metadata
    return _form(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])
