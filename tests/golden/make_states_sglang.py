"""Golden bytes of SGLang's states: known numbers written into its MambaPool by its own kernels, and its host pool's pages of them.

    python tests/golden/make_states_sglang.py      writes tests/golden/states_sglang.json

The kernels of a decode step are given tokens that leave a state of chosen numbers, to the bit: a convolution keeps what goes into
it; a delta rule without decay, with beta 1 and one-hot keys, has the value of token i in row i of its matrix; a state space with
A = 0, dt = 1 and one-hot B has the x of token i in column i. So the engine says what an axis means, not a shape. They run in
Triton's interpreter. Zaya and Inkling have kernels of their own: numbers are put into tensors of their pools by shape. Pages are
made by the host pool's own backup, and read back by it. Needs sglang and what it imports, less its packages of kernels
and torchvision, on a CPU without AMX, for which it orders convolutions otherwise; no KVX.
"""

# ruff: noqa: E402 - the interpreter is chosen, and torchvision replaced, before sglang is imported

from __future__ import annotations

import base64
import contextlib
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from transformers import AutoImageProcessor, AutoProcessor  # noqa: F401 - before torchvision is replaced, which they look for

for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
    module = MagicMock(name=name, __path__=[], __version__="0.0", __spec__=importlib.machinery.ModuleSpec(name, None))
    sys.modules.setdefault(name, module)

import sglang
from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update
from sglang.srt.configs.inkling import InklingConvCacheParams, InklingConvStateShape
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

HERE = Path(__file__).resolve().parent
LAYERS, SLOTS = [0, 2], [3, 1]  # two layers of a model; the slots of two sequences, in a pool of 3 + 1
INDICES = torch.tensor(SLOTS, dtype=torch.int32)
HOST = torch.tensor([2, 5])  # their pages


class Builder(InterpreterBuilder):  # type: ignore[misc]
    """Its masks are bool: the interpreter takes no other, and makes integers where a scalar's comparison is a part of one."""

    def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return super().create_masked_load(ptrs, TensorHandle(mask.data.astype(bool), mask.dtype), *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return super().create_masked_store(ptrs, value, TensorHandle(mask.data.astype(bool), mask.dtype), *rest)


interpreter.interpreter_builder.__class__ = Builder
torch.cpu.device = contextlib.nullcontext  # type: ignore[attr-defined]  # a launch enters its device, which the CPU has none of


def delta(state: torch.Tensor, want: torch.Tensor, key_heads: int, is_kda: bool) -> None:
    """`want` [sequence, head, key, value]: token i has key i alone, and row i as its value."""
    n, heads, keys, values = want.shape
    k = torch.eye(keys).view(1, keys, 1, keys).expand(n, keys, key_heads, keys).reshape(1, n * keys, key_heads, keys).contiguous()
    v = want.transpose(1, 2).reshape(1, n * keys, heads, values).contiguous()
    gate = heads * keys if is_kda else heads
    fused_sigmoid_gating_delta_rule_update(
        A_log=torch.full((heads,), -200.0), a=torch.zeros(n * keys, gate), dt_bias=torch.zeros(gate), softplus_beta=1.0,
        softplus_threshold=20.0, q=k.clone(), k=k, v=v, b=torch.full((n * keys, heads), 60.0), initial_state_source=state,
        initial_state_indices=INDICES, cu_seqlens=torch.arange(n + 1, dtype=torch.int32) * keys, is_kda=is_kda,
    )  # fmt: skip


def ssm(state: torch.Tensor, want: torch.Tensor, groups: int) -> None:
    """`want` [sequence, head, head dim, state size]: token i has column i + group of it as x, and a B that is one there alone."""
    n, heads, dim, size = want.shape
    group = torch.arange(heads) // (heads // groups)
    for i in range(size):
        B = torch.nn.functional.one_hot((i + torch.arange(groups)) % size, size).float().expand(n, groups, size).contiguous()
        x = torch.stack([want[:, h, :, (i + int(group[h])) % size] for h in range(heads)], 1).contiguous()
        A, dt, none = torch.zeros(heads, dim, size), torch.ones(n, heads, dim), torch.zeros(heads, dim)
        selective_state_update(
            state, x, dt, A, B, B.clone(), D=none, dt_bias=none, state_batch_indices=INDICES, out=torch.empty_like(x)
        )


def conv(state: torch.Tensor, want: torch.Tensor) -> None:
    """`want` [sequence, channel, tap], oldest tap first; `state` as the kernel is given it, [slots, channels, taps]."""
    weight = torch.ones(want.shape[1], want.shape[2] + 1, dtype=want.dtype)
    for i in range(want.shape[2]):
        causal_conv1d_update(want[:, :, i].contiguous(), state, weight, conv_state_indices=INDICES)


def text(x: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(x.contiguous().view(torch.uint8).numpy().tobytes()).decode()
    return {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."), "data": data}


def pools(params: Any) -> tuple[MambaPool, MambaPoolHost]:
    pool = MambaPool(size=3, spec_state_size=0, cache_params=params, mamba_layer_ids=LAYERS, device="cpu")
    info = pool.get_device_pool_infos()[0].buffer_info
    return pool, MambaPoolHost(info, 2.0, 0, device_capacity=3, pin_memory=False, layout="page_first")


def write(pool: MambaPool, is_kda: bool, matrix: str, groups: int, kernels: bool, taps_first: bool) -> dict[str, torch.Tensor]:
    """Random numbers into the slots; they must be [layer, sequence, ...]: channel by tap, head dim by state size, key by value."""
    written: dict[str, torch.Tensor] = {}
    for n, tensor in enumerate(pool.mamba_cache.conv):
        shape = tensor.shape[:1:-1] if taps_first else tensor.shape[2:]
        written["conv" if n == 0 else f"conv{n + 1}"] = want = torch.randn(len(LAYERS), len(SLOTS), *shape).to(tensor.dtype)
        for layer in range(len(LAYERS)):
            state = pool.mamba2_layer_cache(layer).conv[n]
            state = state.transpose(-1, -2) if taps_first else state  # as the engine gives KimiLinear's to the kernel
            if kernels:
                conv(state, want[layer])
            else:
                state[INDICES.long()] = want[layer]
    if matrix:
        heads, *sizes = pool.mamba_cache.temporal.shape[2:]
        shape = (heads, *(sizes if matrix == "ssm" else sizes[::-1]))
        written[matrix] = want = torch.randn(len(LAYERS), len(SLOTS), *shape)
        for layer in range(len(LAYERS)):
            state = pool.mamba2_layer_cache(layer).temporal
            if matrix == "ssm":
                ssm(state, want[layer], groups)
            else:
                delta(state, want[layer], groups, is_kda)
    return written


def case(
    name: str, params: Any, matrix: str = "", groups: int = 1, kernels: bool = True, taps_first: bool = False
) -> dict[str, Any]:
    (pool, host), (other, back) = pools(params), pools(params)
    written = write(pool, params.is_kda, matrix, groups, kernels, taps_first)
    slots, how = torch.tensor(SLOTS), "kernel_ascend"  # of the host pool's ways the one that is plain torch
    host.backup_from_device_all_layer(pool, HOST, slots, io_backend=how)
    pages = [host.get_data_page(int(i)).clone() for i in HOST]
    for index, page in enumerate(pages):
        back.set_from_flat_data_page(index, page)
    for layer in range(len(LAYERS)):
        back.load_to_device_per_layer(other, torch.tensor([0, 1]), slots, layer, io_backend=how)
    tensors, again = ([*p.mamba_cache.conv, p.mamba_cache.temporal] for p in (pool, other))
    assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))
    return {
        "name": name,
        "written_by": "kernels" if kernels else "shape",
        "written": {kind: text(t) for kind, t in written.items()},
        "device": [text(t) for t in tensors if t.numel()],
        "host": [text(p) for p in pages],
    }


def main() -> None:
    torch.manual_seed(0)
    kinds = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)

    def mamba(shape: Any) -> Any:
        return Mamba2CacheParams(shape=shape, layers=LAYERS, dtype=kinds)

    create = Mamba2StateShape.create
    # Mamba2: state size 8, and Qwen3-Next: keys of 8; heads of 4, 2 groups or key heads
    heads = create(tp_world_size=1, intermediate_size=16, n_groups=2, num_heads=4, head_dim=4, state_size=8, conv_kernel=4)
    one = Mamba2StateShape.create_full_rank(tp_world_size=1, intermediate_size=16, state_size=8, conv_kernel=4)
    lfm = create(tp_world_size=1, intermediate_size=16, n_groups=1, num_heads=1, head_dim=16, state_size=0, conv_kernel=3)
    kda = KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=8)
    rest = {"intermediate_size": 8, "conv_dim": 8, "ssm_state_size": 0, "num_heads": 1, "head_dim": 1, "state_size": 0}
    zaya = Mamba2StateShape(conv=[(8, 2), (16, 1)], temporal=(1, 1, 0), conv_kernel=3, **rest)
    ink = InklingConvStateShape(conv=[(3, 4), (3, 4), (3, 8), (3, 8), (3, 16), (3, 16)], temporal=(0, 0, 0))
    cases = [
        case("mamba2", mamba(heads), "ssm", groups=2),
        case("qwen3_next", mamba(heads), "delta", groups=2),
        case("mamba", mamba(one), "ssm"),
        case("lfm2", mamba(lfm)),
        case("kimi_linear", KimiLinearCacheParams(shape=kda, layers=LAYERS, dtype=kinds), "delta", groups=2, taps_first=True),
        case("zaya", mamba(zaya), kernels=False),
        case("inkling", InklingConvCacheParams(shape=ink, layers=LAYERS), kernels=False, taps_first=True),
    ]
    body = {"made_by": f"sglang {sglang.__version__}, on aarch64", "slots": SLOTS, "cases": cases}
    (HERE / "states_sglang.json").write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
