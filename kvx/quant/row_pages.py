"""Pages of rows as specs, so that kvx.convert moves a hybrid cache between engines. Bytes of rows move as they are: what one engine
stores for a tile of zeros, or rounded before it coded, the other reads as the number it is.

A page is a block whose K is the rows' elements and whose V their scales, both in words of two bytes; a token of the spec is a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvx.errors import BadArgument, Unsupported
from kvx.quant.rows import RowCodec
from kvx.spec.cache_spec import CacheSpec

_APART = "layer | block kv[K: token head dim; V: token head dim]"
_PLAIN = "layer | block token head dim"  # rows without scales
_V4_MULTIPLE = 576  # FlashMLA wants pages of whole rows' elements
# What each engine pads pages of coded rows to: (main rows, keys of the indexer). Read in vLLM a014e35f, SGLang cce0a124 and
# TensorRT-LLM's footer_scale_kv.
_MULTIPLES = {"vllm": (_V4_MULTIPLE, _V4_MULTIPLE), "sglang": (_V4_MULTIPLE, 1), "tensorrt_llm": (1, 1)}


def engine_page_bytes(codec: RowCodec, rows: int, engine: str) -> int:
    """Of a page of so many rows at "vllm", "sglang" or "tensorrt_llm"."""
    if engine not in _MULTIPLES:
        raise BadArgument(f'engine_page_bytes(): engine "{engine}" is not known. There are {", ".join(_MULTIPLES)}.')
    main, index = _MULTIPLES[engine]
    multiple = 1 if not codec.scale_bytes else main if codec.rope_dim else index
    return -(-rows * codec.row_bytes // multiple) * multiple


def row_spec(
    codec: RowCodec,
    rows: int,  # of a page
    num_pages: int,
    *,
    engine: str = "",  # whose padding it has; "": the codec's own
    page_bytes: int = 0,  # or this one
    num_layers: int = 1,  # each with pages of its own
) -> CacheSpec:
    """The spec of such pages. Buffers are one uint8 [num_pages, page_bytes] a layer.

    Entries of a request are its sequence: src_blocks and dst_blocks of kvx.convert are its rows of the block tables, seq_lens how
    many entries it has. So blocks of 64, 128 and 256 tokens (16, 32 and 64 CSA entries) convert into each other.
    """
    if codec.data_bytes % 2 or codec.scale_bytes % 2:
        raise Unsupported(
            f"row_spec(): rows of {codec.format.name} have {codec.data_bytes} + {codec.scale_bytes} bytes at {codec.dim} elements; "
            "they move in words of two bytes. Pad the scales (RowRule.scale_multiple), or decode and write rows instead."
        )
    size = page_bytes or (engine_page_bytes(codec, rows, engine) if engine else codec.page_bytes(rows))
    content = rows * codec.row_bytes
    return CacheSpec(
        num_pages, rows, 1, codec.data_bytes // 2, layout=_APART if codec.scale_bytes else _PLAIN, format="bf16",
        v_head_dim=codec.scale_bytes // 2, num_layers=num_layers, block_bytes=0 if size == content else size,
    )  # fmt: skip


class WindowMove(NamedTuple):
    """One conversion between an engine's window pages and a ring's page: `pages` laid over the ring from its first row on."""

    pages: tuple[int, ...]  # negative: skipped
    num_rows: int  # of the ring, from its first; seq_lens of the conversion


def window_moves(pages: Sequence[int], length: int, *, rows: int, ring_rows: int) -> tuple[WindowMove, ...]:
    """How a window stands in both: page p // rows of an engine has position p in row p % rows, a ring has it in row p % ring_rows.

    `pages` are the sequence's, from position 0 on (negative: let go of), `length` its tokens. In this order: the page that is
    being filled shares its place in the ring with one that leaves the window, and comes last. From a ring, pages before the last
    also get rows of newer tokens in places of positions no token sees any more.
    """
    if rows < 1 or ring_rows % rows or length < 1 or len(pages) * rows < length:
        raise BadArgument(
            f"window_moves(): {len(pages)} pages of {rows} rows, {length} tokens, a ring of {ring_rows}: pages hold all tokens, "
            "and a ring whole pages."
        )
    count, last = ring_rows // rows, (length - 1) // rows
    before = [-1] * count
    for number in range(max(0, last - count), last):
        before[number % count] = pages[number]
    column = last % count
    newest = WindowMove((*[-1] * column, pages[last]), column * rows + (length - 1) % rows + 1)
    return (WindowMove(tuple(before), ring_rows), newest) if last else (newest,)
