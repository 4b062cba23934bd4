"""KvxL2Adapter behind the storage manager of LMCache's server and behind `lmcache server` itself, on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import zmq

pytest.importorskip("lmcache", reason="the package lmcache is not installed here; `make engines` makes .venv-lmcache, which has it")
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.multiprocess.transfer_context.base import gather_paged_kv_to_cpu

import kvx
from kvx.adapters.engine_names import namer_of
from kvx.adapters.lmcache import chunk_names
from kvx.connector.neighbours import Neighbours
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.errors import BadArgument
from kvx.handover import NEUTRAL, names
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, DiskTier, TierOption
from tests.engines.lmcache_parts import CHUNK, DIM, HEADS, LAYERS, MODEL, some_tokens

BLOCK = 8  # of an engine
KV = MemoryLayoutDesc([torch.Size([2, LAYERS, CHUNK, HEADS * DIM])], [torch.bfloat16])
FUSED = MemoryLayoutDesc([torch.Size([1, LAYERS, CHUNK, HEADS * 2 * DIM])], [torch.bfloat16])  # as from vLLM on a GPU
LATENT = MemoryLayoutDesc([torch.Size([1, LAYERS, CHUNK, HEADS * DIM])], [torch.bfloat16])


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch):
    monkeypatch.setattr("kvx.connector.store_kinds.REFRESH_S", 0.0)


def adapter(folder: Path, **params) -> dict:
    told = {"tiers": [f"disk:{folder}"], "model": MODEL, "head_dim": DIM, "chunk_size": CHUNK, **params}
    return {
        "type": "plugin", "module_path": "kvx.adapters.lmcache", "class_name": "KvxL2Adapter",
        "adapter_params": {k: v for k, v in told.items() if v is not None},
    }  # fmt: skip


class Manager:
    """The server's storage, from the arguments of its command line."""

    def __init__(self, folder: Path, **params) -> None:
        parser = add_storage_manager_args(argparse.ArgumentParser())
        args = ["--l1-size-gb", "0.05", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter(folder, **params))]
        config = parse_args_to_config(parser.parse_args(args))
        config.l1_manager_config.memory_config.shm_name = ""  # several in one process
        self.one = StorageManager(config)

    @property
    def adapter(self):
        ((_, found),) = self.one.l2_adapters()
        return found

    def store(self, keys: list[ObjectKey], layout: MemoryLayoutDesc = KV) -> list[torch.Tensor]:
        """Objects with numbers in them, until L2 has them too."""
        objects = self.one.reserve_write(keys, layout)
        assert list(objects) == keys
        for obj in objects.values():
            obj.tensor.copy_(torch.randn(obj.tensor.shape))
        want = [obj.tensor.clone() for obj in objects.values()]
        before = self.adapter.get_usage().total_bytes_used
        self.one.finish_write(keys)
        until = time.monotonic() + 30
        while self.adapter.get_usage().total_bytes_used < before + sum(t.numel() * 2 for t in want) and time.monotonic() < until:
            time.sleep(0.01)
        return want

    def prefetch(self, keys: list[ObjectKey], layout: MemoryLayoutDesc = KV, timeout_s: float = 30) -> int:
        """How many come from L2."""
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, keys[0].object_group_id, layout)])
        handle = self.one.submit_prefetch_task(spec)
        assert self.one.wait_prefetch_status(handle, timeout_s)
        result = self.one.query_prefetch_status(handle)
        assert result.l1_hit_count == 0
        return result.l2_hit_count

    def read(self, keys: list[ObjectKey]) -> list[torch.Tensor]:
        with self.one.read_prefetched_results(keys) as objects:
            found = [obj.tensor.clone() for obj in objects]
        self.one.finish_read_prefetched(keys)
        return found

    def close(self) -> None:
        self.one.close()


@pytest.fixture
def started(tmp_path):
    made = []

    def start(**params) -> Manager:
        made.append(Manager(tmp_path, **params))
        return made[-1]

    yield start
    for one in made:
        one.close()


def keys_of(tokens: list[int], rank: tuple[int, int] = (0, 1), **more) -> list[ObjectKey]:
    kv_rank = ObjectKey.ComputeKVRank(rank[1], rank[0], rank[1], rank[0])
    return [ObjectKey(h, "tiny", kv_rank, **more) for h in TokenHasher(CHUNK).compute_chunk_hashes(tokens)]


@pytest.mark.parametrize(
    ("layout", "params"),
    [
        (KV, {}),
        (KV, {"layout": "canonical"}),
        (KV, {"head_dim": None}),
        (FUSED, {"num_kv_heads": HEADS}),
        (FUSED, {"num_kv_heads": HEADS, "layout": "canonical"}),
        (LATENT, {"head_dim": HEADS * DIM}),
        (MemoryLayoutDesc([torch.Size([LAYERS, CHUNK, HEADS * DIM])], [torch.bfloat16]), {"head_dim": HEADS * DIM}),
    ],
    ids=["kv", "canonical", "whole", "fused", "fused, canonical", "latent", "latent without an outer axis"],
)
def test_objects_come_back_as_they_were(started, layout, params):
    keys = keys_of(some_tokens(5 * CHUNK))
    want = started(**params).store(keys, layout)
    b = started(**params)  # another server: nothing is known but the directory
    assert b.prefetch(keys, layout) == 5
    assert all(map(torch.equal, b.read(keys), want))


def test_two_groups_of_layers_in_one_object(started):
    """A model of several groups: their objects go whole, each group's under names of its own."""
    both = MemoryLayoutDesc([torch.Size([2, 2, CHUNK, 32]), torch.Size([1, 1, CHUNK, 8])], [torch.bfloat16, torch.float32])
    tokens, b = some_tokens(2 * CHUNK), None
    a = started()
    first, second = keys_of(tokens), keys_of(tokens, object_group_id=1)
    objects = a.one.reserve_write(first, both)
    for obj in objects.values():
        obj.raw_data.random_(0, 255)
    want = [bytes(obj.byte_array) for obj in objects.values()]
    a.one.finish_write(first)
    other = a.store(second, KV)
    b = started()
    assert b.prefetch(first, both) == 2
    with b.one.read_prefetched_results(first) as found:
        assert [bytes(obj.byte_array) for obj in found] == want
    assert b.prefetch(second, KV) == 2
    assert all(map(torch.equal, b.read(second), other))


def test_a_salt_a_rank_and_a_hash_are_told_apart(started):
    tokens = some_tokens(2 * CHUNK)
    started().store(keys_of(tokens))
    b = started()
    assert b.prefetch(keys_of(tokens, cache_salt="user-1")) == 0
    assert b.prefetch(keys_of(tokens, rank=(1, 2))) == 0
    assert b.prefetch(keys_of(some_tokens(2 * CHUNK, seed=4))) == 0
    assert b.prefetch(keys_of(tokens)) == 2


def test_ranks(started):
    half = MemoryLayoutDesc([torch.Size([2, LAYERS, CHUNK, HEADS * DIM // 2])], [torch.bfloat16])
    tokens, a = some_tokens(2 * CHUNK), started(num_kv_heads=HEADS)
    parts = [a.store(keys_of(tokens, rank=(rank, 2)), half) for rank in range(2)]
    b, keys = started(), keys_of(tokens)
    assert b.prefetch(keys) == 2
    for n, found in enumerate(b.read(keys)):
        assert torch.equal(found, torch.cat([parts[0][n], parts[1][n]], -1))


def test_delete(started):
    keys, a = keys_of(some_tokens(2 * CHUNK)), started()
    a.store(keys)
    a.adapter.delete(keys[1:])
    assert a.adapter.get_usage().total_bytes_used == 2 * LAYERS * CHUNK * HEADS * DIM * 2
    assert started().prefetch(keys) == 1
    assert a.adapter.report_status()["is_healthy"]


def test_a_second_model_is_not_kept_under_the_firsts_name(started, caplog):
    a = started()
    a.store(keys_of(some_tokens(CHUNK)))
    other = [ObjectKey(b"x" * 32, "another", 1 << 24 | 1 << 8)]
    objects = a.one.reserve_write(other, KV)
    assert len(objects) == 1
    a.one.finish_write(other)
    until = time.monotonic() + 20
    while "'another' is another" not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    assert "A server of several models" in caplog.text
    assert started().prefetch(keys_of(some_tokens(CHUNK))) == 1


# --- vLLM --------------------------------------------------------------------------------------------------------------------


def vllm(folder: Path, block_size: int) -> tuple[CacheSpec, TierStack, Neighbours]:
    spec = CacheSpec(1, block_size, HEADS, DIM, layout=NEUTRAL, format="bf16", num_layers=LAYERS, model=MODEL)
    kind, options = BlockKind.of(spec), [TierOption.parse(f"disk:{folder}")]
    stack = TierStack(kind, [open_tier(o, kind) for o in options])
    return spec, stack, Neighbours(options, stack, spec, namer_of=namer_of)


def content(memory: list[torch.Tensor], spec: CacheSpec) -> kvx.Digest:
    flat = [t.contiguous().view(torch.uint8).reshape(-1) for t in memory]
    return kvx.digest(flat, spec.replaced(num_blocks=len(flat)), blocks=[list(range(len(flat)))])


OURS = CacheSpec(1, CHUNK, HEADS, DIM, layout="block | kv layer token head dim", format="bf16", num_layers=LAYERS, model=MODEL)
FUSED_OURS = OURS.replaced(layout="block | layer token head (kv dim)")


@pytest.mark.parametrize(
    ("block_size", "layout", "ours"), [(16, KV, OURS), (8, KV, OURS), (48, KV, OURS), (48, FUSED, FUSED_OURS)],
    ids=["16", "8", "48", "48, fused"],
)  # fmt: skip
def test_vllm_finds_what_the_server_wrote_and_the_other_way(started, tmp_path, block_size, layout, ours):
    tokens = some_tokens(6 * CHUNK)
    mine, a = names(tokens, block_size, MODEL), started(num_kv_heads=HEADS)
    want = a.store(keys_of(tokens), layout)
    spec, stack, neighbours = vllm(tmp_path, block_size)
    assert neighbours.take_over(tokens, mine) == 6 * CHUNK // block_size
    assert content([b.buffers[0] for b in stack.get(mine)], spec) == content(want, ours)
    other = some_tokens(6 * CHUNK, seed=7)
    theirs = names(other, block_size, MODEL)
    blocks = [kvx.allocate_buffers(spec) for _ in theirs]
    for (block,) in blocks:
        block.view(torch.bfloat16).copy_(torch.randn(block.numel() // 2))
    stack.put(theirs, [stack.kind.block(b) for b in blocks])
    assert neighbours.lead(other, theirs) == 6
    b, keys = started(num_kv_heads=HEADS), keys_of(other)
    assert b.prefetch(keys, layout) == 6
    assert content(b.read(keys), ours) == content([block for (block,) in blocks], spec)


@pytest.mark.parametrize("row", ["vllm.0.26.nhd", "vllm.0.26.hnd"])
def test_chunks_that_lmcache_makes_of_vllms_blocks_on_a_gpu(row):
    """By its own gathering, whose copies run on a CPU too: K and V of a head stay side by side."""
    engine = kvx.CacheSpec(5, BLOCK, HEADS, DIM, layout=kvx.engine(row).layout, format="bf16", num_layers=LAYERS, model=MODEL)
    shape = (5, BLOCK, HEADS, 2 * DIM) if row.endswith("nhd") else (5, HEADS, BLOCK, 2 * DIM)
    layers = {f"model.layers.{n}.attn": torch.randn(shape).bfloat16() for n in range(LAYERS)}
    ids, hints = [3, 0, 4, 1][: CHUNK // BLOCK * 2], {"kv_layout": row[-3:].upper()}
    chunks = gather_paged_kv_to_cpu(layers, ids, CHUNK // BLOCK, hints)
    assert [list(c.shape) for c in chunks] == [[LAYERS, CHUNK, HEADS * 2 * DIM]] * (len(ids) * BLOCK // CHUNK)
    assert content(chunks, FUSED_OURS) == kvx.digest(list(layers.values()), engine, blocks=[ids])


def test_fused_objects_without_the_number_of_heads_are_found_by_lmcache_alone(started, tmp_path, caplog):
    tokens = some_tokens(2 * CHUNK)
    keys, a = keys_of(tokens), started()
    want = a.store(keys, FUSED)
    assert "with num_kv_heads in adapter_params that is read" in caplog.text
    assert vllm(tmp_path, 16)[2].take_over(tokens, names(tokens, 16, MODEL)) == 0
    b = started()
    assert b.prefetch(keys, FUSED) == 2
    assert all(map(torch.equal, b.read(keys), want))


# --- what fails --------------------------------------------------------------------------------------------------------------


def test_a_damaged_object_is_a_miss(started, tmp_path):
    tokens = some_tokens(3 * CHUNK)
    keys = keys_of(tokens)
    started().store(keys)
    (path,) = tmp_path.rglob(f"{chunk_names(tokens, CHUNK)[1].hex()}.kvx")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    assert started().prefetch(keys) == 1  # the server takes what stands before it


@pytest.mark.parametrize("call", ["_store", "_fetch", "_holds"])
def test_a_hanging_disk_is_a_miss(started, monkeypatch, call):
    keys = keys_of(some_tokens(2 * CHUNK))
    started().store(keys)
    b, fast, is_slow = started(timeout_s=0.3), getattr(DiskTier, call), True

    def slow(self, *args):
        if is_slow:
            time.sleep(3)
        return fast(self, *args)

    monkeypatch.setattr(DiskTier, call, slow)
    began = time.monotonic()
    if call == "_store":
        other = keys_of(some_tokens(CHUNK, seed=3))
        b.one.reserve_write(other, KV)
        b.one.finish_write(other)
        assert b.prefetch(keys) == 2  # reads do not wait behind a write
    else:
        assert b.prefetch(keys) == 0
    assert time.monotonic() - began < 2.5
    is_slow = False
    time.sleep(3)
    if call != "_store":
        assert b.prefetch(keys) == 2


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"tiers": None}, '"tiers": ["host:1GB", "disk:/var/kv"]'),
        ({"model": None}, "kvx.weights_identity(folder"),
        ({"head_dims": 8}, "'head_dims' is not known"),
        ({"head_dim": "8"}, "head_dim is '8'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_a_wrong_config_says_what_to_do(tmp_path, params, want):
    with pytest.raises(BadArgument) as error:
        Manager(tmp_path, **params)
    assert want in str(error.value)


# --- the server itself, and an engine's side of it ---------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """`lmcache server` as docs/lmcache.md types it, in a process of its own. On a CPU an engine copies K and V itself."""

    def __init__(self, folder: Path) -> None:
        self.url, http, self.log = f"tcp://127.0.0.1:{(port := free_port())}", free_port(), folder / f"log-{free_port()}"
        command = [
            str(Path(sys.executable).parent / "lmcache"), "server", "--l1-size-gb", "0.05", "--eviction-policy", "LRU",
            "--chunk-size", str(CHUNK), "--supported-transfer-mode", "engine_driven", "--port", str(port), "--http-port", str(http),
            "--l2-adapter", json.dumps(adapter(folder / "kv")),
        ]  # fmt: skip
        root = str(Path(__file__).resolve().parents[2])
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": root}
            )  # fmt: skip
        self.http = f"http://127.0.0.1:{http}"

    def wait(self) -> str:
        """Until it answers; what it says of itself."""
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            try:
                return urllib.request.urlopen(f"{self.http}/status", timeout=5).read().decode()
            except OSError:
                time.sleep(0.3)
        raise AssertionError(self.log.read_text()[-3000:])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


class Engine:
    """The side of vLLM's `LMCacheMPConnector` that talks to a server, with caches of its own and no vLLM."""

    def __init__(self, url: str, context: zmq.Context) -> None:
        alone = ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
        self.worker = LMCacheMPWorkerAdapter(url, context, "tiny", BLOCK, alone, mq_timeout=60)
        self.scheduler = LMCacheMPSchedulerAdapter([url], context, "tiny", BLOCK, alone, mq_timeout=60)
        self.caches = {f"layer.{n}": torch.randn(2, 32, BLOCK, HEADS, DIM).bfloat16() for n in range(LAYERS)}
        self.worker.register_kv_caches(self.caches, layout_hints={"kv_layout": "NHD"})

    def store(self, tokens: list[int], blocks: list[int]) -> None:
        self.worker.submit_store_request("a", LoadStoreOp(tokens, [blocks], 0, len(tokens)), None)

    def retrieve(self, tokens: list[int], blocks: list[int]) -> int:
        """How many tokens the server has of the text; they are copied into these blocks."""
        self.scheduler.maybe_submit_lookup_request("b", tokens)
        hit, until = None, time.monotonic() + 60
        while (hit := self.scheduler.check_lookup_result("b")) is None and time.monotonic() < until:
            time.sleep(0.02)
        if hit:
            self.worker.submit_retrieve_request("b", LoadStoreOp(tokens, [blocks[: hit // BLOCK]], 0, hit), None)
            while not self.worker.get_finished(set())[1] and time.monotonic() < until:
                time.sleep(0.02)
        return hit

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def test_two_servers_on_one_directory(tmp_path):
    """An engine's blocks go to the first server; another's come from the second, which finds them in the store."""
    tokens, here, there = some_tokens(4 * CHUNK), list(range(4, 12)), list(range(20, 28))
    servers, context = [Server(tmp_path), Server(tmp_path)], zmq.Context()
    try:
        assert all("KvxL2Adapter" in server.wait() for server in servers)
        a, b = (Engine(server.url, context) for server in servers)
        a.store(tokens, here)
        until = time.monotonic() + 30
        while len(list((tmp_path / "kv").rglob("*.kvx"))) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        assert {path.stem for path in (tmp_path / "kv").rglob("*.kvx")} == {name.hex() for name in chunk_names(tokens, CHUNK)}
        assert b.retrieve(tokens, there) == 4 * CHUNK
        for name, cache in b.caches.items():
            assert torch.equal(cache[:, there], a.caches[name][:, here])
        for engine in (a, b):
            engine.close()
        assert all(server.stop() in (0, -signal.SIGINT, 130) for server in servers)
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
        context.destroy(linger=0)
