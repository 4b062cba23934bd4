"""The command line as a person uses it: a process, its output, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

import kvx


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
