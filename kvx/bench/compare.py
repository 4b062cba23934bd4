"""Results that `kvx bench` saved, side by side: what moved from one to another, and how each case stands beside its peers.

A case has moved where its 10th to 90th percentiles lie apart and its medians differ by more than NOISE. On two machines times say
nothing: shares of the ceiling that was measured in the same run are compared instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvx.bench.harness import Timing, summarise
from kvx.errors import BadArgument

NOISE = 0.03  # of medians of two runs on one machine, and of two programs in one run
_TIMING = {"median_us", "p10_us", "p90_us", "repeats"}
# Not another program's time for the same work: first tokens alone, gathering without attention, or the ceiling itself.
_NO_PEER = {"ours", "ours_first", "transformers_first", "gather", "plain", "not converted"}
_MEASURED = {"tflops"}  # which a case says beside its sizes


@dataclass(frozen=True)
class Measured:
    """One case of a result."""

    bench: str
    case: str
    ours: Timing
    share: float | None = None  # of the ceiling
    ceiling: str = ""
    peers: Mapping[str, Timing] = field(default_factory=dict)

    @property
    def best_peer(self) -> str:
        return min(self.peers, key=lambda name: self.peers[name].median_us, default="")

    @property
    def times_best(self) -> float | None:
        """How many times as fast as the fastest peer."""
        return self.peers[self.best_peer].median_us / self.ours.median_us if self.peers else None

    @property
    def verdict(self) -> str:
        ratio = self.times_best
        if ratio is None:
            return "no peer"
        return "ahead" if ratio > 1 + NOISE else "behind" if ratio < 1 - NOISE else "level"


@dataclass(frozen=True)
class BenchResult:
    """What one file holds."""

    path: Path
    bench: str
    machine: str
    ceilings_gbps: Mapping[str, float]
    cases: Mapping[str, Measured]


@dataclass(frozen=True)
class Movement:
    """One case in two results."""

    old: Measured
    new: Measured
    is_one_machine: bool

    @property
    def times_as_fast(self) -> float | None:
        if self.is_one_machine:
            return self.old.ours.median_us / self.new.ours.median_us
        return None if not self.old.share or self.new.share is None else self.new.share / self.old.share

    @property
    def verdict(self) -> str:
        a, b, ratio = self.old.ours, self.new.ours, self.times_as_fast
        if ratio is None:
            return "other machine"
        is_apart = not self.is_one_machine or b.p10_us > a.p90_us or a.p10_us > b.p90_us
        if abs(ratio - 1) <= NOISE or not is_apart:
            return "same"
        return "faster" if ratio > 1 else "slower"


def read_results(where: Path) -> list[BenchResult]:
    """Of a file; of a folder, the newest file of each bench and device."""
    if where.is_dir():
        newest = {path.name[11:]: path for path in sorted(where.glob("????-??-??-*.json"))}  # names begin with a date
        if not newest:
            raise BadArgument(f"kvx bench: {where} has no results; `kvx bench NAME --out {where}` saves one there.")
        return [_read(path) for path in sorted(newest.values(), key=lambda path: path.name[11:])]
    return [_read(where)]


def _read(path: Path) -> BenchResult:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise BadArgument(f"kvx bench: {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise BadArgument(f"kvx bench: {path} is not JSON; it must be a file that `kvx bench NAME --out FOLDER` saved.") from None
    if not isinstance(data, dict) or not isinstance(data.get("bench"), str) or not isinstance(data.get("machine"), dict):
        raise BadArgument(f"kvx bench: {path} is no result; it must be a file that `kvx bench NAME --out FOLDER` saved.")
    m = data["machine"]
    where = m.get("gpu") or f"{m.get('cpu')}, {m.get('threads')} threads, {m.get('simd')}"
    ceilings = {name.removesuffix("_ceiling_gbps"): float(v) for name, v in data.items() if name.endswith("_ceiling_gbps")}
    cases: dict[str, Measured] = {}
    for measured in _cases(data):
        cases.setdefault(measured.case, measured)
    return BenchResult(path, data["bench"], f"{where}, torch {m.get('torch')}", ceilings, cases)


def _cases(data: dict[str, Any]) -> Iterator[Measured]:
    bench = data["bench"]
    for name, value in data.items():
        if _is_timing(value):
            yield Measured(bench, name.replace("_", " "), Timing(**value))
    for row in data.get("rows", ()):
        timings = {name: _timing(value) for name, value in {**row, **row.get("others", {})}.items() if _is_timing(value)}
        if "converted_s" in row:  # of wires: each run's seconds
            timings = {"ours": _of_seconds(row["converted_s"]), "not converted": _of_seconds(row["raw_s"])}
        if "ours" not in timings:
            continue
        ceiling = row.get("ceiling", "copy")
        share = row.get(f"share_of_{ceiling}", row.get("share"))
        peers = {name: t for name, t in timings.items() if name not in _NO_PEER}
        yield Measured(bench, _case_name(row), timings["ours"], share, ceiling if share is not None else "", peers)


def _is_timing(value: object) -> bool:
    return isinstance(value, dict) and set(value) == _TIMING


def _timing(value: dict[str, Any]) -> Timing:
    return Timing(**value)


def _of_seconds(seconds: Sequence[float]) -> Timing:
    return summarise([s * 1e6 for s in seconds])


def _case_name(row: dict[str, Any]) -> str:
    """What a row says of its case, and not what was measured."""
    case = row.get("case")
    if isinstance(case, dict):
        return " ".join([row["op"], *(f"{name}={value}" for name, value in case.items() if name not in _MEASURED)])
    told = {k: v for k, v in row.items() if type(v) in (str, int) and not re.search("bytes|tokens|texts", k)}
    words = [str(v) if isinstance(v, str) else f"{k}={v}" for k, v in told.items() if v != ""]
    return " ".join(words)


def movements(old: BenchResult, new: BenchResult) -> list[Movement]:
    is_one = old.machine == new.machine
    return [Movement(old.cases[name], new.cases[name], is_one) for name in old.cases if name in new.cases]


def pairs(old: Sequence[BenchResult], new: Sequence[BenchResult]) -> list[tuple[BenchResult, BenchResult]]:
    """Of one bench each. Two files are compared whatever their names; of folders, files of one name but for the date."""
    if len(old) == len(new) == 1:
        if old[0].bench != new[0].bench:
            raise BadArgument(
                f"kvx bench compare: {old[0].path} is of {old[0].bench!r} and {new[0].path} of {new[0].bench!r}; "
                "give two results of one bench, or two folders."
            )
        return [(old[0], new[0])]
    by_name = {r.path.name[11:]: r for r in new}
    found = [(r, by_name[r.path.name[11:]]) for r in old if r.path.name[11:] in by_name]
    if not found:
        raise BadArgument("kvx bench compare: OLD and NEW have no bench in common.")
    return found
