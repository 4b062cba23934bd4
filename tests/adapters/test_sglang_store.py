"""SGLang's pages in KVX's tiers, without SGLang: pools of its shapes, names, aliases and bounded calls.

tests/engines/test_sglang.py has the same with SGLang's own pools.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import struct
import threading
import time
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.adapters.sglang import link, page_names
from kvx.adapters.sglang.names import name_of
from kvx.adapters.sglang.page_store import PageStore
from kvx.adapters.sglang.pools import HostPool, Ranks, page_layout, read_pool
from kvx.connector.bounded import Bounded
from kvx.connector.store_names import Alias, Scheme, alias_kind, alias_schemes, aliases, named_kind, read_alias, write_alias
from kvx.errors import BadArgument, Damaged, Unsupported
from kvx.handover import NEUTRAL, names
from kvx.handover.model_parts import ModelPart
from kvx.tiers import BlockKind, TierOption

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 4, 16, 4, 16
MODEL = "tiny-test-weights"
SHAPES = {
    "layer_first": (2, LAYERS, PAGES * PAGE, HEADS, DIM),
    "page_first": (2, PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, DIM),
    "page_unified": (PAGES, HEADS, LAYERS, 2, PAGE, 1, DIM),
}
# The axes of each as (kv, page, layer, token, head, dim), by hand.
ORDERS = {
    "layer_first": lambda t: t.unflatten(2, (PAGES, PAGE)).permute(0, 2, 1, 3, 4, 5),
    "page_first": lambda t: t.unflatten(1, (PAGES, PAGE)).permute(0, 1, 3, 2, 4, 5),
    "page_first_direct": lambda t: t,
    "page_head": lambda t: t.permute(0, 1, 4, 3, 2, 5),
    "page_unified": lambda t: t.squeeze(5).permute(3, 0, 2, 4, 1, 5),
}


class MHATokenToKVPoolHost:
    """Its fields, as SGLang 0.5.23 has them."""

    def __init__(self, layout: str, /, **changed) -> None:
        self.layout, self.dtype, self.page_size, self.page_num = layout, torch.bfloat16, PAGE, PAGES
        self.head_num, self.head_dim, self.v_head_dim, self.layer_num, self.start_layer = HEADS, DIM, DIM, LAYERS, 0
        self.target_layer_num, self.head_group_num, self.size_per_token = LAYERS, HEADS, 2 * LAYERS * HEADS * DIM * 2
        self.kv_buffer = torch.randn(SHAPES[layout]).to(torch.bfloat16)
        self.__dict__.update(changed)


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    """Ascend's form: the latent apart from the rotary part."""

    def __init__(self) -> None:
        super().__init__("page_first_direct", kv_lora_rank=32, qk_rope_head_dim=16, kv_cache_dim=48)
        self.layout = "page_first_kv_split"
        self.k_buffer = torch.randn(PAGES, LAYERS, PAGE, 1, 32).to(torch.bfloat16)
        self.v_buffer = torch.randn(PAGES, LAYERS, PAGE, 1, 16).to(torch.bfloat16)


class MambaPoolHost:
    """A page a slot, which only its own calls know the inside of."""

    def __init__(self, temporal: torch.dtype = torch.float32) -> None:
        self.layout, self.dtype, self.page_size, self.size_per_token, self.num_mamba_layers = "page_first", torch.bfloat16, 1, 96, 2
        self.temporal_state_shape, self.temporal_dtype = (2, 3, 4), temporal
        self.conv_state_shapes, self.conv_dtype = [(8, 3)], torch.bfloat16
        self.kv_buffer = self.pages = torch.randint(0, 255, (8, 96), dtype=torch.uint8)

    def get_data_page(self, index, flat=True):
        return self.pages[index]

    def get_dummy_flat_data_page(self):
        return torch.zeros(96, dtype=torch.uint8)

    def set_from_flat_data_page(self, index, page) -> None:
        self.pages[index] = page


def kv(layout: str, ranks: Ranks | None = None, /, name: str = "kv", **changed) -> HostPool:
    return read_pool(name, MHATokenToKVPoolHost(layout, **changed), model=MODEL, ranks=ranks or Ranks())


def opened(folder, pool: HostPool, **how) -> PageStore:
    return PageStore(pool, [TierOption.parse(f"disk:{folder}:1GB")], model=MODEL, **how)


def put(store: PageStore, keys: list[bytes], pages: list[int]) -> None:
    store.put(keys, store.stage([n * store.pool.page_size for n in pages]))


def get(store: PageStore, keys: list[bytes], pages: list[int]) -> list[bool]:
    return store.load(store.fetch(keys), [n * store.pool.page_size for n in pages])


KEYS = page_names(range(16), PAGE)


@pytest.mark.parametrize(("writer", "reader"), list(itertools.product(SHAPES, SHAPES)))
def test_pages_by_hand(tmp_path, writer, reader):
    """Elements where the shapes of SGLang's buffers say they are, and no others changed."""
    a, b = kv(writer), kv(reader)
    put(opened(tmp_path, a), KEYS, [3, 0, 7, 5])
    before = ORDERS[reader](b.pool.kv_buffer).clone()
    store = opened(tmp_path, b)
    assert store.has([*KEYS, b"\0" * 32]) == [True] * 4 + [False]
    assert get(store, [*KEYS, b"\0" * 32], [1, 2, 9, 8, 4]) == [True] * 4 + [False]
    before[:, [1, 2, 9, 8]] = ORDERS[writer](a.pool.kv_buffer)[:, [3, 0, 7, 5]]
    assert torch.equal(ORDERS[reader](b.pool.kv_buffer), before)


def test_a_page_is_one_run():
    assert page_layout("kv layer (block token) head dim") == page_layout("kv block layer token head dim")
    assert page_layout("kv (block token) layer head dim") == "block | kv token layer head dim"
    assert page_layout("block head layer kv token dim") == NEUTRAL
    assert page_layout("kv | block layer token head dim") == "block | layer token head (kv dim)"


def test_the_latent_apart_from_its_rotary_part(tmp_path):
    ranks = Ranks(1, 4, is_replicated=True)
    a, b = (read_pool("kv", MLATokenToKVPoolHost(), model=MODEL, ranks=ranks) for _ in range(2))
    assert not a.facts
    put(opened(tmp_path, a), KEYS, [3, 0, 7, 5])
    assert all(get(opened(tmp_path, b), KEYS, [1, 2, 9, 8]))
    for mine, theirs in ((a.pool.k_buffer, b.pool.k_buffer), (a.pool.v_buffer, b.pool.v_buffer)):
        assert torch.equal(theirs[[1, 2, 9, 8]], mine[[3, 0, 7, 5]])


def test_heads_of_a_group_of_several(tmp_path):
    """page_unified with two heads a group."""
    a = kv("page_unified", head_group_num=2, kv_buffer=torch.randn(PAGES, 2, LAYERS, 2, PAGE, 2, DIM).to(torch.bfloat16))
    put(opened(tmp_path, a), KEYS[:1], [3])
    b = kv("page_first_direct")
    assert get(opened(tmp_path, b), KEYS[:1], [1]) == [True]
    want = a.pool.kv_buffer[3].permute(2, 1, 3, 0, 4, 5).flatten(3, 4)  # kv, layer, token, head, dim
    assert torch.equal(b.pool.kv_buffer[:, 1], want)


def test_pages_that_go_whole(tmp_path):
    """States; and what has no words: another type or pool, memory beside K and V. Nobody else finds them."""
    pool = read_pool("mamba", MambaPoolHost(), model=MODEL, ranks=Ranks(1, 2, is_replicated=True))
    assert pool.spec is None
    assert pool.facts["tp"] == "1/2"
    assert "layout" not in pool.facts
    put(opened(tmp_path, pool), KEYS[:2], [3, 5])
    other = read_pool("mamba", MambaPoolHost(), model=MODEL, ranks=Ranks(1, 2, is_replicated=True))
    assert get(opened(tmp_path, other), KEYS[:2], [0, 1]) == [True, True]
    assert torch.equal(other.pool.pages[:2], pool.pool.pages[[3, 5]])
    for changed, ranks in (
        (MambaPoolHost(torch.bfloat16), Ranks(1, 2)),
        (MambaPoolHost(), Ranks(0, 2)),
        (MambaPoolHost(), Ranks()),
    ):
        one = read_pool("mamba", changed, model=MODEL, ranks=ranks)
        assert opened(tmp_path, one).has(KEYS[:2]) == [False, False]
    odd = (
        {"dtype": torch.float8_e4m3fn},
        {"storage_format_tag": "x"},
        {"index_k_buffer": torch.zeros(1)},
        {"_layer_shard_enabled": True},
    )
    kinds = [opened(tmp_path, kv("page_first", **changed, get_data_page=None)).kind.text for changed in odd]
    assert len(set(kinds)) == 4
    with pytest.raises(Unsupported, match="has no pages in this process"):
        kv("page_first", dtype=torch.float8_e4m3fn, kv_buffer=None)
    with pytest.raises(Unsupported, match="layout 'sideways'"):
        kv("page_first", layout="sideways")


def test_groups_and_drafts_are_kept_apart(tmp_path):
    """Pools that look alike: a window's, one of several, one with a draft's layers, a rank of context parallelism, a PP stage."""
    put(opened(tmp_path, kv("page_first")), KEYS, [0, 1, 2, 3])
    alike = [
        kv("page_first", name="swa"),
        kv("page_first", Ranks(has_groups=True)),
        kv("page_first", target_layer_num=LAYERS - 1),
        kv("page_first", Ranks(cp_rank=1, cp_size=2)),
        kv("page_first", start_layer=1),
        kv("page_first", Ranks(1, 2)),
    ]
    for pool in alike:
        assert opened(tmp_path, pool).has(KEYS) == [False] * 4, pool.facts
    one = kv("page_first", start_layer=1, layer_num=2, target_layer_num=2, kv_buffer=torch.zeros(2, PAGES * PAGE, 2, HEADS, DIM))
    one = replace(one, buffers=[one.pool.kv_buffer.to(torch.bfloat16).view(torch.uint8).flatten()])
    assert opened(tmp_path, one).has(KEYS) == [True] * 4  # a later stage reads its layers out of whole blocks


def test_a_folder_of_one_group_is_not_taken_for_all(tmp_path):
    """The runner's groups of layers that look alike have one kind, and folders of their own."""
    spec = kvx.CacheSpec(1, PAGE, HEADS, DIM, layout=NEUTRAL, num_layers=LAYERS, model=MODEL)
    kind, text = BlockKind.of(spec), list(range(16))
    for group, found in (("sliding", 0), ("", 4)):
        with TierOption.parse(f"disk:{tmp_path}:1GB").open(kind, group=group) as tier:
            tier.put(names(text, PAGE, MODEL), [kind.block(kvx.allocate_buffers(spec)) for _ in range(4)]).result()
        assert link(text, tmp_path, model=MODEL, page_size=PAGE) == found
        assert opened(tmp_path, kv("page_first")).has(KEYS) == [bool(found)] * 4


def test_names_by_hand():
    tokens = [1, 70000, 3, 4, 5, 6, 7, 8, 9]
    first = hashlib.sha256(struct.pack("<4i", *tokens[:4])).digest()
    second = hashlib.sha256(first + struct.pack("<4i", *tokens[4:8])).digest()
    assert page_names(tokens, 4) == [first, second]
    assert page_names(tokens[:3], 4) == []
    seed = hashlib.sha256(b"sglang-cache-namespace-v1" + b"\1" + struct.pack("<Q", 4) + b"lora" + b"\0").digest()
    assert page_names(tokens, 8, extra_key="lora") == [hashlib.sha256(seed + struct.pack("<8i", *tokens[:8])).digest()]
    assert page_names(tokens, 8, extra_key="lora") != page_names(tokens, 8, cache_salt="lora")
    assert name_of(first.hex()) == first
    assert len({name_of(key) for key in ("a", "b", first.hex(), first.hex() + "00", first.hex().upper() + " ")}) == 5
    with pytest.raises(BadArgument, match="page_size is 0"):
        page_names(tokens, 0)


@pytest.mark.parametrize(("page_size", "block_size"), [(4, 16), (16, 4), (8, 12), (12, 8), (1, 8), (8, 1), (4, 4), (7, 5)])
def test_aliases(page_size, block_size):
    """Tables over the same tokens; a record as it was written; only pages whose blocks are there."""
    count = 90
    pages, blocks = page_names(range(count), page_size), names(range(count), block_size, MODEL)
    found = aliases(pages, page_size, blocks, block_size)
    kind = alias_kind(MODEL, Scheme("sglang", page_size), Scheme("", block_size))
    assert alias_schemes(kind) == (Scheme("sglang", page_size), Scheme("", block_size))
    assert len(found) == len(blocks) * block_size // page_size
    for n, (page, alias) in enumerate(found.items()):
        assert page == pages[n]
        assert read_alias(write_alias(kind, alias)) == alias
        src, dst = alias.tables(page_size, block_size)
        of_blocks = [block for block in src for _ in range(block_size)]
        of_pages = [place for place in dst for _ in range(page_size)]
        assert len(of_blocks) == len(of_pages)
        here = [t for t, place in enumerate(of_pages) if place == 0]
        assert len(here) == page_size
        assert all(of_blocks[t] >= 0 for t in here)
        assert alias.names[of_blocks[here[0]]] == blocks[n * page_size // block_size]
        assert alias.names[of_blocks[here[-1]]] == blocks[((n + 1) * page_size - 1) // block_size]


def test_a_record_that_says_too_much():
    kind = alias_kind(MODEL, Scheme("sglang", 4), Scheme("", 16))
    for first, count, width in ((0, 9, 16), (0, 0, 16), (0, 1, 0), (0, 1, 65), (1 << 63, 1, 16)):
        data = torch.zeros(kind.num_bytes, dtype=torch.uint8)
        data[:16] = torch.frombuffer(bytearray(struct.pack("<QII", first, count, width)), dtype=torch.uint8)
        with pytest.raises(Damaged, match="an alias has"):
            read_alias(kind.block([data]))
    other = BlockKind({**kind.manifest, "of_block_size": "many"}, kind.buffer_bytes)
    younger = BlockKind({**kind.manifest, "kvx_alias": 2}, kind.buffer_bytes)
    assert alias_schemes(other) is None
    assert alias_schemes(younger) is None
    assert Alias(0, (b"a",)).tables(4, 4) == ([0], [0])


def test_link_leads_only_to_what_is_there(tmp_path):
    text = list(range(64))
    with pytest.raises(BadArgument, match="is no folder"):
        link(text, tmp_path / "none", model=MODEL, page_size=4)
    assert link(text, tmp_path, model=MODEL, page_size=4) == 0
    spec = kvx.CacheSpec(1, 16, HEADS, DIM, layout=NEUTRAL, num_layers=LAYERS, model=MODEL)
    kind, by_rule = BlockKind.of(spec), names(text, 16, MODEL)
    with TierOption.parse(f"disk:{tmp_path}:1GB").open(kind) as tier:
        tier.put([*by_rule[:2], by_rule[3]], [kind.block(kvx.allocate_buffers(spec)) for _ in range(3)]).result()
    assert link(text, tmp_path, model=MODEL, page_size=4) == 8  # the third block is not there
    assert link(text, tmp_path, model="another", page_size=4) == 0
    assert link(text, tmp_path, model=MODEL, page_size=4, extra_key="lora") == 0
    store, keys = opened(tmp_path, kv("page_first")), page_names(text, 4)
    assert store.has(keys) == [True] * 8 + [False] * 8
    with TierOption.parse(f"disk:{tmp_path}:1GB").open(kind) as tier:
        tier.drop(by_rule[:1]).result()
    assert store.has(keys) == [False] * 4 + [True] * 4 + [False] * 8  # what an alias leads to has left
    assert get(store, keys[:8], list(range(8))) == [False] * 4 + [True] * 4


def test_a_kind_says_whose_names_it_has():
    spec = kvx.CacheSpec(1, 16, HEADS, DIM, layout=NEUTRAL, num_layers=LAYERS, model=MODEL)
    kind = BlockKind.of(spec)
    assert named_kind(kind, "").text == kind.text
    assert named_kind(kind, "sglang").manifest["names"] == "sglang"


def test_pages_and_indices_agree():
    pool = kv("page_first")
    assert pool.pages(torch.arange(8, 16), 2) == [8, 12]
    for indices in (torch.arange(7), None):
        with pytest.raises(BadArgument, match="2 pages of 4 have 8 indices"):
            pool.pages(indices, 2)


def test_a_host_tier_before_a_disk(tmp_path):
    """What the disk has comes up, and is kept without another copy."""
    put(opened(tmp_path, kv("page_first")), KEYS, [0, 1, 2, 3])
    tiers = [TierOption.parse("host:1MB"), TierOption.parse(f"disk:{tmp_path}:1GB")]
    store = PageStore(kv("page_first"), tiers, model=MODEL)
    host = store.stack.tiers[0]
    assert host.num_blocks == 0
    assert get(store, KEYS, [4, 5, 6, 7]) == [True] * 4
    assert host.num_blocks == 4
    for path in tmp_path.rglob("*.kvx"):
        path.unlink()
    assert store.has(KEYS) == [True] * 4
    assert get(store, KEYS, [4, 5, 6, 7]) == [True] * 4


class TestBounded:
    def bounded(self, **how) -> Bounded:
        return Bounded("get", **({"timeout_s": 0.2, "threads": 2, "logger": logging.getLogger("kvx")} | how))

    def test_answers_and_errors(self, caplog):
        def fail():
            raise OSError(28, "No space left on device")

        assert self.bounded().run([lambda: 1, fail, lambda: 3]) == [1, None, 3]
        assert "No space left on device" in caplog.text
        assert self.bounded().run([]) == []

    def test_what_hangs_is_left_alone_until_it_ends(self, caplog):
        calls, gate, ran = self.bounded(), threading.Event(), []
        began = time.monotonic()
        assert calls.run([gate.wait, gate.wait, lambda: ran.append(1)]) == [None] * 3  # the third had no thread
        assert calls.run([lambda: ran.append(2)]) == [None]
        assert calls.run([lambda: ran.append(3)]) == [None]
        assert time.monotonic() - began < 10
        assert ran == []
        assert caplog.text.count("skipped") == 1
        gate.set()
        until = time.monotonic() + 30  # threads of a busy machine wake up late
        while (answer := calls.run([lambda: "again"])) == [None] and time.monotonic() < until:
            time.sleep(0.01)
        assert answer == ["again"]
        calls.close()
        assert calls.run([lambda: 1]) == [None]

    def test_it_closes_while_something_hangs(self):
        calls, gate = self.bounded(), threading.Event()
        calls.run([gate.wait])
        began = time.monotonic()
        calls.close()
        assert time.monotonic() - began < 10
        gate.set()

    @pytest.mark.parametrize("wrong", [0, -1, "5", None, True, float("nan")])
    def test_a_time_that_is_none(self, wrong):
        with pytest.raises(BadArgument, match="timeout_s is"):
            self.bounded(timeout_s=wrong)


PARTS = (ModelPart((1, 3, 5), num_kv_heads=HEADS, head_dim=DIM), ModelPart((0, 2), window=64, num_kv_heads=HEADS, head_dim=DIM))


def test_a_pool_of_several_says_its_layers_by_the_models_config():
    pool = MHATokenToKVPoolHost("page_first")
    several = Ranks(has_groups=True)
    told = read_pool("kv", pool, model=MODEL, ranks=several, parts=PARTS)
    assert told.facts == {"layers": "1,3,5", "window": 0}
    assert read_pool("kv", pool, model=MODEL, ranks=several).facts == {"group": "kv"}
    with pytest.raises(BadArgument, match=r"config says that the pool 'swa' has 2 of 4 heads.*SGLang's has 3 layers of 4 heads"):
        read_pool("swa", pool, model=MODEL, ranks=several, parts=PARTS)


def test_stages_and_drafts_keep_pools_of_their_own():
    """Each stage counts the layers of such a pool from 0, and a draft's layers are in no config."""
    stages = [Ranks(pp_rank=n, pp_size=2, has_groups=True) for n in range(2)]
    facts = [read_pool("kv", MHATokenToKVPoolHost("page_first"), model=MODEL, ranks=r, parts=PARTS).facts for r in stages]
    assert facts == [{"group": "kv", "pp": "0/2"}, {"group": "kv", "pp": "1/2"}]
    states = [read_pool("mamba", MambaPoolHost(), model=MODEL, ranks=r).facts["pp"] for r in stages]
    assert states == ["0/2", "1/2"]
    drafted = MHATokenToKVPoolHost("page_first")
    drafted.target_layer_num = LAYERS - 1
    assert read_pool("kv", drafted, model=MODEL, ranks=Ranks(has_groups=True), parts=PARTS).facts == {
        "group": "kv",
        "draft_layers": 1,
    }
