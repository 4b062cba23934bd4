"""What pip builds: the wheel holds library and header, and a C program builds against it; kvx-cu13 brings a library of its own.

`make wheels` builds it in isolation, audits and installs it (wheels/build.py)."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvx
from kvx.cli.doctor import PACKAGES
from wheels import build

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Built once, by whichever of pytest's workers comes first, in a folder that is kept: the next time little is compiled."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "wheel"
    folder.mkdir(exist_ok=True)
    build.WORK.mkdir(parents=True, exist_ok=True)
    with (build.WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            # CUDA sources are compiled by `make build`; once is enough.
            env = {**os.environ, **build.CPU, "KVX_STATIC": "ON", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            args = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "--disable-pip-version-check"]
            args += ["--config-settings", f"build-dir={build.WORK / 'test'}", "--wheel-dir", str(folder), str(ROOT)]
            done = subprocess.run(args, env=env, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_wheel_serves_every_python(wheel):
    assert "-py3-none-" in wheel.name


def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    return message_from_string(archive.read(name).decode())


def test_metadata_says_what_it_is(wheel):
    said = metadata(wheel)
    assert (said["Name"], said["Version"]) == ("kvx", kvx.__version__)
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert said["Requires-Python"] == ">=3.11"
    assert {"Typing :: Typed", "Environment :: GPU :: NVIDIA CUDA"} <= set(said.get_all("Classifier"))
    assert "kvx/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_extras_name_what_they_install(wheel):
    extras = ["transformers", "vllm", "nixl", "mooncake", "llama-cpp", "events", "runner", "plot", "view", "cu13", "all"]
    said = metadata(wheel)
    assert said.get_all("Provides-Extra") == extras
    needs = [Requirement(text) for text in said.get_all("Requires-Dist")]
    of = {e: {n.name for n in needs if n.marker and n.marker.evaluate({"extra": e})} for e in extras}
    assert of["runner"] == {"transformers", "safetensors", "gguf"}
    assert of["llama-cpp"] == {"xllamacpp"}
    assert all(of[extra] for extra in extras)
    everything = next(n for n in needs if n.name == "kvx")
    assert everything.extras == set(extras) - {"all", "cu13"}
    (cuda,) = (n for n in needs if n.name == "kvx-cu13")
    assert str(cuda.specifier) == f"=={kvx.__version__}"  # the library and the Python that calls it are of one version
    always = {n.name for n in needs if n.marker is None}
    assert always == {"torch", "numpy", "rich", "typer"}
    # Each is one `kvx doctor` knows, so that it says whether it is there.
    known = {name for package in PACKAGES for name in package.names}
    assert set.union(*(of[e] for e in extras[:-1])) <= known


def test_the_version_has_one_number():
    assert f"project(kvx VERSION {kvx.__version__} " in (ROOT / "CMakeLists.txt").read_text()


def test_wheel_holds_library_header_and_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "kvx/lib/libkvx.so",
        "kvx/lib/libkvx.a",
        "kvx/lib/libkvx.json",
        "kvx/include/kvx_abi.h",
        "kvx/__init__.py",
        "kvx/cli/main.py",
        "kvx/page/static/page.html",
        "kvx/page/static/page.css",
        "kvx/page/static/page.js",
        "kvx/layout/registry.schema.json",
    ):
        assert name in names, f"{name} is not in the wheel"
    assert not [n for n in names if n.startswith(("tests/", "native/", "bench/"))]


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel unpacked on a path of its own; torch comes from this environment."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_installed(folder: Path, code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_installed_package_finds_its_parts(installed):
    out = run_installed(installed, "import kvx; print(kvx.include_dir()); print(kvx.library_path())").splitlines()
    assert Path(out[0], "kvx_abi.h").exists()
    assert Path(out[1]).parent == installed / "kvx" / "lib"


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_c_example_builds_against_the_wheel(installed, tmp_path, kind):
    lib, include = installed / "kvx" / "lib", installed / "kvx" / "include"
    program = tmp_path / "write_gather"
    link = (
        ["-L", str(lib), "-lkvx", f"-Wl,-rpath,{lib}"]
        if kind == "shared"
        else [str(lib / "libkvx.a"), "-lstdc++", "-lgomp", "-lm", "-lpthread"]
    )
    args = [
        os.environ.get("CC", "cc"),
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        str(include),
        str(ROOT / "examples" / "c" / "write_gather.c"),
        *link,
        "-o",
        str(program),
    ]
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_library_needs_no_driver_and_no_python(installed):
    if sysconfig.get_platform().startswith("macosx"):
        pytest.skip("readelf is not on macOS")
    out = subprocess.run(
        ["readelf", "-d", str(installed / "kvx" / "lib" / "libkvx.so")], capture_output=True, text=True, check=True
    ).stdout
    for name in ("libcuda.so", "libcudart", "libpython", "libtorch"):
        assert name not in out


def test_kvx_cu13_brings_the_library_that_is_taken(installed, tmp_path):
    """The library for the CPU, in the clothes of one with CUDA: packed, installed by pip, found and loaded."""
    lib = installed / "kvx" / "lib"
    assert json.loads((lib / "libkvx.json").read_text()) == {"kvx": kvx.__version__, "cuda_archs": ""}
    for name in ("libkvx.so", "libkvbm_kernels.so"):
        shutil.copy(lib / name, tmp_path)
    (tmp_path / "libkvx.json").write_text(json.dumps({"kvx": kvx.__version__, "cuda_archs": "90a,100"}))
    raw = build.pack_cuda(tmp_path, tmp_path, is_part=True)
    assert raw.name.startswith(f"kvx_cu13_sm90a-{kvx.__version__}-py3-none-linux_")
    assert metadata(raw).get_all("Requires-Dist") == [f"kvx=={kvx.__version__}"]
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(raw)], check=True, timeout=120)
    ask = f"import sys; sys.path.append({str(site)!r}); import kvx; from kvx.ops import library; library._gpus = lambda: [90]; "
    out = run_installed(installed, ask + "print(kvx.library_path()); print(library.build_info().abi)").splitlines()
    assert Path(out[0]) == site / "kvx_cu13" / "sm90a" / "libkvx.so"
    assert out[1] == "1.2.0"
    recorded = (site / f"kvx_cu13_sm90a-{kvx.__version__}.dist-info" / "RECORD").read_text()
    digest = hashlib.sha256((site / "kvx_cu13/sm90a/libkvx.so").read_bytes()).digest()
    assert f"kvx_cu13/sm90a/libkvx.so,sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}," in recorded


def test_a_long_list_of_architectures_makes_several_wheels(tmp_path):
    assert build.split("native") == ["native"]
    assert build.split("80;90a") == ["80,90a"]
    assert build.split("all") == ["80,89", "90a,100", "120+PTX"]
    names = ["kvx-0.1.0-py3-none-any.whl", "kvx_cu13_sm80-0.1.0-py3-none-any.whl", "kvx_cu13_sm90a-0.1.0-py3-none-any.whl"]
    joined = build.join([tmp_path / name for name in names], tmp_path)
    assert joined.name == f"kvx_cu13-{kvx.__version__}-py3-none-any.whl"
    assert metadata(joined).get_all("Requires-Dist") == [
        f"{n}=={kvx.__version__}" for n in ("kvx", "kvx-cu13-sm80", "kvx-cu13-sm90a")
    ]


def test_a_library_without_cuda_makes_no_kvx_cu13(installed, tmp_path):
    """As in CI without nvcc, where `make wheels CUDA_LIB=kvx/lib` builds the wheel for the CPU alone."""
    assert not build.has_cuda(installed / "kvx" / "lib")
    with pytest.raises(SystemExit, match=r"there is no .*libkvx\.json\. `make build` makes kvx/lib"):
        build.has_cuda(tmp_path)
