"""Handovers of a PagedCache: a sequence out of it, and one into it, which goes on there and whose whole blocks others find.

K and V become parts in the neutral layout. Entries and states move as they are, block for block: whoever reads them has the same
layers. A state stands where the handover's tokens end, so a sequence takes it there or not at all.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvx.cache.groups import LayerGroup, Member
from kvx.cache.paged import PagedCache
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument, Incompatible, Unsupported
from kvx.handover.facts import is_state_part
from kvx.handover.handover import Handover
from kvx.handover.layer_blocks import (
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
from kvx.handover.source import Source, export_parts
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
    if planes and not model:
        raise BadArgument("read_sequence(): the model has no name, and another's would read it as its own. Give one: model=.")
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
            f"{call}(): {seq} was computed on a state that was replayed in part; it is nobody else's. Compute it whole."
        )
    if seq.length < max(seq.whole_from, seq.num_ahead * cache.block_size):
        raise BadArgument(
            f"{call}(): {seq} computes tokens again, and its state is whole only after {seq.num_ahead * cache.block_size}; "
            "hand it over then."
        )


def _read_planes(cache: PagedCache, seq: Sequence, group: int, member: Member, blocks: list[int], model: str) -> Part:
    """Blocks of entries, or the one of a state, of the layers that store the same planes."""
    buffers, spec = _planes(cache, group, member)
    assert isinstance(spec, StateSpec)
    neutral = spec.replaced(num_blocks=len(blocks), layout=spec.block_layout, model=model, block_bytes=0)
    made = new_buffers(neutral, cache.device)
    convert(
        list(made), buffers, plan=plan(spec.replaced(model=model), neutral), src_blocks=blocks, dst_blocks=list(range(len(blocks)))
    )
    host = tuple(moved(made, torch.device("cpu")))
    is_state = cache.groups[group].blocks_of.has_state
    part = Part(neutral, member.layers, 0, 0, host, block_tokens=0 if is_state else cache.block_size)
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
                buffers, spec = _planes(cache, g, member)
                handover.write_planes(_part_of(handover, member, is_state), buffers, spec, blocks.tolist())
            firsts.append(0)
            continue
        blocks[:found] = -1  # others may be reading them
        write_layers(handover, _layers(cache, g), blocks.tolist(), num_tokens=n)
        firsts.append(max(handover.parts[where[layer].part].first_token for layer in group.layers))
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
    count = sum(isinstance(p.spec, StateSpec) for p in handover.parts)
    if count > len(others):
        raise Incompatible(
            f"{call}(): the handover has {count} parts of entries and states, this cache {len(others)}. It was not read."
        )


def _require_planes(call: str, handover: Handover, group: LayerGroup, member: Member, block_size: int) -> None:
    """Incompatible with the first plane that differs."""
    is_state = group.blocks_of.has_state
    if not is_state and not group.blocks_of.num_blocks(handover.num_tokens, 1):
        return
    at = _part_of(handover, member, is_state)
    theirs = handover.parts[at].spec
    need = 1 if is_state else group.blocks_of.num_blocks(handover.num_tokens, block_size)
    if theirs.num_blocks != need or handover.parts[at].block_tokens != (0 if is_state else block_size):
        raise Incompatible(
            f"{call}(): part {at} of the handover has {theirs.num_blocks} blocks of {handover.parts[at].block_tokens} tokens; here "
            f"{handover.num_tokens} tokens are {need} blocks of {block_size}. It was not read."
        )
    if handover.parts[at].layers != member.layers:
        raise Incompatible(
            f"{call}(): part {at} of the handover is of layers {handover.parts[at].layers}; here {group.name} of such planes are "
            f"of layers {member.layers}. It was not read."
        )
    for a, b in zip(member.spec.planes, theirs.planes, strict=False):
        if a != b:
            raise Incompatible(
                f"{call}(): plane {a.name} of layers {member.layers} is {_form(b)} there, {_form(a)} here. It was not read."
            )


def _form(plane: object) -> str:
    name, axes, form = (getattr(plane, field) for field in ("name", "axes", "format"))
    return f"{name} {form.name} {' x '.join(f'{axis} {size}' for axis, size in axes)}"


def _part_of(handover: Handover, member: Member, is_state: bool) -> int:
    for n, part in enumerate(handover.parts):
        is_it = isinstance(part.spec, StateSpec) and is_state_part(part) == is_state and member.layers[0] in part.layers
        if is_it and [p.name for p in part.spec.planes] == [p.name for p in member.spec.planes]:
            return n
    names = ", ".join(p.name for p in member.spec.planes)
    raise Incompatible(f"handover: no part has {names} of layers {member.layers}. It was not read.")


def _planes(cache: PagedCache, group: int, member: Member) -> tuple[list[Tensor], Spec]:
    handles = [cache.planes(i, group) for i in member.layers]
    return [t for layer in handles for t in layer.tensors], member.spec.replaced(num_layers=len(handles))


def _layers(cache: PagedCache, group: int) -> list[LayerTensors]:
    handles = [(i, cache.layer(i)) for i in cache.groups[group].layers]
    return [LayerTensors(i, layer.tensors, layer.spec) for i, layer in handles]
