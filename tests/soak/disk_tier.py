"""Processes on one disk tier for as long as you say, while they are killed and stopped at any moment.

    python -m tests.soak.disk_tier --seconds 1800

Three processes put, get, look for and drop blocks in one directory, which has room for few of them. Two are killed (SIGKILL) again
and again and started anew; one lives on; each may be stopped (SIGSTOP) for a while, now and then for longer than a file may be
unfinished. A block's bytes follow from its name, so that each that comes out is judged alone. Every few seconds all rest: then the
directory has no more blocks than its capacity, each of them right, and no file that a killed process left long ago.
"""

from __future__ import annotations

import faulthandler
import os
import random
import select
import signal
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from pathlib import Path
from typing import Any

from kvx.errors import TierError
from kvx.tiers import BlockKind, DiskTier
from kvx.tiers.block_file import file_bytes
from tests.soak.trial import HUNG_S, LONGER_S, SAID_S, Flat, arguments, files_and_memory, finish, take_ctrl_c
from tests.tiers.blocks import block, key

KIND = BlockKind({"model": "soak", "layout": "block | layer kv token head dim", "head_start": 0}, (60_000, 17))
CAPACITY, NAMES = 40, 160  # blocks there is room for; that are asked for
REFRESH_S, GRACE_S = 0.2, 4.0
STEADY, NUM_WORKERS, MOST_THREADS = 0, 3, 4
WAIT_S = 40.0  # for one call of a tier; a worker is stopped for 6 s at most
# What a call may say to a process that was stopped long: others took its unfinished file for a killed one's.
LATE = "No such file"
ENDING = (signal.SIGINT, signal.SIGTERM)
SHOWN = ("hits", "killed", "stopped", "evicted", "rests")  # without which a trial shows nothing


def open_tier(folder: Path, **options: Any) -> DiskTier:
    return DiskTier(folder, KIND, CAPACITY * file_bytes(KIND), refresh_s=REFRESH_S, grace_s=GRACE_S, **options)


def is_right(k: bytes, got: Any) -> bool:
    return all(bytes(a.numpy()) == bytes(b.numpy()) for a, b in zip(got.buffers, block(k, KIND).buffers, strict=True))


class Worker:
    """In a process of its own: a line for each few calls, and an answer when it is told to rest."""

    def __init__(self, folder: Path, seed: int, commands: int, said: int) -> None:
        self.rng, self.commands, self._said = random.Random(seed), commands, said
        self.counts: Counter[str] = Counter()
        self.folder = folder
        self.tier = open_tier(folder, threads=self.rng.randint(1, MOST_THREADS))

    def say(self, what: str) -> None:
        os.write(self._said, f"{what}\n".encode())  # under 4096 bytes: as one, or not at all

    def work(self) -> None:
        self.say("begun")
        while True:
            for _ in range(4):
                self._once()
            self.say(" ".join(f"{name}={n}" for name, n in self.counts.items()))
            self.counts.clear()
            time.sleep(self.rng.random() * 0.02)  # others need the processor too
            if select.select([self.commands], [], [], 0)[0]:
                if not os.read(self.commands, 1):
                    return  # nobody is there to tell it anything
                self.say(self._rest())
                os.read(self.commands, 1)  # until it is told to go on

    def _keys(self, most: int) -> list[bytes]:
        return [key(self.rng.randrange(NAMES)) for _ in range(self.rng.randint(1, most))]

    def _once(self) -> None:
        """A few calls that are in flight together."""
        rng, tier, flights = self.rng, self.tier, []
        for _ in range(rng.randint(1, 4)):
            way, keys = rng.random(), self._keys(5)
            call: Future[Any]
            if way < 0.4:
                call = tier.put(keys, [block(k, KIND) for k in keys])
                flights.append(("put", keys, call))
            elif way < 0.85:
                into = [KIND.empty() for _ in keys] if rng.random() < 0.5 else None
                flights.append(("get", keys, tier.get(keys, into)))
            elif way < 0.95:
                flights.append(("has", keys, tier.has(keys)))
            else:
                flights.append(("drop", keys[:1], tier.drop(keys[:1])))
        for name, keys, call in flights:
            self._judge(name, keys, call)

    def _judge(self, name: str, keys: list[bytes], call: Future[Any]) -> None:
        try:
            answers = call.result(WAIT_S)
        except TierError as error:
            self._fail("late" if LATE in str(error) else f"failed {error}")
            return
        except NotDone:
            self._fail(f"hung {name}() was not done within {WAIT_S:.0f} s")
            return
        self.counts[name] += len(keys)
        if name == "get":
            for k, got in zip(keys, answers, strict=True):
                if got is not None and not is_right(k, got):
                    self._fail(f"wrong {k.hex()}")
                self.counts["hits"] += got is not None

    def _fail(self, what: str) -> None:
        self.say(f"! {what}")

    def _rest(self) -> str:
        """Alone for a moment: what others left is seen, counted and cleared away. Then all that is there is read."""
        time.sleep(REFRESH_S * 1.5)
        began_s = time.time()
        self._judge("put", [k := os.urandom(16)], self.tier.put([k], [block(k, KIND)]))
        keys = [bytes.fromhex(p.stem) for p in self.folder.glob("??/*.kvx")]
        for start in range(0, len(keys), 8):
            self._judge("get", keys[start : start + 8], self.tier.get(keys[start : start + 8]))
        stats = self.tier.stats
        files, memory = files_and_memory(os.getpid())
        return f"rested {began_s} {stats.refused} {stats.errors} {stats.evicted} {files} {memory}"


class Slot:
    """A worker's process, from the outside."""

    def __init__(self, folder: Path, seed: int, others: list[Slot]) -> None:
        commands, self.commands = os.pipe()
        self._said, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to all; the parent ends its children
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
                faulthandler.enable()
                for fd in (self.commands, self._said, *(fd for o in others for fd in (o.commands, o._said))):
                    os.close(fd)
                Worker(folder, seed, commands, said).work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(commands)
        os.close(said)
        os.set_blocking(self._said, False)
        self.heard_s, self.stopped_until, self.ends_s = time.monotonic(), 0.0, float("inf")
        self._text, self._has_ended = b"", False

    def lines(self) -> list[str]:
        try:
            data = os.read(self._said, 1 << 16)
        except BlockingIOError:
            return []
        if data:
            self.heard_s = time.monotonic()
        *whole, self._text = (self._text + data).split(b"\n")
        return [line.decode() for line in whole]

    def status(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self._has_ended = bool(pid)
        return os.waitstatus_to_exitcode(status) if pid else None

    def stop(self, seconds: float) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped_until = time.monotonic() + seconds

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.stopped_until, self.heard_s = 0.0, time.monotonic()

    def close(self) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.commands)
        os.close(self._said)


class Trial:
    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self.folder, self.seconds, self.rng = folder, seconds, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.flat = Flat(more_files=0, more_bytes=24 << 20)
        self.most_blocks = self.most_unfinished = 0
        self.is_stopped = False
        self.slots: dict[int, Slot] = {}

    def run(self) -> None:
        self.begin = said_s = time.monotonic()
        try:
            for n in range(NUM_WORKERS):
                self._start(n)
            round_s = time.monotonic() + self.rng.uniform(2, 4)
            while self._seconds_left() > 0 and not self.wrong:
                time.sleep(self.rng.uniform(0, 0.02))
                self._disturb()
                self._listen()
                if time.monotonic() > round_s:
                    self._rest()
                    round_s = time.monotonic() + self.rng.uniform(2, 8)
                if time.monotonic() - said_s > SAID_S:
                    said_s = time.monotonic()
                    print(f"disk tier, {(said_s - self.begin) / 60:.1f} min: {dict(self.counts)}; {self.flat}", flush=True)
            if not self.wrong:
                self._rest()
        except KeyboardInterrupt:
            self.is_stopped = True
            print("disk tier: stopped", flush=True)
        finally:
            for slot in self.slots.values():
                slot.close()
        if not self.wrong:
            self._end()

    def _seconds_left(self) -> float:
        left = self.begin + self.seconds - time.monotonic()
        return left if all(self.counts[what] for what in SHOWN) else left + LONGER_S

    def _start(self, n: int) -> None:
        others = [s for i, s in self.slots.items() if i != n]
        # Ctrl-C waits: what Python runs around a fork loses a KeyboardInterrupt, and the lock of logging with it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self.slots[n] = Slot(self.folder, self.rng.randrange(1 << 30), others)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if n != STEADY:
            self.slots[n].ends_s = time.monotonic() + self.rng.choice((0.02, 0.3, 3)) * self.rng.random()

    def _kill(self, n: int) -> None:
        for line in self.slots[n].lines():
            self._heard(line)
        self.slots.pop(n).close()
        self.counts["killed"] += 1

    def _disturb(self) -> None:
        now = time.monotonic()
        for n, slot in list(self.slots.items()):
            if n != STEADY and now > slot.ends_s:
                self._kill(n)
                self._start(n)
            elif slot.stopped_until:
                if now > slot.stopped_until:
                    slot.go_on()
            elif self.rng.random() < 0.004:
                seconds = self.rng.choice((0.05, 1.0, 1.0, GRACE_S + 2)) * self.rng.random()
                slot.stop(seconds)
                self.counts["stopped"] += 1
                self.counts["stopped long"] += seconds > GRACE_S

    def _listen(self) -> str:
        """The line of one that rests, where there is one."""
        rested = ""
        for n, slot in self.slots.items():
            for line in slot.lines():
                rested = self._heard(line) or rested
            if (status := slot.status()) is not None:
                self.wrong.append(f"worker {n} ended by itself with status {status}")
            elif not slot.stopped_until and time.monotonic() - slot.heard_s > HUNG_S:
                os.kill(slot.pid, signal.SIGABRT)  # it says where
                self.wrong.append(f"worker {n} said nothing for {HUNG_S:.0f} s")
        return rested

    def _heard(self, line: str) -> str:
        if line.startswith("! late"):
            self.counts["late"] += 1
        elif line.startswith("!"):
            self.wrong.append(line[2:])
        elif line.startswith("rested"):
            return line
        elif line != "begun":
            for name, n in (word.split("=") for word in line.split()):
                self.counts[name] += int(n)
        return ""

    def _rest(self) -> None:
        """All but one are killed; that one is alone for a moment."""
        for n in [n for n in self.slots if n != STEADY]:
            self._kill(n)
        slot, line = self.slots[STEADY], ""
        slot.go_on()
        os.write(slot.commands, b"r")
        while not line and not self.wrong:
            time.sleep(0.01)
            line = self._listen()
        if self.wrong:
            return
        began_s = float(line.split()[1])
        refused, errors, evicted, files, memory = map(int, line.split()[2:])
        self.counts["rests"] += 1
        self.counts["evicted"] = evicted
        if refused or errors > self.counts["late"]:
            self.wrong.append(f"the tier refused {refused} blocks and {errors} calls failed; nothing damages any")
        self.flat.see(files, memory, is_warm=time.monotonic() - self.begin > min(60, self.seconds / 3))
        self._look(began_s - GRACE_S)
        os.write(slot.commands, b"g")
        for n in range(NUM_WORKERS):
            if n != STEADY:
                self._start(n)

    def _look(self, oldest_s: float) -> None:
        """What is in the directory when nobody writes. Unfinished files from before then are gone."""
        blocks = unfinished = 0
        for path in self.folder.rglob("*"):
            if path.is_dir() or path.name == "manifest.json":
                continue
            if path.suffix == ".kvx":
                blocks += 1
            elif path.suffix == ".partial":
                unfinished += 1
                if (age_s := oldest_s - path.stat().st_mtime) > 0:
                    self.wrong.append(f"{path.name} should have gone {age_s:.1f} s ago; the grace is {GRACE_S} s")
            else:
                self.wrong.append(f"{path} is no file of a tier")
        self.most_blocks, self.most_unfinished = max(self.most_blocks, blocks), max(self.most_unfinished, unfinished)
        if blocks > CAPACITY:
            self.wrong.append(f"{blocks} blocks are there, with all at rest; the capacity is {CAPACITY}")

    def _end(self) -> None:
        """The next process finds what they left, and nothing that is unfinished stays."""
        time.sleep(GRACE_S + 0.1)
        with open_tier(self.folder) as tier:
            tier.put([k := os.urandom(16)], [block(k, KIND)]).result()
            keys = [bytes.fromhex(p.stem) for p in self.folder.glob("??/*.kvx")]
            got = tier.get(keys).result()
            if not all(b is not None and is_right(k, b) for k, b in zip(keys, got, strict=True)) or tier.stats.refused:
                self.wrong.append("the next process does not find all blocks right")
        self._look(time.time())


def main() -> None:
    options = arguments(__doc__, seconds=60.0).parse_args()
    take_ctrl_c()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder) / "tier", options.seconds, options.seed)
        trial.run()
    c = trial.counts
    rows = {
        "time": f"{(time.monotonic() - trial.begin) / 60:.1f} min",
        "blocks": f"{c['put']} put, {c['get']} asked for, {c['hits']} of them found and right, {c['drop']} dropped",
        "killed": c["killed"],
        "stopped": f"{c['stopped']}, {c['stopped long']} of them for longer than the grace; {c['late']} calls were too late then",
        "at rest": f"{c['rests']} times: {trial.most_blocks} of {CAPACITY} blocks at most, {trial.most_unfinished} unfinished",
        "evicted": f"{c['evicted']} by the one that lives on",
        **trial.flat.rows(),
    }
    wrong = trial.wrong + trial.flat.wrong()
    if c["late"] > MOST_THREADS * c["stopped long"]:
        wrong.append(f"{c['late']} calls were told that they were too late; few had been stopped")
    if not wrong and not trial.is_stopped:
        wrong += [f"no {name}: the trial shows nothing" for name in SHOWN if not c[name]]
    finish("disk tier", rows, wrong, options.seed)


if __name__ == "__main__":
    main()
