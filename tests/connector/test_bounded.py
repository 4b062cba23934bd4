"""Calls of a store in bounded time, and what they were lent."""

from __future__ import annotations

import logging
import threading

import pytest

from kvx.connector.bounded import Bounded, Lease
from kvx.errors import BadArgument

LOGGER = logging.getLogger("kvx")


def test_what_is_late_or_fails_is_a_miss(caplog):
    go = threading.Event()
    calls = Bounded("get", timeout_s=0.1, threads=2, logger=LOGGER)
    assert calls.run([lambda: 1, lambda: 1 / 0]) == [1, None]
    assert calls.run([lambda: 2, go.wait]) == [2, None]
    assert calls.run([lambda: 3]) == [None]  # nothing is asked behind a call that hangs
    go.set()
    while calls.run([lambda: 4]) != [4]:
        pass
    assert "division by zero" in caplog.text
    assert "did not answer in 0.1 s" in caplog.text
    calls.close()
    with pytest.raises(BadArgument, match="timeout_s is 0"):
        Bounded("get", timeout_s=0, threads=1, logger=LOGGER)


def test_what_was_lent_is_released_once_and_not_while_the_call_runs():
    released, began, go = [], threading.Event(), threading.Event()
    lease = Lease(lambda: released.append(1))

    def call() -> int:
        began.set()
        go.wait(10)
        assert released == []
        return 7

    thread = threading.Thread(target=lambda: lease.run(call))
    thread.start()
    began.wait(10)
    lease.give_up()
    assert released == []
    go.set()
    thread.join()
    assert released == [1]


def test_a_call_that_never_began_is_not_run_after_it_was_given_up():
    released = []
    lease = Lease(lambda: released.append(1))
    lease.give_up()
    assert released == [1]
    assert lease.run(lambda: released.append(2)) is None
    assert released == [1]


def test_a_call_that_ended_keeps_what_it_was_lent_until_its_caller_says():
    released = []
    lease = Lease(lambda: released.append(1))
    assert lease.run(lambda: 5) == 5
    assert released == []
    lease.give_up()
    assert released == [1]
