"""Numbers: encode, decode and cast against numpy float64 and a search over every code, without torch's casts."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvx.quant import numbers
from kvx.quant.scales import SCALES
from kvx.spec import ALL_FORMATS, DTYPES
from tests import compare

QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "e2m1")
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
ALL_16 = np.arange(2**16, dtype=np.uint16)
INF, NAN = float("inf"), float("nan")
# numpy speaks up when a signalling NaN or an overflow passes a cast; both are what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in cast:RuntimeWarning")


# ---- what each code means, from the definitions of the types


def fp8(code: int, mantissa: int, bias: int) -> float:
    """Sign, exponent, mantissa; exponent 0 is subnormal. NaN and infinity are the caller's."""
    exponent, fraction = (code & 0x7F) >> mantissa, code & (2**mantissa - 1)
    significand = fraction if exponent == 0 else fraction + 2**mantissa
    value = significand * 2.0 ** (max(exponent, 1) - bias - mantissa)
    return -value if code & 0x80 else value


def value_of(name: str, code: int) -> float:
    match name:
        case "fp8_e4m3":
            return NAN if code & 0x7F == 0x7F else fp8(code, 3, 7)
        case "fp8_e5m2":
            special = {0x7C: INF, 0xFC: -INF}
            return special.get(code, NAN) if code & 0x7C == 0x7C else fp8(code, 2, 15)
        case "e2m1":
            return (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)[code]
        case "int8":
            return float(code if code < 128 else code - 256)
        case "int4":
            return float(code if code < 8 else code - 16)
    raise AssertionError(name)


@cache
def magnitudes(name: str) -> np.ndarray:
    """Finite magnitudes of a float type; the index is the code."""
    half = [value_of(name, code) for code in range(2 ** (DTYPES[name].bits - 1))]
    return np.array([x for x in half if np.isfinite(x)])


def nearest_code(x: np.ndarray, name: str) -> np.ndarray:
    """The code nearest to x (float64), by distance to every code. x is what was divided; saturated first."""
    if name in ("int8", "int4"):
        low, high = (-128, 127) if name == "int8" else (-8, 7)
        whole = np.arange(low, high + 1)
        ordered = whole[np.argsort(-np.abs(whole), kind="stable")]  # a tie goes to the first: away from zero
        clipped = np.clip(np.where(np.isnan(x), 0, x), low, high)
        return (ordered[np.abs(clipped[:, None] - ordered).argmin(1)] & (2 ** DTYPES[name].bits - 1)).astype(np.uint8)
    levels = magnitudes(name)
    clipped = np.minimum(np.where(np.isnan(x), 0, np.abs(x)), levels[-1])
    distance = np.abs(clipped[:, None] - levels)
    low, high = distance.argmin(1), len(levels) - 1 - distance[:, ::-1].argmin(1)
    code = np.where(low % 2 == 0, low, high) | (np.signbit(x) << (DTYPES[name].bits - 1))
    return np.where(np.isnan(x), 0 if name == "e2m1" else 0x7F, code).astype(np.uint8)


@cache
def values_16(name: str) -> np.ndarray:
    """Magnitudes of f16 or bf16 in float64; the index is the code, and infinity stands where the next step would."""
    codes = ALL_16[: 0x7C01 if name == "f16" else 0x7F81]
    exponent, fraction, mantissa, bias = (
        (codes >> 10, codes & 0x3FF, 10, 15) if name == "f16" else (codes >> 7, codes & 0x7F, 7, 127)
    )
    significand = np.where(exponent == 0, fraction, fraction + 2.0**mantissa)
    return significand * 2.0 ** (np.maximum(exponent, 1).astype(np.float64) - bias - mantissa)


def nearest_16(x: np.ndarray, name: str) -> np.ndarray:
    """Bits of f16 or bf16 nearest to x (float64): two neighbours by bisection, a tie to the even one; NaN 0x7fff."""
    levels = values_16(name)
    a = np.minimum(np.where(np.isnan(x), 0, np.abs(x)), levels[-1])
    high = np.searchsorted(levels, a)
    low = np.maximum(high - 1, 0)
    below, above = a - levels[low], levels[high] - a
    code = np.where(below < above, low, np.where(above < below, high, np.where(low % 2 == 0, low, high)))
    code = np.where(levels[high] == a, high, code) | (np.signbit(x).astype(np.int64) << 15)
    return np.where(np.isnan(x), 0x7FFF, code).astype(np.uint16)


def nibbles(units: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even element low."""
    return np.stack([units & 15, units >> 4], -1).reshape(-1)


def encode(x: Tensor, name: str, scale: Tensor | None = None) -> np.ndarray:
    units = numbers.encode(x, DTYPES[name], scale)
    assert units.dtype == torch.uint8
    return nibbles(units.numpy()) if DTYPES[name].bits == 4 else units.numpy()


def require_codes(got: np.ndarray, x: np.ndarray, name: str) -> None:
    want = nearest_code(x, name)
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, f"{wrong.size} wrong; first {x[wrong[0]]!r}: 0x{got[wrong[0]]:02x}, not 0x{want[wrong[0]]:02x}"


def f32(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def around(x: np.ndarray) -> np.ndarray:
    """x, both signs, and one ulp of f32 to either side."""
    x = f32(x)
    near = np.concatenate([x, np.nextafter(x, f32(np.inf)), np.nextafter(x, f32(-np.inf))])
    return np.concatenate([near, -near])


SPECIALS = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
     0xFF800000, 0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF],
    dtype=np.uint32,
).view(np.float32)  # fmt: skip


def torch_16(name: str) -> tuple[Tensor, np.ndarray]:
    """Every bit pattern of f16 or bf16 as a tensor, and what they mean in float64."""
    x = torch.from_numpy(ALL_16.view(np.int16).copy()).view(FLOATS[name])
    mean = ALL_16.view(np.float16) if name == "f16" else (ALL_16.astype(np.uint32) << 16).view(np.float32)
    return x, mean.astype(np.float64)


def same_bits(got: Tensor, want: np.ndarray, what: str) -> None:
    """want: uint16 or uint32 bits."""
    kind = {2: np.int16, 4: np.int32}[want.itemsize]
    compare.bitwise(got, torch.from_numpy(want.view(kind).copy()).view(got.dtype), what)


def f32_bits(x: np.ndarray) -> np.ndarray:
    """Bits of float64 values that f32 holds exactly; one NaN."""
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.astype(np.float32).view(np.uint32))


# ---- the reference itself, at points worked out on paper


@pytest.mark.parametrize(
    ("name", "x", "code"),
    [
        ("fp8_e4m3", 1.0, 0x38),
        ("fp8_e4m3", 448.0, 0x7E),
        ("fp8_e4m3", 2.0**-9, 0x01),
        ("fp8_e4m3", 2.0**-10, 0x00),
        ("fp8_e4m3", 1.0625, 0x38),  # half way from 1 to 1.125: to the even code
        ("fp8_e4m3", 1.1875, 0x3A),
        ("fp8_e5m2", 1.0, 0x3C),
        ("fp8_e5m2", -57344.0, 0xFB),
        ("fp8_e5m2", INF, 0x7B),
        ("fp8_e5m2", 2.0**-16, 0x01),
        ("e2m1", 2.5, 4),
        ("e2m1", 5.0, 6),
        ("e2m1", -0.25, 8),
        ("e2m1", 0.75, 2),
        ("int8", -2.5, 0xFD),
        ("int8", 0.5, 1),
        ("int8", -200.0, 0x80),
        ("int4", -8.5, 8),
        ("int4", 3.5, 4),
        ("int4", NAN, 0),
        ("e2m1", NAN, 0),
        ("fp8_e4m3", NAN, 0x7F),
        ("fp8_e5m2", -NAN, 0x7F),
    ],
)
def test_codes_on_paper(name, x, code):
    assert nearest_code(np.array([x]), name).tolist() == [code]
    assert encode(torch.tensor([x, x]), name).tolist() == [code, code]


@pytest.mark.parametrize(
    ("name", "x", "bits"),
    [
        ("f16", 1.0, 0x3C00),
        ("f16", 65519.996, 0x7BFF),
        ("f16", 65520.0, 0x7C00),
        ("f16", 2.0**-24, 0x0001),
        ("f16", 2.0**-25, 0x0000),
        ("f16", -3 * 2.0**-25, 0x8002),
        ("bf16", 1.0, 0x3F80),
        ("bf16", 1 + 2.0**-8, 0x3F80),
        ("bf16", 1 + 3 * 2.0**-8, 0x3F82),
        ("bf16", 3.4e38, 0x7F80),
        ("bf16", 2.0**-133, 0x0001),
        ("bf16", -NAN, 0x7FFF),
    ],
)
def test_casts_on_paper(name, x, bits):
    assert nearest_16(np.array([np.float64(np.float32(x))]), name).tolist() == [bits]
    got = numbers.cast(torch.tensor([x], dtype=torch.float32), FLOATS[name])
    same_bits(got, np.array([bits], dtype=np.uint16), name)


# ---- encode


@pytest.mark.parametrize("io", ["f16", "bf16"])
@pytest.mark.parametrize("name", QUANTISED)
def test_encode_every_16_bit_pattern(name, io):
    x, mean = torch_16(io)
    require_codes(encode(x, name), mean, name)


@pytest.mark.parametrize("name", QUANTISED)
def test_encode_at_every_boundary(name):
    """Every value, every midpoint of two neighbours, and one ulp of f32 to either side of each; f32's odd numbers."""
    levels = np.unique([v for v in (value_of(name, c) for c in range(2 ** DTYPES[name].bits)) if np.isfinite(v)])
    middles = (levels[1:] + levels[:-1]) / 2
    past = levels[[0, -1]] + (levels[1] - levels[0]) * np.array([[-0.5, 0.5], [-1, 1], [-1e6, 1e6]])
    x = np.concatenate([around(levels), around(middles), around(past.ravel()), SPECIALS])
    assert (f32(middles) == middles).all(), "a midpoint that f32 cannot hold would test nothing"
    require_codes(encode(torch.from_numpy(x), name), x.astype(np.float64), name)


@pytest.mark.parametrize("name", QUANTISED)
def test_encode_divides_as_ieee_does(name):
    """x / scale rounded to f32 once, for moderate and extreme scales; then to the type."""
    rng = np.random.default_rng(0)
    scale = f32(np.concatenate([np.exp(rng.normal(0, 3, 700)), [1e-38, 1e-45, 3e38, 0.1, 127.0, 0.0, -0.5, INF, NAN]]))
    levels = rng.choice(np.arange(0.5, 130, 0.5), (len(scale), 32))
    x = f32(levels * scale[:, None] * (1 + rng.integers(-2, 3, levels.shape) * 2.0**-23))
    x[:, -2:] = f32(rng.normal(0, 1e3, (len(scale), 2)))
    with np.errstate(all="ignore"):
        quotient = (x / scale[:, None]).astype(np.float64)
    got = encode(torch.from_numpy(x), name, torch.from_numpy(scale)[:, None])
    require_codes(got.ravel(), quotient.ravel(), name)


@pytest.mark.parametrize("name", QUANTISED)
def test_encode_saturates_infinities_and_keeps_the_sign(name):
    largest = {
        "fp8_e4m3": (0x7E, 0xFE),
        "fp8_e5m2": (0x7B, 0xFB),
        "int8": (0x7F, 0x80),
        "int4": (7, 8),
        "e2m1": (7, 15),
    }
    nan = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F}.get(name, 0)
    minus_zero = {"int8": 0, "int4": 0, "e2m1": 8}.get(name, 0x80)
    x = torch.tensor([INF, -INF, 3e38, -3e38, NAN, -NAN, 0.0, -0.0])
    high, low = largest[name]
    assert encode(x, name).tolist() == [high, low, high, low, nan, nan, 0, minus_zero]


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("io", ["f16", "bf16", "f32"])
def test_encode_of_plain_types_is_the_cast(name, io):
    x = torch.from_numpy(np.concatenate([around(np.linspace(0, 7, 99)), SPECIALS])).to(FLOATS[io])
    got = numbers.encode(x, DTYPES[name], None)
    assert got.dtype == FLOATS[name]
    compare.bitwise(got, numbers.cast(x, FLOATS[name]))


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(QUANTISED))
def test_encode_any_f32(values, name):
    x = f32(values * 2)
    require_codes(encode(torch.from_numpy(x), name), x.astype(np.float64), name)


def test_encode_keeps_shape_and_halves_the_last_axis_of_4_bit_types():
    x = torch.arange(24.0).view(2, 3, 4) - 12
    assert numbers.encode(x, DTYPES["int8"], None).shape == (2, 3, 4)
    assert numbers.encode(x, DTYPES["int4"], None).shape == (2, 3, 2)
    assert numbers.encode(x, DTYPES["e2m1"], torch.tensor(2.0)).shape == (2, 3, 2)


def test_encode_takes_strided_input():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    for name in QUANTISED:
        got = numbers.encode(x.t().contiguous().t(), DTYPES[name], None)
        compare.bitwise(got, numbers.encode(x, DTYPES[name], None), name)


# ---- decode


def every_code(name: str) -> tuple[Tensor, np.ndarray]:
    """256 bytes, and the values in them."""
    units = np.arange(256, dtype=np.uint8)
    codes = nibbles(units) if DTYPES[name].bits == 4 else units
    return torch.from_numpy(units), np.array([value_of(name, int(c)) for c in codes])


@pytest.mark.parametrize("name", QUANTISED)
def test_decode_every_code(name):
    units, want = every_code(name)
    same_bits(numbers.decode(units, DTYPES[name], None, torch.float32), f32_bits(want), "f32")
    for out in ("f16", "bf16"):
        same_bits(numbers.decode(units, DTYPES[name], None, FLOATS[out]), nearest_16(want, out), out)


@pytest.mark.parametrize("scale", [0.1, -3.0, 1e-41, 1e38, 0.0, INF, NAN])
@pytest.mark.parametrize("name", QUANTISED)
def test_decode_multiplies_in_f32_and_rounds_once_more(name, scale):
    units, values = every_code(name)
    with np.errstate(all="ignore"):
        want = (values.astype(np.float32) * f32(scale)).astype(np.float64)
    factor = torch.tensor(scale)
    same_bits(numbers.decode(units, DTYPES[name], factor, torch.float32), f32_bits(want), "f32")
    for out in ("f16", "bf16"):
        same_bits(numbers.decode(units, DTYPES[name], factor, FLOATS[out]), nearest_16(want, out), out)


@pytest.mark.parametrize("name", QUANTISED)
def test_decode_gives_every_row_its_own_scale(name):
    units, values = every_code(name)
    scale = torch.tensor([[0.5], [2.0], [3.0]])
    got = numbers.decode(units.expand(3, 256), DTYPES[name], scale, torch.float32)
    for row, factor in zip(got, (0.5, 2.0, 3.0), strict=True):
        same_bits(row, f32_bits(values * factor), str(factor))


@pytest.mark.parametrize("name", QUANTISED)
def test_codes_survive_a_round_trip(name):
    """Every finite code comes back, but int's -128 needs no exception: it is inside the range."""
    units, values = every_code(name)
    again = encode(numbers.decode(units, DTYPES[name], None, torch.float32), name)
    finite = np.isfinite(values)
    codes = nibbles(units.numpy()) if DTYPES[name].bits == 4 else units.numpy()
    assert np.array_equal(again[finite], codes[finite])
    assert finite.sum() >= 248


@pytest.mark.parametrize("stored", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("out", ["f16", "bf16", "f32"])
def test_decode_of_plain_types_is_the_cast(stored, out):
    x = torch.from_numpy(SPECIALS).to(FLOATS[stored])
    compare.bitwise(numbers.decode(x, DTYPES[stored], None, FLOATS[out]), numbers.cast(x, FLOATS[out]))


# ---- cast


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_cast_from_f32_at_every_boundary(name):
    """Every value, every midpoint and one ulp to either side, both signs, subnormals and overflow among them."""
    levels = values_16(name)
    x = np.concatenate([around(levels), around((levels[1:] + levels[:-1]) / 2), SPECIALS])
    got = numbers.cast(torch.from_numpy(x), FLOATS[name])
    same_bits(got, nearest_16(x.astype(np.float64), name), name)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_cast_from_random_f32_bits(name):
    x = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    same_bits(numbers.cast(torch.from_numpy(x), FLOATS[name]), nearest_16(x.astype(np.float64), name), name)


@pytest.mark.parametrize(("source", "target"), [("f16", "bf16"), ("bf16", "f16")])
def test_cast_between_16_bit_types_every_pattern(source, target):
    x, mean = torch_16(source)
    same_bits(numbers.cast(x, FLOATS[target]), nearest_16(mean, target), target)


@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_cast_to_f32_is_exact_every_pattern(source):
    x, mean = torch_16(source)
    same_bits(numbers.cast(x, torch.float32), f32_bits(mean), "f32")


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_cast_to_the_same_type_is_a_copy_of_bits(name):
    """Payloads and signs of NaN included: nothing passed through arithmetic."""
    bits = SPECIALS.view(np.uint32) if name == "f32" else ALL_16
    kind = np.int32 if name == "f32" else np.int16
    x = torch.from_numpy(bits.view(kind).copy()).view(FLOATS[name])
    same_bits(numbers.cast(x, FLOATS[name]), bits, name)


@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_cast_does_not_touch_its_input(target):
    x = torch.from_numpy(SPECIALS.copy())
    numbers.cast(x, FLOATS[target])
    same_bits(x, SPECIALS.view(np.uint32), "input")


def test_decode_to_f32_does_not_touch_its_input():
    for name in QUANTISED:
        units, _ = every_code(name)
        numbers.decode(units, DTYPES[name], None, torch.float32)
        assert torch.equal(units, torch.arange(256, dtype=torch.uint8)), name


# ---- parts


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (0.5, 1.0),
        (-0.5, -1.0),
        (1.5, 2.0),
        (2.5, 3.0),
        (-2.5, -3.0),
        (0.49999997, 0.0),  # x + 0.5 rounds to 1 in f32
        (-0.49999997, 0.0),
        (126.49999, 126.0),
        (4194303.5, 4194304.0),
        (0.0, 0.0),
    ],
)
def test_round_half_away(x, want):
    assert float(numbers.round_half_away(torch.tensor(x, dtype=torch.float32))) == want


def test_nibbles_pack_the_even_element_low():
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    packed = numbers.pack_nibbles(codes)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(numbers.unpack_nibbles(packed), codes)


@pytest.mark.parametrize("name", DTYPES)
def test_torch_types_are_as_wide_as_their_units(name):
    assert numbers.torch_dtype(DTYPES[name]).itemsize == max(1, DTYPES[name].bits // 8)


# ---- every format has its arithmetic


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_a_format_has_its_arithmetic(name):
    f = ALL_FORMATS[name]
    assert f.element.name in numbers.CODES or f.element.name in {**FLOATS, "f64": torch.float64}
    assert f.element.is_quantised == (f.element.name in numbers.CODES)
    assert f.scale is None or f.scale.name in SCALES
    if f.element.is_moved_only:
        return
    x = torch.tensor([[0.0, 1.0, -1.0, 0.5]])  # exact in every element type under a scale of a quarter
    scale = None if f.scale is None else torch.tensor([[0.25]])
    assert torch.equal(numbers.decode(numbers.encode(x, f.element, scale), f.element, scale, torch.float32), x)
