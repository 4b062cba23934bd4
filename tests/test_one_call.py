"""The five commonest jobs in a few lines each, and the names, sizes and orders people type."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvx
from kvx.tiers import BlockKind, CacheTiers, DiskTier, HostTier

NHD = [torch.randn(64, 16, 8, 256, dtype=torch.bfloat16) for _ in range(2)]  # [block, token, head, K and V]


def lines_of(job: Callable[..., object]) -> int:
    """Statements' lines of a job, without its head."""
    body = inspect.getsource(job).split("# ---\n")[1]
    return len([line for line in body.splitlines() if line.strip()])


# ---- the five jobs; what stands after `# ---` is what a user types


def generate(model, prompt):
    # ---
    from kvx.adapters.transformers import KvxCache

    return model.generate(prompt, past_key_values=KvxCache(model), max_new_tokens=8, do_sample=False)  # fmt: skip


def to_tensorrt(tensors):
    # ---
    converted = kvx.convert_cache(tensors, "vllm", "tensorrt_llm")
    pool, spec = converted.buffers[0], converted.spec
    return pool, spec


def write_gather_attend(k, v, q, table):
    # ---
    store = kvx.allocate(kvx.CacheSpec(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=64, format="fp8_e4m3_per_token_head"))
    store.write(k, v, store.slots(table))
    k2, v2 = store.gather(table)
    out = store.attend(q, table)
    return k2, v2, out


def prefix_loop(prompts, compute):
    # ---
    group = kvx.LayerGroup("all", range(2), kvx.CacheSpec(num_blocks=64, block_size=4, num_kv_heads=1, head_dim=8, format="f32"))
    cache = kvx.PagedCache([group], max_seqs=8, max_seq_len=64)
    for prompt in prompts:
        seq = cache.admit(prompt)  # its length: what an earlier prompt left
        cache.extend(seq, len(prompt) - seq.length)
        compute(seq, cache)  # the tokens after seq.num_cached
        cache.commit(seq)
        cache.release(seq)


def offload(cache, folder, run):
    # ---
    with CacheTiers(cache, host="2MB", disk=folder, model="my-weights"):
        run(cache)


def test_generate_with_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=99
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[5, 6, 7, 8]])
    got = generate(model, prompt)
    assert torch.equal(got, model.generate(prompt, max_new_tokens=8, do_sample=False))
    assert lines_of(generate) <= 2


def test_vllm_to_tensorrt_llm():
    pool, spec = to_tensorrt(NHD)
    assert spec.layout == kvx.engine("tensorrt_llm").layout
    assert tuple(pool.shape) == (64, 2, 2, 8, 16, 128)
    for layer, tensor in enumerate(NHD):
        for kv in range(2):
            want = tensor.unflatten(3, (2, 128))[:, :, :, kv].transpose(1, 2)  # [block, head, token, dim]
            assert torch.equal(pool[:, layer, kv], want)
    assert lines_of(to_tensorrt) <= 3


def test_write_gather_attend():
    k, v, q = (torch.randn(20, heads, 64, dtype=torch.bfloat16) for heads in (2, 2, 8))
    table = kvx.PackedTable(torch.tensor([[7, 3]], dtype=torch.int32), torch.tensor([20]))
    k2, v2, out = write_gather_attend(k, v, q[:1], table)
    step = k.abs().amax(-1, keepdim=True) / 448 * 16  # half of fp8's largest step, and the scale rounded
    assert ((k2[0] - k).abs() <= step + 1e-2 * k.abs()).all()
    assert v2.shape == k2.shape
    scores = (q[0].float().view(2, 4, 64) @ k2[0].float().permute(1, 2, 0)) / 8
    want = (scores.softmax(-1) @ v2[0].float().transpose(0, 1)).view(8, 64)
    assert (out[0].float() - want).abs().max() < 2e-2
    assert lines_of(write_gather_attend) <= 5


def test_prefix_cached_loop():
    system = list(range(12))
    found = []
    prefix_loop([[*system, 90, 91], [*system, 80, 81], [*system, 90, 91, 92]], lambda seq, cache: found.append(seq.num_cached))
    assert found == [0, 12, 12]
    assert lines_of(prefix_loop) <= 10


def test_offload_to_disk(tmp_path):
    def cache():
        spec = kvx.CacheSpec(num_blocks=16, block_size=4, num_kv_heads=1, head_dim=8, format="f32")
        return kvx.PagedCache([kvx.LayerGroup("all", (0,), spec)], max_seqs=4, max_seq_len=64)

    def run(cache):
        seq = cache.admit(range(20))
        cache.extend(seq, 20 - seq.length)
        for tensor in cache.layer(0).tensors:
            tensor.fill_(7.0)
        cache.commit(seq)
        cache.release(seq)

    offload(cache(), str(tmp_path / "kv"), run)
    again = cache()
    with CacheTiers(again, disk=str(tmp_path / "kv"), model="my-weights"):
        seq = again.admit(range(20))
        assert seq.length == 16  # the last token is left to compute
        assert float(again.layer(0).tensors[0].max()) == 7.0
    with CacheTiers(cache(), disk=str(tmp_path / "kv"), model="other-weights") as other:
        assert other.cache.admit(range(20)).length == 0
    assert lines_of(offload) <= 4


# ---- convert_cache


def test_views_as_vllm_registers_them_are_the_same_cache():
    memory = kvx.convert_cache(NHD, "vllm", "tensorrt_llm")
    views = kvx.convert_cache({f"layers.{i}": t.transpose(1, 2) for i, t in enumerate(NHD)}, "vLLM", "TensorRT-LLM")
    assert torch.equal(memory.buffers[0], views.buffers[0])
    assert memory.source == views.source
    assert views.taken_as == "vllm.0.26.nhd or vllm.lbnhc"
    assert "taken as: vllm.0.26.nhd" in repr(memory)
    assert "64 blocks of 16, 8 heads of 128" in repr(memory)
    assert "<td>" in memory._repr_html_()


def test_some_blocks_in_another_size_and_format():
    got = kvx.convert_cache(NHD, "vllm", "tensorrt_llm", blocks=[7, 3, 1], block_size=64, format="fp8_e4m3_per_token_head_inline")
    assert (got.spec.num_blocks, got.spec.block_size, got.spec.format) == (1, 64, "fp8_e4m3_per_token_head_inline")
    plain = got.source.replaced(num_blocks=1, block_size=64)
    back = [torch.zeros(1, 64, 8, 256, dtype=torch.bfloat16) for _ in NHD]
    kvx.convert(got.buffers, back, plan=kvx.plan(got.spec, plain))
    for tensor, found in zip(NHD, back, strict=True):
        want = torch.cat([tensor[7], tensor[3], tensor[1]])
        assert (found[0, :48] - want).abs().max() <= want.abs().max() / 16
        assert not found[0, 48:].any()


@pytest.mark.parametrize(
    "format", ["fp8", "int8", "fp8_e4m3_per_head", "int8_per_head", "int8_per_block_head", "int4_per_token_head"]
)
def test_scales_are_made_of_the_data(format):
    small = [t * 0.01 for t in NHD]  # which a scale of 1 would turn to nothing
    got = kvx.convert_cache(small, "vllm", "tensorrt_llm", format=format, blocks=range(8))
    back = [torch.zeros(8, 16, 8, 256, dtype=torch.bfloat16) for _ in NHD]
    kvx.convert(got.buffers, back, plan=kvx.plan(got.spec, got.source.replaced(num_blocks=8)))
    steps = {"fp8": 16, "int8": 127, "int4": 7}
    step = next(n for name, n in steps.items() if format.startswith(name))
    for want, found in zip(small, back, strict=True):
        assert (found - want[:8]).abs().max() <= want[:8].abs().max() / step


def test_k_and_v_in_either_nesting():
    k, v = ([torch.randn(1, 2, 32, 8) for _ in range(3)] for _ in range(2))
    by_plane, by_layer = (kvx.convert_cache(x, "hf", "sglang.hnd") for x in ([k, v], list(zip(k, v, strict=True))))
    assert all(torch.equal(a, b) for a, b in zip(by_plane.buffers, by_layer.buffers, strict=True))
    assert torch.equal(by_plane.buffers[1], k[1])
    assert torch.equal(by_plane.buffers[5], v[2])


def test_latents_become_latents():
    got = kvx.convert_cache([torch.randn(8, 16, 576, dtype=torch.bfloat16) for _ in range(2)], "vllm", "tensorrt_llm")
    assert got.spec.layout == kvx.engine("tensorrt_llm.mla").layout


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((64, 16, 16, 256), {}, 'fit more than one layout of "vllm".*\n  vllm.0.26.nhd: .*\n  vllm.0.26.hnd or vllm.lbhnc'),
        ((64, 8, 32, 256), {}, "vllm.cpu"),  # what vLLM's CPU backend packs has the same shape
        ((2, 2, 16, 8, 128), {}, "vllm.0.22.flash_attn.*\n.*vllm.0.22.triton or vllm.0.23"),
        ((64, 5), {}, 'no layout of "vllm" fits 2 tensors of .64, 5. bfloat16'),
        ((64, 16, 8, 256), {"block_size": 64}, "Give blocks=, the block table of one sequence"),
        ((64, 16, 8, 256), {"heads": 8}, "there is no argument heads=. It takes format, .* sizes of the source: num_layers"),
        ((64, 16, 8, 256), {"num_kv_heads": 7}, "no layout"),
        ((64, 16, 8, 256), {"blocks": 3}, r"blocks is the number 3; .* For one block give \[3\]"),
        ((64, 16, 8, 256), {"blocks": [1.5]}, r"blocks is \[1.5\]; it must be a row of block ids, whole numbers"),
        ((64, 16, 8, 256), {"block_size": -16}, "block_size is -16; it takes the tokens per block"),
        ((64, 16, 8, 256), {"format": "fp9"}, 'format "fp9" does not exist'),
        ((64, 48, 8, 256), {}, "tensorrt_llm does not take blocks of 48 tokens; it takes: power of two"),
    ],
)
def test_what_it_refuses(shape, options, said):
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(kvx.BadArgument, match=said):
        kvx.convert_cache(tensors, "vllm", "tensorrt_llm", **options)


def test_two_lists_of_two_are_refused():
    pair = [torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8)]
    with pytest.raises(kvx.BadArgument, match="two lists of two tensors are K and V of two layers in either order"):
        kvx.convert_cache([pair, pair], "hf", "vllm.lbnhc")
    assert kvx.convert_cache([*pair, *pair], "hf", "vllm.lbnhc").source.num_layers == 2
    with pytest.raises(kvx.BadArgument, match="there are no tensors"):
        kvx.convert_cache([], "hf", "vllm.lbnhc")


def test_describe_does_not_take_blocks_for_k_and_v():
    with pytest.raises(kvx.BadArgument, match="dimension kv has 64; K and V are 2"):
        kvx.describe(torch.zeros(2, 64, 16, 8, 128), "block kv token head dim")
    with pytest.raises(kvx.BadArgument, match="heads= is no size of a cache"):
        kvx.describe(torch.zeros(4, 2, 16, 8, 128), "block kv token head dim", heads=8)


# ---- names people type


@pytest.mark.parametrize(
    ("typed", "means"),
    [("fp8", "fp8_e4m3"), ("FP16", "f16"), ("half", "f16"), ("bfloat16", "bf16"), ("float32", "f32"), ("fp8-e5m2", "fp8_e5m2")],
)
def test_other_names_of_formats(typed, means):
    spec = kvx.CacheSpec(4, 4, 1, 8, format=typed, v_format=typed)
    assert (spec.format, spec.v_format) == (means, means)
    assert spec == kvx.CacheSpec(4, 4, 1, 8, format=means, v_format=means)
    assert kvx.from_json(kvx.to_json(spec)) == spec
    assert kvx.Format.named(typed).name == means


def test_a_dtype_is_a_format_and_nhd_a_layout():
    assert kvx.CacheSpec(4, 4, 1, 8, format=torch.float16).format == "f16"
    assert kvx.CacheSpec(4, 4, 1, 8, layout="nhd").layout == kvx.NHD
    assert kvx.CacheSpec(4, 4, 1, 8, layout="HND").layout == kvx.HND
    with pytest.raises(kvx.BadArgument, match="format"):
        kvx.CacheSpec(4, 4, 1, 8, format=torch.complex64)


def test_an_engine_is_its_newest_row_said_aloud():
    with pytest.warns(kvx.KvxWarning, match=r'engine "vllm" is taken as "vllm.lbnhc", the default of vLLM >= 0.28'):
        assert kvx.engine("vllm").name == "vllm.lbnhc"
    assert kvx.engine("TensorRT-LLM") is kvx.engine("trtllm") is kvx.engine("tensorrt_llm")
    assert kvx.engine("llama.cpp").name == "llama_cpp"
    with pytest.raises(kvx.BadArgument, match=r"Similar names: .*dynamo\.universal"):
        kvx.engine("dynamo")


# ---- a store


def test_a_store_says_what_it_is_and_dumps_no_tensor():
    store = kvx.allocate(kvx.CacheSpec(4, 16, 2, 64, format="int8_per_token_head"))
    assert repr(store).startswith(
        "Storage(blocks: 4 of 16 tokens, heads: 2 of dim 64, layout: kv | block token head dim, format: int8"
    )
    assert "size: 17.4 KB, device: cpu" in repr(store)
    assert "tensor(" not in repr(store)
    assert "<th>device</th><td>cpu</td>" in store._repr_html_()


def test_reprs_of_a_cache_and_a_plan():
    spec = kvx.CacheSpec(16, 4, 1, 8, format="f32")
    cache = kvx.PagedCache([kvx.LayerGroup("<b>", (0,), spec)], max_seqs=4, max_seq_len=64)
    seq = cache.admit(range(9))
    cache.extend(seq, 9)
    assert "sequences: 1 of 4, 9 tokens" in repr(cache)
    assert "3 of 16 blocks used" in repr(cache)
    assert "&lt;b&gt;" in cache._repr_html_()
    assert "<b>" not in cache._repr_html_()
    text = repr(kvx.plan(spec, kvx.CacheSpec(16, 4, 1, 8, layout="HND", format="bf16")))
    assert "from: 'kv | block token head dim' f32" in text
    assert "to: 'kv | block head token dim' bf16" in text
    assert len(text) < 400


def test_slots_of_a_table():
    table = kvx.PackedTable(torch.tensor([[7, 3], [2, 0]], dtype=torch.int32), torch.tensor([20, 5]))
    every = kvx.slot_mapping(table, block_size=16)
    positions = torch.cat([torch.arange(20), torch.arange(5)])
    seqs = torch.repeat_interleave(torch.arange(2), torch.tensor([20, 5]))
    assert torch.equal(every, kvx.slot_mapping(table.block_table, positions, seqs, 16))
    assert kvx.slot_mapping(table, block_size=16, new=1).tolist() == [3 * 16 + 3, 2 * 16 + 4]
    assert kvx.slot_mapping(table, block_size=16, new=torch.tensor([2, 0])).tolist() == [3 * 16 + 2, 3 * 16 + 3]
    short = kvx.PackedTable(table.block_table, torch.tensor([20, 1]))
    assert kvx.slot_mapping(short, block_size=16, new=2).tolist() == [50, 51, -1, 32]  # one token has no two last ones
    for wrong, said in (
        ({"new": -1}, "new is -1"),
        ({"new": torch.tensor([21, 0])}, r"new\[0\] is 21; sequence 0 has 20 tokens"),
        ({"new": torch.tensor([1])}, "new has 1 numbers; the table has 2 sequences"),
        ({"positions": torch.arange(3)}, "takes a PackedTable alone"),
    ):
        with pytest.raises(kvx.KvxError, match=said):
            kvx.slot_mapping(table, block_size=16, **wrong)
    with pytest.raises(kvx.BadArgument, match="block_size is 0"):
        kvx.slot_mapping(table)


# ---- tiers


def test_sizes_as_people_write_them():
    kind = BlockKind.of(kvx.CacheSpec(1, 4, 1, 8, format="f32", model="my-weights"))
    with HostTier(kind, "2MB") as host, tempfile.TemporaryDirectory() as folder, DiskTier(Path(folder), kind, "1.5 MB") as disk:
        assert host.capacity_blocks == 2 * 10**6 // kind.num_bytes
        assert disk.capacity_blocks > 0
    with pytest.raises(kvx.BadArgument, match='HostTier: capacity_bytes is "2 parsecs"; it takes a number and B, KB'):
        HostTier(kind, "2 parsecs")


def test_tiers_of_a_cache_that_are_refused(tmp_path):
    spec = kvx.CacheSpec(16, 4, 1, 8, format="f32")
    cache = kvx.PagedCache([kvx.LayerGroup("all", (0,), spec)], max_seqs=4, max_seq_len=64)
    for wrong, said in (
        ({}, 'Give host="2GB", disk="DIR" or both'),
        ({"disk": tmp_path / "kv"}, "the model is not named"),
        ({"host": "2"}, "2 GB. Write 2GB"),
        ({"host": "10B"}, "one block takes 256"),
        ({"tiers": [[]], "host": "2MB"}, "Give one or the other"),
        ({"tiers": "host:1GB"}, 'tiers is host:1GB; it takes a list of opened tiers.*give host="2GB"'),
        ({"tiers": ["host:1GB"]}, "it takes a list of opened tiers for each layer group"),
    ):
        with pytest.raises(kvx.BadArgument, match=said):
            CacheTiers(cache, **wrong)
    with pytest.raises(kvx.BadArgument, match=r"cache is a Storage; it takes a kvx\.PagedCache"):
        CacheTiers(kvx.allocate(spec), host="2MB", model="my-weights")  # type: ignore[arg-type]
    assert cache.prefix is not None
    assert cache.prefix.backing is None


# ---- what newcomers pass by mistake


def test_arrays_are_converted_too():
    tensors = [torch.randn(8, 16, 2, 128) for _ in range(2)]
    got, want = (kvx.convert_cache(x, "vllm.0.26.nhd", "tensorrt_llm") for x in ([t.numpy() for t in tensors], tensors))
    assert all(torch.equal(a, b) for a, b in zip(got.buffers, want.buffers, strict=True))
    with pytest.raises(kvx.BadArgument, match=r"convert_cache\(\): tensors is a str; it takes a torch tensor"):
        kvx.convert_cache("cache.kvx", "vllm", "tensorrt_llm")  # type: ignore[arg-type]


def test_a_reason_that_layouts_share_is_said_once():
    with pytest.raises(kvx.BadArgument, match=r"\n  vllm.0.26.nhd, vllm.0.26.hnd, .*: tensor 1 is \[8, 16, 4, 256\]") as refused:
        kvx.convert_cache([torch.zeros(8, 16, 2, 256), torch.zeros(8, 16, 4, 256)], "vllm", "tensorrt_llm")
    assert len(str(refused.value).splitlines()) <= 6


@pytest.mark.parametrize("wrong", [[[7, 3]], torch.tensor([[7, 3]])], ids=["list", "tensor"])
def test_a_table_without_lengths_is_refused(wrong):
    store = kvx.allocate(kvx.CacheSpec(8, 16, 2, 64))
    for call in (lambda: store.gather(wrong), lambda: store.attend(torch.zeros(1, 4, 64), wrong)):
        with pytest.raises(kvx.BadArgument, match=r"table is a (list|Tensor); it takes .*kvx.PackedTable\(block_table, seq_lens\)"):
            call()
    with pytest.raises(kvx.BadArgument, match=r"slot_mapping is a list; it takes a torch tensor.*kvx.slot_mapping makes it"):
        store.write(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), [112])  # type: ignore[arg-type]
    with pytest.raises(kvx.BadArgument, match=r"slot_mapping\(\): positions is a list; it takes a torch tensor"):
        kvx.slot_mapping(torch.tensor([[7, 3]]), [0], torch.tensor([0]), 16)  # type: ignore[arg-type]
