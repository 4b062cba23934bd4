"""kvx bench step: one decode step of a model of Qwen3-8B's shape, as a CUDA graph, beside the time of its memory traffic.

Weights are random and the cache's numbers too: times do not hang on them. Bytes are every weight once, and K and V of every token
once; the share is of what the device can read. GEMMs and attention are also timed alone; what is left is norms, append and the gaps
between kernels. Beside the GEMMs stands what torch takes for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from kvx.bench.harness import Timing, machine, read_ceiling_gbps, summarise
from kvx.cache.batch import Batch
from kvx.cache.paged import PagedCache
from kvx.cache.sequence import Sequence
from kvx.runner.config import ModelConfig
from kvx.runner.graph import DecodeGraphs
from kvx.runner.model import Model, kv_format_of, layer_groups
from kvx.runner.weights import random_weights

QWEN3_8B = ModelConfig(
    "qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128, max_seq_len=40960, rope_theta=1e6, has_qk_norm=True,
)  # fmt: skip
BATCH, CONTEXT, BLOCK = 64, 2048, 16
KV_FORMATS = ("bf16", "fp8", "int8")


@dataclass(frozen=True)
class StepRow:
    kv_format: str
    whole: Timing
    gemm: Timing  # with what is in their kernels or follows at once: SiLU, and logits in f32
    torch_gemm: Timing  # alone
    attention: Timing
    weight_bytes: int
    kv_bytes: int
    ceiling_gbps: float

    @property
    def needed_us(self) -> float:
        return (self.weight_bytes + self.kv_bytes) / self.ceiling_gbps / 1e3

    def __str__(self) -> str:
        rest = self.whole.median_us - self.gemm.median_us - self.attention.median_us

        def part(name: str, us: float, size: int) -> str:
            return f"   {name:<10} {us:8.0f} us | {size / 1e9:5.2f} GB | {size / us / 1e3 / self.ceiling_gbps:4.0%} of read\n"

        return (
            f" step KV {self.kv_format}: {self.whole.median_us:.0f} us ({self.whole.p10_us:.0f}-{self.whole.p90_us:.0f}); "
            f"memory traffic at peak bandwidth {self.needed_us:.0f} us: {self.needed_us / self.whole.median_us:.0%} of peak\n"
            + part("GEMM", self.gemm.median_us, self.weight_bytes)
            + part("by torch", self.torch_gemm.median_us, self.weight_bytes)
            + part("attention", self.attention.median_us, self.kv_bytes)
            + f"   {'rest':<10} {rest:8.0f} us | norms, append, residuals"
        )


def measure(config: ModelConfig = QWEN3_8B, batch: int = BATCH, context: int = CONTEXT) -> dict[str, Any]:
    ceiling = read_ceiling_gbps("cuda")
    weights = random_weights(config, dtype=torch.bfloat16, device="cuda")
    rows = []
    for name in KV_FORMATS:
        cache = _full_cache(config, name, batch, context)
        model = Model(config, weights, cache, torch.bfloat16)
        work = [(s, 1) for s in cache.sequences]
        _check(model, work)
        step = cache.plan(work)
        row = StepRow(
            name, _time(partial(model.forward, step)), _time(_gemms(model, batch)), _time(_torch_gemms(model, batch)),
            _time(_attention(model, step)), _weight_bytes(model),
            batch * context * sum(g.spec.of_kv.token_bytes * len(g.layers) for g in cache.groups), ceiling,
        )  # fmt: skip
        rows.append(row)
        del model, cache, step
        torch.cuda.empty_cache()
    shape = {"batch": batch, "context": context, "model": "Qwen3-8B's shape, random weights, bf16"}
    return {
        "bench": "step",
        "case": shape,
        "machine": machine("cuda"),
        "read_ceiling_gbps": ceiling,
        "rows": [asdict(r) for r in rows],
    }


def show(result: dict[str, Any]) -> str:
    lines = []
    for r in result["rows"]:
        times = {k: Timing(**r[k]) for k in ("whole", "gemm", "torch_gemm", "attention")}
        lines.append(str(StepRow(**{**r, **times})))
    return "\n".join(lines)


def _check(model: Model, work: list[tuple[Sequence, int]]) -> None:
    want = model.forward(model.cache.plan(work))
    got = DecodeGraphs(model).forward(work)
    if not torch.allclose(got, want, rtol=0.05, atol=0.02 * float(want.abs().max())):
        raise AssertionError("a graph's logits are not those of the step it was captured from; nothing was timed")


def _full_cache(config: ModelConfig, kv_format: str, batch: int, context: int) -> PagedCache:
    """Sequences that have grown together, so that no two blocks of one are neighbours."""
    groups = layer_groups(
        config, num_blocks=batch * (context // BLOCK + 1), block_size=BLOCK, kv_format=kv_format_of(kv_format, "bf16")
    )
    cache = PagedCache(groups, max_seqs=batch, max_seq_len=context, max_tokens=batch, device="cuda", prefix=False)
    seqs = [cache.admit([0] * context) for _ in range(batch)]
    for _ in range(0, context, BLOCK):
        for seq in seqs:
            cache.extend(seq, BLOCK)
    for i in range(config.num_layers):
        layer = cache.layer(i)
        for t in (layer.cache,) if isinstance(layer.cache, torch.Tensor) else layer.cache:
            t.view(torch.uint8).random_(0, 0x40)  # numbers up to 2 in every format
        for scale in layer.scales.values():
            if scale is not None:
                scale.fill_(1 / 64)
    return cache


def _gemms(model: Model, batch: int) -> Callable[[], None]:
    c, w = model.config, model.weights
    x = torch.randn(batch, c.hidden_size, dtype=torch.bfloat16, device="cuda")
    wide = torch.randn(batch, c.intermediate_size, dtype=torch.bfloat16, device="cuda")
    heads = torch.randn(batch, c.num_heads * c.head_dim, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        for layer in w.layers:
            model.gemm(x, layer.qkv)
            model.gemm_parts(heads, layer.out)
            model.gated(x, layer.gate_up)
            model.gemm_parts(wide, layer.down)
        model.logits(x)

    return run


def _torch_gemms(model: Model, batch: int) -> Callable[[], None]:
    c, w = model.config, model.weights
    inputs = {n: torch.randn(batch, n, dtype=torch.bfloat16, device="cuda") for n in (c.hidden_size, c.intermediate_size)}
    inputs[c.num_heads * c.head_dim] = torch.randn(batch, c.num_heads * c.head_dim, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        for matrix in (*(m for layer in w.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)), w.head):
            inputs[matrix.shape[0]] @ matrix

    return run


def _attention(model: Model, step: Batch) -> Callable[[], None]:
    c = model.config
    q = torch.randn(step.num_tokens, c.num_heads, c.head_dim, dtype=torch.bfloat16, device="cuda")
    out, lse = torch.empty_like(q), torch.empty(step.num_tokens, c.num_heads, device="cuda")

    def run() -> None:
        attend, how = model.attention(step, q)
        for i in range(c.num_layers):
            layer = model.cache.layer(i)
            attend(q, layer.cache, step.table(layer.group), spec=layer.spec, out=out, lse=lse, **how, **layer.scales)

    return run


def _weight_bytes(model: Model) -> int:
    w = model.weights
    parts = [w.head, *(t for layer in w.layers for t in (layer.qkv, layer.out, layer.gate_up, layer.down))]
    return sum(t.numel() * t.element_size() for t in parts)


def _time(call: Callable[[], object], repeats: int = 20) -> Timing:
    """One call a graph: it reads far more than L2 holds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    samples = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return summarise(samples[3:])
