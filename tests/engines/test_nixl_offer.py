"""Offers over NIXL in one process: pulled after a plan, each by its own client alone, and let go of when done, late or left."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.wires.nixl import offer as nixl_offer
from kvx.wires.nixl.agent import Remote
from kvx.wires.nixl.offer import NixlOffers, NixlPuller
from kvx.wires.secret import Secret
from kvx.wires.wire import Deadline, WireError
from tests.engines.wires import SECRET
from tests.wires.peers import OTHER, eventually, num_files, resident_bytes

pytest.importorskip("nixl")

THEIRS = kvx.CacheSpec(4, 16, 2, 64, layout="layer kv | block token head dim", format="f32", num_layers=2)
OURS = replace(THEIRS, layout="block | head layer kv token dim")
NUM_BYTES = sum(t.numel() for t in kvx.allocate_buffers(THEIRS))


@pytest.fixture
def src():
    return [t.view(torch.uint8).random_(0, 255) for t in kvx.allocate_buffers(THEIRS)]


@pytest.fixture
def server(src, monkeypatch):
    """Answers every question with a copy of `src`, on a thread."""
    monkeypatch.setattr(nixl_offer, "LATE_S", 0.3)
    is_over = threading.Event()
    with NixlOffers("127.0.0.1", 0, SECRET, lease_s=1.0, max_bytes=5 * NUM_BYTES) as offers:

        def serve() -> None:
            while not is_over.is_set():
                for request in offers.requests():
                    try:
                        offers.offer(request, {"hello": request.about["from"]}, [t.clone() for t in src])
                    except WireError as error:
                        offers.refuse(request, error)
                time.sleep(0.001)

        thread = threading.Thread(target=serve)
        thread.start()
        yield offers._listener.port, offers
        is_over.set()
        thread.join()


def puller_at(port: int, secret: Secret = SECRET) -> NixlPuller:
    return NixlPuller("127.0.0.1", port, secret, Deadline(5))


def test_an_offer_is_pulled_and_let_go_of(server, src):
    port, offers = server
    want = kvx.allocate_buffers(OURS)
    kvx.convert(src, want, plan=kvx.plan(THEIRS, OURS))
    with puller_at(port) as puller:
        for n in range(3):
            into = kvx.allocate_buffers(OURS)
            offer = puller.ask({"from": n}, Deadline(5))
            assert (offer.about, offers.num_offers, offers.num_registered) == ({"hello": n}, 1, 1)
            assert puller.pull(offer, [(into, kvx.plan(THEIRS, OURS))], Deadline(5)) == sum(t.numel() for t in src)
            puller.done(offer, Deadline(5))
            assert (offers.num_offers, offers.num_registered, puller._agent.num_registered) == (0, 0, 0)
            assert all(torch.equal(a, b) for a, b in zip(into, want, strict=True))


def test_an_offer_that_nobody_pulls_is_let_go_of(server):
    port, offers = server
    with puller_at(port) as puller:
        offer = puller.ask({"from": 1}, Deadline(5))
        assert (offers.num_offers, offers.num_bytes) == (1, NUM_BYTES)
        eventually(lambda: offers.num_offers == 0)
        assert offers.num_registered == 0
        with pytest.raises(WireError, match=r"took the offer back before all of it was pulled: after 1 s, its --lease-s"):
            puller.done(offer, Deadline(5))
    eventually(lambda: offers.num_bytes == 0)
    with puller_at(port) as puller:
        assert puller.ask({"from": 2}, Deadline(5)).about == {"hello": 2}


def test_pieces_of_few_bytes_and_too_few_buffers_are_refused(server):
    port, _ = server
    scattered = replace(THEIRS, layout="layer kv | block head dim token")
    with puller_at(port) as puller:
        offer = puller.ask({"from": 1}, Deadline(5))
        with pytest.raises(WireError, match="pieces of 4 bytes"):
            puller.pull(offer, [(kvx.allocate_buffers(OURS), kvx.plan(scattered, OURS))], Deadline(5))
        part = (kvx.allocate_buffers(OURS), kvx.plan(THEIRS, OURS))
        with pytest.raises(WireError, match="4 buffers are offered; the manifest makes 8 or more"):
            puller.pull(offer, [part, part], Deadline(5))


# ---- others


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_second_client_cannot_touch_the_first_s_offer(server, src, op):
    port, _ = server
    run = [kvx.layout.plan.ByteRun(0, 0, 0, 0, 64)]
    with puller_at(port) as first, puller_at(port) as second:
        mine, theirs = first.ask({"from": 1}, Deadline(5)), second.ask({"from": 2}, Deadline(5))
        assert set(mine.places).isdisjoint(theirs.places)
        near = torch.zeros(64, dtype=torch.uint8)
        second._agent.register([near])
        for place in mine.places:
            with pytest.raises(WireError, match="NIXL_ERR_NOT_FOUND"):
                getattr(second._agent, op)([near], Remote(second._peer, (place,)), run, Deadline(5))
        assert not near.any()
        into = kvx.allocate_buffers(OURS)
        first.pull(mine, [(into, kvx.plan(THEIRS, OURS))], Deadline(5))
        want = kvx.allocate_buffers(OURS)
        kvx.convert(src, want, plan=kvx.plan(THEIRS, OURS))
        assert all(torch.equal(a, b) for a, b in zip(into, want, strict=True))


def test_what_a_client_writes_into_its_own_offer_reaches_nobody_else(server, src):
    """UCX cannot offer memory for reading alone: so each client's is a copy."""
    port, _ = server
    run = [kvx.layout.plan.ByteRun(0, 0, 0, 0, 64)]
    with puller_at(port) as first, puller_at(port) as second:
        mine, _ = first.ask({"from": 1}, Deadline(5)), second.ask({"from": 2}, Deadline(5))
        ones = torch.full((64,), 255, dtype=torch.uint8)
        first._agent.register([ones])
        first._agent.write([ones], Remote(first._peer, (mine.places[0],)), run, Deadline(5))
        again = second.ask({"from": 2}, Deadline(5))
        into = kvx.allocate_buffers(THEIRS)
        second.pull(again, [(into, kvx.plan(THEIRS, THEIRS))], Deadline(5))
        assert all(torch.equal(a, b) for a, b in zip(into, src, strict=True))


def test_another_secret_gets_nothing(server):
    port, offers = server
    with pytest.raises(WireError, match="it has another secret"):
        puller_at(port, OTHER)
    assert (offers.num_clients, offers.num_offers) == (0, 0)
    with puller_at(port) as puller:
        assert puller.ask({"from": 1}, Deadline(5)).about == {"hello": 1}


def test_who_asks_again_ends_its_own_offer_before(server):
    """Question after question, and none is pulled: one offer, and the memory of the others goes as well."""
    port, offers = server
    with puller_at(port) as puller:
        for n in range(40):
            body = puller._channel.ask({"about": {"from": n}}, Deadline(5))
            # What was given up waits for READs on their way, and counts.
            assert "Ask again: the oldest offer ends within" in body.get("error", "Ask again: the oldest offer ends within")
            time.sleep(0.1 if "error" in body else 0)
            assert offers.num_offers <= 1
            assert offers.num_registered <= 1
            assert offers.num_bytes <= offers.max_bytes
    eventually(lambda: offers.num_bytes == 0)


def test_bytes_that_are_offered_have_a_limit_and_it_passes(server):
    port, offers = server
    pullers = [puller_at(port) for _ in range(6)]
    try:
        for puller in pullers[:5]:
            puller.ask({"from": 1}, Deadline(5))
        with pytest.raises(WireError, match=f"{5 * NUM_BYTES} bytes are offered to others and this would be {NUM_BYTES} more"):
            pullers[5].ask({"from": 1}, Deadline(5))
        assert offers.num_bytes == offers.max_bytes
        eventually(lambda: offers.num_bytes == 0)  # none of them pulls
        assert pullers[5].ask({"from": 6}, Deadline(5)).about == {"hello": 6}
    finally:
        for puller in pullers:
            puller.close()


def test_a_client_that_goes_ends_its_offer_at_once(server):
    port, offers = server
    offers.lease_s = 60.0
    with puller_at(port) as puller:
        puller.ask({"from": 1}, Deadline(5))
        assert offers.num_offers == 1
    eventually(lambda: offers.num_offers == 0)
    assert offers.num_registered == 0


@pytest.mark.parametrize("body", [{}, {"about": 7}, {"op": "x"}, {"op": ["done"]}], ids=str)
def test_what_is_not_understood_is_said(server, body):
    port, _ = server
    with puller_at(port) as puller:
        assert "the message is not understood" in puller._channel.ask(body, Deadline(5))["error"]
        assert puller.ask({"from": 2}, Deadline(5)).about == {"hello": 2}


def test_done_without_an_offer_is_answered(server):
    port, _ = server
    with puller_at(port) as puller:
        assert puller._channel.ask({"op": "done"}, Deadline(5)) == {"done": False}


def test_clients_one_after_the_other_leave_nothing(server):
    port, offers = server
    for n in range(60):
        if n == 20:
            eventually(lambda: offers.num_clients == 0)
            files, memory = num_files(), resident_bytes()
        with puller_at(port) as puller:
            offer = puller.ask({"from": n}, Deadline(5))
            into = kvx.allocate_buffers(OURS)
            puller.pull(offer, [(into, kvx.plan(THEIRS, OURS))], Deadline(5))
            puller.done(offer, Deadline(5))
    eventually(lambda: offers.num_clients == 0)
    assert offers.num_registered == 0
    assert num_files() <= files + 2
    assert resident_bytes() - memory < 16 << 20


def test_a_port_in_use_is_said(server):
    port, _ = server
    with pytest.raises(WireError, match=f"port {port} is in use by another process"):
        NixlOffers("127.0.0.1", port, SECRET)


def test_no_agent_leaves_no_listener(monkeypatch):
    def fail(**options):
        raise WireError("no NIXL agent")

    monkeypatch.setattr(nixl_offer, "NixlAgent", fail)
    files = num_files()
    with pytest.raises(WireError, match="no NIXL agent"):
        NixlOffers("127.0.0.1", 0, SECRET)
    assert num_files() == files
