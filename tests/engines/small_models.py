"""Small models with random weights that are worth telling apart: hybrids of windows, full views and states, and latents (MLA)."""

from __future__ import annotations

import json
from pathlib import Path

_SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 1024, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


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


def make_plain(path: Path, num_layers: int = 2) -> Path:
    """Llama with two KV heads, which two ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.3, tie_word_embeddings=False,
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


def make_lfm2(path: Path) -> Path:
    """LFM2 of three short convolutions and a layer of attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **_SIZES, num_hidden_layers=4, conv_L_cache=3, block_auto_adjust_ff_dim=False, tie_word_embeddings=False,
        layer_types=["conv", "full_attention", "conv", "conv"],
    )  # fmt: skip
    _save(Lfm2ForCausalLM, config, path)
    # Fields of LFM2's older configs, which vLLM 0.32 reads and this Transformers no longer writes.
    older = {"conv_dim": 64, "block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0}
    told = path / "config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | older))
    return path


def make_falcon_h1(path: Path, kv_heads: int = 1) -> Path:
    """Falcon-H1 of two layers, each with attention and a Mamba-2 state side by side."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **_SIZES | {"num_key_value_heads": kv_heads}, num_hidden_layers=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
        mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4, mamba_chunk_size=8, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(FalconH1ForCausalLM, config, path)


def make_nemotron_h(path: Path) -> Path:
    """Nemotron-H of two Mamba-2 layers, an MLP and a layer of attention."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **_SIZES, layers_block_type=["mamba", "mlp", "attention", "mamba"], head_dim=32, ssm_state_size=16, mamba_num_heads=4,
        mamba_head_dim=16, n_groups=2, conv_kernel=4, chunk_size=8, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(NemotronHForCausalLM, config, path)


def make_gemma4(path: Path, window: int = 48, k_is_v: bool = False) -> Path:
    """Gemma 4 of six layers, windows and full views in turns with heads of two widths; the last two read others' K and V.

    `k_is_v`: layers with full views have one projection for both, which are normed and turned apart.
    """
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **_SIZES, num_hidden_layers=6, head_dim=32, global_head_dim=64, sliding_window=window, vocab_size_per_layer_input=256,
        num_kv_shared_layers=2, hidden_size_per_layer_input=16, layer_types=["sliding_attention", "full_attention"] * 3,
        tie_word_embeddings=True, attention_k_eq_v=k_is_v,
    )  # fmt: skip
    return _save(Gemma4ForCausalLM, config, path)


def make_gemma3n(path: Path) -> Path:
    """The same of Gemma 3n, whose heads are all of one width."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        **_SIZES, num_hidden_layers=6, head_dim=32, sliding_window=48, vocab_size_per_layer_input=256, num_kv_shared_layers=2,
        hidden_size_per_layer_input=16, laurel_rank=8, activation_sparsity_pattern=None, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip
    return _save(Gemma3nForCausalLM, config, path)


def make_llama4(path: Path) -> Path:
    """Llama 4 of four layers, three of which attend to chunks of 64 tokens."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_SIZES, num_hidden_layers=4, head_dim=32, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=64,
        no_rope_layer_interval=4, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(Llama4ForCausalLM, config, path)


def _save(kind: type, config: object, path: Path) -> Path:
    import torch

    torch.manual_seed(7)
    model = kind(config).to(torch.float32)
    if getattr(config, "tie_word_embeddings", False):  # or a token is answered by itself, whatever stands before it
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.02)
    model.save_pretrained(path)
    return path
