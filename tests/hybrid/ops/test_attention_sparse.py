"""attention_sparse: near the float64 answer over windows, fresh rows and entries; what is not read is poison."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kvx
from kvx.ops.attention.sparse import attention_sparse
from kvx.ops.entry.finish import turn
from kvx.ops.entry.step import Run, Step
from kvx.quant.rows import RowCodec, RowPages
from kvx.spec import ROW_FORMATS
from tests.hybrid.ops import hybrid_cases as cases
from tests.hybrid.ops.hybrid_cases import DTYPES, Batch
from tests.ops.attention_cases import EPS, close, error, magnitude

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch saying it has no bf16 instructions
ENTRIES = [n for n in ROW_FORMATS if not n.startswith("index")]
ONES = Batch("ones", (2, 0, -1, 5, 4), (1, 1, 1, 1, 1), (7, 1000, 3, cases.FAR, 127), behind=1)
MIXED = Batch("mixed", (1, -1, 4, 0, 3), (1, 3, 0, 37, 7), (5003, 9, 0, 0, 250), behind=3)
CHUNK = Batch("chunk", (3, 1), (290, 5), (5000, 3))
FIRST = Batch("first", (0, 1), (1, 2), (0, 0))


class Made:
    """Random rows where a step may read, poison where it may not."""

    def __init__(
        self, batch: Batch, device: str, generator: torch.Generator, *, window: str = "fp8_v4", entries: str | None = "fp8_v4",
        dim: int = 512, rope_dim: int = 64, heads: int = 8, io: torch.dtype = torch.bfloat16, window_tokens: int = 128,
        ring: int = 131, ratio: int = 4, rows: int = 64, k: int = 0, fresh: bool = True, missing: float = 0.0,
        size: float = 1.0,
    ) -> None:  # fmt: skip
        self.size = size  # of numbers in rows
        self.batch, self.device, self.window_tokens, self.ratio = batch, device, window_tokens, ratio
        codec = RowCodec(window, dim, rope_dim)
        self.window = cases.poisoned(codec, batch.num_slots, ring, device)
        self.positions = torch.full((batch.num_slots, ring), -1, dtype=torch.int32, device=device)
        self.fresh = cases.poisoned(codec, -(-batch.num_tokens // 64), 64, device) if fresh else None
        for run in batch.runs():
            end = run.start if fresh else run.start + run.end - run.begin
            at = torch.arange(max(0, end - ring), end, device=device)
            self.window.write(run.slot * ring + at % ring, size * cases.randn(generator, len(at), dim, device=device))
            self.positions[run.slot, at % ring] = at.to(torch.int32)
            if self.fresh is not None:
                mine = torch.arange(run.begin, run.end, device=device)
                self.fresh.write(mine, size * cases.randn(generator, len(mine), dim, device=device))
        self.q = cases.tokens(batch, generator, heads, dim, dtype=io, device=device)
        self.more: dict = {}
        self.entries: RowPages | None = None
        self.selected: Tensor | None = None
        if entries is not None:
            self._make_entries(RowCodec(entries, dim, rope_dim), rows, k, missing, generator)
        self.step = batch.step(device)

    def _make_entries(self, codec: RowCodec, rows: int, k: int, missing: float, generator: torch.Generator) -> None:
        batch = self.batch
        self.block_table, num_pages = cases.table(batch, rows, self.ratio, generator, self.device, missing=missing)
        self.entries = cases.poisoned(codec, num_pages, rows, self.device)
        if k:
            self.selected = torch.full((batch.num_tokens, k), 2**30, dtype=torch.int32)
        for run in batch.runs():
            last = torch.zeros(0, dtype=torch.int64)
            for t in range(run.begin, run.end if self.selected is not None else run.begin):
                seen = (run.start + t - run.begin + 1) // self.ratio
                picks = torch.randperm(seen, generator=generator)[: torch.randint(0, k + 1, (), generator=generator)]
                self.selected[t] = -1
                self.selected[t, torch.randperm(k, generator=generator)[: len(picks)]] = picks.to(torch.int32)
                last = torch.cat((last, picks))
            numbers = last.unique() if self.selected is not None else torch.arange((run.start + run.end - run.begin) // self.ratio)
            slots = self._slots(run.slot, numbers)  # of entries that nobody chose the rows stay poison
            self.entries.write(
                slots.to(self.device), self.size * cases.randn(generator, len(numbers), codec.dim, device=self.device)
            )
        if self.selected is not None:
            self.selected = self.selected.to(self.device)

    def _slots(self, slot: int, numbers: Tensor) -> Tensor:
        pages = self.block_table[slot].cpu()[numbers // self.entries.rows].long()
        return torch.where(pages < 0, -1, pages * self.entries.rows + numbers % self.entries.rows)

    def finish(self, generator: torch.Generator, *, sinks: bool = True, rope_dim: int = 64) -> Made:
        if sinks:
            self.more["sinks"] = cases.randn(generator, self.q.shape[1], device=self.device)
        if rope_dim:
            self.more["cos"], self.more["sin"] = cases.tables(rope_dim, self.device)
        return self

    def run(self, backend: str, **more: object) -> tuple[Tensor, Tensor]:
        args: dict = {"fresh": self.fresh, "window_tokens": self.window_tokens, **self.more}
        if self.entries is not None:
            args |= {"entries": self.entries, "block_table": self.block_table, "selected": self.selected, "ratio": self.ratio}
        return attention_sparse(self.q, self.window, self.positions, self.step, **args | more, backend=backend)

    def rows_of(self, run: Run) -> tuple[Tensor, Tensor]:
        """[n, dim] f32 that tokens of the run read, and which of them read which: [tokens, n]."""
        ring, at = self.window.rows, torch.arange(run.start, run.start + run.end - run.begin)
        end = run.start if self.fresh is not None else run.start + len(at)
        old = torch.arange(max(0, run.start - self.window_tokens + 1), end)
        old = old[self.positions[run.slot].cpu()[old % ring] == old]
        parts, places = [self.window.read((run.slot * ring + old % ring).to(self.device))], [old]
        if self.fresh is not None:
            parts.append(self.fresh.read(torch.arange(run.begin, run.end, device=self.device)))
            places.append(at)
        away = at[:, None] - torch.cat(places)
        seen = [(away >= 0) & (away < self.window_tokens)]
        if self.entries is not None:
            numbers = torch.arange(int(at[-1] + 1) // self.ratio)
            chosen = numbers < ((at + 1) // self.ratio)[:, None]
            if self.selected is not None:
                mine, none = self.selected[run.begin : run.end].cpu().long(), len(numbers)
                marks = torch.zeros(len(at), none + 1, dtype=torch.bool)
                chosen &= marks.scatter_(1, mine.where((mine >= 0) & (mine < none), none), True)[:, :none]
            slots = self._slots(run.slot, numbers)
            kept = (slots >= 0) & chosen.any(0)
            parts.append(self.entries.read(slots[kept].to(self.device)))
            seen.append(chosen[:, kept])
        return torch.cat(parts).cpu(), torch.cat(seen, 1)

    def answer(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float, float]:
        """out, lse, how large sums of a score get, and the largest value. Inputs, scores, weights and out are rounded to `dtype`,
        sums are f32: what matrix units do (torch's own on a CPU without bf16 take minutes).
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def rounded(x: Tensor) -> Tensor:
            return x.cpu().to(dtype).to(wide)

        out = torch.zeros(self.q.shape, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64)
        reach = largest = 0.0
        scale, sinks = self.more.get("scale") or self.q.shape[-1] ** -0.5, self.more.get("sinks")
        for run in self.batch.runs():
            rows, seen = self.rows_of(run)
            assert torch.isfinite(rows).all()
            q, keys = rounded(self.q[run.begin : run.end]), rounded(rows)
            scores = rounded(torch.einsum("thd,nd->thn", q, keys) * scale).masked_fill(~seen[:, None], -torch.inf)
            reach = max(reach, magnitude(torch.einsum("thd,nd->thn", q.abs(), keys.abs()) * abs(scale)))
            largest = max(largest, magnitude(rows))
            lse[run.begin : run.end] = rounded(torch.logsumexp(scores, -1)).double()
            if sinks is not None:
                scores = torch.cat((scores, rounded(sinks)[:, None].expand(*scores.shape[:2], 1)), -1)
            weights = rounded(torch.softmax(scores, -1).nan_to_num(0)[..., : len(rows)])
            y = rounded(torch.einsum("thn,nd->thd", weights, keys)).double()
            if "cos" in self.more:
                at = slice(run.start, run.start + run.end - run.begin)
                y = turn(y, self.more["cos"][at].cpu().double(), self.more["sin"][at].cpu().double(), back=True)
            out[run.begin : run.end] = y
        return out, lse, reach, largest

    def check(self, out: Tensor, lse: Tensor) -> None:
        want, want_lse, reach, largest = self.answer(torch.float64)
        theirs, their_lse, _, _ = self.answer(self.q.dtype)
        step = torch.finfo(out.dtype).eps / 2
        # Turning makes of two values one as large as both.
        floor = step * magnitude(want) + 4 * EPS * largest * (2 if "cos" in self.more else 1)
        close("out", out.cpu(), want, 2 * error(theirs, want) + floor)
        floor = math.sqrt(self.q.shape[-1]) * EPS * reach + 4 * EPS * max(1.0, magnitude(want_lse))
        close("lse", lse.cpu(), want_lse, 2 * error(their_lse, want_lse) + floor)


@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("window", ["fp8_v4", "bf16", "f32"])
def test_formats_and_types(native_backend, window, entries, io, generator):
    made = Made(MIXED, native_backend.device, generator, window=window, entries=entries, io=DTYPES[io], k=40).finish(generator)
    made.check(*made.run(native_backend.name))


@pytest.mark.parametrize("k", [0, 1, 33, 512])
@pytest.mark.parametrize("batch", [MIXED, CHUNK, FIRST, ONES], ids=str)
def test_steps(native_backend, batch, k, generator):
    """Chosen entries or all of them; the window alone where a token has no entry yet; tokens of nobody."""
    made = Made(batch, native_backend.device, generator, k=k, ratio=4 if k else 128).finish(generator)
    made.check(*made.run(native_backend.name))


@pytest.mark.parametrize("batch", [MIXED, ONES], ids=str)
def test_the_definition(batch, generator):
    made = Made(batch, "cpu", generator, ratio=128).finish(generator)
    made.check(*made.run("torch"))


@pytest.mark.parametrize("k", [0, 200])
@pytest.mark.parametrize("batch", [ONES, FIRST], ids=str)
def test_tokens_that_are_in_the_window(native_backend, batch, k, generator):
    """Without fresh rows: a decode step, and a first one of two tokens."""
    made = Made(batch, native_backend.device, generator, k=k, ratio=4 if k else 128, fresh=False).finish(generator)
    made.check(*made.run(native_backend.name))


@pytest.mark.parametrize("name", ["fp8_v4", "bf16"])
def test_a_window_alone(native_backend, name, generator):
    for batch, fresh in ((ONES, False), (MIXED, True), (CHUNK, True)):
        made = Made(batch, native_backend.device, generator, window=name, entries=None, fresh=fresh).finish(generator)
        made.check(*made.run(native_backend.name))


@pytest.mark.parametrize(
    ("heads", "dim", "rope_dim"), [(1, 512, 64), (64, 512, 64), (128, 512, 64), (5, 64, 16), (16, 128, 0), (67, 96, 32), (3, 36, 4)]
)
@pytest.mark.parametrize("fresh", [True, False])
def test_shapes(native_backend, heads, dim, rope_dim, fresh, generator):
    name = "fp8_v4" if dim == 512 else "bf16"
    made = Made(
        MIXED if fresh else ONES,
        native_backend.device,
        generator,
        window=name,
        entries=name,
        heads=heads,
        dim=dim,
        rope_dim=rope_dim,
        k=30,
        fresh=fresh,
    )
    made.finish(generator, rope_dim=rope_dim).check(*made.run(native_backend.name))


@pytest.mark.parametrize(("window_tokens", "ring"), [(1, 1), (1, 4), (7, 7), (128, 128), (128, 160), (300, 512)])
def test_windows(native_backend, window_tokens, ring, generator):
    made = Made(CHUNK, native_backend.device, generator, entries=None, window_tokens=window_tokens, ring=ring).finish(generator)
    made.check(*made.run(native_backend.name))


@pytest.mark.parametrize("size", [1e-5, 1e-3, 60.0, 1e3, 1e6])
@pytest.mark.parametrize("k", [0, 40])
def test_numbers_of_any_size(native_backend, k, size, generator):
    """Kernels hold rows in types of less range; what does not fit goes another way."""
    made = Made(ONES, native_backend.device, generator, k=k, ratio=4 if k else 128, heads=64, fresh=False, size=size).finish(
        generator
    )
    made.more["scale"] = 1 / (size * 512)  # weights of many rows matter
    made.check(*made.run(native_backend.name))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_in_a_row(backend, byte, generator):
    """Of tokens that read it everything is NaN, and nothing of the others."""
    made = Made(ONES, backend.device, generator, k=40, heads=64, fresh=False).finish(generator)
    slot, position = ONES.slots[1], ONES.starts[1]
    made.window.pages[slot, position % made.window.rows * made.window.codec.data_bytes + 77] = byte
    out, lse = made.run(backend.name)
    seen = torch.zeros(ONES.num_tokens, dtype=torch.bool)
    seen[1] = True
    assert (torch.isnan(out.cpu()).all(-1).all(-1) == seen).all()
    assert not torch.isnan(out.cpu()[~seen]).any()
    assert torch.isnan(lse.cpu()[1]).all()


@pytest.mark.parametrize("name", ["fp8_v4", "bf16", "f32"])
def test_nan_in_the_row_of_a_later_token(backend, name, generator):
    """Tokens before it do not see it: nothing of it is in them."""
    made = Made(CHUNK, backend.device, generator, window=name, entries=None, heads=64).finish(generator)
    want, want_lse = made.run(backend.name)
    last = CHUNK.runs()[0].end - 1
    made.fresh.write(torch.tensor([last], device=backend.device), torch.full((1, 512), torch.nan, device=backend.device))
    out, lse = made.run(backend.name)
    assert torch.isnan(out[last]).all()
    assert torch.isnan(lse[last]).all()
    others = torch.arange(len(out), device=backend.device) != last
    assert torch.isfinite(out[others]).all()
    assert torch.equal(out[others], want[others])
    assert torch.equal(lse[others], want_lse[others])


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("name", ["fp8_v4", "bf16", "f32"])
def test_nan_in_a_query(backend, name, sinks, generator):
    """The head is NaN, its lse too; other heads and tokens are what they were, within the rounding of weights to bf16."""
    made = Made(MIXED, backend.device, generator, window=name, entries=name, k=16).finish(generator, sinks=sinks)
    want, want_lse = made.run(backend.name)
    token, head = MIXED.runs()[-1].begin, 3
    made.q[token, head, 100] = torch.nan
    out, lse = made.run(backend.name)
    is_odd = torch.zeros_like(lse, dtype=torch.bool)
    is_odd[token, head] = True
    assert torch.isnan(out[token, head]).all()
    assert torch.isnan(lse[token, head])
    torch.testing.assert_close(out[~is_odd], want[~is_odd], rtol=2.0**-6, atol=2.0**-6)
    torch.testing.assert_close(lse[~is_odd], want_lse[~is_odd])


def test_a_workspace_of_the_bytes_that_are_told(backend, generator):
    """Made before the call; 0 on the host, and a call takes it there as well."""
    made = Made(ONES, backend.device, generator, window="fp8_v4", heads=64, ratio=128, fresh=False).finish(generator)
    size = kvx.attention_sparse_workspace_bytes(
        made.q, made.window, made.positions, made.step, window_tokens=128, entries=made.entries, block_table=made.block_table,
        ratio=128,
    )  # fmt: skip
    assert (size > 0) == (backend.device == "cuda")
    made.check(*made.run(backend.name, workspace=torch.empty(size, dtype=torch.uint8, device=backend.device)))


def test_many_entries(native_backend, generator):
    """A token of a long request reads all: rows are cut into spans that threads share."""
    batch = Batch("long", (1, 0), (1, 1), (cases.FAR, 70_000))
    made = Made(batch, native_backend.device, generator, ratio=8, heads=16, fresh=False).finish(generator)
    made.check(*made.run(native_backend.name))


@pytest.mark.parametrize("k", [0, 64])
def test_missing_pages_and_rows(native_backend, k, generator):
    made = Made(MIXED, native_backend.device, generator, k=k, ratio=4, rows=8, missing=0.4).finish(generator)
    made.positions[:, ::3] = -1  # rows that a request never wrote
    made.check(*made.run(native_backend.name))


@pytest.mark.parametrize(("sinks", "rope_dim", "scale"), [(False, 0, None), (True, 0, 0.3), (False, 64, -0.05), (True, 128, None)])
def test_options(native_backend, sinks, rope_dim, scale, generator):
    made = Made(MIXED, native_backend.device, generator, io=torch.float32, k=16).finish(generator, sinks=sinks, rope_dim=rope_dim)
    if scale is not None:
        made.more["scale"] = scale
    made.check(*made.run(native_backend.name))


@pytest.mark.parametrize("sinks", [True, False])
def test_nothing_seen_gives_zero_and_minus_infinity(native_backend, sinks, generator):
    made = Made(MIXED, native_backend.device, generator, entries="bf16", missing=1.0, fresh=False).finish(generator, sinks=sinks)
    made.positions.fill_(-1)
    out, lse = made.run(native_backend.name, out=torch.full_like(made.q, 7.0))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_strides_and_outputs(native_backend, generator):
    made = Made(MIXED, native_backend.device, generator, k=20).finish(generator)
    tokens, heads, dim = made.q.shape
    wide = torch.full((tokens, heads, dim + 8), 3.0, device=native_backend.device)
    sums = torch.full((tokens, heads, 2), 3.0, device=native_backend.device)
    made.q = made.q.transpose(0, 1).contiguous().transpose(0, 1)
    made.selected = torch.cat((made.selected, made.selected * 0 + 5), 1)[:, :20]
    made.run(native_backend.name, out=wide[..., :dim], lse=sums[..., 0])
    made.check(wide[..., :dim], sums[..., 0])
    assert (wide[..., dim:] == 3).all()
    assert (sums[..., 1] == 3).all()
    made.q = torch.stack((made.q, made.q * torch.nan), -1)[..., 0]
    made.check(*made.run(native_backend.name))


def test_bounds_on_entries_change_nothing(native_backend, generator):
    made = Made(ONES, native_backend.device, generator, ratio=128, fresh=False).finish(generator)
    made.check(*made.run(native_backend.name, max_entries=cases.FAR // 128 + 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": lambda m: m.q[..., :500]}, "q is"),
        ({"q": lambda m: m.q.double()}, "q is"),
        ({"positions": lambda m: m.positions[:, :9]}, "positions are"),
        ({"block_table": lambda m: None}, "block_table are given together"),
        ({"selected": lambda m: m.selected.long()}, "selected is"),
        ({"selected": lambda m: m.selected[:4]}, "selected is"),
        ({"fresh": lambda m: cases.poisoned(m.window.codec, 1, 9, m.device)}, "fresh has 9 rows"),
        ({"fresh": lambda m: None, "window_tokens": lambda m: 500}, "a window of 500 tokens"),
        ({"window_tokens": lambda m: 0}, "window_tokens is 0"),
        ({"ratio": lambda m: 0}, "ratio is 0"),
        ({"sinks": lambda m: m.q.new_zeros(3, dtype=torch.float32)}, "sinks must be"),
        ({"sinks": lambda m: m.q.new_zeros((), dtype=torch.float32)}, "sinks"),
        ({"sin": lambda m: m.more["sin"][:, :1]}, "cos and sin are alike"),
        ({"entries": lambda m: cases.poisoned(RowCodec("bf16", 64), 3, 64, m.device)}, "entries have 64 elements"),
        ({"block_table": lambda m: m.block_table.long()}, "block_table is"),
        ({"block_table": lambda m: m.block_table[:2]}, "block_table is"),
        ({"workspace": lambda m: torch.zeros(1 << 20, device=m.device)}, "workspace is .* adjacent uint8"),
        (
            {"workspace": lambda m: torch.zeros(1 << 20, 2, dtype=torch.uint8, device=m.device)[:, 0]},
            "workspace is .* adjacent uint8",
        ),
        ({"workspace": lambda m: torch.zeros(9, dtype=torch.uint8, device="meta")}, "workspace is .* on meta"),
        ({"cos": lambda m: None}, "cos and sin are given together"),
        ({"out": lambda m: m.q[:3].clone()}, "out has"),
        ({"lse": lambda m: m.q.new_zeros(3, 8, dtype=torch.float32)}, "lse must be"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments(backend, change, words, generator):
    made = Made(MIXED, backend.device, generator, k=8).finish(generator)
    args = {
        "q": made.q, "positions": made.positions, "fresh": made.fresh, "entries": made.entries, "block_table": made.block_table,
        "selected": made.selected, "ratio": 4, "window_tokens": 128, **made.more, **{k: f(made) for k, f in change.items()},
    }  # fmt: skip
    q, positions = args.pop("q"), args.pop("positions")
    with pytest.raises(kvx.BadArgument, match=words):
        attention_sparse(q, made.window, positions, made.step, **args, backend=backend.name)


def _page_outside(m: Made) -> None:
    m.block_table[0, 0] = len(m.entries.pages)


def _short_table(m: Made) -> None:
    m.block_table = m.block_table[:, :3].contiguous()


def _slot_outside(m: Made) -> None:
    m.step = Step(m.step.slots + 3, m.step.cu_seqlens, m.step.starts)


def _position_outside(m: Made) -> None:
    m.more["cos"], m.more["sin"] = m.more["cos"][:5003], m.more["sin"][:5003]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_page_outside, "there are"),
        (_short_table, "its table has 3 pages"),
        (_slot_outside, "slot 7"),
        (_position_outside, "position 5003"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize("k", [0, 8])
def test_places_outside(backend, change, words, k, generator):
    made = Made(MIXED, backend.device, generator, k=k).finish(generator)
    if made.selected is not None:
        made.selected[4:, 0] = 0  # the page that is outside, and the last entry, are chosen
        made.selected[0, 0] = 1250
    change(made)
    if backend.device == "cpu":
        out = torch.full_like(made.q, 5.0)
        with pytest.raises(kvx.OutOfRange, match=words):
            made.run(backend.name, out=out)
        assert (out == 5).all()
        return
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    made.run("cuda", errors=errors)
    assert int(errors) > 0
