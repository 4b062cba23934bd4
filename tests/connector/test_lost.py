"""Blocks that are gone when they are read: what vLLM is told, what is not saved, and that all ranks think the same of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvx.connector.groups import parts_of
from kvx.connector.jobs import Job
from kvx.connector.lost import LostLoads, WrongBlocks
from kvx.connector.scheduler import SchedulerSide
from tests.connector.groups import a_group

TABLE = (11, 12, 13, 14, 15, 16, 17, 18)


class Ranks:
    """Threads that wait for each other, as processes do. A rank that does not come breaks the wait instead of making it endless."""

    def __init__(self, count: int) -> None:
        self._numbers: dict[int, list[int]] = {}
        self._all = threading.Barrier(count, timeout=10)
        self.count = count

    def agree(self, rank: int) -> Callable[[list[int]], list[int]]:
        def least(numbers: list[int]) -> list[int]:
            self._numbers[rank] = numbers
            self._all.wait()
            found = [min(of_ranks) for of_ranks in zip(*self._numbers.values(), strict=True)]
            self._all.wait()
            return found

        return least

    def run(self, call: Callable[[int], object]) -> list[object]:
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(call, range(self.count)))


def a_job(first: int, end: int, table: tuple[int, ...] = TABLE, request: str = "r", kept: int = 16) -> Job:
    count = -(-end // kept) - first // kept
    return Job(request, first, end, tuple(bytes([n]) for n in range(count)), (table,), end)


def one_rank(missing: list[int], job: Job, *, engine_size: int = 16, tier_size: int = 16, **how) -> LostLoads:
    lost = LostLoads(engine_size=engine_size, tier_size=tier_size, **how)
    lost.load([job], lambda _: missing)
    return lost


def test_what_one_rank_lost_is_lost_to_all():
    ranks = Ranks(3)
    sides = [LostLoads(engine_size=16, tier_size=16, agree=ranks.agree(r)) for r in range(3)]
    jobs = [a_job(0, 96), a_job(0, 64, table=(21, 22, 23, 24, 25), request="s")]

    def load(rank: int) -> list[tuple[str, int]]:
        gone = {(1, "r"): [4, 5], (2, "r"): [3]}
        found = sides[rank].load(jobs, lambda job: gone.get((rank, job.request), []))
        return [(lost.job.request, lost.first) for lost in found]

    assert ranks.run(load) == [[("r", 48)]] * 3
    for side in sides:
        assert side.is_wrong(a_job(96, 112))
        assert not side.is_wrong(a_job(64, 80, table=(21, 22, 23, 24, 25), request="s"))
        assert side.take_failed() == {14, 15, 16}
        assert side.take_failed() == set()


def test_an_error_on_one_rank_leaves_none_waiting(caplog):
    ranks = Ranks(2)
    sides = [LostLoads(engine_size=16, tier_size=16, agree=ranks.agree(r)) for r in range(2)]

    def read(rank: int) -> Callable[[Job], list[int]]:
        def load(job: Job) -> list[int]:
            if rank and job.request == "r":
                raise OSError("the folder is gone")
            return []

        return load

    jobs = [a_job(32, 96), a_job(0, 32, table=(21, 22), request="s")]
    found = ranks.run(lambda rank: sides[rank].load(jobs, read(rank)))
    assert [[lost.first for lost in of_rank] for of_rank in found] == [[32], [32]]  # what it had written by then is not known
    assert [side.take_failed() for side in sides] == [{13, 14, 15, 16}] * 2
    assert "could not load blocks of request r: OSError('the folder is gone')" in caplog.text


def test_a_step_without_loads_waits_for_nobody():
    def agree(numbers: list[int]) -> list[int]:
        raise AssertionError("the other ranks do not come")

    lost = LostLoads(engine_size=16, tier_size=16, agree=agree)
    assert lost.load([], lambda job: []) == []
    assert not lost.is_wrong(a_job(0, 96))


@pytest.mark.parametrize(
    ("sizes", "job", "missing", "told"),
    [
        ((16, 16), a_job(0, 96), [5, 2], {13, 14, 15, 16}),  # whatever comes after is computed again with it
        ((16, 16), a_job(32, 96), [0], {13, 14, 15, 16}),
        ((32, 16), a_job(0, 96), [1], {11, 12, 13}),  # in the middle of vLLM's block
        ((16, 64), a_job(32, 128, kept=64), [0], {13, 14, 15, 16, 17, 18}),  # only what was to be loaded
        ((16, 64), a_job(32, 128, kept=64), [1], {15, 16, 17, 18}),
        ((16, 16), a_job(0, 96, table=(0, 0, 0, 14, 15, 16)), [3], {14, 15, 16}),
    ],
    ids=["two of six", "its first", "smaller than vLLM's", "larger, from its middle on", "larger", "behind a window"],
)
def test_what_vllm_is_told(sizes, job, missing, told):
    assert one_rank(missing, job, engine_size=sizes[0], tier_size=sizes[1]).take_failed() == told


def test_null_blocks_are_not_told():
    lost = LostLoads(engine_size=16, tier_size=16)
    lost.load([a_job(0, 96, table=(0, 0, 0, 14, 15, 16))], lambda job: [][1])
    assert lost.take_failed() == {14, 15, 16}


def test_where_vllm_cannot_go_on_after_a_part_all_is_lost():
    assert one_rank([4], a_job(0, 96), is_all_or_none=True).take_failed() == set(TABLE[:6])
    assert one_rank([], a_job(0, 96), is_all_or_none=True).take_failed() == set()


def test_what_was_computed_on_it_is_not_saved():
    lost = one_rank([3], a_job(0, 96))
    assert lost.is_wrong(a_job(96, 112))  # of the same step
    assert lost.is_wrong(a_job(96, 128, table=(*TABLE[:6], 31, 32), request="shares its beginning"))
    assert not lost.is_wrong(a_job(0, 48, request="ends before it"))
    assert not lost.is_wrong(a_job(0, 64, table=(11, 12, 13, 33), request="shares what is right"))


def test_what_another_request_of_the_step_computed_on_it_is_not_saved():
    """A later one may find that block by its tokens, and have others than the lost ones before it."""
    lost = LostLoads(engine_size=16, tier_size=16)
    lost.load([a_job(0, 96)], lambda job: [3], tables=[[*TABLE[:6], 31], [11, 12, 32]])
    assert lost.take_failed() == {14, 15, 16}
    assert lost.is_wrong(a_job(96, 112, table=(41, 42, 43, 44, 45, 46, 31), request="finds it"))
    assert lost.is_wrong(a_job(96, 112, table=(41, 42, 43, 44, 45, 46, 17), request="finds the loader's"))
    assert not lost.is_wrong(a_job(0, 48, table=(11, 12, 32), request="shares what is right"))


def test_steps_that_were_scheduled_before_vllm_knew():
    lost = one_rank([3], a_job(0, 96))
    told = lost.take_failed()
    lost.heard(())  # async scheduling: the next step was on its way
    assert lost.is_wrong(a_job(96, 112))
    lost.heard({77})
    assert lost.is_wrong(a_job(96, 112))
    lost.heard(told)  # the scheduler leaves out what is wrong, from here on
    assert not lost.is_wrong(a_job(96, 112))


def test_wrong_blocks_until_they_are_written_again():
    wrong = WrongBlocks(16)
    wrong.lost({14, 15}, [TABLE[:6], [11, 12, 21], [1, 2]])
    assert len(wrong) == 3
    assert wrong.is_right([11, 12, 21], 32, 40)
    assert not wrong.is_right(TABLE, 96, 128)  # vLLM found it in its prefix cache
    assert len(wrong) == 5
    assert wrong.is_right([11, 12, 13, 14, 15, 16], 48, 70)  # computed again, in two steps
    assert len(wrong) == 4
    assert not wrong.is_right([11, 12, 13, 14, 15, 41], 80, 90)  # another that shares the block takes it for whole
    assert wrong.is_right([11, 12, 13, 14, 15, 16], 70, 96)
    assert wrong.is_right([11, 12, 13, 14, 15, 41], 80, 96)
    assert len(wrong) == 2
    assert wrong.is_right([40, 17, 18], 0, 48)  # given to another request, which fills them from their beginning
    assert len(wrong) == 0


def test_a_block_is_not_right_because_its_end_is():
    wrong = WrongBlocks(16)
    wrong.lost({14}, [])
    assert not wrong.is_right([11, 12, 13, 14], 56, 64)
    assert len(wrong) == 1


@pytest.mark.parametrize(("steps", "is_saved"), [(0, False), (1, False), (2, True)], ids=str)
def test_a_request_that_ended_before_its_loss_was_known(steps, is_saved):
    """It shared the lost block and had one more, which vLLM's prefix cache still has: who finds that goes on from wrong K and V.

    With async scheduling two steps are under way, so a loss is known before the second step from here.
    """
    (part,) = parts_of([a_group(block_size=16)])
    side = SchedulerSide([part], [[]], block_size=16, model="m")
    side.begin_step()
    side.add("ends", list(range(70)))
    side.allocated("ends", [[11, 12, 13, 14, 15]], 0)
    side.scheduled("ends", [[11, 12, 13, 14, 15]], is_whole=True, num_computed=32, num_new=38)
    side.drop("ends")
    for _ in range(steps):
        assert side.begin_step() == frozenset()
    side.lost({12})
    assert side.begin_step() == {12}
    assert side.begin_step() == frozenset()
    side.add("finds", list(range(70)))
    side.allocated("finds", [[11, 22, 13, 24, 25]], 0)
    work = side.scheduled("finds", [[11, 22, 13, 24, 25]], is_whole=True, num_computed=48, num_new=22)
    assert (work.save is not None) == is_saved
