"""Every C entry with descriptors that lie, for some seconds. docs/reliability.md says how to run it for longer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import kvx

HERE = Path(__file__).resolve().parent
CASES, SEED = 20_000, 17


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    try:
        library = Path(kvx.library_path())
    except kvx.Unsupported as missing:
        pytest.skip(str(missing))
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no compiler {compiler}; set CXX")
    made = tmp_path_factory.mktemp("fuzz") / "abi"
    # -rdynamic: the library's allocations are to be the program's, which lets some of them fail.
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-mismatched-new-delete", "-rdynamic", "-pthread"]
    link = ["-L", library.parent, "-lkvx", "-lkvbm_kernels", f"-Wl,-rpath,{library.parent}"]
    command = [*compiler.split(), *flags, *sorted(HERE.glob("*.cpp")), "-o", made, *link]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    return made


def run(program: Path, *options: str, threads: int = 1) -> str:
    # A machine that is busy with other tests may stop a call for a while: what does not come back in 10 s is a hang here.
    command = [str(program), "--seed", str(SEED), "--hang-s", "10", *options]
    # Where there is a GPU, descriptors that say device memory would run there, and outputs be looked at before they are written.
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}{done.stderr[-5000:]}"
    return done.stdout


def test_lies_are_refused_or_harmless(program):
    said = run(program, "--cases", str(CASES))
    assert said.startswith(f"{CASES} cases of seed {SEED} in "), said
    assert said.endswith(": passed\n"), said


def test_large_calls_on_several_threads(program):
    assert run(program, "--cases", "300", "--large", threads=4).endswith(": passed\n")


def test_calls_at_the_same_time(program):
    assert run(program, "--cases", "4000", "--threads", "4").endswith(": passed\n")
