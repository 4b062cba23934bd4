"""Schemas: what each layer of a hybrid cache keeps, and what that costs.

A layer keeps a window of rows for each request. A layer with a compressor also keeps, in blocks, an entry for every `ratio` tokens,
and for each request the projected tokens of entries that are not complete: its tail. One with an indexer keeps a key beside each
entry, with a tail of its own. DeepSeek-V4's three kinds are CSA (4, overlap, indexer), HCA (128) and windows alone (0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kvx.errors import BadArgument, Unsupported
from kvx.ops.entry.tail import TAILS
from kvx.quant.rows import RowCodec
from kvx.spec.config_fields import ConfigFields
from kvx.spec.layer_kinds import compress_ratios

MAX_RATIO = 4096  # of kvx.ops.entry.compress


class Bytes(NamedTuple):
    payload: int
    allocated: int  # with what pages are padded by, and the positions of a window's rows

    def __add__(self, other: object) -> Bytes:
        if not isinstance(other, Bytes):
            return NotImplemented
        return Bytes(self.payload + other.payload, self.allocated + other.allocated)

    def times(self, n: int) -> Bytes:
        return Bytes(self.payload * n, self.allocated * n)


@dataclass(frozen=True)
class LayerSchema:
    ratio: int = 0  # tokens an entry stands for; 0: there are none
    overlap: bool = False  # an entry is made of its own tokens and those before them, each projected twice
    bias: bool = False  # scores get a learned number for each place in a window
    window: int = 128
    head_dim: int = 512
    rope_dim: int = 64
    index_dim: int = 0  # of the indexer's keys; 0: every entry is read
    window_rows: str = "fp8_v4"
    entry_rows: str = "fp8_v4"
    index_rows: str = "index_mxfp4"
    tail: str = "running"
    owner: int = -1  # the layer whose entries this one reads; -1: its own
    hadamard: bool = False  # keys of the indexer are rotated before they are coded, as DeepSeek's own code does; queries too

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= MAX_RATIO or self.window < 1 or self.rope_dim % 2 or not 0 <= self.rope_dim <= self.head_dim:
            raise BadArgument(
                f"LayerSchema: ratio {self.ratio}, window {self.window}, head_dim {self.head_dim}, rope_dim {self.rope_dim}: "
                f"ratio is 0 or more, up to {MAX_RATIO}, a window 1 or more, and the rotary part even and within the row."
            )
        if self.tail not in TAILS:
            raise BadArgument(f'LayerSchema: tail is "{self.tail}"; it must be {" or ".join(TAILS)}.')
        if not self.ratio and (self.overlap or self.index_dim):
            raise BadArgument("LayerSchema: overlap and index_dim are of entries; ratio 0 has none.")

    @property
    def kind(self) -> str:
        return "SWA" if not self.ratio else "CSA" if self.index_dim else "HCA"

    @property
    def has_entries(self) -> bool:
        """Of its own: a layer that reads another's keeps none."""
        return self.ratio > 0 and self.owner < 0

    @property
    def window_codec(self) -> RowCodec:
        return RowCodec(self.window_rows, self.head_dim, self.rope_dim)

    @property
    def entry_codec(self) -> RowCodec:
        return RowCodec(self.entry_rows, self.head_dim, self.rope_dim)

    @property
    def index_codec(self) -> RowCodec:
        return RowCodec(self.index_rows, self.index_dim)

    def entries(self, tokens: int) -> int:
        """Complete after so many tokens. Token t reads entry j when entries(t + 1) > j."""
        return tokens // self.ratio if self.ratio else 0

    def block_bytes(self, block_tokens: int) -> Bytes:
        """Of a block in this layer: entries, and the indexer's keys."""
        if not self.has_entries:
            return Bytes(0, 0)
        rows = block_tokens // self.ratio
        codecs = [self.entry_codec, *([self.index_codec] if self.index_dim else [])]
        return Bytes(sum(rows * c.row_bytes for c in codecs), sum(c.page_bytes(rows) for c in codecs))

    def tail_floats(self) -> int:
        """f32 numbers of a request. With overlap: both projections of the open window and the first of the one before, each with
        scores; for keys of the indexer as well."""
        if not self.has_entries:
            return 0
        dims = self.head_dim + self.index_dim
        if self.overlap:
            return 3 * self.ratio * 2 * dims
        return 3 * dims if self.tail == "running" else self.ratio * 2 * dims

    def request_bytes(self, max_drafts: int = 0) -> Bytes:
        """Of a request whatever its length. Drafts may be taken back, so the window keeps that many rows more; of tails there is a
        second one, with the projections of a step's tokens."""
        rows, floats = self.window + max_drafts, self.tail_floats()
        if max_drafts and floats:
            floats += floats + (max_drafts + 1) * 2 * (2 if self.overlap else 1) * (self.head_dim + self.index_dim)
        tail = 4 * floats
        return Bytes(rows * self.window_codec.row_bytes + tail, self.window_codec.page_bytes(rows) + 4 * rows + tail)

    def resume_bytes(self) -> int:
        """What a request needs beside blocks to go on from a multiple of every ratio: the window, and the overlap."""
        overlap = self.ratio * 2 * 4 * (self.head_dim + self.index_dim) if self.overlap and self.has_entries else 0
        return self.window * self.window_codec.row_bytes + overlap


@dataclass(frozen=True)
class HybridSchema:
    layers: tuple[LayerSchema, ...]
    block_tokens: int = 128
    max_drafts: int = 0

    def __post_init__(self) -> None:
        unit = math.lcm(*(layer.ratio or 1 for layer in self.layers))
        if not self.layers or self.block_tokens <= 0 or self.block_tokens % unit:
            raise BadArgument(
                f"HybridSchema: blocks of {self.block_tokens} tokens for {len(self.layers)} layers; whole entries of every layer "
                f"need a multiple of {unit}."
            )
        if self.max_drafts < 0:
            raise BadArgument(f"HybridSchema: max_drafts is {self.max_drafts}; it must be 0 or more.")
        for i, layer in enumerate(self.layers):
            if layer.owner >= i or (layer.owner >= 0 and not self.layers[layer.owner].has_entries):
                raise BadArgument(
                    f"HybridSchema: layer {i} reads entries of layer {layer.owner}; it must be an earlier one that has its own."
                )
            if layer.owner >= 0:
                self._check_owner(i, layer, self.layers[layer.owner])

    @staticmethod
    def _check_owner(i: int, layer: LayerSchema, owner: LayerSchema) -> None:
        """The same pages are read as the owner wrote them."""
        of_keys = ("index_dim", "index_rows", "hadamard") if layer.index_dim else ()
        for name in ("ratio", "head_dim", "rope_dim", "entry_rows", *of_keys):
            ours, theirs = getattr(layer, name), getattr(owner, name)
            if ours != theirs:
                raise BadArgument(
                    f"HybridSchema: layer {i} reads entries of layer {layer.owner}; {name} is {ours!r} here and {theirs!r} there."
                )

    # --- where schemas come from -----------------------------------------------------------------------------------------

    @staticmethod
    def of(model: Any, *, block_tokens: int = 128, max_drafts: int = 0, **rows: Any) -> HybridSchema:
        """Of "DeepSeek-V4-Flash" or another known model's name, a config.json, its fields, or a Transformers config.

        `rows`: fields of LayerSchema for every layer, as entry_rows="bf16".
        """
        config = ConfigFields.load(model)
        ratios = compress_ratios(config)
        dims = {
            "window": config.int_of("sliding_window"),
            "head_dim": config.int_of("head_dim"),
            "rope_dim": config.int_of("qk_rope_head_dim", 0) or 64,
            **rows,
        }
        index_dim = config.int_of("index_head_dim", 0)
        for i, ratio in enumerate(ratios):
            if ratio not in (0, 1, 4, 128):
                raise Unsupported(
                    f"HybridSchema.of(): layer {i} of {config.name} compresses {ratio} tokens into one entry; 4 (CSA), 128 (HCA) "
                    "and 0 or 1 (a window alone) are known. Describe others with LayerSchema."
                )
        if 4 in ratios and not index_dim:
            raise BadArgument(f"HybridSchema.of(): {config.name} has CSA layers (4 tokens an entry) and no index_head_dim.")
        return HybridSchema(tuple(_layer(r, index_dim, dims) for r in ratios), block_tokens, max_drafts)

    # --- what it costs ---------------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> Bytes:
        return _sum(layer.block_bytes(self.block_tokens) for layer in self.layers)

    @property
    def token_bytes(self) -> tuple[float, float]:
        """Of a token in blocks, payload and allocated."""
        return self.block_bytes.payload / self.block_tokens, self.block_bytes.allocated / self.block_tokens

    @property
    def request_bytes(self) -> Bytes:
        return _sum(layer.request_bytes(self.max_drafts) for layer in self.layers)

    @property
    def resume_bytes(self) -> int:
        return sum(layer.resume_bytes() for layer in self.layers)

    def blocks(self, tokens: int) -> int:
        """That hold the entries of so many tokens. Tokens of an open window have none yet."""
        done = max((tokens // ratio * ratio for ratio in self._ratios), default=0)
        return -(-done // self.block_tokens)

    @property
    def reach(self) -> int:
        """Tokens before a position that have to be computed again so that windows and overlaps are exact there.

        A layer's input is exact from where the windows of all layers before it have passed the start; its overlap is made of the
        last `ratio` tokens' inputs.
        """
        reach = passed = 0
        for layer in self.layers:
            if layer.overlap and layer.has_entries:
                reach = max(reach, passed + layer.ratio)
            passed += layer.window
        return max(reach, passed)

    @cached_property
    def _ratios(self) -> tuple[int, ...]:
        """Of layers with entries, each once: a step asks for every request."""
        return tuple({layer.ratio for layer in self.layers if layer.ratio})

    def block_budget(self, max_seq_len: int, max_seqs: int, headroom: float = 1.10) -> int:
        """Blocks for as many requests of that length, and some to spare."""
        if max_seq_len < 1 or max_seqs < 1 or headroom < 1.0:
            raise BadArgument(
                f"block_budget(): max_seq_len {max_seq_len}, max_seqs {max_seqs}, headroom {headroom}: none is under 1."
            )
        return math.ceil(-(-max_seq_len // self.block_tokens) * max_seqs * headroom)

    def memory_bytes(self, num_blocks: int, num_requests: int) -> Bytes:
        return self.block_bytes.times(num_blocks) + self.request_bytes.times(num_requests)


def _layer(ratio: int, index_dim: int, more: Mapping[str, Any]) -> LayerSchema:
    """As DeepSeek-V4 has them; ratio 1 is what some configs write for a window alone."""
    if ratio <= 1:
        return LayerSchema(**more)
    return LayerSchema(ratio, overlap=ratio == 4, bias=True, index_dim=index_dim if ratio == 4 else 0, **more)


def _sum(parts: Iterable[Bytes]) -> Bytes:
    return sum(parts, Bytes(0, 0))
