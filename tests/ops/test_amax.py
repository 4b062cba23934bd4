"""amax: largest finite magnitudes, and the scales made from them."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases, compare


@pytest.mark.parametrize("per", ["tensor", "head", "block", "block_head"])
@pytest.mark.parametrize("io", list(cases.IO))
@pytest.mark.parametrize("strided", [False, True])
def test_amax_matches_definition(native_backend, per, io, strided, generator):
    x = cases.values(301, 5, 33, cases.IO[io], generator, odd=True)
    slots = torch.randint(-3, 40, (301,), generator=generator)
    blocks = {"slot_mapping": slots, "num_blocks": 10, "block_size": 4} if "block" in per else {}
    want = kvx.amax(x, per, backend="torch", **blocks)
    moved = {n: b.to(native_backend.device) if isinstance(b, torch.Tensor) else b for n, b in blocks.items()}
    y = x.to(native_backend.device)
    y = y.permute(2, 1, 0).contiguous().permute(2, 1, 0) if strided else y
    compare.bitwise(kvx.amax(y, per, backend=native_backend.name, **moved).cpu(), want)


def test_amax_by_hand(backend):
    x = torch.tensor([[[1.0, -3.0]], [[float("nan"), 2.0]], [[-float("inf"), 0.5]]], device=backend.device)
    assert kvx.amax(x, backend=backend.name).item() == 3.0
    slots = torch.tensor([0, 5, -1], device=backend.device)
    per_block = kvx.amax(x, "block", slot_mapping=slots, num_blocks=3, block_size=4, backend=backend.name)
    assert per_block.tolist() == [3.0, 2.0, 0.0]


def test_out_is_raised_never_lowered(backend):
    out = torch.tensor([1.0, 9.0], device=backend.device)
    x = torch.tensor([[[4.0], [4.0]]], device=backend.device)
    assert kvx.amax(x, "head", out=out, backend=backend.name) is out
    assert out.tolist() == [4.0, 9.0]


def test_scales_from_amax_lose_nothing_to_saturation(backend, generator):
    x = cases.values(64, 4, 32, torch.float32, generator, odd=False).to(backend.device)
    scale = kvx.scale_from_amax(kvx.amax(x, "head", backend=backend.name), "fp8_e4m3_per_head")
    spec = kvx.CacheSpec(16, 4, 4, 32, format="fp8_e4m3_per_head")
    st = kvx.allocate(spec, backend.device)
    slots = torch.arange(64, device=backend.device)
    kvx.write(st.cache, x, x, slot_mapping=slots, spec=spec, k_scale=scale, v_scale=scale, backend=backend.name)
    table = kvx.PackedTable(torch.arange(16, device=backend.device)[None], torch.tensor([64], device=backend.device))
    k, _ = kvx.gather(
        st.cache,
        table,
        spec=spec,
        max_seq_len=64,
        dtype=torch.float32,
        k_scale=scale,
        v_scale=scale,
        backend=backend.name,
    )
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of a value; below the smallest normal, half of 2^-9 in scaled units.
    bound = x.abs() * 2.0**-4 + scale[:, None] * 2.0**-10
    assert ((k[0] - x).abs() <= bound).all()


def test_wrong_inputs(backend):
    x = torch.zeros(2, 3, 4, device=backend.device)
    for args, words in (
        ({"per": "token"}, "per is"),
        ({"per": "block"}, "needs slot_mapping"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "no blocks"),
        ({"out": torch.zeros(2)}, "out is"),
    ):
        with pytest.raises(kvx.BadArgument, match=words):
            kvx.amax(x, backend=backend.name, **args)
    if backend.device == "cpu":
        with pytest.raises(kvx.OutOfRange):
            kvx.amax(x, "block", slot_mapping=torch.tensor([0, 99]), num_blocks=2, block_size=4, backend=backend.name)
