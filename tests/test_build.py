"""What is compiled when, and what `make` says of it: CMakeLists.txt configured on machines that are made up, and the Makefile with
a cmake that only talks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # of cmake and ninja
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def write_command(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One for all cases: to find the compilers takes cmake seconds."""
    return tmp_path_factory.mktemp("configured")


def configure(folder: Path, *, gpus: str = "", nvcc: bool = True, keep: bool = False, **env: str) -> str:
    """What cmake says on a machine with these GPUs, in a folder that is new to it or, with `keep`, as the last case left it."""
    write_command(folder / "bin", "nvidia-smi", f"printf '%s\\n' {gpus}")
    names = ("KVX_CUDA", "KVX_CUDA_ARCHS", "KVX_REQUIRE_CUDA", "KVX_LINEINFO", "KVX_STATIC", "KVX_SANITIZE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    clean |= {"PATH": f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}", **env}
    args = ["cmake", "-S", str(ROOT), "-B", str(folder / "build"), "-G", "Ninja"]
    args += [] if nvcc else ["-DCMAKE_CUDA_COMPILER=NOTFOUND"]
    args += [] if keep else ["-UKVX_KEPT_ARCHS"]
    done = subprocess.run(args, env=clean, capture_output=True, text=True, timeout=300)
    return " ".join((done.stdout + done.stderr).split())


needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not here: there is no CUDA to choose")
no_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU, and the case is one without")


@no_gpu
def test_without_a_gpu_the_cpu_alone(folder):
    said = configure(folder)
    assert "kvx: built for the CPU, without CUDA: no GPU here. KVX_CUDA=ON asks for it all the same" in said
    assert "CUDA compiler" not in said  # nor is nvcc tried
    assert '"cuda_archs": ""' in (folder / "build/libkvx.json").read_text()


@needs_nvcc
@pytest.mark.parametrize(
    ("gpus", "archs"),
    [("9.0", "90a"), ("9.0 9.0 8.0", "90a,80"), ("12.0", "120"), ("7.5 8.9", "89")],
    ids=["hopper", "three", "blackwell", "one-too-old"],
)
def test_a_gpu_is_compiled_for(folder, gpus, archs):
    said = configure(folder, gpus=gpus)
    assert f"kvx: built for the CPU and for CUDA {archs}" in said
    assert f'"cuda_archs": "{archs}"' in (folder / "build/libkvx.json").read_text()  # for kvx/ops/library.py


@needs_nvcc
def test_line_numbers_of_kernels_are_kept_where_asked_for(folder):
    """They make the library three times as large."""
    flags = folder / "build/build.ninja"
    configure(folder, gpus="9.0")
    assert "--fmad=false" in flags.read_text()
    assert "-lineinfo" not in flags.read_text()
    configure(folder, gpus="9.0", KVX_LINEINFO="ON")
    assert "-lineinfo" in flags.read_text()


@needs_nvcc
def test_a_gpu_that_is_too_old_is_said(folder):
    said = configure(folder, gpus="7.5")
    assert "the kernels need sm_80 or newer, so sm_75 is left out" in said
    assert "built for the CPU, without CUDA" in said
    assert "KVX_CUDA=ON (or KVX_REQUIRE_CUDA=1), and CUDA cannot be compiled" in configure(folder, gpus="7.5", KVX_CUDA="ON")


@needs_nvcc
@no_gpu
def test_asked_for_without_a_gpu(folder):
    said = configure(folder, KVX_CUDA="ON")
    assert "built for the CPU and for CUDA 80,89,90a,100,120+PTX" in said
    assert "for 5 GPU architectures take about" in said
    assert "pip shows them with -v" in said
    assert "for CUDA 80,90a" in configure(folder, KVX_CUDA_ARCHS="80,90a")
    assert "for CUDA 90a" in configure(folder, KVX_CUDA_ARCHS="native")  # make build


@needs_nvcc
@no_gpu
def test_a_folder_with_kernels_keeps_them_until_told(folder):
    """`make demo` after `make test` compiles nothing, and does not take the kernels away."""
    assert "for CUDA 86" in configure(folder, KVX_CUDA_ARCHS="86")
    assert "for CUDA 86" in configure(folder, keep=True)
    assert "without CUDA: KVX_CUDA=OFF." in configure(folder, keep=True, KVX_CUDA="OFF")
    assert "without CUDA: no GPU here" in configure(folder, keep=True)


def test_a_gpu_without_nvcc_says_what_is_lost(tmp_path):
    said = configure(tmp_path, gpus="9.0", nvcc=False)
    assert "this machine has a GPU and no nvcc. Ops on GPU tensors run in torch, without KVX's kernels. For those install" in said
    assert "CUDA cannot be compiled: this machine has a GPU and no nvcc" in configure(
        tmp_path, gpus="9.0", nvcc=False, KVX_CUDA="ON"
    )


def test_a_wrong_setting_is_refused_by_its_name(folder):
    assert 'KVX_CUDA is "yes". It takes AUTO, ON or OFF.' in configure(folder, KVX_CUDA="yes")
    if NVCC:
        assert 'KVX_CUDA_ARCHS names "hopper". It takes native, all, or a list' in configure(folder, KVX_CUDA_ARCHS="hopper")


TALK = """
case "$*" in
  *--build*)
    for n in $(seq 1 200); do
      echo "[$n/200] Building CXX object CMakeFiles/kvx_core.dir/native/file$n.cpp.o"
      echo "warning: noise $n"
    done
    if [ -n "$FAIL" ]; then echo "native/file.cpp:7: error: expected ';'"; exit 1; fi ;;
  *--install*) echo "Installing" ;;
  *) echo "-- The CXX compiler"; echo "-- kvx: built for the CPU ($KVX_CUDA_ARCHS)" ;;
esac
"""
RAN = "import sys\n\ndef main():\n    print('ran', *sys.argv[1:])\n\nif __name__ == '__main__':\n    main()\n"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The Makefile in a folder whose environment is set up, and whose cmake only talks."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements-dev.txt").touch()
    write_command(tmp_path / ".venv/bin", "cmake", TALK)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    for name in ("kvx", "native", "include"):
        (tmp_path / name).mkdir()
    (tmp_path / "kvx/__init__.py").touch()
    (tmp_path / "kvx/__main__.py").write_text(RAN)
    (tmp_path / ".venv/ready").touch()
    return tmp_path


def make(folder: Path, target: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVX_", "MAKE", "MFLAGS"))}
    return subprocess.run(["make", target], cwd=folder, env={**clean, **env}, capture_output=True, text=True, timeout=60)


def test_make_demo_is_quiet_and_leaves_the_command(checkout):
    done = make(checkout, "demo")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0] == "libkvx: built for the CPU ()"
    assert lines[1].startswith("Compiled 1 of 200: native/file1.cpp")
    assert lines[-1] == "ran generate"
    assert len(lines) <= 14
    command = subprocess.run([checkout / ".venv/bin/kvx", "x"], cwd="/", capture_output=True, text=True, timeout=60)
    assert command.stdout == "ran x\n"
    assert "warning: noise 200" in (checkout / "build/dev/log.txt").read_text()


def test_a_failure_shows_the_compilers_words(checkout):
    done = make(checkout, "demo", FAIL="1")
    assert done.returncode != 0
    assert "native/file.cpp:7: error: expected ';'" in done.stderr
    assert "[7/200]" not in done.stderr
    assert "ran generate" not in done.stdout


def test_make_build_asks_for_cuda(checkout):
    assert make(checkout, "build").stdout.startswith("libkvx: built for the CPU (native)")
    assert make(checkout, "build", KVX_CUDA_ARCHS="80").stdout.startswith("libkvx: built for the CPU (80)")
    assert make(checkout, "demo", KVX_CUDA_ARCHS="80").stdout.startswith("libkvx: built for the CPU (80)")


def test_make_wheels_asks_for_cuda_only_when_told(checkout):
    (checkout / "wheels").mkdir()
    (checkout / "wheels/build.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert make(checkout, "wheels").stdout == "[]\n"
    assert make(checkout, "wheels", KVX_CUDA="ON").stdout == "['--cuda-archs', 'all']\n"
    assert make(checkout, "wheels", KVX_CUDA="ON", KVX_CUDA_ARCHS="80;90a").stdout == "['--cuda-archs', '80;90a']\n"
    assert make(checkout, "wheels", CUDA_LIB="kvx/lib").stdout == "['--cuda-lib', 'kvx/lib']\n"
