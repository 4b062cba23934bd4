"""SGLang's host pools of hybrid models over KVX's storage backend: K and V, windows and states of a prompt in and out.

SGLang's kernels need a GPU, so what the pools hold comes from a handover. Importing this imports SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import kvx
from kvx.adapters.sglang.pools import Ranks, read_pool
from kvx.handover import Handover, from_manifest
from kvx.handover.model_parts import model_parts
from kvx.handover.part import Part
from kvx.layout.state_rows import state_row
from kvx.spec import StateSpec
from tests.engines import sglang_pools as sgl
from tests.engines.hybrid_engines import contents, prefilled
from tests.engines.sglang_pools import PoolHitPolicy, PoolName, PoolTransfer


class SglangRank:
    """A host pool for each part of a model, as SGLang has them, and its storage backend."""

    def __init__(
        self, store: Path, model: str, config: Any, handover: Handover, *, page: int, rank: tuple[int, int] = (0, 1),
        format: str = "", layout: str = "page_first", is_told: bool = True,
    ) -> None:  # fmt: skip
        self.pools, self.read, self.page = {}, {}, page
        for part in handover.parts:
            self.pools[_pool_name(part)] = self._pool(part, config, rank[1], layout)
        told = {"model": model, "num_kv_heads": config.num_key_value_heads, "tp": rank} | ({"format": format} if format else {})
        if is_told:
            told["config"] = config._name_or_path
        self.store = sgl.StorageBackendFactory.create_backend("dynamic", sgl.config(store, **told), self.pools[PoolName.KV])
        self.store.register_mem_pool_host(self.pools[PoolName.KV])
        ranks = Ranks(*rank, num_kv_heads=config.num_key_value_heads, has_groups=len(self.pools) > 1)
        parts = model_parts(config) if is_told else ()
        for name, pool in self.pools.items():
            self.store.register_mem_host_pool_v2(pool, name)
            self.read[name] = read_pool(name, pool, model=model, ranks=ranks, parts=parts, page_size=page)
        self.store.on_host_pools_registered()

    def _pool(self, part: Part, config: Any, ranks: int, layout: str) -> Any:
        if isinstance(part.spec, StateSpec):
            return sgl.state_pool(config, list(part.layers), ranks)
        # SGLang gives layers that read others' K and V memory too, and does not fill it.
        kind = "sliding_attention" if part.window else "full_attention"
        layers = list(getattr(config, "layer_types", None) or ()).count(kind) or part.spec.num_layers
        sizes = {"layers": layers, "heads": part.kv.num_kv_heads, "dim": part.kv.head_dim, "tokens": 1024}
        pool = sgl.mha_pool(layout, page_size=self.page, dtype=torch.float32, **sizes)
        pool.kv_buffer.normal_()
        return pool

    def transfer(self, part: Part, keys: Sequence[str]) -> PoolTransfer:
        """Of the pages that a pool has: all, the last of a window, or that of a state."""
        name = _pool_name(part)
        size = 1 if isinstance(part.spec, StateSpec) else self.page
        mine = list(keys[-1:] if isinstance(part.spec, StateSpec) else keys[part.first_block :])
        self.pools[name].alloc(size)  # not the same places in every instance
        where = self.pools[name].alloc(len(mine) * size)
        policy = PoolHitPolicy.ALL_PAGES if name == PoolName.KV else PoolHitPolicy.TRAILING_PAGES
        return PoolTransfer(name=name, host_indices=where, keys=mine, hit_policy=policy)

    def write(self, handover: Handover, keys: Sequence[str]) -> None:
        """What SGLang would have copied from its device, and backs up."""
        told = [self.transfer(part, keys) for part in handover.parts]
        for part, transfer in zip(handover.parts, told, strict=True):
            self._fill(part, transfer)
        assert all(all(done) for done in self.store.batch_set_v2(told).values())

    def found(self, handover: Handover, keys: Sequence[str], count: int) -> Any:
        """What it would find of these pages, as SGLang asks: with the pages that each pool needs at the end of so many."""
        told = [self.transfer(part, keys[:count]) for part in handover.parts]
        told = [PoolTransfer(name=t.name, keys=t.keys, hit_policy=t.hit_policy) for t in told if t.name != PoolName.KV]
        return self.store.batch_exists_v2(list(keys), told)

    def load(self, into: Handover, keys: Sequence[str]) -> None:
        """Out of the store into the pools, and into a handover's memory."""
        wanted = [self.transfer(part, keys) for part in into.parts]
        assert all(all(done) for done in self.store.batch_get_v2(wanted).values())
        for part, transfer in zip(into.parts, wanted, strict=True):
            self._take(part, transfer)

    def _fill(self, part: Part, told: PoolTransfer) -> None:
        pool, here = self.pools[told.name], self.read[told.name]
        if isinstance(part.spec, StateSpec):
            page = torch.zeros(here.page_bytes, dtype=torch.uint8)
            kvx.convert(list(part.buffers), [page], plan=kvx.plan(part.spec, _page_spec(part)))
            pool.set_from_flat_data_page(int(told.host_indices[0]), page.view(pool.get_dummy_flat_data_page().dtype))
            return
        pages = here.blocks(here.pages(told.host_indices, len(told.keys)))
        plan = kvx.plan(part.spec, here.spec.replaced(layer_start=0), layers=(0, part.spec.num_layers))
        kvx.convert(list(part.buffers), list(here.buffers), plan=plan, src_blocks=list(range(len(pages))), dst_blocks=pages)

    def _take(self, part: Part, told: PoolTransfer) -> None:
        pool, here = self.pools[told.name], self.read[told.name]
        if isinstance(part.spec, StateSpec):
            flat = pool.get_data_page(int(told.host_indices[0]), flat=True).contiguous().view(torch.uint8)
            kvx.convert([flat], list(part.buffers), plan=kvx.plan(_page_spec(part), part.spec))
            return
        pages = here.blocks(here.pages(told.host_indices, len(told.keys)))
        plan = kvx.plan(here.spec.replaced(layer_start=0), part.spec, layers=(0, part.spec.num_layers))
        kvx.convert(list(here.buffers), list(part.buffers), plan=plan, src_blocks=pages, dst_blocks=list(range(len(pages))))

    def close(self) -> None:
        self.store.close()


class HybridSglang:
    """Of the process of a session: SGLang over a store, for prompts of whole pages. K and V are Transformers'."""

    def __init__(self, folder: str, store: str, model: str, page: int, num_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._store, self._name, self._page = Path(store), model, page
        self._like = prefilled(self._model, [3] * num_tokens, page, model)
        self._open().close()  # others see in the directory that it is there

    def _open(self) -> SglangRank:
        return SglangRank(self._store, self._name, self._model.config, self._like, page=self._page)

    def write(self, ids: list[int]) -> None:
        with closing(self._open()) as one:
            one.write(prefilled(self._model, ids, self._page, self._name), sgl.keys(ids, self._page))

    def read(self, ids: list[int]) -> dict[str, Any]:
        """How many tokens it finds, as far as it could go on, and the content of its pools after it read them."""
        keys, got = sgl.keys(ids, self._page), from_manifest(self._like.to_json())
        with closing(self._open()) as one:
            count = one.found(got, keys, len(keys)).kv_hit_pages
            if count == len(keys):
                one.load(got, keys)
        return {"cached": count * self._page, "contents": [str(each) for each in contents(got)]}


def _pool_name(part: Part) -> Any:
    return PoolName.MAMBA if isinstance(part.spec, StateSpec) else PoolName.SWA if part.window else PoolName.KV


def _page_spec(part: Part) -> StateSpec:
    assert isinstance(part.spec, StateSpec)
    layout = state_row("sglang.host").layout(part.spec.planes)
    return part.spec.replaced(layout=layout, positions=())
