"""The C ABI from C: the header compiles alone, its bytes are frozen, and C programs call the library without Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kvx
from tests.abi import freeze

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent.parent / "examples" / "c" / "write_gather.c"
STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror"]
COMPILERS = {"c99": ("CC", "cc"), "c11": ("CC", "cc"), "c++17": ("CXX", "c++")}


def run(*command: str | Path, timeout_s: int = 300) -> str:
    """Run, and on failure show what the program said."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout_s)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{Path(command[0]).name} returned {done.returncode}\n{said[-20000:]}"
    return said


def compile_with(standard: str, *arguments: str | Path) -> None:
    variable, default = COMPILERS[standard]
    compiler = os.environ.get(variable, default)
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no compiler {compiler}; set {variable}")
    language = ["-x", "c++"] if standard == "c++17" else ["-x", "c"]
    run(*compiler.split(), f"-std={standard}", *STRICT, "-I", kvx.include_dir(), *language, *arguments)


def build_program(source: Path, folder: Path) -> Path:
    try:
        library = Path(kvx.library_path())
    except kvx.Unsupported as missing:
        pytest.skip(str(missing))
    program = folder / source.stem
    # -lkvx and not the path: a library without a soname would put the path itself into the program.
    link = ["-x", "none", "-L", library.parent, "-lkvx", f"-Wl,-rpath,{library.parent}", "-ldl", "-lm"]
    compile_with("c99", "-O1", "-g", source, *link, "-o", program)
    return program


@pytest.mark.parametrize("standard", ["c99", "c++17"])
def test_header_compiles_alone(standard, tmp_path):
    source = tmp_path / "alone.c"
    source.write_text('#include "kvx_abi.h"\nint main(void) { return 0; }\n')
    compile_with(standard, "-c", source, "-o", tmp_path / "alone.o")


@pytest.mark.parametrize("standard", ["c11", "c++17"])
def test_layout_is_frozen(standard, tmp_path):
    compile_with(standard, "-c", HERE / "layout.c", "-o", tmp_path / "layout.o")


def test_a_struct_that_is_new_is_frozen_by_a_command():
    """What freeze.py writes of a struct is what stands in layout.c; the rest it leaves alone."""
    if shutil.which(os.environ.get("CC", "cc").split()[0]) is None:
        pytest.skip("no compiler cc; set CC")
    whole = (HERE / "layout.c").read_text()
    ours = re.compile(r"^(?:STRUCT|FIELD)\(kvx_topk_args_t, .*\n", re.M)
    assert freeze.freeze(whole) == whole
    without = ours.sub("", whole)
    assert freeze.freeze(without) == without + "\n" + "".join(ours.findall(whole))


def test_layout_names_every_field():
    """A field that layout.c forgets could move unseen."""
    header = re.sub(r"/\*.*?\*/", "", Path(kvx.include_dir(), "kvx_abi.h").read_text(), flags=re.S)
    wanted = []
    for struct, names in freeze.fields(header).items():
        wanted += [f"STRUCT({struct}, ", *(f"FIELD({struct}, {name}, " for name in names)]
    for enum, body in re.findall(r"typedef enum (\w+) \{(.*?)\} \1;", header, re.S):
        wanted.append(f"ENUM({enum})")
        wanted += [f"VALUE({name}, " for name in re.findall(r"(\w+) =", body)]
    frozen = (HERE / "layout.c").read_text()
    assert len(wanted) > 200, "the header was not understood"
    assert [w for w in wanted if w not in frozen] == []


@pytest.mark.parametrize(
    "name",
    [
        "conformance_v1", "conformance_v12", "conformance_append", "conformance_attention", "conformance_hybrid",
        "conformance_names", "hostile",
    ],
)  # fmt: skip
def test_program(name, tmp_path):
    said = run(build_program(HERE / f"{name}.c", tmp_path))
    assert re.search(r"^[1-9]\d* passed, 0 failed$", said, re.M), said[-20000:]


def test_unified_memory(tmp_path):
    said = run(build_program(HERE / "unified.c", tmp_path))
    if "no CUDA device" in said:
        pytest.skip("no CUDA device: managed memory cannot be allocated")
    assert re.search(r"^[1-9]\d* passed, 0 failed$", said, re.M), said


def test_example(tmp_path):
    assert "5 tokens" in run(build_program(EXAMPLE, tmp_path))
