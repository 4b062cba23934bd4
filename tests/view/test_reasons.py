"""For every admitted request: why its prefix ended where it did."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import kvx
from kvx.cache.kinds import State
from kvx.errors import BadArgument
from kvx.spec import StateSpec, state_plane
from kvx.tiers import CacheTiers
from kvx.view import reasons
from kvx.view.watcher import Watcher

KV = kvx.CacheSpec(num_blocks=8, block_size=4, num_kv_heads=1, head_dim=8, format="f32")
A = list(range(13))


def make(num_blocks: int = 8, **options: Any) -> kvx.PagedCache:
    group = kvx.LayerGroup("all", (0,), KV.replaced(num_blocks=num_blocks))
    return kvx.PagedCache([group], max_seqs=4, max_seq_len=32, **options)


class Looked:
    """A cache that is looked at, and the rows of its requests."""

    def __init__(self, cache: kvx.PagedCache) -> None:
        self.cache, self.records = cache, list[dict[str, Any]]()
        self.watcher = Watcher(cache, interval_s=60)  # it looks when a test says so
        self.watcher.join(lambda text: self.records.append(json.loads(text)))

    def __enter__(self) -> Looked:
        return self

    def __exit__(self, *_: object) -> None:
        self.watcher.close()

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        self.watcher.look()
        return {row["seq"]: row for record in self.records for row in record.get("admitted", ())}

    def request(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        """Computed, stored and released."""
        seq = self.cache.admit(tokens, **options)
        self.cache.extend(seq, len(tokens) - seq.length)
        self.cache.commit(seq)
        self.cache.release(seq)
        return self.rows[seq.id]

    def why(self, tokens: list[int], **options: Any) -> tuple[str, int]:
        reason = self.request(tokens, **options)["reason"]
        assert reason["kind"] in reasons.KINDS
        assert reason["text"].endswith(".")
        return reason["kind"], reason["at"]


def test_never_seen_then_everything():
    with Looked(make()) as looked:
        assert looked.why(A) == ("never", 0)
        assert looked.why(A) == ("all", 12)
        assert looked.why([*A[:12], 50, 51]) == ("all", 12)
        assert looked.why([7, 8, 9, 10, 11]) == ("never", 0)


def test_the_first_differing_token_is_named():
    with Looked(make(32)) as looked:
        looked.request(A)
        row = looked.request([*A[:10], 99, 98, 97])
        assert (row["cached"], row["tokens"]) == (8, 13)
        assert row["reason"]["kind"] == "differs"
        assert (row["reason"]["at"], row["reason"]["token"], row["reason"]["stored"]) == (10, 99, 10)
        assert looked.why([*A[:4], 99, *A[5:]]) == ("differs", 4)  # where a block begins
        assert looked.why([0, 1, 2, 77, 78]) == ("differs", 3)  # in the first block
        assert looked.why([*A[:12], 12, 13, 14, 15, 16, 17]) == ("never", 12)  # on, where the stored one ends


def test_the_nearest_of_many_is_the_one_that_is_named():
    with Looked(make(64)) as looked:
        for end in range(40):
            looked.request([0, 1, 2, end, 5])
        reason = looked.request([0, 1, 9, 9, 5])["reason"]
        assert (reason["kind"], reason["at"]) == ("differs", 2)


def test_a_prompt_without_a_full_block_is_short():
    with Looked(make()) as looked:
        assert looked.why([1, 2]) == ("short", 0)
        assert looked.why([1, 2, 3, 4]) == ("short", 0)  # the last token is always computed
        assert looked.why([1, 2, 3, 4, 5]) == ("all", 4)  # and stored all the same


def test_another_extra_and_where_it_begins():
    with Looked(make(32)) as looked:
        looked.request(A)
        row = looked.request(A, extra=b"lora-7")
        assert (row["reason"]["kind"], row["reason"]["at"]) == ("extra", 0)
        assert "'lora-7'" in row["reason"]["text"]
        assert looked.why(A, extras=[(6, b"image")]) == ("extra", 6)
        assert looked.why(A, extras=[(6, b"another")]) == ("extra", 6)
        assert looked.why(A, extras=[(6, b"image")]) == ("all", 12)


def test_another_salt():
    with Looked(make()) as looked:
        looked.request(A)
        looked.cache.prefix.salt = b"tenant 2"
        assert looked.why(A) == ("salt", 0)


def test_evicted_when_and_for_whom():
    with Looked(make()) as looked:
        looked.request(A)
        before = time.perf_counter()
        seq = looked.cache.admit(list(range(100, 129)))
        looked.cache.extend(seq, 29)  # all 8 blocks
        looked.cache.release(seq)
        reason = looked.request(A)["reason"]
        assert (reason["kind"], reason["at"], reason["taker"]) == ("evicted", 0, seq.id)
        assert 0 <= time.perf_counter() - before - (looked.records[-1]["t"] - reason["t"]) < 1
        assert f"for sequence {seq.id}" in reason["text"]
        evicted = [row for record in looked.records for row in record.get("content", ()) if row[0] == "evicted"]
        assert all(age >= 0 for row in evicted for age in row[3])
        assert sum(len(row[2]) for row in evicted) == looked.cache.stats().prefix.evicted


def test_a_tail_that_was_evicted_is_named_at_its_place():
    with Looked(make()) as looked:
        looked.request(A)
        seq = looked.cache.admit([50] * 23)
        looked.cache.extend(seq, 23)  # 6 blocks: the tail of A goes
        looked.cache.release(seq)
        assert looked.why(A) == ("evicted", 8)


def test_cleared():
    with Looked(make()) as looked:
        looked.request(A)
        looked.cache.prefix.clear()
        assert looked.why(A) == ("cleared", 0)


def test_outside_the_window():
    groups = [
        kvx.LayerGroup("full", (0,), KV.replaced(num_blocks=32)),
        kvx.LayerGroup("window", (1,), KV.replaced(num_blocks=32), window=4),
    ]
    with Looked(kvx.PagedCache(groups, max_seqs=4, max_seq_len=64)) as looked:
        cache = looked.cache
        long = list(range(41))
        seq = cache.admit(long)
        for _ in range(41):  # blocks behind the window are given back before they have names
            cache.extend(seq, 1)
        cache.commit(seq)
        cache.release(seq)
        reason = looked.request([*long[:21], 99])["reason"]
        assert (reason["kind"], reason["group"]) == ("window", "window")
        assert "token 20" in reason["text"]


def test_no_snapshot_of_a_state():
    state = StateSpec(4, (state_plane("conv", "f32", channel=2, tap=1),))
    groups = [kvx.LayerGroup("full", (0,), KV), kvx.LayerGroup("state", (1,), state, kind=State())]
    with Looked(kvx.PagedCache(groups, max_seqs=4, max_seq_len=32)) as looked:
        looked.request(A)
        reason = looked.request([*A[:9], 99])["reason"]
        assert (reason["kind"], reason["group"]) == ("window", "state")
        assert "snapshot" in reason["text"]


def test_what_a_tier_brings_back_is_counted_apart():
    cache = make()
    with CacheTiers(cache, host="1MB"), Looked(cache) as looked:
        looked.request(A)
        looked.request([60] * 29)
        row = looked.request(A)
        assert (row["cached"], row["reason"]["kind"]) == (12, "all")
        looked.request([61] * 29)
        seq = cache.admit(A, is_brought_back=False)  # as a scheduler does
        cache.bring_back(seq)
        cache.extend(seq, 1)
        row = looked.rows[seq.id]
        assert (row["cached"], row["brought"], row["reason"]["kind"]) == (12, 12, "all")
        name, counts = next(iter(looked.records[-1]["tiers"].items()))
        assert name == "0 host"
        header = looked.records[0]
        stats = cache.prefix.backing.tiers_of(0)[0][0].stats
        assert counts == [getattr(stats, field) for field in header["tier_counts"]]
        assert looked.watcher.error == ""


def test_a_request_that_a_scheduler_puts_off_is_no_request():
    with Looked(make()) as looked:
        looked.request(A)
        for _ in range(5):
            looked.cache.release(looked.cache.admit(A))
        looked.watcher.look()
        counts = looked.records[-1]["counts"]
        assert counts["put_off"] == 5
        assert counts["reasons"] == {"never": 1}
        assert counts["queries"] == looked.cache.stats().prefix.queries == 6


def test_forks_and_preemptions():
    with Looked(make()) as looked:
        seq = looked.cache.admit(A)
        looked.cache.extend(seq, 13)
        fork = looked.cache.fork(seq)
        assert looked.rows[fork.id]["reason"]["kind"] == "fork"
        looked.cache.release(fork, is_preempted=True)
        looked.cache.release(seq)
        looked.watcher.look()
        ends = {row[0]: row[2] for record in looked.records for row in record.get("released", ())}
        assert ends == {seq.id: "released", fork.id: "preempted"}
        assert looked.records[-1]["counts"]["preemptions"] == 1


def test_without_a_prefix_cache():
    with Looked(make(prefix=False)) as looked:
        seq = looked.cache.admit(A)
        looked.cache.extend(seq, 13)
        assert looked.rows[seq.id]["reason"]["kind"] == "off"
        looked.cache.release(seq)
        looked.watcher.look()
        assert looked.records[-1]["released"][0][0] == seq.id


def test_what_was_there_before_anyone_looked():
    cache = make(32)
    kept = cache.admit(A)
    cache.extend(kept, 13)
    cache.commit(kept)
    gone = cache.admit([80] * 9)
    cache.extend(gone, 9)
    cache.commit(gone)
    cache.release(gone)
    with Looked(cache) as looked:
        assert looked.rows[kept.id]["reason"]["kind"] == "unknown"
        assert looked.why([*A[:6], 99, 98, 97]) == ("differs", 6)  # of a live sequence the tokens are known
        assert looked.why([80] * 9) == ("all", 8)


def test_events_that_were_lost_are_made_up_for(monkeypatch):
    monkeypatch.setattr("kvx.view.watcher.MAX_PENDING", 2)
    with Looked(make()) as looked:
        looked.request(A)
        looked.request([60] * 29)
        assert looked.watcher.num_overflows in (1, 2)
        assert looked.records[-1]["type"] == "snapshot"
        names, _ = looked.cache.prefix.named(0)
        tree = looked.watcher._picture.tree
        assert {name for name, node in tree.nodes.items() if node.groups} == set(names)


def test_what_is_remembered_has_a_bound(monkeypatch):
    monkeypatch.setattr(reasons, "MOST_DEPARTED", 4)
    with Looked(make()) as looked:
        for i in range(20):
            looked.request([i] * 13)
        tree = looked.watcher._picture.tree
        assert sum(not node.groups for node in tree.nodes.values()) == 4
        assert any("forgotten" in record for record in looked.records)
        assert looked.why([1] * 13) == ("never", 0)


def test_nobody_is_told_when_nobody_looks():
    cache = make()
    prefix = cache.prefix
    assert (prefix.has_listeners, prefix.hears_requests) == (False, False)
    with Looked(cache):
        assert prefix.hears_requests
    assert (prefix.has_listeners, prefix.hears_requests) == (False, False)


def test_what_is_no_cache_is_refused():
    with pytest.raises(BadArgument, match=r"kvx\.view: cache is a str; it must be a kvx\.PagedCache"):
        Watcher("cache")  # type: ignore[arg-type]
