"""publish(): a cache's blocks, and those of its tiers, told over ZMQ as vLLM tells its own (vllm/distributed/kv_events.py, 0.32).

    PUB     [topic, number of the batch (8 bytes, big endian), msgpack of [time, [event, ...], data parallel rank]]
    ROUTER  asked with the number of the first batch that is missed; answers with such batches, and [b"", -1, b""] at the end

The cache's thread appends to a queue and goes on. A thread here looks at what changed, and sends. A queue that is full loses
events; then all blocks are looked at anew, so what is told is right again, without a gap. A subscriber that does not keep up loses
batches, sees it by their numbers, and asks for them.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvx.cache.paged import PagedCache
from kvx.cache.prefix import Event, Stretch
from kvx.errors import BadArgument
from kvx.wires.events.history import History
from kvx.wires.events.residency import CLEARED, Holder, KnownTiers, Record, Residency
from kvx.wires.wire import WireError, need

END = (-1).to_bytes(8, "big", signed=True)
GATHER_S = 0.01  # what happens within this time is one batch
MAX_HISTORY_BLOCKS = 1 << 16
_HOW = "pip install 'kvx[events]', which has it and what else events need."
_ADDRESS = re.compile(r"tcp://(\[.+\]|[^:/]+):\d+|ipc://.+")
_AGAIN_S = 1.0  # a wake-up may be lost to Ctrl-C
_LINGER_MS = 500  # how long closing waits for subscribers that still read


class _FromTier(NamedTuple):
    holder: Holder
    key: bytes
    is_there: bool | None  # None: to be asked


class Publisher:
    """Use it in a `with`: leaving tells what is left, and closes the sockets. publish() makes it."""

    def __init__(
        self,
        cache: PagedCache,
        address: str,
        *,
        replay: str = "",
        tiers: KnownTiers | None = None,
        topic: str = "",
        connect: bool = False,
        data_parallel_rank: int = 0,
        max_pending: int = 10_000,
    ) -> None:
        zmq = need("zmq", "pyzmq", _HOW)
        self._msgpack = need("msgspec.msgpack", "msgspec", _HOW)
        for what, given in (("address", address), ("replay", replay or "tcp://127.0.0.1:0")):
            if not isinstance(given, str) or not _ADDRESS.fullmatch(given):
                raise BadArgument(f'publish(): {what} is {given!r}; it must be like "tcp://127.0.0.1:5557" or "ipc:///tmp/events".')
        if max_pending < 1:
            raise BadArgument(f"publish(): max_pending is {max_pending}; it must be 1 or more.")
        self._residency = Residency(cache, tiers)
        assert cache.prefix is not None  # Residency has looked
        self._cache, self._prefix, self._max_pending = cache, cache.prefix, max_pending
        self._topic, self._rank, self._zmq = topic.encode(), data_parallel_rank, zmq
        self._history = History(MAX_HISTORY_BLOCKS) if replay else None
        self._pending: deque[tuple[Event, Stretch | None] | _FromTier] = deque()
        self._is_awake = self._is_closed = False
        self._is_behind = True  # events are missing: all blocks are to be looked at
        self.num_batches = 0  # published; the number of the next one
        self.num_overflows = 0  # how often events were lost
        self.error = ""  # why something could not be looked at or told, the last time; the next look makes up for it
        self._context = zmq.Context()
        try:
            self._pub, self.address = self._open(zmq.PUB, address, connect)
            self._replay: Any = None
            self.replay = ""
            if replay:
                self._replay, self.replay = self._open(zmq.ROUTER, replay)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            weakref.finalize(self, os.close, self._wake)  # not by close(): a tier's thread may be about to write to it
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._listening = [(p.tier, partial(self._told_by_tier, p)) for p in self._residency.holders if p.tier is not None]
        for tier, listener in self._listening:
            tier.listen(listener)
        self._prefix.listen(self._told_by_cache)
        self._thread = threading.Thread(target=self._run, name="kvx events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, address: str, connect: bool = False) -> tuple[Any, str]:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.set_hwm(100_000)  # batches of one subscriber; what it has no room for is not sent to it
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        if "[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            (socket.connect if connect else socket.bind)(address)
        except zmq.ZMQError as error:
            does = "connect to" if connect else "listen at"
            raise WireError(f"publish(): cannot {does} {address}: {error}. Give another address, or port 0 for any.") from None
        return socket, address if connect else socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    # --- on the threads of the cache and its tiers: never waits ---------------------------------------------------------------

    def _told_by_cache(self, event: Event, stretch: Stretch | None) -> None:
        self._put((event, stretch))

    def _told_by_tier(self, holder: Holder, event: Any) -> None:
        """A TierEvent. A remote tier is not asked again: that would take a network's time."""
        if event.kind != "failed":
            is_remote = holder.tier is not None and holder.tier.is_remote
            self._put(_FromTier(holder, event.key, event.kind == "stored" if is_remote else None))

    def _put(self, item: tuple[Event, Stretch | None] | _FromTier) -> None:
        if len(self._pending) < self._max_pending:
            self._pending.append(item)
        elif not self._is_behind:
            self._is_behind = True
            self.num_overflows += 1
        if not self._is_awake:
            self._is_awake = True
            os.eventfd_write(self._wake, 1)

    # --- on the publisher's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        for stretch in self._cache.stretches():  # of blocks stored before anyone listened, what sequences still know
            self._residency.learn(stretch)
        self._step([CLEARED])  # what was told from here before this process is no longer so
        while not self._is_closed:
            ready = dict(poller.poll(_AGAIN_S * 1000))
            try:
                if self._replay in ready:
                    self._answer()
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    time.sleep(GATHER_S)
                self._is_awake = False
                self._step()
            except Exception as error:  # without this thread nobody would be told anything more
                self.error, self._is_behind = f"{type(error).__name__}: {error}", True
                time.sleep(_AGAIN_S)
        self._step()

    def _step(self, records: Sequence[Record] = ()) -> None:
        """Tell what changed."""
        told = list(records)
        items = [self._pending.popleft() for _ in range(len(self._pending))]
        if self._is_behind:
            self._is_behind = False
            for item in items:
                if not isinstance(item, _FromTier) and item[1] is not None:
                    told += self._residency.learn(item[1])
            told += self._residency.look_everywhere()
        else:
            told += self._looked_at(items)
        if self._residency.error:  # a second from now it is asked again
            self.error, self._residency.error, self._is_behind = self._residency.error, "", True
        if told:
            self._send(told)

    def _looked_at(self, items: Sequence[tuple[Event, Stretch | None] | _FromTier]) -> list[Record]:
        records: list[Record] = []
        look = self._residency.look
        for of, some in groupby(items, lambda i: (i.holder.group, i.holder.bit, i.is_there) if isinstance(i, _FromTier) else None):
            if of is not None:
                keys = [i for i in some if isinstance(i, _FromTier)]
                records += look(keys[0].holder, list(dict.fromkeys(i.key for i in keys)), keys[0].is_there)
                continue
            for item in some:
                assert not isinstance(item, _FromTier)
                event, stretch = item
                if event.kind in ("removed", "mended"):
                    records += self._residency.look_everywhere(is_clear=True)
                    continue
                if stretch is not None:
                    records += self._residency.learn(stretch)
                records += look(self._residency.cache_holder(event.group), event.hashes)
        return records

    def _send(self, records: list[Record]) -> None:
        number = self.num_batches
        self.num_batches += 1
        if self._history is not None:
            self._history.append(number, records)
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), self._encoded(records)])

    def _encoded(self, records: list[Record]) -> bytes:
        encoded: bytes = self._msgpack.encode([time.time(), records, self._rank])
        return encoded

    def _answer(self) -> None:
        """One question of a subscriber: [who, b"", number of the first batch it misses]."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8 or self._history is None:
            return
        for number, records in self._history.since(int.from_bytes(frames[2], "big")):
            self._replay.send_multipart([frames[0], b"", self._topic, number.to_bytes(8, "big"), self._encoded(records)])
        self._replay.send_multipart([frames[0], b"", b"", END, b""])

    # --- all of it ------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tell what is left, and close. Subscribers that do not read are waited for half a second, and no longer."""
        if self._is_closed:
            return
        self._prefix.unlisten(self._told_by_cache)
        for tier, listener in self._listening:
            tier.unlisten(listener)
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def publish(
    cache: PagedCache,
    address: str = "tcp://127.0.0.1:5557",  # of the PUB socket; port 0: any, and Publisher.address says which
    *,
    replay: str = "",  # of the ROUTER socket that answers those who missed something; "": none, and nothing is kept
    tiers: KnownTiers | None = None,  # the cache's kvx.tiers.CacheTiers, whose blocks are told too
    topic: str = "",  # before every batch; llm-d takes "kv@POD@MODEL"
    connect: bool = False,  # to a router that listens at `address`, as llm-d's does. False: listen there
    data_parallel_rank: int = 0,
    max_pending: int = 10_000,  # events that wait for the publisher's thread
) -> Publisher:
    """Tell subscribers which blocks the cache and its tiers have, as vLLM 0.32's KV events. Nothing here makes the cache wait.

    Anybody who reaches the address is told all token ids: give it a network of those you trust.
    """
    return Publisher(
        cache, address, replay=replay, tiers=tiers, topic=topic, connect=connect, data_parallel_rank=data_parallel_rank,
        max_pending=max_pending,
    )  # fmt: skip
