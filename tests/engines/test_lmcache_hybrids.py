"""Hybrid models in LMCache's server over KVX's store: an object group for each kind of layers, as its 0.5.6 has them.

What an engine would copy to LMCache is Transformers' here, and Transformers answers from what comes back. LMCache's way for
engines on a CPU refuses such models itself.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="the package lmcache is not installed here; `make engines` makes .venv-lmcache, which has it")
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.multiprocess.transfer_context import worker_transfer

import kvx
from kvx.adapters.transformers import KvxCache
from kvx.adapters.transformers.handover import export_cache, import_cache
from kvx.handover import Handover, from_manifest, join
from kvx.handover.part import Part
from kvx.spec import StateSpec
from tests.engines import small_models
from tests.engines.test_lmcache_server import Manager

KEPT, PROMPT, ANSWER, NAME = 256, 300, 16, "weights-of-a-hybrid"
CASES = [("lfm2", 16, 1), ("lfm2", 128, 2), ("falcon_h1", 32, 1), ("falcon_h1", 128, 2), ("gemma4", 32, 1), ("gemma4", 16, 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    more = {"falcon_h1": {"kv_heads": 2}, "gemma4": {"window": 64}}
    made = {}
    for name in ("lfm2", "falcon_h1", "gemma4"):
        folder = getattr(small_models, f"make_{name}")(tmp_path_factory.mktemp(name), **more.get(name, {}))
        made[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return made


class Objects:
    """A part of a model as LMCache has it: a group's objects, one a chunk; of a window its last ones, of a state one."""

    def __init__(self, part: Part, group: int, chunk: int, hashes: list[bytes], rank: tuple[int, int]) -> None:
        self.part, is_state = part, isinstance(part.spec, StateSpec)
        kv_rank = ObjectKey.ComputeKVRank(rank[1], rank[0], rank[1], rank[0])
        mine = hashes[-1:] if is_state else hashes[part.first_block :]
        self.keys = [ObjectKey(h, "tiny", kv_rank, object_group_id=group) for h in mine]
        if is_state:  # bytes that LMCache does not look into
            self.spec, shape = part.spec, (1, 1, sum(t.numel() for t in part.buffers) // 4)
        else:
            sizes = part.kv
            shape = (2, sizes.num_layers, chunk, sizes.num_kv_heads * sizes.head_dim)
            self.spec = sizes.replaced(layout="block | kv layer token head dim")
        self.layout = MemoryLayoutDesc([torch.Size(shape)], [torch.float32])

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

    def load(self, server: Manager, into: Part) -> None:
        assert server.prefetch(self.keys, self.layout) == len(self.keys)
        memory = [t.reshape(-1).view(torch.uint8) for t in server.read(self.keys)]
        kvx.convert(memory, list(into.buffers), plan=kvx.plan(self.spec, into.spec))


def _answer(model: Any, ids: list[int], cache: Any = None) -> list[int]:
    how = {"do_sample": False, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        return model.generate(torch.tensor([ids]), past_key_values=cache, **how)[0, len(ids) :].tolist()


@pytest.mark.parametrize(("name", "chunk", "ranks"), CASES, ids=lambda x: str(x))
def test_another_server_goes_on_from_what_one_kept(models, name, chunk, ranks, tmp_path):
    model, rng = models[name], random.Random(11)
    ids = [rng.randrange(3, 256) for _ in range(PROMPT)]
    cache = KvxCache(model.config, block_size=chunk)
    with torch.no_grad():
        model(torch.tensor([ids[:KEPT]]), past_key_values=cache)
    written = export_cache(cache, ids[:KEPT], model=NAME, block_size=chunk)
    hashes, found = TokenHasher(chunk).compute_chunk_hashes(ids[:KEPT]), list[Handover]()
    told = {"model": NAME, "chunk_size": chunk, "num_kv_heads": model.config.num_key_value_heads, "head_dim": 32}
    for rank, mine in enumerate(written.shard(ranks)):
        groups = [Objects(part, n, chunk, hashes, (rank, ranks)) for n, part in enumerate(mine.parts)]
        writer, got = Manager(tmp_path, **told), from_manifest(mine.to_json())
        for each in groups:
            each.store(writer)
        writer.close()
        reader = Manager(tmp_path, **told)  # another server: nothing is known but the directory
        for each, into in zip(groups, got.parts, strict=True):
            each.load(reader, into)
        if isinstance(mine.parts[-1].spec, StateSpec):  # it is found where it stands
            elsewhere = Objects(mine.parts[-1], len(groups) - 1, chunk, hashes[:-1], (rank, ranks))
            assert reader.prefetch(elsewhere.keys, elsewhere.layout) == 0
        reader.close()
        got.check()  # every byte is the writer's
        found.append(got)
    alone = _answer(model, ids)
    assert len(set(alone)) > 5  # a text, in which a wrong cache would show
    assert _answer(model, ids, import_cache(join(found), model.config, model=NAME, tokens=ids)) == alone


def test_lmcache_itself_takes_no_hybrids_from_an_engine_on_a_cpu():
    """Its engine-driven mode, the only one without a GPU: blocks of several groups are refused before a store is asked."""
    assert worker_transfer._single_group_block_ids([[1, 2]]) == [1, 2]
    with pytest.raises(RuntimeError, match="does not support hybrid KV cache groups"):
        worker_transfer._single_group_block_ids([[1, 2], [3]])
