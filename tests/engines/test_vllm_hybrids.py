"""Hybrid models of vLLM on KVX's tiers: K, V and states of one engine are gone on with by the next, token for token.

Weights are made here, small and random; every engine is a process of its own.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvx.handover import NEUTRAL, find, keep, names, part_kind
from kvx.spec import CacheSpec, StateSpec
from kvx.spec.layer_specs import layer_specs
from kvx.tiers import DiskTier
from tests.engines import small_models
from tests.engines.vllm_process import generate, kvx_connector

BLOCK, MODEL = 32, "weights-made-by-the-test"
# vLLM's CPU kernels have Mamba-2 states at the end of a step alone, so prefix caching is off, and steps are made to end where
# blocks do.
WITHOUT_PREFIX_CACHING = {
    "enable_prefix_caching": False, "enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 4,
}  # fmt: skip


def numbers(count: int) -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(3, 256) for _ in range(count)]


def kept_in(path: Path, **extra) -> dict:
    return kvx_connector([f"disk:{path}"], model=MODEL, **extra)


@pytest.mark.parametrize(
    ("model", "count", "cached", "engine"),
    [
        ("lfm2", 300, 288, {}),
        ("falcon_h1", 300, 256, WITHOUT_PREFIX_CACHING),
        ("nemotron_h", 300, 256, WITHOUT_PREFIX_CACHING),
        ("gemma4", 300, 256, {}),  # blocks of 64 where heads are half as wide
        ("gemma3n", 300, 288, {}),
        ("llama4", 300, 288, {}),
    ],
)
def test_a_fresh_engine_goes_on_with_it(tmp_path, model, count, cached, engine):
    folder, prompt = getattr(small_models, f"make_{model}")(tmp_path / "model"), numbers(count)
    alone = generate(folder, [prompt], max_tokens=24, **engine)
    assert len(set(alone.tokens[0])) > 5  # a text, in which a wrong cache would show
    first, second = (
        generate(folder, [prompt], max_tokens=24, connector=kept_in(tmp_path / "tiers"), **engine) for _ in range(2)
    )  # fmt: skip
    assert (first.cached, second.cached) == ([0], [cached])
    assert first.tokens == second.tokens == alone.tokens


def test_a_conversation_goes_on_where_decoding_ended_a_block(tmp_path):
    """Falcon-H1 without prefix caching: the state after 320 tokens was there while the first answer was decoded."""
    folder, prompt = small_models.make_falcon_h1(tmp_path / "model"), numbers(300)
    engine = {"enable_prefix_caching": False, "async_scheduling": False}
    connector = kept_in(tmp_path / "tiers", block_size=16)
    first = generate(folder, [prompt], max_tokens=40, connector=connector, **engine)
    longer = [*prompt, *first.tokens[0], 7, 8, 9]
    alone = generate(folder, [longer], max_tokens=24, **engine)
    second = generate(folder, [longer], max_tokens=24, connector=connector, **engine)
    assert second.cached == [320]
    assert second.tokens == alone.tokens


def test_a_conversation_goes_on_where_prefix_caching_keeps_states(tmp_path):
    """LFM2 with prefix caching: the states at the ends of blocks are there, those of the answer too."""
    folder, prompt = small_models.make_lfm2(tmp_path / "model"), numbers(300)
    engine, connector = {"async_scheduling": False}, kept_in(tmp_path / "tiers")
    first = generate(folder, [prompt], max_tokens=40, connector=connector, **engine)
    longer = [*prompt, *first.tokens[0], 7, 8, 9]
    alone = generate(folder, [longer], max_tokens=24, **engine)
    second = generate(folder, [longer], max_tokens=24, connector=connector, **engine)
    assert second.cached == [320]
    assert second.tokens == alone.tokens


def test_a_state_that_is_missing_is_computed_up_to(tmp_path):
    """K and V of all the prompt are there, and the state only after 128 tokens: vLLM goes on there."""
    folder, prompt = small_models.make_lfm2(tmp_path / "model"), numbers(300)
    first = generate(folder, [prompt[:140], prompt], max_tokens=8, connector=kept_in(tmp_path / "tiers"))
    (states,) = (p for p in (tmp_path / "tiers").iterdir() if "plane[" in (p / "manifest.json").read_text())
    for name in names(prompt, BLOCK, MODEL)[4:]:
        for path in states.rglob(f"{name.hex()}.kvx"):
            path.unlink()
    second = generate(folder, [prompt], max_tokens=8, connector=kept_in(tmp_path / "tiers"))
    assert second.cached == [128]
    assert second.tokens[0] == first.tokens[1]


def test_transformers_to_vllm_and_back(tmp_path):
    """LFM2's K, V and states in one directory under one rule: each engine finds what the other kept."""
    from transformers import AutoModelForCausalLM

    from kvx.adapters.transformers import KvxCache
    from kvx.adapters.transformers.handover import export_cache, import_cache

    folder, prompt = small_models.make_lfm2(tmp_path / "model"), numbers(300)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tiers(path: Path) -> list[DiskTier]:
        """As the connector opens them: K and V of layer 1, states of the others."""
        kv = CacheSpec(1, BLOCK, 1, 32, layout=NEUTRAL, format="f32", model=MODEL)
        state = StateSpec(1, next(s.state for s in layer_specs(model.config, "f32") if s.state).planes, num_layers=3, model=MODEL)
        kinds = part_kind(kv, [1]), part_kind(state.replaced(layout=state.block_layout), [0, 2, 3])
        return [DiskTier(path / kind.digest.hex(), kind, 10**9) for kind in kinds]

    cache = KvxCache(model.config, block_size=BLOCK)
    with torch.no_grad():
        model(torch.tensor([prompt[:256]]), past_key_values=cache)
    handover = export_cache(cache, prompt[:256], model=MODEL, block_size=BLOCK)
    assert keep(handover, tiers(tmp_path / "one")) == 8
    alone = generate(folder, [prompt], max_tokens=24)
    answer = generate(folder, [prompt], max_tokens=24, connector=kept_in(tmp_path / "one"))
    assert answer.cached == [256]
    assert answer.tokens == alone.tokens
    back = find(prompt[:-1], tiers(tmp_path / "one"), parts=[((1,), 0), ((0, 2, 3), 0)])  # with what vLLM computed behind it
    assert back.num_tokens == 288
    got = import_cache(back, model.config, model=MODEL, tokens=prompt)
    own = KvxCache(model.config, block_size=BLOCK)
    with torch.no_grad():
        model(torch.tensor([prompt[:288]]), past_key_values=own)
    mine = import_cache(export_cache(own, prompt[:288], model=MODEL, block_size=BLOCK), model.config, model=MODEL, tokens=prompt)
    # Behind its attention vLLM's LFM2 computes other numbers than Transformers, without KVX too: what stands before is compared.
    torch.testing.assert_close(got.layers[1].keys, mine.layers[1].keys, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got.layers[1].values, mine.layers[1].values, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got.layers[0].conv_states[0], mine.layers[0].conv_states[0], rtol=1e-3, atol=1e-3)


def test_ranks_share_states(tmp_path):
    """Falcon-H1 on two ranks: heads are shared out, B and C are on both. A rank finds its own."""
    folder, prompt = small_models.make_falcon_h1(tmp_path / "model", kv_heads=2), numbers(300)
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    engine = {**WITHOUT_PREFIX_CACHING, "tensor_parallel_size": 2, "env": env, "max_tokens": 16}
    first, second = (generate(folder, [prompt], connector=kept_in(tmp_path / "tiers"), **engine) for _ in range(2))
    assert (first.cached, second.cached) == ([0], [256])
    assert first.tokens == second.tokens
