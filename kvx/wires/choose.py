"""Which wire: its name and HOST:PORT to the classes that speak it. A wire's package is loaded when it is chosen."""

from __future__ import annotations

from kvx.errors import BadArgument
from kvx.wires.address import check_free, check_host, connect, host_and_port
from kvx.wires.offer import Offers, Puller
from kvx.wires.secret import Secret
from kvx.wires.wire import Deadline

NAMES = ("nixl", "mooncake")


def check_wire(wire: str, address: str, *, is_listening: bool) -> None:
    """What is wrong is said before a model is loaded: the wire's name, its package, the address.

    A NIXL peer that does not answer yet may still be starting. A master has no such excuse.
    """
    host, port = host_and_port(address)
    if _known(wire) == "nixl":
        from kvx.wires.nixl.agent import load

        load()
        if is_listening:
            check_free(host, port)
        else:
            check_host(host)
    else:
        from kvx.wires.mooncake.store import MASTER, MASTER_TIMEOUT_S
        from kvx.wires.mooncake.store import load as load_mooncake

        load_mooncake("mooncake.store")
        connect(address, MASTER, MASTER_TIMEOUT_S)


def offers_at(wire: str, address: str, secret: Secret, *, lease_s: float, max_bytes: int = 0) -> Offers:
    """The side that has the bytes. `address`: where it listens (nixl), or the store's master. `max_bytes` 0: the wire's own."""
    host, port = host_and_port(address)
    if _known(wire) == "nixl":
        from kvx.wires.nixl.offer import NixlOffers

        return NixlOffers(host, port, secret, lease_s=lease_s, max_bytes=max_bytes)
    from kvx.wires.mooncake.offer import MooncakeOffers

    return MooncakeOffers(host, port, secret, lease_s=lease_s, max_bytes=max_bytes)


def puller_from(wire: str, address: str, secret: Secret, deadline: Deadline) -> Puller:
    """The side that wants them."""
    host, port = host_and_port(address)
    if _known(wire) == "nixl":
        from kvx.wires.nixl.offer import NixlPuller

        return NixlPuller(host, port, secret, deadline)
    from kvx.wires.mooncake.offer import MooncakePuller

    return MooncakePuller(host, port, secret, deadline)


def _known(wire: str) -> str:
    if wire not in NAMES:
        raise BadArgument(f"--wire is {wire!r}; it must be {' or '.join(NAMES)}.")
    return wire
