"""KvxCache on a GPU: the same tokens as DynamicCache there, in f32, for models of each kind of layer."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx.adapters.transformers import KvxCache
from kvx.ops import backend as backends
from tests.adapters import test_transformers_cache as host

pytestmark = pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"cuda: {backends.reason_missing('cuda')}")


@pytest.mark.parametrize("lengths", host.SHAPES)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "Gemma3", "GptOss", "DeepseekV3"])
def test_same_tokens_as_dynamic_cache(name, lengths):
    family = host.FAMILIES[name]
    model = copy.deepcopy(host.model(name)).cuda()
    inputs = {k: v.cuda() for k, v in host.prompts(lengths).items()}
    options = {"max_new_tokens": 14, "do_sample": False}
    model.set_attn_implementation(family.own)
    want = model.generate(**inputs, **options)
    for implementation in dict.fromkeys((family.own, "kvx")):
        model.set_attn_implementation(implementation)
        cache = KvxCache(model.config, block_size=16)
        got = model.generate(**inputs, past_key_values=cache, **options)
        assert got.tolist() == want.tolist(), implementation
        host.check_blocks(cache)


def test_a_step_waits_for_nothing():
    """Decode steps through attn_implementation="kvx" never make the host wait for the device."""
    model = copy.deepcopy(host.model("Llama")).cuda()
    model.set_attn_implementation("kvx")
    cache = KvxCache(model.config, block_size=16)
    ids = torch.randint(2, host.VOCAB, (2, 20), device="cuda")
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                model(ids[:, :1], past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert cache.get_seq_length() == 24
