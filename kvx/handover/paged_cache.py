"""Handovers of a PagedCache: a sequence out of it, and one into it, which goes on there and whose whole blocks others find.

K and V become parts in the neutral layout. Entries and states move as they are, block for block, into any layout of the same
planes: whoever reads them has the same layers. A state stands where the handover's tokens end, so a sequence takes it there or not
at all; its part says that position too.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvx.cache.groups import LayerGroup, Member
from kvx.cache.kinds import State
from kvx.cache.paged import PagedCache
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument, Incompatible, Unsupported, a_type
from kvx.handover.facts import few, is_state_part
from kvx.handover.handover import Handover
from kvx.handover.layer_blocks import (
    LayerPlace,
    LayerTensors,
    num_usable,
    places,
    require_layers,
    require_tokens,
    sources,
    write_layers,
)
from kvx.handover.memory import moved, new_buffers
from kvx.handover.part import Part
from kvx.handover.plane_parts import differing_plane
from kvx.handover.source import Source, export_parts
from kvx.layout.axes import Layout
from kvx.layout.plan import plan
from kvx.layout.views import layer_views
from kvx.ops.move.convert import convert
from kvx.spec import CacheSpec, Spec, StateSpec


def read_sequence(cache: PagedCache, seq: Sequence, *, model: str, block_size: int = 16, format: str = "") -> Handover:
    """All of a sequence's tokens that are in the cache. One whose content hangs on more than its tokens is refused."""
    _require_plain("read_sequence", cache, seq)
    _require_whole("read_sequence", cache, seq)
    found: list[Source] = []
    planes: list[Part] = []
    for g, group in enumerate(cache.groups):
        blocks = cache.blocks(seq, g)
        if isinstance(group.spec, CacheSpec):
            if group.blocks_of.gives_back and not group.window and (blocks < 0).any():
                raise Unsupported(
                    f"read_sequence(): group {group.name!r} is {group.blocks_of} and has given blocks back; a handover knows "
                    "windows and no chunks. It was not read."
                )
            held = np.flatnonzero(blocks >= 0)
            first = int(held[0]) * cache.block_size if len(held) else 0
            found += sources(_layers(cache, g), blocks.tolist(), num_tokens=seq.length, window=group.window, first_token=first)
        elif len(blocks):
            planes += [_read_planes(cache, seq, g, member, blocks.tolist(), model) for member in group.members]
    tokens = seq.tokens[: seq.length]
    kv = export_parts(tokens, found, model=model, block_size=block_size, format=format) if found else []
    return Handover(tokens, (*kv, *planes))


def _require_plain(call: str, cache: PagedCache, seq: Sequence) -> None:
    if seq.extras or seq.extra:
        raise Unsupported(
            f"{call}(): {seq} has an extra (a LoRA, an image): a handover names K and V by model and tokens alone, and another "
            "sequence of the same tokens would be given these. It was not read."
        )


def _require_whole(call: str, cache: PagedCache, seq: Sequence) -> None:
    if not seq.is_exact:
        raise Unsupported(
            f"{call}(): {seq} was computed on a state that was replayed in part; it cannot be shared. Recompute all of it."
        )
    if seq.length < max(seq.whole_from, seq.num_ahead * cache.block_size):
        raise BadArgument(
            f"{call}(): {seq} computes tokens again, and its state is whole only after {seq.num_ahead * cache.block_size}; "
            "hand it over then."
        )


def _read_planes(cache: PagedCache, seq: Sequence, group: int, member: Member, blocks: list[int], model: str) -> Part:
    """Blocks of entries, or the one of a state, of the layers that store the same planes."""
    if not model:
        raise BadArgument("read_sequence(): the model has no name, and another's would read it as its own. Give one: model=.")
    is_state, layers = cache.groups[group].blocks_of.has_state, tuple(sorted(member.layers))
    spec = member.spec.replaced(
        num_blocks=len(blocks), num_layers=len(layers), layout=_states(member).block_layout, model=model, block_bytes=0,
        layer_start=0, positions=(seq.length,) if is_state else (),
    )  # fmt: skip
    made = new_buffers(spec, cache.device)
    for run in _runs(cache, group, member, {layer: LayerPlace(0, n) for n, layer in enumerate(layers)}):
        convert(
            run.tensors, list(made), plan=plan(run.spec.replaced(model=model), spec, layers=run.layers), src_blocks=blocks,
            dst_blocks=list(range(len(blocks))),
        )  # fmt: skip
    host = tuple(moved(made, torch.device("cpu")))
    part = Part(spec, layers, 0, 0, host, block_tokens=0 if is_state else cache.block_size)
    if not is_state:
        _clear_unwritten(cache, seq, part)
    return part.sealed(seq.length)


def _clear_unwritten(cache: PagedCache, seq: Sequence, part: Part) -> None:
    """What stands in a page where no entry is yet is of whoever had the block before."""
    for layer, views in zip(part.layers, layer_views(list(part.buffers), part.spec), strict=True):
        for view in views:
            pages = view.tensor if isinstance(view.tensor, list) else list(view.tensor)
            for block, page in enumerate(pages):
                for start, end in cache.unwritten(layer, view.plane, block, seq.length):
                    page.view(torch.uint8).flatten()[start:end] = 0


def write_sequence(
    cache: PagedCache,
    seq: Sequence,  # of the handover's tokens, or of more that begin with them
    handover: Handover,
    *,
    model: str,  # whose cache it is; a handover of another is refused
    is_last_left: bool = True,  # the sequence's last token, which an engine computes to get the next
) -> None:
    """Room for the handover's tokens, and their content in it. What the cache had of them stays.

    The handover is checked before anything changes, and OutOfBlocks changes nothing.
    """
    call = "write_sequence"
    if not isinstance(handover, Handover):
        raise BadArgument(f"{call}(): handover is {a_type(handover)}; it must be a kvx.handover.Handover.")
    _require_plain(call, cache, seq)
    handover.check()
    _require_geometry(call, cache, handover, model)
    n = num_usable(call, handover, seq.tokens, is_last_left=is_last_left)
    for group in cache.groups:
        for layer in group.layers if isinstance(group.spec, CacheSpec) else ():
            require_tokens(call, handover, layer, group.window, n)
    if any(map(is_state_part, handover.parts)) and n != handover.num_tokens:
        raise Incompatible(
            f"{call}(): the handover has a state, which stands after its {handover.num_tokens} tokens; {seq} would go on after "
            f"{n}. Give it a sequence with one token more. It was not read."
        )
    found = seq.length // cache.block_size
    if seq.length >= n:
        return
    before = seq.length, seq.num_tokens
    cache.extend(seq, n - before[0])
    try:
        _write_groups(cache, seq, handover, n, found)
    except BaseException:  # nothing may be found, or computed on, that was not written
        cache.abandon(seq, *before)
        raise


def _write_groups(cache: PagedCache, seq: Sequence, handover: Handover, n: int, found: int) -> None:
    """The content of every group's blocks, after the first `found`; then they have names."""
    firsts, where = [], places(handover)
    for g, group in enumerate(cache.groups):
        blocks = cache.blocks(seq, g)
        if not isinstance(group.spec, CacheSpec):
            is_state = group.blocks_of.has_state
            if not is_state:
                blocks[: max(found, seq.num_ahead)] = -1
            for member in group.members if len(blocks) else ():
                for run in _runs(cache, g, member, _places_of(handover, member, is_state)):
                    handover.write_planes(run.part, run.tensors, run.spec, blocks.tolist())
            firsts.append(0)
            continue
        blocks[:found] = -1  # others may be reading them
        write_layers(handover, _layers(cache, g), blocks.tolist(), num_tokens=n)
        firsts.append(max(handover.parts[where[layer].part].first_token for layer in group.layers))
    states = [kind for kind in cache.kinds if isinstance(kind, State)]
    if n % cache.block_size == 0 and any(kind.snapshot_every or kind.snapshot_at_end for kind in states):
        seq.snapshot_at = tuple(sorted({*seq.snapshot_at, n // cache.block_size}))  # the end of somebody's prompt, as a rule
    cache.adopt(seq, firsts)


def _require_geometry(call: str, cache: PagedCache, handover: Handover, model: str) -> None:
    """Incompatible where it is of another model, or of other layers, heads or planes."""
    handover.require(model=model)
    kv = [group for group in cache.groups if isinstance(group.spec, CacheSpec)]
    require_layers(call, handover, [layer for group in kv for layer in group.layers])
    where = places(handover)
    for group in kv:
        s = group.spec.of_kv
        for part in {where[layer].part for layer in group.layers}:
            handover.require(part, num_kv_heads=s.num_kv_heads, head_start=s.head_start, head_dim=s.head_dim)
            handover.require(part, v_head_dim=s.v_head_dim or s.head_dim)
    others = [(group, member) for group in cache.groups if group not in kv for member in group.members]
    for group, member in others:
        _require_planes(call, handover, group, member, cache.block_size)
    for other in (p for p in handover.parts if isinstance(p.spec, StateSpec)):
        mine = [m for g, m in others if g.blocks_of.has_state == is_state_part(other) and _names(m.spec) == _names(other.spec)]
        left = set(other.layers) - {layer for member in mine for layer in member.layers}
        if left:
            raise Incompatible(
                f"{call}(): the handover has {', '.join(_names(other.spec))} of layers {few(tuple(sorted(left)))}, and this cache "
                "does not. It was not read."
            )


def _require_planes(call: str, handover: Handover, group: LayerGroup, member: Member, block_size: int) -> None:
    """Incompatible with the first plane that differs."""
    is_state = group.blocks_of.has_state
    need = 1 if is_state else group.blocks_of.num_blocks(handover.num_tokens, block_size)
    if not need:
        return
    where = _places_of(handover, member, is_state)
    for at in sorted({place.part for place in where.values()}):
        part = handover.parts[at]
        if part.spec.num_blocks != need or part.block_tokens != (0 if is_state else block_size):
            raise Incompatible(
                f"{call}(): part {at} of the handover has {part.spec.num_blocks} blocks of {part.block_tokens} tokens; here "
                f"{handover.num_tokens} tokens are {need} blocks of {block_size}. It was not read."
            )
        if sentence := differing_plane(_states(member), part.spec, whole=True):
            raise Incompatible(f"{call}(): {sentence}, of layers {few(member.layers)}. It was not read.")


def _places_of(handover: Handover, member: Member, is_state: bool) -> dict[int, LayerPlace]:
    """Where the handover has each layer of a member."""
    names = _names(member.spec)
    found = {
        layer: LayerPlace(p, n)
        for p, part in enumerate(handover.parts)
        if isinstance(part.spec, StateSpec) and is_state_part(part) == is_state and _names(part.spec) == names
        for n, layer in enumerate(part.layers)
    }
    missing = tuple(layer for layer in member.layers if layer not in found)
    if missing:
        raise Incompatible(f"handover: no part has {', '.join(names)} of layers {few(missing)}. It was not read.")
    return {layer: found[layer] for layer in member.layers}


def _names(spec: Spec) -> list[str]:
    return [p.name for p in spec.planes]


def _states(member: Member) -> StateSpec:
    assert isinstance(member.spec, StateSpec)
    return member.spec


class _Run(NamedTuple):
    """Layers in a row of a part, and of the cache."""

    part: int
    tensors: list[Tensor]
    spec: StateSpec  # layers counted within the part

    @property
    def layers(self) -> tuple[int, int]:
        return self.spec.layer_start, self.spec.layer_start + self.spec.num_layers


def _runs(cache: PagedCache, group: int, member: Member, where: dict[int, LayerPlace]) -> list[_Run]:
    """A member's layers: in a row where its layout has every layer in allocations of its own, else one by one."""
    is_apart = Layout.parse(member.spec.layout).has_layers_apart
    runs: list[list[int]] = []
    for layer in sorted(where):
        last = where[runs[-1][-1]] if runs else None
        if is_apart and last is not None and where[layer] == (last.part, last.layer + 1):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    out = []
    for run in runs:
        tensors: Listing[Tensor] = [t for layer in run for t in cache.planes(layer, group).tensors]
        first = where[run[0]]
        out.append(_Run(first.part, list(tensors), _states(member).replaced(num_layers=len(run), layer_start=first.layer)))
    return out


def _layers(cache: PagedCache, group: int) -> list[LayerTensors]:
    handles = [(i, cache.layer(i)) for i in cache.groups[group].layers]
    return [LayerTensors(i, layer.tensors, layer.spec) for i, layer in handles]
