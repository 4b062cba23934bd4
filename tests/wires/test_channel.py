"""Both sides prove that they have the secret, on this connection and no other; and no frame takes more than it may."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress

import pytest

import kvx
from kvx.wires import channel as channels
from kvx.wires.channel import HELLO, NONCE_BYTES, WrongSecret, connect, welcome, wrap_accepted
from kvx.wires.listener import Listener
from kvx.wires.wire import Deadline, WireError
from tests.wires.peers import OTHER, SECRET, client_of, eventually, listening


def test_what_is_asked_is_answered():
    with listening() as listener, client_of(listener) as client:
        for n in range(3):
            assert client.ask({"n": n, "text": "ä" * 100_000}, Deadline(5)) == {"n": n, "text": "ä" * 100_000}


def test_another_secret_is_refused_at_once_and_by_name():
    with listening() as listener:
        begin = time.monotonic()
        with pytest.raises(
            WrongSecret, match=rf"^listener at 127\.0\.0\.1:{listener.port}: it has another secret\. Copy its secret"
        ):
            connect("127.0.0.1", listener.port, OTHER, Deadline(5), who="listener")
        assert time.monotonic() - begin < 2
        eventually(lambda: listener.num_wrong == 1)
        with client_of(listener) as client:
            assert client.ask({"n": 1}, Deadline(5)) == {"n": 1}


@pytest.fixture
def impostor():
    """Listens, and answers with `say(link)` after TLS."""
    ended = []

    def start(say) -> int:
        server = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            link = wrap_accepted(server.accept()[0])
            link.settimeout(5)
            link.do_handshake()
            say(link)
            link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        ended.append((server, thread))
        return int(server.getsockname()[1])

    yield start
    for server, thread in ended:
        thread.join()
        server.close()


def read(link: ssl.SSLSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += link.recv(size - len(data))
    return data


def test_whoever_answers_must_know_the_secret_too(impostor):
    asked = []

    def say(link):
        read(link, len(HELLO) + NONCE_BYTES)
        link.send(bytes(NONCE_BYTES))
        proof = read(link, 32)
        link.send(b"\x01" + proof)  # the client's own, sent back
        asked.append(link.recv(100))

    with pytest.raises(WrongSecret, match=r"the peer does not know the secret, so no request was sent"):
        connect("127.0.0.1", impostor(say), SECRET, Deadline(5), who="listener")
    assert asked in ([], [b""])


def test_a_handshake_that_is_passed_on_proves_nothing(impostor):
    """Somebody in the middle has two TLS sessions, one with each side: a proof of one is none of the other."""
    with listening() as listener:
        refused = []

        def say(link):
            raw = socket.create_connection(("127.0.0.1", listener.port))
            far = channels._wrap(raw, is_server=False)
            far.settimeout(5)
            far.do_handshake()
            far.send(read(link, len(HELLO) + NONCE_BYTES))
            link.send(read(far, NONCE_BYTES))
            far.send(read(link, 32))
            refused.append(read(far, 1))
            link.send(refused[0])
            far.close()

        with pytest.raises(WrongSecret, match="another secret"):
            connect("127.0.0.1", impostor(say), SECRET, Deadline(5), who="listener")
        assert refused == [b"\x00"]
        eventually(lambda: listener.num_wrong == 1)


def test_a_replayed_handshake_proves_nothing(monkeypatch):
    """All that a client once sent, sent again, on the same kind of session."""
    sent = []
    monkeypatch.setattr(channels, "_send", lambda link, data, deadline: (sent.append(bytes(data)), link.send(data)))
    with listening() as listener, client_of(listener) as client:
        client.ask({"n": 1}, Deadline(5))
        theirs = [data for data in sent if data.startswith(HELLO) or len(data) == 32]
        hello = next(data for data in sent if data.startswith(HELLO))
        proof = sent[sent.index(hello) + 2]  # after the listener's random bytes
        assert len(theirs) >= 2
        link = channels._wrap(socket.create_connection(("127.0.0.1", listener.port)), is_server=False)
        link.settimeout(5)
        link.do_handshake()
        link.send(hello)
        read(link, NONCE_BYTES)
        link.send(proof)
        assert read(link, 1) == b"\x00"
        eventually(lambda: listener.num_wrong == 1)
        link.close()


def test_the_secret_and_the_question_are_not_on_the_wire():
    """What passes through a tap in the middle, which changes nothing, has neither."""
    with listening() as listener, socket.create_server(("127.0.0.1", 0)) as tap:
        seen, threads = bytearray(), []

        def pump(a, b):
            while data := a.recv(1 << 16):
                seen.extend(data)
                b.sendall(data)
            with suppress(OSError):  # it hung up first
                b.shutdown(socket.SHUT_WR)

        def serve():
            near, far = tap.accept()[0], socket.create_connection(("127.0.0.1", listener.port))
            threads.extend(threading.Thread(target=pump, args=ends) for ends in ((near, far), (far, near)))
            for t in threads:
                t.start()

        opener = threading.Thread(target=serve)
        opener.start()
        client = connect("127.0.0.1", tap.getsockname()[1], SECRET, Deadline(5), who="listener")
        assert client.ask({"prompt": "a private question"}, Deadline(5)) == {"prompt": "a private question"}
        client.close()
        for t in (opener, *threads):
            t.join()
    assert len(seen) > 500
    assert b"private question" not in seen
    assert b"secret of the tests" not in seen


@pytest.mark.parametrize("size", [channels.MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_a_frame_s_size_is_looked_at_before_memory_is_taken(size):
    with listening() as listener, client_of(listener) as client:
        client._link.send(size.to_bytes(4, "big"))
        assert client.receive(Deadline(5)) is None  # it hung up
    with listening() as listener, client_of(listener) as client, pytest.raises(kvx.BadArgument, match=f"{8 << 20} is the most"):
        client.send({"x": "y" * channels.MAX_FRAME_BYTES}, Deadline(5))


def test_an_answer_that_is_too_long_is_said():
    with listening(lambda body: {"x": "y" * channels.MAX_FRAME_BYTES}) as listener, client_of(listener) as client:
        assert f"{8 << 20} is the most" in client.ask({}, Deadline(5))["error"]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"7", b"[" * 100_000, b"\xff\xfe", b'{"a":' * 50_000])
def test_what_is_no_object_ends_its_own_connection_only(text):
    with listening() as listener, client_of(listener) as other, client_of(listener) as client:
        client._link.send(len(text).to_bytes(4, "big") + text)
        assert client.receive(Deadline(5)) is None
        assert other.ask({"n": 1}, Deadline(5)) == {"n": 1}


def test_nobody_there_is_waited_for_until_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(WireError, match=rf"^no listener answered at 127\.0\.0\.1:{port} within 0\.3 s\. Look\.$"):
        connect("127.0.0.1", port, SECRET, Deadline(0.3), who="listener", hint="Look.")
    assert time.monotonic() - begin < 2


def test_who_speaks_something_else_is_said_at_once(impostor):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            link = server.accept()[0]
            link.recv(100)
            link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(WireError, match="is no listener: WRONG_VERSION_NUMBER"):
            connect("127.0.0.1", server.getsockname()[1], SECRET, Deadline(5), who="listener")
        thread.join()


def test_a_client_that_waits_says_so_in_time():
    with listening(lambda body: None) as listener, client_of(listener) as client:
        begin = time.monotonic()
        with pytest.raises(WireError, match=r"the other side did not answer within 0\.3 s"):
            client.ask({"n": 1}, Deadline(0.3))
        assert time.monotonic() - begin < 2


def test_another_version_is_not_answered():
    with listening() as listener:
        link = channels._wrap(socket.create_connection(("127.0.0.1", listener.port)), is_server=False)
        link.settimeout(5)
        link.do_handshake()
        link.send(b"KVX\x09" + bytes(NONCE_BYTES))
        assert link.recv(1) == b""
        link.close()


def test_welcome_ends_by_its_deadline():
    """However slowly the other side sends, a byte at a time."""
    a, b = socket.socketpair()
    is_over = threading.Event()

    def drip():
        for byte in b"\x16\x03\x01" + bytes(200):
            if is_over.wait(0.05):
                return
            b.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    begin = time.monotonic()
    link = wrap_accepted(a)
    with pytest.raises(OSError, match=r"WRONG|timed out|within|ended|bad|EOF|error"):
        welcome(link, SECRET, Deadline(0.5))
    assert time.monotonic() - begin < 2
    is_over.set()
    thread.join()
    link.close()
    b.close()


def test_a_python_without_such_tls_says_so_at_once(monkeypatch):
    """Before anything is listened at."""
    channels._context.cache_clear()
    monkeypatch.setattr(channels, "CIPHER", "NONE-SUCH")
    with pytest.raises(kvx.Unsupported, match=r"OpenSSL .* cannot do anonymous ECDH .* or hand over by a folder"):
        Listener("127.0.0.1", 0, SECRET, idle_s=1)
    monkeypatch.undo()
    channels._context.cache_clear()
