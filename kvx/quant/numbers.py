"""Elements: f32 values to storage units and back, one function per kind of type.

The rules every backend keeps, bit for bit: division by the scale is IEEE division in f32; floats round to nearest even,
int8 and int4 half away from zero; quantised types saturate, infinities included; fp8 keeps NaN (0x7f), the others store 0;
a NaN that passes through arithmetic comes out as 0x7fff (16-bit) or 0x7fffffff (f32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.spec.dtypes import DTYPES, DType

# Between neighbours of e2m1's 0 .5 1 1.5 2 3 4 6; a tie goes to the even code.
E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """f16, bf16 and f32 among each other. The same type is a copy of bits; otherwise every NaN becomes the one NaN."""
    if x.dtype == dtype:
        return x
    return one_nan(x.to(torch.float32).to(dtype, copy=True), torch.isnan(x))


def one_nan(y: Tensor, where: Tensor) -> Tensor:
    """y, changed in place: every NaN has the same bits."""
    bits, nan = (torch.int32, 0x7FFFFFFF) if y.dtype == torch.float32 else (torch.int16, 0x7FFF)
    y.view(bits).masked_fill_(where, nan)
    return y


def encode(x: Tensor, dtype: DType, scale: Tensor | None) -> Tensor:
    """x / scale as storage units of `dtype`: that float type, or uint8 codes (4-bit types: two a byte along the last axis)."""
    if not dtype.is_quantised:
        return cast(x, torch_dtype(dtype))
    y = x.to(torch.float32)
    if scale is not None:
        y = y / scale
    return CODES[dtype.name].encode(y, torch.isnan(y))


def decode(units: Tensor, dtype: DType, scale: Tensor | None, out: torch.dtype) -> Tensor:
    """Storage units times scale, as `out`."""
    if not dtype.is_quantised:
        return cast(units, out)
    y = CODES[dtype.name].decode(units)
    if scale is not None:
        y = y * scale
    return one_nan(y.clone(), torch.isnan(y)) if out == torch.float32 else cast(y, out)


def round_half_away(x: Tensor) -> Tensor:
    whole = torch.trunc(x)  # x - whole is exact, so 0.49999997 is not carried to 1 as x + 0.5 would
    return whole + torch.where((x - whole).abs() >= 0.5, torch.sign(x), torch.zeros_like(x))


def pack_nibbles(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(units: Tensor) -> Tensor:
    units = units.view(torch.uint8)
    return torch.stack((units & 15, units >> 4), dim=-1).flatten(-2)


# --- one pair of functions for each quantised type ------------------------------------------------------------------------


class Codes(NamedTuple):
    encode: Callable[[Tensor, Tensor], Tensor]  # f32 numbers and where they are NaN -> uint8 codes
    decode: Callable[[Tensor], Tensor]  # codes -> f32


def _fp8(name: str) -> Codes:
    dtype, qmax = torch_dtype(DTYPES[name]), DTYPES[name].qmax
    return Codes(
        lambda y, nan: y.clamp(-qmax, qmax).to(dtype).view(torch.uint8).masked_fill(nan, 0x7F),
        lambda units: units.view(dtype).to(torch.float32),
    )


def _encode_int(y: Tensor, nan: Tensor, low: float, high: float) -> Tensor:
    return round_half_away(y.masked_fill(nan, 0.0).clamp(low, high)).to(torch.int8).view(torch.uint8)


def _decode_int4(units: Tensor) -> Tensor:
    codes = unpack_nibbles(units).to(torch.int8)
    return torch.where(codes > 7, codes - 16, codes).to(torch.float32)


def _encode_e2m1(y: Tensor, nan: Tensor) -> Tensor:
    magnitude = y.abs()
    codes = torch.zeros(y.shape, dtype=torch.uint8, device=y.device)
    for i, middle in enumerate(E2M1_MIDDLES):
        codes += (magnitude > middle) | ((magnitude == middle) if i % 2 else torch.zeros_like(magnitude, dtype=torch.bool))
    codes = codes | (torch.signbit(y).to(torch.uint8) << 3)
    return pack_nibbles(codes.masked_fill(nan, 0))


def _decode_e2m1(units: Tensor) -> Tensor:
    codes = unpack_nibbles(units).to(torch.int64)
    magnitude = torch.tensor(_E2M1_VALUES, device=units.device)[codes & 7]
    return torch.where(codes > 7, -magnitude, magnitude)


CODES = {
    "fp8_e4m3": _fp8("fp8_e4m3"),
    "fp8_e5m2": _fp8("fp8_e5m2"),
    "int8": Codes(lambda y, nan: _encode_int(y, nan, -128.0, 127.0), lambda units: units.view(torch.int8).to(torch.float32)),
    "int4": Codes(lambda y, nan: pack_nibbles(_encode_int(y, nan, -8.0, 7.0) & 15), _decode_int4),
    "e2m1": Codes(_encode_e2m1, _decode_e2m1),
}
