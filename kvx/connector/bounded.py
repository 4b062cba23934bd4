"""Calls of a store in bounded time. What fails or takes too long is logged and counts as a miss: an engine goes on without it.

A call that took too long may still be running. Until it ends nothing else is asked of the store, so that calls do not pile up
behind a disk that hangs; so what it was given must be nobody else's: memory of an engine is not handed to it, unless the engine
counts references and waits for ours (`Lease`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from kvx.errors import BadArgument

R = TypeVar("R")


class Bounded:
    def __init__(self, what: str, *, timeout_s: float, threads: int, logger: logging.Logger) -> None:
        if type(timeout_s) not in (int, float) or not 0 < timeout_s < 1e6:
            raise BadArgument(f"timeout_s is {timeout_s!r}; it must be the seconds that a call of the store may take, like 5.")
        self._what, self._timeout_s, self._logger = what, timeout_s, logger
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvx-{what}")
        self._lock = threading.Lock()
        self._late: set[Future[object]] = set()
        self._is_silent = False  # what is skipped behind a late call was said

    def run(self, jobs: Sequence[Callable[[], R]]) -> list[R | None]:
        """Each job's answer, None of one that failed or did not end in time. They run together."""
        if not jobs or self._is_waiting():
            return [None] * len(jobs)
        try:
            futures: list[Future[R]] = [self._pool.submit(job) for job in jobs]
        except RuntimeError as error:  # closed
            self._logger.warning("KVX %s: %s", self._what, error)
            return [None] * len(jobs)
        _, late = wait(futures, self._timeout_s)
        running = {f for f in late if not f.cancel()}
        if running:
            with self._lock:
                self._late |= running  # type: ignore[arg-type]  # only asked whether they are done
            self._logger.warning(
                "KVX %s: the store did not answer in %g s. It counts as a miss, and the store is left alone until it answers.",
                self._what, self._timeout_s,
            )  # fmt: skip
        return [None if f in late else self._answer(f) for f in futures]

    def _answer(self, future: Future[R]) -> R | None:
        error = future.exception()
        if error is None:
            return future.result()
        self._logger.warning("KVX %s failed, which counts as a miss: %s", self._what, error)
        return None

    def _is_waiting(self) -> bool:
        with self._lock:
            self._late = {f for f in self._late if not f.done()}
            is_silent, self._is_silent = self._is_silent, bool(self._late)
        if self._is_silent and not is_silent:
            self._logger.warning("KVX %s: skipped, the store has not answered an earlier call yet.", self._what)
        return self._is_silent

    def close(self) -> None:
        """Without waiting for what is late."""
        self._pool.shutdown(wait=not self._is_waiting(), cancel_futures=True)


class Lease:
    """What one call was lent. Given up, it is released when the call has ended, and at once where the call never began."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release, self._lock = release, threading.Lock()
        self._is_running = self._is_given_up = False

    def run(self, call: Callable[[], R]) -> R | None:
        with self._lock:
            if self._is_given_up:
                return None
            self._is_running = True
        try:
            return call()
        finally:
            with self._lock:
                self._is_running, is_late = False, self._is_given_up
            if is_late:
                self._release()

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up, is_running = True, self._is_running
        if not is_running:
            self._release()
