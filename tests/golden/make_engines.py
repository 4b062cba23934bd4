"""Golden bytes of every engine's row, made from the shapes engines use, with numpy and without KVX.

    python tests/golden/make_engines.py        writes tests/golden/engines.json

Letters are those of the engines' papers and enums: L layer, B block, K key or value, H head, N token in block, D head dim,
C a cell of K and V. Elements are 16 bit and hold their running index over [L, B, K, H, N, D].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

Buffers = list[np.ndarray]


def orders(x: np.ndarray, outside: str, inside: str) -> Buffers:
    """x [L, B, K, H, N, D]: an array for each index of the axes outside; in it the axes inside, outermost first."""
    y = x.transpose(["LBKHND".index(c) for c in outside + inside])
    return list(y.reshape(-1, *y.shape[len(outside) :]))


def latent(x: np.ndarray, outside: str, inside: str) -> Buffers:
    """MLA: one row a token, so K and H have size 1."""
    return orders(x, outside + "KH", inside)


def cells(x: np.ndarray, outside: str, inside: str) -> Buffers:
    """vLLM >= 0.26: C is K's row, then V's."""
    c = np.concatenate([x[:, :, 0], x[:, :, 1]], axis=-1)  # [L, B, H, N, C]
    y = c.transpose(["LBHNC".index(a) for a in outside + inside])
    return list(y.reshape(-1, *y.shape[len(outside) :]))


def cpu(k_index: Callable[..., int], v_index: Callable[..., int]) -> Callable[[np.ndarray], Buffers]:
    """vLLM's CPU kernels: in each (block, head) N*D elements of K and then N*D of V, each in an order of its own."""

    def make(x: np.ndarray) -> Buffers:
        layers, blocks, _, heads, n, dim = x.shape
        out = np.full((layers, blocks, heads, 2 * n * dim), -1)
        for t in range(n):
            for d in range(dim):
                out[..., k_index(t, d, n, dim)] = x[:, :, 0, :, t, d]
                out[..., n * dim + v_index(t, d, n, dim)] = x[:, :, 1, :, t, d]
        return list(out)

    return make


def slots(x: np.ndarray) -> np.ndarray:
    """SGLang counts slots, block * N + token: [K, L, slot, H, D]."""
    kv = x.transpose(2, 0, 1, 4, 3, 5)
    return kv.reshape(*kv.shape[:2], -1, *kv.shape[4:])


def packed(k: np.ndarray, pack: int) -> np.ndarray:
    """[B, H, N, D] -> [B, H, D/pack, N, pack], as vLLM's first paged kernels and AITER read K."""
    b, h, n, d = k.shape
    return k.reshape(b, h, n, d // pack, pack).transpose(0, 1, 3, 2, 4)


def vectorized_5d(x: np.ndarray) -> Buffers:
    """AITER: V is [B, H, N/8, D, 8]."""
    out = []
    for k, v in x.transpose(0, 2, 1, 3, 4, 5):  # of each layer, [B, H, N, D]
        b, h, n, d = v.shape
        out += [packed(k, 8), v.reshape(b, h, n // 8, 8, d).transpose(0, 1, 2, 4, 3)]
    return out


def tgi_paged(x: np.ndarray) -> Buffers:
    return [y for k, v in x.transpose(0, 2, 1, 3, 4, 5) for y in (packed(k, 8), v.transpose(0, 1, 3, 2))]


def llama_v_transposed(x: np.ndarray) -> Buffers:
    """K [stream, cell, H*D]; V [stream, H*D, cell]."""
    out = []
    for k, v in x.transpose(0, 2, 1, 3, 4, 5):
        b, h, n, d = k.shape
        out += [k.transpose(0, 2, 1, 3).reshape(b, n, h * d), v.transpose(0, 1, 3, 2).reshape(b, h * d, n)]
    return out


def kv_split(x: np.ndarray) -> Buffers:
    """SGLang on Ascend: [B, L, N, 1, latent] and [B, L, N, 1, rope]; rope is half as long here."""
    k, v = (x[:, :, i, 0].transpose(1, 0, 2, 3) for i in (0, 1))
    return [k, v[..., : v.shape[-1] // 2]]


def page_unified(group: int) -> Callable[[np.ndarray], Buffers]:
    """SGLang's (Hg, L, K, N, Hi, D) in each page."""

    def make(x: np.ndarray) -> Buffers:
        layers, b, kv, h, n, d = x.shape
        y = x.reshape(layers, b, kv, h // group, group, n, d)
        return [y.transpose(1, 3, 0, 2, 5, 4, 6)]

    return make


def block_stack(offset: Callable[..., int]) -> Callable[[np.ndarray], Buffers]:
    """Dynamo: the pointer of (b, l, o) is entry b*(nl*no) + l*no + o of a table."""

    def make(x: np.ndarray) -> Buffers:
        nl, nb, no, nh, nt, hd = x.shape
        table: Buffers = [np.full(nt * nh * hd, -1) for _ in range(nb * nl * no)]
        for b, layer, o, h, t, d in np.ndindex(nb, nl, no, nh, nt, hd):
            table[b * (nl * no) + layer * no + o][offset(h, t, d, nh, nt, hd)] = x[layer, b, o, h, t, d]
        return table

    return make


def operational(offset: Callable[..., int]) -> Callable[[np.ndarray], Buffers]:
    """Dynamo: a block's chunks at (l*no + o)*inner."""

    def make(x: np.ndarray) -> Buffers:
        chunks, per_block = block_stack(offset)(x), x.shape[0] * x.shape[2]
        return [np.concatenate(chunks[b * per_block : (b + 1) * per_block]) for b in range(x.shape[1])]

    return make


def universal(x: np.ndarray) -> Buffers:
    """Dynamo: (((h*nl + l)*no + o)*nt + t)*hd + d in each block."""
    nl, nb, no, nh, nt, hd = x.shape
    out: Buffers = [np.full(nh * nl * no * nt * hd, -1) for _ in range(nb)]
    for b, h, layer, o, t, d in np.ndindex(nb, nh, nl, no, nt, hd):
        out[b][(((h * nl + layer) * no + o) * nt + t) * hd + d] = x[layer, b, o, h, t, d]
    return out


def nhd(h: int, t: int, d: int, nh: int, nt: int, hd: int) -> int:
    return (t * nh + h) * hd + d


def hnd(h: int, t: int, d: int, nh: int, nt: int, hd: int) -> int:
    return (h * nt + t) * hd + d


Maker = Callable[[np.ndarray], Buffers]


def of(make: Callable[[np.ndarray, str, str], Buffers], outside: str, inside: str) -> Maker:
    return lambda x: make(x, outside, inside)


ROWS: dict[str, Maker] = {
    "vllm.0.22.flash_attn": of(orders, "L", "KBNHD"),
    "vllm.0.22.flash_attn.hnd": of(orders, "L", "KBHND"),
    "vllm.0.22.triton": of(orders, "L", "BKNHD"),
    "vllm.0.22.flashinfer_hnd": of(orders, "L", "BKHND"),
    "vllm.0.22.cpu": of(orders, "L", "KBHND"),
    "vllm.0.23": of(orders, "L", "BKNHD"),
    "vllm.0.23.hnd": of(orders, "L", "BKHND"),
    "vllm.0.23.cross_layer": of(orders, "", "BLKNHD"),
    "vllm.0.23.cross_layer.fa_hnd": of(orders, "", "BHLKND"),
    "vllm.0.23.cross_layer.fi_hnd": of(orders, "", "BKHLND"),
    "vllm.0.26.nhd": of(cells, "L", "BNHC"),
    "vllm.0.26.hnd": of(cells, "L", "BHNC"),
    **{f"vllm.{name.lower()}": of(cells, "", name) for name in ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
    "vllm.cpu": cpu(lambda t, d, n, dim: d * n + t, lambda t, d, n, dim: t * dim + d),
    "vllm.cpu.amx": cpu(
        lambda t, d, n, dim: (t // 16) * 16 * dim + ((d // 2) * 16 + t % 16) * 2 + d % 2,
        lambda t, d, n, dim: (d // 16) * 16 * n + (t // 2) * 32 + (d % 16) * 2 + t % 2,
    ),
    "vllm.cpu.arm": cpu(
        lambda t, d, n, dim: (t // 8) * 8 * dim + (d // 4) * 32 + (t % 8) * 4 + d % 4,
        lambda t, d, n, dim: (d // 8) * 8 * n + (t // 4) * 32 + (d % 8) * 4 + t % 4,
    ),
    "vllm.mla": of(latent, "L", "BND"),
    "sglang.nhd": lambda x: [layer for plane in slots(x) for layer in plane],
    "sglang.hnd": of(orders, "KL", "BHND"),
    "sglang.vectorized_5d": vectorized_5d,
    "sglang.mla": lambda x: list(slots(x)[0]),
    "sglang.layer_first": lambda x: [slots(x)],
    "sglang.page_first": lambda x: [slots(x).transpose(0, 2, 1, 3, 4)],
    "sglang.page_first_direct": of(orders, "", "KBLNHD"),
    "sglang.page_head": of(orders, "", "KBHNLD"),
    "sglang.page_unified": page_unified(1),
    "sglang.page_unified, 2 heads a group": page_unified(2),
    "sglang.page_unified.mla": of(latent, "", "BLND"),
    "sglang.page_first_kv_split": kv_split,
    "tensorrt_llm": of(orders, "", "BLKHND"),
    "tensorrt_llm.mla": of(latent, "", "BLND"),
    "tgi.flashinfer": of(orders, "LK", "BNHD"),
    "tgi.flashdecoding": of(orders, "LK", "BNHD"),
    "tgi.paged": tgi_paged,
    "flashinfer.nhd": of(orders, "LK", "BNHD"),
    "flashinfer.hnd": of(orders, "LK", "BHND"),
    "flashinfer.stacked.nhd": of(orders, "L", "BKNHD"),
    "flashinfer.stacked.hnd": of(orders, "L", "BKHND"),
    "max": of(orders, "", "BKLNHD"),
    "transformers": of(orders, "LK", "BHND"),
    "transformers.paged": of(orders, "", "BLKNHD"),
    "llama_cpp": of(orders, "LK", "BNHD"),
    "llama_cpp.v_transposed": llama_v_transposed,
    "lmcache.2ltd": of(orders, "B", "KLNHD"),
    "lmcache.t2d": of(orders, "LB", "NKHD"),
    "lmcache.2td": of(orders, "LB", "KNHD"),
    "lmcache.mla": of(latent, "B", "LND"),
    "dynamo.block_stack.nhd": block_stack(nhd),
    "dynamo.block_stack.hnd": block_stack(hnd),
    "dynamo.operational.nhd": operational(nhd),
    "dynamo.operational.hnd": operational(hnd),
    "dynamo.universal": universal,
    "dynamo.universal.pp": of(orders, "B", "LHKND"),
    "flexkv.layerfirst": of(orders, "", "LKBNHD"),
    "flexkv.blockfirst": of(orders, "", "BLKNHD"),
    "flexkv.layerblock": of(orders, "", "LBKNHD"),
    "aibrix.ncld": of(orders, "B", "NKLHD"),
    "aibrix.lcnd": of(orders, "B", "LKNHD"),
}
# [L, B, K, H, N, D] where it is not (2, 3, 2, 2, 4, 5): multiples that a split needs, one plane and one head of a latent.
SHAPES: dict[str, tuple[int, ...]] = {
    "vllm.cpu": (2, 2, 2, 2, 4, 6),
    "vllm.cpu.amx": (1, 1, 2, 2, 32, 16),
    "vllm.cpu.arm": (1, 2, 2, 2, 8, 16),
    "sglang.vectorized_5d": (2, 1, 2, 2, 16, 8),
    "tgi.paged": (2, 2, 2, 1, 4, 16),
    "sglang.page_unified, 2 heads a group": (2, 2, 2, 4, 4, 4),
    "sglang.page_first_kv_split": (2, 3, 2, 1, 4, 4),
    **{name: (2, 3, 1, 1, 4, 5) for name in ROWS if name.endswith("mla")},
}


def make() -> dict[str, object]:
    cases = {}
    for name, maker in ROWS.items():
        shape = SHAPES.get(name, (2, 3, 2, 2, 4, 5))
        buffers = maker(np.arange(np.prod(shape)).reshape(shape))
        sizes = dict(zip(("num_layers", "num_blocks", "planes", "num_kv_heads", "block_size", "head_dim"), shape, strict=True))
        if maker is kv_split:
            sizes["v_head_dim"] = shape[-1] // 2
        cases[name] = {**sizes, "buffers": [[int(value) for value in buffer.ravel()] for buffer in buffers]}
    return {
        "made_by": "tests/golden/make_engines.py: numpy, from the shapes and index formulas the engines publish",
        "value": "((((layer*num_blocks+block)*planes+kv)*num_kv_heads+head)*block_size+token)*head_dim+dim, of 16 bits; kv 0 is K",
        "cases": cases,
    }


def text() -> str:
    """JSON with a line for each case, so that a change shows which row it is."""
    made = make()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in made["cases"].items())  # type: ignore[attr-defined]
    return (
        f'{{\n "made_by": {json.dumps(made["made_by"])},\n "value": {json.dumps(made["value"])},\n "cases": {{\n{lines}\n }}\n}}\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("engines.json").write_text(text())
