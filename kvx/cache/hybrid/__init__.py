"""The hybrid cache of DeepSeek-V4: windows of rows, compressed entries in blocks, and the sums that entries are made of."""

from kvx.cache.hybrid.cache import HybridCache, LayerStore, Request
from kvx.cache.hybrid.prefix import HybridPrefix, Resumed
from kvx.cache.hybrid.rows import ROW_FORMATS, RowCodec, RowFormat
from kvx.cache.hybrid.schema import Bytes, HybridSchema, LayerSchema
from kvx.cache.hybrid.state import RequestState, put_state, take_state

__all__ = [
    "ROW_FORMATS", "Bytes", "HybridCache", "HybridPrefix", "HybridSchema", "LayerSchema", "LayerStore", "Request", "RequestState",
    "Resumed", "RowCodec", "RowFormat", "put_state", "take_state",
]  # fmt: skip
