"""Jobs of an engine's scheduler on threads: chunks of its host memory to a store and back. Handing over and asking never wait.

A store that hangs is found out after `timeout_s`: what it has and what waits behind it ends as failed, and it is left alone until
it answers. By then the engine's memory is another request's, and a call of the store may still be running. So what is loaded goes
through memory of the tier's, a piece at a time. What is stored is read where it lies, and a tier asks before it keeps it whether it
was still the job's until then (`Block.is_held`); where padding is between, it goes through memory of the thread's.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvx.connector.chunk_job import ChunkJob, JobDone
from kvx.connector.chunk_lookups import ChunkLookups
from kvx.connector.chunk_store import ChunkStore
from kvx.errors import BadArgument
from kvx.tiers import Block
from kvx.tiers.staging import Staging

_PIECE_BYTES = 8 << 20  # that a thread moves at a time
_LEAST_BYTES = 4 << 20  # less than this is not shared out to threads: a file and a job cost more than they save


class _Piece(NamedTuple):
    """Chunks of one group."""

    job: ChunkJob
    group: int
    keys: Sequence[bytes]
    rows: Sequence[int]


class ChunkJobs:
    """The group of a chunk is in its key's last four bytes, as vLLM writes it."""

    def __init__(
        self,
        rows: np.ndarray,  # uint8 [chunks, bytes]: the engine's
        store: ChunkStore,
        *,
        timeout_s: float = 5.0,
        threads: int = 8,
        logger: logging.Logger,
    ) -> None:
        if type(timeout_s) not in (int, float) or not 0 < timeout_s < 1e6:
            raise BadArgument(f"timeout_s is {timeout_s!r}; it must be the seconds that a call of the store may take, like 5.")
        if type(threads) is not int or not 2 <= threads <= 64:
            raise BadArgument(f"threads is {threads!r}; there are 2 to 64, the first of which only reads.")
        self._rows: np.ndarray | None = rows
        self._store, self._timeout_s, self._logger = store, timeout_s, logger
        self._staging = Staging()
        self._change = threading.Condition()
        self._looks: deque[bytes] = deque()
        self._loads: deque[_Piece] = deque()
        self._stores: deque[_Piece] = deque()
        self._busy: dict[int, tuple[float, _Piece | None]] = {}  # thread -> since when, and with what of a job
        self._running: set[ChunkJob] = set()
        self._done: deque[JobDone] = deque()
        self._is_closed = self._is_hanging = False
        self.lookups = ChunkLookups(self._look, timeout_s=timeout_s)
        self._threads = [
            threading.Thread(target=self._work, args=(n,), name=f"kvx-chunks-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- the scheduler's side ----------------------------------------------------------------------------------------------

    def submit(self, job_id: int, keys: Collection[bytes], rows: Iterable[int], *, is_load: bool) -> None:
        job = ChunkJob(job_id, is_load, list(keys))
        by_group: dict[int, list[tuple[bytes, int]]] = {}
        for key, row in zip(keys, rows, strict=True):
            by_group.setdefault(_group(key), []).append((key, int(row)))
        pieces = []
        for group in by_group.keys() & self._store.groups.keys():
            moved = by_group[group]
            size = self._store.groups[group].kind.num_bytes
            share = -(-len(moved) // len(self._threads))  # so that every thread has some of it
            most = max(1, min(_PIECE_BYTES // size, max(share, _LEAST_BYTES // size)))
            for start in range(0, len(moved), most):
                few = moved[start : start + most]
                pieces.append(_Piece(job, group, [key for key, _ in few], [row for _, row in few]))
        job.pieces = len(pieces)
        with self._change:
            if not pieces or self._is_hanging or self._is_closed:
                self._done.append(job.end())
                return
            self._running.add(job)
            (self._loads if is_load else self._stores).extend(pieces)
            self._change.notify_all()

    def finished(self) -> list[JobDone]:
        """Jobs that ended since the last call, in whatever way."""
        self._watch()
        done = [self._done.popleft() for _ in range(len(self._done))]
        for job in done:
            if job.is_load:  # or the engine would ask for it for ever
                self.lookups.miss(set(job.keys) - job.moved)
        return done

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until every job ended; a store that hangs ends them."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._watch()
            with self._change:
                if not self._running or (end_s is not None and time.monotonic() >= end_s):
                    return
                self._change.wait(0.05)

    def close(self) -> None:
        """What was handed over is moved, for at most `timeout_s`. Then the engine's memory is not touched any more."""
        self.drain(self._timeout_s)
        with self._change:
            self._is_closed = True
            left = list(self._running)
            self._forget_waiting()
            self._running.clear()
            self._change.notify_all()
        self._done.extend(job.end() for job in left)
        self._rows = None
        for thread in self._threads:
            thread.join(0.0 if self._is_hanging else self._timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            self._store.close()

    def _look(self, key: bytes) -> bool:
        """False: it is not asked for, and a miss."""
        if self._is_hanging or self._is_closed or _group(key) not in self._store.groups:
            return False
        with self._change:
            self._looks.append(key)
            self._change.notify_all()
        return True

    def _watch(self) -> None:
        """End what hangs, and what waits behind it."""
        now = time.monotonic()
        with self._change:
            late = [piece for since, piece in self._busy.values() if now - since > self._timeout_s]
            was_hanging, self._is_hanging = self._is_hanging, bool(late)
            over: set[ChunkJob] = set()
            if late:
                over = {piece.job for piece in (*late, *self._loads, *self._stores) if piece is not None} & self._running
                self._forget_waiting()
                self._running -= over
        self._done.extend(job.end() for job in over)
        if self._is_hanging and not was_hanging:
            self._logger.warning(
                "KVX: the store did not answer in %g s. It is left alone until it does; until then nothing is found or kept.",
                self._timeout_s,
            )
        elif was_hanging and not self._is_hanging:
            self._logger.warning("KVX: the store answers again.")

    def _forget_waiting(self) -> None:
        for queue in (self._looks, self._loads, self._stores):
            queue.clear()

    # --- the threads' side -------------------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        # The first takes no stores: who waits for an answer does not wait behind a slow disk.
        queues = [self._loads] if number == 0 else [self._loads, self._stores]
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_closed or self._looks or any(queues))
                if self._is_closed:
                    return
                keys = list(self._looks)
                self._looks.clear()
                piece = None if keys else next(queue for queue in queues if queue).popleft()
                self._busy[number] = time.monotonic(), piece
            if piece is None:
                self._answer(keys)
            else:
                self._run(piece)
            with self._change:
                del self._busy[number]
                self._change.notify_all()

    def _answer(self, keys: Sequence[bytes]) -> None:
        for group in {_group(key) for key in keys}:
            names = [key for key in keys if _group(key) == group]
            self.lookups.answers.extend(zip(names, self._store.has(group, names), strict=True))

    def _run(self, piece: _Piece) -> None:
        job, begin, kind = piece.job, time.monotonic(), self._store.groups[piece.group].kind
        moved: Sequence[bytes] = []
        try:
            if not job.is_over:
                moved = (self._load if job.is_load else self._save)(piece)
        except Exception:  # no failure of the store's, which it has caught: a fault of ours. The job must end, and the thread go on
            self._logger.exception(
                "KVX: a thread of the store failed; its blocks were not %s.", "loaded" if job.is_load else "kept"
            )
        with self._change:
            job.moved.update(moved)
            job.num_bytes += kind.num_bytes * len(moved)
            job.seconds += time.monotonic() - begin
            job.pieces -= 1
            if not job.pieces and job in self._running:
                self._running.discard(job)
                self._done.append(job.end())

    def _save(self, piece: _Piece) -> Sequence[bytes]:
        group, job = self._store.groups[piece.group], piece.job

        def stage(new: Sequence[int]) -> Sequence[Block]:
            blocks: list[Block] = []

            def take() -> None:
                assert self._rows is not None
                if group.is_run:
                    for n in new:
                        blocks.append(Block(group.kind, (torch.from_numpy(group.run(self._rows[piece.rows[n]])),), job.is_held))
                    return
                stride = -(-group.kind.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # each on a page, to go past the cache
                for n, room in zip(new, self._staging.room(len(new) * stride).reshape(-1, stride), strict=True):
                    group.read(self._rows[piece.rows[n]], room[: group.kind.num_bytes])
                    blocks.append(Block(group.kind, (torch.from_numpy(room[: group.kind.num_bytes]),)))

            return blocks if job.touch(take) else []

        return self._store.put(piece.group, piece.keys, stage)

    def _load(self, piece: _Piece) -> Sequence[bytes]:
        """By way of memory of the tier's. What is read of a job that has ended goes nowhere."""
        group, job = self._store.groups[piece.group], piece.job

        def take(which: Sequence[int], start: int, data: np.ndarray) -> None:
            def copy() -> None:
                assert self._rows is not None
                group.write(self._rows, [piece.rows[n] for n in which], start, data)

            job.touch(copy)

        found = self._store.read(piece.group, piece.keys, take)
        return [key for key, is_there in zip(piece.keys, found, strict=True) if is_there] if job.is_held() else []


def _group(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")
