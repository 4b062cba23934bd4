"""vLLM's fp8 K and V, whose scales its layers have, through the tiers and back, code for code. By its shapes: it needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvx import Unsupported
from kvx.adapters.vllm.facts import group_facts, layer_scales, tensor_facts
from kvx.adapters.vllm.groups import ModelFacts, read_groups
from kvx.adapters.vllm.layout import read_group
from kvx.connector.groups import Group, parts_of
from kvx.connector.jobs import Job
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.connector.worker import PartMover, runs_of
from kvx.handover import names
from kvx.tiers import BlockKind, TierOption

H, N, D, BLOCKS, TOKENS = 2, 16, 32, 6, list(range(48))
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
TYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class KVQuantMode(IntEnum):
    FP8_PER_TENSOR = 1
    FP8_PER_TOKEN_HEAD = 3


@dataclass
class FullAttentionSpec:
    block_size: int = N
    num_kv_heads: int = H
    head_size: int = D
    head_size_v: int = D
    dtype: torch.dtype = torch.uint8
    kv_quant_mode: KVQuantMode = KVQuantMode.FP8_PER_TENSOR


def a_group(cache_dtype: str, model_dtype: str = "bfloat16") -> Group:
    facts = group_facts(SimpleNamespace(layer_names=NAMES, kv_cache_spec=FullAttentionSpec()), cache_dtype)
    (group,) = read_groups([facts], ModelFacts(dtype=model_dtype))
    return group


def config(**scales: tuple[float, float]) -> SimpleNamespace:
    layers = {n: SimpleNamespace(_k_scale_float=k, _v_scale_float=v) for n, (k, v) in zip(NAMES, scales.values(), strict=True)}
    return SimpleNamespace(cache_config=SimpleNamespace(), compilation_config=SimpleNamespace(static_forward_context=layers))


def mover(group: Group, caches: dict[str, torch.Tensor], told: SimpleNamespace, folder: Path, format: str = "") -> PartMover:
    (part,) = parts_of([group])
    spec = part.tier_spec(block_size=N, model="weights-of-a-test", format=format)
    kind = part.kind(spec, 1)
    stack = TierStack(kind, [open_tier(TierOption("disk", 10**9, folder), kind)])
    facts = [tensor_facts(t) for t in caches.values()]
    segments = read_group(group, facts, part.layers, num_blocks=BLOCKS, layout="LBNHC")
    return PartMover(part, spec, stack, runs_of(segments, caches, layer_scales(group, told)))


def memory(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every code that is a number, in vLLM's view [block, head, token, K|V] of memory [block, token, head, K|V]."""
    torch.manual_seed(3)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(dtype).float().isfinite()]
    codes = codes[~((codes.view(dtype).float() == 0) & (codes != 0))]  # -0 has a code of its own
    picked = {name: codes[torch.randint(len(codes), (BLOCKS, N, H, 2 * D))] for name in NAMES}
    return {name: t.permute(0, 2, 1, 3) for name, t in picked.items()}


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.0173, 3.7)])
@pytest.mark.parametrize(("cache_dtype", "model_dtype"), [("fp8", "bfloat16"), ("fp8_e5m2", "float16"), ("fp8", "float32")])
def test_codes_come_back_as_they_were(tmp_path, cache_dtype, model_dtype, scales):
    group, dtype = a_group(cache_dtype, model_dtype), TYPES[cache_dtype]
    told = config(a=scales, b=(scales[1], scales[0]))
    here, there = memory(dtype), {name: torch.zeros(BLOCKS, N, H, 2 * D, dtype=torch.uint8).permute(0, 2, 1, 3) for name in NAMES}
    keys = tuple(names(TOKENS, N, "weights-of-a-test"))
    # vLLM registers bytes, or the type itself.
    one = mover(group, {name: t.view(dtype) for name, t in here.items()} if scales[0] == 1.0 else here, told, tmp_path)
    assert one.save(Job("r", 0, 48, keys, ((3, 1, 5),), 0, 48)) == 3
    assert mover(group, there, told, tmp_path).load(Job("r", 0, 48, keys, ((2, 4, 1),), 48, 49)) == []
    for name in NAMES:
        assert torch.equal(there[name][[2, 4, 1]], here[name][[3, 1, 5]])
        assert not there[name][[0, 3, 5]].any()
    # In the store they are numbers, which who reads needs no scale for: head, layer, K or V, token, element.
    (block,) = one.stack.get(keys[:1])
    kept = block.buffers[0].view(-1).view(torch.float32 if model_dtype == "float32" else torch.bfloat16).view(H, 2, 2, N, D)
    want = here[NAMES[0]][3].contiguous().view(dtype).float()[..., :D] * scales[0]
    torch.testing.assert_close(kept[:, 0, 0].float(), want, rtol=2**-8, atol=0)


def test_scales_that_differ_are_applied(tmp_path):
    """Another engine of the same model, calibrated otherwise: the numbers are the same, up to fp8."""
    group, here = a_group("fp8"), memory(torch.float8_e4m3fn)
    keys = tuple(names(TOKENS, N, "weights-of-a-test"))
    mover(group, here, config(a=(1.0, 1.0), b=(1.0, 1.0)), tmp_path).save(Job("r", 0, 48, keys, ((3, 1, 5),), 0, 48))
    there = {name: torch.zeros(BLOCKS, N, H, 2 * D, dtype=torch.uint8).permute(0, 2, 1, 3) for name in NAMES}
    mover(group, there, config(a=(2.0, 2.0), b=(2.0, 2.0)), tmp_path).load(Job("r", 0, 48, keys, ((2, 4, 1),), 48, 49))
    for name in NAMES:
        a = here[name][3].contiguous().view(torch.float8_e4m3fn).float()
        b = there[name][2].contiguous().view(torch.float8_e4m3fn).float() * 2
        torch.testing.assert_close(a, b, rtol=2**-4, atol=2**-8)


def test_rounded_numbers_have_a_kind_of_their_own():
    (part,) = parts_of([a_group("fp8")])
    spec = part.tier_spec(block_size=N, model="m")
    assert part.kind(spec, 1).manifest["rounded"] == "fp8_e4m3"
    assert part.kind(spec, 1).digest != BlockKind.of(spec).digest
    small = part.tier_spec(block_size=N, model="m", format="fp8_e4m3_per_token_head_inline")
    assert part.kind(small, 1).num_bytes < 0.6 * part.kind(spec, 1).num_bytes


def test_what_is_not_known_is_refused():
    spec = FullAttentionSpec(kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)
    with pytest.raises(Unsupported, match="kv_quant_mode=3, which changes what its bytes mean"):
        read_groups([group_facts(SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec), "fp8_per_token_head")])
    with pytest.raises(Unsupported, match="holds fp8_inc"):
        a_group("fp8_inc")
    told = config(a=(1.0, 0.0), b=(1.0, 1.0))
    with pytest.raises(Unsupported, match=r"scales of K and V of model\.layers\.0\.self_attn\.attn are \[1\.0, 0\.0\]"):
        layer_scales(a_group("fp8"), told)
    told.cache_config.calculate_kv_scales = True
    with pytest.raises(Unsupported, match="calculate_kv_scales makes scales of the first prompt"):
        layer_scales(a_group("fp8"), told)
