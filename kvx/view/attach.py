"""attach(): a cache's page, served while the cache works."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from kvx.cache.paged import PagedCache
from kvx.page import page_text
from kvx.view.recording import Recording
from kvx.view.server import PORT, PageServer, WatcherSource
from kvx.view.watcher import INTERVAL_S, Watcher


class BrowserView:
    """A cache that is looked at. Open `url` in a browser; use it in a `with`, or close() it. attach() makes it."""

    def __init__(self, watcher: Watcher, *, host: str, port: int) -> None:
        self._watcher = watcher
        self._recordings: list[Recording] = []
        self._server = PageServer(WatcherSource(watcher), page_text({"live": True}), host=host, port=port)
        self.url, self.token = self._server.url, self._server.token

    def record(self, path: str | Path) -> Recording:
        """Write what browsers are told to a file, too, from now on."""
        self._recordings.append(Recording(self._watcher, path, closes_watcher=False))
        return self._recordings[-1]

    def look(self) -> None:
        """Now: what happened so far is told."""
        self._watcher.look()

    @property
    def error(self) -> str:
        return self._watcher.error

    def close(self) -> None:
        """Tell what is left, and that it is the end: pages that are open stay as they are."""
        self._watcher.close()
        for recording in self._recordings:
            recording.close()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"BrowserView({self.url})"


def attach(
    cache: PagedCache,
    *,
    host: str = "127.0.0.1",  # at another address than this machine's own a token is made, and wanted: it stands in `url`
    port: int = PORT,  # 0: any that is free
    title: str = "",
    interval_s: float = INTERVAL_S,
) -> BrowserView:
    """Serve a page that shows a cache while it works: its blocks, sequences, prefixes and tiers, and for every request why its
    prefix ended where it did; /metrics is for Prometheus."""
    watcher = Watcher(cache, title=title, interval_s=interval_s)
    try:
        return BrowserView(watcher, host=host, port=port)
    except BaseException:
        watcher.close()
        raise
