"""Hybrid models: a memory of llama.cpp, with K/V of windows or recurrent states beside those of all tokens, to and from a handover.

A state's position and every sum in it stay as they are. Of a window a server wants two cells more than the next token sees; where
a handover has none, they are zeros, which every later token masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvx.adapters.llama_cpp.checkpoints import Checkpoint
from kvx.adapters.llama_cpp.ggml_rows import row_elements
from kvx.adapters.llama_cpp.kinds import ITEM_BYTES
from kvx.adapters.llama_cpp.memory import GgmlRows, KvCache, KvKind, Memory, Recurrent
from kvx.adapters.llama_cpp.model import LayerRows, StateModel
from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument, Incompatible, Unsupported
from kvx.handover import Handover, Part, Source
from kvx.handover.facts import few, is_state_part
from kvx.handover.layer_blocks import places, require_layers, require_tokens
from kvx.handover.memory import new_buffers
from kvx.handover.plane_parts import differing_plane
from kvx.handover.source import export_parts
from kvx.layout import engine
from kvx.layout.buffers import allocate_buffers, bytes_of
from kvx.layout.plan import plan
from kvx.layout.state_rows import state_row
from kvx.ops.move.convert import convert
from kvx.spec import CacheSpec, Format, StateSpec

_F32 = 0  # ggml's number of it
_WIDE = Format.named("f32")


def export_memory(memory: Memory, tokens: ArrayLike, model: StateModel, *, block_size: int, format: str) -> Handover:
    ids = token_ids("export_state()", tokens, least=1)
    _require_memory(memory, len(ids), model)
    found = []
    for cache, rows in zip(memory.caches, model.rows, strict=True):
        exact = _exact(cache)
        spec = _cell_spec(model, rows, exact.kind.k, len(cache.positions))
        behind = int(cache.positions[0])
        buffers = [_bytes(r.data) for pair in zip(exact.k, exact.v, strict=True) for r in pair]
        blocks = [-1] * behind + list(range(len(cache.positions)))
        found.append(Source(buffers, spec, blocks, rows.layers, rows.window, behind, model.rope))
    kv = export_parts(ids, found, model=model.name, block_size=block_size, format="")
    states = [_state_part(memory.recurrent, model, len(ids))] if memory.recurrent is not None else []
    handover = Handover(ids, (*kv, *states))
    # Pairs turn in rows that keep their format, so that is a step of its own.
    return handover.convert(format=format) if format else handover


def import_memory(
    handover: Handover,
    model: StateModel,
    kinds: Sequence[KvKind],  # of each cache, as the server keeps it
    version: int,
) -> tuple[Memory, list[Checkpoint]]:
    """With the checkpoints that a server needs to go on from it."""
    require_hybrid(handover, model)
    if len(kinds) != len(model.rows):
        raise Incompatible(
            f"import_state(): the engine keeps {len(kinds)} K/V caches; model {model.name!r} has {len(model.rows)}. Nothing was "
            "written."
        )
    caches = tuple(_cache(handover, model, rows).to(kind) for rows, kind in zip(model.rows, kinds, strict=True))
    memory = Memory(version, caches, _recurrent(handover, model) if model.planes else None)
    window = caches[1:]
    # A window that still reaches the beginning: the server goes back to a checkpoint, and computes the last token again.
    is_short = bool(window) and window[0].positions[0] == 0 and version >= 4
    return memory, [Checkpoint(handover.num_tokens, replace(memory, caches=window))] if is_short else []


def require_hybrid(handover: Handover, model: StateModel) -> None:
    """Whole, and of this model: raises before anything is read."""
    call = "import_state"
    entries = next((p for p in handover.parts if p.block_tokens), None)
    if entries is not None:
        raise Unsupported(f"{call}(): the handover has entries of layers {few(entries.layers)}; llama.cpp's states have none.")
    handover.check()
    handover.require(model=model.name)
    require_layers(call, handover, [n for rows in model.rows for n in rows.layers])
    where = places(handover)
    for rows in model.rows:
        for layer in rows.layers:
            at = where[layer].part
            handover.require(at, num_kv_heads=rows.num_kv_heads, head_start=0, head_dim=rows.head_dim, v_head_dim=rows.head_dim)
            require_tokens(call, handover, layer, rows.window, handover.num_tokens)
    here = {n: part for part in handover.parts if is_state_part(part) for n in part.layers}
    if sorted(here) != list(model.state_layers):
        odd = min(set(here) ^ set(model.state_layers))
        raise Incompatible(
            f"{call}(): {'the handover' if odd in here else 'the model'} has a state of layer {odd}, and "
            f"{'the model' if odd in here else 'the handover'} does not. It was not read."
        )
    for part in handover.parts:
        if is_state_part(part) and (sentence := differing_plane(_spec_of(model), _widened(part.spec), whole=True)):
            raise Incompatible(f"{call}(): {sentence}, of layers {few(part.layers)}. It was not read.")


def _require_memory(memory: Memory, num_tokens: int, model: StateModel) -> None:
    """Incompatible unless a memory is of this model and of so many tokens."""
    call = "export_state()"
    if len(memory.caches) != len(model.rows) or (memory.recurrent is None) != (not model.planes):
        raise Incompatible(
            f"{call}: {len(memory.caches)} K/V caches and {'a' if memory.recurrent else 'no'} recurrent state; model "
            f"{model.name!r} has {len(model.rows)} and {'one' if model.planes else 'none'}. It was not read."
        )
    if memory.num_tokens != num_tokens:
        raise BadArgument(f"{call}: {num_tokens} tokens; the state is one after {memory.num_tokens}.")
    for cache, rows in zip(memory.caches, model.rows, strict=True):
        elements = {row_elements(r.type, r.data.shape[1]) for r in (*cache.k, *cache.v)}
        want = rows.num_kv_heads * rows.head_dim
        if (len(cache.k), len(cache.v)) != (len(rows.layers),) * 2 or elements != {want}:
            raise Incompatible(
                f"{call}: K of {len(cache.k)} layers and V of {len(cache.v)}, rows of {sorted(elements)} elements; model "
                f"{model.name!r} has {len(rows.layers)} layers with a window of {rows.window}, in rows of {want}. It was not read."
            )
        if cache.extra.shape[1]:
            raise Unsupported(
                f"{call}: positions have {1 + cache.extra.shape[1]} axes (M-RoPE); those of one axis are handed over."
            )
        if int(cache.positions[-1]) + 1 != num_tokens:
            raise Unsupported(f"{call}: a cache ends at position {cache.positions[-1]} of {num_tokens} tokens. It was not read.")


def _exact(cache: KvCache) -> KvCache:
    """K and V of one type, without the rotation before quantising: as they are, or in f32."""
    kind = cache.kind
    if kind.k == kind.v and kind.k in ITEM_BYTES:
        return cache
    return cache.to(replace(kind, k="f32", v="f32", k_rotation=0, v_rotation=0))


def _cell_spec(model: StateModel, rows: LayerRows, format: str, num_cells: int) -> CacheSpec:
    """A cache's rows as blocks of one token: a window begins at any position."""
    spec = engine("llama_cpp").spec(
        num_layers=len(rows.layers), num_blocks=num_cells, block_size=1, num_kv_heads=rows.num_kv_heads, head_dim=rows.head_dim,
        format=format,
    )  # fmt: skip
    return replace(spec, model=model.name)


def _cache(handover: Handover, model: StateModel, rows: LayerRows) -> KvCache:
    """The handover's K and V of these layers, in its own format."""
    n, where = handover.num_tokens, places(handover)
    first = max(0, n - rows.window - 1) if rows.window else 0
    format = handover.parts[where[rows.layers[0]].part].kv.format
    if format not in ITEM_BYTES:
        handover, format = handover.convert(format="f32"), "f32"
    spec = _cell_spec(model, rows, format, n - first)
    buffers = allocate_buffers(spec)
    for place, layer in enumerate(rows.layers):  # engines may have split them over several parts
        at = where[layer]
        one = replace(spec, num_layers=1, layer_start=at.layer)
        blocks = [-1] * first + list(range(n - first))
        handover.write(at.part, buffers[2 * place : 2 * place + 2], one, blocks, rope=model.rope)
    k, v = (tuple(GgmlRows(format, _rows(t, n - first)) for t in buffers[i::2]) for i in (0, 1))
    positions = np.arange(first, n, dtype=np.int32)
    return KvCache(KvKind(format, format), positions, np.zeros((n - first, 0), np.int32), k, v)


def _state_part(found: Recurrent, model: StateModel, num_tokens: int) -> Part:
    if found.position + 1 != num_tokens or found.num_model_layers != model.num_layers:
        raise Incompatible(
            f"export_state(): a recurrent state at position {found.position} of {found.num_model_layers} layers; the sequence has "
            f"{num_tokens} tokens, and model {model.name!r} {model.num_layers} layers. It was not read."
        )
    here = state_row("llama_cpp").spec(model.planes, num_blocks=1, num_layers=len(model.state_layers))
    sizes, count = [p.num_rows * p.row_bytes for p in model.planes], len(model.state_layers)
    want = [(_F32, size) for size in (*sizes, 0)[:2] for _ in range(count)]
    got = [(type_, len(data)) for type_, data in found.planes]
    if got != want:
        raise Incompatible(
            f"export_state(): planes have (ggml type, bytes) {sorted(set(got))}, {len(got)} in all; of model {model.name!r} they "
            f"have {sorted(set(want))}, {len(want)} in all. It was not read."
        )
    planes = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for _, data in found.planes if data]
    by_layer = [planes[p * count + layer] for layer in range(count) for p in range(len(sizes))]
    spec = _spec_of(model).replaced(positions=(num_tokens,))
    made = new_buffers(spec)
    convert(by_layer, list(made), plan=plan(here.replaced(model=model.name), spec))
    return Part(spec, model.state_layers, 0, 0, made).sealed(num_tokens)


def _recurrent(handover: Handover, model: StateModel) -> Recurrent:
    handover = handover.convert(state_format="f32")  # every number of 16 bits is one of f32
    row = state_row("llama_cpp").spec(model.planes, num_blocks=1, num_layers=1)
    planes: list[list[bytes]] = [[], []]
    at = {n: (p, i) for p, part in enumerate(handover.parts) if is_state_part(part) for i, n in enumerate(part.layers)}
    for layer in model.state_layers:
        part, place = at[layer]
        buffers = allocate_buffers(row)
        handover.write_planes(part, buffers, row.replaced(layer_start=place), [0])
        for n in range(2):
            planes[n].append(bytes_of(buffers[n]).numpy().tobytes() if n < len(buffers) else b"")
    return Recurrent(handover.num_tokens - 1, model.num_layers, tuple((_F32, data) for same in planes for data in same))


def _spec_of(model: StateModel) -> StateSpec:
    """Of the states, as a handover has them."""
    spec = StateSpec(1, model.planes, num_layers=len(model.state_layers), model=model.name)
    return spec.replaced(layout=spec.block_layout)


def _widened(spec: object) -> StateSpec:
    """In f32, as it will be written."""
    assert isinstance(spec, StateSpec)
    return spec.replaced(planes=tuple(replace(p, format=_WIDE) if p.format.name in ITEM_BYTES else p for p in spec.planes))


def _bytes(data: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.array(data)).flatten()


def _rows(t: Tensor, cells: int) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = bytes_of(t).numpy().reshape(cells, -1)
    return found
