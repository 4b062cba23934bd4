"""llama.cpp's states and slot files to and from handovers. The pairs of rotated K change their order on the way, no number does.

Plain models, whose layers all keep K and V of every token, are converted here; hybrid models in hybrid.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from kvx.adapters.llama_cpp.checkpoints import read_checkpoints, write_checkpoints
from kvx.adapters.llama_cpp.ggml_rows import CONVERTED, QUANTISED
from kvx.adapters.llama_cpp.hybrid import export_memory, import_memory, require_hybrid
from kvx.adapters.llama_cpp.kinds import VERSIONS, StateKind
from kvx.adapters.llama_cpp.memory import KvKind, read_memory, write_memory
from kvx.adapters.llama_cpp.model import StateModel
from kvx.adapters.llama_cpp.slot_file import SlotFile, read_slot_file, write_slot_file
from kvx.adapters.llama_cpp.state import SequenceState, read_state, write_state
from kvx.errors import BadArgument, Incompatible, Unsupported
from kvx.handover import Handover, Source, export_blocks
from kvx.layout import engine
from kvx.layout.buffers import allocate_buffers
from kvx.spec import CacheSpec


def export_state(
    data: bytes,  # of llama_state_seq_get_data
    tokens: ArrayLike,  # the sequence's ids: states do not have them
    *,
    model: StateModel,
    version: int = VERSIONS[-1],  # LLAMA_STATE_SEQ_VERSION of the engine: states do not say it
    block_size: int = 16,
    format: str = "",  # "": as it is
) -> Handover:
    if not model.is_plain:
        memory, taken = read_memory(data, version=version)
        if taken != len(data):
            raise BadArgument(f"export_state(): {len(data) - taken} bytes stand behind the state. It is of another model.")
        return export_memory(memory, tokens, model, block_size=block_size, format=format)
    return _export(read_state(_exact(data, version), model=model, version=version), tokens, model, block_size, format)


def import_state(
    handover: Handover,
    *,
    model: StateModel,
    like: bytes | StateKind,  # a state that the engine saved, of any sequence of this model; or what it would say
    version: int = VERSIONS[-1],  # as export_state; with a StateKind, that one's
) -> bytes:
    """For llama_state_seq_set_data."""
    if not model.is_plain:
        version = like.version if isinstance(like, StateKind) else version
        return write_memory(import_memory(handover, model, _kinds(like, model, version), version)[0], is_file=False)
    if isinstance(like, StateKind):
        return _import(handover, model, like, is_file=False)
    kind = read_state(_exact(like, version), model=model, version=version).kind
    return _as(_import(handover, model, kind, is_file=False), like, version, is_file=False)


def export_slot_file(
    file: bytes | str | Path,  # its bytes, or where it is
    *,
    model: StateModel,
    block_size: int = 16,
    format: str = "",  # "": as it is
) -> Handover:
    read = read_slot_file(file)
    if not model.is_plain:
        memory, taken = read_memory(read.state, version=read.version)
        read_checkpoints(read.state[taken:], version=read.version)  # what stands behind is nothing else
        return export_memory(memory, read.tokens, model, block_size=block_size, format=format)
    state = read_state(_exact(read.state, read.version), model=model, version=read.version)
    return _export(state, read.tokens, model, block_size, format)


def import_slot_file(
    handover: Handover,
    *,
    model: StateModel,
    like: bytes | str | Path | StateKind,  # a slot file that the engine saved, or where it is; or what it would say
) -> bytes:
    """For `POST /slots/N?action=restore`. With a StateKind, tokens are packed as llama-server does since 2026-08."""
    if isinstance(like, StateKind):
        file = SlotFile(like.version, handover.tokens, memoryview(b""), True)
    else:
        file = read_slot_file(like)
    if not model.is_plain:
        kinds = _kinds(like if isinstance(like, StateKind) else file.state, model, file.version)
        memory, points = import_memory(handover, model, kinds, file.version)
        state = write_memory(memory) + write_checkpoints(points)
    elif isinstance(like, StateKind):
        state = _import(handover, model, like, is_file=True)
    else:
        kind = read_state(_exact(file.state, file.version), model=model, version=file.version).kind
        state = _as(_import(handover, model, kind, is_file=True), file.state, file.version, is_file=True)
    return write_slot_file(handover.tokens, state, version=file.version, is_packed=file.is_packed)


def _kinds(like: bytes | memoryview | StateKind, model: StateModel, version: int) -> list[KvKind]:
    """How an engine keeps each of a hybrid's K/V caches."""
    if isinstance(like, StateKind):
        return [KvKind(like.format, like.format, like.is_v_transposed, num_streams=like.num_streams)] * len(model.rows)
    return [cache.kind for cache in read_memory(like, version=version)[0].caches]


def _exact(data: bytes | memoryview, version: int) -> bytes | memoryview:
    """Quantised K and V in float32, without the rotation before it; any other state as it is, for read_state to judge."""
    kinds = _quantised(data, version)
    if not kinds:
        return data
    memory, taken = read_memory(data, version=version)
    if taken != len(data):
        return data
    plain = [replace(k, k="f32", v="f32", k_rotation=0, v_rotation=0) for k in kinds]
    return write_memory(memory.to(plain))


def _as(state: bytes, like: bytes | memoryview, version: int, *, is_file: bool) -> bytes:
    """Quantised where `like` is."""
    kinds = _quantised(like, version)
    return write_memory(read_memory(state, version=version)[0].to(kinds), is_file=is_file) if kinds else state


def _quantised(data: bytes | memoryview, version: int) -> list[KvKind]:
    """How each cache of a state is kept, where one is quantised in a type that KVX converts; none else."""
    if version not in VERSIONS or not isinstance(data, bytes | bytearray | memoryview):
        return []
    try:
        caches = read_memory(data, version=version)[0].caches
    except (BadArgument, Incompatible, Unsupported):  # read_state says what is wrong with it
        return []
    latent = next((c for c in caches if not c.v), None)
    if latent is not None:
        raise Unsupported(
            f"export_state(): the state has K of {len(latent.k)} layers and no V: latents (MLA), which are not handed over, or it "
            "was cut off. `kvx llama` saves and restores latents."
        )
    types = {t for c in caches for t in (c.kind.k, c.kind.v)}
    return [c.kind for c in caches] if types & set(QUANTISED) and types <= set(CONVERTED) else []


def _export(state: SequenceState, tokens: ArrayLike, model: StateModel, block_size: int, format: str) -> Handover:
    ids = np.asarray(tokens)
    if ids.shape != (state.num_cells,):
        raise BadArgument(f"export_state(): tokens are {list(ids.shape)}; the state has {state.num_cells} cells, one per token.")
    spec = cache_spec(model, state.kind, state.num_cells)
    source = Source([rows for layer in zip(state.k, state.v, strict=True) for rows in layer], spec, [0], rope=model.rope)
    handover = export_blocks(ids, [source], model=model.name, block_size=block_size)
    # Pairs turn in rows that keep their format, so that is a step of its own.
    return handover.convert(format=format) if format not in ("", state.kind.format) else handover


def require_fit(handover: Handover, model: StateModel) -> None:
    """Whole, and of this model: raises before anything is read."""
    if not model.is_plain:
        require_hybrid(handover, model)
        return
    handover.require_kv(
        "import_state", "import K and V alone, Handover(tokens, parts), and write_recurrent(before=...) puts a state behind"
    )
    handover.check()
    if len(handover.parts) > 1:
        windows = ", ".join(str(p.window) for p in handover.parts)
        raise Unsupported(
            f"import_state(): the handover has layers of windows {windows}; states of layers that see all are written."
        )
    heads = {"num_kv_heads": model.num_kv_heads, "head_start": 0, "head_dim": model.head_dim, "v_head_dim": model.head_dim}
    handover.require(model=model.name, num_layers=model.num_layers, window=0, **heads)


def _import(handover: Handover, model: StateModel, kind: StateKind, *, is_file: bool) -> bytes:
    require_fit(handover, model)
    if (handover.spec.of_kv.format, handover.spec.of_kv.v_format) != (kind.format, ""):
        handover = handover.convert(format=kind.format)
    cells = handover.num_tokens
    spec = cache_spec(model, kind, cells)
    buffers = allocate_buffers(spec)
    handover.write(0, buffers, spec, [0], rope=model.rope)
    return write_state(buffers[0::2], buffers[1::2], num_cells=cells, model=model, kind=kind, is_file=is_file)


def cache_spec(model: StateModel, kind: StateKind, num_cells: int) -> CacheSpec:
    """A state's rows as a cache of one block."""
    row = engine("llama_cpp.v_transposed" if kind.is_v_transposed else "llama_cpp")
    spec = row.spec(
        num_layers=model.num_layers,
        num_blocks=1,
        block_size=num_cells,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        format=kind.format,
    )
    return replace(spec, model=model.name)
