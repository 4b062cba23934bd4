"""kvx/ops/registry.py: one row an op, one way into libkvx, and what is written down twice is the same."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import kvx
from kvx.cli.main import app
from kvx.ops import backend as backends
from kvx.ops import compiled, native, structs
from kvx.ops.registry import ENTRIES, OPS, Op
from tests.gate_calls import entries

ROOT = Path(__file__).resolve().parents[2]
# ctypes structs of include/kvx_abi.h, by the name tests/abi/layout.c freezes their size under.
IN_HEADER = {
    "kvx_array_t": structs.Array,
    "kvx_plane_t": structs.PlaneArgs,
    "kvx_cache_t": structs.CacheArgs,
    "kvx_convert_args_t": structs.ConvertArgs,
    "kvx_rows_t": structs.RowsArgs,
    "kvx_step_t": structs.StepArgs,
    "kvx_finish_t": structs.FinishArgs,
}


def own_structs() -> dict[str, type[ctypes.Structure]]:
    """The structs that stand beside their ops: kvx_x_args_t of an op whose call of the C ABI is kvx_x."""
    found = {}
    for op in OPS.values():
        if op.args is None and op.entries and "_door_" not in op.entries[0].name:
            file = sys.modules[getattr(kvx, op.name).__module__]
            (found[f"{op.entries[0].name}_args_t"],) = (
                x
                for x in vars(file).values()
                if getattr(x, "__module__", "") == file.__name__ and hasattr(x, "_fields_") and issubclass(x, ctypes.Structure)
            )
    return found


def test_every_row_is_a_public_op():
    assert [name for name in OPS if name not in kvx.__all__] == []
    assert all(op.name == name and op.specs for name, op in OPS.items())


def test_only_two_files_know_the_library():
    """library.py opens it and gives its calls their signatures; native.py calls. Ops ask native.py for their calls by name."""
    word = re.compile(r"argtypes|restype|PyDLL\(|CDLL\(|\bLIB\.|load\(\)\.")
    files = {p.name for p in (ROOT / "kvx" / "ops").rglob("*.py") if word.search(p.read_text())}
    assert files == {"library.py", "native.py"}


def test_an_unknown_call_is_refused_by_name():
    with pytest.raises(kvx.InternalError, match=r"kvx_door_toy is no call of kvx/ops/registry\.py"):
        native.entry("kvx_door_toy")


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda e: e.name)
def test_signatures_are_those_of_the_c_source(entry):
    source = "".join((ROOT / path).read_text() for path in ("include/kvx_abi.h", "native/door.cpp"))
    found = re.search(rf"KVX_API\s+[\w* ]+?\b{entry.name}\(([^)]*)\)", source)
    assert found, f"{entry.name} is declared neither in include/kvx_abi.h nor in native/door.cpp"
    declared = [p.strip() for p in found[1].split(",") if p.strip() not in ("", "void")]
    assert len(declared) == len(entry.takes), declared
    for text, given in zip(declared, entry.takes, strict=True):
        assert ctypes.sizeof(given) == (8 if "*" in text or "64" in text or "double" in text or "stream" in text else 4), text


def test_structs_have_the_size_that_the_abi_freezes():
    frozen = dict(re.findall(r"STRUCT\((\w+), (\d+)\)", (ROOT / "tests/abi/layout.c").read_text()))
    ours = IN_HEADER | own_structs()
    assert len(ours) > len(IN_HEADER)
    assert {name: int(frozen[name]) for name in ours} == {name: ctypes.sizeof(s) for name, s in ours.items()}


def test_no_library_call_is_left_out():
    """Every call of the door is some row's, or the package's own."""
    door = set(re.findall(r"KVX_API\s+\w+\s+(kvx_door_\w+)\(", (ROOT / "native/door.cpp").read_text()))
    assert door == {name for name in ENTRIES if name.startswith("kvx_door_")}


def test_rows_that_compile_are_those_with_a_custom_op():
    assert all(getattr(kvx, name) for name in OPS)  # an op registers its custom op when it is first used
    assert {op.compiled for op in OPS.values() if op.compiled} == set(compiled.SCHEMAS)
    with pytest.raises(kvx.InternalError, match=r"kvx::toy is no op's form in kvx/ops/registry\.py"):
        compiled.register("toy", "Tensor(a!) x")


def test_no_internal_call_takes_more_than_eight_parameters():
    """What belongs together is one object: a CacheView, an attention's Queries and Options. Public ops have their keywords."""
    long = []
    for path in sorted((ROOT / "kvx" / "ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name not in kvx.__all__:
                a = node.args
                names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None]
                count = len([n for n in names if n not in ("self", "cls")])
                long += [f"{path.name}:{node.lineno} {node.name} takes {count}"] if count > 8 else []
    assert not long, "\n".join(long)


def listed_places() -> list[str]:
    """The paths that CONTRIBUTING.md's numbered list for an op begins with."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add an op")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)


def test_contributing_lists_at_most_eight_places_and_every_op_is_in_each():
    def words(path: str) -> set[str]:
        return set(re.findall(r"\w+", (ROOT / path).read_text()))

    def in_native(name: str) -> bool:
        """A call has a file of its own, or of its family, below native/<family>/: the function is defined there."""
        return any(f" {name}(" in path.read_text() for path in (ROOT / "native").glob("*/**/*.cpp")) or "_door_" in name

    tested = {word for path in (ROOT / "tests").rglob("test_*.py") for word in re.findall(r"\b(\w+)\(", path.read_text())}
    calls = {entry.name for op in OPS.values() for entry in op.entries}
    c_calls = {name for name in calls if "_door_" not in name}
    missing = {
        "include/kvx_abi.h": c_calls - words("include/kvx_abi.h"),
        "docs/spec.md": c_calls - words("docs/spec.md"),
        "native/<family>/": {name for name in calls if not in_native(name)},
        "kvx/ops/<family>/x.py": {n for n in OPS if not re.match(r"kvx\.ops\.\w+\.\w+$", getattr(kvx, n).__module__)},
        "kvx/ops/registry.py": set(OPS) - words("kvx/ops/registry.py"),
        "kvx/__init__.py": set(OPS) - set(kvx.__all__),
        "tests/ops/test_x.py": set(OPS) - tested,
        "tests/gate_calls.py": set(OPS) - set(entries("torch")),
    }
    assert listed_places() == list(missing)
    assert len(missing) <= 8
    assert not {place: names for place, names in missing.items() if names}


def test_a_toy_op_is_added_by_the_list(monkeypatch):
    """As far as it goes without compiling: a row, a function with its torch body, a custom op. The rest follows."""
    monkeypatch.setattr(compiled, "SCHEMAS", dict(compiled.SCHEMAS))
    monkeypatch.setitem(OPS, "toy", Op("toy", "no spec", backends=("torch",), compiled="toy"))

    @compiled.register("toy", "Tensor(a!) out, Tensor x, str backend")
    def toy_compiled(out, x, backend):
        toy(x, out=out, backend=backend)

    def toy(x: Tensor, *, out: Tensor | None = None, backend: str = "auto") -> Tensor:
        out = torch.empty_like(x) if out is None else out
        if torch.compiler.is_compiling():
            torch.ops.kvx.toy(out, x, backend)
            return out
        assert backends.choose("toy", backend, x, kvx.CacheSpec(4, 4, 1, 8)) == "torch"
        return out.copy_(2 * x)

    assert kvx.supports("toy")
    assert str(kvx.supports("toy", None, "cpu")) == "toy(): no cpu kernel; torch has it."
    with pytest.raises(kvx.Unsupported, match="no cpu kernel"):
        toy(torch.ones(3), backend="cpu")
    support = CliRunner().invoke(app, ["inspect", "--support"])
    assert re.search(r"\btoy\b", support.stdout), support.stdout
    step = torch.compile(lambda x: toy(x + 1) * 3, fullgraph=True, backend="aot_eager")
    assert step(torch.ones(3)).tolist() == [12.0, 12.0, 12.0]


TOY_HEADER = """
#pragma once
#include "check.h"
struct kvx_toy_args_t { uint32_t version, struct_bytes; const float* x; float* out; int64_t count; int32_t memory; };
namespace kvx {
struct ToyParams { const float* x; float* out; int64_t count; };
namespace cpu { kvx_status_t toy(const ToyParams& p); }
namespace cuda { KVX_ON_DEVICE(toy, ToyParams) }
}
"""
TOY_CHECKS = """
#include "append/toy.h"
extern "C" KVX_API kvx_status_t kvx_toy(const kvx_toy_args_t* args, void* stream) {
  using namespace kvx;
  return entry("toy()", [&]() -> kvx_status_t {
    KVX_NEED(args->count >= 0, "count is %lld; it must be 0 or more.", (long long)args->count);
    const ToyParams p{args->x, args->out, args->count};
    return args->memory == KVX_MEMORY_DEVICE ? cuda::toy(p, stream) : cpu::toy(p);
  });
}
"""
TOY_ON_CPU = """
#include "append/toy.h"
kvx_status_t kvx::cpu::toy(const ToyParams& p) {
  for (int64_t i = 0; i < p.count; i++) p.out[i] = 2 * p.x[i];
  return KVX_STATUS_OK;
}
"""


class ToyArgs(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("struct_bytes", ctypes.c_uint32),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("memory", ctypes.c_int32),
    ]


def test_toy_kernels_are_added_by_the_list(tmp_path):
    """Files of its own in a family: what it declares for a device is a stub without nvcc, and nothing else names it."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no compiler {compiler[0]}; set CXX")
    written = {"append/toy.h": TOY_HEADER, "append/toy.cpp": TOY_CHECKS, "append/cpu/toy.cpp": TOY_ON_CPU}
    (tmp_path / "append" / "cpu").mkdir(parents=True)
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    native_folder = ROOT / "native"
    sources = [
        *(tmp_path / name for name in written if name.endswith(".cpp")),
        *(native_folder / f"{n}.cpp" for n in ("check", "absent")),
    ]
    flags = ["-std=c++17", "-shared", "-fPIC", "-DKVX_NO_CUDA", "-I", tmp_path, "-I", native_folder]
    subprocess.run([str(x) for x in (*compiler, *flags, *sources, "-o", tmp_path / "libtoy.so")], check=True)
    toy = ctypes.CDLL(str(tmp_path / "libtoy.so")).kvx_toy
    toy.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    x, out = torch.arange(5.0), torch.zeros(5)
    args = ToyArgs(1 << 16 | 2, ctypes.sizeof(ToyArgs), x.data_ptr(), out.data_ptr(), 5, 1)
    assert toy(ctypes.byref(args), None) == 0
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    args.memory = 2  # a device's
    assert toy(ctypes.byref(args), None) == 2  # KVX_STATUS_UNSUPPORTED
    args.memory, args.count = 1, -1
    assert toy(ctypes.byref(args), None) == 1  # KVX_STATUS_INVALID_ARGUMENT
