"""SGLang's own pools, factory and keys on a CPU. Importing this imports SGLang, as far as it goes without a GPU.

Of what SGLang 0.5.23 imports torchvision alone is replaced; neither sgl_kernel nor flashinfer is needed. What needs a GPU is not
run here: the copies between device and host pools (sgl_kernel's transfer_kv_*, or Triton's), and whatever computes.
"""

# ruff: noqa: E402, F401 - torchvision is replaced before sglang is imported; tests take from here what they use of it

from __future__ import annotations

import importlib.machinery
import sys
import threading
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoImageProcessor, AutoProcessor  # before torchvision is replaced, which they look for

if find_spec("sglang") is None:  # of another package that is missing the import below fails
    why = "the package sglang is not installed here; `make engines` makes an environment that has it, .venv-sglang"
    pytest.skip(why, allow_module_level=True)

for _name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
    _module = MagicMock(name=_name, __path__=[], __version__="0.0", __spec__=importlib.machinery.ModuleSpec(_name, None))
    sys.modules.setdefault(_name, _module)

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import allocator, memory_pool
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed
from sglang.srt.runtime_context import get_parallel

LAYERS, HEADS, DIM = 3, 4, 16
MODEL = "tiny-test-weights"


def mha_device_pool(
    *, page_size: int = 4, tokens: int = 128, heads: int = HEADS, dim: int = DIM, v_dim: int = 0, layers: int = LAYERS,
    dtype=torch.bfloat16,
):  # fmt: skip
    return memory_pool.MHATokenToKVPool(
        size=tokens, page_size=page_size, dtype=dtype, head_num=heads, head_dim=dim, v_head_dim=v_dim or dim, layer_num=layers,
        device="cpu", enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip


def mha_pool(layout: str, *, page_size: int = 4, tokens: int = 128, layers: int = LAYERS, **more: Any):
    info = mha_device_pool(page_size=page_size, tokens=tokens, layers=layers, **more)._mha_buffer_info()
    return get_mha_host_pool_cls(info)(
        info, 2.0, 0, page_size, layout, pin_memory=False, device="cpu", device_capacity_tokens=tokens, start_layer=0,
        end_layer=layers - 1,
    )  # fmt: skip


def mla_pool(layout: str, *, page_size: int = 4, tokens: int = 128, dtype=torch.bfloat16):
    device = memory_pool.MLATokenToKVPool(
        size=tokens, page_size=page_size, dtype=dtype, kv_lora_rank=32, qk_rope_head_dim=16, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(), 2.0, 0, page_size, layout, pin_memory=False, device="cpu", device_capacity_tokens=tokens,
        start_layer=0, end_layer=LAYERS - 1, target_layer_num=LAYERS,
    )  # fmt: skip


def mamba_pool(layout: str = "page_first", *, temporal=torch.float32):
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=128, n_groups=1, num_heads=8, head_dim=16, state_size=24, conv_kernel=4
    )
    params = Mamba2CacheParams(shape=shape, layers=[0, 2], dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=temporal))
    state = memory_pool.MambaPool(
        size=8, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu"
    ).mamba_cache  # fmt: skip
    info = MambaStateBufferInfo(temporal=state.temporal, conv=tuple(state.conv))
    return MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout=layout)


def state_pool(config: Any, layers: list[int], ranks: int):
    """A rank's states in float32, in the shapes that SGLang's own configs of Falcon-H1 and LFM2 make of these numbers."""
    if config.model_type == "lfm2":
        sizes = {"intermediate_size": config.hidden_size, "n_groups": 1, "num_heads": ranks, "head_dim": config.hidden_size}
        sizes |= {"state_size": 0, "conv_kernel": config.conv_L_cache}
    else:
        sizes = {"intermediate_size": config.mamba_d_ssm, "n_groups": config.mamba_n_groups, "num_heads": config.mamba_n_heads}
        sizes |= {"head_dim": config.mamba_d_head, "state_size": config.mamba_d_state, "conv_kernel": config.mamba_d_conv}
    shape = Mamba2StateShape.create(tp_world_size=ranks, **sizes)
    params = Mamba2CacheParams(shape=shape, layers=layers, dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32))
    state = memory_pool.MambaPool(
        size=8, spec_state_size=0, cache_params=params, mamba_layer_ids=layers, device="cpu"
    ).mamba_cache  # fmt: skip
    info = MambaStateBufferInfo(temporal=state.temporal, conv=tuple(state.conv))
    return MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")


def config(folder, *, tp: tuple[int, int] = (0, 1), is_mla: bool = False, **extra: Any) -> HiCacheStorageConfig:
    told = {
        "backend_name": "kvx", "module_path": "kvx.adapters.sglang.storage", "class_name": "KvxStorage", "interface_v1": 1,
        "tiers": [f"disk:{folder}:1GB"], "model": MODEL, **extra,
    }  # fmt: skip
    return HiCacheStorageConfig(
        tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=is_mla,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="tiny", extra_config=told,
    )  # fmt: skip


def backend(folder, pool, *, name: str = "dynamic", **told: Any):
    """By SGLang's own factory, and registered as its controller does."""
    made = StorageBackendFactory.create_backend(name, config(folder, **told), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def controller(folder, pool, page_size: int = 4, *, device: Any = None, **extra: Any):
    """SGLang's own, with its threads; within `parallel()`. `device` is the pool whose pages go to the host's."""
    device = device or mha_device_pool(page_size=page_size)
    slots = allocator.PagedTokenToKVPoolAllocator(
        device.size, page_size=page_size, dtype=device.dtype, device="cpu", kvcache=device, need_sort=False
    )
    return HiCacheController(
        slots, pool, page_size, None, threading.Event(), io_backend="kernel", storage_backend="dynamic", model_name="tiny",
        storage_backend_extra_config=config(folder, **extra).extra_config,
    )  # fmt: skip


def parallel():
    """What a controller asks of the process that it runs in."""
    return get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0)


def keys(tokens, page_size: int, extra_key: str | None = None, cache_salt: str | None = None) -> list[str]:
    return get_hash_str(list(tokens), storage_namespace_seed(extra_key, cache_salt), page_size=page_size)
