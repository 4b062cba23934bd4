"""Handover: a sequence's tokens with their K and V, neutral between engines. Frozen; nothing is read before it is checked.

What it is (model, geometry, format, which heads and layers, which tokens) stands in its manifest, which has a digest of its own.
What is in it has a content digest with every row's coordinates, so a lost head, swapped layers or another order of blocks show.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx.errors import BadArgument, Damaged, Incompatible
from kvx.handover.part import Part, neutral, new_buffers
from kvx.layout.plan import plan
from kvx.ops.convert import convert
from kvx.ops.digest import Digest
from kvx.spec import CacheSpec, from_json, to_json

VERSION = 1
_REQUIRED = ("model", "num_kv_heads", "head_dim", "v_head_dim", "head_start", "format", "v_format")


@dataclass(frozen=True, eq=False)
class Handover:
    tokens: NDArray[np.int32]  # all whose K and V are inside
    parts: tuple[Part, ...]  # one for each kind of layers
    whole: tuple[Digest, ...] = ()  # of a shard: the content of the parts of all shards together

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.ascontiguousarray(self.tokens, np.int32))
        self.tokens.flags.writeable = False
        if self.tokens.ndim != 1 or not len(self.tokens) or not self.parts:
            raise BadArgument(
                f"Handover: tokens are {list(self.tokens.shape)} and parts {len(self.parts)}; there is one of each or more."
            )
        layers = [n for part in self.parts for n in part.layers]
        if len(set(layers)) != len(layers):
            raise BadArgument(f"Handover: layers of its parts are {layers}; each layer is in one part.")
        for part in self.parts:
            blocks = -(-self.num_tokens // part.spec.block_size) - part.first_block
            if part.spec.num_blocks != blocks or part.spec.model != self.model:
                raise BadArgument(
                    f"Handover: a part has {part.spec.num_blocks} blocks of model {part.spec.model!r}; {self.num_tokens} tokens "
                    f"after block {part.first_block} make {blocks}, and the first part's model is {self.model!r}."
                )

    def __repr__(self) -> str:
        kinds = [f"{len(p.layers)} layers {p.spec.format}" + f" window {p.window}" * bool(p.window) for p in self.parts]
        blocks = f"in blocks of {self.block_size}: {'; '.join(kinds)}; {self.num_bytes:,} bytes"
        return f"Handover({self.num_tokens} tokens of {self.model!r} {blocks})"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def model(self) -> str:
        return self.parts[0].spec.model

    @property
    def block_size(self) -> int:
        return self.parts[0].spec.block_size

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for part in self.parts for t in part.buffers)

    @property
    def spec(self) -> CacheSpec:
        """Of the only part."""
        if len(self.parts) != 1:
            raise BadArgument(f"Handover.spec: there are {len(self.parts)} parts, each with a spec of its own: parts[i].spec.")
        return self.parts[0].spec

    # ---- what it is

    def to_json(self) -> str:
        """The manifest."""
        body = self._body()
        return json.dumps({**body, "digest": _digest_of(body)})

    def _body(self) -> dict[str, Any]:
        return {
            "kvx_handover": VERSION,
            "tokens": self.tokens.tolist(),
            "whole": [str(d) for d in self.whole],
            "parts": [
                {
                    "manifest": to_json(p.spec),
                    "layers": list(p.layers),
                    "window": p.window,
                    "first_block": p.first_block,
                    "content": str(p.content),
                }
                for p in self.parts
            ],
        }

    def check(self) -> None:
        """Damaged unless every part's content is what its digest says."""
        for n, part in enumerate(self.parts):
            now = part.digest(self.num_tokens)
            if now != part.content:
                raise Damaged(
                    f"handover: part {n} (layers {_few(part.layers)}, heads {part.spec.head_start} to "
                    f"{part.spec.head_start + part.spec.num_kv_heads - 1}) has content {now}; its manifest says {part.content}. "
                    "It was changed on the way, or belongs to another manifest. Ask for it again."
                )

    def require(self, part: int = 0, **fields: str | int) -> None:
        """Incompatible with the first of these fields that differs: model, num_layers, num_kv_heads, head_dim, format, window."""
        here, spec = self.parts[part], self.parts[part].spec
        known: dict[str, str | int] = {
            **{name: getattr(spec, name) for name in _REQUIRED},
            "v_head_dim": spec.v_head_dim or spec.head_dim,
            "num_layers": sum(len(p.layers) for p in self.parts),
            "window": here.window,
        }
        for name, want in fields.items():
            if name not in known:
                raise BadArgument(f"require(): {name!r} is no field of a handover; they are {', '.join(known)}.")
            if known[name] != want:
                raise Incompatible(f"handover: {name} is {known[name]!r}; here it is {want!r}. It was not read.")

    # ---- into an engine

    def write(
        self,
        part: int,
        buffers: Sequence[Tensor],  # of an engine's paged cache, changed in place
        spec: CacheSpec,  # as it lies there: any layout, format, block size; layers counted within the part
        blocks: Sequence[int],  # of the sequence, from `first_token` on; -1 skips one
        *,
        first_token: int = 0,
        num_tokens: int | None = None,  # None: all that are here
        rope: str = "half",  # how the engine pairs rotated numbers of K
    ) -> None:
        """Put tokens from `first_token` to `num_tokens` into an engine's blocks. Nothing else in them changes."""
        here = self.parts[part]
        end = self.num_tokens if num_tokens is None else num_tokens
        if not 0 <= first_token <= end <= self.num_tokens or first_token % spec.block_size or first_token % here.spec.block_size:
            raise BadArgument(
                f"write(): tokens {first_token} to {end} of {self.num_tokens}; blocks have {here.spec.block_size} tokens here and "
                f"{spec.block_size} there. The first is a multiple of both."
            )
        need = -(-(end - first_token) // spec.block_size)
        if len(blocks) < need:
            raise BadArgument(f"write(): {len(blocks)} blocks of {spec.block_size}; {end - first_token} tokens take {need}.")
        if end == first_token:
            return
        held = replace(here.spec, model=here.spec.model if spec.model else "")
        device = buffers[0].device
        first = first_token // here.spec.block_size - here.first_block
        count = -(-(end - first_token) // here.spec.block_size)
        ids = [n if n >= 0 else -1 for n in range(first, first + count)]
        convert(
            list(buffers),
            moved(here.buffers, device),
            plan=plan(held, spec, rope=("half", rope)),
            src_blocks=torch.tensor([ids], dtype=torch.int32),
            dst_blocks=torch.tensor([list(blocks[:need])], dtype=torch.int32),
            seq_lens=torch.tensor([end - first_token], dtype=torch.int32, device=device),
        )

    # ---- other handovers of the same

    def cut(self, num_tokens: int) -> Handover:
        """Its first tokens. The blocks are shared; layers with windows must still have what the next token sees."""
        if not 0 < num_tokens <= self.num_tokens:
            raise BadArgument(f"cut(): num_tokens is {num_tokens}; the handover has {self.num_tokens}. It is 1 to that.")
        if num_tokens == self.num_tokens:
            return self
        parts = []
        for p in self.parts:
            if p.window and p.first_block * p.spec.block_size > max(0, num_tokens + 1 - p.window):
                raise BadArgument(
                    f"cut(): after {num_tokens} tokens layers {_few(p.layers)} see from token {max(0, num_tokens + 1 - p.window)}; "
                    f"the handover has them from {p.first_block * p.spec.block_size}."
                )
            blocks = -(-num_tokens // p.spec.block_size) - p.first_block
            spec = replace(p.spec, num_blocks=blocks)
            parts.append(_moved_blocks(p, (spec,), num_tokens)[0])
        return Handover(self.tokens[:num_tokens], tuple(parts))

    def convert(self, *, block_size: int = 0, format: str = "") -> Handover:
        """In blocks of another size, or another format. 0 and "": as it is."""
        self.check()
        parts = []
        for p in self.parts:
            size = block_size or p.spec.block_size
            first = p.first_block * p.spec.block_size // size
            blocks = -(-self.num_tokens // size) - first
            spec = neutral(p.spec, num_blocks=blocks, block_size=size, format=format)
            parts.append(_moved_blocks(p, (spec,), self.num_tokens, first)[0])
        return Handover(self.tokens, tuple(parts))

    def shard(self, tp_size: int) -> list[Handover]:
        """One for each tensor parallel rank."""
        self.check()
        by_part = [_moved_blocks(p, tuple(p.spec.shard(tp_size, r) for r in range(tp_size)), self.num_tokens) for p in self.parts]
        whole = tuple(p.content for p in self.parts)
        return [Handover(self.tokens, tuple(parts), whole) for parts in zip(*by_part, strict=True)]


def join(shards: Sequence[Handover]) -> Handover:
    """The handover that was cut into these ranks' shards, in any order. Every head of it must be there."""
    if not shards:
        raise BadArgument("join(): no shards; there is one or more.")
    first = shards[0]
    for n, s in enumerate(shards):
        s.check()
        if not np.array_equal(s.tokens, first.tokens) or s.whole != first.whole or len(s.parts) != len(first.parts):
            raise Incompatible(f"join(): shard {n} is of other tokens or of another handover than shard 0. It was not read.")
    parts = []
    for i, p in enumerate(first.parts):
        same = {s.parts[i].spec.head_start: s.parts[i] for s in shards}
        ranks = [same[h] for h in sorted(same)]
        start, heads = ranks[0].spec.head_start, sum(r.spec.num_kv_heads for r in ranks)
        spec = replace(p.spec, head_start=start, num_kv_heads=heads)
        part = replace(p, spec=spec, buffers=new_buffers(spec))
        here = torch.arange(spec.num_blocks, dtype=torch.int32)
        convert(
            list(part.buffers),
            [t for r in ranks for t in r.buffers],
            plan=plan([r.spec for r in ranks], spec),
            src_blocks=here,
            dst_blocks=here,
        )
        part = part.sealed(first.num_tokens)
        if first.whole and part.content != first.whole[i]:
            held = ", ".join(f"{r.spec.head_start} to {r.spec.head_start + r.spec.num_kv_heads - 1}" for r in ranks)
            raise Damaged(f"join(): heads {held} make content {part.content}; the whole had {first.whole[i]}. A shard is missing.")
        parts.append(part)
    return Handover(first.tokens, tuple(parts))


def from_manifest(text: str, buffers: Sequence[Sequence[Tensor]] | None = None) -> Handover:
    """The handover of a manifest. `buffers`, one list a part; None: new ones, to be filled by whoever brings the bytes.

    The content is not checked yet: check() when it is there.
    """
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("kvx_handover") != VERSION:
            found = body.get("kvx_handover") if isinstance(body, dict) else type(body).__name__
            raise Incompatible(f"handover: manifest version is {found!r}; this library reads {VERSION}.")
        stated = body.pop("digest", None)
        if stated != _digest_of(body):
            raise Damaged(f"handover: the manifest's digest is {stated!r} and its fields make {_digest_of(body)!r}.")
        parts = []
        for n, p in enumerate(body["parts"]):
            spec = from_json(p["manifest"])
            held = tuple(buffers[n]) if buffers is not None else new_buffers(spec)
            parts.append(Part(spec, tuple(p["layers"]), int(p["window"]), int(p["first_block"]), held, _digest_from(p["content"])))
        whole = tuple(_digest_from(d) for d in body["whole"])
        return Handover(np.array(body["tokens"], np.int32), tuple(parts), whole)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(f"handover: no manifest: {type(error).__name__}: {str(error)[:200]}.") from None


def moved(buffers: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """These buffers on a device; as they are where they lie there."""
    return [t if t.device == device else t.to(device) for t in buffers]


def _moved_blocks(p: Part, specs: tuple[CacheSpec, ...], num_tokens: int, first_block: int | None = None) -> list[Part]:
    """A part's first tokens as these shards of it, sealed."""
    first = p.first_block if first_block is None else first_block
    made = [replace(p, spec=s, first_block=first, buffers=new_buffers(s)) for s in specs]
    # Both tables count from token 0, so that blocks of different sizes meet; what is not here is skipped.
    src, dst = ([-1] * b + list(range(s.num_blocks)) for b, s in ((p.first_block, p.spec), (first, specs[0])))
    src = src[: -(-num_tokens // p.spec.block_size)]
    convert(
        [t for m in made for t in m.buffers],
        list(p.buffers),
        plan=plan(p.spec, specs),
        src_blocks=torch.tensor([src], dtype=torch.int32),
        dst_blocks=torch.tensor([dst], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
    )
    return [m.sealed(num_tokens) for m in made]


def _digest_of(body: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in body.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest_from(text: str) -> Digest:
    if len(text) != 32:
        raise BadArgument(f"handover: a content digest is {text!r}; it has 32 digits.")
    return Digest(int(text[:16], 16), int(text[16:], 16))


def _few(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers if len(layers) <= 6 else layers[:5])) + (f", ... {layers[-1]}" if len(layers) > 6 else "")
