"""The rows: how each engine lays out its KV cache. A new engine is a new row, not new code.

Shapes and versions were read in the engines' own sources and wheels in 2026; tests/golden holds the bytes of each row.
docs/layouts.md prints the same table, and a test compares.
"""

from __future__ import annotations

import warnings
from difflib import get_close_matches

from kvx.errors import BadArgument, KvxWarning
from kvx.layout.engine_row import ENGINE_NAMES, EngineRow

_X16, _X32 = "multiple of 16", "multiple of 32"
_CELL = "A cell is K's row, then V's. Block 0 is the null block."
_CELL_TYPES = "f16, bf16, fp8; per-token-head scales as the inline formats have them. nvfp4 pages are another layout"
_CPU = "The true bytes; the tensor's shape says [block, head, token, 2 dim]. One allocation since 0.28."
_TRASH = "The first page takes padding writes."
_LATENT = "MLA: K and V are read out of one latent row per token."
_VIEW = "layer | block head token (kv dim)"  # what vLLM registers since 0.26, in whatever order the memory is

_VLLM = (
    EngineRow("vllm.0.22.flash_attn", "<= 0.22", "layer | kv block token head dim", "FlashAttention, FlexAttention.", _X16),
    EngineRow("vllm.0.22.flash_attn.hnd", "<= 0.22", "layer | kv block head token dim", "FlashAttention, layout HND.", _X16),
    EngineRow("vllm.0.22.triton", "<= 0.22", "layer | block kv token head dim", "Triton, FlashInfer NHD.", _X16),
    EngineRow("vllm.0.22.flashinfer_hnd", "<= 0.22", "layer | block kv head token dim", "FlashInfer, layout HND.", "16, 32, 64"),
    EngineRow("vllm.0.22.cpu", "<= 0.22", "layer | kv block head token dim", "Its shape; how its kernels packed is not checked."),
    EngineRow("vllm.0.23", "0.23 - 0.25", "layer | block kv token head dim", "Block 0 is the null block.", _X16),
    EngineRow("vllm.0.23.hnd", "0.23 - 0.25", "layer | block kv head token dim", "Layout HND. Block 0 is the null block.", _X16),
    EngineRow("vllm.0.23.cross_layer", "0.23 - 0.25", "block layer kv token head dim", "Layout NHD, any backend.", _X16),
    EngineRow("vllm.0.23.cross_layer.fa_hnd", "0.23 - 0.25", "block head layer kv token dim", "FlashAttention, layout HND.", _X16),
    EngineRow("vllm.0.23.cross_layer.fi_hnd", "0.23 - 0.25", "block kv head layer token dim", "FlashInfer, layout HND.", _X16),
    EngineRow("vllm.0.26.nhd", "0.26 - 0.27", "layer | block token head (kv dim)", _CELL, _X16, _CELL_TYPES, registered=_VIEW),
    EngineRow("vllm.0.26.hnd", "0.26 - 0.27", "layer | block head token (kv dim)", _CELL, _X16, _CELL_TYPES, registered=_VIEW),
    EngineRow(
        "vllm.lbnhc",
        ">= 0.28",
        "layer block token head (kv dim)",
        f"Alias NHD, the default. {_CELL}",
        _X16,
        _CELL_TYPES,
        registered=_VIEW,
    ),
    EngineRow(
        "vllm.lbhnc",
        ">= 0.28",
        "layer block head token (kv dim)",
        f"Alias HND, NIXL's default. {_CELL}",
        _X16,
        _CELL_TYPES,
        registered=_VIEW,
    ),
    EngineRow("vllm.lhbnc", ">= 0.28", "layer head block token (kv dim)", f"ROCm's own. {_CELL}", _X16, _CELL_TYPES),
    EngineRow("vllm.blhnc", ">= 0.28", "block layer head token (kv dim)", f"Cross-layer. {_CELL}", _X16, _CELL_TYPES),
    EngineRow("vllm.blnhc", ">= 0.28", "block layer token head (kv dim)", f"Cross-layer. {_CELL}", _X16, _CELL_TYPES),
    EngineRow("vllm.bhlnc", ">= 0.28", "block head layer token (kv dim)", f"Cross-layer. {_CELL}", _X16, _CELL_TYPES),
    EngineRow(
        "vllm.cpu",
        ">= 0.23",
        "layer | block head kv[K: dim token; V: token dim]",
        _CPU,
        _X32,
        "f32, f16; bf16 without AMX or BFMMLA",
        registered=_VIEW,
    ),
    EngineRow(
        "vllm.cpu.amx",
        ">= 0.23",
        "layer | block head kv[K: token/16 dim/2 token%16 dim%2; V: dim/16 token/2 dim%16 token%2]",
        _CPU,
        _X32,
        "bf16 on x86 with AMX",
        registered=_VIEW,
    ),
    EngineRow(
        "vllm.cpu.arm",
        "0.32",
        "layer | block head kv[K: token/8 dim/4 token%8 dim%4; V: dim/8 token/4 dim%8 token%4]",
        _CPU,
        _X32,
        "bf16 on Arm built with BFMMLA",
        registered=_VIEW,
    ),
    EngineRow(
        "vllm.mla",
        "<= 0.27",
        "layer | block token head dim",
        f"{_LATENT} Since 0.28 in one allocation.",
        "by backend",
        num_kv_heads=1,
    ),
)
_SGLANG = (
    EngineRow("sglang.nhd", "0.5.23", "kv layer | (block token) head dim", f"Slots of tokens. {_TRASH}", "any; 1 by default"),
    EngineRow("sglang.hnd", "0.5.23", "kv layer | block head token dim", f"SGLANG_USE_HND_KVCACHE. {_TRASH}"),
    EngineRow(
        "sglang.vectorized_5d",
        "0.5.23",
        "layer kv[K: | block head dim/x token dim%x; V: | block head token/x dim token%x]",
        "AITER on ROCm; x is 16 bytes of elements.",
        "64 by default",
    ),
    EngineRow("sglang.mla", "0.5.23", "layer | (block token) head dim", f"{_LATENT} {_TRASH}", num_kv_heads=1),
    EngineRow("sglang.layer_first", "0.5.23 host", "kv layer (block token) head dim", "MLA has the same without kv."),
    EngineRow("sglang.page_first", "0.5.23 host", "kv (block token) layer head dim", "MLA has the same without kv."),
    EngineRow("sglang.page_first_direct", "0.5.23 host", "kv block layer token head dim", "MLA has the same without kv."),
    EngineRow(
        "sglang.page_head", "0.5.23 host", "kv block head token layer dim", "One head's part is a run: TP ranks can split it."
    ),
    EngineRow(
        "sglang.page_unified",
        "0.5.23 host",
        "block head layer kv token dim",
        "page-unified-v1 with one head a group; with 4: block head/4 layer kv token head%4 dim.",
    ),
    EngineRow("sglang.page_unified.mla", "0.5.23 host", "block layer token head dim", _LATENT, num_kv_heads=1),
    EngineRow(
        "sglang.page_first_kv_split",
        "0.5.23 host",
        "kv | block layer token head dim",
        "Ascend MLA: the latent stands as K, the rotary part as V (v_head_dim).",
        num_kv_heads=1,
    ),
)
_ENGINES = (
    EngineRow(
        "tensorrt_llm",
        "2026",
        "block layer kv head token dim",
        "Pool. KVCacheIndex counts K-or-V blocks of one layer.",
        "power of two",
    ),
    EngineRow("tensorrt_llm.mla", "2026", "block layer head token dim", f"KV factor 1. {_LATENT}", "power of two", num_kv_heads=1),
    EngineRow("tgi.flashinfer", "3", "layer kv | block token head dim", "The table is per token.", "1"),
    EngineRow("tgi.flashdecoding", "3", "layer kv | block token head dim", "As tgi.flashinfer, in longer blocks.", "256"),
    EngineRow(
        "tgi.paged",
        "3; vLLM's first",
        "layer kv[K: | block head dim/x token dim%x; V: | block head dim token]",
        "x is 16 bytes of elements.",
        "16",
    ),
    EngineRow("flashinfer.nhd", "0.7", "layer kv | block token head dim", "A tuple of K and V; layers are the caller's."),
    EngineRow("flashinfer.hnd", "0.7", "layer kv | block head token dim", "A tuple of K and V; layers are the caller's."),
    EngineRow("flashinfer.stacked.nhd", "0.7", "layer | block kv token head dim", "One tensor; layers are the caller's."),
    EngineRow("flashinfer.stacked.hnd", "0.7", "layer | block kv head token dim", "One tensor; layers are the caller's."),
    EngineRow(
        "max",
        "2026-08",
        "block kv layer token head dim",
        "With per_layer_buffers: layer | block kv token head dim.",
        "multiple of 128",
    ),
    EngineRow("transformers", "5.22", "layer kv | block head token dim", "DynamicCache, StaticCache.", "one block per sequence"),
    EngineRow("transformers.paged", "5.22", "block layer kv token head dim", "Continuous batching; two leading sectors are trash."),
    EngineRow(
        "llama_cpp", "2026-08", "layer kv | block token (head dim)", "With flash attention. A block is a stream.", "its cells"
    ),
    EngineRow(
        "llama_cpp.v_transposed",
        "2026-08",
        "layer kv[K: | block token (head dim); V: | block (head dim) token]",
        "Without flash attention. A block is a stream.",
        "its cells",
    ),
)
_STORES = (
    EngineRow("lmcache.2ltd", "0.5.6", "block | kv layer token (head dim)", "KV_2LTD. A block is a chunk.", "256 by default"),
    EngineRow("lmcache.t2d", "0.5.6", "layer block | token kv (head dim)", "KV_T2D, layer by layer.", "256 by default"),
    EngineRow("lmcache.2td", "0.5.6", "layer block | kv token (head dim)", "KV_2TD, layer by layer, blending.", "256 by default"),
    EngineRow("lmcache.mla", "0.5.6", "block | layer token head dim", f"KV_MLA_FMT. {_LATENT}", "256 by default", num_kv_heads=1),
    EngineRow("dynamo.block_stack.nhd", "1.4", "block layer kv | token head dim", "A pointer for each block, layer, K and V."),
    EngineRow("dynamo.block_stack.hnd", "1.4", "block layer kv | head token dim", "A pointer for each block, layer, K and V."),
    EngineRow("dynamo.operational.nhd", "1.4", "block | layer kv token head dim", "A block stack's chunks, one buffer per block."),
    EngineRow("dynamo.operational.hnd", "1.4", "block | layer kv head token dim", "A block stack's chunks, one buffer per block."),
    EngineRow("dynamo.universal", "1.4", "block | head layer kv token dim", "UniversalTP: a head's bytes are one run."),
    EngineRow("dynamo.universal.pp", "1.4", "block | layer head kv token dim", "UniversalPP: a layer's bytes are one run."),
    EngineRow("flexkv.layerfirst", "2026-08", "layer kv block token head dim", "LAYERFIRST."),
    EngineRow(
        "flexkv.blockfirst", "2026-08", "block layer kv token head dim", "BLOCKFIRST; mixed layer groups have this one only."
    ),
    EngineRow("flexkv.layerblock", "2026-08", "layer block kv token head dim", "LAYERBLOCK."),
    EngineRow("aibrix.ncld", "0.8", "block | token kv layer (head dim)", "NCLD."),
    EngineRow("aibrix.lcnd", "0.8", "block | layer kv token (head dim)", "LCND."),
)
ENGINES: dict[str, EngineRow] = {row.name: row for row in (*_VLLM, *_SGLANG, *_ENGINES, *_STORES)}


# Of an engine with several rows, the one its newest version has unless it is told otherwise.
_DEFAULTS = {"vllm": "vllm.lbnhc", "sglang": "sglang.nhd", "flashinfer": "flashinfer.nhd", "lmcache": "lmcache.2ltd"}
_OTHER_NAMES = {"trtllm": "tensorrt_llm", "trt_llm": "tensorrt_llm", "tensorrt": "tensorrt_llm", "hf": "transformers"}
_OTHER_NAMES |= {"huggingface": "transformers", "llama.cpp": "llama_cpp", "llamacpp": "llama_cpp"}


def engine(name: str) -> EngineRow:
    """The engine layout of that name, such as "vllm.0.26.nhd"; `kvx layouts` lists them. Its `spec(...)` makes a CacheSpec.

    The name of an engine alone, such as "vllm", means the default layout of its newest version; a warning says which that is.
    """
    part = row_name(name)
    if part in ENGINES:
        return ENGINES[part]
    if part in _DEFAULTS:
        row = ENGINES[_DEFAULTS[part]]
        warnings.warn(
            f'engine "{name}" is taken as "{row.name}", the default of {row.engine} {row.versions}. Give that name to '
            "avoid this warning; `kvx layouts` lists the others.",
            KvxWarning,
            stacklevel=2,
        )
        return row
    near = [n for n in ENGINES if part and part in n] or [
        *get_close_matches(part, ENGINE_NAMES, n=1, cutoff=0.7),
        *get_close_matches(part, ENGINES, n=5, cutoff=0.5),
    ]
    hint = f"Similar names: {', '.join(near)}. " if near else ""
    raise BadArgument(f'engine "{name}" does not exist. {hint}`kvx layouts` lists all {len(ENGINES)}.')


def engine_rows(name: str) -> list[EngineRow]:
    """The row of that name, or all rows of the engine."""
    part = row_name(name)
    of_engine = [row for row in ENGINES.values() if part in ENGINE_NAMES and row.name.split(".")[0] == part]
    return of_engine or [engine(name)]


def row_name(name: str) -> str:
    """As rows are called: "vLLM" and "TensorRT-LLM" are vllm and tensorrt_llm."""
    text = str(name).strip().lower().replace("-", "_")
    return _OTHER_NAMES.get(text, text)
