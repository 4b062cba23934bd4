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
import kvx.cli.main
from kvx.bench.harness import Row, Timing
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
    formats = run("inspect", "--formats", "--json")
    assert "half away from zero" in formats
    assert all(f'"{name}"' in formats for name in ("bf16", "nvfp4", "fp8_v4", "index_fp8_sglang"))
    assert "KVX_CUDA_ARCHS" in run("inspect", "--env")
    for option in ("--env", "--support", "--formats"):
        refused = CliRunner().invoke(app, ["inspect", option, "vllm.9"])
        assert f"{option} lists what this build has and takes no path; vllm.9 was given" in str(refused.exception)


def test_inspect_spec(tmp_path):
    spec = kvx.CacheSpec(4, 16, 2, 64, format="nvfp4")
    path = tmp_path / "cache.json"
    path.write_text(kvx.to_json(spec))
    facts = json.loads(run("inspect", str(path), "--json"))
    assert facts["digest"] == kvx.spec.digest(spec)
    assert facts["bytes_per_token"] == 2 * 2 * (32 + 4)
    assert facts["scales"]["k"] == [4, 16, 2, 4]


def invoke(*args: str) -> str:
    """What the command refuses with, in this process."""
    done = CliRunner().invoke(app, list(args))
    assert done.exit_code != 0, done.output
    assert done.exception is None or isinstance(done.exception, kvx.KvxError | SystemExit), repr(done.exception)
    return " ".join(f"{done.output} {done.exception}".split())


def test_inspect_counts_all_layers(tmp_path):
    spec = kvx.CacheSpec(2, 16, 2, 64, num_layers=4, layout="layer kv | block token head dim", v_head_dim=32)
    (tmp_path / "a.json").write_text(kvx.to_json(spec))
    facts = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "a.json"), "--json"]).stdout)
    assert facts["bytes_per_token"] == 4 * 2 * 2 * (64 + 32)
    assert facts["bytes_per_token_and_layer"] == 2 * 2 * (64 + 32)
    assert facts["bytes"] == facts["bytes_per_token"] * 32
    assert facts["buffers"] == ["4 x 8,192 bytes", "4 x 4,096 bytes"]
    fields = {**json.loads(kvx.to_json(spec)), "num_layers": 2**28}
    (tmp_path / "a.json").write_text(json.dumps(fields))
    assert "makes 536,870,912 allocations; at most 4,194,304" in invoke("inspect", str(tmp_path / "a.json"))


def test_inspect_of_a_cut_cache_file_says_so(tmp_path):
    spec = kvx.CacheSpec(2, 16, 2, 64)
    for name in ("a.kvx", "a.safetensors", "a.pt", "a"):
        kvx.save(tmp_path / name, kvx.allocate_buffers(spec), spec)
        data = (tmp_path / name).read_bytes()
        for end in (len(data) - 1, 5000, 600):
            (tmp_path / name).write_bytes(data[:end])
            said = invoke("inspect", str(tmp_path / name))
            assert "cut short" in said
            assert "weights_only" not in said


def test_inspect_of_tensors_it_cannot_describe(tmp_path):
    torch.save({"a": torch.zeros(4, device="meta"), "b": torch.eye(3).to_sparse(), "c": torch.zeros(0)}, tmp_path / "a.pt")
    assert "cannot be read" in invoke("inspect", str(tmp_path / "a.pt"))
    torch.save({"a": print}, tmp_path / "b.pt")
    said = invoke("inspect", str(tmp_path / "b.pt"))
    assert "would run code when it is opened, and was not opened" in said
    assert "weights_only" not in said
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: len(data) // 2])
    said = invoke("inspect", str(tmp_path / "a.pt"))
    assert "cut short" in said
    assert "weights_only" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is refused")
@pytest.mark.parametrize("args", [("demo",), ("bench", "write"), ("bench", "tiers")], ids=" ".join)
def test_a_device_that_is_not_there(args, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert "for --device: cuda: " in invoke(*args, "--device", "cuda")
    assert "for --device: tpu: devices are cpu and cuda" in invoke(*args, "--device", "tpu")


def test_what_a_person_guesses(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert CliRunner().invoke(app, ["--version"]).stdout == f"kvx {kvx.__version__}\n"
    (tmp_path / "empty").write_bytes(b"")
    assert "empty is empty" in invoke("inspect", str(tmp_path / "empty"))
    torch.save([1, 2], tmp_path / "l.pt")
    assert "there are no tensors in" in invoke("inspect", str(tmp_path / "l.pt"))
    assert "for --repeats: 0; it must be more than 0" in invoke("bench", "generate", "--repeats", "0")
    assert "for --device: tpu" in invoke("bench", "generate", "--device", "tpu")


def test_an_error_of_the_disk_is_a_sentence(monkeypatch, capsys):
    def broken() -> None:
        raise OSError(5, "Input/output error", "/mnt/x")

    monkeypatch.setattr(kvx.cli.main, "app", broken)
    with pytest.raises(SystemExit) as ended:
        kvx.cli.main.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "kvx: Input/output error (/mnt/x). `kvx doctor` says what this machine has.\n"


def test_bench_writes_nothing_it_was_not_told_to(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.call_bench, "measure", lambda: {"bench": "call", "overhead_us": 1.5})
    monkeypatch.setattr(bench.call_bench, "show", lambda result: "all")
    done = CliRunner().invoke(app, ["bench", "call"])
    assert done.exit_code == 0
    assert "not saved; --out FOLDER saves the result there" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert "not saved as a result" in invoke("bench", "write", "--only", "x", "--out", str(tmp_path / "o"))


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


def test_bench_keeps_what_it_measured_before_it_stopped(monkeypatch, tmp_path):
    first, second = list(bench.amax_bench.cases("cpu"))[:2]
    row = Row("amax", first.label, 1, Timing(1.0, 1.0, 1.0, 1), None, 1.0, {})

    def measure(case: object, *_: object) -> Row:
        if case is second:
            raise KeyboardInterrupt
        return row

    monkeypatch.setattr(bench.amax_bench, "cases", lambda device: iter([first, second]))
    monkeypatch.setattr(bench.amax_bench, "run", measure)
    monkeypatch.setattr(bench.harness, "copy_ceiling_gbps", lambda device: 10.0)
    assert CliRunner().invoke(app, ["bench", "amax", "--out", str(tmp_path)]).exit_code == 130
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-amax-cpu-part.json")
    result = json.loads(path.read_text())
    assert result["is_part"]
    assert [r["case"] for r in result["rows"]] == [first.label]


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
    command = ["-m", "kvx", "demo"]
    if how == "script":  # as pip writes it
        source, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["kvx"].partition(":")
        (tmp_path / "kvx").write_text(f"import sys\nfrom {source} import {name}\nsys.exit({name}())\n")
        command = [str(tmp_path / "kvx"), "demo"]
    done = interrupted(module, tmp_path, *command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_of_somebody_s_own_program_is_python_s(tmp_path):
    done = interrupted("torch", tmp_path, "-c", "from kvx import write")
    assert "KeyboardInterrupt" in done.stderr


def test_once_kvx_is_imported_an_interrupt_is_the_program_s_own(tmp_path):
    script = tmp_path / "kvx"  # of that name, and not the command
    script.write_text("import kvx, signal, sys\nsys.exit(signal.getsignal(2) is not signal.default_int_handler)\n")
    with ctrl_c():
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    assert done.returncode == 0, done.stderr
