"""KVX: one library for every KV cache of LLM inference.

spec = kvx.CacheSpec(num_blocks=64, block_size=16, num_kv_heads=8, head_dim=128, format="bf16")
cache = kvx.allocate(spec).cache
kvx.write(cache, k, v, slot_mapping=slots, spec=spec)
k, v = kvx.gather(cache, kvx.PackedTable(block_table, seq_lens), spec=spec)
"""

from kvx import starting  # first: Ctrl-C while a command imports the rest ends it quietly
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
from kvx.layout.storage import Storage, allocate
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
from kvx.ops.move.copy_blocks import copy_blocks
from kvx.ops.move.digest import Digest, digest
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

__all__ = [
    "FORMATS",
    "HND",
    "NHD",
    "BadArgument",
    "BlockAllocator",
    "CachePointers",
    "CacheSpec",
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

starting.end()
