"""EngineRow: one way an engine lays out its KV cache, as data. The rows are in kvx/layout/engines.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvx.errors import BadArgument

if TYPE_CHECKING:
    from kvx.spec.cache_spec import CacheSpec

# A row's name begins with its engine's.
ENGINE_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
    "tgi": "TGI",
    "flashinfer": "FlashInfer",
    "max": "MAX",
    "transformers": "Transformers",
    "llama_cpp": "llama.cpp",
    "lmcache": "LMCache",
    "dynamo": "Dynamo",
    "flexkv": "FlexKV",
    "aibrix": "AIBrix",
}


@dataclass(frozen=True)
class EngineRow:
    name: str  # engine, then version or mode: "vllm.0.23", "sglang.page_head"
    versions: str  # those it holds for, or the one it was read in
    layout: str  # kvx/layout/axes.py reads it
    notes: str  # what the string cannot say
    block_size: str = ""  # the engine's own rule, "" where none was read. The layout's splits are checked; this is not.
    dtypes: str = ""  # as block_size
    num_kv_heads: int = 0  # 1: one latent row per token (MLA). 0: any
    registered: str = ""  # the dimensions of the tensors the engine hands out, where they are not in the order of memory

    @property
    def engine(self) -> str:
        return ENGINE_NAMES[self.name.split(".")[0]]

    def refuses(self, block_size: int) -> bool:
        """Whether the engine's own rule rules this block size out. Rules in words are not read."""
        if rule := re.fullmatch(r"multiple of (\d+)", self.block_size):
            return block_size % int(rule[1]) != 0
        if re.fullmatch(r"[\d, ]+", self.block_size):
            return str(block_size) not in self.block_size.split(", ")
        return self.block_size == "power of two" and block_size.bit_count() != 1

    def spec(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        format: str = "bf16",
        v_head_dim: int = 0,
    ) -> CacheSpec:
        """A cache of this engine. `dataclasses.replace` gives it what else a spec has: a shard's start, a model."""
        # A spec reads its layout, so this package is imported before specs are.
        from kvx.spec.cache_spec import CacheSpec

        if self.num_kv_heads and num_kv_heads != self.num_kv_heads:
            raise BadArgument(
                f'engine "{self.name}": num_kv_heads is {num_kv_heads}; a latent row belongs to no head. Give {self.num_kv_heads}.'
            )
        return CacheSpec(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layout=self.layout,
            format=format,
            v_head_dim=v_head_dim,
            num_layers=num_layers,
        )
