"""vLLM on KVX's tiers: what one engine kept, another goes on with, token for token. Every engine is a process of its own."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvx import Incompatible
from kvx.handover import NEUTRAL, find, keep, names
from kvx.spec import CacheSpec
from kvx.tiers import Block, BlockKind, DiskTier
from tests.engines.small_models import make_hybrid, make_latent, make_plain
from tests.engines.vllm_process import Answer, generate, kvx_connector

MODEL = "smollm2-test"
BLOCK = 32
KEPT = CacheSpec(
    num_blocks=1, block_size=BLOCK, num_kv_heads=3, head_dim=64, num_layers=30, layout=NEUTRAL, format="f32", model=MODEL
)
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
LOSING_RANK = "KVX_TEST_LOSING_RANK"  # vllm_losing.py's
TEXT = """\
The lighthouse stood at the end of a long stone pier, and every evening the keeper walked out to light the lamp. In
winter the waves came over the wall, and he held on to a rope that his father had fixed there many years before. He
knew the name of each ship that passed, and he wrote them down in a book with the hour and the weather. One night in
November a ship came that he did not know. It had no lights and made no sound. He took his glass and looked for a
flag, but there was none. He wrote in his book: a ship without a name, at eleven, wind from the north. Then he went
down to the water to see who was on it. The door of the small boat house was open, and on the floor there lay a
letter, which was addressed to him. He read the letter by the light of the lamp. It said that"""


@pytest.fixture(scope="module")
def folder(small_model_copies) -> Path:
    return small_model_copies.folder


@pytest.fixture(scope="module")
def prompt(folder) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])


@pytest.fixture(scope="module")
def alone(folder, prompt) -> list[int]:
    """vLLM without a connector."""
    answer = generate(folder, [prompt])
    assert answer.cached == [0]
    assert len(set(answer.tokens[0])) > 10  # a text, in which a wrong cache would show
    return answer.tokens[0]


@pytest.fixture(scope="module")
def kept(folder, prompt, alone, tmp_path_factory) -> Path:
    """The tiers that a first engine filled."""
    path = tmp_path_factory.mktemp("tiers")
    answer = with_tiers(folder, prompt, path)
    assert answer.cached == [0]
    assert answer.tokens[0] == alone
    return path


@pytest.fixture(scope="module")
def transformers_alone(folder, prompt) -> list[int]:
    return continued(folder, prompt, None)


def with_tiers(folder: Path, prompt: list[int], path: Path, model: str = MODEL, **engine) -> Answer:
    return generate(folder, [prompt], connector=kvx_connector([f"disk:{path}"], model=model, block_size=BLOCK), **engine)


def tier(path: Path, spec: CacheSpec = KEPT) -> DiskTier:
    """As the connector opens it: a folder for each kind."""
    kind = BlockKind.of(spec)
    return DiskTier(path / kind.digest.hex(), kind, 10**9)


def continued(folder: Path, prompt: list[int], cache) -> list[int]:
    """32 tokens of Transformers."""
    model = load(folder)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, past_key_values=cache, do_sample=False, min_new_tokens=32, max_new_tokens=32, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def full_blocks(prompt: list[int], size: int = BLOCK) -> int:
    return (len(prompt) - 1) // size * size


def test_a_fresh_engine_goes_on_with_it(folder, prompt, alone, kept):
    answer = with_tiers(folder, prompt, kept)
    assert answer.cached == [full_blocks(prompt)]
    assert answer.tokens[0] == alone


@pytest.mark.parametrize("size", [64, 128])
def test_in_other_blocks(folder, prompt, alone, kept, size):
    answer = with_tiers(folder, prompt, kept, block_size=size)
    assert answer.cached == [full_blocks(prompt, size)]
    assert answer.tokens[0] == alone


def test_host_memory_brings_back_what_the_cache_gave_up(folder, prompt, alone):
    """Between two times of one prompt others push it out of vLLM's cache, which has 12 blocks; the host tier still has it."""
    others = [[1 + n, *prompt[:-40]] for n in range(3)]
    connector = kvx_connector(["host:1GB"], model=MODEL, block_size=BLOCK)
    answer = generate(folder, [prompt, *others, prompt], connector=connector, num_gpu_blocks_override=12, max_model_len=320)
    assert answer.cached[-1] == full_blocks(prompt)
    assert answer.tokens[0] == answer.tokens[-1] == alone


def test_vllm_to_transformers(folder, prompt, transformers_alone, kept):
    from kvx.adapters.transformers.handover import import_cache

    with tier(kept) as blocks:
        handover = find(prompt, [blocks], parts=[(range(30), 0)])
    assert handover is not None
    assert handover.num_tokens == len(prompt) // BLOCK * BLOCK
    cache = import_cache(handover, load(folder).config, model=MODEL, tokens=prompt)
    assert cache.get_seq_length() > 0
    assert continued(folder, prompt, cache) == transformers_alone


def test_transformers_to_vllm(folder, prompt, alone, tmp_path):
    from transformers import DynamicCache

    from kvx.adapters.transformers.handover import export_cache

    model, cache = load(folder), DynamicCache()
    with torch.no_grad():
        model(torch.tensor([prompt]), past_key_values=cache)
    handover = export_cache(cache, prompt, model=MODEL, block_size=BLOCK)
    with tier(tmp_path) as blocks:
        assert keep(handover, [blocks]) == len(prompt) // BLOCK
    answer = with_tiers(folder, prompt, tmp_path)
    assert answer.cached == [full_blocks(prompt)]
    assert answer.tokens[0] == alone


def test_another_models_blocks_are_not_read(folder, prompt, alone, kept):
    answer = with_tiers(folder, prompt, kept, model="another")
    assert answer.cached == [0]
    assert answer.tokens[0] == alone
    place = kept / BlockKind.of(KEPT).digest.hex()
    with pytest.raises(Incompatible, match="model: 'another' here, 'smollm2-test' there"):
        DiskTier(place, BlockKind.of(replace(KEPT, model="another")), 10**9)
    with pytest.raises(Incompatible, match="num_kv_heads: 1 here, 3 there"):  # a rank of three is no rank of one
        DiskTier(place, BlockKind.of(replace(KEPT, num_kv_heads=1, head_start=1)), 10**9)


def fine_tuned(folder: Path, path: Path) -> Path:
    """The same model with other numbers in one norm: 256 bytes of its file."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.input_layernorm.weight"] = weights["model.layers.0.input_layernorm.weight"].flip(0) * 3 - 1.5
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_two_checkpoints_of_one_geometry_never_meet(tmp_path):
    """Nobody names the model: each is named by its weights, and finds its own blocks again."""
    base, prompt = make_plain(tmp_path / "base"), numbers(203)
    tuned = fine_tuned(base, tmp_path / "tuned")
    connector = kvx_connector([f"disk:{tmp_path / 'tiers'}"], block_size=16)
    first = generate(base, [prompt], max_tokens=32, connector=connector)
    alone = generate(tuned, [prompt], max_tokens=32)
    assert first.tokens != alone.tokens  # wrong K and V would show
    got, again = (generate(tuned, [prompt], max_tokens=32, connector=connector) for _ in range(2))
    assert (first.cached, got.cached, again.cached) == ([0], [0], [192])
    assert got.tokens == again.tokens == alone.tokens
    moved = base.rename(tmp_path / "moved")  # a folder's name is no part of it
    back = generate(moved, [prompt], max_tokens=32, connector=connector)
    assert (back.cached, back.tokens) == ([192], first.tokens)


def test_what_vllm_makes_of_the_weights_is_part_of_the_name(tmp_path):
    base, prompt = make_plain(tmp_path / "base"), numbers(203)
    connector = kvx_connector([f"disk:{tmp_path / 'tiers'}"], block_size=16)
    generate(base, [prompt], max_tokens=8, connector=connector)
    other = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}}
    alone = generate(base, [prompt], max_tokens=8, **other)
    got = generate(base, [prompt], max_tokens=8, connector=connector, **other)
    assert (got.cached, got.tokens) == ([0], alone.tokens)
    with pytest.raises(RuntimeError, match=r'load_format is "dummy".*Give "model" in kv_connector_extra_config'):
        generate(base, [prompt], max_tokens=8, connector=connector, load_format="dummy")


def test_a_damaged_block_is_a_miss(folder, prompt, alone, kept):
    third = names(prompt, BLOCK, MODEL)[2]
    (path,) = kept.rglob(f"{third.hex()}.kvx")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    answer = with_tiers(folder, prompt, kept)
    assert answer.cached == [2 * BLOCK]
    assert answer.tokens[0] == alone
    assert with_tiers(folder, prompt, kept).cached == [full_blocks(prompt)]  # that run put it back


def losing(path: Path, policy: str, **extra) -> dict:
    """A connector that loses the third block of what it loads, after it was counted."""
    connector = kvx_connector([f"disk:{path}"], **extra)
    return connector | {
        "kv_connector": "LosingConnector",
        "kv_connector_module_path": "tests.engines.vllm_losing",
        "kv_load_failure_policy": policy,
    }


def blocks_in(path: Path, spec: CacheSpec, tokens: list[int]) -> list[Block | None]:
    with tier(path, spec) as blocks:
        return blocks.get(names(tokens, spec.block_size, spec.model)).result()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_is_lost_after_it_was_counted(folder, prompt, alone, kept, tmp_path, policy):
    """Three blocks are kept, the third goes; the step that was to load them computes others, whose K and V are wrong."""
    with_tiers(folder, prompt[: 3 * BLOCK + 1], tmp_path, max_tokens=1)
    connector = losing(tmp_path, policy, model=MODEL, block_size=BLOCK)
    prompts, tokens = (
        ([prompt], [alone]) if policy == "recompute" else ([prompt, prompt], [[], alone])
    )  # who asks again is answered
    answer = generate(folder, prompts, connector=connector, env={LOSING_RANK: "0", **V1_RUNNER})
    assert "KVX-TEST lost block 2: True" in answer.log
    assert answer.tokens == tokens
    for block, right in zip(blocks_in(tmp_path, KEPT, prompt), blocks_in(kept, KEPT, prompt), strict=True):
        torch.testing.assert_close(block.buffers[0], right.buffers[0], rtol=1e-3, atol=1e-3)
    again = with_tiers(folder, prompt, tmp_path)
    assert again.cached == [full_blocks(prompt)]
    assert again.tokens[0] == alone


def numbers(count: int) -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(256) for _ in range(count)]


def test_windows_and_full_views(tmp_path):
    """Gemma 3: groups with tables of their own, and null blocks behind the windows."""
    folder, prompt = make_hybrid(tmp_path / "model"), numbers(203)
    alone = generate(folder, [prompt], max_tokens=32)
    connector = kvx_connector([f"disk:{tmp_path / 'tiers'}"], block_size=16)
    first, second = (generate(folder, [prompt], max_tokens=32, connector=connector) for _ in range(2))
    assert len(set(alone.tokens[0])) > 5
    assert (first.cached, second.cached) == ([0], [192])
    assert first.tokens == second.tokens == alone.tokens
    with pytest.raises(RuntimeError, match="from token 32 of 192 on, and vLLM cannot be told of them in a model of several groups"):
        generate(
            folder, [prompt], connector=losing(tmp_path / "tiers", "recompute", block_size=16), env={LOSING_RANK: "0", **V1_RUNNER}
        )


def test_latents(tmp_path):
    """MLA's rows as one plane. vLLM's CPU backend goes on after a cache by decoding only, and computes other prompts anew.

    Its decoding and its prefill give different numbers, without a connector too, so decoded tokens are compared with decoded ones.
    """
    folder, prompt = make_latent(tmp_path / "model"), numbers(192)
    connector = kvx_connector([f"disk:{tmp_path / 'tiers'}"], block_size=16)
    first = generate(folder, [prompt], max_tokens=33, connector=connector)
    alone = generate(folder, [prompt, [*prompt, 7, 8], [*prompt, 9]], max_tokens=33)
    assert first.tokens[0] == alone.tokens[0]
    assert len(set(alone.tokens[0])) > 5
    second = generate(folder, [[*prompt, alone.tokens[0][0]], [*prompt, 7, 8]], max_tokens=32, connector=connector)
    assert second.cached == [192, 0]
    assert second.tokens[0] == alone.tokens[0][1:]
    assert second.tokens[1] == alone.tokens[1][:32]
    assert "KVX loads latents only where one token of a prompt is left to compute" in second.log
    # After a loss it computes all of a prompt: a part after a cache would come out otherwise.
    lost = generate(
        folder, [[*prompt, 9]], max_tokens=32, connector=losing(tmp_path / "tiers", "recompute", block_size=16),
        env={LOSING_RANK: "0", **V1_RUNNER},
    )  # fmt: skip
    assert "KVX-TEST lost block 2: True" in lost.log
    assert lost.tokens[0] == alone.tokens[2][:32]


def test_ranks_take_over_each_others_heads(tmp_path):
    """Two ranks keep a head each, in folders of their own: out of one rank's blocks, which have both, and the other way round."""
    folder, prompt = make_plain(tmp_path / "model"), numbers(203)
    connector = kvx_connector([f"disk:{tmp_path / 'tiers'}"], block_size=16)
    one = generate(folder, [prompt], max_tokens=32, connector=connector)
    two = [generate(folder, [prompt], max_tokens=32, connector=connector, env=TWO_RANKS, tensor_parallel_size=2) for _ in range(2)]
    assert [one.cached, two[0].cached, two[1].cached] == [[0], [192], [192]]
    assert two[0].tokens == two[1].tokens
    kinds = list((tmp_path / "tiers").iterdir())
    assert len(kinds) == 3
    (alone,) = (kind for kind in kinds if '"num_kv_heads":2' in (kind / "manifest.json").read_text())
    shutil.rmtree(alone)
    back = generate(folder, [prompt], max_tokens=32, connector=connector)
    assert (back.cached, back.tokens) == ([192], one.tokens)


def test_what_one_rank_lost_is_lost_to_all(tmp_path):
    """Rank 0 has all of its blocks; the sums over ranks that it goes on with are wrong all the same."""
    folder, prompt = make_plain(tmp_path / "model"), numbers(203)
    ranks = {"max_tokens": 32, "env": {LOSING_RANK: "1", **V1_RUNNER, **TWO_RANKS}, "tensor_parallel_size": 2}
    connector = kvx_connector([f"disk:{tmp_path / 'tiers'}"], model="plain", block_size=16)
    first = generate(folder, [prompt], **ranks, connector=connector)
    assert first.cached == [0]
    assert len(set(first.tokens[0])) > 5
    for name in names(prompt, 16, "plain")[6:]:  # so that the step which loads has others to save
        for path in (tmp_path / "tiers").rglob(f"{name.hex()}.kvx"):
            path.unlink()
    lost = generate(folder, [prompt], **ranks, connector=losing(tmp_path / "tiers", "recompute", model="plain", block_size=16))
    assert lost.log.count("KVX-TEST lost block 2: True") == 1
    again = generate(folder, [prompt], **ranks, connector=connector)
    assert again.cached == [192]
    assert first.tokens == lost.tokens == again.tokens


def test_what_cannot_be_right_is_refused(folder, prompt, tmp_path):
    with pytest.raises(RuntimeError, match="block_size is 48 in the tiers and 32 in vLLM; one divides the other"):
        generate(folder, [prompt], connector=kvx_connector([f"disk:{tmp_path}"], block_size=48))
