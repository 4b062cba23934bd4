"""pip install . in an isolated build: the wheel holds library and header, and a C program builds against it."""

from __future__ import annotations

import os
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

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # CUDA sources are compiled by `make build`; once is enough.
    env = {**os.environ, "KVX_CUDA": "OFF", "KVX_STATIC": "ON"}
    args = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--quiet",
        "--disable-pip-version-check",
        "--config-settings",
        f"build-dir={folder / 'build'}",  # its own: another worker may build one at the same time
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
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
    extras = ["transformers", "vllm", "nixl", "mooncake", "llama-cpp", "runner", "plot", "all"]
    said = metadata(wheel)
    assert said.get_all("Provides-Extra") == extras
    needs = [Requirement(text) for text in said.get_all("Requires-Dist")]
    of = {e: {n.name for n in needs if n.marker and n.marker.evaluate({"extra": e})} for e in extras}
    assert of["runner"] == {"transformers", "safetensors", "gguf"}
    assert of["llama-cpp"] == {"xllamacpp"}
    assert all(of[extra] for extra in extras)
    everything = next(n for n in needs if n.name == "kvx")
    assert everything.extras == set(extras) - {"all"}
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
        "kvx/include/kvx_abi.h",
        "kvx/__init__.py",
        "kvx/cli/main.py",
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
