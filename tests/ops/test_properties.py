"""Random geometry, strides, tables and types: the native backends against the definition, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given, reject
from hypothesis import strategies as st

import kvx
from tests import cases, compare

MORE_LAYOUTS = (
    "block kv head token dim",
    "head block (kv token) dim",
    "kv | token block head dim",
    "(block kv) token head dim",
)


@st.composite
def any_case(draw):
    layout = draw(st.sampled_from([*cases.LAYOUTS, *MORE_LAYOUTS]))
    lens = draw(st.lists(st.integers(0, 20), max_size=4))
    block_size = draw(st.integers(1, 9))
    case = cases.Case(
        layout=layout,
        format=draw(st.sampled_from([name for name, row in kvx.FORMATS.items() if not row.element.is_moved_only])),
        io=draw(st.sampled_from(list(cases.IO))),
        num_blocks=sum(-(-n // block_size) for n in lens) + draw(st.integers(1, 3)),
        block_size=block_size,
        num_kv_heads=draw(st.integers(1, 5)),
        head_dim=draw(st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 64, 80, 96]))),
        lens=tuple(lens),
        index=draw(st.sampled_from([torch.int32, torch.int64])),
        odd_values=draw(st.booleans()),
    )
    try:
        _ = case.spec
    except kvx.BadArgument:  # a geometry this format or layout does not have; tests/spec covers those
        reject()
    return case


@given(case=any_case(), seed=st.integers(0, 2**31))
def test_write_then_gather(native_backend, case, seed):
    made = case.make(native_backend.device, torch.Generator().manual_seed(seed))
    want = made.to("cpu").clone()
    want.write("torch")
    made.write(native_backend.name)
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor.cpu(), want.tensors()[name], name)
    for got, expected, name in zip(made.gather(native_backend.name), want.gather("torch"), "kv", strict=True):
        compare.bitwise(got.cpu(), expected, name)


@given(
    seed=st.integers(0, 2**31),
    pads=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    io_order=st.permutations(range(3)),
    fmt=st.sampled_from(["bf16", "f32", "fp8_e4m3", "int8_per_token_head"]),
)
def test_any_strides(native_backend, seed, pads, order, io_order, fmt):
    """A cache whose axes lie in any order with padding after each, and IO in any order of its own."""
    g = torch.Generator().manual_seed(seed)
    made = cases.Case(format=fmt, io="f32").make(native_backend.device, g)
    want = made.to("cpu").clone()
    want.write("torch")

    def spread(t):
        shape = [n + p for n, p in zip(t.shape, pads, strict=True)]
        lying = torch.zeros([shape[a] for a in order], dtype=t.dtype, device=t.device).permute(*[order.index(a) for a in range(4)])
        view = lying[tuple(slice(0, n) for n in t.shape)]
        view.copy_(t)
        return view

    made.cache = tuple(spread(c) for c in made.cache)
    made.k, made.v = (x.permute(*io_order).contiguous().permute(*[io_order.index(a) for a in range(3)]) for x in (made.k, made.v))
    made.write(native_backend.name)
    for got, expected in zip(made.cache, want.cache, strict=True):
        compare.bitwise(got.cpu(), expected)
    for got, expected in zip(made.gather(native_backend.name), want.gather("torch"), strict=True):
        compare.bitwise(got.cpu(), expected)


@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["ragged", "page_csr"]),
    lens=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    block_size=st.integers(1, 8),
)
def test_tables_agree(native_backend, seed, kind, lens, block_size):
    case = cases.Case(
        format="f32",
        io="f32",
        lens=tuple(lens),
        block_size=block_size,
        num_blocks=sum(-(-n // block_size) for n in lens) + 1,
    )
    made = case.make(native_backend.device, torch.Generator().manual_seed(seed))
    made.write(native_backend.name)
    packed = kvx.PackedTable(made.block_table, made.seq_lens)
    other = (kvx.to_ragged if kind == "ragged" else kvx.to_page_csr)(packed, block_size)
    for got, want in zip(made.gather(native_backend.name, table=other), made.gather(native_backend.name), strict=True):
        compare.bitwise(got, want)
