"""Which CUDA kernel attention takes for a cache, and why not a faster one: what decode/decode.cu, prefill/prefill.cu and
any/any.cu in native/attention ask of a call, answered without a device. Tests hold listed head sizes and formats to a fast one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from kvx.errors import BadArgument
from kvx.layout.planes import plane_maps
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.formats import FORMATS, Format, Granularity

QUERIES = ("bf16", "f16", "f32")
MOST_DIMS = 512  # of the fast kernels and of the general one
MOST_PREFILL_DIMS = 256  # where queries are of another type than the cache
MOST_SMALL_DIMS = 128  # decode over 4-bit elements, or scales along rows
SMALL = ("nvfp4", "mxfp4", "mxfp8", "int4_per_group", "int4_per_token_head")  # which those are
HOPPER = 90
PRODUCTS_DIMS = range(80, 129)  # head sizes of the kernel that multiplies in fp8, the larger of K's and V's
# Of K and V in models: what `kvx inspect --support` and the tests go through.
HEAD_SIZES = (
    *((n, n) for n in (64, 80, 96, 112, 128, 160)), (192, 192), (192, 128), *((n, n) for n in (224, 256, 512)),
)  # fmt: skip
# Decode at head_dim 128 on an H200, as a share of reading the same bytes (bench/results); the general kernel by bits of an element.
_DECODE_SHARE = "63 to 99 % of read"
_SMALL_SHARE = {8: "56 to 82 % of read", 4: "32 to 62 % of read"}
_GENERAL_SHARE = {32: "16 to 35 % of read", 16: "16 to 29 % of read", 8: "7 to 16 % of read", 4: "4 to 9 % of read"}


@dataclass(frozen=True)
class Kernel:
    """`fast` names the kernel of the kind asked for; `general` takes every format, `row` is the last resort."""

    kind: str  # decode or prefill
    name: str  # fast, general or row
    share: str = ""  # measured, as text; "" where nothing was
    why: str = ""  # not fast
    takes_fp8_products: bool = False  # where a call allows them

    @property
    def is_fast(self) -> bool:
        return self.name == "fast"

    def __str__(self) -> str:
        measured = f", {self.share}" if self.share else ""
        measured += ", with fp8_products=True in fp8" if self.takes_fp8_products else ""
        return f"the fast {self.kind} kernel{measured}" if self.is_fast else f"the {self.name} kernel{measured}: {self.why}"


def attention_kernel(spec: CacheSpec, kind: str = "decode", *, queries: str = "", arch: int = HOPPER) -> Kernel:
    """The kernel of a call with few query rows a sequence (`decode`: up to 16) or many (`prefill`).

    queries  their type; "": the cache's own where it is bf16, f16 or f32, else bf16
    arch     the device's compute capability as a number: 80, 90, 120
    """
    if kind not in ("decode", "prefill"):
        raise BadArgument(f'attention_kernel(): kind is "{kind}"; it must be decode or prefill.')
    element = spec.plane(0).format.element.name
    queries = queries or (element if element in QUERIES else "bf16")
    if queries not in QUERIES:
        raise BadArgument(f'attention_kernel(): queries is "{queries}"; it must be {", ".join(QUERIES)}.')
    why = _why_not_fast(spec, kind, queries, arch)
    if not why:
        small = _SMALL_SHARE[spec.plane(0).format.element.bits] if _is_small(spec) else _DECODE_SHARE
        return Kernel(kind, "fast", small if kind == "decode" else "", "", kind == "prefill" and _takes_fp8_products(spec))
    odd = [f for f in (p.format for p in spec.planes) if f.group_size % 8]
    if _most(spec) > MOST_DIMS or odd:
        return Kernel(kind, "row", "", why)
    return Kernel(kind, "general", _GENERAL_SHARE[min(p.format.element.bits for p in spec.planes)] if kind == "decode" else "", why)


class Listed(NamedTuple):
    """Of a format under queries of a type, in rows of a listed size."""

    format: str
    queries: str
    head_dim: int
    v_head_dim: int
    decode: Kernel
    prefill: Kernel


def listed_kernels(arch: int = HOPPER) -> list[Listed]:
    """Every format, type of queries and listed head size that a cache can have; groups of scales do not divide all of them."""
    found = []
    for name, queries, (dim, v_dim) in itertools.product(FORMATS, QUERIES, HEAD_SIZES):
        if FORMATS[name].element.is_moved_only or any(d % max(FORMATS[name].group_size, 1) for d in (dim, v_dim)):
            continue
        spec = CacheSpec(4, 16, 2, dim, v_head_dim=v_dim, format=name)
        kernels = (attention_kernel(spec, kind, queries=queries, arch=arch) for kind in ("decode", "prefill"))
        found.append(Listed(name, queries, dim, v_dim, *kernels))
    return found


def _most(spec: CacheSpec) -> int:
    return max(p.head_dim for p in spec.planes)


def _is_small(spec: CacheSpec) -> bool:
    return spec.plane(0).format.name == spec.plane(1).format.name and spec.plane(0).format.name in SMALL


def _why_not_fast(spec: CacheSpec, kind: str, queries: str, arch: int) -> str:
    k, v = spec.plane(0), spec.plane(1)
    element, bits = k.format.element.name, k.format.element.bits
    if kind == "prefill" and arch != HOPPER:
        return f"the fast one is Hopper's (sm_90), this is sm_{arch}"
    if queries == "f32":
        return "queries in f32"
    if element != v.format.element.name:
        return f"K is {element} and V {v.format.element.name}"
    is_small = kind == "decode" and _is_small(spec)
    if element not in ("bf16", "f16", "fp8_e4m3", "fp8_e5m2", "int8") and not is_small:
        return f"elements are {element}"
    if element == "bf16" and queries == "f16" and kind == "prefill":
        return "a bf16 cache under f16 queries"
    most = MOST_SMALL_DIMS if is_small else MOST_DIMS if kind == "decode" or element == queries else MOST_PREFILL_DIMS
    if _most(spec) > most:
        return f"rows of {_most(spec)} elements, over {most}"
    unit = 128 // bits
    if any(p.head_dim % unit for p in (k, v)):
        return f"rows of {k.head_dim} and {v.head_dim} elements, no multiples of {unit}"
    if any(m.axes[-1] != "dim" or m.dim[-1] != len(m.shape) - 1 for m in plane_maps(spec)):
        return "the elements of a row are not contiguous"
    if any(p.format.row_bytes(p.head_dim) % 16 for p in (k, v)) or spec.block_bytes % 16:
        return "rows do not begin at multiples of 16 bytes"
    return "" if is_small else _why_not_scales(k.format, v.format, k.head_dim, v.head_dim)


def _takes_fp8_products(spec: CacheSpec) -> bool:
    """Of what prefill is fast for: blocks that a tensor map describes, and one scale a head."""
    k, v = spec.plane(0).format, spec.plane(1).format
    coarse = (Granularity.NONE, Granularity.TENSOR, Granularity.HEAD)
    if k.element.name != "fp8_e4m3" or any(f.granularity not in coarse for f in (k, v)) or _most(spec) not in PRODUCTS_DIMS:
        return False
    block = spec.block_size
    return block % 128 == 0 or (block >= 8 and 128 % block == 0)


def _why_not_scales(k: Format, v: Format, k_dim: int, v_dim: int) -> str:
    for f, dim in ((k, k_dim), (v, v_dim)):
        if f.num_groups(dim) > 1:
            return f"one scale per {f.group_size} elements"
        if f.scale is not None and f.scale.name != "f32":
            return f"scales in {f.scale.name}"
    by_row = [f.granularity not in (Granularity.NONE, Granularity.TENSOR, Granularity.HEAD) for f in (k, v)]
    if by_row[0] != by_row[1]:
        return "per-row scales in only one of K and V"
    if k.element.name == "fp8_e5m2" and by_row[0]:
        return "e5m2 with per-row or per-block scales"
    return ""
