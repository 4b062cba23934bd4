"""Handovers and paged caches over one directory: each finds what another kept, whatever its blocks, ranks and names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvx
from kvx.adapters.sglang.names import SGLANG, page_names
from kvx.adapters.store import HandoverStore, StorePart, share
from kvx.connector.store_names import Scheme, alias_kind, named_kind, read_alias
from kvx.errors import BadArgument
from kvx.handover import NEUTRAL, Handover, Source, export_blocks, join, names
from kvx.handover.paged_cache import read_sequence, write_sequence
from kvx.handover.part import rank_specs
from kvx.spec import CacheSpec, PlaneSpec, StateSpec, state_plane
from kvx.spec.formats import Format
from kvx.tiers import BlockKind, CacheTiers, DiskTier

MODEL, TOKENS = "weights-of-a-store", [(n * 29 + n // 5) % 241 for n in range(133)]
HEADS, DIM, LAYERS = 3, 8, 2


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch):
    monkeypatch.setattr("kvx.connector.store_kinds.REFRESH_S", 0.0)


def kept(block_size: int, format: str = "f32") -> CacheSpec:
    return CacheSpec(1, block_size, HEADS, DIM, layout=NEUTRAL, num_layers=LAYERS, format=format, model=MODEL)


def a_handover(tokens: list[int] = TOKENS) -> Handover:
    torch.manual_seed(3)
    spec = CacheSpec(1, len(tokens), HEADS, DIM, num_layers=LAYERS, format="f32", layout="layer kv | block token head dim")
    buffers = kvx.allocate_buffers(spec)
    for t in buffers:
        t.view(torch.float32).normal_()
    return export_blocks(np.array(tokens), [Source(buffers, spec, blocks=[0])], model=MODEL, block_size=16)


def content(handover: Handover | None, num_tokens: int) -> kvx.Digest:
    assert handover is not None
    return handover.cut(num_tokens).parts[0].content


def cache(block_size: int, salt: str = MODEL) -> kvx.PagedCache:
    group = kvx.LayerGroup("full", range(LAYERS), CacheSpec(256 // block_size, block_size, HEADS, DIM, format="f32"))
    return kvx.PagedCache([group], max_seqs=2, max_seq_len=256, salt=salt.encode())


@pytest.mark.parametrize(("theirs", "mine"), [(16, 32), (32, 16), (16, 16), (48, 32)])
def test_in_other_blocks(tmp_path, theirs, mine):
    handover = a_handover()
    with HandoverStore(f"disk:{tmp_path}", kept(theirs)) as one, HandoverStore(f"disk:{tmp_path}", kept(mine)) as two:
        assert one.keep(handover) == len(TOKENS) // theirs
        found = two.find(TOKENS)
    whole = len(TOKENS) // theirs * theirs // mine * mine
    assert found is not None
    assert (found.num_tokens, found.block_size) == (whole, mine)
    assert content(found, whole) == content(handover, whole)


def test_of_other_ranks(tmp_path):
    """Two ranks of three heads have two and one; three have one each; all of them find one another's."""
    handover, store = a_handover(), f"disk:{tmp_path}"
    for spec, shard in zip(rank_specs(kept(16), 2), handover.shard(2), strict=True):
        with HandoverStore(store, spec) as one:
            one.keep(shard)
    found = []
    for spec in rank_specs(kept(32), 3):
        with HandoverStore(store, spec) as one:
            found.append(one.find(TOKENS))
    assert content(join(found), 128) == content(handover, 128)
    with HandoverStore(store, kept(64)) as one:
        assert content(one.find(TOKENS), 128) == content(handover, 128)


def test_another_model_and_another_format_are_not_found(tmp_path):
    with HandoverStore(f"disk:{tmp_path}", kept(16)) as one:
        one.keep(a_handover())
    other = kept(32).replaced(model="weights-of-another")
    for spec in (other, kept(32, "fp8_e4m3_per_token_head_inline")):
        with HandoverStore(f"disk:{tmp_path}", spec) as two:
            assert two.find(TOKENS) is None


def test_a_format_of_the_store(tmp_path):
    handover, fp8 = a_handover(), "fp8_e4m3_per_token_head_inline"
    with HandoverStore(f"disk:{tmp_path}", kept(16, fp8)) as one, HandoverStore(f"disk:{tmp_path}", kept(64, fp8)) as two:
        one.keep(handover)
        found = two.find(TOKENS)
    assert found is not None
    assert content(found, 128) == content(handover.convert(format=fp8), 128)


def test_states_beside(tmp_path):
    """Parts of a hybrid: K and V are taken over from other blocks, a state is found where it stands."""
    planes = (state_plane("conv", "f32", channel=8, tap=3),)
    groups = [
        kvx.LayerGroup("attention", (1,), CacheSpec(16, 16, HEADS, DIM, format="f32")),
        kvx.LayerGroup("states", (0, 2), StateSpec(4, planes), kind=kvx.cache.kinds.State()),
    ]
    paged = kvx.PagedCache(groups, max_seqs=2, max_seq_len=256)
    seq = paged.admit(TOKENS)
    paged.extend(seq, 128)
    handover = read_sequence(paged, seq, model=MODEL)
    parts = [StorePart(kept(16).replaced(num_layers=1), (1,)), StorePart(StateSpec(1, planes, num_layers=2, model=MODEL), (0, 2))]
    with HandoverStore(f"disk:{tmp_path}", parts) as one:
        assert one.keep(handover) == 8
        found = one.find(TOKENS)
    assert found is not None
    assert [p.content for p in found.parts] == [p.content for p in handover.parts]


def hybrid(size: int, planes: tuple[PlaneSpec, ...], *, ranks: int = 1, rank: int = 0) -> list[StorePart]:
    """K and V of layer 1, states of layers 0 and 2."""
    states = StateSpec(1, planes, num_layers=2, model=MODEL).shard(ranks, rank)
    return [StorePart(kept(size).replaced(num_layers=1), (1,)), StorePart(states, (0, 2))]


def a_hybrid(planes: tuple[PlaneSpec, ...], num_tokens: int) -> Handover:
    groups = [
        kvx.LayerGroup("attention", (1,), CacheSpec(16, 16, HEADS, DIM, format="f32")),
        kvx.LayerGroup("states", (0, 2), StateSpec(4, planes), kind=kvx.cache.kinds.State()),
    ]
    paged = kvx.PagedCache(groups, max_seqs=2, max_seq_len=256)
    seq = paged.admit(TOKENS)
    paged.extend(seq, num_tokens)
    made = read_sequence(paged, seq, model=MODEL)
    parts = [part for part in made.parts if isinstance(part.spec, StateSpec)]
    for n, t in enumerate(parts[0].buffers):
        t.view(torch.float32).copy_(torch.arange(t.numel() // 4) * 3.0 + n)
    return replace(made, parts=tuple(part.sealed(num_tokens) for part in made.parts))


@pytest.mark.parametrize(("theirs", "mine", "num_tokens"), [(32, 16, 128), (16, 64, 128), (16, 32, 112), (16, 16, 112)])
def test_a_state_under_names_of_other_blocks(tmp_path, theirs, mine, num_tokens):
    """It is found where a block of the reader's ends too, and nowhere else; parts may come in any order."""
    planes = (state_plane("conv", "f32", channel=8, tap=3), state_plane("ssm", "f32", head=4, row=2, column=2))
    handover, store = a_hybrid(planes, num_tokens), f"disk:{tmp_path}"
    with HandoverStore(store, hybrid(theirs, planes)) as one, HandoverStore(store, hybrid(mine, planes)) as two:
        one.keep(replace(handover, parts=handover.parts[::-1]))
        found = two.find(TOKENS)
        cut = two.find(TOKENS[: num_tokens - 1])
    assert cut is None
    if num_tokens % mine:
        assert found is None
        return
    assert found is not None
    assert found.num_tokens == num_tokens
    assert [p.content for p in found.parts] == [p.content for p in handover.parts]


def test_states_of_other_ranks_and_types(tmp_path):
    planes = (state_plane("conv", "f32", channel=8, tap=3), state_plane("ssm", "f32", head=4, row=2, column=2))
    handover, store = a_hybrid(planes, 128), f"disk:{tmp_path}"
    one, two = handover.shard(2)
    for rank, shard in enumerate((one, two)):
        with HandoverStore(store, hybrid(16, planes)) as whole:
            assert whole.find(TOKENS) is None  # a rank's state is missing
        parts = hybrid(16, planes, ranks=2, rank=rank)
        heads = shard.parts[0].kv
        parts[0] = StorePart(kept(16).replaced(num_layers=1, num_kv_heads=heads.num_kv_heads, head_start=heads.head_start), (1,))
        with HandoverStore(store, parts) as mine:
            mine.keep(shard)
    with HandoverStore(store, hybrid(16, planes)) as whole:
        found = whole.find(TOKENS)
    assert found is not None
    assert [p.content for p in found.parts] == [p.content for p in handover.parts]
    with HandoverStore(store, hybrid(16, tuple(replace(p, format=Format.named("bf16")) for p in planes))) as other:
        assert other.find(TOKENS) is None


def test_a_cache_and_handovers(tmp_path):
    """A PagedCache finds what a handover kept in other blocks, and the other way round."""
    handover = a_handover()
    with HandoverStore(f"disk:{tmp_path}", kept(16)) as store:
        store.keep(handover)
        one = cache(32)
        with CacheTiers(one, disk=tmp_path, model=MODEL) as tiers, share(tiers):
            seq = one.admit(TOKENS)
            assert seq.length == 128
            assert content(read_sequence(one, seq, model=MODEL), 128) == content(handover, 128)
        other = [5, *TOKENS]
        two = cache(64)
        with CacheTiers(two, disk=tmp_path, model=MODEL) as tiers, share(tiers):
            seq = two.admit(other)
            assert seq.length == 0
            write_sequence(two, seq, a_handover(other), model=MODEL)
            two.release(seq)
            tiers.save()
        assert content(store.find(other), 128) == content(a_handover(other), 128)


def test_a_cache_is_not_led_astray(tmp_path):
    """A sequence with an extra has names of its own: nothing that others wrote of its tokens comes under them."""
    with HandoverStore(f"disk:{tmp_path}", kept(16)) as store:
        store.keep(a_handover())
    one = cache(32)
    with CacheTiers(one, disk=tmp_path, model=MODEL) as tiers, share(tiers):
        for more in ({"extra": b"lora-1"}, {"extras": [(0, b"a picture")]}):
            seq = one.admit(TOKENS, **more)
            assert seq.length == 0
            one.release(seq)


def sglang_pages(folder: Path, page_size: int) -> DiskTier:
    """As SGLang makes a folder when it starts."""
    spec = kept(page_size).replaced(layout=NEUTRAL)
    kind = named_kind(BlockKind.of(spec), SGLANG)
    return DiskTier(folder / kind.digest.hex(), kind, 10**9)


def test_sglang_is_led_to_both(tmp_path):
    with sglang_pages(tmp_path, 32), HandoverStore(f"disk:{tmp_path}", kept(16)) as store:
        store.keep(a_handover())
        one = cache(64)
        with CacheTiers(one, disk=tmp_path, model=MODEL) as tiers, share(tiers):
            one.release(one.admit(TOKENS))
    for size in (16, 64):
        kind = alias_kind(MODEL, Scheme(SGLANG, 32), Scheme("", size))
        with DiskTier(tmp_path / kind.digest.hex(), kind, 10**9) as records:
            (first,) = records.get(page_names(TOKENS, 32)[:1]).result()
        assert first is not None
        assert read_alias(first).names == tuple(names(TOKENS[:64], size, MODEL)[: max(1, 32 // size)])


def test_a_cache_of_another_salt_leaves_no_records(tmp_path):
    """Its blocks have other names than KVX's: a record would lead nowhere."""
    one = cache(64, salt="another")
    with sglang_pages(tmp_path, 32), CacheTiers(one, disk=tmp_path, model=MODEL) as tiers, share(tiers):
        one.release(one.admit(TOKENS))
    assert not list(tmp_path.glob(f"{alias_kind(MODEL, Scheme(SGLANG, 32), Scheme('', 64)).digest.hex()}/*"))


def test_closed_it_is_asked_no_more(tmp_path):
    one = cache(32)
    with CacheTiers(one, disk=tmp_path, model=MODEL) as tiers:
        share(tiers).close()
        with HandoverStore(f"disk:{tmp_path}", kept(16)) as store:
            store.keep(a_handover())
        assert one.admit(TOKENS).length == 0


def test_what_is_no_store():
    with pytest.raises(BadArgument, match="tier is 'host:1GB' for 1 parts; it takes disk:DIR"):
        HandoverStore("host:1GB", kept(16))
    with pytest.raises(BadArgument, match=r"blocks of \[16, 32\] tokens"):
        HandoverStore("disk:/nowhere", [StorePart(kept(16), (0, 1)), StorePart(kept(32), (2, 3), 8)])
