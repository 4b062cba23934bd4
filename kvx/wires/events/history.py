"""History: the batches that were published, for subscribers that missed some. What is older than the oldest of them is kept as one
batch that has its sum, so that whoever asks from the beginning gets to where the others are, however late."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvx.wires.events.residency import CLEARED, Record


class EventBatch(NamedTuple):
    sequence: int
    records: list[Record]
    num_blocks: int


class History:
    """At most `max_blocks` of batches one by one; their sum has as many as there are."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks, self._num_blocks = max_blocks, 0
        self._batches: deque[EventBatch] = deque()
        self._base = -1  # the number of the last batch that is in the sum
        self._sum: dict[tuple[int, str, str | None, bytes], tuple[Record, int]] = {}  # each block: its record, and where in it

    def append(self, sequence: int, records: list[Record]) -> None:
        batch = EventBatch(sequence, records, sum(len(r.get("block_hashes", ())) for r in records))
        self._batches.append(batch)
        self._num_blocks += batch.num_blocks
        while self._num_blocks > self._max_blocks and len(self._batches) > 1:
            old = self._batches.popleft()
            self._num_blocks -= old.num_blocks
            self._base = old.sequence
            self._add(old.records)

    def since(self, sequence: int) -> Iterator[tuple[int, list[Record]]]:
        """The batches from this one on, each with its number. Where it is no longer there by itself, the sum comes first, as the
        last of those that are in it: it begins with AllBlocksCleared."""
        if sequence <= self._base:
            yield self._base, [CLEARED, *self._summed()]
        yield from ((b.sequence, b.records) for b in self._batches if b.sequence >= sequence)

    def _add(self, records: list[Record]) -> None:
        for record in records:
            if record["type"] == "AllBlocksCleared":
                self._sum.clear()
                continue
            for i, name in enumerate(record["block_hashes"]):
                key = record["group_idx"], record["medium"], record.get("locality"), name
                self._sum.pop(key, None)  # told again: it counts as new, after its parent
                if record["type"] == "BlockStored":
                    self._sum[key] = record, i

    def _summed(self) -> Iterator[Record]:
        """Stored blocks, those of one record that follow each other as one."""
        run: Record = {}
        first = end = 0
        for record, i in self._sum.values():
            if record is run and i == end:
                end += 1
                continue
            if run:
                yield _part(run, first, end)
            run, first, end = record, i, i + 1
        if run:
            yield _part(run, first, end)


def _part(record: Record, first: int, end: int) -> Record:
    """Some of its blocks."""
    names, bs = record["block_hashes"], record["block_size"]
    part = {
        **record,
        "block_hashes": names[first:end],
        "parent_block_hash": names[first - 1] if first else record["parent_block_hash"],
        "token_ids": record["token_ids"][first * bs : end * bs],
    }
    return {**part, "extra_keys": record["extra_keys"][first:end]} if "extra_keys" in record else part
