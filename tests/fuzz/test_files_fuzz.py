"""A few thousand of the cases of tests/fuzz/files.py; the rest by hand."""

from __future__ import annotations

import pytest

from tests.fuzz import files


@pytest.mark.parametrize("seed", [0, 10**9])
def test_changed_files_are_refused_or_what_was_sealed(seed):
    seen = files.run(1500, seed)
    for kind in ("file", "folder", "spec", "manifest"):
        assert seen[f"{kind} refused"] > 10
    assert seen["file as it was"] > 0  # a change of what says nothing: a space in the header, padding
