"""merge_attention: parts of one softmax give the whole, and every backend agrees with the definition within rounding."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases

NONE = -torch.inf


def made(parts, tokens, heads, dim, dtype, g):
    outs = torch.randn(parts, tokens, heads, dim, generator=g).to(dtype)
    lses = torch.randn(parts, tokens, heads, generator=g) * 4
    lses[torch.rand(lses.shape, generator=g) < 0.2] = NONE
    lses[:, 0, 0] = NONE
    outs[lses == NONE] = torch.nan  # not read
    return outs, lses


def tolerance(outs, out_dtype):
    """One rounding to the result's type (half an ulp each way), and 8 + 2 * parts ulp of f32 before it."""
    largest = float(outs.float().nan_to_num().abs().max())
    return largest * (torch.finfo(out_dtype).eps + (8 + 2 * outs.shape[0]) * 2.0**-24)


@pytest.mark.parametrize("io", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("shape", [(1, 3, 2, 128), (2, 5, 3, 64), (7, 4, 4, 80), (33, 2, 5, 256), (3, 4, 2, 7)], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_matches_definition(native_backend, io, out, shape, has_sinks, generator):
    outs, lses = made(*shape, cases.IO[io], generator)
    sinks = torch.randn(shape[2], generator=generator) * 3 if has_sinks else None
    want, want_lse = kvx.merge_attention(outs, lses, sinks=sinks, dtype=cases.IO[out], backend="torch")
    device = native_backend.device
    got, got_lse = kvx.merge_attention(
        outs.to(device),
        lses.to(device),
        sinks=None if sinks is None else sinks.to(device),
        dtype=cases.IO[out],
        backend=native_backend.name,
    )
    assert not want.isnan().any()
    torch.testing.assert_close(got.cpu().float(), want.float(), rtol=0, atol=tolerance(outs, cases.IO[out]))
    torch.testing.assert_close(got_lse.cpu(), want_lse, rtol=4 * 2.0**-23, atol=1e-5)
    assert (got[0, 0] == 0).all()
    assert got_lse[0, 0] == NONE


def test_parts_of_a_softmax_make_the_whole(backend, generator):
    """Scores and values cut into uneven parts, against one softmax in f64, with and without a sink."""
    q, k, v = (torch.randn(n, 2, 32, generator=generator) for n in (5, 40, 40))
    scores = torch.einsum("thd,shd->ths", q, k).double() * 0.3
    sinks = torch.randn(2, generator=generator)
    outs, lses = [], []
    for a, b in ((0, 3), (3, 3), (3, 21), (21, 40)):
        part = scores[..., a:b]
        outs.append(torch.einsum("ths,shd->thd", part.softmax(-1), v[a:b].double()).float())
        lses.append(part.logsumexp(-1).float() if b > a else torch.full((5, 2), NONE))
    for given in (None, sinks):
        with_sink = scores if given is None else torch.cat([scores, given.double()[None, :, None].expand(5, 2, 1)], -1)
        want = torch.einsum("ths,shd->thd", with_sink.softmax(-1)[..., :40], v.double())
        got, lse = kvx.merge_attention(
            torch.stack(outs).to(backend.device),
            torch.stack(lses).to(backend.device),
            sinks=None if given is None else given.to(backend.device),
            backend=backend.name,
        )
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse.cpu().double(), scores.logsumexp(-1), rtol=0, atol=2e-6)


def test_only_the_sink_is_seen(backend):
    outs, lses = torch.full((2, 1, 1, 16), torch.nan, device=backend.device), torch.full((2, 1, 1), NONE, device=backend.device)
    out, lse = kvx.merge_attention(outs, lses, sinks=torch.ones(1, device=backend.device), backend=backend.name)
    assert (out == 0).all()
    assert lse[0, 0] == NONE


def test_results_merge_again(backend, generator):
    """The sink enters in the last merge only."""
    outs, lses = made(6, 4, 3, 64, torch.float32, generator)
    outs, lses, sinks = (x.to(backend.device) for x in (outs, lses, torch.randn(3, generator=generator)))
    want, _ = kvx.merge_attention(outs, lses, sinks=sinks, backend=backend.name)
    halves = [kvx.merge_attention(outs[i : i + 3], lses[i : i + 3], backend=backend.name) for i in (0, 3)]
    got, _ = kvx.merge_attention(
        torch.stack([h[0] for h in halves]), torch.stack([h[1] for h in halves]), sinks=sinks, backend=backend.name
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_strides_and_outputs(backend, generator):
    outs, lses = (x.to(backend.device) for x in made(3, 4, 2, 32, torch.bfloat16, generator))
    want, want_lse = kvx.merge_attention(outs, lses, backend=backend.name)
    out = torch.empty(2, 4, 64, dtype=outs.dtype, device=outs.device).transpose(0, 1)[..., ::2]
    lse = torch.empty(2, 4, device=outs.device).T
    kvx.merge_attention(outs.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2), lses, out=(out, lse), backend=backend.name)
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=0)


def test_wrong_inputs_are_refused_by_name(backend, generator):
    outs, lses = (x.to(backend.device) for x in made(3, 4, 2, 32, torch.bfloat16, generator))
    for changes, words in (
        ({"outs": outs[0]}, "outs"),
        ({"outs": outs.double()}, "outs"),
        ({"lses": lses[1:]}, "lses"),
        ({"lses": lses.half()}, "lses"),
        ({"sinks": torch.ones(3, device=outs.device)}, "sinks"),
        ({"out": (outs[0][:1], lses[0])}, "out"),
        ({"backend": "gpu"}, "backend"),
    ):
        given = {"outs": outs, "lses": lses, "backend": backend.name, **changes}
        with pytest.raises(kvx.BadArgument, match=words):
            kvx.merge_attention(given.pop("outs"), given.pop("lses"), **given)
