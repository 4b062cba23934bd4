"""Handovers in tiers: full blocks under names of tokens, the longest beginning back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvx
from kvx.handover import export_blocks, find, join, keep, model_name, names
from kvx.tiers import BlockKind, DiskTier, HostTier, block_spec
from tests.handover.caches import MODEL, PLAIN, Engine, small

SPEC = kvx.CacheSpec(1, 4, 2, 32, layout=PLAIN, format="bf16", num_layers=2, model=MODEL)


def refuse(call, words, kind=kvx.BadArgument):
    with pytest.raises(kind, match=words):
        call()


def tier_of(part, path=None):
    kind = BlockKind.of(block_spec(part.spec))
    return HostTier(kind, 100 * kind.num_bytes) if path is None else DiskTier(path, kind, 1 << 22)


def test_names():
    a = names(range(10), 4, "m")
    assert len(a) == 2
    assert a == names(np.arange(11), 4, "m") == names(list(range(8)), 4, "m")
    assert names(range(8), 4, "n")[0] != a[0]
    assert names([9, *range(1, 8)], 4, "m")[1] != a[1]
    assert names([], 4, "m") == [] == names(range(3), 4, "m")
    # The sum that others must come to: blake2b of the one before and the tokens, after that of the model.
    assert [n.hex() for n in names([1, 2, 3, 4], 2, "m")] == [
        "c82a53545640df20051384fbfba74661",
        "cf616bb1aacac5a724ea457d9e015bd5",
    ]


@pytest.mark.parametrize("tokens", [[0.5, 1], [2**31, 1], np.array([2**32 + 5, 1]), [-1, 2], [[1, 2]], "ab"])
def test_names_of_what_is_no_token(tokens):
    refuse(lambda: names(tokens, 2, "m"), "row of int32 ids")
    refuse(lambda: names([1, 2], 0, "m"), "block_size is 0")
    refuse(lambda: names([1, 2], "2", "m"), "block_size is '2'")
    refuse(lambda: names([1, 2], 2, None), "model is None; it must be the model's name")


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_there_and_back(kind, tmp_path):
    h = small(random.Random(0), num_tokens=22, block_size=4)
    with tier_of(h.parts[0], tmp_path / "t" if kind == "disk" else None) as tier:
        parts = [((0, 1, 2), 0)]
        assert find(h.tokens, [tier], parts=parts) is None
        assert keep(h, [tier]) == 5
        assert tier.num_blocks == 5
        back = find(h.tokens, [tier], parts=parts)
        assert back is not None
        assert back.to_json() == h.cut(20).to_json()
        more = find([*h.tokens.tolist(), 7, 8, 9], [tier], parts=parts)
        assert more is not None
        assert more.to_json() == back.to_json()
        tokens = h.tokens.tolist()
        tokens[9] += 1
        other = find(tokens, [tier], parts=parts)
        assert other is not None
        assert other.to_json() == h.cut(8).to_json()
        assert find(h.tokens[:3], [tier], parts=parts) is None
        assert find([], [tier], parts=parts) is None
        tier.drop(names(h.tokens, 4, MODEL)[2:3]).result()
        short = find(h.tokens, [tier], parts=parts)
        assert short is not None
        assert short.num_tokens == 8


@given(st.integers(4, 60), st.integers(1, 30), st.integers(4, 60), st.sets(st.integers(0, 14)), st.integers(0, 2**32))
def test_the_longest_beginning(n, window, asked, dropped, seed):
    """Full layers and sliding ones: as long as both have what the next token sees, and no longer."""
    rng = random.Random(seed)
    n = max(n, asked)
    first = max(0, min(n - 1, n + 1 - window))
    full = Engine.new(SPEC, n, rng).fill(rng)
    sliding = Engine.new(replace(SPEC, num_layers=1), n, rng, first_token=first).fill(rng)
    tokens = [rng.randrange(100) for _ in range(n)]
    sources = [*full.sources(layers=(0, 2)), *sliding.sources(layers=(1,), window=window, first_token=first)]
    h = export_blocks(tokens, sources, block_size=4)
    with tier_of(h.parts[0]) as a, tier_of(h.parts[1]) as b:
        keep(h, [a, b])
        keys = names(tokens, 4, MODEL)
        has = [set(range(len(keys))) - dropped, {i for i in range(len(keys)) if i * 4 >= first} - {d + 2 for d in dropped}]
        a.drop([keys[i] for i in dropped if i < len(keys)]).result()
        b.drop([keys[i + 2] for i in dropped if i + 2 < len(keys)]).result()
        found = find(tokens[:asked], [a, b], parts=[((0, 2), 0), ((1,), window)])
        want = 0
        for m in range(1, asked // 4 + 1):
            begin = max(0, min(4 * m - 1, 4 * m + 1 - window)) // 4
            if set(range(m)) <= has[0] and set(range(begin, m)) <= has[1]:
                want = m
        assert (found.num_tokens if found else 0) == 4 * want
        if found:
            found.check()
            assert found.tokens.tolist() == tokens[: 4 * want]
            same = export_blocks(tokens[: 4 * want], full.sources(layers=(0, 2)), block_size=4)
            assert found.parts[0].content == same.parts[0].content


def test_a_block_that_lacks_its_first_tokens_is_not_kept():
    """It would be found by a shorter beginning, which sees them."""
    rng = random.Random(0)
    e = Engine.new(SPEC, 24, rng, first_token=12).fill(rng)
    h = export_blocks(range(24), e.sources(window=8, first_token=14), block_size=8)
    assert h.parts[0].first_block == 1
    with tier_of(h.parts[0]) as tier:
        assert keep(h, [tier]) == 3
        assert tier.has(names(range(24), 8, MODEL)).result() == [False, False, True]


def test_damage_is_not_kept():
    h = small(random.Random(0), num_tokens=22, block_size=4)
    with tier_of(h.parts[0]) as tier:
        h.parts[0].buffers[2][7] ^= 4
        refuse(lambda: keep(h, [tier]), "part 0", kvx.Damaged)
        assert tier.num_blocks == 0


def test_wrong_tiers():
    h = small(random.Random(0), num_tokens=22, block_size=4)
    other = small(random.Random(0), num_tokens=22, block_size=8)
    with tier_of(h.parts[0]) as tier, tier_of(other.parts[0]) as larger:
        refuse(lambda: keep(h, []), "0 tiers for 1 parts")
        refuse(lambda: keep(h, [None]), "a tier is None; it must be a Tier")
        refuse(lambda: keep(h, [tier, larger]), "2 tiers for 1 parts")
        refuse(lambda: keep(h, [larger]), "block_size", kvx.Incompatible)
        refuse(lambda: find([1], [], parts=[]), "0 tiers")
        refuse(lambda: find([1], [tier, tier], parts=[((0,), 0), ((1,), 0)]), "one tier is given for two parts")
        refuse(lambda: find([1], [tier, larger], parts=[((0,), 0), ((1,), 0)]), "a tier has blocks of 8")
        refuse(lambda: find([1.5], [tier], parts=[((0, 1, 2), 0)]), "row of int32 ids")
        keep(h, [tier])
        refuse(lambda: find(h.tokens, [tier], parts=[((0, 1), 0)]), "for 2 layers of the model")
        refuse(lambda: keep(h.shard(2)[0], [tier]), "num_kv_heads", kvx.Incompatible)
    apart = small(random.Random(0), num_tokens=22, format="int8_per_token_head")
    kind = BlockKind.of(block_spec(apart.spec))
    with HostTier(kind, 100 * kind.num_bytes) as tier:
        refuse(lambda: keep(apart, [tier]), "scales apart from the rows")
        refuse(lambda: find([1], [tier], parts=[((0, 1, 2), 0)]), "scales apart from the rows")


def test_shards_have_tiers_of_their_own():
    h = small(random.Random(0), num_tokens=16, block_size=4)
    shards = h.shard(2)
    tiers = [tier_of(s.parts[0]) for s in shards]
    for s, tier in zip(shards, tiers, strict=True):
        keep(s, [tier])
    back = [find(h.tokens, [tier], parts=[((0, 1, 2), 0)]) for tier in tiers]
    assert join(back).to_json() == h.to_json()
    for tier in tiers:
        tier.close()


def test_a_geometry_is_no_name_in_a_directory(tmp_path):
    """What an export names by default. Between two engines that a person set up it does; a fine-tune would find these blocks."""
    geometry = model_name("llama", num_layers=2, num_kv_heads=2, head_dim=32, hidden_size=64, vocab_size=128)
    spec = replace(SPEC, model=geometry)
    refuse(lambda: DiskTier(tmp_path / "tier", BlockKind.of(spec), 1 << 22), "the geometry alone")
    refuse(lambda: DiskTier(tmp_path / "tier", BlockKind.of(replace(spec, model="")), 1 << 22), "the model is not named")
    assert not list(tmp_path.iterdir())
    HostTier(BlockKind.of(spec), 1 << 22).close()
