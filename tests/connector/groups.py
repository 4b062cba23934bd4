"""Groups of layers as an adapter reads them."""

from __future__ import annotations

from kvx.connector.groups import Group


def a_group(
    layers: tuple[int, ...] = (0,),
    *,
    index: int = 0,
    block_size: int = 16,
    num_kv_heads: int = 1,
    head_dim: int = 8,
    window: int = 0,
) -> Group:
    names = tuple(f"layers.{n}.attn" for n in layers)
    return Group(index, names, layers, block_size, num_kv_heads, head_dim, 0, "f32", window, is_latent=False)
