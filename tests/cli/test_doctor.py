"""kvx doctor: what it says of an installation that works, and of those that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import kvx
from kvx.cli import doctor
from kvx.cli.main import app
from kvx.ops import library

ROOT = Path(__file__).resolve().parents[2]


def test_one_screen():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) < 40
    assert done.stdout.startswith("core       works\n")
    for words in (kvx.__version__, library.library_path(), "ABI 1.2.0, header 1.2.0", "transformers", "mooncake", "GiB available"):
        assert words in done.stdout


def test_an_optional_package_that_is_not_installed_is_no_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: "")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "nixl          not installed    kvx prefill and decode over NIXL: pip install nixl\n" in done.stdout
    assert "MISSING" not in done.stdout
    assert "no problems found\n" in done.stdout


def test_for_machines():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    facts = json.loads(done.stdout)
    assert facts["works"] is True
    assert facts["library"]["abi"] == facts["library"]["header_abi"] == "1.2.0"
    assert set(facts["packages"]) == {p.module for p in doctor.PACKAGES}
    assert facts["folders"]["temporary"]["writable"] is True
    assert facts["memory"]["total"] > 1 << 28


def test_no_optional_package_is_imported(tmp_path):
    """One that ends the process when it is imported does not end the doctor."""
    for name in ("vllm", "nixl", "mooncake", "flashinfer", "triton"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(66)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = "from kvx.cli.doctor import facts; import json; print(json.dumps(facts()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["packages"]["nixl"]["version"]  # it is there, of a version or none


def test_imports_in_a_process_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "aborts.py").write_text("import os\nos.abort()\n")
    (tmp_path / "raises.py").write_text("raise ImportError('libmissing.so.1 is not there')\n")
    assert doctor.import_problem("aborts") == "the process ended by signal 6"
    assert doctor.import_problem("raises") == "ImportError: libmissing.so.1 is not there"
    assert doctor.import_problem("json") == ""
    monkeypatch.setattr(doctor, "PACKAGES", (doctor.Package("raises", ("raises",), "nothing"),))
    monkeypatch.setattr(doctor, "_version", lambda package: "1.0")
    done = CliRunner().invoke(app, ["doctor", "--imports"])
    assert done.exit_code == 0  # the core works without it
    assert "DOES NOT IMPORT: ImportError: libmissing.so.1 is not there" in done.stdout
    assert "WARNING    raises does not import: ImportError" in done.stdout
    assert "fix: pip install --force-reinstall raises" in done.stdout


def test_a_core_that_does_not_work(monkeypatch):
    monkeypatch.setattr(doctor.backends, "reason_missing", lambda name: "libkvx is not built; run `make build`")
    monkeypatch.setattr(doctor.library, "build_info", lambda: None)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "DOES NOT WORK" in done.stdout
    assert "ERROR      the core: libkvx is not built" in done.stdout
    assert "fix: make build" in done.stdout


def test_a_library_that_computes_otherwise(monkeypatch):
    real = kvx.gather
    monkeypatch.setattr(kvx, "gather", lambda *a, backend, **o: [t + (backend == "cpu") for t in real(*a, backend=backend, **o)])
    assert "do not agree" in doctor._core()


def test_a_header_of_another_abi(monkeypatch, tmp_path):
    (tmp_path / "kvx_abi.h").write_text(
        "#define KVX_ABI_VERSION_MAJOR 1u\n#define KVX_ABI_VERSION_MINOR 3u\n#define KVX_ABI_VERSION_PATCH 0u\n"
    )
    monkeypatch.setattr(doctor.library, "include_dir", lambda: str(tmp_path))
    assert {"what": "libkvx has ABI 1.2.0, but its header has 1.3.0", "fix": "make build"} in doctor.facts()["problems"]


@pytest.mark.parametrize(
    ("sm", "archs", "is_there"),
    [("90", "90a", True), ("80", "90a", False), ("89", "80;90a", True), ("86", "80", True), ("120", "80;90a;120", True),
     ("100", "90a", False), ("120", "80;90+PTX", True), ("80", "90+PTX", False), ("90", "80;86", False)],
)  # fmt: skip
def test_architectures(sm, archs, is_there):
    assert library.is_compiled_for(int(sm), archs) is is_there


def test_a_gpu_without_kernels(monkeypatch):
    gpu = SimpleNamespace(name="A100", major=8, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: gpu)
    info = SimpleNamespace(has_cuda=True, cuda_archs="90a", cuda_devices=1, cuda_runtime=13000, cuda_driver=13010)
    monkeypatch.setattr(doctor.library, "build_info", lambda: info)
    problems: list[dict[str, str]] = []
    found = doctor._cuda(problems)
    assert (found["runtime"], found["driver"], found["gpus"][0]["sm"]) == ("13.0", "13.1", "80")
    assert problems[0]["what"] == "libkvx has no kernels for A100 (sm_80); it was compiled for 90a"
    assert "KVX_CUDA_ARCHS=80 make build" in problems[0]["fix"]
    info.has_cuda = False
    doctor._cuda(problems)
    assert problems[1]["what"] == "torch sees a GPU, but libkvx was compiled without CUDA"


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    problems: list[dict[str, str]] = []
    doctor._folders(problems)
    assert problems[0] == {
        "what": f"the folder for temporary files, {tmp_path}, is not writable",
        "fix": "TMPDIR=FOLDER kvx ...",
    }


def test_a_command_that_cannot_start_is_a_sentence(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: wrong ELF class')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "kvx", "doctor"], capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kvx cannot start: ImportError: libtorch.so: wrong ELF class. Fix: reinstall kvx")
    (tmp_path / "torch.py").write_text("import torch_is_not_there\n")
    done = subprocess.run(
        [sys.executable, "-m", "kvx", "doctor"], capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path
    )
    assert "Fix: pip install torch_is_not_there" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", "from kvx import *"], capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path
    )
    assert "Traceback" in done.stderr  # somebody's own program has Python's
