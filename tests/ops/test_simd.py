"""Every instruction set gives the same bits (attention: is as near): narrower ones are asked for by KVX_SIMD, in a process each."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvx

CHECK = """
import torch
from kvx.ops import library
from tests import cases, compare
from tests.ops import attention_cases, mla_cases
assert library.build_info().simd == {simd!r}, library.build_info().simd
for case in (*cases.PLAIN, *cases.QUANTISED, *cases.SHAPES):
    made = case.make("cpu", torch.Generator().manual_seed(0))
    want = made.clone()
    want.write("torch")
    made.write("cpu")
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor, want.tensors()[name], str(case))
    if case.lens:
        for got, expected in zip(made.gather("cpu"), want.gather("torch"), strict=True):
            compare.bitwise(got, expected, str(case))
for case in (*attention_cases.DECODE, *attention_cases.FORMATS, *attention_cases.VARLEN, *mla_cases.ALL):  # an error, not bits
    made = case.make("cpu", torch.Generator().manual_seed(0))
    made.check(*made.run("cpu"))
"""

# Group sizes, dims and query types of caches of one format; what is printed shows whether two runs computed alike.
PRODUCTS = """
import hashlib
import torch
from tests.ops import attention_cases
case, lse = attention_cases.Case, hashlib.sha256()
for heads, dim in ((2, 64), (4, 96), (8, 128), (16, 256), (4, 144)):
    if dim % 32 and (FORMAT.startswith("mx") or FORMAT == "int4_per_group"):
        continue
    for more in ({}, {"soft_cap": 5.0}, {"window": 9, "queries": 2}, {"scale": -0.3}, {"layout": "HND"}):
        one = case(lens=(700, 1, 33), heads=heads, dim=dim, format=FORMAT, io=IO, **more)
        made = one.make("cpu", torch.Generator().manual_seed(0))
        got = made.run("cpu")
        made.check(*got)
        lse.update(got[1].numpy().tobytes())
print(lse.hexdigest())
"""


def _has(flag: str) -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and flag in info.read_text().split()


def _run(code: str, simd: str | None) -> str:
    env = {k: v for k, v in os.environ.items() if k != "KVX_SIMD"} | ({"KVX_SIMD": simd} if simd else {})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("io", ["bf16", "f16", "f32"])
def test_bf16_products(io):
    """AVX512_BF16 multiplies bf16 keys by 16-bit queries: as near as without it, by another way. f32 queries do not use it."""
    if not _has("avx512_bf16"):
        pytest.skip("this CPU has no AVX512_BF16")
    code = f"FORMAT, IO = 'bf16', {io!r}" + PRODUCTS
    assert (_run(code, "avx512bf16") != _run(code, "avx512")) == (io != "f32")


@pytest.mark.parametrize("io", ["bf16", "f16"])
@pytest.mark.parametrize(
    "fmt", ["bf16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "int4_per_token_head", "mxfp8", "mxfp4", "nvfp4"]
)
def test_tiles(fmt, io):
    """AMX multiplies tiles of bf16 or of bytes, whatever the cache's elements are: as near as without it, by another way."""
    ask_for_tiles = (158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) on x86
    if not _has("amx_bf16") or ctypes.CDLL(None).syscall(*ask_for_tiles) != 0:
        pytest.skip("this CPU has no AMX, or the system does not let this process use it")
    code = f"FORMAT, IO = {fmt!r}, {io!r}" + PRODUCTS
    assert _run(code, None) != _run(code, "avx512bf16")


@pytest.mark.parametrize("io", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("fmt", ["int8", "int8_per_token_head", "int4_per_token_head"])
def test_integer_products(fmt, io):
    """SDOT and VNNI multiply bytes by queries and weights in parts of 8 bits: as near as without them, by another way. With
    queries in f32 VNNI is not used."""
    if _has("asimddp"):
        wide, narrow = None, "plain"
    elif _has("avx512_vnni"):
        wide, narrow = "avx512vnni", "avx512"
    else:
        pytest.skip("this CPU has no instruction that adds up products of bytes")
    code = f"FORMAT, IO = {fmt!r}, {io!r}" + PRODUCTS
    assert (_run(code, wide) != _run(code, narrow)) == (io != "f32" or narrow == "plain")


@pytest.mark.parametrize("level", ["avx512", "avx512vnni", "avx512bf16"])
def test_small_formats_on_avx512(level):
    """Every way rows of few bits take for a few query rows, on each set of instructions that has its own."""
    if not _has({"avx512": "avx512dq", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}[level]):
        pytest.skip(f"this CPU has no {level}")
    formats = ("int8", "int4_per_token_head", "int4_per_group", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4")
    _run("".join(f"FORMAT, IO = {fmt!r}, {io!r}" + PRODUCTS for fmt in formats for io in ("bf16", "f16")), level)


@pytest.mark.parametrize("fmt", ["int8_per_token_head", "int4_per_token_head"])
@pytest.mark.parametrize("dim", [64, 72, 512, 576, 1024])
def test_sums_of_the_largest_integers(dim, fmt):
    """Where products of bytes are added up in 32 bits, the largest of them fit, in rows of any length."""
    heads, kv_heads, tokens = 8, 2, 70
    spec = kvx.CacheSpec(tokens // 16 + 1, 16, kv_heads, dim, layout=kvx.NHD, format=fmt)
    storage = kvx.allocate(spec)
    for t in storage.cache:
        t.view(torch.uint8).fill_(0x80 if fmt.startswith("int8") else 0x88)  # the least integer, in every element
    for scale in storage.scales().values():
        scale.fill_(1 / 64)
    table = kvx.PackedTable(torch.arange(spec.num_blocks, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32))
    q = torch.tensor([1.0, -1.0] * (heads // 2))[None, :, None].expand(1, heads, dim).to(torch.bfloat16).contiguous()
    given = {"spec": spec, **storage.scales()}
    got, lse = kvx.attention_decode(q, storage.cache, table, **given, backend="cpu")
    want, want_lse = kvx.attention_decode(q.double().float(), storage.cache, table, **given, backend="torch")
    torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=0)
    torch.testing.assert_close(lse, want_lse, rtol=2**-14, atol=0)


@pytest.mark.parametrize("simd", ["plain", "avx2", "avx512", "avx512vnni"])
def test_narrower_instruction_sets_agree(simd):
    is_arm = platform.machine() in ("aarch64", "arm64")
    if is_arm and simd != "plain":
        pytest.skip("an instruction set of x86")
    if not is_arm and not _has({"plain": "sse2", "avx2": "f16c", "avx512": "avx512dq", "avx512vnni": "avx512_vnni"}[simd]):
        pytest.skip(f"this CPU has no {simd}")
    _run(CHECK.format(simd="neon" if is_arm else simd), simd)
