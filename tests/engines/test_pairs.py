"""Every ordered pair of engines, by examples/handover.py: what the second says after a handover is what it says alone."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

for needed in ("vllm", "xllamacpp"):
    pytest.importorskip(needed, reason=f"needs {needed}: make engines")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "handover.py"
TOKENS = 32


def test_every_pair(small_model_copies, capsys):
    example = runpy.run_path(str(EXAMPLE))
    names = list(example["ENGINES"])
    same = example["hand_over"](
        names, ["direct", "file", "ranks", "fp8"], folder=small_model_copies.folder, gguf=small_model_copies.gguf, num_tokens=TOKENS
    )
    rounded = {pair: n for pair, n in same.items() if pair[2] == "fp8"}
    with capsys.disabled():
        print("\ntokens before fp8 shows:", {f"{a} -> {b}": n for (a, b, _), n in rounded.items()})
    assert len(same) == len(names) ** 2 * 4
    assert {pair: n for pair, n in same.items() if pair not in rounded and n != TOKENS} == {}
    assert min(rounded.values()) > 0
