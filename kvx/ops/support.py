"""What each op takes, one row an op: who computes it and which specs it reads. `kvx.supports` answers from these rows.

A new op adds its row here, or calls `register` where it is defined. A row's rule names what a backend does not take and the
nearest thing that works; without a rule every backend takes what the definition does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvx.errors import Unsupported
from kvx.layout.axes import Layout
from kvx.layout.planes import plane_maps
from kvx.ops.attention_kernels import Kernel, attention_kernel
from kvx.spec.cache_spec import CacheSpec

BACKENDS = ("torch", "cpu", "cuda")
# Why a spec cannot be used with a backend, as a sentence that says what to do instead; "" when it can.
Rule = Callable[[CacheSpec, str], str]


@dataclass(frozen=True)
class Support:
    """Yes, or no and why. True or false as a condition; printed, it is the sentence the call would raise."""

    op: str
    backend: str
    reason: str = ""  # "": supported
    kernels: tuple[Kernel, ...] = ()  # of attention on a GPU: for few query rows, and for many

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        how = f": {'; '.join(map(str, self.kernels))}" if self.kernels else ""
        return self.reason or f"{self.op} runs on {self.backend}{how}."


@dataclass(frozen=True)
class Takes:
    op: str
    specs: str  # in words, for `kvx inspect --support`
    rule: Rule | None = None
    backends: tuple[str, ...] = BACKENDS


def cells(spec: CacheSpec, backend: str) -> str:
    """Ops that address tokens: the layout and the format have cells that one position and one head name."""
    try:
        plane_maps(spec)
    except Unsupported as error:
        return str(error)
    return ""


def kernels_of(op: str, spec: CacheSpec, arch: int) -> tuple[Kernel, ...]:
    """Of attention on a GPU: decode takes few query rows a sequence, varlen few and many."""
    kinds = {"attention_decode": ("decode",), "attention_varlen": ("decode", "prefill")}.get(op, ())
    return tuple(attention_kernel(spec, kind, arch=arch) for kind in kinds)


def latents(spec: CacheSpec, backend: str) -> str:
    """attention_mla: one KV head, whose K is the latent and whose V its rotary part."""
    if spec.num_kv_heads != 1:
        return (
            f"attention_mla(): spec.num_kv_heads is {spec.num_kv_heads}; a latent cache has 1, which every query head reads. "
            "Caches with heads of their own: attention_decode, attention_varlen."
        )
    if not Layout.parse(spec.layout).has_kv:
        return (
            f"attention_mla(): layout {spec.layout!r} has no kv axis to tell the latent from its rotary part. The same bytes are "
            "`block token (head kv dim)`, with head_dim the latent's width and v_head_dim the rotary part's."
        )
    return cells(spec, backend)


_CELLS = "layouts with a kv axis, whole tokens and heads; every format but those that only convert"
_ANY = "any"
_NONE = "no spec"
TABLE: dict[str, Takes] = {}


def register(op: str, specs: str, rule: Rule | None = None, backends: tuple[str, ...] = BACKENDS) -> None:
    TABLE[op] = Takes(op, specs, rule, backends)


for _op in ("write", "gather", "gather_sequence", "attention_decode", "attention_varlen", "qkv_norm_rope_append", "copy_blocks"):
    register(_op, _CELLS, cells)
register("attention_mla", "one KV head, its K the latent, its V the rotary part; otherwise as attention_decode", latents)
for _op in ("convert", "digest"):
    register(_op, _ANY)
for _op in ("amax", "qk_norm_rope", "qkv_norm_rope", "append_batched", "merge_attention", "transpose_heads"):
    register(_op, _NONE)
register("attention_decode_batched", "contiguous caches behind cache_pointers")
# Workspaces and plans go with the attention they are for.
for _op in ("attention_plan", "attention_workspace_bytes"):
    register(_op, _CELLS, cells)
# Caches of rows in pages (kvx.cache.hybrid), which no spec describes.
for _op in ("append_swa", "compress", "index_scores", "topk", "attention_sparse"):
    register(_op, _NONE)
