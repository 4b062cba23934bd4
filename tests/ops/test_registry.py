"""kvx/ops/registry.py: one row an op, one way into libkvx, and what is written down twice is the same."""

from __future__ import annotations

import ast
import ctypes
import re
from pathlib import Path

import pytest

import kvx
from kvx.ops import compiled, native, structs
from kvx.ops.registry import ENTRIES, OPS

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
    "kvx_append_swa_args_t": structs.AppendSwaArgs,
    "kvx_compress_args_t": structs.CompressArgs,
    "kvx_index_scores_args_t": structs.IndexScoresArgs,
    "kvx_topk_args_t": structs.TopkArgs,
    "kvx_attention_sparse_args_t": structs.SparseArgs,
}


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
    assert {name: int(frozen[name]) for name in IN_HEADER} == {name: ctypes.sizeof(s) for name, s in IN_HEADER.items()}


def test_no_library_call_is_left_out():
    """Every call of the door is some row's, or the package's own."""
    door = set(re.findall(r"KVX_API\s+\w+\s+(kvx_door_\w+)\(", (ROOT / "native/door.cpp").read_text()))
    assert door == {name for name in ENTRIES if name.startswith("kvx_door_")}


def test_rows_that_compile_are_those_with_a_custom_op():
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
