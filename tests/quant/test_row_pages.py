"""Pages of rows between engines: convert moves them, and what the other engine's codec reads is what was written, byte for byte."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch

import kvx
from kvx.quant.row_pages import engine_page_bytes, row_spec, window_moves
from kvx.quant.rows import RowCodec, RowPages
from kvx.spec import ROW_FORMATS

ENGINES = ("vllm", "sglang", "tensorrt_llm")


def codec(name: str) -> RowCodec:
    return RowCodec(name, 128) if name.startswith("index") else RowCodec(name, 512, 64)


def pages(c: RowCodec, rows: int, num_pages: int, engine: str, device: str = "cpu") -> RowPages:
    size = engine_page_bytes(c, rows, engine)
    return RowPages(c, torch.full((num_pages, size), 0xEE, dtype=torch.uint8, device=device), rows)


def slots_of(table: list[int], rows: int, count: int) -> torch.Tensor:
    at = torch.arange(count)
    return torch.tensor(table)[at // rows] * rows + at % rows


@pytest.mark.parametrize(
    ("name", "rows", "engine", "size"),
    [
        ("fp8_v4", 64, "vllm", 37440), ("fp8_v4", 2, "vllm", 1728), ("fp8_v4", 128, "sglang", 74880),
        ("fp8_v4", 64, "tensorrt_llm", 37376),
        ("index_fp8", 64, "vllm", 8640), ("index_mxfp4", 64, "vllm", 4608), ("index_fp8", 64, "sglang", 8448),
        ("index_mxfp4", 64, "sglang", 4352), ("bf16", 64, "vllm", 65536),
    ],
)  # fmt: skip
def test_sizes_of_pages(name, rows, engine, size):
    assert engine_page_bytes(codec(name), rows, engine) == size
    assert row_spec(codec(name), rows, 3, engine=engine).cache_bytes == 3 * size


def check_convert(backend, c, a, b, src_table, dst_table, count, src_engine, dst_engine):
    """Every byte of the destination: rows of the codec, and nothing else changed."""
    x = torch.randn(count, c.dim, generator=torch.Generator().manual_seed(count))
    a.write(slots_of(src_table, a.rows, count), x)
    want = RowPages(c, b.pages.clone(), b.rows)
    want.write(slots_of(dst_table, b.rows, count), x)
    to = b.pages.to(backend.device)
    plan = kvx.plan(row_spec(c, a.rows, len(a.pages), engine=src_engine), row_spec(c, b.rows, len(b.pages), engine=dst_engine))
    kvx.convert(
        a.pages.to(backend.device), to, plan=plan, src_blocks=torch.tensor([src_table]), dst_blocks=torch.tensor([dst_table]),
        seq_lens=torch.tensor([count]), backend=backend.name,
    )  # fmt: skip
    assert torch.equal(to.cpu(), want.pages)


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize(("src_engine", "dst_engine"), list(permutations(ENGINES, 2)), ids=lambda e: e)
def test_every_format_between_engines(backend, name, src_engine, dst_engine):
    """CSA entries: blocks of 256 tokens into blocks of 128, in other places."""
    c = codec(name)
    a, b = pages(c, 64, 3, src_engine), pages(c, 32, 6, dst_engine)
    check_convert(backend, c, a, b, [2, 0], [5, 1, 0, 3], 101, src_engine, dst_engine)


@pytest.mark.parametrize(("src_tokens", "dst_tokens"), list(product((64, 128, 256), repeat=2)), ids=str)
@pytest.mark.parametrize("name", ["fp8_v4", "index_mxfp4"])
@pytest.mark.parametrize(("src_engine", "dst_engine"), [("vllm", "tensorrt_llm"), ("tensorrt_llm", "vllm"), ("sglang", "vllm")])
def test_block_sizes(backend, name, src_tokens, dst_tokens, src_engine, dst_engine):
    c, count = codec(name), 90
    (a_rows, b_rows) = (tokens // 4 for tokens in (src_tokens, dst_tokens))
    tables = [torch.randperm(8, generator=torch.Generator().manual_seed(r))[: -(-count // r)].tolist() for r in (a_rows, b_rows)]
    check_convert(
        backend, c, pages(c, a_rows, 8, src_engine), pages(c, b_rows, 8, dst_engine), *tables, count, src_engine, dst_engine
    )


@pytest.mark.parametrize(("a_rows", "b_rows"), [(2, 1), (1, 2)])
def test_entries_of_hca(backend, a_rows, b_rows):
    """Two a block of 256 tokens, one a block of 128."""
    c = codec("fp8_v4")
    tables = [[5, 0, 3, 1][: 4 // a_rows], [4, 2, 0, 1][: 4 // b_rows]]
    check_convert(backend, c, pages(c, a_rows, 6, "vllm"), pages(c, b_rows, 6, "tensorrt_llm"), *tables, 3, "vllm", "tensorrt_llm")


def test_layers_and_requests_in_one_call(backend):
    c = codec("fp8_v4")
    src, dst = row_spec(c, 64, 4, engine="vllm", num_layers=2), row_spec(c, 32, 8, engine="sglang", num_layers=2)
    a, b = [pages(c, 64, 4, "vllm") for _ in range(2)], [pages(c, 32, 8, "sglang") for _ in range(2)]
    tables, lens = ([[3, 1], [0, -1]], [[7, 6, 5], [1, 0, -1]]), [70, 40]
    want = [RowPages(c, t.pages.clone(), t.rows) for t in b]
    for layer, (seq, count) in product(range(2), enumerate(lens)):
        x = torch.randn(count, 512, generator=torch.Generator().manual_seed(2 * layer + seq))
        a[layer].write(slots_of(tables[0][seq], 64, count), x)
        want[layer].write(slots_of(tables[1][seq], 32, count), x)
    to = [t.pages.to(backend.device) for t in b]
    kvx.convert(
        [t.pages.to(backend.device) for t in a], to, plan=kvx.plan(src, dst), src_blocks=torch.tensor(tables[0]),
        dst_blocks=torch.tensor(tables[1]), seq_lens=torch.tensor(lens), backend=backend.name,
    )  # fmt: skip
    assert all(torch.equal(t.cpu(), w.pages) for t, w in zip(to, want, strict=True))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 192, 200, 256, 1000])
@pytest.mark.parametrize("rows", [64, 128])
def test_windows_into_rings_and_back(backend, length, rows):
    """vLLM's window pages have 64 rows, SGLang's 128, by position; a ring has position p in row p % 128."""
    c, ring, engine = codec("fp8_v4"), 128, "vllm" if rows == 64 else "sglang"
    seen = torch.arange(max(0, length - ring), length)
    numbers = -(-length // rows)
    first = int(seen[0]) // rows
    table = [-1] * first + [(3 + 2 * i) % 7 for i in range(numbers - first)]
    places = torch.tensor(table)[seen // rows] * rows + seen % rows
    x = torch.randn(len(seen), 512, generator=torch.Generator().manual_seed(length))
    paged, in_ring = pages(c, rows, 7, engine), RowPages.zeros(c, 2, ring)
    paged.write(places, x)
    specs = row_spec(c, rows, 7, engine=engine), row_spec(c, ring, 2)
    moves = window_moves(table, length, rows=rows, ring_rows=ring)
    target = in_ring.pages.to(backend.device)
    for move in moves:
        kvx.convert(
            paged.pages.to(backend.device), target, plan=kvx.plan(*specs), src_blocks=torch.tensor([move.pages]),
            dst_blocks=torch.tensor([[1]]), seq_lens=torch.tensor([move.num_rows]), backend=backend.name,
        )  # fmt: skip
    want = RowPages.zeros(c, 2, ring)
    want.write(ring + seen % ring, x)
    got = RowPages(c, target.cpu(), ring)
    assert torch.equal(got.read(ring + seen % ring), want.read(ring + seen % ring))
    back = pages(c, rows, 7, engine)
    to = back.pages.to(backend.device)
    for move in moves:
        kvx.convert(
            target, to, plan=kvx.plan(*reversed(specs)), src_blocks=torch.tensor([[1]]), dst_blocks=torch.tensor([move.pages]),
            seq_lens=torch.tensor([move.num_rows]), backend=backend.name,
        )  # fmt: skip
    assert torch.equal(RowPages(c, to.cpu(), rows).read(places), paged.read(places))


def test_refused():
    with pytest.raises(kvx.BadArgument, match='engine "llama" is not known'):
        row_spec(codec("fp8_v4"), 64, 2, engine="llama")
    with pytest.raises(kvx.Unsupported, match=r"32 \+ 2 bytes|16 \+ 1 bytes"):
        row_spec(RowCodec("index_mxfp4", 32), 64, 2)
    with pytest.raises(kvx.BadArgument, match="pages hold all tokens"):
        window_moves([0], 65, rows=64, ring_rows=128)
    with pytest.raises(kvx.BadArgument, match="a ring whole pages"):
        window_moves([0, 1], 65, rows=64, ring_rows=100)
    with pytest.raises(kvx.BadArgument, match="block_bytes"):
        row_spec(codec("fp8_v4"), 64, 2, page_bytes=37374)
