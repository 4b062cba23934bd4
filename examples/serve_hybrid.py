"""Three tiny hybrid models, each serving eight requests on one paged cache: prefixes are found again, requests are preempted and
computed again, and the tokens of every answer are compared with Transformers alone. On a CPU, without a download.

    make build && PYTHONPATH=. .venv/bin/python examples/serve_hybrid.py

It needs transformers 5.22, which `make build` installs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, FalconH1Config, Lfm2Config, Qwen3NextConfig, logging

import kvx
from kvx.adapters.transformers import PagedModel, layer_groups
from kvx.runner import Engine, Params

SHARED, NEW = 48, 24  # tokens of the system prompt, and of an answer
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "Qwen3-Next": Qwen3NextConfig(  # gated delta nets, and attention in the last layer
        **SIZES, num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"], head_dim=16,
        linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
    "Falcon-H1": FalconH1Config(  # Mamba 2 and attention side by side in each layer
        **SIZES, num_hidden_layers=2, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=24, mamba_chunk_size=16
    ),
    "LFM2": Lfm2Config(  # short convolutions, and attention between them
        **SIZES, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, block_auto_adjust_ff_dim=False
    ),
}  # fmt: skip


class Served(NamedTuple):
    """What a row of the table says."""

    model: str
    requests: int
    prompt_tokens: int
    reused: int
    computed: int
    preempted: int
    same: int  # answers whose tokens are those of Transformers alone


def prompts() -> list[list[int]]:
    """Seven questions after one system prompt; the first is asked again."""
    ids = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 256, (SHARED,), generator=ids).tolist()
    asked = [shared + torch.randint(3, 256, (n,), generator=ids).tolist() for n in (9, 4, 21, 13, 6, 30, 17)]
    return [*asked, asked[0]]


def alone(model: Any, prompt: list[int]) -> list[int]:
    """Transformers' own answer, with its own cache."""
    ids = torch.tensor([prompt])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    found: list[int] = said[0, len(prompt) :].tolist()
    return found


def serve(name: str) -> Served:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    # Blocks of 8 tokens for K and V; states of 5 sequences that run, and 5 snapshots. Too little for all eight requests at once.
    groups = layer_groups(model.config, num_blocks=19, num_states=10, block_size=8, format="f32")
    cache = kvx.PagedCache(groups, max_seqs=5, max_seq_len=160)
    engine = Engine(PagedModel(model, cache), max_batch_tokens=64)

    asked = prompts()
    params = Params(max_tokens=NEW, ignore_eos=True, snapshot_at=(SHARED,))  # where the system prompt ends
    answers = engine.generate(asked, params)
    cache.check()
    same = sum(list(a.tokens) == alone(model, p) for (a,), p in zip(answers, asked, strict=True))
    done = engine.scheduler.counts
    return Served(name, len(asked), done.prompt_tokens, done.reused_tokens, done.computed_tokens, done.preemptions, same)


def main() -> None:
    logging.set_verbosity_error()
    print("model       requests  prompt tokens  reused  computed  preempted  as Transformers alone")
    for row in map(serve, CONFIGS):
        print(
            f"{row.model:10}  {row.requests:8}  {row.prompt_tokens:13}  {row.reused:6}  {row.computed:8}  {row.preempted:9}  "
            f"{row.same} of {row.requests}"
        )
    print(
        "\nreused: prompt tokens that were in the cache already. computed: all others, what was generated, and what a request\n"
        "that was preempted had to recompute."
    )


if __name__ == "__main__":
    main()
