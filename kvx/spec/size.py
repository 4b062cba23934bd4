"""Sizes: what a model's KV cache costs, a token and a request, and what fits in a memory. Whole blocks of whole layers, exactly.

A request costs `fixed_bytes + token_bytes * tokens`, once it is longer than the windows and rounded up to blocks. Everything is
counted for one tensor-parallel rank. Scales kept once for a tensor or a head are left out: a few bytes for the whole cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kvx.errors import BadArgument
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.config_fields import ConfigFields
from kvx.spec.formats import FORMATS, Format, Granularity, format_name
from kvx.spec.layer_kinds import RECORDS, LayerKind, StoredRow, described, layer_kinds
from kvx.spec.models import CHECKED_TYPES
from kvx.spec.state_spec import StateSpec

BLOCK_SIZE = 16  # by default; compressed layers need a multiple of the tokens an entry stands for
STATES = ("ring", "tight")
STATE_FORMATS = ("bf16", "f16", "f32")
_FIRST = ("bf16", "fp8_e4m3", "int8_per_token_head", "fp8_ds_mla", "nvfp4")


class PlaneSize(NamedTuple):
    """One plane of a layer's state, on one rank."""

    name: str
    shape: str
    format: str
    num_bytes: int


@dataclass(frozen=True)
class GroupSize:
    """Layers of one kind, in bytes of all of them."""

    name: str
    num_layers: int
    stores: str  # the rows of a layer
    ratio: int  # tokens a row stands for
    window: int  # tokens whose rows are kept; 0: all
    is_chunked: bool  # the window starts anew every `window` tokens, in place of sliding
    ring_tokens: int  # last tokens whose rows each request keeps outside of blocks
    block_size: int
    block_bytes: int  # of one block of tokens in each of its layers; 0: nothing is kept in blocks
    state_bytes: int  # of a request, outside of blocks
    resume_bytes: int  # of a shared prefix, outside of blocks
    planes: tuple[PlaneSize, ...] = ()  # what a recurrent layer's state is made of, one layer's; `state_bytes` has all of them

    @property
    def token_bytes(self) -> float:
        """Of a token while it is kept in a block."""
        return self.block_bytes / self.block_size

    @property
    def max_blocks(self) -> int:
        """A request's most; 0: no end."""
        if not self.window:
            return 0
        if self.is_chunked and self.window % self.block_size == 0:
            return self.window // self.block_size
        # Tokens in a row touch one block more than they fill when the first stands last in its block.
        return _blocks(self.window - 1, self.block_size) + 1

    @property
    def fixed_bytes(self) -> int:
        """What a long request costs whatever its length."""
        return self.state_bytes + self.max_blocks * self.block_bytes

    def private_bytes(self, num_blocks: int) -> int:
        """Of a request's own blocks, at the most it holds at once."""
        return self.state_bytes + min(num_blocks, self.max_blocks or num_blocks) * self.block_bytes

    def shared_bytes(self, num_blocks: int) -> int:
        """Of a prefix's blocks, as many as those who go on from it read."""
        if not num_blocks:
            return 0
        kept = num_blocks
        if self.max_blocks:
            read = num_blocks * self.block_size % self.window if self.is_chunked else self.window - 1
            kept = min(num_blocks, _blocks(read, self.block_size))
        return self.resume_bytes + kept * self.block_bytes


@dataclass(frozen=True)
class Size:
    """A model's cache in one format, on one rank."""

    model: str
    format: str
    index_format: str  # of an indexer's keys; "" where there is none
    tp: int
    block_size: int
    groups: tuple[GroupSize, ...]
    model_type: str = ""  # of its config
    is_checked: bool = True  # whether the sizes of this model_type were compared with real caches
    notes: tuple[str, ...] = ()  # what is not counted, and fields that are not understood
    state_format: str = ""  # of recurrent matrices; "" where there are none

    @property
    def token_bytes(self) -> float:
        """What one more token costs a long request."""
        return self.block_bytes / self.block_size

    @property
    def block_bytes(self) -> int:
        """What one more block costs a long request."""
        return sum(g.block_bytes for g in self.groups if not g.max_blocks)

    @property
    def fixed_bytes(self) -> int:
        """What a long request costs beside its tokens: full windows, rings and states."""
        return sum(g.fixed_bytes for g in self.groups)

    def request_bytes(self, context: int) -> int:
        """One request at its longest, its last block whole."""
        return self.total_bytes(context)

    def total_bytes(self, context: int, requests: int = 1, shared_prefix: int = 0) -> int:
        """Requests of `context` tokens, the first `shared_prefix` of them the same in all: its whole blocks are held once."""
        shared, private = self._parts(context, shared_prefix)
        _require("requests", requests, 0)
        return shared + requests * private

    def fit_requests(self, memory_bytes: int, context: int, shared_prefix: int = 0) -> int:
        """Requests of `context` tokens that fit."""
        shared, private = self._parts(context, shared_prefix)
        _require("memory_bytes", memory_bytes, 0)
        return max(0, memory_bytes - shared) // private

    def fit_context(self, memory_bytes: int, requests: int = 1, shared_prefix: int = 0) -> int | None:
        """The longest context with which so many requests fit; 0: none does; None: any does, since no layer keeps all tokens."""
        _require("memory_bytes", memory_bytes, 0)
        _require("requests", requests, 1)
        _require("shared_prefix", shared_prefix, 0)
        shared_blocks = shared_prefix // self.block_size

        def fits(private_blocks: int) -> bool:
            return self.total_bytes((shared_blocks + private_blocks) * self.block_size, requests, shared_prefix) <= memory_bytes

        low = 1  # a context is longer than what it shares
        if not fits(low):
            return 0
        # Past the windows the cost is a line; before them no block is free of cost, so this is past what fits.
        high = low + sum(g.max_blocks for g in self.groups) + (memory_bytes // self.block_bytes if self.block_bytes else 0) + 1
        if fits(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return (shared_blocks + low) * self.block_size

    def to_dict(self) -> dict[str, Any]:
        """Every number, for JSON."""
        groups = [
            {
                **asdict(g), **{n: getattr(g, n) for n in ("token_bytes", "max_blocks", "fixed_bytes")},
                "planes": [p._asdict() for p in g.planes],
            }
            for g in self.groups
        ]  # fmt: skip
        sums = {n: getattr(self, n) for n in ("token_bytes", "block_bytes", "fixed_bytes")}
        return {**asdict(self), **sums, "groups": groups}

    def _parts(self, context: int, shared_prefix: int) -> tuple[int, int]:
        """Bytes held once, and bytes of each request."""
        _require("context", context, 1)
        _require("shared_prefix", shared_prefix, 0)
        if shared_prefix >= context:
            raise BadArgument(
                f"size(): shared_prefix is {shared_prefix} and context {context}, which counts the prefix too. "
                "A context has one token more, at least."
            )
        shared = shared_prefix // self.block_size
        private = _blocks(context, self.block_size) - shared
        return sum(g.shared_bytes(shared) for g in self.groups), sum(g.private_bytes(private) for g in self.groups)


def size(
    model: str | Path | Mapping[str, Any],  # a known model's name, a config.json or its folder, or its fields
    format: str = "bf16",  # a row of kvx.FORMATS, or fp8_ds_mla or nvfp4_ds_mla where the model has such records
    *,
    tp: int = 1,
    block_size: int = 0,  # tokens; 0: 16, or 128 with layers that compress 128 tokens into one
    index_format: str = "",  # of an indexer's keys; "": the model's own, or `format` where that is not quantised
    state: str = "ring",  # DeepSeek-V4's unfinished entries: "ring", every token as engines keep it, or "tight", the minimum
    state_format: str = "",  # of recurrent matrices: bf16, f16 or f32; "": as Transformers keeps them, mostly f32
) -> Size:
    """What the model's KV cache costs on each of `tp` ranks.

    KV heads are shared out; where ranks outnumber heads, each head is on several. Latents are whole on each rank.
    States of recurrent layers are counted once a request, convolutions in `format` (bf16 where that is quantised) and with the
    taps that a next token reads.
    """
    config = ConfigFields.load(model)
    name, (kinds, notes) = config.name, described(config)
    format = format_name(format)
    _require("tp", tp, 1)
    _require("block_size", block_size, 0)
    if state not in STATES:
        raise BadArgument(f"size(): state is {state!r}; it takes {' or '.join(STATES)}.")
    unit = max(kind.ratio for kind in kinds)
    block_size = block_size or max(BLOCK_SIZE, unit)
    if block_size % unit:
        raise BadArgument(
            f"size(): block_size is {block_size}; {name} compresses {unit} tokens into one, so it takes a multiple of {unit}."
        )
    if state_format and state_format not in STATE_FORMATS:
        raise BadArgument(f"size(): state_format is {state_format!r}; it takes {', '.join(STATE_FORMATS)}.")
    matrices = [plane for kind in kinds for plane in kind.planes if not plane.is_conv]
    if state_format and not matrices:
        raise BadArgument(f"size(): state_format is {state_format!r}, and {name} keeps no recurrent matrices. Leave it out.")
    for row in (row for kind in kinds for row in kind.rows):
        if row.num_heads % tp and tp % row.num_heads:
            raise BadArgument(
                f"size(): tp is {tp} and {name} has {row.num_heads} KV heads: neither divides the other. Take a tp that does."
            )
    indexes = [row for kind in kinds for row in kind.rows if row.index_format]
    if index_format and not indexes:
        raise BadArgument(f"size(): index_format is {index_format!r}, and {name} has no indexer. Leave it out.")
    try:
        groups = tuple(_group(kind, format, index_format, tp, block_size, state, state_format) for kind in kinds)
    except BadArgument as error:
        advice = f" {name} takes {', '.join(size_formats(model))}, among others." if not _takes(kinds, format) else ""
        raise BadArgument(f"size(): {name} in {format}: {error}{advice}") from None
    index = _row_format(indexes[0], format, index_format) if indexes else ""
    is_checked = config.model_type in CHECKED_TYPES
    matrix = matrices[0].format(plain_format(format), state_format) if matrices else ""
    return Size(name, format, index, tp, block_size, groups, config.model_type, is_checked, notes, matrix)


def size_formats(model: str | Path | Mapping[str, Any], *, every: bool = False) -> list[str]:
    """Formats that the model's rows can take: those most used, or every one."""
    kinds = layer_kinds(ConfigFields.load(model))
    return [name for name in ((*FORMATS, *RECORDS) if every else _FIRST) if _takes(kinds, name)]


def plain_format(format: str) -> str:
    """The model's dtype beside a cache of this format: what is quantised is so of a bf16 model."""
    return format if format in STATE_FORMATS else "bf16"


def kv_bytes(kind: LayerKind, format: str, tp: int) -> int:
    """Of a token in one layer's blocks; what a format keeps once a block counts whole."""
    return sum(_row_bytes(row, _row_format(row, format, ""), 1, tp) for row in kind.rows)


def plane_sizes(kind: LayerKind, format: str, state_format: str, tp: int) -> tuple[PlaneSize, ...]:
    """Of one layer's state on one rank; the first, which has no less than others."""
    if not kind.planes:
        return ()
    specs = {p.name: p for p in StateSpec(1, tuple(p.spec(format, state_format) for p in kind.planes)).shard(tp, 0).planes}
    return tuple(
        PlaneSize(p.name, " x ".join(f"{axis} {size}" for axis, size in specs[p.name].axes), specs[p.name].format.name,
                  specs[p.name].num_rows * specs[p.name].row_bytes)
        for p in kind.planes
    )  # fmt: skip


def _group(kind: LayerKind, format: str, index_format: str, tp: int, block_size: int, state: str, state_format: str) -> GroupSize:
    def held(rows: tuple[StoredRow, ...], entries: int) -> int:
        return sum(_row_bytes(row, _row_format(row, format, index_format), entries, tp) for row in rows)

    ring = held(kind.ring, 1) * kind.ring_tokens
    floats = kind.state_floats if state == "ring" else kind.tight_floats
    planes = plane_sizes(kind, plain_format(format), state_format, tp)
    recurrent = sum(p.num_bytes for p in planes)
    return GroupSize(
        name=kind.name,
        num_layers=kind.num_layers,
        stores=", ".join(map(str, (*(kind.rows or kind.ring), *kind.planes))),
        ratio=kind.ratio,
        window=kind.window,
        is_chunked=kind.is_chunked,
        ring_tokens=kind.ring_tokens,
        block_size=block_size,
        block_bytes=kind.num_layers * held(kind.rows, block_size // kind.ratio),
        state_bytes=kind.num_layers * (ring + 4 * floats + recurrent),
        resume_bytes=kind.num_layers * (ring + 4 * kind.resume_floats + recurrent),
        planes=planes,
    )


def _row_format(row: StoredRow, format: str, index_format: str) -> str:
    """An indexer's keys follow a cache that is not quantised; beside others they have a format of their own."""
    if not row.index_format:
        return format
    is_plain = format in FORMATS and not FORMATS[format].element.is_quantised
    return index_format or (format if is_plain else row.index_format)


def _row_bytes(row: StoredRow, format: str, entries: int, tp: int) -> int:
    """Bytes of so many entries of a block in one layer, with their scales and the block's."""
    records = dict(row.records)
    if format in records:
        return entries * records[format]
    if format in RECORDS:
        raise BadArgument(f"{row} has no record of that name.")
    total = 0
    for part, dim in enumerate(row.dims):
        chosen = _part_format(Format.named(format), dim, part)
        try:
            spec = CacheSpec(1, entries, row.num_heads, dim, layout="block token head dim", format=chosen.name).shard(tp, 0)
        except BadArgument as error:
            raise BadArgument(str(error).removeprefix("CacheSpec: ")) from None
        total += entries * spec.token_bytes
        if chosen.scale is not None and chosen.granularity in (Granularity.BLOCK, Granularity.BLOCK_HEAD):
            total += prod(spec.scale_shape(0) or ()) * chosen.scale.bits // 8
    return total


def _part_format(format: Format, dim: int, part: int) -> Format:
    """A latent's rotary part stays bf16 where it is shorter than the format's groups: so the 656-byte record."""
    return FORMATS["bf16"] if part and format.group_size > dim else format


def _takes(kinds: tuple[LayerKind, ...], format: str) -> bool:
    try:
        for row in (row for kind in kinds for row in (*kind.rows, *kind.ring) if not row.index_format):
            _row_bytes(row, format, 1, 1)
    except BadArgument:
        return False
    return True


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _require(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise BadArgument(f"size(): {name} is {value!r}; it takes a whole number of {least} or more.")
