"""Reading vLLM's layouts from recorded facts: shapes, strides and names as 0.26, 0.28 and 0.32 register them. No vLLM here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvx import Unsupported, allocate_buffers, convert, plan
from kvx.adapters.vllm.facts import tensor_facts
from kvx.adapters.vllm.groups import GroupFacts, read_groups
from kvx.adapters.vllm.layout import TensorFacts, read_group
from kvx.connector.groups import parts_of
from kvx.connector.worker import runs_of

B, H, N, D, L = 5, 2, 16, 8, 3
NAMES = tuple(f"model.layers.{n}.self_attn.attn" for n in range(L))
FULL = GroupFacts("FullAttentionSpec", NAMES, N, H, D, "float32", head_size_v=D)
LATENT = GroupFacts("MLAAttentionSpec", NAMES, N, 1, 24, "bfloat16")
# vLLM 0.32's six layouts. A name is the order of the axes in memory.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def views(order: str, row: int, dtype: torch.dtype, heads: int = H, pad: int = 0) -> dict[str, torch.Tensor]:
    """The layers' views of one allocation, filled with numbers that are all different. `pad`: elements behind each block."""
    sizes = {"L": L, "B": B, "H": heads, "N": N, "C": row}
    strides, step = {}, 1
    for axis in reversed(order):
        if axis == "B":
            step += pad
        strides[axis] = step
        step *= sizes[axis]
    memory = torch.arange(step, dtype=torch.float32).to(dtype)
    shape, by = [sizes[a] for a in "LBHNC"], [strides[a] for a in "LBHNC"]
    return dict(zip(NAMES, memory.as_strided(shape, by), strict=True))


def read(facts: GroupFacts, caches: dict[str, torch.Tensor], **kwargs):
    group = read_groups([facts])[0]
    return read_group(group, [tensor_facts(caches[n]) for n in facts.layer_names], group.layers, num_blocks=B, **kwargs)


def neutral(facts: GroupFacts, caches: dict[str, torch.Tensor], **kwargs) -> list[torch.Tensor]:
    """All that the reader finds, as K and V [layer, block, token, head, dim]."""
    segments = read(facts, caches, **kwargs)
    assert len(segments) == 1
    (run,) = runs_of(segments, caches)
    spec = segments[0].spec
    plain = replace(
        spec, layout="layer kv | block token head dim" if spec.num_planes == 2 else "layer | block token head dim", block_bytes=0
    )
    out = allocate_buffers(plain)
    convert(list(run.buffers), out, plan=plan(spec, plain))
    return out


# LHBNC has its blocks inside heads: they cannot be padded.
@pytest.mark.parametrize(("name", "pad"), [(n, pad) for n in LAYOUTS for pad in (0, 64) if not pad or n != "LHBNC"])
@pytest.mark.parametrize("heads", [H, N])  # as many as tokens: a view alone could be read either way
def test_named_layouts_are_read_as_their_views_say(name, pad, heads):
    caches = views(name, 2 * D, torch.float32, heads=heads, pad=pad)
    found = neutral(replace(FULL, num_kv_heads=heads), caches, layout=name)
    for n, cache in enumerate(caches.values()):
        k, v = cache.transpose(1, 2).split(D, -1)
        for plane, want in enumerate((k, v)):
            assert torch.equal(found[2 * n + plane].view(torch.float32).view(want.shape), want)


@pytest.mark.parametrize(("name", "order"), [("NHD", "BNHC"), ("HND", "BHNC"), ("", "BNHC"), ("", "BHNC")])
def test_a_tensor_a_layer_as_in_0_26(name, order):
    caches = views("L" + order, 2 * D, torch.float32)
    caches = {k: v.permute(*("BHNC".index(a) for a in order)).contiguous() for k, v in caches.items()}
    caches = {k: v.permute(*(order.index(a) for a in "BHNC")) for k, v in caches.items()}
    found = neutral(FULL, caches, layout=name)
    for n, cache in enumerate(caches.values()):
        k, v = cache.transpose(1, 2).split(D, -1)
        assert torch.equal(found[2 * n].view(torch.float32).view(k.shape), k)
        assert torch.equal(found[2 * n + 1].view(torch.float32).view(v.shape), v)


@pytest.mark.parametrize("name", ["LBNHC", "LBHNC", "BLHNC"])
def test_latent_rows_are_one_plane(name):
    caches = views(name, 24, torch.bfloat16, heads=1)
    found = neutral(LATENT, caches, layout=name)
    for one, cache in zip(found, caches.values(), strict=True):
        assert torch.equal(one.view(torch.bfloat16).view(B, N, 1, 24), cache.transpose(1, 2))
    old = {k: v.squeeze(1) for k, v in caches.items()}  # to 0.27: [block, token, latent]
    assert all(torch.equal(a, b) for a, b in zip(neutral(LATENT, old), found, strict=True))


def test_kernel_blocks_are_pieces_of_vllms():
    facts = replace(FULL, block_size=4 * N)
    caches = views("LBHNC", 2 * D, torch.float32)
    group = read_groups([facts])[0]
    with pytest.raises(Unsupported, match="5 blocks of 16 tokens are not vLLM's 5 of 64"):
        read(facts, caches, layout="LBHNC")
    tensors = [TensorFacts((4 * B, H, N, 2 * D), (H * N * 2 * D, N * 2 * D, 2 * D, 1), 4, 0)] * L
    (segment,) = read_group(group, tensors, group.layers, num_blocks=B, layout="LBHNC")
    assert segment.pieces == 4
    assert (segment.spec.num_blocks, segment.spec.block_size) == (4 * B, N)


def test_cpu_bytes_are_a_row_of_their_own():
    caches = views("LBHNC", 2 * D, torch.float32)
    (segment,) = read(FULL, caches, layout="LBHNC", packing="vllm.cpu")
    assert segment.spec.layout == "layer | block head kv[K: dim token; V: token dim]"
    with pytest.raises(Unsupported, match="heads outside tokens, without gaps"):
        read(FULL, views("LBNHC", 2 * D, torch.float32), layout="LBNHC", packing="vllm.cpu")


@pytest.mark.parametrize(
    ("shape", "strides", "layout", "says"),
    [
        ((2, B, N, H, D), (B * N * H * D, N * H * D, H * D, D, 1), "NHD", "not the four axes"),  # 0.22
        ((B, 2, N, H, D), (2 * N * H * D, N * H * D, H * D, D, 1), "NHD", "not the four axes"),  # 0.23 - 0.25
        ((B, H, N, 2 * D), (N * H * 2 * D, N * 2 * D, 2 * D, 1), "NHD", "strides say BHN .* layout NHD says BNH"),
        ((B, H, N, 2 * D), (N * H * 2 * D, N * 2 * D, 2 * D, 1), "BHNLC", "called 'BHNLC'; known are LBNHC"),
        ((B, 2 * H, N, D), (N * H * 2 * D, N * D, D, 1), "HND", "second axis has 4 for 2 KV heads"),  # nvfp4's slots
        ((B, H, N, 2 * D + 8), (N * H * 24, N * 24, 24, 1), "HND", "a row has 24 elements where K and V make 16"),
        ((B, H, N, 2 * D), (2 * N * H * 2 * D, 2 * N * 2 * D, 4 * D, 2), "HND", "not side by side"),
        ((B, H, N, 2 * D), (N * H * 3 * D, N * 3 * D, 3 * D, 1), "HND", "gaps that no known layout has"),
        ((B - 1, H, N, 2 * D), (N * H * 2 * D, N * 2 * D, 2 * D, 1), "HND", "4 blocks of 16 tokens are not vLLM's 5 of 16"),
    ],
)
def test_what_is_not_known_is_refused(shape, strides, layout, says):
    group = read_groups([FULL])[0]
    with pytest.raises(Unsupported, match=says):
        read_group(group, [TensorFacts(shape, strides, 4, 0)] * L, group.layers, num_blocks=B, layout=layout)


def test_a_layer_that_lies_otherwise_is_refused():
    group = read_groups([FULL])[0]
    a = TensorFacts((B, H, N, 2 * D), (N * H * 2 * D, N * 2 * D, 2 * D, 1), 4, 0)
    b = TensorFacts((B, H, N, 2 * D), (2 * N * H * 2 * D, N * 2 * D, 2 * D, 1), 4, 0)
    with pytest.raises(Unsupported, match=r"model\.layers\.1\..* lies as no other layer of its group"):
        read_group(group, [a, b, a], group.layers, num_blocks=B, layout="LBHNC")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (replace(FULL, kind="CircularBufferSpec"), "CircularBufferSpec: a ring of one request has no blocks with names"),
        (replace(FULL, kind="ChunkedLocalAttentionSpec"), "a ChunkedLocalAttentionSpec with a window of 0 tokens"),
        (replace(FULL, kind="FutureSpec"), "FutureSpec: this adapter has not learned to read it"),
        (replace(FULL, dtype="uint8"), "holds uint8; it reads float32, float16, bfloat16 and, of K and V, fp8_e4m3 and fp8_e5m2"),
        (replace(LATENT, dtype="fp8_e4m3"), "holds fp8_e4m3 latents"),
        (replace(FULL, unusual={"kv_quant_mode": "4"}), "kv_quant_mode=4, which changes what its bytes mean"),
        (replace(FULL, layer_names=("draft",)), "has 0 numbers in its name"),
        (replace(LATENT, num_kv_heads=2), "latent rows of 2 heads"),
    ],
)
def test_groups_that_cannot_be_read_are_refused(facts, says):
    with pytest.raises(Unsupported, match=says):
        read_groups([facts])


def test_a_part_is_all_layers_that_see_the_same():
    """Gemma 3: five layers with windows and one without become six groups in vLLM, and two parts."""
    facts = [replace(FULL, layer_names=(f"model.layers.{n}.attn",)) for n in range(6)]
    facts = [f if n == 5 else replace(f, kind="SlidingWindowSpec", window=48) for n, f in enumerate(facts)]
    parts = parts_of(read_groups(facts))
    assert [(p.window, p.layers, len(p.groups)) for p in parts] == [(0, (5,), 1), (48, (0, 1, 2, 3, 4), 5)]
    kinds = [p.kind(p.tier_spec(block_size=16, model="m"), 2) for p in parts]
    assert kinds[0].digest != kinds[1].digest
    assert kinds[1].manifest["window"] == 48
    alone = parts[0].kind(parts[0].tier_spec(block_size=16, model="m"), 1)
    assert "window" not in alone.manifest  # as kvx.handover.keep names it


def test_chunks_are_no_windows():
    """Llama 4: after the end of a chunk nothing before is seen; inside one, all of it."""
    (part,) = parts_of(read_groups([replace(FULL, kind="ChunkedLocalAttentionSpec", window=64, block_size=16)]))
    (group,) = part.groups
    assert [group.first_seen(n) for n in (0, 63, 64, 65, 127, 128)] == [0, 0, 64, 64, 64, 128]
    (window,) = read_groups([replace(FULL, kind="SlidingWindowSpec", window=64, block_size=16)])
    assert [window.first_seen(n) for n in (0, 63, 64, 78, 79, 128)] == [0, 0, 0, 0, 16, 64]
    spec = part.tier_spec(block_size=16, model="m")
    assert part.kind(spec, 2).digest != parts_of([replace(window, layers=group.layers)])[0].kind(spec, 2).digest


def test_ranks_have_kinds_of_their_own():
    (part,) = parts_of(read_groups([FULL]))
    a, b = (part.kind(part.tier_spec(block_size=16, model="m", head_start=start), 1) for start in (0, H))
    assert a.digest != b.digest
    assert part.kind(part.tier_spec(block_size=32, model="m"), 1).digest != a.digest
    with pytest.raises(Unsupported, match="scales apart"):
        part.tier_spec(block_size=16, model="m", format="fp8_e4m3_per_token_head")


def test_stages_of_a_pipeline_have_kinds_of_their_own():
    """The whole model's kind stays as it was, and a stage's says which layers it has."""
    names = tuple(f"model.layers.{n}.attn" for n in range(3))
    (part,) = parts_of(read_groups([replace(FULL, layer_names=names)]))
    stages = [part.stage(0, 2), part.stage(2, 3)]
    specs = [p.tier_spec(block_size=16, model="m") for p in stages]
    assert [(p.layers, s.layer_start, s.num_layers) for p, s in zip(stages, specs, strict=True)] == [((0, 1), 0, 2), ((2,), 2, 1)]
    digests = {p.kind(p.tier_spec(block_size=16, model="m"), 1).digest for p in [part, *stages, part.stage(0, 3)]}
    assert len(digests) == 3
