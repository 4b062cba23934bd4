"""Hybrid models in LMCache's server over KVX's store: an object group for each part of a model, as its 0.5.6 has them.

What an engine would copy to LMCache comes from a handover. Importing this imports LMCache.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="the package lmcache is not installed here; `make engines` makes .venv-lmcache, which has it")
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

import kvx
from kvx.handover import Handover, from_manifest
from kvx.handover.part import Part
from kvx.layout.state_rows import state_row
from kvx.spec import StateSpec
from tests.engines.hybrid_engines import contents, prefilled
from tests.engines.test_lmcache_server import Manager

STATES = {"row": "vllm.sd", "conv": "f32", "matrix": "f32"}


def manager(
    store: Path, model: str, config: Any, chunk: int, *, is_told: bool = True, states: Any = STATES, **more: Any
) -> Manager:  # fmt: skip
    """LMCache's server's storage. `is_told`: of the model, and of the states of its engine."""
    told = {"model": model, "chunk_size": chunk, "num_kv_heads": config.num_key_value_heads, "head_dim": 32, **more}
    if is_told:
        told["config"] = config._name_or_path
        if config.model_type in ("lfm2", "falcon_h1"):
            told["states"] = states
    return Manager(store, **told)


class Objects:
    """A part of a model as LMCache has it: a group's objects, one a chunk; of a window its last ones, of a state one."""

    def __init__(self, part: Part, group: int, chunk: int, hashes: list[bytes], rank: tuple[int, int]) -> None:
        self.part, is_state = part, isinstance(part.spec, StateSpec)
        kv_rank = ObjectKey.ComputeKVRank(rank[1], rank[0], rank[1], rank[0])
        mine = hashes[-1:] if is_state else hashes[part.first_block :]
        self.keys = [ObjectKey(h, "tiny", kv_rank, object_group_id=group) for h in mine]
        if isinstance(part.spec, StateSpec):  # a layer's page of bytes, as wide as LMCache makes it: in steps of 16 a token
            layers = part.spec.num_layers
            content = part.spec.block_content_bytes // layers
            width = -(-content // (16 * chunk)) * 16
            layout = state_row("vllm.sd").layout(part.spec.planes).replace("layer | block", "layer block")
            padded = 0 if chunk * width == content else chunk * width
            self.spec = part.spec.replaced(layout=layout, block_bytes=padded, positions=())
            self.layout = MemoryLayoutDesc([torch.Size((1, layers, chunk, width))], [torch.int8])
        else:
            sizes = part.kv
            self.spec = sizes.replaced(layout="block | kv layer token head dim")
            shape = torch.Size((2, sizes.num_layers, chunk, sizes.num_kv_heads * sizes.head_dim))
            self.layout = MemoryLayoutDesc([shape], [torch.float32])

    def store(self, server: Manager) -> None:
        objects = server.one.reserve_write(self.keys, self.layout)
        assert list(objects) == self.keys
        memory = [obj.tensor.view(-1).view(torch.uint8) for obj in objects.values()]
        kvx.convert(list(self.part.buffers), memory, plan=kvx.plan(self.part.spec, self.spec))
        before = server.adapter.get_usage().total_bytes_used
        server.one.finish_write(self.keys)
        until = time.monotonic() + 30
        while server.adapter.get_usage().total_bytes_used < before + sum(t.numel() for t in memory):
            assert time.monotonic() < until
            time.sleep(0.01)

    def found(self, server: Manager) -> int:
        return server.prefetch(self.keys, self.layout)

    def load(self, server: Manager, into: Part) -> None:
        """Of what was found."""
        memory = [t.reshape(-1).view(torch.uint8) for t in server.read(self.keys)]
        kvx.convert(memory, list(into.buffers), plan=kvx.plan(self.spec, into.spec))


def objects_of(handover: Handover, ids: list[int], chunk: int, rank: tuple[int, int] = (0, 1)) -> list[Objects]:
    hashes = TokenHasher(chunk).compute_chunk_hashes(ids)
    return [Objects(part, n, chunk, hashes, rank) for n, part in enumerate(handover.parts)]


class HybridLmcache:
    """Of the process of a session: LMCache over a store, for prompts of whole chunks. K and V are Transformers'."""

    def __init__(self, folder: str, store: str, model: str, page: int, num_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._store, self._name, self._chunk = Path(store), model, page
        self._like = prefilled(self._model, [3] * num_tokens, page, model)
        self.read([4] * num_tokens)  # it is asked, so that others see in the directory that it is there

    def _open(self) -> Manager:
        return manager(self._store, self._name, self._model.config, self._chunk)

    def write(self, ids: list[int]) -> None:
        with closing(self._open()) as server:
            for each in objects_of(prefilled(self._model, ids, self._chunk, self._name), ids, self._chunk):
                each.store(server)

    def read(self, ids: list[int]) -> dict[str, Any]:
        """How many tokens it finds, if all parts have what they need at their end, and the content of what it read."""
        got, missing = from_manifest(self._like.to_json()), 0
        with closing(self._open()) as server:
            for each, into in zip(objects_of(got, ids, self._chunk), got.parts, strict=True):
                if each.found(server) < len(each.keys):
                    missing += 1
                else:
                    each.load(server, into)
        return {"cached": 0 if missing else len(ids), "contents": [str(each) for each in contents(got)]}
