"""Picture: what was seen of a cache, and what changed since, as records that a page, a file and metrics are all made of.

docs/live.md has the form. A snapshot has the fields of changes, of everything; whoever applies one forgets what it had.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvx.cache.names import BlockHash
from kvx.cache.paged import PagedCache
from kvx.cache.prefix import PrefixStats, Stretch
from kvx.view.reasons import Asked, Gone, PrefixTree, Reason

Record = dict[str, Any]
STATES = ("free", "kept", "used", "shared", "pinned", "in flight")  # of a block; a record has the place in this list
FREE, KEPT, USED, SHARED, PINNED, IN_FLIGHT = range(6)
MOST_REQUESTS = 1000  # that a snapshot tells of
TIER_COUNTS = ("stored", "evicted", "hits", "misses", "bytes_in", "bytes_out")


class ContentEvent(NamedTuple):
    """What a cache's listener heard of blocks."""

    t: float
    kind: str  # "stored", "evicted", "removed", "loading"
    group: int
    names: Sequence[BlockHash]
    blocks: Sequence[int]
    stretch: Stretch | None
    root: BlockHash  # of a stretch that begins a sequence
    taker: int  # of "evicted": the sequence that gets the block


class RequestEvent(NamedTuple):
    """And of a sequence."""

    t: float
    kind: str  # "admitted", "brought", "forked", "released", "preempted"
    seq: int
    num_tokens: int
    length: int
    num_cached: int
    asked: Asked | None  # of "admitted" and "brought"


class SeenSequence(NamedTuple):
    id: int
    length: int
    num_tokens: int
    num_cached: int
    tables: tuple[NDArray[np.int32], ...]  # one a group


@dataclass(frozen=True)
class Seen:
    """A cache at one moment: copies."""

    refs: list[NDArray[np.int32]]
    idle: list[NDArray[np.bool_]]
    pins: list[dict[int, int]]
    sequences: list[SeenSequence]
    stats: dict[str, int] | None  # of the prefix cache

    @staticmethod
    def of(cache: PagedCache) -> Seen:
        """For who holds its lock."""
        prefix, groups = cache.prefix, range(len(cache.groups))
        return Seen(
            [a.counts() for a in cache.allocators],
            [a.idle() for a in cache.allocators],
            [prefix.pinned(g) if prefix is not None else {} for g in groups],
            [
                SeenSequence(s.id, s.length, s.num_tokens, s.num_cached, tuple(cache.blocks(s, g) for g in groups))
                for s in cache.sequences
            ],
            None if prefix is None else dict(vars(prefix.stats)),
        )

    def states(self, group: int) -> NDArray[np.uint8]:
        """Of every block."""
        refs, pins = self.refs[group], self.pins[group]
        states = self.idle[group].astype(np.uint8)
        states[refs > 0] = USED
        if pins:
            refs = refs.copy()
            refs[list(pins)] -= np.fromiter(pins.values(), np.int32, len(pins))
        states[refs > 1] = SHARED
        states[list(pins)] = PINNED
        return states


class Picture:
    """Not thread-safe: one thread changes it and tells what changed."""

    def __init__(self, cache: PagedCache) -> None:
        self._has_prefix = cache.prefix is not None
        self.block_size, groups = cache.block_size, cache.groups
        self.tree = PrefixTree(cache.block_size, cache.kinds, [g.name for g in groups])
        self._states = [np.zeros(a.num_blocks, np.uint8) for a in cache.allocators]
        self._sequences: dict[int, tuple[int, int]] = {}  # length and known tokens
        self._tables: dict[tuple[int, int], NDArray[np.int32]] = {}  # of a sequence in a group
        self._block_of: list[dict[int, int]] = [{} for _ in groups]  # number of a node -> the block that has it
        self._in_flight: list[set[int]] = [set() for _ in groups]
        self._requests: OrderedDict[int, Record] = OrderedDict()  # the newest, by sequence
        self._tiers: dict[str, list[int]] = {}
        self._counts: Record = {}
        self._reasons: Counter[str] = Counter()
        self._evictions = [0] * len(groups)
        self._preemptions = self._put_off = 0

    # --- what changed -------------------------------------------------------------------------------------------------------

    def changes(
        self, t: float, events: Iterable[ContentEvent | RequestEvent], seen: Seen | None, tiers: Mapping[str, list[int]]
    ) -> Record:
        """Since the last time; {} where nothing did. `seen` is None while the cache is in a long call."""
        record: Record = {}
        self._apply(events, record)
        if seen is not None:
            self._see_sequences(t, seen, record)
        if runs := self._see_blocks(seen):
            record["blocks"] = runs
        if tiers != self._tiers:
            self._tiers = {name: list(counts) for name, counts in tiers.items()}
            record["tiers"] = self._tiers
        if forgotten := self.tree.forget():
            record["forgotten"] = forgotten
        counts = self._count(seen)
        if counts != self._counts:
            record["counts"] = self._counts = counts
        return {"type": "changes", "t": round(t, 4), **record} if record else {}

    def _apply(self, events: Iterable[ContentEvent | RequestEvent], record: Record) -> None:
        new: dict[int, Record] = {}  # admitted by these events
        released: list[list[Any]] = []
        for event in events:
            if isinstance(event, ContentEvent):
                self._apply_content(event, record)
                continue
            is_over = event.kind in ("released", "preempted")
            if not is_over:
                new[event.seq] = self._admit(event)
            elif event.seq in new and event.length == event.num_cached and event.kind == "released":
                del new[event.seq]  # a scheduler looked, and found no room for it
                self._uncount(self._requests.pop(event.seq))
                self._put_off += 1
            else:
                self._preemptions += event.kind == "preempted"
                self._end(event.seq, event.t, event.kind)
                released.append([event.seq, round(event.t, 4), event.kind])
        for name, rows in (("admitted", [dict(row) for row in new.values()]), ("released", released)):
            if rows:
                record[name] = rows
        while len(self._requests) > MOST_REQUESTS:
            self._requests.popitem(last=False)

    def _admit(self, event: RequestEvent) -> Record:
        before = self._requests.get(event.seq)
        age = None
        if event.asked is None:
            reason = Reason("fork", event.length, "It was forked: it shares all blocks of another sequence.")
        else:
            reason = self.tree.why(event.asked)
            age = self.tree.touch(event.asked.names[: event.asked.found], event.t)
        row: Record = {
            "seq": event.seq,
            "t": round(event.t, 4) if before is None else before["t"],
            "tokens": event.num_tokens,
            "cached": event.num_cached,
            "brought": 0,
            "reason": reason.to_json(),
        }
        if before is not None:  # what its backing had came after
            self._uncount(before)
            row["brought"] = event.num_cached - before["cached"]
            age = before.get("age", age)
        if age is not None:
            row["age"] = round(age, 4)
        self._reasons[reason.kind] += 1
        self._requests[event.seq] = row
        for blocks in self._in_flight:  # what was loading has come, or will not
            blocks.clear()
        return row

    def _uncount(self, row: Record) -> None:
        kind = row["reason"]["kind"]
        self._reasons[kind] -= 1
        if not self._reasons[kind]:
            del self._reasons[kind]

    def _end(self, seq: int, t: float, how: str) -> None:
        if seq in self._requests:
            self._requests[seq] |= {"end": round(t, 4), "how": how}

    def _apply_content(self, event: ContentEvent, record: Record) -> None:
        group, held = event.group, self._block_of[event.group]
        if event.kind == "loading":
            self._in_flight[group].update(event.blocks)
        elif event.kind == "stored":
            if event.stretch is not None:
                self._add(record, "nodes", self.learn(event.stretch, event.root, event.t))
            numbers = self.tree.store(group, event.names, event.t)
            held.update(zip(numbers, event.blocks, strict=True))
            self._in_flight[group].difference_update(event.blocks)
            self._add_content(record, ["stored", group, numbers, list(event.blocks)])
        else:
            is_cleared = event.kind == "removed"
            numbers, ages = self.tree.lose(group, event.names, Gone(event.t, event.taker, is_cleared))
            for number in numbers:
                held.pop(number, None)
            self._evictions[group] += 0 if is_cleared else len(numbers)
            self._add_content(record, [event.kind, group, numbers, [round(age, 4) for age in ages], event.taker])

    @staticmethod
    def _add_content(record: Record, row: list[Any]) -> None:
        """In the order in which it happened; what goes on like the last joins it."""
        rows = record.setdefault("content", [])
        if rows and rows[-1][:2] == row[:2] and rows[-1][4:] == row[4:]:
            rows[-1][2] += row[2]
            rows[-1][3] += row[3]
        elif row[2]:
            rows.append(row)

    @staticmethod
    def _add(record: Record, name: str, rows: list[Any]) -> None:
        if rows:
            record.setdefault(name, []).extend(rows)

    def learn(self, stretch: Stretch, root: BlockHash, t: float) -> list[list[int]]:
        """What the names are made of; new nodes, as a record has them."""
        return [list(run) for run in self.tree.learn(stretch, root, t)]

    def _see_sequences(self, t: float, seen: Seen, record: Record) -> None:
        moved, tables = [], []
        for s in seen.sequences:
            if self._sequences.get(s.id) != (s.length, s.num_tokens):
                if s.id not in self._sequences and s.id not in self._requests:
                    self._add(record, "admitted", [self._unheard(t, s)])
                self._sequences[s.id] = s.length, s.num_tokens
                moved.append([s.id, s.length, s.num_tokens])
            for group, table in enumerate(s.tables):
                if (first := _first_other(self._tables.get((s.id, group)), table)) >= 0:
                    tables.append([s.id, group, first, table[first:].tolist()])
                    self._tables[s.id, group] = table
        self._add(record, "sequences", moved)
        self._add(record, "tables", tables)
        live = {s.id for s in seen.sequences}
        told = {row[0] for row in record.get("released", ())}
        for seq in [seq for seq in self._sequences if seq not in live]:
            del self._sequences[seq]
            for group in range(len(self._states)):
                self._tables.pop((seq, group), None)
            if seq not in told:  # nobody hears of it where there are no prefixes
                self._end(seq, t, "released")
                self._add(record, "released", [[seq, round(t, 4), "released"]])

    def _unheard(self, t: float, s: SeenSequence) -> Record:
        """Of a sequence that nobody heard of when it was admitted."""
        reason = (
            Reason("unknown", s.num_cached, "It was admitted before anyone looked.")
            if self._has_prefix
            else Reason("off", 0, "The cache keeps no prefixes.")
        )
        self._reasons[reason.kind] += 1
        row = {
            "seq": s.id, "t": round(t, 4), "tokens": s.num_tokens, "cached": s.num_cached, "brought": 0, "reason": reason.to_json(),
        }  # fmt: skip
        self._requests[s.id] = row
        return dict(row)

    def _see_blocks(self, seen: Seen | None) -> list[list[int]]:
        """Runs of blocks whose state is another: [group, state, first block, how many]."""
        runs = []
        for group, before in enumerate(self._states):
            states = before.copy() if seen is None else seen.states(group)
            if self._in_flight[group]:
                states[list(self._in_flight[group])] = IN_FLIGHT
            runs += _runs(group, states, np.flatnonzero(states != before))
            self._states[group] = states
        return runs

    def _count(self, seen: Seen | None) -> Record:
        """Totals."""
        stats = {k: v for k, v in self._counts.items() if k in PrefixStats.__annotations__}
        if seen is not None and seen.stats is not None:
            stats = seen.stats
        return {
            **stats,
            "preemptions": self._preemptions,
            "put_off": self._put_off,
            "reasons": dict(sorted(self._reasons.items())),
            "evictions": list(self._evictions),
        }

    # --- all of it ----------------------------------------------------------------------------------------------------------

    def resync(self, t: float, named: Sequence[tuple[Sequence[BlockHash], Sequence[int]]]) -> None:
        """Events are missing: each group has these names in these blocks."""
        for group, (names, blocks) in enumerate(named):
            now = set(names)
            lost = [name for name, node in self.tree.nodes.items() if node.groups >> group & 1 and name not in now]
            self.tree.lose(group, lost, Gone(t, -1, False))
            new = [name for name in names if not (name in self.tree.nodes and self.tree.nodes[name].groups >> group & 1)]
            self.tree.store(group, new, t)
            self._block_of[group] = {self.tree.nodes[name].number: block for name, block in zip(names, blocks, strict=True)}

    def snapshot(self, t: float) -> Record:
        parts: Record = {"blocks": [], "nodes": [], "content": []}
        for group, states in enumerate(self._states):
            parts["blocks"] += _runs(group, states, np.flatnonzero(states != FREE))
            held = self._block_of[group]
            if held:
                parts["content"].append(["stored", group, list(held), list(held.values())])
        for node in sorted(self.tree.nodes.values(), key=lambda node: node.number):
            above = self.tree.nodes.get(node.parent)
            parent, last = -1 if above is None else above.number, parts["nodes"][-1] if parts["nodes"] else None
            if last is not None and node.number == last[0] + last[1] and parent == node.number - 1:
                last[1] += 1
            else:
                parts["nodes"].append([node.number, 1, parent])
        return {
            "type": "snapshot",
            "t": round(t, 4),
            **parts,
            "sequences": [[seq, *both] for seq, both in self._sequences.items()],
            "tables": [[seq, group, 0, table.tolist()] for (seq, group), table in self._tables.items()],
            "admitted": [dict(row) for row in self._requests.values()],
            "tiers": self._tiers,
            "counts": self._counts,
        }


def _runs(group: int, states: NDArray[np.uint8], at: NDArray[np.intp]) -> list[list[int]]:
    """Of the blocks `at`, those that follow each other in one state as one."""
    if not len(at):
        return []
    of = states[at]
    begins = np.flatnonzero(np.concatenate(([True], (np.diff(at) != 1) | (np.diff(of) != 0))))
    counts = np.diff(np.concatenate((begins, [len(at)])))
    return [[group, s, b, n] for s, b, n in zip(of[begins].tolist(), at[begins].tolist(), counts.tolist(), strict=True)]


def _first_other(before: NDArray[np.int32] | None, now: NDArray[np.int32]) -> int:
    """Where two tables begin to differ; -1: nowhere."""
    if before is None:
        return 0
    n = min(len(before), len(now))
    other = before[:n] != now[:n]
    if np.count_nonzero(other):
        return int(other.argmax())
    return -1 if len(before) == len(now) else n
