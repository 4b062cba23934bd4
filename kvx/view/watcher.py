"""Watcher: looks at a cache while it works, and tells sinks what changed, as the lines of a recording.

On the cache's thread an event is appended to a queue, and nothing else. A thread here takes the cache's lock for as long as copies
of its counts take, ten times a second, and compares them with those of before. Where looking takes long it looks less often, down
to four times a second: so it is busy for a hundredth of the time. Decode steps are not told one by one; what they did is seen.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

import kvx
from kvx.cache.paged import PagedCache
from kvx.cache.prefix import Event, Stretch
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument, a_type
from kvx.view.picture import STATES, TIER_COUNTS, ContentEvent, Picture, Record, RequestEvent, Seen
from kvx.view.reasons import Asked

VERSION = 1  # of the form of a recording
INTERVAL_S = 0.1
MAX_PENDING = 200_000  # events between two looks; what is more is lost, and all is looked at anew
LONGEST_S = 0.25  # between two looks where looking takes long: a page moves four times a second
MOST_BUSY = 0.01  # of the time, until then
_WAIT_S = 0.02  # for the cache's lock: a call that waits for a tier holds it longer

Write = Callable[[str], None]  # one line, with its end


class Watcher:
    """Use it in a `with`: leaving tells what is left. attach() and record() make it."""

    def __init__(self, cache: PagedCache, *, title: str = "", interval_s: float = INTERVAL_S) -> None:
        if not isinstance(cache, PagedCache):
            raise BadArgument(f"kvx.view: cache is {a_type(cache)}; it must be a kvx.PagedCache. An engine's is engine.cache.")
        self._cache, self._prefix, self._title, self._interval_s = cache, cache.prefix, title, interval_s
        self._began, self._zero = time.time(), time.perf_counter()
        self._pending: deque[ContentEvent | RequestEvent] = deque()
        self._is_behind = False  # events are missing
        self._sinks: list[Write] = []
        self._readers: list[Callable[[Record], None]] = []
        self._lock = threading.Lock()  # of all that is not for the cache's thread
        self._stop = threading.Event()
        self._is_closed = False
        self.error = ""  # why something could not be looked at or written, the last time
        self.num_overflows = 0
        self._picture = Picture(cache)
        self.header: Record = self._header()
        if self._prefix is not None:
            self._prefix.listen(self._told, self._told_of_request)
        with cache.allocators[0].guard.lock:
            if self._prefix is not None:
                for stretch in cache.stretches():  # of what was stored before, as far as sequences still know
                    self._picture.learn(stretch, self._prefix.root(stretch.extra), 0.0)
            self._is_behind = True
            self._look()
        self._thread = threading.Thread(target=self._run, name="kvx view", daemon=True)
        self._thread.start()

    def _header(self) -> Record:
        cache = self._cache
        stats = cache.stats()
        groups = [
            {"name": g.name, "blocks": g.num_blocks, "block_bytes": g.block_bytes, "kind": type(k).__name__, "window": k.window}
            for g, k in zip(stats.groups, cache.kinds, strict=True)
        ]
        return {
            "type": "header", "kvx": "recording", "version": VERSION, "by": kvx.__version__, "began": self._began,
            "title": self._title, "block_size": cache.block_size, "max_seqs": cache.max_seqs, "max_seq_len": cache.max_seq_len,
            "device": str(cache.device), "has_prefix": self._prefix is not None, "states": list(STATES),
            "tier_counts": list(TIER_COUNTS), "groups": groups,
        }  # fmt: skip

    # --- on the cache's thread, under its lock: never waits -----------------------------------------------------------------

    def _told(self, event: Event, stretch: Stretch | None) -> None:
        if event.kind == "mended":
            self._is_behind = True
            return
        if self._is_full():
            return
        t = time.perf_counter() - self._zero
        assert self._prefix is not None
        root = self._prefix.root(stretch.extra) if stretch is not None and not stretch.parent else b""
        taker = self._cache.taker
        whom = -1 if taker is None or event.kind != "evicted" else taker.id
        self._pending.append(ContentEvent(t, event.kind, event.group, event.hashes, event.blocks, stretch, root, whom))

    def _is_full(self) -> bool:
        if len(self._pending) < MAX_PENDING:
            return False
        self.num_overflows += not self._is_behind
        self._is_behind = True
        return True

    def _told_of_request(self, kind: str, seq: Sequence) -> None:
        if self._is_full():
            return
        t, asked = time.perf_counter() - self._zero, None
        if kind in ("admitted", "brought"):
            bs, found = self._cache.block_size, seq.num_cached // self._cache.block_size
            names = tuple(seq.hashes[: max(0, seq.num_tokens - 1) // bs])
            tokens = np.ascontiguousarray(seq.token_row[found * bs : (found + 1) * bs], "<i4").tobytes()
            asked = Asked(names, found, tokens, seq.root, seq.extra, tuple(seq.extras))
        self._pending.append(RequestEvent(t, kind, seq.id, seq.num_tokens, seq.length, seq.num_cached, asked))

    # --- looking ------------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Now, on the caller's thread: all that happened is told when it returns."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        guard, seen, named = self._cache.allocators[0].guard, None, None
        if guard.lock.acquire(timeout=_WAIT_S):
            try:
                if guard.is_torn:
                    guard.mend()
                events = list(self._pending)
                self._pending.clear()
                seen = Seen.of(self._cache)
                if self._is_behind and self._prefix is not None:
                    named = [self._prefix.named(g) for g in range(len(self._cache.groups))]
                is_behind, self._is_behind = self._is_behind, False
            finally:
                guard.lock.release()
        else:
            events, is_behind = [self._pending.popleft() for _ in range(len(self._pending))], False
        t = time.perf_counter() - self._zero
        record = self._picture.changes(t, events, seen, self._tiers())
        if is_behind:
            if named is not None:
                self._picture.resync(t, [(names, blocks.tolist()) for names, blocks in named])
            record = self._picture.snapshot(t)
        if record:
            self._tell(record)

    def _tiers(self) -> dict[str, list[int]]:
        """Totals of each tier, over the groups, by its kind and place."""
        backing = None if self._prefix is None else self._prefix.backing
        tiers_of = getattr(backing, "tiers_of", None)  # a Backing of another kind has none
        found: dict[str, list[int]] = {}
        for member in [m for g in range(len(self._cache.groups)) for m in tiers_of(g)] if tiers_of is not None else ():
            for place, tier in enumerate(member):
                name = f"{place} {type(tier).__name__.removesuffix('Tier').lower()}"
                counts = found.setdefault(name, [0] * len(TIER_COUNTS))
                stats = tier.stats
                for i, field in enumerate(TIER_COUNTS):
                    counts[i] += getattr(stats, field)
        return found

    def _tell(self, record: Record) -> None:
        for reader in self._readers:
            reader(record)
        if self._sinks:
            text = line(record)
            for write in list(self._sinks):
                self._write(write, text)

    def _write(self, write: Write, text: str) -> bool:
        """One that fails gets no more."""
        try:
            write(text)
        except (OSError, ValueError) as error:  # a full disk, a closed file
            self.error = f"{type(error).__name__}: {error}"
            self._sinks = [other for other in self._sinks if other is not write]
            return False
        return True

    # --- who is told --------------------------------------------------------------------------------------------------------

    def join(self, write: Write) -> None:
        """From now on it gets every line: first those from which everything follows."""
        with self._lock:
            self._look()
            self._sinks.append(write)
            for record in (self.header, self._picture.snapshot(time.perf_counter() - self._zero)):
                if not self._write(write, line(record)):
                    return
            if self._is_closed:
                self._write(write, line(self._end()))

    def leave(self, write: Write) -> None:
        with self._lock:
            self._sinks = [other for other in self._sinks if other is not write]

    def read_by(self, reader: Callable[[Record], None]) -> None:
        """As join(), for one in this process."""
        with self._lock:
            self._look()
            reader(self.header)
            reader(self._picture.snapshot(time.perf_counter() - self._zero))
            self._readers.append(reader)

    def _end(self) -> Record:
        return {"type": "end", "t": round(time.perf_counter() - self._zero, 4)}

    # --- all of it ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = self._interval_s
        while not self._stop.wait(pause):
            begin = time.thread_time()
            try:
                self.look()
            except Exception as error:  # without this thread nobody would be told anything more
                self.error, self._is_behind = f"{type(error).__name__}: {error}", True
            pause = max(self._interval_s, min(LONGEST_S, (time.thread_time() - begin) / MOST_BUSY))

    def close(self) -> None:
        """Tell what is left, and that it is the end. The cache goes on alone."""
        if self._is_closed:
            return
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._look()
            if self._prefix is not None:
                self._prefix.unlisten(self._told)
            self._is_closed = True
            self._tell(self._end())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def line(record: Record) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def header_of(record: Any) -> Record:
    """The first record of a recording, where it is one that this version reads; else BadArgument says what it is."""
    if not isinstance(record, dict) or record.get("kvx") != "recording":
        raise BadArgument("its first line does not say that it is a recording of kvx")
    version = record.get("version")
    if type(version) is not int or version < 1:
        raise BadArgument(f"its version is {version!r}; it must be a whole number")
    if version > VERSION:
        raise BadArgument(f"it is of version {version}, and this kvx reads up to {VERSION}. A newer kvx reads it")
    return record
