"""Offers through Mooncake's store: questions, answers and bytes are objects in it.

kvx/ask               a question: one at a time, taken out by the side that answers
kvx/NUMBER/answer     what is offered
kvx/NUMBER/0, 1, ...  its buffers
kvx/NUMBER/done       they are pulled

Questions and answers are sealed with the secret that both sides have: another's are not taken for theirs, nor an old one for a new.
The manifest in the answer has the digest of the buffers. Nothing hides them: whoever reaches the store can read and remove them.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvx.errors import KvxError
from kvx.layout.buffers import memory_bytes
from kvx.layout.plan import Plan
from kvx.ops.move.convert import convert
from kvx.wires.channel import WrongSecret
from kvx.wires.mooncake.store import MASTER_TIMEOUT_S, NO_ROOM, OWNER_GONE, MooncakeStore, StoreError
from kvx.wires.offer import NO_PREFILL, PREFILL_HINT, Offer, OfferRequest, Offers, Puller, check_room, places_of, read_answer
from kvx.wires.secret import Secret
from kvx.wires.wire import Deadline, WireError

_ASK = "kvx/ask"
_LOOK_S = 0.01  # between two looks at the store
_NUMBER = re.compile(r"[0-9a-f]{32}")
_MAX_OFFERS, _MAX_SEEN = 64, 100_000  # at a time; questions remembered, so that none is answered twice
_SEAL_CHARS = 64
SEGMENT_BYTES = 512 << 20
SECRET_HINT = f"{PREFILL_HINT} With the same --secret-file? It does not answer those who have another."


@dataclass
class _Given:
    num_buffers: int
    num_bytes: int
    until_s: float


class MooncakeOffers(Offers):
    """It gives the store the memory that the bytes lie in. One such side a master, which is at `host` and `port`."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        *,
        lease_s: float = 30.0,
        max_bytes: int = 0,  # that it gives the store; 0: SEGMENT_BYTES
        my_host: str = "",
    ) -> None:
        self.lease_s, self.max_bytes = lease_s, max_bytes or SEGMENT_BYTES
        self._secret = secret
        self._store = MooncakeStore(f"{host}:{port}", host=my_host, segment_bytes=self.max_bytes)
        self._given: dict[str, _Given] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._looked_s = 0.0

    @property
    def num_offers(self) -> int:
        return len(self._given)

    @property
    def num_registered(self) -> int:
        return self._store.num_registered

    def requests(self) -> list[OfferRequest]:
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
        return self._question(text)

    def _question(self, text: bytes) -> list[OfferRequest]:
        """Of whoever has the secret, and for the first time. Others are not answered."""
        body = _open(self._secret, "ask", text)
        number, about = (body.get("id"), body.get("about")) if body is not None else (None, None)
        if not isinstance(number, str) or not _NUMBER.fullmatch(number) or not isinstance(about, dict) or number in self._seen:
            return []
        self._seen[number] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        request = OfferRequest(number, about)
        if len(self._given) >= _MAX_OFFERS:
            with suppress(WireError):
                self.refuse(
                    request, WireError(f"{_MAX_OFFERS} offers wait to be pulled, as many as may be. Ask again in a moment.")
                )
            return []
        return [request]

    def offer(self, request: OfferRequest, about: dict[str, Any], buffers: Sequence[Tensor]) -> None:
        full, size, now = [t for t in buffers if t.numel()], sum(map(memory_bytes, buffers)), time.monotonic()
        wait_s = min((g.until_s for g in self._given.values()), default=now) - now
        check_room(size, sum(g.num_bytes for g in self._given.values()), self.max_bytes, wait_s)
        self._give(request, len(buffers), size)
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

    def _say(self, request: OfferRequest, body: dict[str, Any]) -> None:
        if request.number not in self._given:
            self._give(request, 0, 0)
        self._store.put(f"kvx/{request.number}/answer", _seal(self._secret, request.number, body))

    def _give(self, request: OfferRequest, num_buffers: int, num_bytes: int) -> None:
        self._given[request.number] = _Given(num_buffers, num_bytes, time.monotonic() + self.lease_s)

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
    def __init__(self, host: str, port: int, secret: Secret, deadline: Deadline, *, my_host: str = "") -> None:
        self._master, self._secret = f"{host}:{port}", secret
        self._store = MooncakeStore(self._master, host=my_host, timeout_s=min(deadline.left_s, MASTER_TIMEOUT_S))

    def ask(self, about: dict[str, Any], deadline: Deadline) -> Offer:
        number = secrets.token_hex(16)
        text = _seal(self._secret, "ask", {"id": number, "about": about})
        answer, asked_s = b"", 0.0
        while not answer:
            # Another's question may lie there, and the first of a name stays: so it is asked again. It is answered once.
            if time.monotonic() - asked_s > 1 and not self._store.get(_ASK):
                self._put_question(text)
                asked_s = time.monotonic()
            answer = self._store.get(f"kvx/{number}/answer")
            if not answer:
                try:
                    deadline.pause(f"{NO_PREFILL} answered at the store of {self._master}", _LOOK_S, SECRET_HINT)
                except WireError:
                    if self._store.get(_ASK) == text:
                        self._store.remove(_ASK)
                    raise
        body = _open(self._secret, number, answer)
        if body is None:
            raise WrongSecret(
                f"what answers at the store of {self._master} does not know the secret. Nothing is pulled. Name the file that the "
                "prefill has: --secret-file FILE."
            )
        try:
            return read_answer(number, body)
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
            convert(came, list(into), plan=plan)  # the store knows whole objects only
            at += len(places)
        return size

    def done(self, offer: Offer, deadline: Deadline) -> None:
        self._store.put(f"kvx/{offer.number}/done", b"1")

    def close(self) -> None:
        self._store.close()


def _seal(secret: Secret, label: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, allow_nan=False).encode()
    return secret.proof(f"mooncake {label}", text).hex().encode() + text


def _open(secret: Secret, label: str, sealed: bytes) -> dict[str, Any] | None:
    """None where it is not what somebody sealed who has the secret, for this label."""
    seal, text = sealed[:_SEAL_CHARS], sealed[_SEAL_CHARS:]
    try:
        if not secret.proves(bytes.fromhex(seal.decode("ascii")), f"mooncake {label}", text):
            return None
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
