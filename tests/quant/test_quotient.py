"""The short quotient of the CUDA quantiser (native/cuda/chunk.cuh): no scale on its short way can give another code than division.

The quotient of a 16-bit x comes out as RN(x/s * (1 + e)) with |e| <= 2**-44, where division gives RN(x/s). A code depends only on
how that compares with the code type's boundaries, all f32 numbers of few bits. So an x/s is at risk only within 2**-44 of a
midpoint between a boundary and its neighbour: significands M = (b << k) +- 1. With X, S the significands of x and s as integers,
that is |X * 2**p - M * S| <= M * S * 2**-44: for each M and X there is at most one S to look at.
"""

import numpy as np
import pytest

# type: (low zero bits of a boundary in 25 bits, boundaries as odd integers)
TYPES = {
    "int8": (17, range(1, 256, 2)),
    "fp8_e4m3": (20, range(1, 32, 2)),
    "fp8_e5m2": (21, range(1, 16, 2)),
    "int4": (21, range(1, 16, 2)),
    "e2m1": (22, range(1, 8, 2)),
}


def divides(s: np.ndarray, zeros: int) -> np.ndarray:
    """Quantiser::is_plain, negated: these scales take the long way."""
    mask = (1 << zeros) - 1
    return (((s + 64) & mask) <= 128) & ((s & mask) != 0)


@pytest.mark.parametrize("x_bits", [8, 11], ids=("bf16", "f16"))
@pytest.mark.parametrize("name", TYPES)
def test_no_scale_on_the_short_way_is_at_risk(name, x_bits):
    zeros, boundaries = TYPES[name]
    at_risk = 0
    for b in boundaries:
        assert (b << zeros).bit_length() <= 25
        base = b << (25 - b.bit_length())  # the boundary with 25 bits: one below the f32's last is the midpoint
        midpoints = [base + 1, base - 1]
        if b == 1:
            midpoints.append(2 * base - 1)  # below a power of two the neighbour is half as far
        for m in midpoints:
            for x in range(1 << (x_bits - 1), 1 << x_bits):
                for p in range(48 - x_bits, 53 - x_bits):
                    product = x << p
                    for s in {product // m, -(-product // m)}:
                        if (1 << 23) <= s < (1 << 24) and abs(product - m * s) <= (m * s) >> 44:
                            at_risk += 1
                            assert divides(np.int64(s), zeros), (b, m, x, s)
    assert at_risk or name != "int8"  # the search finds something, so it can


def test_powers_of_two_take_the_short_way():
    assert not divides(np.int64(1 << 23), 17)
