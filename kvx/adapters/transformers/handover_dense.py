"""K and V of transformers' own layers, [batch, heads, columns, dim], to and from a handover.

A layer of DeepSeek's latents (MLA) has one head, a latent as K and the rotary part as V. In a handover they are one row a token,
the latent first. A KvxCache of latents goes this way too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from kvx.adapters.transformers.cache import KvxCache
from kvx.adapters.transformers.dense_layer import dense_layer, is_filled, keeps_kv
from kvx.adapters.transformers.layer import FORMATS, KvxLayer
from kvx.adapters.transformers.wanted import Wanted
from kvx.errors import BadArgument
from kvx.handover import Handover, Part, Source
from kvx.handover.layer_blocks import LayerTensors, require_tokens, sources, write_layers
from kvx.spec import CacheSpec

_LAYOUTS = {1: "block head token dim", 2: "kv | block head token dim"}  # of a latent, of K and V


def dense_sources(cache: Cache, wanted: Wanted) -> list[Source]:
    found = []
    n, size = wanted.num_tokens, wanted.block_size
    device = next(layer.keys.device for layer in cache.layers if is_filled(layer))  # layers may be spread over several
    for index, layer in enumerate(cache.layers):
        if not is_filled(layer):
            continue  # of a model whose later layers read the K and V of earlier ones
        held = dense_layer("export_cache", index, layer)
        wanted.check_sequence(held.keys.shape[0])
        wanted.check_length(held.length, wanted.padding or 0)
        if wanted.padding is None and n < held.length:
            raise BadArgument(
                f"export_cache(): {n} tokens; the cache has {held.length} columns of each sequence. Say how many at its left are "
                "padding: padding=, 0 where these tokens are a beginning."
            )
        start = held.first - (wanted.padding or 0)  # position of the first column that is here; padding stands before 0
        first = max(start, 0)
        wanted.check_window(held.window, first, index)
        rows = _planes(index, *(x[wanted.sequence, :, first - start : n - start].to(device) for x in (held.keys, held.values)))
        blocks = tuple(_blocks(x, first % size, size) for x in rows)
        here = LayerTensors(index, blocks, _spec(blocks, size))
        ids = [-1] * (first // size) + list(range(blocks[0].shape[0]))
        found += sources([here], ids, num_tokens=n, window=held.window, first_token=first)
    return found


def is_latent(layer: KvxLayer) -> bool:
    """K and V of one head are a latent and its rotary part."""
    return layer.is_initialized and layer.spec.num_kv_heads == 1 and layer.spec.plane(0).head_dim != layer.spec.kv[1].head_dim


def fill_dense(cache: Cache, handover: Handover, n: int, dtype: torch.dtype, device: torch.device, latent_dim: int) -> None:
    """An empty cache. `latent_dim` of the rows of latents are K."""
    for index, layer in enumerate(cache.layers):
        if not keeps_kv(layer):
            continue
        held = dense_layer("import_cache", index, layer)
        require_tokens("import_cache", handover, index, held.window, n)
        if n > held.capacity:
            raise BadArgument(f"import_cache(): {n} tokens; layer {index} of the cache has room for {held.capacity:.0f}.")
    parts = [part for part in handover.parts if isinstance(part.spec, CacheSpec)]
    for part in parts if not cache.layers else ():  # they come as they are filled, and the model's masks have the windows
        require_tokens("import_cache", handover, part.layers[0], part.window, n)
    at = {"cache_position": torch.arange(n, device=device)}  # transformers 4 writes there; 5 counts itself
    for part in parts:
        for index in part.layers:
            rows = [x[:, :, :n] for x in _read(handover, part, index, n, dtype, device)]
            k, v = rows if len(rows) == 2 else (rows[0][..., :latent_dim], rows[0][..., latent_dim:])
            cache.update(k, v, index, at)
            if isinstance(cache, KvxCache):
                cache.settle(cache.layers[index])


def _read(handover: Handover, part: Part, layer: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """[1, heads, tokens, dim] of K and of V, or of latents; whole blocks long. What a window has let go is 0, and never seen."""
    spec = part.kv
    size = -(-n // spec.block_size) * spec.block_size
    planes = [
        torch.zeros(1, spec.num_kv_heads, size, spec.plane(i).head_dim, dtype=dtype, device=device) for i in range(spec.num_planes)
    ]
    write_layers(handover, [LayerTensors(layer, tuple(planes), _spec(tuple(planes), size))], [0], num_tokens=n)
    return tuple(planes)


def _planes(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """[heads, tokens, dim] of K and of V, or of both in one row where they are parts of a latent."""
    if k.dtype not in FORMATS:
        raise BadArgument(f"export_cache(): keys of layer {layer} are {k.dtype}; they must be {', '.join(map(str, FORMATS))}.")
    if k.shape[0] != 1 or k.shape[2] == v.shape[2]:
        return k, v
    return (torch.cat((k, v), dim=2),)


def _blocks(x: Tensor, before: int, block_size: int) -> Tensor:
    """[heads, tokens, dim] as [blocks, heads, block_size, dim]; the first token has `before` others before it in its block."""
    x = pad(x, (0, 0, before, -(before + x.shape[1]) % block_size))
    blocks: Tensor = x.unflatten(1, (-1, block_size))
    return blocks.transpose(0, 1).contiguous()


def _spec(planes: tuple[Tensor, ...], block_size: int) -> CacheSpec:
    """Of tensors [blocks, heads, block_size, dim]."""
    x = planes[0]
    return CacheSpec(
        num_blocks=x.shape[0], block_size=block_size, num_kv_heads=x.shape[1], head_dim=x.shape[3], v_head_dim=planes[-1].shape[3],
        layout=_LAYOUTS[len(planes)], format=FORMATS[x.dtype],
    )  # fmt: skip
