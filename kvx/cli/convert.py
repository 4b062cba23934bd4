"""kvx convert: a cache in a file, in another engine's bytes. Walked block by block, so that it may be larger than memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from math import lcm
from typing import Annotated

import torch
import typer
from rich.progress import Progress

import kvx
from kvx import files
from kvx.errors import BadArgument
from kvx.layout.engines import ENGINES

_STEP_BYTES = 256 << 20  # converted between two steps of the bar


def layout_of(text: str) -> str:
    """A row's layout by its name, or the text itself."""
    return ENGINES[text].layout if text in ENGINES else text


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="a file of kvx.save(); with --tp, {rank} stands for the rank")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="the file to write; with --tp, with {rank}")],
    to: Annotated[str, typer.Option("--to", help="layout of OUT: a row of `kvx layouts`, or a layout string")] = "",
    from_: Annotated[str, typer.Option("--from", help="layout IN must have; refused when its manifest says another")] = "",
    tp: Annotated[str, typer.Option(help="tensor parallel ranks of IN and OUT, such as 4:8")] = "1:1",
    block_size: Annotated[int, typer.Option(help="tokens in a block of OUT; 0: as IN")] = 0,
    format: Annotated[str, typer.Option(help="format of OUT (`kvx inspect --formats`)")] = "",
) -> None:
    """Convert a cache file: layout, tensor parallel size, block size, format."""
    try:
        ranks = [int(n) for n in tp.split(":")]
        assert len(ranks) == 2
        assert min(ranks) > 0
    except (ValueError, AssertionError):
        raise typer.BadParameter(f"{tp!r}; it is ranks of IN and of OUT, such as 4:8", param_hint="--tp") from None
    opened = [files.load(path) for path in files.shard_paths(source, ranks[0])]
    sources = [f.spec for f in opened]
    if from_ and layout_of(from_) != sources[0].layout:
        raise BadArgument(f"kvx convert: {source} has layout {sources[0].layout!r}; --from says {layout_of(from_)!r}.")
    whole = _whole(sources)
    size = block_size or whole.block_size
    blocks = -(-whole.num_slots // size)
    wanted = replace(
        whole, layout=layout_of(to) if to else whole.layout, block_size=size, num_blocks=blocks,
        format=format or whole.format, v_format="" if format else whole.v_format,
    )  # fmt: skip
    targets = [wanted.shard(ranks[1], i) for i in range(ranks[1])]
    plan = kvx.plan(sources, targets)
    typer.echo(plan.explain(blocks))
    with ExitStack() as stack:
        outputs = [
            stack.enter_context(files.create(p, s)) for p, s in zip(files.shard_paths(target, ranks[1]), targets, strict=True)
        ]
        _walk(plan, outputs, [f.buffers for f in opened], whole, wanted)
    typer.echo(f"{sum(t.numel() for file in outputs for t in file.buffers):,} bytes in {target}")


def _whole(shards: list[kvx.CacheSpec]) -> kvx.CacheSpec:
    """The cache that shards are parts of. Its blocks are not padded: how much is said of allocations, and it has none."""
    first, last = (pick(s.head_start for s in shards) for pick in (min, max))
    end = max(s.head_start + s.num_kv_heads for s in shards if s.head_start == last)
    layer, layer_end = min(s.layer_start for s in shards), max(s.layer_start + s.num_layers for s in shards)
    return replace(
        shards[0], num_kv_heads=end - first, head_start=first, num_layers=layer_end - layer, layer_start=layer, block_bytes=0
    )  # fmt: skip


def _walk(
    plan: kvx.Plan, outputs: list[files.NewFile], inputs: list[list[torch.Tensor]], src: kvx.CacheSpec, dst: kvx.CacheSpec
) -> None:
    """All slots, in order, a few blocks at a time, each digested while it is in memory. Block sizes that differ meet at their
    least common multiple."""
    tokens = src.num_slots
    both = lcm(src.block_size, dst.block_size)
    step = max(1, _STEP_BYTES // max(1, src.cache_bytes * both // src.num_slots)) * both
    with Progress(transient=True) as bar:
        task = bar.add_task("converting", total=tokens)
        for begin in range(0, tokens, step):
            end = min(tokens, begin + step)
            ids = [torch.arange(begin // s.block_size, -(-end // s.block_size)).view(1, -1) for s in (src, dst)]
            kvx.convert(
                [file.buffers for file in outputs], inputs, plan=plan, src_blocks=ids[0], dst_blocks=ids[1],
                seq_lens=torch.tensor([end - begin]),
            )  # fmt: skip
            for file in outputs:
                file.keep_digest(begin // dst.block_size, -(-end // dst.block_size))
            bar.update(task, completed=end)
