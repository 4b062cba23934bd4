"""Architectures of transformers, one of each mechanism, against the table of docs/transformers.md; `make sweep` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5.22", reason="the table is of transformers 5.22")

from tests.adapters.architectures import architectures, read_table, summary  # noqa: E402

pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith("5.22."),
    reason=f"the table is of transformers 5.22, not {transformers.__version__}; make sweep writes it",
)
TABLE = read_table((Path(__file__).parents[2] / "docs" / "transformers.md").read_text())
RAN = [
    "LlamaForCausalLM",  # the usual
    "GPT2LMHeadModel",  # says that it is not causal
    "MoshiForCausalLM",  # a window in the cache, and none in the mask
    "Llama4ForCausalLM",  # chunks
    "Gemma3nForCausalLM",  # layers that read the K and V of others
    "DeepseekV3ForCausalLM",  # latents
    "DogeForCausalLM",  # changes its mask
    "PaliGemmaForConditionalGeneration",  # makes it ahead, and looks both ways
    "BloomForCausalLM",  # attends by itself
    "GPTNeoXJapaneseForCausalLM",  # views K and V as contiguous
    "GitForCausalLM",  # adds the mask
    "MptForCausalLM",  # adds a bias
    "BertLMHeadModel",  # an encoder as a decoder
    "BartForConditionalGeneration",  # two caches
    "T5ForConditionalGeneration",  # two, and a position bias
    "RecurrentGemmaForCausalLM",  # states that are in no cache
    "Qwen3NextForCausalLM",  # states beside layers of K and V
    "FalconH1ForCausalLM",  # and beside K and V of one layer
    "MllamaForCausalLM",  # layers that look at an image
    "DeepseekV32ForCausalLM",  # an indexer
]


def test_the_table_has_every_architecture():
    assert set(TABLE) == set(architectures())


def test_nothing_is_different():
    assert not {name: outcome for name, outcome in TABLE.items() if "DIFFERENT" in outcome or "MIXED" in outcome}


@pytest.mark.parametrize("name", RAN)
def test_an_architecture_is_as_the_table_says(name):
    assert summary(name) == TABLE[name]
