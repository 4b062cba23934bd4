"""Which CUDA kernel attention takes for a cache, and why not a faster one: what decode/decode.cu, prefill/prefill.cu, any/any.cu
and latent/latent.cu in native/attention ask of a call, answered without a device. Tests hold listed head sizes and formats to a
fast one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from kvx.errors import BadArgument
from kvx.layout.planes import plane_maps
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.formats import FORMATS, Granularity

QUERIES = ("bf16", "f16", "f32")
MOST_DIMS = 512  # of the fast kernels and of the general one
MOST_PREFILL_DIMS = 256  # where what is multiplied is of another type than the queries
MOST_F32_ROWS = 8  # of queries in f32, a sequence and KV head: the fast decode kernel, over
UNDER_F32 = ("bf16", "f16", "fp8_e4m3", "int8")
SMALL = ("nvfp4", "mxfp4", "mxfp8", "int4_per_group")  # elements of 4 bits or scales along rows, in one format for K and V
HOPPER = 90
LATENT_DIMS = (512, 64)  # of the kernels for latent caches (MLA): the latent and its rotary part
LATENT_RECORD = "fp8_e4m3_per_128_inline"  # the latent's format in records of 656 bytes
PRODUCTS_DIMS = range(80, 129)  # head sizes of the kernel that multiplies in fp8, the larger of K's and V's
# Of K and V in models: what `kvx inspect --support` and the tests go through.
HEAD_SIZES = (
    *((n, n) for n in (64, 80, 96, 112, 128, 160)), (192, 192), (192, 128), *((n, n) for n in (224, 256, 512)),
)  # fmt: skip
# Decode on an H200, as a share of reading the same bytes (bench/results), by bits of an element; the general one of 128 elements.
_DECODE_SHARE = "63 to 99 % of read"
_SMALL_SHARE = {8: "34 to 89 % of read", 4: "25 to 76 % of read"}
_ODD_SHARE = {16: "18 to 49 % of read", 8: "14 to 49 % of read", 4: "16 to 33 % of read"}
# Prefill of four prompts of 4,096 tokens; odd ones include 8-bit rows of more than 256 elements.
_PREFILL_SHARE = {"16-bit": "39 to 73 %", "8-bit": "32 to 58 %", "small": "37 to 46 %", "odd": "18 to 39 %"}
# MLA, 128 sequences of 4,096 tokens: with few heads, as a share of reading the same bytes; 128 heads are bound by arithmetic.
_LATENT_SHARE = {
    "bf16": "87 to 91 % of read with up to 16 heads, 63 to 73 % of 790 TFLOP/s with 128",
    LATENT_RECORD: "51 % of read with 16 heads, 56 % of 790 TFLOP/s with 128",
}
_GENERAL_SHARE = {32: "16 to 35 % of read", 16: "16 to 29 % of read", 8: "7 to 16 % of read", 4: "4 to 9 % of read"}


@dataclass(frozen=True)
class Kernel:
    """`fast` names the kernel of the kind asked for, `portable` one for any GPU, of prompts or of latents; `general` takes every
    format, `row` is the last resort."""

    kind: str  # decode, prefill or mla
    name: str  # fast, portable, general or row
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
    """The kernel of a call with few query rows a sequence (`decode`: up to 16) or many (`prefill`), or over a latent cache (`mla`).

    queries  their type; "": the cache's own where it is bf16, f16 or f32, else bf16
    arch     the device's compute capability as a number: 80, 90, 120
    """
    if kind not in ("decode", "prefill", "mla"):
        raise BadArgument(f'attention_kernel(): kind is "{kind}"; it must be decode, prefill or mla.')
    element = spec.plane(0).format.element.name
    queries = queries or (element if element in QUERIES else "bf16")
    if queries not in QUERIES:
        raise BadArgument(f'attention_kernel(): queries is "{queries}"; it must be {", ".join(QUERIES)}.')
    if kind == "mla":
        return _latent_kernel(spec, queries, arch)
    why = _why_not_fast(spec, kind, queries, arch)
    if not why:
        share = _prefill_share(spec) if kind == "prefill" else _decode_share(spec, queries)
        return Kernel(kind, "fast", share, "", kind == "prefill" and _takes_fp8_products(spec))
    if kind == "prefill" and _takes_portable(spec, queries):
        return Kernel(kind, "portable", "", why)
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
    return _has_one_format(spec) and spec.plane(0).format.name in SMALL


def _decode_share(spec: CacheSpec, queries: str) -> str:
    bits = spec.plane(0).format.element.bits
    shares = _ODD_SHARE if _is_odd(spec) else _SMALL_SHARE
    share = shares[bits] if _is_odd(spec) or _is_small(spec) or bits == 4 else _DECODE_SHARE
    said = [share] if _has_one_format(spec) else []
    if queries == "f32":
        said.append(f"for up to {MOST_F32_ROWS} query rows per KV head (more: the general kernel)")
    return ", ".join(said)


def _prefill_share(spec: CacheSpec) -> str:
    bits = spec.plane(0).format.element.bits
    if not _has_one_format(spec):
        return ""
    if bits == 16:
        which = "16-bit"
    elif _is_odd(spec) or _most(spec) > MOST_PREFILL_DIMS:
        which = "odd"
    else:
        which = "small" if _is_small(spec) or bits == 4 else "8-bit"
    return f"{_PREFILL_SHARE[which]} of 790 TFLOP/s"


def _has_one_format(spec: CacheSpec) -> bool:
    """K's and V's: others were not measured."""
    return spec.plane(0).format.name == spec.plane(1).format.name


def _is_odd(spec: CacheSpec) -> bool:
    """Rows that do not begin and end at multiples of 16 bytes, or scales of f16: fast kernels take them, but not as fast."""
    k, v = spec.plane(0), spec.plane(1)
    if any(p.head_dim * p.format.element.bits % 128 or p.format.row_bytes(p.head_dim) % 16 for p in (k, v)):
        return True
    return any(p.format.scale is not None and p.format.scale.name == "f16" and not _is_small(spec) for p in (k, v))


def _why_not_fast(spec: CacheSpec, kind: str, queries: str, arch: int) -> str:
    k, v = spec.plane(0), spec.plane(1)
    element, bits = k.format.element.name, k.format.element.bits
    is_decode, is_small = kind == "decode", _is_small(spec)
    if not is_decode and arch != HOPPER:
        return f"the fast one is Hopper's (sm_90), this is sm_{arch}"
    if queries == "f32" and not is_decode:
        return "queries in f32"
    if element != v.format.element.name:
        return f"K is {element} and V {v.format.element.name}"
    if element == "f32":
        return "elements are f32"
    if queries == "f32" and (is_small or element not in UNDER_F32):
        return f"{k.format if is_small else element} under queries in f32"
    if queries == "f16" and not is_decode and (is_small or element == "bf16"):
        return f"{k.format if is_small else 'a bf16 cache'} under f16 queries"
    is_split = is_decode or element == queries or (bits == 8 and not is_small and queries == "bf16")
    most = MOST_DIMS if is_split else MOST_PREFILL_DIMS
    if _most(spec) > most:
        return f"rows of {_most(spec)} elements, over {most}"
    if not is_decode and any(p.head_dim % 8 for p in (k, v)):
        return f"rows of {k.head_dim} and {v.head_dim} elements, no multiples of 8"
    unit = 4 if is_decode or bits < 16 else 16  # bytes that rows, and their places, are multiples of
    if any(p.head_dim * bits % (8 * unit) for p in (k, v)):
        return f"rows of {k.head_dim} and {v.head_dim} elements, no multiples of {unit} bytes"
    if any(m.axes[-1] != "dim" or m.dim[-1] != len(m.shape) - 1 for m in plane_maps(spec)):
        return "the elements of a row are not contiguous"
    if any(p.format.row_bytes(p.head_dim) % unit for p in (k, v)) or spec.block_bytes % unit:
        return f"rows do not begin at multiples of {unit} bytes"
    odd = [p.format.group_size for p in (k, v) if p.format.num_groups(p.head_dim) > 1]
    if is_small or not odd:
        return ""
    return f"one scale per {odd[0]} elements" if k.format.name == v.format.name else f"K is {k.format} and V {v.format}"


def _latent_kernel(spec: CacheSpec, queries: str, arch: int) -> Kernel:
    latent, rotary = (p.format.name for p in spec.planes)
    takes = "fast kernels take bf16 queries over 512 + 64 elements in bf16"
    of_latent, of_rotary = plane_maps(spec)
    is_record = latent == LATENT_RECORD and of_rotary.buffer == 0 and of_latent.shape[-1] == 656
    if (dims := tuple(p.head_dim for p in spec.planes)) != LATENT_DIMS:
        why = f"a latent of {dims[0]} and a rotary part of {dims[1]} elements; {takes}"
    elif queries != "bf16" or rotary != "bf16" or not (latent == "bf16" or is_record):
        why = f"{queries} queries over a latent in {latent} and a rotary part in {rotary}; {takes}, or in records of 656 bytes"
    elif any(m.axes[-1] != "dim" or m.dim[-1] != len(m.shape) - 1 for m in (of_latent, of_rotary)):
        why = "the elements of a row are not contiguous"
    elif arch == HOPPER:
        return Kernel("mla", "fast", _LATENT_SHARE[latent])
    elif is_record:
        why = f"the fast one for records of 656 bytes is Hopper's (sm_90), this is sm_{arch}"
    else:
        why = f"the fast one is Hopper's (sm_90), this is sm_{arch}; more than 16 queries per sequence (max_query_len) take the "
        why += "slow row kernel"
        return Kernel("mla", "portable", "", why)
    return Kernel("mla", "row", "under 1 % of read", why)


# Digits of a number's mantissa, the first one included.
_DIGITS = {"e8m0": 1, "e2m1": 2, "fp8_e5m2": 3, "fp8_e4m3": 4, "int4": 4, "int8": 8, "bf16": 8, "f16": 11, "f32": 24}


def _takes_portable(spec: CacheSpec, queries: str) -> bool:
    """Queries of 16 bits over elements that one number of 16 bits holds, in rows of up to 256."""
    formats = [p.format for p in spec.planes]
    if queries == "f32" or _most(spec) > MOST_PREFILL_DIMS or any(f.group_size % 8 for f in formats):
        return False
    if all(f.element.name == "f16" for f in formats):
        return True
    for f, p in zip(formats, spec.planes, strict=True):
        of_scale = _DIGITS[f.scale.name] if f.scale is not None and f.num_groups(p.head_dim) > 1 else 0
        if _DIGITS[f.element.name] + (0 if queries == "bf16" else of_scale) > 8:
            return False
    return True


def _takes_fp8_products(spec: CacheSpec) -> bool:
    """Of what prefill is fast for: blocks that a tensor map describes, and one scale a head."""
    k, v = spec.plane(0).format, spec.plane(1).format
    coarse = (Granularity.NONE, Granularity.TENSOR, Granularity.HEAD)
    if k.element.name != "fp8_e4m3" or any(f.granularity not in coarse for f in (k, v)) or _most(spec) not in PRODUCTS_DIMS:
        return False
    block = spec.block_size
    return block % 128 == 0 or (block >= 8 and 128 % block == 0)
