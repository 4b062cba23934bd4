"""kvx bench append: a fused QKV to rotated Q and a written cache, against torch's own steps and a plain copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.bench.harness import COLD_BYTES, LAYOUTS, Row, time_calls

MAX_POSITIONS = 32768


@dataclass(frozen=True)
class AppendCase:
    tokens: int
    layout: str = "NHD"
    format: str = "bf16"
    norm: bool = True
    rope: str = "half"
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    rotary: int = 128
    block: int = 16

    @property
    def label(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "layout": self.layout,
            "tokens": self.tokens,
            "norm": self.norm,
            "rope": self.rope,
            "heads": f"{self.heads}/{self.kv_heads}",
            "dim": self.dim,
            "rotary": self.rotary,
            "block": self.block,
        }

    @property
    def spec(self) -> kvx.CacheSpec:
        blocks = max(64, 2 * self.tokens // self.block)
        return kvx.CacheSpec(blocks, self.block, self.kv_heads, self.dim, layout=LAYOUTS[self.layout], format=self.format)


def cases(device: str) -> Iterator[AppendCase]:
    large = 8192 if device == "cuda" else 4096
    for layout in ("NHD", "HND", "fused"):
        yield AppendCase(large, layout)
    yield AppendCase(large, norm=False)
    yield AppendCase(large, rope="interleaved")
    yield AppendCase(large, dim=64, rotary=64, heads=64)
    yield AppendCase(large, dim=256, rotary=64, heads=16, kv_heads=2)
    for fmt in ("fp8_e4m3", "fp8_e4m3_per_token_head", "int8_per_token_head", "int8_per_token_head_f16", "nvfp4"):
        yield AppendCase(large, "HND", fmt)
    for tokens in (1, 64, 1024) if device == "cuda" else (1, 64):
        yield AppendCase(tokens)
        yield AppendCase(tokens, "HND", "fp8_e4m3_per_token_head")


@dataclass
class AppendInputs:
    """Buffers of one call; several sets rotate so that none is cached. They share cos and sin, as layers of a model do."""

    storage: kvx.Storage
    qkv: Tensor
    q_out: Tensor
    slots: Tensor
    how: dict[str, Any]


def make_tables(case: AppendCase, device: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(99)
    angle = torch.rand(MAX_POSITIONS, case.rotary // 2, generator=g) * 6.3
    how: dict[str, Any] = {"rope": case.rope, "cos": angle.cos().to(device), "sin": angle.sin().to(device)}
    if case.norm:
        how |= {f"{name}_weight": (torch.randn(case.dim, generator=g) * 0.1 + 1).to(torch.bfloat16).to(device) for name in "qk"}
    return how


def make_set(case: AppendCase, device: str, seed: int, tables: dict[str, Any]) -> AppendInputs:
    g = torch.Generator().manual_seed(seed)
    spec = case.spec
    blocks = torch.randperm(spec.num_blocks, generator=g)[: -(-case.tokens // case.block)]
    slots = (blocks[:, None] * case.block + torch.arange(case.block)).flatten()[: case.tokens]
    qkv = torch.randn(case.tokens, (case.heads + 2 * case.kv_heads) * case.dim, generator=g).to(torch.bfloat16).to(device)
    # Prefill: one after another; decode: anywhere.
    positions = (
        torch.arange(case.tokens) + seed if case.tokens > 1024 else torch.randint(0, MAX_POSITIONS, (case.tokens,), generator=g)
    )
    q_out = torch.empty(case.tokens, case.heads, case.dim, dtype=torch.bfloat16, device=device)
    storage = kvx.allocate(spec, device)
    for scale in (storage.k_scale, storage.v_scale):
        if scale is not None and scale.dim() == 0:
            scale.fill_(0.02)
    return AppendInputs(storage, qkv, q_out, slots.to(device), {**tables, "positions": positions.to(device)})


def moved_bytes(case: AppendCase) -> int:
    """QKV read once, Q and cells written once; slots, positions and one row of cos and sin a token read once."""
    rows = (2 * case.heads + 2 * case.kv_heads) * case.dim * 2
    return case.tokens * (rows + case.spec.token_bytes + 16 + case.rotary * 4)


def append(s: AppendInputs, spec: kvx.CacheSpec, backend: str = "auto") -> None:
    kvx.qkv_norm_rope_append(
        s.q_out, s.storage.cache, s.qkv, slot_mapping=s.slots, spec=spec, backend=backend, **s.how, **s.storage.scales()
    )


def eager(case: AppendCase, s: AppendInputs) -> None:
    """What an engine writes in torch: split, rms_norm, rotate, index_copy_."""
    q, k, v = s.qkv.split([h * case.dim for h in (case.heads, case.kv_heads, case.kv_heads)], dim=1)
    c, sn = (s.how[name][s.how["positions"]][:, None] for name in ("cos", "sin"))
    made = []
    for x, weight in ((q, s.how.get("q_weight")), (k, s.how.get("k_weight"))):
        x = x.unflatten(1, (-1, case.dim))
        x = x if weight is None else torch.nn.functional.rms_norm(x, (case.dim,), weight, 1e-6)
        lo, hi = x.float().chunk(2, -1)
        made.append(torch.cat([lo * c - hi * sn, hi * c + lo * sn], -1).to(x.dtype))
    s.q_out.copy_(made[0])
    k_cache, v_cache = (t.view(-1, case.kv_heads, case.dim) for t in s.storage.cache)
    k_cache.index_copy_(0, s.slots, made[1])
    v_cache.index_copy_(0, s.slots, v.unflatten(1, (-1, case.dim)))


def run(case: AppendCase, device: str, ceiling_gbps: float) -> Row:
    spec, size = case.spec, moved_bytes(case)
    count = min(16, max(2, COLD_BYTES // size)) if device == "cuda" else 3
    tables = make_tables(case, device)
    sets = [make_set(case, device, seed, tables) for seed in range(count)]
    check(sets[0], spec, case)
    ours = time_calls([partial(append, s, spec) for s in sets], device)
    peer = None
    if (case.format, case.layout, case.rope, case.rotary) == ("bf16", "NHD", "half", case.dim):
        peer = time_calls([partial(eager, case, s) for s in sets], device)
    return Row("append", case.label, size, ours, peer, ceiling_gbps)


def check(s: AppendInputs, spec: kvx.CacheSpec, case: AppendCase) -> None:
    """The timed buffers hold what the definition puts there."""
    append(s, spec)
    want = make_set(case, str(s.qkv.device.type), 0, {n: x for n, x in s.how.items() if n != "positions"})
    append(want, spec, "torch")
    pairs: list[tuple[Any, Any]] = [(s.storage.cache, want.storage.cache), (s.q_out, want.q_out)]
    pairs += [(s.storage.k_scale, want.storage.k_scale), (s.storage.v_scale, want.storage.v_scale)]
    for got, expected in pairs:
        for a, b in zip(_list(got), _list(expected), strict=True):
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                raise AssertionError(f"append differs from the definition for {spec}; nothing was timed")


def _list(x: Any) -> list[Tensor]:
    return [] if x is None else [x.reshape(-1)] if isinstance(x, Tensor) else [t.reshape(-1) for t in x]
