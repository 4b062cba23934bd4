"""Golden bytes of packed and transposed rows with elements of 1, 2, 4 and 8 bytes, with numpy and without KVX.

    python tests/golden/make_elements.py        writes tests/golden/elements.json

Every element is its running index over [L, B, K, H, N, D], spread over all its bits, so that a byte out of its place shows.
Letters are those of make_engines.py; packs of x elements have 16 bytes, whatever an element has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

TYPES = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_SPREAD = {1: 1, 2: 0x9E37, 4: 0x9E3779B1, 8: 0x9E3779B97F4A7C15}


def values(shape: tuple[int, ...], size: int) -> np.ndarray:
    """[L, B, K, H, N, D]: odd factors, so that no two of 2**(8 * size) indices meet."""
    index = np.arange(np.prod(shape), dtype=np.uint64)
    with np.errstate(over="ignore"):
        return (index * np.uint64(_SPREAD[size])).astype(TYPES[size]).reshape(shape)


def _planes(x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """K and V of each layer, [B, H, N, D]."""
    return [(layer[:, 0], layer[:, 1]) for layer in x]


def _packed(k: np.ndarray) -> np.ndarray:
    """[B, H, N, D] -> [B, H, D/x, N, x]"""
    b, h, n, d = k.shape
    pack = 16 // k.itemsize
    return k.reshape(b, h, n, d // pack, pack).transpose(0, 1, 3, 2, 4)


def tgi_paged(x: np.ndarray) -> list[np.ndarray]:
    return [y for k, v in _planes(x) for y in (_packed(k), v.transpose(0, 1, 3, 2))]


def vectorized_5d(x: np.ndarray) -> list[np.ndarray]:
    """V [B, H, N/x, D, x]"""
    out = []
    for k, v in _planes(x):
        b, h, n, d = v.shape
        pack = 16 // v.itemsize
        out += [_packed(k), v.reshape(b, h, n // pack, pack, d).transpose(0, 1, 2, 4, 3)]
    return out


def v_transposed(x: np.ndarray) -> list[np.ndarray]:
    return [y for k, v in _planes(x) for y in (k.transpose(0, 2, 1, 3), v.transpose(0, 1, 3, 2))]


def cpu(x: np.ndarray) -> list[np.ndarray]:
    """In each (block, head) K as [D, N], then V as [N, D]."""
    layers, b, _, h, n, d = x.shape
    k, v = (x[:, :, i].reshape(layers, b, h, n, d) for i in (0, 1))
    return list(np.concatenate([k.swapaxes(-1, -2).reshape(layers, b, h, -1), v.reshape(layers, b, h, -1)], axis=-1))


def universal(x: np.ndarray) -> list[np.ndarray]:
    return list(x.transpose(1, 3, 0, 2, 4, 5))


ROWS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "tgi.paged": tgi_paged,
    "sglang.vectorized_5d": vectorized_5d,
    "llama_cpp.v_transposed": v_transposed,
    "vllm.cpu": cpu,
    "dynamo.universal": universal,
}


def shape_of(name: str, size: int) -> tuple[int, ...]:
    """[L, B, K, H, N, D], with axes that a pack divides."""
    pack = 16 // size
    tokens = pack if name == "sglang.vectorized_5d" else 3
    return (1, 2, 2, 2, tokens, pack if name in ("tgi.paged", "sglang.vectorized_5d") and pack > 3 else 4)


def text() -> str:
    cases = []
    for name, make in ROWS.items():
        for size in TYPES:
            shape = shape_of(name, size)
            buffers = [b.tobytes().hex() for b in make(values(shape, size))]
            cases.append(json.dumps({"row": name, "element_bytes": size, "shape": shape, "buffers": buffers}))
    made_by = "tests/golden/make_elements.py: numpy, from the shapes the engines publish"
    head = f'{{\n "made_by": "{made_by}",\n "shape": "[layer, block, kv, head, token, dim]",\n "cases": [\n  '
    return head + ",\n  ".join(cases) + "\n ]\n}\n"


if __name__ == "__main__":
    Path(__file__).with_name("elements.json").write_text(text())
