"""What --fast leaves out of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests import fast

ROOT = Path(__file__).resolve().parent.parent


def test_fast_leaves_out_files_that_exist():
    for name in fast.SLOW:
        assert (ROOT / "tests" / name).exists(), f"tests/fast.py names {name}"
    assert fast.is_slow(ROOT / "tests" / "fuzz" / "test_abi_fuzz.py")
    assert not fast.is_slow(ROOT / "tests" / "ops" / "test_write.py")


def test_fast_takes_few_cases_of_each_test():
    items = [SimpleNamespace(nodeid=f"a.py::test_many[{n}]") for n in range(100)] + [SimpleNamespace(nodeid="a.py::test_one")]
    chosen, left_out = fast.few_cases(items)
    assert [i.nodeid for i in chosen] == ["a.py::test_many[0]", "a.py::test_many[49]", "a.py::test_many[99]", "a.py::test_one"]
    assert len(left_out) == 97
