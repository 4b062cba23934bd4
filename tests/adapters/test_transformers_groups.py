"""layer_groups beside what transformers itself stores: heads, dims, types and states of every layer, for a model of each kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.22", reason="states stand in the cache since transformers 5")

import kvx  # noqa: E402
from kvx.adapters.transformers import layer_groups  # noqa: E402
from kvx.runner import Engine  # noqa: E402
from kvx.spec.cache_spec import CacheSpec  # noqa: E402
from tests.adapters.paged_models import PLAIN, STATES, tiny  # noqa: E402

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
OTHERS = (
    "axk1", "cohere2", "dbrx", "diffllama", "falcon", "gemma2", "glm4_moe_lite", "gpt_bigcode", "hunyuan_v1_moe", "inkling_text",
    "jetmoe", "lfm2_moe", "longcat_flash", "mimo_v2_flash", "minicpm3", "mistral", "modernbert-decoder", "olmo_hybrid", "phi3",
    "qwen3_5_moe_text", "youtu",
)  # fmt: skip


@torch.no_grad()
def stored(name: str, dtype: torch.dtype) -> dict[int, tuple[Any, list[Any]]]:
    """Of each layer with something: K and V as (heads, key dim, value dim), and states as (shape, type)."""
    model = tiny(name) if dtype == torch.float32 else copy.deepcopy(tiny(name)).to(dtype)
    cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=torch.arange(3, 14)[None], past_key_values=cache, use_cache=True)
    found = {}
    for i, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        kv = None if keys is None else (keys.shape[1], keys.shape[3], layer.values.shape[3])
        parts = (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        states = [(tuple(t.shape[1:]), t.dtype) for part in parts for t in part.values() if t is not None]
        if kv or states:
            found[i] = kv, states
    return found


CASES = [(name, "f32") for name in STATES + PLAIN + OTHERS] + [(name, "bf16") for name in STATES]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_groups_are_what_transformers_stores(name, kind):
    theirs = stored(name, TYPES[kind])
    found: dict[int, tuple[Any, list[Any]]] = {i: (None, []) for i in theirs}
    for group in layer_groups(tiny(name).config, num_blocks=2, num_states=2, format=kind):
        for member in group.members:
            for i in member.layers:
                kv, states = found[i]
                if isinstance(member.spec, CacheSpec):
                    assert kv is None
                    found[i] = (member.spec.num_kv_heads, *(p.head_dim for p in member.spec.kv)), states
                else:
                    found[i] = kv, [(dict(p.axes), p.format.name) for p in sorted(member.spec.planes, key=lambda p: p.name)]
    for i, (kv, states) in theirs.items():
        assert found[i][0] == kv, i
        assert len(found[i][1]) == len(states), i
        for (axes, format), (shape, dtype) in zip(found[i][1], states, strict=True):
            unused = shape[-1] - axes["tap"] if "tap" in axes else 0
            assert unused in (0, 1), i  # transformers keeps a column that nobody reads
            sizes = [n + (unused if a == "tap" else 0) for a, n in axes.items() if (a, n) != ("column", 1)]
            assert sizes == list(shape), i
            assert TYPES[format] == dtype, i


@pytest.mark.parametrize("wrong", [None, torch.nn.Linear(2, 2)], ids=["none", "module"])
def test_an_engine_says_how_a_model_becomes_one_it_takes(wrong):
    with pytest.raises(kvx.BadArgument, match=r"Engine\(\): model is (a Linear|None) .*PagedModel\(model, cache\)"):
        Engine(wrong)
