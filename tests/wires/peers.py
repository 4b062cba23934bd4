"""A listener that answers on a thread, and clients of it. No package is needed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvx.wires.channel import Channel, connect
from kvx.wires.listener import Listener
from kvx.wires.secret import Secret
from kvx.wires.wire import Deadline

SECRET = Secret(b"the secret of the tests, which is long enough")
OTHER = Secret(b"another secret of the tests, long enough too")


@contextmanager
def listening(
    answer: Callable[[dict[str, Any]], dict[str, Any] | None] = dict, idle_s: float = 30.0, **options: Any
) -> Iterator[Listener]:
    """Answers every question with what `answer` makes of it; None: not at all."""
    is_over = threading.Event()
    with Listener("127.0.0.1", 0, SECRET, idle_s=idle_s, **options) as listener:
        listener.gone = []

        def serve() -> None:
            while not is_over.is_set():
                for client, body in listener.events(0.01):
                    if body is None:
                        listener.gone.append(client.number)
                    elif (said := answer(body)) is not None:
                        client.answer(said)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener
        finally:
            is_over.set()
            thread.join()


@contextmanager
def client_of(listener: Listener, secret: Secret = SECRET, timeout_s: float = 5.0) -> Iterator[Channel]:
    channel = connect("127.0.0.1", listener.port, secret, Deadline(timeout_s), who="listener")
    try:
        yield channel
    finally:
        channel.close()


def eventually(is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
