"""Engines over one store, each alike to its caller: write a prompt's K and V, read what others wrote, answer alone.

Each class is made in a process of its own environment (forked.py). A row of ENGINES is all that another engine needs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.forked import ROOT, Session, fork_server


@dataclass(frozen=True)
class StoreCase:
    """What an engine is told of a store, and of the model."""

    folder: str  # of the model
    gguf: str
    model: str  # its name in the store
    store: str = ""  # a directory; "": none, and the engine answers alone
    block_size: int = 16
    format: str = "f32"  # in the store
    ranks: int = 1
    layout: str = "page_first"  # of SGLang's pools
    heads: int = 3
    dim: int = 64
    layers: int = 30


class EngineRow(NamedTuple):
    environment: str
    name: str  # of the class
    preload: tuple[str, ...]
    decodes: bool = True  # SGLang's kernels need a GPU: of it the pools and the storage run here; LMCache computes nothing


_OURS = ("torch", "kvx.adapters.store", "kvx.runner")
ENGINES = {
    "vllm": EngineRow(".venv-engines", "VllmOnStore", ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")),
    "llama_cpp": EngineRow(".venv-engines", "LlamaOnStore", (*_OURS, "xllamacpp")),
    "transformers": EngineRow(".venv", "TransformersOnStore", (*_OURS, "transformers")),
    "runner": EngineRow(".venv", "RunnerOnStore", _OURS),
    "paged": EngineRow(".venv", "PagedOnStore", (*_OURS, "transformers")),
    "sglang": EngineRow(".venv-sglang", "SglangOnStore", ("tests.engines.sglang_pools", "kvx.adapters.sglang.storage"), False),
    "lmcache": EngineRow(".venv-lmcache", "LmcacheOnStore", ("tests.engines.lmcache_parts", "kvx.adapters.lmcache"), False),
}
_VLLM_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def missing_environment(*names: str) -> str:
    """The first of these engines' that is not here; "": all are."""
    environments = [ENGINES[name].environment for name in names]
    return next((e for e in environments if not (ROOT / e / "bin" / "python").exists()), "")


def open_engine(name: str, case: StoreCase) -> Session:
    row = ENGINES[name]
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), **_VLLM_ENVIRONMENT}
    server = fork_server(ROOT / row.environment / "bin" / "python", row.preload, env)
    more = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"} if case.ranks > 1 else {}
    return server.session(f"tests.engines.store_engines:{row.name}", env=more, **vars(case))


class _OnStore:
    def __init__(self, **case: Any) -> None:
        self.case = StoreCase(**case)
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def answer(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """`tokens` after a prompt, greedy, and how many of its own were `cached` in the store."""
        raise NotImplementedError

    def write(self, prompt: list[int]) -> None:
        """As the engine does anyway, when it answers."""
        self.answer(prompt, 1)

    def read(self, prompts: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
        return [self.answer(p, num_tokens) for p in prompts]


class VllmOnStore(_OnStore):
    def open(self) -> None:
        from tests.engines.vllm_process import ServedLlm, kvx_connector

        c = self.case
        told = kvx_connector([f"disk:{c.store}"], model=c.model, block_size=c.block_size, format=c.format) if c.store else None
        # Without prefix caching nothing but the store can have a prompt's K and V.
        engine = {"enable_prefix_caching": False, "tensor_parallel_size": c.ranks}
        self._llm = ServedLlm(c.folder, told, engine)

    def answer(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        found = self._llm.answer([prompt], num_tokens)
        return {"tokens": found["tokens"][0], "cached": found["cached"][0]}


class _ByHandover(_OnStore):
    """An engine whose sequences come and go as handovers. Ranks are simulated: each has a store for its own heads."""

    def open(self) -> None:
        from kvx import CacheSpec
        from kvx.adapters.store import HandoverStore
        from kvx.handover import NEUTRAL
        from kvx.handover.part import rank_specs

        c = self.case
        spec = CacheSpec(1, c.block_size, c.heads, c.dim, layout=NEUTRAL, num_layers=c.layers, format=c.format, model=c.model)
        self._stores = [HandoverStore(f"disk:{c.store}", s) for s in rank_specs(spec, c.ranks)] if c.store else []
        self.load()

    def load(self) -> None:
        raise NotImplementedError

    def prefill(self, prompt: Sequence[int]) -> Any:
        raise NotImplementedError

    def decode(self, prompt: Sequence[int], num_tokens: int, found: Any) -> list[int]:
        raise NotImplementedError

    def write(self, prompt: list[int]) -> None:
        handover = self.prefill(prompt)
        for store, shard in zip(self._stores, handover.shard(self.case.ranks), strict=True):
            store.keep(shard)

    def answer(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        from kvx.handover import join

        ranks = [store.find(prompt[:-1]) for store in self._stores]
        found = join(ranks).convert(format="f32") if ranks and None not in ranks else None
        cached = 0 if found is None else found.num_tokens
        return {"tokens": self.decode(prompt, num_tokens, found), "cached": cached}


class TransformersOnStore(_ByHandover):
    def load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.case.folder, dtype=torch.float32).eval()

    def prefill(self, prompt: Sequence[int]) -> Any:
        import torch
        from transformers import DynamicCache

        from kvx.adapters.transformers.handover import export_cache

        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(torch.tensor([prompt]), past_key_values=cache)
        return export_cache(cache, prompt, model=self.case.model, block_size=self.case.block_size)

    def decode(self, prompt: Sequence[int], num_tokens: int, found: Any) -> list[int]:
        import torch

        from kvx.adapters.transformers.handover import import_cache

        cache = None if found is None else import_cache(found, self.model.config, model=self.case.model, tokens=prompt)
        how = {"do_sample": False, "min_new_tokens": num_tokens, "max_new_tokens": num_tokens, "pad_token_id": 0}
        with torch.no_grad():
            out = self.model.generate(torch.tensor([prompt]), past_key_values=cache, **how)
        return [int(t) for t in out[0, len(prompt) :]]

    def reference(self, prompts: list[list[int]], count: int, path: str) -> None:
        """K and V of the first `count` tokens of every prompt in float32, and of the first prompt in float64, each in a file.

        [prompt, layer, kv, head, token, dim].
        """
        import torch
        from transformers import DynamicCache

        for name, dtype, asked in (("f32", torch.float32, prompts), ("f64", torch.float64, prompts[:1])):
            self.model.to(dtype)
            found = []
            for prompt in asked:
                cache = DynamicCache(config=self.model.config)
                with torch.no_grad():
                    self.model(torch.tensor([prompt[:count]]), past_key_values=cache)
                found.append(torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]))
            torch.save(torch.stack(found), f"{path}/{name}.pt")
        self.model.to(torch.float32)


class LlamaOnStore(_ByHandover):
    def load(self) -> None:
        from kvx.adapters.llama_cpp import Slots, StateModel
        from kvx.runner.gguf_file import GgufFile
        from tests.engines.llama_cpp import LlamaCpp

        self._llama = LlamaCpp(Path(self.case.gguf), Path(tempfile.mkdtemp()))
        named = StateModel.of_gguf(GgufFile(Path(self.case.gguf)).metadata, name=self.case.model)
        self._llama.slots = Slots(self._llama.address, self._llama.folder, model=named, timeout_s=300)

    def prefill(self, prompt: Sequence[int]) -> Any:
        return self._llama.prefill(prompt)

    def decode(self, prompt: Sequence[int], num_tokens: int, found: Any) -> list[int]:
        return self._llama.decode(prompt, num_tokens, found)  # which asserts that all of it was taken


class RunnerOnStore(_OnStore):
    def open(self) -> None:
        from kvx.runner import Engine

        c = self.case
        more = {"tiers": [f"disk:{c.store}"], "tier_format": c.format, "tier_model": c.model} if c.store else {}
        self._engine = Engine.load(c.folder, dtype="f32", block_size=c.block_size, num_blocks=1024 // c.block_size, **more)

    def answer(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        from kvx.runner import Params

        self._engine.reset()  # nothing but the store can have it
        ((answer,),) = self._engine.generate([prompt], Params(max_tokens=num_tokens, ignore_eos=True))
        return {"tokens": list(answer.tokens), "cached": answer.num_cached}

    def write(self, prompt: list[int]) -> None:
        self.answer(prompt, 1)
        self._save()

    def _save(self) -> None:
        self._engine.tiers.backing.save()  # as Engine.close() does


class PagedOnStore(RunnerOnStore):
    """A Transformers model over a PagedCache of one's own, with CacheTiers behind it."""

    def open(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        import kvx
        from kvx.adapters.store import share
        from kvx.adapters.transformers import PagedModel, layer_groups
        from kvx.runner import Engine
        from kvx.tiers import BlockKind, CacheTiers, TierOption, kept_specs, open_tiers

        c = self.case
        model = AutoModelForCausalLM.from_pretrained(c.folder, dtype=torch.float32).eval()
        groups = layer_groups(model.config, num_blocks=1024 // c.block_size, block_size=c.block_size, format="f32")
        cache = kvx.PagedCache(groups, max_seqs=4, max_seq_len=512, max_tokens=512, salt=c.model.encode())
        if c.store and c.format == "f32":
            self._tiers = CacheTiers(cache, disk=c.store, model=c.model)
        elif c.store:
            kept = [spec.replaced(format=c.format) for spec in kept_specs(cache, c.model)]
            tiers = open_tiers([TierOption.parse(f"disk:{c.store}")], [BlockKind.of(spec) for spec in kept], ["full"])
            self._tiers = CacheTiers(cache, tiers, kept=kept)
        if c.store:
            self._shared = share(self._tiers)
        self._engine = Engine(PagedModel(model, cache))

    def _save(self) -> None:
        self._tiers.save()


class SglangOnStore(_OnStore):
    """SGLang's host pools, a rank each, and its storage backend. What would compute needs a GPU: K and V are Transformers'."""

    def open(self) -> None:
        import torch

        from tests.engines import sglang_pools as sgl

        c = self.case
        self._pools, self._stores = [], []
        for rank in range(c.ranks):
            sizes = {"layers": c.layers, "heads": c.heads // c.ranks, "dim": c.dim, "dtype": torch.float32, "tokens": 1024}
            pool = sgl.mha_pool(c.layout, page_size=c.block_size, **sizes)
            more = {} if c.format == "f32" else {"format": c.format}
            told = {"tiers": [f"disk:{c.store}"], "model": c.model, "num_kv_heads": c.heads, **more}
            self._pools.append(pool)
            self._stores.append(sgl.backend(c.store, pool, tp=(rank, c.ranks), **told))
        self._model = None

    def _places(self, prompt: Sequence[int]) -> tuple[list[str], list[Any]]:
        from tests.engines import sglang_pools as sgl

        keys = sgl.keys(prompt[: len(prompt) // self.case.block_size * self.case.block_size], self.case.block_size)
        return keys, [pool.alloc(len(keys) * self.case.block_size) for pool in self._pools]

    def write(self, prompt: list[int]) -> None:
        from kvx.adapters.sglang.pools import Ranks, read_pool

        if self._model is None:
            self._model = TransformersOnStore(**{**vars(self.case), "store": "", "ranks": 1})
        handover = self._model.prefill(prompt)
        keys, places = self._places(prompt)
        whole = handover.cut(len(keys) * self.case.block_size)
        for rank, (pool, store, where) in enumerate(zip(self._pools, self._stores, places, strict=True)):
            found = read_pool("kv", pool, model=self.case.model, ranks=Ranks(rank, self.case.ranks, num_kv_heads=self.case.heads))
            whole.write(0, list(found.buffers), found.spec, blocks=found.blocks(found.pages(where, len(keys))))
            assert all(store.batch_set_v1(keys, where))
            pool.free(where)

    def answer(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """What its prefetch would find, and the content of the pages that then have it."""
        import kvx
        from kvx.adapters.sglang.pools import Ranks, read_pool

        keys, places = self._places(prompt[:-1])
        count, total = len(keys), kvx.Digest()
        for store in self._stores:
            count = min(count, store.batch_exists(keys))
        for rank, (pool, store, where) in enumerate(zip(self._pools, self._stores, places, strict=True)):
            here = where[: count * self.case.block_size]
            assert all(store.batch_get_v1(keys[:count], here))
            found = read_pool("kv", pool, model=self.case.model, ranks=Ranks(rank, self.case.ranks, num_kv_heads=self.case.heads))
            total += kvx.digest(list(found.buffers), found.spec, blocks=[found.blocks(found.pages(here, count))])
            pool.free(where)
        return {"cached": count * self.case.block_size, "content": str(total)}


class LmcacheOnStore(_OnStore):
    """LMCache's memory, keys and storage plugin, a worker for each rank. It computes nothing: K and V are Transformers'."""

    def open(self) -> None:
        import torch

        from kvx import CacheSpec
        from tests.engines import lmcache_parts as lmc

        c = self.case
        self._running = lmc.running_loop()
        loop, heads, self._model = self._running.__enter__(), c.heads // c.ranks, None
        told = {"kvx.model": c.model, "kvx.num_kv_heads": c.heads} | ({} if c.format == "f32" else {"kvx.format": c.format})
        self._workers = [
            lmc.Lmcache(
                c.store, loop, kv_shape=(c.layers, 2, c.block_size, heads, c.dim), dtype=torch.float32, worker=(rank, c.ranks),
                extra=told, max_local_cpu_size=0.2,
            )
            for rank in range(c.ranks)
        ]  # fmt: skip
        chunk = CacheSpec(
            1, c.block_size, heads, c.dim, layout="block | kv layer token head dim", format="f32", num_layers=c.layers
        )  # fmt: skip
        self._specs = [chunk.replaced(head_start=rank * heads, model=c.model) for rank in range(c.ranks)]

    def _keys(self, worker: Any, prompt: Sequence[int]) -> list[Any]:
        return worker.keys(list(prompt[: len(prompt) // self.case.block_size * self.case.block_size]))

    def write(self, prompt: list[int]) -> None:
        if self._model is None:
            self._model = TransformersOnStore(**{**vars(self.case), "store": "", "ranks": 1})
        handover = self._model.prefill(prompt)
        for worker, spec in zip(self._workers, self._specs, strict=True):
            keys = self._keys(worker, prompt)
            objects = worker.objects(len(keys))
            whole = handover.cut(len(keys) * self.case.block_size)
            memory = [_bytes(obj) for obj in objects]
            whole.write(0, memory, spec.replaced(num_blocks=len(keys)), blocks=range(len(keys)))
            worker.put(keys, objects)
            assert worker.kvx.batched_contains(keys) == len(keys)
            for obj in objects:
                obj.ref_count_down()

    def read(self, prompts: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
        time.sleep(1.1)  # folders are looked for once a second, and it may have looked before the others wrote
        return super().read(prompts, num_tokens)

    def answer(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """What it would find, and the content of the chunks that it then has."""
        import kvx

        keys = [self._keys(worker, prompt[:-1]) for worker in self._workers]
        count = min(worker.kvx.batched_contains(mine) for worker, mine in zip(self._workers, keys, strict=True))
        total = kvx.Digest()
        for worker, mine, spec in zip(self._workers, keys, self._specs, strict=True):
            found = worker.kvx.batched_get_blocking(mine[:count])
            assert None not in found
            total += kvx.digest([_bytes(obj) for obj in found], spec.replaced(num_blocks=count), blocks=[list(range(count))])
            for obj in found:
                obj.ref_count_down()
        return {"cached": count * self.case.block_size, "content": str(total)}


def _bytes(obj: Any) -> Any:
    import torch

    return obj.tensor.view(-1).view(torch.uint8)
