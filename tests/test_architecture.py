"""docs/architecture.md is true: its picture is what the command draws now, and its walks are the way that calls take."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvx
from kvx.ops import native
from kvx.tiers import BlockKind, CacheTiers, DiskTier
from kvx.tiers.cache_tiers import kept_specs
from tests import picture, picture_state, picture_tutorial
from tests.test_imports import LEVELS, ROOT


def test_the_picture_is_what_the_command_draws():
    assert picture.PICTURE.read_text() == picture.svg(), "docs/architecture.svg is of another time: run `make picture`"
    assert picture_state.PICTURE.read_text() == picture_state.svg(), "docs/state.svg is of another time: run `make picture`"
    assert picture_tutorial.PICTURE.read_text() == picture_tutorial.svg(), "docs/tutorial.svg is old: run `make picture`"


def test_arrows_point_down_and_leave_out_what_follows():
    found = picture.arrows()
    assert all(top > low for top, low in found)
    tiers, wires, cache = (1 + LEVELS.index(f"kvx.{name}") for name in ("tiers", "wires", "cache"))
    assert (tiers, wires) in found
    assert (wires, cache) in found
    assert (tiers, cache) not in found  # tiers import the cache, and so do the wires that they import


def test_walks_name_what_is_there():
    walks = picture.walks()
    assert len(walks) == 3
    for title, stops in walks.items():
        assert 0 < len(stops) <= 5, title
        for path, names in (file for stop in stops for file in stop.files):
            assert names, f"{title}: {path} without a function"
            text = (ROOT / path).read_text()
            for name in (part for n in names for part in n.split(".")):
                assert re.search(rf"\b{name}\b", text), f"{title}: {path} has no {name}"


def test_files_beside_the_walks_exist():
    for path in re.findall(r"`((?:kvx|native|tests|include)/[^` ]+)`", picture.PAGE.read_text()):
        assert (ROOT / path).exists(), f"docs/architecture.md names {path}"


def walk_write(folder: Path) -> None:
    spec = kvx.CacheSpec(num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8, format="f32")
    x = torch.ones(3, 1, 8)
    kvx.write(kvx.allocate(spec).cache, x, x, slot_mapping=torch.arange(3), spec=spec)


def walk_block(folder: Path) -> None:
    spec = kvx.CacheSpec(num_blocks=4, block_size=4, num_kv_heads=1, head_dim=8, format="f32")
    cache = kvx.PagedCache([kvx.LayerGroup("all", (0,), spec)], max_seqs=2, max_seq_len=16)
    kept = kept_specs(cache, "small")

    def length_found(tokens: list[int]) -> int:
        seq = cache.admit(tokens)
        found = seq.length
        cache.extend(seq, len(tokens) - found)
        cache.commit(seq)
        cache.release(seq)
        return found

    with DiskTier(folder, BlockKind.of(kept[0]), 1 << 20) as disk, CacheTiers(cache, [[disk]], kept=kept):
        assert length_found(list(range(13))) == 0
        assert length_found(list(range(50, 63))) == 0
        assert length_found(list(range(13))) == 12


def walk_layout(folder: Path) -> None:
    layouts = "layer kv | block token head dim", "layer | block head kv token/2 dim token%2"
    a, b = (kvx.CacheSpec(3, 4, 1, 8, layout=layout, model=str(folder)) for layout in layouts)  # no spec whose places are known
    kvx.convert(kvx.allocate_buffers(a), kvx.allocate_buffers(b), plan=kvx.plan(a, b))


@pytest.mark.parametrize(
    ("number", "walk"), list(enumerate([walk_write, walk_block, walk_layout])), ids=["write", "block", "layout"]
)
def test_every_python_stop_is_called(number, walk: Callable[[Path], None], tmp_path):
    if not native.HAS_CPU:
        pytest.skip("libkvx is not built: a write ends in torch")
    called: set[tuple[str, str]] = set()

    def note(frame, event, arg):
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        walk(tmp_path)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    stops = list(picture.walks().values())[number]
    named = {(str(ROOT / path), n) for stop in stops for path, names in stop.files for n in names if path.endswith(".py")}
    assert len(named) >= 2
    assert named <= called, f"not on the way: {named - called}"
