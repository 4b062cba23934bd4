"""examples/c/convert.c: a plan made in Python, loaded and run by a program without Python, gives the bytes kvx.convert gives."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch

import kvx
from tests.abi.test_abi import EXAMPLE, build_program, run

GEOMETRY = {"num_kv_heads": 4, "head_dim": 32, "num_layers": 2}
FUSED, POOL, BLOCKS = "layer | block token head (kv dim)", "block layer kv head token dim", "block | head layer kv token dim"
PACKED = "layer kv[K: | block head dim/x token dim%x; V: | block head dim token]"


def spec(layout: str, num_blocks: int = 6, block_size: int = 8, **more) -> kvx.CacheSpec:
    return kvx.CacheSpec(num_blocks, block_size, layout=layout, **{**GEOMETRY, **more})


CASES = {
    "one buffer": (spec(FUSED), spec(POOL)),
    "a buffer for each block": (spec(PACKED), spec(BLOCKS, num_blocks=4)),
    "longer blocks": (spec(FUSED, 6, 4), spec(PACKED, 5, 8)),
    "shards": ([spec(FUSED).shard(2, i) for i in (0, 1)], spec(POOL)),
    "another format": (spec(FUSED), spec(POOL, format="int8_per_token_head")),
    "scales of blocks": (spec(FUSED, 6, 4), spec(POOL, 5, 8, format="fp8_e4m3_per_block_head")),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_program(EXAMPLE.with_name("convert.c"), tmp_path_factory.mktemp("convert"))


def expected(plan: kvx.Plan) -> bytes:
    """What the program says it does, done by kvx.convert."""
    sizes = plan.buffer_bytes("src")
    numbers = (np.arange(sum(sizes), dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)
    src = [torch.from_numpy(part.copy()) for part in np.split(numbers, np.cumsum(sizes)[:-1])]
    dst = [torch.zeros(size, dtype=torch.uint8) for size in plan.buffer_bytes("dst")]
    a, b = plan.src[0], plan.dst[0]
    whole = np.lcm(a.block_size, b.block_size)
    tokens = min(a.num_slots, b.num_slots) // whole * whole
    kvx.convert(
        src,
        dst,
        plan=plan,
        src_blocks=[a.num_blocks - 1 - i for i in range(tokens // a.block_size)],
        dst_blocks=list(range(tokens // b.block_size)),
        backend="cpu",
    )
    return b"".join(t.numpy().tobytes() for t in dst)


@pytest.mark.parametrize("name", CASES)
def test_the_program_makes_the_bytes_python_makes(program, tmp_path, name):
    plan = kvx.plan(*CASES[name])
    (tmp_path / "plan").write_bytes(plan.to_bytes())
    assert "kvx_run made the same bytes" in run(program, tmp_path / "plan", tmp_path / "out")
    got, want = (tmp_path / "out").read_bytes(), expected(plan)
    assert len(set(want)) > 16, "the destination is nearly empty: nothing was compared"
    assert got == want


def test_the_program_says_what_is_wrong(program, tmp_path):
    (tmp_path / "plan").write_bytes(b"KVXP" + bytes(200))
    done = subprocess.run([program, tmp_path / "plan", tmp_path / "out"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "kvx_plan_load returned INCOMPATIBLE" in done.stderr
    assert "the plan has version 0; this library reads 1." in done.stderr
