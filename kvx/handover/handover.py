"""Handover: a sequence's tokens with their K and V, neutral between engines. Frozen; nothing is read before it is checked.

What it is (model, geometry, format, which heads and layers, which tokens) stands in its manifest, which has a digest of its own.
What is in it has a content digest with every row's coordinates, so a lost head, swapped layers or another order of blocks show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument, Damaged, Incompatible, OutOfRange, Unsupported, a_type
from kvx.handover.facts import check_parts, few, first_seen, is_state_part, tokens_of
from kvx.handover.manifest import read_manifest, write_manifest
from kvx.handover.memory import moved, new_buffers
from kvx.handover.part import Part, neutral, rank_specs
from kvx.handover.plane_parts import check_state_format, differing_plane, in_format, moved_planes
from kvx.handover.scales import differ, have_one_format
from kvx.layout.place import buffer_sizes
from kvx.layout.plan import plan
from kvx.ops.move.convert import convert
from kvx.ops.move.digest import Digest
from kvx.spec import CacheSpec, Spec, StateSpec
from kvx.spec.byte_size import byte_text
from kvx.spec.shown import Shown

MAX_BYTES = 16 << 30  # of a manifest's parts, unless the caller says otherwise: 50,000 tokens of a 70B model
_REQUIRED = ("model", "num_kv_heads", "head_dim", "v_head_dim", "head_start", "format", "v_format")


@dataclass(frozen=True, eq=False, repr=False)
class Handover(Shown):
    """A sequence on its way from one engine to another: its tokens, and K, V and states in neutral blocks, with digests."""

    tokens: NDArray[np.int32]  # all whose K and V are inside
    parts: tuple[Part, ...]  # one for each kind of layers
    whole: tuple[Digest, ...] = ()  # of a shard: the content of the parts of all shards together
    _is_checked: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", token_ids("Handover", self.tokens, least=1))
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "whole", tuple(self.whole))
        if not self.parts or len(self.whole) not in (0, len(self.parts)):
            raise BadArgument(f"Handover: {len(self.parts)} parts and {len(self.whole)} digests of wholes; a part or more.")
        check_parts(self.num_tokens, self.parts)

    def shown(self) -> dict[str, str]:
        kinds = [f"{len(p.layers)} layers {_what(p)}" + f" window {p.window}" * bool(p.window) for p in self.parts]
        return {
            "tokens": f"{self.num_tokens:,}" + f" in blocks of {self.block_size}" * bool(self.block_size),
            "model": repr(self.model),
            "layers": "; ".join(kinds),
            "size": byte_text(self.num_bytes),
            "device": str(self.parts[0].buffers[0].device),
        }

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def model(self) -> str:
        return self.parts[0].spec.model

    @property
    def block_size(self) -> int:
        """Tokens of a block; of states alone 0."""
        return max(map(tokens_of, self.parts))

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for part in self.parts for t in part.buffers)

    @property
    def spec(self) -> Spec:
        """Of the only part."""
        if len(self.parts) != 1:
            raise BadArgument(f"Handover.spec: there are {len(self.parts)} parts, each with a spec of its own: parts[i].spec.")
        return self.parts[0].spec

    # ---- what it is

    def to_json(self) -> str:
        """The manifest."""
        return write_manifest(self.tokens, self.parts, [p.content for p in self.parts], self.whole)

    def check(self) -> None:
        """Damaged unless every part's content is what its digest says."""
        for n, part in enumerate(self.parts):
            now = part.digest(self.num_tokens)
            if now != part.content:
                raise Damaged(
                    f"handover: part {n} (layers {few(part.layers)}, {_held(part.spec)}) has content {now}; its manifest says "
                    f"{part.content}. "
                    "It was changed on the way, or belongs to another manifest. Ask for it again."
                )
        object.__setattr__(self, "_is_checked", True)

    def require(self, part: int = 0, **fields: str | int) -> None:
        """Incompatible with the first of these fields that differs: model, num_layers, num_kv_heads, head_dim, format, window."""
        here = self._part("require", part)
        known: dict[str, str | int] = {
            **_geometry(here.spec),
            "num_layers": len({n for p in self.parts for n in p.layers}),
            "window": here.window,
        }
        for name, want in fields.items():
            if name not in known:
                raise BadArgument(f"require(): {name!r} is no field of a handover; the fields are {', '.join(known)}.")
            if known[name] != want:
                raise Incompatible(f"handover: {name} is {known[name]!r}; here it is {want!r}. It was not read.")

    # ---- into an engine

    def write(
        self,
        part: int,
        buffers: Sequence[Tensor],  # of an engine's paged cache, changed in place
        spec: CacheSpec,  # as it lies there: any layout, format, block size; layers counted within the part; a rank's own heads
        blocks: Sequence[int],  # of the sequence, from `first_token` on; -1 skips one
        *,
        first_token: int = 0,
        num_tokens: int | None = None,  # None: all that are here
        rope: str = "half",  # how the engine pairs rotated numbers of K
    ) -> None:
        """Put tokens from `first_token` to `num_tokens` into an engine's blocks. Nothing else in them changes.

        The content is checked before the first of it is written, unless check() was called: Damaged then, and nothing changes.
        A spec with some of the handover's heads is a tensor parallel rank's: it gets those, from its head_start on, and nothing is
        said of the others. Where all are meant, require(num_kv_heads=...) first.
        """
        here = self._part("write", part)
        mine = here.spec
        if not isinstance(mine, CacheSpec):
            raise Unsupported(f"write(): part {part} is {_what(here)}, not K and V; write_planes() puts it into blocks.")
        if not isinstance(spec, CacheSpec):
            raise BadArgument(f"write(): spec is {a_type(spec)}; it must be the CacheSpec of the engine's cache.")
        end = self.num_tokens if num_tokens is None else num_tokens
        if not 0 <= first_token <= end <= self.num_tokens or first_token % spec.block_size or first_token % mine.block_size:
            raise BadArgument(
                f"write(): tokens {first_token} to {end} of {self.num_tokens}; blocks have {mine.block_size} tokens here and "
                f"{spec.block_size} there. The first is a multiple of both."
            )
        if spec.model and spec.model != self.model:
            raise Incompatible(f"write(): the handover is of model {self.model!r}; here it is {spec.model!r}. It was not read.")
        need = -(-(end - first_token) // spec.block_size)
        if len(blocks) < need:
            raise BadArgument(f"write(): {len(blocks)} blocks of {spec.block_size}; {end - first_token} tokens take {need}.")
        check_ids("write()", "blocks", blocks[:need], spec.num_blocks)
        if end == first_token:
            return
        if not self._is_checked:
            self.check()
        into, given = list(buffers), here
        if have_one_format(mine, spec) and differ(mine, here.buffers, spec, into):
            # Quantised anew under the engine's scales, which other sequences there are stored under too.
            given = _moved_blocks(here, (replace(mine, format="f32", v_format=""),), self.num_tokens)[0]
        first = first_token // mine.block_size - here.first_block
        count = -(-(end - first_token) // mine.block_size)
        # Blocks that lie wholly before what is here stay as they are.
        absent = max(0, here.first_token - first_token) // spec.block_size
        convert(
            moved(given.buffers, into[0].device),
            into,
            plan=plan(given.spec, spec, rope=("half", rope), partial=True),  # into one rank of several
            src_blocks=block_table(max(-1, n) for n in range(first, first + count)),
            dst_blocks=block_table([-1] * min(absent, need) + list(blocks[absent:need])),
            seq_lens=torch.tensor([end - first_token], dtype=torch.int32),
        )

    def write_planes(self, part: int, buffers: Sequence[Tensor], spec: Spec, blocks: Sequence[int]) -> None:
        """Put a part that is not K and V into an engine's blocks: of entries one for each of its own, of a state one; -1 skips.

        `spec` is how they lie there, in any layout, layers counted within the part. A rank's own share is taken, as write() takes
        heads; another format, other sizes or another orientation are refused by name, and so is a state of another position where
        the spec says one. The content is checked first.
        """
        here = self._part("write_planes", part)
        if not isinstance(here.spec, StateSpec) or not isinstance(spec, StateSpec):
            raise BadArgument(f"write_planes(): part {part} is {_what(here)} and spec {a_type(spec)}; both are of planes.")
        if spec.model and spec.model != self.model:
            raise Incompatible(
                f"write_planes(): the handover is of model {self.model!r}; here it is {spec.model!r}. It was not read."
            )
        if sentence := differing_plane(spec, here.spec, whole=False):
            raise Incompatible(f"write_planes(): part {part}: {sentence}. It was not read.")
        count = here.spec.num_blocks
        if not isinstance(blocks, Sequence) or len(blocks) < count:
            raise BadArgument(f"write_planes(): blocks are {str(blocks)[:80]}; part {part} has {count}, each with a number there.")
        if not buffers:
            raise BadArgument("write_planes(): buffers are empty; they must be the engine's tensors, as spec says.")
        check_ids("write_planes()", "blocks", blocks[:count], spec.num_blocks)
        said = {spec.positions[int(n)] for n in blocks[:count] if spec.positions and int(n) >= 0}
        if is_state_part(here) and said - {self.num_tokens}:
            raise Incompatible(
                f"write_planes(): part {part} is a state after {self.num_tokens} tokens; here it is one after {said.pop()}. It was "
                "not read."
            )
        if not self._is_checked:
            self.check()
        into = list(buffers)
        convert(
            moved(here.buffers, into[0].device), into, plan=plan(here.spec, spec, partial=True), src_blocks=list(range(count)),
            dst_blocks=[int(n) for n in blocks[:count]],
        )  # fmt: skip

    def _part(self, call: str, n: int) -> Part:
        if not isinstance(n, int) or not 0 <= n < len(self.parts):
            raise BadArgument(f"{call}(): part is {n!r}; the handover has {len(self.parts)}, counted from 0.")
        return self.parts[n]

    # ---- other handovers of the same

    def cut(self, num_tokens: int) -> Handover:
        """Its first tokens, in blocks of their own. Layers with windows must still have what the next token sees."""
        if not isinstance(num_tokens, int) or not 0 < num_tokens <= self.num_tokens:
            raise BadArgument(f"cut(): num_tokens is {num_tokens!r}; the handover has {self.num_tokens}. It is 1 to that.")
        if num_tokens == self.num_tokens:
            return self
        self.require_kv("cut", "a state stands where the handover ends")
        self.check()
        parts = []
        for p in self.parts:
            seen = first_seen(num_tokens, p.window)
            if p.first_token > seen:
                raise BadArgument(
                    f"cut(): after {num_tokens} tokens layers {few(p.layers)} see from token {seen}; the handover has them from "
                    f"{p.first_token}."
                )
            spec = p.spec.replaced(num_blocks=-(-num_tokens // p.spec.block_size) - p.first_block)
            parts.append(_moved_blocks(p, (spec,), num_tokens)[0])
        return Handover(self.tokens[:num_tokens], tuple(parts))

    def convert(
        self,
        *,
        block_size: int | None = None,  # None: as it is
        format: str = "",  # of K and V; "": as it is
        state_format: str | Mapping[str, str] = "",  # of states, for all planes or by their names; "": as they are
    ) -> Handover:
        """In blocks of another size, or another format. States have no blocks of tokens: they stay, in their own format."""
        if block_size is None:
            block_size = self.block_size
        elif not isinstance(block_size, int) or block_size < 1:
            kept = f"blocks of {self.block_size}" if self.block_size else "all as it is"
            raise BadArgument(f"convert(): block_size is {block_size!r}; it must be 1 or more. Leave it out to keep {kept}.")
        entries = next((p for p in self.parts if isinstance(p.spec, StateSpec) and p.block_tokens), None)
        if entries is not None:
            self._refuse("convert", entries, "rows stay as they are")
        if not any(isinstance(p.spec, CacheSpec) for p in self.parts) and (format or block_size != self.block_size):
            raise BadArgument(
                "convert(): the handover has states and no K and V; format and block_size are of those. state_format=."
            )
        check_state_format("convert", self.parts, state_format)
        self.check()
        parts = []
        for p in self.parts:
            if isinstance(p.spec, StateSpec):
                parts.append(in_format(p, state_format))
                continue
            blocks = -(-self.num_tokens // block_size) - p.first_token // block_size
            spec = neutral(p.spec.of_kv, num_blocks=blocks, block_size=block_size, format=format)
            parts.append(_moved_blocks(p, (spec,), self.num_tokens)[0])
        # A shard stays one of the same whole: the size of blocks is not in the digest of content, the format is.
        same = all(a.content == b.content for a, b in zip(parts, self.parts, strict=True))
        return Handover(self.tokens, tuple(parts), self.whole if same else ())

    def require_kv(self, call: str, why: str) -> None:
        """Unsupported where it has more than K and V."""
        other = next((p for p in self.parts if isinstance(p.spec, StateSpec)), None)
        if other is not None:
            self._refuse(call, other, why)

    def _refuse(self, call: str, part: Part, why: str) -> NoReturn:
        raise Unsupported(f"{call}(): the handover has {_what(part)} of layers {few(part.layers)}, not only K and V: {why}.")

    def shard(self, tp_size: int) -> list[Handover]:
        """One for each tensor parallel rank. Where heads do not divide, the first ranks have one more; with more ranks than heads,
        ranks in a row have the same."""
        self.check()
        by_part = [_moved_blocks(p, rank_specs(p.spec, tp_size), self.num_tokens) for p in self.parts]
        whole = tuple(p.content for p in self.parts)
        return [Handover(self.tokens, tuple(parts), whole) for parts in zip(*by_part, strict=True)]


def from_manifest(
    text: str, buffers: Sequence[Sequence[Tensor]] | None = None, *, max_bytes: int = MAX_BYTES
) -> Handover:  # fmt: skip
    """The handover of a manifest. `buffers`, one list a part; None: new ones, to be filled by whoever brings the bytes.

    New ones of more than `max_bytes` are refused, before memory is taken. The content is not checked yet: check() when it is there.
    """
    told = read_manifest(text)
    if buffers is None:
        size = sum(count * size for p in told.parts for count, size in buffer_sizes(p.spec))
        if size > max_bytes:
            raise BadArgument(
                f"handover: the manifest speaks of {size:,} bytes; max_bytes is {max_bytes:,}. Allow more for a peer you trust."
            )
    elif len(buffers) != len(told.parts):
        raise BadArgument(f"handover: buffers of {len(buffers)} parts; the manifest has {len(told.parts)}.")
    parts = []
    for n, p in enumerate(told.parts):
        held = new_buffers(p.spec) if buffers is None else tuple(buffers[n])
        parts.append(Part(p.spec, p.layers, p.window, p.first_block, held, p.content, p.first_token, p.block_tokens))
    return Handover(told.tokens, tuple(parts), told.whole)


def block_table(ids: Iterable[int]) -> Tensor:
    """[1, columns]: one sequence's, in host memory, where ids are checked before anything moves."""
    try:
        return torch.tensor([[int(n) for n in ids]], dtype=torch.int32)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadArgument(f"handover: block ids are whole numbers under 2**31: {str(error)[:200]}.") from None


def check_ids(call: str, name: str, ids: Sequence[int], num_blocks: int) -> None:
    """OutOfRange where a cache has no such block: said here, since what converts does not know who called. Negative ones skip."""
    try:
        last = max(map(int, ids), default=-1)
    except (ValueError, TypeError) as error:
        raise BadArgument(
            f"{call}: {name} is {str(ids)[:100]}; they must be whole numbers, block ids: {str(error)[:100]}."
        ) from None
    if last >= num_blocks:
        raise OutOfRange(f"{call}: {name} has {last}; the cache has {num_blocks} blocks, counted from 0. Nothing was moved.")


def _what(part: Part) -> str:
    """A part's content in a word or two."""
    if isinstance(part.spec, CacheSpec):
        return part.spec.format
    kind = "a state" if is_state_part(part) else f"blocks of {part.block_tokens} tokens"
    return f"{kind} ({', '.join(p.name for p in part.spec.planes)})"


def _held(spec: Spec) -> str:
    if isinstance(spec, CacheSpec):
        return f"heads {spec.head_start} to {spec.head_start + spec.num_kv_heads - 1}"
    return f"planes {', '.join(p.name for p in spec.planes)}"


def _geometry(spec: Spec) -> dict[str, str | int]:
    """The fields that an engine may require."""
    if not isinstance(spec, CacheSpec):
        return {"model": spec.model}
    found: dict[str, str | int] = {name: getattr(spec, name) for name in _REQUIRED}
    return found | {"v_head_dim": spec.v_head_dim or spec.head_dim, "v_format": spec.v_format or spec.format}


def _moved_blocks(p: Part, specs: tuple[Spec, ...], num_tokens: int) -> list[Part]:
    """A part's first tokens as these shards of it, sealed."""
    if isinstance(p.spec, StateSpec):
        return moved_planes(p, specs)
    first = p.first_token // specs[0].block_size
    made = [replace(p, spec=s, first_block=first, buffers=new_buffers(s)) for s in specs]
    # Both tables count from token 0, so that blocks of different sizes meet; what is not here is skipped.
    src, dst = ([-1] * b + list(range(s.num_blocks)) for b, s in ((p.first_block, p.spec), (first, specs[0])))
    convert(
        list(p.buffers),
        [t for m in made for t in m.buffers],
        plan=plan(p.spec, specs),
        src_blocks=block_table(src[: -(-num_tokens // p.spec.block_size)]),
        dst_blocks=block_table(dst),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
    )
    return [m.cleared().sealed(num_tokens) for m in made]
