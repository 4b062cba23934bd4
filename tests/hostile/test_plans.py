"""Hostile plans: whatever the bytes say, loading gives a status and a sentence, and running stays inside the buffers it names.

The structs are read out of the header, so that a field it gains is mutated too. What may crash runs in a process of its own.
Buffers end where a page begins that nobody may touch: a read past the end stops the process, as a write does. What stands before
a buffer is watched for changes.
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
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import kvx
from kvx.ops.native import ABI_VERSION, LIB, ConvertArgs

ROOT = Path(__file__).resolve().parent.parent.parent
MAX_BYTES, MAX_WORK, MAX_BUFFERS = 4 << 20, 1 << 20, 256  # of a plan that is run
FLIPS = 600  # mutations of each plan and seed
pytestmark = pytest.mark.skipif(LIB is None, reason="libkvx is not built")

# ---- the structs of the header

_TYPES: dict[str, type] = {
    "uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64,
}  # fmt: skip


def _read_structs() -> None:
    text = re.sub(r"/\*.*?\*/", "", Path(kvx.include_dir(), "kvx_abi.h").read_text(), flags=re.S)
    numbers = dict(re.findall(r"#define (\w+) (\d+)\s", text))
    for struct_name, body in re.findall(r"typedef struct (kvx_plan_\w+_t) \{(.*?)\} \1;", text, re.S):
        fields = []
        for kind, name, count in re.findall(r"(\w+) (\w+)(?:\[(\w+)\])?;", body):
            fields.append((name, _TYPES[kind] * int(numbers.get(count, count)) if count else _TYPES[kind]))
        _TYPES[struct_name] = type(struct_name, (ctypes.Structure,), {"_fields_": fields})


_read_structs()
Header, Box, Cell = (_TYPES[f"kvx_plan_{name}_t"] for name in ("header", "box", "cell"))


class Plan:
    """A plan's bytes, taken apart: header, boxes, cells and the pairs of sizes, each to be changed and put together again."""

    def __init__(self, data: bytes):
        self.header = Header.from_buffer_copy(data)
        at = ctypes.sizeof(Header)
        self.boxes, at = self._read(data, at, Box, self.header.num_boxes)
        self.cells, at = self._read(data, at, Cell, self.header.num_cells)
        pairs = [list(p) for p in struct.iter_unpack("<QQ", data[at:])]
        self.sizes = pairs[: self.header.num_src_sizes], pairs[self.header.num_src_sizes :]

    @staticmethod
    def _read(data: bytes, at: int, kind: type, count: int) -> tuple[list, int]:
        size = ctypes.sizeof(kind)
        return [kind.from_buffer_copy(data, at + i * size) for i in range(count)], at + count * size

    def to_bytes(self) -> bytes:
        sizes = b"".join(struct.pack("<QQ", *pair) for side in self.sizes for pair in side)
        return b"".join(map(bytes, (self.header, *self.boxes, *self.cells))) + sizes

    def counted(self) -> bytes:
        """The bytes, after the header's counts were made those of the parts."""
        h = self.header
        h.num_boxes, h.num_cells = len(self.boxes), len(self.cells)
        h.num_src_sizes, h.num_dst_sizes = map(len, self.sizes)
        h.num_src_buffers, h.num_dst_buffers = (sum(count for count, _ in side) for side in self.sizes)
        h.plan_bytes = len(self.to_bytes())
        return self.to_bytes()

    def set(self, path: str, value: int) -> Plan:
        """`box.src.offset`, `box.digit.1.size`, `cell.dst.dtype`, `header.magic`; box and cell are the first."""
        head, *names = path.split(".")
        at = {"header": lambda: self.header, "box": lambda: self.boxes[0], "cell": lambda: self.cells[0]}[head]()
        for name in names[:-1]:
            at = at[int(name)] if name.isdigit() else getattr(at, name)
        setattr(at, names[-1], value)
        return self


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

_GEOMETRY = {"num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 32, "num_layers": 2}
_FUSED, _POOL, _BLOCKS = "layer | block token head (kv dim)", "block layer kv head token dim", "block layer kv | token head dim"


def _spec(layout: str, **more: object) -> kvx.CacheSpec:
    return kvx.CacheSpec(**{**_GEOMETRY, "layout": layout, **more})


_CODED = "kv | block head token dim"
PAIRS = {
    "copy": (_spec(_FUSED), _spec(_POOL)),
    "turn": (_spec("layer | block head kv[K: dim token; V: token dim]"), _spec(_FUSED)),
    "buffers": (_spec(_BLOCKS), _spec("block | head layer kv token dim")),
    "sizes": (_spec(_POOL, block_size=8), _spec("kv layer | (block token) head dim", num_blocks=6)),
    "split": (_spec("layer kv | block token/2 head token%2 dim"), _spec(_POOL, block_size=2, num_blocks=6)),
    "shards": ([_spec(_FUSED).shard(2, i) for i in (0, 1)], _spec(_BLOCKS)),
    "token_head": (_spec(_FUSED), _spec(_POOL, format="int8_per_token_head")),
    "inline": (_spec(_FUSED, format="int4_per_token_head_inline"), _spec(_POOL, format="f32")),
    "group": (_spec(_FUSED, format="nvfp4"), _spec(_POOL, format="f16", num_blocks=2)),
    "to_group": (_spec(_FUSED), _spec(_POOL, format="nvfp4")),
    "block": (_spec(_FUSED), _spec(_POOL, format="fp8_e4m3_per_block_head", block_size=8)),
    "head": (_spec(_FUSED, format="fp8_e5m2_per_head"), _spec(_BLOCKS, format="mxfp8")),
    "packed": (_spec("kv | block head dim/x token dim%x", num_layers=1), _spec(_CODED, format="int8_per_block", num_layers=1)),
}


@lru_cache
def plan_bytes(name: str) -> bytes:
    return kvx.plan(*PAIRS[name]).to_bytes()


# ---- loading and running


def load(data: bytes) -> int | None:
    """The plan's handle, or None. A refusal is INVALID_ARGUMENT or INCOMPATIBLE, has a sentence, and leaves the pointer alone."""
    out = ctypes.c_void_p(7)
    status = LIB.kvx_plan_load(data, len(data), ctypes.addressof(out))
    if status == 0:
        return out.value
    sentence = LIB.kvx_last_error().decode()
    assert status in (1, 4), f"status {status}: {sentence}"
    assert re.fullmatch(r"kvx_plan_load\(\): [^\n]{10,}\.", sentence), sentence
    assert out.value == 7
    return None


_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fenced:
    """Memory of a buffer that ends where a page begins that may not be touched; the bytes before it, back to the page's start or
    further, are 0xa5."""

    def __init__(self, num_bytes: int):
        pages = -(-num_bytes // _PAGE) + 1
        self.map = mmap.mmap(-1, (pages + 1) * _PAGE)
        self.start = pages * _PAGE - num_bytes
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.address = base + self.start
        self.map[: self.start] = b"\xa5" * self.start
        assert _LIBC.mprotect(base + pages * _PAGE, _PAGE, 0) == 0

    def fill(self, data: bytes) -> None:
        self.map[self.start : self.start + len(data)] = data

    def is_whole(self) -> bool:
        return self.map[: self.start] == b"\xa5" * self.start


@lru_cache(maxsize=64)
def fenced(num_bytes: int, _which: object) -> Fenced:
    return Fenced(num_bytes)


@lru_cache
def numbers(num_bytes: int) -> bytes:
    return random.Random(0).randbytes(num_bytes)


def is_small(plan: Plan) -> bool:
    """Whether it is run: a plan may ask for more bytes, blocks or moves than a test has time for."""
    h = plan.header
    sizes = [[b for count, b in side for _ in range(min(count, MAX_BUFFERS + 1))] for side in plan.sizes]
    if max(map(len, sizes)) > MAX_BUFFERS or sum(map(sum, sizes)) > MAX_BYTES or max(h.src_num_blocks, h.dst_num_blocks) > 1 << 20:
        return False
    tokens = 2 * max(h.src_block_size, h.dst_block_size)
    for box in plan.boxes:
        cell = plan.cells[box.cell - 1] if box.cell else None
        work = max(1, tokens // h.unit_tokens) * (cell.head_dim if cell else box.run_bytes)
        for digit in box.digit[: box.num_digits]:
            work *= digit.size
        if work > MAX_WORK:
            return False
    return True


def run(handle: int, plan: Plan) -> int:
    """Convert block 1 to block 0 and a few more, once with and once without lengths. Returns the last status."""
    h = plan.header
    sides = []
    for which, side in enumerate(plan.sizes):
        buffers = [fenced(size, (which, i)) for i, size in enumerate(s for count, s in side for _ in range(count))]
        for n, buffer in enumerate(buffers):
            buffer.fill(
                numbers(buffer.map.size() - _PAGE - buffer.start) if which == 0 else bytes(buffer.map.size() - _PAGE - buffer.start)
            )
            assert n < MAX_BUFFERS
        sides.append(buffers)
    args = ConvertArgs(
        version=ABI_VERSION, struct_bytes=ctypes.sizeof(ConvertArgs), device=-1, src_memory=1, dst_memory=1, table_memory=1
    )
    pointers = [(ctypes.c_void_p * (len(b) + 1))(*(x.address for x in b)) for b in sides]
    args.src_buffers, args.dst_buffers = map(ctypes.addressof, pointers)
    # Both sides hold as many tokens; ids go down from the last block that is there, then skip.
    whole = max(h.src_block_size, h.dst_block_size)
    tables = []
    for array, size, count in (
        (args.src_blocks, h.src_block_size, h.src_num_blocks),
        (args.dst_blocks, h.dst_block_size, h.dst_num_blocks),
    ):
        columns = max(1, 2 * whole // size) if 2 * whole // size <= 4096 else 1
        ids = (ctypes.c_int64 * columns)(*(count - 1 - i if i < count else -1 for i in range(columns)))
        array.data, array.data_bytes, array.ndim, array.dtype = ctypes.addressof(ids), ctypes.sizeof(ids), 2, 7
        array.shape[0], array.shape[1], array.stride[0], array.stride[1] = 1, columns, columns, 1
        tables.append((ids, columns * size))
    lens = (ctypes.c_int64 * 1)(max(0, min(tokens for _, tokens in tables) - 1))
    status = 0
    for has_lens in (False, True):
        if has_lens:
            args.seq_lens.data, args.seq_lens.ndim, args.seq_lens.dtype = ctypes.addressof(lens), 1, 7
            args.seq_lens.shape[0], args.seq_lens.stride[0] = 1, 1
        bound = ctypes.c_void_p()
        status = LIB.kvx_bind(handle, ctypes.addressof(args), ctypes.addressof(bound))
        if status == 0:
            status = LIB.kvx_run(bound, None)
            LIB.kvx_bound_free(bound)
        assert status in (0, 1, 3), LIB.kvx_last_error().decode()
    for name, buffers in zip(("source", "destination"), sides, strict=True):
        assert all(b.is_whole() for b in buffers), f"bytes in front of a {name} buffer changed"
    for b in sides[0]:
        assert b.map[b.start : -_PAGE] == numbers(b.map.size() - _PAGE - b.start), "the source changed"
    return status


def try_plan(data: bytes) -> str:
    """Load, and run where that is quick: "refused", "loaded" or "ran"."""
    handle = load(data)
    if handle is None:
        return "refused"
    try:
        plan = Plan(data)
        if not is_small(plan):
            return "loaded"
        return "ran" if run(handle, plan) == 0 else "loaded"
    finally:
        LIB.kvx_plan_free(handle)


# ---- a process of its own


def in_child(call: str, tmp_path: Path, timeout_s: int = 120) -> str:
    """Run a function of this module. A crash, a hang or a failed assertion fails the test with the case it happened at."""
    note = tmp_path / "case"
    code = f"from tests.hostile import test_plans as t; t.begin({str(note)!r}); t.{call}"
    # One thread: guards and limits are the same, and no pool spins beside other tests.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        said, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"{call} did not end in {timeout_s} s, at {note.read_text() if note.exists() else 'the start'}")
    if process.returncode:
        end = signal.Signals(-process.returncode).name if process.returncode < 0 else f"exit {process.returncode}"
        pytest.fail(f"{call} ended with {end}, at {note.read_text() if note.exists() else 'the start'}\n{errors[-3000:]}")
    return said


_note = -1


def begin(path: str) -> None:
    """In the child: where to note the case at hand, and 1 GiB of memory more than now at most."""
    global _note
    _note = os.open(path, os.O_CREAT | os.O_WRONLY)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def at_case(text: str) -> None:
    os.pwrite(_note, text.ljust(160).encode(), 0)


# ---- every field


def evil(kind: type, now: int) -> set[int]:
    bits = 8 * ctypes.sizeof(kind)
    is_signed = kind(-1).value < 0
    values = {0, 1, 2, 3, 5, now + 1, now - 1, now * 2, now + 4, 13, 255, 1 << 16, 1 << 26, (1 << 31) - 1, 1 << 31, (1 << 32) - 1}
    values |= {-1, -2, -(1 << 31)} | {sign << n for n in (40, 53, 60, 61, 62) for sign in (1, -1)}
    values |= {(1 << bits) - 1, (1 << bits - 1) - 1, -(1 << bits - 1), (1 << 62) - 1}
    low, high = (-(1 << bits - 1), 1 << bits - 1) if is_signed else (0, 1 << bits)
    return {v for v in values if low <= v < high and v != now}


def sweep(name: str) -> None:
    """One number at a time, every evil value: header, first and last box, first and last cell, all sizes."""
    data = plan_bytes(name)
    plan = Plan(data)
    at, parts = 0, [("header", Header, [0])]
    parts += [
        ("box", Box, sorted({0, len(plan.boxes) - 1})),
        ("cell", Cell, sorted({0, len(plan.cells) - 1}) if plan.cells else []),
    ]
    counts = {"header": 1, "box": len(plan.boxes), "cell": len(plan.cells)}
    numbers_at = []
    for part, kind, which in parts:
        for i, (path, offset, leaf) in itertools.product(which, leaves(kind)):
            numbers_at.append((f"{part} {i}{path}", at + i * ctypes.sizeof(kind) + offset, leaf))
        at += counts[part] * ctypes.sizeof(kind)
    numbers_at += [(f"size {offset - at}", offset, ctypes.c_uint64) for offset in range(at, len(data), 8)]
    tally = {"refused": 0, "loaded": 0, "ran": 0}
    for what, offset, leaf in numbers_at:
        now = leaf.from_buffer_copy(data, offset).value
        for value in sorted(evil(leaf, now)):
            at_case(f"plan {name}: {what} = {value}, was {now}")
            changed = data[:offset] + bytes(leaf(value)) + data[offset + ctypes.sizeof(leaf) :]
            tally[try_plan(changed)] += 1
    print(*tally.values())


def show(name: str) -> None:
    print(try_plan(plan_bytes(name)))


@pytest.mark.parametrize("name", PAIRS)
def test_plans_to_start_from_run(name, tmp_path):
    assert in_child(f"show({name!r})", tmp_path).strip() == "ran"


@pytest.mark.parametrize("name", PAIRS)
def test_every_number(name, tmp_path):
    refused, loaded, ran = map(int, in_child(f"sweep({name!r})", tmp_path).split())
    assert refused > 1000 and ran > 100, (refused, loaded, ran)


# ---- random bytes


def flip(name: str, seed: int, count: int) -> None:
    """Some bits, bytes or words of a plan at random. Counts stay in place in most, or nothing would get past them."""
    rng = random.Random(f"{name} {seed}")
    data = plan_bytes(name)
    first = ctypes.sizeof(Header)
    tally = {"refused": 0, "loaded": 0, "ran": 0}
    used = [i for i, byte in enumerate(data) if byte or i % 8 < 2]  # zeros fill most of a plan: digits that are not there
    for case in range(count):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.choice(used) if rng.random() < 0.9 else rng.randrange(len(data))
            if at < first and rng.random() < 0.8:
                at = rng.randrange(first, len(data))
            kind = rng.randrange(4)
            if kind == 0:
                changed[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                changed[at] = rng.randrange(256)
            elif kind == 2:  # a small number in place of a small number
                at = at // 8 * 8
                changed[at : at + 8] = struct.pack("<q", rng.choice((0, 1, 2, 3, 4, 8, 16, 64, 100, -1, 1 << 20)))[: len(data) - at]
            else:  # a word from elsewhere in the plan
                at, other = at // 8 * 8, rng.randrange(0, len(data) - 8, 8)
                changed[at : at + 8] = data[other : other + 8]
        at_case(f"plan {name}, seed {seed}, case {case}")
        tally[try_plan(bytes(changed))] += 1
    print(*tally.values())


@pytest.mark.parametrize("name", PAIRS)
def test_random_flips(name, tmp_path):
    refused, loaded, ran = map(int, in_child(f"flip({name!r}, 0, {FLIPS})", tmp_path).split())
    assert refused + loaded + ran == FLIPS
    assert ran >= FLIPS // 20, (refused, loaded, ran)  # otherwise nothing was tried
