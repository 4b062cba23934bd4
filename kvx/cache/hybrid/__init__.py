"""The hybrid cache of DeepSeek-V4: windows of rows, compressed entries in blocks, and the sums that entries are made of."""

from kvx.cache.hybrid.cache import HybridCache
from kvx.cache.hybrid.handle import ClassicalView, IndexerView, LayerHandle, Projected, SWAView
from kvx.cache.hybrid.schema import Bytes, HybridSchema, LayerSchema
from kvx.cache.hybrid.store import LayerStore
from kvx.quant.rows import RowCodec
from kvx.spec.formats import ROW_FORMATS
from kvx.spec.formats import Format as RowFormat

__all__ = [
    "ROW_FORMATS",
    "Bytes",
    "ClassicalView",
    "HybridCache",
    "HybridSchema",
    "IndexerView",
    "LayerHandle",
    "LayerSchema",
    "LayerStore",
    "Projected",
    "RowCodec",
    "RowFormat",
    "SWAView",
]
