"""attention of prompts over 16-bit caches, whose blocks a device may copy whole: their sizes, layouts, tables, ends and bad ids.

Tiles of a device are 128 keys: sequences end in the middle of a block, at the end of one, and at the end of a tile. What stands
after the end is NaN. They are 64, 128, 192 or 256 columns wide: rows in between, of 80 or 96 elements, end before the tile does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvx
from kvx.bench.attention import AttentionCase, make
from kvx.ops import backend as backends
from tests.ops import attention_cases
from tests.ops.attention_cases import EPS, Case, close, error, magnitude

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch saying it has no bf16 instructions


def case(block: int, layout: str = "NHD", dim: int = 128, io: str = "bf16", **more: object) -> Case:
    given = {"lens": (301, 129, 128, 7, 0), "queries": (70, 129, 40, 7, 3), "heads": 4, **more}
    return Case(block=block, layout=layout, dim=dim, format=io, io=io, **given)


CASES = [
    *(case(block) for block in (1, 4, 8, 16, 32, 48, 64, 128, 256, 384)),
    *(case(block, layout) for block in (16, 128) for layout in ("HND", "fused_NHD", "fused_HND", "stacked")),
    *(case(block, layout, 64, "f16") for block in (8, 64, 256) for layout in ("NHD", "HND", "fused_NHD")),
    *(case(block, lens=(1500, 897), queries=(80, 20), note="laps") for block in (16, 48, 64, 1024)),
    *(case(block, window=w) for block in (16, 128) for w in (1, 100, 129, 2**40)),
    case(64, causal=False),
    case(64, causal=False, window=70, sinks=True),
    case(16, heads=8, kv_heads=1, soft_cap=4.0, sinks=True),
    case(16, heads=1, kv_heads=1, note="one_head"),
]
PADDED = [
    *(case(block, dim=dim, io=io) for dim, io in ((80, "bf16"), (96, "f16"), (112, "bf16")) for block in (1, 16, 48, 128)),
    *(case(16, layout, dim) for dim in (80, 96) for layout in ("HND", "fused_NHD", "fused_HND", "stacked")),
    *(case(block, dim=dim, lens=(1500, 897), queries=(80, 20), note="laps") for dim, block in ((80, 16), (96, 48))),
    *(case(16, dim=dim, lens=(3000, 40, 700), queries=(1, 40, 3), heads=h, note="both") for dim, h in ((80, 4), (96, 16))),
    case(16, dim=80, window=100),
    case(64, dim=96, causal=False, window=70, sinks=True),
    case(16, dim=80, heads=8, kv_heads=1, soft_cap=4.0, sinks=True),
    *(
        Case(lens=(301, 129, 7), queries=(70, 129, 1), format=f, io=io, dim=dim)
        for f in ("fp8_e4m3", "fp8_e4m3_per_token_head", "int8_per_token_head")
        for dim, io in ((80, "bf16"), (96, "f16"))
    ),
]

# Above 128 a device's tiles are 64 keys, but for K of up to 192 over V of up to 128.
_WIDTHS = ((192, 0, "bf16"), (192, 128, "f16"), (256, 0, "bf16"), (512, 0, "f16"))
WIDE = [
    *(case(block, dim=d, v_dim=v, io=io) for d, v, io in _WIDTHS for block in (16, 48, 128)),
    *(case(block, dim=256) for block in (1, 8, 64, 256)),
    *(case(16, y, 256) for y in ("HND", "fused_NHD", "stacked")),
    case(16, "fused_HND", 192, v_dim=128),
    *(case(block, dim=256, lens=(1500, 897), queries=(80, 20), note="laps") for block in (16, 48, 64, 1024)),
    *(case(block, dim=d, v_dim=v) for d, v in ((136, 0), (160, 0), (224, 0), (256, 64), (64, 192)) for block in (16, 48)),
    *(case(16, dim=d, v_dim=v) for d, v in ((264, 0), (320, 0), (512, 256), (128, 384))),
    *(case(16, dim=d, v_dim=v) for d, v in ((8, 0), (40, 0), (72, 0), (128, 64), (40, 120))),
    *(case(16, dim=d, v_dim=v, io=io, window=w) for d, v, io in _WIDTHS for w in (1, 65)),
    *(case(64, dim=d, v_dim=v, io=io, causal=False, window=70, sinks=True) for d, v, io in _WIDTHS),
    *(case(16, dim=d, v_dim=v, io=io, heads=8, kv_heads=1, soft_cap=4.0, sinks=True) for d, v, io in _WIDTHS),
    *(case(16, dim=d, v_dim=v, io=io, lens=(3000, 40, 700), queries=(1, 40, 3), heads=40, note="both") for d, v, io in _WIDTHS),
]
# Elements of 8 and 4 bits, widened on the way, with each kind of scale, and rows at multiples of 8 and of 4 bytes; and f16 caches
# under bf16 queries.
_CODES = ("fp8_e4m3", "fp8_e4m3_per_token_head", "fp8_e5m2_per_head", "int8_per_head", "int8_per_token_head")
CODES = [
    *(
        Case(lens=(301, 129, 7), queries=(70, 129, 1), format=f, io="bf16", dim=d, v_dim=v)
        for f in (*_CODES, "f16")
        for d, v in ((112, 64), (192, 128), (256, 0))
    ),
    *(
        Case(lens=(1500, 897), queries=(80, 20), format=f, io="f16", dim=d, block=b, window=w, soft_cap=c, sinks=True, note="laps")
        for f in _CODES
        for d, b, w, c in ((256, 16, 0, 0.0), (160, 48, 300, 5.0))
    ),
    Case(lens=(301, 129, 7), queries=(70, 129, 1), format="f16", io="bf16", dim=128, soft_cap=5.0, sinks=True),
    *(
        Case(lens=(301, 129, 7), queries=(70, 129, 1), format=f, io="bf16", dim=d, v_dim=v)
        for f in ("nvfp4", "mxfp4", "mxfp8", "int4_per_group", "int4_per_token_head")
        for d, v in ((64, 0), (128, 0), (192, 128), (256, 0), (96, 32))
    ),
    *(
        Case(lens=(301, 129, 7), queries=(70, 129, 1), format=f, v_format=v, io=io, dim=d)
        for f, v, d, io in (
            ("int4_per_token_head", "", 128, "f16"), ("int4_per_token_head", "", 40, "bf16"), ("nvfp4", "", 80, "bf16"),
            ("fp8_e4m3", "", 72, "bf16"), ("fp8_e4m3", "", 200, "f16"), ("int8_per_token_head_inline", "", 40, "bf16"),
            ("fp8_e4m3_per_token_head_inline", "", 256, "bf16"), ("int4_per_token_head_inline", "", 64, "f16"),
            ("int8_per_token_head_f16", "", 128, "bf16"), ("int8_per_token_head_f16", "", 192, "f16"),
            ("fp8_e5m2_per_token_head", "", 128, "bf16"), ("fp8_e5m2_per_block", "", 64, "f16"), ("fp8_e4m3", "", 512, "bf16"),
            ("int8_per_token_head", "", 512, "bf16"), ("fp8_e5m2_per_head", "", 320, "bf16"),
            ("int8_per_token_head_inline", "", 512, "bf16"), ("fp8_e4m3_per_token_head", "fp8_e4m3", 128, "bf16"),
            ("int8_per_head", "int8_per_token_head_f16", 256, "bf16"),
        )
    ),
    *(
        Case(lens=(1500, 897), queries=(80, 20), format=f, io="bf16", dim=d, block=b, window=w, soft_cap=c, sinks=True, note="laps")
        for f, d, b, w, c in (
            ("nvfp4", 128, 16, 0, 0.0), ("mxfp4", 256, 48, 300, 5.0), ("mxfp8", 64, 16, 300, 0.0),
            ("int4_per_group", 128, 1, 0, 5.0), ("int4_per_token_head", 256, 16, 0, 0.0),
            ("fp8_e4m3", 512, 16, 300, 5.0), ("int8_per_token_head", 72, 16, 0, 0.0),
        )
    ),
]  # fmt: skip

# What the kernel for prompts on any GPU takes where Hopper's does not: rows whose elements lie apart or begin anywhere, queries of
# another type than the cache, K and V in two formats.
_LONG = {"lens": (301, 129, 7, 0), "queries": (70, 129, 7, 3)}
OTHERS = [
    *(
        replace(case(16, dim=d, v_dim=v, io="f16"), format="bf16")
        for d, v in ((64, 0), (128, 0), (192, 128), (256, 0), (72, 0), (33, 0))
    ),
    *(case(16, "old_vllm", dim=d, io=io) for d, io in ((64, "f16"), (128, "bf16"), (256, "bf16"))),
    *(case(block, dim=d) for block, d in ((16, 100), (48, 66), (16, 33), (1, 20), (16, 250))),
    *(
        Case(**_LONG, format=f, v_format=v, io=io, dim=d, v_dim=w)
        for f, v, io, d, w in (
            ("fp8_e4m3", "int8", "bf16", 128, 0), ("nvfp4", "mxfp4", "bf16", 64, 0), ("bf16", "fp8_e4m3", "bf16", 128, 256),
            ("mxfp8", "", "f16", 128, 0), ("mxfp4", "", "f16", 256, 0), ("int8", "", "bf16", 100, 0),
            ("fp8_e4m3", "bf16", "f16", 64, 0), ("fp8_e4m3_per_128", "", "bf16", 256, 0), ("f16", "", "bf16", 33, 0),
            ("int4_per_token_head", "", "bf16", 100, 0),
        )
    ),
    *(
        Case(lens=(1500, 897), queries=(80, 20), format=f, io=io, dim=d, window=w, soft_cap=c, sinks=True, note="laps")
        for f, io, d, w, c in (
            ("bf16", "f16", 128, 300, 5.0), ("bf16", "f16", 256, 0, 0.0), ("f16", "bf16", 66, 65, 9.0),
            ("mxfp8", "f16", 64, 1, 0.0),
        )
    ),
    Case(**_LONG, format="bf16", io="f16", dim=128, causal=False, window=70, heads=7, kv_heads=1),
    Case(**_LONG, format="bf16", io="f16", dim=128, scale=2e-6),
    *(Case(**_LONG, format="bf16", io="f16", dim=128, soft_cap=c) for c in (1e6, 3e38)),
    Case(**_LONG, format="f16", io="bf16", dim=33, scale=1e-30),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES + PADDED + WIDE + CODES + OTHERS, ids=str)
def test_prompts_over_blocks(backend, case, generator):
    made = case.make(backend.device, generator)
    made.check(*made.run(backend.name))


# On a device a block of threads goes from item to item (a sequence's rows for a KV head) without a pause, where there are many.
def many(**more: object) -> AttentionCase:
    return AttentionCase((), 32, 16, **more)


MANY = [
    *(many(dim=d, v_dim=v, format=f, io=io) for d, v, io in _WIDTHS for f in (io,)),
    *(many(dim=d, format=f) for d in (64, 128, 256) for f in ("fp8_e4m3", "int8_per_token_head")),
    *(many(dim=d, format=f) for d, f in ((128, "nvfp4"), (256, "mxfp4"), (64, "mxfp8"), (128, "int4_per_token_head"))),
    many(dim=512, format="fp8_e4m3"),
    many(dim=72, format="int8_per_token_head"),
    many(format="f16"),
    AttentionCase((), 48, 16, dim=80, block=24),  # 64 rows are no whole tokens, and blocks no whole boxes
    AttentionCase((), 112, 16, "HND", block=128),
]


@pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"cuda: {backends.reason_missing('cuda')}")
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("case", MANY, ids=lambda c: f"{c.dim}-{c.v_dim}-{c.format}-{c.io}-{c.heads}")
def test_many_prompts_are_each_as_alone(case, window):
    check_each_as_alone(case, window, count=90)


def check_each_as_alone(case: AttentionCase, window: int, count: int, **more: bool) -> None:
    """Bit for bit: an item's numbers do not depend on those before it in its block of threads."""
    lens = [40 + 37 * i % 311 for i in range(count)]  # not so few rows that they are the kernel's for decode
    case = replace(case, lens=tuple(lens), is_prefill=True)
    b = make(case, "cuda", 0)
    given = {"spec": case.spec, "window": window, **b.storage.scales(), **more}
    out, lse = kvx.attention_varlen(b.q, b.storage.cache, b.table, cu_seqlens=b.cu, max_query_len=max(lens), **given)
    first = 0
    for i, n in enumerate(lens):
        table = kvx.PackedTable(b.table.block_table[i : i + 1], b.table.seq_lens[i : i + 1])
        cu = torch.tensor([0, n], dtype=torch.int32, device="cuda")
        rows = slice(first, first + n)
        alone, alone_lse = kvx.attention_varlen(b.q[rows], b.storage.cache, table, cu_seqlens=cu, max_query_len=max(lens), **given)
        assert torch.equal(out[rows], alone), (i, n)
        assert torch.equal(lse[rows], alone_lse), (i, n)
        first += n


@pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"cuda: {backends.reason_missing('cuda')}")
@pytest.mark.skipif(os.environ.get("KVX_GPU") == "portable", reason="this is what other GPUs run")
def test_prompts_on_other_gpus():
    """The kernels that GPUs other than Hopper run, on this one: all that is tested here, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "cuda", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "KVX_GPU": "portable"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout)


def widen(x: Tensor, width: int, fill: float) -> tuple[Tensor, Tensor]:
    """`x` at the beginning of wider rows, and what stands after it in each of them."""
    rows = torch.full((*x.shape[:-1], width), fill, dtype=torch.float32).to(x)
    rows[..., : x.shape[-1]] = x
    return rows[..., : x.shape[-1]], rows[..., x.shape[-1] :]


@pytest.mark.parametrize("block", [16, 48])
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 160, 224, 320])
def test_rows_end_where_they_end(backend, dim, format, block, generator):
    """What follows a row of queries or of the cache, up to a tile's width and past it, is NaN; after results nothing changes."""
    shape = Case(lens=(301, 129, 40), queries=(70, 129, 1), dim=dim, block=block, format=format, io="bf16")
    made = shape.make(backend.device, generator)
    made.cache.cache = tuple(widen(x, 544, float("nan"))[0] for x in made.cache.cache)
    made.q, _ = widen(made.q, 544, float("nan"))
    out, after = widen(torch.zeros_like(made.q, memory_format=torch.contiguous_format), 544, 5.0)
    made.check(*made.run(backend.name, out=out))
    assert (after == 5.0).all()


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("kind", ["int64", "strided", "ragged", "page_csr"])
def test_prompts_by_every_table(backend, kind, block, generator):
    made = case(block, lens=(301, 129, 7), queries=(40, 129, 7)).make(backend.device, generator)
    ids, lens = made.table.block_table, made.table.seq_lens
    table = {
        "int64": lambda: kvx.PackedTable(ids.long(), lens.long()),
        "strided": lambda: kvx.PackedTable(torch.stack([ids, ids * 0 - 5], -1)[..., 0], lens),
        "ragged": lambda: kvx.to_ragged(made.table, block),
        "page_csr": lambda: kvx.to_page_csr(made.table, block),
    }[kind]()
    made.check(*made.run(backend.name, table=table))


@pytest.mark.parametrize("block", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("bad", [-1, 2**30, "num_blocks"], ids=str)
def test_prompts_with_bad_ids(backend, block, bad, generator):
    """Keys of a block that is not there are not seen: in the first tile, in the middle, and where the sequence ends."""
    length, num_queries = 901, 70
    made = case(block, lens=(length,), queries=(num_queries,)).make(backend.device, generator)
    ids = made.table.block_table.clone()
    is_there = torch.ones(length, dtype=torch.bool)
    for position in (20, 530, length - 1):
        first = position // block * block
        ids[0, position // block] = made.cache.spec.num_blocks if bad == "num_blocks" else bad
        is_there[first : first + block] = False
    table = kvx.PackedTable(ids, made.table.seq_lens)
    if backend.device == "cpu":
        with pytest.raises(kvx.OutOfRange, match="sequence 0"):
            made.run(backend.name, table=table)
        return
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    out, lse = made.run(backend.name, table=table, errors=errors)
    assert int(errors) >= int((~is_there).sum())
    seen = torch.arange(length) <= torch.arange(length - num_queries, length).unsqueeze(1)
    given = made.q.cpu(), made.k[0, :length], made.v[0, :length], seen & is_there, made.case, None
    want, want_lse, reach = attention_cases.attend(*given, torch.float64)
    theirs, their_lse, _ = attention_cases.attend(*given, torch.bfloat16)
    floor = torch.finfo(out.dtype).eps / 2 * magnitude(want) + 4 * EPS * magnitude(made.v[0, :length])
    close("out", out.cpu(), want, 2 * error(theirs, want) + floor)
    floor = made.case.dim**0.5 * EPS * reach + 4 * EPS * magnitude(want_lse)
    close("lse", lse.cpu(), want_lse, 2 * error(their_lse, want_lse) + floor)
