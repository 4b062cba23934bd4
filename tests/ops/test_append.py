"""qkv_norm_rope_append: Q, cache and scales equal the definition bit for bit; the cache holds what `write` would store."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import kvx
from tests import cases, compare
from tests.ops import rope

HEADS = 5  # queries; what is left of a warp's rows has to be right too


@dataclass
class Made:
    """A case of write with rows of Q before it."""

    kv: cases.Made
    q: Tensor
    args: dict[str, object]

    @staticmethod
    def of(case: cases.Case, how: rope.Rope, device: str, g: torch.Generator, heads: int = HEADS) -> Made:
        kv = case.make("cpu", g)
        q = cases.values(kv.k.shape[0], heads, case.head_dim, kv.k.dtype, g, case.odd_values)
        return Made(kv.to(device), q.to(device), rope.to(device, how.make(q.shape[0], case.head_dim, q.dtype, g)))

    def to(self, device: str) -> Made:
        return Made(self.kv.to(device).clone(), self.q.to(device), rope.to(device, self.args))

    def append(self, backend: str, fused: bool = True, **more: object) -> Tensor:
        rows = rope.fuse(self.q, self.kv.k, self.kv.v) if fused else (self.q, self.kv.k, self.kv.v)
        given = {"slot_mapping": self.kv.slots, "spec": self.kv.spec, **self.args, **self.kv.scales, **more}
        return kvx.qkv_norm_rope_append(None, self.kv.cache, rows, backend=backend, **given)

    def compare(self, q: Tensor, other: Made, other_q: Tensor) -> None:
        compare.bitwise(q.cpu(), other_q.cpu(), "q_out")
        for name, tensor in self.kv.tensors().items():
            compare.bitwise(tensor.cpu(), other.kv.tensors()[name].cpu(), name)


def check(case: cases.Case, how: rope.Rope, backend, g: torch.Generator, **more: object) -> None:
    made = Made.of(case, how, backend.device, g)
    want = made.to("cpu")
    want_q = want.append("torch")
    made.compare(made.append(backend.name, **more), want, want_q)


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_every_cache(native_backend, case, generator):
    check(case, rope.Rope(rotary=1.0 if case.head_dim % 2 == 0 else 0.9), native_backend, generator)


USUAL = cases.Case(head_dim=128, num_kv_heads=2)
QUANTISED = ("fp8_e4m3", "fp8_e4m3_per_token_head", "int8_per_token_head_f16", "nvfp4", "mxfp8", "int4_per_token_head_inline")


@pytest.mark.parametrize("how", rope.ROPES, ids=str)
@pytest.mark.parametrize("fmt", ["bf16", *QUANTISED])
@pytest.mark.parametrize("dim", [128, 64, 96])
def test_every_rope(native_backend, how, fmt, dim, generator):
    check(replace(USUAL, format=fmt, head_dim=dim, odd_values=dim == 96), how, native_backend, generator)


@pytest.mark.parametrize("io", ["f16", "f32"])
@pytest.mark.parametrize("fmt", ["f16", "f32", "fp8_e4m3_per_token_head", "int8"])
def test_other_io_types(native_backend, io, fmt, generator):
    check(replace(USUAL, format=fmt, io=io), rope.Rope(), native_backend, generator)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3_per_token_head", "nvfp4"])
@pytest.mark.parametrize("norm", ["", "qk"])
def test_many_tokens(native_backend, fmt, norm, generator):
    """Enough rows of 32 and 8 heads for six rounds a thread, the most, on a GPU of up to 200 SMs."""
    case = cases.Case(head_dim=128, num_kv_heads=8, format=fmt, block_size=16, num_blocks=210, lens=(2900, 300))
    made = Made.of(case, rope.Rope(norm=norm), native_backend.device, generator, heads=32)
    want = made.to("cpu")
    want_q = want.append("torch")
    made.compare(made.append(native_backend.name), want, want_q)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3_per_token_head", "nvfp4"])
@pytest.mark.parametrize("layout", ["NHD", "fused_HND", "old_vllm", "packed8"])
def test_cache_holds_what_write_stores(backend, fmt, layout, generator):
    """Norm and rotation first, through their own op; then write. The same bytes."""
    if layout == "old_vllm" and fmt == "nvfp4":
        pytest.skip("two elements a byte need stride 1 along dim")
    made = Made.of(replace(USUAL, format=fmt, layout=layout), rope.Rope(), backend.device, generator)
    apart = made.to(backend.device)
    q, k, v = kvx.qkv_norm_rope((apart.q, apart.kv.k, apart.kv.v), backend=backend.name, **apart.args)
    apart.kv.k, apart.kv.v = k, v
    apart.kv.write(backend.name)
    made.compare(made.append(backend.name, fused=False), apart, q)


def test_slot_and_position_are_independent(backend, generator):
    made = Made.of(USUAL, rope.Rope(), backend.device, generator)
    moved = made.to(backend.device)
    moved.args["positions"] = (moved.args["positions"] + 1) % rope.MAX_POSITIONS
    q, other = made.append(backend.name), moved.append(backend.name)
    assert not torch.equal(q, other)
    compare.bitwise(made.kv.cache[1], moved.kv.cache[1], "V does not rotate")
    assert not torch.equal(made.kv.cache[0].view(torch.int16), moved.kv.cache[0].view(torch.int16))


def test_contiguous_head_major_cache(backend, generator):
    """One block a sequence, block_size = capacity: [batch, heads, capacity, dim]."""
    spec = kvx.CacheSpec(3, 50, 2, 64, layout=kvx.HND, format="f32")
    cache = tuple(torch.zeros(3, 2, 50, 64, device=backend.device) for _ in range(2))
    q, k, v = (torch.randn(3, h, 64, generator=generator).to(backend.device) for h in (4, 2, 2))
    lens = torch.tensor([7, 0, 49], device=backend.device)
    slots = torch.arange(3, device=backend.device) * 50 + lens
    kvx.qkv_norm_rope_append(None, cache, (q, k, v), slot_mapping=slots, spec=spec, rope="none", backend=backend.name)
    for i, at in enumerate(lens.tolist()):
        compare.bitwise(cache[0][i, :, at], k[i])
        compare.bitwise(cache[1][i, :, at], v[i])
    assert int((cache[0] != 0).any(-1).sum()) == 6


@pytest.mark.parametrize("fmt", ["int8_per_token_head", "nvfp4", "fp8_e4m3_per_token_head_inline"])
def test_scales_given_with_tokens(native_backend, fmt, generator):
    made = Made.of(replace(USUAL, format=fmt), rope.Rope(), native_backend.device, generator)
    row = made.kv.spec.plane(0).format
    shape = (*made.kv.k.shape[:2], row.num_groups(128)) if row.group_size else made.kv.k.shape[:2]
    given = {f"{p}_token_scale": torch.rand(shape, generator=generator) + 0.1 for p in "kv"}
    want = made.to("cpu")
    want_q = want.append("torch", **given)
    made.compare(made.append(native_backend.name, **rope.to(native_backend.device, given)), want, want_q)


def test_int8_scale_is_the_stored_f16(backend, generator):
    """Elements are divided by the scale as a reader sees it, rounded to f16 and floored: never by a finer one."""
    made = Made.of(
        replace(USUAL, format="int8_per_token_head_f16", io="f32"), rope.Rope("none", norm=""), backend.device, generator
    )
    made.kv.k[2] *= 1e-9  # under what an f16 scale can say
    made.append(backend.name)
    for token in (0, 2):
        slot = int(made.kv.slots[token])
        stored = made.kv.scales["k_scale"][slot // 4, slot % 4].float()
        codes = made.kv.cache[0].view(torch.int8)[slot // 4, slot % 4].float()
        assert (stored > 0).all()
        assert ((codes * stored[:, None] - made.kv.k[token]).abs() <= stored[:, None] * 0.5000001).all()


def test_q_goes_where_it_is_told(backend, generator):
    made = Made.of(USUAL, rope.Rope(), backend.device, generator)
    want = made.to(backend.device).append(backend.name)
    out = torch.empty(HEADS, want.shape[0], 128, dtype=want.dtype, device=want.device)
    rows = rope.fuse(made.q, made.kv.k, made.kv.v)
    got = kvx.qkv_norm_rope_append(
        out.transpose(0, 1), made.kv.cache, rows, slot_mapping=made.kv.slots, spec=made.kv.spec, backend=backend.name, **made.args
    )
    assert got.data_ptr() == out.data_ptr()
    compare.bitwise(out.transpose(0, 1).contiguous(), want)


def test_out_of_range_writes_nothing_on_the_host(generator):
    for name in ("torch", "cpu"):
        for field, words in (("slots", r"slot_mapping\[3\] is 28; the cache has 28 slots"), ("positions", r"positions\[3\] is 99")):
            made = Made.of(USUAL, rope.Rope(), "cpu", generator)
            before = made.to("cpu")
            if field == "slots":
                made.kv.slots[3] = made.kv.spec.num_slots
            else:
                made.args["positions"][3] = 99
            with pytest.raises(kvx.OutOfRange, match=rf"qkv_norm_rope_append\(\): {words}"):
                made.append(name)
            for key, tensor in made.kv.tensors().items():
                compare.bitwise(tensor, before.kv.tensors()[key])


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3_per_token_head", "f32"])
def test_out_of_range_is_counted_on_a_device(fmt, generator):
    if not torch.cuda.is_available():
        pytest.skip("backend cuda: no CUDA device or driver on this machine")
    made = Made.of(replace(USUAL, format=fmt), rope.Rope(), "cuda", generator)
    good = made.to("cuda")
    good.kv.slots = good.kv.slots.clone()
    good.kv.slots[1], good.kv.slots[4] = -1, -1
    want = good.append("cuda")
    made.kv.slots, made.args["positions"] = made.kv.slots.clone(), made.args["positions"].clone()
    made.kv.slots[1], made.args["positions"][4] = 2**40, -3
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    out = torch.zeros_like(want)
    rows = (made.q, made.kv.k, made.kv.v)
    kvx.qkv_norm_rope_append(
        out, made.kv.cache, rows, slot_mapping=made.kv.slots, spec=made.kv.spec, errors=errors, **made.args, **made.kv.scales
    )
    assert int(errors) == 2
    want[4] = 0
    made.compare(out, good, want)
    kvx.debug(True)
    try:
        with pytest.raises(kvx.OutOfRange, match="2 slots"):
            made.append("cuda")
    finally:
        kvx.debug(False)


def test_wrong_inputs_are_refused_by_name(backend, generator):
    made = Made.of(USUAL, rope.Rope(), backend.device, generator)
    rows = rope.fuse(made.q, made.kv.k, made.kv.v)
    for changes, words in (
        ({"qkv": rows[:, :-1]}, "qkv"),
        ({"qkv": (made.q, made.kv.k)}, "q|k|v"),
        ({"slot_mapping": made.kv.slots[1:]}, "slot_mapping"),
        ({"slot_mapping": made.kv.slots.float()}, "slot_mapping"),
        ({"q_out": made.q[:, :1]}, "q_out"),
        ({"cache": made.kv.cache[0]}, "cache"),
        ({"k_scale": torch.ones((), device=backend.device)}, "k_scale"),
        ({"k_weight": made.q[0, 0, :5]}, "k_weight"),
        ({"backend": "gpu"}, "backend"),
    ):
        given = {
            "q_out": None,
            "cache": made.kv.cache,
            "qkv": rows,
            "slot_mapping": made.kv.slots,
            "spec": made.kv.spec,
            "backend": backend.name,
            **made.args,
            **changes,
        }
        with pytest.raises(kvx.BadArgument, match=words):
            kvx.qkv_norm_rope_append(given.pop("q_out"), given.pop("cache"), given.pop("qkv"), **given)


@pytest.mark.parametrize("fmt", ["bf16", "int8_per_token_head"])
def test_graph_capture_and_replay(fmt, generator):
    if not torch.cuda.is_available():
        pytest.skip("backend cuda: no CUDA device or driver on this machine")
    made = Made.of(replace(USUAL, format=fmt, num_kv_heads=8), rope.Rope(), "cuda", generator, heads=32)
    replayed, untouched = made.to("cuda"), made.to("cpu")
    rows = rope.fuse(made.q, made.kv.k, made.kv.v)
    out = torch.empty_like(made.q)

    def step(m: Made, q_out: Tensor) -> None:
        kvx.qkv_norm_rope_append(q_out, m.kv.cache, rows, slot_mapping=m.kv.slots, spec=m.kv.spec, **m.args, **m.kv.scales)

    step(made, torch.empty_like(out))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        step(replayed, out)
        assert torch.cuda.memory_allocated() == before, "append allocated under capture"
    replayed.kv.slots.copy_(replayed.kv.slots.flip(0))
    replayed.args["positions"].copy_(replayed.args["positions"].flip(0))
    graph.replay()
    want = untouched
    want.kv.slots, want.args["positions"] = replayed.kv.slots.cpu(), replayed.args["positions"].cpu()
    want_q = want.append("torch")
    torch.cuda.synchronize()
    replayed.compare(out, want, want_q)
