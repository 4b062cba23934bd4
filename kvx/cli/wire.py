"""Which wire: `--wire` and HOST:PORT to the classes that speak it. Both have the same two sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from torch import Tensor

from kvx.errors import BadArgument, KvxError
from kvx.layout.plan import Plan
from kvx.tiers.remote import Deadline


class Request(Protocol):
    @property
    def about(self) -> dict[str, Any]: ...


class Offer(Protocol):
    @property
    def about(self) -> dict[str, Any]: ...


class Offers(Protocol):
    """The side that has the bytes."""

    @property
    def num_offers(self) -> int: ...
    def requests(self) -> Sequence[Any]: ...
    def offer(self, request: Any, about: dict[str, Any], buffers: Sequence[Tensor]) -> None: ...
    def answer(self, request: Any, about: dict[str, Any]) -> None: ...
    def refuse(self, request: Any, error: KvxError) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...


class Puller(Protocol):
    """The side that wants them."""

    def ask(self, about: dict[str, Any], deadline: Deadline) -> Any: ...
    def pull(self, offer: Any, parts: Sequence[tuple[Sequence[Tensor], Plan]], deadline: Deadline) -> int: ...
    def done(self, offer: Any, deadline: Deadline) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...


def check_wire(wire: str, address: str) -> None:
    """What is wrong is said before a model is loaded: the address, the wire's name, its package."""
    host_and_port(address)
    if wire == "nixl":
        from kvx.tiers.nixl_agent import load

        load()
    elif wire == "mooncake":
        from kvx.tiers.mooncake_store import load as load_mooncake

        load_mooncake("mooncake.store")
    else:
        raise BadArgument(f"--wire is {wire!r}; it is nixl or mooncake.")


def offers_at(wire: str, address: str, lease_s: float) -> Offers:
    host, port = host_and_port(address)
    if wire == "nixl":
        from kvx.tiers.nixl_offer import NixlOffers

        return NixlOffers(port, lease_s=lease_s)
    if wire == "mooncake":
        from kvx.tiers.mooncake_offer import MooncakeOffers

        return MooncakeOffers(host, port, lease_s=lease_s)
    raise BadArgument(f"--wire is {wire!r}; it is nixl or mooncake.")


def puller_from(wire: str, address: str, deadline: Deadline) -> Puller:
    host, port = host_and_port(address)
    if wire == "nixl":
        from kvx.tiers.nixl_offer import NixlPuller

        return NixlPuller(host, port, deadline)
    if wire == "mooncake":
        from kvx.tiers.mooncake_offer import MooncakePuller

        return MooncakePuller(host, port, deadline)
    raise BadArgument(f"--wire is {wire!r}; it is nixl or mooncake.")


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadArgument(f"{address!r} is no HOST:PORT, like 127.0.0.1:5600.")
    return host, int(port)
