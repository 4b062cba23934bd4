"""KvxStoragePlugin under LMCache's own backends, memory and keys, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("lmcache", reason="the package lmcache is not installed here; `make engines` makes .venv-lmcache, which has it")
from lmcache.v1.event_manager import EventManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.storage_backend.storage_manager import StorageManager

import kvx
from kvx.adapters.engine_names import namer_of
from kvx.adapters.lmcache import chunk_names, link
from kvx.adapters.lmcache.names import names_field
from kvx.connector.neighbours import Neighbours
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.errors import BadArgument
from kvx.handover import NEUTRAL, NEUTRAL_LATENT, names
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, TierOption
from tests.engines import lmcache_parts as lmc
from tests.engines.lmcache_parts import CHUNK, DIM, FORMATS, HEADS, LAYERS, MODEL, Lmcache, some_tokens

BUILTIN = names_field("builtin", 0)  # LMCache without vLLM
# Of tokens 0 to 31 in chunks of 16 with PYTHONHASHSEED=0, by the hashing module of vLLM 0.32.
VLLM_HASHES = {
    "sha256_cbor": ["7913e9343b88bdf9", "17c587bb83dc4528"],
    "sha256": ["fcac779b0b7a89c0", "8ee1ed6b119795a4"],
}


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch):
    monkeypatch.setattr("kvx.connector.store_kinds.REFRESH_S", 0.0)


@pytest.fixture(scope="module")
def loop():
    with lmc.running_loop() as made:
        yield made


@pytest.fixture
def started(loop, tmp_path):
    made = []

    def start(**how) -> Lmcache:
        made.append(Lmcache(how.pop("folder", tmp_path), loop, **how))
        return made[-1]

    yield start
    for one in made:
        one.close()


def same(a, b) -> bool:
    return a is not None and b is not None and a.metadata.fmt == b.metadata.fmt and torch.equal(a.tensor, b.tensor)


# --- LMCache alone -----------------------------------------------------------------------------------------------------------


def test_several_groups_of_layers_in_one_object_are_found_by_lmcache_alone(started, monkeypatch, caplog):
    """As LMCache's engine has a hybrid model: its groups' shapes one after the other."""
    a = started(dtype=torch.float32)
    shapes = [torch.Size([2, 2, CHUNK, 8]), torch.Size([2, 1, CHUNK, 24])]
    monkeypatch.setattr(a.metadata, "get_shapes", lambda tokens=None: shapes)
    monkeypatch.setattr(a.metadata, "get_dtypes", lambda: [torch.float32] * 2)
    assert a.kvx.batched_contains(a.keys(some_tokens(2 * CHUNK))) == 0
    assert "2 groups of layers in one object" in caplog.text


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kept", ["", "canonical"])
def test_chunks_come_back_as_they_were(started, format, kept):
    a = started(**FORMATS[format], extra={"kvx.layout": kept})
    keys = a.keys(some_tokens(5 * CHUNK))
    objects = a.objects(len(keys))
    assert a.kvx.batched_contains(keys) == 0
    a.put(keys, objects)
    assert a.kvx.batched_contains(keys) == len(keys)
    assert not any(map(a.kvx.exists_in_put_tasks, keys))
    assert [obj.get_ref_count() for obj in objects] == [1] * len(keys)  # LMCache's own, which we gave back
    b = started(**FORMATS[format], extra={"kvx.layout": kept})  # another process: nothing is known but the directory
    assert b.kvx.contains(keys[0])
    assert b.kvx.pin(keys[0])
    assert b.run(b.kvx.batched_async_contains("lookup", keys)) == len(keys)
    assert all(map(same, b.kvx.batched_get_blocking(keys), objects))
    assert same(b.kvx.get_blocking(keys[2]), objects[2])
    assert same(b.kvx.get_non_blocking(keys[3]).result(20), objects[3])
    assert all(map(same, b.run(b.kvx.batched_get_non_blocking("lookup", keys)), objects))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_a_dtype_is_part_of_the_kind(started, tmp_path, dtype):
    a = started(dtype=dtype)
    keys, objects = a.keys(some_tokens(2 * CHUNK)), a.objects(2)
    a.put(keys, objects)
    assert a.kvx.batched_contains(keys) == 2
    found = a.kvx.batched_get_blocking(keys)
    assert all(torch.equal(x.tensor.view(torch.uint8), y.tensor.view(torch.uint8)) for x, y in zip(found, objects, strict=True))
    other = started(dtype=torch.float16 if dtype != torch.float16 else torch.float8_e4m3fn)
    assert other.kvx.batched_contains(keys) == (
        2 if {dtype, other.metadata.kv_dtype} <= {torch.bfloat16, torch.float16, torch.float32} else 0
    )


def test_a_chunk_that_is_not_full_is_not_kept(started, caplog):
    """LMCache saves them where `save_unfull_chunk` is on."""
    a = started(save_unfull_chunk=True)
    keys = a.keys(some_tokens(CHUNK + 5))
    assert len(keys) == 2
    full, (rest,) = a.objects(1), a.objects(1, tokens=5)
    a.put(keys, [*full, rest])
    assert a.kvx.batched_contains(keys) == 1
    assert a.kvx.batched_get_blocking(keys)[1] is None
    assert "does not keep a chunk of KV_2LTD [(2, 3, 5, 32)]" in caplog.text
    assert rest.get_ref_count() == 1


def test_tags_of_a_request_are_told_apart(started):
    a = started()
    tokens = some_tokens(CHUNK)
    plain, tagged = a.keys(tokens), a.keys(tokens, **{"lmcache.tag.user": "x"})
    a.put(plain, a.objects(1))
    assert (a.kvx.batched_contains(plain), a.kvx.batched_contains(tagged)) == (1, 0)


def test_remove_and_clear(started, caplog):
    a = started()
    keys = a.keys(some_tokens(3 * CHUNK))
    a.put(keys, a.objects(3))
    assert a.kvx.remove(keys[1])
    assert not a.kvx.remove(keys[1])
    assert a.kvx.batched_contains(keys) == 1
    assert a.kvx.clear() == 0
    assert "clear() removes nothing" in caplog.text
    assert a.kvx.batched_remove(keys) == 2
    assert a.kvx.unpin(keys[0]) is False


def test_ranks(started):
    """Two workers wrote heads of their own; one worker reads all of them, and four a quarter each."""
    tokens, parts = some_tokens(2 * CHUNK), []
    for rank in range(2):
        one = started(heads=2, worker=(rank, 2), extra={"kvx.num_kv_heads": HEADS})
        objects = one.objects(2)
        one.put(one.keys(tokens), objects)
        parts.append([obj.tensor.clone() for obj in objects])
    whole = started()
    for n, obj in enumerate(whole.kvx.batched_get_blocking(whole.keys(tokens))):
        assert torch.equal(obj.tensor, torch.cat([parts[0][n], parts[1][n]], -1))
    for rank in range(4):
        one = started(heads=1, worker=(rank, 4), extra={"kvx.num_kv_heads": HEADS})
        row = slice((rank % 2) * DIM, (rank % 2 + 1) * DIM)
        for n, obj in enumerate(one.kvx.batched_get_blocking(one.keys(tokens))):
            assert torch.equal(obj.tensor, parts[rank // 2][n][..., row])


def test_workers_of_which_nothing_is_said_find_their_own_alone(started):
    tokens = some_tokens(CHUNK)
    a, b, whole = started(worker=(0, 2)), started(worker=(1, 2)), started()
    objects = a.objects(1)
    a.put(a.keys(tokens), objects)
    assert [x.kvx.batched_contains(x.keys(tokens)) for x in (a, b, whole)] == [1, 0, 0]


def test_layer_by_layer_and_whole_chunks_are_each_others(started):
    tokens = some_tokens(2 * CHUNK)
    a, whole = started(use_layerwise=True), started()
    keys = a.keys(tokens)
    objects = a.objects(len(keys))
    a.put(keys, objects)
    for n, obj in enumerate(whole.kvx.batched_get_blocking(whole.keys(tokens))):
        want = torch.stack([objects[n * LAYERS + layer].tensor for layer in range(LAYERS)], 1)  # token, layer, kv, row
        assert torch.equal(obj.tensor, want.permute(2, 1, 0, 3))
    other, (made,) = some_tokens(CHUNK, seed=9), whole.objects(1)
    whole.put(whole.keys(other), [made])
    found = a.kvx.batched_get_blocking(a.keys(other))
    assert torch.equal(torch.stack([obj.tensor for obj in found], 1), made.tensor.permute(2, 1, 0, 3))


def test_through_lmcaches_storage_manager(loop, tmp_path):
    one = Lmcache(tmp_path, loop)
    manager = StorageManager(one.config, one.metadata, EventManager())
    keys, count = one.keys(some_tokens(4 * CHUNK)), 4
    objects = [manager.allocate(torch.Size(one.shape()), one.metadata.kv_dtype) for _ in range(count)]
    for obj in objects:
        obj.tensor.copy_(torch.randn(obj.tensor.shape))
    want = [obj.tensor.clone() for obj in objects]
    manager.batched_put(keys, objects)
    manager.storage_backends["kvx"]._puts.submit(lambda: None).result(20)
    assert manager.batched_contains(keys) == (4, {"kvx": keys})
    assert manager.contains(keys[0]) == "kvx"
    for obj, tensor in zip(manager.batched_get(keys, location="kvx"), want, strict=True):
        assert torch.equal(obj.tensor, tensor)
        obj.ref_count_down()
    assert torch.equal(manager.get(keys[2]).tensor, want[2])
    assert manager.memcheck()
    assert manager.remove(keys[3]) == 1
    manager.close()
    one.close()


# --- names -------------------------------------------------------------------------------------------------------------------


def test_names_are_lmcaches(started):
    tokens = some_tokens(100)
    a = started(save_unfull_chunk=True)
    made = [(key.chunk_hash % 2**64).to_bytes(8, "big") for key in a.keys(tokens)]
    assert made[:6] == chunk_names(tokens, CHUNK, algorithm="builtin", root=0)
    assert len(made) == 7  # the last is not full
    assert a.kvx._chunks.names == BUILTIN
    assert (
        TokenHasher(CHUNK).compute_chunk_hashes(tokens) == chunk_names(tokens, CHUNK) == namer_of("lmcache:blake3")(tokens, CHUNK)
    )


def test_names_are_the_same_in_every_process():
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from kvx.adapters.lmcache import chunk_names\n"
        "print([chunk_names(range(64), 16, algorithm=a, **r)[-1].hex() for a, r in (('builtin', {'root': -5}), ('sha256_cbor', "
        "{'python_hash_seed': '0'}), ('sha256', {'python_hash_seed': '0'}), ('blake3', {}))])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "17", "random")
    }
    assert len(found) == 1


@pytest.mark.parametrize("algorithm", VLLM_HASHES)
def test_names_by_vllms_hashes(algorithm):
    """vLLM is not installed here; LMCache takes its hashes where it is."""
    found = chunk_names(range(32), 16, algorithm=algorithm, python_hash_seed="0")
    assert [name.hex() for name in found] == VLLM_HASHES[algorithm]


def test_what_cannot_be_named_is_refused():
    with pytest.raises(BadArgument, match="root=0 where LMCache runs without vLLM"):
        chunk_names(range(32), 16, algorithm="builtin")
    with pytest.raises(BadArgument, match="there are blake3, builtin, sha256_cbor, sha256"):
        chunk_names(range(32), 16, algorithm="md5")
    with pytest.raises(BadArgument, match="chunk_size is 0"):
        chunk_names(range(32), 0)
    assert namer_of("lmcache:segments") is namer_of("lmcache:xxhash:0011223344556677") is None
    with pytest.raises(BadArgument, match="lmcache:blake3"):
        link([1], ".", model=MODEL, names="lmcache:segments")


def test_random_names_are_refused(loop, tmp_path, monkeypatch, caplog):
    """vLLM is there and PYTHONHASHSEED is not: each process has a root of its own."""
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("kvx.adapters.lmcache.engine_hash.find_spec", lambda name: True if name == "vllm" else found(name))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    errors = said(loop, tmp_path, monkeypatch)
    assert "random in every process" in errors
    assert "PYTHONHASHSEED=0" in errors


# --- other engines -----------------------------------------------------------------------------------------------------------


class Vllm:
    """A store as vLLM's connector has it: blocks by KVX's names, canonical, and what neighbours wrote."""

    def __init__(self, folder, block_size: int, *, is_latent: bool = False, heads: int = HEADS) -> None:
        row = (1, DIM * HEADS, NEUTRAL_LATENT) if is_latent else (heads, DIM, NEUTRAL)
        self.spec = CacheSpec(1, block_size, row[0], row[1], layout=row[2], format="bf16", num_layers=LAYERS, model=MODEL)
        kind, options = BlockKind.of(self.spec), [TierOption.parse(f"disk:{folder}")]
        self.stack = TierStack(kind, [open_tier(o, kind) for o in options])
        self.neighbours = Neighbours(options, self.stack, self.spec, namer_of=namer_of)

    def blocks(self, tokens: list[int]) -> list:
        return self.stack.get(names(tokens, self.spec.block_size, MODEL))

    def digest(self, blocks) -> kvx.Digest:
        memory = [block.buffers[0] for block in blocks]
        return kvx.digest(memory, self.spec.replaced(num_blocks=len(memory)), blocks=[list(range(len(memory)))])


def digest_of(one: Lmcache, objects) -> kvx.Digest:
    (store,) = (s for s in one.kvx._chunks.stores.values() if s.chunk_spec is not None)
    memory = [obj.tensor.contiguous().view(torch.uint8).reshape(-1) for obj in objects]
    return kvx.digest(memory, store.chunk_spec.replaced(num_blocks=len(memory)), blocks=[list(range(len(memory)))])


@pytest.mark.parametrize("block_size", [16, 8, 48])
@pytest.mark.parametrize("mla", [False, True])
def test_vllm_finds_what_lmcache_wrote(started, tmp_path, block_size, mla):
    tokens, a = some_tokens(6 * CHUNK), started(mla=mla)
    objects = a.objects(6)
    a.put(a.keys(tokens), objects)
    b = Vllm(tmp_path, block_size, is_latent=mla)
    assert b.neighbours.take_over(tokens, names(tokens, block_size, MODEL)) == 6 * CHUNK // block_size
    blocks = b.blocks(tokens)
    assert None not in blocks
    assert b.digest(blocks) == digest_of(a, objects)


def test_vllm_finds_what_lmcache_wrote_layer_by_layer(started, tmp_path):
    tokens, a = some_tokens(3 * CHUNK), started(use_layerwise=True)
    keys = a.keys(tokens)
    a.put(keys, a.objects(len(keys)))
    b, whole = Vllm(tmp_path, 8), started()
    assert b.neighbours.take_over(tokens, names(tokens, 8, MODEL)) == 6
    assert b.digest(b.blocks(tokens)) == digest_of(whole, whole.kvx.batched_get_blocking(whole.keys(tokens)))


@pytest.mark.parametrize("block_size", [16, 8, 24])
@pytest.mark.parametrize("how", [{}, {"mla": True}, {"use_layerwise": True}])
def test_lmcache_finds_what_vllm_wrote(started, tmp_path, block_size, how):
    tokens, a = some_tokens(96), started(**how)
    b = Vllm(tmp_path, block_size, is_latent="mla" in how)
    blocks = [b.stack.kind.block(kvx.allocate_buffers(b.spec)) for _ in range(96 // block_size)]
    for block in blocks:
        block.buffers[0].view(torch.bfloat16).copy_(torch.randn(block.buffers[0].numel() // 2))
    b.stack.put(names(tokens, block_size, MODEL), blocks)
    keys = a.keys(tokens)
    a.kvx._has(keys)  # it has a kind there by now, of each layer
    assert a.kvx.batched_contains(keys) == 0
    assert b.neighbours.lead(tokens, names(tokens, block_size, MODEL)) > 0
    assert a.kvx.batched_contains(keys) == len(keys)
    found = a.kvx.batched_get_blocking(keys)
    if "use_layerwise" not in how:
        assert digest_of(a, found) == b.digest(blocks)
    else:
        whole = started()
        assert whole.kvx.batched_contains(whole.keys(tokens)) == 6
        for n, obj in enumerate(whole.kvx.batched_get_blocking(whole.keys(tokens))):
            assert torch.equal(
                torch.stack([x.tensor for x in found[n * LAYERS : (n + 1) * LAYERS]], 1), obj.tensor.permute(2, 1, 0, 3)
            )


def test_who_has_tokens_and_no_engine_links(started, tmp_path):
    tokens, b = some_tokens(64), Vllm(tmp_path, 8)
    b.stack.put(names(tokens, 8, MODEL), [b.stack.kind.block(kvx.allocate_buffers(b.spec)) for _ in range(8)])
    a = started()
    assert link(tokens, tmp_path, model=MODEL, chunk_size=CHUNK, names=BUILTIN) == 4
    assert a.kvx.batched_contains(a.keys(tokens)) == 4
    assert link(tokens, tmp_path, model=MODEL, chunk_size=32) == 2  # the server's names


# --- wrong config ------------------------------------------------------------------------------------------------------------


def said(loop, folder, monkeypatch, **how) -> str:
    """What LMCache's launcher logs of a plugin that it could not make; it goes on without."""
    errors = []
    monkeypatch.setattr("lmcache.v1.storage_backend.logger.error", lambda text, *args: errors.append(text % args))
    one = Lmcache(folder, loop, **how)
    assert one.kvx is None
    one.close()
    return "\n".join(errors)


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ({"extra": {"kvx.tiers": None}}, '"tiers": ["host:1GB", "disk:/var/kv"]'),
        ({"extra": {"kvx.tiers": "disk:/x"}}, "it must be a list of them"),
        ({"extra": {"kvx.tiers": ["tape:/x"]}}, "tape:/x"),
        ({"extra": {"kvx.model": None}}, "kvx.weights_identity(folder"),
        ({"extra": {"kvx.model": "llama-16x2048-kv8x64-v128256"}}, "llama-16x2048-kv8x64-v128256"),
        ({"extra": {"kvx.block_size": 16}}, "LMCache's own, chunk_size"),
        ({"extra": {"kvx.tier": ["disk:/x"]}}, "'tier' is not known"),
        ({"extra": {"kvx.timeout_s": "soon"}}, "timeout_s is 'soon'"),
        ({"extra": {"kvx.layout": "mine"}}, 'it must be "canonical"'),
        ({"extra": {"kvx.format": "fp8_e4m3_per_tensor"}}, "inline"),
        ({"extra": {"kvx.num_kv_heads": -1}}, "num_kv_heads is -1"),
        ({"extra": {"kvx.num_kv_heads": 6}, "worker": (0, 2)}, "worker 0 of 2 has 4 of them"),
    ],
)  # fmt: skip
def test_a_wrong_config_says_what_to_do(loop, tmp_path, monkeypatch, how, want):
    assert want in said(loop, tmp_path, monkeypatch, **how)
