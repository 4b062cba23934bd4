"""kvx verify: is this file what was written, and do two hold the same KV, whatever their layouts?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Annotated, Any

import torch
import typer

import kvx
from kvx import files
from kvx.cli.shards import Shards, find_paths
from kvx.errors import BadArgument
from kvx.files.seal import PartDigests, part_ranges

FORM = 1  # of what --json prints


def verify(
    first: Annotated[str, typer.Argument(metavar="A", help="A cache file, or one per rank: 'cache{rank}.kvx'.")],
    second: Annotated[
        str, typer.Argument(metavar="[B]", help="Another cache file, in any layout, block size and number of ranks.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with the digest of each part of the cache; `kvx page` can show it.")
    ] = False,
) -> None:
    """Check a cache file against its seal (checksum), or compare two files: format, geometry and content. Exit code 1 when they
    differ."""
    a = Shards.open("kvx verify", find_paths("kvx verify", first))
    if not second:
        a.require_seals("kvx verify", "Give a second file to compare with.")
    say = _silent if as_json else typer.echo
    found = [_content(a, first, say)]
    if not second:
        verdict = "as it was written" if found[0]["is_whole"] else "not as it was written"
        _finish(found, verdict, None, as_json, is_said=found[0]["is_whole"])
        return
    b = Shards.open("kvx verify", find_paths("kvx verify", second))
    found.append(_content(b, second, say))
    difference = field_difference(a.whole, b.whole)
    if not difference and found[0]["digest"] != found[1]["digest"]:
        difference = first_difference(a, b)
    is_whole = all(one["is_whole"] for one in found)
    verdict = f"differ: {difference}" if difference else "the same KV" + ("" if is_whole else ", and not as it was written")
    _finish(found, verdict, not difference, as_json)


def _finish(found: list[dict[str, Any]], verdict: str, is_same: bool | None, as_json: bool, is_said: bool = True) -> None:
    if as_json:
        typer.echo(json.dumps({"kvx_verify": FORM, "files": found, "is_same": is_same, "verdict": verdict}, indent=1))
    elif is_said:
        typer.echo(verdict)
    if is_same is False or not all(one["is_whole"] for one in found):
        raise typer.Exit(1)


def _silent(text: str) -> None:
    """What --json has as fields is not said beside it."""


def _content(shards: Shards, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The digest of all and of each part, and whether each file is what its seal says. Ranks with the same heads count once."""
    total, is_whole, seen = kvx.Digest(), True, dict[tuple[int, int], tuple[str, str]]()
    parts: list[dict[str, Any]] = []
    for file in shards.files:
        if file.parts:
            check = files.SealCheck(file).read_all()
            found = check.found
            if str(found.total) != file.content or [str(d) for d in found.sums] != file.parts:
                say(check.words())
                is_whole = False
        else:
            found = PartDigests(file.spec)
            for part in part_ranges(file.spec):
                found.add(file.buffers, part.start, part.stop)
        for n, (part, mine) in enumerate(zip(part_ranges(file.spec), found.sums, strict=True)):
            parts.append({"path": file.path, "first_block": part.start, "end_block": part.stop, "digest": str(mine),
                          "kept": file.parts[n] if file.parts else None})  # fmt: skip
        here = (file.spec.layer_start, file.spec.of_kv.head_start)
        path, held = seen.setdefault(here, (file.path, str(found.total)))
        if held != str(found.total):
            raise BadArgument(f"kvx verify: {path} and {file.path} hold the same heads, with different content.")
        if path == file.path:
            total += found.total
    is_sealed = all(f.parts for f in shards.files)
    say(f"{name}: {total}{'' if is_sealed else ' (no seal)'}")
    return {"name": name, "digest": str(total), "is_sealed": is_sealed, "is_whole": is_whole, "parts": parts}


def field_difference(a: kvx.CacheSpec, b: kvx.CacheSpec) -> str:
    """The first field of format and geometry that differs; "" where none does. Layout, block size and where scales stand may."""
    for name in ("model", "num_layers", "layer_start", "num_kv_heads", "head_start", "num_planes", "num_slots"):
        x, y = getattr(a, name), getattr(b, name)
        if x != y and (name != "model" or (x and y)):  # "" says nothing
            what = {"num_planes": "number of planes (2: K and V, 1: a latent)", "num_slots": "number of tokens"}.get(name, name)
            return f"{what} is {x!r} in one and {y!r} in the other"
    for i, (x, y) in enumerate(zip(a.planes, b.planes, strict=True)):
        v = "v_" * i
        if replace(x.format, name="", is_inline=False) != replace(y.format, name="", is_inline=False):
            return f"{v}format is {x.format.name!r} in one and {y.format.name!r} in the other"
        if x.head_dim != y.head_dim:
            return f"{v}head_dim is {x.head_dim} in one and {y.head_dim} in the other"
    return ""


def first_difference(a: Shards, b: Shards) -> str:
    """The first layer, token and head that differ, with both brought to one layout a block at a time."""
    spec = a.whole
    size = lcm(spec.block_size, b.whole.block_size)
    plain = replace(spec, layout=spec.plain_layout, block_size=size, num_blocks=1)
    for begin in range(0, spec.num_slots, size):
        length = min(size, spec.num_slots - begin)
        sides = []
        for shards in (a, b):
            out, block_size = kvx.allocate_buffers(plain), shards.whole.block_size
            first, end = begin // block_size, -(-(begin + length) // block_size)
            kvx.convert(
                [f.buffers for f in shards.parts], out, plan=kvx.plan([f.spec for f in shards.parts], plain),
                src_blocks=torch.arange(first, end).view(1, -1), dst_blocks=torch.zeros(1, 1, dtype=torch.int64),
                seq_lens=torch.tensor([length]),
            )  # fmt: skip
            sides.append(out)
        for n, (x, y) in enumerate(zip(*sides, strict=True)):
            if not torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)):
                at = int((x.view(-1).view(torch.uint8) != y.view(-1).view(torch.uint8)).nonzero()[0])
                return _place(plain, n, at, begin, spec)
    return "their scales differ" if spec.plane(0).format.scale else "nothing, element by element"


def _place(plain: kvx.CacheSpec, buffer: int, byte: int, begin: int, spec: kvx.CacheSpec) -> str:
    layers = plain.num_layers * plain.num_planes
    if buffer >= layers:
        return f"scale byte {byte}, tokens {begin} and on"
    row = plain.plane(buffer % plain.num_planes).format.row_bytes(plain.plane(buffer % plain.num_planes).head_dim)
    head, token = byte // row % plain.num_kv_heads, begin + byte // (row * plain.num_kv_heads)
    layer, name = plain.layer_start + buffer // plain.num_planes, "kv"[buffer % plain.num_planes]
    where = f"block {token // spec.block_size}, token {token % spec.block_size} (slot {token}), head {plain.head_start + head}"
    return f"{name} of layer {layer}, {where}"
