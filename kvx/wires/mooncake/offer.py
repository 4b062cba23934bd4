"""Offers through Mooncake's store: questions, answers and bytes are objects in it.

kvx/ask               a question: one at a time, taken out by the side that answers
kvx/NUMBER/answer     what is offered
kvx/NUMBER/0, 1, ...  its buffers
kvx/NUMBER/done       they are pulled
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvx.errors import KvxError
from kvx.layout.plan import Plan
from kvx.ops.convert import convert
from kvx.wires.mooncake.store import MASTER_TIMEOUT_S, NO_ROOM, OWNER_GONE, MooncakeStore, StoreError
from kvx.wires.offer import NO_PREFILL, PREFILL_HINT, Offer, Offers, Puller, Request, places_of, read_answer
from kvx.wires.wire import Deadline, WireError

_ASK = "kvx/ask"
_LOOK_S = 0.01  # between two looks at the store


@dataclass
class _Given:
    num_buffers: int
    until_s: float


class MooncakeOffers(Offers):
    """It gives the store the memory that the bytes lie in. One such side a master, which is at `host` and `port`."""

    def __init__(self, host: str, port: int, *, lease_s: float = 30.0, segment_bytes: int = 512 << 20, my_host: str = "") -> None:
        self.lease_s = lease_s
        self._store = MooncakeStore(f"{host}:{port}", host=my_host, segment_bytes=segment_bytes)
        self._given: dict[str, _Given] = {}
        self._looked_s = 0.0

    @property
    def num_offers(self) -> int:
        return len(self._given)

    @property
    def num_registered(self) -> int:
        return self._store.num_registered

    def requests(self) -> list[Request]:
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now
        try:
            done = self._store.has([f"kvx/{number}/done" for number in self._given])
            for (number, given), is_done in zip(list(self._given.items()), done, strict=True):
                if is_done or given.until_s <= now:
                    self._end(number)
            text = self._store.get(_ASK)
        except WireError:  # the master is gone for now
            return []
        if not text:
            return []
        self._store.remove(_ASK)
        with suppress(ValueError, KeyError, TypeError):
            body = json.loads(text)
            if body["id"] not in self._given:
                return [Request(str(body["id"]), dict(body["about"]))]
        return []

    def offer(self, request: Request, about: dict[str, Any], buffers: Sequence[Tensor]) -> None:
        full = [t for t in buffers if t.numel()]
        self._give(request, len(buffers))
        try:
            self._store.register(full)
            for n, t in enumerate(buffers):
                if t.numel():
                    self._store.put_from(f"kvx/{request.number}/{n}", t)
            self._say(request, {"about": about, "places": list(range(len(buffers)))})
        except WireError:
            self._end(request.number)
            raise
        finally:
            self._store.release(full)  # the store has its own copy

    def _say(self, request: Request, body: dict[str, Any]) -> None:
        if request.number not in self._given:
            self._give(request, 0)
        self._store.put(f"kvx/{request.number}/answer", json.dumps(body).encode())

    def _give(self, request: Request, num_buffers: int) -> None:
        self._given[request.number] = _Given(num_buffers, time.monotonic() + self.lease_s)

    def _end(self, number: str) -> None:
        given = self._given.pop(number)
        for name in ("answer", "done", *map(str, range(given.num_buffers))):
            self._store.remove(f"kvx/{number}/{name}")

    def close(self) -> None:
        for number in list(self._given):
            with suppress(Exception):
                self._end(number)
        self._store.close()


class MooncakePuller(Puller):
    def __init__(self, host: str, port: int, deadline: Deadline, *, my_host: str = "") -> None:
        self._master = f"{host}:{port}"
        self._store = MooncakeStore(self._master, host=my_host, timeout_s=min(deadline.left_s, MASTER_TIMEOUT_S))

    def ask(self, about: dict[str, Any], deadline: Deadline) -> Offer:
        number = f"{os.getpid()}-{os.urandom(6).hex()}"
        text = json.dumps({"id": number, "about": about}).encode()
        answer, asked_s = b"", 0.0
        while not answer:
            # Another's question may lie there, and the first of a name stays: so it is asked again. It is answered once.
            if time.monotonic() - asked_s > 1 and not self._store.get(_ASK):
                self._put_question(text)
                asked_s = time.monotonic()
            answer = self._store.get(f"kvx/{number}/answer")
            if not answer:
                try:
                    deadline.pause(f"{NO_PREFILL} answered at the store of {self._master}", _LOOK_S, PREFILL_HINT)
                except WireError:
                    if self._store.get(_ASK) == text:
                        self._store.remove(_ASK)
                    raise
        try:
            return read_answer(number, dict(json.loads(answer)))
        except (TypeError, ValueError) as error:
            raise WireError(f"the answer is not understood: {type(error).__name__} {error}.") from error
        except KvxError:  # refused: nobody will pull it
            self._store.put(f"kvx/{number}/done", b"1")
            raise

    def _put_question(self, text: bytes) -> None:
        """The store's memory is the prefill's: without one there is no room for a question. It may still be starting."""
        try:
            self._store.put(_ASK, text)
        except StoreError as error:
            if error.code not in (NO_ROOM, OWNER_GONE):
                raise

    def pull(self, offer: Offer, parts: Sequence[tuple[Sequence[Tensor], Plan]], deadline: Deadline) -> int:
        at = size = 0
        for into, plan in parts:
            places = places_of(offer, at, plan)
            came = [torch.zeros(n, dtype=torch.uint8) for n in plan.buffer_bytes("src")]
            full = [(place, t) for place, t in zip(places, came, strict=True) if t.numel()]
            self._store.register([t for _, t in full])
            try:
                for place, t in full:
                    deadline.check("the offer was not here")
                    n = self._store.get_into(f"kvx/{offer.number}/{place}", t)
                    if n != t.numel():
                        raise WireError(f"buffer {place} of the offer has {n} bytes; the manifest makes {t.numel()}.")
                    size += n
            finally:
                self._store.release([t for _, t in full])
            convert(list(into), came, plan=plan)  # the store knows whole objects only
            at += len(places)
        return size

    def done(self, offer: Offer, deadline: Deadline) -> None:
        self._store.put(f"kvx/{offer.number}/done", b"1")

    def close(self) -> None:
        self._store.close()
