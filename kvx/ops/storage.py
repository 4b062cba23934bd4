"""Storage: the cache tensors of one layer together with their spec and scales, so that calls need not pass those again."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvx.layout.buffers import mark_unset
from kvx.layout.device_memory import check_fits
from kvx.layout.planes import cache_shapes
from kvx.ops.append.gather import gather
from kvx.ops.append.write import write
from kvx.ops.attention.attention import attention_decode, attention_varlen
from kvx.spec.byte_size import byte_text
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.shown import Shown
from kvx.tables import PackedTable, Table, slot_mapping


@dataclass(frozen=True, eq=False, repr=False)
class Storage(Shown):
    """The cache tensors of one layer with their spec and, if the format stores them separately, their scales.

    kvx.allocate makes one. Its methods call the op of the same name with the spec and the scales.
    """

    spec: CacheSpec
    cache: Tensor | tuple[Tensor, Tensor]
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def write(self, k: Tensor, v: Tensor, slots: Tensor, **options: Any) -> None:
        """Write the K and V of each token, [num_tokens, num_kv_heads, head_dim], to its slot.

        `slots(table)` computes the slots; a token with slot -1 is skipped. `options` are further arguments of kvx.write.
        """
        write(self.cache, k, v, slot_mapping=slots, spec=self.spec, **{**self.scales(), **options})

    def slots(self, table: PackedTable, new: int | Tensor | None = None) -> Tensor:
        """The slots of all tokens of each sequence, or of the last `new`, one sequence after the other (kvx.slot_mapping)."""
        return slot_mapping(table, block_size=self.spec.block_size, new=new)

    def gather(self, table: Table, **options: Any) -> tuple[Tensor, Tensor]:
        """Read K and V of every sequence, [batch, max_seq_len, num_kv_heads, head_dim], zero past its length.

        `options` are further arguments of kvx.gather. On a GPU pass `max_seq_len`.
        """
        return gather(self.cache, table, spec=self.spec, **{**self.scales(), **options})

    def attend(self, q: Tensor, table: Table, *, cu_seqlens: Tensor | None = None, **options: Any) -> Tensor:
        """Causal attention of `q` [num_tokens, num_heads, head_dim] over the sequences of `table`; returns the output.

        The queries of a sequence are its last tokens. Without `cu_seqlens` all sequences have the same number of queries
        (kvx.attention_decode). With it, sequence s has rows cu_seqlens[s] to cu_seqlens[s + 1] of `q` (kvx.attention_varlen).
        `options` are further arguments of these two, which also return the log-sum-exp.
        """
        options = {**self.scales(), **options}
        if cu_seqlens is None:
            return attention_decode(q, self.cache, table, spec=self.spec, **options)[0]
        return attention_varlen(q, self.cache, table, cu_seqlens=cu_seqlens, spec=self.spec, **options)[0]

    def scales(self) -> dict[str, Any]:
        """The scales, as keyword arguments of kvx.write, kvx.gather and attention."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def tensors(self) -> list[Tensor]:
        parts = self.cache if isinstance(self.cache, tuple) else (self.cache,)
        return [t for t in (*parts, self.k_scale, self.v_scale) if t is not None]

    def shown(self) -> dict[str, str]:
        s, tensors = self.spec, self.tensors()
        v = f" and {s.v_format or s.format}" if (s.v_format or s.format) != s.format else ""
        dims = f"{s.head_dim}" + f" and {s.v_head_dim}" * (s.v_head_dim not in (0, s.head_dim))
        return {
            "blocks": f"{s.num_blocks} of {s.block_size} tokens",
            "heads": f"{s.num_kv_heads} of dim {dims}",
            "layout": s.layout,
            "format": f"{s.format}{v}",
            "size": byte_text(sum(t.untyped_storage().nbytes() for t in tensors)),
            "device": str(tensors[0].device),
        }


def allocate(spec: CacheSpec, device: str | torch.device = "cpu") -> Storage:
    """Allocate the cache tensors of one layer, filled with zeros, and its scales, filled with ones.

    Raises BadArgument if they need more memory than the device has.
    """
    check_fits("allocate()", spec.num_blocks, spec.cache_bytes // spec.num_layers, device)
    tensors = []
    shared = len(cache_shapes(spec)) == 1 and spec.plane(0).format.element != spec.kv[1].format.element
    for shape, plane in zip(cache_shapes(spec), spec.kv, strict=False):
        whole = not shared and not plane.format.is_inline and plane.format.element.bits >= 8
        whole = whole and not (len(cache_shapes(spec)) == 1 and spec.kv[1].format.is_inline)
        dtype = getattr(torch, plane.format.element.torch_name) if whole else torch.uint8
        tensors.append(_zeros(spec, shape, dtype, device))
    cache = tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])
    return Storage(spec, cache, *(_scale(spec, i, device) for i in (0, 1)))


def _zeros(spec: CacheSpec, shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    if not spec.block_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Blocks of one layer are padded as the whole cache's: block is the first dimension then.
    blocks = torch.zeros(shape[0], spec.block_bytes // dtype.itemsize, dtype=dtype, device=device)
    return blocks[:, : prod(shape[1:])].view(shape)


def _scale(spec: CacheSpec, index: int, device: str | torch.device) -> Tensor | None:
    shape, scale = spec.scale_shape(index), spec.plane(index).format.scale
    if shape is None or scale is None:
        return None
    if scale.bits == 8:  # e4m3 and e8m0 both spell 1.0 in one byte
        return torch.full(shape, 0x38 if scale.name == "fp8_e4m3" else 127, dtype=torch.uint8, device=device)
    ones = torch.ones(shape, dtype=getattr(torch, scale.torch_name), device=device)
    if not spec.plane(index).format.granularity.is_stored_per_token:
        mark_unset(ones)
    return ones
