"""The runner on a GPU: decode steps as CUDA graphs, the same answers as the host's, and the kernels between GEMMs."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from kvx import PagedCache
from kvx.ops import backend as backends
from kvx.runner import Engine, Params
from kvx.runner.config import ModelConfig
from kvx.runner.graph import DecodeGraphs
from kvx.runner.model import Model, kv_format_of, layer_groups
from kvx.runner.weights import random_weights

pytestmark = pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"cuda: {backends.reason_missing('cuda')}")

CONFIG = ModelConfig(
    "qwen3", vocab_size=500, hidden_size=256, intermediate_size=384, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64,
    max_seq_len=512, has_qk_norm=True,
)  # fmt: skip


def model(device: str, dtype: torch.dtype = torch.float32, kv_format: str = "auto", *, num_blocks: int = 96) -> Model:
    """The same weights on every device: far from uniform answers."""
    weights = random_weights(CONFIG, dtype=torch.float32, device="cpu", seed=1)
    name = kv_format_of(kv_format, "f32" if dtype == torch.float32 else "bf16")
    cache = PagedCache(
        layer_groups(CONFIG, num_blocks=num_blocks, block_size=16, kv_format=name), max_seqs=12, max_seq_len=256, max_tokens=64,
        device=device,
    )  # fmt: skip
    for layer in weights.layers:
        for w in (layer.qkv, layer.out, layer.gate_up, layer.down):
            w.mul_(4.0)
    weights.embed.mul_(50.0)
    if device == "cuda":
        weights = to_device(weights, dtype)
    return Model(CONFIG, weights, cache, dtype)


def to_device(value, dtype: torch.dtype):
    """Weights, their layers and tensors."""
    if isinstance(value, torch.Tensor):
        dense = value.to_dense().t().contiguous() if value.is_mkldnn else value
        return dense.to("cuda", dtype if value.dim() > 1 or value.numel() != CONFIG.head_dim // 2 else torch.float32)
    if isinstance(value, tuple):
        return tuple(to_device(v, dtype) for v in value)
    if value is None:
        return None
    return type(value)(**{k: to_device(v, dtype) for k, v in vars(value).items()})


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(1, 60))] for _ in range(n)]


@pytest.mark.parametrize("num_blocks", [96, 14], ids=["room", "preempted"])
def test_tokens_are_those_of_the_host(num_blocks):
    """f32 on both: answers grow, leave and are preempted, so that batches of many sizes run on few graphs."""
    asked, params = prompts(10), Params(max_tokens=40, ignore_eos=True)
    host = Engine(model("cpu", num_blocks=num_blocks), use_graphs=False)
    device = Engine(model("cuda", num_blocks=num_blocks))
    want = [[a.tokens for a in group] for group in host.generate(asked, params)]
    assert [[a.tokens for a in group] for group in device.generate(asked, params)] == want
    assert device.stats()["graph_replays"] > 20
    assert (device.stats()["preemptions"] > 0) == (num_blocks == 14)
    device.cache.check()


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8"])
def test_replay_equals_the_step_it_was_captured_from(kv_format):
    """Lengths, tables and slots change between replays. Attention and GEMMs of a padded batch may add up in another order."""
    made = model("cuda", torch.bfloat16, kv_format)
    cache, graphs = made.cache, DecodeGraphs(made)
    seqs = []
    for i, prompt in enumerate(prompts(9, seed=3)):
        seqs.append(cache.admit(prompt))
        cache.extend(seqs[-1], len(prompt))
        made.forward(cache.plan([(seqs[-1], len(prompt))]))
        for _ in range(3):
            for seq in seqs:
                cache.extend(seq, [(7 * i + seq.length) % CONFIG.vocab_size])
            work = [(s, 1) for s in seqs]
            want = made.forward(cache.plan(work))
            got = graphs.forward(work)
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.02 * float(want.abs().max()))
        if i == 5:
            cache.release(seqs.pop(2))
            graphs.reset()
    assert graphs.replays == 27
    cache.check()


def test_host_arrays_are_not_filled_while_they_are_sent():
    """Plans follow each other without a wait; what each one's step read is kept on the device and looked at in the end."""
    made = model("cuda")
    cache = made.cache
    seqs = [cache.admit(p) for p in prompts(8, seed=5)]
    for seq in seqs:
        cache.extend(seq, len(seq.tokens) - seq.length)
    kept, want = [], []
    busy = torch.randn(2048, 2048, device="cuda")
    for turn in range(20):
        for seq in seqs:
            cache.extend(seq, [turn])
        order = seqs[turn % 8 :] + seqs[: turn % 8]
        for _ in range(5):
            busy = busy @ busy / 2048  # copies queue up behind it
        batch = cache.plan([(s, 1) for s in order])
        kept.append((batch.tokens.clone(), batch.seq_lens.clone(), batch.slot_mapping().clone(), batch.table().block_table.clone()))
        slots = [int(cache.blocks(s)[(s.length - 1) // 16]) * 16 + (s.length - 1) % 16 for s in order]
        want.append(([turn] * 8, [s.length for s in order], slots, [cache.blocks(s).tolist() for s in order]))
    for (tokens, lens, slots, table), (want_tokens, want_lens, want_slots, want_table) in zip(kept, want, strict=True):
        assert tokens.tolist() == want_tokens
        assert lens.tolist() == want_lens
        assert slots.tolist() == want_slots
        assert [row[: len(ids)] for row, ids in zip(table.tolist(), want_table, strict=True)] == want_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [576, 4096])
def test_steps_between_gemms(dtype, width):
    fused = pytest.importorskip("kvx.runner.fused", reason="Triton is not installed")
    g = torch.Generator("cuda").manual_seed(0)

    def rows(n: int) -> torch.Tensor:
        return torch.randn(7, n, device="cuda", generator=g).to(dtype)

    h, x, weight, gate_up = rows(width), rows(width), rows(width)[0], rows(2 * width)
    sum_, before = h + x, x.clone()
    got = fused.add_rms_norm(h, x, weight, 1e-6)
    assert torch.equal(h, sum_)
    assert torch.equal(x, before)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(got, rms_norm(sum_, (width,), weight, 1e-6), **close)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(fused.silu_mul(gate_up), silu(gate) * up, **close)
