"""LMCache and vLLM on one directory: what either wrote the other finds, with no call by hand and the same content.

vLLM runs in a process and an environment of its own. LMCache's backends and keys run here; what copies between it and an engine
needs a GPU, so the chunks that LMCache writes here hold K and V of Transformers.
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("lmcache", reason="the package lmcache is not installed here; `make engines` makes .venv-lmcache, which has it")
import lmcache as lmcache_package

import kvx
from kvx.handover import NEUTRAL, names
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, TierOption
from tests.engines import lmcache_parts as lmc
from tests.engines.lmcache_parts import MODEL, Lmcache
from tests.engines.small_models import make_plain
from tests.engines.vllm_process import ROOT, Answer, generate, kvx_connector

VLLM = ROOT / ".venv-engines" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not VLLM.exists(), reason="`make engines` makes the environment of vLLM, .venv-engines, which is not here"
)
LAYERS, HEADS, DIM, COUNT, CHUNK = 2, 2, 32, 192, 64
CHUNKS = CacheSpec(
    COUNT // CHUNK, CHUNK, HEADS, DIM, layout="block | kv layer token head dim", format="f32", num_layers=LAYERS, model=MODEL
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_plain(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(256) for _ in range(COUNT + 11)]


@pytest.fixture(scope="module")
def alone(folder, prompt) -> list[int]:
    answer = generate(folder, [prompt], max_tokens=32, python=VLLM)
    assert len(set(answer.tokens[0])) > 5  # a wrong cache would show
    return answer.tokens[0]


@pytest.fixture
def lmcache(tmp_path):
    with lmc.running_loop() as loop:
        one = Lmcache(tmp_path, loop, kv_shape=(LAYERS, 2, CHUNK, HEADS, DIM), dtype=torch.float32)
        yield one
        one.close()


def ask_vllm(folder: Path, prompt: list[int], store: Path, block_size: int) -> Answer:
    connector = kvx_connector([f"disk:{store}"], model=MODEL, block_size=block_size)
    return generate(folder, [prompt], max_tokens=32, connector=connector, python=VLLM)


def content_of(objects) -> kvx.Digest:
    memory = [obj.tensor.view(torch.uint8).reshape(-1) for obj in objects]
    return kvx.digest(memory, CHUNKS, blocks=[list(range(len(memory)))])


def content_in(store: Path, prompt: list[int], block_size: int) -> kvx.Digest:
    """Of vLLM's own blocks of the prompt in the store."""
    spec = CacheSpec(1, block_size, HEADS, DIM, layout=NEUTRAL, format="f32", num_layers=LAYERS, model=MODEL)
    kind = BlockKind.of(spec)
    with TierOption.parse(f"disk:{store}").open(kind) as tier:
        blocks = tier.get(names(prompt[:COUNT], block_size, MODEL)).result()
    assert None not in blocks
    memory = [block.buffers[0] for block in blocks]
    return kvx.digest(memory, spec.replaced(num_blocks=len(memory)), blocks=[list(range(len(memory)))])


def computed(folder: Path, prompt: list[int], one: Lmcache) -> list:
    """Chunks with K and V of the prompt, as Transformers computes them."""
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvx.adapters.transformers.handover import export_cache

    model, cache = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), DynamicCache()
    with torch.no_grad():
        model(torch.tensor([prompt]), past_key_values=cache)
    objects = one.objects(COUNT // CHUNK)
    memory = [obj.raw_data[: obj.get_size()] for obj in objects]
    handover = export_cache(cache, prompt, model=MODEL, block_size=16).cut(COUNT)
    handover.write(0, memory, CHUNKS, blocks=list(range(len(memory))))
    return objects


@pytest.mark.parametrize("block_size", [16, 64])
def test_vllm_finds_what_lmcache_wrote(folder, prompt, alone, tmp_path, lmcache, block_size):
    objects = computed(folder, prompt, lmcache)
    lmcache.put(lmcache.keys(prompt[:COUNT]), objects)
    answer = ask_vllm(folder, prompt, tmp_path, block_size)
    assert answer.cached == [COUNT]
    assert answer.tokens[0] == alone
    assert content_in(tmp_path, prompt, block_size) == content_of(objects)


@pytest.mark.parametrize("block_size", [16, 96])
def test_lmcache_finds_what_vllm_wrote(folder, prompt, alone, tmp_path, lmcache, block_size):
    """LMCache's store is told no tokens: vLLM writes records under its names, as it sees in the directory that LMCache is there."""
    answer = ask_vllm(folder, prompt, tmp_path, block_size)
    assert (answer.cached, answer.tokens[0]) == ([0], alone)
    keys = lmcache.keys(prompt[:COUNT])
    assert lmcache.kvx.batched_contains(keys) == COUNT // CHUNK
    assert content_of(lmcache.kvx.batched_get_blocking(keys)) == content_in(tmp_path, prompt, block_size)


BESIDE = """
import sys
sys.path[:0], sys.path[len(sys.path):] = [sys.argv[1]], sys.argv[2:]
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.token_database import ChunkedTokenDatabase
from kvx.adapters.lmcache.engine_hash import names_made_here
from kvx.adapters.engine_names import namer_of
from kvx.errors import BadArgument
for algorithm in ("sha256_cbor", "sha256", "builtin"):
    config = LMCacheEngineConfig.from_defaults(chunk_size=16, pre_caching_hash_algorithm=algorithm)
    try:
        names = names_made_here(config, None)
    except BadArgument as error:
        print("FOUND", algorithm, "refused", "PYTHONHASHSEED=0" in str(error))
        continue
    made = [h for _, _, h in ChunkedTokenDatabase(config, None).process_tokens(list(range(64)), make_key=False)]
    ours = [int(name.hex(), 16) for name in namer_of(names)(range(64), 16)]
    print("FOUND", algorithm, names.split(":")[1], [h % 2**64 for h in made] == ours)
"""


@pytest.mark.parametrize("seed", [None, "0"])
def test_names_beside_vllm(seed):
    """LMCache with vLLM's hashes, both in one process: the names are its own, or refused where they are random."""
    packages = Path(lmcache_package.__file__).parents[1]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | ({} if seed is None else {"PYTHONHASHSEED": seed})
    run = subprocess.run([VLLM, "-W", "ignore", "-c", BESIDE, ROOT, packages], env=env, capture_output=True, text=True, timeout=300)
    found = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("FOUND")]
    builtin = ["builtin", "refused", "True"] if seed is None else ["builtin", "builtin", "True"]
    assert found == [["sha256_cbor", "sha256_cbor", "True"], ["sha256", "sha256", "True"], builtin], run.stderr[-2000:]
