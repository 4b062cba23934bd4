"""KVX: one library for every KV cache of LLM inference.

spec = kvx.CacheSpec(num_blocks=64, block_size=16, num_kv_heads=8, head_dim=128, format="bf16")
cache = kvx.allocate(spec).cache
kvx.write(cache, k, v, slot_mapping=slots, spec=spec)
k, v = kvx.gather(cache, kvx.PackedTable(block_table, seq_lens), spec=spec)

Nothing is imported until it is used, torch neither: `kvx --help` takes a fifth of a second, and a program pays for what it calls.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; the same names as in _HOMES (tests/test_imports.py compares)
    from kvx.cache import BlockAllocator, LayerGroup, PagedCache, PrefixCache
    from kvx.errors import (
        BadArgument,
        Damaged,
        Incompatible,
        InternalError,
        KvxError,
        KvxWarning,
        LayoutError,
        OutOfBlocks,
        OutOfRange,
        TierError,
        Unsupported,
    )
    from kvx.files import load, save
    from kvx.identity import weights_identity
    from kvx.layout.axes import HND, NHD, Layout, hnd_packed
    from kvx.layout.buffers import allocate_buffers
    from kvx.layout.describe import describe
    from kvx.layout.engines import engine
    from kvx.layout.plan import Plan, plan
    from kvx.layout.planes import views
    from kvx.layout.pointers import CachePointers, cache_pointers
    from kvx.layout.views import PlaneView, layer_views
    from kvx.ops.append.amax import amax
    from kvx.ops.append.append import append_batched, qkv_norm_rope_append
    from kvx.ops.append.gather import gather
    from kvx.ops.append.gather_sequence import gather_sequence
    from kvx.ops.append.norm_rope import qk_norm_rope, qkv_norm_rope
    from kvx.ops.append.transpose_heads import transpose_heads
    from kvx.ops.append.write import write
    from kvx.ops.attention.attention import attention_decode, attention_plan, attention_varlen, attention_workspace_bytes
    from kvx.ops.attention.batched import attention_decode_batched
    from kvx.ops.attention.merge import merge_attention
    from kvx.ops.attention.mla import attention_mla
    from kvx.ops.attention.sparse import attention_sparse, attention_sparse_workspace_bytes
    from kvx.ops.backend import chosen_backend, debug, supports
    from kvx.ops.entry.append_swa import append_swa
    from kvx.ops.entry.compress import compress
    from kvx.ops.entry.index_scores import index_scores
    from kvx.ops.entry.step import Step
    from kvx.ops.entry.topk import topk, topk_workspace_bytes
    from kvx.ops.library import include_dir, library_path
    from kvx.ops.move.convert import bind, convert
    from kvx.ops.move.convert_cache import ConvertedCache, convert_cache
    from kvx.ops.move.copy_blocks import copy_blocks
    from kvx.ops.move.digest import Digest, digest
    from kvx.ops.storage import Storage, allocate
    from kvx.ops.support import Support
    from kvx.quant.row_pages import row_spec
    from kvx.quant.rows import RowCodec, RowPages
    from kvx.quant.scales import scale_from_amax
    from kvx.spec import FORMATS, CacheSpec, Format, Granularity, from_json, to_json
    from kvx.spec.size import Size, size, size_formats
    from kvx.tables import (
        KvOffsetsTable,
        PackedTable,
        PageCsrTable,
        RaggedTable,
        Table,
        cache_table,
        cu_seqlens,
        slot_mapping,
        to_page_csr,
        to_ragged,
    )

__version__ = "0.1.0"

# Where each name is, by module.
_HOMES = {
    "kvx.cache": "BlockAllocator LayerGroup PagedCache PrefixCache",
    "kvx.errors": "BadArgument Damaged Incompatible InternalError KvxError KvxWarning LayoutError OutOfBlocks "
    "OutOfRange TierError Unsupported",
    "kvx.files": "load save",
    "kvx.identity": "weights_identity",
    "kvx.layout.axes": "HND NHD Layout hnd_packed",
    "kvx.layout.buffers": "allocate_buffers",
    "kvx.layout.describe": "describe",
    "kvx.layout.engines": "engine",
    "kvx.layout.plan": "Plan plan",
    "kvx.layout.planes": "views",
    "kvx.layout.pointers": "CachePointers cache_pointers",
    "kvx.layout.views": "PlaneView layer_views",
    "kvx.ops.append.amax": "amax",
    "kvx.ops.append.append": "append_batched qkv_norm_rope_append",
    "kvx.ops.append.gather": "gather",
    "kvx.ops.append.gather_sequence": "gather_sequence",
    "kvx.ops.append.norm_rope": "qk_norm_rope qkv_norm_rope",
    "kvx.ops.append.transpose_heads": "transpose_heads",
    "kvx.ops.append.write": "write",
    "kvx.ops.attention.attention": "attention_decode attention_plan attention_varlen attention_workspace_bytes",
    "kvx.ops.attention.batched": "attention_decode_batched",
    "kvx.ops.attention.merge": "merge_attention",
    "kvx.ops.attention.mla": "attention_mla",
    "kvx.ops.attention.sparse": "attention_sparse attention_sparse_workspace_bytes",
    "kvx.ops.backend": "chosen_backend debug supports",
    "kvx.ops.entry.append_swa": "append_swa",
    "kvx.ops.entry.compress": "compress",
    "kvx.ops.entry.index_scores": "index_scores",
    "kvx.ops.entry.step": "Step",
    "kvx.ops.entry.topk": "topk topk_workspace_bytes",
    "kvx.ops.library": "include_dir library_path",
    "kvx.ops.move.convert": "bind convert",
    "kvx.ops.move.convert_cache": "ConvertedCache convert_cache",
    "kvx.ops.move.copy_blocks": "copy_blocks",
    "kvx.ops.move.digest": "Digest digest",
    "kvx.ops.storage": "Storage allocate",
    "kvx.ops.support": "Support",
    "kvx.quant.row_pages": "row_spec",
    "kvx.quant.rows": "RowCodec RowPages",
    "kvx.quant.scales": "scale_from_amax",
    "kvx.spec": "FORMATS CacheSpec Format Granularity from_json to_json",
    "kvx.spec.size": "Size size size_formats",
    "kvx.tables": "KvOffsetsTable PackedTable PageCsrTable RaggedTable Table cache_table cu_seqlens slot_mapping "
    "to_page_csr to_ragged",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
# Found after `import kvx` alone: kvx.spec.
_PARTS = (
    "adapters", "cache", "connector", "errors", "files", "handover", "identity", "layout", "ops", "quant", "runner", "spec",
    "tables", "tiers", "view", "wires",
)  # fmt: skip

if not TYPE_CHECKING:  # a checker that sees a __getattr__ takes every name for one that exists

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return import_module(f"kvx.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'kvx' has no attribute {name!r}", name=name, obj=import_module("kvx"))
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value  # the next time Python finds it by itself
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_PARTS})


__all__ = [
    "FORMATS",
    "HND",
    "NHD",
    "BadArgument",
    "BlockAllocator",
    "CachePointers",
    "CacheSpec",
    "ConvertedCache",
    "Damaged",
    "Digest",
    "Format",
    "Granularity",
    "Incompatible",
    "InternalError",
    "KvOffsetsTable",
    "KvxError",
    "KvxWarning",
    "LayerGroup",
    "Layout",
    "LayoutError",
    "OutOfBlocks",
    "OutOfRange",
    "PackedTable",
    "PageCsrTable",
    "PagedCache",
    "Plan",
    "PlaneView",
    "PrefixCache",
    "RaggedTable",
    "RowCodec",
    "RowPages",
    "Size",
    "Step",
    "Storage",
    "Support",
    "Table",
    "TierError",
    "Unsupported",
    "allocate",
    "allocate_buffers",
    "amax",
    "append_batched",
    "append_swa",
    "attention_decode",
    "attention_decode_batched",
    "attention_mla",
    "attention_plan",
    "attention_sparse",
    "attention_sparse_workspace_bytes",
    "attention_varlen",
    "attention_workspace_bytes",
    "bind",
    "cache_pointers",
    "cache_table",
    "chosen_backend",
    "compress",
    "convert",
    "convert_cache",
    "copy_blocks",
    "cu_seqlens",
    "debug",
    "describe",
    "digest",
    "engine",
    "from_json",
    "gather",
    "gather_sequence",
    "hnd_packed",
    "include_dir",
    "index_scores",
    "layer_views",
    "library_path",
    "load",
    "merge_attention",
    "plan",
    "qk_norm_rope",
    "qkv_norm_rope",
    "qkv_norm_rope_append",
    "row_spec",
    "save",
    "scale_from_amax",
    "size",
    "size_formats",
    "slot_mapping",
    "supports",
    "to_json",
    "to_page_csr",
    "to_ragged",
    "topk",
    "topk_workspace_bytes",
    "transpose_heads",
    "views",
    "weights_identity",
    "write",
]
