"""What the side that asks says when nobody answers, or when the other refuses. Wires are stand-ins: no package is needed."""

from __future__ import annotations

import pytest
import torch

import kvx
from kvx.wires.mooncake import offer as mooncake_offer
from kvx.wires.mooncake.store import NO_ROOM, OWNER_GONE, StoreError
from kvx.wires.nixl import offer as nixl_offer
from kvx.wires.offer import check_room, read_answer
from kvx.wires.wire import Deadline, WireError
from tests.wires.peers import OTHER, SECRET


@pytest.mark.parametrize(("is_other_kind", "error"), [(False, WireError), (True, kvx.Incompatible)])
def test_a_refusal_says_whose_it_is(is_other_kind, error):
    with pytest.raises(error, match="the other side refuses: no room"):
        read_answer("1", {"error": "no room", "is_other_kind": is_other_kind})


def test_a_deadline_says_what_to_do():
    with pytest.raises(WireError, match=r"^nothing came within 0 s\. Look again\.$"):
        Deadline(0).check("nothing came", "Look again.")
    with pytest.raises(WireError, match=r"^nothing came within 0 s\.$"):
        Deadline(0).pause("nothing came")


def test_nobody_at_the_other_end_of_nixl(monkeypatch):
    monkeypatch.setattr(nixl_offer, "NixlAgent", lambda **options: pytest.fail("an agent was made for nobody"))
    want = r"^no `kvx prefill --listen` answered at 127\.0\.0\.1:9 within 0\.02 s\. Is it running, on the same --wire\?$"
    with pytest.raises(WireError, match=want):
        nixl_offer.NixlPuller("127.0.0.1", 9, SECRET, Deadline(0.02))


@pytest.mark.parametrize("body", [
    {"about": {}, "places": [1.0]}, {"about": {}, "places": [True]}, {"about": {}, "places": [-1]},
    {"about": {}, "places": [1 << 64]}, {"about": {}, "places": "12"},
    {"about": [], "places": []}, {"about": {}}, {"places": []}, {},
], ids=str)  # fmt: skip
def test_an_answer_that_is_none(body):
    with pytest.raises(WireError, match="the answer is not understood"):
        read_answer("1", body)


def test_offers_have_a_limit():
    check_room(10, 90, 100, 3.0)
    with pytest.raises(
        WireError, match=r"the offer has 101 bytes; 100 may be offered at a time\. Ask for fewer tokens, or raise --offer"
    ):
        check_room(101, 0, 100, 0.0)
    with pytest.raises(WireError, match=r"95 bytes are offered to others and this would be 10 more; 100 may .* ends within 3 s\."):
        check_room(10, 95, 100, 3.0)


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
            body = mooncake_offer._open(SECRET, "ask", value)
            self.objects[f"kvx/{body['id']}/answer"] = self.answer(body["id"])

    def answer(self, number) -> bytes:
        return mooncake_offer._seal(SECRET, number, {"about": {"hello": 1}, "places": []})

    def has(self, names) -> list[bool]:
        return [name in self.objects for name in names]

    def get(self, name) -> bytes:
        return self.objects.get(name, b"")

    def remove(self, name) -> bool:
        return self.objects.pop(name, None) is not None

    def close(self) -> None: ...


@pytest.fixture
def puller(request, monkeypatch):
    monkeypatch.setattr(mooncake_offer, "MooncakeStore", Store)
    monkeypatch.setattr(Store, "codes", request.param)
    with mooncake_offer.MooncakePuller("far", 5600, SECRET, Deadline(5)) as puller:
        yield puller


@pytest.mark.parametrize(
    "puller", [(NO_ROOM,) * 99, (OWNER_GONE,) * 99], ids=["nobody gave memory", "who gave it is gone"], indirect=True
)
def test_a_store_without_a_prefill(puller):
    want = r"^no `kvx prefill --listen` answered at the store of far:5600 within 0\.02 s\. Is it running, on the same --wire\? With"
    with pytest.raises(WireError, match=want):
        puller.ask({}, Deadline(0.02))


@pytest.mark.parametrize("puller", [(NO_ROOM,)], ids=str, indirect=True)
def test_a_prefill_that_is_just_starting_is_waited_for(puller):
    assert puller.ask({}, Deadline(5)).about == {"hello": 1}


@pytest.mark.parametrize("puller", [(-900,)], ids=str, indirect=True)
def test_what_else_a_store_says_is_said_at_once(puller):
    with pytest.raises(WireError, match="code -900"):
        puller.ask({}, Deadline(5))


# ---- Mooncake's store has no secrets of its own: questions and answers in it are sealed


@pytest.mark.parametrize("puller", [()], ids=["store"], indirect=True)
@pytest.mark.parametrize("answer", [
    lambda number: b'{"about": {"hello": 2}, "places": []}',
    lambda number: mooncake_offer._seal(OTHER, number, {"about": {}, "places": []}),
    lambda number: mooncake_offer._seal(SECRET, "0" * 32, {"about": {}, "places": []}),
    lambda number: b"\xff" * 100,
], ids=["no seal", "another secret", "of another question", "no text"])  # fmt: skip
def test_an_answer_without_the_secret_is_not_believed(puller, answer, monkeypatch):
    monkeypatch.setattr(Store, "answer", lambda self, number: answer(number))
    with pytest.raises(WireError, match=r"does not know the secret\. Nothing is pulled\."):
        puller.ask({}, Deadline(5))


@pytest.fixture
def offers(monkeypatch):
    monkeypatch.setattr(mooncake_offer, "MooncakeStore", Store)
    monkeypatch.setattr(mooncake_offer, "_LOOK_S", 0.0)
    with mooncake_offer.MooncakeOffers("far", 5600, SECRET, lease_s=30.0, max_bytes=1000) as offers:
        yield offers


def asked(offers, number: str, secret=SECRET, about=None) -> list[str]:
    offers._store.objects["kvx/ask"] = mooncake_offer._seal(secret, "ask", {"id": number, "about": about or {}})
    return [request.number for request in offers.requests()]


def test_a_question_without_the_secret_or_asked_before_is_not_answered(offers):
    assert asked(offers, "a" * 32, OTHER) == []
    offers._store.objects["kvx/ask"] = b'{"id": "x", "about": {}}'
    assert offers.requests() == []
    for number in ("../../x", "a" * 31, "A" * 32, 7):
        assert asked(offers, number) == []
    assert asked(offers, "a" * 32) == ["a" * 32]
    assert asked(offers, "a" * 32) == []
    assert offers._store.objects == {}


def test_too_many_offers_and_too_many_bytes_are_refused_with_a_sentence(offers):
    numbers = [f"{n:032x}" for n in range(mooncake_offer._MAX_OFFERS)]
    for number in numbers:
        assert asked(offers, number) == [number]
        offers.answer(mooncake_offer.OfferRequest(number, {}), {})
    assert asked(offers, "f" * 32) == []
    said = mooncake_offer._open(SECRET, "f" * 32, offers._store.objects[f"kvx/{'f' * 32}/answer"])
    assert "64 offers wait to be pulled" in said["error"]
    with pytest.raises(WireError, match="the offer has 1001 bytes; 1000 may be offered"):
        offers.offer(mooncake_offer.OfferRequest("e" * 32, {}), {}, [torch.zeros(1001, dtype=torch.uint8)])
