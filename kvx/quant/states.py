"""States in int8: a scale for each row, behind its elements, as the formats with inline scales have it. In torch.

A recurrent state is read and written at every step. Rounded to 8 bits each time, its errors pile up; so what rounding lost is kept
too, in a second such row, and goes into the next step: error feedback. docs/state.md has the accuracy of each, measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument, a_type
from kvx.quant.numbers import decode, encode
from kvx.quant.scales import finite_amax, scale_from_amax
from kvx.spec.formats import Format

INT8_ROWS = "int8_per_token_head_inline"  # of a state's plane: the last axis is a row


def encode_rows(x: Tensor) -> Tensor:
    """[..., n] floats as rows of bytes [..., n + 4]: codes, then their scale. What convert() makes of them, bit for bit."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 1 or x.shape[-1] < 1:
        raise BadArgument(
            f"encode_rows(): x is {_what(x)}; it must be a tensor of floats, and its last axis the elements of a row."
        )
    if not x.numel():
        return torch.empty(*x.shape[:-1], x.shape[-1] + 4, dtype=torch.uint8, device=x.device)
    fmt, values = Format.named(INT8_ROWS), x.to(torch.float32)
    scale = scale_from_amax(finite_amax(values, -1)[..., None], fmt)
    return torch.cat((encode(values, fmt.element, scale).view(torch.uint8), scale.contiguous().view(torch.uint8)), -1)


def decode_rows(rows: Tensor) -> Tensor:
    """Of encode_rows: f32."""
    if not isinstance(rows, Tensor) or rows.dtype != torch.uint8 or rows.dim() < 1 or rows.shape[-1] < 5:
        raise BadArgument(f"decode_rows(): rows are {_what(rows)}; they must be a tensor of bytes, n elements and 4 of a scale.")
    if not rows.numel():
        return torch.empty(*rows.shape[:-1], rows.shape[-1] - 4, device=rows.device)
    scale = rows[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return decode(rows[..., :-4], Format.named(INT8_ROWS).element, scale, torch.float32)


def encode_with_rest(x: Tensor) -> tuple[Tensor, Tensor]:
    """A state's rows, and those of what their rounding lost: together they have nearly 16 bits."""
    rows = encode_rows(x)
    return rows, encode_rows(x.to(torch.float32) - decode_rows(rows))


def decode_with_rest(rows: Tensor, rest: Tensor) -> Tensor:
    if _what(rows) != _what(rest):
        raise BadArgument(f"decode_with_rest(): rows are {_what(rows)} and their rest {_what(rest)}; both are alike.")
    return decode_rows(rows) + decode_rows(rest)


def _what(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else a_type(x)
