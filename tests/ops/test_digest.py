"""The content digest: one number whatever the layout, the sharding, the block size; another for any change."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.layout.coordinates import content_number
from kvx.layout.engines import ENGINES
from kvx.ops.move import digest as digest_of
from tests.ops import layouts
from tests.ops.test_convert import fill

SPEC = kvx.CacheSpec(6, 4, 2, 16, num_layers=2, layout="layer | block token head (kv dim)")
LAYOUTS = [
    "layer kv | block token head dim",
    "layer kv | block head token dim",
    "block layer kv head token dim",
    "block | head layer kv token dim",
    "kv layer | (block token) head dim",
    "layer kv[K: | block head dim/x token dim%x; V: | block head dim token]",
    "layer | block head kv[K: dim token; V: token dim]",
]


def converted(src, buffers, dst, backend, **tables):
    out = kvx.allocate_buffers(dst, backend.device)
    kvx.convert(buffers, out, plan=kvx.plan(src, dst), backend=backend.name, **tables)
    return out


@pytest.mark.parametrize(
    "fmt", ["bf16", "f32", "int8_per_token_head", "fp8_e4m3_per_head", "int8_per_block_head", "nvfp4", "int4_per_token_head"]
)
def test_native_equals_definition(native_backend, fmt):
    spec = replace(SPEC, format=fmt, layout="layer kv | block token head dim", head_dim=32)
    buffers = fill(spec, 0)
    ids = torch.tensor([[3, 1, 0], [5, 2, 4]])
    lens = torch.tensor([9, 12])
    want = kvx.digest(buffers, spec, blocks=ids, seq_lens=lens, backend="torch")
    got = kvx.digest([t.to(native_backend.device) for t in buffers], spec, blocks=ids, seq_lens=lens, backend=native_backend.name)
    assert str(got) == str(want)
    assert got != kvx.Digest()


@pytest.mark.parametrize("head_dim", [1, 3, 7, 20])
def test_rows_that_are_no_whole_words(native_backend, head_dim):
    spec = replace(SPEC, head_dim=head_dim)
    buffers = layouts.random_buffers(spec, 0)
    got = kvx.digest([t.to(native_backend.device) for t in buffers], spec, backend=native_backend.name)
    assert got == kvx.digest(buffers, spec, backend="torch")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_make_no_difference(backend, layout):
    buffers = [t.to(backend.device) for t in layouts.random_buffers(SPEC, 0)]
    other = replace(SPEC, layout=layout)
    out = converted(SPEC, buffers, other, backend, src_blocks=[4, 1, 5], dst_blocks=[0, 3, 2])
    want = kvx.digest(buffers, SPEC, blocks=[4, 1, 5], backend=backend.name)
    assert kvx.digest(out, other, blocks=[0, 3, 2], backend=backend.name) == want
    assert kvx.digest(out, other, blocks=[3, 0, 2], backend=backend.name) != want


def test_block_sizes_make_no_difference(backend):
    buffers = [t.to(backend.device) for t in layouts.random_buffers(SPEC, 0)]
    other = replace(SPEC, block_size=8, num_blocks=4, layout="block layer kv head token dim")
    tables = {"src_blocks": torch.tensor([[4, 1, 5]]), "dst_blocks": torch.tensor([[2, 0]]), "seq_lens": torch.tensor([11])}
    out = converted(SPEC, buffers, other, backend, **tables)
    a = kvx.digest(buffers, SPEC, blocks=tables["src_blocks"], seq_lens=tables["seq_lens"], backend=backend.name)
    b = kvx.digest(out, other, blocks=tables["dst_blocks"], seq_lens=tables["seq_lens"], backend=backend.name)
    assert a == b


def test_shards_add_up(backend):
    buffers = [t.to(backend.device) for t in layouts.random_buffers(SPEC, 0)]
    whole = kvx.digest(buffers, SPEC, backend=backend.name)
    heads = [SPEC.shard(2, i) for i in range(2)]
    stages = [replace(SPEC, num_layers=1, layer_start=i) for i in range(2)]
    for shards in (heads, stages):
        parts = [kvx.allocate_buffers(s, backend.device) for s in shards]
        kvx.convert(buffers, parts, plan=kvx.plan(SPEC, shards), backend=backend.name)
        assert kvx.digest(parts, shards, backend=backend.name) == whole
        total = sum((kvx.digest(p, s, backend=backend.name) for p, s in zip(parts, shards, strict=True)), kvx.Digest())
        assert total == whole


def test_inline_scales_make_no_difference(backend):
    a = replace(SPEC, format="int8_per_token_head_inline")
    b = replace(SPEC, format="int8_per_token_head", layout="layer kv | block head token dim")
    buffers = fill(a, 0, backend.device)
    out = converted(a, buffers, b, backend)
    assert kvx.digest(buffers, a, backend=backend.name) == kvx.digest(out, b, backend=backend.name)


def test_bad_input_is_refused(backend):
    buffers = [t.to(backend.device) for t in layouts.random_buffers(SPEC, 0)]
    with pytest.raises(kvx.OutOfRange, match=r"^digest\(\): .*6 blocks"):
        kvx.digest(buffers, SPEC, blocks=[6], backend=backend.name)
    with pytest.raises(kvx.BadArgument, match=r"digest\(\): blocks is \['a'\]; it must be a row of block ids"):
        kvx.digest(buffers, SPEC, blocks=["a"], backend=backend.name)
    with pytest.raises(kvx.BadArgument, match=r"digest\(\): cache has 1 buffers; the specs make 2"):
        kvx.digest(buffers[:1], SPEC, backend=backend.name)
    far = replace(SPEC, layer_start=65535)
    with pytest.raises(kvx.Unsupported, match="65,535"):
        kvx.digest(buffers, far, backend=backend.name)


def test_every_bit_counts():
    buffers = layouts.random_buffers(SPEC, 0)
    seen = {str(kvx.digest(buffers, SPEC))}
    for buffer in buffers:
        for byte in range(0, buffer.numel(), 97):
            buffer[byte] ^= 1 << byte % 8
            seen.add(str(kvx.digest(buffers, SPEC)))
            buffer[byte] ^= 1 << byte % 8
    assert len(seen) == 1 + sum(len(range(0, b.numel(), 97)) for b in buffers)


def test_swapped_heads_layers_and_planes_differ():
    """What connectors get wrong: the same bytes under other coordinates."""
    buffers = layouts.random_buffers(SPEC, 0)
    want = kvx.digest(buffers, SPEC)
    view = [b.view(6, 4, 2, 2, 32) for b in buffers]
    heads, planes = [v.flip(2).contiguous().view(-1) for v in view], [v.flip(3).contiguous().view(-1) for v in view]
    for wrong in (heads, planes, buffers[::-1]):
        assert kvx.digest(wrong, SPEC) != want


GEOMETRY = {"num_layers": 2, "num_blocks": 3, "block_size": 32, "head_dim": 32, "format": "f16"}


def spec_of(name: str) -> kvx.CacheSpec:
    return ENGINES[name].spec(**GEOMETRY, num_kv_heads=ENGINES[name].num_kv_heads or 2)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_engine_row_converts_to_every_other_and_back(name):
    """Bit for bit; the digest is the same on the way."""
    spec = spec_of(name)
    source = layouts.random_buffers(spec, 1)
    want = kvx.digest(source, spec)
    count = 0
    for other in map(spec_of, sorted(ENGINES)):
        if (other.num_planes, other.num_kv_heads) != (spec.num_planes, spec.num_kv_heads):
            continue
        there, back = kvx.allocate_buffers(other), kvx.allocate_buffers(spec)
        kvx.convert(source, there, plan=kvx.plan(spec, other))
        kvx.convert(there, back, plan=kvx.plan(other, spec))
        assert all(torch.equal(a, b) for a, b in zip(source, back, strict=True)), other.layout
        assert kvx.digest(there, other) == want, other.layout
        count += 1
    assert count  # itself at least


def test_pairs_of_errors_inside_a_word_meet_two_sums():
    """Halves of a word exchanged: one sum used to say what the other did, so that 32 bits were all that told them apart."""
    spec = kvx.CacheSpec(1, 64, 1, 8)  # a row is one word
    k, v = (torch.randint(0, 256, (64 * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    want = kvx.digest([k, v], spec)
    for row in range(64):
        swapped = k.clone()
        swapped[16 * row : 16 * row + 16] = k[16 * row : 16 * row + 16].view(2, 8).flip(0).flatten()
        got = kvx.digest([swapped, v], spec)
        assert (got.first - want.first) % 2**64 != (want.second - got.second) % 2**64
        assert got.first != want.first
        assert got.second != want.second


def test_a_word_made_to_fool_the_first_sum_meets_the_second():
    """Keys are public: numbers exchanged behind their keys leave one sum alone, and never both."""
    spec = kvx.CacheSpec(1, 1, 1, 8)
    key = digest_of._row_keys(0, 0, 0, content_number(spec))
    word = [1, 2, 3, 4]
    x = [w + k & 0xFFFFFFFF for w, k in zip(word, key[:4], strict=True)]
    other = [a - k & 0xFFFFFFFF for a, k in zip((x[2], x[3], x[0], x[1]), key[:4], strict=True)]
    rows = [torch.frombuffer(bytearray(struct.pack("<4I", *w)), dtype=torch.uint8) for w in (word, other)]
    zero = torch.zeros(16, dtype=torch.uint8)
    first, second = (kvx.digest([row, zero], spec) for row in rows)
    assert first.first == second.first
    assert first.second != second.second


@pytest.mark.parametrize("even", [False, True])
def test_what_happens_to_words_of_one_row_is_seen(even):
    """Exchanged, turned round, shifted, doubled, cleared: of random words and of words in even steps, both sums change."""
    spec = kvx.CacheSpec(1, 1, 1, 64)
    k = torch.arange(128, dtype=torch.uint8) if even else torch.randint(0, 256, (128,), dtype=torch.uint8)
    words = k.view(8, 16)
    orders = [list(p) for p in itertools.permutations(range(8))][1::97]
    orders += [[i if n == j else n for n in range(8)] for i in range(8) for j in range(8) if i != j]  # one twice, one lost
    made = [words[order] for order in orders] + [words.roll(n, 0) for n in range(1, 8)] + [words.roll(n, 1) for n in range(1, 16)]
    made += [torch.where(torch.arange(8)[:, None] == i, 0, words) for i in range(8)]
    want = kvx.digest([k, k], spec)
    for wrong in made:
        got = kvx.digest([wrong.flatten().contiguous(), k], spec)
        assert got.first != want.first, wrong
        assert got.second != want.second, wrong


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"format": "bf16"}, {"format": "f16"}),
        ({"format": "fp8_e4m3_per_head"}, {"format": "int8_per_head"}),
        ({"format": "fp8_e4m3"}, {"format": "fp8_e5m2"}),
        ({"head_dim": 16}, {"head_dim": 12}),
        ({"v_head_dim": 16}, {"v_head_dim": 8}),
        ({"format": "int8_per_head"}, {"format": "int8_per_block"}),
    ],
    ids=str,
)
def test_what_rows_mean_is_in_the_digest(one, other):
    """The same bits, or the same numbers and zeros behind them, under another format or head size are other content."""
    a, b = (replace(SPEC, layout="layer kv | block token head dim", **fields) for fields in (one, other))
    zeros = [[torch.zeros_like(t) for t in kvx.allocate_buffers(s)] for s in (a, b)]
    assert kvx.digest(zeros[0], a) != kvx.digest(zeros[1], b)


def test_heads_that_two_shards_hold_do_not_count_twice():
    parts = [SPEC.shard(2, 0), SPEC.shard(2, 0)]
    buffers = [kvx.allocate_buffers(s) for s in parts]
    with pytest.raises(kvx.BadArgument, match=r"layers 0\.\.1, heads 0\.\.0 are in more than one shard and would count twice"):
        kvx.digest(buffers, parts)
