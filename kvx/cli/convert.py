"""kvx convert: a cache in a file, in another engine's bytes. Walked block by block, so that it may be larger than memory.

What is read is held against its seal on the way, in the same pass, and the new file appears only when all of it was right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

import kvx
from kvx import files
from kvx.cli.shards import Shards, find_paths
from kvx.errors import BadArgument, LayoutError
from kvx.layout.axes import Layout
from kvx.layout.engines import ENGINES

_STEP_BYTES = 256 << 20  # converted between two steps of the bar
_MOST_TABLE_BYTES = 64 << 20


def layout_of(text: str) -> str:
    """A row's layout by its name, or the text itself."""
    return ENGINES[text].layout if text in ENGINES else text


def _layout(option: str, text: str) -> str:
    """layout_of, read: LayoutError that names the option."""
    try:
        return Layout.parse(layout_of(text)).text
    except LayoutError as error:
        raise LayoutError(f"{option}: {error}\n  `kvx layouts` lists names of layouts.") from None


def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="IN", help="Input file, written by kvx.save(). With --tp, one file per rank: 'cache{rank}.kvx'."),
    ],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Output file. With --tp, one file per rank: 'cache{rank}.kvx'.")],
    to: Annotated[str, typer.Option("--to", help="Layout of OUT: a name from `kvx layouts`, or a layout string.")] = "",
    from_: Annotated[str, typer.Option("--from", help="Layout that IN must have; refused when its manifest says another.")] = "",
    tp: Annotated[str, typer.Option(help="Tensor parallel sizes of IN and OUT, such as 4:8.")] = "1:1",
    block_size: Annotated[
        int, typer.Option(help="Tokens per block of OUT; 0: as IN. Larger blocks than IN's need --table or --id-order.")
    ] = 0,
    format: Annotated[str, typer.Option(help="Format of OUT; `kvx inspect --formats` lists them.")] = "",
    table: Annotated[
        str, typer.Option(help="Block table of IN, one list of block ids per sequence: '[[3, 0, 7], [5]]', or a JSON file with it.")
    ] = "",
    id_order: Annotated[
        bool, typer.Option("--id-order", help="The blocks of IN are one sequence, in the order of their ids.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check IN against its seal (checksum), and seal OUT.")
    ] = True,
) -> None:
    """Convert a cache file: layout, tensor parallel size, block size, format."""
    try:
        ranks = [int(n) for n in tp.split(":")]
        assert len(ranks) == 2
        assert 0 < min(ranks) <= max(ranks) <= 1 << 16
    except (ValueError, AssertionError):
        raise typer.BadParameter(f"{tp!r}; it must be ranks of IN and of OUT, such as 4:8", param_hint="--tp") from None
    if block_size < 0:
        raise typer.BadParameter(f"{block_size}; it must be 1 or more, or 0 for blocks as IN has them", param_hint="--block-size")
    if table and id_order:
        raise typer.BadParameter(
            "a table says the order of blocks, and so does --id-order. Give one of the two", param_hint="--table"
        )
    shards = Shards.open("kvx convert", find_paths("kvx convert", source, ranks[0]))
    if verify:
        shards.require_seals("kvx convert", "--no-verify takes it as it is, and gives OUT no seal.")
    else:
        typer.echo(f"--no-verify: the content of {source} was not checked, and {target} gets no seal.", err=True)
    wanted_layout = _layout("--to", to) if to else ""
    if from_ and _layout("--from", from_) != shards.files[0].spec.layout:
        raise BadArgument(f"kvx convert: {source} has layout {shards.files[0].spec.layout!r}; --from says {layout_of(from_)!r}.")
    whole = shards.whole
    size = block_size or whole.block_size
    rows = _table(table, whole) if table else None
    _say_order(whole, size, rows, id_order)
    blocks = sum(-(-len(row) * whole.block_size // size) for row in rows) if rows is not None else -(-whole.num_slots // size)
    wanted = replace(
        whole, layout=wanted_layout or whole.layout, block_size=size, num_blocks=blocks,
        format=format or whole.format, v_format="" if format else whole.v_format,
    )  # fmt: skip
    targets = [wanted.shard(ranks[1], i) for i in range(ranks[1])]
    plan = kvx.plan([f.spec for f in shards.parts], targets)
    typer.echo(plan.explain(blocks))
    if verify and rows is not None:  # a table reads blocks in another order than their digests stand in
        for file in shards.files:
            file.check()
    checks = [files.SealCheck(file) for file in shards.files] if verify and rows is None else []
    with ExitStack() as stack:
        outputs = [
            stack.enter_context(files.create(p, s)) for p, s in zip(files.shard_paths(target, ranks[1]), targets, strict=True)
        ]
        steps = _steps(whole, size, rows if rows is not None else [range(whole.num_blocks)])
        with Progress(transient=True) as bar:
            task = bar.add_task("converting", total=sum(map(len, rows)) if rows is not None else whole.num_blocks)
            for src, dst, tokens in steps:
                for check in checks:
                    check.read(src[0], src[-1] + 1)
                kvx.convert(
                    [f.buffers for f in shards.parts], [file.buffers for file in outputs], plan=plan,
                    src_blocks=torch.tensor([src]), dst_blocks=torch.arange(dst.start, dst.stop).view(1, -1),
                    seq_lens=torch.tensor([tokens]),
                )  # fmt: skip
                if verify:
                    for made in outputs:
                        made.keep_digest(dst.start, dst.stop)
                bar.advance(task, len(src))
        for check in checks:
            check.finish()
    typer.echo(f"{sum(t.numel() for file in outputs for t in file.buffers):,} bytes in {target}")


def _steps(whole: kvx.CacheSpec, size: int, rows: list[Any]) -> Iterator[tuple[list[int], range, int]]:
    """Blocks of IN, the blocks of OUT they fill, and their tokens, a few at a time. Sequences begin blocks of their own; block
    sizes that differ meet at their least common multiple."""
    both = lcm(whole.block_size, size)
    step = max(1, _STEP_BYTES // max(1, whole.cache_bytes * both // whole.num_slots)) * both
    first = 0
    for row in rows:
        tokens = len(row) * whole.block_size
        for begin in range(0, tokens, step):
            end = min(tokens, begin + step)
            src = list(row[begin // whole.block_size : -(-end // whole.block_size)])
            yield src, range(first + begin // size, first - (-end // size)), end - begin
        first -= -tokens // size


def _say_order(whole: kvx.CacheSpec, size: int, rows: list[list[int]] | None, id_order: bool) -> None:
    """Which blocks stand together is the engine's to know: said aloud where it matters, and asked for where it is not given."""
    joins = whole.block_size % size != 0 and whole.num_blocks > 1
    if rows is not None:
        left = whole.num_blocks - sum(map(len, rows))
        without = f"; the other {left} are left out" if left else ""
        typer.echo(f"{len(rows)} sequences of the table, {whole.num_blocks - left} of {whole.num_blocks} blocks{without}")
    elif joins and not id_order:
        raise BadArgument(
            f"kvx convert: --block-size {size} joins blocks of {whole.block_size}, and which of the {whole.num_blocks} belong "
            "together is in the engine's block table, not in the file. Give it: --table '[[3, 0, 7], [5]]', a row of block ids per "
            "sequence, or a JSON file. Where the blocks are one sequence in the order of their ids, say --id-order."
        )
    elif joins:
        typer.echo(f"blocks 0 to {whole.num_blocks - 1} are one sequence, in the order of their ids (--id-order)")
    elif size < whole.block_size:
        parts = whole.block_size // size
        typer.echo(f"each block of {whole.block_size} becomes {parts} of {size}: block n is {parts}n to {parts}n+{parts - 1}")


def _table(text: str, spec: kvx.CacheSpec) -> list[list[int]]:
    """Rows of block ids, of IN's blocks and each once."""
    where = "--table"
    try:
        if not text.lstrip().startswith("["):
            where = f"--table {text}"
            if Path(text).stat().st_size > _MOST_TABLE_BYTES:
                raise BadArgument(f"{where}: a table of more than {_MOST_TABLE_BYTES:,} bytes.")
            text = Path(text).read_text(encoding="utf-8")
        rows = json.loads(text)
    except OSError as error:
        raise BadArgument(f"{where} cannot be read: {error.strerror}. It is rows of block ids or a file of them.") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(
            f"{where} is no JSON: {str(error)[:100]}. It is a row of block ids per sequence: [[3, 0, 7], [5]]."
        ) from None
    if isinstance(rows, list) and rows and all(type(n) is int for n in rows):
        rows = [rows]  # one sequence
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(r, list) and r and all(type(n) is int for n in r) for r in rows)
    ):
        raise BadArgument(f"{where} is {json.dumps(rows)[:100]}; it must be a row of block ids per sequence: [[3, 0, 7], [5]].")
    seen: set[int] = set()
    for n in (n for row in rows for n in row):
        if not 0 <= n < spec.num_blocks:
            raise BadArgument(f"{where} has block {str(n)[:40]}; the cache has blocks 0 to {spec.num_blocks - 1}.")
        if n in seen:
            raise BadArgument(f"{where} has block {n} twice. A block of several sequences is in the file once: name it once.")
        seen.add(n)
    return [list(row) for row in rows]
