"""What a cache layer holds as [batch, heads, columns, dim]: which columns of K and V, and whose window they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kvx.adapters.transformers.layer import KvxLayer
from kvx.errors import Unsupported

# By name, because each version has some of them, and exactly: classes made from these keep more than K and V.
_LINEAR = "LinearAttention"  # states alone: LinearAttentionLayer; beside K and V: LinearAttentionAnd...
_FULL = ("DynamicLayer", "StaticLayer", f"{_LINEAR}AndFullAttentionLayer", f"{_LINEAR}AndStaticFullAttentionLayer")
_SLIDING = (
    *("DynamicSlidingWindowLayer", "StaticSlidingWindowLayer", "SlidingWindowLayer", "ChunkedSlidingLayer"),
    *(f"{_LINEAR}AndSlidingWindowAttentionLayer", f"{_LINEAR}AndStaticSlidingWindowAttentionLayer"),
)


class DenseLayer(NamedTuple):
    keys: Tensor  # [batch, heads, columns, dim], the columns that are there; nothing before the first update
    values: Tensor
    first: int  # which column of all is the first of them
    length: int  # columns of all
    window: int  # positions a token sees; 0: all
    capacity: float  # columns it can hold: inf where it grows, or lets the oldest go


def dense_layer(call: str, index: int, layer: Any) -> DenseLayer:
    name = type(layer).__name__
    if name not in (*_FULL, *_SLIDING) and not isinstance(layer, KvxLayer):
        raise Unsupported(
            f"{call}(): layer {index} is a {name}, which keeps more than K, V and states, or not as they are. Layers are of "
            f"{', '.join((*_FULL, *_SLIDING))}, or a KvxCache's."
        )
    is_static = hasattr(layer, "max_cache_len")
    window = int(layer.max_cache_len if is_static else getattr(layer, "sliding_window", 0)) if name in _SLIDING else 0
    window = layer.window if isinstance(layer, KvxLayer) else window
    capacity = float(layer.max_cache_len) if is_static and not window else float("inf")
    length = int(layer.get_seq_length())
    if not is_filled(layer) or not length:
        return DenseLayer(Tensor(), Tensor(), 0, 0, window, capacity)
    # Static layers have room for all their columns from the start; the first `length` are written.
    k, v = (x[:, :, :length] for x in (layer.read() if isinstance(layer, KvxLayer) else (layer.keys, layer.values)))
    return DenseLayer(k, v, length - k.shape[2], length, window, capacity)


def keeps_kv(layer: Any) -> bool:
    """Layers of states alone have no length, nor have those that keep nothing."""
    return hasattr(layer, "get_seq_length")


def is_filled(layer: Any) -> bool:
    """Whether it has tensors of K and V. transformers 4.56 knows by them alone."""
    if not keeps_kv(layer):
        return False
    if hasattr(layer, "is_initialized"):
        return bool(layer.is_initialized)
    return getattr(layer, "keys", None) is not None
