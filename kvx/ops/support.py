"""What `kvx.supports` answers, and the rules it answers by. The rows of kvx/ops/registry.py say which op has which.

A rule names what a backend does not take and the nearest thing that works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvx.errors import Unsupported
from kvx.layout.axes import Layout
from kvx.layout.planes import plane_maps
from kvx.ops.attention.kernels import Kernel, attention_kernel
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


def cells(spec: CacheSpec, backend: str) -> str:
    """Ops that address tokens: the layout and the format have cells that one position and one head name."""
    try:
        plane_maps(spec)
    except Unsupported as error:
        return str(error)
    return ""


def kernels_of(op: str, spec: CacheSpec, arch: int) -> tuple[Kernel, ...]:
    """Of attention on a GPU: decode takes few query rows a sequence, varlen few and many."""
    kinds = {"attention_decode": ("decode",), "attention_varlen": ("decode", "prefill"), "attention_mla": ("mla",)}.get(op, ())
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
