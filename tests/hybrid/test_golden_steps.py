"""The steps of golden.py one by one: rotation and its tables, choice, sink, the online pool. Only the tables need transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.hybrid import golden, models
from tests.hybrid.golden import Projected


def noise(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def test_rotation_turns_neighbouring_pairs_of_the_last_dims() -> None:
    x, positions, freqs = noise(5, 3, 20), torch.tensor([0, 1, 7, 300, 65536]), golden.frequencies(8, 10000)
    got = golden.rotate(x, positions, freqs)
    assert torch.equal(got[..., :12], x[..., :12])
    turn = torch.polar(torch.ones(5, 1, 4, dtype=torch.float64), positions[:, None, None] * freqs)
    want = torch.view_as_real(torch.view_as_complex(x[..., 12:].reshape(5, 3, 4, 2)) * turn).flatten(-2)
    assert torch.allclose(got[..., 12:], want, rtol=0, atol=1e-12)
    assert torch.equal(got[0], x[0])


def test_rotation_leaves_only_the_distance() -> None:
    q, k, freqs = noise(4, 16), noise(4, 16).flip(0), golden.yarn(16, 160000, factor=16, original=65536)
    a, b = torch.tensor([3, 40, 128, 999]), torch.tensor([0, 44, 4, 996])
    dots = [(golden.rotate(q, a + s, freqs) * golden.rotate(k, b + s, freqs)).sum(-1) for s in (0, 1000)]
    assert torch.allclose(*dots, rtol=0, atol=1e-10)


def test_unrotate_is_the_inverse() -> None:
    x, positions, freqs = noise(300, 2, 64), torch.arange(300), golden.frequencies(32, 160000)
    assert torch.allclose(golden.unrotate(golden.rotate(x, positions, freqs), positions, freqs), x, rtol=0, atol=1e-12)
    assert not torch.allclose(golden.rotate(x, positions, freqs), x, rtol=0, atol=1)


def test_yarn_of_the_real_sizes() -> None:
    real = {"original": 65536, "beta_fast": 32, "beta_slow": 1}
    assert golden.yarn_range(64, 160000, **real) == (15, 25)
    plain, table = golden.frequencies(64, 160000), golden.yarn(64, 160000, factor=16, **real)
    assert torch.equal(table[:16], plain[:16])
    assert torch.allclose(table[25:], plain[25:] / 16, rtol=1e-15, atol=0)
    assert torch.allclose(table[20], plain[20] * (0.5 / 16 + 0.5), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dim", [64, 32, 16])
def test_tables_are_transformers(dim: int) -> None:
    models.library()
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as source

    config = source.DeepseekV4Config(head_dim=512, qk_rope_head_dim=dim, rope_parameters=dict(models.YARN))
    rotary = source.DeepseekV4RotaryEmbedding(config)
    main, compress = golden.frequencies(dim, 10000), golden.yarn(dim, 160000, factor=16, original=65536)
    assert torch.allclose(rotary.main_inv_freq.double(), main, rtol=3e-7, atol=0)
    assert torch.allclose(rotary.compress_inv_freq.double(), compress, rtol=3e-7, atol=0)
    assert rotary.compress_attention_scaling == 1  # no mscale
    x, positions = noise(9, 512, dtype=torch.float32), torch.arange(9) * 30
    cos, sin = rotary(x, position_ids=positions[None], layer_type="compress")
    want = source.apply_rotary_pos_emb(x[None, None], cos, sin)[0, 0]
    assert torch.equal(golden.rotate(x, positions, rotary.compress_inv_freq), want)


def test_select_takes_the_best_visible_and_pads() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 9.0], [1.0, 3.0, 2.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    assert golden.select(scores, torch.tensor([3, 4, 1]), 2).tolist() == [[1, 2], [3, 1], [0, -1]]
    assert golden.select(scores, torch.tensor([0, 2, 4]), 6).tolist() == [[-1] * 6, [1, 0, -1, -1, -1, -1], [0, 1, 2, 3, -1, -1]]
    assert golden.select(scores[:, :0], torch.tensor([0, 0, 0]), 2).tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_select_breaks_ties_to_the_lower_index(value: float) -> None:
    scores = torch.full((1, 300), value)
    scores[0, [7, 200]] = 1.0
    assert golden.select(scores, torch.tensor([300]), 5).tolist() == [[7, 200, 0, 1, 2]]


def test_visible_entries() -> None:
    t = torch.tensor([0, 2, 3, 4, 6, 7, 126, 127, 254, 255])
    assert golden.num_visible(t, 4).tolist() == [0, 0, 1, 1, 1, 2, 31, 32, 63, 64]
    assert golden.num_visible(t, 128).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 2]
    assert golden.select_all(torch.tensor([0, 1, 3]), 3).tolist() == [[-1, -1, -1], [0, -1, -1], [0, 1, 2]]


def test_sink_scales_what_was_attended() -> None:
    """FlashMLA's form: attend without it, then multiply by exp(lse) / (exp(lse) + exp(sink))."""
    q, window, sinks = noise(6, 3, 16), noise(6, 16), torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    plain = golden.attend(q, window, sinks=sinks - golden.INF, num_window=6)
    logits = torch.einsum("thd,sd->ths", q, window) / 4
    lse = logits.masked_fill(torch.ones(6, 6).triu(1).bool()[:, None], -golden.INF).logsumexp(-1)
    want = plain * (lse - sinks).sigmoid()[..., None]
    assert torch.allclose(golden.attend(q, window, sinks=sinks, num_window=6), want, rtol=0, atol=1e-12)


def test_pool_reads_ovl_of_the_window_before() -> None:
    """One slot far ahead of the others is the entry; where it may stand says which slots an entry reads."""
    kv = torch.arange(12.0)[:, None]
    for t in range(12):
        ovl, cur = (Projected(kv + start, torch.zeros(12, 1)) for start in (100, 0))
        ovl.score[t] = 1000
        pooled = golden.pool_windows(cur, 4, ovl)[:, 0].tolist()
        assert [p >= 100 and p == 100 + t for p in pooled] == [False, t // 4 == 0, t // 4 == 1]
        assert pooled[0] == 1.5


@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize("num_tokens", [127, 128, 300])
def test_online_pool_is_the_direct_one(num_tokens: int, spread: int) -> None:
    g = torch.Generator().manual_seed(num_tokens)
    kv, score = torch.randn(2, num_tokens, 64, generator=g)
    cur = Projected(kv, score * spread)
    got, want = golden.pool_online(cur, 128), golden.pool_windows(cur, 128)
    assert got.shape == want.shape == (num_tokens // 128, 64)
    assert torch.allclose(got, want, rtol=0, atol=1e-6)
