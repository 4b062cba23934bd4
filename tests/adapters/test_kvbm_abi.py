"""kvbm_kernels.h from C and C++: it compiles without CUDA, the library exports what it names, and its checks have an order."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import kvx
from kvx.adapters import kvbm
from tests.abi.test_abi import compile_with, run

PROGRAM = Path(__file__).resolve().parent.parent / "abi" / "kvbm.c"


@pytest.fixture
def library() -> Path:
    try:
        return Path(kvbm.library_path())
    except kvx.Unsupported as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("standard", ["c99", "c++17"])
def test_header_compiles_alone(standard, tmp_path):
    source = tmp_path / "alone.c"
    source.write_text('#include "kvbm_kernels.h"\nint main(void) { return 0; }\n')
    compile_with(standard, "-c", source, "-o", tmp_path / "alone.o")


@pytest.mark.parametrize("standard", ["c99", "c++17"])
def test_program(standard, library, tmp_path):
    link = ["-x", "none", "-L", library.parent, "-lkvbm_kernels", f"-Wl,-rpath,{library.parent}"]
    compile_with(standard, "-O1", "-g", PROGRAM, *link, "-o", tmp_path / "kvbm")
    said = run(tmp_path / "kvbm")
    assert re.search(r"^[1-9]\d* passed, 0 failed$", said, re.M), said


def test_library_exports_the_header_and_no_more(library):
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    header = re.sub(r"/\*.*?\*/", "", Path(kvx.include_dir(), "kvbm_kernels.h").read_text(), flags=re.S)
    named = set(re.findall(r"\b(kvbm_kernels_\w+)\(", header))
    assert len(named) == 7
    assert {line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()} == named


def test_python_knows_every_number_of_the_header():
    header = re.sub(r"/\*.*?\*/", "", Path(kvx.include_dir(), "kvbm_kernels.h").read_text(), flags=re.S)
    wanted = dict(re.findall(r"\bKVBM_(\w+) = (\d+)", header))
    prefixes = {
        kvbm.KvbmDType: "DTYPE_",
        kvbm.BlockLayout: "LAYOUT_",
        kvbm.CopyBackend: "BACKEND_",
        kvbm.Direction: "",
        kvbm.BatchMode: "",
    }
    known = {prefix + member.name: str(member.value) for enum, prefix in prefixes.items() for member in enum}
    results = {"SUCCESS": "0", "INVALID_VALUE": "1", "OUT_OF_MEMORY": "2", "NOT_SUPPORTED": str(kvbm.NOT_SUPPORTED)}
    assert known | results == wanted
