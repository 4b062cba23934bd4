"""index_scores: within the stated bound of the float64 answer, -inf exactly where a token may not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvx
from kvx.ops.entry.index_scores import index_scores
from kvx.ops.entry.step import Step
from kvx.quant.rows import RowCodec
from kvx.spec import ROW_FORMATS
from tests.hybrid.ops import hybrid_cases as cases
from tests.hybrid.ops.hybrid_cases import BATCHES, DTYPES, Batch

MIXED = Batch("mixed", (1, -1, 4, 0, 3), (1, 3, 0, 141, 7), (5003, 9, 0, 0, 250), behind=3)
INDEX = [n for n in ROW_FORMATS if n.startswith("index")]
E4M3 = torch.float8_e4m3fn


class Made:
    def __init__(
        self, batch: Batch, codec: RowCodec, device: str, generator: torch.Generator, *, heads: int = 8, ratio: int = 4,
        rows: int = 64, io: torch.dtype = torch.bfloat16, missing: float = 0.0,
    ) -> None:  # fmt: skip
        self.batch, self.ratio, self.device = batch, ratio, device
        self.block_table, num_pages = cases.table(batch, rows, ratio, generator, device, missing=missing)
        self.keys = cases.poisoned(codec, num_pages, rows, device)
        for run in batch.runs():  # rows that nobody may read yet stay poison
            numbers = torch.arange((run.start + run.end - run.begin) // ratio)
            pages = self.block_table[run.slot].cpu()[numbers // rows].long()
            slots = torch.where(pages < 0, -1, pages * rows + numbers % rows)
            self.keys.write(slots.to(device), cases.randn(generator, len(numbers), codec.dim, device=device))
        self.q = cases.tokens(batch, generator, heads, codec.dim, dtype=io, device=device)
        self.weights = cases.tokens(batch, generator, heads, device=device)
        self.step = batch.step(device)
        self.rounding = 2.0**-22 * codec.dim
        if io == E4M3 and device == "cuda" and codec.format.element.name == "fp8_e4m3":
            self.rounding = 2.0**-12  # Hopper's tensor cores keep 13 bits of a sum of e4m3

    def run(self, backend: str, **more: object) -> Tensor:
        return index_scores(self.q, self.weights, self.keys, self.block_table, self.step, ratio=self.ratio, **more, backend=backend)

    def check(self, got: Tensor, columns: int = 0) -> None:
        want, reach = self.answer(columns or self.block_table.shape[1] * self.keys.rows)
        got = got.cpu().double()
        assert got.shape == want.shape
        hidden = want == -torch.inf
        assert ((got == -torch.inf) == hidden).all(), "-inf in other places"
        off = (got - want).masked_fill(hidden, 0).abs()
        worst = (off / reach.clamp(min=1e-30)).max() if off.numel() else 0
        assert worst <= self.rounding, f"off by {worst} of the sum of magnitudes; {self.rounding} at most"

    def answer(self, columns: int) -> tuple[Tensor, Tensor]:
        want = torch.full((self.batch.num_tokens, columns), -torch.inf, dtype=torch.float64)
        reach = torch.ones_like(want)
        for run in self.batch.runs():
            count = min(columns, (run.start + run.end - run.begin) // self.ratio)
            numbers = torch.arange(count)
            pages = self.block_table[run.slot].cpu()[numbers // self.keys.rows].long()
            slots = torch.where(pages < 0, -1, pages * self.keys.rows + numbers % self.keys.rows)
            keys = self.keys.read(slots.to(self.device)).cpu().double()
            q, w = self.q[run.begin : run.end].float().cpu().double(), self.weights[run.begin : run.end].cpu().double()
            scores = torch.einsum("th,thj->tj", w, torch.einsum("thd,jd->thj", q, keys).relu())
            visible = torch.arange(run.start + 1, run.start + 1 + len(q))[:, None] // self.ratio
            want[run.begin : run.end, :count] = scores.masked_fill((numbers >= visible) | (slots < 0), -torch.inf)
            reach[run.begin : run.end, :count] = torch.einsum(
                "th,thj->tj", w.abs(), torch.einsum("thd,jd->thj", q.abs(), keys.abs())
            )
        return want, reach


@pytest.mark.parametrize("io", [*DTYPES, "e4m3"])
@pytest.mark.parametrize("name", ["f32", "bf16", *INDEX])
def test_formats_and_types(native_backend, name, io, generator):
    made = Made(MIXED, RowCodec(name, 128), native_backend.device, generator, io=DTYPES.get(io, E4M3))
    made.check(made.run(native_backend.name))


def test_the_definition(generator):
    made = Made(MIXED, RowCodec("index_mxfp4", 128), "cpu", generator, missing=0.1)
    made.check(made.run("torch"))


@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (3, 64), (64, 128), (5, 512), (130, 32), (64, 36)])
def test_shapes(native_backend, heads, dim, generator):
    made = Made(MIXED, RowCodec("bf16", dim), native_backend.device, generator, heads=heads)
    made.check(made.run(native_backend.name))


@pytest.mark.parametrize(("heads", "name"), [(64, "index_mxfp4"), (32, "index_fp8"), (64, "index_nvfp4")])
def test_chunks_of_many_tokens(native_backend, heads, name, generator):
    """Tiles of tokens and of entries, neither ending where a tile does."""
    batch = Batch("chunk", (1, 0), (333, 70), (700, 5))
    made = Made(batch, RowCodec(name, 128), native_backend.device, generator, heads=heads)
    made.check(made.run(native_backend.name))


@pytest.mark.parametrize("rows", [7, 8, 16, 32, 128])
@pytest.mark.parametrize("heads", [8, 32, 48, 64])
def test_queries_and_keys_of_e4m3(native_backend, heads, rows, generator):
    """Multiplied as they are where a device can: chunks of many tokens, pages of any size, some of them missing."""
    batch = Batch("chunk", (1, 0, 2), (133, 1, 70), (700, 5003, 5))
    codec = RowCodec("index_fp8", 128)
    made = Made(batch, codec, native_backend.device, generator, heads=heads, rows=rows, io=E4M3, missing=0.1)
    made.check(made.run(native_backend.name))


@pytest.mark.parametrize(("ratio", "rows"), [(1, 16), (4, 64), (4, 60), (128, 2), (5, 7)])
@pytest.mark.parametrize("batch", [b for b in BATCHES if b.name != "chunks"], ids=str)
def test_steps(native_backend, batch, ratio, rows, generator):
    made = Made(batch, RowCodec("index_mxfp4", 64), native_backend.device, generator, heads=4, ratio=ratio, rows=rows, missing=0.1)
    made.check(made.run(native_backend.name))


@pytest.mark.parametrize("columns", [1, 100, 333, 2000])
def test_fewer_columns_than_the_table_has(native_backend, columns, generator):
    made = Made(MIXED, RowCodec("index_fp8", 128), native_backend.device, generator)
    made.check(made.run(native_backend.name, max_entries=columns), columns)


def test_all_pages_missing(native_backend, generator):
    made = Made(MIXED, RowCodec("index_fp8", 128), native_backend.device, generator, missing=1.0)
    assert (made.run(native_backend.name) == -torch.inf).all()


def test_outputs_and_strides(native_backend, generator):
    """Columns past the result stay; queries and weights of any strides."""
    made = Made(MIXED, RowCodec("index_mxfp4", 128), native_backend.device, generator)
    columns = made.block_table.shape[1] * 64
    wide = torch.full((len(made.q), columns + 9), 3.0, device=native_backend.device)
    made.q = made.q.transpose(0, 1).contiguous().transpose(0, 1)
    made.weights = made.weights.T.contiguous().T
    made.check(made.run(native_backend.name, out=wide[:, 4 : 4 + columns]))
    made.check(wide[:, 4 : 4 + columns])
    assert (wide[:, :4] == 3).all()
    assert (wide[:, 4 + columns :] == 3).all()
    apart = torch.stack((made.q, made.q * torch.nan), -1)
    made.q = apart[..., 0]
    made.check(made.run(native_backend.name))


def test_hadamard(native_backend, generator):
    """Rotated queries on rotated keys: scores are those of neither."""
    made = Made(MIXED, RowCodec("f32", 128), native_backend.device, generator, io=torch.float32)
    got = made.run(native_backend.name, hadamard=True)
    made.q = kvx.ops.entry.finish.hadamard(made.q)
    made.check(got)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": lambda m: m.q[..., :100]}, "q is"),
        ({"q": lambda m: m.q.double()}, "q is"),
        ({"weights": lambda m: m.weights[:, :3]}, "weights are"),
        ({"weights": lambda m: m.weights.half()}, "weights are"),
        ({"ratio": lambda m: 0}, "ratio is 0"),
        ({"block_table": lambda m: m.block_table.long()}, "block_table is"),
        ({"out": lambda m: m.weights.new_zeros(3, 9)}, "scores are"),
        ({"out": lambda m: m.weights.new_zeros(9, len(m.q)).T}, "scores are"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments(backend, change, words, generator):
    made = Made(MIXED, RowCodec("index_fp8", 128), backend.device, generator)
    args = {
        "q": made.q,
        "weights": made.weights,
        "block_table": made.block_table,
        "ratio": 4,
        **{k: f(made) for k, f in change.items()},
    }
    q, weights, blocks = (args.pop(name) for name in ("q", "weights", "block_table"))
    with pytest.raises(kvx.BadArgument, match=words):
        index_scores(q, weights, made.keys, blocks, made.step, **args, backend=backend.name)


def _page_outside(m: Made) -> None:
    m.block_table[0, 0] = len(m.keys.pages)


def _slot_outside(m: Made) -> None:
    m.step = Step(m.step.slots + 3, m.step.cu_seqlens, m.step.starts)


def _short_table(m: Made) -> None:
    m.block_table = m.block_table[:, :3].contiguous()


@pytest.mark.parametrize(
    ("change", "columns", "words"),
    [(_page_outside, 0, "there are"), (_short_table, 999, "its table has 3 pages"), (_slot_outside, 0, "slot 7")],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_places_outside(backend, change, columns, words, generator):
    made = Made(MIXED, RowCodec("bf16", 128), backend.device, generator)
    change(made)
    if backend.device == "cpu":
        out = torch.full((len(made.q), columns or made.block_table.shape[1] * 64), 5.0)
        with pytest.raises(kvx.OutOfRange, match=words):
            made.run(backend.name, out=out)
        assert (out == 5).all()
        return
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    scores = made.run("cuda", max_entries=columns, errors=errors)
    assert int(errors) > 0
    assert not torch.isnan(scores).any()
