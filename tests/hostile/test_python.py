"""Hostile Python arguments: refused with a sentence, never a crash, nothing outside the cache touched."""

from __future__ import annotations

import pytest
import torch

import kvx
from tests import cases, compare


@pytest.fixture
def made(generator):
    return cases.Case(format="f32", io="f32").make("cpu", generator)


def refuse(call, words, kind=kvx.BadArgument):
    with pytest.raises(kind, match=words):
        call()


def test_overlapping_cache_views(made):
    flat = torch.zeros(7 * 4 * 3 * 32)
    stuck = flat.as_strided((7, 4, 3, 32), (0, 96, 32, 1))
    refuse(
        lambda: kvx.write((stuck, made.cache[1]), made.k, made.v, slot_mapping=made.slots, spec=made.spec, backend="cpu"),
        "share an address",
    )
    near = flat.as_strided((7, 4, 3, 32), (384, 96, 31, 1))
    refuse(
        lambda: kvx.write((near, made.cache[1]), made.k, made.v, slot_mapping=made.slots, spec=made.spec, backend="cpu"),
        "share an address",
    )


def test_k_and_v_are_the_same_tensor(made):
    one = made.cache[0]
    refuse(lambda: kvx.write((one, one), made.k, made.v, slot_mapping=made.slots, spec=made.spec, backend="cpu"), "overlap")


def test_overlapping_outputs(made):
    made.write("cpu")
    out = tuple(torch.zeros(11 * 3 * 32).as_strided((4, 11, 3, 32), (0, 96, 32, 1)) for _ in range(2))
    refuse(lambda: made.gather("cpu", out=out), "share an address")


def test_lying_tables(made):
    made.write("cpu")
    lens = made.seq_lens
    for indptr in ([0, 9, 9, 13, 14], [0, 99, 99, 99, 99], [-5, 9, 9, 13, 18], [3, 2, 1, 0, 0]):
        table = kvx.RaggedTable(torch.zeros(18, dtype=torch.int64), torch.tensor(indptr), lens)
        refuse(lambda table=table: made.gather("cpu", table=table), "sequence", kvx.OutOfRange)
    csr = kvx.PageCsrTable(
        torch.zeros(5, dtype=torch.int32),
        torch.tensor([0, 3, 3, 4, 2**30], dtype=torch.int32),
        torch.tensor([1, 0, 4, 1], dtype=torch.int32),
    )
    refuse(lambda: made.gather("cpu", table=csr), "sequence", kvx.OutOfRange)


def test_huge_numbers(made):
    for slot in (2**31, 2**40, 2**62, 2**63 - 1):
        slots = made.slots.clone()
        slots[0] = slot
        refuse(
            lambda slots=slots: kvx.write(made.cache, made.k, made.v, slot_mapping=slots, spec=made.spec, backend="cpu"),
            "slots",
            kvx.OutOfRange,
        )
    refuse(lambda: kvx.CacheSpec(2**62, 16, 8, 128), "bytes")
    refuse(lambda: kvx.CacheSpec(1, 2**40, 8, 128), "block_size")


def test_scales_of_the_wrong_kind(generator):
    made = cases.Case(format="fp8_e4m3_per_head").make("cpu", generator)
    args = {"slot_mapping": made.slots, "spec": made.spec, "backend": "cpu"}
    good = made.scales["k_scale"]
    refuse(lambda: kvx.write(made.cache, made.k, made.v, **args), "needs k_scale")
    refuse(lambda: kvx.write(made.cache, made.k, made.v, k_scale=good[:-1], v_scale=good, **args), "k_scale is")
    half = {"k_scale": good.half(), "v_scale": good}
    refuse(lambda: kvx.write(made.cache, made.k, made.v, **half, **args), "k_scale is torch.float16; .* makes it torch.float32")
    refuse(
        lambda: kvx.write(made.cache, made.k, made.v, k_scale=good, v_scale=good, k_token_scale=good, **args),
        "no scale per token",
    )


def test_not_tensors():
    spec = kvx.CacheSpec(2, 4, 1, 8, format="f32")
    cache = kvx.allocate(spec).cache
    k, slots = torch.zeros(1, 1, 8), torch.tensor([0])
    refuse(lambda: kvx.write(cache, [[1.0]], k, slot_mapping=slots, spec=spec), "k is a list")
    refuse(lambda: kvx.write(cache, k, k, slot_mapping=[0], spec=spec), "slot_mapping is a list")
    refuse(lambda: kvx.write("cache", k, k, slot_mapping=slots, spec=spec), "cache")
    refuse(lambda: kvx.write((cache[0], 5), k, k, slot_mapping=slots, spec=spec), "v_cache is an int")
    refuse(lambda: kvx.write(cache, k, k, slot_mapping=slots, spec="bf16"), "spec is a str")
    refuse(lambda: kvx.gather(cache, torch.zeros(1, 2), spec=spec), "table is a Tensor")
    refuse(lambda: kvx.write(cache, k, k.to("meta"), slot_mapping=slots, spec=spec), "v has no memory .* it is on the meta device")


def test_a_failed_call_leaves_the_next_one_working(made):
    for _ in range(3):
        with pytest.raises(kvx.KvxError):
            kvx.write(made.cache, made.k[:1], made.v, slot_mapping=made.slots, spec=made.spec, backend="cpu")
        want = made.clone()
        want.write("torch")
        made.write("cpu")
        compare.bitwise(made.cache[0], want.cache[0])


def test_ops_release_the_interpreter_lock():
    """A long host call lets other Python threads run."""
    import threading
    import time

    spec = kvx.CacheSpec(8192, 16, 8, 128, format="fp8_e4m3_per_token_head")
    st = kvx.allocate(spec)
    k = torch.randn(32768, 8, 128).bfloat16()
    slots = torch.arange(32768)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    kvx.write(st.cache, k, k, slot_mapping=slots, spec=spec, **st.scales())
    end = time.perf_counter()
    stop.set()
    thread.join()
    if end - start > 0.02:
        assert sum(start < t < end for t in ticks) >= 3, "no other thread ran during a long call"
