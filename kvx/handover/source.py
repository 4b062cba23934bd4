"""Out of an engine: its blocks, as they lie in memory, become a handover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument, Incompatible, a_type
from kvx.handover.handover import Handover, block_table, check_ids
from kvx.handover.memory import moved, new_buffers
from kvx.handover.part import Part, neutral
from kvx.handover.scales import require_one_scale
from kvx.layout.plan import plan
from kvx.ops.move.convert import convert
from kvx.spec import CacheSpec


@dataclass(frozen=True, eq=False)
class Source:
    """An engine's paged cache of one kind of layers, or one rank's or stage's part of it."""

    buffers: Sequence[Tensor]  # every buffer, as the spec says; on any device
    spec: CacheSpec  # in the engine's own layout
    blocks: Sequence[int]  # the sequence's, in order; -1 where one is behind the window
    layers: Sequence[int] = ()  # of the model, in their order; (): spec.layer_start and on
    window: int = 0  # positions a token of these layers sees; 0: all
    first_token: int = 0  # tokens before it are not there: behind the window
    rope: str = "half"  # how rotated pairs of K lie: "half" a row apart, or "interleaved"

    @property
    def model_layers(self) -> tuple[int, ...]:
        first = self.spec.layer_start
        return tuple(int(n) for n in self.layers) or tuple(range(first, first + self.spec.num_layers))

    @property
    def first_held(self) -> int:
        """The first token that is there: `first_token`, or that of the first block."""
        behind = next((n for n, block in enumerate(self.blocks) if int(block) >= 0), len(self.blocks))
        return max(self.first_token, behind * self.spec.block_size)


class _Table(NamedTuple):
    """What sources that one conversion reads have in common."""

    blocks: tuple[int, ...]
    rope: str
    num_blocks: int
    block_size: int


class _Run(NamedTuple):
    """Layers in a row of the part that a source has in a row."""

    first: int
    end: int
    spec: CacheSpec  # its layers counted within the part; true from `first` to `end`
    source: Source


def export_blocks(
    tokens: ArrayLike,  # ids whose K and V are in the blocks
    sources: Sequence[Source],  # ranks and stages of one kind of layers are joined, and groups with tables of their own
    *,
    model: str = "",  # the model that K and V belong to; "": as the specs say
    block_size: int = 16,
    format: str = "",  # "": as it is
) -> Handover:
    """A sequence's K and V out of an engine's memory, converted, sealed with the digest of its content. Waits for the device."""
    ids = token_ids("export_blocks()", tokens, least=1)
    return Handover(ids, tuple(export_parts(ids, sources, model=model, block_size=block_size, format=format)))


def export_parts(tokens: ArrayLike, sources: Sequence[Source], *, model: str, block_size: int, format: str) -> list[Part]:
    """The parts of export_blocks()."""
    ids = token_ids("export_blocks()", tokens, least=1)
    for s in sources or ():
        if not isinstance(s, Source):
            raise BadArgument(f"export_blocks(): a source is {a_type(s)}; it must be a Source(buffers, spec, blocks).")
    model = model or _one_model(sources)
    if not sources:
        raise BadArgument("export_blocks(): 0 sources; there is one or more: Source(buffers, spec, blocks).")
    if not model:
        raise BadArgument("export_blocks(): the model has no name, and another's would read it as its own. Give one: model=.")
    if not isinstance(block_size, int) or block_size < 1:
        raise BadArgument(f"export_blocks(): into blocks of {block_size!r}; block_size is 1 or more.")
    kinds: dict[tuple[object, ...], list[Source]] = {}
    for s in sources:
        _check(s, ids.size)
        kinds.setdefault((s.window, *((p.head_dim, p.format) for p in s.spec.planes)), []).append(s)
    return [_part(ids.size, same, model, block_size, format) for same in kinds.values()]


def _one_model(sources: Sequence[Source]) -> str:
    named = sorted({s.spec.model for s in sources if s.spec.model})
    if len(named) > 1:
        raise Incompatible(f"export_blocks(): sources are of models {named[0]!r} and {named[1]!r}; a handover is of one.")
    return named[0] if named else ""


def _check(s: Source, num_tokens: int) -> None:
    layers, size = s.model_layers, s.spec.block_size
    need = -(-num_tokens // size)
    if need > len(s.blocks):
        raise BadArgument(
            f"export_blocks(): a source has {len(s.blocks)} blocks of {size} for {num_tokens} tokens; they take {need}."
        )
    if len(layers) != s.spec.num_layers or list(layers) != sorted(set(layers)):
        raise BadArgument(
            f"export_blocks(): a source has {s.spec.num_layers} layers for {len(layers)} of the model: {str(layers)[:100]}. There "
            "are as many, each once and in their order."
        )
    check_ids("export_blocks()", "a source's blocks", s.blocks[:need], s.spec.num_blocks)
    first = s.first_held
    absent = [n for n, block in enumerate(s.blocks[:need]) if int(block) < 0 and (n + 1) * size > first]
    if not 0 <= s.first_token <= first < num_tokens or (first and not s.window) or absent:
        raise BadArgument(
            f"export_blocks(): layers {str(layers)[:100]} have a window of {s.window} and tokens from {first} of {num_tokens} on"
            + (f", but no block for {absent[0] * size} to {(absent[0] + 1) * size - 1}" if absent else "")
            + ". Only what lies before first_token, behind a window, may be absent."
        )


def _part(num_tokens: int, sources: list[Source], model: str, block_size: int, format: str) -> Part:
    layers = tuple(sorted({n for s in sources for n in s.model_layers}))
    specs = [s.spec for s in sources]
    head = min(s.head_start for s in specs)
    heads = max(s.head_start + s.num_kv_heads for s in specs) - head
    first_token = max(s.first_held for s in sources)
    first = first_token // block_size
    blocks = -(-num_tokens // block_size) - first
    spec = neutral(specs[0], num_blocks=blocks, block_size=block_size, format=format, model=model)
    spec = replace(spec, layer_start=0, num_layers=len(layers), head_start=head, num_kv_heads=heads)
    device = sources[0].buffers[0].device
    made = new_buffers(spec, device)
    tables: dict[_Table, list[Source]] = {}
    for s in sources:
        need = -(-num_tokens // s.spec.block_size)
        ids = tuple(int(n) for n in s.blocks[:need])
        tables.setdefault(_Table(ids, s.rope, s.spec.num_blocks, s.spec.block_size), []).append(s)
    dst = block_table([-1] * first + list(range(spec.num_blocks)))
    for table, same in tables.items():
        for (begin, end), runs in _runs(same, layers, model).items():
            if not format:
                require_one_scale("export_blocks", [(r.spec, r.source.buffers) for r in runs])
            convert(
                [t for r in runs for t in r.source.buffers],
                list(made),
                plan=plan([r.spec for r in runs], spec, layers=(begin, end), rope=(table.rope, "half")),
                src_blocks=block_table(table.blocks),
                dst_blocks=dst,
                seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            )
    host = tuple(moved(made, torch.device("cpu")))
    return Part(spec, layers, sources[0].window, first, host, first_token=first_token).cleared().sealed(num_tokens)


def _runs(sources: list[Source], layers: tuple[int, ...], model: str) -> dict[tuple[int, int], list[_Run]]:
    """The part's layers that these sources have, in runs, and who has them."""
    place = {n: i for i, n in enumerate(layers)}
    by_source: list[list[_Run]] = []
    for s in sources:
        at = [place[n] for n in s.model_layers]
        starts = [j for j in range(len(at)) if j == 0 or at[j] != at[j - 1] + 1]
        by_source.append([
            _Run(at[j], at[j] + end - j, replace(s.spec, layer_start=at[j] - j, model=model), s)
            for j, end in zip(starts, [*starts[1:], len(at)], strict=True)
        ])  # fmt: skip
    found: dict[tuple[int, int], list[_Run]] = {}
    runs = sorted((r for rs in by_source for r in rs), key=lambda r: (r.first, r.end))
    if any(len(rs) > 1 for rs in by_source):  # a spec is true for its run alone: run by run, each of all ranks
        for r in runs:
            found.setdefault((r.first, r.end), []).append(r)
        return found
    for r in runs:  # stages follow each other, and ranks stand side by side: one conversion for all that touch
        last = next(reversed(found), None)
        if last is None or r.first > last[1]:
            found[r.first, r.end] = [r]
        else:
            joined = found.pop(last)
            found[last[0], max(last[1], r.end)] = [*joined, r]
    return found
