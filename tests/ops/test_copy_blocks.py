"""copy_blocks, gather_sequence and transpose_heads: bits move, and nothing else does."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases, compare

LAYOUTS = [cases.Case(layout=layout, format=f) for layout in cases.LAYOUTS for f in ("bf16", "f32")]
FORMATS = [
    cases.Case(layout=layout, format=f, head_dim=max(64, kvx.FORMATS[f].group_size), lens=(9, 0, 4, 4))
    for f in kvx.FORMATS
    if kvx.FORMATS[f].element.is_quantised
    for layout in ("NHD", "fused_HND")
]
OTHERS = [
    cases.Case(head_dim=1, num_kv_heads=1, block_size=1, num_blocks=40),
    cases.Case(head_dim=7, block_size=3, num_blocks=11),
    cases.Case(layout="(kv head) block token dim", format="mxfp8", head_dim=64),
    cases.Case(layout="block kv head dim/8 token dim%8"),
    cases.Case(head_dim=64, v_head_dim=128, layout="fused_NHD"),
    cases.MLA_RECORD,
]
PAIRS = [(0, 5), (3, 6), (-1, 2), (1, -4), (4, 4), (3, 2)]


def filled(case: cases.Case, device: str, g: torch.Generator) -> cases.Made:
    """Random bytes everywhere, so that every byte of a block counts."""
    made = case.make("cpu", g)
    for tensor in made.tensors().values():
        raw = tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=g, dtype=torch.uint8))
    return made.to(device)


def copy(made: cases.Made, pairs, backend: str, **more: object) -> None:
    kvx.copy_blocks(made.cache, pairs, spec=made.spec, backend=backend, **made.scales, **more)


@pytest.mark.parametrize("case", [*LAYOUTS, *FORMATS, *OTHERS], ids=str)
def test_matches_definition(native_backend, case, generator):
    made = filled(case, native_backend.device, generator)
    want = made.to("cpu").clone()
    copy(want, PAIRS, "torch")
    copy(made, PAIRS, native_backend.name)
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor.cpu(), want.tensors()[name], name)


@pytest.mark.parametrize("fmt", ["bf16", "int8_per_token_head", "fp8_e4m3_per_block_head", "int4_per_token_head_inline"])
def test_definition_copies_blocks_and_nothing_else(fmt, generator):
    made = filled(cases.Case(format=fmt), "cpu", generator)
    before = made.clone()
    copy(made, [(0, 5), (3, 6)], "torch")
    source = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 0, 6: 3}
    for name, tensor in made.tensors().items():
        for block, was in source.items():
            compare.bitwise(tensor[block], before.tensors()[name][was], f"{name}[{block}]")


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pairs_of_any_kind(backend, index, generator):
    made = filled(cases.Case(), backend.device, generator)
    want = made.clone()
    copy(want, [(0, 5), (3, 6)], backend.name)
    pairs = torch.tensor([[0, 3], [5, 6]], dtype=index, device=backend.device).T  # strided, where the cache is
    copy(made, pairs, backend.name)
    empty = torch.empty(0, 2, dtype=index, device=backend.device)
    copy(made, empty, backend.name)
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor, want.tensors()[name], name)


def test_bad_pairs_on_the_host_are_refused(backend, generator):
    made = filled(cases.Case(), backend.device, generator)
    before = made.clone()
    for pairs, error, words in (
        ([(0, 1), (2, 7)], kvx.OutOfRange, r"pairs\[1\] is \(2, 7\); the cache has 7 blocks"),
        ([(9, 1)], kvx.OutOfRange, r"pairs\[0\] is \(9, 1\)"),
        ([(0, 1), (2, 1)], kvx.BadArgument, "block 1 is a destination twice"),
        ([(0, 1), (1, 2)], kvx.BadArgument, "block 1 is a source and a destination"),
        (torch.zeros(2, 3, dtype=torch.int64), kvx.BadArgument, "pairs"),
        (torch.zeros(2, 2), kvx.BadArgument, "pairs"),
    ):
        with pytest.raises(error, match=words):
            copy(made, pairs, backend.name)
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor, before.tensors()[name], name)


def test_bad_pairs_on_a_device_are_counted(generator):
    if not torch.cuda.is_available():
        pytest.skip("backend cuda: no CUDA device or driver on this machine")
    made = filled(cases.Case(), "cuda", generator)
    want = made.clone()
    copy(want, [(0, 5)], "cuda")
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    copy(made, torch.tensor([[0, 5], [1, 7], [2**40, 3]], device="cuda"), "cuda", errors=errors)
    assert int(errors) == 2
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor, want.tensors()[name], name)


@pytest.mark.parametrize("case", [cases.Case(), cases.Case(layout="fused_HND", format="int8_per_token_head", io="f32")], ids=str)
def test_gather_sequence_is_one_row_of_gather(backend, case, generator):
    made = case.make(backend.device, generator)
    made.write(backend.name)
    want = made.gather(backend.name, max_seq_len=9)
    got = kvx.gather_sequence(
        made.cache, made.block_table[0], 9, spec=made.spec, dtype=cases.IO[case.io], backend=backend.name, **made.scales
    )
    for a, b in zip(got, want, strict=True):
        compare.bitwise(a, b[0])
    with pytest.raises(kvx.BadArgument, match="num_tokens is 99"):
        kvx.gather_sequence(made.cache, made.block_table[0], 99, spec=made.spec, backend=backend.name, **made.scales)


@pytest.mark.parametrize("shape", [(5, 3, 128), (70, 8, 64), (1, 4, 7), (3, 1, 16), (0, 2, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transpose_heads(backend, shape, dtype, generator):
    x = torch.randn(shape, generator=generator).to(dtype).to(backend.device)
    got = kvx.transpose_heads(x, backend=backend.name)
    compare.bitwise(got, x.transpose(0, 1).contiguous())
    compare.bitwise(kvx.transpose_heads(got, backend=backend.name), x)
    with pytest.raises(kvx.BadArgument, match="x is"):
        kvx.transpose_heads(x[0] if shape[0] else x[:, 0], backend=backend.name)
