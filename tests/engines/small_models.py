"""Small models with random weights that are worth telling apart: a hybrid of windows and full views, and latents (MLA)."""

from __future__ import annotations

from pathlib import Path


def make_hybrid(path: Path) -> Path:
    """Gemma 3 of six layers, every third with a full view, the others with a window of 48 tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, sliding_window=48, layer_types=kinds, max_position_embeddings=1024, initializer_range=0.3,
        tie_word_embeddings=False,
    )  # fmt: skip
    return _save(Gemma3ForCausalLM, config, path)


def make_plain(path: Path) -> Path:
    """Llama of two layers with two KV heads, which two ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=1024, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(LlamaForCausalLM, config, path)


def make_latent(path: Path) -> Path:
    """DeepSeek V2 of two dense layers; the latent row has 576 elements, the only size that vLLM's CPU kernel has."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, first_k_dense_replace=2,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32, max_position_embeddings=1024,
        initializer_range=0.2,
    )  # fmt: skip
    return _save(DeepseekV2ForCausalLM, config, path)


def _save(kind: type, config: object, path: Path) -> Path:
    import torch

    torch.manual_seed(7)
    kind(config).to(torch.float32).save_pretrained(path)
    return path
