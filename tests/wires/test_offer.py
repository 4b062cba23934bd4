"""What the side that asks says when nobody answers, or when the other refuses. Wires are stand-ins: no package is needed."""

from __future__ import annotations

import json

import pytest

import kvx
from kvx.wires.mooncake import offer as mooncake_offer
from kvx.wires.mooncake.store import NO_ROOM, OWNER_GONE, StoreError
from kvx.wires.nixl import offer as nixl_offer
from kvx.wires.nixl.agent import NixlAgent
from kvx.wires.offer import read_answer
from kvx.wires.wire import Deadline, WireError


@pytest.mark.parametrize(("is_other_kind", "error"), [(False, WireError), (True, kvx.Incompatible)])
def test_a_refusal_says_whose_it_is(is_other_kind, error):
    with pytest.raises(error, match="the other side refuses: no room"):
        read_answer("1", {"error": "no room", "is_other_kind": is_other_kind})


def test_a_deadline_says_what_to_do():
    with pytest.raises(WireError, match=r"^nothing came within 0 s\. Look again\.$"):
        Deadline(0).check("nothing came", "Look again.")
    with pytest.raises(WireError, match=r"^nothing came within 0 s\.$"):
        Deadline(0).pause("nothing came")


class Deaf:
    """A NIXL agent whose peers never answer."""

    connect = NixlAgent.connect
    closed = 0

    def __init__(self, **options) -> None:
        self._agent = self

    def check_remote_metadata(self, name) -> bool:
        return False

    def fetch_remote_metadata(self, name, host, port) -> None: ...

    def send_local_metadata(self, host, port) -> None: ...

    def close(self) -> None:
        Deaf.closed += 1


def test_nobody_at_the_other_end_of_nixl(monkeypatch):
    monkeypatch.setattr(nixl_offer, "NixlAgent", Deaf)
    want = r"^no `kvx prefill --listen` answered at far:5600 within 0\.02 s\. Is it running, on the same --wire\?$"
    with pytest.raises(WireError, match=want):
        nixl_offer.NixlPuller("far", 5600, Deadline(0.02))
    assert Deaf.closed == 1


class Store:
    """Mooncake's, whose put ends in `codes`, one after the other."""

    codes: tuple[int, ...] = ()

    def __init__(self, master, **options) -> None:
        self.objects: dict[str, bytes] = {}
        self.left = list(Store.codes)

    def put(self, name, value) -> None:
        code = self.left.pop(0) if self.left else 0
        if code:
            raise StoreError(f"put of {name}: code {code}.", code)
        self.objects[name] = value
        if name == "kvx/ask":
            self.objects[f"kvx/{json.loads(value)['id']}/answer"] = b'{"about": {"hello": 1}, "places": []}'

    def get(self, name) -> bytes:
        return self.objects.get(name, b"")

    def remove(self, name) -> bool:
        return self.objects.pop(name, None) is not None

    def close(self) -> None: ...


@pytest.fixture
def puller(request, monkeypatch):
    monkeypatch.setattr(mooncake_offer, "MooncakeStore", Store)
    monkeypatch.setattr(Store, "codes", request.param)
    with mooncake_offer.MooncakePuller("far", 5600, Deadline(5)) as puller:
        yield puller


@pytest.mark.parametrize(
    "puller", [(NO_ROOM,) * 99, (OWNER_GONE,) * 99], ids=["nobody gave memory", "who gave it is gone"], indirect=True
)
def test_a_store_without_a_prefill(puller):
    want = r"^no `kvx prefill --listen` answered at the store of far:5600 within 0\.02 s\. Is it running, on the same --wire\?$"
    with pytest.raises(WireError, match=want):
        puller.ask({}, Deadline(0.02))


@pytest.mark.parametrize("puller", [(NO_ROOM,)], ids=str, indirect=True)
def test_a_prefill_that_is_just_starting_is_waited_for(puller):
    assert puller.ask({}, Deadline(5)).about == {"hello": 1}


@pytest.mark.parametrize("puller", [(-900,)], ids=str, indirect=True)
def test_what_else_a_store_says_is_said_at_once(puller):
    with pytest.raises(WireError, match="code -900"):
        puller.ask({}, Deadline(5))
