"""Offers over NIXL in one process: pulled after a plan, let go of when done or late, and peers forgotten that say nothing more."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.wires.nixl import offer as nixl_offer
from kvx.wires.nixl.offer import NixlOffers, NixlPuller
from kvx.wires.wire import Deadline, WireError
from tests.engines.wires import free_port

pytest.importorskip("nixl")

THEIRS = kvx.CacheSpec(4, 16, 2, 64, layout="layer kv | block token head dim", format="f32", num_layers=2)
OURS = replace(THEIRS, layout="block | head layer kv token dim")


@pytest.fixture
def src():
    return [t.view(torch.uint8).random_(0, 255) for t in kvx.allocate_buffers(THEIRS)]


@pytest.fixture
def server(src, monkeypatch):
    """Answers every question with `src`, on a thread."""
    monkeypatch.setattr(nixl_offer, "QUIET_S", 1.0)
    port, is_over = free_port(), threading.Event()
    with NixlOffers(port, lease_s=1.0) as offers:

        def serve() -> None:
            while not is_over.is_set():
                for request in offers.requests():
                    offers.offer(request, {"hello": request.about["from"]}, src)
                time.sleep(0.001)

        thread = threading.Thread(target=serve)
        thread.start()
        yield port, offers
        is_over.set()
        thread.join()


def test_an_offer_is_pulled_and_let_go_of(server, src):
    port, offers = server
    want = kvx.allocate_buffers(OURS)
    kvx.convert(want, src, plan=kvx.plan(THEIRS, OURS))
    with NixlPuller("127.0.0.1", port, Deadline(5)) as puller:
        for n in range(3):
            into = kvx.allocate_buffers(OURS)
            offer = puller.ask({"from": n}, Deadline(5))
            assert (offer.about, offers.num_offers, offers.num_registered) == ({"hello": n}, 1, 1)
            assert puller.pull(offer, [(into, kvx.plan(THEIRS, OURS))], Deadline(5)) == sum(t.numel() for t in src)
            puller.done(offer, Deadline(5))
            assert (offers.num_offers, offers.num_registered, puller._agent.num_registered) == (0, 0, 0)
            assert all(torch.equal(a, b) for a, b in zip(into, want, strict=True))


def test_an_offer_that_nobody_pulls_is_let_go_of_and_its_peer_forgotten(server):
    port, offers = server
    with NixlPuller("127.0.0.1", port, Deadline(5)) as puller:
        puller.ask({"from": 1}, Deadline(5))
        name = puller._agent.name
        assert offers._agent.knows(name)
    end = time.monotonic() + 5
    while offers.num_offers or offers._agent.knows(name):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert offers.num_registered == 0
    with NixlPuller("127.0.0.1", port, Deadline(5)) as puller:
        assert puller.ask({"from": 2}, Deadline(5)).about == {"hello": 2}


def test_pieces_of_few_bytes_and_too_few_buffers_are_refused(server):
    port, _ = server
    scattered = replace(THEIRS, layout="layer kv | block head dim token")
    with NixlPuller("127.0.0.1", port, Deadline(5)) as puller:
        offer = puller.ask({"from": 1}, Deadline(5))
        with pytest.raises(WireError, match="pieces of 4 bytes"):
            puller.pull(offer, [(kvx.allocate_buffers(OURS), kvx.plan(scattered, OURS))], Deadline(5))
        part = (kvx.allocate_buffers(OURS), kvx.plan(THEIRS, OURS))
        with pytest.raises(WireError, match="4 buffers are offered; the manifest makes 8 or more"):
            puller.pull(offer, [part, part], Deadline(5))
