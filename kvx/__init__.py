"""KVX: one library for every KV cache of LLM inference.

spec = kvx.CacheSpec(num_blocks=64, block_size=16, num_kv_heads=8, head_dim=128, format="bf16")
cache = kvx.allocate(spec).cache
kvx.write(cache, k, v, slot_mapping=slots, spec=spec)
k, v = kvx.gather(cache, kvx.PackedTable(block_table, seq_lens), spec=spec)
"""

from kvx.errors import (
    BadArgument,
    Incompatible,
    InternalError,
    KvxError,
    KvxWarning,
    LayoutError,
    OutOfRange,
    Unsupported,
)
from kvx.files import load, save
from kvx.layout.axes import HND, NHD, Layout, hnd_packed
from kvx.layout.buffers import allocate_buffers
from kvx.layout.describe import describe
from kvx.layout.engines import engine
from kvx.layout.plan import Plan, plan
from kvx.layout.planes import views
from kvx.layout.storage import Storage, allocate
from kvx.layout.views import PlaneView, layer_views
from kvx.ops.amax import amax
from kvx.ops.backend import debug
from kvx.ops.convert import bind, convert
from kvx.ops.digest import Digest, digest
from kvx.ops.gather import gather
from kvx.ops.library import include_dir, library_path
from kvx.ops.write import write
from kvx.quant.scales import scale_from_amax
from kvx.spec import FORMATS, CacheSpec, Format, Granularity, from_json, to_json
from kvx.tables import (
    KvOffsetsTable,
    PackedTable,
    PageCsrTable,
    RaggedTable,
    Table,
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
    "CacheSpec",
    "Digest",
    "Format",
    "Granularity",
    "Incompatible",
    "InternalError",
    "KvOffsetsTable",
    "KvxError",
    "KvxWarning",
    "Layout",
    "LayoutError",
    "OutOfRange",
    "PackedTable",
    "PageCsrTable",
    "Plan",
    "PlaneView",
    "RaggedTable",
    "Storage",
    "Table",
    "Unsupported",
    "allocate",
    "allocate_buffers",
    "amax",
    "bind",
    "convert",
    "cu_seqlens",
    "debug",
    "describe",
    "digest",
    "engine",
    "from_json",
    "gather",
    "hnd_packed",
    "include_dir",
    "layer_views",
    "library_path",
    "load",
    "plan",
    "save",
    "scale_from_amax",
    "slot_mapping",
    "to_json",
    "to_page_csr",
    "to_ragged",
    "views",
    "write",
]
