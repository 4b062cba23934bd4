"""The command line as a person uses it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvx
from kvx.cli import bench
from kvx.cli.main import app
from tests.interrupts import ctrl_c

ROOT = Path(__file__).resolve().parents[2]


def run(*args: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "kvx", *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stderr


def test_demo_shows_every_step():
    out = run("demo", "--device", "cpu")
    for words in ("1. Describe", "2. Write", "3. Gather", "4. Inspect", "nvfp4", "bf16"):
        assert words in out


def test_inspect_build():
    facts = json.loads(run("inspect", "--json"))
    assert facts["abi"] == "1.2.0"
    assert facts["ops"]["write"]["torch"] is True
    assert set(facts["backends"]) == {"torch", "cpu", "cuda"}
    assert "cuda_archs" in facts
    assert "simd" in run("inspect")


def test_inspect_formats_and_environment():
    assert "half away from zero" in run("inspect", "--formats", "--json")
    assert "KVX_CUDA_ARCHS" in run("inspect", "--env")


def test_inspect_spec(tmp_path):
    spec = kvx.CacheSpec(4, 16, 2, 64, format="nvfp4")
    path = tmp_path / "cache.json"
    path.write_text(kvx.to_json(spec))
    facts = json.loads(run("inspect", str(path), "--json"))
    assert facts["digest"] == kvx.spec.digest(spec)
    assert facts["bytes_per_token"] == 2 * 2 * (32 + 4)
    assert facts["scales"]["k"] == [4, 16, 2, 4]


def test_inspect_tensor_file(tmp_path):
    path = tmp_path / "cache.pt"
    torch.save({"k": torch.tensor([1.0, float("nan"), -3.0, 0.0])}, path)
    facts = json.loads(run("inspect", str(path), "--json"))
    assert facts[0]["nan"] == 1
    assert facts[0]["amax"] == 3.0
    assert facts[0]["zero_share"] == 0.25


def test_errors_are_sentences(tmp_path):
    assert "does not exist" in run("inspect", "nothing.json", code=2)
    path = tmp_path / "bad.json"
    path.write_text("{}")
    assert "not a KVX manifest" in run("inspect", str(path), code=2)
    assert "Traceback" not in run("inspect", str(path), code=2)
    assert "cuda" in run("bench", "write", "--device", "tpu", code=2)


def test_inspect_of_what_it_cannot_read(tmp_path):
    def said(path: Path) -> str:
        error = CliRunner().invoke(app, ["inspect", str(path)]).exception
        assert isinstance(error, kvx.BadArgument), repr(error)
        return str(error)

    for name in ("random.safetensors", "random.npy", "random.pt", "random"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 4)
        text = said(tmp_path / name)
        assert text.startswith(f"inspect: {tmp_path / name} cannot be read: ")
        assert text.endswith("It takes a spec (.json), a cache file, or tensors (.pt, .npy, .safetensors).")
    (tmp_path / "latin.json").write_bytes(b"\xff{")
    assert "latin.json cannot be read" in said(tmp_path / "latin.json")
    assert f"{tmp_path} is a folder. Name a file" in said(tmp_path)


def test_bench_call_writes_a_result(tmp_path):
    out = run("bench", "call", "--out", str(tmp_path))
    assert "overhead" in out
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert result["overhead_us"] > 0
    assert result["machine"]["kvx"] == kvx.__version__


def test_bench_as_json_is_json_alone(tmp_path):
    result = json.loads(run("bench", "amax", "--json", "--only", "no such case", "--out", str(tmp_path)))
    assert (result["bench"], result["rows"]) == ("amax", [])
    assert result["copy_ceiling_gbps"] > 0
    assert not list(tmp_path.iterdir())


def test_bench_hybrid_has_both_ceilings_and_checks_what_it_times(tmp_path):
    result = json.loads(run("bench", "hybrid", "--json", "--only", "topk", "--out", str(tmp_path)))
    assert result["copy_ceiling_gbps"] > 0
    assert result["read_ceiling_gbps"] > 0
    (row,) = result["rows"]
    assert (row["op"], row["case"], row["ceiling"]) == ("topk", {"batch": 8, "entries": 65536, "k": 512}, "read")
    assert row["bytes"] == 8 * (65536 + 512) * 4
    assert row["torch"]["median_us"] > 0


@pytest.fixture
def untimed(monkeypatch):
    """Benches that must not begin."""
    for module in (bench.call_bench, bench.tiers_bench, bench.wires_bench):
        monkeypatch.setattr(module, "measure", lambda **options: pytest.fail("it was measured"))
    monkeypatch.setattr(bench.harness, "copy_ceiling_gbps", lambda device: pytest.fail("it was measured"))


@pytest.mark.parametrize(("args", "said"), [
    (("call", "--out", "{file}/x"), "for --out: {file}/x cannot be made: Not a directory"),
    (("write", "--out", "{file}"), "for --out: {file} cannot be made: File exists"),
    (("tiers", "--folder", "{file}/x"), "for --folder: {file}/x is no folder"),
    (("wires", "--folder", "{file}"), "for --folder: {file} is no folder"),
], ids=["no place for results", "a file for results", "no folder of tiers", "a file for a folder"])  # fmt: skip
def test_bench_folders_are_looked_at_before_anything_is_measured(untimed, monkeypatch, args, said):
    monkeypatch.setenv("COLUMNS", "300")
    file = os.devnull
    done = CliRunner().invoke(app, ["bench", *(a.format(file=file) for a in args)])
    assert done.exit_code == 2, done.output
    assert said.format(file=file) in " ".join(done.output.split())


def test_bench_keeps_what_it_measured_when_the_folder_is_gone(monkeypatch, tmp_path):
    out = tmp_path / "results"

    def measure() -> dict[str, object]:
        out.rmdir()
        return {"bench": "call", "overhead_us": 1.5}

    monkeypatch.setattr(bench.call_bench, "measure", measure)
    monkeypatch.setattr(bench.call_bench, "show", lambda result: "all")
    done = CliRunner().invoke(app, ["bench", "call", "--out", str(out)])
    assert isinstance(done.exception, kvx.BadArgument)
    assert "The result is on stdout" in str(done.exception)
    assert '"overhead_us": 1.5' in done.stdout


# ---- Ctrl-C while it is still importing

INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)\n"


def interrupted(module: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command whose `module` has Ctrl-C pressed while it is imported."""
    (folder / f"{module}.py").write_text(INTERRUPTED)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    with ctrl_c():  # or the child ignores it where the tests run in the background
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, env=env, cwd=folder)


@pytest.mark.parametrize("module", ["torch", "typer"])
@pytest.mark.parametrize("how", ["-m", "script"])
def test_an_interrupt_while_importing_is_quiet(module, how, tmp_path):
    command = ["-m", "kvx", "layouts"]
    if how == "script":  # as pip writes it
        source, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["kvx"].partition(":")
        (tmp_path / "kvx").write_text(f"import sys\nfrom {source} import {name}\nsys.exit({name}())\n")
        command = [str(tmp_path / "kvx"), "layouts"]
    done = interrupted(module, tmp_path, *command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_of_somebody_s_own_program_is_python_s(tmp_path):
    done = interrupted("torch", tmp_path, "-c", "import kvx")
    assert "KeyboardInterrupt" in done.stderr


def test_once_kvx_is_imported_an_interrupt_is_the_program_s_own(tmp_path):
    script = tmp_path / "kvx"  # of that name, and not the command
    script.write_text("import kvx, signal, sys\nsys.exit(signal.getsignal(2) is not signal.default_int_handler)\n")
    with ctrl_c():
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    assert done.returncode == 0, done.stderr
