"""Hostile plans: whatever the bytes say, loading gives a status and a sentence, and running stays inside the buffers it names.

Structs are read out of the header, so that a field it gains is mutated too. What may crash runs in a process of its own, which
needs libkvx and no torch. Buffers end where a page begins that nobody may touch: a read past the end stops that process as a write
does. What stands before a buffer is compared.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MAX_BYTES, MAX_BUFFERS, MAX_BLOCKS = 1 << 20, 256, 1 << 16  # of a plan that is run
FLIPS = 2500  # of each plan

# ---- the structs of the header

TYPES: dict[str, type] = {
    "uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64,
    "kvx_memory_type_t": ctypes.c_int32,
}  # fmt: skip


def _read_structs() -> None:
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "include" / "kvx_abi.h").read_text(), flags=re.S)
    numbers = dict(re.findall(r"#define (\w+) (\d+)\s", text))
    for name, body in re.findall(r"typedef struct (kvx_array_t|kvx_plan_\w+_t|kvx_convert_args_t) \{(.*?)\} \1;", text, re.S):
        fields = []
        for words, field, count in re.findall(r"([\w* ]+[ *])(\w+)(?:\[(\w+)\])?;", body):
            kind = ctypes.c_void_p if "*" in words else TYPES[words.strip()]
            fields.append((field, kind * int(numbers.get(count, count)) if count else kind))
        TYPES[name] = type(name, (ctypes.Structure,), {"_fields_": fields})


_read_structs()
Header, Box, Cell = (TYPES[f"kvx_plan_{name}_t"] for name in ("header", "box", "cell"))
ConvertArgs = TYPES["kvx_convert_args_t"]


class Plan:
    """A plan's bytes, taken apart: header, boxes, cells and the pairs of sizes, to be changed and put together again."""

    def __init__(self, data: bytes):
        self.header = Header.from_buffer_copy(data)
        at = ctypes.sizeof(Header)
        self.boxes, at = self._read(data, at, Box, self.header.num_boxes)
        self.cells, at = self._read(data, at, Cell, self.header.num_cells)
        pairs = list(struct.iter_unpack("<QQ", data[at:]))
        self.sizes = pairs[: self.header.num_src_sizes], pairs[self.header.num_src_sizes :]

    @staticmethod
    def _read(data: bytes, at: int, kind: type, count: int) -> tuple[list, int]:
        size = ctypes.sizeof(kind)
        return [kind.from_buffer_copy(data, at + i * size) for i in range(count)], at + count * size

    def to_bytes(self) -> bytes:
        sizes = b"".join(struct.pack("<QQ", *pair) for side in self.sizes for pair in side)
        return b"".join(map(bytes, (self.header, *self.boxes, *self.cells))) + sizes

    def set(self, path: str, value: int) -> None:
        """`header.magic`, `box.src.offset`, `box.digit.1.size`, `cell.dst.dtype`; of the first box and the first cell."""
        head, *names = path.split(".")
        at = {"header": [self.header], "box": self.boxes, "cell": self.cells}[head][0]
        for name in names[:-1]:
            at = at[int(name)] if name.isdigit() else getattr(at, name)
        kind = type(getattr(type(at)(), names[-1]))
        assert kind is int, path
        setattr(at, names[-1], value)


def leaves(kind: type, at: int = 0, path: str = "") -> Iterator[tuple[str, int, type]]:
    """(path, offset, integer type) of every number in a struct."""
    if issubclass(kind, ctypes.Array):
        for i in range(kind._length_):
            yield from leaves(kind._type_, at + i * ctypes.sizeof(kind._type_), f"{path}.{i}")
    elif issubclass(kind, ctypes.Structure):
        for name, field in kind._fields_:
            yield from leaves(field, at + getattr(kind, name).offset, f"{path}.{name}")
    else:
        yield path, at, kind


# ---- plans to start from

GEOMETRY = {"num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 32, "num_layers": 2}
FUSED, POOL, BLOCKS = ({"layout": text} for text in (
    "layer | block token head (kv dim)", "block layer kv head token dim", "block layer kv | token head dim",
))  # fmt: skip
PAIRS = {  # name: source, destination
    "copy": (FUSED, POOL),
    "turn": ({"layout": "layer | block head kv[K: dim token; V: token dim]"}, FUSED),
    "buffers": (BLOCKS, {"layout": "block | head layer kv token dim"}),
    "sizes": ({**POOL, "block_size": 8}, {"layout": "kv layer | (block token) head dim", "num_blocks": 6}),
    "split": ({"layout": "layer kv | block token/2 head token%2 dim"}, {**POOL, "block_size": 2, "num_blocks": 6}),
    "token_head": (FUSED, {**POOL, "format": "int8_per_token_head"}),
    "inline": ({**FUSED, "format": "int4_per_token_head_inline"}, {**POOL, "format": "f32"}),
    "group": ({**FUSED, "format": "nvfp4"}, {**POOL, "format": "f16", "num_blocks": 2}),
    "to_group": (FUSED, {**POOL, "format": "nvfp4"}),
    "block": (FUSED, {**POOL, "format": "fp8_e4m3_per_block_head", "block_size": 8}),
    "head": ({**FUSED, "format": "fp8_e5m2_per_head"}, {**BLOCKS, "format": "mxfp8"}),
    "packed": (
        {"layout": "kv | block head dim/x token dim%x", "num_layers": 1},
        {"layout": "kv | block head token dim", "num_layers": 1, "format": "int8_per_block"},
    ),
}


@lru_cache
def plan_bytes(name: str) -> bytes:
    import kvx

    return kvx.plan(*(kvx.CacheSpec(**{**GEOMETRY, **side}) for side in PAIRS[name])).to_bytes()


# ---- loading and running


@lru_cache
def library(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    lib.kvx_last_error.restype = ctypes.c_char_p
    lib.kvx_plan_load.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p]
    for name in ("kvx_bind", "kvx_bind_buffers", "kvx_run_blocks"):
        getattr(lib, name).argtypes = [ctypes.c_void_p] * 3
    lib.kvx_run.argtypes = [ctypes.c_void_p] * 2
    lib.kvx_digest.argtypes = [ctypes.c_void_p] * 4
    for name in ("kvx_plan_free", "kvx_bound_free"):
        getattr(lib, name).argtypes, getattr(lib, name).restype = [ctypes.c_void_p], None
    return lib


def load(lib: ctypes.CDLL, data: bytes) -> tuple[int, str, int | None]:
    """(status, sentence, handle). A refusal is INVALID_ARGUMENT or INCOMPATIBLE, has a sentence, and leaves the pointer alone."""
    out = ctypes.c_void_p(7)
    status = lib.kvx_plan_load(data, len(data), ctypes.addressof(out))
    if status == 0:
        return 0, "", out.value
    sentence = lib.kvx_last_error().decode()
    assert status in (1, 4), f"status {status}: {sentence}"
    assert re.fullmatch(r"kvx_plan_load\(\): [^\n]{10,}\.", sentence), sentence
    assert out.value == 7
    return status, sentence, None


PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fenced:
    """A buffer that ends where a page begins that may not be touched. In front of it stands a page or more of 0xa5."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        pages = -(-num_bytes // PAGE) + 1
        self.map = mmap.mmap(-1, (pages + 1) * PAGE)
        self.start = pages * PAGE - num_bytes
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.address = base + self.start
        self.map[: self.start] = b"\xa5" * self.start
        assert _LIBC.mprotect(base + pages * PAGE, PAGE, 0) == 0

    @property
    def data(self) -> bytes:
        return self.map[self.start : self.start + self.num_bytes]

    @data.setter
    def data(self, data: bytes) -> None:
        self.map[self.start : self.start + self.num_bytes] = data

    def is_whole(self) -> bool:
        return self.map[: self.start] == b"\xa5" * self.start


@lru_cache(maxsize=256)
def fenced(num_bytes: int, _which: object) -> Fenced:
    return Fenced(num_bytes)


@lru_cache
def noise(num_bytes: int) -> bytes:
    return random.Random(0).randbytes(num_bytes)


def is_small(plan: Plan) -> bool:
    """Whether it is run. A plan may ask for more bytes, buffers or blocks than there is time for. What it moves follows."""
    h = plan.header
    if any(sum(count for count, _ in side) > MAX_BUFFERS or sum(c * b for c, b in side) > MAX_BYTES for side in plan.sizes):
        return False
    if max(h.src_num_blocks, h.dst_num_blocks) > MAX_BLOCKS:
        return False
    return 2 * max(h.src_block_size, h.dst_block_size) <= MAX_BLOCKS


def run(lib: ctypes.CDLL, handle: int, plan: Plan) -> int:
    """Convert as many tokens as two of the larger blocks hold, without a length and with one. The later status."""
    h = plan.header
    sides = []
    for which, side in enumerate(plan.sizes):
        buffers = [fenced(size, (which, i)) for i, size in enumerate(s for count, s in side for _ in range(count))]
        for b in buffers:
            b.data = bytes(b.num_bytes) if which else noise(b.num_bytes)
        sides.append(buffers)
    args = ConvertArgs(version=1 << 16 | 2, struct_bytes=ctypes.sizeof(ConvertArgs), device=-1)
    args.src_memory = args.dst_memory = args.table_memory = 1
    pointers = [(ctypes.c_void_p * (len(side) + 1))(*(b.address for b in side)) for side in sides]
    args.src_buffers, args.dst_buffers = map(ctypes.addressof, pointers)
    tokens, tables = 2 * max(h.src_block_size, h.dst_block_size), []
    for array, size, count in (
        (args.src_blocks, h.src_block_size, h.src_num_blocks),
        (args.dst_blocks, h.dst_block_size, h.dst_num_blocks),
    ):
        columns = tokens // size
        ids = (ctypes.c_int64 * columns)(*(max(-1, count - 1 - i) for i in range(columns)))  # the last block, the one before, skip
        array.data, array.ndim, array.dtype = ctypes.addressof(ids), 1, 7
        array.shape[0], array.stride[0] = columns, 1
        tables.append(ids)
    status, sums, lens = 0, (ctypes.c_uint64 * 2)(), ctypes.c_int64(max(0, tokens - max(h.src_block_size, h.dst_block_size) - 1))
    for has_lens in (False, True):
        if has_lens:
            args.seq_lens.data, args.seq_lens.ndim, args.seq_lens.dtype = ctypes.addressof(lens), 1, 7
            args.seq_lens.shape[0], args.seq_lens.stride[0] = 1, 1
        bound = ctypes.c_void_p()
        status = lib.kvx_bind(handle, ctypes.addressof(args), ctypes.addressof(bound))
        if status == 0:
            status = lib.kvx_run(bound, None)
            lib.kvx_bound_free(bound)
        assert status in (0, 1, 3), (status, lib.kvx_last_error())
        apart = lib.kvx_bind_buffers(handle, ctypes.addressof(args), ctypes.addressof(bound))
        if apart == 0:
            apart = lib.kvx_run_blocks(bound, ctypes.addressof(args), None)
            lib.kvx_bound_free(bound)
        assert apart == status, (apart, lib.kvx_last_error())
        # The digest reads by the same plan: its numbers are nonsense here, its reads are not.
        assert lib.kvx_digest(handle, ctypes.addressof(args), ctypes.addressof(sums), None) in (0, 1, 3)
    for name, side in zip(("source", "destination"), sides, strict=True):
        assert all(b.is_whole() for b in side), f"bytes in front of a {name} buffer changed"
    assert all(b.data == noise(b.num_bytes) for b in sides[0]), "the source changed"
    return status


def try_plan(lib: ctypes.CDLL, data: bytes) -> str:
    """Load, and run where that is quick: "refused", "loaded" or "ran"."""
    _, _, handle = load(lib, data)
    if handle is None:
        return "refused"
    plan = Plan(data)
    ran = is_small(plan) and run(lib, handle, plan) == 0
    lib.kvx_plan_free(handle)
    return "ran" if ran else "loaded"


# ---- a process of its own


@pytest.fixture
def library_path() -> str:
    import kvx

    try:
        return kvx.library_path()
    except kvx.Unsupported as missing:
        pytest.skip(str(missing))


@pytest.fixture
def child(library_path, tmp_path):
    """Runs a function of this module on a plan's bytes. A crash, a hang or a failed assertion names the case it happened at."""

    def call(function: str, data: bytes, *more: object, timeout_s: int = 120) -> str:
        (tmp_path / "plan").write_bytes(data)
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.hostile.test_plans", library_path, tmp_path, function, *more]
        # One thread: the checks are the same, and no pool spins beside other tests.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(map(str, command), cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            said, errors = process.communicate(timeout=timeout_s)
            end = f"ended with {signal.Signals(-process.returncode).name if process.returncode < 0 else process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            said, errors = process.communicate()
            end = f"did not end in {timeout_s} s"
        if process.returncode:
            case = (tmp_path / "case").read_text().strip() if (tmp_path / "case").exists() else "the start"
            pytest.fail(f"{function} {end}, at {case}\n{errors[-3000:]}")
        return said

    return call


_case_file = -1


def at_case(text: str) -> None:
    os.pwrite(_case_file, text.ljust(160).encode(), 0)


def main(path: str, folder: str, function: str, *more: str) -> None:
    global _case_file
    lib, data = library(path), Path(folder, "plan").read_bytes()
    _case_file = os.open(Path(folder, "case"), os.O_CREAT | os.O_WRONLY)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE + (1 << 30)  # 1 GiB more than now
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print({"try_plan": try_plan, "sweep": sweep, "flip": flip}[function](lib, data, *more))


# ---- what is refused, and why


def mutated(name: str, path: str, value: int) -> bytes:
    plan = Plan(plan_bytes(name))
    plan.set(path, value)
    return plan.to_bytes()


FAR, BIG, I32, U32 = 1 << 40, 1 << 62, (1 << 31) - 1, (1 << 32) - 1
OUT, STRIDE, BUFFER = "ends at byte|overflowing stride", "negative or overflowing stride", "reaches .* buffer .*; there are"
_ROWS = [  # plan; number, `|` between those that are alike; values; words of the sentence
    ("copy", "header.magic", (0, 0x4B565850), "not a plan: they begin with 0x"),
    ("copy", "header.version", (0, 2, 1 << 31), "this library reads 1"),
    ("copy", "header.plan_bytes", (0, 80, 1 << 63), "its header says"),
    ("copy", "header.num_boxes|num_cells|num_src_sizes|num_dst_sizes", (9, U32), "counts make"),
    ("buffers", "header.num_src_buffers|num_dst_buffers", (0, 1, 99, U32), "sizes|at most"),
    ("copy", "header.src_block_size|dst_block_size|src_num_blocks|dst_num_blocks", (0, -1), "empty block or cache"),
    ("copy", "header.src_num_blocks|dst_num_blocks", (4, FAR, BIG), f"{OUT}|under 2.40 blocks"),
    ("copy", "header.unit_tokens", (0,), "empty block or cache"),
    ("copy", "header.unit_tokens", (3, 5, 8, U32), "does not divide the block sizes 4 and 4"),
    ("copy", "box.num_digits", (13, U32), "digits"),
    ("copy", "box.run_bytes", (0, -1, -BIG), "runs of"),
    ("copy", "box.run_bytes", (FAR, BIG), OUT),
    ("copy", "box.cell", (1, U32), "box 0"),
    ("token_head", "box.cell", (9, U32), "box 0"),
    ("copy", "box.src|dst.offset|block|token_outer|token_inner|buffer|block_step", (-1,), STRIDE),
    ("copy", "box.src|dst.offset|block", (FAR, BIG), OUT),
    ("copy", "box.src|dst.token_split", (0, -1, 3), STRIDE),
    ("sizes", "box.src.token_inner", (FAR, BIG), OUT),
    ("buffers", "box.src|dst.buffer|block_step", (99, I32), BUFFER),
    ("copy", "box.digit.0|1|2|3.size", (0, -1), "has size"),
    ("copy", "box.digit.0|1|2|3.size", (99, FAR, BIG), f"{OUT}|{BUFFER}|more tokens|more than 2.40 runs"),
    ("copy", "box.digit.1.src|dst", (-1, FAR, BIG), OUT),
    ("copy", "box.digit.1.src_step|dst_step", (-1, 9, I32), f"{STRIDE}|{BUFFER}"),
    ("copy", "box.digit.1.token", (-1,), "digit 1"),
    ("token_head", "box.digit.0.layer", (-1,), "negative layer step"),
    ("token_head", "box.digit.0.dst_scale", (-1, FAR, BIG), "past the scales"),
    ("token_head", "cell.src|dst.dtype", (-1, 0, 6, 10, 14, 99), "box 0"),
    ("token_head", "cell.src|dst.pack|group_size", (0, 3, 64, U32), "box 0"),
    ("token_head", "cell.src|dst.is_inline", (2, U32), "makes no sense|overflowing"),
    ("token_head", "cell.src|dst.dim_outer|dim_inner", (-1, -BIG), "overflowing"),
    ("token_head", "cell.src.dim_inner", (FAR, BIG), OUT),
    ("token_head", "cell.head_dim", (0, 33, 1 << 31, U32), "box 0"),
    ("token_head", "cell.dst.granularity", (-1, 7, 99), "granularity -?[0-9]+ for int8"),
    ("token_head", "cell.src.granularity", (1, 5, 6), "granularity [0-9] for bf16"),
    ("token_head", "cell.dst.scale_dtype", (-1, 0, 6, 12, 99), "in no buffer"),
    ("token_head", "cell.dst.scale_buffer", (-1,), "in no buffer"),
    ("token_head", "cell.dst.scale_buffer", (3, I32), "for scales; there are 3"),
    ("token_head", "cell.dst.scale_offset|scale_block", (-1, FAR, BIG), "past the scales"),
    ("to_group", "cell.dst.scale_group", (-1, FAR, BIG), "past the scales"),
    ("to_group", "cell.dst.tensor_scale_buffer", (99, I32), "past the tensor scales"),
    ("to_group", "cell.dst.first_layer", (-1, 2, FAR), "past the tensor scales|begins at layer"),
    ("inline", "cell.src.scale_offset|scale_group", (-1,), "overflowing"),
    ("inline", "cell.src.scale_offset", (FAR, BIG), OUT),
    ("block", "cell.dst.scale_dtype|is_inline", (1,), "per block that are not plain F32"),
    ("block", "cell.dst.tensor_scale_buffer", (0,), "per block that are not plain F32"),
]
REFUSED = [
    (name, ".".join(path), value, words)
    for name, paths, values, words in _ROWS
    for path in itertools.product(*(part.split("|") for part in paths.split(".")))
    for value in values
]


@pytest.mark.parametrize(("name", "path", "value", "words"), REFUSED, ids=[f"{n}-{p}-{v}" for n, p, v, _ in REFUSED])
def test_refused(library_path, name, path, value, words):
    status, sentence, handle = load(library(library_path), mutated(name, path, value))
    assert handle is None, "it was loaded"
    assert status == (4 if path == "header.version" else 1)
    assert re.search(words, sentence), sentence


@pytest.mark.parametrize("name", ["copy", "buffers", "group"])
def test_cut_and_extended(library_path, name):
    lib, data = library(library_path), plan_bytes(name)
    for length in (*range(200), *range(200, len(data), 13), len(data) - 1):
        assert load(lib, data[:length])[0] == 1, length
    for more in (1, 8, 16, 184, 896):
        assert load(lib, data + bytes(more))[0] == 1, more
    for boxes in (data[80:], data[:80] + data[80 + 896 :], data[:80] + bytes(len(data) - 80)):
        assert load(lib, boxes)[0] == 1


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("pair", [(0, 64), (1, 0), (1, 1), (1, 1 << 62), (1 << 63, 64), ((1 << 64) - 1, (1 << 64) - 1)])
def test_sizes_that_lie(library_path, which, pair):
    plan = Plan(plan_bytes("copy"))
    plan.sizes[which][0] = pair
    assert load(library(library_path), plan.to_bytes())[0] == 1


def test_missing_pointers(library_path):
    lib, data, out = library(library_path), plan_bytes("copy"), ctypes.c_void_p(7)
    at = ctypes.addressof(out)
    for call in ((None, len(data), at), (data, len(data), None), (None, 0, None), (data, 0, at)):
        assert lib.kvx_plan_load(*call) == 1
        assert lib.kvx_last_error().startswith(b"kvx_plan_load(): ")
    for call in (lib.kvx_bind, lib.kvx_bind_buffers, lib.kvx_run_blocks):
        assert call(None, None, None) == 1
    assert lib.kvx_run(None, None) == 1
    lib.kvx_plan_free(None)
    lib.kvx_bound_free(None)
    assert out.value == 7


def test_arguments_of_another_major(library_path):
    lib, args, out = library(library_path), ConvertArgs(version=2 << 16, struct_bytes=1), ctypes.c_void_p()
    _, _, handle = load(lib, plan_bytes("copy"))
    status = lib.kvx_bind(handle, ctypes.addressof(args), ctypes.addressof(out))
    lib.kvx_plan_free(handle)
    assert status == 4


@pytest.mark.parametrize("path", ["header.content", "box.digit.11.size", "box.digit.11.src", "cell.reserved32"])
def test_unread(library_path, path):
    """Reserved words and digits past num_digits: not checked, not read."""
    lib = library(library_path)
    status, sentence, handle = load(lib, mutated("token_head", path, -1))
    assert status == 0, sentence
    lib.kvx_plan_free(handle)


# ---- bugs that are there


def tiny(*boxes: dict, src: list = ((1, 64),), dst: list = ((1, 64),), cell: dict | None = None, **header: int) -> bytes:
    """A plan of few numbers: boxes and a cell as {path: value}, sizes as pairs."""
    plan = Plan(bytes(ctypes.sizeof(Header)))
    h = plan.header = Header(magic=0x5058564B, version=1, unit_tokens=4)
    h.src_block_size, h.dst_block_size, h.src_num_blocks, h.dst_num_blocks = 4, 4, 1, 1
    plan.sizes = list(src), list(dst)
    for numbers in boxes:
        plan.boxes.insert(0, Box(run_bytes=4))
        for path, value in ({"src.token_split": 4, "dst.token_split": 4} | numbers).items():
            plan.set(f"box.{path}", value)
    if cell:
        plan.cells.append(Cell(head_dim=4))
        for side in ("src", "dst"):
            one = {"dtype": 3, "group_size": 4, "pack": 4, "dim_inner": 4, "scale_buffer": -1, "tensor_scale_buffer": -1}
            for name, value in one.items():
                plan.set(f"cell.{side}.{name}", value)
        for path, value in cell.items():
            plan.set(f"cell.{path}", value)
    h.num_boxes, h.num_cells = len(plan.boxes), len(plan.cells)
    h.num_src_sizes, h.num_dst_sizes = map(len, plan.sizes)
    h.num_src_buffers, h.num_dst_buffers = (sum(count for count, _ in side) for side in plan.sizes)
    for name, value in header.items():
        setattr(h, name, value)
    h.plan_bytes = len(plan.to_bytes())
    return plan.to_bytes()


def digits(count: int, **numbers: int) -> dict[str, int]:
    return {"num_digits": count} | {f"digit.{i}.{name}": value for i in range(count) for name, value in numbers.items()}


_FP8 = {"dtype": 4, "dim_inner": 1, "scale_dtype": 3, "scale_buffer": 1}
_TENSOR = {f"src.{name}": value for name, value in {**_FP8, "granularity": 1, "tensor_scale_buffer": 2}.items()}
_BY_BLOCK = {f"dst.{name}": value for name, value in {**_FP8, "granularity": 2}.items()}
_LONG = {
    f"{side}.{name}": value
    for side in ("src", "dst")
    for name, value in (("pack", 1 << 29), ("group_size", 1 << 29), ("dim_inner", 0))
}
_INT4 = {"head_dim": 6, "src.dtype": 12, "src.pack": 6, "dst.pack": 6, "src.group_size": 3, "dst.group_size": 6}
_THREE = [(1, 64), (1, 4), (1, 4)]
PAST_BUGS = {  # each was loaded once, or ended the process
    "the check of buffers gives up: a small one is read past its end": tiny(
        {"run_bytes": 64} | digits(12, size=2, src_step=1), src=[(12, 64), (1, 1)]
    ),
    "112 bytes ask for a gigabyte": tiny(src=[(1 << 26, 64)], dst=[(1 << 26, 64)]),
    "first_layer wraps: 4 bytes in front of the tensor scales are read": tiny(
        {"cell": 1}, src=_THREE, cell=_TENSOR | {"src.first_layer": (1 << 62) - 1}
    ),
    "first_layer and the digit's layers wrap": tiny(
        {"cell": 1} | digits(1, size=2, layer=1), src=_THREE, cell=_TENSOR | {"src.first_layer": (1 << 63) - 1}
    ),
    "a row of 2^29 elements in 4 bytes": tiny({"cell": 1}, cell={"head_dim": 1 << 29, "dst.dtype": 2} | _LONG),
    "a scale of a block at an odd byte: SIGBUS on Arm": tiny(
        {"cell": 1}, dst=[(1, 64), (1, 8)], cell=_BY_BLOCK | {"dst.scale_offset": 1}
    ),
    "groups of 3 elements of 4 bits: codes are lost": tiny({"cell": 1}, cell=_INT4),
    "2^62 moves of the same bytes": tiny(digits(1, size=1 << 62)),
    "2^120 moves: the count overflows and none is made": tiny(digits(2, size=1 << 60)),
    "2^55 moves between buffers": tiny(digits(11, size=32, src_step=1), src=[(512, 64)]),
    "2^62 destination blocks: a bit each at bind": tiny(dst_num_blocks=1 << 62),
    "blocks of 2^60 tokens": tiny({}, src_block_size=1 << 60, dst_block_size=1 << 60),
}


@pytest.mark.parametrize("name", PAST_BUGS)
def test_past_bugs(child, name):
    assert child("try_plan", PAST_BUGS[name], timeout_s=30).strip() == "refused"


def test_a_million_buffers_that_all_exist(child):
    """The check of buffers once took memory without end here."""
    box = {"src.block_step": 1} | digits(1, size=1 << 10, src_step=1 << 10, dst=4)
    data = tiny(box, src=[((1 << 20) - 1, 64), (1, 65)], dst=[(1, 4096)], src_num_blocks=1 << 10)
    assert child("try_plan", data, timeout_s=30).strip() == "loaded"


_AGAIN = "times the .* bytes of the destination"
_MANY = {"run_bytes": 64} | digits(1, size=(1 << 22) - 1, src_step=1, dst=1)
ENDLESS = {  # what it asks for: a plan of few bytes, and words of the sentence
    "2^30 writes of the same run": (tiny(digits(1, size=1 << 30)), _AGAIN),
    "2^40 writes by four digits": (tiny(digits(4, size=1 << 10)), _AGAIN),
    "2^30 writes of the same row": (tiny({"cell": 1} | digits(1, size=1 << 30), cell={"head_dim": 4}), _AGAIN),
    "2^29 units of a token, all at byte 0": (tiny({}, unit_tokens=1, src_block_size=1 << 29, dst_block_size=1 << 29), _AGAIN),
    "2^39 blocks in the same 64 bytes": (tiny({}, src_num_blocks=1 << 39, dst_num_blocks=1 << 39), _AGAIN),
    "2^32 steps between buffers": (
        tiny(digits(4, size=256, src_step=1, dst=0), src=[(2048, 64)]),
        "steps through more source buffers than the 2048",
    ),
    "1,000 boxes through 2^22 buffers of two sizes": (
        tiny(*[_MANY] * 1000, src=[((1 << 22) - 1, 64), (1, 63)], dst=[(1, 1 << 28)]),
        "over 2.25 steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_endless(library_path, name):
    """Refused at once, and not begun: each would have run for hours."""
    data, words = ENDLESS[name]
    began = time.perf_counter()
    status, sentence, handle = load(library(library_path), data)
    took_s = time.perf_counter() - began
    assert took_s < 1, f"{took_s:.1f} s"
    assert handle is None, "it was loaded"
    assert status == 1
    assert re.search(words, sentence), sentence


# ---- every number


def evil(kind: type, now: int) -> list[int]:
    bits = 8 * ctypes.sizeof(kind)
    values = {0, 1, 2, 3, 5, 13, 255, now + 1, now - 1, now + 4, now * 2, 1 << 16, 1 << 26, (1 << 31) - 1, 1 << 31, (1 << 32) - 1}
    values |= {-1, -2, -(1 << 31), (1 << 62) - 1, (1 << 63) - 1} | {sign << n for n in (40, 53, 60, 61, 62) for sign in (1, -1)}
    values |= {(1 << bits) - 1, (1 << bits - 1) - 1, -(1 << bits - 1)}
    low, high = (-(1 << bits - 1), 1 << bits - 1) if kind(-1).value < 0 else (0, 1 << bits)
    return sorted(v for v in values if low <= v < high and v != now)


def sweep(lib: ctypes.CDLL, data: bytes) -> str:
    """One number at a time, every evil value: header, first and last box, first and last cell, all sizes."""
    plan, at, places = Plan(data), 0, []
    for part, kind, count in (("header", Header, 1), ("box", Box, len(plan.boxes)), ("cell", Cell, len(plan.cells))):
        for i, (path, offset, leaf) in itertools.product(sorted({0, count - 1}) if count else [], leaves(kind)):
            places.append((f"{part} {i}{path}", at + i * ctypes.sizeof(kind) + offset, leaf))
        at += count * ctypes.sizeof(kind)
    places += [(f"size {(offset - at) // 8}", offset, ctypes.c_uint64) for offset in range(at, len(data), 8)]
    tally = {"refused": 0, "loaded": 0, "ran": 0}
    for what, offset, leaf in places:
        now = leaf.from_buffer_copy(data, offset).value
        for value in evil(leaf, now):
            at_case(f"{what} = {value}, was {now}")
            tally[try_plan(lib, data[:offset] + bytes(leaf(value)) + data[offset + ctypes.sizeof(leaf) :])] += 1
    return " ".join(map(str, tally.values()))


@pytest.mark.parametrize("name", PAIRS)
def test_every_number(child, name):
    refused, loaded, ran = map(int, child("sweep", plan_bytes(name)).split())
    assert min(refused, ran) > 100, (refused, loaded, ran)


# ---- bytes at random


def flip(lib: ctypes.CDLL, data: bytes, name: str, count: str) -> str:
    """A few bits, bytes or words of a plan at random; the header seldom, or little would get past its counts."""
    rng = random.Random(name)
    used = [i for i, byte in enumerate(data) if byte]  # most of a plan is digits that are not there
    tally = {"refused": 0, "loaded": 0, "ran": 0}
    for case in range(int(count)):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.choice(used) if rng.random() < 0.7 else rng.randrange(len(data))
            if at < ctypes.sizeof(Header) and rng.random() < 0.8:
                at = rng.randrange(ctypes.sizeof(Header), len(data))
            how, word = rng.randrange(4), at // 8 * 8
            if how == 0:
                changed[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                changed[at] = rng.randrange(256)
            elif how == 2:
                changed[word : word + 8] = struct.pack("<q", rng.choice((0, 1, 2, 3, 4, 8, 16, 64, 100, -1, 1 << 20)))
            else:
                other = rng.randrange(0, len(data), 8)
                changed[word : word + 8] = data[other : other + 8]
        at_case(f"case {case}")
        tally[try_plan(lib, bytes(changed))] += 1
    return " ".join(map(str, tally.values()))


@pytest.mark.parametrize("name", PAIRS)
def test_random_flips(child, name):
    refused, loaded, ran = map(int, child("flip", plan_bytes(name), name, FLIPS).split())
    assert min(refused, ran) > FLIPS // 10, (refused, loaded, ran)


if __name__ == "__main__":
    main(*sys.argv[1:])
