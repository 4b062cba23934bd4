"""A tiny DeepSeek-V4 with random weights on a hybrid cache, on a CPU: its text, what each layer keeps of it, and the text again.

    make build && PYTHONPATH=. .venv/bin/python examples/deepseek_v4.py

It needs transformers 5.22, which `make build` installs.
"""

from __future__ import annotations

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridSchema
from kvx.cache.sequence import Sequence

PROMPT, NEW = 300, 12


def tiny_model() -> DeepseekV4ForCausalLM:
    """Four layers: a window alone, CSA (4 tokens an entry, chosen by an indexer), HCA (128 tokens an entry), CSA."""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=256, hidden_size=64, num_hidden_layers=4, compress_ratios=[0, 4, 128, 4], sliding_window=16,
        num_attention_heads=4, head_dim=64, qk_rope_head_dim=16, q_lora_rank=48, o_groups=2, o_lora_rank=24, index_n_heads=64,
        index_head_dim=32, index_topk=8, moe_intermediate_size=16, n_routed_experts=2, num_experts_per_tok=2, num_hash_layers=0,
        rope_parameters={
            "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1
        },
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config).eval()


def main() -> None:
    model = tiny_model()
    schema = HybridSchema.of(model.config, entry_rows="f32", window_rows="f32", index_rows="f32")
    sizes = {"num_blocks": schema.block_budget(PROMPT + NEW, 1), "max_seqs": 1, "max_seq_len": 512}
    cache = HybridCache(schema, **sizes, prefix=True, snapshot_every=0)  # no snapshots: entries alone are shared
    hybrid = HybridModel(model, cache)

    ids = torch.randint(256, (PROMPT,))
    request = cache.admit(ids.tolist())
    prompt = torch.cat([hybrid.forward(request, chunk) for chunk in ids.split(70)])  # a prompt in chunks
    said, logits = [], prompt
    for _ in range(NEW):
        said.append(int(logits[-1].argmax()))
        logits = hybrid.forward(request, torch.tensor(said[-1:]))
    cache.commit(request)

    theirs = model.generate(ids[None], max_new_tokens=NEW, do_sample=False, past_key_values=DynamicCache(config=model.config))
    print(f"said {said}")
    print(f"transformers' own cache says {'the same' if theirs[0, PROMPT:].tolist() == said else 'something else'}\n")
    show_layers(cache, request)
    cache.release(request)

    again = cache.admit(ids.tolist())
    start, shared = again.length, again.num_ahead * cache.block_size
    replayed = f"tokens {start} to {shared - 1} are computed again, for their windows, and write no entries"
    print(f"\nthe prompt again: entries of {shared} tokens are there; {replayed}")
    logits = hybrid.forward(again, ids[start:])[shared - start :]
    off = float((logits - prompt[shared:]).abs().max())
    print(f"logits from token {shared} on are {'the same' if off < 1e-4 else 'others'}, within {off:.0e}")


def show_layers(cache: HybridCache, request: Sequence) -> None:
    """What the cache keeps of a request, and what that costs."""
    block = cache.schema.block_tokens
    print(f"after {request.length} tokens, in {len(cache.block_ids(request))} blocks of {block} tokens:")
    print("layer  kind  window rows  entries  keys of the indexer  tail         bytes/token  a request")
    for i, store in enumerate(cache.layers):
        layer, entries = store.schema, store.schema.entries(request.length)
        rows = int((store.window.positions[cache.slot(request)] >= 0).sum())
        tail = f"{request.length % layer.ratio} of {layer.ratio}" if layer.ratio else "none"
        keys, token = entries if layer.index_dim else 0, layer.block_bytes(block).payload / block
        print(
            f"{i:5}  {layer.kind}   {rows:11}  {entries:7}  {keys:19}  {tail:9}  {token:13.1f}  {layer.request_bytes().payload:9,}"
        )


if __name__ == "__main__":
    main()
