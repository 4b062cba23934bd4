"""Offers over NIXL: a question, an answer with addresses, a READ, a word at the end. Metadata travels by NIXL's own listener."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvx.layout.plan import Plan
from kvx.wires.nixl.agent import NixlAgent, Remote, agent_name
from kvx.wires.offer import NO_PREFILL, PREFILL_HINT, Offer, Offers, Puller, Request, places_of, read_answer
from kvx.wires.wire import Deadline, WireError

QUIET_S = 60.0  # a peer that says nothing for so long is forgotten
LEAST_PIECE_BYTES = 32  # a row of K or V is more, in any layout that keeps rows together


@dataclass
class _Given:
    registration: int
    until_s: float


class NixlOffers(Offers):
    def __init__(self, port: int, *, lease_s: float = 30.0) -> None:
        self.lease_s = lease_s
        self._agent = NixlAgent(agent_name(port), listen_port=port)
        self._given: dict[str, _Given] = {}
        self._heard_s: dict[str, float] = {}  # when a peer last said something
        self._waiting: list[tuple[Request, float]] = []  # their senders' metadata is still on its way

    @property
    def num_offers(self) -> int:
        return len(self._given)

    @property
    def num_registered(self) -> int:
        return self._agent.num_registered

    def requests(self) -> list[Request]:
        now = time.monotonic()
        with suppress(WireError):
            for peer, body in self._agent.notifications():
                self._heard_s[peer] = now
                if body.get("op") == "done":
                    self._end(str(body.get("offer")))
                    with suppress(WireError):  # it is gone; the messages of others are still to be read
                        self._agent.notify(peer, {"re": body.get("id")})
                elif isinstance(body.get("about"), dict) and isinstance(body.get("id"), str):
                    self._waiting.append((Request(body["id"], body["about"], peer), now))
        for number in [n for n, given in self._given.items() if given.until_s <= now]:
            self._end(number)
        for peer in [p for p, at in self._heard_s.items() if at + max(self.lease_s, QUIET_S) <= now]:
            del self._heard_s[peer]
            self._agent.forget(peer)
        ready = [r for r, _ in self._waiting if self._agent.knows(r.peer)]
        self._waiting = [(r, at) for r, at in self._waiting if r not in ready and at + self.lease_s > now]
        return ready

    def offer(self, request: Request, about: dict[str, Any], buffers: Sequence[Tensor]) -> None:
        registration = self._agent.register(buffers)
        self._given[request.number] = _Given(registration, time.monotonic() + self.lease_s)
        addresses = [t.data_ptr() for t in buffers]
        metadata = b64encode(self._agent.metadata()).decode()  # newer than what the asker got: with these buffers
        self._say(request, {"about": about, "places": addresses, "metadata": metadata})

    def _say(self, request: Request, body: dict[str, Any]) -> None:
        try:
            self._agent.notify(request.peer, {**body, "re": request.number})
        except WireError:  # it is gone, and needs no answer
            self._end(request.number)

    def _end(self, number: str) -> None:
        given = self._given.pop(number, None)
        if given is not None:
            self._agent.release(given.registration)

    def close(self) -> None:
        self._agent.close()
        self._given.clear()


class NixlPuller(Puller):
    """After a WireError close it: that ends what was given up."""

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        self._peer, self._agent = agent_name(port), NixlAgent(listen_port=0)
        try:
            self._agent.connect(host, port, self._peer, deadline, who=NO_PREFILL, hint=PREFILL_HINT)
        except BaseException:
            self._agent.close()
            raise

    def ask(self, about: dict[str, Any], deadline: Deadline) -> Offer:
        body = self._agent.ask(self._peer, {"about": about}, deadline)
        offer = read_answer(str(body["re"]), body)
        if offer.places:
            try:
                self._agent.add_peer(b64decode(body["metadata"]))
            except (KeyError, TypeError, ValueError) as error:
                raise WireError(f"the answer has no metadata: {type(error).__name__} {error}.") from error
        return offer

    def pull(self, offer: Offer, parts: Sequence[tuple[Sequence[Tensor], Plan]], deadline: Deadline) -> int:
        at = size = 0
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
        self._agent.ask(self._peer, {"op": "done", "offer": offer.number}, deadline)

    def close(self) -> None:
        self._agent.close()
