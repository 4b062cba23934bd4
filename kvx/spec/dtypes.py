"""Element types. `code` is the ABI's number for it (kvx_dtype_t), for ever."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    name: str
    code: int
    bits: int
    torch_name: str  # the torch type one storage unit has; 4-bit types are stored two a byte
    qmax: float = 0.0  # largest magnitude a computed scale maps to; 0 = not a quantised type
    arithmetic: str = ""  # what a write does to x, exactly

    @property
    def is_quantised(self) -> bool:
        return self.qmax > 0

    @property
    def is_moved_only(self) -> bool:
        """Converted bit for bit, and no more: ops compute in f32, which does not hold it."""
        return self.bits > 32

    def __str__(self) -> str:
        return self.name


_RNE = "round to nearest even"
_CAST = f"widened to f32, then {_RNE}; overflow to infinity, one NaN"
_SATURATE = "x / scale in IEEE f32, saturated,"

DTYPES: dict[str, DType] = {
    t.name: t
    for t in (
        DType("f16", 1, 16, "float16", arithmetic=_CAST),
        DType("bf16", 2, 16, "bfloat16", arithmetic=_CAST),
        DType("f32", 3, 32, "float32", arithmetic="widened exactly; one NaN"),
        DType("fp8_e4m3", 4, 8, "float8_e4m3fn", 448.0, f"{_SATURATE} {_RNE}; NaN is 0x7f"),
        DType("fp8_e5m2", 5, 8, "float8_e5m2", 57344.0, f"{_SATURATE} {_RNE}; NaN is 0x7f"),
        DType("int8", 11, 8, "int8", 127.0, f"{_SATURATE} round half away from zero to -128..127; NaN is 0"),
        DType("int4", 12, 4, "uint8", 7.0, f"{_SATURATE} round half away from zero to -8..7; NaN is 0"),
        DType("e2m1", 13, 4, "uint8", 6.0, f"{_SATURATE} {_RNE}; NaN is 0"),
        DType("e8m0", 14, 8, "uint8", arithmetic="smallest power of two not below the scale"),
        DType("f64", 15, 64, "float64", arithmetic="no write: converted bit for bit, into f64 only"),
    )
}
