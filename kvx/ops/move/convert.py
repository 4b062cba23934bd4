"""convert: one cache's bytes as another's, after a plan (kvx/layout/plan.py). The torch body below is the definition."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, KvxWarning, OutOfRange, a_type
from kvx.layout.box import Box
from kvx.layout.buffers import bytes_of, is_unset, mark_set, memory_bytes
from kvx.layout.gate import check_memory
from kvx.layout.place import num_buffers, num_cache_buffers
from kvx.layout.plan import Plan
from kvx.ops import backend as backends
from kvx.ops import native
from kvx.ops.move.block_ids import BlockIds, as_numbers, as_table, check_blocks, check_together
from kvx.ops.move.sides import Buffers, Sides, flat, kept_sides, latest_sides, loaded, memory_of, new_args, sides_of
from kvx.ops.move.transcode import BY_BLOCK, Rows
from kvx.ops.scales import unset_words
from kvx.spec.cache_spec import PlaneSpec
from kvx.spec.formats import Granularity

_run_bound, _run_unlocked = native.entry("kvx_run"), native.entry("kvx_run", keeps_lock=False)
_bind, _bound_free = native.entry("kvx_bind"), native.entry("kvx_bound_free")
_convert = native.entry("kvx_door_convert")
_OTHER_TENSORS = -2  # what it answers where they are not those of the sides it was given


def convert(
    src: Buffers,  # every buffer of the source; shard by shard, nested as you like
    dst: Buffers,  # every buffer of the destination, changed in place
    *,
    plan: Plan,
    src_blocks: Tensor | Sequence[int] | None = None,  # [n], or [num_seqs, columns]; None: plan.blocks, or all, in order
    dst_blocks: Tensor | Sequence[int] | None = None,  # both None, or neither, where the plan has blocks
    seq_lens: Tensor | None = None,  # [num_seqs]: tokens past a length are left alone
    errors: Tensor | None = None,  # one int64 on the device: bad block ids are added to it
    backend: str = "auto",
) -> None:
    """Move blocks of `src` into blocks of `dst`. A negative id skips its pair.

    Ids given as host tensors or lists are checked before anything moves; ids on a device are checked there, and bad ones are
    skipped and counted in `errors` (kvx.debug() raises). Never waits for the device: ids of the host are copied, and reach it in
    stream order. The plan remembers the buffers, so that calls with the same ones and other ids cost little more than the launch.
    """
    _check_plan(plan)
    numbers, memory = as_numbers(plan, src_blocks, dst_blocks, seq_lens)
    # As they come, in the hope that they are flat and those of the last call: the library says if they are.
    sources, destinations = _side(src), _side(dst)
    tensors, sides = (*sources, *destinations), latest_sides(plan)
    status = _OTHER_TENSORS
    if sides is not None and _takes(sides, backend) and sides.may_be_of(tensors, len(sources)):
        status = _run(sides, id(tensors), numbers, errors)
    if status == _OTHER_TENSORS:
        sources, destinations = list(flat("src", src)), list(flat("dst", dst))
        tensors, sides = (*sources, *destinations), kept_sides(plan, sources, destinations)
        if sides is not None and _takes(sides, backend) and sides.may_be_of(tensors, len(sources)):
            status = _run(sides, id(tensors), numbers, errors)
    if status == _OTHER_TENSORS:
        sides = sides_of(plan, sources, destinations)
        if _choose(backend, sides, sources, destinations) == "torch":
            Bound(plan, sources, destinations, src_blocks, dst_blocks, seq_lens, errors, backend).run()
            return _say_unset(plan, destinations)
        sides.bind(plan, tensors)
        status = _run(sides, None, numbers, errors)
    del memory  # of the numbers: until here
    if status:
        message = native.last_error()
        check_together(*check_blocks(plan, src_blocks, dst_blocks, seq_lens), seq_lens)  # Python's own words come first
        native.raise_status(status, message, call="convert()")
    if any(_dst_scales(plan)):
        _say_unset(plan, tensors[len(sources) :])


def _run(sides: Sides, tensors: int | None, numbers: tuple[int | None, ...], errors: Tensor | None) -> int:
    """What the library answers: _OTHER_TENSORS where `tensors`, the id of a tuple, are not those of the sides."""
    counts = backends.is_debug() and sides.ordinal is not None
    if counts and errors is None:
        errors = torch.zeros((), dtype=torch.int64, device=sides.device)
    status: int = _convert(
        sides.handle,
        tensors,
        *numbers,
        None if errors is None else errors.data_ptr(),
        None if sides.ordinal is None else torch._C._cuda_getCurrentRawStream(sides.ordinal),
    )
    if counts and errors is not None and status == 0:
        _raise_counted(errors)
    return status


def bind(
    plan: Plan,
    src: Buffers,
    dst: Buffers,
    *,
    src_blocks: Tensor | Sequence[int] | None = None,
    dst_blocks: Tensor | Sequence[int] | None = None,
    seq_lens: Tensor | None = None,
    errors: Tensor | None = None,
    backend: str = "auto",
) -> Bound:
    """The first half of `convert`, for running often: all is checked and prepared. Ids on a device are read anew by each run."""
    bound = Bound(plan, src, dst, src_blocks, dst_blocks, seq_lens, errors, backend)
    _say_unset(plan, bound.dst)
    return bound


class Bound:
    """A plan with addresses. Holds the tensors it was given."""

    def __init__(
        self,
        plan: Plan,
        src: Buffers,
        dst: Buffers,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        seq_lens: Tensor | None,
        errors: Tensor | None,
        backend: str,
    ):
        _check_plan(plan)
        self.plan = plan
        self.src, self.dst = list(flat("src", src)), list(flat("dst", dst))
        sides = sides_of(plan, self.src, self.dst)
        self.src_blocks, self.dst_blocks = check_blocks(plan, src_blocks, dst_blocks, seq_lens)
        self.seq_lens, self.errors = seq_lens, errors
        self.device = sides.device
        self.backend = _choose(backend, sides, self.src, self.dst)
        self._handle: int | None = None
        if self.backend == "torch":
            check_memory("convert", "torch", src=self.src, dst=self.dst)
            _check_ids(self)
            return
        if self.errors is None and self.device.type == "cuda" and backends.is_debug():
            self.errors = torch.zeros((), dtype=torch.int64, device=self.device)
        self._bind(sides)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise BadArgument("Bound: it holds addresses, and is neither copied nor pickled. Send the plan and call kvx.bind() there.")

    def run(self) -> None:
        """On the current stream of the caches' device."""
        if self._handle is None:
            return _convert_torch(self)
        if self.device.type == "cuda":
            status = _run_bound(self._handle, torch._C._cuda_getCurrentRawStream(self.device.index))
        else:
            status = _run_unlocked(self._handle, None)
        if status:
            native.raise_status(status, call="convert()")
        if self.errors is not None and backends.is_debug():
            _raise_counted(self.errors)

    def _bind(self, sides: Sides) -> None:
        args = new_args(self.device)
        check_together(self.src_blocks, self.dst_blocks, self.seq_lens)
        args.table_memory = memory_of([self.src_blocks])
        sides.src.fill(args, "src")
        sides.dst.fill(args, "dst")
        native.fill_array(args.src_blocks, self.src_blocks)
        native.fill_array(args.dst_blocks, self.dst_blocks)
        if self.seq_lens is not None:
            native.fill_array(args.seq_lens, self.seq_lens)
        args.errors = None if self.errors is None else self.errors.data_ptr()
        handle = ctypes.c_void_p()
        status = _bind(loaded(self.plan), ctypes.addressof(args), ctypes.addressof(handle))
        if status:
            native.raise_status(status, call="convert()")
        self._handle = handle.value
        weakref.finalize(self, _bound_free, handle.value)


def _check_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise BadArgument(f"convert(): plan is {a_type(plan)}; it must be a Plan, made by kvx.plan(src, dst).")


def _choose(backend: str, sides: Sides, src: Sequence[Tensor], dst: Sequence[Tensor]) -> str:
    return backends.choose("convert", backend, src[0] if src[0].device == sides.device else dst[0])


def _takes(sides: Sides, backend: str) -> bool:
    return backend == "auto" or backend == sides.device.type


def _side(buffers: Buffers) -> Sequence[Any]:
    return buffers if isinstance(buffers, (list, tuple)) else (buffers,)


def _raise_counted(errors: Tensor) -> None:
    bad = int(errors)
    if bad:
        errors.zero_()
        raise OutOfRange(f"convert(): {bad} block ids are outside the caches; those blocks were not converted.")


def _say_unset(plan: Plan, dst: Sequence[Tensor]) -> None:
    """That rows are encoded under a scale that nobody set. What convert itself fills counts as set from now on."""
    read, filled = _dst_scales(plan)
    for at in filled:
        mark_set(dst[at])
    for at, plane in read:
        if is_unset(dst[at]):
            warnings.warn(unset_words("convert", plane), KvxWarning, stacklevel=3)
            return


def _dst_scales(plan: Plan) -> tuple[list[tuple[int, PlaneSpec]], list[int]]:
    """Which scale buffers of the destination the plan reads, with their planes, and which it fills. Kept with the plan."""
    kept: tuple[list[tuple[int, PlaneSpec]], list[int]] | None = plan.__dict__.get("_dst_scales")
    if kept is not None:
        return kept
    used, made = set[int](), set[int]()
    for box in plan.boxes:
        if box.cell is None:  # bytes as they are, and scales among them
            steps = (range(0, d.size * d.dst_step, d.dst_step) for d in box.digits if d.dst_step)
            made |= {box.dst.buffer + sum(at) for at in product(*steps)}
        elif Granularity(box.cell.dst.granularity) in BY_BLOCK:
            made.add(box.cell.dst.scale_buffer)
        elif Granularity(box.cell.dst.granularity) in (Granularity.TENSOR, Granularity.HEAD):
            used.add(box.cell.dst.scale_buffer)
    kept, first = ([], []), 0
    for spec in plan.dst:
        scaled = [p for i, p in enumerate(spec.planes) if spec.scale_shape(i) is not None and p.format.scale is not None]
        for at, plane in enumerate(scaled, first + num_cache_buffers(spec)):
            if at in used and plane.format.element.name != "fp8_e5m2":
                kept[0].append((at, plane))
            elif at in made:
                kept[1].append(at)
        first += num_buffers(spec)
    plan.__dict__["_dst_scales"] = kept
    return kept


# ---- the definition


def _check_ids(bound: Bound) -> None:
    """What the library checks of host tables."""
    p = bound.plan
    tables = [as_table(t).cpu().to(torch.int64) for t in (bound.src_blocks, bound.dst_blocks)]
    tokens = [t.shape[1] * s[0].block_size for t, s in zip(tables, (p.src, p.dst), strict=True)]
    if tables[0].shape[0] != tables[1].shape[0]:
        raise BadArgument(f"convert(): src_blocks has {tables[0].shape[0]} sequences and dst_blocks {tables[1].shape[0]}.")
    if bound.seq_lens is None and tokens[0] != tokens[1]:
        raise BadArgument(f"convert(): src_blocks holds {tokens[0]} tokens a sequence and dst_blocks {tokens[1]}. Give seq_lens.")
    lens = [min(tokens)] * tables[0].shape[0] if bound.seq_lens is None else bound.seq_lens.tolist()
    for s, length in enumerate(lens):
        if not 0 <= length <= min(tokens):
            raise OutOfRange(f"convert(): seq_lens[{s}] is {length}; the tables hold {min(tokens)} tokens. Nothing was converted.")
    for name, table, spec in (("src_blocks", tables[0], p.src[0]), ("dst_blocks", tables[1], p.dst[0])):
        used = [i for row, n in zip(table.tolist(), lens, strict=True) for i in row[: -(-n // spec.block_size)]]
        bad = [i for i in used if i >= spec.num_blocks]
        if bad:
            raise OutOfRange(f"convert(): {name} has {bad[0]}; the cache has {spec.num_blocks} blocks. Nothing was converted.")
        named = [i for i in used if i >= 0]
        if name == "dst_blocks" and len(set(named)) < len(named):
            raise BadArgument("convert(): dst_blocks names a block twice. Nothing was converted.")
    ranges = [[(t.data_ptr(), t.data_ptr() + memory_bytes(t)) for t in side] for side in (bound.src, bound.dst)]
    if any(a < d and c < b for a, b in ranges[0] for c, d in ranges[1]):
        raise BadArgument("convert(): a source buffer and a destination buffer overlap. Convert into memory of its own.")


def _convert_torch(bound: Bound) -> None:
    p = bound.plan
    src, dst = ([bytes_of(t) for t in side] for side in (bound.src, bound.dst))
    units = list(_units(bound))
    for box in (box for box in p.boxes if box.cell is None):
        for unit in units:
            _move(box, src, dst, *unit)
    cells = [Rows(box, *unit) for box in p.boxes if box.cell is not None for unit in units]
    _scale_blocks([r for r in cells if r.granularity in BY_BLOCK], src, dst)
    for r in cells:
        x = r.read(src)
        if r.granularity.is_stored_per_token:
            r.scale(dst, r.amax(x))
        r.write(dst, x)


def _scale_blocks(cells: list[Rows], src: list[Tensor], dst: list[Tensor]) -> None:
    """Scales that belong to blocks, in a pass of their own: a block's rows may come from several boxes and units."""
    most: dict[tuple[int, int], Tensor] = {}
    for r in cells:
        for at, amax in zip(r.scale_ids(), r.amax(r.read(src)), strict=True):
            most[at] = torch.maximum(most.get(at, amax), amax)
    for r in cells:
        if r.scale_ids():
            r.scale(dst, torch.stack([most[at] for at in r.scale_ids()]))


def _units(bound: Bound) -> Iterator[tuple[int, int, int, int, int]]:
    """(source block, destination block, token of each at which the unit starts, tokens that are there)."""
    p = bound.plan
    rows = [as_table(t).tolist() for t in (bound.src_blocks, bound.dst_blocks)]
    sizes = p.src[0].block_size, p.dst[0].block_size
    most = min(len(rows[0][0]) * sizes[0], len(rows[1][0]) * sizes[1]) if rows[0] else 0
    lens = [most] * len(rows[0]) if bound.seq_lens is None else bound.seq_lens.tolist()
    for a_row, b_row, length in zip(*rows, lens, strict=True):
        for token in range(0, length, p.unit_tokens):
            a, b = a_row[token // sizes[0]], b_row[token // sizes[1]]
            if a >= 0 and b >= 0:
                yield a, b, token % sizes[0], token % sizes[1], min(p.unit_tokens, length - token)


def _move(box: Box, src: list[Tensor], dst: list[Tensor], a: int, b: int, a_token: int, b_token: int, tokens: int) -> None:
    """One box of one unit, of which `tokens` tokens are there: a strided view of each side, buffer by buffer."""
    steps = [d for d in box.digits if d.src_step or d.dst_step]
    even = [d for d in box.digits if not (d.src_step or d.dst_step)]
    counts = torch.zeros((), dtype=torch.int64)
    for d in even:  # the token each index stands for
        counts = counts.unsqueeze(-1) + torch.arange(d.size) * d.token
    kept = (counts < tokens).to(src[0].device).unsqueeze(-1)
    shape = [d.size for d in even] + [box.run_bytes]
    for index in torch.cartesian_prod(*(torch.arange(d.size) for d in steps)).view(-1, len(steps)).tolist() if steps else [[]]:
        views = []
        for side, block, token, buffers, stride, step in (
            (box.src, a, a_token, src, "src", "src_step"),
            (box.dst, b, b_token, dst, "dst", "dst_step"),
        ):
            buffer = side.buffer + block * side.block_step + sum(i * getattr(d, step) for i, d in zip(index, steps, strict=True))
            start = side.offset + block * side.block + token // side.token_split * side.token_outer
            start += token % side.token_split * side.token_inner
            start += sum(i * getattr(d, stride) for i, d in zip(index, steps, strict=True))
            start += buffers[buffer].storage_offset()  # it may be a piece of a larger allocation, as a handover's are
            views.append(buffers[buffer].as_strided(shape, [getattr(d, stride) for d in even] + [1], start))
        views[1].copy_(torch.where(kept, views[0], views[1]))
