"""kvx verify: is this file what was written, and do two hold the same KV, whatever their layouts?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

import kvx
from kvx import files
from kvx.errors import BadArgument


def verify(
    first: Annotated[Path, typer.Argument(metavar="A", help="a cache file")],
    second: Annotated[Path | None, typer.Argument(metavar="[B]", help="another, in any layout and block size")] = None,
) -> None:
    """Compare a file with the digest it was written with, or two files with each other. Exit code 1 when they differ."""
    a = files.load(first)
    parts = part_digests(a)
    mine = str(sum(parts, kvx.Digest()))
    typer.echo(f"{first}: {mine}")
    if second is None:
        if not a.content:
            raise BadArgument(f"kvx verify: {first} keeps no digest of its content; give a second file to compare with.")
        if a.content != mine:
            typer.echo(f"differs{where_damaged(a, parts)}: it was written with {a.content}. The file was damaged or changed.")
            raise typer.Exit(1)
        typer.echo("as it was written")
        return
    b = files.load(second)
    theirs = str(sum(part_digests(b), kvx.Digest()))
    typer.echo(f"{second}: {theirs}")
    if mine == theirs:
        typer.echo("the same KV")
        return
    typer.echo(f"differ: {first_difference(a, b)}")
    raise typer.Exit(1)


def part_digests(file: files.CacheFile) -> list[kvx.Digest]:
    return [files.digest_blocks(file.buffers, file.spec, part.start, part.stop) for part in files.part_ranges(file.spec)]


def where_damaged(file: files.CacheFile, parts: list[kvx.Digest]) -> str:
    """The blocks whose part has another digest than the one kept. Scales that all blocks share damage all of them."""
    ranges = files.part_ranges(file.spec)
    bad = [part for part, mine, kept in zip(ranges, parts, file.parts, strict=False) if str(mine) != kept]
    if not bad:
        return ""
    names = [f"{part.start}" if len(part) == 1 else f"{part.start}..{part.stop - 1}" for part in bad]
    return f" in blocks {', '.join(names[:8])}{', ...' if len(bad) > 8 else ''} of {file.spec.num_blocks}"


def first_difference(a: files.CacheFile, b: files.CacheFile) -> str:
    """The first layer, token and head that differ, with both files brought to one layout a block at a time."""
    for name in ("num_kv_heads", "head_dim", "num_layers", "layer_start", "head_start", "format", "v_format", "v_head_dim"):
        x, y = getattr(a.spec, name), getattr(b.spec, name)
        if x != y:
            return f"{name} is {x!r} in one and {y!r} in the other"
    if a.spec.num_slots != b.spec.num_slots:
        return f"one holds {a.spec.num_slots} tokens and the other {b.spec.num_slots}"
    layout = "layer kv | block token head dim" if a.spec.num_planes == 2 else "layer | block token head dim"
    size = max(a.spec.block_size, b.spec.block_size)
    plain = replace(a.spec, layout=layout, block_size=size, num_blocks=1, block_bytes=0)
    for begin in range(0, a.spec.num_slots, size):
        length = min(size, a.spec.num_slots - begin)
        sides = []
        for f in (a, b):
            out = kvx.allocate_buffers(plain)
            first, end = begin // f.spec.block_size, -(-(begin + length) // f.spec.block_size)
            kvx.convert(
                out, f.buffers, plan=kvx.plan(f.spec, plain), src_blocks=torch.arange(first, end).view(1, -1),
                dst_blocks=torch.zeros(1, 1, dtype=torch.int64), seq_lens=torch.tensor([length]),
            )  # fmt: skip
            sides.append(out)
        for n, (x, y) in enumerate(zip(*sides, strict=True)):
            if not torch.equal(x, y):
                return _place(
                    plain, n, int((x.view(-1).view(torch.uint8) != y.view(-1).view(torch.uint8)).nonzero()[0]), begin, a.spec
                )
    return "their scales differ" if a.spec.plane(0).format.scale else "nothing, element by element"


def _place(plain: kvx.CacheSpec, buffer: int, byte: int, begin: int, spec: kvx.CacheSpec) -> str:
    layers = plain.num_layers * plain.num_planes
    if buffer >= layers:
        return f"scale byte {byte}, tokens {begin} and on"
    row = plain.plane(buffer % plain.num_planes).format.row_bytes(plain.plane(buffer % plain.num_planes).head_dim)
    head, token = byte // row % plain.num_kv_heads, begin + byte // (row * plain.num_kv_heads)
    layer, name = plain.layer_start + buffer // plain.num_planes, "kv"[buffer % plain.num_planes]
    where = f"block {token // spec.block_size}, token {token % spec.block_size} (slot {token}), head {plain.head_start + head}"
    return f"{name} of layer {layer}, {where}"
