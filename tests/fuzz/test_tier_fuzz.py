"""Some hundred of the cases of tests/fuzz/tier_blocks.py; the rest by hand."""

from __future__ import annotations

import pytest

from tests.fuzz import tier_blocks


@pytest.mark.parametrize("seed", [0, 10**9])
def test_whatever_stands_in_a_directory_no_wrong_block_comes_out(seed):
    seen = tier_blocks.run(400, seed)
    for what in ("right", "missed", "refused", "put"):
        assert seen[what] > 20, what
