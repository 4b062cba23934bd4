"""Scales: from a largest magnitude to a stored scale, and back to the factor a reader multiplies by."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.quant.numbers import CODES, Codes, one_nan
from kvx.spec.dtypes import DType
from kvx.spec.formats import Format


def scale_from_amax(amax: Tensor, format: Format | str, tensor_scale: Tensor | None = None) -> Tensor:
    """f32 scale that maps `amax` to the format's largest element: max(amax / qmax / tensor_scale, floor)."""
    fmt = Format.named(format) if isinstance(format, str) else format
    if fmt.scale is None:
        raise BadArgument(f"scale_from_amax(): format {fmt} takes no scale.")
    if not amax.is_floating_point():
        raise BadArgument(
            f"scale_from_amax(): amax is {amax.dtype}; it must be of floating point numbers, as kvx.amax() gives them."
        )
    # A tensor, not a Python number: torch divides a CUDA tensor by a number through its reciprocal, which is not IEEE.
    s = amax.to(torch.float32) / torch.tensor(fmt.element.qmax, dtype=torch.float32, device=amax.device)
    if tensor_scale is not None:
        s = s / tensor_scale
    floor = torch.tensor(fmt.scale_floor, dtype=torch.float32, device=amax.device)
    return torch.where(s > floor, s, floor)


def finite_amax(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Largest finite |x| along `dim`, in f32. NaN and infinities do not count: they saturate or stay NaN anyway."""
    a = x.to(torch.float32).abs()
    return torch.where(a < torch.inf, a, torch.zeros_like(a)).amax(dim)


def round_scale(s: Tensor, dtype: DType) -> Tensor:
    """f32 scales as the units they are stored in."""
    if dtype.name not in SCALES:
        raise BadArgument(f"{dtype} is not a scale type. Scales are {', '.join(SCALES)}.")
    return SCALES[dtype.name].encode(s, torch.isnan(s))


def load_scale(units: Tensor, dtype: DType) -> Tensor:
    """Stored scales as f32."""
    return SCALES[dtype.name].decode(units)


def _widen(units: Tensor) -> Tensor:
    return units.to(torch.float32)


def _round_f16(s: Tensor, nan: Tensor) -> Tensor:
    """Saturates: an infinite scale would turn a whole row into NaN."""
    return one_nan(torch.where(s > 65504.0, torch.full_like(s, 65504.0), s).to(torch.float16), nan)


def _round_e8m0(s: Tensor, nan: Tensor) -> Tensor:
    """The smallest power of two that is not below s. Code 0 is 2**-127."""
    bits = s.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    exponent = torch.where(bits <= 0x00400000, torch.zeros_like(bits), (bits + 0x7FFFFF) >> 23)
    return exponent.clamp(max=254).masked_fill(nan, 255).to(torch.uint8)


def _load_e8m0(units: Tensor) -> Tensor:
    codes = units.view(torch.uint8)
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 0x00400000), bits)
    bits = torch.where(codes == 255, torch.full_like(bits, 0x7FFFFFFF), bits)
    return bits.view(torch.float32)


SCALES = {
    "f32": Codes(lambda s, nan: one_nan(s.clone(), nan), _widen),
    "f16": Codes(_round_f16, _widen),
    "bf16": Codes(lambda s, nan: one_nan(s.to(torch.bfloat16), nan), _widen),
    "fp8_e4m3": CODES["fp8_e4m3"],
    "e8m0": Codes(_round_e8m0, _load_e8m0),
}
