"""docs/performance.md, docs/formats.md and the pictures are what `make picture` writes from the results."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from kvx.bench import accuracy
from kvx.cli import bench
from tests import performance, picture_readme

MAKE = "run `make picture`"


def test_performance_page_is_written_from_the_results():
    assert performance.PAGE.read_text() == performance.performance_page(), f"docs/performance.md: {MAKE}"


def test_accuracy_table_is_written_from_the_result():
    assert performance.FORMATS.read_text() == performance.formats_page(), f"docs/formats.md: {MAKE}"


@pytest.mark.parametrize("path", list(picture_readme.PICTURES), ids=lambda p: p.name)
def test_pictures_are_as_drawn(path):
    assert path.read_text() == picture_readme.PICTURES[path](), f"{path.name}: {MAKE}"


def test_every_cell_of_the_performance_page_has_one_fact():
    cells = [c for line in performance.PAGE.read_text().splitlines() if line.startswith("| ") for c in line.split("|")]
    assert len(cells) > 1000
    assert not [c for c in cells if " / " in c or ";" in c]


def test_accuracy_compares_distributions():
    want = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    got = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    same, other = (accuracy.compare(x, want, torch.tensor([0, 1])) for x in (want, got))
    assert (same["same_top_token"], same["kl_divergence"]) == (1.0, 0.0)
    assert same["perplexity"] == pytest.approx((0.5 * 0.8) ** -0.5)
    assert other["same_top_token"] == 0.5
    assert other["kl_divergence"] == pytest.approx(0.25 * math.log(2) / 2)
    assert other["perplexity"] == pytest.approx((0.25 * 0.8) ** -0.5)


def test_saved_commands_can_be_typed():
    """A result of a bench without --device does not name one."""
    commands = {c.callback.__name__: inspect.signature(c.callback).parameters for c in bench.app.registered_commands}
    saving = {name: options for name, options in commands.items() if "out" in options}
    assert {name for name, options in saving.items() if "device" not in options} == set(bench.ONE_DEVICE)


def test_case_of_a_printed_line():
    line = " write a=1 b=x | 36.62 us (36-37) | 3.6 TB/s | 88% of copy | torch 104.1 us | flash 9.5 us"
    case = performance._case_of_line(line)
    assert case == performance.Case("write", {"a": "1", "b": "x"}, 36.62, 0.88, "copy", {"torch": 104.1, "flash": 9.5})
    assert performance._case_of_line(" copy ceiling 4.221 TB/s (bytes read + bytes written)") is None


@pytest.mark.parametrize(
    ("us", "text"), [(1.984, "1.98 us"), (36.62, "36.6 us"), (348.7, "349 us"), (4253.0, "4.25 ms"), (4.6e6, "4.60 s")]
)
def test_time_text(us, text):
    assert performance.time_text(us) == text
