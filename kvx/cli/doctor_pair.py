"""kvx doctor A B: can two engines share blocks, what would be converted at what cost, and where what they computed differs.

An engine that keeps blocks in a store describes them when it starts: the folder of its kind, DIR/<32 digits>, with a manifest. A
probe is a prompt that both engines were given: its blocks are compared, whatever their sizes, layouts, formats and names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.adapters.engine_names import namer_of, said
from kvx.connector.store_names import NAMES, spec_of
from kvx.errors import BadArgument
from kvx.handover import names as rule_names
from kvx.spec import CacheSpec
from kvx.spec.byte_size import byte_text
from kvx.tiers import Block, BlockKind, DiskTier
from kvx.tiers.directory import read_manifest

_ROUNDED = 2.0**-3  # of a number, between two formats: a step of fp8
_MUST = ("model", "head_dim", "v_head_dim", "num_layers", "layer_start")


@dataclass(frozen=True)
class KeptBlocks:
    """Blocks of K and V of one kind in a store."""

    folder: Path
    kind: BlockKind
    spec: CacheSpec
    beside: dict[str, str | int]

    @property
    def names(self) -> str:
        return str(self.beside.get(NAMES, ""))

    @property
    def heads(self) -> range:
        return range(self.spec.head_start, self.spec.head_start + self.spec.num_kv_heads)

    def said(self) -> str:
        s = self.spec
        heads = f"heads {self.heads[0]} to {self.heads[-1]}"
        per_token = byte_text(self.kind.num_bytes // s.block_size)
        rows = f"{s.num_layers} layers, {heads}, blocks of {s.block_size} {s.format}, {per_token} a token"
        return f"{rows}, {s.layout!r}, {said(self.names)} names"

    def blocks(self, tokens: Sequence[int]) -> list[Block | None]:
        size = self.spec.block_size
        namer = namer_of(self.names)
        found = rule_names(tokens, size, self.spec.model) if namer is None else namer(tokens, size)
        with DiskTier(self.folder, self.kind, 1 << 62, threads=1) as tier:
            return tier.get_now(found)


def read(path: str) -> KeptBlocks:
    folder = Path(path)
    kinds = {at: kind for at in (folder, *_folders(folder)) if (kind := read_manifest(at)) is not None}
    found = {}
    for at, kind in kinds.items():
        spec = spec_of(kind)
        if spec is not None and (not spec[1].get(NAMES) or namer_of(str(spec[1][NAMES])) is not None):
            found[at] = KeptBlocks(at, kind, *spec)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise BadArgument(
            f"kvx doctor: {path} has no blocks of K and V; it must be the folder of a kind in a store, DIR/<32 digits>."
        )
    several = "\n".join(f"  {at}: {each.said()}" for at, each in found.items())
    raise BadArgument(f"kvx doctor: {path} has blocks of {len(found)} kinds; name one of them:\n{several}")


def _folders(folder: Path) -> list[Path]:
    return sorted(at for at in folder.iterdir() if at.is_dir()) if folder.is_dir() else []


def compare(a: KeptBlocks, b: KeptBlocks) -> dict[str, Any]:
    """`shares`: "bytes", "blocks" (after conversion) or "nothing", with why; what is converted, and what a token costs."""
    fields = [(f, getattr(a.spec, f), getattr(b.spec, f)) for f in _MUST]
    beside = sorted({*a.beside, *b.beside} - {NAMES})
    fields += [(f, a.beside.get(f), b.beside.get(f)) for f in beside]
    against = [f"{name}: {x!r} and {y!r}" for name, x, y in fields if x != y]
    if not set(a.heads) & set(b.heads):
        against.append(f"heads: {a.heads[0]} to {a.heads[-1]}, and {b.heads[0]} to {b.heads[-1]}")
    converted = [
        f"{name}: {getattr(a.spec, name)!r} and {getattr(b.spec, name)!r}"
        for name in ("layout", "format", "block_size", "head_start", "num_kv_heads")
        if getattr(a.spec, name) != getattr(b.spec, name)
    ]
    if a.names != b.names:
        converted.append(f"names: {said(a.names)} and {said(b.names)}")
    shares = "nothing" if against else "blocks" if converted else "bytes"
    return {"a": a.said(), "b": b.said(), "shares": shares, "against": against, "converted": converted}


def lines(found: dict[str, Any]) -> list[str]:
    out = [f"A  {found['a']}", f"B  {found['b']}"]
    if found["against"]:
        return [*out, "They share nothing. What differs:", *(f"  {text}" for text in found["against"])]
    if not found["converted"]:
        return [*out, "They share bytes: the same kind and the same names."]
    return [*out, "They share blocks, converted by whoever reads. What differs:", *(f"  {text}" for text in found["converted"])]


def read_tokens(path: str) -> list[int]:
    try:
        tokens = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BadArgument(f"kvx doctor: --probe {path} cannot be read: {error}. It is a JSON list of token ids.") from None
    if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
        raise BadArgument(f"kvx doctor: --probe {path} is no JSON list of token ids.")
    return tokens


def probe(a: KeptBlocks, b: KeptBlocks, tokens: Sequence[int]) -> str:
    """The first token, layer and head that differ, or that none does. BadArgument where the two cannot be compared."""
    against = compare(a, b)["against"]
    if against:
        raise BadArgument(f"kvx doctor: what A and B keep cannot be compared: {against[0]}.")
    unit = lcm(a.spec.block_size, b.spec.block_size)
    heads = sorted(set(a.heads) & set(b.heads))
    within = 0.0 if a.spec.format == b.spec.format else _ROUNDED
    most, compared = 0.0, 0
    for n, (x, y) in enumerate(zip(_units(a, tokens, unit), _units(b, tokens, unit), strict=False)):
        x, y = (t[..., [h - side.heads[0] for h in heads], :] for t, side in ((x, a), (y, b)))
        far = (x - y).abs() > within * torch.maximum(x.abs(), y.abs())
        most, compared = max(most, float((x - y).abs().max())), compared + unit
        if far.any():
            _, token, layer, plane, head, _ = (int(i) for i in min(_by_token(far)))
            at = x[layer, plane, token, head], y[layer, plane, token, head]
            worst = int((at[0] - at[1]).abs().argmax())
            what = f"{'KV'[plane]} of head {heads[head]}" if len(a.spec.planes) > 1 else "the latent"
            return (
                f"differ: token {n * unit + token}, layer {a.spec.layer_start + layer}, {what}, element {worst}: "
                f"{float(at[0][worst]):g} and {float(at[1][worst]):g}. All before is the same."
            )
    if not compared:
        raise BadArgument("kvx doctor: A and B have no block of the probe in common. Give both engines the prompt first.")
    return f"the same: {compared} tokens of the probe are in both" + (
        f", within a step of rounding (most {most:g})" if within else ""
    )


def _by_token(far: Tensor) -> Iterator[tuple[int, ...]]:
    """Places as (0, token, layer, plane, head, element), the first token first."""
    for layer, plane, token, head, element in far.nonzero().tolist():
        yield 0, token, layer, plane, head, element


def _units(side: KeptBlocks, tokens: Sequence[int], unit: int) -> Iterator[Tensor]:
    """K and V of so many tokens at a time, as far as they are there: [layer, plane, token, head, element]."""
    per = unit // side.spec.block_size
    blocks = side.blocks(tokens)
    planes = len(side.spec.planes)  # one of a latent
    layout = f"layer {'kv ' * (planes > 1)}| block token head dim"
    plain = side.spec.replaced(num_blocks=1, block_size=unit, layout=layout, format="f32")
    p = kvx.plan(side.spec.replaced(num_blocks=per), plain)
    for first in range(0, len(blocks) // per * per, per):
        here = [block for block in blocks[first : first + per] if block is not None]
        if len(here) < per:
            return
        out = kvx.allocate_buffers(plain)
        kvx.convert([t for block in here for t in block.buffers], out, plan=p)
        rows = [t.view(torch.float32).view(unit, side.spec.num_kv_heads, -1) for t in out]
        width = max(row.shape[-1] for row in rows)
        rows = [torch.nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows]
        yield torch.stack(rows).view(side.spec.num_layers, planes, *rows[0].shape)
