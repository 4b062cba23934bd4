"""attention_mla: every backend near the float64 answer over latent caches in one tensor, in two, and in 656-byte records."""

from __future__ import annotations

import math
import struct

import pytest
import torch

import kvx
from tests import cases, compare
from tests.ops import attention_cases, mla_cases
from tests.ops.mla_cases import RECORD, Case, record

LONG = (300, 1, 90)
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch saying it has no bf16 instructions


@pytest.mark.parametrize("case", mla_cases.ALL, ids=str)
def test_mla_is_near_the_answer(backend, case, generator):
    made = case.make(backend.device, generator)
    made.check(*made.run(backend.name))


def test_nothing_seen_gives_zero_and_minus_infinity(backend, generator):
    made = Case(lens=(0, 2), queries=4).make(backend.device, generator)
    out, lse = made.run(backend.name, out=torch.full((8, 16, 512), 7.0, device=backend.device))
    assert (out[:6] == 0).all()
    assert (lse[:6] == -math.inf).all()
    assert torch.isfinite(lse[6:]).all()


@pytest.mark.parametrize("case", [Case(lens=(200, 9)), record(lens=(200, 9), queries=(60, 1))], ids=str)
@pytest.mark.parametrize("kind", ["int64", "strided", "ragged", "page_csr"])
def test_tables_name_the_same_blocks(backend, case, kind, generator):
    made = case.make(backend.device, generator)
    packed, block = made.table, made.cache.spec.block_size
    ids, lens = packed.block_table, packed.seq_lens
    table = {
        "int64": lambda: kvx.PackedTable(ids.long(), lens.long()),
        "strided": lambda: kvx.PackedTable(torch.stack([ids, ids * 0 - 5], -1)[..., 0], lens),
        "ragged": lambda: kvx.to_ragged(packed, block),
        "page_csr": lambda: kvx.to_page_csr(packed, block),
    }[kind]()
    made.check(*made.run(backend.name, table=table))


@pytest.mark.parametrize("case", [Case(queries=2, lens=(70, 9)), record(queries=2, lens=(70, 9))], ids=str)
def test_strided_queries_and_outputs(backend, case, generator):
    made = case.make(backend.device, generator)
    wide = torch.full((4, 16, 520), 3.0, dtype=torch.float32, device=backend.device)
    sums = torch.full((4, 16, 2), 3.0, device=backend.device)
    made.q = made.q.transpose(0, 1).contiguous().transpose(0, 1)  # head-major underneath
    made.run(backend.name, out=wide[..., :512], lse=sums[..., 0])
    made.check(wide[..., :512], sums[..., 0])
    assert (wide[..., 512:] == 3).all()
    assert (sums[..., 1] == 3).all()
    flat = made.q.new_empty(4, 16, 576, 2)
    flat[..., 0] = made.q
    made.q = flat[..., 0]  # elements apart
    made.check(*made.run(backend.name))


def test_rows_of_no_sequence_are_left_alone(backend, generator):
    made = Case(lens=(20, 9), queries=(3, 1)).make(backend.device, generator)
    want = made.run(backend.name)
    made.q = torch.cat([made.q[:1] * math.nan, made.q, made.q[:2] * math.nan])
    out = torch.full((7, 16, 512), 5.0, dtype=torch.bfloat16, device=backend.device)
    lse = torch.full((7, 16), 5.0, device=backend.device)
    made.run(backend.name, cu_seqlens=made.cu + 1, out=out, lse=lse)
    compare.bitwise(out[1:5], want[0])
    compare.bitwise(lse[1:5], want[1])
    assert (out[[0, 5, 6]] == 5).all()
    assert (lse[[0, 5, 6]] == 5).all()


def test_a_window_needs_only_its_own_blocks(backend, generator):
    made = Case(lens=(170, 91), queries=2, window=10, block=16).make(backend.device, generator)
    ids = made.table.block_table.clone()
    ids[0, :9] = -1  # positions 0..143; the first seen is 170 - 2 - 9 = 159
    ids[1, 0] = 2**30
    made.check(*made.run(backend.name, table=kvx.PackedTable(ids, made.table.seq_lens)))


@pytest.mark.parametrize("case", [Case(lens=(150, 20)), record(lens=(150, 20)), Case(lens=(150, 20), heads=3, dim=80)], ids=str)
def test_bad_block_ids(backend, case, generator):
    made = case.make(backend.device, generator)
    for bad in (made.cache.spec.num_blocks, -1, 2**30):
        ids = made.table.block_table.clone()
        ids[0, 1] = bad  # positions 64..127 of sequence 0
        table = kvx.PackedTable(ids, made.table.seq_lens)
        if backend.device == "cpu":
            out = torch.full((2, case.heads, case.dim), 3.0)
            with pytest.raises(kvx.OutOfRange, match="sequence 0"):
                made.run(backend.name, table=table, out=out)
            assert (out == 3).all()
            continue
        errors = torch.zeros((), dtype=torch.int64, device="cuda")
        out, lse = made.run(backend.name, table=table, errors=errors)
        assert int(errors) > 0
        seen = torch.ones(1, 150, dtype=torch.bool)
        seen[:, 64:128] = False
        want = attention_cases.attend(made.q[:1].cpu(), made.k[0, :150], made.v[0, :150], seen, made.case, None, torch.float64)
        attention_cases.close("out", out[:1].cpu(), want[0], 2e-2)
        attention_cases.close("lse", lse[:1].cpu(), want[1], 2e-2)


def test_impossible_lengths_and_ranges(backend, generator):
    made = Case(lens=(33, 5), queries=(3, 1)).make(backend.device, generator)
    lens = made.table.seq_lens

    def changed(x, at, value):
        y = x.clone()
        y[at] = value
        return y

    wrong = [
        ({"table": kvx.PackedTable(made.table.block_table, changed(lens, 0, -3))}, "sequence 0"),
        ({"table": kvx.PackedTable(made.table.block_table, changed(lens, 1, 2**20))}, "sequence 1"),
        ({"max_seq_len": 32}, "sequence 0"),
        ({"cu_seqlens": changed(made.cu, 2, 5)}, "cu_seqlens"),
        ({"cu_seqlens": changed(made.cu, 0, -1)}, "cu_seqlens"),
        ({"max_query_len": 2}, "cu_seqlens"),
    ]
    for more, words in wrong:
        if backend.device == "cpu":
            with pytest.raises(kvx.OutOfRange, match=words):
                made.run(backend.name, **more)
        else:  # the result is unspecified, and nothing outside the tensors is touched
            made.run(backend.name, **more)
            torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"q": lambda q: q[..., :512]}, "576"),
        ({"q": lambda q: q[:3]}, "3 tokens for 4 sequences"),
        ({"q": lambda q: q.double()}, "f16, bf16 or f32"),
        ({"out": torch.zeros(4, 16, 576)}, "512"),
        ({"lse": torch.zeros(4, 16, dtype=torch.float64)}, "lse"),
        ({"scale": 0.0}, "not 0"),
        ({"scale": math.inf}, "finite"),
        ({"window": -1}, "window"),
        ({"k_scale": torch.ones(4)}, "takes no scales"),
        ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, r"\[5\]"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_wrong_inputs_are_refused(backend, more, words, generator):
    made = Case().make(backend.device, generator)
    more = {n: x.to(backend.device) if isinstance(x, torch.Tensor) else x for n, x in more.items()}
    made.q = more.pop("q", lambda q: q)(made.q)
    with pytest.raises(kvx.BadArgument, match=rf"attention_mla\(\): .*{words}"):
        made.run(backend.name, **more)


def test_scale_has_to_be_given(generator):
    made = Case().make("cpu", generator)
    with pytest.raises(TypeError, match="scale"):
        kvx.attention_mla(made.q, made.cache.cache, made.table, spec=made.cache.spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (kvx.CacheSpec(4, 16, 2, 512, v_head_dim=64), "spec.num_kv_heads is 2; a latent cache has 1"),
        (kvx.CacheSpec(4, 16, 1, 576, layout="block token head dim"), "has no kv axis to tell the latent from its rotary part"),
        (kvx.CacheSpec(4, 16, 1, 512, v_head_dim=64, format="f64"), "f64 only converts"),
    ],
)
@pytest.mark.parametrize("chosen", ["auto", "torch"])
def test_caches_that_are_not_latent(spec, words, chosen):
    answer = kvx.supports("attention_mla", spec, "torch")
    assert not answer
    assert words in str(answer)
    table = kvx.PackedTable(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(kvx.Unsupported) as raised:
        kvx.attention_mla(torch.zeros(1, 16, 576), torch.zeros(1), table, spec=spec, scale=1.0, backend=chosen)
    assert str(raised.value) == str(answer)


def test_empty_batch(backend):
    spec = kvx.CacheSpec(2, 4, 1, 16, v_head_dim=8, layout=cases.LATENT)
    cache = kvx.allocate(spec, backend.device).cache
    none = torch.zeros(0, dtype=torch.int32, device=backend.device)
    q = torch.zeros(0, 4, 24, device=backend.device)
    table = kvx.PackedTable(none.view(0, 3), none)
    out, lse = kvx.attention_mla(q, cache, table, spec=spec, scale=1.0, backend=backend.name)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("fmt", ["bf16", RECORD])
@pytest.mark.parametrize("lens", [(150, 40), (5000, 40)])  # by one worker of a GPU, and by several
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_is_not_a_number_spoils_its_own_row_alone(backend, fmt, lens, sinks, generator):
    v_format = "" if fmt == "bf16" else "bf16"
    made = Case(lens=lens, queries=2, format=fmt, v_format=v_format, sinks=sinks).make(backend.device, generator)
    out, lse = made.run(backend.name)
    made.q[1, 3, 5] = math.nan
    spoiled, spoiled_lse = made.run(backend.name)
    assert torch.isnan(spoiled[1, 3]).all()
    assert torch.isnan(spoiled_lse[1, 3])
    spoiled[1, 3], spoiled_lse[1, 3] = out[1, 3], lse[1, 3]
    compare.bitwise(spoiled, out)
    compare.bitwise(spoiled_lse, lse)


def test_parts_merge_by_lse(backend, generator):
    made = Case(lens=(192,), causal=False, io="f32").make(backend.device, generator)
    want, want_lse = made.run(backend.name)
    ids = made.table.block_table
    parts = []
    for columns, n in ((ids[:, :1], 64), (ids[:, 1:], 128)):
        table = kvx.PackedTable(columns, torch.tensor([n], dtype=torch.int32, device=backend.device))
        parts.append(made.run(backend.name, table=table))
    out, lse = kvx.merge_attention(torch.stack([o for o, _ in parts]), torch.stack([x for _, x in parts]))
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", [Case(lens=LONG), record(lens=LONG), record(lens=LONG, queries=2)], ids=str)
def test_workspace_and_plan(native_backend, case, generator):
    """A plan made once serves every layer of the step."""
    first, second = layers = [case.make(native_backend.device, torch.Generator().manual_seed(0)) for _ in range(2)]
    second.q = -second.q  # one table for both layers, as engines have it
    want = [layer.run(native_backend.name) for layer in layers]
    shapes = {"spec": first.cache.spec, "latent": True}
    size = kvx.attention_workspace_bytes(first.q, first.cache.cache, first.table, **shapes)
    assert size == 0 or native_backend.device == "cuda"
    workspace = torch.empty(size, dtype=torch.uint8, device=native_backend.device) if size else None
    kvx.attention_plan(first.q, first.cache.cache, first.table, workspace=workspace, **shapes)
    for layer, (out, lse) in zip(layers, want, strict=True):
        got = layer.run(native_backend.name, workspace=workspace, planned=workspace is not None)
        compare.bitwise(got[0], out)
        compare.bitwise(got[1], lse)


@pytest.mark.parametrize("case", [Case(lens=LONG), record(lens=LONG), record(lens=LONG, heads=128)], ids=str)
def test_workspace_keeps_nothing_of_a_longer_plan(native_backend, case, generator):
    """Thread blocks without work in the second plan had some in the first."""
    made = case.make(native_backend.device, generator)
    size = kvx.attention_workspace_bytes(made.q, made.cache.cache, made.table, spec=made.cache.spec, latent=True)
    workspace = torch.empty(size, dtype=torch.uint8, device=native_backend.device) if size else None
    short = kvx.PackedTable(made.table.block_table, made.table.seq_lens.clamp(max=9))
    want = made.run(native_backend.name, table=short)
    made.run(native_backend.name, workspace=workspace)
    got = made.run(native_backend.name, table=short, workspace=workspace)
    compare.bitwise(got[0], want[0])
    compare.bitwise(got[1], want[1])


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("case", [
    Case(lens=(300, 1, 90, 512)),
    record(lens=(300, 1, 90, 512), heads=128),
    record(lens=(300, 1, 90, 512), queries=(40, 1, 3, 1)),
    Case(lens=(40, 1, 33, 64), dim=80, v_dim=16, heads=7),
], ids=str)  # fmt: skip
def test_graph_replay_follows_lengths_and_tables(case, is_planned, generator):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = case.make("cuda", generator)
    lens, ids, cu, q = (x.clone() for x in (made.table.seq_lens, made.table.block_table, made.cu, made.q))
    table = kvx.PackedTable(ids, lens)
    more = {} if isinstance(case.queries, int) else {"cu_seqlens": cu, "max_query_len": 64}
    shapes = {"spec": made.cache.spec, "max_seq_len": 1024, **more}
    size = kvx.attention_workspace_bytes(q, made.cache.cache, table, latent=True, **shapes)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    out, lse = torch.empty_like(q[..., : case.dim]), torch.empty(q.shape[:2], device="cuda")

    def step():
        if is_planned:
            kvx.attention_plan(q, made.cache.cache, table, workspace=workspace, latent=True, **shapes)
        given = {**made.given, **shapes, "workspace": workspace, "planned": is_planned}
        kvx.attention_mla(q, made.cache.cache, table, out=out, lse=lse, **given)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for round_ in range(4):
        keep = torch.randperm(4, generator=generator)
        new = torch.tensor([int(n) if round_ == 0 else max(0, int(n) - 7 * round_ * i) for i, n in enumerate(made.table.seq_lens)])
        lens.copy_(new.to(torch.int32)[keep].cuda()), ids.copy_(made.table.block_table[keep.cuda()])
        q.copy_(torch.randn(q.shape, generator=generator))
        graph.replay()
        eager = torch.empty_like(out), torch.empty_like(lse)
        kvx.attention_mla(q, made.cache.cache, table, out=eager[0], lse=eager[1], **{**made.given, **shapes})
        compare.bitwise(out, eager[0], f"out of round {round_}")
        compare.bitwise(lse, eager[1], f"lse of round {round_}")


@pytest.mark.parametrize("case", [Case(sinks=True), record(lens=(70, 9), queries=(5, 1), window=4)], ids=str)
def test_mla_compiles_without_graph_breaks(native_backend, case, generator):
    made = case.make(native_backend.device, generator)
    want = made.run(native_backend.name)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, ids, lens, cu):
        given = {**made.given, **({} if isinstance(case.queries, int) else {"cu_seqlens": cu})}
        out, lse = kvx.attention_mla(q * 2, made.cache.cache, kvx.PackedTable(ids, lens), **given)
        return out + 1, lse

    got = step(made.q / 2, made.table.block_table, made.table.seq_lens, made.cu)
    compare.bitwise(got[0], want[0] + 1)
    compare.bitwise(got[1], want[1])


# ---- the 656-byte record

SPEC = kvx.CacheSpec(3, 2, 1, 512, v_head_dim=64, layout=cases.LATENT, format=RECORD, v_format="bf16")


def test_record_has_656_bytes():
    cache = kvx.allocate(SPEC).cache
    assert (cache.shape, cache.dtype) == ((3, 2, 656), torch.uint8)
    assert SPEC.token_bytes == 656
    assert SPEC.cache_bytes == 3 * 2 * 656
    latent, rotary = kvx.views(cache, SPEC)
    assert (latent.shape, rotary.shape, rotary.dtype) == ((3, 2, 1, 512), (3, 2, 1, 64), torch.bfloat16)
    assert rotary.data_ptr() - cache.data_ptr() == 528


def test_bytes_of_one_record(backend):
    """Four groups of latents whose scale is a power of two, one of zeros among them, and a rotary part: every byte by hand."""
    latent = torch.zeros(512)
    latent[0], latent[1], latent[127] = 448.0, -1.0, 0.5  # group 0: scale 448 / 448 = 1
    latent[128], latent[129] = -896.0, 2.0  # group 1: scale 2
    latent[384], latent[511] = 0.875, 2.0**-9  # group 3: scale 2^-9, so 448 and 1; group 2 is zeros: the floor
    rotary = torch.zeros(64)
    rotary[0], rotary[63] = 1.0, -2.5
    want = bytearray(656)
    want[0], want[1], want[127] = 0x7E, 0xB8, 0x30  # e4m3: 448 is 0 1111 110, -1 is 1 0111 000, 0.5 is 0 0110 000
    want[128], want[129] = 0xFE, 0x38  # -448, 1
    want[384], want[511] = 0x7E, 0x38
    want[512:528] = struct.pack("<4f", 1.0, 2.0, 1e-6, 2.0**-9)
    want[528:530], want[654:656] = b"\x80\x3f", b"\x20\xc0"  # bf16: 1 is 0x3f80, -2.5 is 0xc020
    cache = kvx.allocate(SPEC, backend.device).cache
    cache.fill_(0xAA)
    k, v = (x.view(1, 1, -1).to(backend.device) for x in (latent, rotary))
    slots = torch.tensor([3], device=backend.device)
    kvx.write(cache, k, v, slot_mapping=slots, spec=SPEC, backend=backend.name)
    assert bytes(cache[1, 1].cpu().tolist()) == bytes(want)
    rest = torch.cat([cache[0].flatten(), cache[1, 0], cache[2].flatten()])
    assert (rest == 0xAA).all()
    table = kvx.PackedTable(torch.tensor([[1]], device=backend.device), torch.tensor([2], device=backend.device))
    got = kvx.gather(cache, table, spec=SPEC, max_seq_len=2, dtype=torch.float32, backend=backend.name)
    compare.bitwise(got[0][0, 1, 0].cpu(), latent)
    compare.bitwise(got[1][0, 1, 0].cpu(), rotary)


def test_records_that_lie_badly_are_refused(backend):
    whole = torch.zeros(3 * 2 * 658 + 2, dtype=torch.uint8, device=backend.device)
    table = kvx.PackedTable(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    table = kvx.PackedTable(*(t.to(backend.device) for t in table.tensors))
    q = torch.zeros(1, 16, 576, device=backend.device)
    for start, step in ((1, 656), (0, 657)):
        cache = whole[start:].as_strided((3, 2, 656), (2 * step, step, 1))
        with pytest.raises(kvx.BadArgument):
            kvx.attention_mla(q, cache, table, spec=SPEC, scale=1.0, backend=backend.name)
    with pytest.raises(kvx.BadArgument, match="656"):
        kvx.attention_mla(q, kvx.allocate(SPEC, backend.device).cache[..., :576], table, spec=SPEC, scale=1.0, backend=backend.name)


def test_one_position_gives_its_latent(backend, generator):
    """An attention that sees one position returns that row's latent, dequantised."""
    made = record(lens=(9, 70), window=1, io="f32").make(backend.device, generator)
    out, _ = made.run(backend.name)
    for s, n in enumerate((9, 70)):
        torch.testing.assert_close(out[s].cpu(), made.v[s, n - 1].expand(16, 512), atol=1e-6, rtol=1e-6)


def test_record_converts_both_ways(backend, generator):
    """To two bf16 tensors and back, and to scales of their own: numbers as gather reads them, one digest for one content."""
    made = record(lens=(70, 9), block=16).make(backend.device, generator)
    spec = made.cache.spec
    two = kvx.CacheSpec(spec.num_blocks, 16, 1, 512, v_head_dim=64, format="bf16")
    apart = kvx.CacheSpec(spec.num_blocks, 16, 1, 512, v_head_dim=64, format="fp8_e4m3_per_128", v_format="bf16")
    source = made.cache.cache
    blocks = [[int(i) for i in made.table.block_table.flatten() if i < spec.num_blocks]] * 2
    given = {"src_blocks": blocks[0], "dst_blocks": blocks[1], "backend": backend.name}
    found = {}
    for dst in (two, apart):
        found[dst] = kvx.allocate_buffers(dst, backend.device)
        kvx.convert([source], found[dst], plan=kvx.plan(spec, dst), **given)
    k, v = found[two][0].view(torch.bfloat16).view(-1, 16, 1, 512), found[two][1].view(torch.bfloat16).view(-1, 16, 1, 64)
    want = kvx.gather(source, made.table, spec=spec, max_seq_len=70, dtype=torch.bfloat16, backend="torch")
    got = kvx.gather((k, v), made.table, spec=two, max_seq_len=70, dtype=torch.bfloat16, backend="torch")
    for g, w in zip(got, want, strict=True):
        compare.bitwise(g.cpu(), w.cpu())
    back = kvx.allocate_buffers(spec, backend.device)
    kvx.convert(found[apart], back, plan=kvx.plan(apart, spec), **given)
    digests = [kvx.digest(b, s, blocks=blocks[0], backend=backend.name) for b, s in ((back, spec), (found[apart], apart))]
    assert digests[0] == digests[1] == kvx.digest([source], spec, blocks=blocks[0], backend=backend.name)


def test_record_is_described_again():
    spec = kvx.CacheSpec(
        3, 4, 1, 512, v_head_dim=64, num_layers=2, layout=f"layer | {cases.LATENT}", format=RECORD, v_format="bf16"
    )
    tensors = [torch.zeros(3, 4, 656, dtype=torch.uint8) for _ in range(2)]
    given = {"format": RECORD, "v_format": "bf16"}
    assert kvx.describe(tensors, spec.layout, head_dim=512, v_head_dim=64, **given) == spec
    views = kvx.layer_views(tensors, spec)
    found = kvx.describe(views, **given)
    assert (found.head_dim, found.v_head_dim, found.format, found.v_format) == (512, 64, RECORD, "bf16")
    assert views[0][1].first.dtype == torch.bfloat16
