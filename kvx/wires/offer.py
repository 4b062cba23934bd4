"""Buffers that one process offers and another pulls: the two sides, whatever the wire.

    Puller.ask(about)        -->  Offers.requests()
    Offer                    <--  Offers.offer(request, about, buffers), or answer, or refuse
    Puller.pull(offer, ...)  ===  the bytes
    Puller.done(offer)       -->  they are let go of; or when the asker is gone, asks anew, or took longer than `lease_s`

What is asked and what is offered is the caller's: a dictionary of JSON each way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import Tensor

from kvx.errors import Incompatible, KvxError
from kvx.layout.plan import Plan
from kvx.wires.listener import Client
from kvx.wires.wire import Deadline, WireError

PREFILL = "`kvx prefill --listen`"
NO_PREFILL = f"no {PREFILL}"  # of those who wait for an answer
PREFILL_HINT = "Is it running, on the same --wire?"


class OfferRequest(NamedTuple):
    number: str
    about: dict[str, Any]
    client: Client | None = None  # who asked, where answers go to somebody

    @property
    def is_wanted(self) -> bool:
        """Whoever asked is still there, as far as is known."""
        return self.client is None or self.client.is_open


class Offer(NamedTuple):
    number: str
    about: dict[str, Any]
    places: tuple[int, ...]  # of its buffers: addresses in the peer's memory, or numbers in a store


class _Closing(ABC):
    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Offers(_Closing):
    """The side that has the bytes. Call `requests` often: looking is what keeps a wire going."""

    lease_s: float
    max_bytes: int  # that lie there for others, all together

    @property
    @abstractmethod
    def num_offers(self) -> int:
        """That somebody may still pull."""

    @abstractmethod
    def requests(self) -> list[OfferRequest]:
        """New questions. Offers that are pulled, or that nobody pulled in time, are let go of."""

    @abstractmethod
    def offer(self, request: OfferRequest, about: dict[str, Any], buffers: Sequence[Tensor]) -> None:
        """Let the asker pull these buffers, until it says that it is done, goes away, or `lease_s` is over.

        They are the asker's alone from now on: no wire here can keep it from writing into them.
        """

    def answer(self, request: OfferRequest, about: dict[str, Any]) -> None:
        """Without buffers."""
        self._say(request, {"about": about, "places": []})

    def refuse(self, request: OfferRequest, error: KvxError) -> None:
        """The asker raises Incompatible if this is, else WireError, with the same sentence and who said it."""
        self._say(request, {"error": str(error), "is_other_kind": isinstance(error, Incompatible)})

    @abstractmethod
    def _say(self, request: OfferRequest, body: dict[str, Any]) -> None: ...


class Puller(_Closing):
    """The side that wants them, for a request or some in a row."""

    @abstractmethod
    def ask(self, about: dict[str, Any], deadline: Deadline) -> Offer:
        """Incompatible, or WireError with the other side's sentence, where it refuses."""

    @abstractmethod
    def pull(self, offer: Offer, parts: Sequence[tuple[Sequence[Tensor], Plan]], deadline: Deadline) -> int:
        """All of an offer: of each part, its plan's source lies in the next buffers offered. How many bytes came."""

    @abstractmethod
    def done(self, offer: Offer, deadline: Deadline) -> None:
        """The other side lets go of it."""


def read_answer(number: str, body: dict[str, Any]) -> Offer:
    """What `_say` said."""
    if "error" in body:
        raise (Incompatible if body.get("is_other_kind") else WireError)(f"the other side refuses: {body['error']}")
    about, places = body.get("about"), body.get("places")
    if (
        not isinstance(about, dict)
        or not isinstance(places, list)
        or any(type(p) is not int or not 0 <= p < 1 << 64 for p in places)
    ):
        raise WireError('the answer is not understood: it has "about", an object, and "places", a list of whole numbers.')
    return Offer(number, about, tuple(places))


def check_room(size: int, used: int, limit: int, wait_s: float) -> None:
    """Raise where an offer of `size` bytes would make more than may be offered at a time."""
    if size > limit:
        raise WireError(f"the offer has {size} bytes; {limit} may be offered at a time. Ask for fewer tokens, or raise --offer-gb.")
    if used + size > limit:
        raise WireError(
            f"{used} bytes are offered to others and this would be {size} more; {limit} may be offered at a time. "
            f"Ask again: the oldest offer ends within {wait_s:.0f} s."
        )


def places_of(offer: Offer, at: int, plan: Plan) -> tuple[int, ...]:
    """Of the buffers of one part, whose first is number `at`."""
    count = len(plan.buffer_bytes("src"))
    places = offer.places[at : at + count]
    if len(places) != count:
        raise WireError(f"{len(offer.places)} buffers are offered; the manifest makes {at + count} or more.")
    return places
