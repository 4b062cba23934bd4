"""What the long trials share: a child that is watched, what a process has open and in memory, Ctrl-C, and the table at the end."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

HUNG_S = 60.0  # a process that says nothing for so long
SAID_S = 60.0  # between two lines of progress
LONGER_S = 120.0  # a trial goes on for, at most, where something that it is to show has not happened yet


def files_and_memory(pid: int) -> tuple[int, int]:
    """Descriptors that a process has open, and the bytes of it that are in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Flat:
    """Descriptors and memory of one process, seen when it is at rest: the most while it warms up, then the most after."""

    more_files: int  # that it may have after, over the most while it warmed up
    more_bytes: int
    warm: tuple[int, int] = (0, 0)
    most: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)

    def see(self, files: int, memory: int, *, is_warm: bool) -> None:
        self.last = files, memory
        if is_warm and self.warm[0]:
            self.most = max(self.most[0], files), max(self.most[1], memory)
        else:
            self.warm = max(self.warm[0], files), max(self.warm[1], memory)

    def wrong(self) -> list[str]:
        out = []
        if self.last[0] > self.warm[0] + self.more_files:
            out.append(f"{self.last[0]} descriptors are open at the end; {self.warm[0]} when it was warm")
        if self.last[1] > self.warm[1] + self.more_bytes:
            out.append(f"{self.last[1] >> 20} MB are in memory at the end; {self.warm[1] >> 20} when it was warm")
        return out

    def __str__(self) -> str:
        return f"{self.last[0]} descriptors, {self.last[1] >> 20} MB"

    def rows(self) -> dict[str, object]:
        kinds = ("warm", self.warm), ("most after", self.most), ("at the end", self.last)
        return {
            "descriptors": ", ".join(f"{n[0]} {what}" for what, n in kinds) + f" (may grow by {self.more_files})",
            "memory": ", ".join(f"{n[1] >> 20} MB {what}" for what, n in kinds) + f" (may grow by {self.more_bytes >> 20})",
        }


_alive: set[subprocess.Popen[str]] = set()  # none outlives this process, also where a second Ctrl-C breaks off the end


@atexit.register
def _kill_all() -> None:
    for process in _alive:
        process.kill()


class Child:
    """A Python process that says lines, and when it did last. Terminals' Ctrl-C does not reach it: its parent ends it."""

    def __init__(self, module: str, *args: str, on_line: Callable[[str], None] = lambda line: None) -> None:
        # faulthandler: SIGABRT makes a hung one say where.
        command = [sys.executable, "-X", "faulthandler", "-m", module, *args]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
        _alive.add(self.process)
        self.pid, self.has_begun = self.process.pid, False
        self.begun_s = self.heard_s = time.monotonic() + 120  # it has yet to load
        self._on_line = on_line
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard_s = time.monotonic()
            if not self.has_begun:
                self.has_begun, self.begun_s = True, self.heard_s
            self._on_line(line.rstrip("\n"))

    @property
    def is_hung(self) -> bool:
        return time.monotonic() - self.heard_s > HUNG_S

    @property
    def status(self) -> int | None:
        """None while it lives."""
        return self.process.poll()

    def wait_begun(self) -> bool:
        while not self.has_begun and self.status is None and not self.is_hung:
            time.sleep(0.05)
        return self.has_begun

    def send(self, number: int) -> None:
        if self.status is None:
            self.process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> int:
        """Its status, when all it said was read."""
        self.send(number)
        try:
            self.process.wait(HUNG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()
        self._thread.join()
        _alive.discard(self.process)
        return self.process.returncode


def take_ctrl_c() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt, also in a process that was started in the background, which ignores SIGINT."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def arguments(doc: str | None, seconds: float = 0.0) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=seconds, help="how long")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"), help="of what is chosen at random")
    return parser


def finish(title: str, rows: Mapping[str, object], wrong: Sequence[str], seed: int) -> None:
    """Say how it went, in one piece, and end."""
    width = max(map(len, rows))
    lines = ["", f"{title}, seed {seed}", *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
    lines += [f"  WRONG: {what}" for what in wrong] or ["nothing was wrong, nothing hung, nothing was kept"]
    if wrong:
        lines.append(f"again: --seed {seed}; what happens when differs from run to run")
    print("\n".join(lines), flush=True)
    sys.exit(bool(wrong))
