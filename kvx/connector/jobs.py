"""What the scheduler tells the worker to do with a request's blocks: plain numbers, since the two may be two processes."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

SKIP = -1
NULL = 0  # the null block, as vLLM numbers it: a place in a table that has no memory


@dataclass(frozen=True)
class Job:
    """Tokens `first` to `end` of a request, to be loaded or saved."""

    request: str
    first: int
    end: int
    names: tuple[bytes, ...]  # of the tiers' blocks from first // block_size on, to the one that holds end - 1
    blocks: tuple[tuple[int, ...], ...]  # for each group its table, from token 0 on
    computed: int = 0  # tokens before the step: what is behind a window by then has no memory any more, whatever the table says
    reached: int = 0  # tokens after the step, where states stand then

    def first_name(self, block_size: int) -> int:
        """The place of names[0] in the sequence."""
        return self.first // block_size


@dataclass(frozen=True)
class Tables:
    """One group's ids beside the tiers', for the same tokens. SKIP where nothing moves."""

    engine: list[int]
    tier: list[int]  # places in Job.names


def tables(job: Job, group: int, *, engine_size: int, tier_size: int) -> Tables:
    """Both run over whole blocks of either size; what lies outside of the job's tokens, or on the null block, is skipped."""
    unit = lcm(engine_size, tier_size)
    start, end = job.first // unit * unit, -(-job.end // unit) * unit
    ids = job.blocks[group]
    engine = []
    for n in range(start // engine_size, end // engine_size):
        # A block that the job ends inside is read as far as it goes: the other table skips what follows.
        inside = job.first < (n + 1) * engine_size and n * engine_size < job.end
        here = ids[n] if inside and n < len(ids) else NULL
        engine.append(here if here != NULL else SKIP)
    at = job.first_name(tier_size)
    tier = [n - at if 0 <= n - at < len(job.names) else SKIP for n in range(start // tier_size, end // tier_size)]
    return Tables(engine, tier)


def needed(tables: Tables, engine_size: int, tier_size: int) -> list[bool]:
    """For each place of the tiers' table: whether any of its tokens has memory in the group."""
    return [any(ids) for ids in _has_memory(tables, engine_size, tier_size)]


def complete(tables: Tables, engine_size: int, tier_size: int) -> list[bool]:
    """As needed(), of all its tokens."""
    return [all(ids) for ids in _has_memory(tables, engine_size, tier_size)]


def _has_memory(tables: Tables, engine_size: int, tier_size: int) -> list[list[bool]]:
    """For each place of the tiers' table, the group's blocks that its tokens lie in."""
    spans = [(n * tier_size // engine_size, -(-(n + 1) * tier_size // engine_size)) for n in range(len(tables.tier))]
    return [[i != SKIP for i in tables.engine[first:end]] for first, end in spans]
