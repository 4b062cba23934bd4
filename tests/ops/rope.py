"""Norms, rotations and fused rows for the tests of qk_norm_rope and qkv_norm_rope_append."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests import cases

MAX_POSITIONS = 37


@dataclass(frozen=True)
class Rope:
    """One way to treat Q and K; prints as a readable id."""

    style: str = "half"
    norm: str = "qk"  # which of Q and K are normed: "", "q", "k", "qk"
    rotary: float = 1.0  # share of head_dim that rotates
    table: str = "f32"
    weight: str = "f32"
    offset: float = 0.0
    index: torch.dtype = torch.int64

    def __str__(self) -> str:
        parts = [self.style, f"norm_{self.norm}" if self.norm else "plain"]
        parts += [f"rotary{self.rotary:g}"] if self.rotary != 1 else []
        parts += [f"tables_{self.table}"] if self.table != "f32" else []
        parts += [f"weight_{self.weight}"] if self.weight != "f32" else []
        return "-".join([*parts, *(["offset"] if self.offset else []), *(["i32"] if self.index == torch.int32 else [])])

    def make(self, tokens: int, dim: int, io: torch.dtype, g: torch.Generator) -> dict[str, object]:
        """Keyword arguments of qkv_norm_rope; positions are not in the order of tokens."""
        made: dict[str, object] = {"rope": self.style, "eps": 1e-5, "weight_offset": self.offset}
        weight_type = cases.IO.get(self.weight, io)
        for name in self.norm:
            made[f"{name}_weight"] = (torch.randn(dim, generator=g) * 0.3 + 1).to(weight_type)
        half = int(dim * self.rotary) // 2
        if self.style != "none" and half:
            angle = torch.rand(MAX_POSITIONS, half, generator=g) * 6.3
            table = cases.IO.get(self.table, io)
            made["cos"], made["sin"] = angle.cos().to(table), angle.sin().to(table)
            made["positions"] = torch.randint(0, MAX_POSITIONS, (tokens,), generator=g).to(self.index)
        return made


ROPES = [
    Rope(),
    Rope(norm=""),
    Rope(norm="q"),
    Rope(norm="k", weight="io", offset=1.0),
    Rope("interleaved"),
    Rope("interleaved", norm="", table="io", index=torch.int32),
    Rope("none"),
    Rope("none", norm=""),
    Rope(rotary=0.5),
    Rope(rotary=0.25, norm="", table="io"),
    Rope("interleaved", rotary=0.5, weight="io"),
]


def to(device: str, values: dict[str, object]) -> dict[str, object]:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in values.items()}


def fuse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
