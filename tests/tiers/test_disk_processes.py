"""DiskTier and processes: several in one directory, killed or interrupted at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count

from kvx.tiers.directory import _UNFINISHED, Directory
from tests.tiers.blocks import block, files, found, is_right, key, open_tier, put


def in_child(work: Callable[[], None]) -> int:
    """Fork, and run it there; the child's id. No tier may be open here: threads do not live on in a child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_two_processes_at_once(tmp_path):
    """They put, get, drop and evict the same blocks. Neither ever reads a wrong one, and the capacity holds at the end."""

    def work(seed: int) -> None:
        rng = random.Random(seed)
        with open_tier("disk", tmp_path, 6, refresh_s=0, threads=2) as tier:
            for _ in range(150):
                numbers = [rng.randrange(12) for _ in range(2)]
                put(tier, *numbers)
                found(tier, *(rng.randrange(12) for _ in range(3)))
                tier.drop([key(rng.randrange(12))]).result()
            assert (tier.stats.refused, tier.stats.errors) == (0, 0)
            assert tier.stats.hits

    pids = [in_child(lambda seed=seed: work(seed)) for seed in (1, 2)]
    assert [exit_code(pid) for pid in pids] == [0, 0]
    with open_tier("disk", tmp_path, 6) as tier:
        put(tier, 99)
        assert len(files(tmp_path)) <= 6
        found(tier, *range(12))
        assert tier.stats.refused == 0


def said_until_killed(work: Callable[[Callable[[int], None]], None], seconds: float) -> set[int]:
    """The numbers that a child says while it works, which is until it is killed, so long after the first."""
    out, into = os.pipe()
    pid = in_child(lambda: work(lambda n: os.write(into, n.to_bytes(4, "little"))))
    os.close(into)
    data = os.read(out, 4)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    while more := os.read(out, 1 << 16):
        data += more
    os.close(out)
    return {int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data) // 4 * 4, 4)}


def test_kill_at_200_random_moments(tmp_path):
    """What a child said was kept is found, whole; nothing else is ever read but right. A child says it after the future is done."""
    rng, done = random.Random(1), set()
    for trial in range(200):

        def work(say, trial=trial):
            with open_tier("disk", tmp_path, 1 << 16, threads=1) as tier:
                for n in count(trial << 20):
                    put(tier, n)
                    say(n)

        done |= said_until_killed(work, rng.random() * 0.006)
    killed_writing = len(list(tmp_path.glob("??/.*.partial")))
    with open_tier("disk", tmp_path, 1 << 16) as tier:
        keys = [key(n) for n in sorted(done)]
        got = tier.get(keys).result()
        assert all(b is not None and is_right(k, b) for k, b in zip(keys, got, strict=True))
        rest = [bytes.fromhex(p.stem) for p in files(tmp_path) if p.suffix == ".kvx" and bytes.fromhex(p.stem) not in set(keys)]
        assert all(is_right(k, b) for k, b in zip(rest, tier.get(rest).result(), strict=True))
        assert tier.stats.refused == tier.stats.errors == 0
    assert len(done) >= 200
    assert killed_writing, "no child was killed in the middle of a file: the test shows nothing"


def test_an_interrupt_waits_for_what_is_in_flight(tmp_path):
    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        try:
            with open_tier("disk", tmp_path, 64) as tier:
                for n in range(32):
                    tier.put([key(n)], [block(key(n))])
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
        except KeyboardInterrupt:
            return
        raise AssertionError("no interrupt")

    assert exit_code(in_child(work)) == 0
    with open_tier("disk", tmp_path, 64) as tier:
        assert found(tier, *range(32)) == [True] * 32


def test_a_block_written_while_a_folder_is_looked_at_is_seen(tmp_path, monkeypatch):
    """In the same tick of the file system's clock, by another process, while this one was stopped for longer than a tick."""
    second = key(1)[:1] + bytes(15)
    with open_tier("disk", tmp_path, 8) as mine, open_tier("disk", tmp_path, 8) as theirs:
        put(theirs, 1)
        folder = tmp_path / f"{second[0]:02x}"
        scan = Directory._scan

        def slow(self, fd, name):
            before = folder.stat()
            has_partial = scan(self, fd, name)
            theirs.put([second], [block(second)]).result()
            os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
            time.sleep(0.1)
            return has_partial

        monkeypatch.setattr(Directory, "_scan", slow)
        mine._directory.refresh()
        monkeypatch.undo()
        mine._directory.refresh()
        assert mine.num_blocks == 2


def test_processes_with_one_id_write_files_of_their_own():
    """As in two containers, or in one that was killed and started again: what the first left must not stop the second."""
    program = "import os; os.getpid = lambda: 1; from kvx.tiers.directory import partial_name; print(partial_name('ab.kvx'))"
    names = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert names[0] != names[1]
    assert all(_UNFINISHED.fullmatch(n.strip()) for n in names)
