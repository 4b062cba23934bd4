"""Rows of a hybrid cache: bytes by each engine's rule, pages, and how far off a number can be."""

from __future__ import annotations

import pytest
import torch

from kvx import BadArgument
from kvx.cache.hybrid import ROW_FORMATS, RowCodec
from tests import compare

V4 = [name for name in ROW_FORMATS if name.startswith("fp8_v4")]
ROW_BYTES = {
    "f32": 2048, "bf16": 1024, **dict.fromkeys(V4, 584), "fp8_entry": 580, "nvfp4_entry": 288, "index_mxfp4": 68,
    "index_mxfp4_sglang": 68, "index_fp8": 132, "index_fp8_sglang": 132, "index_nvfp4": 72,
}  # fmt: skip
# The largest error a tile may have, of its largest magnitude.
BOUNDS = {
    "f32": 0.0, "bf16": 2.0**-8, **dict.fromkeys(V4, 1 / 17 + 2.0**-8), "fp8_entry": 16 / 448 + 1e-6, "nvfp4_entry": 1 / 6 * 1.07,
    "index_mxfp4": 1 / 5, "index_mxfp4_sglang": 1 / 5, "index_fp8": 1 / 17, "index_fp8_sglang": 16 / 448 + 1e-6,
    "index_nvfp4": 1 / 6 * 1.07,
}  # fmt: skip


def codec(name: str) -> RowCodec:
    return RowCodec(name, 128) if name.startswith("index") else RowCodec(name, 512, 64)


def tiles(c: RowCodec, x: torch.Tensor) -> torch.Tensor:
    """[rows, tiles, elements] of what is coded."""
    coded = x[:, : c.dim - c.rope_dim]
    return coded.unflatten(1, (-1, c.group or coded.shape[1]))


def test_every_format_is_here():
    assert set(ROW_BYTES) == set(BOUNDS) == set(ROW_FORMATS)


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_sizes_and_errors(name, generator):
    c = codec(name)
    assert c.row_bytes == ROW_BYTES[name]
    low, high = (-1, 2) if "nvfp4" in name else (-3, 3)  # an e4m3 scale has no more room
    x = torch.randn(64, c.dim, generator=generator) * torch.logspace(low, high, 64).unsqueeze(1)
    data, scales = c.encode(x)
    assert data.shape == (64, c.data_bytes)
    assert scales.shape == (64, c.scale_bytes)
    got = c.decode(data, scales)
    off = (tiles(c, got) - tiles(c, x)).abs().amax(-1) / tiles(c, x).abs().amax(-1)
    assert float(off.max()) <= BOUNDS[name]
    if c.rope_dim:
        compare.bitwise(got[:, -64:], x[:, -64:].bfloat16().float(), "the rotary part")


@pytest.mark.parametrize(
    ("name", "byte"),
    [("fp8_v4", 105), ("fp8_v4_sglang", 105), ("fp8_v4_sglang_triton", 92), ("fp8_v4_trtllm", 92), ("fp8_v4_flashmla", 114)],
)
def test_a_tile_of_zeros(name, byte):
    data, scales = codec(name).encode(torch.zeros(1, 512))
    assert scales[0].tolist() == [byte] * 7 + [0]
    assert not data.any()


@pytest.mark.parametrize("name", V4)
def test_scales_are_the_powers_that_do(name):
    """448 of a power of two needs that power, and the next number up the next."""
    x = torch.zeros(2, 512)
    x[0, ::64], x[1, ::64] = 448.0 * 4, 448.0 * 4 * (1 + 2.0**-7)
    data, scales = codec(name).encode(x)
    assert scales[:, :7].tolist() == [[129] * 7, [130] * 7]
    assert data[0, 0] == 0x7E, "448 is e4m3's largest"


@pytest.mark.parametrize("name", V4)
def test_coding_what_was_decoded_changes_nothing(name, generator):
    c = codec(name)
    once = c.decode(*c.encode(torch.randn(200, 512, generator=generator)))
    assert torch.equal(once, once.bfloat16().float())
    assert torch.equal(c.decode(*c.encode(once)), once)


def test_what_is_rounded_first_shows():
    """vLLM codes bf16 numbers, SGLang f32: 17.001 is 17 in bf16, halfway between e4m3's 16 and 18, and goes to the even one."""
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 1] = 448.0, 17.001
    assert codec("fp8_v4").decode(*codec("fp8_v4").encode(x))[0, 1] == 16
    assert codec("fp8_v4_sglang").decode(*codec("fp8_v4_sglang").encode(x))[0, 1] == 18


def test_ties_of_four_bits():
    """Middles between neighbours: to the even code, or all down, where -0 becomes 0."""
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.zeros(1, 128)
    x[0, 0] = 6.0  # the group's scale is 1
    x[0, 1:8], x[0, 8:15] = torch.tensor(middles), -torch.tensor(middles)
    even, down = codec("index_mxfp4"), codec("index_mxfp4_sglang")
    assert even.decode(*even.encode(x))[0, 1:8].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert down.decode(*down.encode(x))[0, 1:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert even.encode(x)[0][0, 4] & 15 == 8, "-0.25 is -0"
    assert down.encode(x)[0][0, 4] & 15 == 0
    assert even.encode(x)[1][0, 0] == down.encode(x)[1][0, 0] == 127


def test_low_nibble_is_the_even_element():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1] = 6.0, 3.0
    assert codec("index_mxfp4").encode(x)[0][0, 0] == 0x57  # 6 is code 7, 3 is code 5


def test_scale_of_indexer_keys():
    x = torch.zeros(1, 128)
    x[0, 3] = 100.0
    stored = {name: float(codec(name).encode(x)[1].view(torch.float32)) for name in ("index_fp8", "index_fp8_sglang")}
    assert stored == {"index_fp8": 0.25, "index_fp8_sglang": pytest.approx(100 / 448, rel=1e-7)}


@pytest.mark.parametrize(
    ("name", "rows", "size"),
    [
        ("fp8_v4", 2, 1728),
        ("fp8_v4", 32, 19008),
        ("fp8_v4", 64, 37440),
        ("fp8_v4", 128, 74880),
        ("fp8_v4", 256, 149760),
        ("fp8_v4_trtllm", 64, 37376),
        ("index_fp8", 64, 8448),
        ("index_mxfp4", 64, 4352),
    ],
)
def test_page_sizes(name, rows, size):
    assert codec(name).page_bytes(rows) == size


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_pages(name, generator):
    """Rows go where their slots say; one without a slot goes nowhere, and what is not written stays."""
    c, rows = codec(name), 6
    pages = torch.full((5, c.page_bytes(rows)), 0xA5, dtype=torch.uint8)
    x = torch.randn(4, c.dim, generator=generator)
    slots = torch.tensor([13, -1, 29, 0])
    c.write(pages, rows, slots, x)
    data, scales = c.encode(x)
    page = pages[2]  # slot 13 is its row 1
    assert page[c.data_bytes : 2 * c.data_bytes].tolist() == data[0].tolist()
    first = rows * c.data_bytes + c.scale_bytes
    assert page[first : first + c.scale_bytes].tolist() == scales[0].tolist()
    assert int((pages != 0xA5).sum(1).count_nonzero()) == 3
    got = c.read(pages, rows, torch.tensor([13, 29, 0, -7]))
    compare.bitwise(got[:3], c.decode(data, scales)[[0, 2, 3]], "rows read back")
    assert not got[3].any()


@pytest.mark.parametrize(
    "make", [lambda: RowCodec("fp8", 512), lambda: RowCodec("fp8_v4", 500, 64), lambda: RowCodec("bf16", 64, 65)]
)
def test_wrong_shapes_are_refused(make):
    with pytest.raises(BadArgument):
        make()


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_no_rows(name):
    c = codec(name)
    pages = torch.zeros(2, c.page_bytes(3), dtype=torch.uint8)
    c.write(pages, 3, torch.zeros(0, dtype=torch.int64), torch.zeros(0, c.dim))
    assert c.read(pages, 3, torch.zeros(0, dtype=torch.int64)).shape == (0, c.dim)


def test_pages_that_are_too_small_are_refused():
    with pytest.raises(BadArgument, match=r"\[pages, 1728\]"):
        codec("fp8_v4").parts(torch.zeros(3, 100, dtype=torch.uint8), 2)
