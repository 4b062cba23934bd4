"""Elements of 1, 2, 4 and 8 bytes, packed and transposed: literal bytes that numpy made, converted there and back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import kvx
from kvx.layout.place import num_cache_buffers
from tests.golden import make_elements

GOLDEN = Path(make_elements.__file__).with_name("elements.json")
CASES = json.loads(GOLDEN.read_text())["cases"]
FORMATS = {1: "fp8_e4m3", 2: "bf16", 4: "f32", 8: "f64"}
PLAIN = "layer kv | block token head dim"


def buffers_of(spec: kvx.CacheSpec, data: list[bytes]) -> list[torch.Tensor]:
    """The cache's bytes, and its scales, where it has some, as they are made."""
    rest = kvx.allocate_buffers(spec)[num_cache_buffers(spec) :]
    return [torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in data] + rest


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['row']}-{c['element_bytes']}")
def test_bytes_are_the_golden_ones_there_and_back(backend, case):
    layers, blocks, _, heads, tokens, dim = case["shape"]
    size = case["element_bytes"]
    spec = kvx.engine(case["row"]).spec(
        num_layers=layers, num_blocks=blocks, block_size=tokens, num_kv_heads=heads, head_dim=dim, format=FORMATS[size]
    )
    plain = kvx.CacheSpec(blocks, tokens, heads, dim, num_layers=layers, format=FORMATS[size], layout=PLAIN)
    x = make_elements.values(tuple(case["shape"]), size).transpose(0, 2, 1, 4, 3, 5)  # [L, K, B, N, H, D]
    source = buffers_of(plain, [x[layer, kv].tobytes() for layer in range(layers) for kv in (0, 1)])
    want = buffers_of(spec, [bytes.fromhex(b) for b in case["buffers"]])

    def converted(a: kvx.CacheSpec, b: kvx.CacheSpec, data: list[torch.Tensor]) -> list[torch.Tensor]:
        out = kvx.allocate_buffers(b, backend.device)
        kvx.convert([t.to(backend.device) for t in data], out, plan=kvx.plan(a, b), backend=backend.name)
        return [t.cpu() for t in out]

    assert [t.tolist() for t in converted(plain, spec, source)] == [t.tolist() for t in want]
    assert [t.tolist() for t in converted(spec, plain, want)] == [t.tolist() for t in source]


def test_goldens_are_what_their_script_makes():
    assert make_elements.text() == GOLDEN.read_text()
    assert {(c["row"], c["element_bytes"]) for c in CASES} == {(row, n) for row in make_elements.ROWS for n in (1, 2, 4, 8)}
    assert not re.search(r"^\s*(import|from) kvx", Path(make_elements.__file__).read_text(), re.M)


def test_eight_byte_elements_only_move():
    sizes = {"num_blocks": 2, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    spec, half = (kvx.CacheSpec(**sizes, format=name) for name in ("f64", "bf16"))
    for a, b in ((spec, half), (half, spec)):
        with pytest.raises(kvx.Unsupported, match=f"k is {a.format} at the source and {b.format} .* f64 converts bit for bit only"):
            kvx.plan(a, b)
    cache = (torch.zeros(2, 4, 2, 8, dtype=torch.float64),) * 2
    rows = torch.zeros(1, 2, 8)
    with pytest.raises(kvx.Unsupported, match="format f64 only converts"):
        kvx.write(cache, rows, rows, slot_mapping=torch.zeros(1, dtype=torch.int64), spec=spec)
    with pytest.raises(kvx.Unsupported, match="format f64 only converts"):
        kvx.gather(cache, kvx.PackedTable(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])), spec=spec)
    assert kvx.describe(cache, "kv | block token head dim") == spec
    assert kvx.digest(cache, spec, backend="torch") == kvx.digest(cache, spec)
