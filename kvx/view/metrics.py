"""Metrics: a cache's totals for Prometheus, out of the records that a page is drawn from. prometheus_client writes them.

docs/grafana/kvx.json is a dashboard of these.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvx.errors import Unsupported
from kvx.view.picture import Record

AGES_S = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)  # ends of the histograms' buckets
_NO_MISS = ("all", "fork", "short", "off")  # reasons for which nothing was missing


class Histogram:
    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(AGES_S) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(AGES_S, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each with all that are less."""
        total, found = 0, []
        for end, count in zip((*map(str, AGES_S), "+Inf"), self.counts, strict=True):
            total += count
            found.append((end, float(total)))
        return found


class Metrics:
    """Told records in their order, by one thread; asked by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._header: Record = {}
        self._blocks: list[bytearray] = []
        self._sequences: dict[int, int] = {}
        self._counts: Record = {}
        self._tiers: dict[str, list[int]] = {}
        self._hit_age, self._eviction_age = Histogram(), Histogram()

    def read(self, record: Record) -> None:
        with self._lock:
            if record["type"] == "header":
                self._header = record
                self._blocks = [bytearray(group["blocks"]) for group in record["groups"]]
            elif record["type"] in ("snapshot", "changes"):
                self._apply(record, is_snapshot=record["type"] == "snapshot")

    def _apply(self, record: Record, *, is_snapshot: bool) -> None:
        if is_snapshot:
            self._blocks = [bytearray(len(states)) for states in self._blocks]
            self._sequences.clear()
        for group, state, first, count in record.get("blocks", ()):
            self._blocks[group][first : first + count] = bytes([state]) * count
        for seq, length, _ in record.get("sequences", ()):
            self._sequences[seq] = length
        for row in record.get("released", ()):
            self._sequences.pop(row[0], None)
        self._counts = record.get("counts", self._counts)
        self._tiers = record.get("tiers", self._tiers)
        if is_snapshot:  # its ages are of the past, and were told
            return
        for row in record.get("admitted", ()):
            if "age" in row:
                self._hit_age.add(row["age"])
        for kind, _, _, ages, *_ in record.get("content", ()):
            if kind == "evicted":
                for age in ages:
                    self._eviction_age.add(age)

    def text(self, accept: str = "") -> tuple[str, bytes]:
        """What /metrics answers, in OpenMetrics where that is accepted: its type, and the text."""
        try:
            from prometheus_client.exposition import choose_encoder
            from prometheus_client.registry import CollectorRegistry
        except ImportError:
            raise Unsupported("/metrics needs prometheus_client: pip install 'kvx[view]'.") from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # it has what a Collector has
        encode, kind = choose_encoder(accept)
        return kind, encode(registry)

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks of a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        with self._lock:
            groups = self._header.get("groups", [])
            family: Any = GaugeMetricFamily("kvx_blocks", "Blocks of the cache in each state.", labels=["group", "state"])
            for group, states in zip(groups, self._blocks, strict=False):
                count = Counter(states)
                for number, state in enumerate(self._header["states"]):
                    family.add_metric([group["name"], state], count[number])
            yield family
            yield GaugeMetricFamily("kvx_sequences", "Sequences that are admitted and not released.", value=len(self._sequences))
            tokens = sum(self._sequences.values())
            yield GaugeMetricFamily("kvx_tokens", "Tokens in the cache, once for each sequence that has them.", value=tokens)
            for name, key, words in _TOTALS:
                yield CounterMetricFamily(name, words, value=self._counts.get(key, 0))
            family = CounterMetricFamily("kvx_prefix_misses", "Requests whose prefix ended, by the reason.", labels=["reason"])
            for reason, n in self._counts.get("reasons", {}).items():
                if reason not in _NO_MISS:
                    family.add_metric([reason], n)
            yield family
            family = CounterMetricFamily("kvx_requests", "Sequences admitted, by why their prefix ended.", labels=["reason"])
            for reason, n in self._counts.get("reasons", {}).items():
                family.add_metric([reason], n)
            yield family
            family = CounterMetricFamily("kvx_evictions", "Blocks whose content was evicted.", labels=["group"])
            for group, n in zip(groups, self._counts.get("evictions", ()), strict=False):
                family.add_metric([group["name"]], n)
            yield family
            family = CounterMetricFamily("kvx_tier_bytes", "Bytes to and from each tier.", labels=["tier", "direction"])
            places = self._header.get("tier_counts", [])
            for tier, counts in self._tiers.items():
                of = dict(zip(places, counts, strict=False))
                family.add_metric([tier, "to"], of.get("bytes_in", 0))
                family.add_metric([tier, "from"], of.get("bytes_out", 0))
            yield family
            family = CounterMetricFamily("kvx_tier_blocks", "Blocks of each tier by what happened.", labels=["tier", "event"])
            for tier, counts in self._tiers.items():
                for what, n in zip(places, counts, strict=False):
                    if not what.startswith("bytes"):
                        family.add_metric([tier, what], n)
            yield family
            for name, words, ages in (
                ("kvx_hit_age_seconds", "How long what a request found had not been used.", self._hit_age),
                ("kvx_eviction_age_seconds", "How long an evicted block had not been used.", self._eviction_age),
            ):
                yield HistogramMetricFamily(name, words, buckets=ages.buckets(), sum_value=ages.sum)


_TOTALS = (
    ("kvx_prefix_queries", "queries", "Lookups of prompts that have a full block."),
    ("kvx_prefix_hits", "hits", "Lookups that found a block or more."),
    ("kvx_prefix_tokens_asked", "tokens_asked", "Tokens of prompts that might have been found."),
    ("kvx_prefix_tokens_hit", "tokens_hit", "Tokens of prompts that were found."),
    ("kvx_prefix_tokens_brought", "tokens_brought", "Prompt tokens loaded from tiers."),
    ("kvx_blocks_stored", "stored", "Blocks that got a name, by which others find them."),
    ("kvx_preemptions", "preemptions", "Sequences that were preempted: others needed their blocks."),
    ("kvx_put_off", "put_off", "Lookups of requests that a scheduler then found no room for."),
)
