"""llama.cpp and vLLM, each to the other through a disk tier: whole blocks by their names, the rest of the prompt is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
pytest.importorskip("vllm", reason="make engines")

from kvx.handover import NEUTRAL, find, keep
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, DiskTier
from tests.engines.llama_cpp import LlamaCpp
from tests.engines.models import Smollm2
from tests.engines.vllm_process import Answer, generate, kvx_connector

BLOCK, NUM_TOKENS = 32, 64
TEXT = """\
A town had one clock, and it was wrong. In the morning it was early and in the evening it was late, so that the days were longer
than in other towns. People liked it. The baker slept until five by the clock and the school began at nine by the clock. One day a
man came with a new clock from the city, which was right to the second, and the mayor asked everybody what to do. The baker said:"""


@pytest.fixture(scope="module")
def llama(small_model_copies: Smollm2, tmp_path_factory: pytest.TempPathFactory) -> LlamaCpp:
    return LlamaCpp(small_model_copies.gguf, tmp_path_factory.mktemp("slots"))


@pytest.fixture(scope="module")
def prompt(small_model_copies: Smollm2) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(small_model_copies.folder)(TEXT)["input_ids"])


@pytest.fixture(scope="module")
def vllm_alone(small_model_copies: Smollm2, prompt: list[int], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """What vLLM says by itself, and the tier it filled."""
    path = tmp_path_factory.mktemp("tier")
    answer = asked(small_model_copies, prompt, path)
    assert answer.cached == [0]
    return path, answer.tokens[0]


def asked(models: Smollm2, prompt: list[int], path: Path) -> Answer:
    connector = kvx_connector([f"disk:{path}"], block_size=BLOCK)
    return generate(models.folder, [prompt], max_tokens=NUM_TOKENS, connector=connector)


def tier(llama: LlamaCpp, path: Path) -> DiskTier:
    """As vLLM's connector opens it."""
    m = llama.model
    spec = CacheSpec(
        num_blocks=1, block_size=BLOCK, num_kv_heads=m.num_kv_heads, head_dim=m.head_dim, num_layers=m.num_layers, layout=NEUTRAL,
        format="f32", model=m.name,
    )  # fmt: skip
    kind = BlockKind.of(spec)
    return DiskTier(path / kind.digest.hex(), kind, 10**9)


def test_llama_cpp_to_vllm(
    llama: LlamaCpp, small_model_copies: Smollm2, prompt: list[int], vllm_alone: tuple[Path, list[int]], tmp_path: Path
) -> None:
    handover = llama.prefill(prompt).convert(block_size=BLOCK)
    assert keep(handover, [tier(llama, tmp_path)]) == len(prompt) // BLOCK
    answer = asked(small_model_copies, prompt, tmp_path)
    assert answer.cached == [(len(prompt) - 1) // BLOCK * BLOCK]
    assert answer.tokens[0] == vllm_alone[1]


def test_vllm_to_llama_cpp(llama: LlamaCpp, prompt: list[int], vllm_alone: tuple[Path, list[int]]) -> None:
    layers = range(llama.model.num_layers)
    handover = find(prompt, [tier(llama, vllm_alone[0])], parts=[(layers, 0)])
    assert handover is not None
    assert handover.num_tokens == len(prompt) // BLOCK * BLOCK
    assert llama.decode(prompt, NUM_TOKENS, handover) == llama.decode(prompt, NUM_TOKENS)
