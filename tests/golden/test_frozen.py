"""Plans, digests, manifests and files of a release before are those of this one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvx
from kvx.handover import load as load_handover
from kvx.tiers import BlockKind, DiskTier
from tests.golden.make_frozen import HERE, NAME, SPEC, filled, frozen, specs

BEFORE = json.loads((HERE / "frozen.json").read_text())
NOW = dict(specs())


def test_every_spec_is_still_there():
    assert set(BEFORE) <= set(NOW)


@pytest.mark.parametrize("engine", sorted({name.split()[0] for name in BEFORE}))
def test_plans_digests_and_manifests(engine):
    mine = {name: text for name, text in BEFORE.items() if name.split()[0] == engine}
    assert {name: frozen(NOW[name]) for name in mine} == mine


def equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    flat = [[t.view(torch.uint8).flatten() for t in tensors] for tensors in (got, want)]
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def test_a_cache_file():
    file = kvx.load(HERE / "frozen" / "cache.kvx")
    assert file.spec == SPEC
    assert equal(list(file.buffers), filled(SPEC))


def test_a_handover():
    got = load_handover(HERE / "frozen" / "handover")
    got.check()
    assert got.tokens.tolist() == list(range(12))
    assert equal(list(got.parts[0].buffers), filled(got.parts[0].spec))


def test_a_disk_tier(tmp_path: Path):
    pytest.importorskip("xxhash", reason="its checksum is that of xxhash")
    folder = tmp_path / "tier"
    shutil.copytree(HERE / "frozen" / "tier", folder, copy_function=shutil.copyfile)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)  # git keeps no such modes
    kind = BlockKind.of(replace(SPEC, num_blocks=1))
    with DiskTier(folder, kind, 1 << 20) as tier:
        (block,) = tier.get_now([NAME])
    assert block is not None
    assert equal(list(block.buffers), filled(replace(SPEC, num_blocks=1)))
