"""vLLM's words into a connector's: groups, block sizes, ranks' heads, the CPU's packings, and what is refused. No vLLM here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvx import BadArgument, Unsupported, allocate_buffers, convert, engine, plan
from kvx.adapters.vllm.facts import head_start, require_known
from kvx.adapters.vllm.groups import GroupFacts, read_groups, require_block_size
from kvx.adapters.vllm.packing import find_packing
from kvx.connector.groups import parts_of

H, D = 2, 8


def test_block_sizes_fit_into_each_other():
    groups = read_groups([GroupFacts("FullAttentionSpec", ("layers.0.attn",), 32, H, D, "float32")])
    for size in (16, 32, 128):
        require_block_size(size, groups)
    with pytest.raises(BadArgument, match="block_size is 48 in the tiers and 32 in vLLM; one divides the other"):
        require_block_size(48, groups)


def test_heads_of_ranks():
    assert [head_start(r, 2, 4, 2) for r in range(2)] == [0, 2]
    assert [head_start(r, 4, 2, 1) for r in range(4)] == [0, 0, 1, 1]
    assert [head_start(r, 2, 16, 2) for r in range(2)] == [0, 2]  # Gemma 4's full layers have 4 of 16


@pytest.mark.parametrize("row", ["vllm.cpu", "vllm.cpu.amx", "vllm.cpu.arm"])
def test_packings_are_found_by_what_comes_out(row):
    facts = GroupFacts("FullAttentionSpec", ("layers.0.attn",), 32, H, 64, "bfloat16")
    (group,) = read_groups([facts])

    def write(k, v, cache, slots):
        spec = engine(row).spec(num_layers=1, num_blocks=3, block_size=32, num_kv_heads=2, head_dim=64)
        plain = replace(spec, layout="layer kv | block token head dim")
        convert([k, v], [cache], plan=plan(plain, spec))

    assert find_packing(group, write) == row
    with pytest.raises(Unsupported, match=r"none of vllm\.cpu"):
        find_packing(group, lambda k, v, cache, slots: cache.view(-1)[: k.numel()].copy_(k.reshape(-1)))
    assert len(allocate_buffers(parts_of([group])[0].tier_spec(block_size=32, model="m"))) == 1


@pytest.mark.parametrize(("field", "says"), [("async_scheduling", "async_scheduling"), ("v2", "the V2 model runner")])
def test_computing_again_is_refused_where_vllm_does_it_wrong(field, says):
    def config(policy: str, **has: bool) -> SimpleNamespace:
        return SimpleNamespace(
            parallel_config=SimpleNamespace(),
            kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
            scheduler_config=SimpleNamespace(async_scheduling=has.get("async_scheduling", False)),
            use_v2_model_runner=has.get("v2", False),
        )

    require_known(config("fail", **{field: True}))
    require_known(config("recompute"))
    with pytest.raises(Unsupported, match=f'kv_load_failure_policy is "recompute" with {says}'):
        require_known(config("recompute", **{field: True}))
