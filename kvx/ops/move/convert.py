"""convert: one cache's bytes as another's, after a plan (kvx/layout/plan.py). The torch body below is the definition."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from array import array
from collections.abc import Iterator, Sequence
from itertools import product

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
from kvx.ops.move.sides import Buffers, Sides, flat, memory_of, sides_of
from kvx.ops.move.transcode import BY_BLOCK, Rows
from kvx.ops.scales import unset_words
from kvx.ops.structs import ABI_VERSION, ConvertArgs
from kvx.spec.cache_spec import PlaneSpec
from kvx.spec.formats import Granularity

_run, _run_unlocked = native.entry("kvx_run"), native.entry("kvx_run", keeps_lock=False)
_bind, _bound_free = native.entry("kvx_bind"), native.entry("kvx_bound_free")
_plan_load, _plan_free = native.entry("kvx_plan_load"), native.entry("kvx_plan_free")


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
    skipped and counted in `errors` (kvx.debug() raises).
    """
    bound = Bound(plan, src, dst, src_blocks, dst_blocks, seq_lens, errors, backend)
    _say_unset(bound)
    bound.run()


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
    _say_unset(bound)
    return bound


class Bound:
    """A plan with addresses. Holds the tensors it was given."""

    def __init__(
        self,
        plan: Plan,
        src: Buffers,
        dst: Buffers,
        src_blocks: Tensor | Sequence[int] | None,
        dst_blocks: Tensor | Sequence[int] | None,
        seq_lens: Tensor | None,
        errors: Tensor | None,
        backend: str,
    ):
        if not isinstance(plan, Plan):
            raise BadArgument(f"convert(): plan is {a_type(plan)}; it must be a Plan, made by kvx.plan(src, dst).")
        self.plan = plan
        self.src, self.dst = list(flat("src", src)), list(flat("dst", dst))
        sides = sides_of(plan, self.src, self.dst)
        if plan.blocks is not None:
            if (src_blocks is None) != (dst_blocks is None):
                given, other = ("src_blocks", "dst_blocks") if dst_blocks is None else ("dst_blocks", "src_blocks")
                raise BadArgument(
                    f"convert(): {given} is given and {other} is not; the plan's blocks are pairs. Give both, or neither."
                )
            if src_blocks is None:
                src_blocks, dst_blocks = plan.blocks
        self.src_blocks = blocks_of("convert", "src_blocks", src_blocks, plan.src[0].num_blocks)
        self.dst_blocks = blocks_of("convert", "dst_blocks", dst_blocks, plan.dst[0].num_blocks)
        if seq_lens is not None and (not isinstance(seq_lens, Tensor) or seq_lens.dtype not in (torch.int32, torch.int64)):
            raise BadArgument(f"convert(): seq_lens is {str(seq_lens)[:100]}; it must be a tensor [num_seqs], int32 or int64.")
        if seq_lens is not None:
            check_memory("convert", seq_lens=seq_lens)
        if seq_lens is not None and tuple(seq_lens.shape) != tuple(as_table(self.src_blocks).shape[:1]):
            raise BadArgument(
                f"convert(): seq_lens is {list(seq_lens.shape)}; src_blocks has {len(as_table(self.src_blocks))} sequences, and "
                "each has a length."
            )
        self.seq_lens, self.errors = seq_lens, errors
        self.device = sides.device
        self.backend = backends.choose("convert", backend, self.src[0] if self.src[0].device == self.device else self.dst[0])
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
            status = _run(self._handle, torch._C._cuda_getCurrentRawStream(self.device.index))
        else:
            status = _run_unlocked(self._handle, None)
        if status:
            native.raise_status(status, call="convert()")
        if self.errors is not None and backends.is_debug():
            bad = int(self.errors)
            if bad:
                self.errors.zero_()
                raise OutOfRange(f"convert(): {bad} block ids are outside the caches; those blocks were not converted.")

    def _bind(self, sides: Sides) -> None:
        args = new_args(self.device)
        ids = [self.src_blocks, self.dst_blocks] + ([] if self.seq_lens is None else [self.seq_lens])
        if len({t.device for t in ids}) > 1:
            raise BadArgument(
                f"convert(): block ids and seq_lens are on {', '.join(str(t.device) for t in ids)}; keep them together."
            )
        args.table_memory = memory_of(ids)
        sides.src.fill(args, "src")
        sides.dst.fill(args, "dst")
        native.fill_array(args.src_blocks, self.src_blocks)
        native.fill_array(args.dst_blocks, self.dst_blocks)
        if self.seq_lens is not None:
            native.fill_array(args.seq_lens, self.seq_lens)
        args.errors = None if self.errors is None else self.errors.data_ptr()
        handle = ctypes.c_void_p()
        status = _bind(_loaded(self.plan), ctypes.addressof(args), ctypes.addressof(handle))
        if status:
            native.raise_status(status, call="convert()")
        self._handle = handle.value
        weakref.finalize(self, _bound_free, handle.value)


def _say_unset(bound: Bound) -> None:
    """That rows are encoded under a scale that nobody set. What convert itself fills counts as set from now on."""
    read, filled = _dst_scales(bound.plan)
    for at in filled:
        mark_set(bound.dst[at])
    for at, plane in read:
        if is_unset(bound.dst[at]):
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


def new_args(device: torch.device) -> ConvertArgs:
    return ConvertArgs(
        version=ABI_VERSION,
        struct_bytes=ctypes.sizeof(ConvertArgs),
        device=device.index if device.type == "cuda" else -1,
    )


def _loaded(plan: Plan) -> int:
    """The plan in the library, loaded once."""
    handle = plan.__dict__.get("_handle")
    if handle is None:
        data, out = plan.to_bytes(), ctypes.c_void_p()
        status = _plan_load(data, len(data), ctypes.addressof(out))
        if status:
            native.raise_status(status, call="convert()")
        handle = plan.__dict__["_handle"] = out.value
        weakref.finalize(plan, _plan_free, out.value)
    assert handle is not None
    return int(handle)


def blocks_of(call: str, name: str, ids: Tensor | Sequence[int] | None, num_blocks: int) -> Tensor:
    if ids is None:
        return torch.arange(num_blocks, dtype=torch.int32)
    if not isinstance(ids, Tensor):
        try:
            ids = _ids_of(ids)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BadArgument(
                f"{call}(): {name} is {str(ids)[:100]}; it must be a row of block ids, whole numbers: {str(error)[:100]}."
            ) from None
    if ids.is_meta:
        raise BadArgument(f"{call}(): {name} is on the meta device and has no memory. Make it on the host or the caches' device.")
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() not in (1, 2):
        raise BadArgument(
            f"{call}(): {name} is {list(ids.shape)} {ids.dtype}; it must be [n] or [num_seqs, columns], int32 or int64."
        )
    return ids


def _ids_of(ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Whole numbers alone: nothing is rounded. A row by way of an array, in a quarter of what torch.tensor takes."""
    if isinstance(ids, (list, tuple, range)) and ids:
        try:
            return torch.frombuffer(array("q", ids), dtype=torch.int64)
        except TypeError:
            pass  # rows of them, or no numbers
    table = torch.tensor(ids)
    if table.is_floating_point() and table.numel():
        raise TypeError("they have fractions")
    return table.to(torch.int64)


def as_table(ids: Tensor) -> Tensor:
    """[num_seqs, columns]: a list is one sequence."""
    return ids if ids.dim() == 2 else ids.unsqueeze(0)


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
