"""vLLM's pages of states, read and written: golden pages of the engine itself (tests/golden/make_states_vllm.py), padded by it.

Qwen3-Next, bf16 and with the delta rule, and the DS order were not run: their bytes here are by vLLM's shapes alone,
`MambaSpec.shapes` ((taps, channels), (heads, value, key)), or (channels, taps).
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvx
from kvx.adapters.vllm.groups import GroupFacts, ModelFacts, read_groups, require_block_size
from kvx.adapters.vllm.layout import TensorFacts
from kvx.adapters.vllm.states import read_states, state_planes
from kvx.connector.groups import parts_of
from kvx.layout.buffers import allocate_buffers
from kvx.layout.state_rows import state_row
from kvx.spec import PlaneSpec, StateSpec, state_plane

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {
    "lfm2": (state_plane("conv", "f32", channel=64, tap=2),),
    "falcon_h1": (state_plane("conv", "f32", channel=64, tap=3), state_plane("ssm", "f32", head=4, row=8, column=16)),
}


def as_registered(storage: torch.Tensor, content_bytes: int) -> torch.Tensor:
    """Pages [num_blocks, page_bytes] as vLLM hands them to a connector: int8 [num_blocks, 1, 1, content], blocks a page apart."""
    blocks, page = storage.shape
    return storage.view(torch.int8).as_strided((blocks, 1, 1, content_bytes), (page, content_bytes, content_bytes, 1))


class Golden:
    """One model's pages, each in the block that its group had, and Transformers' states of the same layers."""

    def __init__(self, name: str) -> None:
        found = json.loads((GOLDEN / f"states_vllm_{name}.json").read_text())
        self.planes = MODELS[name]
        self.page_bytes = found["pages"][0]["page_bytes"]
        assert found["pages"][0]["content_bytes"] == sum(p.num_rows * p.row_bytes for p in self.planes)
        self.states = [self._tensors(layer) for layer in found["transformers"]]
        self.pages = [
            {int(b): np.frombuffer(base64.b64decode(text), np.uint8) for b, text in layer["blocks"].items()}
            for layer in found["pages"]
        ]
        self.block_ids = [group[0] for group in found["block_ids"]]

    def _tensors(self, layer: dict) -> list[torch.Tensor]:
        data = [(bytearray(base64.b64decode(t["f32"])), t["shape"]) for t in layer.values()]
        return [torch.frombuffer(x, dtype=torch.float32).view(shape) for x, shape in data]

    def spec(self, num_blocks: int) -> StateSpec:
        return state_row("vllm.sd").spec(self.planes, num_blocks=num_blocks, block_bytes=self.page_bytes)

    def block_of(self, layer: int) -> int:
        """Groups have blocks of their own in one memory: the layer's is the one whose page is nearest to its states."""
        want = self.as_page(layer)
        return min(self.pages[layer], key=lambda b: float(np.abs(self.pages[layer][b].view(np.float32) - want).max()))

    def as_page(self, layer: int) -> np.ndarray:
        """Transformers' states of a layer in vLLM's order, by numpy alone: [taps, channels], then [heads, head dim, state size]."""
        conv, *matrix = (t[0].numpy() for t in self.states[layer])
        return np.concatenate([conv[:, 1:].T.reshape(-1), *(m.reshape(-1) for m in matrix)])


@pytest.mark.parametrize("name", MODELS)
def test_pages_of_the_engine_are_read(name):
    """Padded pages become Transformers' tensors, up to the rounding of two engines.

    LFM2's second convolution stands behind a layer of attention, whose output the two engines do not agree on (2.1 of 37 there):
    its numbers are not compared, only its bytes, below.
    """
    golden = Golden(name)
    dst = state_row("transformers").spec(golden.planes, num_blocks=1)
    blocks = set()
    for layer, want in enumerate(golden.states):
        block = golden.block_of(layer)
        blocks.add(block)
        memory = torch.randint(0, 256, (5, golden.page_bytes), dtype=torch.uint8)
        memory[block, : len(golden.pages[layer][block])] = torch.from_numpy(golden.pages[layer][block].copy())
        out = allocate_buffers(dst)
        pages = as_registered(memory, len(golden.pages[layer][block]))
        kvx.convert([pages], out, plan=kvx.plan(golden.spec(5), dst, blocks=([block], [0])))
        for got, t in zip(out, want, strict=True):
            a, b = got.view(torch.float32).view(t.shape), t
            if t is want[0]:
                a, b = a[..., 1:], b[..., 1:]  # the oldest column is nobody's
            if name != "lfm2" or layer == 0:
                assert float((a - b).abs().max()) < 1e-4 * float(b.abs().max())
    assert blocks <= set(golden.block_ids)


@pytest.mark.parametrize("name", MODELS)
def test_pages_are_written_as_the_engine_does(name):
    """What was read and written again is the engine's page byte for byte, and its padding and other pages are as they were."""
    golden = Golden(name)
    plain = state_row("transformers").spec(golden.planes, num_blocks=1)
    spec = golden.spec(5)
    for layer in range(len(golden.states)):
        block = golden.block_of(layer)
        page = golden.pages[layer][block]
        source = torch.zeros(5, golden.page_bytes, dtype=torch.uint8)
        source[block, : len(page)] = torch.from_numpy(page.copy())
        between = allocate_buffers(plain)
        kvx.convert([as_registered(source, len(page))], between, plan=kvx.plan(spec, plain, blocks=([block], [0])))
        target = torch.full((5, golden.page_bytes), 0xA5, dtype=torch.uint8)
        want = target.clone()
        want[2, : len(page)] = source[block, : len(page)]
        kvx.convert(between, [as_registered(target, len(page))], plan=kvx.plan(plain, spec, blocks=([0], [2])))
        assert torch.equal(target, want)


def qwen3_next_planes(order: str) -> tuple[tuple[PlaneSpec, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Its planes, random content [taps or channels, ...] as vLLM shapes it, and the page's bytes."""
    planes = (state_plane("conv", "bf16", channel=1024, tap=3), state_plane("delta", "bf16", head=4, row=128, column=128))
    rng = np.random.default_rng(0)
    conv, delta = (rng.integers(0, 2**16, shape, dtype=np.uint16) for shape in ((1024, 3), (4, 128, 128)))
    first = conv.T if order == "vllm.sd" else conv
    page = np.concatenate([first.reshape(-1), delta.swapaxes(1, 2).reshape(-1)]).view(np.uint8)  # [heads, value, key]
    return planes, conv, delta, page


@pytest.mark.parametrize("order", ["vllm.sd", "vllm.ds"])
def test_pages_of_qwen3_next_beside_attention(order):
    """((3, 1024), (4, 128, 128)) in bf16: 137,216 bytes of a page of 163,840. By vLLM's shapes: it does not run on this CPU."""
    planes, conv, delta, page = qwen3_next_planes(order)
    assert len(page) == 137216
    spec = state_row(order).spec(planes, num_blocks=3, block_bytes=163840)
    storage = torch.full((3, 163840), 0x5A, dtype=torch.int8)
    storage[1, :137216] = torch.from_numpy(page.copy()).view(torch.int8)
    memory = as_registered(storage, 137216)
    views = kvx.layer_views([memory], spec)[0]
    for view, want in zip(views, (conv, delta), strict=True):
        assert np.array_equal(view.tensor[1].contiguous().view(torch.int16).numpy().view(np.uint16), want)
    there = state_row("transformers").spec(planes, num_blocks=1)
    between, target = allocate_buffers(there), torch.full((3, 163840), 0x5A, dtype=torch.int8)
    kvx.convert([memory], between, plan=kvx.plan(spec, there, blocks=([1], [0])))
    kvx.convert(between, [as_registered(target, 137216)], plan=kvx.plan(there, spec, blocks=([0], [1])))
    assert torch.equal(target, storage)


def falcon_h1(**more: object) -> dict:
    return {
        "model_type": "falcon_h1", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
        **more,
    }  # fmt: skip


STATES = GroupFacts(
    "MambaSpec", ("model.2.mixer", "model.3.mixer"), 1024, 0, 0, "", states=(((3, 64), "float32"), ((4, 8, 16), "float32"))
)


def test_a_connector_reads_groups_of_states():
    """Falcon-H1's layers are counted after those of attention. Shapes are a rank's: B and C are on both."""
    (group,) = read_groups([STATES], ModelFacts(2, planes=state_planes(falcon_h1())))
    assert (group.layers, group.keeps_states) == ((0, 1), False)
    assert [(p.name, p.sizes) for p in group.planes] == [
        ("conv", {"channel": 64, "tap": 3}),
        ("ssm", {"head": 4, "row": 8, "column": 16}),
    ]
    kv = GroupFacts("FullAttentionSpec", ("model.0.attn", "model.1.attn"), 32, 1, 32, "float32")
    parts = parts_of(read_groups([STATES, kv], ModelFacts(2, planes=state_planes(falcon_h1()))))
    assert [(part.is_state, part.layers) for part in parts] == [(False, (0, 1)), (True, (0, 1))]
    rank = replace(STATES, states=(((3, 48), "float32"), ((2, 8, 16), "float32")))
    (half,) = read_groups([rank], ModelFacts(2, planes=state_planes(falcon_h1()), num_ranks=2))
    assert half.planes == group.planes
    require_block_size(32, [group])  # its one block is as long as a request
    kind = parts_of([group])[0].state_spec(model="m")
    neutral = StateSpec(1, group.planes, num_layers=2, model="m")
    assert kind == neutral.replaced(layout=neutral.block_layout)  # as kvx.adapters.transformers hands them over


def test_a_connectors_pages():
    (group,) = read_groups([STATES], ModelFacts(2, planes=state_planes(falcon_h1())))
    (part,) = parts_of([group])
    spec = part.state_spec(model="m")
    content = StateSpec(1, group.planes).block_content_bytes
    page = TensorFacts((3, 1, 1, content), (4096, content, content, 1), 1, 0)
    made = read_states(group, [page, page], part, spec, num_blocks=3, order="vllm.sd")
    assert [(s.layers, s.spec.layer_start, s.spec.block_bytes) for s in made] == [((0,), 0, 4096), ((1,), 1, 4096)]
    for other in (replace(page, shape=(3, 1, 1, content + 4)), replace(page, element_bytes=4), replace(page, shape=(3, content))):
        with pytest.raises(kvx.Unsupported, match=r"the states of model\.2\.mixer are .* it reads pages"):
            read_states(group, [other, page], part, spec, num_blocks=3, order="vllm.sd")


@pytest.mark.parametrize(
    ("facts", "config", "says"),
    [
        (replace(STATES, states=(((3, 60), "float32"), ((4, 8, 16), "float32"))), falcon_h1(), "shapes \\[\\[3, 60\\], "),
        (replace(STATES, states=STATES.states[:1]), falcon_h1(), "by the model's config it has conv 64 x 3 and ssm 4 x 8 x 16"),
        (replace(STATES, states=(((3, 64), "float8_e4m3fn"), STATES.states[1])), falcon_h1(), "keeps states in float8_e4m3fn"),
        (replace(STATES, unusual={"num_speculative_blocks": "2"}), falcon_h1(), "num_speculative_blocks=2"),
        (STATES, {"model_type": "rwkv9", "num_hidden_layers": 2, "layer_types": ["rwkv"] * 2}, "does not say what they hold"),
    ],
)
def test_states_that_a_connector_does_not_read(facts, config, says):
    with pytest.raises(kvx.Unsupported, match=says):
        read_groups([facts], ModelFacts(2, planes=state_planes(config)))


def test_what_is_not_such_a_page_is_refused():
    """The engine's tensor under a spec of other pages."""
    planes = MODELS["falcon_h1"]
    content = sum(p.num_rows * p.row_bytes for p in planes)
    memory = as_registered(torch.zeros(3, 4096, dtype=torch.int8), content)
    for page, why in ((0, "Where they pad blocks, say so in the spec: block_bytes"), (8192, "bytes of memory; the spec makes")):
        with pytest.raises(kvx.BadArgument, match=why):
            kvx.digest([memory], state_row("vllm.sd").spec(planes, num_blocks=3, block_bytes=page))
    with pytest.raises(kvx.BadArgument, match="in the spec makes it float32"):
        kvx.digest([memory.to(torch.int16)], state_row("vllm.sd").spec(planes, num_blocks=3, block_bytes=8192))
    kv = kvx.CacheSpec(num_blocks=3, block_size=4, num_kv_heads=1, head_dim=8, layout="block kv token head dim")
    with pytest.raises(kvx.BadArgument, match="int8; format bf16 in the spec makes it bfloat16"):
        kvx.digest([torch.zeros(3, 128, dtype=torch.int8)], kv)
