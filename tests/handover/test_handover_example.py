"""examples/handover.py with the two engines that are always there."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.runner.smollm import needs_weights

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "handover.py"


@needs_weights
def test_transformers_and_the_runner():
    lines: list[str] = []
    hand_over = runpy.run_path(str(EXAMPLE))["hand_over"]
    same = hand_over(["transformers", "kvx"], ["direct", "file", "ranks"], num_tokens=12, show=lines.append)
    assert same == {
        (a, b, way): 12 for a in ("transformers", "kvx") for b in ("transformers", "kvx") for way in ("direct", "file", "ranks")
    }
    assert len(lines) == 2
