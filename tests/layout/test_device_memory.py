"""What a device has no memory for is refused before any is taken. On the host it would end the process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvx
from kvx.layout import device_memory
from kvx.layout.device_memory import check_fits, device_bytes, host_bytes

HUGE = kvx.CacheSpec(num_blocks=10**9, block_size=16, num_kv_heads=4, head_dim=64)  # 16 TB
LAYOUTS = ["kv | block token head dim", "layer | block kv token head dim", "block token head (kv dim)"]


@pytest.fixture
def small_host(monkeypatch):
    """One of 4 MB, so that a test may go past its end."""
    monkeypatch.setattr(device_memory, "host_bytes", lambda: 4_000_000)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["bf16", "int8_per_token_head"])
def test_more_than_there_is(layout, format):
    spec = replace(HUGE, layout=layout, format=format)
    for call, make in (("allocate_buffers", kvx.allocate_buffers), ("allocate", kvx.allocate)):
        with pytest.raises(kvx.BadArgument, match=rf"^{call}\(\): 1000000000 blocks take .* GB; cpu has .* GB\. \d+ blocks"):
            make(spec)
    groups = [kvx.LayerGroup("all", (0, 1), spec)]
    with pytest.raises(kvx.BadArgument, match=r"^PagedCache\(\): 1000000000 blocks take"):
        kvx.PagedCache(groups, max_seqs=1, max_seq_len=64)


def test_all_layers_are_counted(small_host):
    """Each of them fits, and so do two; three do not."""
    spec = kvx.CacheSpec(num_blocks=100, block_size=16, num_kv_heads=2, head_dim=128, format="bf16")  # 1.64 MB
    assert spec.cache_bytes == 1_638_400
    made = kvx.PagedCache([kvx.LayerGroup("a", (0, 1), spec)], max_seqs=1, max_seq_len=64)
    assert made.memory_bytes == 2 * spec.cache_bytes
    with pytest.raises(kvx.BadArgument, match=r"100 blocks take 0\.0 GB; cpu has 0\.0 GB\. 40 blocks take half"):
        kvx.PagedCache([kvx.LayerGroup("a", (0, 1), spec), kvx.LayerGroup("b", (2,), spec)], max_seqs=1, max_seq_len=64)
    three = replace(spec, num_layers=3, layout="layer kv | block token head dim")
    with pytest.raises(kvx.BadArgument, match="40 blocks take half of that"):
        kvx.allocate_buffers(three)
    kvx.allocate_buffers(replace(three, num_blocks=40))


def test_the_last_byte_fits(small_host):
    check_fits("call()", 5, 4_000_000, "cpu")
    check_fits("call()", 5, 4_000_000, torch.device("cpu"))
    with pytest.raises(kvx.BadArgument, match="2 blocks take half"):
        check_fits("call()", 5, 4_000_001, "cpu")
    with pytest.raises(kvx.BadArgument, match="Make the blocks smaller"):
        check_fits("call()", 1, 4_000_001, torch.device("cpu"))


def test_devices():
    assert device_bytes("cpu") == device_bytes(torch.device("cpu")) == host_bytes() > 0
    assert device_bytes("meta") is None
    assert len(kvx.allocate_buffers(replace(HUGE, num_blocks=1), None)) == 2  # torch's own default
    assert kvx.allocate_buffers(HUGE, "meta")[0].numel() == 10**9 * 16 * 4 * 64 * 2
    if torch.cuda.is_available():
        assert device_bytes("cuda") == torch.cuda.mem_get_info()[1]


SMALL = kvx.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=64)
CALLS = {
    "allocate": lambda device: kvx.allocate(SMALL, device),
    "allocate_buffers": lambda device: kvx.allocate_buffers(SMALL, device),
    "PagedCache": lambda device: kvx.PagedCache([kvx.LayerGroup("a", (0,), SMALL)], max_seqs=1, max_seq_len=32, device=device),
    "Engine.load": lambda device: kvx.runner.Engine.load("no-such-model", device=device),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_gpu_that_torch_does_not_see(call, device, monkeypatch):
    """torch's own words are "Torch not compiled with CUDA enabled", of no call in particular."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, advice in ((None, "built without CUDA: install a build with it"), ("13.0", "`nvidia-smi`, and CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        words = rf'^{call}\(\): device is "cuda.*", and torch sees no CUDA device\. .*{advice}.*, or use device="cpu"\.$'
        with pytest.raises(kvx.Unsupported, match=words):
            CALLS[call](str(device) if call == "Engine.load" else device)


def test_a_gpu_past_the_last(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        kvx.Unsupported, match=r'^allocate\(\): device is "cuda:2", and torch sees 2 CUDA devices, cuda:0 to cuda:1'
    ):
        kvx.allocate(SMALL, "cuda:2")


@pytest.mark.parametrize("call", ["allocate", "allocate_buffers", "PagedCache"])
def test_a_device_that_is_none(call):
    with pytest.raises(kvx.BadArgument, match=rf"^{call}\(\): device is 'gpu'; it takes \"cpu\", \"cuda\""):
        CALLS[call]("gpu")
    if not torch.xpu.is_available():
        with pytest.raises(kvx.Unsupported, match=rf'^{call}\(\): device is "xpu", which torch cannot use here'):
            CALLS[call]("xpu")
