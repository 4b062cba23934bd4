"""How vLLM's CPU backend packs a block: found by writing rows through its own op and looking where they came out.

Its tensors say [block, head, token, 2 dim], whatever is inside. Which packing it takes depends on the machine, the type and the
build (an Arm wheel with or without BFMMLA), so no table of them can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvx.connector.groups import Group
from kvx.errors import KvxError, Unsupported
from kvx.layout.buffers import allocate_buffers
from kvx.layout.engines import ENGINES
from kvx.layout.plan import plan
from kvx.ops.move.convert import convert

ROWS = ("vllm.cpu", "vllm.cpu.amx", "vllm.cpu.arm")
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# k and v [token, head, dim] into a cache [block, head, token, 2 dim], at slots
WriteRows = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def find_packing(group: Group, write: WriteRows) -> str:
    """The row of kvx/layout/engines.py that has these bytes. Unsupported where none has."""
    heads, dim, size, blocks = 2, group.head_dim, group.block_size, 3
    dtype, tokens = _DTYPES[group.format], blocks * size
    values = torch.arange(2 * tokens * heads * dim, dtype=torch.int32).view(2, tokens, heads, dim)
    # Numbers that are exact in every type and differ between near neighbours in every axis.
    k, v = ((values * 7919) % 251 - 125).to(dtype)
    cache = torch.zeros(blocks, heads, size, 2 * dim, dtype=dtype)
    write(k, v, cache, torch.arange(tokens, dtype=torch.int64))
    for name in ROWS:
        try:
            spec = ENGINES[name].spec(
                num_layers=1, num_blocks=blocks, block_size=size, num_kv_heads=heads, head_dim=dim, format=group.format
            )
            plain = replace(spec, layout="layer kv | block token head dim")
            found = allocate_buffers(plain)
            convert([cache], found, plan=plan(spec, plain))
        except KvxError:  # a packing whose tiles this head or block does not fill
            continue
        if all(torch.equal(a.view(dtype).view(b.shape), b) for a, b in zip(found, (k, v), strict=True)):
            return name
    raise Unsupported(
        f"KvxConnector: vLLM's CPU backend packs blocks of {size} tokens of {dim} {group.format} elements in a way that is none of "
        f"{', '.join(ROWS)}. It was not read."
    )
