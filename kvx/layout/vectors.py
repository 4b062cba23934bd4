"""Conformance vectors: for layouts and sizes, where elements lie, so that another implementation of the language can be checked.

`kvx layouts --vectors FILE` writes them, docs/layouts.md explains each field, and tests/page holds the page's code to them. Places
are the library's own (kvx/layout/place.py). A kind of vector is a name in `vectors()` and a list of cases.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

import kvx
from kvx.errors import KvxError
from kvx.layout.axes import Layout
from kvx.layout.engines import ENGINES
from kvx.layout.match import inline_scale_place
from kvx.layout.place import Place, buffer_sizes, places, scale_places, tensor_scale_buffers
from kvx.layout.plan_vectors import plan_vectors
from kvx.layout.state_rows import STATE_ROWS
from kvx.layout.vector_cases import SEED, random_spec, random_state, small_spec, state_planes, wrong_specs, wrong_strings
from kvx.spec.cache_spec import CacheSpec, Spec
from kvx.spec.size_vectors import size_vectors

FORM = 1
RANDOM = 400  # strings of K and V; of states a tenth
SAMPLES = 6  # of each list beside the first and the last


def vectors() -> dict[str, Any]:
    """All of them, as JSON would have it."""
    return {"form": FORM, "kvx": kvx.__version__, "seed": SEED, "places": place_vectors(), "refused": refused_vectors(),
            "plans": plan_vectors(), "sizes": size_vectors()}  # fmt: skip


def to_text(found: dict[str, Any]) -> str:
    """JSON, a case a line: a change shows in a diff."""
    parts = []
    for name, value in found.items():
        rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in value) if isinstance(value, list) else None
        parts.append(f"{json.dumps(name)}: " + (f"[\n{rows}\n]" if rows is not None else json.dumps(value)))
    return "{" + ",\n".join(parts) + "}\n"


def place_vectors() -> list[dict[str, Any]]:
    """Every engine's rows, those of states, and random strings."""
    found = [_vector(f"engine {row.name}", small_spec(row)) for row in ENGINES.values()]
    for row in STATE_ROWS.values():
        for kind in ("delta", "ssm"):
            spec = row.spec(state_planes(kind), num_blocks=3, num_layers=2)
            found.append(_vector(f"state {row.name} {kind}", spec))
            if row.name.startswith("vllm"):  # its pages are padded
                page = -(-spec.content_bytes() // 64) * 64 + 64
                found.append(_vector(f"state {row.name} {kind} padded", spec.replaced(block_bytes=page)))
    r = random.Random(SEED)
    found += [_vector(f"random {i}", random_spec(r, i)) for i in range(RANDOM)]
    found += [_vector(f"random state {i}", random_state(r)) for i in range(RANDOM // 10)]
    return found


# ---- one case


def _vector(name: str, spec: Spec) -> dict[str, Any]:
    planes = []
    r = random.Random(f"{SEED} {name}")
    tensor = tensor_scale_buffers(spec)
    for i, plane in enumerate(spec.planes):
        axes = [("layer", spec.num_layers), ("block", spec.num_blocks), *plane.axes]
        bits, place = plane.format.element.bits, places(spec)[i]
        found = {
            "name": plane.name,
            "format": plane.format.name,
            "axes": [list(axis) for axis in axes],
            "elements": _places(place, axes, r, bits / (8 * place.unit_bytes), bits),
            "crc32": _crc(place, axes, bits / (8 * place.unit_bytes)),
        }
        scale = inline_scale_place(spec, i) or scale_places(spec)[i]
        if scale is not None:
            groups = [*axes[:-1], (axes[-1][0], plane.format.num_groups(plane.row_elements))]
            of_scale = [axis for axis in groups if axis[0] == "layer" or scale.of(axis[0])]
            found["scales"] = _places(scale, of_scale, r)
        if tensor[i] >= 0:
            found["tensor_scales"] = [[[layer], tensor[i], 4 * layer] for layer in range(spec.num_layers)]
        planes.append(found)
    case: dict[str, Any] = {
        "name": name,
        "layout": spec.layout,
        "buffers": [list(part) for part in buffer_sizes(spec)],
        "planes": planes,
    }
    if isinstance(spec, CacheSpec):
        case["spec"] = {
            name: getattr(spec, name)
            for name in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "v_head_dim", "format", "v_format")
        }
    return case | {"block_bytes": spec.block_bytes}


def _places(place: Place, axes: Sequence[tuple[str, int]], r: random.Random, units: float = 1, bits: int = 8) -> list[list[Any]]:
    """[coordinates, buffer, byte] of the first, the last and some between; of elements of four bits also the bit."""
    points = [tuple(0 for _ in axes), tuple(size - 1 for _, size in axes)]
    points += [tuple(r.randrange(size) for _, size in axes) for _ in range(SAMPLES)]
    found: list[list[Any]] = []
    for point in dict.fromkeys(points):
        index = dict(zip((axis for axis, _ in axes), point, strict=True))
        index[axes[-1][0]] = int(index[axes[-1][0]] * units)
        buffer, byte = place.locate(**index)
        found.append([list(point), buffer, byte] + ([point[-1] % 2 * 4] if bits == 4 else []))
    return found


def _crc(place: Place, axes: Sequence[tuple[str, int]], units: float) -> int:
    """CRC-32 of (buffer, byte) of every element as little-endian 64-bit integers, in the order of the axes, the last fastest."""
    index = np.indices([size for _, size in axes]).reshape(len(axes), -1)
    at = dict(zip((axis for axis, _ in axes), index, strict=True))
    at[axes[-1][0]] = (index[-1] * units).astype(np.int64)  # a row counts units: two elements of four bits are one
    buffer, byte = (np.full(index.shape[1], start, np.int64) for start in (place.buffer, place.offset))
    for d in place.digits:
        digit = at[d.axis] // d.divisor % d.size if d.axis in at else 0
        buffer, byte = buffer + digit * d.step, byte + digit * d.stride
    return zlib.crc32(np.stack([buffer, byte], 1).astype("<i8").tobytes())


# ---- what is refused


def refused_vectors() -> list[dict[str, Any]]:
    """With the sentence KVX has for each: for strings it marks the characters that are wrong."""
    return [*_refused_strings(), *islice(_refused_specs(), 200)]


def _refused_strings() -> Iterator[dict[str, Any]]:
    for text in wrong_strings():
        try:
            Layout.parse(text)
        except KvxError as error:
            yield {"layout": text, "error": str(error)}


def _refused_specs() -> Iterator[dict[str, Any]]:
    for spec in wrong_specs():
        try:
            CacheSpec(**spec)
        except KvxError as error:
            yield {"layout": spec.pop("layout"), "spec": spec, "error": str(error)}
