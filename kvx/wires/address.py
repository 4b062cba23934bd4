"""HOST:PORT: read, and tried before anything slow begins. Nothing is sent."""

from __future__ import annotations

import errno
import socket

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


def check_free(host: str, port: int) -> None:
    """Raise unless `host` is this machine's and nobody listens at `port`, on any of its addresses."""
    if all(_bind(family, there, 0) is not None for family, there in _resolve(host)):  # a name may have addresses that are off
        raise BadArgument(f"{host} is no address of this machine. Listen at one of its own, or at 0.0.0.0.")
    error = _bind(socket.AF_INET, "", port)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        raise WireError(f"port {port} is in use by another process. Give another port, or end that one.")
    raise WireError(f"port {port} cannot be listened at: {error.strerror}. Give another port.")


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


def _bind(family: socket.AddressFamily, host: str, port: int) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that ended a moment ago is in nobody's way
            s.bind((host, port))
    except OSError as error:
        return error
    return None
