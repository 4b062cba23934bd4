"""Reading how vLLM's cache lies in memory: shape, strides and the declared layout of each registered tensor in, specs out.

Nothing is assumed: a shape that is not known is refused by a sentence. Plain facts in: vLLM is not imported here.

    0.26, 0.27   one tensor per layer, [block, head, token, K|V], strides after NHD or HND; MLA [block, token, latent]
    0.28 - 0.32  the same shape as views of one allocation, in one of six named layouts; MLA [block, 1, token, latent]
    CPU          the shape of those, other bytes inside (packing.py finds which)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvx.connector.groups import Group, Segment
from kvx.errors import Unsupported
from kvx.layout.engines import ENGINES
from kvx.spec import CacheSpec

# By name: the axes of one layer's view, outermost first. L is where layers stand among them; it decides the strides alone.
_ORDERS = {
    "LBNHC": "BNH",
    "LBHNC": "BHN",
    "LHBNC": "HBN",
    "BLHNC": "BHN",
    "BLNHC": "BNH",
    "BHLNC": "BHN",
    "NHD": "BNH",
    "HND": "BHN",
}
_WORDS = {"B": "block", "H": "head", "N": "token"}


@dataclass(frozen=True)
class TensorFacts:
    """A registered tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    element_bytes: int
    address: int  # of its first element; only distances count


def read_group(
    group: Group,
    tensors: Sequence[TensorFacts],  # of its layers, in order
    part_layers: Sequence[int],  # of the part that the group belongs to, in order
    *,
    num_blocks: int,  # of vLLM's tables
    layout: str = "",  # the declared name, "" where a version has none
    packing: str = "",  # CPU: the row of kvx/layout/engines.py whose bytes are inside; "": as the shape says
) -> list[Segment]:
    """The group's layers in runs that are adjacent in the part. Unsupported with the first fact that is not known."""
    views = [_view(group, name, t, num_blocks, layout) for name, t in zip(group.layer_names, tensors, strict=True)]
    if len(set(views)) > 1:
        odd = next(n for n, v in enumerate(views) if v != views[0])
        raise _unknown(group.layer_names[odd], tensors[odd], f"it lies as no other layer of its group: {views[odd]}, {views[0]}")
    view = views[0]
    where = [part_layers.index(n) for n in group.layers]
    segments = []
    for first, end in _runs(where):
        count = end - first
        text, block_bytes, is_whole = _layout(group, tensors[first:end], view, packing, group.layer_names[first], len(tensors))
        spec = CacheSpec(
            num_blocks=view.num_blocks,
            block_size=view.block_size,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            v_head_dim=group.v_head_dim,
            layout=text,
            format=group.format,
            num_layers=count,
            layer_start=where[first],
            block_bytes=block_bytes,
        )
        segments.append(Segment(group, group.layers[first:end], spec, first, is_whole))
    return segments


@dataclass(frozen=True)
class _View:
    """One layer's tensor, as [block, head, token, row]."""

    num_blocks: int
    block_size: int
    order: str  # of B, H and N, outermost first
    block: int  # strides in elements
    head: int
    token: int
    row: int  # elements


def _view(group: Group, name: str, t: TensorFacts, num_blocks: int, layout: str) -> _View:
    shape, strides = t.shape, t.strides
    if layout and layout not in _ORDERS:
        raise _unknown(name, t, f"the layout is called {layout!r}; known are {', '.join(_ORDERS)}")
    if group.is_latent and len(shape) == 3:  # to 0.27: no axis of heads
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], strides[0], *strides[1:])
    if len(shape) != 4:
        raise _unknown(name, t, "it has not the four axes [block, head, token, row] of vLLM 0.26 and later")
    blocks, heads, tokens, row = shape
    want = group.head_dim if group.is_latent else group.head_dim + (group.v_head_dim or group.head_dim)
    if heads != group.num_kv_heads:
        raise _unknown(name, t, f"its second axis has {heads} for {group.num_kv_heads} KV heads")
    if row != want:
        raise _unknown(name, t, f"a row has {row} elements where K and V make {want}")
    if tokens < 1 or group.block_size % tokens or blocks != num_blocks * (group.block_size // tokens):
        raise _unknown(name, t, f"{blocks} blocks of {tokens} tokens are not vLLM's {num_blocks} of {group.block_size}")
    if strides[3] != 1:
        raise _unknown(name, t, "the elements of a row are not side by side")
    sizes = {"B": blocks, "H": heads, "N": tokens}
    by_name = dict(zip("BHN", strides[:3], strict=True))
    order = "".join(sorted("BHN", key=lambda a: (-by_name[a], "BHN".index(a))))
    told = _ORDERS.get(layout, "")
    # An axis of one element stands anywhere. A latent row has no head, so a name says nothing of it.
    seen, said = ("".join(a for a in o if sizes[a] > 1) for o in (order, told or order))
    if told and not group.is_latent and seen != said:
        raise _unknown(name, t, f"its strides say {seen} (outermost first) and its layout {layout} says {said}")
    order = told if told and not group.is_latent else order
    if sizes["H"] == 1:
        order = "BHN"  # as good as any: a head of one has no stride
        by_name["H"] = by_name["N"] * tokens
    return _View(blocks, tokens, order, by_name["B"], by_name["H"], by_name["N"], row)


def _layout(
    group: Group, tensors: Sequence[TensorFacts], view: _View, packing: str, name: str, num_layers: int
) -> tuple[str, int, bool]:
    """The layout's text, bytes from block to block where they are padded, and whether one buffer holds all layers."""
    t = tensors[0]
    inner = {"BHN": view.token == view.row and view.head == view.block_size * view.row,
             "BNH": view.head == view.row and view.token == group.num_kv_heads * view.row,
             "HBN": view.token == view.row and view.block == view.block_size * view.row
             and view.head == view.num_blocks * view.block}[view.order]  # fmt: skip
    content = group.num_kv_heads * view.block_size * view.row
    if packing:
        if view.order != "BHN" or not inner or view.block != content or group.v_head_dim:
            raise _unknown(name, t, "a CPU cache has heads outside tokens, without gaps, and V as long as K")
        return ENGINES[packing].layout, 0, False
    row = "dim" if group.is_latent else "(kv dim)"
    if group.is_latent:
        if not inner or view.block < content:
            raise _unknown(name, t, "its rows of tokens do not follow each other")
        return f"layer | block token head {row}", _padding(view.block, content, t), False
    axes = [_WORDS[a] for a in view.order]
    if inner and (view.order == "HBN" or view.block >= content):
        padding = 0 if view.order == "HBN" else _padding(view.block, content, t)
        return f"layer | {' '.join(axes)} {row}", padding, False
    # BHLNC: a head's layers stand together, so that one layer alone has gaps. All of them from the first on have none.
    step = view.block_size * view.row
    distances = {b.address - a.address for a, b in pairwise(tensors)}
    together = view.order == "BHN" and view.token == view.row and len(tensors) == num_layers
    if together and view.head == num_layers * step and distances <= {step * t.element_bytes} and view.block >= content * num_layers:
        return f"block head layer token {row}", _padding(view.block, content * num_layers, t), True
    raise _unknown(name, t, "its strides leave gaps that no known layout has")


def _padding(block: int, content: int, t: TensorFacts) -> int:
    return 0 if block == content else block * t.element_bytes


def _runs(where: Sequence[int]) -> list[tuple[int, int]]:
    """First and end of runs of numbers that follow each other."""
    starts = [n for n in range(len(where)) if n == 0 or where[n] != where[n - 1] + 1]
    return list(zip(starts, [*starts[1:], len(where)], strict=True))


def _unknown(name: str, t: TensorFacts, why: str) -> Unsupported:
    return Unsupported(
        f"KvxConnector: the cache of {name} is {list(t.shape)} with strides {list(t.strides)}: {why}. It was not read."
    )
