"""Every kernel once, on shapes that reach each path, for compute-sanitizer: `make sanitize-gpu`. Checks results too.

python3 tests/sanitize.py                    all parts
python3 tests/sanitize.py small prefill:0/3  some of them; of attention's, the first third of the cases
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import kvx
from tests import cases, compare
from tests.hybrid.ops import hybrid_cases as rows_cases
from tests.hybrid.ops import test_append_swa, test_attention_sparse, test_compress, test_index_scores, test_topk
from tests.layout import test_states
from tests.ops import (
    attention_cases,
    mla_cases,
    rope,
    test_append,
    test_append_batched,
    test_attention_batched,
    test_attention_fp8_products,
    test_attention_prefill,
    test_convert,
    test_copy_blocks,
    test_merge_attention,
    test_norm_rope,
)

CASES = [
    *cases.SHAPES,
    *(
        cases.Case(layout=layout, format=f, head_dim=64)
        for layout in ("NHD", "fused_HND")
        for f in ("bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "mxfp8")
    ),
    cases.Case(format="f32", io="f16"),
]


class Device:
    name = device = "cuda"


def convert_cases() -> int:
    """Rows, tiles, cells and the digest."""
    count = 0
    for a in test_convert.LAYOUTS_ANY_BLOCK:
        for b in test_convert.LAYOUTS_ANY_BLOCK[1::2]:
            g = {"num_blocks": 3, "block_size": 16, "num_kv_heads": 2, "head_dim": 64, "num_layers": 2, "format": "bf16"}
            test_convert.run(Device, kvx.CacheSpec(**g, layout=a), kvx.CacheSpec(**g, layout=b), [[2, 0]], [[1, 2]])
            count += 1
    g = {"num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 64, "num_layers": 2}
    plain = kvx.CacheSpec(**g, layout="layer | block token head (kv dim)")
    for fmt in ("fp8_e4m3_per_token_head", "int8_per_block_head", "nvfp4", "int8_per_token_head_inline"):
        coded = kvx.CacheSpec(**g, layout="block layer kv head token dim", format=fmt)
        for pair in ((plain, coded), (coded, plain)):
            test_convert.transcode(Device, *pair, src_blocks=[3, 1], dst_blocks=[0, 2])
        buffers = test_convert.fill(coded, 0)
        assert kvx.digest([t.cuda() for t in buffers], coded) == kvx.digest(buffers, coded)
        count += 3
    for src, dst in (("vllm.sd", "vllm.sd"), ("transformers", "vllm.sd"), ("sglang.host", "transformers")):
        for sizes in ((4, 16, 32), (2, 8, 128), (3, 5, 7)):
            test_states.test_floats_become_other_floats_in_any_order(Device, src, dst, sizes, seeded())
            count += 1
    return count


def append_cases() -> int:
    """Lanes and warps of append, with a bad slot and a bad position; merging and copying."""
    count = 0
    caches = [*cases.SHAPES, *(test_append.USUAL.with_(format=f) for f in ("bf16", *test_append.QUANTISED))]
    for case in caches:
        for how in rope.ROPES if case.head_dim == 128 else rope.ROPES[::4]:
            if case.head_dim % 2:
                continue
            made = test_append.Made.of(case, how, "cuda", torch.Generator().manual_seed(0))
            want = made.to("cpu")
            want.kv.slots[-1:] = -1
            want_q = want.append("torch")
            errors = torch.zeros((), dtype=torch.int64, device="cuda")
            made.kv.slots[-1:] = made.kv.spec.num_slots + 5
            made.compare(made.append("cuda", errors=errors), want, want_q)
            assert int(errors) == min(1, made.kv.slots.numel())
            count += 1
    for case in (*test_copy_blocks.FORMATS, *test_copy_blocks.OTHERS):
        test_copy_blocks.test_matches_definition(Device, case, torch.Generator().manual_seed(0))
    for shape in ((7, 4, 4, 80), (3, 4, 2, 7)):
        test_merge_attention.test_matches_definition(Device, "bf16", "bf16", shape, True, torch.Generator().manual_seed(0))
    test_append_batched.test_with_norm_and_rope(Device, torch.Generator().manual_seed(0))
    test_norm_rope.test_positions_outside_the_tables(Device, torch.Generator().manual_seed(0))
    return count + len(test_copy_blocks.FORMATS) + len(test_copy_blocks.OTHERS) + 4


SHARE = slice(None)  # of attention's cases, so that several processes can go through a part


def attend(chosen: list) -> int:
    """With poison in everything that no query may see."""
    chosen = chosen[SHARE]
    for case in chosen:
        made = case.make("cuda", torch.Generator().manual_seed(0))
        made.check(*made.run("cuda"))
    return len(chosen)


def decode_cases() -> int:
    chosen = [*attention_cases.DECODE[::2], *attention_cases.FORMATS[::2], *attention_cases.LAYOUTS, *attention_cases.VARLEN]
    return attend(chosen + attention_cases.BYTES[::3] + attention_cases.WIDE[::3])


def small_cases() -> int:
    """Formats whose scales stand along a row, and the kernel for any."""
    return attend(attention_cases.SMALL[::2] + attention_cases.ODD[::2] + attention_cases.GENERAL)


def prefill_cases() -> int:
    for case in test_attention_prefill.MANY[::3][SHARE]:
        test_attention_prefill.check_each_as_alone(case, window=50, count=20)
    made = test_attention_prefill
    return attend(made.CASES[::3] + made.WIDE[::4] + made.CODES[::3] + made.OTHERS[::2])


def fp8_products_cases() -> int:
    chosen = test_attention_fp8_products.TAKEN[::2]
    for case in chosen:
        made = case.make("cuda", torch.Generator().manual_seed(0))
        test_attention_fp8_products.check(made, *made.run("cuda", fp8_products=True))
    many = test_attention_prefill.many(format="fp8_e4m3")
    test_attention_prefill.check_each_as_alone(many, window=50, count=20, fp8_products=True)
    return len(chosen) + 1


def latent_cases() -> int:
    return attend(mla_cases.ALL[::2])


def own_cache_cases() -> int:
    """Every sequence in a buffer of its own."""
    for case in test_attention_batched.CASES:
        test_attention_batched.test_each_sequence_reads_its_cache(Device, case, torch.Generator().manual_seed(0))
    for what in ("no_k", "id"):
        for dim in (80, 128):
            test_attention_batched.test_a_cache_that_is_not_there(Device, dim, what, torch.Generator().manual_seed(0))
    return len(test_attention_batched.CASES) + 4


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def run_all(calls: list[Callable[[], None]]) -> int:
    for call in calls:
        call()
    return len(calls)


def append_swa_cases() -> int:
    calls = [lambda f=f: test_append_swa.test_windows_in_every_format(Device, *f, seeded()) for f in test_append_swa.FORMATS[::2]]
    return run_all(
        calls + [lambda b=b: test_append_swa.test_steps_and_rings(Device, b, 131, seeded()) for b in test_append_swa.BATCHES]
    )


def compress_cases() -> int:
    calls = []
    for kind in test_compress.KINDS:
        calls += [
            lambda f=f, k=kind: test_compress.test_entries_in_every_format(Device, *f, k, seeded())
            for f in rows_cases.codecs()[::6]
        ]
        calls += [lambda k=kind, r=r: test_compress.test_steps(Device, rows_cases.BATCHES[2], k, r, seeded()) for r in (4, 128)]
        calls += [lambda k=kind: test_compress.test_shared_entries_and_missing_pages(Device, k, seeded())]
    return run_all(
        calls + [lambda n=n: test_compress.test_hadamard_before_codes(Device, n, seeded()) for n in ("index_mxfp4", "index_fp8")]
    )


def window_cases() -> int:
    """compress where windows are pooled by pairs."""
    pairs, many = test_compress.LONG
    cases = ((pairs, "f32"), (many, "bf16"))
    return run_all([lambda b=b, io=io: test_compress.test_many_windows(Device, b, True, io, seeded()) for b, io in cases])


def index_cases() -> int:
    calls = [lambda h=h: test_index_scores.test_queries_and_keys_of_e4m3(Device, h, 32, seeded()) for h in (8, 64)]
    for name in ("index_fp8", "index_mxfp4", "index_nvfp4", "bf16"):
        calls += [lambda n=name, i=i: test_index_scores.test_formats_and_types(Device, n, i, seeded()) for i in ("bf16", "e4m3")]
    calls += [lambda e=e: test_topk.test_random_scores(Device, e, 512, seeded()) for e in (513, 3000, 20000)]
    return run_all([*calls, lambda: test_topk.test_long_rows(Device, 70_000, 4096, seeded())])


def sparse_cases() -> int:
    calls = [lambda n=n: test_attention_sparse.test_a_window_alone(Device, n, seeded()) for n in ("fp8_v4", "bf16")]
    for k in (0, 33):
        calls += [lambda k=k: test_attention_sparse.test_steps(Device, test_attention_sparse.MIXED, k, seeded())]
        calls += [lambda k=k: test_attention_sparse.test_numbers_of_any_size(Device, k, 1e6, seeded())]
        calls += [
            lambda k=k: test_attention_sparse.test_tokens_that_are_in_the_window(Device, test_attention_sparse.ONES, k, seeded())
        ]
    return run_all([*calls, lambda: test_attention_sparse.test_missing_pages_and_rows(Device, 64, seeded())])


def rows_and_tables() -> int:
    """write, gather and amax."""
    for case in CASES:
        made = case.make("cuda", torch.Generator().manual_seed(0))
        want = made.to("cpu").clone()
        want.write("torch")
        made.slots = made.slots.clone()
        if made.slots.numel() > 2:
            made.slots[-1] = made.spec.num_slots + 5  # a bad slot: counted, not touched
        errors = torch.zeros((), dtype=torch.int64, device="cuda")
        made.write("cuda", errors=errors)
        for name, tensor in made.tensors().items():
            compare.bitwise(tensor.cpu(), want.tensors()[name], f"{case}: {name}")
        if not case.lens:
            continue
        packed = kvx.PackedTable(made.block_table, made.seq_lens)
        for table in (packed, kvx.to_ragged(packed, case.block_size), kvx.to_page_csr(packed, case.block_size)):
            for got, expected in zip(made.gather("cuda", table=table), want.gather("torch"), strict=True):
                compare.bitwise(got.cpu(), expected, str(case))
    x = torch.randn(300, 5, 33, device="cuda")
    slots = torch.randint(-3, 40, (300,), device="cuda")
    for per in ("tensor", "head", "block", "block_head"):
        blocks = {"slot_mapping": slots, "num_blocks": 10, "block_size": 4} if "block" in per else {}
        kvx.amax(x, per, **blocks)
    return len(CASES)


PARTS = {
    "rows": rows_and_tables, "convert": convert_cases, "append": append_cases, "decode": decode_cases,
    "small": small_cases, "prefill": prefill_cases, "fp8_products": fp8_products_cases, "latent": latent_cases,
    "own_caches": own_cache_cases,
    "append_swa": append_swa_cases, "compress": compress_cases, "windows": window_cases, "index": index_cases,
    "sparse": sparse_cases,
}  # fmt: skip


def main() -> None:
    """All parts, or those named."""
    global SHARE
    for asked in sys.argv[1:] or PARTS:
        name, _, share = asked.partition(":")
        first, _, of = share.partition("/")
        SHARE = slice(int(first), None, int(of)) if share else slice(None)
        begin = time.perf_counter()
        count = PARTS[name]()
        torch.cuda.synchronize()
        print(f"{asked}: {count} cases, every result equal to the definition, {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
