"""KvxLayer: one layer's K and V in blocks, behind transformers' interface of a cache layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvx.adapters.transformers.batch_blocks import BatchBlocks
from kvx.errors import BadArgument
from kvx.ops.append.gather import gather
from kvx.ops.append.write import write
from kvx.ops.move.copy_blocks import copy_blocks
from kvx.ops.storage import Storage, allocate
from kvx.spec.cache_spec import CacheSpec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # as which any element is copied
FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class KvxLayer(CacheLayerMixin):
    """K and V of one layer. The blocks are those of every layer of its kind; KvxCache keeps them in step."""

    is_compileable = False
    is_croppable = True
    supports_early_init = True

    def __init__(self, index: int, blocks: BatchBlocks, format: str) -> None:
        # Not the mixin's: it would set keys and values, which are read from the blocks here.
        self.index = index
        self.blocks = blocks
        self.format = format
        self.length = 0  # columns this layer has seen
        self.first_visible = 0  # the first one that the newest queries may see
        self.is_initialized = False
        self.window = blocks.window
        self.is_sliding = self.window > 0
        self.waiting: tuple[Tensor, Tensor] | None = None  # K and V whose padding is not known yet

    # ---- what KvxCache and attention call

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Storage for rows like these."""
        values = key_states if value_states is None else value_states
        if key_states.dtype not in FORMATS:
            raise BadArgument(f"KvxCache.update(): keys are {key_states.dtype}; they must be float32, bfloat16 or float16.")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.max_batch_size = key_states.shape[0], key_states.shape[0]
        self.spec = CacheSpec(
            num_blocks=max(1, self.blocks.num_blocks), block_size=self.blocks.block_size, num_kv_heads=key_states.shape[1],
            head_dim=key_states.shape[3], v_head_dim=values.shape[3], format=self.format or FORMATS[self.dtype],
        )  # fmt: skip
        self.storage = allocate(self.spec, self.device)
        self.is_initialized = True

    def check(self, key: Tensor, value: Tensor) -> None:
        """Refuse K and V of another model, type or batch."""
        if key.is_meta or value.is_meta or key.dtype != value.dtype or key.device != value.device:
            raise BadArgument(
                f"KvxCache.update(): keys are {key.dtype} on {key.device}, values {value.dtype} on {value.device}; both are of "
                "one type on one device that has memory."
            )
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise BadArgument(
                f"KvxCache.update(): keys are {list(key.shape)}, values {list(value.shape)}; both are [batch, heads, tokens, dim]."
            )
        if not self.is_initialized:
            return
        has = (self.spec.num_kv_heads, self.spec.head_dim, self.spec.kv[1].head_dim, self.dtype, str(self.device))
        got = (key.shape[1], key.shape[3], value.shape[3], key.dtype, str(key.device))
        if got != has:
            raise BadArgument(
                f"KvxCache.update(): layer {self.index} got (heads, key dim, value dim, type, device) {got}; it has {has}. "
                "A cache belongs to one model: make another, or reset() and use it for the same."
            )
        if key.shape[0] != self.batch_size and self.length:
            raise BadArgument(
                f"KvxCache.update(): layer {self.index} got {key.shape[0]} sequences; it has {self.batch_size}. Use "
                "reorder_cache(), batch_select_indices() or batch_repeat_interleave() to change them, or reset() for a new batch."
            )

    def resize(self, ids: NDArray[np.int64]) -> None:
        """Storage for as many blocks as there are now; block i is what block ids[i] was."""
        if not self.is_initialized:
            return
        old, self.spec = self.storage, replace(self.spec, num_blocks=self.blocks.num_blocks)
        self.storage = allocate(self.spec, self.device)
        index = torch.from_numpy(ids).to(self.device)
        for source, target in zip(_tensors(old), _tensors(self.storage), strict=True):
            if target.shape == source.shape:  # scales of a tensor or a head have no block axis
                target.copy_(source)
            elif len(ids) == len(source):  # all of them, in order
                target[: len(ids)].copy_(source)
            else:
                target.view(_BITS[target.element_size()])[: len(ids)] = source.view(_BITS[source.element_size()])[index]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        if self.is_initialized:
            copy_blocks(self.storage.cache, pairs, spec=self.spec, **self.storage.scales())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """K and V, or one tensor of both; then their scales, where those stand apart."""
        return tuple(_tensors(self.storage))

    def store(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write [batch, heads, tokens, dim] into its slots."""
        k, v = (x.detach().transpose(1, 2).reshape(-1, *x.shape[1:2], x.shape[3]) for x in (key, value))
        write(self.storage.cache, k, v, slot_mapping=slots, spec=self.spec, **self.storage.scales())

    def read(self) -> tuple[Tensor, Tensor]:
        """K and V of the columns that get_mask_sizes tells of, [batch, heads, columns, dim]; padding is 0 or another's token."""
        count, column = self.length - self.first_visible, self.first_visible
        table, begins = self.blocks.table_from(column)
        first = column - self.blocks.pads - begins  # row of the first column; negative where that is padding
        is_whole = not first.any()  # every sequence begins with its table
        rows = count if is_whole else int(table.block_table.shape[1]) * self.spec.block_size
        batch, heads = len(first), self.spec.num_kv_heads
        # Contiguous as DynamicCache's are, because models view them: gather writes through the strides.
        out = [torch.empty(batch, heads, rows, p.head_dim, dtype=self.dtype, device=self.device) for p in self.spec.kv]
        into = out[0].transpose(1, 2), out[1].transpose(1, 2)
        gather(self.storage.cache, table, spec=self.spec, max_seq_len=rows, out=into, **self.storage.scales())
        k, v = out
        if is_whole:
            return k, v
        if (first == first[0]).all() and first[0] >= 0:
            at = int(first[0])
            return k[:, :, at : at + count].contiguous(), v[:, :, at : at + count].contiguous()
        index = torch.from_numpy(np.clip(first[:, None] + np.arange(count), 0, rows - 1)).to(self.device)[:, None, :, None]
        return k.take_along_dim(index, 2), v.take_along_dim(index, 2)

    # ---- what transformers calls

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise BadArgument("KvxLayer.update(): layers share blocks, so they are updated through their cache: KvxCache.update().")

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(columns, first column) that attention will get. transformers 4 gives cache positions, 5 their number."""
        n = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        first = self.first_column(self.length)
        return self.length + n - first, first

    def first_column(self, seen: int) -> int:
        """The first column that a query after `seen` of them sees."""
        return max(seen - self.window + 1, 0) if self.is_sliding else 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.window if self.is_sliding else -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    @property
    def keys(self) -> Tensor | None:
        return self.read()[0] if self.is_initialized and self.length else None

    @property
    def values(self) -> Tensor | None:
        return self.read()[1] if self.is_initialized and self.length else None

    def offload(self) -> None:
        raise BadArgument("KvxCache.offload(): blocks stay on the model's device; give KvxCache a smaller format instead.")

    def prefetch(self) -> None:
        """Nothing is ever offloaded."""


def _tensors(storage: Storage) -> list[Tensor]:
    cache = (storage.cache,) if isinstance(storage.cache, Tensor) else storage.cache
    return [t for t in (*cache, storage.k_scale, storage.v_scale) if t is not None]
