"""The tile headers on a device: each launcher of tiles.cu against what torch computes on the host.

tiles.cu is compiled once a session, for the device and, as PTX, for sm_80: there conversions have instructions of their own to do
without, and a newer device runs that too.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import compare
from tests.cuda.guarded import GuardedMemory

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parent.parent / "native"
SOURCES = [HERE / "tiles.cu", NATIVE / "tiles" / "tensor_map.cu"]
FLAGS = ["-std=c++17", "-O2", "-Werror", "all-warnings", "-I", NATIVE, "-shared", "-Xcompiler", "-fPIC"]
UNSUPPORTED_PTX = 222  # cudaErrorUnsupportedPtxVersion: the driver is older than nvcc
POISON = 2**30
KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "s8": torch.int8}


def find_nvcc() -> str:
    folders = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = shutil.which("nvcc", path=os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if found is None:
        pytest.skip("no nvcc: set CUDA_HOME to a CUDA toolkit")
    return found


def compile_tiles(*options: str | Path) -> None:
    done = subprocess.run([find_nvcc(), *map(str, [*FLAGS, *options, *SOURCES])], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"nvcc returned {done.returncode}\n{(done.stdout + done.stderr)[-20000:]}"


def capability() -> tuple[int, int]:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.cuda.get_device_capability()


class Library:
    """The launchers. Tensors are handed over as addresses; a launcher returns when its kernel is over."""

    def __init__(self, path: Path) -> None:
        self.calls = ctypes.CDLL(str(path))
        self.calls.error_text.restype = ctypes.c_char_p

    def run(self, name: str, *args: object) -> None:
        for a in args:
            assert not isinstance(a, Tensor) or (a.is_cuda and a.is_contiguous())
        status = getattr(self.calls, name)(*[ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in args])
        if status == UNSUPPORTED_PTX:
            pytest.skip("the driver is older than nvcc and does not take its PTX")
        assert status == 0, f"{name}(): {self.calls.error_text(status).decode()}"


def load(target: str, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The library for `target`. Workers of one session share it: the first compiles, the others wait."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / f"libtiles_{target}.so"
    with open(folder / f"tiles_{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            gencode = f"-gencode=arch=compute_{target.split('_')[1]},code={target}"
            compile_tiles(gencode, "-o", path)
    return Library(path)


@pytest.fixture(scope="session")
def own(tmp_path_factory) -> Library:
    major, minor = capability()
    if major < 8:
        pytest.skip(f"tiles are for sm_80 and later; this device is sm_{major}{minor}")
    return load("sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}", tmp_path_factory)


@pytest.fixture(scope="session", params=["own", "compute_80"])
def tiles(request, tmp_path_factory) -> Library:
    library = request.getfixturevalue("own")
    return library if request.param == "own" else load(request.param, tmp_path_factory)


@pytest.fixture
def guarded() -> Iterator[GuardedMemory]:
    try:
        memory = GuardedMemory()
    except RuntimeError as refused:
        pytest.skip(f"no memory with an end of its own: {refused}")
    yield memory
    memory.close()


def integers(generator: torch.Generator, *shape: int, most: int) -> Tensor:
    """In [-most, most]: sums of products of them are exact in f32, in any order."""
    return torch.randint(-most, most + 1, shape, generator=generator).double()


def unset(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), device="cuda")


def equal(got: Tensor, want: Tensor, what: str) -> None:
    compare.bitwise(got.cpu() + 0.0, want.float() + 0.0, what)  # + 0: the sign of a sum that is 0 is not promised


def test_compiles(tmp_path):
    """Where no device can run them, at least the headers compile, for Hopper and for the oldest that they are for."""
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("90a", "80")]
    compile_tiles("--threads", "2", *gencode, "-o", tmp_path / "tiles.so")


# ---- block_rows.cuh


class Table(ctypes.Structure):
    """tiles.cu has the same struct."""

    _fields_ = (
        ("indices", ctypes.c_void_p),
        ("indptr", ctypes.c_void_p),
        ("bases", ctypes.c_void_p * 2),
        *((name, ctypes.c_int64) for name in ("row_stride", "index_stride", "num_indices", "max_blocks")),
        *((name, ctypes.c_int64) for name in ("block_size", "num_blocks")),
        *((name, ctypes.c_int32) for name in ("format", "index_bytes", "indptr_bytes", "is_packed_32")),
        *((name, ctypes.c_uint32 * 2) for name in ("block", "token", "head")),
    )


# In units of 16 bytes, K's and V's: the last row's offset is just below 2^32 of them.
STEPS = {"block": (4_290_000, 12_345), "token": (77, 3), "head": (5, 100_000)}
NUM_BLOCKS = 1000


@dataclass(frozen=True)
class TableKind:
    """A way to write down which block each position is in."""

    name: str
    format: int  # kvx_block_table_format_t
    dtype: torch.dtype = torch.int32
    spacing: int = 1  # entries from one id to the next

    def __str__(self) -> str:
        return self.name

    def tokens_per_entry(self, block_size: int) -> int:
        return 1 if self.name == "ragged" else block_size

    def make(self, entries: list[list[int]], width: int, block_size: int) -> tuple[Table, list[Tensor]]:
        """The struct, and the tensors behind it, ids first. A row of a packed table has `width` entries, poison after its own."""
        spread = [[x for e in row for x in (e, *[POISON] * (self.spacing - 1))] for row in entries]
        table = Table(block_size=block_size, num_blocks=NUM_BLOCKS, format=self.format, index_bytes=self.dtype.itemsize, **STEPS)
        table.index_stride = self.spacing * self.dtype.itemsize
        if self.format == 1:
            padded = [[*row, *[POISON] * (width * self.spacing - len(row))] for row in spread]
            tensors = [torch.tensor(padded, dtype=self.dtype).cuda()]
            table.row_stride, table.max_blocks = tensors[0].shape[1] * self.dtype.itemsize, width
            table.is_packed_32 = table.index_bytes == table.index_stride == 4
        else:
            indptr = torch.tensor([0, *[len(row) for row in entries]]).cumsum(0).to(self.dtype).cuda()
            tensors = [torch.tensor([x for row in spread for x in row] + [POISON] * 3, dtype=self.dtype).cuda(), indptr]
            table.num_indices, table.indptr, table.indptr_bytes = int(indptr[-1]), indptr.data_ptr(), self.dtype.itemsize
        table.indices = tensors[0].data_ptr()
        return table, tensors


TABLES = [
    TableKind("packed_32", format=1),
    TableKind("packed_64", format=1, dtype=torch.int64),
    TableKind("packed_apart", format=1, spacing=2),
    TableKind("ragged", format=2),
    TableKind("page_csr", format=4),
    TableKind("page_csr_64", format=4, dtype=torch.int64),
]


def check_rows(tiles: Library, table: Table, kind: TableKind, entries: list[list[int]], queries: list[tuple[int, ...]]) -> int:
    """Every query (seq, position, end, head) against plain Python; returns how many rows were there."""
    got = torch.full((len(queries), 5), POISON, dtype=torch.int32, device="cuda")
    tiles.run("find_rows", ctypes.byref(table), torch.tensor(queries, dtype=torch.int32).cuda(), got, len(queries))
    num_found, per_entry = 0, kind.tokens_per_entry(table.block_size)
    for (seq, position, end, head), (asked, inside, block, *offsets) in zip(queries, got.tolist(), strict=True):
        what = f"{kind}: sequence {seq}, position {position} of {end}, head {head}"
        entry = position // per_entry
        id = entries[seq][entry] if position < end and entry < len(entries[seq]) else -1
        if not 0 <= id < NUM_BLOCKS:
            assert (block, *offsets) == (-1, 0, 0), f"{what}: there is no block, and {block} at {offsets} was found"
            assert position < end or asked == -1, f"{what}: the table was read ({asked}) for a position past the end"
            continue
        token = position % table.block_size
        wanted = [id * STEPS["block"][i] + token * STEPS["token"][i] + head * STEPS["head"][i] for i in range(2)]
        assert max(wanted) < 2**32
        assert (asked, inside, block, *(o % 2**32 for o in offsets)) == (id, token, id, *wanted), what
        num_found += 1
    return num_found


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("kind", TABLES, ids=str)
def test_rows_of_random_tables(tiles, kind, block_size, generator):
    """Tiles that begin anywhere, span blocks and run past the end; ids outside the cache; a sequence longer than its table."""
    lens = [0, 1, block_size - 1, block_size, block_size + 1, 5 * block_size + 2, 300]
    per_entry = kind.tokens_per_entry(block_size)
    entries = [torch.randint(0, NUM_BLOCKS, (-(-n // per_entry),), generator=generator).tolist() for n in lens]
    bad = [-1, NUM_BLOCKS, -(2**31), 2**31 - 1] + ([2**32 + 3, 2**63 - 1] if kind.dtype == torch.int64 else [])
    width = max(len(row) for row in (*entries, 2 * bad))
    entries += [[x for id in bad for x in (id, 3)], [NUM_BLOCKS - 1] * width]
    lens += [len(entries[-2]) * per_entry, width * per_entry + 50]
    table, _tensors = kind.make(entries, width, block_size)
    queries = []
    for seq, end in enumerate(lens):
        begin = int(torch.randint(0, per_entry, (), generator=generator))
        heads = torch.randint(0, 8, (end + 70,), generator=generator).tolist()
        queries += [(seq, begin + i, end, head) for i, head in enumerate(heads)]
    assert check_rows(tiles, table, kind, entries, queries) > 100


def test_own_caches(tiles):
    """A cache a sequence, by its two addresses. An id outside, and a cache without K or V, have the address that stands in."""
    ids, none = [2, 0, -1, 4, 3, 1], 0xABC0
    bases = torch.tensor([[0x1000, 0, 0x3000, 0x4000], [0x5000, 0x6000, 0x7000, 0]])
    on_device = bases.cuda()
    for dtype in (torch.int32, torch.int64):
        indices = torch.tensor([[id, POISON] for id in ids], dtype=dtype).cuda()
        table = Table(
            indices=indices.data_ptr(),
            row_stride=2 * dtype.itemsize,
            index_bytes=dtype.itemsize,
            num_blocks=4,
            format=1,
            block_size=16,
        )
        table.bases = tuple(row.data_ptr() for row in on_device)
        got = torch.zeros(len(ids), 3, dtype=torch.int64, device="cuda")
        tiles.run("find_caches", ctypes.byref(table), ctypes.c_void_p(none), got, len(ids))
        for id, found in zip(ids, got.tolist(), strict=True):
            addresses = bases[:, id].tolist() if 0 <= id < 4 else [0, 0]
            assert found == ([id, *addresses] if all(addresses) else [-1, none, none]), f"{dtype}: id {id}"


# ---- elements.cuh


@pytest.mark.parametrize("row_bytes", [64, 128, 256, 1152])
def test_swizzle_mixes_chunks(tiles, row_bytes):
    """Each chunk stays in its row, no two meet, and any eight rows of one column lie in all eight 16-byte parts of the banks."""
    rows = 32
    at = torch.full((rows, row_bytes // 16), -1, dtype=torch.int32, device="cuda")
    tiles.run("swizzle", row_bytes, rows, at)
    at = at.cpu()
    assert at.flatten().sort().values.tolist() == list(range(0, rows * row_bytes, 16))
    assert torch.equal(at // row_bytes, torch.arange(rows).unsqueeze(1).expand_as(at))
    banks = (at // 16 % 8).unfold(0, 8, 1)  # [rows - 7, chunks, 8 rows]
    assert torch.equal(banks.sort(-1).values, torch.arange(8).expand_as(banks))


@pytest.mark.parametrize("row_bytes", [64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_rows(tiles, kind, row_bytes, generator):
    """Keys by queries and values by weights, through fragments; every place of a tile is used."""
    dims = row_bytes // KINDS[kind].itemsize
    rows = integers(generator, 32, dims, most={"s8": 127, "e4m3": 15}.get(kind, 100))
    if kind == "e4m3":
        rows /= 2  # 15 / 2 has as many digits as a code
    stored = rows.to(KINDS[kind]).cuda()
    assert torch.equal(stored.cpu().double(), rows)
    queries, weights = integers(generator, 8, dims, most=4), integers(generator, 8, 32, most=4)
    given = stored, queries.float().cuda(), weights.float().cuda()
    scores, out = unset(32, 8), unset(dims, 8)
    tiles.run("multiply_rows", list(KINDS).index(kind), row_bytes, *given, scores, out)
    equal(scores, rows @ queries.T, "keys by queries")
    equal(out, rows.T @ weights.T, "values by weights")


def every_code(kind: str) -> tuple[Tensor, Tensor]:
    """256 words of four codes, each code once at each byte; and what they are in f16, [256, 4]."""
    codes = ((torch.arange(256).unsqueeze(1) + torch.tensor([0, 59, 101, 203])) % 256).to(torch.uint8)
    return codes.cuda(), codes.view(KINDS[kind]).to(torch.float16)


def equal_codes(got: Tensor, want: Tensor, what: str) -> None:
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN at {(got.isnan() != want.isnan()).nonzero().tolist()}"
    compare.bitwise(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0), what)


@pytest.mark.parametrize("kind", ["e4m3", "s8"])
def test_every_code_converts(tiles, kind):
    words, values = every_code(kind)
    assert int(values.isnan().sum()) == (8 if kind == "e4m3" else 0)
    got = torch.zeros(256, 8, dtype=torch.float16, device="cuda")
    tiles.run("convert", list(KINDS).index(kind), words, got, 256)
    equal_codes(got, values[:, [0, 1, 2, 3, 0, 2, 1, 3]], f"pairs of {kind}")


# ---- ptx.cuh


@pytest.mark.parametrize(("kind", "order"), [("e4m3", [0, 1, 2, 3]), ("s8", [3, 1, 2, 2])])
def test_conversion_instructions(tiles, kind, order):
    words, values = every_code(kind)
    got = torch.zeros(256, 4, dtype=torch.float16, device="cuda")
    tiles.run("convert_plain", list(KINDS).index(kind), words, got, 256)
    equal_codes(got, values[:, order], kind)


def check_copies(tiles: Library, address: int, chunks: Tensor, num_bytes: Tensor) -> None:
    got = torch.zeros(3, 32, 4, dtype=torch.int32, device="cuda")
    tiles.run("copy_chunks", ctypes.c_void_p(address), num_bytes.to(torch.int32).cuda(), got)
    is_asked, untouched = (num_bytes > 0).unsqueeze(1), torch.tensor(-1, dtype=torch.int32)
    is_copied = torch.arange(0, 16, 4) < num_bytes.unsqueeze(1)
    first = torch.cat([torch.where(is_asked, chunks[:, :1], 0), untouched.expand(32, 3)], 1)
    compare.bitwise(got[0].cpu(), torch.where(is_copied, chunks, 0), "copy_16 of some bytes")
    compare.bitwise(got[1].cpu(), torch.where(is_asked, chunks, untouched), "copy_16")
    compare.bitwise(got[2].cpu(), first, "copy_4")


def test_copies_fill_with_zeros(tiles, generator):
    chunks = torch.randint(1, 2**31, (32, 4), generator=generator).to(torch.int32)
    on_device = chunks.cuda()
    check_copies(tiles, on_device.data_ptr(), chunks, torch.tensor([16, 0, 8, 4] * 8))


def test_matrices(tiles, generator):
    """Lane 4 g + t has elements 2 t and 2 t + 1 of row g: a matrix's words in the lanes' order are the matrix."""
    matrices = torch.randint(-(2**15), 2**15, (4, 8, 8), generator=generator).to(torch.int16)
    got = torch.zeros(3, 4, 32, 2, dtype=torch.int16, device="cuda")
    tiles.run("load_all_matrices", matrices.cuda(), got)
    for i, what in enumerate(("load_matrices", "load_matrices_turned", "turn_matrix")):
        compare.bitwise(got[i].cpu().reshape(4, 8, 8), (matrices.mT if i else matrices).contiguous(), what)


# ---- barrier.cuh and wgmma.cuh


def test_meetings(tiles):
    """Two warps in turns, 100 times: a turn that did not wait for the one before would lose a step."""
    got = torch.zeros(32, dtype=torch.int32, device="cuda")
    tiles.run("meeting", got, 100)
    want = torch.arange(32)
    for i in range(100):
        want = want * 3 % 1021 + i
    assert got.tolist() == want.tolist()


def need_hopper() -> None:
    if capability() < (9, 0):
        pytest.skip("waiting at a barrier, and the copy engine, take sm_90 or later")


def test_ring_of_stages(own, generator):
    """300 steps through three stages: each is overwritten a hundred times, and no reader sees another step's bytes."""
    need_hopper()
    steps = torch.randint(-(2**31), 2**31, (300, 64 * 4), generator=generator).to(torch.int32)
    got, wrong = torch.zeros_like(steps, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    own.run("ring", steps.cuda(), got, 300, wrong)
    compare.bitwise(got.cpu(), steps, "what the readers saw")
    assert int(wrong) == 0, f"{int(wrong)} times a phase was over too early, or was not over"


@pytest.mark.parametrize("how", ["shared", "shared_added", "turned"])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_warpgroup_products(own, kind, columns, how, generator):
    """[64, depth] by [depth, columns]: both in shared memory, or the first in registers. Starting from nothing forgets even NaN."""
    if capability() != (9, 0):
        pytest.skip("warpgroup multiplications are sm_90a's alone")
    is_turned, depth = how == "turned", 64 if how == "turned" else 128
    a, b = integers(generator, 64, depth, most=8), integers(generator, depth, columns, most=8)
    c = integers(generator, 64, columns, most=99)
    before = c if how != "shared" else torch.full_like(c, float("nan"))
    stored = [x.to(KINDS[kind]).contiguous().cuda() for x in (a, b if is_turned else b.T)]
    got = unset(64, columns)
    own.run("multiply", list(KINDS).index(kind), columns, int(is_turned), *stored, before.float().cuda(), got, int(how != "shared"))
    equal(got, a @ b + (0 if how == "shared" else c), how)


# ---- group_ring.cuh; ring.cuh, and those who fill K's ring and V's: row_filler.cuh, map_filler.cuh


@pytest.mark.parametrize("num_steps", [1, 2, 301])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_ring_of_groups(tiles, stages, num_steps, generator):
    """A warp that waits for its own copies: fewer steps than stages, and many laps."""
    steps = torch.randint(-(2**31), 2**31, (num_steps, 32, 4), generator=generator).to(torch.int32)
    got = torch.zeros_like(steps, device="cuda")
    tiles.run("feed_groups", stages, steps.cuda(), got, num_steps)
    compare.bitwise(got.cpu(), steps, "what the lanes saw")


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_ring_of_tiles_from_registers(own, stages, generator):
    """Tiles that the filling threads have made themselves; 301 steps end in the middle of a lap."""
    need_hopper()
    steps = torch.randint(-(2**31), 2**31, (301, 64, 4), generator=generator).to(torch.int32)
    got = torch.zeros_like(steps, device="cuda")
    own.run("feed", stages, steps.cuda(), got, len(steps))
    x, y, z, w = steps.unbind(-1)
    compare.bitwise(got.cpu(), torch.stack([x, y ^ x, z, w + z], -1), "what the readers saw")


class TileRange(ctypes.Structure):
    """kv_rings.cuh has the same struct."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("seq", "head", "first_tile", "num_tiles", "begin", "length"))


NUM_HEADS, FEW_BLOCKS, TILE = 3, 40, 128


@dataclass
class Planes:
    """K and V as [block, token, head, dim] of 16-bit codes: two views of one buffer on the device, and of its copy on the host."""

    on_device: tuple[Tensor, Tensor]
    on_host: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, layout: str, block_size: int, dim: int, generator: torch.Generator) -> Planes:
        blocks, tokens, heads = FEW_BLOCKS, block_size, NUM_HEADS
        shape = {
            "NHD": (2, blocks, tokens, heads, dim),
            "HND": (2, blocks, heads, tokens, dim),
            "fused": (blocks, tokens, heads, 2, dim),
        }
        codes = torch.randint(-(2**15), 2**15, shape[layout], generator=generator).to(torch.int16)

        def views(x: Tensor) -> tuple[Tensor, Tensor]:
            if layout == "fused":
                return x[..., 0, :], x[..., 1, :]
            return (x[0], x[1]) if layout == "NHD" else (x[0].transpose(1, 2), x[1].transpose(1, 2))

        return cls(views(codes.cuda()), views(codes))

    def describe(self, table: Table) -> None:
        """The planes' steps, in units of 16 bytes."""
        table.num_blocks = FEW_BLOCKS
        table.block, table.token, table.head = (tuple(x.stride(i) * 2 // 16 for x in self.on_device) for i in range(3))


def unswizzle(raw: Tensor) -> Tensor:
    """[..., columns, rows, 64] as shared memory has it to [..., rows, columns * 64]: chunk c of row r lies at c ^ r % 8."""
    chunks = raw.unflatten(-1, (8, 8))
    rows = torch.arange(raw.shape[-2]).unsqueeze(1)
    return chunks[..., rows, torch.arange(8) ^ rows % 8, :].flatten(-2).transpose(-3, -2).flatten(-2)


def check_fill(own: Library, planes: Planes, kind: TableKind, block_size: int, uses_maps: bool, generator: torch.Generator) -> None:
    """Sequences of all kinds of ends through the rings: six tiles are three laps. A bad id is one block without rows.

    Rows of 80 or 96 elements lie in tiles of 128: what follows them in memory is another row's, and the tile has zeros there.
    """
    dim, per_entry = planes.on_host[0].shape[-1], kind.tokens_per_entry(block_size)
    tile_dim = -(-dim // 64) * 64
    lens = [6 * TILE + 37, 7 * TILE + 1, 4 * TILE, 5, 3 * TILE - 1]
    entries = [torch.randint(0, FEW_BLOCKS, (-(-n // per_entry),), generator=generator).tolist() for n in lens]
    for position, id in ((130, -1), (300, FEW_BLOCKS), (700, 2**31 - 1), (lens[1] - 1, -(2**31))):
        entries[1][position // per_entry] = id
    entries[4][0] = -7
    table, _tensors = kind.make(entries, max(map(len, entries)), block_size)
    planes.describe(table)
    data = (ctypes.c_void_p * 2)(*(x.data_ptr() for x in planes.on_device))
    for seq, length in enumerate(lens):
        first = seq % 2 if length > TILE else 0
        count, head = -(-length // TILE) - first, seq % NUM_HEADS
        got = torch.zeros(count, 2, tile_dim // 64, TILE, 64, dtype=torch.int16, device="cuda")
        valid = torch.zeros(count, 4, dtype=torch.int32, device="cuda")
        begin = first * TILE + (50 if first else 0)  # where a window begins; a box is there if any of its rows is
        of_tiles = TileRange(seq=seq, head=head, first_tile=first, num_tiles=count, begin=begin, length=length)
        own.run("fill_rings", ctypes.byref(table), data, NUM_HEADS, dim * 2, int(uses_maps), ctypes.byref(of_tiles), got, valid)
        positions = torch.arange(first * TILE, (first + count) * TILE)
        unit = min(block_size, TILE) if uses_maps else 1
        ids = torch.tensor([entries[seq][p // per_entry] if begin // unit * unit <= p < length else -1 for p in positions.tolist()])
        is_there = (ids >= 0) & (ids < FEW_BLOCKS)
        what = f"{kind}, sequence {seq}, {length} tokens from {first * TILE}"
        bits = (valid.cpu().unsqueeze(-1) >> torch.arange(32) & 1).flatten().bool()
        assert torch.equal(bits, is_there), (
            f"{what}: rows {(bits != is_there).nonzero().flatten().tolist()} are said to be otherwise"
        )
        rows = unswizzle(got.cpu())
        for i, plane in enumerate(planes.on_host):
            want = plane[ids.where(is_there, torch.tensor(0)), positions % block_size, head]
            want = want.where(is_there.unsqueeze(1), torch.tensor(0, dtype=torch.int16))
            want = torch.nn.functional.pad(want, (0, tile_dim - dim))
            compare.bitwise(rows[:, i].reshape(-1, tile_dim), want, f"{what}, plane {i}")


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 128, 256])
@pytest.mark.parametrize("kind", TABLES, ids=str)
def test_rings_find_their_rows(own, kind, block_size, dim, generator):
    need_hopper()
    check_fill(own, Planes.make("NHD", block_size, dim, generator), kind, block_size, False, generator)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("block_size", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND", "fused"])
def test_rings_filled_by_the_copy_engine(own, layout, block_size, dim, generator):
    need_hopper()
    planes = Planes.make(layout, block_size, dim, generator)
    for kind in TABLES:
        if kind.name != "ragged":  # there a block's tokens may be apart
            check_fill(own, planes, kind, block_size, True, generator)


# ---- tensor_map.h and tensor_map.cuh


@pytest.mark.parametrize("width", [80, 128])
@pytest.mark.parametrize("block_size", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND", "fused"])
def test_boxes(own, layout, block_size, width, generator):
    """Boxes that begin anywhere in the plane or outside of it: what is outside is zeros, past the end of a row too."""
    need_hopper()
    planes = Planes.make(layout, block_size, width, generator)
    table, tokens = Table(block_size=block_size), min(block_size, TILE)
    planes.describe(table)
    boxes = [(64 * (i % 2), i % NUM_HEADS, i * tokens % block_size, i * 7 % FEW_BLOCKS) for i in range(12)]
    boxes += [(0, 1, 0, block) for block in (-1, FEW_BLOCKS, 2**30, -(2**30))]
    boxes += [(0, head, 0, 2) for head in (-1, NUM_HEADS)] + [(128, 1, 0, 2)]
    boxes += [(64, 1, token, 3) for token in (-3, tokens // 2, block_size - 1, block_size, -tokens)]
    got = torch.zeros(len(boxes), 1, TILE, 64, dtype=torch.int16, device="cuda")
    own.run(
        "copy_boxes",
        ctypes.byref(table),
        ctypes.c_void_p(planes.on_device[0].data_ptr()),
        NUM_HEADS,
        width * 2,
        torch.tensor(boxes, dtype=torch.int32).cuda(),
        got,
        len(boxes),
    )
    rows = unswizzle(got.cpu())
    assert (rows[:, tokens:] == -1).all(), "a box is larger than it was said to be"
    for (dim, head, token, block), have in zip(boxes, rows, strict=True):
        want = torch.zeros(tokens, 64, dtype=torch.int16)
        for i in range(tokens):
            if 0 <= block < FEW_BLOCKS and 0 <= head < NUM_HEADS and 0 <= token + i < block_size and dim < width:
                row = planes.on_host[0][block, token + i, head, dim : dim + 64]
                want[i, : len(row)] = row
        compare.bitwise(
            have[:tokens], want, f"{layout}, blocks of {block_size}: box at dim {dim}, head {head}, token {token}, block {block}"
        )


def test_planes_that_fit_a_tensor_map(own):
    def fits(block_size: int = 16, dim: int = 128, is_dense: int = 1, num_blocks: int = 4, is_bytes: int = 0, **steps: int) -> bool:
        heads = steps.pop("heads", 3)
        table = Table(block_size=block_size, num_blocks=num_blocks)
        for name, step in {"head": 16, "token": 48, "block": 48 * block_size, **steps}.items():
            setattr(table, name, (step, step))
        return bool(own.calls.fits_map(ctypes.byref(table), heads, dim, is_dense, is_bytes))

    sizes = [n for n in range(1, 600) if fits(block_size=n)]
    assert sizes == [8, 16, 32, 64, 128, 256, 384, 512]
    assert fits(block_size=8192)
    assert fits(dim=64)
    assert fits(dim=80)
    assert fits(dim=96)
    assert not fits(dim=100)
    assert fits(dim=80, is_bytes=1)
    assert not fits(dim=72, is_bytes=1)
    assert not fits(is_dense=0)
    assert not fits(num_blocks=0)
    for name, only_one in (("head", {"heads": 1}), ("block", {"num_blocks": 1})):
        assert not fits(**{name: 0}), f"a {name} in the place of all others"
        assert fits(**{name: 0}, **only_one), f"the stride of one {name} is nobody's concern"


# ---- what must not be read. A failure is an illegal access, after which no test of the process can use the device: these are last.


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("kind", TABLES, ids=str)
def test_table_ends_with_the_last_position(own, kind, block_size, guarded, generator):
    """The table says that it goes on and its memory does not: the last position's block is the last that is read."""
    per_entry = kind.tokens_per_entry(block_size)
    for end in (block_size, 3 * block_size + 1, 130):
        num_entries = -(-end // per_entry)
        entries = [torch.randint(0, NUM_BLOCKS, (num_entries,), generator=generator).tolist()]
        table, tensors = kind.make(entries, num_entries, block_size)
        ids = tensors[0].flatten()[: (num_entries - 1) * kind.spacing + 1]
        table.indices, table.max_blocks, table.num_indices = guarded.put(ids), num_entries + 1000, num_entries + 1000
        for indptr in tensors[1:]:
            indptr[1] += 1000
        queries = [(0, position, end, 1) for position in range(end + 300)]
        assert check_rows(own, table, kind, entries, queries) == end


def test_copies_of_nothing_read_nothing(own, guarded, generator):
    chunks = torch.randint(1, 2**31, (32, 4), generator=generator).to(torch.int32)
    address = guarded.put(chunks[:16])  # lanes from 16 on have addresses past the end, and copy 0 bytes
    check_copies(own, address, chunks, torch.tensor([16] * 16 + [0] * 16))
