"""HOST:PORT: what is none, who is not this machine, which port is taken."""

from __future__ import annotations

import socket

import pytest

import kvx
from kvx.wires.address import check_free, check_host, connect, host_and_port
from kvx.wires.wire import WireError


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:port", "host:70000", "host:²"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(kvx.BadArgument, match="is no HOST:PORT"):
        host_and_port(address)


def test_the_last_colon_is_the_port_s():
    assert host_and_port("::1:5600") == ("::1", 5600)


@pytest.fixture
def taken():
    """A port that somebody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield int(s.getsockname()[1])


def test_a_host_that_nobody_is():
    for check in (check_host, lambda host: check_free(host, 5600)):
        with pytest.raises(WireError, match=r"no machine called 'nobody\.invalid' is known here"):
            check("nobody.invalid")


def test_only_this_machine_s_addresses_are_listened_at(taken):
    with pytest.raises(kvx.BadArgument, match=r"192\.0\.2\.1 is no address of this machine"):  # of documentation, RFC 5737
        check_free("192.0.2.1", 5600)


def test_a_taken_port_is_said(taken):
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        with pytest.raises(WireError, match=f"port {taken} is in use by another process. Give another port"):
            check_free(host, taken)


def test_a_free_port_stays_free(taken):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    check_free("127.0.0.1", port)
    check_free("localhost", port)


def test_who_answers(taken):
    assert connect(f"127.0.0.1:{taken}", "mooncake_master", 5) == "127.0.0.1"
    with pytest.raises(WireError, match=r"no mooncake_master answers at 127\.0\.0\.1:9: .*Start one"):
        connect("127.0.0.1:9", "mooncake_master", 5)
