"""States in tiers: a snapshot is found at its own position alone, and with it as much as every other part can go on from."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import kvx
from kvx.handover import Handover, find, join, keep, names, part_kind
from kvx.handover.paged_cache import read_sequence, write_sequence
from kvx.spec import StateSpec
from kvx.tiers import BlockKind, DiskTier, HostTier
from tests.handover.hybrid_cache import (
    BS,
    FULL,
    MODEL,
    SLIDING,
    STATES,
    WINDOW,
    begun,
    contents,
    hybrid,
    planes,
    run,
    states,
    tokens,
)

ROOT = Path(__file__).resolve().parents[2]
PARTS = [(FULL, 0), (SLIDING, WINDOW), (STATES, 0)]


def handed_over(n: int, ids: list[int] | None = None) -> Handover:
    return read_sequence(*begun(n, None, ids or ()), model=MODEL, block_size=BS)


def tiers_of(handover: Handover, folder: Path | None = None, *, is_told: bool = False) -> list[HostTier | DiskTier]:
    kinds = [part_kind(p.spec, p.layers, p.window) if is_told else BlockKind.of(p.spec) for p in handover.parts]
    if folder is None:
        return [HostTier(kind, 40 * kind.num_bytes) for kind in kinds]
    return [DiskTier(folder / str(n), kind, 1 << 22) for n, kind in enumerate(kinds)]


def refuse(call, words, kind=kvx.BadArgument):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("kind", ["host", "disk", "told"])
def test_the_deepest_position_at_which_every_part_goes_on(kind, tmp_path):
    """Told: kinds say which part they are of, as those of vLLM's connector."""
    tiers = tiers_of(handed_over(16), None if kind == "host" else tmp_path, is_told=kind == "told")
    assert find(tokens(), tiers, parts=PARTS) is None
    assert [keep(handed_over(n), tiers) for n in (16, 32)] == [2, 4]
    assert [t.num_blocks for t in tiers] == [4, 2, 2], "of the window one block of each, of the state one"
    found = find(tokens(), tiers, parts=PARTS)
    assert found is not None
    assert found.to_json() == handed_over(32).to_json()
    for asked in (31, 24, 16):  # K and V are there for 24 too, and no state
        found = find(tokens()[:asked], tiers, parts=PARTS)
        assert found is not None
        assert found.to_json() == handed_over(16).to_json()
    assert find(tokens()[:15], tiers, parts=PARTS) is None
    other = [*tokens()[:20], 3, *tokens()[21:]]
    found = find(other, tiers, parts=PARTS)
    assert found is not None
    assert found.num_tokens == 16
    # and what was found goes on
    cache = hybrid(states("vllm.sd"))
    seq = cache.admit(other)
    write_sequence(cache, seq, found, model=MODEL)
    run(cache, seq, 33)
    want = read_sequence(*begun(33, None, other), model=MODEL)
    assert contents(read_sequence(cache, seq, model=MODEL)) == contents(want)
    for t in tiers:
        t.close()


_CHILD = """
import sys
from pathlib import Path
from kvx.handover import find, save
from tests.handover.hybrid_cache import tokens
from tests.handover.test_states_in_tiers import PARTS, handed_over, tiers_of
made = find(tokens()[:39], tiers_of(handed_over(8), Path(sys.argv[1])), parts=PARTS)
save(sys.argv[2], made)
"""


def test_another_process_finds_it(tmp_path):
    tiers = tiers_of(handed_over(16), tmp_path / "tiers")
    for n in (8, 32):
        keep(handed_over(n), tiers)
    for t in tiers:
        t.close()
    command = [sys.executable, "-c", _CHILD, str(tmp_path / "tiers"), str(tmp_path / "found")]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    found = kvx.handover.load(tmp_path / "found", model=MODEL)
    assert found.to_json() == handed_over(32).to_json()


def test_against_what_must_be_there():
    """Random snapshots kept, random blocks dropped: never deeper than every part can go on, never less deep."""
    whole = {n: handed_over(n) for n in (8, 16, 24, 32)}
    keys = names(tokens(), BS, MODEL)
    for seed in range(60):
        rng = random.Random(seed)
        tiers = tiers_of(whole[8])
        for n in rng.sample(list(whole), rng.randint(1, 4)):
            keep(whole[n], tiers)
        for t in tiers:
            t.drop(rng.sample(keys, rng.choice([0, 0, 1]))).result()
        has = [t.has(keys).result() for t in tiers]
        asked = rng.randint(1, 40)
        want = 0
        for m in range(1, min(asked // BS, 4) + 1):
            begin = max(0, min(BS * m - 1, BS * m + 1 - WINDOW)) // BS
            if all(has[0][:m]) and all(has[1][begin:m]) and has[2][m - 1]:
                want = BS * m
        found = find(tokens()[:asked], tiers, parts=PARTS)
        assert (found.num_tokens if found else 0) == want, seed
        if found:
            assert contents(found) == contents(whole[want])
        for t in tiers:
            t.close()


def test_a_damaged_snapshot_is_not_found(tmp_path):
    tiers = tiers_of(handed_over(16), tmp_path)
    for n in (16, 32):
        keep(handed_over(n), tiers)
    name = names(tokens(), BS, MODEL)[3]
    path = tmp_path / "2" / f"{name[0]:02x}" / f"{name.hex()}.kvx"
    data = bytearray(path.read_bytes())
    data[-5] ^= 2
    path.write_bytes(data)
    found = find(tokens(), tiers, parts=PARTS)
    assert found is not None
    assert found.to_json() == handed_over(16).to_json()
    for t in tiers:
        t.close()


def test_what_is_refused():
    odd = handed_over(21)
    tiers = tiers_of(odd)
    refuse(
        lambda: keep(odd, tiers),
        r"stands after 21 tokens; in blocks of 8 a state is found where one ends.*after 16 tokens; nothing",
    )
    assert [t.num_blocks for t in tiers] == [0, 0, 0]
    even = handed_over(16)
    refuse(lambda: keep(even.convert(state_format="bf16"), tiers), "planes", kvx.Incompatible)
    refuse(lambda: keep(even.shard(2)[0], tiers), "num_kv_heads", kvx.Incompatible)
    refuse(lambda: keep(even, tiers, block_size=4), "block_size is 4; blocks of the parts have 8 tokens")
    even.parts[2].buffers[0][9] ^= 1
    refuse(lambda: keep(even, tiers), "part 2", kvx.Damaged)
    keep(handed_over(16), tiers)
    refuse(lambda: find(tokens(), tiers, parts=[*PARTS[:2], (STATES[1:], 0)]), "for 2 layers of the model")
    refuse(lambda: find(tokens(), tiers, parts=[*PARTS[:2], (STATES, 4)]), "window 4")
    for t in tiers:
        t.close()


def test_states_alone_and_ranks():
    parts = handed_over(16).parts[2:]
    alone = Handover(tokens()[:16], parts)
    [tier] = tiers_of(alone)
    refuse(lambda: keep(alone, [tier]), "say how many are between names: block_size=")
    refuse(lambda: find(tokens(), [tier], parts=PARTS[2:]), "say how many are between names: block_size=")
    assert keep(alone, [tier], block_size=8) == 2
    found = find(tokens(), [tier], parts=PARTS[2:], block_size=8)
    assert found is not None
    assert found.to_json() == alone.to_json()
    assert find(tokens(), [tier], parts=PARTS[2:], block_size=4) is None, "names of other blocks are others"
    tier.close()
    shards = handed_over(16).shard(4)
    of_ranks = [tiers_of(s) for s in shards]
    for s, tiers in zip(shards, of_ranks, strict=True):
        keep(s, tiers)
    found = join([find(tokens(), tiers, parts=PARTS) for tiers in of_ranks])
    assert contents(found) == contents(handed_over(16))


def test_what_a_cache_evicts_another_finds(tmp_path):
    """CacheTiers keeps snapshots of any layout; a cache of another layout brings them back and goes on."""
    from kvx.tiers import CacheTiers, kept_specs

    def backed(cache: kvx.PagedCache) -> CacheTiers:
        kept = kept_specs(cache, MODEL)
        assert isinstance(kept[2], StateSpec)
        return CacheTiers(cache, [[DiskTier(tmp_path / str(n), BlockKind.of(k), 1 << 22)] for n, k in enumerate(kept)], kept=kept)

    for row in ("vllm.sd", "sglang", "sglang.host", ""):
        cache = hybrid(states(row, of=planes()))
        backing = backed(cache)
        seq = cache.admit(tokens())
        assert seq.length == (0 if row == "vllm.sd" else 32)
        run(cache, seq, 40)
        assert contents(read_sequence(cache, seq, model=MODEL)) == contents(read_sequence(*begun(40), model=MODEL))
        cache.release(seq)
        backing.save()
        backing.close()
        for mover in backing.movers:
            for tier in mover.tiers:
                tier.close()


def test_what_is_no_part_no_tier_and_no_handover():
    handover = handed_over(16)
    tiers = tiers_of(handover)
    for wrong in (None, [FULL, SLIDING, STATES], [(1, 0)] * 3, [(FULL,)] * 3, [(FULL, -1)] * 3, [(FULL, 0, 1, 2)] * 3):
        refuse(
            lambda wrong=wrong: find(tokens(), tiers, parts=wrong),
            r"find\(\): parts has .*; of each tier it has \(layers, window\)",
        )
    refuse(lambda: find(tokens(), None, parts=PARTS), r"find\(\): tiers is None")
    refuse(lambda: keep(None, tiers), r"keep\(\): handover is None")


def test_converting_states_alone():
    alone = Handover(handed_over(16).tokens, handed_over(16).parts[-1:])
    for wrong in ({"format": "bf16"}, {"block_size": 8}):
        refuse(lambda wrong=wrong: alone.convert(**wrong), "the handover has states and no K and V")
    assert alone.convert(state_format="bf16").parts[0].spec.planes[0].format.name == "bf16"
    for blocks in (None, 0, []):
        refuse(lambda blocks=blocks: alone.write_planes(0, [], alone.parts[0].spec, blocks), "blocks are")
    refuse(lambda: alone.write_planes(0, [], alone.parts[0].spec, [0]), "buffers are empty")
