"""HOST:PORT: read, and tried before anything slow begins, without a byte being sent; and the network devices behind an address."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

from kvx.errors import BadArgument
from kvx.wires.wire import WireError


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadArgument(f"{address!r} is no HOST:PORT, like 127.0.0.1:5600.")
    return host, int(port)


def check_host(host: str) -> None:
    """Raise where no machine has this name."""
    _resolve(host)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address and no other. Of a name with several, the first that is this machine's."""
    error: OSError | None = None
    for family, there in _resolve(host):
        link = socket.socket(family, socket.SOCK_STREAM)
        try:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that ended a moment ago is in nobody's way
            if family == socket.AF_INET6:
                link.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            link.bind((there, port))
            link.listen(1)  # two may bind one port, and only one listen
            return link
        except OSError as e:
            link.close()
            error = e if error is None or e.errno != errno.EADDRNOTAVAIL else error  # a name may have addresses that are off
    assert error is not None
    if error.errno == errno.EADDRNOTAVAIL:
        raise BadArgument(f"{host} is no address of this machine. Listen at one of its own, or at 0.0.0.0.")
    if error.errno == errno.EADDRINUSE:
        raise WireError(f"port {port} is in use by another process. Give another port, or end that one.")
    raise WireError(f"port {port} cannot be listened at: {error.strerror}. Give another port.")


def check_free(host: str, port: int) -> None:
    """Raise unless it can be listened at this address."""
    bind(host, port).close()


def connect(address: str, what: str, timeout_s: float) -> str:
    """Raise unless `what` answers there. This machine's address, as it is seen from there."""
    try:
        with socket.create_connection(host_and_port(address), timeout=timeout_s) as link:
            return str(link.getsockname()[0])
    except OSError as error:
        raise WireError(f"no {what} answers at {address}: {error}. Start one, or name another.") from None


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        return [(row[0], str(row[4][0])) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise WireError(f"no machine called {host!r} is known here: {error}. Give a name or an address of one.") from None


def devices_of(host: str) -> list[str]:
    """The network devices that a transport may use which is meant for this address: the one that has it, and those of RDMA.

    Of a loopback address, that of loopback alone. Empty: any (0.0.0.0, or nobody here has the address).
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        return []
    mine = [name for _, name in socket.if_nameindex() if address in _addresses(name)]
    if address.is_loopback:
        return mine or [name for _, name in socket.if_nameindex() if ipaddress.ip_address("127.0.0.1") in _addresses(name)]
    rdma = sorted(f"{port.parent.parent.name}:{port.name}" for port in Path("/sys/class/infiniband").glob("*/ports/*"))
    return mine[:1] + rdma if mine else []


def _addresses(device: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, suppress(OSError):  # one that is down has none
        got = ioctl(s, 0x8915, struct.pack("256s", device.encode()[:15]))  # SIOCGIFADDR
        found.add(ipaddress.IPv4Address(got[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            if line.split()[-1] == device:
                found.add(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
    return found
