"""Masks for attn_implementation="kvx": what is left of one is a window, a length and the padding of each sequence.

transformers makes masks once a forward, by a function that each implementation may choose, or ahead of it: generate() does for
caches of a fixed size, and some models do. Ours returns a MaskStates: it has the shape and type of sdpa's mask, and no memory. For
a causal mask, with or without a sliding window, over left-padded sequences, it knows those few numbers, and attention over blocks
takes them. Any other mask is made in full, and attention then gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from kvx.adapters.transformers.states import uncompiled
from kvx.errors import Unsupported

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.rsub.Scalar)


@dataclass(frozen=True)
class CausalMask:
    """A query in column c of sequence s sees columns pads[s] to c, the last `window` of them if that is not 0."""

    window: int
    columns: int  # with the newest; -1: not known, and there is no padding
    pads: NDArray[np.int64] | None  # None: no padding

    def pads_of(self, batch_size: int) -> NDArray[np.int64]:
        return np.zeros(batch_size, np.int64) if self.pads is None else self.pads

    def dense(self, num_queries: int, num_columns: int, device: torch.device, *, causal: bool = True) -> Tensor:
        """[batch or 1, 1, queries, columns] booleans over the last columns. Not causal: of the padding alone."""
        last = max(self.columns, num_columns)
        query = torch.arange(last - num_queries, last, device=device)[:, None]
        column = torch.arange(last - num_columns, last, device=device)[None, :]
        seen = column <= query if causal else torch.ones_like(column <= query)
        if self.window and causal:
            seen &= column > query - self.window
        seen = seen[None, None]
        if self.pads is not None:
            seen = seen & (column >= torch.from_numpy(self.pads).to(device)[:, None, None, None])
        return seen


class MaskStates(Tensor):
    """[batch, 1, queries, columns] booleans, as sdpa takes them. Any op that meets it gets the mask in full."""

    causal: CausalMask | None  # None: more than that
    full: Tensor | None  # once it was asked for

    @staticmethod
    def make(
        shape: tuple[int, int, int], device: torch.device, causal: CausalMask | None, full: Tensor | None = None
    ) -> MaskStates:
        """Of (batch, queries, columns)."""
        batch, queries, columns = shape
        size = (batch, 1, queries, columns) if full is None else full.shape
        made = Tensor._make_wrapper_subclass(MaskStates, size, dtype=torch.bool, device=device)
        made.causal, made.full = causal, full
        return made

    def read(self) -> Tensor:
        """The mask itself."""
        if self.full is None:
            assert self.causal is not None  # or it was made in full
            self.full = self.causal.dense(self.shape[2], self.shape[3], self.device).expand(self.shape)
        return self.full

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _SUMS and any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            raise Unsupported(
                "attention 'kvx': the model adds the mask to its scores, so it attends by itself and not through transformers' "
                "AttentionInterface. Use attn_implementation='eager'; a KvxCache serves that too."
            )
        if isinstance(args[0], MaskStates) and (same := _same(func, args[0], list(args[1:]), kwargs)) is not None:
            return same
        args, kwargs = tree_map_only(MaskStates, MaskStates.read, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MaskStates({list(self.shape)}, {self.causal or 'in full'})"


def _same(func: Any, mask: MaskStates, args: list[Any], kwargs: Any) -> MaskStates | None:
    """The mask still, where an op leaves it so: models cut masks to the columns there are, and move them to a layer's device."""
    shape, device = (mask.shape[0], mask.shape[2], mask.shape[3]), mask.device
    if func is _aten.slice.Tensor:
        dim, start, end, step = args + [0, None, None, 1][len(args) :]
        if (start or 0) != 0 or step != 1 or (end is not None and end < mask.shape[dim]):
            return None
    elif func is _aten._to_copy.default:
        if kwargs.get("dtype") not in (None, torch.bool) or mask.causal is None:
            return None
        device = torch.device(kwargs.get("device") or device)
    elif func not in (_aten.detach.default, _aten.alias.default):
        return None
    return MaskStates.make(shape, device, mask.causal, mask.full if device == mask.device else None)


@uncompiled
def make_mask(
    batch_size: int, kv_length: int, kv_offset: int = 0, mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None, **kwargs: Any,
) -> MaskStates:  # fmt: skip
    """For AttentionMaskInterface."""
    window, columns = _window(mask_function), int(kv_length + kv_offset)
    num_queries, last = _queries(kwargs)
    # A cache of a fixed size has columns that no token has yet: then the queries are not the last of them.
    pads = left_padding(attention_mask, columns, batch_size) if window is not None and last == columns else None
    device = torch.device(kwargs.get("device") or (torch.device("cpu") if attention_mask is None else attention_mask.device))
    shape = batch_size, num_queries, int(kv_length)
    if window is None or pads is None:
        kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
        full = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, **kwargs,
        )  # fmt: skip
        return MaskStates.make(shape, full.device, None, full)
    return MaskStates.make(shape, device, CausalMask(window, columns, np.asarray(pads, np.int64) if any(pads) else None))


def _queries(kwargs: dict[str, Any]) -> tuple[int, int]:
    """How many there are, and the columns up to the last of them. transformers 4 gives their positions."""
    positions = kwargs.get("cache_position")
    if positions is not None:
        return positions.shape[0], int(positions[-1]) + 1
    return int(kwargs["q_length"]), int(kwargs["q_length"]) + int(kwargs.get("q_offset", 0))


def read_mask(mask: Tensor | None, window: int, batch_size: int) -> CausalMask | None:
    """What a layer's mask says; None where it is more than causal. `window` is the layer's own, for models that make no masks."""
    if mask is None:
        return CausalMask(window, -1, None)
    if isinstance(mask, MaskStates):
        return mask.causal
    if mask.dim() == 2 and not mask.is_floating_point():  # padding as the tokenizer made it
        seen = mask.to(torch.bool)
        pads = left_padding(seen, mask.shape[1], batch_size)
        return None if pads is None else CausalMask(window, mask.shape[1], np.asarray(pads, np.int64))
    return None


def left_padding(mask: Tensor | None, columns: int, batch_size: int) -> list[int] | None:
    """Masked columns at the left of each sequence; None where there are others."""
    if mask is None:
        return [0] * batch_size
    if mask.dim() != 2 or mask.shape[1] < columns:
        return None
    mask = mask[:, :columns].view(torch.uint8)
    # Two numbers a sequence, and nothing as long as the context is made on the way.
    first, count = torch.stack((mask.argmax(1), mask.sum(1))).tolist()
    pads = [f if c else columns for f, c in zip(first, count, strict=True)]
    return pads if all(p + c == columns for p, c in zip(pads, count, strict=True)) else None


def _window(mask_function: Any) -> int | None:
    """0 for transformers' causal mask, the window of its sliding one, None for any other."""
    if mask_function is masking_utils.causal_mask_function:
        return 0
    # and_masks(sliding_window_overlay(window), causal_mask_function) has no name: it is known by what it closes over.
    made_here = getattr(mask_function, "__module__", "") == masking_utils.__name__
    parts: Any = _closed(mask_function).get("mask_functions", ()) if made_here else ()
    if len(parts) != 2 or parts[1] is not masking_utils.causal_mask_function:
        return None
    if not mask_function.__qualname__.startswith("and_masks.") or not parts[0].__qualname__.startswith("sliding_window_overlay."):
        return None
    window = _closed(parts[0]).get("sliding_window")
    return window if isinstance(window, int) and window > 0 else None


def _closed(function: Callable[..., Any]) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return {} if code is None else {name: c.cell_contents for name, c in zip(code.co_freevars, cells, strict=True)}
