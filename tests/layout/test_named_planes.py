"""Planes with names and axes of their own, none of them tokens: placed, planned, converted and digested by the code of K and V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvx
from kvx.layout.axes import Layout
from kvx.layout.buffers import allocate_buffers
from kvx.layout.gate import grids, refusal
from kvx.layout.place import buffer_bytes, num_buffers, places
from kvx.spec import StateSpec, state_plane

HEADS, CHANNELS, TAPS, ROWS, COLUMNS = 4, 24, 3, 6, 10


def states(layout: str, ranks: int = 1, rank: int = 0) -> StateSpec:
    """A convolution's taps and a matrix a head, of one sequence a block."""
    planes = (
        state_plane("conv", "bf16", channel=CHANNELS, tap=TAPS),
        state_plane("state", "f32", head=HEADS, row=ROWS, column=COLUMNS),
    )
    whole = StateSpec(3, planes, num_layers=2, layout=LAYOUTS[0])
    return replace(whole.shard(ranks, rank), layout=layout)


LAYOUTS = [
    "layer | block plane[conv: channel tap; state: head row column]",
    "layer plane[conv: | block tap channel; state: | block head column row]",
    "block layer plane[conv: tap channel; state: row head column]",
    "plane[conv: | layer block channel tap; state: | layer block row column head]",
    "block | layer plane[conv: channel tap; state: head/2 row head%2 column]",
]


def memory(spec: StateSpec, conv: np.ndarray, state: np.ndarray) -> list[np.ndarray]:
    """The same in numpy, from the layout's text alone: [layer, block, channel, tap] and [layer, block, head, row, column]."""
    out = [np.zeros(size, np.uint8) for size in buffer_bytes(spec)]
    for place, x in zip(places(spec), (conv, state), strict=True):
        names = ["layer", "block", *(("channel", "tap") if x is conv else ("head", "row", "column"))]
        item = x.dtype.itemsize
        for index in np.ndindex(x.shape):
            buffer, byte = place.locate(**dict(zip(names, index, strict=True)))
            out[buffer][byte : byte + item] = np.frombuffer(x[index].tobytes(), np.uint8)
    return out


@pytest.fixture(scope="module")
def truth() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return (
        rng.integers(0, 2**16, (2, 3, CHANNELS, TAPS), dtype=np.uint16),
        rng.standard_normal((2, 3, HEADS, ROWS, COLUMNS)).astype(np.float32),
    )


def test_places_cover_every_byte_once(truth):
    """The layouts are dense: the reading above leaves no byte and writes none twice."""
    for text in LAYOUTS:
        spec = states(text)
        total = sum(buffer_bytes(spec))
        assert total == sum(x.nbytes for x in truth)
        seen = [np.zeros(size, int) for size in buffer_bytes(spec)]
        for place, x in zip(places(spec), truth, strict=True):
            names = ["layer", "block", *(("channel", "tap") if x.ndim == 4 else ("head", "row", "column"))]
            for index in np.ndindex(x.shape):
                buffer, byte = place.locate(**dict(zip(names, index, strict=True)))
                seen[buffer][byte : byte + x.dtype.itemsize] += 1
        assert all((s == 1).all() for s in seen), text


@pytest.mark.parametrize("src", LAYOUTS)
@pytest.mark.parametrize("dst", LAYOUTS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_conversions(src, dst, backend, truth):
    a, b = states(src), states(dst)
    out = allocate_buffers(b)
    kvx.convert([torch.from_numpy(x) for x in memory(a, *truth)], out, plan=kvx.plan(a, b), backend=backend)
    for got, want in zip(out, memory(b, *truth), strict=True):
        assert np.array_equal(got.view(torch.uint8).flatten().numpy(), want)


@pytest.mark.parametrize("dst", LAYOUTS[:4])
def test_ranks_get_their_channels_and_their_heads(dst, truth):
    whole, ranks = states(LAYOUTS[0]), [states(dst, ranks=2, rank=r) for r in range(2)]
    parts = [allocate_buffers(spec) for spec in ranks]
    full = [torch.from_numpy(x) for x in memory(whole, *truth)]
    kvx.convert(full, [t for part in parts for t in part], plan=kvx.plan(whole, ranks))
    conv, state = truth
    for r, part in enumerate(parts):
        share = conv[:, :, r * 12 : r * 12 + 12], state[:, :, r * 2 : r * 2 + 2]
        for got, want in zip(part, memory(ranks[r], *share), strict=True):
            assert np.array_equal(got.view(torch.uint8).flatten().numpy(), want)
    again = allocate_buffers(whole)
    kvx.convert([t for part in parts for t in part], again, plan=kvx.plan(ranks, whole))
    assert all(torch.equal(x.view(torch.uint8).flatten(), y) for x, y in zip(again, full, strict=True))
    lost = r"layers 0\.\.1, channels 12\.\.23 of src are in no dst"
    with pytest.raises(kvx.BadArgument, match=lost):
        kvx.plan(whole, ranks[0])
    assert [str(x) for x in kvx.plan(whole, ranks[0], partial=True).left_out] == [
        "layers 0..1, channels 12..23",
        "layers 0..1, heads 2..3",
    ]


def test_digests_are_equal_in_every_layout_and_add_up_over_ranks(truth):
    conv, state = truth
    found = {str(kvx.digest([torch.from_numpy(x) for x in memory(s, *truth)], s)) for s in map(states, LAYOUTS)}
    assert len(found) == 1
    ranks = [states(LAYOUTS[1], ranks=2, rank=r) for r in range(2)]
    shares = [
        torch.from_numpy(x)
        for r, s in enumerate(ranks)
        for x in memory(s, conv[:, :, r * 12 : r * 12 + 12], state[:, :, r * 2 : r * 2 + 2])
    ]
    assert str(kvx.digest(shares, ranks)) in found
    other = state.copy()
    other[1, 2, 0], other[1, 2, 1] = state[1, 2, 1], state[1, 2, 0]  # two heads changed places
    changed = [torch.from_numpy(x) for x in memory(states(LAYOUTS[0]), conv, other)]
    assert str(kvx.digest(changed, states(LAYOUTS[0]))) not in found
    turned = [torch.from_numpy(x) for x in memory(states(LAYOUTS[0]), conv[..., ::-1].copy(), state)]
    assert str(kvx.digest(turned, states(LAYOUTS[0]))) not in found


def test_the_gate_knows_their_axes():
    spec = states(LAYOUTS[1])
    conv, state = grids(spec)[0][1], grids(spec)[1][1]
    assert (str(conv), str(state)) == ("block 3 tap 3 channel 24", "block 3 head 4 column 10 row 6")
    assert refusal(torch.zeros(3, TAPS, CHANNELS, dtype=torch.bfloat16), conv) == ""
    assert "neither" in refusal(torch.zeros(3, CHANNELS, TAPS, dtype=torch.bfloat16), conv)
    assert "format f32 in the spec makes it float32" in refusal(torch.zeros(3, 4, 10, 6, dtype=torch.float16), state)
    assert num_buffers(spec) == 4


@pytest.mark.parametrize("text", LAYOUTS[:4])
def test_views_of_every_layer(text, truth):
    spec = states(text)
    views = kvx.layer_views([torch.from_numpy(x) for x in memory(spec, *truth)], spec)
    for layer, (conv, state) in enumerate(views):
        assert (conv.plane, conv.axes) == ("conv", ("block", "channel", "tap"))
        assert (state.plane, state.axes) == ("state", ("block", "head", "row", "column"))
        assert np.array_equal(conv.tensor.view(torch.int16).numpy().view(np.uint16), truth[0][layer])
        assert np.array_equal(state.tensor.numpy(), truth[1][layer])


def test_planes_go_to_those_of_their_name():
    kv = kvx.CacheSpec(3, 1, 4, 10, num_layers=2, layout="layer kv | block token head dim")
    with pytest.raises(kvx.BadArgument, match=r"has 2 planes \(conv, state\), .* has 2 \(k, v\)"):
        kvx.plan(states(LAYOUTS[0]), kv)
    with pytest.raises(kvx.BadArgument, match="src shards differ in num_blocks: 3 and 4"):
        kvx.plan([states(LAYOUTS[0]), replace(states(LAYOUTS[0]), num_blocks=4)], states(LAYOUTS[0]))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("layer | block channel tap", "K and V have no `channel`"),
        ("block plane[conv: channel tap channel]", "`channel` must stand here once"),
        ("block plane[conv: channel; Conv: tap]", "lower case names"),
        ("block plane[k: token head dim; v: token head dim]", "k and v are those of kv"),
        ("block plane[conv: channel tap", "is written plane"),
        ("block plane[conv: channel tap] head", "is the last thing"),
        ("block kv plane[conv: channel tap]", "stands before plane[...] already"),
        ("plane | block channel", 'unknown axis "plane"'),
        ("layer | plane[conv: channel tap]", "`block` must stand here exactly once"),
    ],
)
def test_names_that_are_not_taken(text, why):
    with pytest.raises(kvx.KvxError) as error:
        Layout.parse(text)
    assert why in str(error.value)
