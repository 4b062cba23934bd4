"""DeepSeek-V4 in tiers and handovers: evicted to disk and found again, handed to another process, with the logits of a cold run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

import kvx
from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema, Projected
from kvx.handover import Handover, join, load, save
from kvx.handover.paged_cache import read_sequence, write_sequence
from kvx.tiers import BlockKind, CacheTiers, DiskTier, HostTier, kept_specs
from kvx.tiers.block_file import file_bytes
from tests.hybrid import models
from tests.hybrid.hybrids import F32, answer, check, hybrid_on, tokens

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny flash"
TOKENS = list(range(30))


def feed(hybrid: HybridModel, seq, ids: torch.Tensor) -> torch.Tensor:
    """The rest of `ids`, in steps that end where blocks do."""
    got = []
    while seq.length < len(ids):
        stop = min(len(ids), (seq.length // 128 + 1) * 128)
        got.append(hybrid.forward(seq, ids[seq.length : stop]))
        hybrid.cache.commit(seq)
    return torch.cat(got)


def on_disk(cache: HybridCache, folder: Path) -> CacheTiers:
    kept = kept_specs(cache, NAME)
    kinds = [BlockKind.of(spec) for spec in kept]
    tiers = [[DiskTier(folder / str(n), kind, 40 * file_bytes(kind))] for n, kind in enumerate(kinds)]
    return CacheTiers(cache, tiers, kept=kept)


def close(backing: CacheTiers) -> None:
    backing.close()
    for mover in backing.movers:
        for tier in mover.tiers:
            tier.close()


# --- tiers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", [0, 2])
@models.one_thread()
def test_a_prefix_that_was_evicted_is_found_on_disk(backend, tmp_path, snapshots):
    """Three blocks of entries, so that a second text evicts the first's; then in another cache, as after a restart."""
    ids, other, want = tokens(backend, 300), tokens(backend, 300, 9), answer(models.FLASH, 300)
    hybrid = hybrid_on(backend, models.FLASH, num_blocks=3, prefix=True, num_snapshots=snapshots, max_seqs=1)
    cache = hybrid.cache
    backing = on_disk(cache, tmp_path)
    for text in (ids, other):
        seq = cache.admit(text.tolist())
        feed(hybrid, seq, text)
        cache.release(seq)
        cache.check()
    seq = cache.admit(ids.tolist())
    assert (seq.length, seq.num_ahead) == (256, 0), "both blocks of entries and the snapshot behind them"
    assert backing.num_lost == 0
    check(backend, feed(hybrid, seq, ids), want[256:])
    cache.check()
    backing.save()
    close(backing)

    again = hybrid_on(backend, models.FLASH, prefix=True)
    backing = on_disk(again.cache, tmp_path)
    seq = again.cache.admit(ids.tolist())
    assert seq.length == 256
    check(backend, feed(again, seq, ids), want[256:])
    assert backing.stats.onboarded == 2 * 2 + 3, "of two blocks the members of entries, of one state those of windows"
    again.cache.check()
    close(backing)


def test_a_block_of_which_a_member_is_missing_is_not_there(tmp_path):
    """Entries of CSA layers came back, those of HCA layers are damaged: computed again, from the block before."""
    hybrid = HybridModel(models.make(models.FLASH), tiny_cache(num_blocks=3))
    ids = models.tokens(300)
    backing = on_disk(hybrid.cache, tmp_path)
    for text in (ids, models.tokens(300, 9)):
        seq = hybrid.cache.admit(text.tolist())
        feed(hybrid, seq, text)
        hybrid.cache.release(seq)
    for mover in backing.movers:
        mover.settle()
    name = hybrid.cache.prefix.hashes(ids.numpy().astype("int32"))[1]
    last = len(kept_specs(hybrid.cache, NAME)) - 1
    path = tmp_path / str(last) / f"{name[0]:02x}" / f"{name.hex()}.kvx"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    seq = hybrid.cache.admit(ids.tolist())
    assert seq.length == 128
    hybrid.cache.check()
    got = feed(hybrid, seq, ids)
    torch.testing.assert_close(got, models.run(hybrid.model, ids).logits[128:], rtol=0, atol=5e-5)
    close(backing)


def tiny_cache(**options) -> HybridCache:
    schema = HybridSchema.of(models.make(models.FLASH).config, **F32)
    return HybridCache(schema, **{"num_blocks": 24, "max_seqs": 2, "max_seq_len": 512, "prefix": True, **options})


def test_each_member_has_tiers_of_its_own():
    cache = tiny_cache()
    kept = kept_specs(cache, NAME)
    kind = BlockKind.of(kept[0])
    with HostTier(kind, 1 << 20) as tier, pytest.raises(kvx.BadArgument, match="the cache has 5 members of groups"):
        CacheTiers(cache, [[tier]], kept=kept[:1])


# --- handovers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 129, 200, 256])
@models.one_thread()
def test_a_sequence_goes_on_in_another_cache(backend, tmp_path, at):
    ids, want = tokens(backend, 260), models.whole(models.FLASH, 260).logits
    first = hybrid_on(backend, models.FLASH)
    seq = first.cache.admit(ids.tolist())
    first.forward(seq, ids[:at])
    handover = read_sequence(first.cache, seq, model=NAME)
    first.forward(seq, ids[at:])  # what was read is a copy
    save(tmp_path / "handover", handover)
    second = hybrid_on(backend, models.FLASH, num_blocks=7, prefix=True, num_snapshots=1)
    other = second.cache.admit(tokens(backend, 150, 5).tolist())
    second.forward(other, tokens(backend, 150, 5))
    mine = second.cache.admit(ids.tolist())
    write_sequence(second.cache, mine, load(tmp_path / "handover"), model=NAME)
    second.cache.check()
    assert mine.length == at
    check(backend, second.forward(mine, ids[at:]), want[at:])
    found = second.cache.admit([*ids.tolist(), 1])
    # Others find the blocks, and a state that stands where a block ends; else they compute one again, 64 tokens back.
    assert (found.length, found.num_ahead) == {3: (0, 0), 129: (64, 1), 200: (64, 1), 256: (256, 0)}[at]
    second.cache.check()


_CHILD = """
import sys, torch
from kvx.handover import load
from kvx.handover.paged_cache import write_sequence
from tests.hybrid import models
from tests.hybrid.hybrids import hybrid_on
from tests.conftest import Backend
torch.set_num_threads(1)
ids = models.tokens(260)
hybrid = hybrid_on(Backend("torch", "cpu"), models.FLASH, prefix=True)
seq = hybrid.cache.admit(ids.tolist())
write_sequence(hybrid.cache, seq, load(sys.argv[1]), model="tiny flash")
torch.save(hybrid.forward(seq, ids[200:]), sys.argv[2])
"""


@models.one_thread()
def test_another_process_goes_on(tmp_path):
    ids = models.tokens(260)
    hybrid = HybridModel(models.make(models.FLASH), tiny_cache())
    seq = hybrid.cache.admit(ids.tolist())
    hybrid.forward(seq, ids[:200])
    save(tmp_path / "handover", read_sequence(hybrid.cache, seq, model=NAME))
    run = [sys.executable, "-c", _CHILD, str(tmp_path / "handover"), str(tmp_path / "logits.pt")]
    subprocess.run(run, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    got = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(got, models.whole(models.FLASH, 260).logits[200:], rtol=0, atol=5e-5)


def small_cache(**options) -> HybridCache:
    """Layers of two kinds; entries of 4 and 8 tokens in blocks of 8."""
    layers = (
        LayerSchema(4, overlap=True, window=8, head_dim=16, rope_dim=0, index_dim=32, **F32),
        LayerSchema(8, window=8, head_dim=16, rope_dim=0, **F32),
        LayerSchema(window=8, head_dim=16, rope_dim=0, **F32),
    )
    made = HybridSchema(layers, block_tokens=8)
    return HybridCache(made, **{"num_blocks": 8, "max_seqs": 2, "max_seq_len": 64, "prefix": True, "model": NAME, **options})


def run_to(cache: HybridCache, seq, length: int, seed: int = 0) -> None:
    n, g = length - seq.length, torch.Generator().manual_seed(seed)
    cache.prepare_forward([(seq, n)])
    for i, store in enumerate(cache.layers):
        handle = cache.acquire(i, backend="torch")
        handle.write_swa(torch.randn(n, 16, generator=g))
        if store.tail is not None:
            parts = 2 if i == 0 else 1
            index = Projected(*torch.randn(2, n, 64, generator=g)) if i == 0 else None
            handle.flush(Projected(*torch.randn(2, n, 16 * parts, generator=g)), index)


def handed_over(length: int = 21, **options) -> tuple[HybridCache, Handover]:
    cache = small_cache(**options)
    seq = cache.admit(TOKENS)
    run_to(cache, seq, length)
    return cache, read_sequence(cache, seq, model=NAME)


def test_what_was_never_written_is_not_handed_over():
    """Pages of an earlier request lie where no entry is yet: equal sequences have equal handovers."""
    used = small_cache()
    before = used.admit([7] * 30)
    run_to(used, before, 30, seed=5)
    used.release(before)
    used.prefix.clear()
    seq = used.admit(TOKENS)
    run_to(used, seq, 21)
    theirs, (_, ours) = read_sequence(used, seq, model=NAME), handed_over()
    assert [p.content for p in theirs.parts] == [p.content for p in ours.parts]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_join_again(ranks):
    _, handover = handed_over()
    assert [str(p.content) for p in join(handover.shard(ranks)).parts] == [str(p.content) for p in handover.parts]


def test_every_bit_is_under_the_digest():
    _, handover = handed_over()
    count = 0
    for part in handover.parts:
        for buffer in part.buffers:
            for at in range(0, buffer.numel(), 61):
                buffer[at] ^= 4
                with pytest.raises(kvx.Damaged, match="changed on the way"):
                    Handover(handover.tokens, handover.parts).check()
                buffer[at] ^= 4
                count += 1
    handover.check()
    assert count > 100


REFUSED = {
    "another model": (lambda h: (small_cache(), TOKENS, h, "other"), "model is 'tiny flash'"),
    "a state goes on where it stands": (lambda h: (small_cache(), TOKENS[:21], h, NAME), "stands after its 21 tokens"),
    "other tokens": (lambda h: (small_cache(), [9, *TOKENS[1:]], h, NAME), "token 0 is 9"),
    "other rows": (lambda h: (other_rows(), TOKENS, h, NAME), "column 128 there, window f32 row 1 x column 64 here"),
    "fewer layers": (lambda h: (fewer_layers(), TOKENS, h, NAME), "positions, window of layers 2, and this cache does not"),
    "a cache of K and V": (lambda h: (kv_cache(), TOKENS, h, NAME), "num_layers of the handover is 0"),
}


def other_rows() -> HybridCache:
    schema = small_cache().schema
    layers = tuple(replace(layer, window_rows="bf16") for layer in schema.layers)
    return HybridCache(HybridSchema(layers, block_tokens=8), num_blocks=8, max_seqs=2, max_seq_len=64, prefix=True)


def fewer_layers() -> HybridCache:
    return HybridCache(
        HybridSchema(small_cache().schema.layers[:2], block_tokens=8), num_blocks=8, max_seqs=2, max_seq_len=64, prefix=True
    )


def kv_cache() -> kvx.PagedCache:
    return kvx.PagedCache([kvx.LayerGroup("all", (0,), kvx.CacheSpec(8, 8, 1, 16))], max_seqs=2, max_seq_len=64)


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_fit_is_refused(why):
    _, handover = handed_over()
    made, words = REFUSED[why]
    cache, ids, given, model = made(handover)
    seq = cache.admit(ids)
    with pytest.raises(kvx.Incompatible, match=words):
        write_sequence(cache, seq, given, model=model)
    assert seq.length == 0
    assert all(a.num_used == 0 for a in cache.allocators)
    cache.check()


def test_what_is_no_whole_sequence_is_not_read():
    cache = small_cache(snapshot_every=0, replay="bounded", max_seqs=3)
    first = cache.admit(TOKENS)
    run_to(cache, first, 24)
    cache.commit(first)
    second = cache.admit(TOKENS)
    assert (second.length, second.num_ahead, second.is_exact) == (16, 3, False)
    with pytest.raises(kvx.Unsupported, match="replayed in part"):
        read_sequence(cache, second, model=NAME)
    lora = cache.admit(TOKENS, extra=b"lora")
    with pytest.raises(kvx.Unsupported, match="has an extra"):
        read_sequence(cache, lora, model=NAME)
    exact = small_cache(snapshot_every=0)
    first = exact.admit(TOKENS)
    run_to(exact, first, 28)
    exact.commit(first)
    second = exact.admit(TOKENS)
    assert (second.length, second.num_ahead) == (0, 3)
    with pytest.raises(kvx.BadArgument, match="whole only after 24"):
        read_sequence(exact, second, model=NAME)


@pytest.mark.parametrize("call", ["cut", "convert", "write"])
def test_calls_of_k_and_v_say_so(call):
    _, handover = handed_over()
    calls = {
        "cut": lambda: handover.cut(8),
        "convert": lambda: handover.convert(format="bf16"),
        "write": lambda: handover.write(0, [], kvx.CacheSpec(1, 8, 1, 16), []),
    }
    with pytest.raises(kvx.Unsupported, match=r"not (only )?K and V"):
        calls[call]()


@pytest.mark.parametrize("field", ["planes", "layout", "num_blocks", "model"])
def test_a_manifest_that_was_edited_is_refused(field):
    """Whatever digest was made anew in it: the content's seal is over every field."""
    from kvx.handover import from_manifest

    _, handover = handed_over()
    body = json.loads(handover.to_json())
    inner = json.loads(body["parts"][0]["manifest"])
    inner[field] = {"planes": "[]", "layout": "block | layer", "num_blocks": 2, "model": "other"}[field]
    body["parts"][0]["manifest"] = json.dumps(inner)
    with pytest.raises(kvx.KvxError):
        from_manifest(json.dumps(body))


def test_entries_of_another_number_of_blocks_are_refused():
    """Too few would leave another request's entries in the last block."""
    from kvx.handover.memory import new_buffers
    from kvx.handover.part import Part

    _, handover = handed_over()

    def with_blocks(part: Part, n: int) -> Part:
        if not part.block_tokens:
            return part
        spec = part.spec.replaced(num_blocks=n)
        return Part(spec, part.layers, 0, 0, new_buffers(spec), block_tokens=part.block_tokens).sealed(21)

    fewer = Handover(handover.tokens, tuple(with_blocks(p, 2) for p in handover.parts))
    cache = small_cache()
    seq = cache.admit(TOKENS)
    with pytest.raises(kvx.Incompatible, match="2 blocks of 8 tokens; here 21 tokens are 3 blocks of 8"):
        write_sequence(cache, seq, fewer, model=NAME)
    assert seq.length == 0
