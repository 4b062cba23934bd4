"""The chunks of a process of LMCache's engine mode, as its config and metadata tell them: their form, and the store of each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from lmcache.v1.memory_management import MemoryFormat

from kvx.adapters.lmcache.chunks import WHOLE, ChunkForm, LmcacheStore, Worker, read_chunk
from kvx.adapters.lmcache.config import StoreConfig
from kvx.adapters.lmcache.engine_hash import names_made_here
from kvx.adapters.lmcache.names import name_of

LOGGER = logging.getLogger("kvx")


class EngineChunks:
    def __init__(self, config: Any, metadata: Any, told: StoreConfig) -> None:
        self._config, self._metadata, self._told = config, metadata, told
        self.names = names_made_here(config, metadata)
        self.stores: dict[ChunkForm, LmcacheStore] = {}
        self._lock = threading.Lock()

    def format(self) -> Any:
        """As LMCache's engine chooses it."""
        if self._metadata.use_mla:
            return MemoryFormat.KV_MLA_FMT
        if self._config.use_layerwise:
            return MemoryFormat.KV_2TD if self._config.enable_blending else MemoryFormat.KV_T2D
        return MemoryFormat.KV_2LTD

    def form(self, layer: int) -> ChunkForm:
        """Of full chunks. Asked anew each time: LMCache learns of an engine's groups of layers after it has made its backends."""
        format_ = self.format()
        shapes, dtypes = self._metadata.get_shapes(self._config.chunk_size), self._metadata.get_dtypes()
        if self._config.use_layerwise:
            _, _, tokens, row = shapes[0]
            dtypes, shapes = (
                dtypes[:1],
                [{"KV_T2D": (tokens, 2, row), "KV_2TD": (2, tokens, row), "KV_MLA_FMT": (tokens, row)}[format_.name]],
            )
        return ChunkForm(
            tuple(tuple(s) for s in shapes), tuple(dtypes), format_.name, max(layer, 0) if self._config.use_layerwise else WHOLE
        )

    def store(self, form: ChunkForm) -> LmcacheStore:
        with self._lock:
            if form not in self.stores:
                m, told = self._metadata, self._told
                worker = Worker(m.worker_id, m.world_size, told.num_kv_heads)
                is_shared = m.use_mla and m.world_size > 1 and self._saves_first_rank_only()
                if is_shared:  # LMCache's first rank writes for all of them
                    worker = Worker()
                shares = (1 if m.use_mla else m.world_size) * (m.kv_shape[0] if self._config.use_layerwise else 1)
                size = self._config.chunk_size
                spec = read_chunk(form, model=told.settings.model, chunk_size=size, head_dim=m.kv_shape[4], worker=worker)
                if len(form.shapes) > 1:
                    LOGGER.warning(
                        "KVX: chunks have %d groups of layers in one object, and LMCache does not say which layers those are: they "
                        "are found by LMCache alone. Its server takes groups apart, with --separate-object-groups.",
                        len(form.shapes),
                    )
                self.stores[form] = told.open(form, spec, names=self.names, chunk_size=size, shares=shares)
            return self.stores[form]

    def _saves_first_rank_only(self) -> bool:
        return bool(self._config.get_extra_config_value("save_only_first_rank", self._metadata.use_mla))

    def by_form(self, keys: Sequence[Any]) -> list[tuple[LmcacheStore, list[int], list[bytes]]]:
        """Stores, and which of the keys are theirs: one, or one a layer."""
        layers: dict[int, list[int]] = {}
        for n, key in enumerate(keys):
            layers.setdefault(getattr(key, "layer_id", WHOLE), []).append(n)
        return [(self.store(self.form(layer)), at, [_name(keys[n]) for n in at]) for layer, at in layers.items()]


def _name(key: Any) -> bytes:
    """Model, dtype and worker are in the kind; what a request was tagged with is not."""
    return name_of(key.chunk_hash, *(f"{k}%{v}" for k, v in key.tags or ()))
