"""A PagedCache on tiers: what it evicts comes back with a prefix, and whatever the tiers do its own counts hold."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvx
from kvx.errors import TierError
from kvx.tiers import BlockKind, CacheTiers, DiskTier, HostTier, block_spec
from kvx.tiers.block_file import file_bytes
from tests.cache.test_paged import BS, admitted, assert_content, make, random_calls, snapshot
from tests.tiers.movers import NEUTRAL


def kept_of(cache: kvx.PagedCache) -> list[kvx.CacheSpec]:
    return [block_spec(replace(g.spec, layout=NEUTRAL, num_layers=len(g.layers), model="small")) for g in cache.groups]


class Lossy(HostTier):
    """Refuses, loses and damages blocks, by chance."""

    rng = random.Random(0)
    share = 0.0

    def _store(self, key, block):
        if self.rng.random() < self.share:
            raise OSError("no room")
        return super()._store(key, block)

    def _fetch(self, key, into):
        if self.rng.random() < self.share:
            self._remove(key)
            return None
        return super()._fetch(key, into)


def on_host(cache: kvx.PagedCache, num_blocks: int = 64, share: float = 0.0) -> CacheTiers:
    tiers = []
    for spec in kept_of(cache):
        kind = BlockKind.of(spec)
        tiers.append([Lossy(kind, num_blocks * kind.num_bytes)])
        tiers[-1][0].share = share
    return CacheTiers(cache, tiers, kept=kept_of(cache))


def close(backing: CacheTiers) -> None:
    backing.close()
    for mover in backing.movers:
        for tier in mover.tiers:
            tier.close()


@pytest.mark.parametrize("share", [0.0, 0.3], ids=["sound", "lossy"])
@pytest.mark.parametrize("window", [0, 1, 6])
@pytest.mark.parametrize("seed", range(2))
def test_random_calls_match_the_model(seed, window, share):
    rng = random.Random(seed)
    cache = make(rng.choice([10, 14]), window=window)
    backing = on_host(cache, rng.choice([5, 40]), share)
    random_calls(cache, rng)
    stats = backing.stats
    assert stats.offloaded > 0
    assert (stats.failed > 0) == (share > 0)
    close(backing)


def test_random_calls_bring_blocks_back():
    """As above, with room for all."""
    cache = make(14)
    backing = on_host(cache, 200)
    random_calls(cache, random.Random(3))
    assert cache.stats().prefix.tokens_brought > 0
    close(backing)


def evicted(cache: kvx.PagedCache, tokens: list[int]) -> None:
    """Compute these, then others, until none of them is in the cache."""
    cache.release(admitted(cache, tokens))
    for n in range(3):
        cache.release(admitted(cache, [1000 + n * 50 + i for i in range(40)]))
    assert cache.prefix.ids(0, cache.prefix.hashes(np.array(tokens, np.int32))).max() == -1


@pytest.mark.parametrize("window", [0, 1, 6, 30])
def test_a_prefix_comes_back_and_the_last_token_is_left(window):
    cache, tokens = make(12, window=window), list(range(29))
    backing = on_host(cache)
    evicted(cache, tokens)
    seq = cache.admit(tokens)
    cache.check()
    assert seq.length == seq.num_cached == 28
    assert_content(cache, seq, tokens)
    cache.extend(seq, 1)
    cache.release(seq)
    assert cache.admit(tokens[:28]).length == 24
    assert cache.admit(tokens, extra=b"lora").length == 0
    loaded = backing.movers[0].stats.onboarded
    assert cache.admit(tokens).length == 28
    assert backing.movers[0].stats.onboarded == loaded, "the second time it is in the cache"
    cache.check()
    close(backing)


def test_only_what_a_window_sees_is_loaded():
    cache, tokens = make(12, window=6), list(range(29))
    backing = on_host(cache)
    evicted(cache, tokens)
    seq = cache.admit(tokens)
    assert [m.stats.onboarded for m in backing.movers] == [7, 2]
    assert cache.blocks(seq, 1).tolist()[:5] == [-1] * 5
    close(backing)


def test_it_goes_on_after_what_the_cache_has():
    cache, tokens = make(12), list(range(29))
    backing = on_host(cache)
    evicted(cache, tokens)
    seq = cache.admit(tokens[:13])
    cache.extend(seq, 1)
    assert (seq.num_cached, backing.stats.onboarded) == (12, 3)
    other = cache.admit(tokens)
    assert other.num_cached == 28
    assert backing.stats.onboarded == 7
    assert cache.blocks(other)[:3].tolist() == cache.blocks(seq)[:3].tolist()
    assert_content(cache, other, tokens)
    cache.check()
    close(backing)


def test_without_room_less_comes_back():
    cache, tokens = make(12), list(range(29))
    backing = on_host(cache)
    evicted(cache, tokens)
    other = admitted(cache, list(range(500, 532)))  # 8 of 12 blocks
    seq = cache.admit(tokens)
    assert seq.length == 16
    assert_content(cache, seq, tokens)
    cache.check()
    cache.release(other)
    cache.extend(seq, 13)
    cache.check()
    close(backing)


@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_damaged_block_is_computed_again(tmp_path, at):
    cache, tokens = make(12, window=6), list(range(29))
    kinds = [BlockKind.of(s) for s in kept_of(cache)]
    tiers = [[DiskTier(tmp_path / str(n), k, 200 * file_bytes(k))] for n, k in enumerate(kinds)]
    backing = CacheTiers(cache, tiers, kept=kept_of(cache))
    evicted(cache, tokens)
    backing.movers[0].settle()
    backing.movers[1].settle()
    name = cache.prefix.hashes(np.array(tokens, np.int32))[at]
    path = tmp_path / "0" / f"{name[0]:02x}" / f"{name.hex()}.kvx"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    seq = cache.admit(tokens)
    assert seq.length == at * BS
    cache.check()
    assert_content(cache, seq, tokens)
    close(backing)


class Broken(HostTier):
    error: BaseException | None = None

    def _fetch(self, key, into):
        if self.error is not None:
            raise self.error
        return super()._fetch(key, into)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug")], ids=["interrupt", "bug"])
def test_an_error_in_the_middle_leaves_everything_as_it_was(error):
    cache, tokens = make(12, window=6), list(range(29))
    kinds = [BlockKind.of(s) for s in kept_of(cache)]
    tiers = [[HostTier(kinds[0], 1 << 16)], [Broken(kinds[1], 1 << 16)]]
    backing = CacheTiers(cache, tiers, kept=kept_of(cache))
    evicted(cache, tokens)
    tiers[1][0].error = error
    before = snapshot(cache)[0]
    with pytest.raises(type(error)):
        cache.admit(tokens)
    cache.check()
    assert snapshot(cache)[0] == before
    assert [a.num_used for a in cache.allocators] == [0, 0]
    tiers[1][0].error = None
    seq = cache.admit(tokens)
    assert seq.length == 28
    assert_content(cache, seq, tokens)
    cache.check()
    close(backing)


@pytest.mark.parametrize("format", ["bf16", "int8_per_token_head", "fp8_e4m3_per_token_head", "int4_per_token_head_inline"])
def test_formats_are_kept_bit_for_bit(format):
    """Scales apart in the cache are inline in the tier."""
    spec = kvx.CacheSpec(12, BS, 1, 16, format=format)
    cache = kvx.PagedCache([kvx.LayerGroup("full", (4, 7), spec)], max_seqs=4, max_seq_len=60)
    inline = format if format in ("bf16", "int4_per_token_head_inline") else f"{format}_inline"
    kept = [replace(k, format=inline) for k in kept_of(cache)]
    kind = BlockKind.of(kept[0])
    backing = CacheTiers(cache, [[HostTier(kind, 1 << 20)]], kept=kept)
    tokens = list(range(29))
    seq = admitted(cache, tokens)

    def rows(seq):
        blocks = cache.blocks(seq)[:7]
        return [t[blocks].clone() for i in (4, 7) for t in cache.layer(i).tensors if t.dim()]

    before = rows(seq)
    cache.release(seq)
    for n in range(4):
        cache.release(admitted(cache, [900 + n * 50 + i for i in range(40)]))
    seq = cache.admit(tokens)
    assert (seq.length, backing.stats.onboarded) == (28, 7)
    for a, b in zip(before, rows(seq), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    close(backing)


def test_save_puts_all_into_the_last_tier(tmp_path):
    cache, tokens = make(40), list(range(29))
    (kept,) = kept_of(cache)
    kind = BlockKind.of(kept)
    with HostTier(kind, 4 * kind.num_bytes) as host, DiskTier(tmp_path, kind, 1 << 20) as disk:
        backing = CacheTiers(cache, [[host, disk]], kept=[kept])
        cache.release(admitted(cache, tokens))
        backing.movers[0].offload([b"elsewhere"], [0]).result(10)
        assert disk.num_blocks == 0
        backing.save()
        assert disk.num_blocks == 8
        assert (backing.stats.offloaded, backing.stats.handed_down) == (8, 1)
        assert backing.stats.failed == 0
        backing.close()
        assert cache.prefix.backing is None
    again = make(40)
    with DiskTier(tmp_path, kind, 1 << 20) as disk, CacheTiers(again, [[disk]], kept=[kept]):
        seq = again.admit(tokens)
        assert seq.length == 28
        assert_content(again, seq, tokens)


def test_what_does_not_fit_is_refused():
    cache = make(12)
    (kept,) = kept_of(cache)
    with HostTier(BlockKind.of(kept), 1 << 16) as tier:
        with pytest.raises(kvx.BadArgument, match="the cache has 1 groups"):
            CacheTiers(cache, [[tier], [tier]], kept=[kept, kept])
        with pytest.raises(kvx.BadArgument, match="kept blocks have 8 tokens, the cache's 4"):
            CacheTiers(cache, [[tier]], kept=[replace(kept, block_size=8)])
        plain = make(12, prefix=False)
        with pytest.raises(kvx.BadArgument, match="prefix=True"):
            CacheTiers(plain, [[tier]], kept=[kept])
        backing = CacheTiers(cache, [[tier]], kept=[kept])
        seq = admitted(cache, list(range(9)))
        cache.extend(seq, [1])
        with pytest.raises(kvx.BadArgument, match="before extend"):
            cache.bring_back(seq)
        backing.close()


def test_two_caches_share_a_tier_only_where_it_knows_the_weights():
    """Names of blocks are of tokens: without the model in the kind, one cache would get the other's K and V."""
    cache, other = make(12), make(12)
    (kept,) = kept_of(cache)
    for model in ("", "llama-2x64-kv1x16-v128"):
        nameless = replace(kept, model=model)
        with HostTier(BlockKind.of(nameless), 1 << 16) as tier:
            for _ in range(2):  # the same cache may come back
                CacheTiers(cache, [[tier]], kept=[nameless]).close()
            with pytest.raises(kvx.BadArgument, match=r"keeps another cache's blocks.*CacheSpec\(model=\.\.\.\)"):
                CacheTiers(other, [[tier]], kept=[nameless])
            assert other.prefix.backing is None
    with HostTier(BlockKind.of(kept), 1 << 16) as tier:
        CacheTiers(cache, [[tier]], kept=[kept]).close()
        CacheTiers(other, [[tier]], kept=[kept]).close()


def test_one_tier_for_two_groups_is_refused():
    """Names are of tokens: the other group's blocks have the same."""
    cache = make(8, window=6)
    kind = BlockKind.of(kept_of(cache)[0])
    with HostTier(kind, 64 * kind.num_bytes) as tier, pytest.raises(kvx.BadArgument, match="one tier is given for two groups"):
        CacheTiers(cache, [[tier], [tier]], kept=kept_of(cache))


def test_a_second_one_on_a_cache_is_refused(tmp_path):
    """It would replace the first silently: what that keeps would never be found again."""
    cache = make(12)
    CacheTiers(cache, host="1MB", model="small")  # nobody holds it, but the cache
    gc.collect()
    first = cache.prefix.backing
    with pytest.raises(kvx.BadArgument, match=r"^CacheTiers: the cache already has CacheTiers\(.*cache\.prefix\.backing\.close"):
        CacheTiers(cache, disk=str(tmp_path / "kv"), model="small")
    assert cache.prefix.backing is first
    assert not (tmp_path / "kv").exists()  # refused before anything is opened
    cache.prefix.backing.close()
    first.close()  # twice is once
    with CacheTiers(cache, disk=str(tmp_path / "kv"), model="small") as second:
        assert cache.prefix.backing is second
        first.close()
        assert cache.prefix.backing is second
    assert cache.prefix.backing is None


def test_after_one_that_could_not_be_made_comes_another(tmp_path):
    cache = make(12)
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError):
        CacheTiers(cache, disk=str(tmp_path / "file"), model="small")
    with CacheTiers(cache, host="1MB", model="small"):
        pass


def test_a_backing_of_ones_own_is_named_too():
    cache = make(12)

    class Mine:
        def __repr__(self) -> str:
            return "Mine()"

    cache.attach(Mine())  # type: ignore[arg-type]
    with pytest.raises(kvx.BadArgument, match=r"the cache already has Mine\(\).*cache\.attach\(None\)"):
        CacheTiers(cache, host="1MB", model="small")


def test_repr_says_sizes_use_and_where(tmp_path):
    cache = make(8)
    with CacheTiers(cache, host="1MB", disk=f"{tmp_path}/kv:1MB", model="small") as tiers:
        for start in (0, 100):  # the second evicts the first
            cache.release(admitted(cache, list(range(start, start + 29))))
        for mover in tiers.movers:
            mover.settle()
        text, offloaded = repr(tiers), tiers.stats.offloaded
        assert offloaded > 0
        assert "CacheTiers(group 'full': HostTier, " in text
        assert f"then DiskTier {tmp_path}/kv" in text
        assert f"offloaded: {offloaded} blocks, " in text
        assert "state: attached)" in text
        assert "tensor(" not in text
        assert "<th>loaded</th><td>0 blocks, 0 B</td>" in tiers._repr_html_()
    assert "state: closed)" in repr(tiers)
