"""Masks for attn_implementation="kvx": what is left of one is a window, a length and the padding of each sequence.

transformers makes masks once a forward, by a function that each implementation may choose. For a causal mask, with or without a
sliding window, over left-padded sequences, ours returns those few numbers instead of [batch, 1, queries, columns] booleans. Any
other mask is made in full, and attention then gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import masking_utils


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


def make_mask(
    batch_size: int, kv_length: int, kv_offset: int = 0, mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """For AttentionMaskInterface. [2 + batch] int64 on the host: window, columns, padding of each sequence; or a mask in full."""
    window, columns = _window(mask_function), int(kv_length + kv_offset)
    pads = None if window is None else left_padding(attention_mask, columns, batch_size)
    if window is None or pads is None:
        kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
        full = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        return full(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, **kwargs,
        )  # fmt: skip
    # On the host, and few: layers read it without waiting for a device.
    return torch.tensor([window, columns, *pads], dtype=torch.int64)


def read_mask(mask: Tensor | None, window: int, batch_size: int) -> CausalMask | None:
    """What a layer's mask says; None where it is more than causal. `window` is the layer's own, for models that make no masks."""
    if mask is None:
        return CausalMask(window, -1, None)
    if mask.dim() == 2:  # padding as the tokenizer made it
        pads = left_padding(mask.to(torch.bool), mask.shape[1], batch_size)
        return None if pads is None else CausalMask(window, mask.shape[1], np.asarray(pads, np.int64))
    if mask.dim() != 1:
        return None
    window, columns, *rest = mask.tolist()
    return CausalMask(window, columns, np.asarray(rest, np.int64) if any(rest) else None)


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
