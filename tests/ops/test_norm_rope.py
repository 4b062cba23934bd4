"""qk_norm_rope and qkv_norm_rope: every backend equals the torch definition bit for bit; the definition equals f64 closely."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases, compare
from tests.ops import rope

DIMS = [128, 64, 256, 96, 80, 192, 16, 40, 7, 2, 1, 512, 576]


def only_q(values):
    values = {n: x for n, x in values.items() if n != "k_weight"}
    return {("weight" if n == "q_weight" else n): x for n, x in values.items()}


@pytest.mark.parametrize("how", rope.ROPES, ids=str)
@pytest.mark.parametrize("io", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dim", DIMS)
def test_matches_definition(native_backend, how, io, dim, generator):
    x = cases.values(21, 3, dim, cases.IO[io], generator, odd=dim == 80)
    args = only_q(how.make(21, dim, x.dtype, generator))
    want = kvx.qk_norm_rope(x, backend="torch", **args)
    got = kvx.qk_norm_rope(x.to(native_backend.device), backend=native_backend.name, **rope.to(native_backend.device, args))
    compare.bitwise(got.cpu(), want)


@pytest.mark.parametrize("how", rope.ROPES, ids=str)
@pytest.mark.parametrize("dim", [128, 80])
def test_definition_is_close_to_f64(how, dim, generator):
    """Steps of f32: 16 rounded ones from x to y at most, a sum of log2(dim) + 3 levels among them."""
    x = torch.randn(19, 2, dim, generator=generator)
    args = only_q(how.make(19, dim, x.dtype, generator))
    got = kvx.qk_norm_rope(x, backend="torch", **args)
    y = x.double()
    if (w := args.get("weight")) is not None:
        y = y / (y.square().mean(-1, keepdim=True) + args["eps"]).sqrt() * (w.double() + args["weight_offset"])
    if (cos := args.get("cos")) is not None:
        c, s = (t[args["positions"].long()].double()[:, None] for t in (cos, args["sin"]))
        half = c.shape[-1]
        z = y.clone()
        pairs = (slice(0, half), slice(half, 2 * half)) if how.style == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        z[..., pairs[0]] = y[..., pairs[0]] * c - y[..., pairs[1]] * s
        z[..., pairs[1]] = y[..., pairs[1]] * c + y[..., pairs[0]] * s
        y = z
    torch.testing.assert_close(got.double(), y, rtol=0, atol=float(y.abs().max()) * 16 * 2.0**-24)


@pytest.mark.parametrize("dim", [128, 40])
def test_outputs_of_any_strides(backend, dim, generator):
    """Head-major, in place, and a slice of something larger."""
    x = cases.values(9, 4, dim, torch.bfloat16, generator, odd=False).to(backend.device)
    args = rope.to(backend.device, only_q(rope.Rope().make(9, dim, x.dtype, generator)))
    want = kvx.qk_norm_rope(x, backend=backend.name, **args)
    head_major = torch.empty(4, 9, dim, dtype=x.dtype, device=x.device)
    kvx.qk_norm_rope(x, out=head_major.transpose(0, 1), backend=backend.name, **args)
    compare.bitwise(head_major.transpose(0, 1).contiguous(), want)
    wide = torch.full((9, 6, 2 * dim), 7.0, dtype=x.dtype, device=x.device)
    kvx.qk_norm_rope(x, out=wide[:, 1:5, ::2], backend=backend.name, **args)
    compare.bitwise(wide[:, 1:5, ::2].contiguous(), want)
    assert (wide[:, 1:5, 1::2] == 7).all()
    assert (wide[:, 0] == 7).all()
    assert (wide[:, 5] == 7).all()
    again = x.clone()
    assert kvx.qk_norm_rope(again, out=again, backend=backend.name, **args) is again
    compare.bitwise(again, want)
    strided = torch.stack([x, x], dim=-1)[..., 0]
    compare.bitwise(kvx.qk_norm_rope(strided, backend=backend.name, **args), want)


def test_copy_keeps_bits(backend, generator):
    x = cases.values(11, 3, 64, torch.bfloat16, generator, odd=True)
    x.view(torch.int16)[0, 0, :4] = torch.tensor([0x7FC1, 0x7F81, -1, 0x7F80], dtype=torch.int16)  # NaN payloads
    x = x.to(backend.device)
    compare.bitwise(kvx.qk_norm_rope(x, backend=backend.name), x)


@pytest.mark.parametrize("how", rope.ROPES, ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (64, 128), (40, 24)], ids=str)
def test_split_matches_definition(native_backend, how, dims, generator):
    q, k, v = (cases.values(13, h, d, torch.bfloat16, generator, odd=False) for h, d in ((6, dims[0]), (2, dims[0]), (2, dims[1])))
    args = how.make(13, dims[0], q.dtype, generator)
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": dims[0], "v_head_dim": dims[1]}
    qkv = rope.fuse(q, k, v)
    want = kvx.qkv_norm_rope(qkv, backend="torch", **shape, **args)
    here = rope.to(native_backend.device, args)
    for rows in (qkv.to(native_backend.device), tuple(x.to(native_backend.device) for x in (q, k, v))):
        got = kvx.qkv_norm_rope(rows, backend=native_backend.name, **shape, **here)
        for name, a, b in zip("qkv", got, want, strict=True):
            compare.bitwise(a.cpu(), b, name)
    compare.bitwise(want[2], v)


def test_many_tokens(native_backend, generator):
    """Enough rows for several rounds a thread and threads left over."""
    for tokens, heads in ((5000, 7), (701, 48)):
        x = torch.randn(tokens, heads, 128, generator=generator).bfloat16()
        args = only_q(rope.Rope().make(tokens, 128, x.dtype, generator))
        want = kvx.qk_norm_rope(x, backend="torch", **args)
        got = kvx.qk_norm_rope(x.to(native_backend.device), backend=native_backend.name, **rope.to(native_backend.device, args))
        compare.bitwise(got.cpu(), want)


def test_no_tokens(backend):
    x = torch.empty(0, 2, 64, device=backend.device)
    none = torch.empty(0, dtype=torch.int64, device=backend.device)
    table = torch.ones(4, 32, device=backend.device)
    assert kvx.qk_norm_rope(x, cos=table, sin=table, positions=none, backend=backend.name).shape == (0, 2, 64)


def test_positions_outside_the_tables(backend, generator):
    x = torch.randn(5, 2, 64, generator=generator).to(backend.device)
    args = rope.to(backend.device, only_q(rope.Rope().make(5, 64, x.dtype, generator)))
    want = kvx.qk_norm_rope(x, backend=backend.name, **args)
    args["positions"] = args["positions"].clone()
    args["positions"][1], args["positions"][3] = rope.MAX_POSITIONS, -1
    out = torch.full_like(x, 7.0)
    if backend.device == "cpu":
        with pytest.raises(kvx.OutOfRange, match=rf"positions\[1\] is {rope.MAX_POSITIONS}"):
            kvx.qk_norm_rope(x, out=out, backend=backend.name, **args)
        assert (out == 7).all()
        return
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    kvx.qk_norm_rope(x, out=out, errors=errors, backend=backend.name, **args)
    assert int(errors) == 2
    want[1], want[3] = 7.0, 7.0
    compare.bitwise(out, want)


def test_wrong_inputs_are_refused_by_name(backend, generator):
    x = torch.randn(5, 2, 64, generator=generator).to(backend.device)
    args = rope.to(backend.device, only_q(rope.Rope().make(5, 64, x.dtype, generator)))
    for changes, words in (
        ({"x": x[0]}, "dim"),
        ({"x": x.double()}, "f64|float64|element type"),
        ({"weight": args["weight"][:-1]}, "weight"),
        ({"cos": args["cos"][:, :-1]}, "cos|sin"),
        ({"cos": args["cos"].double()}, "cos"),
        ({"cos": None}, "cos, sin and positions"),
        ({"positions": args["positions"][1:]}, "positions"),
        ({"positions": args["positions"].float()}, "positions"),
        ({"rope": "neox"}, "half, interleaved or none"),
        ({"out": x[:, :1]}, "out"),
        ({"backend": "gpu"}, "backend"),
    ):
        given = {"x": x, "backend": backend.name, **args, **changes}
        with pytest.raises(kvx.BadArgument, match=words):
            kvx.qk_norm_rope(given.pop("x"), **given)
    with pytest.raises(kvx.BadArgument, match=r"\[num_tokens, 384\]"):
        kvx.qkv_norm_rope(x[:, 0], num_heads=4, num_kv_heads=1, head_dim=64, backend=backend.name)
