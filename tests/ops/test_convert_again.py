"""convert called again: a plan keeps its buffers checked and bound, and only blocks change. The same bytes as bound anew."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvx
from kvx.ops import backend as backends
from kvx.ops.move.convert import bind, convert
from tests import compare
from tests.ops import layouts

LAYOUTS = [
    "layer | block token head (kv dim)",
    "block layer kv head token dim",
    "layer kv[K: | block head dim/x token dim%x; V: | block head dim token]",
    "block | head layer kv token dim",
]


def buffers_of(spec, seed, device):
    """Of any bytes; of numbers a cache holds where the format is one of floats."""
    made = [t.to(device) for t in kvx.allocate_buffers(spec)]
    g = torch.Generator().manual_seed(seed)
    for t in made:
        if spec.format == "bf16":
            t.copy_(torch.randn(t.numel() // 2, generator=g).to(torch.bfloat16).view(torch.uint8))
        elif t.dtype == torch.uint8:
            t.copy_(torch.randint(0, 100, t.shape, generator=g).to(torch.uint8))
    return made


def random_blocks(rng, src, dst, device):
    """Ids of either width, one row or a table, some of them negative, as many as each call likes; lengths now and then."""
    num_seqs, tokens = rng.choice([1, 1, 2, 3]), rng.choice([0, 8, 16, 24])
    tables = []
    for spec in (src, dst):
        columns = tokens // spec.block_size
        ids = torch.tensor(rng.sample(range(spec.num_blocks), num_seqs * columns), dtype=rng.choice([torch.int32, torch.int64]))
        ids[torch.tensor([rng.random() < 0.2 for _ in range(len(ids))], dtype=torch.bool)] = -rng.randrange(1, 2**31)
        tables.append(ids.view(num_seqs, columns) if num_seqs > 1 or rng.random() < 0.3 else ids)
    lens = None
    if rng.random() < 0.5:
        lens = torch.tensor([rng.randint(0, tokens) for _ in range(num_seqs)], dtype=rng.choice([torch.int32, torch.int64]))
    where = device if rng.random() < 0.4 else "cpu"
    return [t if t is None else t.to(where) for t in (*tables, lens)]


@pytest.mark.parametrize("seed", range(24))
def test_other_blocks_give_the_bytes_of_a_fresh_bind(native_backend, seed):
    rng, device = random.Random(seed), native_backend.device
    sizes = rng.choice([(8, 8), (4, 8), (8, 4)])
    src = kvx.CacheSpec(40, sizes[0], 2, 32, num_layers=3, layout=rng.choice(LAYOUTS), format="bf16")
    formats = ["bf16", "int8_per_token_head", "fp8_e4m3_per_block_head", "f32"]
    dst = replace(src, layout=rng.choice(LAYOUTS[:2]), block_size=sizes[1], format=rng.choice(formats))
    a, plan = buffers_of(src, seed, device), kvx.plan(src, dst)
    got = buffers_of(dst, seed + 1, device)
    want = [t.clone() for t in got]
    for call in range(8):
        src_blocks, dst_blocks, lens = random_blocks(rng, src, dst, device)
        given = {"src_blocks": src_blocks, "dst_blocks": dst_blocks, "seq_lens": lens}
        convert(a, got, plan=plan, **given, backend=native_backend.name)
        bind(kvx.plan(src, dst), a, want, **given, backend=native_backend.name).run()
        for x, y in zip(got, want, strict=True):
            compare.bitwise(x.cpu(), y.cpu(), f"call {call}")
    assert len(plan.__dict__["_sides"]) == 1


def test_many_buffers_and_ids_again(native_backend):
    """More than a launch carries: addresses are put on the device once, ids with each call."""
    src = kvx.CacheSpec(700, 2, 1, 8, num_layers=2, layout="block layer kv | token head dim")
    dst = replace(src, layout="block | head layer kv token dim")
    a, got = layouts.random_buffers(src, 0, native_backend.device), layouts.random_buffers(dst, 1, native_backend.device)
    plan, want = kvx.plan(src, dst), [t.cpu() for t in got]
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        ids = [torch.randperm(700, generator=g)[: (700, 3, 513, 650)[seed]] for _ in range(2)]
        convert(a, got, plan=plan, src_blocks=ids[0], dst_blocks=ids[1], backend=native_backend.name)
        convert([t.cpu() for t in a], want, plan=plan, src_blocks=ids[0], dst_blocks=ids[1], backend="torch")
    for x, y in zip(got, want, strict=True):
        compare.bitwise(x.cpu(), y)


def caches(device, *, num_blocks=64, **more):
    src = kvx.CacheSpec(num_blocks, 4, 2, 8, num_layers=3, layout="layer kv | block token head dim", **more)
    dst = replace(src, layout="block layer kv head token dim")
    return (layouts.random_buffers(src, 0, device), layouts.random_buffers(dst, 1, device), kvx.plan(src, dst))


def test_ids_are_checked_by_every_call(native_backend):
    src, dst, plan = caches(native_backend.device)
    convert(src, dst, plan=plan, src_blocks=[0], dst_blocks=[1], backend=native_backend.name)
    before = dst[0].clone()
    for ids, said in (
        (([64], [1]), r"src_blocks\[0\] is 64; the source has 64 blocks. Nothing was converted"),
        (([0, 1], [2, 99]), r"dst_blocks\[1\] is 99; the destination has 64 blocks"),
        (([0, 1, 2], [5, 7, 5]), "dst_blocks names block 5 twice. Nothing was converted"),
        ((torch.tensor([[0, 1]]), torch.tensor([[3], [4]])), "src_blocks has 1 sequences and dst_blocks 2"),
        (([0, 1], [2]), "src_blocks holds 8 tokens a sequence and dst_blocks 4. Give seq_lens"),
        ((torch.zeros(1, 1, 1, dtype=torch.int64), [2]), r"src_blocks is \[1, 1, 1\] torch.int64; it must be \[n\]"),
        ((torch.zeros(1), [2]), r"src_blocks is \[1\] torch.float32; it must be \[n\]"),
        ((torch.zeros(1, dtype=torch.int64, device="meta"), [2]), "src_blocks is on the meta device and has no memory"),
        (([0.5], [2]), "src_blocks is .* whole numbers"),
        ((None, None, [4]), "seq_lens is .* must be a tensor"),
    ):
        with pytest.raises((kvx.BadArgument, kvx.OutOfRange), match=rf"^convert\(\): {said}"):
            convert(
                src, dst, plan=plan, backend=native_backend.name,
                **dict(zip(("src_blocks", "dst_blocks", "seq_lens"), ids, strict=False)),
            )  # fmt: skip
    compare.bitwise(dst[0].cpu(), before.cpu())
    # Which blocks a refused call named is forgotten.
    convert(src, dst, plan=plan, src_blocks=[0, 1, 2], dst_blocks=[5, 7, 6], backend=native_backend.name)


def test_ids_of_numpy_are_read_where_they_are(native_backend):
    src, dst, plan = caches(native_backend.device)
    there = np.array([3, 1, 2])
    rows = dst[0].view(64, -1)
    for dtype in (np.int64, np.int32, np.uint8):
        for kind in (np.array([0, 1, 2], dtype), np.arange(6, dtype=dtype)[::2], np.frombuffer(bytes(8 * 3), dtype)[:1]):
            dst[0].zero_()
            convert(src, dst, plan=plan, src_blocks=kind, dst_blocks=there[: len(kind)], backend=native_backend.name)
            assert all(rows[i].any() for i in there[: len(kind)])
            assert not rows[0].any()


def test_a_plan_with_blocks_again(native_backend):
    src = kvx.CacheSpec(4, 4, 2, 8, layout="layer | block token head (kv dim)")
    a, b = layouts.random_buffers(src, 0, native_backend.device), layouts.random_buffers(src, 1, native_backend.device)
    plan = kvx.plan(src, src, blocks=([3, 1], [0, 2]))
    for _ in range(2):
        convert(a, b, plan=plan, backend=native_backend.name)
        compare.bitwise(b[0].view(4, -1)[[0, 2]].cpu(), a[0].view(4, -1)[[3, 1]].cpu())
        b[0].zero_()
        convert(a, b, plan=plan, src_blocks=[2], dst_blocks=[1], backend=native_backend.name)
        compare.bitwise(b[0].view(4, -1)[1].cpu(), a[0].view(4, -1)[2].cpu())
        with pytest.raises(kvx.BadArgument, match="src_blocks is given and dst_blocks is not"):
            convert(a, b, plan=plan, src_blocks=[2], backend=native_backend.name)


def test_buffers_that_changed_are_bound_anew(native_backend):
    src, dst, plan = caches(native_backend.device)

    def moves(value):
        src[2].fill_(value)
        convert(src, dst, plan=plan, src_blocks=[1], dst_blocks=[2], backend=native_backend.name)
        return int(dst[0].view(64, 3, 2, -1)[2, 1, 0].max()) == value  # layer 1, K

    assert moves(3)
    assert moves(4)
    src[2].set_(torch.zeros_like(src[2]))  # elsewhere
    assert moves(5)
    src[2].data = torch.zeros_like(src[2])
    assert moves(6)
    src[2].resize_(2 * len(src[2]))
    assert moves(7)
    src[2] = torch.zeros_like(src[2])  # another object in the same list
    assert moves(8)
    src[2].resize_(8)
    with pytest.raises(kvx.BadArgument, match=r"src buffer 2 is \[8\] uint8, 8 bytes of memory; the spec makes"):
        moves(9)


def test_the_same_tensors_shared_out_otherwise(native_backend):
    """As many tensors in the same order, of which one is now on the other side."""
    one = kvx.CacheSpec(4, 4, 2, 8, layout="layer | block token head (kv dim)")
    a, b, c = (layouts.random_buffers(one, i, native_backend.device)[0] for i in range(3))
    plan = kvx.plan(one, one)
    convert([a], [b], plan=plan, backend=native_backend.name)
    for src, dst in (([a, b], []), ([], [a, b]), ([a, b], [c]), ([a], [b, c])):
        with pytest.raises(kvx.BadArgument, match=r"(src|dst) has \d buffers; the specs make 1"):
            convert(src, dst, plan=plan, backend=native_backend.name)
    convert(a, b, plan=plan, backend=native_backend.name)
    convert([[a]], ([b],), plan=plan, backend=native_backend.name)
    compare.bitwise(b.cpu(), a.cpu())
    assert len(plan.__dict__["_sides"]) == 1


def test_a_gradient_that_is_asked_for_later_is_noticed(native_backend):
    spec = kvx.CacheSpec(4, 4, 2, 8, layout="layer | block token head (kv dim)", format="f32")
    src, dst = (torch.zeros(4, 4, 2, 16, device=native_backend.device) for _ in range(2))
    plan = kvx.plan(spec, spec)
    convert(src, dst, plan=plan, backend=native_backend.name)
    src.requires_grad_(True)
    with pytest.raises(kvx.BadArgument, match="src buffer 0 requires grad"):
        convert(src, dst, plan=plan, backend=native_backend.name)
    with torch.no_grad():
        convert(src, dst, plan=plan, backend=native_backend.name)


def test_memory_is_not_held(native_backend):
    src, dst, plan = caches(native_backend.device)
    convert(src, dst, plan=plan, src_blocks=[1], dst_blocks=[2], backend=native_backend.name)
    alive = [weakref.ref(t) for t in (*src, *dst)]
    del src, dst
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    for fill in range(12):  # memory and objects at the places of those that are gone
        a, b, _ = caches(native_backend.device)
        a[0].fill_(fill)
        convert(a, b, plan=plan, src_blocks=[1], dst_blocks=[2], backend=native_backend.name)
        assert int(b[0].view(64, 3, 2, -1)[2, 0, 0].max()) == fill
        del a, b


def test_a_scale_that_was_never_set_is_said_by_every_call(native_backend):
    plain = kvx.CacheSpec(4, 4, 2, 32, layout="kv | block token head dim")
    coded = replace(plain, format="fp8_e4m3_per_head")
    src, dst, plan = (
        kvx.allocate_buffers(plain, native_backend.device),
        kvx.allocate_buffers(coded, native_backend.device),
        kvx.plan(plain, coded),
    )
    for _ in range(3):
        with pytest.warns(kvx.KvxWarning, match=r"convert\(\)") as said:
            convert(src, dst, plan=plan, src_blocks=[1], dst_blocks=[2], backend=native_backend.name)
        assert [w.filename for w in said] == [__file__]
    for scale in dst[2:]:
        scale.fill_(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(src, dst, plan=plan, src_blocks=[1], dst_blocks=[2], backend=native_backend.name)


def test_two_threads_on_one_plan(native_backend):
    """Each moves blocks of its own, all at once, over one kept binding."""
    src, dst, plan = caches(native_backend.device, num_blocks=4096)
    want = dst[0].clone()
    failed = []

    def work(part):
        rng = random.Random(part)
        try:
            for _ in range(60):
                ids = torch.tensor(rng.sample(range(part, 4096, 4), rng.choice([1, 7, 700])))
                convert(src, dst, plan=plan, src_blocks=ids, dst_blocks=ids, backend=native_backend.name)
            rest = torch.arange(part, 4096, 4)
            convert(src, dst, plan=plan, src_blocks=rest, dst_blocks=rest, backend=native_backend.name)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed
    bind(plan, src, [want], backend=native_backend.name).run()
    compare.bitwise(dst[0].cpu(), want.cpu())


# ---- a GPU: the host never waits


@pytest.fixture
def cuda():
    if backends.reason_missing("cuda") is not None:
        pytest.skip("backend cuda: no CUDA device or driver on this machine")
    return "cuda"


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


BUSY_CYCLES = 400_000_000  # some 0.2 s


@pytest.mark.parametrize("has_lens", [False, True])
def test_ids_of_the_host_do_not_wait_for_the_device(cuda, has_lens):
    src, dst, plan = caches(cuda, num_blocks=20_000)
    want = dst[0].clone()
    given = [torch.randperm(20_000)[:16_384] for _ in range(2)]
    lens = torch.tensor([4 * 16_384 - 3]) if has_lens else None
    for ids in ([0], given[0]):  # memory for tables is there from now on
        convert(src, dst, plan=plan, src_blocks=ids, dst_blocks=ids)
    dst[0].copy_(want)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    took = seconds(lambda: convert(src, dst, plan=plan, src_blocks=given[0], dst_blocks=given[1], seq_lens=lens))
    is_busy = not torch.cuda.current_stream().query()
    assert is_busy, f"the stream was done when convert came back, after {took * 1e3:.1f} ms"
    assert took < 0.02
    bind(plan, src, [want], src_blocks=given[0], dst_blocks=given[1], seq_lens=lens).run()
    compare.bitwise(dst[0].cpu(), want.cpu())


def test_a_fresh_binding_does_not_wait_for_the_device(cuda):
    """Also where addresses are too many to travel with a launch."""
    src = kvx.CacheSpec(700, 2, 1, 8, num_layers=2, layout="block layer kv | token head dim")
    dst = replace(src, layout="block | head layer kv token dim")
    a, b = layouts.random_buffers(src, 0, cuda), layouts.random_buffers(dst, 1, cuda)
    c = [t.clone() for t in b]
    convert(a, b, plan=kvx.plan(src, dst))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    convert(a, c, plan=kvx.plan(src, dst))
    assert not torch.cuda.current_stream().query()
    for x, y in zip(b, c, strict=True):
        compare.bitwise(x.cpu(), y.cpu())


def test_tables_under_way_are_not_overwritten(cuda):
    """Many calls queued behind a busy stream, each with ids of its own, over two streams."""
    src, dst, plan = caches(cuda, num_blocks=4096)
    outs = [[torch.zeros_like(dst[0])] for _ in range(40)]
    ids = [(torch.randperm(4096)[:3000], torch.randperm(4096)[:3000]) for _ in outs]
    convert(src, outs[0], plan=plan, src_blocks=ids[0][0], dst_blocks=ids[0][1])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for n, (out, (a, b)) in enumerate(zip(outs, ids, strict=True)):
        with torch.cuda.stream(streams[n % 2]):
            if n < 2:
                torch.cuda._sleep(BUSY_CYCLES // (1 + n))
            a, b = a.clone(), b.clone()
            convert(src, out, plan=plan, src_blocks=a, dst_blocks=b)
            a.fill_(0), b.fill_(0)  # the caller's are free again
    torch.cuda.synchronize()
    for out, (a, b) in zip(outs, ids, strict=True):
        want = torch.zeros_like(dst[0])
        bind(plan, src, [want], src_blocks=a.cuda(), dst_blocks=b.cuda()).run()
        compare.bitwise(out[0].cpu(), want.cpu())


def test_bindings_may_go_while_their_work_is_queued(cuda):
    src = kvx.CacheSpec(700, 2, 1, 8, num_layers=2, layout="block layer kv | token head dim")
    dst = replace(src, layout="block | head layer kv token dim")
    a, got, want = layouts.random_buffers(src, 0, cuda), layouts.random_buffers(dst, 1, cuda), layouts.random_buffers(dst, 1, cuda)
    other = layouts.random_buffers(dst, 2, cuda)
    ids = torch.randperm(700)
    bind(kvx.plan(src, dst), a, want, src_blocks=ids).run()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    bind(kvx.plan(src, dst), a, got, src_blocks=ids).run()  # gone as soon as it is queued
    gc.collect()
    for _ in range(8):
        bind(kvx.plan(src, dst), a, other, src_blocks=torch.randperm(700)).run()
    torch.cuda.synchronize()
    for x, y in zip(got, want, strict=True):
        compare.bitwise(x.cpu(), y.cpu())


@pytest.mark.parametrize("num_ids", [4, 3000])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_captured_call_replays_its_own_blocks(cuda, num_ids, is_known):
    src, dst, plan = caches(cuda, num_blocks=4096)
    ids = [torch.randperm(4096)[:num_ids] for _ in range(2)]
    lens = torch.tensor([4 * num_ids - 1])
    want = [torch.zeros_like(dst[0])]
    bind(plan, src, want, src_blocks=ids[0], dst_blocks=ids[1], seq_lens=lens).run()
    convert(src, [dst[0].clone()], plan=plan)  # kernels are loaded outside of a capture
    if is_known:
        convert(src, dst, plan=plan, src_blocks=[0], dst_blocks=[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        convert(src, dst, plan=plan, src_blocks=ids[0], dst_blocks=ids[1], seq_lens=lens)
    for _ in range(3):
        for _ in range(6):  # take all slots there are
            other = torch.randperm(4096)[:3000]
            convert(src, dst, plan=plan, src_blocks=other, dst_blocks=other)
        dst[0].zero_()
        graph.replay()
        compare.bitwise(dst[0].cpu(), want[0].cpu())
