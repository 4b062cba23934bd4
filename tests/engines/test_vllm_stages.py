"""vLLM's pipeline on KVX's tiers: stages, ranks and one process find each other's layers; what one lost is wrong in the next."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx.handover import names
from kvx.tiers import BlockKind, DiskTier
from kvx.tiers.directory import read_manifest
from tests.engines.small_models import make_hybrid, make_latent, make_plain
from tests.engines.test_vllm_connector import LOSING_RANK, TWO_RANKS, V1_RUNNER, losing, numbers
from tests.engines.vllm_process import Answer, generate, kvx_connector

MODEL, BLOCK, PROMPT = "plain-in-stages", 16, numbers(203)
# vLLM 0.32 makes what a later stage receives into when it compiles: with enforce_eager it fails on a CPU.
STAGES = {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three layers: two in the first stage, one in the second."""
    return make_plain(tmp_path_factory.mktemp("plain"), num_layers=3)


@pytest.fixture(scope="module")
def alone(folder) -> list[list[int]]:
    answer = generate(folder, [PROMPT], max_tokens=32)
    assert len(set(answer.tokens[0])) > 5
    return answer.tokens


@pytest.fixture(scope="module")
def kept(folder, alone, tmp_path_factory) -> Path:
    """What two stages wrote."""
    path = tmp_path_factory.mktemp("tiers")
    answer = asked(folder, path, **STAGES)
    assert (answer.cached, answer.tokens) == ([0], alone)
    assert [(m["layer_start"], m["num_layers"], m["num_kv_heads"]) for m in manifests(path)] == [(0, 2, 2), (2, 1, 2)]
    return path


def asked(folder: Path, path: Path, connector: dict[str, Any] | None = None, **engine: Any) -> Answer:
    connector = connector or kvx_connector([f"disk:{path}"], model=MODEL, block_size=BLOCK)
    return generate(
        folder, [PROMPT], max_tokens=32, connector=connector, env={**TWO_RANKS, **V1_RUNNER, **engine.pop("env", {})}, **engine
    )


def manifests(path: Path) -> list[dict[str, Any]]:
    found = [json.loads((p / "manifest.json").read_text())["manifest"] for p in path.iterdir()]
    return sorted(found, key=lambda m: (m["layer_start"], m["num_layers"], m["head_start"], m["num_kv_heads"]))


def blocks_of(path: Path) -> dict[bytes, list[torch.Tensor | None]]:
    """Of each kind the prompt's blocks."""
    found = {}
    for folder in path.iterdir():
        kind = read_manifest(folder)
        assert isinstance(kind, BlockKind)
        with DiskTier(folder, kind, 10**9) as tier:
            blocks = tier.get(names(PROMPT, BLOCK, MODEL)).result()
        found[kind.digest] = [None if b is None else b.buffers[0].view(torch.float32).clone() for b in blocks]
    return found


def test_stages_ranks_and_one_process_find_each_others_layers(folder, alone, kept, tmp_path):
    """Two stages, then one process, then both: each has blocks of the one before alone, and keeps its own."""
    path, ranks = shutil.copytree(kept, tmp_path / "tiers"), {**STAGES, "tensor_parallel_size": 2}
    for shards, engine in [([(0, 2, 2), (2, 1, 2)], {}), ([(0, 3, 2)], ranks), ([(0, 2, 1)] * 2 + [(2, 1, 1)] * 2, STAGES)]:
        assert [(m["layer_start"], m["num_layers"], m["num_kv_heads"]) for m in manifests(path)] == shards
        before = list(path.iterdir())
        answer = asked(folder, path, **engine)
        assert (answer.cached, answer.tokens) == ([192], alone)
        for kind in before:
            shutil.rmtree(kind)
    back, right = blocks_of(path), blocks_of(kept)
    assert back.keys() == right.keys()
    for kind, blocks in right.items():
        assert all(torch.equal(a, b) for a, b in zip(back[kind], blocks, strict=True))  # as the first stages computed them


@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_stage_lost_is_wrong_in_those_after_it(folder, alone, kept, tmp_path, stage):
    """Six blocks are there, and one stage's third goes when it was counted: the step that loads them computes others to save."""
    path = shutil.copytree(kept, tmp_path / "tiers")
    for name in names(PROMPT, BLOCK, MODEL)[6:]:
        for file in path.rglob(f"{name.hex()}.kvx"):
            file.unlink()
    connector = losing(path, "recompute", model=MODEL, block_size=BLOCK)
    lost = asked(folder, path, connector, env={LOSING_RANK: str(stage)}, **STAGES)
    assert lost.log.count("KVX-TEST lost block 2: True") == 1
    assert lost.tokens == alone
    found, right = blocks_of(path), blocks_of(kept)
    assert found.keys() == right.keys()
    for kind, blocks in right.items():
        for n, (a, b) in enumerate(zip(found[kind], blocks, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=lambda said, n=n: f"block {n}: {said}")


def test_latents_in_stages(tmp_path):
    """Out of one process's blocks, and the other way round. vLLM's CPU backend goes on after latents by decoding only."""
    folder, path, prompt = make_latent(tmp_path / "model"), tmp_path / "tiers", numbers(192)
    connector = kvx_connector([f"disk:{path}"], block_size=BLOCK)
    alone = generate(folder, [prompt], max_tokens=17, connector=connector)
    for shards, engine in [([(0, 2)], {"env": TWO_RANKS, **STAGES}), ([(0, 1), (1, 1)], {})]:
        assert [(m["layer_start"], m["num_layers"]) for m in manifests(path)] == shards
        before = list(path.iterdir())
        answer = generate(folder, [[*prompt, alone.tokens[0][0]]], max_tokens=16, connector=connector, **engine)
        assert (answer.cached, answer.tokens[0]) == ([192], alone.tokens[0][1:])
        for kind in before:
            shutil.rmtree(kind)


def test_layers_that_differ_are_refused(tmp_path):
    folder = make_hybrid(tmp_path / "model")
    with pytest.raises(RuntimeError, match="pipeline_parallel_size is 2, and layers have a full view, a window of 48 tokens"):
        asked(folder, tmp_path / "tiers", **STAGES)
