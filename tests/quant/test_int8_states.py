"""States in int8: the bytes that conversions make, and what a recurrence over them is worth."""

from __future__ import annotations

import pytest
import torch

import kvx
from kvx.layout.state_rows import STATE_ROWS, state_row
from kvx.layout.views import layer_views
from kvx.quant.states import INT8_ROWS, decode_rows, decode_with_rest, encode_rows, encode_with_rest
from kvx.spec import StateSpec, state_plane

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def planes(format: str) -> tuple:
    return state_plane("conv", "bf16", channel=24, tap=3), state_plane("delta", format, head=4, row=16, column=32)


def filled(spec: StateSpec, generator: torch.Generator, device: str = "cpu") -> list[torch.Tensor]:
    buffers = kvx.allocate_buffers(spec, device)
    for view in (view for layer in layer_views(buffers, spec) for view in layer):
        view.tensor.copy_(torch.randn(view.tensor.shape, generator=generator))
    return buffers


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("row", STATE_ROWS)
def test_conversions_make_these_rows(row, format, backend, generator):
    """Any engine's states to int8 and back: what encode_rows and decode_rows say."""
    src = state_row(row).spec(planes(format), num_blocks=3, num_layers=2)
    dst = StateSpec(3, planes(INT8_ROWS), num_layers=2)
    buffers = filled(src, generator, backend.device)
    codes, back = (kvx.allocate_buffers(spec, backend.device) for spec in (dst, src))
    kvx.convert(buffers, codes, plan=kvx.plan(src, dst), backend=backend.name)
    kvx.convert(codes, back, plan=kvx.plan(dst, src), backend=backend.name)
    for layer, coded, again in zip(layer_views(buffers, src), layer_views(codes, dst), layer_views(back, src), strict=True):
        assert torch.equal(layer[0].tensor, again[0].tensor)
        want = encode_rows(layer[1].tensor)
        assert torch.equal(coded[1].tensor, want)
        assert torch.equal(again[1].tensor, decode_rows(want).to(FLOATS[format]))


def test_shards_and_digests(generator):
    """The heads of each rank, converted by themselves, are those of the whole."""
    whole, dst = StateSpec(2, planes("f32"), num_layers=2), StateSpec(2, planes(INT8_ROWS), num_layers=2)
    buffers, one = filled(whole, generator), kvx.allocate_buffers(dst)
    parts = [dst.shard(4, i) for i in range(4)]
    shards = [kvx.allocate_buffers(part) for part in parts]
    kvx.convert(buffers, one, plan=kvx.plan(whole, dst))
    kvx.convert(buffers, shards, plan=kvx.plan(whole, parts))
    assert kvx.digest(one, dst) == kvx.digest(shards, parts)


def gated_delta(s: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The state after one more token."""
    k, v, beta, decay = (x.to(s.dtype) for x in inputs)
    s = s * decay[..., None]
    return s + torch.einsum("hk,hv->hkv", k, beta * (v - torch.einsum("hkv,hk->hv", s, k)))


def recurrence(keep, steps: int, generator: torch.Generator) -> list[float]:
    """A gated delta rule whose state is kept so between steps: the relative errors of what it reads, against float64."""
    heads, dim = 4, 64
    state, exact, errors = torch.zeros(heads, dim, dim), torch.zeros(heads, dim, dim, dtype=torch.float64), []
    for _ in range(steps):
        k, v, q = (torch.randn(heads, dim, generator=generator) for _ in range(3))
        k = k / k.norm(dim=-1, keepdim=True)
        beta, decay = (torch.rand(heads, 1, generator=generator) for _ in range(2))
        inputs = k, v, beta, torch.exp(-0.02 * decay)
        state, exact = keep(gated_delta(state, inputs)), gated_delta(exact, inputs)
        want = torch.einsum("hkv,hk->hv", exact, q.double())
        errors.append(float((torch.einsum("hkv,hk->hv", state.double(), q.double()) - want).norm() / want.norm()))
    return errors


KEPT = {
    "f32": lambda s: s,
    "bf16": lambda s: s.bfloat16().float(),
    "int8": lambda s: decode_rows(encode_rows(s)),
    "int8 and its rest": lambda s: decode_with_rest(*encode_with_rest(s)),
}


def test_a_recurrence_over_rounded_states():
    """In int8 alone errors pile up to percents; with the rest they stay under those of bf16."""
    worst = {}
    for name, keep in KEPT.items():
        errors = recurrence(keep, 300, torch.Generator().manual_seed(0))
        worst[name] = sum(errors[-100:]) / 100
    assert worst["f32"] < 1e-6
    assert 0.01 < worst["int8"] < 0.1, worst
    assert worst["int8 and its rest"] < worst["bf16"] / 10, worst
    assert worst["int8 and its rest"] < 5e-4, worst


def test_a_snapshot_in_int8():
    """Rounded once, an error is one step's, and the recurrence forgets it."""
    count = iter(range(400))
    errors = recurrence(lambda s: decode_rows(encode_rows(s)) if next(count) == 200 else s, 400, torch.Generator().manual_seed(0))
    assert max(errors[:200]) < 1e-6
    assert 1e-3 < max(errors[200:]) < 0.02
    assert max(errors[380:]) < max(errors[200:210]) / 2


@pytest.mark.parametrize("shape", [(7,), (1, 7), (1, 1, 3), (2, 7), (0, 5), (3, 0, 8)], ids=str)
def test_rows_of_any_size(shape, generator):
    x = torch.randn(shape, generator=generator)
    rows, rest = encode_with_rest(x)
    assert rows.shape == rest.shape == (*shape[:-1], shape[-1] + 4)
    torch.testing.assert_close(decode_with_rest(rows, rest), x, rtol=0, atol=1e-4 * float(x.abs().max()) if x.numel() else 0)
    with pytest.raises(kvx.BadArgument, match="both are alike"):
        decode_with_rest(rows, rest[None])


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4, dtype=torch.int32), torch.zeros(2, 0), torch.tensor(1.0), None], ids=str)
def test_what_has_no_rows(wrong):
    with pytest.raises(kvx.BadArgument, match=r"encode_rows\(\): x is"):
        encode_rows(wrong)
    with pytest.raises(kvx.BadArgument, match=r"decode_rows\(\): rows are"):
        decode_rows(wrong)


def test_formats_that_states_have_not():
    with pytest.raises(kvx.BadArgument, match="bf16, f16 or f32, or a format with inline scales"):
        StateSpec(2, (state_plane("delta", "int8_per_token_head", head=2, row=4, column=8),))
    with pytest.raises(kvx.BadArgument, match="scales of 4 bytes behind rows of 3 elements, where they are not aligned"):
        StateSpec(2, (state_plane("conv", INT8_ROWS, channel=8, tap=3),))
    both = state_plane("conv", "bf16", channel=1, tap=3), state_plane("delta", INT8_ROWS, head=2, row=4, column=8)
    with pytest.raises(kvx.BadArgument, match="puts 6 bytes of conv before or behind elements of 4 bytes, not aligned"):
        state_row("vllm.sd").spec(both, num_blocks=2)
    with pytest.raises(kvx.BadArgument, match="a scale for 128 elements; its rows have 32, which is no multiple"):
        StateSpec(2, (state_plane("delta", "fp8_e4m3_per_128_inline", head=2, row=4, column=32),))
