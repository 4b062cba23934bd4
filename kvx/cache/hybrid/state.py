"""RequestState: all that a cache holds of one request, buffer by buffer, to go on elsewhere or later.

Every buffer has a name, "layer.3.window", and a line in the manifest. A whole state has the pages of entries; a checkpoint leaves
them out, being taken where blocks end: there tails are empty but for the overlap, and blocks are shared by their content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvx.cache.hybrid.cache import HybridCache, Request
from kvx.cache.hybrid.schema import HybridSchema
from kvx.cache.hybrid.store import LayerStore
from kvx.errors import BadArgument
from kvx.quant.rows import RowPages

VERSION = 1


@dataclass(frozen=True)
class RequestState:
    schema: HybridSchema
    length: int
    buffers: dict[str, Tensor]  # copies
    version: int = VERSION
    is_exact: bool = True  # False: a bounded replay left something out
    root: bytes = b""  # with extras: what its content hangs on besides its tokens, as a HybridPrefix names it
    extras: tuple[tuple[int, bytes], ...] = ()

    @property
    def has_entries(self) -> bool:
        return any(name.endswith(".entries") for name in self.buffers)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.buffers.values())

    def manifest(self) -> list[dict[str, object]]:
        """A line for each buffer: name, type, shape, bytes, and the format of its rows."""
        lines: list[dict[str, object]] = []
        for name, t in self.buffers.items():
            _, index, part = name.split(".")
            layer = self.schema.layers[int(index)]
            rows = {"window": layer.window_rows, "entries": layer.entry_rows, "index": layer.index_rows}.get(part, "")
            kind = str(t.dtype).removeprefix("torch.")
            lines.append({"name": name, "dtype": kind, "shape": list(t.shape), "bytes": t.numel() * t.element_size(), "rows": rows})
        return lines


def take_state(cache: HybridCache, request: Request, *, entries: bool = True) -> RequestState:
    """What the cache holds of a request. Without entries it is a checkpoint, and the request stands where a block ends."""
    cache.check_live("take_state", request)
    if not entries and request.length % cache.schema.block_tokens:
        raise BadArgument(
            f"take_state(): {request} is not where a block of {cache.schema.block_tokens} tokens ends; "
            "entries=True takes all of it."
        )
    if request.length < request.num_shared:
        raise BadArgument(
            f"take_state(): {request} computes tokens again, and its windows are whole only after {request.num_shared}; "
            "take its state then."
        )
    buffers: dict[str, Tensor] = {}
    for i, store in enumerate(cache.layers):
        for part, tensor in _slot_parts(store, request.slot, only_overlap=not entries):
            buffers[f"layer.{i}.{part}"] = tensor.clone()
        if entries:
            for part, pool in _pools(store):
                buffers[f"layer.{i}.{part}"] = pool.pages[cache.blocks(request).long()].clone()
    return RequestState(
        cache.schema, request.length, buffers, is_exact=request.is_exact, root=request.root, extras=tuple(request.extras)
    )


def put_state(cache: HybridCache, state: RequestState) -> Request:
    """A new request that goes on from a whole state. After an error its slot and blocks are free again."""
    check_state(cache, state)
    guard, request = cache._guard, None
    try:
        with guard.lock:
            request = cache.admit_request()
            _fill(cache, request, state)
        return request
    except BaseException:
        if request is not None:
            guard.is_torn = request.is_released = True
            cache._mend_now()
        raise


def _fill(cache: HybridCache, request: Request, state: RequestState) -> None:
    cache.give_blocks("put_state", [(request, state.length)])
    put_slot(cache, request, state)
    for i, store in enumerate(cache.layers):
        for part, pool in _pools(store):
            pool.pages[cache.blocks(request).long()] = state.buffers[f"layer.{i}.{part}"].to(cache.device)
    request.is_exact, request.root, request.extras = state.is_exact, state.root, list(state.extras)


def put_slot(cache: HybridCache, request: Request, state: RequestState) -> None:
    """Windows and tails alone."""
    for i, store in enumerate(cache.layers):
        for part, tensor in _slot_parts(store, request.slot, only_overlap=False):
            name = f"layer.{i}.{part}"
            if name in state.buffers:
                tensor.copy_(state.buffers[name])


def check_state(cache: HybridCache, state: RequestState) -> None:
    """Refuse what would be read as something else."""
    if state.version != VERSION:
        raise BadArgument(f"the state has version {state.version}; this library reads {VERSION}.")
    ours, theirs = cache.schema, state.schema
    if len(ours.layers) != len(theirs.layers):
        raise BadArgument(f"the state has {len(theirs.layers)} layers, the cache {len(ours.layers)}.")
    for i, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        differ = [name for name in vars(a) if getattr(a, name) != getattr(b, name)]
        if differ:
            name = differ[0]
            raise BadArgument(f"layer {i}: {name} is {getattr(b, name)!r} in the state and {getattr(a, name)!r} in the cache.")
    if (ours.block_tokens, ours.max_drafts) != (theirs.block_tokens, theirs.max_drafts):
        raise BadArgument(
            f"the state has blocks of {theirs.block_tokens} tokens and room for {theirs.max_drafts} drafts, the cache "
            f"{ours.block_tokens} and {ours.max_drafts}."
        )
    if not state.has_entries and any(layer.has_entries for layer in ours.layers):
        raise BadArgument("put_state(): the state is a checkpoint, without entries; HybridPrefix goes on from those.")
    takes = _whole_buffers(cache, state.length)
    for name in dict.fromkeys((*takes, *state.buffers)):
        got, want = state.buffers.get(name), takes.get(name, "not there")
        has = "not there" if got is None else _form(got.shape, got.dtype)
        if has != want:
            raise BadArgument(f"put_state(): buffer {name} is {has} in the state; after {state.length} tokens it is {want}.")


def _whole_buffers(cache: HybridCache, length: int) -> dict[str, str]:
    """Shape and type of each buffer of a request with so many tokens."""
    takes: dict[str, str] = {}
    for i, store in enumerate(cache.layers):
        for part, tensor in _slot_parts(store, 0, only_overlap=False):
            takes[f"layer.{i}.{part}"] = _form(tensor.shape, tensor.dtype)
        for part, pool in _pools(store):
            takes[f"layer.{i}.{part}"] = _form((cache.schema.blocks(length), pool.pages.shape[1]), pool.pages.dtype)
    return takes


def _form(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _pools(store: LayerStore) -> list[tuple[str, RowPages]]:
    """Of its own entries."""
    pools = (("entries", store.entries), ("index", store.index)) if store.schema.has_entries else ()
    return [(part, pool) for part, pool in pools if pool is not None]


def _slot_parts(store: LayerStore, slot: int, *, only_overlap: bool) -> list[tuple[str, Tensor]]:
    parts = [("window", store.window.pages[slot]), ("positions", store.window.positions[slot])]
    for name, tail in (("tail", store.tail), ("index_tail", store.index_tail)):
        if tail is not None and (tail.overlap or not only_overlap):
            parts.append((name, tail.state[slot]))
    return parts
