"""Ctrl-C at every point of an engine's calls and at any time; a request cancelled under load. Others' answers stay the same."""

from __future__ import annotations

import random
import threading

import pytest

from kvx.cache.prefix import PrefixCache
from kvx.errors import BadArgument
from kvx.runner import Engine, Params, engine, export_sequence, handover, import_sequence, request, resume, schedule
from tests.interrupts import interrupted_by_another_process, signalled_at_every_point
from tests.runner import test_families

PROMPTS = [list(range(3, 3 + n)) for n in (5, 9, 14)]
PARAMS = Params(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    test_families.make("llama", folder)
    return folder


@pytest.fixture
def made(llama):
    return Engine.load(llama, num_blocks=24, block_size=4, max_batch_tokens=12)


def tokens_of(answers):
    return [[a.tokens for a in group] for group in answers]


def assert_works(made: Engine, want) -> None:
    made.cache.check()
    assert tokens_of(made.generate(PROMPTS, PARAMS)) == want
    made.cache.check()
    assert made.cache.num_seqs == 0
    assert made.scheduler.is_idle
    assert not made._texts


def several(made: Engine) -> None:
    """Some in the middle, with forks to come; one that waits."""
    made.reset()
    made.add(PROMPTS[2], Params(max_tokens=6, n=2, ignore_eos=True))
    made.add(PROMPTS[0], PARAMS)
    made.step()
    made.add(PROMPTS[1], PARAMS)


def first_piece(made: Engine) -> None:
    pieces = made.stream(PROMPTS, PARAMS)
    try:
        next(pieces)
    finally:
        pieces.close()


def handed_over(made: Engine):
    return export_sequence(made, list(range(20, 30)))


CALLS = {
    "add": lambda e: e.add(PROMPTS[0]),
    "step": lambda e: e.step(),
    "cancel": lambda e: e.cancel(e._next_request - 2),
    "cancel one that waits": lambda e: e.cancel(e._next_request - 1),
    "reset": lambda e: e.reset(),
    "stream": first_piece,
    "export": handed_over,
}


@pytest.mark.parametrize("is_hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_every_point_of_a_call(made, name, is_hooked):
    want = tokens_of(made.generate(PROMPTS, PARAMS))

    def prepare():
        several(made)
        return made._next_request, lambda: CALLS[name](made)

    count = 0
    for number in signalled_at_every_point(prepare, engine, request, schedule, handover, is_hooked=is_hooked):
        made.cache.check()
        made.cancel(0)  # answered long ago: any call clears up what a second Ctrl-C, or one at the very end, left to do
        numbers = {c.request for c in (*made.scheduler.running, *made.scheduler.waiting)}
        if name != "add" or not is_hooked:  # whose number may be lost on its way back: it is answered as any other
            assert not {n for n in numbers if n >= number}  # whose numbers nobody has
        assert made.cache.num_seqs == sum(c.seq is not None for c in made.scheduler.running)
        while not made.scheduler.is_idle:
            made.step()
        count += 1
        if count % 10 == 1:
            assert_works(made, want)
    assert count > 5
    made.reset()
    assert_works(made, want)


@pytest.mark.parametrize("is_hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("call", [import_sequence, resume])
def test_ctrl_c_at_every_point_of_taking_a_handover(made, call, is_hooked):
    want, given, count = tokens_of(made.generate(PROMPTS, PARAMS)), handed_over(made), 0

    def prepare():
        made.reset()
        return made, lambda: call(made, given)

    for _ in signalled_at_every_point(prepare, handover, is_hooked=is_hooked):
        made.cancel(0)
        assert_works(made, want)
        count += 1
    assert count >= 3


def test_ctrl_c_from_another_process(made):
    interrupted(made, 60)


def interrupted(made: Engine, wanted: int) -> None:
    """Serving, while Ctrl-C comes at any time: what is answered is right, and nothing stays behind."""
    want = tokens_of(made.generate(PROMPTS, PARAMS))
    served = 0

    def work():
        nonlocal served
        made.cache.check()
        while True:
            assert tokens_of(made.generate(PROMPTS, PARAMS)) == want
            served += 1

    assert interrupted_by_another_process(work, wanted, 0.03) == wanted
    assert served
    assert_works(made, want)


def test_cancel_under_load(made):
    """Of random requests some are cancelled: their blocks come back, and all others have the answers they have alone."""
    rng = random.Random(0)
    asked, alone, got, cancelled = {}, {}, {}, set()
    for i in range(24):
        prompt = [rng.randrange(3, 120) for _ in range(rng.randint(1, 20))]
        params = Params(max_tokens=rng.randint(1, 10), n=rng.choice([1, 1, 2]), temperature=0.8, seed=i, ignore_eos=True)
        alone[i] = [a.tokens for a in made.generate([prompt], params)[0]]
        asked[i] = (prompt, params)
    made.reset()
    base, left = made._next_request, list(asked)
    while left or not made.scheduler.is_idle:
        for i in left[: rng.randint(0, 3)]:
            assert made.add(*asked[i]) == base + i
            left.remove(i)
        for piece in made.step():
            got.setdefault((piece.request - base, piece.index), []).append(piece.token)
        live = sorted({c.request for c in (*made.scheduler.running, *made.scheduler.waiting)})
        if live and rng.random() < 0.3:
            number = rng.choice(live)
            assert made.cancel(number)
            assert not made.cancel(number)
            assert number not in {c.request for c in (*made.scheduler.running, *made.scheduler.waiting)}
            cancelled.add(number - base)
        made.cache.check()
    assert len(cancelled) > 3
    assert made.cache.num_seqs == 0
    assert not made._texts
    for i, answers in alone.items():
        for k, tokens in enumerate(answers):
            mine = tuple(got.get((i, k), ()))
            assert mine == tokens[: len(mine)] if i in cancelled else mine == tokens


def test_cancel_from_another_thread(made):
    """One thread steps, another cancels; both answers of a cancelled request end, and the other request is answered."""
    want = made.generate([PROMPTS[0]], Params(max_tokens=40, ignore_eos=True))[0][0].tokens
    first = made.add_completions(PROMPTS[0], Params(max_tokens=40, ignore_eos=True))
    second = made.add_completions(PROMPTS[1], Params(max_tokens=60, n=2, ignore_eos=True))
    started, results = threading.Event(), []

    def cancel():
        started.wait()
        results.append(made.cancel(second[0].request))

    thread = threading.Thread(target=cancel)
    thread.start()
    while not all(c.finish for c in (*first, *second)):
        made.step()
        started.set()
    thread.join()
    assert results == [True]
    assert [c.finish for c in second] == ["cancelled"] * 2
    assert tuple(first[0].generated) == want
    made.cache.check()
    assert made.cache.num_seqs == 0


def test_cancel_in_a_handler_while_a_broken_step_is_put_right(made, monkeypatch):
    """The handler comes into the middle of forgetting names: it must not begin the same again inside."""
    want = tokens_of(made.generate(PROMPTS, PARAMS))
    several(made)
    number, inside = made._next_request - 1, []
    forget, forward = PrefixCache._drop, made._forward

    def broken(work):
        forward(work)
        raise KeyboardInterrupt

    def handled(self, *args):
        if not inside:
            inside.append(made.cancel(number))
        forget(self, *args)

    monkeypatch.setattr(made, "_forward", broken)
    monkeypatch.setattr(PrefixCache, "_drop", handled)
    with pytest.raises(KeyboardInterrupt):
        made.step()
    assert inside
    monkeypatch.undo()
    assert_works(made, want)


def test_generate_on_several_threads(made):
    want, got = tokens_of(made.generate(PROMPTS, PARAMS)), []
    threads = [threading.Thread(target=lambda: got.append(tokens_of(made.generate(PROMPTS, PARAMS)))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [want] * 4
    assert_works(made, want)


@pytest.mark.parametrize("number", [-1, 10**6, "one", None])
def test_numbers_that_were_never_given(made, number):
    with pytest.raises(BadArgument, match=r"cancel\(\): request is"):
        made.cancel(number)
