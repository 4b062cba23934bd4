"""llama.cpp's recurrent states, read and written, against bytes of the engine itself and Transformers' states of the same weights.

tests/golden/states.json has both (make_states.py): the engine's states of tiny models after 20 tokens.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path

import pytest
import torch

import kvx
from kvx.adapters.llama_cpp import read_recurrent, write_recurrent
from kvx.layout.buffers import allocate_buffers
from kvx.layout.state_rows import state_row
from kvx.spec import PlaneSpec, StateSpec, state_plane

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "states.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
NUM_TOKENS = 20
MODELS = {  # its planes, layers with a state, all layers
    "qwen3_next": (
        (state_plane("conv", "f32", channel=128, tap=3), state_plane("delta", "f32", head=4, row=16, column=16)),
        3,
        4,
    ),
    "mamba2": ((state_plane("conv", "f32", channel=64, tap=3), state_plane("ssm", "f32", head=4, row=8, column=16)), 2, 2),
    "mamba": ((state_plane("conv", "f32", channel=32, tap=3), state_plane("ssm", "f32", channel=32, column=16)), 2, 2),
    "lfm2": ((state_plane("conv", "f32", channel=32, tap=2),), 2, 3),
}


def spec_of(name: str) -> StateSpec:
    planes, layers, _ = MODELS[name]
    return state_row("llama_cpp").spec(planes, num_blocks=1, num_layers=layers)


def state_of(name: str) -> bytes:
    return base64.b64decode(CASES[name]["llama_cpp"])


def transformers_buffers(name: str) -> list[torch.Tensor]:
    """Of the layers that have the same weights, in the row's order; each is the tensor that DynamicCache holds, [1, ...]."""
    out = []
    for layer in CASES[name]["transformers"]:
        for t in layer.values():
            data = bytearray(base64.b64decode(t["f32"]))
            out.append(torch.frombuffer(data, dtype=torch.float32).view(t["shape"]))
    return out


@pytest.mark.parametrize("name", MODELS)
def test_transformers_states_are_the_engines(name):
    """Row to row: what Transformers keeps becomes what llama.cpp wrote itself, up to the rounding of two engines."""
    planes, _, all_layers = MODELS[name]
    there = transformers_buffers(name)
    layers = len(there) // len(planes)
    src = state_row("transformers").spec(planes, num_blocks=1, num_layers=layers)
    dst = state_row("llama_cpp").spec(planes, num_blocks=1, num_layers=layers)
    out = allocate_buffers(dst)
    kvx.convert(there, out, plan=kvx.plan(src, dst))
    found = read_recurrent(state_of(name), spec_of(name), num_model_layers=all_layers)
    assert found.num_tokens == NUM_TOKENS
    for got, want in zip(out, found.buffers[: len(out)], strict=True):
        a, b = got.view(torch.float32), want.view(torch.float32)
        assert float(b.abs().max()) > 0.1
        assert float((a - b).abs().max()) < 5e-4 * float(b.abs().max())  # LFM2: behind a layer whose K and V llama.cpp keeps in f16


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_what_the_engine_wrote(name):
    """Byte for byte; behind the K and V of a hybrid's whole state too (LFM2's, which was taken with flags 0)."""
    data, spec, layers = state_of(name), spec_of(name), MODELS[name][2]
    found = read_recurrent(data, spec, num_model_layers=layers)
    alone = write_recurrent(found.buffers, spec, num_tokens=found.num_tokens, num_model_layers=layers)
    before = data[: len(data) - len(alone) + 8]
    assert (before == struct.pack("<II", 0xAF143CD8, 0)) == (name != "lfm2")
    assert alone == struct.pack("<II", 0xAF143CD8, 0) + data[len(before) :]
    again = write_recurrent(found.buffers, spec, num_tokens=found.num_tokens, num_model_layers=layers, before=before)
    assert again == data


def test_lfm2_writes_matrices_of_no_bytes():
    data = state_of("lfm2")
    assert data[-24:] == struct.pack("<iQ", 0, 0) * 2
    _, layers, _ = MODELS["lfm2"]
    assert struct.unpack_from("<IiIIIiQ", data, len(data) - 24 - layers * (12 + 256) - 20) == (1, NUM_TOKENS - 1, 0, 0, 3, 0, 256)


def sd(planes: tuple[PlaneSpec, ...]) -> StateSpec:
    return state_row("vllm.sd").spec(planes, num_blocks=1, num_layers=2)


def changed(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + struct.pack("<I", value) + data[at + 4 :]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda d, s: read_recurrent(d[:100], s, num_model_layers=2), "data is 100 bytes; these states take"),
        (lambda d, s: read_recurrent(d[:-4], s, num_model_layers=2), "It is of another model, or of several sequences"),
        (lambda d, s: read_recurrent(d, s, num_model_layers=3), "2 layers; a state of this model has 1 cell"),
        (lambda d, s: read_recurrent(changed(d, 8, 2), s, num_model_layers=2), "it says 2 cells"),
        (lambda d, s: read_recurrent(changed(d, 28, 1), s, num_model_layers=2), "R of layer 0 of those with a state is of"),
        (lambda d, s: read_recurrent("text", s, num_model_layers=2), "data is str"),
        (lambda d, s: read_recurrent(d, spec_of("lfm2"), num_model_layers=2), "It was not read"),
        (lambda d, s: read_recurrent(d, sd(s.planes), num_model_layers=2), "Convert to it with kvx.convert"),
        (lambda d, s: write_recurrent([], s, num_tokens=20, num_model_layers=2), r"buffers have \[\] bytes"),
        (lambda d, s: write_recurrent(allocate_buffers(s), s, num_tokens=0, num_model_layers=2), "num_tokens is 0"),
        (
            lambda d, s: read_recurrent(d, StateSpec(1, (state_plane("ssm", "bf16", channel=8, column=4),)), num_model_layers=2),
            "planes are ssm bf16; llama.cpp has conv",
        ),
    ],
    ids=range(11),
)  # fmt: skip
def test_what_is_refused(make, why):
    with pytest.raises(kvx.KvxError, match=why):
        make(state_of("mamba2"), spec_of("mamba2"))
