"""torch.compile(fullgraph=True) across norm, rotation, append and merge."""

from __future__ import annotations

import torch

import kvx
from tests import compare
from tests.ops import rope, test_append


def test_append_compiles(native_backend, generator):
    made = test_append.Made.of(test_append.USUAL, rope.Rope(), native_backend.device, generator)
    want = made.to(native_backend.device)
    want_q = want.append(native_backend.name)
    spec, cache, args = made.kv.spec, made.kv.cache, made.args

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(qkv, slots):
        return kvx.qkv_norm_rope_append(None, cache, qkv * 2, slot_mapping=slots, spec=spec, **args) + 0

    got = step(rope.fuse(made.q, made.kv.k, made.kv.v) / 2, made.kv.slots)
    made.compare(got, want, want_q)


def test_norm_rope_and_merge_compile(native_backend, generator):
    x = torch.randn(5, 4, 64, generator=generator).to(native_backend.device)
    args = rope.to(native_backend.device, rope.Rope(norm="").make(5, 64, x.dtype, generator))
    weight = torch.nn.Parameter(torch.randn(64, generator=generator).to(native_backend.device), requires_grad=False)
    lses = torch.randn(5, 4, generator=generator).to(native_backend.device)

    def step(x, lses):
        y = kvx.qk_norm_rope(x, weight=weight, **args)
        return kvx.merge_attention(torch.stack([y, x]), torch.stack([lses, -lses]))[0] - x

    compare.bitwise(torch.compile(step, fullgraph=True, backend="aot_eager")(x, lses), step(x, lses))
