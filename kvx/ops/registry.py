"""The table of ops: one row an op. What it is called, which caches it takes, who computes it, its calls of libkvx and their
arguments, and the custom op that torch.compile sees in its place.

`kvx.supports` and `kvx inspect --support` answer from these rows, library.py gives every call of libkvx its signature from
them, and compiled.py registers no custom op that has no row here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvx.ops import structs
from kvx.ops.support import BACKENDS, Rule, cells, latents

_P, _I32, _I64, _U64, _F64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double
_TEXT, _INT = ctypes.c_char_p, ctypes.c_int


class Entry(NamedTuple):
    """A call of libkvx. Pointers to structs, tensors as objects and streams all cross as addresses."""

    name: str
    takes: tuple[Any, ...]
    gives: Any = _INT  # a kvx_status_t


@dataclass(frozen=True)
class Op:
    name: str  # kvx.<name>
    specs: str  # which caches it takes, in words
    rule: Rule | None = None  # and which of them a backend does not take; None: it takes what the definition does
    entries: tuple[Entry, ...] = ()  # its calls of libkvx; none: it is made of other ops
    args: type[ctypes.Structure] | None = None  # the struct of its arguments, where it is shared; its own stands beside the op
    compiled: str = ""  # the custom op kvx::<compiled>; "": torch.compile breaks the graph at it
    backends: tuple[str, ...] = BACKENDS


_CELLS = "layouts with a kv axis that do not split tokens or heads; all formats but those that only convert"
_LATENTS = "one KV head, its K the latent, its V the rotary part; otherwise as attention_decode"
_ANY = "any"
_NONE = "takes no spec"

_PLAN = (Entry("kvx_plan_load", (_TEXT, _U64, _P)), Entry("kvx_plan_free", (_P,), None))
_ATTENTION = (Entry("kvx_door_attention", (_P,) * 7),)
_NORM_ROPE = (Entry("kvx_door_norm_rope", (_TEXT, _P, _P, _P)),)
_NORM_ROPE_USUAL = (Entry("kvx_door_norm_rope_usual", (_TEXT, *(_P,) * 6, _I64, _F64, _F64, _P)),)
_APPEND = (Entry("kvx_door_append", (_TEXT, *(_P,) * 6)),)
_APPEND_USUAL = (Entry("kvx_door_append_usual", (_TEXT, *(_P,) * 5, _I64, *(_P,) * 6, _I64, _F64, _F64, _P)),)


def _called_by_struct(*names: str) -> tuple[Entry, ...]:
    """Calls of the C ABI itself: a struct of arguments, kvx_x_args_t of kvx_x, and a stream or where the answer goes."""
    return tuple(Entry(name, (_P, _P)) for name in names)


_ROWS = (
    Op("write", _CELLS, cells, (Entry("kvx_door_write", (_P,) * 8),), structs.Extra, "write"),
    Op("gather", _CELLS, cells, (Entry("kvx_door_gather", (_P,) * 8),), structs.TableArgs, "gather"),
    Op("gather_sequence", _CELLS, cells, compiled="gather"),
    Op("attention_decode", _CELLS, cells, _ATTENTION, structs.AttentionArgs, "attention"),
    Op("attention_varlen", _CELLS, cells, _ATTENTION, structs.AttentionArgs, "attention"),
    Op("qkv_norm_rope_append", _CELLS, cells, _APPEND + _APPEND_USUAL, structs.AppendArgs, "qkv_norm_rope_append"),
    Op("copy_blocks", _CELLS, cells, (Entry("kvx_door_copy_blocks", (_P,) * 6),), structs.Extra),
    Op("attention_mla", _LATENTS, latents, _ATTENTION, structs.AttentionArgs, "attention"),
    Op(
        "convert", _ANY, None,
        (
            *_PLAN, Entry("kvx_bind", (_P,) * 3), Entry("kvx_run", (_P, _P)), Entry("kvx_bound_free", (_P,), None),
            Entry("kvx_door_sides", (_P,) * 5), Entry("kvx_door_sides_free", (_P,), None),
            Entry("kvx_door_convert", (_P, _P, _P, _I64, _P, _I64, _P, _P, _P)),
        ),
        structs.ConvertArgs,
    ),
    Op("digest", _ANY, None, (*_PLAN, Entry("kvx_digest", (_P,) * 4)), structs.ConvertArgs),
    Op("amax", _NONE, None, (Entry("kvx_door_amax", (_P, _P, _P, _INT, _I64, _P, _P)),), None, "amax"),
    Op("qk_norm_rope", _NONE, None, _NORM_ROPE + _NORM_ROPE_USUAL, structs.AppendArgs, "norm_rope"),
    Op("qkv_norm_rope", _NONE, None, _NORM_ROPE, structs.AppendArgs, "norm_rope"),
    Op("append_batched", _NONE, None, _APPEND, structs.AppendArgs, "append_batched"),
    Op("merge_attention", _NONE, None, (Entry("kvx_door_merge", (_P,) * 6),), None, "merge_attention"),
    Op("transpose_heads", _NONE, None, _NORM_ROPE, structs.AppendArgs, "norm_rope"),
    Op("attention_decode_batched", "contiguous caches behind cache_pointers", None, _ATTENTION, structs.AttentionArgs, "attention"),
    # Workspaces and plans go with the attention they are for.
    Op("attention_plan", _CELLS, cells, _ATTENTION, structs.AttentionArgs, "attention_plan"),
    Op("attention_workspace_bytes", _CELLS, cells, _ATTENTION, structs.AttentionArgs),
    # Caches of rows in pages (kvx.cache.hybrid), which no spec describes.
    Op("append_swa", _NONE, None, _called_by_struct("kvx_append_swa")),
    Op("compress", _NONE, None, _called_by_struct("kvx_compress")),
    Op("index_scores", _NONE, None, _called_by_struct("kvx_index_scores")),
    Op("topk", _NONE, None, _called_by_struct("kvx_topk", "kvx_topk_workspace")),
    Op("attention_sparse", _NONE, None, _called_by_struct("kvx_attention_sparse", "kvx_attention_sparse_workspace")),
)  # fmt: skip
OPS: dict[str, Op] = {op.name: op for op in _ROWS}

# What the package asks of the library besides ops.
_OTHERS = (
    Entry("kvx_last_error", (), _TEXT),
    Entry("kvx_get_version", (_P,)),
    Entry("kvx_build_info", (_P,)),
    Entry("kvx_door_init", (_P,) * 6, None),
    Entry("kvx_door_sizes", (_P, _I64), None),
    Entry("kvx_door_append_bytes", (), _I64),
    Entry("kvx_hash_blocks", (_I32, _TEXT, _TEXT, _I64, _I64, _P)),
)
ENTRIES: dict[str, Entry] = {e.name: e for e in (*_OTHERS, *(e for op in OPS.values() for e in op.entries))}
