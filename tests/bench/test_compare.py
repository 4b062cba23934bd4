"""kvx bench compare and table: what moved between two saved results, and who is ahead in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvx.bench.compare import read_results
from kvx.cli.main import app

ROOT = Path(__file__).resolve().parent.parent.parent
H200 = {"gpu": "NVIDIA H200", "cpu": "x", "threads": 16, "simd": "avx512", "torch": "2.11"}


def timing(us: float, spread: float = 0.01) -> dict:
    return {"median_us": us, "p10_us": us * (1 - spread), "p90_us": us * (1 + spread), "repeats": 30}


def row(us: float, *, spread: float = 0.01, share: float = 0.5, peer: float | None = None, **case) -> dict:
    others = {"gather": timing(1.0)} | ({"cudnn": timing(peer)} if peer else {})
    body = {"op": "attention", "case": case, "bytes": 1, "ours": timing(us, spread), "torch": None, "others": others}
    return {**body, "ceiling": "read", "share_of_read": share}


def save(folder: Path, rows: list[dict], *, name: str = "2026-11-16-attention-cuda.json", **fields) -> Path:
    folder.mkdir(exist_ok=True)
    result = {"bench": "attention", "machine": H200, "read_ceiling_gbps": 4300.0, "rows": rows} | fields
    (folder / name).write_text(json.dumps(result))
    return folder / name


def run(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", *map(str, args)])
    return done.exit_code, f"{done.output}{done.exception or ''}"


def compared(*args: object) -> dict:
    code, text = run("compare", *args, "--json")
    assert code == 0, text
    return json.loads(text)


def test_what_moved_is_told_and_noise_is_not(tmp_path):
    old = [row(100, dim=64), row(100, dim=128), row(100, dim=192), row(100, dim=256, spread=0.2), row(9, dim=72)]
    new = [row(80, dim=64), row(125, dim=128), row(102, dim=192), row(110, dim=256, spread=0.2), row(9, dim=80)]
    a, b = save(tmp_path / "a", old), save(tmp_path / "b", new, read_ceiling_gbps=4200.0)
    found = compared(a, b)
    assert [(r["case"], r["verdict"]) for r in found["rows"]] == [
        ("attention dim=64", "faster"),
        ("attention dim=128", "slower"),
        ("attention dim=192", "same"),  # two percent
        ("attention dim=256", "same"),  # ten, and each run is wider than that
    ]
    assert found["rows"][0]["times_as_fast"] == pytest.approx(1.25)
    assert found["notes"] == [
        "attention: the read ceiling was 4.3 TB/s and is 4.2 TB/s.",
        "attention: only in OLD: attention dim=72.",
        "attention: only in NEW: attention dim=80.",
    ]
    code, text = run("compare", a, b)
    assert code == 0
    assert "dim=64" in text
    assert "dim=192" not in text
    assert "4 cases: 2 same, 1 faster, 1 slower" in text
    assert "dim=192" in run("compare", a, b, "--all")[1]
    assert run("compare", a, b, "--check")[0] == 1
    assert run("compare", a, a, "--check")[0] == 0


def test_on_two_machines_shares_are_compared(tmp_path):
    a = save(tmp_path / "a", [row(100, dim=64, share=0.5), row(100, dim=128, share=0.9)])
    b = save(tmp_path / "b", [row(300, dim=64, share=0.8), row(300, dim=128, share=0.9)], machine=H200 | {"gpu": "L4"})
    found = compared(a, b)
    assert [r["verdict"] for r in found["rows"]] == ["faster", "same"]
    assert "Shares of the ceiling are compared, not times." in found["notes"][0]


def test_folders_are_compared_by_their_newest_files(tmp_path):
    save(tmp_path / "a", [row(500, dim=64)], name="2026-11-14-attention-cuda.json")
    save(tmp_path / "a", [row(100, dim=64)], name="2026-11-16-attention-cuda.json")
    save(tmp_path / "b", [row(50, dim=64)], name="2026-11-18-attention-cuda.json")
    save(tmp_path / "b", [row(50, dim=64)], name="2026-11-18-attention-cpu.json")
    (only,) = compared(tmp_path / "a", tmp_path / "b")["rows"]
    assert only["times_as_fast"] == pytest.approx(2)


def test_who_is_ahead(tmp_path):
    rows = [row(100, dim=64, peer=150), row(100, dim=128, peer=80), row(100, dim=192, peer=101), row(100, dim=256)]
    path = save(tmp_path, rows)
    code, text = run("table", path, "--json")
    assert code == 0
    found = json.loads(text)
    assert [r["verdict"] for r in found["rows"]] == ["ahead", "behind", "level", "no peer"]  # gathering alone is no peer
    assert found["rows"][1]["fastest_peer"] == "cudnn"
    text = run("table", path)[1]
    assert "4 cases:" in text
    assert "50% of read" in text
    assert "1 cases: 1 ahead" in run("table", path, "--only", "dim=64")[1]


def test_the_projects_own_results_are_read():
    results = read_results(ROOT / "bench" / "results")
    assert {"attention", "convert", "cache", "tiers", "wires", "call", "write"} <= {r.bench for r in results if r.cases}
    for result in results:
        assert all(case and m.ours.median_us > 0 for case, m in result.cases.items())
        data = json.loads(result.path.read_text())
        timed = [r for r in data.get("rows", ()) if "ours" in r or "converted_s" in r]
        assert len(result.cases) >= len(timed), f"{result.path.name}: two cases have one name"


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is not JSON"), ("[]", "is no result"), ('{"bench": 1}', "is no result"), (None, "cannot be read: No such file")],
)
def test_what_is_no_result(tmp_path, text, said):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    code, output = run("table", path)
    assert code != 0
    assert said in " ".join(output.split())


def test_results_of_two_benches_and_an_empty_folder(tmp_path):
    a, b = save(tmp_path / "a", []), save(tmp_path / "b", [], bench="write")
    assert "give two results of one bench" in " ".join(run("compare", a, b)[1].split())
    (tmp_path / "none").mkdir()
    assert "has no results" in " ".join(run("table", tmp_path / "none")[1].split())
