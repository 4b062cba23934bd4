"""Scales: from a largest magnitude to the stored scale and back, in each scale type, against numpy and plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvx
from kvx.quant import numbers
from kvx.quant.scales import finite_amax, load_scale, round_scale, scale_from_amax
from kvx.spec import DTYPES, FORMATS
from tests import compare

INF, NAN = float("inf"), float("nan")
SCALED = [name for name, row in FORMATS.items() if row.scale is not None]
SCALE_TYPES = ("f32", "f16", "bf16", "fp8_e4m3", "e8m0")
FLOOR = {"f32": np.float32(1e-6), "f16": np.float32(1e-6), "fp8_e4m3": np.float32(2**-9), "e8m0": np.float32(0)}
QMAX = {"fp8_e4m3": 448, "fp8_e5m2": 57344, "int8": 127, "int4": 7, "e2m1": 6}

positive = st.floats(min_value=0, width=32, allow_nan=False)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def bits(x: Tensor) -> list[int]:
    return [int(b) & (256 ** x.element_size() - 1) for b in compare.bits(x).flatten()]


# ---- scale_from_amax


@pytest.mark.parametrize(
    ("fmt", "amax", "scale"),
    [
        ("fp8_e4m3", 448.0, 1.0),
        ("fp8_e4m3_per_head", 7.0, 0.015625),
        ("fp8_e5m2", 57344.0 * 3, 3.0),
        ("int8", 127.0, 1.0),
        ("int8_per_token_head", 12.7, float(np.float32(12.7) / np.float32(127))),
        ("int4_per_token_head", 3.5, 0.5),
        ("int4_per_group", 14.0, 2.0),
        ("mxfp4", 12.0, 2.0),
        ("mxfp8", 0.4375, 2.0**-10),
        ("nvfp4", 6.0, 1.0),
    ],
)
def test_scale_maps_amax_to_the_largest_element(fmt, amax, scale):
    compare.bitwise(scale_from_amax(tensor(amax), fmt), tensor(scale))
    compare.bitwise(scale_from_amax(tensor(amax), FORMATS[fmt]), tensor(scale))


@given(st.sampled_from(SCALED), positive, st.none() | st.floats(min_value=2.0**-126, max_value=2.0**126, width=32))
def test_scale_is_two_ieee_divisions_and_a_floor(fmt, amax, tensor_scale):
    row = FORMATS[fmt]
    with np.errstate(all="ignore"):
        want = np.float32(amax) / np.float32(QMAX[row.element.name])
        if tensor_scale is not None:
            want = want / np.float32(tensor_scale)
    want = max(want, FLOOR[row.scale.name])
    given_scale = None if tensor_scale is None else torch.tensor(tensor_scale)
    compare.bitwise(scale_from_amax(torch.tensor([amax]), fmt, given_scale), tensor(float(want)))


@pytest.mark.parametrize("fmt", SCALED)
def test_floors(fmt):
    """Zero, NaN and what lies under the floor come out as the floor."""
    floor = FLOOR[FORMATS[fmt].scale.name]
    assert np.float32(FORMATS[fmt].scale_floor) == floor
    amax = tensor(0.0, -0.0, NAN, float(floor) * QMAX[FORMATS[fmt].element.name] * 0.5)
    got = scale_from_amax(amax, fmt)
    compare.bitwise(got[:3], torch.full((3,), float(floor)))
    assert float(got[3]) == float(floor)


def test_a_tensor_scale_divides():
    got = scale_from_amax(tensor(6.0 * 448, 12.0, 0.0), "nvfp4", torch.tensor(2.0))
    compare.bitwise(got, tensor(224.0, 1.0, 2**-9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_amax_of_any_float_type_gives_an_f32_scale(dtype):
    compare.bitwise(scale_from_amax(torch.tensor([254.0], dtype=dtype), "int8"), tensor(2.0))


def test_scale_keeps_the_shape():
    assert scale_from_amax(torch.ones(3, 2, 5), "int8").shape == (3, 2, 5)
    assert scale_from_amax(torch.tensor(448.0), "fp8_e4m3").shape == ()


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
def test_a_format_without_scales_is_refused(fmt):
    with pytest.raises(kvx.BadArgument) as refused:
        scale_from_amax(tensor(1.0), fmt)
    assert str(refused.value) == f"scale_from_amax(): format {fmt} takes no scale."


def test_an_unknown_format_is_refused():
    with pytest.raises(kvx.BadArgument, match='format "int9" does not exist'):
        scale_from_amax(tensor(1.0), "int9")


# ---- finite_amax


def test_amax_counts_finite_elements_only():
    x = tensor(1, -3, 2, NAN, 4, -5, INF, 1, -INF, NAN, INF, -INF, 0, -0.0, 0, 0).view(4, 4)
    compare.bitwise(finite_amax(x, -1), tensor(3, 5, 0, 0))
    compare.bitwise(finite_amax(x, 0), tensor(4, 5, 2, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_amax_is_f32_whatever_comes_in(dtype):
    compare.bitwise(finite_amax(torch.tensor([[0.5, -2.0, INF]], dtype=dtype), -1), tensor(2.0))


def test_the_largest_f32_is_finite():
    largest = float(np.finfo(np.float32).max)
    compare.bitwise(finite_amax(tensor(1.0, -largest), 0), torch.tensor(largest))


# ---- round_scale and load_scale


@given(positive)
def test_f32_is_kept_as_it_is(s):
    compare.bitwise(round_scale(tensor(s), DTYPES["f32"]), tensor(s))
    compare.bitwise(load_scale(tensor(s), DTYPES["f32"]), tensor(s))


@pytest.mark.parametrize(
    ("s", "stored"),
    [
        (1.0, 0x3C00),
        (65504.0, 0x7BFF),
        (65519.0, 0x7BFF),
        (65520.0, 0x7BFF),  # would round to infinity, which would make a row NaN
        (1e9, 0x7BFF),
        (INF, 0x7BFF),
        (1e-6, 0x0011),  # 17 * 2**-24: the floor as f16 holds it
        (2.0**-24, 0x0001),
        (2.0**-25, 0x0000),
        (1 + 2.0**-11, 0x3C00),  # a tie, to the even code
        (1 + 3 * 2.0**-11, 0x3C02),
        (0.0, 0x0000),
    ],
)
def test_f16_rounds_to_nearest_and_saturates(s, stored):
    got = round_scale(tensor(s), DTYPES["f16"])
    assert got.dtype == torch.float16
    assert bits(got) == [stored]


@given(positive)
def test_f16_is_numpys(s):
    want = np.float16(min(np.float32(s), np.float32(65504)))
    assert bits(round_scale(tensor(s), DTYPES["f16"])) == [int(want.view(np.uint16))]


@pytest.mark.parametrize(
    ("s", "stored"),
    [
        (1.0, 0x3F80),
        (1 + 2.0**-8, 0x3F80),
        (1 + 3 * 2.0**-8, 0x3F82),
        (1e-6, 0x3586),
        (2.0**-133, 0x0001),
        (3.3895314e38, 0x7F7F),
    ],
)
def test_bf16_rounds_to_nearest(s, stored):
    got = round_scale(tensor(s), DTYPES["bf16"])
    assert got.dtype == torch.bfloat16
    assert bits(got) == [stored]


@pytest.mark.parametrize(
    ("s", "stored"),
    [
        (1.0, 0x38),
        (448.0, 0x7E),
        (463.0, 0x7E),
        (1e9, 0x7E),
        (INF, 0x7E),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),
        (3 * 2.0**-10, 0x02),
        (1.0625, 0x38),
        (1.1875, 0x3A),
        (0.0, 0x00),
        (NAN, 0x7F),
    ],
)
def test_e4m3_rounds_to_nearest_and_saturates(s, stored):
    got = round_scale(tensor(s), DTYPES["fp8_e4m3"])
    assert got.dtype == torch.uint8
    assert bits(got) == [stored]


def test_e4m3_stores_and_loads_every_code():
    codes = torch.arange(127, dtype=torch.uint8)
    want = [(c % 8 + (8 if c >= 8 else 0)) * 2.0 ** (max(c // 8, 1) - 10) for c in range(127)]
    compare.bitwise(load_scale(codes, DTYPES["fp8_e4m3"]), tensor(*want))
    assert bits(round_scale(tensor(*want), DTYPES["fp8_e4m3"])) == list(range(127))
    assert load_scale(torch.tensor([0x7F], dtype=torch.uint8), DTYPES["fp8_e4m3"]).isnan().all()


@pytest.mark.parametrize(
    ("s", "stored"),
    [
        (1.0, 127),
        (float(np.nextafter(np.float32(1), np.float32(2))), 128),
        (float(np.nextafter(np.float32(1), np.float32(0))), 127),
        (0.75, 127),
        (0.5, 126),
        (3.0, 129),
        (4.0, 129),
        (2.0**-126, 1),
        (float(np.nextafter(np.float32(2**-126), np.float32(1))), 2),
        (1.5 * 2.0**-127, 1),
        (2.0**127, 254),
        (3e38, 254),  # there is no larger power of two to go to
        (INF, 254),
        (0.0, 0),
        (NAN, 255),
        (-NAN, 255),
    ],
)
def test_e8m0_is_the_smallest_power_of_two_not_below(s, stored):
    got = round_scale(tensor(s), DTYPES["e8m0"])
    assert got.dtype == torch.uint8
    assert bits(got) == [stored]


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_e8m0_of_any_normal_scale(s):
    mantissa, exponent = math.frexp(s)  # s = mantissa * 2**exponent, mantissa in [0.5, 1)
    stored = round_scale(tensor(s), DTYPES["e8m0"])
    assert bits(stored) == [exponent + 127 - (mantissa == 0.5)]
    loaded = float(load_scale(stored, DTYPES["e8m0"]))
    assert loaded / 2 < s <= loaded


def test_e8m0_loads_every_code():
    got = load_scale(torch.arange(256, dtype=torch.uint8), DTYPES["e8m0"])
    assert got[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert bits(got[255:]) == [0x7FFFFFFF]


@pytest.mark.parametrize("s", [2.0**-149, 2.0**-128, 2.0**-127])
def test_e8m0_below_the_normal_range(s):
    assert bits(round_scale(tensor(s), DTYPES["e8m0"])) == [0]


@pytest.mark.parametrize(("name", "one_nan"), [("f32", 0x7FFFFFFF), ("f16", 0x7FFF), ("bf16", 0x7FFF)])
def test_nan_is_stored_as_the_one_nan(name, one_nan):
    assert bits(round_scale(tensor(NAN, -NAN), DTYPES[name])) == [one_nan, one_nan]


@pytest.mark.parametrize("s", [-1.0, -0.0, -INF])
def test_e8m0_of_a_negative_scale_is_as_in_c(s):
    assert bits(round_scale(tensor(s), DTYPES["e8m0"])) == [254]


@pytest.mark.parametrize("name", SCALE_TYPES)
def test_stored_scales_are_fixed_points(name):
    """What was stored and loaded is stored as the same bits again."""
    s = torch.exp(torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 4)
    once = round_scale(s, DTYPES[name])
    compare.bitwise(round_scale(load_scale(once, DTYPES[name]), DTYPES[name]), once)
    loaded = load_scale(once, DTYPES[name])
    assert loaded.dtype == torch.float32
    slack = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "fp8_e4m3": 2**-4, "e8m0": 1}[name]
    inside = (s > 2**-6) & (s <= 448)  # normal in every type
    assert inside.sum() > 400
    assert ((loaded - s).abs() <= s * slack)[inside].all()


@pytest.mark.parametrize("name", SCALE_TYPES)
def test_shape_is_kept_and_strides_are_honoured(name):
    s = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.5
    turned = s.t().contiguous().t()
    compare.bitwise(round_scale(turned, DTYPES[name]), round_scale(s, DTYPES[name]))
    stored = round_scale(s, DTYPES[name])
    compare.bitwise(load_scale(stored.t().contiguous().t(), DTYPES[name]), load_scale(stored, DTYPES[name]))
    assert load_scale(stored, DTYPES[name]).shape == (4, 6)


@pytest.mark.parametrize("name", ["int8", "int4", "e2m1", "fp8_e5m2"])
def test_element_types_are_no_scale_types(name):
    with pytest.raises(kvx.BadArgument) as refused:
        round_scale(tensor(1.0), DTYPES[name])
    assert str(refused.value) == f"{name} is not a scale type. Scales are f32, f16, bf16, fp8_e4m3, e8m0."


# ---- the whole way


@pytest.mark.parametrize("fmt", SCALED)
def test_a_row_of_zeros_has_a_scale_above_zero_and_stays_zero(fmt):
    row = FORMATS[fmt]
    stored = round_scale(scale_from_amax(finite_amax(torch.zeros(2, 32), -1), row), row.scale)
    loaded = load_scale(stored, row.scale)
    assert (loaded > 0).all()
    units = numbers.encode(torch.zeros(2, 32), row.element, loaded[:, None])
    assert not units.any()
    compare.bitwise(numbers.decode(units, row.element, loaded[:, None], torch.float32), torch.zeros(2, 32))


@given(st.sampled_from(["mxfp4", "mxfp8"]), st.floats(min_value=2.0**-100, max_value=2.0**126, width=32))
def test_a_power_of_two_scale_never_saturates_its_amax(fmt, amax):
    row = FORMATS[fmt]
    loaded = load_scale(round_scale(scale_from_amax(tensor(amax), row), row.scale), row.scale)
    assert QMAX[row.element.name] / 2 * (1 - 2**-22) < amax / float(loaded) <= QMAX[row.element.name] * (1 + 2**-22)


@pytest.mark.parametrize("fmt", SCALED)
def test_elements_are_within_half_a_step_of_what_was_written(fmt):
    """With the scale as stored, |x' - x| is at most half a step of the element type at x."""
    row = FORMATS[fmt]
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    loaded = load_scale(round_scale(scale_from_amax(finite_amax(x, -1), row), row.scale), row.scale)[:, None]
    again = numbers.decode(numbers.encode(x, row.element, loaded), row.element, loaded, torch.float32)
    if row.element.name in ("int8", "int4"):
        step = loaded.expand_as(x)
    else:
        mantissa = {"fp8_e4m3": 3, "fp8_e5m2": 2, "e2m1": 1}[row.element.name]
        smallest = {"fp8_e4m3": 2**-9, "fp8_e5m2": 2**-16, "e2m1": 0.5}[row.element.name]
        step = torch.maximum(2.0 ** (torch.floor(torch.log2((x / loaded).abs())) - mantissa), torch.tensor(smallest))
        step = step * loaded
    inside = (x / loaded).abs() <= QMAX[row.element.name]  # a scale rounded down saturates the largest element
    assert inside.float().mean() > 0.95
    assert ((again - x).abs() <= 0.5 * step * (1 + 2**-20))[inside].all()
