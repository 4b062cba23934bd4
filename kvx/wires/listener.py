"""Who listens: at one address and no other, for those who have the secret, each with a thread and deadlines of its own.

A connection that says nothing, half a word, or the wrong word takes nothing from the others: those that have not proved themselves
are few, and the oldest of them leaves first. A client asks, is answered, and asks again; what it sends before its answer ends it.
"""

from __future__ import annotations

import itertools
import queue
import socket
import ssl
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from kvx.errors import BadArgument
from kvx.wires.address import bind
from kvx.wires.channel import FRAME_S, HANDSHAKE_S, Channel, WrongSecret, check_tls, welcome, wrap_accepted
from kvx.wires.secret import Secret
from kvx.wires.wire import Deadline, WireError

MAX_CLIENTS = 64
MAX_UNPROVED = 32
_LOOK_S = 0.1  # between two looks whether a client that waits for its answer is still there
_BACKLOG = 128
_numbers = itertools.count(1)


class Client:
    """One that has proved itself. Answers may come from any thread; one for each question."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.is_open = True
        self._answer: dict[str, Any] | None = None
        self._has_answer = threading.Event()

    def answer(self, body: dict[str, Any]) -> None:
        self._answer = body
        self._has_answer.set()

    def _take(self) -> dict[str, Any]:
        assert self._answer is not None
        body, self._answer = self._answer, None
        self._has_answer.clear()
        return body


class Listener:
    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        *,
        idle_s: float,  # a client that asks nothing for so long is let go of
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        if max_clients < 1 or not idle_s > 0:
            raise BadArgument(f"Listener: max_clients is {max_clients}, idle_s {idle_s:g}; both are more than 0.")
        self.idle_s, self.max_clients = idle_s, max_clients
        self.num_wrong = 0  # that came with another secret
        self._secret = secret
        self._events: queue.SimpleQueue[tuple[Client, dict[str, Any] | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unproved: dict[int, ssl.SSLSocket] = {}  # the oldest first
        self._proved: dict[int, ssl.SSLSocket] = {}
        self._is_closed = False
        check_tls()
        self._socket = bind(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._socket.listen(_BACKLOG)
        self._socket.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._accept, name="Listener", daemon=True)
        self._thread.start()

    @property
    def num_clients(self) -> int:
        return len(self._proved)

    @property
    def num_unproved(self) -> int:
        return len(self._unproved)

    def events(self, wait_s: float = 0.0) -> list[tuple[Client, dict[str, Any] | None]]:
        """What clients asked since, each to be answered once; None: this one is gone. Waits so long where there is nothing."""
        came = []
        with suppress(queue.Empty):
            came.append(self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait())
            while True:
                came.append(self._events.get_nowait())
        return came

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._socket.close()
        with self._lock:
            links = [*self._unproved.values(), *self._proved.values()]
        for link in links:
            _hang_up(link)
        end = time.monotonic() + 2
        while (self._unproved or self._proved) and time.monotonic() < end:
            time.sleep(0.002)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                raw, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # no descriptor is left, or it hung up already. Those that prove nothing give theirs back first
                self._drop_oldest(1)
                time.sleep(_LOOK_S / 2)
                continue
            self._begin(raw)

    def _begin(self, raw: socket.socket) -> None:
        number = next(_numbers)
        try:
            link = wrap_accepted(raw)
        except (OSError, ValueError):  # it is gone already
            return
        self._drop_oldest(MAX_UNPROVED)
        with self._lock:
            self._unproved[number] = link
        try:
            threading.Thread(target=self._serve, args=(number, link), name="Listener client", daemon=True).start()
        except RuntimeError:  # no thread is left
            self._end(number, link)

    def _drop_oldest(self, most: int) -> None:
        """Hang up on one that has proved nothing, where there are `most` of them or more. Its thread does the rest."""
        with self._lock:
            oldest = next(iter(self._unproved), None)
            link = self._unproved.pop(oldest) if oldest is not None and len(self._unproved) >= most else None
        if link is not None:
            _hang_up(link)

    def _serve(self, number: int, link: ssl.SSLSocket) -> None:
        client: Client | None = None
        try:
            channel = welcome(link, self._secret, Deadline(HANDSHAKE_S))
            with self._lock:
                is_full = len(self._proved) >= self.max_clients
                if not is_full:
                    self._proved[number] = link
                    self._unproved.pop(number, None)
            if is_full:
                text = f"{self.max_clients} clients are connected, as many as may be. Ask again in a moment."
                channel.receive(Deadline(HANDSHAKE_S))  # its question: it listens for an answer only then
                channel.send({"error": text}, Deadline(FRAME_S))
                return
            client = Client()
            self._converse(client, channel)
        except WrongSecret:
            self.num_wrong += 1
        except (OSError, ValueError):  # gone, late, or not understood (WireError is an OSError; a closed socket a ValueError)
            pass
        finally:
            self._end(number, link)
            if client is not None:
                client.is_open = False
                self._events.put((client, None))

    def _converse(self, client: Client, channel: Channel) -> None:
        while not self._is_closed and (body := channel.receive(Deadline(self.idle_s))) is not None:
            self._events.put((client, body))
            while not client._has_answer.wait(_LOOK_S):
                if self._is_closed or not channel.is_quiet:
                    return
            answer = client._take()
            try:
                channel.send(answer, Deadline(FRAME_S))
            except WireError:
                raise
            except (TypeError, ValueError) as error:  # it is no JSON, or too long: ours to mend, and not to hide
                channel.send({"error": f"the answer cannot be sent: {error}"}, Deadline(FRAME_S))

    def _end(self, number: int, link: ssl.SSLSocket) -> None:
        with self._lock:
            self._unproved.pop(number, None)
            self._proved.pop(number, None)
        with suppress(OSError):
            link.close()


def _hang_up(link: ssl.SSLSocket) -> None:
    """From another thread than the link's own, which wakes up and closes it. ssl's shutdown() would take its session away."""
    with suppress(OSError):
        socket.socket.shutdown(link, socket.SHUT_RDWR)
