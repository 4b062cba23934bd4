"""KVX's tiers behind vLLM's own OffloadingConnector: a fresh engine loads what one before it stored, token for token."""

from __future__ import annotations

import pytest

from tests.engines.small_models import make_hybrid
from tests.engines.vllm_process import generate


def offloading(path, **extra) -> dict:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KvxOffloadingSpec",
            "spec_module_path": "kvx.adapters.vllm.offloading",
            "tiers": [f"disk:{path}"],
            "model": "small",
            **extra,
        },
    }


def test_a_fresh_engine_loads_it(tmp_path):
    """A hybrid: groups with windows and without, each with a tier."""
    folder, prompt = make_hybrid(tmp_path / "model"), [(n * 37 + n // 7) % 256 for n in range(203)]
    alone = generate(folder, [prompt], max_tokens=24)
    # Stores begin in the step after, so that the last ones of an engine that ends may be lost: a second prompt lets them pass.
    first = generate(folder, [prompt, prompt[:40]], max_tokens=24, connector=offloading(tmp_path / "tiers"))
    second = generate(folder, [prompt], max_tokens=24, connector=offloading(tmp_path / "tiers"))
    assert len(set(alone.tokens[0])) > 5
    assert first.tokens[0] == alone.tokens[0]
    assert second.tokens == alone.tokens
    assert second.cached[0] >= 160


def test_chunks_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="blocks_per_chunk is 2"):
        generate(make_hybrid(tmp_path / "model"), [[1, 2, 3]], connector=offloading(tmp_path, blocks_per_chunk=2))


def test_it_wants_a_name(tmp_path):
    with pytest.raises(RuntimeError, match=r'"model" is not given.*a name that only these weights have'):
        generate(make_hybrid(tmp_path / "model"), [[1, 2, 3]], connector=offloading(tmp_path, model=""))
