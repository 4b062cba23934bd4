"""KV events without sockets: what a cache and its tiers tell, as plain records, leads whoever follows to what they have."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

import kvx
from kvx.cache.kinds import Chunked, Full, Latent, Sliding, State
from kvx.spec import StateSpec, state_plane
from kvx.tiers import CacheTiers, Tier
from kvx.wires.events.history import History
from kvx.wires.events.residency import CLEARED, Residency, _kind_fields

BS = 4
SPEC = kvx.CacheSpec(num_blocks=12, block_size=BS, num_kv_heads=1, head_dim=16, model="small")

FULL = Full()
KINDS = pytest.mark.parametrize(
    "kinds", [(Full(),), (Full(), Sliding(6)), (Full(), State(snapshot_every=1))], ids=["full", "window", "state"]
)


class Follower:
    """A router: what it believes after these records."""

    def __init__(self):
        self.blocks: dict[tuple[int, str], dict[bytes, tuple]] = {}

    def follow(self, records):
        for r in records:
            if r["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            here = self.blocks.setdefault((r["group_idx"], r["medium"]), {})
            if r["type"] == "BlockRemoved":
                for name in r["block_hashes"]:
                    del here[name]  # nothing is removed that was not told before
                continue
            assert len(r["token_ids"]) == r["block_size"] * len(r["block_hashes"])
            parent, size = r["parent_block_hash"], r["block_size"]
            for i, name in enumerate(r["block_hashes"]):
                here[name] = parent, tuple(r["token_ids"][i * size : (i + 1) * size])
                parent = name
        return self

    def names(self):
        return {key: set(names) for key, names in self.blocks.items() if names}


def make(kinds=(FULL,), num_blocks=12, **options) -> kvx.PagedCache:
    groups = []
    for i, kind in enumerate(kinds):
        spec = SPEC.replaced(num_blocks=num_blocks)
        if isinstance(kind, State):
            spec = StateSpec(num_blocks=num_blocks, planes=(state_plane("s", "f32", channel=8),))
        groups.append(kvx.LayerGroup(f"g{i}", (i,), spec, kind=kind))
    return kvx.PagedCache(groups, max_seqs=4, max_seq_len=40, **options)


def answered(cache, tokens, **options):
    seq = cache.admit(tokens, **options)
    while seq.length < len(tokens):
        cache.extend(seq, cache.until_snapshot(seq, len(tokens) - seq.length))
        cache.commit(seq)
    cache.release(seq)


class Told:
    """Events as they come, looked at at once: what a publisher's thread does later."""

    def __init__(self, cache, tiers=None):
        self.residency, self.events, self.records = Residency(cache, tiers), [], []
        cache.prefix.listen(lambda event, stretch: self.events.append((event, stretch)))

    def take(self):
        """Records of what happened since the last time."""
        r, events, out = self.residency, list(self.events), []
        self.events.clear()
        for event, stretch in events:
            if event.kind in ("removed", "mended"):
                out += r.look_everywhere(is_clear=True)
                continue
            out += [] if stretch is None else r.learn(stretch)
            out += r.look(r.cache_holder(event.group), event.hashes)
        self.records += out
        return out


def names_of(cache, tiers=None):
    """By the cache's own index, and the tiers' own lists."""
    found = {}
    for g in range(len(cache.groups)):
        found[g, "GPU"] = set(cache.prefix.named(g)[0])
        for tier in tiers.tiers_of(g)[0] if tiers else ():
            found[g, tier.medium] = set(tier.names())
    return {key: names for key, names in found.items() if names}


def test_a_prompt_is_one_record_with_its_tokens_and_parent():
    cache = make()
    told = Told(cache)
    answered(cache, list(range(9)))
    (record,) = told.take()
    hashes = cache.prefix.hashes(np.arange(8, dtype=np.int32))
    assert record == {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": list(range(8)), "block_size": BS,
        "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    answered(cache, list(range(13)))
    (record,) = told.take()
    assert record["parent_block_hash"] == hashes[-1]
    assert record["token_ids"] == [8, 9, 10, 11]


def test_extras_are_told_with_the_block_they_begin_in():
    cache = make()
    told = Told(cache)
    answered(cache, list(range(17)), extra=b"lora", extras=[(6, b"image")])
    records = told.take()
    assert [r["extra_keys"] for r in records] == [[(b"lora",), (b"lora", (b"image", 2)), (b"lora",), (b"lora",)]]
    answered(cache, list(range(17)), extras=[(6, b"image")])
    records = told.take()
    stored = [(len(r["block_hashes"]), r.get("extra_keys")) for r in records if r["type"] == "BlockStored"]
    assert stored == [(1, None), (1, [((b"image", 2),)]), (2, None)]


def test_an_eviction_is_a_removal_and_clear_is_all_of_it():
    cache = make(num_blocks=4)
    told = Told(cache)
    answered(cache, list(range(16)))
    answered(cache, list(range(100, 112)))
    first, second = cache.prefix.hashes(np.arange(16, dtype=np.int32)), cache.prefix.hashes(np.arange(100, 112, dtype=np.int32))
    records = told.take()
    removed = [name for r in records if r["type"] == "BlockRemoved" for name in r["block_hashes"]]
    assert set(removed) <= set(first)
    assert Follower().follow(records).names() == names_of(cache) == {(0, "GPU"): {first[0], *second}}
    cache.prefix.clear()
    assert told.take() == [CLEARED]


@pytest.mark.parametrize("seed", range(3))
@KINDS
def test_random_calls_lead_a_follower_to_what_the_cache_has(kinds, seed):
    rng, cache = random.Random(seed), make(kinds)
    told, follower = Told(cache), Follower()
    for n in range(60):
        text = [rng.randrange(2)] * rng.randrange(1, 20) + [rng.randrange(3)] * rng.randrange(12)
        answered(cache, text)
        if rng.random() < 0.03:
            cache.prefix.clear()
        if rng.random() < 0.5:
            follower.follow(told.take())
            assert follower.names() == names_of(cache), n
    follower.follow(told.take())
    assert follower.names() == names_of(cache)
    parents = {name: at for here in follower.blocks.values() for name, at in here.items()}
    for name, (parent, tokens) in parents.items():
        assert cache.prefix.hashes(np.array(tokens, np.int32), parent=parent) == [name], "a name is of its parent and its tokens"
    cache.check()


def test_tiers_are_media_of_their_own(tmp_path):
    cache = make((Full(), Sliding(6)), num_blocks=8)
    with CacheTiers(cache, host=f"{20 * SPEC.cache_bytes // 12}B", disk=f"{tmp_path}/kv:1MB") as tiers:
        told = Told(cache, tiers)
        for n in range(6):
            answered(cache, list(range(100 * n, 100 * n + 30)))
        for mover in tiers.movers:
            mover.settle()
        told.take()
        told.records += told.residency.look_everywhere()
        follower = Follower().follow(told.records)
        assert follower.names() == names_of(cache, tiers)
        assert {medium for _, medium in follower.names()} == {"GPU", "CPU", "STORAGE"}
        unknown = [name for here in follower.blocks.values() for name, (_, tokens) in here.items() if not tokens]
        assert not unknown, "what left the cache is told with its tokens"
        assert {r.get("locality") for r in told.records if r.get("medium") == "CPU"} == {"LOCAL"}


def test_blocks_of_an_earlier_process_are_told_without_tokens_until_somebody_has_them(tmp_path):
    text = list(range(21))
    cache = make()
    with CacheTiers(cache, disk=f"{tmp_path}/kv:1MB"):
        answered(cache, text)
    cache = make()
    with CacheTiers(cache, disk=f"{tmp_path}/kv:1MB") as tiers:
        told = Told(cache, tiers)
        records = told.residency.look_everywhere()
        assert [(r["medium"], r["token_ids"], r["block_size"]) for r in records] == [("STORAGE", [], 0)] * 5
        answered(cache, text)
        again = [r for r in told.take() if r["medium"] == "STORAGE"]
        assert [token for r in again for token in r["token_ids"]] == text[:20]


def test_a_block_with_members_is_there_when_all_of_them_are():
    class Fake:
        medium, is_remote = "CPU", False

    cache = make()

    class Tiers:
        def __init__(self):
            self.cache, self.tiers = cache, [[Fake()], [Fake()]]

        def tiers_of(self, group):
            return self.tiers

    r = Residency(cache, Tiers())
    _, one, two = r.holders
    assert r.look(one, [b"a"], True) == []
    assert [x["type"] for x in r.look(two, [b"a"], True)] == ["BlockStored"]
    assert [x["type"] for x in r.look(one, [b"a"], False)] == ["BlockRemoved"]
    assert r.look(two, [b"a"], False) == []


def test_a_tier_that_cannot_be_asked_changes_nothing_and_is_said():
    class Gone:
        medium, is_remote, is_gone = "STORAGE", False, False

        def names(self):
            return [b"a"]

        def has_now(self, names):
            if self.is_gone:
                raise OSError("the disk is gone")
            return [True] * len(names)

    cache, gone = make(), Gone()

    class Tiers:
        def __init__(self):
            self.cache = cache

        def tiers_of(self, group):
            return [[gone]]

    r = Residency(cache, Tiers())
    assert len(r.look_everywhere()) == 1
    gone.is_gone = True
    answered(cache, list(range(5)))
    assert [x["medium"] for x in r.look_everywhere()] == ["GPU"], "the others are looked at all the same"
    assert r.error == "Gone cannot be asked: the disk is gone"
    assert r.resident()[0, "STORAGE"] == {b"a"}


def test_a_call_that_was_broken_off_is_looked_at_again():
    cache = make()
    told = Told(cache)
    answered(cache, list(range(8)))
    told.events.clear()  # lost on the way
    cache._guard.is_torn = True
    cache.room()
    assert [event.kind for event, _ in told.events] == ["mended"]
    assert Follower().follow(told.take()).names() == names_of(cache)
    cache = make(max_events=10)
    cache._guard.is_torn = True
    cache.room()
    assert not cache.prefix.events, "kept events are of blocks"


@pytest.mark.parametrize(
    ("kind", "name", "window"),
    [
        (Full(), "full_attention", None),
        (Sliding(128), "sliding_window", 128),
        (Chunked(64), "chunked_local_attention", None),
        (Latent(), "mla_attention", None),
        (Latent(16), "sliding_window_mla", 16),
        (State(), "mamba", None),
    ],
)
def test_kinds_have_vllms_names(kind, name, window):
    fields = _kind_fields(3, kind)
    assert (fields["group_idx"], fields["kv_cache_spec_kind"], fields.get("kv_cache_spec_sliding_window")) == (3, name, window)


@pytest.mark.parametrize("seed", range(5))
def test_a_history_leads_to_the_same_from_wherever_one_begins(seed):
    rng, cache = random.Random(seed), make((Full(), Sliding(6)))
    told, history, batches, states = Told(cache), History(20), [], []
    for n in range(40):
        answered(cache, [rng.randrange(2)] * rng.randrange(1, 20) + [rng.randrange(3)] * rng.randrange(12))
        if n == 20:
            cache.prefix.clear()
        if records := told.take():
            history.append(len(batches), records)
            batches.append(records)
            states.append(names_of(cache))
    assert len(list(history.since(0))) < len(batches), "the oldest are summed up"
    for start in range(len(batches) + 1):
        follower = Follower()
        for records in batches[:start]:
            follower.follow(records)
        numbers = []
        for number, records in history.since(start):
            follower.follow(records)
            numbers.append(number)
            assert follower.names() == states[number]
        assert follower.names() == names_of(cache)
        assert numbers == list(range(len(batches) - len(numbers), len(batches)))


def test_publish_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(kvx.Unsupported, match=r"pyzmq.*kvx\[events\]"):
        kvx.wires.events.publish(make(), "tcp://127.0.0.1:0")


def test_a_cache_without_names_cannot_be_followed():
    with pytest.raises(kvx.BadArgument, match="prefix=True"):
        Residency(make(prefix=False))


def test_every_tier_says_where_its_blocks_are():
    seen = [Tier]
    for cls in seen:
        seen += cls.__subclasses__()
        assert cls.medium in ("CPU", "STORAGE")
