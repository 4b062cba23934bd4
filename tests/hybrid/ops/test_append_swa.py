"""append_swa: the bytes of windows and of a step's rows are the definition's, in every format."""

from __future__ import annotations

import pytest
import torch

import kvx
from kvx.ops import backend as backends
from kvx.ops.entry.append_swa import append_swa
from kvx.ops.entry.step import Step
from kvx.quant.rows import RowCodec, RowPages
from kvx.spec import ROW_FORMATS
from tests import compare
from tests.hybrid.ops import hybrid_cases as cases
from tests.hybrid.ops.hybrid_cases import BATCHES, DTYPES, Batch

MIXED, CHUNKS = (next(b for b in BATCHES if b.name == name) for name in ("mixed", "chunks"))
FORMATS = cases.codecs()


class Made:
    def __init__(self, batch: Batch, codec: RowCodec, rows: int, io: torch.dtype, device: str, generator: torch.Generator) -> None:
        self.window = RowPages.zeros(codec, batch.num_slots, rows, device)
        self.window.pages.copy_(torch.randint(0, 256, self.window.pages.shape, generator=generator, dtype=torch.uint8))
        self.positions = torch.full((batch.num_slots, rows), -1, dtype=torch.int32, device=device)
        self.x = cases.tokens(batch, generator, codec.dim, dtype=io, device=device)
        self.step = batch.step(device)
        self.finish: dict[str, object] = {}

    def with_finish(self, generator: torch.Generator, weight: torch.dtype | None, rope_dim: int) -> Made:
        dim, device = self.window.codec.dim, self.x.device
        if weight is not None:
            self.finish["weight"] = cases.randn(generator, dim, dtype=weight, device=str(device))
        if rope_dim:
            self.finish["cos"], self.finish["sin"] = cases.tables(rope_dim, str(device))
        return self

    def check(self, backend: str) -> None:
        got, want = (cases.clone(self.window) for _ in range(2))
        places = [self.positions.clone() for _ in range(2)]
        for rows, at, name in ((got, places[0], backend), (want, places[1], "torch")):
            append_swa(rows, at, self.x, self.step, **self.finish, backend=name)
        compare.bitwise(got.pages, want.pages, "window")
        compare.bitwise(places[0], places[1], "positions")


@pytest.mark.parametrize(("name", "dim", "rope_dim"), FORMATS)
def test_windows_in_every_format(native_backend, name, dim, rope_dim, generator):
    made = Made(MIXED, RowCodec(name, dim, rope_dim), 134, torch.bfloat16, native_backend.device, generator)
    made.with_finish(generator, torch.bfloat16, rope_dim or 64).check(native_backend.name)


@pytest.mark.parametrize("rows", [1, 128, 131])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_steps_and_rings(native_backend, batch, rows, generator):
    """Windows that wrap, chunks longer than them, rings with room for drafts, tokens of nobody."""
    made = Made(batch, RowCodec("fp8_v4", 512, 64), rows, torch.bfloat16, native_backend.device, generator)
    made.with_finish(generator, torch.float32, 64).check(native_backend.name)


@pytest.mark.parametrize("rope_dim", [0, 2, 16, 64])
@pytest.mark.parametrize("weight", [None, "f16", "bf16", "f32"])
@pytest.mark.parametrize("io", DTYPES)
def test_norm_and_rotation(native_backend, io, weight, rope_dim, generator):
    made = Made(MIXED, RowCodec("f32", 64), 128, DTYPES[io], native_backend.device, generator)
    made.with_finish(generator, weight and DTYPES[weight], rope_dim).check(native_backend.name)


@pytest.mark.parametrize("dim", [2, 6, 72, 100, 1024])
def test_odd_widths(native_backend, dim, generator):
    made = Made(MIXED, RowCodec("bf16", dim), 16, torch.float32, native_backend.device, generator)
    made.with_finish(generator, torch.float32, 2).check(native_backend.name)


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_an_odd_rotary_part_is_refused(name):
    """Elements turn in pairs, and bf16 behind an odd number of bytes would not be aligned."""
    with pytest.raises(kvx.BadArgument, match="even"):
        RowCodec(name, 65 if ROW_FORMATS[name].rows.keeps_rope else 64, 1)


@pytest.mark.parametrize("name", [n for n in ROW_FORMATS if n != "f32"])
def test_rows_of_odd_numbers(native_backend, name, generator):
    """Zeros, tiles whose largest is tiny, infinities and NaN, ties."""
    dim, rope_dim = (512, 64) if ROW_FORMATS[name].rows.keeps_rope else (128, 0)
    made = Made(CHUNKS, RowCodec(name, dim, rope_dim), 128, torch.float32, native_backend.device, generator)
    n = len(made.x)
    sizes = 10.0 ** torch.linspace(-42, 30, n, dtype=torch.float64)
    made.x.mul_(sizes.to(torch.float32).to(made.x.device)[:, None])
    made.x[::7] = 0
    made.x[1::7, ::5] = -0.0
    made.x[2::7, 3] = torch.inf
    made.x[2::7, dim - 1] = -torch.inf
    made.x[3::7, 40] = torch.nan
    made.x[3::7, dim - 2] = torch.nan
    steps = torch.arange(dim, device=made.x.device)
    signs = 1 - 2 * (steps // 25 % 2)
    made.x[4::7] = signs * (steps % 25) * 0.25  # the scale is 1, and every second one a tie of e2m1
    made.x[5::7] = signs * (448.0 - steps % 57 * 8)  # the same of e4m3
    made.check(native_backend.name)


@pytest.mark.parametrize("name", ["fp8_v4", "fp8_entry", "nvfp4_entry", "bf16", "f32"])
def test_rows_of_a_step_alone(native_backend, name, generator):
    """Without positions token t is row t, whatever its slot; rows behind stay."""
    codec = RowCodec(name, 512, 64)
    made = Made(MIXED, codec, 64, torch.float16, native_backend.device, generator).with_finish(generator, torch.float32, 64)
    got, want = (cases.poisoned(codec, 6, 64, native_backend.device) for _ in range(2))
    for rows, backend in ((got, native_backend.name), (want, "torch")):
        append_swa(rows, None, made.x, made.step, **made.finish, backend=backend)
    compare.bitwise(got.pages, want.pages)
    read = want.read(torch.arange(len(made.x), device=made.x.device))
    assert torch.isfinite(read[cases.owned(MIXED).to(read.device)]).all()


def test_strides(native_backend, generator):
    device = native_backend.device
    made = Made(MIXED, RowCodec("fp8_v4", 512, 64), 128, torch.bfloat16, device, generator).with_finish(
        generator, torch.bfloat16, 64
    )
    wide = torch.full((len(made.x), 700), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, 100:612] = made.x
    made.x = wide[:, 100:612]
    made.check(native_backend.name)
    apart = torch.full((len(made.x), 512, 2), torch.nan, dtype=torch.bfloat16, device=device)
    apart[..., 1] = made.x
    made.x = apart[..., 1]
    made.check(native_backend.name)
    spaced = torch.zeros(len(made.window.pages), made.window.pages.shape[1] + 576, dtype=torch.uint8, device=device)
    made.window = RowPages(made.window.codec, spaced[:, : made.window.pages.shape[1]], 128)
    got = spaced.clone()
    pages = RowPages(made.window.codec, got[:, : made.window.pages.shape[1]], 128)
    append_swa(pages, made.positions, made.x, made.step, **made.finish, backend=native_backend.name)
    assert (got[:, made.window.pages.shape[1] :] == 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": lambda m: m.x[:, :500]}, "x is"),
        ({"x": lambda m: m.x.double()}, "x is"),
        ({"positions": lambda m: m.positions[:, :100]}, "positions are"),
        ({"positions": lambda m: m.positions.long()}, "positions are"),
        ({"weight": lambda m: m.x.new_ones(500)}, "weight is"),
        ({"weight": lambda m: m.x.new_ones(1)}, "weight is"),
        ({"weight": lambda m: m.x.new_ones(())}, "weight is"),
        ({"weight": lambda m: m.finish["weight"].double()}, "weight is"),
        ({"eps": lambda m: -1.0}, "eps is -1"),
        ({"cos": lambda m: None}, "cos and sin are given together"),
        ({"sin": lambda m: None}, "cos and sin are given together"),
        ({"cos": lambda m: m.finish["cos"][:50]}, "cos and sin are alike"),
        ({"sin": lambda m: m.finish["sin"][:, :1]}, "cos and sin are alike"),
        ({"cos": lambda m: m.x.new_ones(9, 257).float(), "sin": lambda m: m.x.new_ones(9, 257).float()}, "cos and sin are alike"),
        ({"cos": lambda m: m.x.new_ones(()).float(), "sin": lambda m: m.x.new_ones(()).float()}, "cos is"),
        ({"step": lambda m: Step(m.step.slots.long(), *m.step[1:])}, r"step\.slots is"),
        ({"step": lambda m: Step(*m.step[:2], m.step.starts[:2])}, r"step\.starts is"),
        ({"errors": lambda m: torch.zeros(2, dtype=torch.int64, device=m.x.device)}, "errors must be one int64"),
        ({"positions": lambda m: None, "x": lambda m: m.x.new_zeros(800, 512)}, "800 tokens for 768 rows"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments(backend, change, words, generator):
    made = Made(MIXED, RowCodec("bf16", 512), 128, torch.bfloat16, backend.device, generator).with_finish(
        generator, torch.bfloat16, 64
    )
    args = {"positions": made.positions, "x": made.x, **made.finish, **{k: f(made) for k, f in change.items()}}
    with pytest.raises(kvx.BadArgument, match=words):
        append_swa(made.window, args.pop("positions"), args.pop("x"), args.pop("step", made.step), **args, backend=backend.name)


BAD = [
    (Step.of((0, 6), (1, 1), (0, 0)), "slot 6", 1),
    (Step.of((0, 1), (1, 9), (0, 0)), "ends at token 10", 1),
    (Step.of((0, 1), (1, 1), (4, cases.FAR + 600)), "cos and sin have", 1),
    (Step(*(torch.tensor(x, dtype=torch.int32) for x in ((0, 1), (0, 1, 2), (3, -4)))), "position -4", 1),
]


@pytest.mark.parametrize(("step", "words", "good"), BAD, ids=[words for _, words, _ in BAD])
def test_places_outside(backend, step, words, good, generator):
    """The host refuses and has written nothing; a device counts them and writes the others."""
    device = backend.device
    window = cases.poisoned(RowCodec("bf16", 64), 6, 8, device)
    positions = torch.full((6, 8), -1, dtype=torch.int32, device=device)
    cos, sin = cases.tables(16, device)
    x = cases.randn(generator, 4, 64, device=device)
    errors = torch.zeros((), dtype=torch.int64, device=device)
    step = Step(*(t.to(device) for t in step))
    if device == "cpu":
        with pytest.raises(kvx.OutOfRange, match=words):
            append_swa(window, positions, x, step, cos=cos, sin=sin, backend=backend.name)
        assert (positions == -1).all()
        assert (window.pages == cases.NAN_BYTE).all()
        return
    append_swa(window, positions, x, step, cos=cos, sin=sin, errors=errors, backend="cuda")
    assert int(errors) > 0
    assert int((positions >= 0).sum()) == good


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_a_slot_that_is_twice_in_a_step(name):
    """Its two runs would write the same rows. A device does not look for it."""
    if backends.reason_missing(name) is not None:
        pytest.skip(f"backend {name} is not there")
    window, positions = cases.poisoned(RowCodec("bf16", 64), 6, 8, "cpu"), torch.full((6, 8), -1, dtype=torch.int32)
    with pytest.raises(kvx.OutOfRange, match="slot 2, which is in the step before"):
        append_swa(window, positions, torch.zeros(3, 64), Step.of((2, 0, 2), (1, 1, 1), (0, 0, 4)), backend=name)
    assert (positions == -1).all()
