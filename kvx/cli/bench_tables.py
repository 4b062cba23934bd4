"""kvx bench compare and kvx bench table: saved results side by side, in one table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvx.bench.compare import BenchResult, Measured, movements, pairs, read_results

COLOURS = {"faster": "green", "ahead": "green", "slower": "red", "behind": "red"}
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A result that --out saved, or a folder of them: the newest of each.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another of the same bench, or another folder.")],
    every: Annotated[bool, typer.Option("--all", help="List cases that did not move too.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 where a case is slower.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two saved results: which cases are faster or slower, by more than noise."""
    rows: list[dict[str, Any]] = []
    told: list[str] = []
    for before, after in pairs(read_results(old), read_results(new)):
        told += _differences(before, after)
        for m in movements(before, after):
            rows.append({
                "bench": before.bench, "case": m.new.case, "old_us": m.old.ours.median_us, "new_us": m.new.ours.median_us,
                "old_share": m.old.share, "new_share": m.new.share, "times_as_fast": m.times_as_fast, "verdict": m.verdict,
            })  # fmt: skip
    counts = Counter(row["verdict"] for row in rows)
    if as_json:
        typer.echo(json.dumps({"counts": counts, "notes": told, "rows": rows}, indent=1))
    else:
        _show_movements([row for row in rows if every or row["verdict"] not in ("same", "other machine")])
        for line in told:
            typer.echo(line)
        typer.echo(f"{len(rows)} cases: " + (", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()) or "none in both"))
    if check and counts["slower"]:
        raise typer.Exit(1)


def _differences(old: BenchResult, new: BenchResult) -> list[str]:
    """What else is not the same in two results."""
    said = []
    if old.machine != new.machine:
        said.append(f"{old.bench}: OLD is of {old.machine}; NEW of {new.machine}. Shares of the ceiling are compared, not times.")
    for name, gbps in new.ceilings_gbps.items():
        if name in old.ceilings_gbps and old.machine == new.machine:
            said.append(
                f"{old.bench}: the {name} ceiling was {old.ceilings_gbps[name] / 1e3:.3g} TB/s and is {gbps / 1e3:.3g} TB/s."
            )
    for which, a, b in (("OLD", old, new), ("NEW", new, old)):
        only = [case for case in a.cases if case not in b.cases]
        if only:
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            said.append(f"{old.bench}: only in {which}: {only[0]}{more}.")
    return said


def _show_movements(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table("case", "old", "new", "share of peak", "times as fast", "", box=None, pad_edge=False)
    for row in rows:
        shares = "" if row["old_share"] is None or row["new_share"] is None else f"{row['old_share']:.0%} -> {row['new_share']:.0%}"
        ratio = "" if row["times_as_fast"] is None else f"{row['times_as_fast']:.2f}"
        table.add_row(
            row["case"],
            _time(row["old_us"]),
            _time(row["new_us"]),
            shares,
            ratio,
            row["verdict"],
            style=COLOURS.get(row["verdict"]),
        )
    _print(table)


def table(
    where: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Results that --out saved, or folders of them.")],
    only: Annotated[str, typer.Option(help="List only the cases whose line contains this text.")] = "",
    as_json: Json = False,
) -> None:
    """Show saved results in one table: each case, its share of the measured peak, the fastest peer, and which one is ahead."""
    results = [result for path in where for result in read_results(path)]
    cases = [(r, m) for r in results for m in r.cases.values() if only in f"{r.bench} {m.case}"]
    counts = Counter(m.verdict for _, m in cases)
    if as_json:
        rows = [{"file": r.path.name, "machine": r.machine, **_row(m)} for r, m in cases]
        typer.echo(json.dumps({"counts": counts, "rows": rows}, indent=1))
        return
    shown = Table("case", "kvx", "share of peak", "fastest peer", "its time", "times as fast", "", box=None, pad_edge=False)
    last = None
    for result, m in cases:
        if result is not last:
            shown.add_section()
            shown.add_row(f"[b]{result.bench}[/b], {result.machine}")
            last = result
        shown.add_row(m.case, *_cells(m), style=COLOURS.get(m.verdict))
    _print(shown)
    typer.echo(f"{len(cases)} cases: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()))


def _row(m: Measured) -> dict[str, Any]:
    peers = {name: t.median_us for name, t in m.peers.items()}
    beside = {"peers_us": peers, "fastest_peer": m.best_peer, "times_as_fast": m.times_best, "verdict": m.verdict}
    return {"bench": m.bench, "case": m.case, "us": m.ours.median_us, "share": m.share, "ceiling": m.ceiling, **beside}


def _cells(m: Measured) -> list[str]:
    share = "" if m.share is None else f"{m.share:.0%} of {m.ceiling}"
    if m.times_best is None:
        return [_time(m.ours.median_us), share, "", "", "", m.verdict]
    return [_time(m.ours.median_us), share, m.best_peer, _time(m.peers[m.best_peer].median_us), f"{m.times_best:.2f}", m.verdict]


def _time(us: float) -> str:
    return f"{us:.3g} us" if us < 1e3 else f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def _print(shown: Table) -> None:
    """As wide as its rows where it goes to a file: a case cut in two is found by no search."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=240)
    console.print(shown)
