"""PagedCache: random calls against lists of tokens, with real K and V; check() after every call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import kvx
from kvx.cache import Sequence
from kvx.cache.kinds import Chunked, GroupKind, State
from kvx.spec import StateSpec, state_plane

BS = 4


def spec(num_blocks: int, **options) -> kvx.CacheSpec:
    return kvx.CacheSpec(num_blocks, BS, **{"num_kv_heads": 1, "head_dim": 2, "format": "f32", **options})


def make(
    num_blocks: int = 32, *, window: int = 0, chunk: int = 0, kind: GroupKind | None = None, states: int = 0,
    snapshot_every: int = 1, max_seqs: int = 6, max_seq_len: int = 60, **options,
) -> kvx.PagedCache:  # fmt: skip
    groups = [kvx.LayerGroup("full", (0, 2), spec(num_blocks))]
    if window:
        groups.append(kvx.LayerGroup("sliding", (1,), spec(num_blocks), window=window))
    if chunk:
        groups.append(kvx.LayerGroup("chunked", (3,), spec(num_blocks), kind=Chunked(chunk)))
    if kind is not None:
        groups.append(kvx.LayerGroup("other", (5,), spec(num_blocks), kind=kind))
    if states:  # layer 2 has K and V, and a state beside them
        planes = (state_plane("conv", "f32", channel=2, tap=3), state_plane("delta", "f32", head=1, row=2, column=2))
        groups.append(kvx.LayerGroup("states", (2, 4), StateSpec(states, planes), kind=State(snapshot_every)))
    return kvx.PagedCache(groups, max_seqs=max_seqs, max_seq_len=max_seq_len, **options)


def content(tokens: list[int], start: int, end: int) -> list[float]:
    """What is written at each position: it hangs on every token up to there, as K and V do."""
    values, h = [], 7
    for i, t in enumerate(tokens[:end]):
        h = (h * 31 + t + 1) % 65521
        if i >= start:
            values.append(float(h))
    return values


def write_step(cache: kvx.PagedCache, seq: Sequence, n: int, tokens: list[int]) -> None:
    batch = cache.plan([(seq, n)])
    x = torch.tensor(content(tokens, seq.length - n, seq.length))
    assert batch.tokens.tolist() == tokens[seq.length - n : seq.length]
    assert batch.positions.tolist() == list(range(seq.length - n, seq.length))
    for i in kv_layers(cache):
        layer = cache.layer(i)
        k = (x + i)[:, None, None].expand(n, 1, layer.spec.head_dim)
        kvx.write(layer.cache, k, -k, slot_mapping=batch.slot_mapping(layer.group), spec=layer.spec, **layer.scales)

    for g, i in state_layers(cache):  # as a recurrence does: what was there, and the step's tokens
        block = int(batch.state_blocks(g)[0])
        assert_state(cache, g, i, block, tokens, seq.length - n)
        for plane in cache.planes(i, g).planes.values():
            plane[block] = x[-1] + i


def kv_layers(cache: kvx.PagedCache) -> list[int]:
    return [i for g in cache.groups if isinstance(g.spec, kvx.CacheSpec) for i in g.layers]


def state_layers(cache: kvx.PagedCache) -> list[tuple[int, int]]:
    return [(n, i) for n, g in enumerate(cache.groups) if isinstance(g.spec, StateSpec) for i in g.layers]


def assert_state(cache: kvx.PagedCache, group: int, layer: int, block: int, tokens: list[int], length: int) -> None:
    """A state is that after `length` tokens; before the first it is zeros."""
    want = content(tokens, length - 1, length)[-1] + layer if length else 0.0
    for name, plane in cache.planes(layer, group).planes.items():
        assert (plane[block] == want).all(), f"{name} of layer {layer} is {plane[block]}; after {length} tokens it is {want}"


def first_seen(kind: GroupKind, length: int) -> int:
    """The first token that the next one sees, counted here and not by the kind; one that a test adds says it."""
    if hasattr(kind, "first_token"):
        return kind.first_token(length)
    if isinstance(kind, Chunked):
        return length // kind.chunk * kind.chunk
    return max(0, length - kind.window + 1) if kind.window else 0


def assert_content(cache: kvx.PagedCache, seq: Sequence, tokens: list[int]) -> None:
    """Every position that the next token can see holds what was written for it."""
    want = torch.tensor(content(tokens, 0, seq.length))
    for g, i in state_layers(cache):
        if seq.length:
            assert_state(cache, g, i, int(cache.blocks(seq, g)[0]), tokens, seq.length)
    for i in kv_layers(cache):
        layer = cache.layer(i)
        blocks = torch.from_numpy(cache.blocks(seq, layer.group)).long()
        seen = torch.arange(first_seen(cache.kinds[layer.group], seq.length), seq.length)
        k, v = (t[blocks[seen // BS], seen % BS, 0, 0] for t in layer.cache)
        torch.testing.assert_close(k, want[seen] + i, rtol=0, atol=0)
        torch.testing.assert_close(v, -want[seen] - i, rtol=0, atol=0)


def snapshot(cache: kvx.PagedCache) -> tuple:
    seqs = [(s.id, s.length, s.num_tokens, s.limit, s.num_stored, list(s.starts), list(s.hashes)) for s in cache.sequences]
    counts = [(a.counts().tolist(), a.num_free, a.num_idle) for a in cache.allocators]
    blocks = [cache.blocks(s, g).tolist() for s in cache.sequences for g in range(len(cache.groups))]
    return seqs, counts, blocks, cache.prefix.num_blocks if cache.prefix else 0


@dataclass
class Model:
    """Each sequence is the list of its tokens."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    seqs: dict[int, Sequence] = field(default_factory=dict)

    def add(self, seq: Sequence, tokens: list[int]) -> None:
        self.tokens[seq.id], self.seqs[seq.id] = tokens, seq


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "plain"])
@pytest.mark.parametrize("window", [0, 1, 6])
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_match_the_model(seed, window, prefix):
    rng = random.Random(seed)
    random_calls(make(rng.choice([6, 14, 40]), window=window, prefix=prefix), rng)


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("others", [{}, {"window": 6}, {"chunk": 7}, {"window": 1, "chunk": 12}], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_random_calls_with_states_match_the_model(seed, others, every):
    """Six states are one for each sequence: snapshots live only where none is needed."""
    rng = random.Random(seed)
    cache = make(
        rng.choice([6, 14, 40]), states=rng.choice([6, 7, 20]), snapshot_every=every, prefix=seed > 0 or every > 0, **others
    )
    random_calls(cache, rng)


def random_calls(cache: kvx.PagedCache, rng: random.Random, count: int = 150) -> None:
    """So many of them, each followed by check() and a look at every sequence's K and V."""
    m, prefix = Model(), cache.prefix is not None
    bases = [[rng.randrange(50) for _ in range(40)] for _ in range(2)]
    outs = 0
    for _ in range(count):
        seq = rng.choice(list(m.seqs.values())) if m.seqs else None
        op = (
            rng.choice(["admit", "extend", "extend", "one", "one", "tokens", "fork", "truncate", "release", "pin"])
            if seq
            else "admit"
        )
        before, tokens = snapshot(cache), m.tokens[seq.id] if seq else []
        try:
            if op == "admit":
                new = rng.choice(bases)[: rng.randint(0, 40)] + [rng.randrange(50) for _ in range(rng.randint(0, 6))]
                seq = cache.admit(new)
                assert seq.length == seq.num_cached <= max(0, len(new) - 1)
                assert seq.length % BS == 0
                m.add(seq, new)
                before = None
            elif op == "extend" and len(tokens) > seq.length:
                n = rng.randint(1, len(tokens) - seq.length)
                room = cache.room(seq)
                try:
                    cache.extend(seq, n)
                    assert n <= room
                except kvx.OutOfBlocks:
                    assert n > room
                    raise
                write_step(cache, seq, n, tokens)
                if rng.random() < 0.7:
                    cache.commit(seq)
                before = None
            elif op in ("one", "tokens") and len(tokens) == seq.length and len(tokens) < 52:
                new = [rng.randrange(50) for _ in range(1 if op == "one" else rng.randint(1, 8))]
                cache.extend(seq, new if rng.random() < 0.5 else np.array(new))
                tokens += new
                write_step(cache, seq, len(new), tokens)
                if rng.random() < 0.7:
                    cache.commit(seq)
                before = None
            elif op == "fork":
                m.add(cache.fork(seq), list(tokens))
                before = None
            elif op == "truncate":
                length = rng.randint(max(0, seq.length - 6), seq.length)
                has_left = any(length and g.first_block(length) < f for g, f in zip(cache._tables, seq.starts, strict=True))
                if has_left or (0 < length < seq.length and state_layers(cache)):
                    with pytest.raises(kvx.BadArgument, match=r"were freed|cannot go back"):
                        cache.truncate(seq, length)
                else:
                    cache.truncate(seq, length)
                    del tokens[length:]
                    before = None
            elif op == "release":
                cache.release(seq)
                del m.seqs[seq.id], m.tokens[seq.id]
                before = None
            elif op == "pin" and prefix and seq.hashes and cache.prefix.pin(seq.hashes[:1]):
                cache.check()
                cache.prefix.unpin(seq.hashes[:1])
        except kvx.OutOfBlocks:
            outs += 1
            victim = rng.choice([*m.seqs])
            assert snapshot(cache) == before
            cache.release(m.seqs.pop(victim))
            del m.tokens[victim]
            before = None
        if before is not None:
            assert snapshot(cache) == before
        cache.check()
        for s in m.seqs.values():
            assert s.tokens.tolist() == m.tokens[s.id]
            assert_content(cache, s, m.tokens[s.id])
    for s in m.seqs.values():
        cache.release(s)
    cache.check()
    assert all(a.num_used == 0 for a in cache.allocators)
    assert all(prefix or a.num_idle == 0 for a in cache.allocators)


def admitted(cache: kvx.PagedCache, tokens: list[int]) -> Sequence:
    seq = cache.admit(tokens)
    n = len(tokens) - seq.length
    cache.extend(seq, n)
    write_step(cache, seq, n, tokens)
    cache.commit(seq)
    return seq


@pytest.mark.parametrize(("n", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 16)])
def test_at_least_one_token_is_left_to_compute(n, hit):
    cache = make()
    tokens = list(range(20))
    cache.release(admitted(cache, tokens))
    seq = cache.admit(tokens[:n])
    assert seq.length == seq.num_cached == hit
    other = cache.admit(tokens[:n], extra=b"lora")
    assert other.length == 0
    assert cache.stats().prefix.tokens_hit == hit


def test_tokens_of_any_kind():
    cache = make()
    for tokens in (
        [5, 6],
        (5, 6),
        np.array([5, 6]),
        np.array([5, 6], np.uint8),
        torch.tensor([5, 6]),
        torch.tensor([5, 6], dtype=torch.int32),
        np.array([5, 0, 6, 0], np.int32)[::2],
    ):
        seq = cache.admit(tokens)
        cache.extend(seq, 2)
        cache.extend(seq, tokens)
        assert seq.tokens.tolist() == [5, 6, 5, 6]
        cache.release(seq)
    cache.check()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1.5], "int32 ids"),
        ([2**31], "int32 ids"),
        (np.array([2**31]), r"tokens\[0\] is 2147483648"),
        (np.zeros((2, 2), int), "one row"),
        (np.array([0.5]), "float64"),
        ([3, 2**31 - 1, -1], r"tokens\[2\] is -1; ids are 0 to 2147483647"),
        (np.array([-(2**40), 3]), r"tokens\[0\] is -1099511627776;"),
        (torch.tensor([2, -7, -8], dtype=torch.int32), r"tokens\[1\] is -7;"),
    ],
    ids=["float", "large", "large-array", "matrix", "float-array", "negative", "negative-array", "negative-tensor"],
)
def test_bad_tokens_are_refused(tokens, words):
    cache = make()
    seq = cache.admit([1, 2])
    cache.extend(seq, 2)
    for call in (cache.admit, lambda t: cache.extend(seq, t), lambda t: cache.append(seq, t)):
        before = snapshot(cache)
        with pytest.raises(kvx.BadArgument, match=words):
            call(tokens)
        assert snapshot(cache) == before
    cache.check()


def test_every_id_is_a_token():
    """The first and the last, and those whose bytes have their highest bits set."""
    cache = make()
    tokens = [0, 2**31 - 1, 0x7F, 0x80, 0xFF, 0x80FF, 0x808080, 0x7FFFFF80]
    for given in (tokens, np.array(tokens), np.array(tokens, np.int32), np.array(tokens, np.uint64)):
        assert cache.admit(given).tokens.tolist() == tokens


def test_misuse_is_refused_and_changes_nothing():
    cache, other = make(max_seqs=2), make()
    seq, foreign = admitted(cache, list(range(10))), other.admit([1])
    gone = cache.admit([1, 2])
    cache.release(gone)
    before = snapshot(cache)
    calls = [
        lambda s: cache.extend(s, 1),
        lambda s: cache.extend(s, [1]),
        lambda s: cache.append(s, [1]),
        lambda s: cache.truncate(s, 0),
        lambda s: cache.plan([(s, 1)]),
        cache.commit,
        cache.fork,
        cache.release,
        cache.room,
        cache.blocks,
    ]
    for call in calls:
        with pytest.raises(kvx.BadArgument, match="was released"):
            call(gone)
        with pytest.raises(kvx.BadArgument, match="is of another cache"):
            call(foreign)
    for call, words in (
        (lambda: cache.admit(range(61)), "61 tokens; max_seq_len is 60"),
        (lambda: cache.extend(seq, [1] * 51), "would have 61 tokens; max_seq_len is 60"),
        (lambda: cache.extend(seq, 1), "10 are known"),
        (lambda: cache.extend(seq, -1), "n is -1"),
        (lambda: cache.truncate(seq, 11), "length is 11; the sequence has 10"),
        (lambda: cache.plan([(seq, 11)]), "11 queries"),
        (lambda: cache.plan([(seq, 0)]), "0 queries"),
        (lambda: cache.plan([(seq, 1)], pad_seqs=3), "3 sequences and 1 tokens"),
        (lambda: cache.plan([(seq, 1)], pad_tokens=61), "61 tokens"),
        (lambda: cache.layer(3), r"no group has K and V of layer 3; they have \[0, 2\]"),
    ):
        with pytest.raises(kvx.BadArgument, match=words):
            call()
        assert snapshot(cache) == before
    cache.admit([1])
    with pytest.raises(kvx.OutOfBlocks, match="all 2 sequences are in use"):
        cache.admit([1])
    with pytest.raises(kvx.OutOfBlocks, match="all 2 sequences are in use"):
        cache.fork(seq)
    cache.check()


def test_a_sequence_ends_at_max_seq_len_inside_a_block():
    cache = make(max_seq_len=6)
    seq = cache.admit([1] * 5)
    cache.extend(seq, 5)
    cache.extend(seq, [2])
    with pytest.raises(kvx.BadArgument, match="max_seq_len is 6"):
        cache.extend(seq, [3])
    cache.check()


def test_known_tokens_without_room_come_first():
    cache = make()
    seq = cache.admit([1, 2, 3])
    with pytest.raises(kvx.BadArgument, match="3 known tokens have no room yet"):
        cache.extend(seq, [4])
    cache.append(seq, [4])
    cache.extend(seq, 4)
    assert seq.tokens.tolist() == [1, 2, 3, 4]


def test_without_a_prefix_cache_tokens_need_no_names():
    cache = make(prefix=False)
    seq = cache.admit([])
    cache.extend(seq, 9)
    assert seq.length == seq.num_tokens == 9
    cache.commit(seq)
    cache.check()


def test_out_of_blocks_in_one_group_leaves_the_others():
    groups = [kvx.LayerGroup("many", (0,), spec(20)), kvx.LayerGroup("few", (1,), spec(3))]
    cache = kvx.PagedCache(groups, max_seqs=2, max_seq_len=40)
    seq = admitted(cache, list(range(6)))
    before = snapshot(cache)
    assert cache.room(seq) == 6
    assert cache.room() == 4
    with pytest.raises(kvx.OutOfBlocks, match=r"extend.*need 2 blocks, 1 can be had in group 'few'") as error:
        cache.extend(seq, list(range(7)))
    assert (error.value.needed, error.value.free, error.value.idle, error.value.group) == (2, 1, 0, "few")
    assert snapshot(cache) == before
    cache.extend(seq, list(range(6)))
    cache.check()


@pytest.mark.parametrize("format", ["f32", "bf16", "int8_per_token_head", "fp8_e4m3_per_block_head", "int4_per_token_head_inline"])
def test_forks_diverge_in_every_format(format, generator):
    """fork, divergent extends, truncate and copy-on-write: each sequence gathers what was written for it, to the bit."""
    cache = kvx.PagedCache(
        [kvx.LayerGroup("all", (0, 1), spec(40, num_kv_heads=2, head_dim=32, format=format))], max_seqs=6, max_seq_len=40
    )
    lone = kvx.allocate(cache.groups[0].spec)  # blocks 0, 1, 2 ... hold each sequence alone
    written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def step(seq, n):
        batch = cache.plan([(seq, n)])
        k, v = (torch.randn(n, 2, 32, generator=generator) for _ in "kv")
        for i in (0, 1):
            layer = cache.layer(i)
            kvx.write(layer.cache, k, v, slot_mapping=batch.slot_mapping(), spec=layer.spec, **layer.scales)
        old = written.get(seq.id, (k[:0], v[:0]))
        written[seq.id] = tuple(torch.cat((o[: seq.length - n], x)) for o, x in zip(old, (k, v), strict=True))

    def same(seq):
        n = seq.length
        kvx.write(lone.cache, *written[seq.id], slot_mapping=torch.arange(n), spec=cache.groups[0].spec, **lone.scales())
        table = kvx.PackedTable(torch.arange(-(-n // BS))[None], torch.tensor([n]))
        want = kvx.gather(lone.cache, table, spec=cache.groups[0].spec, dtype=torch.float32, **lone.scales())
        batch = cache.plan([(seq, 1)])
        for i in (0, 1):
            layer = cache.layer(i)
            got = kvx.gather(layer.cache, batch.table(), spec=layer.spec, dtype=torch.float32, **layer.scales)
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=0, atol=0)

    first = cache.admit(list(range(10)))
    cache.extend(first, 10)
    step(first, 10)
    cache.commit(first)
    forks = [cache.fork(first) for _ in range(3)]
    for f in forks:
        written[f.id] = written[first.id]
    for n, seq in enumerate((first, *forks), 1):
        cache.extend(seq, [100 + n] * n)
        step(seq, n)
        cache.commit(seq)
        cache.check()
    cache.truncate(forks[0], 7)  # into a block that others read
    written[forks[0].id] = tuple(x[:7] for x in written[forks[0].id])
    cache.extend(forks[0], [55])
    step(forks[0], 1)
    cache.truncate(first, 6)
    written[first.id] = tuple(x[:6] for x in written[first.id])
    cache.extend(first, [66, 67])
    step(first, 2)
    for seq in (first, *forks):
        same(seq)
    cache.release(forks[2])
    for seq in (first, *forks[:2]):
        same(seq)
    cache.check()


def test_a_cached_block_is_not_written_to():
    """Truncated into a block that has a name, a sequence writes elsewhere: the name still finds what it says."""
    cache = make()
    tokens = list(range(12))
    seq = admitted(cache, tokens)
    cache.truncate(seq, 6)
    cache.extend(seq, [90, 91])
    write_step(cache, seq, 2, [*tokens[:6], 90, 91])
    cache.commit(seq)
    again = cache.admit([*tokens, 1])
    assert again.length == 12
    assert_content(cache, again, tokens)
    assert_content(cache, seq, [*tokens[:6], 90, 91])
    cache.check()


def test_window_gives_blocks_back_and_attention_does_not_notice(generator):
    window, steps = 7, [9, 5, 1, 1, 1, 8, 1]
    geometry = {"num_kv_heads": 2, "head_dim": 16}
    groups = [
        kvx.LayerGroup("full", (0,), spec(16, **geometry)),
        kvx.LayerGroup("sliding", (1,), spec(16, **geometry), window=window),
    ]
    cache = kvx.PagedCache(groups, max_seqs=2, max_seq_len=40, prefix=False)
    seq = cache.admit([])
    most = 0
    for n in steps:
        cache.extend(seq, n)
        batch = cache.plan([(seq, n)])
        k, v = (torch.randn(n, 2, 16, generator=generator) for _ in "kv")
        q = torch.randn(n, 4, 16, generator=generator)
        outs = []
        for i in (0, 1):
            layer = cache.layer(i)
            kvx.write(layer.cache, k, v, slot_mapping=batch.slot_mapping(layer.group), spec=layer.spec)
            table = batch.table(layer.group)
            outs.append(kvx.attention_varlen(q, layer.cache, table, cu_seqlens=batch.cu_seqlens, spec=layer.spec, window=window))
            if n == 1:
                out, _ = kvx.attention_decode(q, layer.cache, table, spec=layer.spec, window=window)
                torch.testing.assert_close(out, outs[-1][0])
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        most = max(most, cache.allocators[1].num_used)
        cache.check()
    held = cache.blocks(seq, 1)
    assert (held[:4] == -1).all()
    assert cache.allocators[0].num_used == 7
    assert cache.allocators[1].num_used == 3
    with pytest.raises(kvx.BadArgument, match="were freed"):
        cache.truncate(seq, 16)
    cache.truncate(seq, 0)
    assert cache.allocators[1].num_used == 0
    cache.check()


def test_a_window_group_hits_with_its_last_blocks_only():
    cache = make(num_blocks=12, window=5)
    tokens = list(range(17))
    cache.release(admitted(cache, tokens))
    sliding = cache.allocators[1]
    taken = sliding.allocate(sliding.num_available - 2)  # only two of its four stored blocks are left
    seq = cache.admit([*tokens, 1])
    assert seq.length == 8  # tail first: blocks 0 and 1 are left
    cache.release(seq)
    sliding.release(taken)
    again = admitted(cache, [*tokens, 2])
    assert_content(cache, again, [*tokens, 2])


def test_latent_group(generator):
    latent = spec(16, head_dim=32, v_head_dim=8, layout="block token (head kv dim)")
    cache = kvx.PagedCache([kvx.LayerGroup("mla", (0,), latent, is_latent=True)], max_seqs=2, max_seq_len=40)
    seq = cache.admit(list(range(11)))
    cache.extend(seq, 11)
    batch, layer = cache.plan([(seq, 11)]), cache.layer(0)
    k, v = torch.randn(11, 1, 32, generator=generator), torch.randn(11, 1, 8, generator=generator)
    kvx.write(layer.cache, k, v, slot_mapping=batch.slot_mapping(), spec=layer.spec, **layer.scales)
    fork = cache.fork(seq)
    cache.extend(fork, [5])
    batch = cache.plan([(fork, 1)])
    kvx.write(layer.cache, k[:1], v[:1], slot_mapping=batch.slot_mapping(), spec=layer.spec, **layer.scales)
    q = torch.randn(1, 4, 40, generator=generator)
    out, _ = kvx.attention_mla(q, layer.cache, batch.table(), spec=layer.spec, scale=0.2)
    keys, values = torch.cat((k, k[:1]))[:, 0], torch.cat((v, v[:1]))[:, 0]
    weights = (q[0] @ torch.cat((keys, values), 1).T * 0.2).softmax(-1)
    torch.testing.assert_close(out[0], weights @ keys)
    assert layer.is_latent
    with pytest.raises(kvx.BadArgument, match="a latent has one"):
        kvx.LayerGroup("mla", (0,), spec(4, num_kv_heads=2), is_latent=True)


def test_batches_mix_and_pad():
    cache = make(window=6)
    a, b = admitted(cache, list(range(9))), admitted(cache, [7, 8, 9])
    batch = cache.plan([(a, 4), (b, 1)], pad_seqs=4, pad_tokens=8)
    assert (batch.num_seqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (4, 8, 4, 9)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert batch.positions.tolist() == [5, 6, 7, 8, 2, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 5, 5]
    assert batch.seq_lens.tolist() == [9, 3, 0, 0]
    assert batch.last.tolist() == [3, 4, 0, 0]
    for group in (0, 1):
        table = batch.table(group)
        assert table.block_table.shape == (4, 15)
        assert table.block_table[0, :3].tolist() == cache.blocks(a, group).tolist()
        want = kvx.slot_mapping(table.block_table, batch.positions[:5], torch.tensor([0, 0, 0, 0, 1]), BS)
        assert batch.slot_mapping(group).tolist() == [*want.tolist(), -1, -1, -1]
    empty = cache.plan([], pad_seqs=2, pad_tokens=2)
    assert empty.seq_lens.tolist() == [0, 0]
    assert empty.slot_mapping(0).tolist() == [-1, -1]
    assert empty.cu_seqlens.tolist() == [0, 0, 0]


def addresses(batch) -> list[int]:
    tensors = [batch.tokens, batch.positions, batch.cu_seqlens, batch.seq_lens, batch.last]
    for group in (0, 1):
        tensors += [batch.slot_mapping(group), batch.table(group).block_table]
    return [t.data_ptr() for t in tensors]


def test_plans_stay_in_place_and_allocate_nothing():
    cache = make(num_blocks=64, window=6)
    seqs = [admitted(cache, list(range(i, i + 9))) for i in range(4)]
    first = addresses(cache.plan([(seqs[0], 1)]))
    for work in ([(s, 1) for s in seqs], [(seqs[0], 9), (seqs[1], 1)], [(seqs[2], 3)]):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            batch = cache.plan(work, pad_seqs=4)
        assert addresses(batch) == first
        assert not [e for e in profile.events() if e.cpu_memory_usage > 0], "plan() allocated"
    layer = cache.layer(0)
    assert cache.layer(0) is layer
    assert [t.data_ptr() for t in layer.tensors] == [t.data_ptr() for t in cache.layer(0).tensors]


def test_groups_that_cannot_be_one_cache():
    one = kvx.LayerGroup("a", (0,), spec(4))
    for groups, words in (
        ([], "groups is empty"),
        ([one, kvx.LayerGroup("b", (0, 1), spec(4))], r"layers \[0\] are in two groups"),
        ([one, kvx.LayerGroup("b", (1,), kvx.CacheSpec(4, 8, 1, 2))], r"block_size \[4, 8\]"),
        ([one, kvx.LayerGroup("a", (1,), spec(4))], "two groups have one name"),
    ):
        with pytest.raises(kvx.BadArgument, match=words):
            kvx.PagedCache(groups, max_seqs=1, max_seq_len=8)
    for options, words in (
        ({"max_seqs": 0, "max_seq_len": 8}, "max_seqs is 0"),
        ({"max_seqs": 1, "max_seq_len": 0}, "max_seq_len is 0"),
    ):
        with pytest.raises(kvx.BadArgument, match=words):
            kvx.PagedCache([one], **options)
    for layers, more, words in (((), {}, "each once"), ((1, 1), {}, "each once"), ((0,), {"window": -1}, "window is -1")):
        with pytest.raises(kvx.BadArgument, match=words):
            kvx.LayerGroup("x", layers, spec(4), **more)
    with pytest.raises(kvx.BadArgument, match="num_layers is 2"):
        kvx.LayerGroup("x", (0, 1), spec(4, num_layers=2, layout="layer kv | block token head dim"))


def test_memory_and_stats():
    cache = make(num_blocks=8, window=5)
    assert cache.memory_bytes == 3 * 2 * 8 * BS * 2 * 4
    seq = admitted(cache, list(range(5)))
    stats = cache.stats()
    assert (stats.num_seqs, stats.num_tokens, [g.num_used for g in stats.groups]) == (1, 5, [2, 2])
    assert stats.used_bytes == 2 * (2 * 64) + 2 * 64
    cache.release(seq)
    assert cache.stats().used_bytes == 0


def test_check_finds_what_is_wrong():
    cache = make()
    seq = admitted(cache, list(range(9)))
    cache._tables[0].table[seq.row, 0] = 30
    with pytest.raises(kvx.InternalError, match="owners"):
        cache.check()


def test_an_interrupt_while_a_backing_reads_leaks_no_blocks():
    """Ctrl-C in the second group's eviction: the first group's new blocks are given back."""

    class Interrupted:
        def offer(self, group, hashes, blocks):
            if group == 1:
                raise KeyboardInterrupt

        def find(self, group, hashes):
            return [False] * len(hashes)

        def load(self, group, hashes, blocks):
            return 0

    spec = kvx.CacheSpec(num_blocks=4, block_size=4, num_kv_heads=1, head_dim=8, layout="block kv token head dim", format="f32")
    groups = [kvx.LayerGroup("a", (0,), spec), kvx.LayerGroup("b", (1,), spec)]
    cache = kvx.PagedCache(groups, max_seqs=4, max_seq_len=64)
    first = cache.admit(list(range(16)))
    cache.extend(first, 16)
    cache.commit(first)
    cache.release(first)
    cache.attach(Interrupted())
    seq = cache.admit(list(range(100, 108)))
    with pytest.raises(KeyboardInterrupt):
        cache.extend(seq, 8)
    cache.check()
    cache.release(seq)
    cache.prefix.clear()
    assert [a.num_free for a in cache.allocators] == [4, 4]
