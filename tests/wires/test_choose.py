"""Which wire, and what is said before anything slow begins. No package is needed."""

from __future__ import annotations

import importlib.util
import socket

import pytest

import kvx
from kvx.wires.choose import check_wire, offers_at
from kvx.wires.mooncake import store
from kvx.wires.nixl import agent
from kvx.wires.wire import WireError
from tests.wires.peers import SECRET


@pytest.mark.parametrize(("wire", "how"), [("nixl", "pip install --no-deps nixl"), ("mooncake", "pip install mooncake-transfer")])
def test_a_missing_package_says_how_to_get_it(wire, how):
    if importlib.util.find_spec(wire) is not None:
        pytest.skip(f"{wire} is installed")
    for call in (
        lambda: offers_at(wire, "127.0.0.1:9", SECRET, lease_s=1.0),
        lambda: check_wire(wire, "127.0.0.1:9", is_listening=False),
    ):
        with pytest.raises(kvx.Unsupported, match=f"needs the package {wire}: {how}"):
            call()


def test_a_wire_that_does_not_exist():
    with pytest.raises(kvx.BadArgument, match="--wire is 'string'; it must be nixl or mooncake"):
        offers_at("string", "127.0.0.1:9", SECRET, lease_s=1.0)


@pytest.fixture
def port(monkeypatch):
    """One that is taken; and both packages are there."""
    monkeypatch.setattr(agent, "load", lambda: None)
    monkeypatch.setattr(store, "load", lambda module: None)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield int(s.getsockname()[1])


def test_nixl_listens_at_a_free_port_of_this_machine(port):
    with pytest.raises(WireError, match=f"port {port} is in use"):
        check_wire("nixl", f"127.0.0.1:{port}", is_listening=True)
    check_wire("nixl", f"127.0.0.1:{port}", is_listening=False)
    with pytest.raises(kvx.BadArgument, match=r"192\.0\.2\.1 is no address of this machine"):
        check_wire("nixl", "192.0.2.1:5600", is_listening=True)
    check_wire("nixl", "192.0.2.1:5600", is_listening=False)
    with pytest.raises(WireError, match="no machine called"):
        check_wire("nixl", "nobody.invalid:5600", is_listening=False)


@pytest.mark.parametrize("is_listening", [True, False])
def test_mooncake_s_master_answers(port, is_listening):
    check_wire("mooncake", f"127.0.0.1:{port}", is_listening=is_listening)
    with pytest.raises(WireError, match=r"no mooncake_master answers at 127\.0\.0\.1:9"):
        check_wire("mooncake", "127.0.0.1:9", is_listening=is_listening)
