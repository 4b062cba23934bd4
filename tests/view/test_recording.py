"""Recordings: everything that a cache has follows from its lines; wrong files are told."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvx
from kvx.errors import BadArgument
from kvx.tiers import CacheTiers
from kvx.view import RecordingReader
from kvx.view.picture import STATES
from kvx.view.watcher import Watcher

KV = kvx.CacheSpec(num_blocks=24, block_size=4, num_kv_heads=1, head_dim=8, format="f32")


def make(**options: Any) -> kvx.PagedCache:
    groups = [kvx.LayerGroup("full", (0,), KV), kvx.LayerGroup("window", (1,), KV, window=8)]
    return kvx.PagedCache(groups, max_seqs=6, max_seq_len=64, **options)


class Replayed:
    """What a reader of the lines knows: a second reading of the form that docs/live.md describes."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}

    def read(self, record: dict[str, Any]) -> None:
        if record["type"] == "header":
            self.header = record
        if record["type"] in ("header", "snapshot"):
            self.blocks = [np.zeros(g["blocks"], int) for g in self.header["groups"]]
            self.sequences, self.tables, self.nodes, self.requests = {}, {}, {}, {}
            self.held: list[dict[int, int]] = [{} for _ in self.header["groups"]]
        self.counts = record.get("counts", getattr(self, "counts", {}))
        for first, count, parent in record.get("nodes", ()):
            for i in range(count):
                self.nodes[first + i] = parent if i == 0 else first + i - 1
        for kind, group, nodes, values, *_ in record.get("content", ()):
            for node, value in zip(nodes, values, strict=True):
                self.held[group].pop(node, None)
                if kind == "stored":
                    self.held[group][node] = value
        for group, state, first, count in record.get("blocks", ()):
            self.blocks[group][first : first + count] = state
        for row in record.get("admitted", ()):
            self.requests[row["seq"]] = row
        for seq, length, num_tokens in record.get("sequences", ()):
            self.sequences[seq] = (length, num_tokens)
        for seq, group, first, blocks in record.get("tables", ()):
            self.tables[seq, group] = [*self.tables.get((seq, group), [])[:first], *blocks]
        for seq, _, how in record.get("released", ()):
            self.sequences.pop(seq, None)
            for group in range(len(self.held)):
                self.tables.pop((seq, group), None)
            if seq in self.requests:
                self.requests[seq]["how"] = how


def assert_same(replayed: Replayed, cache: kvx.PagedCache) -> None:
    for g, stats in enumerate(cache.stats().groups):
        count = Counter(STATES[s] for s in replayed.blocks[g].tolist())
        assert count["free"] == stats.num_free
        assert count["kept"] == stats.num_idle
        assert count["used"] + count["shared"] + count["pinned"] == stats.num_used
        assert count["pinned"] == stats.num_pinned
        for block, state in enumerate(replayed.blocks[g].tolist()):
            assert (STATES[state] == "shared") == (cache.allocators[g].refs(block) > 1), block
        if cache.prefix is not None:
            assert sorted(replayed.held[g].values()) == sorted(cache.prefix.named(g)[1].tolist())
    assert replayed.sequences == {s.id: (s.length, s.num_tokens) for s in cache.sequences}
    for s in cache.sequences:
        for g in range(len(cache.groups)):
            assert replayed.tables[s.id, g] == cache.blocks(s, g).tolist()


@pytest.mark.parametrize("prefix", [True, False])
def test_random_work_is_seen_as_it_is(prefix):
    cache, rng, live = make(prefix=prefix), random.Random(3), []
    replayed = Replayed()
    with Watcher(cache, interval_s=60) as watcher:
        watcher.join(lambda text: replayed.read(json.loads(text)))
        for step in range(400):
            act = rng.random()
            try:
                if act < 0.35 and len(live) < 6:
                    start = rng.choice([0, 0, 0, 7])
                    tokens = [*range(start, start + rng.randint(1, 20)), *([rng.randint(50, 53)] * rng.randint(0, 9))]
                    live.append(cache.admit(tokens))
                    cache.extend(live[-1], live[-1].num_tokens - live[-1].length)
                    cache.commit(live[-1])
                elif act < 0.75 and live:
                    seq = rng.choice(live)
                    if seq.length < 60:
                        cache.extend(seq, [rng.randint(60, 61)])
                        cache.commit(seq)
                elif act < 0.8 and live and len(live) < 6:
                    live.append(cache.fork(rng.choice(live)))
                elif live:
                    cache.release(live.pop(rng.randrange(len(live))), is_preempted=rng.random() < 0.3)
            except kvx.OutOfBlocks:
                cache.release(live.pop())
            if step % 7 == 0:  # several changes between two looks, too
                watcher.look()
                assert_same(replayed, cache)
        late = Replayed()  # who comes late gets a snapshot, from which the same follows
        watcher.join(lambda text: late.read(json.loads(text)))
        assert_same(late, cache)
        assert late.nodes == replayed.nodes
        assert late.counts == replayed.counts
    if prefix:
        stats = cache.stats().prefix
        assert (replayed.counts["queries"], replayed.counts["evicted"]) == (stats.queries, stats.evicted)
        assert replayed.counts["evictions"][0] + replayed.counts["evictions"][1] == stats.evicted
        assert replayed.counts["preemptions"] > 0


def test_pinned_blocks_are_pinned():
    cache = make()
    seq = cache.admit(list(range(13)))
    cache.extend(seq, 13)
    cache.commit(seq)
    replayed = Replayed()
    with Watcher(cache, interval_s=60) as watcher:
        watcher.join(lambda text: replayed.read(json.loads(text)))
        cache.prefix.pin(seq.hashes[:2])
        watcher.look()
        assert [STATES[s] for s in replayed.blocks[0][cache.blocks(seq, 0)].tolist()] == ["pinned", "pinned", "used", "used"]
        cache.release(seq)
        watcher.look()
        assert Counter(replayed.blocks[0].tolist())[STATES.index("pinned")] == 2


def test_blocks_that_a_tier_fills_are_in_flight():
    cache, replayed, seen = make(), Replayed(), []
    with CacheTiers(cache, host="1MB") as tiers, Watcher(cache, interval_s=60) as watcher:
        watcher.join(lambda text: replayed.read(json.loads(text)))
        for tokens in (list(range(13)), [70] * 49, [71] * 49):
            seq = cache.admit(tokens)
            cache.extend(seq, len(tokens) - seq.length)
            cache.commit(seq)
            cache.release(seq)
        load = tiers.load

        def look_meanwhile(*args: Any) -> int:
            other = threading.Thread(target=watcher.look)  # this thread has the cache's lock: the other looks without
            other.start()
            other.join()
            seen.append(Counter(replayed.blocks[0].tolist())[STATES.index("in flight")])
            return load(*args)

        tiers.load = look_meanwhile
        seq = cache.admit(list(range(13)))
        watcher.look()
        assert seq.num_cached == 12
        assert max(seen) == 3
        assert_same(replayed, cache)


def test_a_file_has_all_of_it(tmp_path):
    cache, path = make(), tmp_path / "run.jsonl"
    with kvx.view.record(cache, path, title="a run", interval_s=0.01) as recording:
        for i in range(30):
            seq = cache.admit([*range(9), i, i, i, i, i])
            cache.extend(seq, 14 - seq.length)
            cache.commit(seq)
            time.sleep(0.002)
            if i % 2:
                cache.release(seq)
            if cache.num_seqs == 6:
                break
        assert recording.error == ""
    assert not cache.prefix.has_listeners
    replayed = Replayed()
    with RecordingReader(path) as reader:
        for record in reader.records():
            replayed.read(record)
        assert reader.is_over
    assert replayed.header["title"] == "a run"
    assert_same(replayed, cache)
    assert sum(replayed.counts["reasons"].values()) == len(replayed.requests)


def test_prompts_are_not_written(tmp_path):
    cache, path = make(), tmp_path / "run.jsonl"
    with kvx.view.record(cache, path):
        seq = cache.admit([7_000_001, 7_000_002, 7_000_003, 7_000_004, 7_000_005])
        cache.extend(seq, 5)
        cache.commit(seq)
    assert b"700000" not in path.read_bytes()


def test_one_that_still_grows_is_read_along(tmp_path):
    path = tmp_path / "run.jsonl"
    with kvx.view.record(make(), path), RecordingReader(path) as reader:
        assert [r["type"] for r in reader.records()] == ["header", "snapshot"]
        whole = path.read_bytes()
        with path.open("ab") as file:  # half a line
            file.write(b'{"type":"chan')
            file.flush()
            assert list(reader.records()) == []
            file.write(b'ges","t":1}\n')
        assert [r["type"] for r in reader.records()] == ["changes"]
        assert whole


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": 1}\n', "does not say that it is a recording"),
        (b"\x89PNG\r\n\x1a\n....", "it is no JSON"),
        (b"[]\n", "does not say that it is a recording"),
        (b'{"kvx":"recording","version":99}\n', "of version 99, and this kvx reads up to 1"),
        (b'{"kvx":"recording","version":"x"}\n', "its version is 'x'"),
        (b"[" * 100_000 + b"\n", "it is no JSON"),
        (b"x" * (2 << 20), "it has no end"),
        (b'{"kvx":"recording","version":1}\n[1]\n', "line 2: it is no record with a type"),
    ],
)
def test_what_is_no_recording_is_told(tmp_path: Path, text: bytes, why: str):
    path = tmp_path / "wrong"
    path.write_bytes(text)
    with pytest.raises(BadArgument, match="is no recording") as told, RecordingReader(path) as reader:
        list(reader.records())
    assert why in str(told.value)


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    cache = make()
    with pytest.raises(BadArgument, match=r"record\(\): .* cannot be written: No such file or directory"):
        kvx.view.record(cache, tmp_path / "none" / "run.jsonl")
    assert not cache.prefix.has_listeners


def test_a_disk_that_is_full_ends_the_recording_and_not_the_run(tmp_path):
    cache = make()
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    recording = kvx.view.record(cache, "/dev/full", interval_s=0.01)
    seq = cache.admit([1, 2, 3])
    cache.extend(seq, 3)
    assert "No space left" in recording.error
    recording.close()
    assert "No space left" in recording.error
