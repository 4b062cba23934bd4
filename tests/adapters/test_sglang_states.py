"""SGLang's pools of states, read and written: golden bytes of the engine itself (tests/golden/make_states_sglang.py).

Known numbers were written into slots of its device pool by its own kernels (of Zaya and Inkling: by the pool's shapes), and its
host pool made pages of them. Every comparison is of bits.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch

import kvx
from kvx.layout.buffers import allocate_buffers
from kvx.layout.state_rows import state_row
from kvx.spec import PlaneSpec, StateSpec, state_plane

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "states_sglang.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
SLOTS, NUM_SLOTS, LAYERS = GOLDEN["slots"], 4, 2  # two sequences, in a pool of 3 slots and one more


def convs(taps: int, *channels: int) -> tuple[PlaneSpec, ...]:
    return tuple(
        state_plane(f"conv{n or ''}", "bf16", channel=c, tap=taps) for n, c in zip((0, 2, 3, 4, 5, 6), channels, strict=False)
    )


MODELS = {
    "mamba2": ("sglang", (*convs(3, 48), state_plane("ssm", "f32", head=4, row=4, column=8))),
    "qwen3_next": ("sglang", (*convs(3, 48), state_plane("delta", "f32", head=4, row=8, column=4))),
    "mamba": ("sglang", (*convs(3, 16), state_plane("ssm", "f32", channel=16, column=8))),
    "lfm2": ("sglang", convs(2, 16)),
    "zaya": ("sglang", (*convs(2, 8), state_plane("conv2", "bf16", channel=16, tap=1))),
    "kimi_linear": ("sglang.kimi", (*convs(3, 48), state_plane("delta", "f32", head=2, row=8, column=8))),
    "inkling": ("sglang.kimi", convs(3, 4, 4, 8, 8, 16, 16)),
}


def tensor(found: dict) -> torch.Tensor:
    data = bytearray(base64.b64decode(found["data"]))
    return torch.frombuffer(data, dtype=getattr(torch, found["dtype"])).view(found["shape"])


class Golden:
    def __init__(self, name: str) -> None:
        case = CASES[name]
        row, self.planes = MODELS[name]
        self.written = {kind: tensor(t) for kind, t in case["written"].items()}  # [layer, sequence, *axes of the plane]
        self.device = [tensor(t) for t in case["device"]]  # [layer, slot, ...]
        self.pages = torch.stack([tensor(t) for t in case["host"]])
        self.device_spec = state_row(row).spec(self.planes, num_blocks=NUM_SLOTS, num_layers=LAYERS)
        self.host_spec = state_row(f"{row}.host").spec(self.planes, num_blocks=len(SLOTS), num_layers=LAYERS)
        self.plain = state_row("transformers").spec(self.planes, num_blocks=len(SLOTS), num_layers=LAYERS)

    def transformers_tensors(self) -> list[torch.Tensor]:
        """What was written, as Transformers has it: a tensor for each plane of a layer, and a column of zeros before the taps."""
        out = []
        for layer in range(LAYERS):
            for plane in self.planes:
                x = self.written[plane.name][layer]
                out.append(torch.cat([torch.zeros_like(x[..., :1]), x], -1) if plane.name.startswith("conv") else x)
        return out


def as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.contiguous().view(torch.uint8).reshape(-1) for t in tensors]


def convert(src: list[torch.Tensor], a: StateSpec, b: StateSpec, blocks: tuple[list[int], list[int]]) -> list[torch.Tensor]:
    out = allocate_buffers(b)
    for t in out:
        t.zero_()
    kvx.convert(src, out, plan=kvx.plan(a, b, blocks=blocks))
    return as_bytes(out)


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, as_bytes(want), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_device_pool(name):
    """Slots of [layers, slots, ...] are the numbers that the engine was given; these written are its pool, other slots zero."""
    golden = Golden(name)
    assert all(float(x.float().abs().min()) > 0 for x in golden.written.values())
    here = [0, 1]
    assert same(convert(golden.device, golden.device_spec, golden.plain, (SLOTS, here)), golden.transformers_tensors())
    assert same(convert(golden.transformers_tensors(), golden.plain, golden.device_spec, (here, SLOTS)), golden.device)
    views = kvx.layer_views(golden.device, golden.device_spec)
    for layer, found in enumerate(views):
        for view in found:
            want = golden.written[view.plane][layer]
            assert torch.equal(view.tensor[SLOTS].reshape(want.shape), want)


@pytest.mark.parametrize("name", MODELS)
def test_host_pool(name):
    """Pages are the same numbers, both ways, and from the device's slots as the engine's own backup made them."""
    golden = Golden(name)
    here = [0, 1]
    assert same(convert([golden.pages], golden.host_spec, golden.plain, (here, here)), golden.transformers_tensors())
    assert same(convert(golden.transformers_tensors(), golden.plain, golden.host_spec, (here, here)), [golden.pages])
    assert same(convert(golden.device, golden.device_spec, golden.host_spec, (SLOTS, here)), [golden.pages])
    assert same(convert([golden.pages], golden.host_spec, golden.device_spec, (here, SLOTS)), golden.device)


def test_a_matrix_turned_round_is_seen():
    """Kimi's is square: which axis is the key's is said by the engine's kernel alone, and the other reading is not what it got."""
    golden = Golden("kimi_linear")
    matrix, want = golden.device[1][:, SLOTS], golden.written["delta"]
    assert torch.equal(matrix.transpose(-1, -2), want)
    assert not torch.equal(matrix, want)
