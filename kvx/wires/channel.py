"""A connection that both sides have proved themselves on: encrypted, and one JSON object each way at a time.

    TLS 1.2, anonymous elliptic curve Diffie-Hellman      nobody else can read or change what follows
    client: KVX 1, 32 random bytes                  -->
                                                    <--   server: 32 random bytes
    client: HMAC(secret, "client", this TLS session, both)  -->
                                                    <--   server: 1, HMAC(secret, "server", ...); or 0: another secret
    4 bytes of length, JSON                         -->
                                                    <--   the same

The proofs are of this TLS session (its `tls-unique` binding, RFC 5929), so that somebody in the middle, who has two sessions, can
pass on neither; and of both sides' fresh random bytes, so that none is good twice. No certificates: the secret takes their place.
Python 3.11 has no TLS with pre-shared keys, which would be the same in one step.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import ssl
from contextlib import suppress
from functools import cache
from typing import Any

from kvx.errors import BadArgument, Unsupported, a_type
from kvx.wires.secret import PROOF_BYTES, Secret
from kvx.wires.wire import Deadline, WireError

HELLO = b"KVX\x01"
CIPHER = "AECDH-AES256-SHA"
NONCE_BYTES = 32
MAX_FRAME_BYTES = 8 << 20  # a question of a million tokens
HANDSHAKE_S = 5.0  # all of it
FRAME_S = 10.0  # from a frame's first byte to its last
_PIECE_BYTES = 1 << 16  # memory is taken as bytes come, not as they are announced
_RETRY_S = 0.1


class WrongSecret(WireError):
    """The other side has another secret, or none. Nothing was said to it."""


class Channel:
    """For one thread at a time."""

    def __init__(self, link: ssl.SSLSocket) -> None:
        self._link = link
        self.my_host = str(link.getsockname()[0])

    def send(self, body: dict[str, Any], deadline: Deadline) -> None:
        data = json.dumps(body, allow_nan=False).encode()
        if len(data) > MAX_FRAME_BYTES:
            raise BadArgument(f"a message of {len(data)} bytes; {MAX_FRAME_BYTES} is the most. Ask for fewer tokens.")
        _send(self._link, len(data).to_bytes(4, "big") + data, deadline)

    def receive(self, start: Deadline, end: Deadline | None = None) -> dict[str, Any] | None:
        """The next object: begun by `start`, whole by `end`, or FRAME_S after it began. None: the other side hung up."""
        first = _receive(self._link, 1, start, can_end=True)
        if not first:
            return None
        deadline = end or Deadline(FRAME_S)
        size = int.from_bytes(first + _receive(self._link, 3, deadline), "big")
        if size > MAX_FRAME_BYTES:
            raise WireError(f"a message of {size} bytes is announced; {MAX_FRAME_BYTES} is the most.")
        try:
            body = json.loads(_receive(self._link, size, deadline))
        except (ValueError, RecursionError) as error:
            raise WireError(f"a message is no JSON: {type(error).__name__}.") from None
        if not isinstance(body, dict):
            raise WireError(f"a message is {a_type(body)}, and no object.")
        return body

    def ask(self, body: dict[str, Any], deadline: Deadline, who: str = "the other side") -> dict[str, Any]:
        """Send, and wait for the answer."""
        try:
            self.send(body, deadline)
            answer = self.receive(deadline, deadline)
        except WireError:
            deadline.check(f"{who} did not answer")
            raise
        if answer is None:
            raise WireError(f"{who} hung up without an answer.")
        return answer

    @property
    def is_quiet(self) -> bool:
        """Nothing came, and nobody hung up: so it is while an answer is being made."""
        watch = select.poll()
        watch.register(self._link, select.POLLIN | select.POLLHUP | select.POLLERR)
        return not self._link.pending() and not watch.poll(0)

    def close(self) -> None:
        self._link.close()


def connect(host: str, port: int, secret: Secret, deadline: Deadline, *, who: str, hint: str = "") -> Channel:
    """Prove oneself to whoever listens there, who does the same. One that is just starting, or full, is asked again."""
    while True:
        try:
            return _greet(host, port, secret, Deadline(min(HANDSHAKE_S, deadline.left_s)))
        except WrongSecret as error:
            raise WrongSecret(f"{who} at {host}:{port}: {error}") from None
        except ssl.SSLEOFError:
            pass  # it hung up: it is full
        except ssl.SSLError as error:
            raise WireError(f"what answers at {host}:{port} is no {who}: {error.reason or error}. {hint}".rstrip()) from None
        except OSError:  # a WireError too: nobody is there yet, or it hung up
            pass
        deadline.pause(f"no {who} answered at {host}:{port}", _RETRY_S, hint)


def _greet(host: str, port: int, secret: Secret, deadline: Deadline) -> Channel:
    raw = socket.create_connection((host, port), timeout=max(deadline.left_s, 0.001))
    link = _wrap(raw, is_server=False)
    try:
        link.settimeout(max(deadline.left_s, 0.001))
        link.do_handshake()
        mine = secrets.token_bytes(NONCE_BYTES)
        _send(link, HELLO + mine, deadline)
        theirs = _receive(link, NONCE_BYTES, deadline)
        said = _binding(link), mine, theirs
        _send(link, secret.proof("client", *said), deadline)
        if _receive(link, 1, deadline) != b"\x01":
            raise WrongSecret("it has another secret. Copy its secret file here, or name the right one: --secret-file FILE.")
        if not secret.proves(_receive(link, PROOF_BYTES, deadline), "server", *said):
            raise WrongSecret("the peer does not know the secret, so no request was sent. Check what listens there.")
        return Channel(link)
    except BaseException:
        link.close()
        raise


def check_tls() -> None:
    """Raise where this Python's OpenSSL has no such TLS."""
    _context(is_server=True)


def wrap_accepted(raw: socket.socket) -> ssl.SSLSocket:
    """Nothing is read yet."""
    return _wrap(raw, is_server=True)


def welcome(link: ssl.SSLSocket, secret: Secret, deadline: Deadline) -> Channel:
    """The other side of connect(). Who does not prove itself within the deadline is an OSError; the caller closes the link."""
    link.settimeout(max(deadline.left_s, 0.001))
    link.do_handshake()
    hello = _receive(link, len(HELLO) + NONCE_BYTES, deadline)
    if not hello.startswith(HELLO):
        raise WireError("it does not speak this version of KVX.")
    mine = secrets.token_bytes(NONCE_BYTES)
    _send(link, mine, deadline)
    said = _binding(link), hello[len(HELLO) :], mine
    if not secret.proves(_receive(link, PROOF_BYTES, deadline), "client", *said):
        _send(link, b"\x00", deadline)
        raise WrongSecret("it has another secret.")
    _send(link, b"\x01" + secret.proof("server", *said), deadline)
    return Channel(link)


def _wrap(raw: socket.socket, *, is_server: bool) -> ssl.SSLSocket:
    try:
        with suppress(OSError):  # of a stand-in for TCP
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that lost its power says nothing
            for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, option):
                    raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return _context(is_server=is_server).wrap_socket(raw, server_side=is_server, do_handshake_on_connect=False)
    except BaseException:
        raw.close()
        raise


@cache
def _context(*, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # anonymous: the proofs say who it is
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        # 1.3 has no anonymous key exchange. Level 0 is what lets one be chosen; there is this one cipher.
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(f"{CIPHER}:@SECLEVEL=0")
    except (ssl.SSLError, ValueError) as error:
        raise Unsupported(
            f"{ssl.OPENSSL_VERSION}, which this Python has, cannot do anonymous ECDH ({CIPHER}): {error}. "
            "Use a Python with another OpenSSL, or hand over by a folder: `kvx prefill --out`."
        ) from None
    return context


def _binding(link: ssl.SSLSocket) -> bytes:
    binding = link.get_channel_binding("tls-unique")
    if not binding:
        raise WireError("the TLS session has no binding to prove.")
    return binding


def _send(link: ssl.SSLSocket, data: bytes, deadline: Deadline) -> None:
    view = memoryview(data)
    try:
        while view:
            link.settimeout(max(deadline.left_s, 0.001))
            view = view[link.send(view[:_PIECE_BYTES]) :]
            if view:
                deadline.check("a message was not taken")
    except WireError:
        raise
    except OSError as error:
        raise WireError(f"the connection ended: {error}.") from error


def _receive(link: ssl.SSLSocket, size: int, deadline: Deadline, *, can_end: bool = False) -> bytes:
    data = bytearray()
    try:
        while len(data) < size:
            link.settimeout(max(deadline.left_s, 0.001))
            piece = link.recv(min(size - len(data), _PIECE_BYTES))
            if not piece and can_end:
                return b""
            if not piece:
                raise WireError("the connection ended in the middle of a message.")
            data += piece
            if len(data) < size:
                deadline.check("a message was not whole")
    except WireError:
        raise
    except TimeoutError:
        raise WireError(f"nothing more came within {deadline.timeout_s:g} s.") from None
    except OSError as error:
        raise WireError(f"the connection ended: {error}.") from error
    return bytes(data)
