"""Offers over NIXL: a question, an answer with addresses, a READ, a word at the end.

Words and metadata travel by a channel of our own, that both sides prove themselves on. A client is given the metadata of its own
offer, and has one at a time. The bytes travel as UCX sends them: docs/wires.md says who can see them.
"""

from __future__ import annotations

import itertools
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvx.layout.buffers import memory_bytes
from kvx.layout.plan import Plan
from kvx.wires.address import devices_of
from kvx.wires.channel import connect
from kvx.wires.listener import MAX_CLIENTS, Client, Listener
from kvx.wires.nixl.agent import NixlAgent, Remote
from kvx.wires.offer import PREFILL, PREFILL_HINT, Offer, OfferRequest, Offers, Puller, check_room, places_of, read_answer
from kvx.wires.secret import Secret
from kvx.wires.wire import Deadline, WireError

QUIET_S = 60.0  # a client that asks nothing for so long after its lease is hung up on
LATE_S = 10.0  # memory of an offer that was not ended by its client stays for so long: a READ may be on its way
LEAST_PIECE_BYTES = 32  # a row of K or V is more, in any layout that keeps rows together
OFFER_BYTES = 4 << 30


@dataclass
class _Given:
    registration: int
    buffers: Sequence[Tensor]
    num_bytes: int
    until_s: float


class NixlOffers(Offers):
    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        *,
        lease_s: float = 30.0,
        max_bytes: int = 0,  # 0: OFFER_BYTES
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        self.lease_s, self.max_bytes = lease_s, max_bytes or OFFER_BYTES
        self._given: dict[int, _Given] = {}  # by client: the oldest first
        self._late: list[_Given] = []  # not registered any more
        self._asked = itertools.count()
        self._listener = Listener(host, port, secret, idle_s=lease_s + QUIET_S, max_clients=max_clients)
        try:
            self.devices = devices_of(self._listener.host)
            self._agent = NixlAgent(devices=self.devices)
        except BaseException:
            self._listener.close()
            raise

    @property
    def num_offers(self) -> int:
        return len(self._given)

    @property
    def num_bytes(self) -> int:
        return sum(given.num_bytes for given in (*self._given.values(), *self._late))

    @property
    def num_registered(self) -> int:
        return self._agent.num_registered

    @property
    def num_clients(self) -> int:
        return self._listener.num_clients

    def requests(self) -> list[OfferRequest]:
        self._agent.progress()
        came = []
        for client, body in self._listener.events():
            if body is None:
                self._end(client.number)
            elif body.get("op") == "done":
                client.answer({"done": self._end(client.number, is_done=True)})
            elif isinstance(body.get("about"), dict):
                self._end(client.number)  # one at a time: who asks anew has ended the one before
                came.append(OfferRequest(f"{client.number}-{next(self._asked)}", body["about"], client))
            else:
                client.answer({"error": 'the message is not understood: it has "about", an object, or "op": "done".'})
        self._expire()
        return came

    def offer(self, request: OfferRequest, about: dict[str, Any], buffers: Sequence[Tensor]) -> None:
        client, size, now = _client(request), sum(map(memory_bytes, buffers)), time.monotonic()
        self._expire()
        ends_s = [g.until_s + LATE_S for g in self._given.values()] + [g.until_s for g in self._late]
        check_room(size, self.num_bytes, self.max_bytes, min(ends_s, default=now) - now)
        if not client.is_open:
            raise WireError("whoever asked is gone.")
        registration = self._agent.register(buffers)
        self._given[client.number] = _Given(registration, buffers, size, now + self.lease_s)
        try:
            metadata = b64encode(self._agent.metadata(registration)).decode()
        except WireError:
            self._end(client.number, is_done=True)
            raise
        places = [t.data_ptr() for t in buffers]
        self._say(request, {"about": about, "places": places, "metadata": metadata, "lease_s": self.lease_s})

    def _say(self, request: OfferRequest, body: dict[str, Any]) -> None:
        _client(request).answer(body)  # one that is gone needs none, and requests() hears of it

    def _expire(self) -> None:
        now = time.monotonic()
        for number in [n for n, given in self._given.items() if given.until_s <= now]:
            self._end(number)
        self._late = [given for given in self._late if given.until_s > now]

    def _end(self, number: int, *, is_done: bool = False) -> bool:
        """Whether there was an offer to end."""
        given = self._given.pop(number, None)
        if given is None:
            return False
        self._agent.release(given.registration)
        if not is_done:
            given.until_s = time.monotonic() + LATE_S
            self._late.append(given)
        return True

    def close(self) -> None:
        self._listener.close()
        self._agent.close()
        self._given.clear()
        self._late.clear()


class NixlPuller(Puller):
    """After a WireError close it: that ends what was given up."""

    def __init__(self, host: str, port: int, secret: Secret, deadline: Deadline) -> None:
        self._who = f"{PREFILL} at {host}:{port}"
        self._channel = connect(host, port, secret, deadline, who=PREFILL, hint=PREFILL_HINT)
        self._lease = Deadline(0)
        self._peer = ""
        self._asked = itertools.count()
        try:
            self._agent = NixlAgent(devices=devices_of(self._channel.my_host))
        except BaseException:
            self._channel.close()
            raise

    def ask(self, about: dict[str, Any], deadline: Deadline) -> Offer:
        self._forget()
        body = self._channel.ask({"about": about}, deadline, self._who)
        offer = read_answer(str(next(self._asked)), body)
        if offer.places:
            try:
                self._lease = Deadline(float(body["lease_s"]))
                metadata = b64decode(body["metadata"], validate=True)
            except (KeyError, TypeError, ValueError) as error:
                raise WireError(f"the answer has no metadata: {type(error).__name__} {error}.") from error
            self._peer = self._agent.add_peer(metadata)
        return offer

    def pull(self, offer: Offer, parts: Sequence[tuple[Sequence[Tensor], Plan]], deadline: Deadline) -> int:
        at = size = 0
        deadline = min(deadline, self._lease, key=lambda d: d.left_s)  # afterwards its memory is another's
        for into, plan in parts:
            remote = Remote(self._peer, places_of(offer, at, plan))
            least = next(iter(plan.runs())).bytes
            if least < LEAST_PIECE_BYTES:
                raise WireError(
                    f"what is offered lies in pieces of {least} bytes, and NIXL wants a descriptor for each. The other side may "
                    "choose a layout that keeps rows together: --layout."
                )
            registration = self._agent.register(into)
            size += self._agent.read(into, remote, plan.runs(strided=True), deadline)
            self._agent.release(registration)  # not after an error: a transfer that was given up may still write
            at += len(remote.addresses)
        return size

    def done(self, offer: Offer, deadline: Deadline) -> None:
        body = self._channel.ask({"op": "done"}, deadline, self._who)
        if body.get("done") is not True:
            raise WireError(
                f"{self._who} took the offer back before all of it was pulled: after {self._lease.timeout_s:g} s, its --lease-s. "
                "What came is not used. Ask again, or give it a longer one."
            )
        self._forget()

    def _forget(self) -> None:
        """What an earlier offer made known: its addresses may be another's by now."""
        if self._peer:
            self._agent.forget(self._peer)
            self._peer = ""

    def close(self) -> None:
        self._agent.close()
        self._channel.close()


def _client(request: OfferRequest) -> Client:
    assert request.client is not None
    return request.client
