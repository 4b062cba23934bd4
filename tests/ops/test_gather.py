"""gather: every backend equals the torch definition bit for bit, over the four tables and three kinds of output."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases, compare


@pytest.mark.parametrize("case", [c for c in cases.ALL if c.lens], ids=str)
def test_gather_matches_definition(native_backend, case, generator):
    made = case.make(native_backend.device, generator)
    made.write(native_backend.name)
    want = made.to("cpu").gather("torch")
    for got, expected, name in zip(made.gather(native_backend.name), want, "kv", strict=True):
        compare.bitwise(got.cpu(), expected, name)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_gather_returns_what_was_written_and_zeros_after(backend, layout, fmt, generator):
    made = cases.Case(layout=layout, format=fmt, io=fmt).make(backend.device, generator)
    made.write(backend.name)
    k, v = made.gather(backend.name)
    first = 0
    for s, n in enumerate(made.case.lens):
        compare.bitwise(k[s, :n], made.k[first : first + n], "k")
        compare.bitwise(v[s, :n], made.v[first : first + n], "v")
        assert (k[s, n:] == 0).all()
        assert (v[s, n:] == 0).all()
        first += n


def test_length_past_max_seq_len_is_cut(backend, generator):
    made = cases.Case(io="f32", format="f32").make(backend.device, generator)
    made.write(backend.name)
    whole, _ = made.gather(backend.name)
    cut, _ = made.gather(backend.name, max_seq_len=3)
    compare.bitwise(cut, whole[:, :3].contiguous())


def tables(made):
    packed = kvx.PackedTable(made.block_table, made.seq_lens)
    return {
        "packed": packed,
        "packed_mixed_types": kvx.PackedTable(made.block_table.to(torch.int32), made.seq_lens.to(torch.int64)),
        "packed_strided": kvx.PackedTable(torch.stack([made.block_table, made.block_table * 0 - 5], -1)[..., 0], made.seq_lens),
        "ragged": kvx.to_ragged(packed, made.spec.block_size),
        "page_csr": kvx.to_page_csr(packed, made.spec.block_size),
    }


@pytest.mark.parametrize("kind", ["packed_mixed_types", "packed_strided", "ragged", "page_csr"])
@pytest.mark.parametrize("fmt", ["f32", "fp8_e4m3_per_token_head"])
@pytest.mark.parametrize("dim", [32, 7])
def test_tables_name_the_same_blocks(backend, kind, fmt, dim, generator):
    made = cases.Case(format=fmt, io="f32", head_dim=dim).make(backend.device, generator)
    made.write(backend.name)
    want = made.gather(backend.name)
    got = made.gather(backend.name, table=tables(made)[kind])
    for a, b in zip(got, want, strict=True):
        compare.bitwise(a, b)


@pytest.mark.parametrize("fmt", ["bf16", "int8_per_token_head_inline"])
@pytest.mark.parametrize("kind", ["packed", "ragged", "page_csr"])
def test_packed_output(backend, fmt, kind, generator):
    made = cases.Case(format=fmt).make(backend.device, generator)
    made.write(backend.name)
    padded = made.gather(backend.name)
    cu = kvx.cu_seqlens(made.seq_lens)
    total = int(cu[-1])
    out = tuple(torch.full((total, 3, 32), 7.0, dtype=torch.bfloat16, device=backend.device) for _ in range(2))
    made.gather(backend.name, table=tables(made)[kind], cu_seqlens=cu, out=out)
    for x, p in zip(out, padded, strict=True):
        compare.bitwise(x, torch.cat([p[s, :n] for s, n in enumerate(made.case.lens)]))


def test_packed_output_with_room_is_zero_filled(backend, generator):
    made = cases.Case(format="f32", io="f32").make(backend.device, generator)
    made.write(backend.name)
    cu = torch.tensor([0, 11, 12, 16, 20], dtype=torch.int32, device=backend.device)
    out = tuple(torch.full((20, 3, 32), 7.0, device=backend.device) for _ in range(2))
    made.gather(backend.name, cu_seqlens=cu, out=out)
    padded, _ = made.gather(backend.name, max_seq_len=11)
    for s, n in enumerate((11, 1, 4, 4)):
        compare.bitwise(out[0][int(cu[s]) : int(cu[s]) + n], padded[s, :n].contiguous())


def test_rows_in_front_of_the_first_sequence_are_zero_where_outputs_are_made(backend, generator, monkeypatch):
    if backend.device != "cpu":
        pytest.skip("with cu_seqlens on a device outputs are the caller's")
    made = cases.Case(format="f32", io="f32").make(backend.device, generator)
    made.write(backend.name)
    cu, empty = kvx.cu_seqlens(made.seq_lens), torch.empty
    want = made.gather(backend.name, cu_seqlens=cu)
    monkeypatch.setattr(torch, "empty", lambda *args, **more: empty(*args, **more).fill_(7))
    for x, y in zip(made.gather(backend.name, cu_seqlens=cu + 2), want, strict=True):
        assert (x[:2] == 0).all()
        compare.bitwise(x[2:], y)


def test_three_and_four_dimensional_outputs_agree(backend, generator):
    made = cases.Case().make(backend.device, generator)
    made.write(backend.name)
    k4, v4 = made.gather(backend.name)
    out = tuple(torch.empty(k4.shape[0] * k4.shape[1], 3, 32, dtype=k4.dtype, device=k4.device) for _ in range(2))
    made.gather(backend.name, out=out)
    compare.bitwise(out[0].view(k4.shape), k4)
    compare.bitwise(out[1].view(v4.shape), v4)


def test_strided_outputs(backend, generator):
    made = cases.Case().make(backend.device, generator)
    made.write(backend.name)
    k4, v4 = made.gather(backend.name)
    wide = torch.full((2, *k4.shape[:-1], 40), 3.0, dtype=k4.dtype, device=k4.device)
    if backend.name == "torch":
        wide = torch.full((2, *k4.shape), 3.0, dtype=k4.dtype, device=k4.device)
    made.gather(backend.name, out=(wide[0, ..., :32], wide[1, ..., :32]))
    compare.bitwise(wide[0, ..., :32], k4)
    compare.bitwise(wide[1, ..., :32], v4)
    assert (wide[..., 32:] == 3).all()


def kv_offsets(generator, device, fmt="bf16", layout=kvx.HND):
    """TensorRT-LLM pools: [blocks, kv] of one layer; V's index is K's + 1; some blocks in the secondary pool, one missing."""
    spec = kvx.CacheSpec(12, 4, 2, 16, format=fmt, layout=layout)
    dtype = getattr(torch, spec.plane(0).format.element.torch_name)
    shape = (2, 4, 16) if layout == kvx.HND else (4, 2, 16)
    pools = [torch.randn(n, *shape, generator=generator).to(dtype).to(device) for n in (12, 6)]
    second = -(2**31)
    offsets = torch.tensor(
        [
            [[[0, 4, 2**30], [1, 5, 2**30]], [[0, second + 2, 2**30], [1, second + 3, 2**30]]],
            [[[8, -1, 10], [9, -1, 11]], [[8, 6, second + 4], [9, 7, second + 5]]],
        ],
        dtype=torch.int64,
    ).to(torch.int32)
    lens = torch.tensor([7, 12], dtype=torch.int32)
    return spec, tuple(pools), kvx.KvOffsetsTable(offsets.to(device), lens.to(device))


@pytest.mark.parametrize("layout", [kvx.HND, kvx.NHD])
def test_kv_offsets_by_hand(backend, layout, generator):
    spec, pools, table = kv_offsets(generator, backend.device, layout=layout)
    k, v = kvx.gather(pools, table, spec=spec, max_seq_len=13, backend=backend.name)
    assert k.shape == (4, 13, 2, 16)
    offsets = table.offsets.cpu().flatten(0, 1).long()
    for seq, n in enumerate((7, 7, 12, 12)):
        for out, kv in ((k, 0), (v, 1)):
            for pos in range(13):
                value = int(offsets[seq, kv, min(pos // 4, 2)])
                if pos >= n or value == -1:
                    assert (out[seq, pos] == 0).all(), (seq, pos)
                    continue
                block = pools[int(value < 0)][value & 0x7FFFFFFF]
                compare.bitwise(out[seq, pos], block[:, pos % 4] if layout == kvx.HND else block[pos % 4])


def test_kv_offsets_matches_definition_with_scales(native_backend, generator):
    spec, pools, table = kv_offsets(generator, "cpu", fmt="fp8_e4m3_per_head")
    scale = torch.rand(2, generator=generator) + 0.5
    want = kvx.gather(pools, table, spec=spec, max_seq_len=13, k_scale=scale, v_scale=scale, dtype=torch.float32, backend="torch")
    d = native_backend.device
    moved = kvx.KvOffsetsTable(table.offsets.to(d), table.seq_lens.to(d))
    got = kvx.gather(
        tuple(p.to(d) for p in pools),
        moved,
        spec=spec,
        max_seq_len=13,
        k_scale=scale.to(d),
        v_scale=scale.to(d),
        dtype=torch.float32,
        backend=native_backend.name,
    )
    for a, b in zip(got, want, strict=True):
        compare.bitwise(a.cpu(), b)


def test_bad_block_ids(backend, generator):
    made = cases.Case(format="f32", io="f32").make(backend.device, generator)
    made.write(backend.name)
    good, _ = made.gather(backend.name)
    for bad in (made.spec.num_blocks, -1, 2**30):
        table = made.block_table.clone()
        table[0, 1] = bad  # positions 4..7 of sequence 0
        packed = kvx.PackedTable(table, made.seq_lens)
        if backend.device == "cpu":
            with pytest.raises(kvx.OutOfRange, match="sequence 0"):
                made.gather(backend.name, table=packed)
            continue
        errors = torch.zeros((), dtype=torch.int64, device="cuda")
        k, _ = made.gather(backend.name, table=packed, errors=errors)
        assert int(errors) == 4
        assert (k[0, 4:8] == 0).all()
        compare.bitwise(k[0, :4], good[0, :4])
        compare.bitwise(k[2], good[2])


def test_impossible_lengths(backend, generator):
    made = cases.Case(format="f32", io="f32").make(backend.device, generator)
    made.write(backend.name)
    too_long = made.seq_lens.clone()
    too_long[0] = 4 * made.block_table.shape[1] + 1
    negative = made.seq_lens.clone()
    negative[1] = -3
    csr = kvx.to_page_csr(kvx.PackedTable(made.block_table, made.seq_lens), 4)
    last = csr.last_page_len.clone()
    last[0] = 5
    for table in (
        kvx.PackedTable(made.block_table, too_long),
        kvx.PackedTable(made.block_table, negative),
        kvx.PageCsrTable(csr.indices, csr.indptr, last),
    ):
        if backend.device == "cpu":
            with pytest.raises(kvx.OutOfRange):
                made.gather(backend.name, table=table, max_seq_len=20)
        else:
            errors = torch.zeros((), dtype=torch.int64, device="cuda")
            made.gather(backend.name, table=table, max_seq_len=20, errors=errors)
            assert int(errors) > 0


def test_wrong_cu_seqlens(backend, generator):
    made = cases.Case(format="f32", io="f32").make(backend.device, generator)
    made.write(backend.name)
    out = tuple(torch.zeros(18, 3, 32, device=backend.device) for _ in range(2))
    for cu in ([0, 9, 9, 13, 19], [0, 9, 8, 13, 18], [-1, 9, 9, 13, 18], [0, 13, 13, 13, 18]):
        cu_t = torch.tensor(cu, dtype=torch.int32, device=backend.device)
        if backend.device == "cpu":
            with pytest.raises(kvx.OutOfRange, match="cu_seqlens"):
                made.gather(backend.name, cu_seqlens=cu_t, out=out, max_seq_len=12)
        else:
            errors = torch.zeros((), dtype=torch.int64, device="cuda")
            made.gather(backend.name, cu_seqlens=cu_t, out=out, max_seq_len=12, errors=errors)
            assert int(errors) > 0


def test_wrong_tables_are_refused():
    lens, ids = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    for make, words in (
        (lambda: kvx.PackedTable(ids.float(), lens), "int32 or int64"),
        (lambda: kvx.PackedTable(ids[0], lens), "2 dimensions"),
        (lambda: kvx.PackedTable(ids, lens.repeat(2)), "2 sequences"),
        (lambda: kvx.RaggedTable(ids[0], lens, lens), "one more"),
        (lambda: kvx.PageCsrTable(ids[0], lens, lens), "one more"),
        (lambda: kvx.KvOffsetsTable(ids.long(), lens), "int32"),
        (lambda: kvx.KvOffsetsTable(ids.view(1, 1, 1, 2), lens), "K and V"),
    ):
        with pytest.raises(kvx.BadArgument, match=words):
            make()


def test_kv_offsets_needs_a_power_of_two(native_backend, generator):
    _, pools, table = kv_offsets(generator, native_backend.device)
    with pytest.raises(kvx.BadArgument, match="power of two"):
        kvx.gather(pools, table, spec=kvx.CacheSpec(4, 3, 2, 16), max_seq_len=4, backend=native_backend.name)


def test_empty_batch(backend):
    spec = kvx.CacheSpec(2, 4, 1, 8)
    cache = kvx.allocate(spec, backend.device).cache
    none = torch.zeros(0, dtype=torch.int32, device=backend.device)
    k, v = kvx.gather(cache, kvx.PackedTable(none.view(0, 3), none), spec=spec, max_seq_len=5, backend=backend.name)
    assert k.shape == (0, 5, 1, 8)
    assert v.shape == (0, 5, 1, 8)
    kvx.write(cache, k.view(0, 1, 8), v.view(0, 1, 8), slot_mapping=none, spec=spec, backend=backend.name)


def test_max_seq_len_defaults_to_the_longest(generator):
    made = cases.Case().make("cpu", generator)
    made.write("cpu")
    k, _ = kvx.gather(made.cache, kvx.PackedTable(made.block_table, made.seq_lens), spec=made.spec)
    assert k.shape[1] == 9
