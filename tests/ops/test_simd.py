"""Every instruction set gives the same bits (attention: is as near): narrower ones are asked for by KVX_SIMD, in a process each."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("simd", ["plain", "avx2"])
def test_narrower_instruction_sets_agree(simd):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("KVX_SIMD chooses among x86 instruction sets; Arm has one, which every other test runs")
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(simd=simd)], env={**os.environ, "KVX_SIMD": simd}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
