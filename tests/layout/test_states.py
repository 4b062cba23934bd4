"""States of every engine's row, made by numpy from the shapes engines use, converted into every other and over ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvx
import kvx.handover
from kvx.layout.buffers import allocate_buffers
from kvx.layout.place import buffer_bytes
from kvx.layout.state_rows import STATE_ROWS, state_row
from kvx.layout.views import layer_views
from kvx.spec import PlaneSpec, StateSpec, state_plane

LAYERS, BLOCKS = 2, 3
Arrays = dict[str, np.ndarray]  # conv [layer, block, channel, tap], ssm or delta [layer, block, head, row, column]


def engine_tensors(name: str, x: Arrays) -> list[np.ndarray]:
    """What an engine would have in memory, by its shapes alone (facts of the engines, not of the layout strings)."""
    conv = x["conv"]
    matrix = x.get("ssm", x.get("delta"))
    if matrix is not None and "delta" in x and name != "transformers":
        matrix = matrix.swapaxes(-1, -2)  # [heads, value, key]
    if name == "transformers":  # [batch, channels, kernel] with a column that is never read, [batch, heads, ...]
        older = np.concatenate([np.zeros_like(conv[..., :1]), conv], -1)
        return [t for layer in range(LAYERS) for t in (older[layer], *([matrix[layer]] if matrix is not None else []))]
    if name == "llama_cpp":
        return [t for layer in range(LAYERS) for t in (conv[layer], *([matrix[layer]] if matrix is not None else []))]
    if name.startswith("vllm"):  # int8 pages: convolution, then matrix
        first = conv.swapaxes(-1, -2) if name == "vllm.sd" else conv
        parts = [first] + ([matrix] if matrix is not None else [])
        pages = [np.ascontiguousarray(p).reshape(LAYERS, BLOCKS, -1).view(np.uint8) for p in parts]
        return list(np.concatenate(pages, -1))
    first = conv.swapaxes(-1, -2) if name.startswith("sglang.kimi") else conv
    if name.endswith(".host"):  # a page: matrices of all layers, then convolutions
        parts = ([matrix] if matrix is not None else []) + [first]
        pages = [np.ascontiguousarray(p.swapaxes(0, 1)).reshape(BLOCKS, -1).view(np.uint8) for p in parts]
        return [np.concatenate(pages, -1)]
    return [first, *([matrix] if matrix is not None else [])]


def as_bytes(tensors: list[np.ndarray]) -> list[np.ndarray]:
    return [np.ascontiguousarray(t).reshape(-1).view(np.uint8) for t in tensors]


def random_planes(r: random.Random) -> tuple[PlaneSpec, ...]:
    """A convolution of q, k and v or of x, B and C; with a matrix a head, key by value or head dim by state size, or without."""
    heads, groups, dim, size = r.choice([2, 4, 8]), r.choice([1, 2]), r.choice([2, 4, 6]), r.choice([2, 4, 8])
    shares = ((heads * dim, dim), (groups * size, size), (groups * size, size))
    channels = sum(n for n, _ in shares)
    conv = state_plane("conv", "f32", channel=channels, tap=r.choice([1, 2, 3]), shares=shares)
    kind = r.choice(["ssm", "delta", ""])
    return (conv, *([state_plane(kind, "f32", head=heads, row=dim, column=size)] if kind else []))


def random_content(r: random.Random, planes: tuple[PlaneSpec, ...]) -> Arrays:
    rng = np.random.default_rng(r.randrange(2**32))
    return {p.name: rng.standard_normal((LAYERS, BLOCKS, *(n for _, n in p.axes))).astype(np.float32) for p in planes}


def part_of(x: Arrays, spec: StateSpec) -> Arrays:
    """What a rank holds: its shares of the channels, and its heads."""
    out = {}
    for p in spec.planes:
        index = [i for share in p.shares for i in range(share.first, share.first + share.size)]
        out[p.name] = x[p.name][:, :, index]
    return out


def spec_of(name: str, planes: tuple[PlaneSpec, ...]) -> StateSpec:
    return state_row(name).spec(planes, num_blocks=BLOCKS, num_layers=LAYERS)


def tensors(name: str, x: Arrays) -> list[torch.Tensor]:
    return [torch.from_numpy(t.copy()) for t in as_bytes(engine_tensors(name, x))]


@pytest.mark.parametrize("name", STATE_ROWS)
def test_rows_are_what_engines_have(name):
    r = random.Random(name)
    for _ in range(10):
        planes = random_planes(r)
        x, spec = random_content(r, planes), spec_of(name, planes)
        assert [t.numel() for t in tensors(name, x)] == list(buffer_bytes(spec))
        views = kvx.layer_views(tensors(name, x), spec)
        for layer, found in enumerate(views):
            for view in found:
                assert np.array_equal(view.tensor.numpy(), x[view.plane][layer])


@pytest.mark.parametrize("src", STATE_ROWS)
@pytest.mark.parametrize("dst", STATE_ROWS)
def test_every_row_converts_into_every_other(src, dst):
    r = random.Random(f"{src} {dst}")
    for _ in range(4):
        planes = random_planes(r)
        x, a, b = random_content(r, planes), spec_of(src, planes), spec_of(dst, planes)
        out = allocate_buffers(b)
        kvx.convert(tensors(src, x), out, plan=kvx.plan(a, b), backend=r.choice(["auto", "torch"]))
        assert all(torch.equal(got, want) for got, want in zip(out, tensors(dst, x), strict=True))
        assert kvx.digest(out, b) == kvx.digest(tensors(src, x), a)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_get_whole_heads_and_whole_groups(ranks):
    """q, k and v or x, B and C are shared out one by one; groups that are fewer than ranks are held by several."""
    r = random.Random(ranks)
    done = 0
    while done < 12:
        planes = random_planes(r)
        src, dst = r.choice(list(STATE_ROWS)), r.choice(list(STATE_ROWS))
        whole = spec_of(src, planes)
        try:
            shards = [replace(s, layout=state_row(dst).layout(planes)) for s in (whole.shard(ranks, i) for i in range(ranks))]
        except kvx.BadArgument:  # heads that do not divide
            continue
        x = random_content(r, planes)
        out = [allocate_buffers(s) for s in shards]
        plan = kvx.plan(whole, shards)
        kvx.convert(tensors(src, x), [t for part in out for t in part], plan=plan)
        for part, spec in zip(out, shards, strict=True):
            assert all(torch.equal(got, want) for got, want in zip(part, tensors(dst, part_of(x, spec)), strict=True))
        again = allocate_buffers(whole)
        kvx.convert([t for part in out for t in part], again, plan=kvx.plan(shards, whole))
        assert all(torch.equal(got, want) for got, want in zip(again, tensors(src, x), strict=True))
        done += 1


def test_types_change_on_the_way():
    """A bf16 model: Transformers keeps the matrix in f32, vLLM in bf16."""
    r = random.Random(3)
    planes = random_planes(r)
    x = random_content(r, planes)
    narrow = tuple(replace(p, format=kvx.spec.Format.named("bf16")) for p in planes)
    a, b = spec_of("transformers", planes), spec_of("vllm.sd", narrow)
    out = allocate_buffers(b)
    kvx.convert(tensors("transformers", x), out, plan=kvx.plan(a, b))
    for layer, found in enumerate(kvx.layer_views(out, b)):
        for view in found:
            assert torch.equal(view.tensor, torch.from_numpy(x[view.plane][layer]).bfloat16())


def test_pages_are_padded():
    """Falcon-H1 in vLLM: conv (3, 176) and ssm (8, 16, 24) in f32 make 14,400 bytes of a page of 65,536."""
    planes = (state_plane("conv", "f32", channel=176, tap=3), state_plane("ssm", "f32", head=8, row=16, column=24))
    spec = state_row("vllm.sd").spec(planes, num_blocks=4, num_layers=2, block_bytes=65536)
    assert spec.content_bytes() == 14400
    pages = torch.zeros(4, 65536, dtype=torch.uint8)
    pages[:, 2112:14400].view(torch.float32)[:] = torch.arange(4 * 3072).view(4, 3072).float()
    views = kvx.layer_views([pages.flatten()], replace(spec, num_layers=1))
    conv, ssm = views[0]
    assert tuple(conv.tensor.shape) == (4, 176, 3)
    assert torch.equal(ssm.tensor, torch.arange(4 * 3072).view(4, 8, 16, 24).float())


CONV, SSM = state_plane("conv", "f32", channel=8, tap=3), state_plane("ssm", "f32", head=6, row=2, column=2)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: StateSpec(4, ()), "planes is"),
        (lambda: StateSpec(0, random_planes(random.Random(1))), "num_blocks is 0"),
        (lambda: StateSpec(4, (state_plane("conv", "int8_per_head", channel=8, tap=3),)), "states are bf16, f16 or f32"),
        (lambda: StateSpec(4, (state_plane("conv", "f32", token=8, dim=3),)), "has the axes token dim"),
        (lambda: StateSpec(4, (CONV,) * 2), "each has a name of its own"),
        (
            lambda: StateSpec(4, (CONV,), layout="block plane[ssm: channel tap]"),
            "names the planes ssm; the spec has conv",
        ),
        (
            lambda: StateSpec(4, (CONV,), layout="block plane[conv: channel row]"),
            "gives conv the axes channel row; the plane has channel tap",
        ),
        (lambda: StateSpec(4, (CONV,), "block plane[conv: channel tap]", 2), "no layer axis"),
        (lambda: state_plane("conv", "f32", channel=8, tap=3, shares=((4, 2), (2, 1))), "its shares have 6 channels"),
        (lambda: state_plane("conv", "f32"), "has no axes"),
        (lambda: state_plane("conv", "q8", channel=8, tap=3), 'format "q8" does not exist'),
        (lambda: state_row("vllm"), "the rows are transformers, vllm.sd"),
        (lambda: StateSpec(4, (SSM,)).shard(4, 0), "6 units of 1 heads over 4 ranks"),
        (lambda: StateSpec(4, (CONV,), block_bytes=8), "a block of these states has 96"),
        (lambda: StateSpec(2, (CONV,), positions=(5,)), "positions has 1 of 2 blocks"),
        (lambda: StateSpec(1, (CONV,), positions=(-1,)), "positions is (-1,); it must be the number of tokens"),
        (lambda: StateSpec(1, (CONV,), positions=("5",)), "positions is ('5',)"),
        (
            lambda: state_row("vllm.sd").spec((state_plane("conv", "bf16", channel=3, tap=3), SSM), num_blocks=2),
            "18 bytes of conv before or behind elements of 4 bytes",
        ),
    ],
    ids=range(18),
)  # fmt: skip
def test_what_is_refused(make, why):
    with pytest.raises(kvx.KvxError) as error:
        make()
    assert why in str(error.value)


def test_what_takes_no_states_says_so():
    spec = replace(spec_of("transformers", (CONV, state_plane("ssm", "f32", channel=8, column=4))), num_layers=1)
    with pytest.raises(kvx.Unsupported, match=r"takes a CacheSpec, of K and V\. States are taken by plan, .* PagedCache and tiers"):
        kvx.allocate(spec)
    with pytest.raises(kvx.BadArgument, match=r"State\(\) takes those"):
        kvx.LayerGroup("states", (0,), spec)
    assert "StateSpec has no kv" in str(kvx.supports("write", spec, "cpu"))


@pytest.mark.parametrize("name", STATE_ROWS)
def test_files_keep_them(name, tmp_path):
    r = random.Random(name)
    for n in range(5):
        planes = random_planes(r)
        x, spec = random_content(r, planes), spec_of(name, planes)
        kvx.save(tmp_path / f"{n}.kvx", tensors(name, x), spec)
        found = kvx.load(tmp_path / f"{n}.kvx", expect=spec)
        assert found.spec == spec == kvx.spec.spec_from_json(kvx.spec.to_json(spec))
        assert all(torch.equal(got, want) for got, want in zip(found.buffers, tensors(name, x), strict=True))
        other = replace(spec, planes=tuple(replace(p, format=kvx.spec.Format.named("bf16")) for p in planes))
        with pytest.raises(kvx.Incompatible, match="manifests differ in planes"):
            kvx.load(tmp_path / f"{n}.kvx", expect=other)


def test_positions_travel_with_them(tmp_path):
    """Which position a state holds at is in its manifest where the spec says it, and another is refused by name."""
    spec = StateSpec(3, (CONV,), positions=(20, 0, 7), model="m")
    plain = replace(spec, positions=())
    assert kvx.spec.spec_from_json(kvx.spec.to_json(spec)) == spec
    assert "positions" not in kvx.spec.to_json(plain)
    for text in ("20 x 7", "", "20  0 7", 20):
        said = kvx.spec.to_json(spec).replace('"positions": "20 0 7"', f'"positions": {json.dumps(text)}')
        with pytest.raises(kvx.BadArgument, match=r"positions are .*; they must be numbers of tokens"):
            kvx.spec.spec_from_json(said)
    with pytest.raises(kvx.Incompatible, match="a field was changed after it was written"):
        kvx.spec.spec_from_json(kvx.spec.to_json(spec).replace("20 0 7", "21 0 7"))
    kvx.save(tmp_path / "states.kvx", allocate_buffers(spec), spec)
    assert kvx.load(tmp_path / "states.kvx", expect=plain).spec.positions == (20, 0, 7)  # who says none takes any
    with pytest.raises(kvx.Incompatible, match=r"manifests differ in positions: \(21, 0, 7\) here, \(20, 0, 7\) there"):
        kvx.load(tmp_path / "states.kvx", expect=replace(spec, positions=(21, 0, 7)))
    there = StateSpec(2, (CONV,), positions=(7, 21))
    assert kvx.plan(spec, there, blocks=([2], [0])).blocks == ((2,), (0,))
    with pytest.raises(kvx.BadArgument, match=r"block 0 of src is a state after 20 tokens, block 1 of dst one after 21"):
        kvx.plan(spec, there, blocks=([2, 0], [0, 1]))
    assert kvx.plan(spec, replace(there, positions=()), blocks=([0], [1])).blocks == ((0,), (1,))
    assert spec.replaced(num_blocks=1).positions == ()
    assert kvx.digest(allocate_buffers(spec), spec) == kvx.digest(allocate_buffers(plain), plain)
    one = StateSpec(1, (CONV,), layout=plain.block_layout, positions=(20,), model="m")
    part = kvx.handover.Part(one, (0,), 0, 0, tuple(allocate_buffers(one)))
    with pytest.raises(kvx.BadArgument, match="a state of layers 0 is one after 20 tokens; the handover has 3"):
        kvx.handover.Handover([1, 2, 3], (part,))


def test_a_layer_may_have_several_convolutions():
    """Inkling has four. Names with numbers are planes of the layout language."""
    planes = (*(state_plane(f"conv{n}", "f32", channel=4 + n, tap=3) for n in range(4)),)
    spec = spec_of("vllm.sd", planes)
    assert spec.layout == "layer | block plane[conv0: tap channel; conv1: tap channel; conv2: tap channel; conv3: tap channel]"
    assert spec.block_content_bytes == LAYERS * 4 * 3 * (4 + 5 + 6 + 7)
    with pytest.raises(kvx.BadArgument, match=r"plane\[...\] is written"):
        StateSpec(4, (CONV,), layout="block plane[2conv: channel tap]")


def test_files_of_states(tmp_path):
    """As those of K and V: sealed, and a bit that changed is found."""
    spec = replace(spec_of("transformers", (CONV, state_plane("ssm", "f32", channel=8, column=4))), num_layers=1)
    buffers = allocate_buffers(spec)
    for n, buffer in enumerate(buffers):
        buffer.view(torch.uint8)[:] = torch.arange(buffer.numel()) * (n + 3) % 251
    path = tmp_path / "states.kvx"
    kvx.save(path, buffers, spec)
    file = kvx.load(path, spec)
    assert file.spec == spec
    assert all(torch.equal(a, b) for a, b in zip(file.buffers, buffers, strict=True))
    with pytest.raises(kvx.Incompatible):
        kvx.load(path, replace(spec, model="another"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(kvx.Damaged):
        kvx.load(path)


def test_another_kind_of_matrix_is_another_content():
    """The same bytes as key by value and as head dim by state size are not the same state: names say which."""
    a = spec_of("transformers", (state_plane("delta", "f32", head=2, row=4, column=4),))
    b = spec_of("transformers", (state_plane("ssm", "f32", head=2, row=4, column=4),))
    with pytest.raises(kvx.BadArgument, match=r"has 1 planes \(delta\), .* has 1 \(ssm\)"):
        kvx.plan(a, b)
    x = [torch.arange(t.numel()).to(torch.uint8) for t in allocate_buffers(a)]
    assert kvx.digest(x, a) != kvx.digest(x, b)


# --- other floats ----------------------------------------------------------------------------------------------------------

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.mark.parametrize("sizes", [(4, 16, 32), (2, 8, 128), (3, 5, 7), (1, 3, 1366), (16, 16, 1)], ids=str)
@pytest.mark.parametrize("dst", STATE_ROWS)
@pytest.mark.parametrize("src", STATE_ROWS)
def test_floats_become_other_floats_in_any_order(backend, src, dst, sizes, generator):
    """Rows are whichever axis lies side by side: every element is the other type's nearest, wherever it stands."""
    a_format, b_format = random.Random(f"{src} {dst} {sizes}").sample(list(FLOATS), 2)
    head, row, column = sizes

    def spec(engine: str, format: str) -> StateSpec:
        conv, delta = {"channel": 4 * column, "tap": 3}, {"head": head, "row": row, "column": column}
        planes = state_plane("conv", format, **conv), state_plane("delta", format, **delta)
        return state_row(engine).spec(planes, num_blocks=3, num_layers=2)

    a_spec, b_spec = spec(src, a_format), spec(dst, b_format)
    a, b = (kvx.allocate_buffers(s, backend.device) for s in (a_spec, b_spec))
    for view in (view for layer in layer_views(a, a_spec) for view in layer):
        view.tensor.copy_(torch.randn(view.tensor.shape, generator=generator) * 3e4)
        view.tensor[(0,) * view.tensor.dim()] = float("nan")
    kvx.convert(a, b, plan=kvx.plan(a_spec, b_spec), src_blocks=[2, 0], dst_blocks=[0, 1], backend=backend.name)
    for there, here in zip(layer_views(a, a_spec), layer_views(b, b_spec), strict=True):
        for x, y in zip(there, here, strict=True):
            torch.testing.assert_close(y.tensor[:2], x.tensor[[2, 0]].to(FLOATS[b_format]), rtol=0, atol=0, equal_nan=True)
