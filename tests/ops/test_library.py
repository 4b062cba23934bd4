"""Which libkvx is taken where several are, the package's own or one of kvx-cu13, and the environment it reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvx.errors import KvxWarning, Unsupported
from kvx.ops import library


def put(folder: Path, archs: str, version: str = "0.1.0") -> Path:
    folder.mkdir(parents=True)
    (folder / "libkvx.json").write_text(json.dumps({"kvx": version, "cuda_archs": archs}))
    (folder / "libkvx.so").touch()
    return folder


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A package for the CPU, on a machine where kvx-cu13 would be found in the folder site."""
    monkeypatch.setattr(library, "_PACKAGE", tmp_path / "kvx")
    monkeypatch.syspath_prepend(tmp_path / "site")
    library.library_path.cache_clear()
    yield put(tmp_path / "kvx" / "lib", "")
    library.library_path.cache_clear()


@pytest.fixture
def parts(tmp_path, own) -> dict[str, Path]:
    archs = {"sm80": "80,89", "sm90a": "90a,100", "sm120": "120+PTX"}
    return {name: put(tmp_path / "site" / "kvx_cu13" / name, text) for name, text in archs.items()}


def taken(monkeypatch, *gpus: int) -> Path:
    monkeypatch.setattr(library, "_gpus", lambda: list(gpus))
    return Path(library.library_path()).parent


def test_without_kvx_cu13_its_own(own, monkeypatch):
    assert taken(monkeypatch, 90) == own


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        ((80,), "sm80"),
        ((86,), "sm80"),
        ((89,), "sm80"),
        ((90, 90), "sm90a"),
        ((100,), "sm90a"),
        ((103,), "sm90a"),
        ((120,), "sm120"),
        ((121,), "sm120"),
        ((80, 90, 90), "sm90a"),
    ],
)
def test_the_one_for_this_gpu(parts, monkeypatch, gpus, name):
    assert taken(monkeypatch, *gpus) == parts[name]


def test_without_a_gpu_any_of_them(parts, monkeypatch):
    assert taken(monkeypatch) in parts.values()


def test_wheels_in_two_places_are_one_package(parts, tmp_path, monkeypatch):
    """As with `pip install --user` beside an environment."""
    monkeypatch.syspath_prepend(tmp_path / "user")
    volta = put(tmp_path / "user" / "kvx_cu13" / "sm70", "70")
    assert taken(monkeypatch, 70) == volta
    library.library_path.cache_clear()
    assert taken(monkeypatch, 90) == parts["sm90a"]


def test_what_was_compiled_here_comes_first(parts, own, monkeypatch):
    (own / "libkvx.json").write_text(json.dumps({"kvx": "0.1.0", "cuda_archs": "90a"}))
    assert taken(monkeypatch, 80) == own
    library.library_path.cache_clear()
    (own / "libkvx.json").unlink()  # of a checkout that was built before there was one
    assert taken(monkeypatch, 80) == own


def test_another_version_is_refused_and_said(own, tmp_path, monkeypatch):
    put(tmp_path / "site" / "kvx_cu13" / "sm90a", "90a", "0.2.0")
    words = r"kvx is 0\.1\.0 and kvx-cu13 is 0\.2\.0: .* not used\. Install the same version: pip install kvx-cu13==0\.1\.0"
    with pytest.warns(KvxWarning, match=words):
        assert taken(monkeypatch, 90) == own


def test_a_gpu_that_no_wheel_has_kernels_for_is_said(parts, own, monkeypatch):
    with pytest.warns(KvxWarning, match=r"kernels for 120\+PTX, 80,89, 90a,100 and this machine's GPU is sm_75: they are not used"):
        assert taken(monkeypatch, 75) == own


def test_a_wheel_without_its_library_is_said(parts, monkeypatch):
    (parts["sm90a"] / "libkvx.so").unlink()
    with pytest.raises(Unsupported, match=r"no libkvx\.so in .*sm90a"):
        taken(monkeypatch, 90)


def test_the_driver_is_asked():
    assert all(gpu >= 50 for gpu in library._gpus())  # none on most machines, and no error there


def test_settings_that_mean_nothing_are_said(monkeypatch):
    monkeypatch.setenv("KVX_SIMD", "avx1024")
    monkeypatch.setenv("KVX_GPU", "portable")
    with pytest.warns(KvxWarning) as said:
        library.load.__wrapped__()
    assert [str(w.message) for w in said] == ["KVX_SIMD=avx1024 is ignored: it takes plain, avx2, avx512, avx512vnni, avx512bf16."]


def test_settings_are_those_that_the_sources_read():
    native = Path(library.__file__).parents[2] / "native"
    read = {name for path in native.rglob("*.c*") for name in re.findall(r'getenv\("(KVX_\w+)"\)', path.read_text())}
    assert read == set(library.SETTINGS)
    machine = (native / "cpu" / "machine.cpp").read_text()
    assert set(library.SETTINGS["KVX_SIMD"]) == set(re.findall(r'\{"([a-z0-9]+)", \w+, rows_', machine))
