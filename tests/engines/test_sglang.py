"""KvxStorage behind SGLang's own factory, host pools and controller: pages written by one instance are found by another, whatever
its layout, page size and number of ranks."""

from __future__ import annotations

import itertools
import queue
import time
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.adapters.sglang import link, page_names
from kvx.adapters.sglang.pools import Ranks, read_pool
from kvx.errors import BadArgument, KvxError
from kvx.handover import NEUTRAL, names
from kvx.tiers import BlockKind, TierOption
from tests.engines import sglang_pools as sgl
from tests.engines.sglang_pools import PoolHitPolicy, PoolName, PoolTransfer

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
TOKENS = [(n * 37 + n // 7) % 256 for n in range(64)]


def filled(pool, seed: int = 0):
    """Numbers in every element, none of them zero."""
    torch.manual_seed(seed)
    for t in {id(t): t for t in (pool.kv_buffer if isinstance(pool.kv_buffer, (tuple, list)) else [pool.kv_buffer])}.values():
        t.copy_(torch.randn(t.shape).abs() + 0.5)
    return pool


def content(pools, indices, ranks=None) -> kvx.Digest:
    """The digest of these pages, of all ranks together."""
    read = [read_pool("kv", pool, model=sgl.MODEL, ranks=ranks[n] if ranks else Ranks()) for n, pool in enumerate(pools)]
    blocks = [read[0].blocks(read[0].pages(i, i.numel() // read[0].page_size)) for i in indices]
    total = None
    for r, ids in zip(read, blocks, strict=True):
        one = kvx.digest(list(r.buffers), r.spec, blocks=[ids])
        total = one if total is None else total + one
    return total


def elsewhere(pool, count: int):
    """Other places than the first: an instance that forgot to convert ids would be seen."""
    pool.alloc(2 * pool.page_size)
    return pool.alloc(count)


def test_names_are_sglangs():
    for page_size, extra_key, salt in itertools.product((1, 4, 16), (None, "", "lora-7"), (None, "tenant")):
        told = sgl.keys(TOKENS[:50], page_size, extra_key, salt)[: 50 // page_size]  # it hashes what is left over too
        ours = page_names(TOKENS[:50], page_size, extra_key=extra_key, cache_salt=salt)
        assert [bytes.fromhex(key) for key in told] == ours
    assert page_names(TOKENS[:3], 4) == []


@pytest.mark.parametrize("kept", ["", "canonical"])
@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_layout_finds_every_other(tmp_path, writer, kept):
    pool = filled(sgl.mha_pool(writer))
    there = elsewhere(pool, 32)
    keys = sgl.keys(TOKENS[:32], 4)
    assert sgl.backend(tmp_path, pool, layout=kept).batch_set_v1(keys, there) == [True] * 8
    for reader in LAYOUTS:
        other = sgl.mha_pool(reader)
        store, here = sgl.backend(tmp_path, other, layout=kept), other.alloc(32)
        assert store.batch_exists([*keys, "0" * 64]) == 8
        assert store.batch_get_v1([*keys[:6], "0" * 64], here[:28]) == [True] * 6 + [False]
        assert store.batch_get_v1(keys, here) == [True] * 8
        assert content([other], [here]) == content([pool], [there])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_latents(tmp_path, layout):
    pool = filled(sgl.mla_pool(layout))
    there, keys = elsewhere(pool, 32), sgl.keys(TOKENS[:32], 4)
    assert sgl.backend(tmp_path, pool, is_mla=True, tp=(0, 2)).batch_set_v1(keys, there) == [True] * 8
    for reader, rank in itertools.product(("layer_first", "page_first", "page_first_direct"), (0, 1)):
        other = sgl.mla_pool(reader)  # every rank has the whole row
        here = other.alloc(32)
        assert sgl.backend(tmp_path, other, is_mla=True, tp=(rank, 2)).batch_get_v1(keys, here) == [True] * 8
        assert content([other], [here]) == content([pool], [there])


@pytest.mark.parametrize("kept", ["", "canonical"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_values_of_another_width(tmp_path, layout, kept):
    pool = filled(sgl.mha_pool(layout, v_dim=8))
    there, keys = elsewhere(pool, 16), sgl.keys(TOKENS[:16], 4)
    assert sgl.backend(tmp_path, pool, layout=kept).batch_set_v1(keys, there) == [True] * 4
    for reader in ("page_first", "page_first_direct"):
        other = sgl.mha_pool(reader, v_dim=8)
        here = other.alloc(16)
        assert sgl.backend(tmp_path, other).batch_get_v1(keys, here) == [True] * 4
        assert content([other], [here]) == content([pool], [there])


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)])
def test_ranks(tmp_path, writers, readers):
    """Ranks of TP 4 have one head each: the model's number of heads says which."""
    keys = sgl.keys(TOKENS[:32], 4)

    def instance(ranks: int, layout: str, is_filled: bool):
        pools, where, stores = [], [], []
        for rank in range(ranks):
            pool = sgl.mha_pool(layout, heads=sgl.HEADS // ranks)
            pools.append(filled(pool, rank) if is_filled else pool)
            where.append(elsewhere(pool, 32))
            stores.append(sgl.backend(tmp_path, pool, tp=(rank, ranks), num_kv_heads=sgl.HEADS))
        return pools, where, stores, [Ranks(rank, ranks, num_kv_heads=sgl.HEADS) for rank in range(ranks)]

    pools, there, stores, ranks = instance(writers, "page_first_direct", True)
    for store, where in zip(stores, there, strict=True):
        assert store.batch_set_v1(keys, where) == [True] * 8
    others, here, found, other_ranks = instance(readers, "page_head", False)
    for store, where in zip(found, here, strict=True):
        assert store.batch_exists(keys) == 8
        assert store.batch_get_v1(keys, where) == [True] * 8
    assert content(others, here, other_ranks) == content(pools, there, ranks)


def test_heads_that_nobody_named_are_not_guessed(tmp_path):
    """Ranks with one head each may hold a head together with others."""
    keys, pool = sgl.keys(TOKENS[:16], 4), filled(sgl.mha_pool("page_first", heads=1))
    assert all(sgl.backend(tmp_path, pool, tp=(0, 4)).batch_set_v1(keys, pool.alloc(16)))
    assert sgl.backend(tmp_path, sgl.mha_pool("page_first", heads=1), tp=(0, 4)).batch_exists(keys) == 4
    assert sgl.backend(tmp_path, sgl.mha_pool("page_first", heads=1), tp=(1, 4)).batch_exists(keys) == 0
    assert sgl.backend(tmp_path, sgl.mha_pool("page_first")).batch_exists(keys) == 0


@pytest.mark.parametrize(("page_size", "other_size"), [(4, 16), (16, 4), (8, 12), (1, 8)])
def test_page_sizes(tmp_path, page_size, other_size):
    """Hashes of pages of another size are no function of each other: who has the tokens links them."""
    pool = filled(sgl.mha_pool("page_first", page_size=page_size, tokens=96))
    count = 48
    there = elsewhere(pool, count)
    assert all(sgl.backend(tmp_path, pool).batch_set_v1(sgl.keys(TOKENS[:count], page_size), there))
    other = sgl.mha_pool("layer_first", page_size=other_size, tokens=96)
    store, keys = sgl.backend(tmp_path, other), sgl.keys(TOKENS[:count], other_size)
    assert store.batch_exists(keys) == 0
    assert link(TOKENS[:count], tmp_path, model=sgl.MODEL, page_size=other_size) == len(keys)
    time.sleep(1.1)  # folders are looked for once a second
    assert store.batch_exists(keys) == len(keys)
    here = elsewhere(other, count)
    assert store.batch_get_v1(keys, here) == [True] * len(keys)
    assert content([other], [here]) == content([pool], [there])


def test_blocks_that_another_engine_wrote(tmp_path):
    """By KVX's names, neutral, in blocks of another size: as vLLM's connector and handovers keep them."""
    spec = kvx.CacheSpec(4, 16, sgl.HEADS, sgl.DIM, layout=NEUTRAL, num_layers=sgl.LAYERS, model=sgl.MODEL)
    blocks = kvx.allocate_buffers(spec)
    for t in blocks:
        t.view(torch.bfloat16).normal_()
    kind = BlockKind.of(replace(spec, num_blocks=1))
    with TierOption.parse(f"disk:{tmp_path}").open(kind) as tier:
        tier.put(names(TOKENS, 16, sgl.MODEL), [kind.block([t]) for t in blocks]).result()
    for page_size, tp in ((4, 1), (32, 1), (16, 2)):
        keys = sgl.keys(TOKENS, page_size)
        assert link(TOKENS, tmp_path, model=sgl.MODEL, page_size=page_size) == len(keys)
        pools, where = [], []
        for rank in range(tp):
            pools.append(sgl.mha_pool("page_first_direct", page_size=page_size, heads=sgl.HEADS // tp))
            where.append(elsewhere(pools[-1], 64))
            assert all(sgl.backend(tmp_path, pools[-1], tp=(rank, tp)).batch_get_v1(keys, where[-1]))
        ranks = [Ranks(rank, tp) for rank in range(tp)]
        assert content(pools, where, ranks) == kvx.digest(blocks, spec, blocks=[[0, 1, 2, 3]])


def test_another_model_or_text_is_not_found(tmp_path):
    keys, pool = sgl.keys(TOKENS[:16], 4), filled(sgl.mha_pool("page_first"))
    assert all(sgl.backend(tmp_path, pool).batch_set_v1(keys, pool.alloc(16)))
    other = sgl.mha_pool("page_first_direct")
    assert sgl.backend(tmp_path, other, model="a fine-tune").batch_exists(keys) == 0
    assert sgl.backend(tmp_path, other).batch_exists(sgl.keys(TOKENS[1:17], 4)) == 0
    assert sgl.backend(tmp_path, other).batch_exists(sgl.keys(TOKENS[:16], 4, "lora")) == 0
    half = sgl.mha_pool("page_first", dtype=torch.float16)  # K and V of another type are converted, and to the digest others
    assert sgl.backend(tmp_path, half).batch_exists(keys) == 4


def test_in_fewer_bits(tmp_path):
    """fp8 in the store, bf16 in both pools: a quarter of a step of fp8 at most is lost."""
    keys, pool = sgl.keys(TOKENS[:16], 4), filled(sgl.mha_pool("page_first"))
    told = {"format": "fp8_e4m3_per_token_head_inline"}
    there = pool.alloc(16)
    assert all(sgl.backend(tmp_path, pool, **told).batch_set_v1(keys, there))
    other = sgl.mha_pool("layer_first")
    here = other.alloc(16)
    assert all(sgl.backend(tmp_path, other, **told).batch_get_v1(keys, here))
    a, b = pool.kv_buffer[:, :16].transpose(1, 2), other.kv_buffer[:, :, :16]
    assert torch.allclose(a.float(), b.float(), rtol=2**-4 * 1.1)
    assert not torch.equal(a, b)


def test_flat_pages(tmp_path):
    """Without interface_v1 SGLang hands over its own pages: the same blocks."""
    keys, pool = sgl.keys(TOKENS[:16], 4), filled(sgl.mha_pool("page_head"))
    there = elsewhere(pool, 16)
    pages = [pool.get_data_page(int(i)) for i in there[::4]]
    for kept in ("", "canonical"):
        store = sgl.backend(tmp_path / kept, pool, layout=kept)
        assert store.batch_set(keys, pages)
        assert store.exists(keys[3])
        assert not store.exists("f" * 64)
        found = store.batch_get([*keys, "f" * 64], [pool.get_dummy_flat_data_page() for _ in range(5)])
        assert found[4] is None
        assert all(torch.equal(a, b) for a, b in zip(found[:4], pages, strict=True))
        assert torch.equal(store.get(keys[2]), pages[2])
        here = elsewhere(pool, 16)
        assert all(store.batch_get_v1(keys, here))
        assert content([pool], [here]) == content([pool], [there])
        assert not store.set(keys[0] + "x", torch.zeros(3))


def test_states_are_found_where_they_stand(tmp_path):
    """A mamba pool has a page at the end of a span alone: the lengths that can be restored are those."""
    pool, states = filled(sgl.mha_pool("page_first")), sgl.mamba_pool()
    torch.manual_seed(1)
    for t in (states.temporal_buffer, *states.conv_buffer):
        t.normal_()
    keys = sgl.keys(TOKENS[:32], 4)

    def registered(kv, mamba):
        made = sgl.StorageBackendFactory.create_backend("dynamic", sgl.config(tmp_path), kv)
        made.register_mem_pool_host(kv)
        for name, each in ((PoolName.KV, kv), (PoolName.MAMBA, mamba)):
            made.register_mem_host_pool_v2(each, name)
        made.on_host_pools_registered()
        return made

    store, slots = registered(pool, states), states.alloc(2)
    told = store.batch_set_v2(
        [
            PoolTransfer(name=PoolName.KV, host_indices=pool.alloc(32), keys=keys),
            PoolTransfer(name=PoolName.MAMBA, host_indices=slots, keys=[keys[2], keys[5]], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
    )
    assert told == {PoolName.KV: [True] * 8, PoolName.MAMBA: [True] * 2}
    others = sgl.mamba_pool("page_first_direct")
    again = registered(sgl.mha_pool("layer_first"), others)
    wanted = [PoolTransfer(name=PoolName.MAMBA, keys=[keys[7]], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    found = again.batch_exists_v2(keys, wanted)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.MAMBA: 6}
    assert again.batch_exists_v2(keys[:2], wanted).kv_hit_pages == 0
    two = [replace(wanted[0], keys=keys[6:8])]  # a window of two pages is nowhere whole
    assert again.batch_exists_v2(keys, two).kv_hit_pages == 0
    assert again.batch_exists_v2(keys, [replace(wanted[0], hit_policy=PoolHitPolicy.ALL_PAGES)]).kv_hit_pages == 0
    here = others.alloc(3)[1:]
    asked = PoolTransfer(name=PoolName.MAMBA, host_indices=here, keys=[keys[5], keys[2]])
    assert again.batch_get_v2([asked]) == {PoolName.MAMBA: [True, True]}
    for a, b in zip(here.tolist(), slots.flip(0).tolist(), strict=True):
        assert torch.equal(others.get_data_page(a), states.get_data_page(b))
    bf16 = registered(sgl.mha_pool("layer_first"), sgl.mamba_pool(temporal=torch.bfloat16))
    assert bf16.batch_exists_v2(keys, wanted).kv_hit_pages == 0  # a state of another type is not this one


@pytest.fixture
def parallel():
    with sgl.parallel():
        yield


@pytest.mark.parametrize("interface", [0, 1])
def test_sglangs_controller_backs_up_and_prefetches(tmp_path, parallel, interface):
    """Its own threads: what it wrote with one layout another of its controllers finds, and loads as far as it is there."""
    pool = filled(sgl.mha_pool("page_first"))
    there = elsewhere(pool, 48)
    writer = sgl.controller(tmp_path, pool, interface_v1=interface)
    writer.write_storage(there, TOKENS[:48], hash_value=sgl.keys(TOKENS[:48], 4))
    assert writer.ack_backup_queue.get(timeout=20).completed_tokens == 48
    other = sgl.mha_pool("page_first_direct")
    reader = sgl.controller(tmp_path, other, interface_v1=interface)
    reader.prefetch("request", TOKENS[:56])
    operation = reader.prefetch_hit_queue.get(timeout=20)
    assert operation.storage_hit_count == 48
    operation.host_indices = other.alloc(48)
    reader.prefetch_buffer.put(operation)
    done = [reader.ack_prefetch_queue.get(timeout=20) for _ in range(2)]
    assert max(ack.completed_tokens or 0 for ack in done) == 48
    assert content([other], [operation.host_indices]) == content([pool], [there])
    for each in (writer, reader):
        each.detach_storage_backend()


def test_the_engine_goes_on_when_the_store_is_gone(tmp_path, parallel, monkeypatch):
    """Every call fails: the controller's threads live, and count it as nothing found."""
    pool = filled(sgl.mha_pool("page_first"))
    one = sgl.controller(tmp_path, pool)
    for call in ("_store", "_fetch", "_holds"):
        monkeypatch.setattr("kvx.tiers.disk.DiskTier." + call, _broken)
    one.write_storage(pool.alloc(16), TOKENS[:16], hash_value=sgl.keys(TOKENS[:16], 4))
    assert one.ack_backup_queue.get(timeout=20).completed_tokens == 0
    one.prefetch("request", TOKENS[:16])
    assert one.prefetch_hit_queue.get(timeout=20).storage_hit_count == 0
    with pytest.raises(queue.Empty):
        one.ack_prefetch_queue.get(timeout=0.1)
    one.detach_storage_backend()


def _broken(*_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tiers": []}, r"tiers is \(\); it must be a list"),
        ({"tiers": ["tape:1GB"]}, 'tier "tape:1GB" is none'),
        ({"model": ""}, '"model" is not given'),
        ({"model": "llama-2x64-kv2x32-v128"}, "the geometry alone"),
        ({"blocksize": 3}, "'blocksize' is not known; there are tiers, model"),
        ({"block_size": 16}, "block_size is SGLang's own, --page-size"),
        ({"timeout_s": "soon"}, "timeout_s is 'soon'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"layout": "page_first"}, "layout is 'page_first'; it must be \"canonical\""),
        ({"format": "fp7"}, 'format "fp7" does not exist'),
        ({"format": "fp8_e4m3"}, "has scales apart from the rows"),
        ({"num_kv_heads": "4"}, "num_kv_heads is '4'"),
        ({"num_kv_heads": 16, "tp": (0, 2)}, "num_kv_heads is 16; rank 0 of 2 has 4"),
    ],
)
def test_a_wrong_config_is_said_at_the_start(tmp_path, extra, message):
    with pytest.raises(KvxError, match=message) as error:
        sgl.backend(tmp_path, sgl.mha_pool("page_first"), **extra)
    assert isinstance(error.value, (BadArgument, ValueError))


def test_a_class_that_is_not_there(tmp_path):
    with pytest.raises((ImportError, AttributeError, ValueError), match="KvxStrage"):
        sgl.backend(tmp_path, sgl.mha_pool("page_first"), class_name="KvxStrage")


def test_many_pages_take_little_memory(tmp_path, monkeypatch):
    """The store has few of them in memory at once, however many SGLang hands over."""
    monkeypatch.setattr("kvx.connector.store_calls._MOST_BYTES", 5 * 3072)
    pool = filled(sgl.mha_pool("page_first"))
    there, keys = pool.alloc(128), sgl.keys([*TOKENS, *TOKENS], 4)
    store = sgl.backend(tmp_path, pool)
    memory = store._store("kv")._memory
    took, take = [], memory.take
    monkeypatch.setattr(memory, "take", lambda n: took.append(memory.num_held + n) or take(n))
    assert store.batch_set_v1(keys, there) == [True] * 32
    other = pool.alloc(128)
    assert store.batch_get_v1(keys, other) == [True] * 32
    assert 5 <= max(took) <= 10  # of one step, and what the one before still holds
    assert content([pool], [other]) == content([pool], [there])
