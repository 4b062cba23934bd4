"""compress: entries and tails are the definition's within the rounding of a softmax; coded ones within a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import kvx
from kvx.ops.entry.compress import compress
from kvx.ops.entry.step import Step
from kvx.ops.entry.tail import Tail
from kvx.quant.rows import RowCodec, RowPages
from kvx.spec import ROW_FORMATS
from tests import compare
from tests.hybrid.ops import hybrid_cases as cases
from tests.hybrid.ops.hybrid_cases import BATCHES, DTYPES, Batch

MIXED, DECODE = (next(b for b in BATCHES if b.name == name) for name in ("mixed", "decode"))
KINDS = ["overlap", "ring", "running"]
CLOSE = 1e-5  # 128 places of a softmax in f32, each within 2^-24, and the exponentials within a few of those
# A step of a code next to a number, as a share of the number and of the largest of its tile (which powers of two may double).
STEPS = {"f32": (CLOSE, CLOSE), "bf16": (2.0**-7, CLOSE), "fp8_e4m3": (2.0**-3, 2.0**-16), "e2m1": (0.5, 1 / 6)}


def make_tail(kind: str, ratio: int, dim: int, batch: Batch, device: str, generator: torch.Generator) -> Tail:
    """As earlier tokens left it: of each run what is open, and the window before."""
    tail = Tail(ratio, dim, batch.num_slots, overlap=kind == "overlap", kind="ring" if kind == "ring" else "running", device=device)
    width = tail.num_parts * dim
    for run in batch.runs():
        before = run.start % ratio + (ratio if run.start >= ratio else 0)
        if before:
            kv, score = (cases.randn(generator, before, width, device=device) for _ in range(2))
            tail.take(run.slot, run.start - before, kv, score)
    return tail


class Made:
    def __init__(
        self, batch: Batch, kind: str, ratio: int, codec: RowCodec, device: str, generator: torch.Generator, *,
        io: torch.dtype = torch.bfloat16, rows: int = 16,
    ) -> None:  # fmt: skip
        self.tail = make_tail(kind, ratio, codec.dim, batch, device, generator)
        width = self.tail.num_parts * codec.dim
        self.kv, self.score = (cases.tokens(batch, generator, width, dtype=io, device=device) for _ in range(2))
        self.block_table, num_pages = cases.table(batch, rows, ratio, generator, device)
        self.entries = cases.poisoned(codec, num_pages, rows, device)
        self.step = batch.step(device)
        self.more: dict[str, object] = {}
        self.generator, self.device = generator, device

    def finish(self, rope_dim: int = 64, weight: torch.dtype | None = torch.bfloat16, *, bias: bool = True) -> Made:
        dim = self.entries.codec.dim
        if weight is not None:
            self.more["weight"] = cases.randn(self.generator, dim, dtype=weight, device=self.device)
        if rope_dim:
            self.more["cos"], self.more["sin"] = cases.tables(rope_dim, self.device)
        if bias:
            self.more["bias"] = cases.randn(self.generator, self.tail.ratio, self.tail.num_parts * dim, device=self.device)
        return self

    def run(self, backend: str) -> tuple[RowPages, Tensor]:
        entries, tail = cases.clone(self.entries), copy.deepcopy(self.tail)
        compress(tail, self.kv, self.score, entries, self.block_table, self.step, **self.more, backend=backend)
        return entries, tail.state

    def check(self, backend: str) -> None:
        (got, state), (want, want_state) = self.run(backend), self.run("torch")
        same_entries(got, want)
        torch.testing.assert_close(state, want_state, rtol=CLOSE, atol=CLOSE)
        # What is in the state as it came, or is empty, is so to the bit.
        whole = (
            torch.isinf(want_state) | (want_state == 0) if self.tail.is_running else torch.ones_like(want_state, dtype=torch.bool)
        )
        compare.bitwise(state[whole], want_state[whole], "state")


def same_entries(got: RowPages, want: RowPages) -> None:
    """Rows that nobody wrote to the bit, the others within a step, and nearly all within the rounding."""
    codec = want.codec
    data, want_data = (p.codec.parts(p.pages, p.rows)[0] for p in (got, want))
    written = (want_data != cases.NAN_BYTE).any(-1).flatten()
    compare.bitwise(data.flatten(0, 1)[~written], want_data.flatten(0, 1)[~written], "rows of nobody")
    at = written.nonzero().flatten()
    x, y = got.read(at), want.read(at)
    assert torch.isfinite(x).all()
    coded = codec.dim - codec.rope_dim
    for part, element, group in (
        (slice(0, coded), codec.format.element.name, codec.group or coded),
        (slice(coded, None), "bf16", codec.rope_dim),
    ):
        a, b = x[:, part], y[:, part]
        if b.numel() == 0:
            continue
        largest = b.unflatten(1, (-1, group)).abs().amax(-1, keepdim=True).expand(-1, -1, group).flatten(1)
        of_number, of_tile = STEPS[element]
        off = (a - b).abs()
        assert (off <= of_number * torch.maximum(a.abs(), b.abs()) + of_tile * largest).all(), f"{element}: {off.max()}"
        near = (off <= CLOSE * largest).float().mean()
        assert near > 0.99, f"{element}: {near} of the numbers are the same"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dim", "rope_dim"), cases.codecs())
def test_entries_in_every_format(native_backend, name, dim, rope_dim, kind, generator):
    made = Made(MIXED, kind, 4, RowCodec(name, dim, rope_dim), native_backend.device, generator)
    made.finish(rope_dim or 64).check(native_backend.name)


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_steps(native_backend, batch, kind, ratio, generator):
    made = Made(batch, kind, ratio, RowCodec("f32", 64), native_backend.device, generator, rows=8)
    made.finish(16).check(native_backend.name)


# Enough windows that a device pools them by pairs: with a block for each multiprocessor (of 132), and with more.
LONG = [
    Batch("pairs", (2, -1, 0, 4), (700, 9, 331, 16), (0, 5, 13, 160), num_slots=5),
    Batch("many_pairs", (1, 3, 2), (1600, 5, 2011), (7, 30, 0), num_slots=4, behind=3),
]


@pytest.mark.parametrize("io", ["f32", "bf16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", LONG, ids=str)
def test_many_windows(native_backend, batch, bias, io, generator):
    made = Made(batch, "running", 16, RowCodec("fp8_v4", 512, 64), native_backend.device, generator, io=DTYPES[io], rows=8)
    made.finish(64, bias=bias).check(native_backend.name)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_close_a_window(native_backend, kind, generator):
    """One token a sequence, at every place of a window, far along and near the start."""
    places = (0, 1, 2, 3, 4, 7, cases.FAR, cases.FAR + 3)
    batch = Batch("places", tuple(range(8)), (1,) * 8, places, num_slots=9)
    made = Made(batch, kind, 4, RowCodec("f32", 512), native_backend.device, generator)
    made.finish(64).check(native_backend.name)


@pytest.mark.parametrize("weight", [None, "f16", "f32"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("io", DTYPES)
def test_types(native_backend, io, bias, weight, generator):
    made = Made(MIXED, "overlap", 4, RowCodec("f32", 128), native_backend.device, generator, io=DTYPES[io])
    made.finish(0 if weight is None else 64, weight and DTYPES[weight], bias=bias).check(native_backend.name)


@pytest.mark.parametrize("dim", [64, 128, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_hadamard(native_backend, kind, dim, generator):
    made = Made(MIXED, kind, 4, RowCodec("f32", dim), native_backend.device, generator).finish(64 if dim > 64 else 16)
    made.more["hadamard"] = True
    made.check(native_backend.name)


@pytest.mark.parametrize("name", [n for n in ROW_FORMATS if n.startswith("index")])
def test_hadamard_before_codes(native_backend, name, generator):
    made = Made(MIXED, "overlap", 4, RowCodec(name, 128), native_backend.device, generator).finish(64)
    made.more["hadamard"] = True
    made.check(native_backend.name)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_entries_and_missing_pages(native_backend, kind, generator):
    made = Made(MIXED, kind, 4, RowCodec("fp8_v4", 512, 64), native_backend.device, generator).finish()
    made.more["num_shared"] = torch.tensor([70, 5004, -1, 253, 0, 0], dtype=torch.int32, device=native_backend.device)
    made.block_table[0, 2] = -1
    made.block_table[0, 0] = 2**30  # all of its entries are shared: it is not looked at
    made.check(native_backend.name)
    entries, _ = made.run(native_backend.name)
    written = (entries.pages.cpu() != cases.NAN_BYTE).any(1).nonzero().flatten().tolist()
    # Of slot 0 entries from 17 on, less those of the missing page; of slot 3 entry 63, its last.
    assert set(written) == {int(made.block_table[slot, column]) for slot, column in ((0, 1), (0, 3), (0, 4), (3, 3))}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_any_size(native_backend, kind, generator):
    """Weights that are all but zero, and a score of -inf among others."""
    made = Made(MIXED, kind, 4, RowCodec("f32", 64), native_backend.device, generator, io=torch.float32).finish(0)
    made.score.mul_(60)
    made.score[2::4, ::5] = -torch.inf  # no window's first token: a running sum that begins with -inf is NaN
    made.check(native_backend.name)


def test_strides(native_backend, generator):
    made = Made(MIXED, "overlap", 4, RowCodec("f32", 128), native_backend.device, generator).finish(64)
    both = torch.stack((made.kv, made.score), 1)
    made.kv, made.score = both[:, 0], both[:, 1]
    made.check(native_backend.name)
    apart = torch.stack((made.kv, made.score), -1)
    made.kv, made.score = apart[..., 0], apart[..., 1]
    made.check(native_backend.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv": lambda m: m.kv[:, :100]}, "kv is"),
        ({"score": lambda m: m.score[:3]}, "score"),
        ({"kv": lambda m: m.kv.double(), "score": lambda m: m.score.double()}, "float64"),
        ({"bias": lambda m: m.more["bias"][:3]}, "bias is"),
        ({"weight": lambda m: m.kv.new_ones(5)}, "weight is"),
        ({"weight": lambda m: m.kv.new_ones(())}, "weight is"),
        ({"sin": lambda m: None}, "cos and sin are given together"),
        ({"num_shared": lambda m: m.block_table[0, 0]}, "num_shared is"),
        ({"block_table": lambda m: m.block_table.long()}, "block_table is"),
        ({"block_table": lambda m: m.block_table[:2]}, "block_table is"),
        ({"num_shared": lambda m: m.block_table[:, 0].long()}, "num_shared is"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments(backend, change, words, generator):
    made = Made(MIXED, "overlap", 4, RowCodec("bf16", 128), backend.device, generator).finish(64)
    args = {
        "kv": made.kv,
        "score": made.score,
        "block_table": made.block_table,
        **made.more,
        **{k: f(made) for k, f in change.items()},
    }
    kv, score, blocks = (args.pop(name) for name in ("kv", "score", "block_table"))
    with pytest.raises(kvx.BadArgument, match=words):
        compress(made.tail, kv, score, made.entries, blocks, made.step, **args, backend=backend.name)


def test_hadamard_of_a_width_that_has_none(backend, generator):
    made = Made(MIXED, "ring", 4, RowCodec("f32", 96), backend.device, generator)
    with pytest.raises(kvx.BadArgument, match="power of two"):
        compress(made.tail, made.kv, made.score, made.entries, made.block_table, made.step, hadamard=True, backend=backend.name)


def _page_outside(m: Made) -> None:
    m.block_table[0, 1] = len(m.entries.pages)


def _short_table(m: Made) -> None:
    m.block_table = m.block_table[:, :3].contiguous()


def _position_outside(m: Made) -> None:
    m.more["cos"], m.more["sin"] = (x[:256] for x in cases.tables(16, m.device))  # slot 1 closes the entry of position 5000


def _start_outside(m: Made) -> None:
    m.step = Step(m.step.slots, m.step.cu_seqlens, m.step.starts - 1)


def _slot_outside(m: Made) -> None:
    m.step = Step(m.step.slots + 3, m.step.cu_seqlens, m.step.starts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_page_outside, "there are"),
        (_short_table, "its table has 3 pages"),
        (_slot_outside, "slot 7"),
        (_position_outside, "cos and sin have 256"),
        (_start_outside, "position -1"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_places_outside(backend, change, words, generator):
    """The host refuses and has written nothing; a device counts them and leaves those entries out."""
    made = Made(MIXED, "overlap", 4, RowCodec("bf16", 64), backend.device, generator)
    change(made)
    entries, tail = cases.clone(made.entries), copy.deepcopy(made.tail)
    args = (tail, made.kv, made.score, entries, made.block_table, made.step)
    if backend.device == "cpu":
        with pytest.raises(kvx.OutOfRange, match=words):
            compress(*args, **made.more, backend=backend.name)
        compare.bitwise(entries.pages, made.entries.pages)
        compare.bitwise(tail.state, made.tail.state)
        return
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    compress(*args, **made.more, errors=errors, backend="cuda")
    assert int(errors) > 0
