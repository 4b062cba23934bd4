"""RequestState: all that a cache holds of one request, buffer by buffer, to go on elsewhere or later.

Every buffer has a name, "layer.3.window", and a line in the manifest. A whole state has the pages of entries; a checkpoint leaves
them out, being taken where blocks end: there tails are empty but for the overlap, and blocks are shared by their content.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvx.cache.hybrid.cache import HybridCache, Request
from kvx.cache.hybrid.schema import HybridSchema
from kvx.cache.hybrid.store import LayerStore
from kvx.errors import BadArgument

VERSION = 1


@dataclass(frozen=True)
class RequestState:
    schema: HybridSchema
    length: int
    buffers: dict[str, Tensor]  # copies
    version: int = VERSION

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
    buffers: dict[str, Tensor] = {}
    for i, store in enumerate(cache.layers):
        for part, tensor in _slot_parts(store, request, only_overlap=not entries):
            buffers[f"layer.{i}.{part}"] = tensor.clone()
        if entries and store.schema.has_entries:
            for part, pool in (("entries", store.entries), ("index", store.index)):
                if pool is not None:
                    buffers[f"layer.{i}.{part}"] = pool.pages[cache.blocks(request).long()].clone()
    return RequestState(cache.schema, request.length, buffers)


def put_state(cache: HybridCache, state: RequestState) -> Request:
    """A new request that goes on from a whole state. OutOfBlocks changes nothing."""
    check_state(cache, state)
    if not state.has_entries and any(layer.has_entries for layer in cache.schema.layers) and cache.schema.blocks(state.length):
        raise BadArgument("put_state(): the state is a checkpoint, without entries; HybridPrefix goes on from those.")
    request = cache.admit_request()
    try:
        cache.give_blocks("put_state", [(request, state.length)])
    except Exception:
        cache.release_request(request)
        raise
    put_slot(cache, request, state)
    for i, store in enumerate(cache.layers):
        for part, pool in (("entries", store.entries), ("index", store.index)):
            pages = state.buffers.get(f"layer.{i}.{part}")
            if pool is not None and pages is not None:
                pool.pages[cache.blocks(request).long()] = pages.to(cache.device)
    return request


def put_slot(cache: HybridCache, request: Request, state: RequestState) -> None:
    """Windows and tails alone."""
    for i, store in enumerate(cache.layers):
        for part, tensor in _slot_parts(store, request, only_overlap=False):
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


def _slot_parts(store: LayerStore, request: Request, *, only_overlap: bool) -> list[tuple[str, Tensor]]:
    slot = request.slot
    parts = [("window", store.window.pages[slot]), ("positions", store.window.positions[slot])]
    for name, tail in (("tail", store.tail), ("index_tail", store.index_tail)):
        if tail is not None and (tail.overlap or not only_overlap):
            parts.append((name, tail.state[slot]))
    return parts
