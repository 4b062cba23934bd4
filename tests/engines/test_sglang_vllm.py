"""SGLang and vLLM on one directory: what either wrote the other finds, with no call by hand and the same content.

vLLM runs in a process and an environment of its own. SGLang's pools, keys and controller run here; what would compute in them needs
a GPU, so the pages that SGLang writes here hold K and V of Transformers.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import kvx
from kvx.adapters.sglang.names import page_names
from kvx.adapters.sglang.pools import Ranks, read_pool
from kvx.handover import NEUTRAL, names
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, TierOption
from tests.engines import sglang_pools as sgl
from tests.engines.small_models import make_plain
from tests.engines.vllm_process import ROOT, Answer, generate, kvx_connector

VLLM = ROOT / ".venv-engines" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not VLLM.exists(), reason="`make engines` makes the environment of vLLM, .venv-engines, which is not here"
)
LAYERS, HEADS, DIM, COUNT = 2, 2, 32, 192
POOL = {"layers": LAYERS, "heads": HEADS, "dim": DIM, "dtype": torch.float32, "tokens": 512}


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


@pytest.fixture(autouse=True)
def parallel():
    with sgl.parallel():
        yield


def ask_vllm(folder: Path, prompt: list[int], store: Path, block_size: int) -> Answer:
    connector = kvx_connector([f"disk:{store}"], model=sgl.MODEL, block_size=block_size)
    return generate(folder, [prompt], max_tokens=32, connector=connector, python=VLLM)


def controller(store: Path, pool, page_size: int, **extra):
    return sgl.controller(store, pool, page_size, device=sgl.mha_device_pool(page_size=page_size, **POOL), **extra)


def content_of(pool, indices: torch.Tensor) -> kvx.Digest:
    found = read_pool("kv", pool, model=sgl.MODEL, ranks=Ranks())
    ids = found.blocks(found.pages(indices, indices.numel() // found.page_size))
    return kvx.digest(list(found.buffers), found.spec, blocks=[ids])


def content_in(store: Path, prompt: list[int], block_size: int) -> kvx.Digest:
    """Of vLLM's own blocks of the prompt in the store."""
    spec = CacheSpec(1, block_size, HEADS, DIM, layout=NEUTRAL, format="f32", num_layers=LAYERS, model=sgl.MODEL)
    kind = BlockKind.of(spec)
    with TierOption.parse(f"disk:{store}").open(kind) as tier:
        blocks = tier.get(names(prompt[:COUNT], block_size, sgl.MODEL)).result()
    assert None not in blocks
    memory = [block.buffers[0] for block in blocks]
    return kvx.digest(memory, spec.replaced(num_blocks=len(memory)), blocks=[list(range(len(memory)))])


def computed(folder: Path, prompt: list[int], pool) -> torch.Tensor:
    """Pages of the pool with K and V of the prompt, as Transformers computes them."""
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvx.adapters.transformers.handover import export_cache

    model, cache = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), DynamicCache()
    with torch.no_grad():
        model(torch.tensor([prompt]), past_key_values=cache)
    handover = export_cache(cache, prompt, model=sgl.MODEL, block_size=16).cut(COUNT)
    found = read_pool("kv", pool, model=sgl.MODEL, ranks=Ranks())
    pool.alloc(2 * pool.page_size)
    where = pool.alloc(COUNT)
    handover.write(0, list(found.buffers), found.spec, blocks=found.blocks(found.pages(where, COUNT // pool.page_size)))
    return where


@pytest.mark.parametrize(
    ("layout", "page_size", "block_size"), [("page_first", 64, 16), ("layer_first", 16, 64), ("page_head", 32, 32)]
)
def test_vllm_finds_what_sglang_wrote(folder, prompt, alone, tmp_path, layout, page_size, block_size):
    pool = sgl.mha_pool(layout, page_size=page_size, **POOL)
    where, keys = computed(folder, prompt, pool), sgl.keys(prompt[:COUNT], page_size)
    one = controller(tmp_path, pool, page_size)
    one.write_storage(where, prompt[:COUNT], hash_value=keys)
    assert one.ack_backup_queue.get(timeout=20).completed_tokens == COUNT
    one.detach_storage_backend()
    answer = ask_vllm(folder, prompt, tmp_path, block_size)
    assert answer.cached == [COUNT]
    assert answer.tokens[0] == alone
    assert content_in(tmp_path, prompt, block_size) == content_of(pool, where)


@pytest.mark.parametrize(("layout", "page_size", "block_size"), [("page_first", 64, 16), ("page_head", 16, 64)])
def test_sglang_finds_what_vllm_wrote(folder, prompt, alone, tmp_path, layout, page_size, block_size):
    """SGLang has no tokens: vLLM writes records under its names, as it sees in the directory that SGLang is there."""
    pool = sgl.mha_pool(layout, page_size=page_size, **POOL)
    one = controller(tmp_path, pool, page_size)
    answer = ask_vllm(folder, prompt, tmp_path, block_size)
    assert (answer.cached, answer.tokens[0]) == ([0], alone)
    one.prefetch("request", prompt)
    operation = one.prefetch_hit_queue.get(timeout=20)
    assert operation.storage_hit_count == COUNT
    operation.host_indices = pool.alloc(COUNT)
    one.prefetch_buffer.put(operation)
    done = [one.ack_prefetch_queue.get(timeout=20) for _ in range(2)]
    assert max(ack.completed_tokens or 0 for ack in done) == COUNT
    assert content_of(pool, operation.host_indices) == content_in(tmp_path, prompt, block_size)
    one.detach_storage_backend()


def test_sglang_that_comes_later_finds_it_once_vllm_was_asked_again(folder, prompt, alone, tmp_path):
    ask_vllm(folder, prompt, tmp_path, 16)
    pool = sgl.mha_pool("page_first_direct", page_size=32, **POOL)
    store = sgl.backend(tmp_path, pool)
    keys = [name.hex() for name in page_names(prompt[:COUNT], 32)]
    assert store.batch_exists(keys) == 0
    assert ask_vllm(folder, prompt, tmp_path, 16).cached == [COUNT]
    again = sgl.backend(tmp_path, pool)
    assert again.batch_exists(keys) == COUNT // 32
