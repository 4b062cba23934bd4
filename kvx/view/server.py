"""What `kvx view` and attach() serve: the page, /events with records as they come, /metrics for Prometheus.

    GET /          the page
    GET /events    server-sent events; each is a JSON array of records, four a second at most. The first is a header
    GET /metrics   Prometheus' text, or OpenMetrics where that is accepted

On loopback whoever is on this machine may look, and the request must name this machine (a page of another site that points its own
name here gets nothing). At another address a token is wanted, in the address or as a bearer token.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from kvx.errors import BadArgument, KvxError, Unsupported
from kvx.view.metrics import Metrics
from kvx.view.recording import RecordingReader
from kvx.view.watcher import Watcher

PORT = 8484
GATHER_S = 0.25  # records within this time are one event
MOST_PENDING = 10_000  # lines that a browser is behind; then it is let go, and begins anew
_BEAT_S = 5.0  # without anything to say a word is sent all the same: so one who left is noticed


class RecordSource(Protocol):
    """Where records come from."""

    def lines(self, stop: threading.Event) -> Iterator[list[str]]:
        """Batches of them, empty ones too, until all is told."""

    def metrics(self) -> Metrics: ...


class WatcherSource:
    """A cache of this process."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._metrics = watcher, Metrics()
        watcher.read_by(self._metrics.read)

    def lines(self, stop: threading.Event) -> Iterator[list[str]]:
        pending: queue.SimpleQueue[str] = queue.SimpleQueue()
        write = pending.put
        self._watcher.join(write)
        try:
            while pending.qsize() < MOST_PENDING:
                batch = [pending.get() for _ in range(pending.qsize())]
                yield batch
                if stop.is_set() and pending.empty():
                    return
                stop.wait(GATHER_S)
        finally:
            self._watcher.leave(write)

    def metrics(self) -> Metrics:
        return self._metrics


class FileSource:
    """A recording, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._metrics, self._lock = path, Metrics(), threading.Lock()
        self._reader = RecordingReader(path)
        if not self._read():
            raise BadArgument(f"{path} is no recording: it is empty, or its first line is not written yet.")

    def _read(self) -> int:
        with self._lock:
            n = 0
            for n, record in enumerate(self._reader.records(), 1):  # noqa: B007
                self._metrics.read(record)
            return n

    def lines(self, stop: threading.Event) -> Iterator[list[str]]:
        with RecordingReader(self._path) as reader:
            while not (stop.is_set() or reader.is_over):
                yield list(reader.lines())
                if not reader.is_over:
                    stop.wait(GATHER_S)

    def metrics(self) -> Metrics:
        self._read()
        return self._metrics


class NoSource:
    """Nothing to see yet: the page takes a file that is dropped on it."""

    def lines(self, stop: threading.Event) -> Iterator[list[str]]:
        yield from ()

    def metrics(self) -> Metrics:
        return Metrics()


class PageServer:
    """Serves from the moment it is made until close()."""

    def __init__(self, source: RecordSource, page: str, *, host: str = "127.0.0.1", port: int = PORT) -> None:
        if type(port) is not int or not 0 <= port < 65536:
            raise BadArgument(f"kvx view: port is {port!r}; it must be 0 (any) to 65535.")
        self._source, self._page, self._stop = source, page.encode(), threading.Event()
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(16)
        try:
            self._http = _Http((host, port), self)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BadArgument(
                    f"kvx view: port {port} of {host} is taken. Give another with --port, or --port 0 for any that is free."
                ) from None
            raise BadArgument(f"kvx view: cannot listen at {host}, port {port}: {error.strerror or error}.") from None
        self.port = int(self._http.server_address[1])
        at = f"[{host}]" if ":" in host else host
        self.url = f"http://{at}:{self.port}/" + (f"?token={self.token}" if self.token else "")
        self._num_streams, self._streams = 0, threading.Condition()
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="kvx view server", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Browsers get what is left, for so long; then it is over."""
        if self._stop.is_set():
            return
        self._stop.set()
        with self._streams:
            self._streams.wait_for(lambda: self._num_streams == 0, timeout_s)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    # --- answers ------------------------------------------------------------------------------------------------------------

    def answer(self, request: _Request) -> None:
        url = urlsplit(request.path)
        if not self._may(request, url.query):
            return request.say(403, "This address is of `kvx view`, which wants the token that it printed: /?token=...\n")
        if url.path == "/":
            request.say(200, self._page, "text/html; charset=utf-8")
        elif url.path == "/events":
            self._stream(request)
        elif url.path == "/metrics":
            self._say_metrics(request)
        elif url.path == "/favicon.ico":
            request.say(204, b"")
        else:
            request.say(404, "There is nothing here. `kvx view` has /, /events and /metrics.\n")

    def _may(self, request: _Request, query: str) -> bool:
        if not self.token:
            return is_loopback(urlsplit(f"//{request.headers.get('Host', '')}").hostname or "")
        given = parse_qs(query).get("token", [""])[0] or request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _say_metrics(self, request: _Request) -> None:
        try:
            kind, text = self._source.metrics().text(request.headers.get("Accept", ""))
        except Unsupported as error:
            return request.say(501, f"{error}\n")
        except KvxError as error:
            return request.say(500, f"{error}\n")
        request.say(200, text, kind)

    def _stream(self, request: _Request) -> None:
        with self._streams:
            self._num_streams += 1
        try:
            request.begin(200, "text/event-stream")
            last = time.monotonic()
            for batch in self._source.lines(self._stop):
                if batch:
                    request.wfile.write(b"data: [" + ",".join(text.rstrip("\n") for text in batch).encode() + b"]\n\n")
                elif time.monotonic() - last > _BEAT_S:
                    request.wfile.write(b": still here\n\n")
                else:
                    continue
                request.wfile.flush()
                last = time.monotonic()
        except KvxError as error:  # a recording that went wrong further on
            request.wfile.write(f"event: wrong\ndata: {str(error).splitlines()[0]}\n\n".encode())
        finally:
            with self._streams:
                self._num_streams -= 1
                self._streams.notify_all()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], owner: PageServer) -> None:
        self.owner = owner
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that left is no error; what else goes wrong with one request ends that one."""


class _Request(BaseHTTPRequestHandler):
    server: _Http
    server_version, sys_version = "kvx", ""
    timeout = 30

    def do_GET(self) -> None:
        self.server.owner.answer(self)

    def begin(self, code: int, kind: str, length: int | None = None) -> None:
        self.send_response(code)
        fields = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Content-Security-Policy": "frame-ancestors 'none'",
        }
        for name, value in fields.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def say(self, code: int, text: bytes | str, kind: str = "text/plain; charset=utf-8") -> None:
        data = text.encode() if isinstance(text, str) else text
        self.begin(code, kind, len(data))
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Who asked for what is nobody's business."""


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
