"""Caches that are buffers of their own, one a sequence, named by a table of addresses on the device.

For engines that grow one contiguous [heads, capacity, dim] cache a sequence: the table is filled outside of a captured graph, and a
launch inside it reaches all of them. A slot is `cache index * capacity + position`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.axes import HND
from kvx.layout.gate import check_memory
from kvx.spec.cache_spec import CacheSpec

_ALIGNMENT = 16  # device kernels move 16 bytes at a time and cannot look at each address


@dataclass(frozen=True)
class CachePointers:
    """Made by cache_pointers(). `k` and `v` may be refilled with the addresses of other caches alike in shape and strides."""

    k: Tensor  # [num_caches] int64, on the caches' device
    v: Tensor
    ids: Tensor  # [num_caches] int32 there: 0, 1, 2, ...; which cache a sequence has, where nobody says otherwise
    caches: tuple[tuple[Tensor, Tensor], ...]  # kept alive; what the torch definition writes and reads
    spec: CacheSpec  # num_blocks = num_caches, block_size = capacity, layout HND


def cache_pointers(
    caches: Sequence[tuple[Tensor, Tensor]],  # K [num_kv_heads, capacity, head_dim] and V [..., v_head_dim] of each sequence
    *,
    format: str = "",  # "": that of the tensors, f16, bf16 or f32
) -> CachePointers:
    """Addresses of caches that are alike: one shape, type, stride and device for all K, and for all V."""
    call = "cache_pointers"
    if not caches:
        raise BadArgument(f"{call}(): caches is empty; give at least one (K, V).")
    first_k, first_v = caches[0]
    check_memory(call, caches=[x for pair in caches for x in pair])
    for i, pair in enumerate(caches):
        for name, x, like in zip("KV", pair, (first_k, first_v), strict=True):
            if x.dim() != 3 or (x.shape, x.stride(), x.dtype, x.device) != (like.shape, like.stride(), like.dtype, like.device):
                raise BadArgument(
                    f"{call}(): {name} of cache {i} is {list(x.shape)} {x.dtype} with strides {list(x.stride())} on {x.device}; "
                    f"cache 0 has {list(like.shape)} {like.dtype}, {list(like.stride())}, {like.device}. All are "
                    "[num_kv_heads, capacity, dim] and alike."
                )
            if x.data_ptr() % _ALIGNMENT:
                raise BadArgument(f"{call}(): {name} of cache {i} starts at an address that is no multiple of {_ALIGNMENT} bytes.")
    if first_v.shape[:2] != first_k.shape[:2]:
        raise BadArgument(f"{call}(): K is {list(first_k.shape)} and V {list(first_v.shape)}; heads and capacity must agree.")
    names = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
    heads, capacity, dim = first_k.shape
    spec = CacheSpec(
        len(caches), capacity, heads, dim, layout=HND, format=format or names.get(first_k.dtype, ""), v_head_dim=first_v.shape[2]
    )
    element = spec.plane(0).format.element
    if spec.plane(0).format.is_inline or element.bits < 8 or getattr(torch, element.torch_name) != first_k.dtype:
        raise BadArgument(
            f"{call}(): format {spec.plane(0).format} does not lie in {first_k.dtype}, an element each. Formats of whole bytes "
            "with scales apart do."
        )
    k, v = (torch.tensor([pair[i].data_ptr() for pair in caches], dtype=torch.int64, device=first_k.device) for i in (0, 1))
    ids = torch.arange(len(caches), dtype=torch.int32, device=first_k.device)
    return CachePointers(k, v, ids, tuple((a, b) for a, b in caches), spec)
