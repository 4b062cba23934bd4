"""Hybrid models in LMCache's server over KVX's store: an object group for each kind of layers, as its 0.5.6 has them.

What an engine would copy to LMCache is Transformers' here, and Transformers answers from what comes back. LMCache's way for
engines on a CPU refuses such models itself.
"""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="the package lmcache is not installed here; `make engines` makes .venv-lmcache, which has it")
from lmcache.v1.multiprocess.transfer_context import worker_transfer

import kvx
from kvx.adapters.store import HandoverStore, store_parts
from kvx.adapters.transformers.handover import import_cache
from kvx.errors import BadArgument
from kvx.handover import Handover, from_manifest, join
from kvx.spec import StateSpec
from tests.engines import small_models
from tests.engines.hybrid_engines import MODEL, HybridPaged, contents, prefilled
from tests.engines.hybrid_objects import STATES, manager, objects_of
from tests.engines.test_lmcache_server import Manager

KEPT, PROMPT, ANSWER = 256, 300, 16
FP8 = "fp8_e4m3_per_token_head_inline"
# Chunks, ranks, and whether the model's config is given: without it objects go whole.
CASES = [
    ("lfm2", 16, 1, False), ("lfm2", 128, 2, True), ("falcon_h1", 32, 1, True), ("falcon_h1", 128, 2, False),
    ("gemma4", 32, 1, False), ("gemma4", 16, 2, True),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    more = {"falcon_h1": {"kv_heads": 2}, "gemma4": {"window": 64}}
    made = {}
    for name in ("lfm2", "falcon_h1", "gemma4"):
        folder = getattr(small_models, f"make_{name}")(tmp_path_factory.mktemp(name), **more.get(name, {}))
        made[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return made


def _answer(model: Any, ids: list[int], cache: Any = None) -> list[int]:
    how = {"do_sample": False, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        return model.generate(torch.tensor([ids]), past_key_values=cache, **how)[0, len(ids) :].tolist()


@pytest.mark.parametrize(("name", "chunk", "ranks", "is_told"), CASES, ids=lambda x: str(x))
def test_another_server_goes_on_from_what_one_kept(models, name, chunk, ranks, is_told, tmp_path):
    model, rng = models[name], random.Random(11)
    ids = [rng.randrange(3, 256) for _ in range(PROMPT)]
    written, found = prefilled(model, ids[:KEPT], chunk, MODEL), list[Handover]()
    for rank, mine in enumerate(written.shard(ranks)):
        groups, got = objects_of(mine, ids[:KEPT], chunk, (rank, ranks)), from_manifest(mine.to_json())
        with closing(manager(tmp_path, MODEL, model.config, chunk, is_told=is_told)) as writer:
            for each in groups:
                each.store(writer)
        # Another server: nothing is known but the directory.
        with closing(manager(tmp_path, MODEL, model.config, chunk, is_told=is_told)) as reader:
            for each, into in zip(groups, got.parts, strict=True):
                assert each.found(reader) == len(each.keys)
                each.load(reader, into)
            if isinstance(mine.parts[-1].spec, StateSpec):  # it is found where it stands
                assert objects_of(mine, ids[: KEPT - chunk], chunk, (rank, ranks))[-1].found(reader) == 0
        got.check()  # every byte is the writer's
        found.append(got)
    alone = _answer(model, ids)
    assert len(set(alone)) > 5  # a text, in which a wrong cache would show
    assert _answer(model, ids, import_cache(join(found), model.config, model=MODEL, tokens=ids)) == alone


# Chunks, ranks of LMCache, and blocks in the store of an engine with one rank.
OTHERS = [
    ("lfm2", 16, 1, "", 32), ("lfm2", 128, 2, "bf16", 16), ("falcon_h1", 32, 1, FP8, 16), ("falcon_h1", 128, 2, "", 32),
    ("gemma4", 32, 1, "", 16), ("gemma4", 16, 2, FP8, 32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "chunk", "ranks", "format", "block"), OTHERS, ids=lambda x: str(x)[:4])
def test_others_find_what_it_wrote_and_it_finds_theirs(models, name, chunk, ranks, format, block, tmp_path):
    """Transformers and the KVX runner through a HandoverStore, on the directory of LMCache's server."""
    model, rng, told = models[name], random.Random(13), {"format": format} if format else {}
    texts = [[rng.randrange(3, 256) for _ in range(PROMPT)] for _ in range(2)]
    written, theirs = (prefilled(model, ids[:KEPT], chunk, MODEL) for ids in texts)

    def server() -> Manager:
        return manager(tmp_path, MODEL, model.config, chunk, **told)

    kept = store_parts(model.config, model=MODEL, block_size=block, dtype="f32", format=format)
    with HandoverStore(f"disk:{tmp_path}", kept) as store:
        for rank, mine in enumerate(written.shard(ranks)):
            with closing(server()) as one:
                for each in objects_of(mine, texts[0][:KEPT], chunk, (rank, ranks)):
                    each.store(one)
        found = store.find(texts[0][:-1])
        assert found is not None
        assert found.num_tokens == KEPT
        assert _digests(found.convert(format="f32"), ranks) == _read(server, written, texts[0][:KEPT], chunk, ranks)
        store.keep(theirs)
        rounded = theirs.convert(format=format).convert(format="f32") if format else theirs
        assert _digests(rounded, ranks) == _read(server, theirs, texts[1][:KEPT], chunk, ranks)
    if format:
        return
    alone, runner = _answer(model, texts[0]), HybridPaged(model)
    assert len(set(alone)) > 5
    assert _answer(model, texts[0], import_cache(found, model.config, model=MODEL, tokens=texts[0])) == alone
    for handover in (None, found):
        assert runner.decode(texts[0], ANSWER, handover).tokens == alone


def _digests(handover: Handover, ranks: int) -> list[list[kvx.Digest]]:
    return [contents(mine) for mine in handover.shard(ranks)]


def _read(server: Any, like: Handover, ids: list[int], chunk: int, ranks: int) -> list[list[kvx.Digest]]:
    """What LMCache's memory has of these chunks after they were read out of the store."""
    found = []
    for rank, mine in enumerate(like.shard(ranks)):
        got = from_manifest(mine.to_json())
        with closing(server()) as one:
            for each, into in zip(objects_of(mine, ids, chunk, (rank, ranks)), got.parts, strict=True):
                assert each.found(one) == len(each.keys)
                each.load(one, into)
        found.append(contents(got))
    return found


def test_states_are_found_by_lmcache_alone_where_the_engines_order_is_not_told(models, tmp_path, caplog):
    """Pages of bytes: LMCache says neither their planes nor their types."""
    model, ids = models["falcon_h1"], [n % 251 + 3 for n in range(64)]
    written = prefilled(model, ids, 16, MODEL)
    with closing(manager(tmp_path, MODEL, model.config, 16, states=None)) as one:
        for each in objects_of(written, ids, 16):
            each.store(one)
        assert "of the group 1 are found by LMCache alone" in caplog.text
    with closing(manager(tmp_path, MODEL, model.config, 16, states=None)) as one:
        assert [each.found(one) for each in objects_of(written, ids, 16)] == [4, 1]
    kept = store_parts(model.config, model=MODEL, block_size=16, dtype="f32")
    with HandoverStore(f"disk:{tmp_path}", kept) as store:
        assert store.find(ids) is None


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ({"row": "vllm.sd"}, "it must say how the engine keeps them"),
        ({**STATES, "row": "llama_cpp"}, "Rows are vllm.sd, vllm.ds"),
        ({**STATES, "matrix": "fp8"}, "formats are bf16, f16, f32"),
    ],
)
def test_what_is_wrong_with_states_is_said(models, states, says, tmp_path):
    with pytest.raises(BadArgument, match=says):
        manager(tmp_path, MODEL, models["lfm2"].config, 16, states=states)


def test_lmcache_itself_takes_no_hybrids_from_an_engine_on_a_cpu():
    """Its engine-driven mode, the only one without a GPU: blocks of several groups are refused before a store is asked."""
    assert worker_transfer._single_group_block_ids([[1, 2]]) == [1, 2]
    with pytest.raises(RuntimeError, match="does not support hybrid KV cache groups"):
        worker_transfer._single_group_block_ids([[1, 2], [3]])
