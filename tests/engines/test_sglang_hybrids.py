"""Hybrid models in SGLang's own host pools and KVX's store: K and V, windows and states of a prompt come back to another instance
as far as every pool has them, and a model goes on from them token for token.

SGLang's kernels need a GPU, so Transformers computes what the pools hold, and answers from what they hold after the store. Page
sizes of 16, 32 and 128, f32, bf16 and fp8 in the store, one rank and two are swept in pairs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

import kvx
from kvx.adapters.sglang.pools import Ranks, read_pool
from kvx.adapters.transformers import KvxCache
from kvx.adapters.transformers.handover import export_cache, import_cache
from kvx.handover import Handover, from_manifest, join
from kvx.handover.part import Part
from kvx.layout.state_rows import state_row
from kvx.spec import CacheSpec, StateSpec
from tests.engines import sglang_pools as sgl
from tests.engines import small_models
from tests.engines.sglang_pools import PoolHitPolicy, PoolName, PoolTransfer

MODEL, KEPT, PROMPT, ANSWER, WINDOW = "hybrid-weights-of-a-test", 256, 300, 16, 64
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


class Instance:
    """One rank of an SGLang: a host pool for each part of a model, as SGLang has them, and its storage backend."""

    def __init__(self, folder: Any, config: Any, handover: Handover, case: Case, rank: int, layout: str = "page_first") -> None:
        self.pools, self.read, self.case = {}, {}, case
        for part in handover.parts:
            self.pools[_pool_name(part)] = _pool(part, config, case, layout)
        told = {"model": MODEL, "num_kv_heads": config.num_key_value_heads, "tp": (rank, case.ranks)}
        if case.format:
            told["format"] = case.format
        self.store = sgl.StorageBackendFactory.create_backend("dynamic", sgl.config(folder, **told), self.pools[PoolName.KV])
        self.store.register_mem_pool_host(self.pools[PoolName.KV])
        ranks = Ranks(rank, case.ranks, num_kv_heads=told["num_kv_heads"], has_groups=len(self.pools) > 1)
        for name, pool in self.pools.items():
            self.store.register_mem_host_pool_v2(pool, name)
            self.read[name] = read_pool(name, pool, model=MODEL, ranks=ranks)
        self.store.on_host_pools_registered()

    def transfer(self, part: Part, keys: Sequence[str]) -> PoolTransfer:
        """Of the pages that a pool has: all, the last of a window, or that of a state."""
        name = _pool_name(part)
        size = 1 if isinstance(part.spec, StateSpec) else self.case.page
        mine = list(keys[-1:] if isinstance(part.spec, StateSpec) else keys[part.first_block :])
        self.pools[name].alloc(size)  # not the same places in every instance
        where = self.pools[name].alloc(len(mine) * size)
        policy = PoolHitPolicy.ALL_PAGES if name == PoolName.KV else PoolHitPolicy.TRAILING_PAGES
        return PoolTransfer(name=name, host_indices=where, keys=mine, hit_policy=policy)

    def fill(self, handover: Handover, number: int, told: PoolTransfer) -> None:
        """What SGLang would have copied from its device."""
        part, pool = handover.parts[number], self.pools[told.name]
        if isinstance(part.spec, StateSpec):
            page = torch.zeros(self.read[told.name].page_bytes, dtype=torch.uint8)
            handover.write_planes(number, [page], _page_spec(part), [0])
            pool.set_from_flat_data_page(int(told.host_indices[0]), page.view(pool.get_dummy_flat_data_page().dtype))
            return
        here = self.read[told.name]
        pages = [-1] * part.first_block + here.blocks(here.pages(told.host_indices, len(told.keys)))
        handover.write(number, list(here.buffers), _counted(here.spec), blocks=pages)

    def take(self, part: Part, told: PoolTransfer) -> None:
        """What the pool has, into a part of a handover."""
        if isinstance(part.spec, StateSpec):
            flat = self.pools[told.name].get_data_page(int(told.host_indices[0]), flat=True).contiguous().view(torch.uint8)
            kvx.convert([flat], list(part.buffers), plan=kvx.plan(_page_spec(part), part.spec))
            return
        here = self.read[told.name]
        pages = here.blocks(here.pages(told.host_indices, len(told.keys)))
        plan = kvx.plan(_counted(here.spec), part.spec)
        kvx.convert(list(here.buffers), list(part.buffers), plan=plan, src_blocks=pages, dst_blocks=list(range(len(pages))))


def _pool_name(part: Part) -> Any:
    return PoolName.MAMBA if isinstance(part.spec, StateSpec) else PoolName.SWA if part.window else PoolName.KV


def _pool(part: Part, config: Any, case: Case, layout: str) -> Any:
    if isinstance(part.spec, StateSpec):
        return sgl.state_pool(config, list(part.layers), case.ranks)
    sizes = {"layers": part.spec.num_layers, "heads": part.kv.num_kv_heads, "dim": part.kv.head_dim, "tokens": 1024}
    return sgl.mha_pool(layout, page_size=case.page, dtype=torch.float32, **sizes)


def _page_spec(part: Part) -> StateSpec:
    assert isinstance(part.spec, StateSpec)
    layout = state_row("sglang.host").layout(part.spec.planes)
    return part.spec.replaced(layout=layout, positions=())


def _counted(spec: CacheSpec) -> CacheSpec:
    """Layers counted within the part, as a handover's are."""
    return spec.replaced(layer_start=0)


def _prefilled(model: Any, ids: list[int], page: int) -> Handover:
    cache = KvxCache(model.config, block_size=page)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache)
    return export_cache(cache, ids, model=MODEL, block_size=page)


def _answer(model: Any, ids: list[int], cache: Any = None) -> list[int]:
    how = {"do_sample": False, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        return model.generate(torch.tensor([ids]), past_key_values=cache, **how)[0, len(ids) :].tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model}-{c.page}-tp{c.ranks}-{(c.format or 'f32')[:4]}")
def test_another_instance_goes_on_from_what_one_wrote(models, case, tmp_path):
    model, rng = models[case.model], random.Random(11)
    ids = [rng.randrange(3, 256) for _ in range(PROMPT)]
    written = _prefilled(model, ids[:KEPT], case.page)
    keys, found = sgl.keys(ids[:PROMPT], case.page)[: PROMPT // case.page], []
    num_kept = KEPT // case.page
    for rank, mine in enumerate(written.shard(case.ranks)):
        writer = Instance(tmp_path, model.config, mine, case, rank, case.layout)
        told = [writer.transfer(part, keys[:num_kept]) for part in mine.parts]
        for n, transfer in enumerate(told):
            writer.fill(mine, n, transfer)
        assert all(all(done) for done in writer.store.batch_set_v2(told).values())
        writer.store.close()

        reader = Instance(tmp_path, model.config, mine, case, rank, "layer_first")
        # As SGLang asks: with the pages that each pool needs at the end of the prompt.
        wanted = [reader.transfer(part, keys[:num_kept]) for part in mine.parts]
        told = [PoolTransfer(name=t.name, keys=t.keys, hit_policy=t.hit_policy) for t in wanted if t.name != PoolName.KV]
        hit = reader.store.batch_exists_v2(keys, told)
        assert (hit.kv_hit_pages, hit.restorable_prefix_pages[-1]) == (num_kept, num_kept)
        if len(mine.parts) > 1 and not mine.parts[-1].window:  # a state stands at one place
            assert hit.restorable_prefix_pages == [num_kept]
            assert reader.store.batch_exists_v2(keys[: num_kept - 1], told).kv_hit_pages == 0
        assert all(all(done) for done in reader.store.batch_get_v2(wanted).values())
        got = from_manifest(mine.to_json())
        for part, transfer in zip(got.parts, wanted, strict=True):
            reader.take(part, transfer)
        reader.store.close()
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


def test_states_of_other_ranks_are_misses(models, tmp_path):
    """Falcon-H1 by one rank and by two: of states each finds its own alone, so nothing can be gone on from."""
    ids = [n % 251 + 3 for n in range(64)]
    written, keys = _prefilled(models["falcon_h1"], ids, 16), sgl.keys(ids, 16)
    config = models["falcon_h1"].config
    one = Instance(tmp_path, config, written, Case("falcon_h1", 16), 0)
    told = [one.transfer(part, keys) for part in written.parts]
    for n, transfer in enumerate(told):
        one.fill(written, n, transfer)
    assert all(all(done) for done in one.store.batch_set_v2(told).values())
    half = Instance(tmp_path, config, written.shard(2)[0], Case("falcon_h1", 16, ranks=2), 0)
    wanted = [PoolTransfer(name=PoolName.MAMBA, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    assert half.store.batch_exists(keys) == 4  # K and V of any ranks
    assert half.store.batch_exists_v2(keys, wanted).kv_hit_pages == 0
    for each in (one, half):
        each.store.close()
