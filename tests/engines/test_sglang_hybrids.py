"""Hybrid models in SGLang's own host pools and KVX's store: K and V, windows and states of a prompt come back to another instance
as far as every pool has them, and a model goes on from them token for token.

SGLang's kernels need a GPU, so Transformers computes what the pools hold, and answers from what they hold after the store. Page
sizes of 16, 32 and 128, f32, bf16 and fp8 in the store, one rank and two are swept in pairs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from copy import copy, deepcopy
from typing import Any, NamedTuple

import pytest
import torch

import kvx
from kvx.adapters.store import HandoverStore, store_parts
from kvx.adapters.transformers.handover import import_cache
from kvx.errors import BadArgument
from kvx.handover import Handover, from_manifest, join
from kvx.handover.part import Part
from kvx.spec import StateSpec
from tests.engines import sglang_pools as sgl
from tests.engines import small_models
from tests.engines.hybrid_engines import MODEL, HybridPaged, contents, prefilled
from tests.engines.hybrid_pools import SglangRank

KEPT, PROMPT, ANSWER, WINDOW = 256, 300, 16, 64
FP8 = "fp8_e4m3_per_token_head_inline"
ROUNDING = {"": 0.0, "bf16": 2.0**-8, FP8: 2.0**-4}  # of one number


class Case(NamedTuple):
    model: str
    page: int
    ranks: int = 1
    format: str = ""  # of K and V in the store; "": as the pool's, f32. States are kept as they are
    layout: str = "page_first"  # of the writer's pools; the reader has another


CASES = [
    Case("lfm2", 16),
    Case("lfm2", 32, format="bf16", layout="page_head"),
    Case("lfm2", 32, ranks=2),  # both have the one KV head, and each half of the channels
    Case("falcon_h1", 128),
    Case("falcon_h1", 16, ranks=2, layout="page_first_direct"),
    Case("falcon_h1", 32, format=FP8),
    Case("gemma4", 32),
    Case("gemma4", 32, ranks=2, layout="page_head"),
    Case("gemma4", 128, format="bf16"),
    Case("gemma4", 16, format=FP8, layout="page_first_direct"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    more = {"falcon_h1": {"kv_heads": 2}, "gemma4": {"window": WINDOW}}
    made = {}
    for name in ("lfm2", "falcon_h1", "gemma4"):
        folder = getattr(small_models, f"make_{name}")(tmp_path_factory.mktemp(name), **more.get(name, {}))
        made[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return made


def _open(path: Any, model: Any, handover: Handover, case: Case, rank: int, layout: str = "page_first", **more: Any) -> SglangRank:
    told = {"page": case.page, "rank": (rank, case.ranks), "format": case.format, "layout": layout, **more}
    return SglangRank(path, MODEL, model.config, handover, **told)


def _answer(model: Any, ids: list[int], cache: Any = None) -> list[int]:
    how = {"do_sample": False, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        return model.generate(torch.tensor([ids]), past_key_values=cache, **how)[0, len(ids) :].tolist()


def _said(case: Case) -> str:
    return f"{case.model}-{case.page}-tp{case.ranks}-{(case.format or 'f32')[:4]}"


@pytest.mark.parametrize("case", CASES, ids=_said)
def test_another_instance_goes_on_from_what_one_wrote(models, case, tmp_path):
    model, rng = models[case.model], random.Random(11)
    ids = [rng.randrange(3, 256) for _ in range(PROMPT)]
    written = prefilled(model, ids[:KEPT], case.page, MODEL)
    keys, found = sgl.keys(ids[:PROMPT], case.page)[: PROMPT // case.page], []
    num_kept = KEPT // case.page
    for rank, mine in enumerate(written.shard(case.ranks)):
        writer = _open(tmp_path, model, mine, case, rank, case.layout)
        writer.write(mine, keys[:num_kept])
        writer.close()

        reader = _open(tmp_path, model, mine, case, rank, "layer_first")
        hit = reader.found(mine, keys, num_kept)
        assert (hit.kv_hit_pages, hit.restorable_prefix_pages[-1]) == (num_kept, num_kept)
        if isinstance(mine.parts[-1].spec, StateSpec):  # it stands at one place
            assert hit.restorable_prefix_pages == [num_kept]
            assert reader.found(mine, keys[: num_kept - 1], num_kept).kv_hit_pages == 0
        got = from_manifest(mine.to_json())
        reader.load(got, keys[:num_kept])
        reader.close()
        if not case.format:
            got.check()  # every byte is the writer's
        for a, b in zip(got.parts, mine.parts, strict=True):
            _compare(a, b, ROUNDING[case.format])
        found.append(got)
    if case.format:
        return
    cache = import_cache(join(found), model.config, model=MODEL, tokens=ids)
    alone = _answer(model, ids)
    assert len(set(alone)) > 5  # a text, in which a wrong cache would show
    assert _answer(model, ids, cache) == alone


def _compare(got: Part, want: Part, rounding: float) -> None:
    for a, b in zip(got.buffers, want.buffers, strict=True):
        x, y = a.view(torch.float32), b.view(torch.float32)
        if isinstance(got.spec, StateSpec) or not rounding:
            assert torch.equal(x, y)
            continue
        rows = y.view(-1, want.kv.head_dim)
        room = rounding * rows.abs() + rounding * rows.abs().amax(-1, keepdim=True) * 2.0**-9  # below the smallest normal number
        assert ((x.view_as(rows) - rows).abs() <= room).all()


# With blocks of another size in the store than SGLang's pages, and SGLang by one rank and two while the others have one.
OTHERS = [
    (Case("lfm2", 16), 32),
    (Case("lfm2", 32, ranks=2), 16),
    (Case("lfm2", 128, format="bf16", layout="page_head"), 32),
    (Case("falcon_h1", 128), 32),
    (Case("falcon_h1", 16, ranks=2, layout="page_first_direct"), 128),
    (Case("falcon_h1", 32, format=FP8), 16),
    (Case("gemma4", 32), 16),
    (Case("gemma4", 16, ranks=2, layout="page_head"), 32),
    (Case("gemma4", 16, format=FP8), 32),
]


@pytest.mark.parametrize(("case", "block"), OTHERS, ids=lambda c: _said(c) if isinstance(c, Case) else str(c))
def test_others_find_what_it_wrote_and_it_finds_theirs(models, case, block, tmp_path):
    """Transformers and the KVX runner through a HandoverStore, on the directory of SGLang's pools."""
    model, rng = models[case.model], random.Random(13)
    texts = [[rng.randrange(3, 256) for _ in range(PROMPT)] for _ in range(2)]
    written, theirs = (prefilled(model, ids[:KEPT], case.page, MODEL) for ids in texts)
    keys = [sgl.keys(ids[:KEPT], case.page) for ids in texts]
    kept = store_parts(model.config, model=MODEL, block_size=block, dtype="f32", format=case.format)
    with HandoverStore(f"disk:{tmp_path}", kept) as store:
        for rank, mine in enumerate(written.shard(case.ranks)):
            with closing(_open(tmp_path, model, mine, case, rank, case.layout)) as one:
                one.write(mine, keys[0])
        found = store.find(texts[0][:-1])
        assert found is not None
        assert found.num_tokens == KEPT
        # The same as SGLang itself has there, which of another prompt has what the store has.
        assert _digests(found.convert(format="f32"), case.ranks) == _read(tmp_path, model, written, case, keys[0])
        store.keep(theirs)
        rounded = theirs.convert(format=case.format).convert(format="f32") if case.format else theirs
        assert _digests(rounded, case.ranks) == _read(tmp_path, model, theirs, case, keys[1])
    if case.format:
        return
    alone, runner = _answer(model, texts[0]), HybridPaged(model)
    assert len(set(alone)) > 5  # a text, in which a wrong cache would show
    assert _answer(model, texts[0], import_cache(found, model.config, model=MODEL, tokens=texts[0])) == alone
    for handover in (None, found):
        assert runner.decode(texts[0], ANSWER, handover).tokens == alone


def _digests(handover: Handover, ranks: int) -> list[list[kvx.Digest]]:
    """Of each rank's part of it, as it is now."""
    return [contents(mine) for mine in handover.shard(ranks)]


def _read(path: Any, model: Any, like: Handover, case: Case, keys: Sequence[str]) -> list[list[kvx.Digest]]:
    """What SGLang's pools have of these pages after it was read out of the store."""
    found = []
    for rank, mine in enumerate(like.shard(case.ranks)):
        with closing(_open(path, model, mine, case, rank, "layer_first")) as reader:
            assert reader.found(mine, keys, len(keys)).kv_hit_pages == len(keys)
            got = from_manifest(mine.to_json())
            reader.load(got, keys)
            found.append(contents(got))
    return found


def test_without_the_models_config_it_finds_its_own_alone(models, tmp_path, caplog):
    """Which layers a pool has SGLang does not say, so nothing is guessed; states are found by the same ranks."""
    ids, model = [n % 251 + 3 for n in range(64)], models["falcon_h1"]
    written, keys = prefilled(model, ids, 16, MODEL), sgl.keys(ids, 16)
    with closing(_open(tmp_path, model, written, Case("falcon_h1", 16), 0, is_told=False)) as one:
        assert "found by SGLang alone" in caplog.text
        one.write(written, keys)
        assert one.found(written, keys, 4).kv_hit_pages == 4
    with closing(_open(tmp_path, model, written.shard(2)[0], Case("falcon_h1", 16, ranks=2), 0, is_told=False)) as half:
        assert half.store.batch_exists(keys) == 4  # K and V of any ranks
        assert half.found(written.shard(2)[0], keys, 4).kv_hit_pages == 0
    kept = store_parts(model.config, model=MODEL, block_size=16, dtype="f32")
    with HandoverStore(f"disk:{tmp_path}", kept) as store:
        assert store.find(ids) is None


def test_a_config_of_another_model_is_refused(models, tmp_path):
    written = prefilled(models["falcon_h1"], [n % 251 + 3 for n in range(64)], 16, MODEL)
    model = copy(models["falcon_h1"])
    model.config = deepcopy(model.config)
    model.config._name_or_path = models["lfm2"].config._name_or_path
    with pytest.raises(BadArgument, match=r"config says that the pool 'kv' has 1 of 1 heads.*SGLang's has 2 layers of 2 heads"):
        _open(tmp_path, model, written, Case("falcon_h1", 16), 0)
