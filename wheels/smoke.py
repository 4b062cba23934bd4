"""What an installed kvx does first: files, commands and calls. make wheels runs it (build.py) in an environment of the wheels and
what pip got for them: `python -I smoke.py`, with the word `cuda` where kvx-cu13 is among them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import kvx
from kvx.ops import library

WITH_CUDA = "cuda" in sys.argv[1:]

# ---- the files

site = Path(kvx.__file__).parent.parent
assert site.name == "site-packages", f"{kvx.__file__} is not an installed kvx"
assert kvx.__version__ == version("kvx")
assert Path(kvx.include_dir(), "kvx_abi.h").exists()
path = Path(kvx.library_path())
assert path.is_relative_to(site / ("kvx_cu13" if WITH_CUDA else "kvx")), path
assert path.with_name("libkvbm_kernels.so").exists()
info = library.build_info()
assert info is not None, f"{path} does not load"
assert info.has_cuda == WITH_CUDA, info

# ---- the command


def say(*args: str) -> str:
    done = subprocess.run([Path(sys.executable).parent / "kvx", *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


assert kvx.__version__ in say("--version")
doctor = say("doctor")
assert "core       works" in doctor, doctor
assert str(path) in doctor, doctor
assert "vllm" in say("layouts")

# ---- the calls: allocate, write, gather, attend, convert


def try_on(device: str) -> None:
    spec = kvx.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64)
    assert kvx.supports("write", spec, device), kvx.supports("write", spec, device)
    blocks, num_tokens = torch.tensor([[5, 2, 7]], dtype=torch.int32, device=device), 40
    table = kvx.PackedTable(blocks, torch.tensor([num_tokens], dtype=torch.int32, device=device))
    slots = (blocks.long().T * 16 + torch.arange(16, device=device)).flatten()[:num_tokens]
    k, v = torch.randn(2, num_tokens, 2, 64, device=device).to(torch.bfloat16)

    def read(cache: torch.Tensor, of: kvx.CacheSpec) -> list[torch.Tensor]:
        return [x.reshape(num_tokens, 2, 64) for x in kvx.gather(cache, table, spec=of, max_seq_len=num_tokens)]

    store = kvx.allocate(spec, device=device)
    kvx.write(store.cache, k, v, slot_mapping=slots, spec=spec)
    assert all(map(torch.equal, read(store.cache, spec), (k, v))), "what was written is not what is gathered"

    q = torch.randn(1, 4, 64, device=device).to(torch.bfloat16)
    out, _ = kvx.attention_decode(q, store.cache, table, spec=spec)
    q4, k4, v4 = (x.float().movedim(1, 0).repeat_interleave(4 // x.shape[1], 0) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q4, k4, v4)
    assert torch.allclose(out.float().movedim(1, 0), want, atol=2e-2), "attention is not what torch computes"

    other = kvx.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64, layout=kvx.HND)
    converted = kvx.allocate(other, device=device)
    kvx.convert(src=store.cache, dst=converted.cache, plan=kvx.plan(spec, other))
    assert all(map(torch.equal, read(converted.cache, other), (k, v))), "what was converted is not what is gathered"


try_on("cpu")
if WITH_CUDA and torch.cuda.is_available():
    try_on("cuda")
print(f"kvx {kvx.__version__} works with torch {torch.__version__} and {path.relative_to(site)}")
