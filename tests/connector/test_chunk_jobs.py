"""Chunks of an engine's memory to tiers and back on threads: what comes back, what fails, and what hangs."""

from __future__ import annotations

import errno
import logging
import threading
import time

import numpy as np
import pytest

from kvx.connector.chunk_jobs import ChunkJobs
from kvx.connector.chunk_store import ChunkGroup, ChunkStore
from kvx.errors import BadArgument
from kvx.tiers import BlockKind, DiskTier, TierOption, packs

LOGGER = logging.getLogger("kvx.test")
# Two groups in one row of three pages: the first uses all of it, the second two pieces with padding between.
SPANS = {0: ((0, 12288),), 7: ((0, 512), (8192, 100))}


def kind(group: int, model: str = "small") -> BlockKind:
    return BlockKind({"model": model, "group": group}, (sum(size for _, size in SPANS[group]),))


def open_jobs(tmp_path, *, tiers=("disk",), rows=None, timeout_s=5.0, threads=3, open_tier=None) -> tuple[ChunkJobs, np.ndarray]:
    if rows is None:
        rows = np.random.default_rng(1).integers(0, 256, (16, 12288), np.uint8)
    options = [TierOption.parse(f"disk:{tmp_path / 'kv'}:10MB" if t == "disk" else t) for t in tiers]
    store = ChunkStore({n: ChunkGroup(kind(n), spans) for n, spans in SPANS.items()}, options, logger=LOGGER, open_tier=open_tier)
    store.open(timeout_s)
    return ChunkJobs(rows, store, timeout_s=timeout_s, threads=threads, logger=LOGGER), rows


def name(n: int, group: int = 0) -> bytes:
    return n.to_bytes(32, "little") + group.to_bytes(4, "big")


def run(jobs: ChunkJobs, keys, rows, *, is_load, job_id=1):
    jobs.submit(job_id, keys, rows, is_load=is_load)
    jobs.drain()
    (done,) = jobs.finished()
    assert done.job_id == job_id
    return done


def look(jobs: ChunkJobs, key: bytes, request: str = "r") -> bool:
    end = time.monotonic() + 10
    while (found := jobs.lookups.look(key, request)) is None and time.monotonic() < end:
        jobs.finished()
        time.sleep(0.005)
    assert found is not None
    return found


@pytest.mark.parametrize("tiers", [("disk",), ("host:1MB",), ("host:1MB", "disk")], ids=", ".join)
def test_what_goes_out_comes_back(tmp_path, tiers):
    jobs, rows = open_jobs(tmp_path, tiers=tiers)
    keys = [name(n) for n in range(5)] + [name(n, 7) for n in range(3)]
    assert run(jobs, keys, range(8), is_load=False).is_whole
    assert [look(jobs, k) for k in (*keys, name(9), name(5, 7), name(1, 3))] == [True] * 8 + [False] * 3
    want = rows[:8].copy()
    rows[:] = 1
    done = run(jobs, keys, range(8, 16), is_load=True)
    assert done.is_whole
    assert done.num_bytes == 5 * 12288 + 3 * 612
    assert np.array_equal(rows[8:13], want[:5])
    for n in range(13, 16):  # the second group's own bytes alone, and nothing between them
        used = np.zeros(12288, bool)
        used[:512] = used[8192:8292] = True
        assert np.array_equal(rows[n, used], want[n - 8, used])
        assert (rows[n, ~used] == 1).all()
    jobs.close()


def test_rows_in_any_order(tmp_path):
    jobs, rows = open_jobs(tmp_path)
    keys, want = [name(n) for n in range(6)], rows[:6].copy()
    run(jobs, keys, range(6), is_load=False)
    where = [9, 3, 15, 4, 5, 0]
    assert run(jobs, keys, where, is_load=True).is_whole
    assert np.array_equal(rows[where], want)
    jobs.close()


@pytest.mark.parametrize("where", [[1, 2, 3], [3, 0, 2]], ids=str)
def test_bytes_of_a_group_go_into_their_spans_wherever_a_piece_ends(where):
    group = ChunkGroup(kind(7), SPANS[7])
    data = np.random.default_rng(2).integers(1, 256, (3, 612), np.uint8)
    for size in (612, 512, 500, 7):
        rows = np.zeros((4, 12288), np.uint8)
        for start in range(0, 612, size):
            group.write(rows, where, start, data[:, start : start + size])
        assert np.array_equal(rows[where, :512], data[:, :512])
        assert np.array_equal(rows[where, 8192:8292], data[:, 512:])
        assert np.count_nonzero(rows) == data.size


@pytest.mark.parametrize("is_load", [True, False])
def test_a_fault_in_a_thread_ends_its_job_and_not_the_thread(tmp_path, monkeypatch, caplog, is_load):
    jobs, _ = open_jobs(tmp_path, threads=2)
    assert run(jobs, [name(1)], [0], is_load=False).is_whole

    def fail(*args):
        raise RuntimeError("a fault")

    for _ in range(3):  # more than there are threads
        with monkeypatch.context() as patch:
            patch.setattr(ChunkStore, "read" if is_load else "put", fail)
            done = run(jobs, [name(1)], [1], is_load=is_load)
        assert not done.is_whole
    assert f"its blocks were not {'loaded' if is_load else 'kept'}" in caplog.text
    assert run(jobs, [name(1)], [2], is_load=True).is_whole
    jobs.close()


def test_another_process_finds_them(tmp_path):
    jobs, rows = open_jobs(tmp_path)
    run(jobs, [name(1)], [3], is_load=False)
    jobs.close()
    again, other = open_jobs(tmp_path, rows=np.zeros_like(rows))
    assert look(again, name(1))
    assert run(again, [name(1)], [0], is_load=True).is_whole
    assert np.array_equal(other[0], rows[3])
    again.close()


def test_what_is_not_there_is_said_by_name(tmp_path):
    jobs, rows = open_jobs(tmp_path)
    run(jobs, [name(1)], [0], is_load=False)
    before = rows[2].copy()
    done = run(jobs, [name(1), name(2)], [1, 2], is_load=True)
    assert not done.is_whole
    assert done.moved == {name(1)}
    assert np.array_equal(rows[2], before)
    jobs.close()


def test_a_damaged_block_is_a_miss_from_then_on(tmp_path, caplog):
    jobs, _ = open_jobs(tmp_path)
    run(jobs, [name(1)], [0], is_load=False)
    (file,) = tmp_path.rglob("*.kvx")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert look(jobs, name(1))
    assert not run(jobs, [name(1)], [1], is_load=True).moved
    assert look(jobs, name(1)) is False  # the same request is not told again that it is there
    jobs.lookups.forget("r")
    assert look(jobs, name(1)) is False
    assert len(jobs.lookups) == 1
    assert "the checksum differs" in caplog.text
    jobs.close()


def test_a_full_disk_is_a_miss_and_one_line(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    jobs, _ = open_jobs(tmp_path)
    monkeypatch.setattr(packs, "write_pack", full)
    done = run(jobs, [name(n) for n in range(8)], range(8), is_load=False)
    assert not done.is_whole
    assert not done.moved
    assert caplog.text.count("No space left on device") == 1
    assert "counts as a miss" in caplog.text
    assert look(jobs, name(1)) is False
    monkeypatch.undo()
    jobs.lookups.forget("r")
    assert run(jobs, [name(1)], [1], is_load=False).is_whole
    assert look(jobs, name(1))
    jobs.close()


def test_a_folder_that_cannot_be_used(tmp_path, caplog):
    (tmp_path / "kv").write_text("no folder")
    jobs, _ = open_jobs(tmp_path)
    assert "the tiers cannot be opened" in caplog.text
    assert not run(jobs, [name(1)], [1], is_load=False).moved
    assert look(jobs, name(1)) is False
    jobs.close()


def test_settings_that_cannot_work(tmp_path):
    for wrong, match in (
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": "5"}, "timeout_s is '5'"),
        ({"threads": 1}, "2 to 64"),
    ):
        store = ChunkStore({0: ChunkGroup(kind(0), SPANS[0])}, [], logger=LOGGER)
        with pytest.raises(BadArgument, match=match):
            ChunkJobs(np.zeros((1, 12288), np.uint8), store, logger=LOGGER, **wrong)
    with pytest.raises(BadArgument, match="one block takes"):
        ChunkStore({0: ChunkGroup(kind(0), SPANS[0])}, [TierOption.parse(f"disk:{tmp_path}:1KB")], logger=LOGGER).open(5)


class Hanging(DiskTier):
    """Until it is let go."""

    def __init__(self, *args, gate: threading.Event, **options) -> None:
        super().__init__(*args, **options)
        self.gate, self.is_in = gate, threading.Event()

    def _store(self, key, block):
        self.is_in.set()
        self.gate.wait()
        return super()._store(key, block)

    def _read(self, key, into):
        self.is_in.set()
        self.gate.wait()
        return super()._read(key, into)


@pytest.fixture
def hanging(tmp_path):
    """(jobs, rows, the gate, the tiers): with a store that hangs while the gate is shut."""
    gate, tiers = threading.Event(), []
    gate.set()

    def open_tier(option, of):
        tiers.append(Hanging(option.path / of.digest.hex(), of, option.capacity_bytes, gate=gate))
        return tiers[-1]

    jobs, rows = open_jobs(tmp_path, timeout_s=0.3, open_tier=open_tier)
    yield jobs, rows, gate, tiers
    gate.set()
    jobs.close()


def test_a_store_that_hangs_ends_in_bounded_time(hanging, caplog):
    jobs, _rows, gate, _ = hanging
    gate.clear()
    begin = time.monotonic()
    for n in range(4):
        jobs.submit(n, [name(n)], [n], is_load=False)
    jobs.submit(9, [name(9)], [9], is_load=True)
    jobs.drain()
    assert time.monotonic() - begin < 3
    done = {job.job_id: job for job in jobs.finished()}
    assert done.keys() == {0, 1, 2, 3, 9}
    assert not any(job.moved for job in done.values())
    assert "did not answer in 0.3 s" in caplog.text
    assert jobs.lookups.look(name(1), "r") is False  # at once
    jobs.submit(10, [name(1)], [1], is_load=False)
    assert [job.job_id for job in jobs.finished()] == [10]
    gate.set()
    end = time.monotonic() + 10
    while "answers again" not in caplog.text and time.monotonic() < end:
        jobs.finished()
        time.sleep(0.02)
    assert run(jobs, [name(5)], [5], is_load=False, job_id=11).is_whole


def test_memory_of_a_job_that_ended_is_another_s(hanging):
    """A write that hung keeps nothing, since its row is another's; a read does not touch rows that are not its own any more."""
    jobs, rows, gate, tiers = hanging
    want = rows[0].copy()
    run(jobs, [name(0)], [0], is_load=False)
    gate.clear()
    for tier in tiers:
        tier.is_in.clear()
    jobs.submit(1, [name(1)], [1], is_load=False)
    assert tiers[0].is_in.wait(5)
    jobs.drain()
    rows[1] = 255  # the next owner of the row
    gate.set()
    _wait_idle(jobs)
    assert not tiers[0].has_now([name(1)])[0]
    assert not list(tiers[0].path.rglob("*.partial"))
    assert not any(done.moved for done in jobs.finished())

    gate.clear()
    tiers[0].is_in.clear()
    jobs.submit(2, [name(0)], [3], is_load=True)
    assert tiers[0].is_in.wait(5)
    jobs.drain()
    assert [job.moved for job in jobs.finished()] == [frozenset()]
    rows[3] = 255
    gate.set()
    _wait_idle(jobs)
    assert (rows[3] == 255).all()
    assert run(jobs, [name(0)], [4], is_load=True).is_whole
    assert np.array_equal(rows[4], want)


def _wait_idle(jobs: ChunkJobs) -> None:
    end = time.monotonic() + 10
    while (jobs._busy or jobs._is_hanging) and time.monotonic() < end:
        jobs.finished()
        time.sleep(0.01)
    assert not jobs._busy


def test_closing_while_it_hangs(hanging):
    jobs, _, gate, _ = hanging
    gate.clear()
    jobs.submit(1, [name(1)], [1], is_load=False)
    begin = time.monotonic()
    jobs.close()
    assert time.monotonic() - begin < 3
    assert [job.job_id for job in jobs.finished()] == [1]
    jobs.submit(2, [name(1)], [1], is_load=False)
    assert [job.moved for job in jobs.finished()] == [frozenset()]


def test_many_jobs_together(tmp_path):
    jobs, rows = open_jobs(tmp_path, tiers=("host:1MB", "disk"), threads=4)
    want = rows.copy()
    for n in range(60):
        jobs.submit(n, [name(n % 16), name(n % 16, 7)], [n % 16, n % 16], is_load=False)
    jobs.drain()
    assert sorted(job.job_id for job in jobs.finished() if job.is_whole) == list(range(60))
    rows[:] = 0
    for n in range(16):
        jobs.submit(n, [name(n)], [n], is_load=True)
    jobs.drain()
    assert all(job.is_whole for job in jobs.finished())
    assert np.array_equal(rows, want)
    jobs.close()
