"""write: every backend equals the torch definition bit for bit, and touches nothing else."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases, compare


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_write_matches_definition(native_backend, case, generator):
    made = case.make(native_backend.device, generator)
    want = made.to("cpu").clone()
    want.write("torch")
    made.write(native_backend.name)
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor.cpu(), want.tensors()[name], name)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_definition_puts_rows_where_the_slot_says(layout, generator):
    made = cases.Case(layout=layout, format="f32", io="f32").make("cpu", generator)
    made.write("torch")
    k_view, v_view = kvx.views(made.cache, made.spec)
    for view, x in ((k_view, made.k), (v_view, made.v)):
        if view.dim() == 5:
            view = view.permute(0, 3, 1, 2, 4).flatten(3)
        for token, slot in enumerate(made.slots.tolist()):
            if slot >= 0:
                compare.bitwise(view[slot // 4, slot % 4], x[token])
        written = {s for s in made.slots.tolist() if s >= 0}
        for slot in set(range(made.spec.num_slots)) - written:
            assert view[slot // 4, slot % 4].isnan().all(), f"slot {slot} was touched"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3_per_head", "int8_per_token_head"])
def test_strides_of_everything_are_honoured(backend, layout, fmt, generator):
    """A cache cut out of a larger buffer, IO with permuted and padded strides, every second slot of a longer vector."""
    made = cases.Case(layout=layout, format=fmt, io="f32").make(backend.device, generator)
    big = []
    for c in made.cache:
        wide = torch.empty(c.shape[0] + 1, c.shape[1], c.shape[2] + 2, c.shape[3] * 2, dtype=c.dtype, device=c.device)
        cases.poison(wide)
        big.append(wide)
    want = made.to("cpu").clone()
    want.write("torch")
    made.cache = tuple(w[1:, :, 1:-1, : c.shape[3]] for w, c in zip(big, made.cache, strict=True))
    made.k = made.k.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    made.v = torch.stack([made.v, made.v], dim=-1)[..., 0]
    made.slots = torch.stack([made.slots, made.slots * 0 - 99], dim=-1).flatten()[::2]
    made.write(backend.name)
    for got, expected in zip(made.cache, want.cache, strict=True):
        compare.bitwise(got.cpu(), expected)
    for w, c in zip(big, made.cache, strict=True):
        c.view(torch.uint8 if c.element_size() == 1 else torch.int16).fill_(-1 if c.element_size() == 2 else 255)
        assert (w.view(torch.uint8) == 255).all(), "something outside the view was written"


def test_fused_kv_as_two_views_of_one_tensor(backend, generator):
    """vLLM >= 0.26 hands out K and V as views of one tensor: the same bytes as the fused layout."""
    fused = cases.Case(layout="fused_NHD").make(backend.device, generator)
    pair = fused.clone()
    fused.write(backend.name)
    d = pair.spec.head_dim
    views = (pair.cache[..., :d], pair.cache[..., d:])
    spec = cases.Case(layout="NHD").spec
    kvx.write(views, pair.k, pair.v, slot_mapping=pair.slots, spec=spec, backend=backend.name)
    compare.bitwise(pair.cache, fused.cache)


@pytest.mark.parametrize("fmt", ["int8_per_token_head", "fp8_e4m3_per_token_head_inline", "nvfp4", "mxfp8"])
def test_scales_given_with_tokens(native_backend, fmt, generator):
    made = cases.Case(format=fmt, head_dim=64, io="f32").make(native_backend.device, generator)
    row = made.spec.plane(0).format
    shape = (*made.k.shape[:2], row.num_groups(64)) if row.group_size else made.k.shape[:2]
    given = {f"{p}_token_scale": (torch.rand(shape, generator=generator) + 0.1).to(native_backend.device) for p in "kv"}
    want = made.to("cpu").clone()
    want.write("torch", **{n: s.cpu() for n, s in given.items()})
    made.write(native_backend.name, **given)
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor.cpu(), want.tensors()[name], name)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_e4m3_per_token_head", "int8"])
@pytest.mark.parametrize("scale", [1.0, 0.037, 3e-39, 1e30])
def test_tensor_scale_multiplies(native_backend, fmt, scale, generator):
    """Moderate scales take the short division on a device, extreme ones the long one; both are IEEE division."""
    made = cases.Case(format=fmt, head_dim=64, odd_values=True).make(native_backend.device, generator)
    more = {f"{p}_tensor_scale": torch.tensor(scale, device=native_backend.device) for p in "kv"}
    want = made.to("cpu").clone()
    want.write("torch", **{n: s.cpu() for n, s in more.items()})
    made.write(native_backend.name, **more)
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor.cpu(), want.tensors()[name], name)


@pytest.mark.parametrize("element", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_division_is_ieee_for_many_scales(native_backend, element, generator):
    """100k quotients near rounding boundaries, a scale per block: the device's short division must round as x / s does."""
    spec = kvx.CacheSpec(4096, 1, 1, 32, format=f"{element}_per_block")
    scale = torch.exp(torch.randn(4096, generator=generator) * 10).clamp(1e-20, 1e20)
    codes = torch.randint(1, 120, (4096, 1, 32), generator=generator).float() + 0.5
    k = codes * scale[:, None, None] * (1 + torch.randint(-2, 3, codes.shape, generator=generator) * 2.0**-23)
    slots = torch.arange(4096)
    results = []
    for name, device in (("torch", "cpu"), (native_backend.name, native_backend.device)):
        st = kvx.allocate(spec, device)
        s = scale.to(device)
        kvx.write(
            st.cache,
            k.to(device),
            -k.to(device),
            slot_mapping=slots.to(device),
            spec=spec,
            k_scale=s,
            v_scale=s,
            backend=name,
        )
        results.append(st.cache)
    for got, want in zip(results[1], results[0], strict=True):
        compare.bitwise(got.cpu(), want)


@pytest.mark.parametrize("element", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_under_awkward_scales(native_backend, element, dtype, generator):
    """All 65,536 patterns, over scales whose last bits sit where the short quotient must give way."""
    base = torch.arange(8, 16, dtype=torch.int64) << 20  # significands of 24 bits
    beside = (0, 1, 2, 3, 63, 64, 65, -1, -2, -63, -64, -65)
    near = torch.cat([base + d for d in beside] + [base + (1 << 17) + d for d in (-1, 0, 1)])
    random = torch.randint(1 << 23, 1 << 24, (64,), generator=generator)
    scale = torch.cat([near.clamp(1 << 23, (1 << 24) - 1), random]).double().mul(2.0**-26).float()
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1, 128)
    spec = kvx.CacheSpec(patterns.shape[0], 1, 1, 128, format=element)
    k, slots = patterns.to(native_backend.device), torch.arange(patterns.shape[0], device=native_backend.device)
    got, want = kvx.allocate(spec, native_backend.device), kvx.allocate(spec)
    for s in scale:
        for st, x, at, name in ((got, k, slots, native_backend.name), (want, patterns, slots.cpu(), "torch")):
            s_here = s.to(x.device)
            kvx.write(st.cache, x, x, slot_mapping=at, spec=spec, k_scale=s_here, v_scale=s_here, backend=name)
        compare.bitwise(got.cache[0].cpu(), want.cache[0])


def test_saturation(backend):
    """Never NaN from a finite value; NaN stays NaN; infinities go to the largest value."""
    x = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), float("nan"), 448.0, 0.0, 65504.0]).view(1, 1, 8)
    want = {
        "fp8_e4m3": [448.0, -448.0, 448.0, -448.0, float("nan"), 448.0, 0.0, 448.0],
        "fp8_e5m2": [57344.0, -57344.0, 57344.0, -57344.0, float("nan"), 448.0, 0.0, 57344.0],
        "int8": [127.0, -128.0, 127.0, -128.0, 0.0, 127.0, 0.0, 127.0],
    }
    for fmt, values in want.items():
        spec = kvx.CacheSpec(1, 1, 1, 8, format=fmt)
        cache = kvx.allocate(spec, backend.device).cache
        one = torch.ones((), device=backend.device)
        args = {"k_scale": one, "v_scale": one, "spec": spec, "backend": backend.name}
        kvx.write(
            cache,
            x.to(backend.device),
            x.to(backend.device),
            slot_mapping=torch.zeros(1, dtype=torch.int64, device=backend.device),
            **args,
        )
        got = cache[0].float().flatten().cpu()
        torch.testing.assert_close(got, torch.tensor(values), rtol=0, atol=0, equal_nan=True)


def test_out_of_range_slot_writes_nothing_on_the_host(generator):
    for name in ("torch", "cpu"):
        made = cases.Case().make("cpu", generator)
        before = made.clone()
        made.slots[3] = made.spec.num_slots
        with pytest.raises(kvx.OutOfRange, match=r"slot_mapping\[3\] is 28; the cache has 28 slots"):
            made.write(name)
        for key, tensor in made.tensors().items():
            compare.bitwise(tensor, before.tensors()[key])


@pytest.mark.parametrize("fmt", ["bf16", "f32", "fp8_e4m3_per_token_head", "int8_per_head"])
@pytest.mark.parametrize("dim", [32, 7])
def test_out_of_range_slots_are_counted_on_a_device(fmt, dim, generator):
    if not torch.cuda.is_available():
        pytest.skip("backend cuda: no CUDA device or driver on this machine")
    made = cases.Case(format=fmt, head_dim=dim).make("cuda", generator)
    good = made.clone()
    good.slots = made.slots.clone()
    good.slots[1], good.slots[3] = -1, -1
    good.write("cuda")
    made.slots = made.slots.clone()
    made.slots[1], made.slots[3] = made.spec.num_slots, 2**40
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    made.write("cuda", errors=errors)
    assert int(errors) == 2
    for key, tensor in made.tensors().items():
        compare.bitwise(tensor, good.tensors()[key])
    kvx.debug(True)
    try:
        with pytest.raises(kvx.OutOfRange, match="2 slots"):
            made.write("cuda")
    finally:
        kvx.debug(False)


def test_pool_beyond_two_to_the_31_elements(native_backend):
    """Slots whose element offset passes 2^31: the cache is 4.3 GB of bytes, of which a few are touched."""
    if native_backend.name == "cuda" and torch.cuda.get_device_properties(0).total_memory < 20e9:
        pytest.skip("needs 10 GB of device memory")
    spec = kvx.CacheSpec(2**31 // (16 * 128) + 8, 16, 1, 128, format="int8", layout=kvx.HND)
    cache = tuple(torch.empty(spec.num_blocks, 1, 16, 128, dtype=torch.int8, device=native_backend.device) for _ in range(2))
    last = spec.num_slots - 1
    slots = torch.tensor([0, last, last - 17], device=native_backend.device)
    k = torch.arange(3 * 128, device=native_backend.device).view(3, 1, 128).float() % 100
    for slot in slots.tolist():
        for c in cache:
            c[slot // 16, 0, slot % 16] = 0
    kvx.write(cache, k, -k, slot_mapping=slots, spec=spec, backend=native_backend.name)
    for i, slot in enumerate(slots.tolist()):
        compare.bitwise(cache[0][slot // 16, 0, slot % 16], k[i, 0].to(torch.int8))
        compare.bitwise(cache[1][slot // 16, 0, slot % 16], -k[i, 0].to(torch.int8))


def test_alignment_below_16_bytes_works(native_backend, generator):
    for shift in (1, 2, 4):
        for io in ("bf16", "f32"):
            made = cases.Case(io=io, format=io).make(native_backend.device, generator)
            want = made.to("cpu").clone()
            want.write("torch")
            moved = []
            for c in made.cache:
                flat = torch.empty(c.numel() + shift, dtype=c.dtype, device=c.device)[shift:]
                moved.append(flat.view(c.shape).copy_(c))
            made.cache = tuple(moved)
            made.write(native_backend.name)
            for got, expected in zip(made.cache, want.cache, strict=True):
                compare.bitwise(got.cpu(), expected)


def test_wrong_inputs_are_refused_by_name(backend, generator):
    made = cases.Case().make(backend.device, generator)
    device, spec = backend.device, made.spec

    def call(**changes):
        args = {
            "cache": made.cache,
            "k": made.k,
            "v": made.v,
            "slot_mapping": made.slots,
            "spec": spec,
            "backend": backend.name,
            **changes,
        }
        kvx.write(args.pop("cache"), args.pop("k"), args.pop("v"), **args)

    for changes, words in (
        ({"k": made.k[:, :, :-1]}, "k"),
        ({"k": made.k[:-1]}, "k"),
        ({"slot_mapping": made.slots.float()}, "slot_mapping"),
        ({"slot_mapping": made.slots[:, None]}, "slot_mapping"),
        ({"v": made.v.double()}, "v"),
        ({"cache": made.cache[0]}, "cache"),
        ({"cache": (made.cache[0][:-1], made.cache[1])}, "cache"),
        ({"k_scale": torch.ones((), device=device)}, "k_scale"),
        ({"backend": "gpu"}, "backend"),
    ):
        with pytest.raises(kvx.BadArgument, match=words):
            call(**changes)
    if backend.device == "cuda":
        with pytest.raises(kvx.BadArgument, match="slot_mapping is on cpu"):
            call(slot_mapping=made.slots.cpu())


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head"])
def test_graph_capture_and_replay_with_changed_slots(fmt, generator):
    if not torch.cuda.is_available():
        pytest.skip("backend cuda: no CUDA device or driver on this machine")
    made = cases.Case(format=fmt, head_dim=128, num_kv_heads=8).make("cuda", generator)
    made.write("cuda")  # loads the module outside the capture
    replayed = made.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        replayed.write("cuda")
        assert torch.cuda.memory_allocated() == before, "write allocated under capture"
    replayed.slots.copy_(replayed.slots.flip(0))
    graph.replay()
    want = made.clone()
    want.slots = replayed.slots
    want.write("cuda")
    torch.cuda.synchronize()
    for key in ("cache[0]", "cache[1]"):
        compare.bitwise(replayed.tensors()[key], want.tensors()[key])


def test_accepts_anything_with_dlpack():
    numpy = pytest.importorskip("numpy")
    spec = kvx.CacheSpec(2, 4, 1, 8, format="f32")
    cache = (numpy.zeros((2, 4, 1, 8), dtype=numpy.float32), numpy.zeros((2, 4, 1, 8), dtype=numpy.float32))
    k = numpy.arange(8, dtype=numpy.float32).reshape(1, 1, 8)
    kvx.write(cache, k, -k, slot_mapping=numpy.array([5]), spec=spec)
    assert (cache[0][1, 1, 0] == k[0, 0]).all()
    assert (cache[1][1, 1, 0] == -k[0, 0]).all()
