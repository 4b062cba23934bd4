"""kvx bench accuracy: what a KV format costs in quality, on SmolLM2-135M.

The model reads one text with its K and V in each format, every token attending to K and V as they were stored. Its predictions are
compared with those it makes with an f32 cache: perplexity of the text, how often the likeliest next token is the same, and the
Kullback-Leibler divergence of the two distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvx.bench.accuracy_text import TEXT
from kvx.bench.generate_transformers import model_of
from kvx.bench.harness import machine
from kvx.runner import Engine, small_model
from kvx.runner.model import Model
from kvx.spec.cache_spec import CacheSpec

FORMATS = (
    "f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3_per_token_head", "int8_per_token_head", "mxfp8", "int4_per_token_head",
    "int4_per_group", "nvfp4", "mxfp4",
)  # fmt: skip
BLOCK_SIZE = 16


def measure(say: Callable[[str], object]) -> dict[str, Any]:
    engine = Engine.load(small_model(), dtype="f32")
    assert isinstance(engine.model, Model)
    assert engine.tokenizer is not None
    c = engine.model.config
    ids = torch.tensor([engine.tokenizer.encode(TEXT.replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n"))])
    model = model_of(engine.model)
    say(f" SmolLM2-135M-Instruct, weights and activations in f32, {ids.shape[1]} tokens of English prose")
    say(f" {'format':<24} | bytes per token | perplexity | same top token | mean KL divergence from f32")
    rows: list[dict[str, Any]] = []
    want: Tensor | None = None
    for format in FORMATS:
        got = _log_probs(model, ids, format)
        want = got if want is None else want
        layer = CacheSpec(num_blocks=1, block_size=BLOCK_SIZE, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, format=format)
        size = c.num_layers * layer.token_bytes
        rows.append({"format": format, "bytes_per_token": size, **compare(got, want, ids[0, 1:])})
        say(line(rows[-1]))
    return {
        "bench": "accuracy",
        "model": "SmolLM2-135M-Instruct",
        "dtype": "f32",
        "num_tokens": ids.shape[1],
        "machine": machine("cpu"),
        "rows": rows,
    }


@torch.inference_mode()
def _log_probs(model: Any, ids: Tensor, format: str) -> Tensor:
    """Of every next token but the last, [tokens - 1, vocabulary]."""
    from kvx.adapters.transformers import KvxCache  # only here: other benches run without transformers

    logits = model(ids, past_key_values=KvxCache(model.config, format=format, block_size=BLOCK_SIZE)).logits
    log_probs: Tensor = logits[0, :-1].float().log_softmax(-1)
    return log_probs


def compare(got: Tensor, want: Tensor, targets: Tensor) -> dict[str, float]:
    """Perplexity of the targets by `got`, and how far it is from `want`; both are log-probabilities, [tokens, vocabulary]."""
    loss = -got.gather(-1, targets[:, None]).double().mean()
    same = (got.argmax(-1) == want.argmax(-1)).double().mean()
    kl = torch.nn.functional.kl_div(got.double(), want.double(), log_target=True, reduction="none").sum(-1).mean()
    return {"perplexity": math.exp(loss), "same_top_token": float(same), "kl_divergence": max(0.0, float(kl))}


def line(row: dict[str, Any]) -> str:
    return (
        f" {row['format']:<24} | {row['bytes_per_token']:>15,} | {row['perplexity']:>10.3f} | {row['same_top_token']:>14.1%} | "
        f"{row['kl_divergence']:.2e}"
    )


def show(result: dict[str, Any]) -> str:
    return ""  # lines are said as they are measured
