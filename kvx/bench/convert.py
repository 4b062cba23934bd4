"""kvx bench convert: whole caches from one engine's bytes to another's, against a plain copy and torch's permute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.bench import convert_states
from kvx.bench.convert_states import StatesCase
from kvx.bench.harness import COLD_BYTES, Row, time_calls
from kvx.layout.place import buffer_bytes
from kvx.layout.views import layer_views
from kvx.spec import Spec

_ROWS = {
    "vllm.0.22": "vllm.0.22.flash_attn",
    "vllm.0.23": "vllm.0.23",
    "vllm.0.26-nhd": "vllm.0.26.nhd",
    "vllm.0.26-hnd": "vllm.0.26.hnd",
    "vllm.blhnc": "vllm.blhnc",
    "trtllm": "tensorrt_llm",
    "stack-nhd": "dynamo.block_stack.nhd",
    "stack-hnd": "dynamo.block_stack.hnd",
    "operational": "dynamo.operational.nhd",
    "universal": "dynamo.universal",
    "packed": "tgi.paged",
}
LAYOUTS = {
    **{label: kvx.engine(name).layout for label, name in _ROWS.items()},
    "nhd": f"layer {kvx.NHD}",
    "hnd": f"layer {kvx.HND}",
    "packed-k": f"layer {kvx.hnd_packed()}",
    "transposed-v": "layer kv | block head dim token",
}


@dataclass(frozen=True)
class ConvertCase:
    src: str
    dst: str
    tokens: int = 16  # of a block
    blocks: int = 128
    layers: int = 80
    tp: str = "1:1"
    format: str = "bf16"  # of the destination
    to: str = "same"  # same: one memory; host: device to pinned host
    heads: int = 8
    dim: int = 128

    @property
    def label(self) -> dict[str, Any]:
        return {
            "src": self.src,
            "dst": self.dst,
            "block": self.tokens,
            "blocks": self.blocks,
            "layers": self.layers,
            "tp": self.tp,
            "format": self.format,
            "to": self.to,
            **({"dim": self.dim} if self.dim != 128 else {}),
        }

    def specs(self) -> tuple[list[kvx.CacheSpec], list[kvx.CacheSpec]]:
        sizes = [int(n) for n in self.tp.split(":")]
        src, dst = (
            kvx.CacheSpec(self.blocks, self.tokens, self.heads, self.dim, layout=LAYOUTS[name], num_layers=self.layers, format=fmt)
            for name, fmt in ((self.src, "bf16"), (self.dst, self.format))
        )
        return [src.shard(sizes[0], i) for i in range(sizes[0])], [dst.shard(sizes[1], i) for i in range(sizes[1])]

    @property
    def bytes(self) -> int:
        """Read and written."""
        src, dst = self.specs()
        return sum(spec.cache_bytes for spec in (*src, *dst))


PAIRS = [
    ("stack-nhd", "universal"),
    ("universal", "stack-nhd"),
    ("stack-hnd", "universal"),
    ("universal", "stack-hnd"),
    ("nhd", "hnd"),
    ("hnd", "nhd"),
    ("vllm.0.22", "trtllm"),
    ("vllm.0.23", "trtllm"),
    ("vllm.0.26-nhd", "trtllm"),
    ("trtllm", "vllm.0.26-nhd"),
    ("vllm.0.26-hnd", "trtllm"),
    ("vllm.blhnc", "trtllm"),
    ("nhd", "packed"),
    ("packed", "nhd"),
    ("nhd", "packed-k"),
    ("packed-k", "nhd"),
    ("nhd", "transposed-v"),
    ("transposed-v", "nhd"),
    ("stack-nhd", "operational"),
]


def cases(device: str) -> Iterator[ConvertCase | StatesCase]:
    yield from _kv_cases(device)
    yield from convert_states.cases(device)


def _kv_cases(device: str) -> Iterator[ConvertCase]:
    if device != "cuda":  # 512 MiB
        for src, dst in PAIRS:
            yield ConvertCase(src, dst, layers=64)
        yield ConvertCase("vllm.0.26-hnd", "vllm.0.26-hnd", layers=64, tp="4:8")
        yield ConvertCase("vllm.0.26-nhd", "trtllm", layers=8, format="fp8_e4m3_per_token_head")
        return
    for tokens, blocks in ((16, 128), (64, 32)):
        for src, dst in PAIRS:
            yield ConvertCase(src, dst, tokens, blocks)
        for layout in ("vllm.0.26-nhd", "vllm.0.26-hnd", "hnd"):
            yield ConvertCase(layout, layout, tokens, blocks, tp="4:8")
    eight = ("fp8_e4m3_per_token_head", "int8_per_token_head", "fp8_e4m3_per_token_head_inline", "fp8_e4m3", "mxfp8")
    for fmt in (*eight, "int4_per_token_head", "mxfp4", "nvfp4"):
        yield ConvertCase("vllm.0.26-nhd", "trtllm", format=fmt)
    for fmt in ("fp8_e4m3_per_token_head", "nvfp4"):
        yield ConvertCase("vllm.0.26-nhd", "trtllm", format=fmt, dim=192)
    yield ConvertCase("nhd", "hnd", format="fp8_e4m3_per_token_head")
    yield ConvertCase("nhd", "nhd", format="int8_per_token_head")
    for src, dst in (("stack-nhd", "universal"), ("vllm.0.26-nhd", "trtllm")):
        yield ConvertCase(src, dst, 16, 1)
    for blocks in (820, 3280):  # 8.6 and 34 GB, read and written
        for src, dst in (("nhd", "hnd"), ("vllm.0.26-nhd", "trtllm")):
            yield ConvertCase(src, dst, 16, blocks)
    for src, dst in (("vllm.0.26-nhd", "trtllm"), ("stack-nhd", "universal"), ("trtllm", "trtllm")):
        yield ConvertCase(src, dst, 16, 128, to="host")


def run(case: ConvertCase | StatesCase, device: str, ceiling_gbps: float) -> Row:
    if isinstance(case, StatesCase):
        return _run_states(case, device, ceiling_gbps)
    small = case.bytes < COLD_BYTES
    count = 1 if device != "cuda" else 24 if small else 2
    ours = time_calls(_calls(case.specs(), count, device, is_coded=case.format != "bf16", is_to_host=case.to == "host"), device)
    ceiling = _host_ceiling_gbps() if case.to == "host" else ceiling_gbps
    peer = _torch_peer(case, device) if case.tp == "1:1" and case.to == "same" and case.format == "bf16" and not small else None
    return Row("convert", case.label, case.bytes, ours, peer, ceiling)


def _run_states(case: StatesCase, device: str, ceiling_gbps: float) -> Row:
    ours = time_calls(_calls(case.specs(), 2 if device == "cuda" else 1, device, is_coded=bool(case.state_format)), device)
    copy = convert_states.torch_peer(case, device)
    return Row("convert", case.label, case.bytes, ours, None if copy is None else time_calls([copy], device), ceiling_gbps)


def _calls(
    specs: tuple[Sequence[Spec], Sequence[Spec]], count: int, device: str, *, is_coded: bool, is_to_host: bool = False
) -> list[Callable[[], object]]:
    """The same conversion on `count` sets of buffers, of which the first is checked."""
    src, dst = specs
    plan, num_blocks = kvx.plan(src, dst), src[0].num_blocks
    calls: list[Callable[[], object]] = []
    for n in range(count):
        g = torch.Generator().manual_seed(n)
        a = [[_random(size, device, g) for size in buffer_bytes(s)] for s in src]
        if is_coded:  # numbers, not any bits
            for view in (v for s, shard in zip(src, a, strict=True) for layer in layer_views(shard, s) for v in layer):
                assert isinstance(view.tensor, Tensor)
                view.tensor.normal_()
        b = [kvx.allocate_buffers(s, "cpu" if is_to_host else device, pin_memory=is_to_host) for s in dst]
        ids = torch.randperm(num_blocks, generator=g), torch.randperm(num_blocks, generator=g)
        bound = kvx.bind(plan, a, b, src_blocks=ids[0], dst_blocks=ids[1])
        if n == 0:
            check(plan, bound, a, b, ids)
        calls.append(bound.run)
    return calls


def _random(size: int, device: str, g: torch.Generator) -> Tensor:
    if device == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
    return torch.empty(size // 8, dtype=torch.int64).random_(generator=g).view(torch.uint8)


def check(plan: kvx.Plan, bound: Any, a: list[list[Tensor]], b: list[list[Tensor]], ids: tuple[Tensor, Tensor]) -> None:
    """The timed buffers hold what the definition puts there: the first and last pair of blocks, run alone, change nothing."""
    bound.run()
    if a[0][0].is_cuda:
        torch.cuda.synchronize()
    some = [i[[0, -1]] if len(i) > 1 else i for i in ids]
    again = [[t.clone() for t in shard] for shard in b]
    same = [[t.to(b[0][0].device) for t in shard] for shard in a]
    kvx.convert(same, again, plan=plan, src_blocks=some[0], dst_blocks=some[1], backend="torch")
    for x_shard, y_shard in zip(b, again, strict=True):
        for x, y in zip(x_shard, y_shard, strict=True):
            if not torch.equal(x, y):
                raise AssertionError("convert differs from the definition; nothing was timed")


def _host_ceiling_gbps() -> float:
    a = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    b = torch.empty(512 << 20, dtype=torch.uint8, pin_memory=True)
    samples: list[float] = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a, non_blocking=True)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return 2 * a.numel() / sorted(samples)[4] / 1e6


_VIEWS = {  # torch's way: one tensor each, permuted and copied, no block lists
    ("nhd", "hnd"): ("l k b t h d", "l k b h t d"),
    ("hnd", "nhd"): ("l k b h t d", "l k b t h d"),
    ("stack-nhd", "universal"): ("b l k t h d", "b h l k t d"),
    ("vllm.0.23", "trtllm"): ("l b k t h d", "b l k h t d"),
    ("vllm.0.26-nhd", "trtllm"): ("l b t h k d", "b l k h t d"),
    ("nhd", "packed"): ("l k b t h d", "l k b h d t"),
}


def _torch_peer(case: ConvertCase, device: str) -> Any:
    axes = _VIEWS.get((case.src, case.dst))
    if axes is None:
        return None
    sizes = {"l": case.layers, "k": 2, "b": case.blocks, "t": case.tokens, "h": case.heads, "d": case.dim}
    order = [axes[0].split().index(x) for x in axes[1].split()]
    src = torch.zeros([sizes[x] for x in axes[0].split()], dtype=torch.bfloat16, device=device)
    dst = torch.empty([sizes[x] for x in axes[1].split()], dtype=torch.bfloat16, device=device)
    return time_calls([partial(dst.copy_, src.permute(order))], device)
