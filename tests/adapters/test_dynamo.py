"""Dynamo's conversions against plain torch permutes, exact to the byte; and its C calls on a device, through ctypes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import kvx
from kvx.adapters import dynamo, kvbm
from tests import compare

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.int64)
BACKENDS = ("auto", "vectorized", "kernel", "async", "batch")


@dataclass(frozen=True)
class Case:
    nb: int = 3
    nh: int = 3
    nl: int = 2
    no: int = 2
    nt: int = 4
    hd: int = 5
    offset: int = 0  # elements a tensor starts after an allocation does

    def __str__(self) -> str:
        return f"nb{self.nb}-nh{self.nh}-nl{self.nl}-no{self.no}-nt{self.nt}-hd{self.hd}-at{self.offset}"

    @property
    def inner(self) -> int:
        return self.nt * self.nh * self.hd

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
        count = torch.Size(shape).numel()
        size = torch.empty((), dtype=dtype).element_size()
        data = torch.randint(
            0, 256, ((count + self.offset) * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        return data.to(device).view(dtype)[self.offset :].view(shape)

    def chunks(self, layout: str, dtype: torch.dtype, device: str) -> list[list[Tensor]]:
        shape = (self.nt, self.nh, self.hd) if layout == "NHD" else (self.nh, self.nt, self.hd)
        per = self.nl * self.no
        return [[self.make(shape, dtype, device, b * per + i) for i in range(per)] for b in range(self.nb)]

    def wholes(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
        return [self.make(shape, dtype, device, 10_000 + b) for b in range(self.nb)]

    def universals(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        return self.wholes((self.nh, self.nl, self.no, self.nt, self.hd), dtype, device)


CASES = (
    Case(),
    Case(offset=1),
    Case(no=1, nl=3),
    Case(nb=1, nh=1, no=1, nt=8, hd=576),
    Case(no=3),
    Case(nb=2, nh=8, nl=4, nt=16, hd=128),
    Case(nb=2, nh=8, nl=2, nt=16, hd=128, offset=3),
    Case(nb=1, nh=5, nl=1, nt=1, hd=1),
    Case(nb=1, nh=2, nl=1, nt=64, hd=192),
)
case_test = pytest.mark.parametrize("case", CASES, ids=str)
dtype_test = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        require_cuda()
    return request.param


def load() -> ctypes.CDLL:
    try:
        return kvbm.load()
    except kvx.Unsupported as missing:
        pytest.skip(str(missing))


def require_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if load().kvbm_kernels_is_stub_build():
        pytest.skip("libkvbm_kernels was built without CUDA")


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def universal_of(group: list[Tensor], case: Case, layout: str) -> Tensor:
    stacked = torch.stack([bits(c).cpu() for c in group]).view(case.nl, case.no, *group[0].shape)
    return stacked.permute((3, 0, 1, 2, 4) if layout == "NHD" else (2, 0, 1, 3, 4)).contiguous()


# ---- the four calls


@case_test
@dtype_test
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_universal_matches_torch(device, case, dtype, layout):
    blocks, universals = case.chunks(layout, dtype, device), case.universals(dtype, device)
    want = [universal_of(group, case, layout) for group in blocks]
    assert dynamo.block_to_universal(blocks, universals, layout) is None
    for got, w in zip(universals, want, strict=True):
        compare.bitwise(bits(got).cpu(), w, "universal")
    back = [[torch.zeros_like(bits(c)).view(dtype) for c in group] for group in blocks]
    assert dynamo.universal_to_block(universals, back, layout.lower()) is None
    for group, again in zip(blocks, back, strict=True):
        for chunk, copy in zip(group, again, strict=True):
            compare.bitwise(bits(copy), bits(chunk), "chunk")


@case_test
@dtype_test
@pytest.mark.parametrize("backend", BACKENDS)
def test_operational_matches_torch(device, case, dtype, backend):
    blocks = case.chunks("NHD", dtype, device)
    operationals = case.wholes((case.nl, case.no, case.inner), dtype, device)
    if device == "cuda" and backend == "vectorized" and case.inner * operationals[0].element_size() % 8:
        with pytest.raises(ValueError, match="multiple of 8"):
            dynamo.block_to_operational(blocks, operationals, backend)
        return
    assert dynamo.block_to_operational(blocks, operationals, backend) is None
    for group, got in zip(blocks, operationals, strict=True):
        want = torch.cat([bits(c).view(-1) for c in group]).view(case.nl, case.no, case.inner)
        compare.bitwise(bits(got), want, "operational")
    back = [[torch.zeros_like(bits(c)).view(dtype) for c in group] for group in blocks]
    assert dynamo.operational_to_block(operationals, back, backend) is None
    for group, again in zip(blocks, back, strict=True):
        for chunk, copy in zip(group, again, strict=True):
            compare.bitwise(bits(copy), bits(chunk), "chunk")


def test_bytes_around_a_tensor_stay(device):
    """A row of 15 bytes moved 16 at a time would be seen here."""
    case = Case(nb=1, nl=1, no=1, nt=2, nh=3)
    blocks = case.chunks("NHD", torch.uint8, device)
    memory = torch.full((64,), 7, dtype=torch.uint8, device=device)
    universal = memory[17 : 17 + case.inner].view(case.nh, 1, 1, case.nt, case.hd)
    dynamo.block_to_universal(blocks, universal, "NHD")
    compare.bitwise(universal.cpu(), universal_of(blocks[0], case, "NHD"))
    memory[17 : 17 + case.inner] = 7
    assert bool((memory == 7).all())


def test_a_tensor_alone_is_a_batch_of_one(device):
    case = Case(nb=1)
    blocks, universals = case.chunks("HND", torch.bfloat16, device), case.universals(torch.bfloat16, device)
    dynamo.block_to_universal(blocks, universals[0], "Hnd")
    compare.bitwise(bits(universals[0]).cpu(), universal_of(blocks[0], case, "HND"))
    whole = torch.zeros(case.nl, case.no, case.inner, dtype=torch.bfloat16, device=device)
    dynamo.block_to_operational(blocks, whole, " Memcpy_Batch ")
    compare.bitwise(bits(whole).view(-1), torch.cat([bits(c).view(-1) for c in blocks[0]]))


def test_empty_batches_do_nothing(device):
    assert dynamo.block_to_universal([], [], "NHD") is None
    assert dynamo.operational_to_block([], []) is None
    empty = torch.zeros(2, 1, 2, 0, 4, device=device)
    assert dynamo.universal_to_block(empty, [[torch.zeros(0, 2, 4, device=device)] * 2], "NHD") is None


def test_errors_have_their_kinds(device):
    case = Case(nb=1)
    blocks, (universal,) = case.chunks("NHD", torch.float32, device), case.universals(torch.float32, device)
    whole = torch.zeros(case.nl, case.no, case.inner, device=device)
    for error, text, call in (
        (ValueError, "layout is 'NDH'", lambda: dynamo.block_to_universal(blocks, universal, "NDH")),
        (ValueError, "layout is 'x'", lambda: dynamo.block_to_universal([], [], "x")),
        (ValueError, r"expected \[3, 4, 5\]", lambda: dynamo.block_to_universal(blocks, universal, "HND")),
        (ValueError, "5 dimensions", lambda: dynamo.block_to_universal(blocks, universal[0], "NHD")),
        (ValueError, "2 groups for 1", lambda: dynamo.block_to_universal(blocks * 2, universal, "NHD")),
        (ValueError, r"blocks\[0\] has 3 chunks", lambda: dynamo.block_to_universal([blocks[0][:3]], universal, "NHD")),
        (ValueError, "contiguous", lambda: dynamo.universal_to_block(universal.transpose(0, 3), blocks, "NHD")),
        (ValueError, "they must be the same", lambda: dynamo.universal_to_block([universal, universal[:2]], blocks, "NHD")),
        (ValueError, "backend is 'fast'", lambda: dynamo.block_to_operational(blocks, whole, "fast")),
        (ValueError, "inner is 61", lambda: dynamo.block_to_operational(blocks, torch.zeros(2, 2, 61, device=device))),
        (TypeError, "float16", lambda: dynamo.block_to_universal(blocks, universal.half(), "NHD")),
        (TypeError, "16 bytes", lambda: dynamo.operational_to_block(whole.to(torch.complex128), blocks)),
        (TypeError, "is an ndarray", lambda: dynamo.operational_to_block([whole.cpu().numpy()], blocks)),
        (TypeError, "blocks is a Tensor", lambda: dynamo.operational_to_block(whole, whole)),
        (TypeError, "blocks\\[0\\] is a Tensor", lambda: dynamo.operational_to_block(whole, [whole])),
    ):
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(kvx.BadArgument, match="meta"):
        dynamo.operational_to_block(whole.to("meta"), blocks)


# ---- the C calls


@pytest.mark.parametrize(("call", "sizes"), [("launch_universal_from_block", 6), ("launch_block_from_universal", 6)])
def test_bad_numbers_are_refused(call, sizes):
    function = getattr(load(), f"kvbm_kernels_{call}")
    for dtype, layout, want in ((-1, 0, 1), (5, 0, 1), (0, 2, 1), (0, -1, 1), (4, 1, 0), (3, 0, 0)):
        assert function(None, None, *[0] * sizes, dtype, layout, None) == want


def test_without_a_driver_work_returns_an_error():
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    lib = load()
    table = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.create_string_buffer(64)))
    at = ctypes.addressof(table)
    results = {
        lib.kvbm_kernels_launch_vectorized_copy(at, at, 16, 1, None),
        lib.kvbm_kernels_launch_universal_from_block(at, at, 1, 1, 1, 1, 1, 8, 1, 0, None),
        lib.kvbm_kernels_memcpy_batch(at, at, 16, 1, kvbm.BatchMode.FALLBACK_ONLY, None),
        lib.kvbm_kernels_launch_operational_copy(at, at, at, at, 1, 1, 1, 8, 2, 1, 0, 0, None),
    }
    assert 0 not in results
    if lib.kvbm_kernels_is_stub_build():
        assert results == {kvbm.NOT_SUPPORTED}


def pointers(tensors: list[Tensor], device: str = "cuda") -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("size", [1, 15, 16, 64, 256, 512, 999, 4096, 16384, 40001, 1 << 20])
@pytest.mark.parametrize(("src_at", "dst_at"), [(0, 0), (1, 1), (3, 5), (0, 8), (4, 0), (2, 0)])
def test_vectorized_copy(size, src_at, dst_at):
    require_cuda()
    rows = 5
    src = torch.randint(0, 256, (rows, size + 48), dtype=torch.uint8, device="cuda")
    dst = torch.full((rows, size + 48), 9, dtype=torch.uint8, device="cuda")
    want = dst.clone()
    want[:, dst_at : dst_at + size] = src[:, src_at : src_at + size]
    tables = pointers([r[src_at:] for r in src]), pointers([r[dst_at:] for r in dst])
    assert load().kvbm_kernels_launch_vectorized_copy(tables[0].data_ptr(), tables[1].data_ptr(), size, rows, stream()) == 0
    compare.bitwise(dst, want)


@pytest.mark.parametrize("size", [24, 999])
def test_vectorized_copy_of_more_pairs_than_65535(size):
    require_cuda()
    count = 70_000
    src = torch.randint(0, 256, (count, size), dtype=torch.uint8, device="cuda")
    dst = torch.zeros_like(src)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).cuda()
    to = dst.data_ptr() + size * order
    at = src.data_ptr() + size * torch.arange(count, device="cuda")
    assert load().kvbm_kernels_launch_vectorized_copy(at.data_ptr(), to.data_ptr(), size, count, stream()) == 0
    compare.bitwise(dst[order], src)


@pytest.mark.parametrize(("count", "size"), [(1, 256), (8, 512), (3, 1 << 20), (4, 999), (256, 64)])
@pytest.mark.parametrize("mode", list(kvbm.BatchMode), ids=lambda m: m.name.lower())
@pytest.mark.parametrize("default_stream", [False, True], ids=["own_stream", "default_stream"])
def test_memcpy_batch(count, size, mode, default_stream):
    """Pinned memory to the device and back."""
    require_cuda()
    lib = load()
    src = torch.randint(0, 256, (count, size), dtype=torch.uint8).pin_memory()
    there, back = torch.zeros(count, size, dtype=torch.uint8, device="cuda"), torch.zeros_like(src).pin_memory()
    torch.cuda.synchronize()
    own = torch.cuda.Stream()
    raw = None if default_stream else own.cuda_stream
    for a, b in ((src, there), (there, back)):
        tables = pointers(list(a), "cpu"), pointers(list(b), "cpu")
        result = lib.kvbm_kernels_memcpy_batch(tables[0].data_ptr(), tables[1].data_ptr(), size, count, mode, raw)
        if mode == kvbm.BatchMode.BATCH_WITHOUT_FALLBACK and (default_stream or not lib.kvbm_kernels_has_memcpy_batch_async()):
            assert result in (1, kvbm.NOT_SUPPORTED)
            return
        assert result == 0
    torch.cuda.synchronize()
    compare.bitwise(back, src)


def test_tables_may_be_pinned_host_memory():
    require_cuda()
    case = Case()
    blocks, universals = case.chunks("NHD", torch.bfloat16, "cuda"), case.universals(torch.bfloat16, "cuda")
    tables = pointers(universals, "cpu").pin_memory(), pointers([c for g in blocks for c in g], "cpu").pin_memory()
    sizes = (case.nb, case.nh, case.nl, case.no, case.nt, case.hd)
    result = load().kvbm_kernels_launch_universal_from_block(*(t.data_ptr() for t in tables), *sizes, 1, 0, stream())
    torch.cuda.synchronize()
    assert result == 0
    for group, got in zip(blocks, universals, strict=True):
        compare.bitwise(bits(got).cpu(), universal_of(group, case, "NHD"))


def test_work_stays_on_the_current_stream():
    """The source is written on a side stream, late; only a call on the same stream sees it."""
    require_cuda()
    case = Case(nb=2, nh=8, nl=4, nt=16, hd=128)
    blocks, universals = case.chunks("NHD", torch.bfloat16, "cuda"), case.universals(torch.bfloat16, "cuda")
    side = torch.cuda.Stream()
    for sleep in (1, 20_000_000):  # the first time loads kernels and takes pinned memory, which may wait for the device
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(sleep)
            for group in blocks:
                for chunk in group:
                    chunk.add_(1)
            dynamo.block_to_universal(blocks, universals, "NHD")
    assert not side.query()  # the call came back while the stream was still asleep
    side.synchronize()
    for group, got in zip(blocks, universals, strict=True):
        compare.bitwise(bits(got).cpu(), universal_of(group, case, "NHD"))
