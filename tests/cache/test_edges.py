"""What lies beside the usual calls of a PagedCache: wrong kinds and sizes, Ctrl-C while blocks come back, unfit handovers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvx
from kvx.cache import admitted, block_table, blocks, group_table, guard, paged, prefix, recall, resuming, sequence, state_table
from kvx.cache.groups import Member
from kvx.cache.kinds import Entries, Full, State
from kvx.handover import Handover, from_manifest, join
from kvx.handover.memory import new_buffers
from kvx.handover.paged_cache import read_sequence, write_sequence
from kvx.handover.part import Part
from kvx.layout.state_rows import state_row
from kvx.spec import StateSpec, spec_from_json, state_plane, to_json
from tests.cache.test_paged import BS, assert_content, make, spec, write_step
from tests.interrupts import signalled_at_every_point

STATES = StateSpec(4, (state_plane("conv", "f32", channel=8, tap=2),))
TOKENS = list(range(24))


# --- groups that are none --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, -4, 2.5, True, "8"])
def test_sizes_of_blocks(block_size):
    for group in (kvx.LayerGroup("all", (0,), spec(4)), kvx.LayerGroup("states", (0,), STATES, kind=State())):
        if block_size == 8 and group.spec is STATES:
            continue
        with pytest.raises(kvx.BadArgument, match=r"PagedCache\(\): block_size is"):
            kvx.PagedCache([group], max_seqs=2, max_seq_len=32, block_size=block_size)


@pytest.mark.parametrize(
    ("kind", "of", "says"),
    [
        (State(), spec(4), "it must be a StateSpec"),
        (Entries((4,)), spec(4), "it must be a StateSpec"),
        (Full(), STATES, r"State\(\) takes those"),
    ],
)
def test_a_kind_takes_the_specs_of_its_blocks(kind, of, says):
    with pytest.raises(kvx.BadArgument, match=says):
        kvx.LayerGroup("all", (0,), of, kind=kind)


def test_other_k_and_v_are_a_group_of_their_own():
    with pytest.raises(kvx.BadArgument, match="a group of their own"):
        kvx.LayerGroup("all", (0,), spec(4), others=(Member((1,), spec(4, head_dim=4)),))


# --- Ctrl-C while blocks come back -----------------------------------------------------------------------------------------


class Memory:
    """A backing in plain tensors."""

    def __init__(self, cache: kvx.PagedCache) -> None:
        self.cache, self.held = cache, {}

    def tensors(self, group: int) -> list[torch.Tensor]:
        layers = self.cache._tables[group].layers.values()
        return [t for layer in layers for t in (layer.cache if hasattr(layer, "cache") else layer.planes.values())]

    def offer(self, group, hashes, ids):
        for h, b in zip(hashes, ids.tolist(), strict=True):
            self.held[group, h] = [t[b].clone() for t in self.tensors(group)]

    def find(self, group, hashes):
        return [(group, h) in self.held for h in hashes]

    def load(self, group, hashes, ids):
        for h, b in zip(hashes, ids.tolist(), strict=True):
            for t, x in zip(self.tensors(group), self.held[group, h], strict=True):
                t[b] = x
        return len(hashes)


def with_blocks_to_bring_back(**options) -> tuple[kvx.PagedCache, kvx.cache.Sequence]:
    """A sequence of which two blocks are in the cache, and three more in its backing."""
    cache = make(16, **options)
    backing = Memory(cache)
    cache.attach(backing)
    seq = cache.admit(TOKENS)
    for _ in range(5):
        cache.extend(seq, BS)
        write_step(cache, seq, BS, TOKENS)
        cache.commit(seq)
    for group in range(len(cache.groups)):
        backing.offer(group, *cache.prefix.named(group))
    cache.release(seq)
    cache.prefix.pin(cache.prefix.hashes(np.array(TOKENS, np.int32))[:2])
    other = cache.admit(list(range(100, 155)))
    cache.extend(other, 55)
    cache.release(other)
    return cache, cache.admit(TOKENS, is_brought_back=False)


@pytest.mark.parametrize("options", [{"window": 6}, {"chunk": 8}, {"window": 6, "states": 9}], ids=str)
def test_ctrl_c_while_blocks_come_back(options):
    modules = (admitted, block_table, blocks, group_table, guard, paged, prefix, recall, resuming, sequence, state_table)

    def prepare():
        cache, seq = with_blocks_to_bring_back(**options)
        return (cache, seq), lambda: cache.bring_back(seq)

    count = 0
    for cache, seq in signalled_at_every_point(prepare, *modules):
        cache.check()
        assert_content(cache, seq, TOKENS)
        count += 1
    assert count > 100


# --- handovers -------------------------------------------------------------------------------------------------------------


def state_handover(*planes, model: str = "m") -> Handover:
    made = StateSpec(1, planes, model=model)
    made = made.replaced(layout=made.block_layout)
    held = new_buffers(made)
    held[0].view(torch.float32)[:] = torch.arange(held[0].numel() // 4)
    return Handover(np.array([1, 2]), (Part(made, (0,), 0, 0, held).sealed(2),))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shares", [(), ((8, 2), (4, 1), (4, 1))], ids=["one share", "q k v"])
def test_states_of_ranks_join(ranks, shares):
    handover = state_handover(state_plane("conv", "f32", channel=16, tap=2, shares=shares))
    shards = handover.shard(ranks)
    assert join(shards).parts[0].content == handover.parts[0].content
    if ranks == 4:
        alone = [Handover(s.tokens, s.parts) for s in shards]  # exported rank by rank: nobody knows the whole
        with pytest.raises(kvx.Incompatible, match="a shard is missing"):
            join([alone[0], alone[3]])
        with pytest.raises(kvx.KvxError):
            join(shards[:3])


def test_states_of_two_models_are_no_handover():
    a, b = (state_handover(state_plane("conv", "f32", channel=4, tap=2), model=m) for m in "ab")
    with pytest.raises(kvx.BadArgument, match="model 'b'"):
        Handover(a.tokens, (a.parts[0], replace(b.parts[0], layers=(1,))))


@pytest.mark.parametrize("prefix", [True, False])
def test_what_hangs_on_more_than_tokens_is_not_handed_over(prefix):
    cache = make(prefix=prefix)
    plain = cache.admit(TOKENS)
    cache.extend(plain, 20)
    handover = read_sequence(cache, plain, model="m", block_size=BS)
    for lora in (cache.admit(TOKENS, extra=b"lora"), cache.admit(TOKENS, extras=[(3, b"cat")])):
        with pytest.raises(kvx.Unsupported, match=r"write_sequence\(\): .* has an extra"):
            write_sequence(cache, lora, handover, model="m")
        cache.extend(lora, 20 - lora.length)
        with pytest.raises(kvx.Unsupported, match=r"read_sequence\(\): .* has an extra"):
            read_sequence(cache, lora, model="m")


def test_chunks_that_were_given_back_are_not_handed_over():
    cache = make(chunk=8)
    seq = cache.admit(TOKENS)
    cache.extend(seq, 12)
    cache.extend(seq, 8)
    with pytest.raises(kvx.Unsupported, match=r"group 'chunked' is Chunked\(chunk=8\)"):
        read_sequence(cache, seq, model="m")


def test_a_write_that_fails_leaves_no_length(monkeypatch):
    cache = make(window=6)
    seq = cache.admit(TOKENS)
    cache.extend(seq, 20)
    handover, other = read_sequence(cache, seq, model="m", block_size=BS), make(window=6)
    mine = other.admit(TOKENS)

    def fail(*_, **__):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("kvx.handover.paged_cache.write_layers", fail)
    with pytest.raises(RuntimeError, match="gone"):
        write_sequence(other, mine, handover, model="m")
    assert (mine.length, mine.num_tokens) == (0, 24)
    assert all(a.num_used == 0 for a in other.allocators)
    other.check()


# --- manifests -------------------------------------------------------------------------------------------------------------


def hostile(**plane) -> str:
    import json

    body = json.loads(to_json(STATES))
    planes = json.loads(body["planes"])
    planes[0].update(plane)
    body["planes"] = json.dumps(planes)
    del body["digest"]
    return json.dumps(body)


@pytest.mark.parametrize(
    "plane",
    [
        {"shares": [[0, 10**4000, 1]]},
        {"shares": [[n, 1, 1] for n in range(4000)]},
        {"shares": [[0, 4, 1], [2, 4, 1]]},
        {"shares": [[-1, 8, 1]]},
        {"shares": []},
        {"axes": [["channel", 8], ["channel", 2]]},
        {"axes": "channel"},
        {"format": "x" * 900_000},
        {"name": "n" * 900_000},
        {"name": 3},
    ],
    ids=lambda plane: next(iter(plane)),
)
def test_hostile_planes_are_refused_in_few_words(plane):
    with pytest.raises(kvx.BadArgument) as error:
        spec_from_json(hostile(**plane))
    assert len(str(error.value)) < 600


def test_planes_go_through_their_manifest():
    assert spec_from_json(to_json(STATES)) == STATES
    handover = state_handover(state_plane("conv", "f32", channel=16, tap=2, shares=((8, 2), (4, 1), (4, 1))))
    again = from_manifest(handover.to_json(), [list(p.buffers) for p in handover.parts])
    again.check()
    assert again.parts[0].spec == handover.parts[0].spec


def test_tokens_appended_one_by_one_ask_for_no_snapshots():
    """A decode step appends its token. Where a block ends is behind it then; what is asked for stays as long as the prompt's."""
    groups = [kvx.LayerGroup("states", (0,), StateSpec(8, (state_plane("conv", "f32", channel=2, tap=1),)), kind=State())]
    cache = kvx.PagedCache(groups, max_seqs=2, max_seq_len=400, block_size=4)
    seq = cache.admit(range(11))
    cache.extend(seq, cache.until_snapshot(seq, 11))
    cache.commit(seq)
    assert (seq.length, cache.prefix.num_blocks) == (8, 1)
    for token in range(100):
        cache.append(seq, [token])
        cache.extend_all([(seq, seq.num_tokens - seq.length)])
        cache.commit(seq)
    assert (seq.snapshot_at, cache.prefix.num_blocks) == ((), 1)
    cache.append(seq, range(9))  # the next turn of a conversation: 120 tokens
    assert seq.snapshots == (29,)
    assert cache.until_snapshot(seq, 9) == 116 - 111


@pytest.mark.parametrize("engine", ["", "vllm.sd", "vllm.ds", "sglang", "transformers"])
@pytest.mark.parametrize(("conv", "delta"), [("bf16", "f32"), ("f32", "f32"), ("bf16", "bf16")])
def test_a_state_is_copied_whole_and_alone(conv, delta, engine):
    """In all layers and planes, whatever their widths and orders and what pads them: the blocks beside it are as they were."""
    planes = (state_plane("conv", conv, channel=6, tap=3), state_plane("delta", delta, head=1, row=3, column=5))
    padded = {"block_bytes": 256} if engine.startswith("vllm") else {}
    one = state_row(engine).spec(planes, num_blocks=4, num_layers=1, **padded) if engine else StateSpec(4, planes)
    others = (Member((7,), StateSpec(4, (state_plane("ring", "bf16", channel=1, tap=1),))),)
    groups = [kvx.LayerGroup("states", (1, 3), one, kind=State(1), others=others)]
    cache = kvx.PagedCache(groups, max_seqs=3, max_seq_len=16, block_size=4)
    generator = torch.Generator().manual_seed(0)
    tensors = [plane for i in (1, 3, 7) for plane in cache.planes(i, 0).planes.values()]
    for tensor in tensors:
        tensor.copy_(torch.randint(1, 100, tensor.shape, generator=generator))
    before = [tensor.clone() for tensor in tensors]
    with torch.inference_mode():
        cache._tables[0].copy_block(2, 1)
    cache._tables[0].clear_block(0)
    cache._tables[0].copy_block(3, 2)
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor, torch.stack((torch.zeros_like(was[0]), was[2], was[3], was[3])))
