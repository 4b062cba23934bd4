"""Tiers for the chunks of an engine's host memory, group by group. Nothing here raises once it is open: what fails is logged
and is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvx.connector.tier_stack import TierStack
from kvx.errors import KvxError, TierError
from kvx.tiers import Block, BlockKind, Tier, TierOption
from kvx.tiers.block import Take

_AGAIN_S = 30.0  # a directory that cannot be opened is tried again, and a failure that goes on is logged again


class ChunkGroup(NamedTuple):
    kind: BlockKind
    spans: tuple[tuple[int, int], ...]  # (first byte, how many) of a chunk's row that are the group's: the rest is padding

    @property
    def is_run(self) -> bool:
        """Without padding between its bytes."""
        return len(self.spans) == 1

    def run(self, row: np.ndarray) -> np.ndarray:
        """The group's bytes where they lie."""
        ((start, size),) = self.spans
        return row[start : start + size]

    def read(self, row: np.ndarray, into: np.ndarray) -> None:
        for part, (start, size) in zip(self._parts(into), self.spans, strict=True):
            np.copyto(part, row[start : start + size])

    def write(self, rows: np.ndarray, which: Sequence[int], start: int, data: np.ndarray) -> None:
        """Bytes of the group into these rows, a row of `data` each, from the group's byte `start` on."""
        # Rows that follow each other are one run of memory each way, which is copied faster.
        is_run = list(which) == list(range(which[0], which[0] + len(which)))
        index = slice(which[0], which[0] + len(which)) if is_run else list(which)
        at = -start  # of a span's first byte, in `data`
        for first, size in self.spans:
            begin, end = max(at, 0), min(at + size, data.shape[1])
            if begin < end:
                rows[index, first + begin - at : first + end - at] = data[:, begin:end]
            at += size

    def _parts(self, data: np.ndarray) -> list[np.ndarray]:
        return np.split(data, np.cumsum([size for _, size in self.spans])[:-1])


class ChunkStore:
    """Thread-safe."""

    def __init__(
        self,
        groups: Mapping[int, ChunkGroup],
        tiers: Sequence[TierOption],
        *,
        logger: logging.Logger,
        open_tier: Callable[[TierOption, BlockKind], Tier] | None = None,  # default: TierOption.open
    ) -> None:
        self.groups, self._logger, self._open_tier = dict(groups), logger, open_tier or _open_direct
        whole = sum(group.kind.num_bytes for group in groups.values())
        self._options = {n: [tier.share(group.kind.num_bytes, whole) for tier in tiers] for n, group in groups.items()}
        self._stacks: dict[int, TierStack] = {}
        self._opening, self._saying = threading.Lock(), threading.Lock()
        self._refused_s: dict[int, float] = {}  # group -> when its tiers could not be opened
        self._failed_s, self._num_silent = -_AGAIN_S, 0

    def open(self, timeout_s: float) -> None:
        """What can never work raises. A directory that cannot be used now, or does not answer, may be usable later."""
        wrong: list[KvxError] = []

        def run() -> None:
            try:
                for group in self.groups:
                    self._stack(group)
            except KvxError as error:
                wrong.append(error)

        thread = threading.Thread(target=run, name="kvx-open", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if wrong:
            raise wrong[0]
        if thread.is_alive():
            self._logger.warning("KVX: the tiers were not open after %g s. Until they are, nothing is found or kept.", timeout_s)

    def has(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        """Which are in some tier."""
        try:
            stack = self._stack(group)
            return [False] * len(keys) if stack is None else stack.has_any(keys)
        except Exception as error:  # an engine goes on without its store, whatever happens there
            self._fail("looking for blocks", error)
            return [False] * len(keys)

    def put(self, group: int, keys: Sequence[bytes], stage: Callable[[Sequence[int]], Sequence[Block]]) -> list[bytes]:
        """Which are kept now. `stage` makes blocks of those that are not yet, by their places in `keys`; none: it is too late."""
        try:
            stack = self._stack(group)
            if stack is None:
                return []
            new = [n for n, is_there in enumerate(stack.has(keys)) if not is_there]
            if not new:
                return list(keys)
            blocks = stage(new)
            if not blocks:
                return []
            failed = [error for tier in stack.tiers if (error := _put(tier, [keys[n] for n in new], blocks)) is not None]
            if failed:  # of a tier that is full; another may have room
                self._fail("storing blocks", failed[0])
                return [key for key, is_there in zip(keys, stack.has_any(keys), strict=True) if is_there]
            return list(keys)
        except Exception as error:
            self._fail("storing blocks", error)
            return []

    def read(self, group: int, keys: Sequence[bytes], take: Take) -> list[bool]:
        """Which were found, and are as they were written. `take` is given their bytes, and of others any."""
        try:
            stack = self._stack(group)
            return [False] * len(keys) if stack is None else stack.read(keys, take)
        except Exception as error:
            self._fail("loading blocks", error)
            return [False] * len(keys)

    def close(self) -> None:
        for stack in self._stacks.values():
            for tier in stack.tiers:
                tier.close()

    def _stack(self, group: int) -> TierStack | None:
        """None while its tiers cannot be opened."""
        if group in self._stacks:
            return self._stacks[group]
        with self._opening:
            if group not in self._stacks and time.monotonic() - self._refused_s.get(group, -_AGAIN_S) >= _AGAIN_S:
                kind, opened = self.groups[group].kind, []
                try:
                    for option in self._options[group]:
                        opened.append(self._open_tier(option, kind))
                        opened[-1].listen(self._hear)
                    self._stacks[group] = TierStack(kind, opened)
                except (TierError, OSError) as error:
                    for tier in opened:
                        tier.close()
                    self._refused_s[group] = time.monotonic()
                    self._logger.warning(
                        "KVX: the tiers cannot be opened, so nothing is found or kept: %s They are tried again in %g s.",
                        error, _AGAIN_S,
                    )  # fmt: skip
            return self._stacks.get(group)

    def _hear(self, event: object) -> None:
        kind, detail = getattr(event, "kind", ""), getattr(event, "detail", "")
        if kind in ("refused", "failed"):
            self._fail("a tier", KvxError(detail))

    def _fail(self, what: str, error: Exception) -> None:
        """Said at most every 30 s: a disk that is full fails at every block."""
        with self._saying:
            self._num_silent += 1
            if time.monotonic() - self._failed_s < _AGAIN_S:
                return
            count, self._num_silent, self._failed_s = self._num_silent, 0, time.monotonic()
        more = f" ({count} failures since the last of these lines)" if count > 1 else ""
        self._logger.warning("KVX: %s failed, which counts as a miss: %s: %s%s", what, type(error).__name__, error, more)


def _open_direct(option: TierOption, kind: BlockKind) -> Tier:
    """Past the system's cache: an engine that has chunks in host memory is one itself. A job's small chunks go into one file."""
    return option.open(kind, direct=True, packed=True)


def _put(tier: Tier, keys: Sequence[bytes], blocks: Sequence[Block]) -> TierError | None:
    try:
        tier.put_now(keys, blocks)
    except TierError as error:
        return error
    return None
