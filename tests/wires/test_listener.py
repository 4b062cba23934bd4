"""A listener goes on answering whatever others do: idle, half-open, slow, too many, gone. It keeps nothing of those who went."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time

import pytest

import kvx
from kvx.wires import listener as listeners
from kvx.wires.channel import connect
from kvx.wires.listener import MAX_UNPROVED, Listener
from kvx.wires.wire import Deadline, WireError
from tests.wires.peers import OTHER, SECRET, client_of, eventually, listening, num_files, resident_bytes


def answers(listener: Listener) -> bool:
    with client_of(listener) as client:
        return client.ask({"n": 7}, Deadline(5)) == {"n": 7}


def test_it_listens_where_it_is_told_and_nowhere_else():
    with listening() as listener:
        assert listener.host == "127.0.0.1"
        with socket.socket() as s:
            s.settimeout(1)
            assert s.connect_ex(("127.0.0.2", listener.port)) != 0  # an address of this machine, too
        with pytest.raises(WireError, match=f"port {listener.port} is in use by another process"):
            Listener("127.0.0.1", listener.port, SECRET, idle_s=1)
    with pytest.raises(kvx.BadArgument, match=r"192\.0\.2\.77 is no address of this machine"):
        Listener("192.0.2.77", 0, SECRET, idle_s=1)


def half_open(port: int, data: bytes = b"") -> socket.socket:
    s = socket.create_connection(("127.0.0.1", port))
    s.send(data)
    return s


@pytest.mark.parametrize(
    "data", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n"], ids=["idle", "a byte", "half", "HTTP"]
)
def test_connections_that_prove_nothing_hold_nobody(data):
    with listening() as listener:
        held = [half_open(listener.port, data) for _ in range(3 * MAX_UNPROVED)]
        for _ in range(3):
            begin = time.monotonic()
            assert answers(listener)
            assert time.monotonic() - begin < 2
        assert listener.num_unproved <= MAX_UNPROVED
        for s in held:
            s.close()
        eventually(lambda: listener.num_unproved == 0)


def test_they_are_let_go_of_by_the_deadline(monkeypatch):
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 0.3)
    with listening() as listener:
        files = num_files()
        held = [half_open(listener.port) for _ in range(10)]
        eventually(lambda: listener.num_unproved == 10)
        eventually(lambda: listener.num_unproved == 0)
        assert num_files() == files + 10  # their own ends
        for s in held:
            s.close()


def test_half_a_frame_and_silence_end_by_their_deadlines(monkeypatch):
    monkeypatch.setattr("kvx.wires.channel.FRAME_S", 0.3)
    with listening(idle_s=0.5) as listener:
        halves = [client_of(listener) for _ in range(20)]
        channels = [half.__enter__() for half in halves]
        for channel in channels:
            channel._link.send(b"\x00\x00\x10\x00half")
        with client_of(listener) as silent:
            assert answers(listener)
            eventually(lambda: listener.num_clients == 0)
            assert silent.receive(Deadline(5)) is None
        for half in halves:
            half.__exit__(None, None, None)
        eventually(lambda: len(listener.gone) == 22)


def test_one_beyond_the_most_gets_a_sentence():
    with listening(max_clients=2) as listener:
        with client_of(listener) as a, client_of(listener) as b, client_of(listener) as c:
            assert "2 clients are connected, as many as may be" in c.ask({"n": 1}, Deadline(5))["error"]
            assert a.ask({"n": 1}, Deadline(5)) == b.ask({"n": 1}, Deadline(5)) == {"n": 1}
        eventually(lambda: listener.num_clients == 0)
        assert answers(listener)


def test_a_client_that_goes_while_it_waits_is_noticed():
    with listening(lambda body: None) as listener:
        with client_of(listener) as client:
            client.send({"n": 1}, Deadline(5))
            eventually(lambda: listener.num_clients == 1)
        eventually(lambda: listener.gone != [])
        assert listener.num_clients == 0


def test_who_asks_again_before_its_answer_is_ended():
    with listening(lambda body: None) as listener, client_of(listener) as client:
        client.send({"n": 1}, Deadline(5))
        client.send({"n": 2}, Deadline(5))
        eventually(lambda: len(listener.gone) == 1)


def test_an_answer_that_is_no_json_is_said():
    with listening(lambda body: {"x": object()}) as listener, client_of(listener) as client:
        assert "the answer cannot be sent" in client.ask({}, Deadline(5))["error"]


def test_a_client_that_never_reads_ends_by_the_deadline(monkeypatch):
    monkeypatch.setattr("kvx.wires.listener.FRAME_S", 0.5)
    with listening(lambda body: {"x": "y" * (7 << 20)}) as listener, client_of(listener) as client:
        client.send({"n": 1}, Deadline(5))
        eventually(lambda: len(listener.gone) == 1)
        assert listener.num_clients == 0


def test_many_clients_one_after_the_other_leave_nothing():
    with listening() as listener:
        for _ in range(50):
            assert answers(listener)
        eventually(lambda: listener.num_clients == 0)
        files, memory, threads = num_files(), resident_bytes(), threading.active_count()
        for n in range(300):
            if n % 3 == 0:
                with pytest.raises(WireError, match="another secret"):
                    connect("127.0.0.1", listener.port, OTHER, Deadline(5), who="listener")
            elif n % 3 == 1:
                half_open(listener.port, b"\x16\x03").close()
            else:
                assert answers(listener)
        eventually(lambda: listener.num_clients + listener.num_unproved == 0)
        eventually(lambda: threading.active_count() == threads)
        assert num_files() == files
        assert resident_bytes() - memory < 8 << 20


def test_it_survives_having_no_descriptors_left():
    """As with `ulimit -n 100`: those that prove nothing go first, and when there is room again it answers."""
    code = """
import resource, socket, time
from tests.wires.peers import SECRET, client_of, eventually, listening, num_files
from kvx.wires.wire import Deadline
with listening() as listener:
    with client_of(listener) as client:
        client.ask({}, Deadline(5))
    limit = num_files() + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held = []
    try:
        while True:
            held.append(socket.create_connection(("127.0.0.1", listener.port)))
    except OSError as error:
        print(error.errno == 24, flush=True)
    time.sleep(0.5)
    for s in held:
        s.close()
    with client_of(listener, timeout_s=10) as client:
        print(client.ask({"n": 1}, Deadline(5)), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["True", "{'n': 1}"], done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100


def test_closing_ends_all():
    files, threads = num_files(), threading.active_count()
    with listening() as listener, client_of(listener) as client:
        client.ask({}, Deadline(5))
        idle = half_open(listener.port)
        eventually(lambda: listener.num_unproved == 1)
        listener.close()
        assert client.receive(Deadline(5)) is None
        idle.close()
    eventually(lambda: threading.active_count() == threads)
    assert num_files() == files
