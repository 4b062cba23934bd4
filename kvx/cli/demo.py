"""kvx demo: a cache described, written, gathered and inspected, in a few seconds on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import kvx
from kvx.cli.inspect import build_facts
from kvx.cli.options import check_device
from kvx.layout.planes import cache_shapes

FORMATS = ("bf16", "fp8_e4m3_per_head", "fp8_e4m3_per_token_head", "int8_per_token_head", "nvfp4")


def demo(
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Write two sequences into scattered blocks of a small cache in several formats, and gather them again."""
    check_device(device)
    console = Console()
    facts = build_facts()
    cuda = facts["cuda_archs"] or "not built"
    simd = f"{facts['simd']} x {facts['threads']} threads"
    console.print(f"kvx {facts['kvx']} · ABI {facts['abi']} · {simd} · CUDA {cuda} · on {device}\n")

    spec = kvx.CacheSpec(num_blocks=32, block_size=16, num_kv_heads=8, head_dim=128, layout=kvx.HND)
    console.print("1. Describe: everything about the cache but its address.")
    console.print(f"   {spec}")
    console.print(
        f"   tensors {[list(s) for s in cache_shapes(spec)]}, {spec.cache_bytes / 1e6:.1f} MB, digest {kvx.spec.digest(spec)}\n"
    )

    torch.manual_seed(0)
    lens = torch.tensor([100, 37], dtype=torch.int32, device=device)
    order = torch.randperm(spec.num_blocks, device=device)
    table = torch.stack([order[:8], order[8:16]]).to(torch.int32)
    seq = torch.repeat_interleave(torch.arange(2, device=device), lens)
    pos = torch.cat([torch.arange(int(n), device=device) for n in lens])
    slots = kvx.slot_mapping(table, pos, seq, spec.block_size)
    k, v = (torch.randn(slots.shape[0], 8, 128, device=device).to(torch.bfloat16) for _ in range(2))
    console.print(
        f"2. Write: {slots.shape[0]} tokens of two sequences into blocks {table[0, :7].tolist()} and {table[1, :3].tolist()}.\n"
    )

    result = Table(title="3. Gather: the same tokens back, in order", title_justify="left")
    for column in ("format", "B/token", "write", "gather", "error", "backend"):
        result.add_column(column, justify="left" if column in ("format", "backend") else "right", no_wrap=True)
    for name in FORMATS:
        result.add_row(name, *round_trip(name, spec, k, v, slots, table, lens))
    console.print(result)

    console.print("\n4. Inspect: which blocks are in use (one letter a block, by sequence).")
    letters = ["."] * spec.num_blocks
    for s, n in enumerate(lens.tolist()):
        for block in table[s, : -(-n // spec.block_size)].tolist():
            letters[block] = "AB"[s]
    console.print("   " + "".join(letters))
    console.print("\nNext: `kvx inspect`, `kvx inspect --formats`, `kvx bench write`.")


def round_trip(
    name: str,
    base: kvx.CacheSpec,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
) -> tuple[str, ...]:
    """One format: write, gather, and how far the result is from what went in."""
    spec = kvx.CacheSpec(base.num_blocks, base.block_size, base.num_kv_heads, base.head_dim, layout=base.layout, format=name)
    storage = kvx.allocate(spec, k.device)
    if name.endswith("per_head"):
        storage = kvx.Storage(spec, storage.cache, *(kvx.scale_from_amax(kvx.amax(x, "head"), name) for x in (k, v)))
    write_us = timed(lambda: storage.write(k, v, slots))
    packed = kvx.PackedTable(table, lens)
    longest = int(lens.max())
    out = storage.gather(packed, max_seq_len=longest)
    gather_us = timed(lambda: storage.gather(packed, max_seq_len=longest, out=out))
    first = int(lens[0])
    error = max(float((a[0, :first].float() - x[:first].float()).abs().max()) for a, x in zip(out, (k, v), strict=True))
    return f"{spec.token_bytes}", f"{write_us:.0f} us", f"{gather_us:.0f} us", f"{error:.3f}", k.device.type


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call after a warm-up, device included."""
    for _ in range(3):
        call()
    sync: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    sync()
    start = time.perf_counter()
    call()
    sync()
    return (time.perf_counter() - start) * 1e6
