"""Which wire: its name and HOST:PORT to the classes that speak it. A wire's package is loaded when it is chosen."""

from __future__ import annotations

from kvx.errors import BadArgument
from kvx.wires.offer import Offers, Puller
from kvx.wires.wire import Deadline

NAMES = ("nixl", "mooncake")


def check_wire(wire: str, address: str) -> None:
    """What is wrong is said before a model is loaded: the address, the wire's name, its package."""
    host_and_port(address)
    if _known(wire) == "nixl":
        from kvx.wires.nixl.agent import load

        load()
    else:
        from kvx.wires.mooncake.store import load as load_mooncake

        load_mooncake("mooncake.store")


def offers_at(wire: str, address: str, lease_s: float) -> Offers:
    """The side that has the bytes. `address`: where it listens (nixl), or the store's master."""
    host, port = host_and_port(address)
    if _known(wire) == "nixl":
        from kvx.wires.nixl.offer import NixlOffers

        return NixlOffers(port, lease_s=lease_s)
    from kvx.wires.mooncake.offer import MooncakeOffers

    return MooncakeOffers(host, port, lease_s=lease_s)


def puller_from(wire: str, address: str, deadline: Deadline) -> Puller:
    """The side that wants them."""
    host, port = host_and_port(address)
    if _known(wire) == "nixl":
        from kvx.wires.nixl.offer import NixlPuller

        return NixlPuller(host, port, deadline)
    from kvx.wires.mooncake.offer import MooncakePuller

    return MooncakePuller(host, port, deadline)


def _known(wire: str) -> str:
    if wire not in NAMES:
        raise BadArgument(f"--wire is {wire!r}; it is {' or '.join(NAMES)}.")
    return wire


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadArgument(f"{address!r} is no HOST:PORT, like 127.0.0.1:5600.")
    return host, int(port)
