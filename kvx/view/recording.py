"""A recording: what a watcher told, as a file of JSON lines. docs/live.md has its form.

Read it as it grows, too: each line is whole when its end is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvx.cache.paged import PagedCache
from kvx.errors import BadArgument
from kvx.view.picture import Record
from kvx.view.watcher import INTERVAL_S, Watcher, header_of

MOST_LINE_BYTES = 256 << 20  # a snapshot of millions of blocks has less; a header far less than 1 MB


class Recording:
    """A watcher's lines in a file. Use it in a `with`: leaving writes what is left. record() makes it."""

    def __init__(self, watcher: Watcher, path: str | Path, *, closes_watcher: bool) -> None:
        self.path, self._watcher, self._closes = Path(path), watcher, closes_watcher
        try:
            self._file = self.path.open("w", encoding="utf-8", buffering=1 << 16)
        except OSError as error:
            why = error.strerror or error
            raise BadArgument(f"record(): {self.path} cannot be written: {why}. Give another file, like run.jsonl.") from None
        watcher.join(self._write)

    def _write(self, text: str) -> None:
        """On the watcher's thread. What is written is there for who reads along, and after a kill."""
        self._file.write(text)
        self._file.flush()

    @property
    def error(self) -> str:
        """Why nothing more is written, such as a full disk; "": it is."""
        return self._watcher.error

    def close(self) -> None:
        if self._closes:
            self._watcher.close()
        else:
            self._watcher.look()
        self._watcher.leave(self._write)
        try:
            self._file.close()
        except OSError as error:  # what it could not write, it cannot flush
            self._watcher.error = self._watcher.error or str(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def record(cache: PagedCache, path: str | Path, *, title: str = "", interval_s: float = INTERVAL_S) -> Recording:
    """Write what a cache does from now on to a file of JSON lines, which `kvx view FILE` and the page replay.

    A thread looks at the cache every `interval_s`, or less often: it is busy for a hundredth of the time. Token ids are not
    written, but for those at which prompts differ.
    """
    watcher = Watcher(cache, title=title, interval_s=interval_s)
    try:
        return Recording(watcher, path, closes_watcher=True)
    except BaseException:
        watcher.close()
        raise


class RecordingReader:
    """The lines of a recording that are whole, those that come later too."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise BadArgument(f"{self.path} cannot be read: {error.strerror or error}.") from None
        self._number, self._rest = 0, b""
        self.is_over = False  # the end was read

    def lines(self) -> Iterator[str]:
        """Those since the last call, without their ends. BadArgument where one is not of a recording, the first above all."""
        for text, _ in self._whole():
            yield text

    def records(self) -> Iterator[Record]:
        """The same, read."""
        for _, found in self._whole():
            yield found

    def _whole(self) -> Iterator[tuple[str, Record]]:
        while part := self._file.readline(1 << 20):
            self._rest += part
            if not part.endswith(b"\n"):
                if len(self._rest) > (MOST_LINE_BYTES if self._number else 1 << 20):
                    raise self._wrong("it has no end")
                continue
            text, self._rest = self._rest.rstrip(b"\n"), b""
            yield text.decode("utf-8", "replace"), self._checked(text)
            self._number += 1

    def _checked(self, text: bytes) -> Record:
        try:
            found: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise self._wrong("it is no JSON") from None
        if not self._number:
            try:
                return header_of(found)
            except BadArgument as error:
                raise self._wrong(str(error)) from None
        if not isinstance(found, dict) or not isinstance(found.get("type"), str):
            raise self._wrong("it is no record with a type")
        self.is_over |= found["type"] == "end"
        return found

    def _wrong(self, why: str) -> BadArgument:
        return BadArgument(
            f"{self.path} is no recording: line {self._number + 1}: {why}. `kvx generate --record FILE` and kvx.view.record() make "
            "them."
        )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
