"""Cases of write and gather: one dataclass each, printing as a readable id. Unused slots hold NaN, unused table entries 2**30."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import kvx

HUGE_ID = 2**30
FUSED_NHD = "block token head (kv dim)"
FUSED_HND = "block head token (kv dim)"
STACKED = "block kv token head dim"
FLAT = "kv | (block token) head dim"
LATENT = "block token (head kv dim)"  # one head: [num_blocks, block_size, latent and rotary part]
OLD_VLLM = "kv[K: | block head dim/x token dim%x; V: | block head dim token]"
LAYOUTS = {
    "NHD": kvx.NHD,
    "HND": kvx.HND,
    "packed8": kvx.hnd_packed(8),
    "fused_NHD": FUSED_NHD,
    "fused_HND": FUSED_HND,
    "stacked": STACKED,
    "flat": FLAT,
    "old_vllm": OLD_VLLM,
}
IO = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Case:
    layout: str = "NHD"
    format: str = "bf16"
    io: str = "bf16"
    num_blocks: int = 7
    block_size: int = 4
    num_kv_heads: int = 3
    head_dim: int = 32
    v_head_dim: int = 0
    v_format: str = ""
    lens: tuple[int, ...] = (9, 0, 4, 5)
    index: torch.dtype = torch.int64
    odd_values: bool = False  # NaN, infinities, zeros, subnormals among the inputs
    note: str = field(default="", compare=False)

    def __str__(self) -> str:
        base = Case()
        parts = [self.note] if self.note else []
        for name in (
            "layout",
            "format",
            "io",
            "num_blocks",
            "block_size",
            "num_kv_heads",
            "head_dim",
            "v_head_dim",
            "v_format",
            "lens",
        ):
            value = getattr(self, name)
            if value != getattr(base, name) or name in ("layout", "format"):
                parts.append(str(value) if isinstance(value, str) else f"{name}={value}".replace(" ", ""))
        if self.index != torch.int64:
            parts.append("i32")
        if self.odd_values:
            parts.append("odd")
        return "-".join(parts)

    @property
    def spec(self) -> kvx.CacheSpec:
        return kvx.CacheSpec(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            layout=LAYOUTS.get(self.layout, self.layout),
            format=self.format,
            v_format=self.v_format,
        )

    def with_(self, **changes: object) -> Case:
        return replace(self, **changes)

    def make(self, device: str, generator: torch.Generator) -> Made:
        """Inputs, tables and a poisoned cache, the same for every device."""
        spec = self.spec
        max_blocks = max((n + self.block_size - 1) // self.block_size for n in (*self.lens, 1)) + 1
        free = torch.randperm(spec.num_blocks, generator=generator).tolist()
        table = torch.full((len(self.lens), max_blocks), HUGE_ID, dtype=self.index)
        slots = []
        for s, n in enumerate(self.lens):
            for pos in range(n):
                if pos % self.block_size == 0:
                    table[s, pos // self.block_size] = free.pop()
                slots.append(int(table[s, pos // self.block_size]) * self.block_size + pos % self.block_size)
        slots_t = torch.tensor([*slots, -1, -7], dtype=self.index)  # two tokens at the end are skipped
        tokens = slots_t.shape[0]
        k, v = (values(tokens, self.num_kv_heads, p.head_dim, IO[self.io], generator, self.odd_values) for p in spec.planes)
        storage = kvx.allocate(spec)
        for t in (storage.cache,) if isinstance(storage.cache, Tensor) else storage.cache:
            poison(t)
        scales = {"k_scale": storage.k_scale, "v_scale": storage.v_scale}
        for i, name in enumerate(scales):
            kind = spec.plane(i).format.granularity
            if scales[name] is not None and kind <= kvx.Granularity.BLOCK_HEAD:
                scales[name].copy_(torch.rand(scales[name].shape, generator=generator) * 0.1 + 0.01)
            elif scales[name] is not None:
                poison(scales[name])
        made = Made(self, spec, storage.cache, k, v, slots_t, table, torch.tensor(self.lens, dtype=self.index), scales)
        return made.to(device)


def poison(t: Tensor) -> None:
    t.view(torch.uint8).fill_(0xFF)  # NaN in every float type, -1 in every integer one


def values(tokens: int, heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator, odd: bool) -> Tensor:
    x = torch.randn(tokens, heads, dim, generator=generator) * torch.exp(2 * torch.randn(tokens, heads, 1, generator=generator))
    if odd and x.numel():
        flat = x.view(-1)
        special = torch.tensor(
            [
                float("nan"),
                float("inf"),
                -float("inf"),
                0.0,
                -0.0,
                1e-40,
                -1e-30,
                448.0,
                464.0,
                57344.0,
                65504.0,
                3e38,
                0.5,
                -0.5,
                2.5,
            ]
        )
        at = torch.randint(0, flat.numel(), (max(len(special), flat.numel() // 8),), generator=generator)
        flat[at] = special[torch.arange(at.numel()) % len(special)]
        x[0] = 0.0  # a whole token of zeros: computed scales meet their floor
    return x.to(dtype)


@dataclass
class Made:
    case: Case
    spec: kvx.CacheSpec
    cache: Tensor | tuple[Tensor, ...]
    k: Tensor
    v: Tensor
    slots: Tensor
    block_table: Tensor
    seq_lens: Tensor
    scales: dict[str, Tensor | None]

    def to(self, device: str) -> Made:
        def move(x):
            return None if x is None else tuple(move(y) for y in x) if isinstance(x, tuple) else x.to(device)

        scales = {n: move(s) for n, s in self.scales.items()}
        return Made(
            self.case,
            self.spec,
            move(self.cache),
            move(self.k),
            move(self.v),
            move(self.slots),
            move(self.block_table),
            move(self.seq_lens),
            scales,
        )

    def clone(self) -> Made:
        def copy(x):
            return None if x is None else tuple(copy(y) for y in x) if isinstance(x, tuple) else x.clone()

        return Made(
            self.case,
            self.spec,
            copy(self.cache),
            self.k,
            self.v,
            self.slots,
            self.block_table,
            self.seq_lens,
            {n: copy(s) for n, s in self.scales.items()},
        )

    def write(self, backend: str, **more: object) -> None:
        kvx.write(self.cache, self.k, self.v, slot_mapping=self.slots, spec=self.spec, backend=backend, **self.scales, **more)

    def gather(self, backend: str, **more: object) -> tuple[Tensor, Tensor]:
        more.setdefault("max_seq_len", max((*self.case.lens, 1)) + 2)
        more.setdefault("dtype", IO[self.case.io])
        table = more.pop("table", None) or kvx.PackedTable(self.block_table, self.seq_lens)
        return kvx.gather(self.cache, table, spec=self.spec, backend=backend, **self.scales, **more)

    def tensors(self) -> dict[str, Tensor]:
        caches = (self.cache,) if isinstance(self.cache, Tensor) else self.cache
        return {
            **{f"cache[{i}]": c for i, c in enumerate(caches)},
            **{n: s for n, s in self.scales.items() if s is not None},
        }


PLAIN = [Case(layout=layout, format=f, io=io) for layout in LAYOUTS for f, io in (("bf16", "bf16"), ("f32", "f16"), ("f16", "f32"))]
QUANTISED = [
    Case(layout=layout, format=f, io=io, head_dim=max(32, kvx.FORMATS[f].group_size), odd_values=odd)
    for f in kvx.FORMATS
    if kvx.FORMATS[f].element.is_quantised
    for layout, io, odd in (("NHD", "bf16", False), ("HND", "f32", True), ("fused_HND", "f16", True))
]
MLA_RECORD = Case(
    layout=LATENT, format="fp8_e4m3_per_128_inline", v_format="bf16", num_kv_heads=1, head_dim=512, v_head_dim=64, note="656_bytes"
)
SHAPES = [
    Case(head_dim=1, num_kv_heads=1, block_size=1, num_blocks=40, note="smallest"),
    Case(head_dim=7, format="f32", io="f32", note="odd_dim"),
    Case(head_dim=7, format="fp8_e4m3_per_token_head", note="odd_dim"),
    Case(head_dim=80, format="int8_per_token_head", note="dim80"),
    Case(head_dim=96, format="fp8_e4m3_per_token_head", io="f16", note="dim96"),
    Case(head_dim=128, num_kv_heads=8, format="fp8_e4m3_per_token_head", block_size=16, lens=(33, 16), note="usual"),
    Case(head_dim=256, num_kv_heads=5, format="int8_per_token_head_inline", layout="fused_NHD", note="inline"),
    Case(head_dim=192, v_head_dim=128, format="bf16", note="mla_like"),
    Case(head_dim=64, v_head_dim=32, format="fp8_e4m3", v_format="nvfp4", note="mixed"),
    Case(head_dim=64, v_head_dim=128, format="bf16", v_format="int8_per_token_head", note="mixed"),
    Case(head_dim=64, v_head_dim=128, layout="fused_NHD", note="fused_uneven"),
    MLA_RECORD,
    MLA_RECORD.with_(io="f32", head_dim=256, v_head_dim=16, odd_values=True),
    Case(layout="fused_HND", format="fp8_e4m3_per_128_inline", v_format="f16", head_dim=256, v_head_dim=20, note="mixed"),
    Case(layout="fused_NHD", format="f32", v_format="int4_per_token_head_inline", head_dim=40, v_head_dim=24, note="mixed"),
    Case(layout="stacked", format="fp8_e4m3_per_128_inline", v_format="bf16", head_dim=128, v_head_dim=66, note="mixed"),
    Case(block_size=3, num_blocks=11, note="block3"),
    Case(block_size=5, num_blocks=9, format="fp8_e5m2_per_block_head", note="block5"),
    Case(index=torch.int32),
    Case(lens=(), note="empty"),
    Case(lens=(4, 8, 12), num_blocks=9, note="whole_blocks"),
    Case(num_kv_heads=40, head_dim=128, note="wide"),
    Case(num_kv_heads=40, head_dim=128, format="fp8_e4m3_per_token_head", note="wide"),
    Case(layout="kv | block head dim/4 token dim%4", format="int4_per_group", head_dim=64, note="packed_int4"),
    Case(layout="packed8", format="fp8_e4m3_per_token_head", head_dim=64, note="packed_fp8"),
    Case(layout="block kv head dim/8 token dim%8", note="packed_interleaved"),
    Case(layout="kv block head dim/16 token dim%16", format="fp8_e4m3_per_token_head", head_dim=64, note="packed16_fp8"),
    Case(layout="kv block head dim/32 token dim%32", format="nvfp4", head_dim=128, note="packed32_nvfp4"),
    Case(head_dim=64, v_head_dim=128, format="nvfp4", note="uneven_groups"),
    Case(head_dim=128, v_head_dim=64, format="nvfp4", note="uneven_groups"),
    Case(layout="(kv head) block token dim", format="mxfp8", head_dim=64, note="kv_with_head"),
]
ALL = [*PLAIN, *QUANTISED, *SHAPES]
