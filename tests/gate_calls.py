"""A small call of every public entry that takes tensors, for tests/test_gate.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.spec import ROW_FORMATS
from tests.hybrid.ops import test_attention_sparse, test_compress, test_index_scores
from tests.hybrid.ops.hybrid_cases import Batch

SPEC = kvx.CacheSpec(num_blocks=5, block_size=4, num_kv_heads=2, head_dim=16, layout="kv | block token head dim")
CODED = replace(SPEC, format="int8_per_token_head")
WHOLE = replace(SPEC, num_layers=2, layout="layer | block kv token head dim")
OTHER = replace(WHOLE, layout="block layer kv head token dim")
MLA = kvx.CacheSpec(num_blocks=5, block_size=4, num_kv_heads=1, head_dim=64, v_head_dim=512, layout="kv | block token head dim")
ONE = Batch("one", (1, 0), (1, 3), (9, 2), num_slots=2)
INDEX = next(name for name in ROW_FORMATS if name.startswith("index"))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def caches(spec: kvx.CacheSpec) -> tuple[Tensor, Tensor]:
    store = kvx.allocate(spec)
    k, v = store.cache
    return k.copy_(randn(*k.shape)), v.copy_(randn(*v.shape, seed=1))


def table() -> kvx.PackedTable:
    return kvx.PackedTable(torch.tensor([[3, 1], [0, 4]], dtype=torch.int32), torch.tensor([7, 5], dtype=torch.int32))


def whole() -> list[Tensor]:
    return [randn(5, 2, 4, 2, 16, seed=i) for i in range(2)]


@dataclass
class Entry:
    """A call with its arguments. What it changes in place is read back from `outputs`."""

    arguments: dict[str, Any]
    call: Callable[..., Any]
    outputs: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()  # arguments of any size: tables of angles, pages and tables with room, tokens of no sequence
    only_asks: bool = False  # answers a question without reading a tensor's memory


def plain(function: Callable[..., Any], outputs: tuple[str, ...] = (), loose: tuple[str, ...] = (), **arguments: Any) -> Entry:
    return Entry(arguments, function, outputs, loose)


def asks(function: Callable[..., Any], **arguments: Any) -> Entry:
    return Entry(arguments, function, only_asks=True)


def angles(dim: int = 16) -> dict[str, Tensor]:
    return {"cos": randn(32, dim // 2, dtype=torch.float32), "sin": randn(32, dim // 2, dtype=torch.float32, seed=3)}


def slots() -> Tensor:
    return torch.tensor([6, 0, 19], dtype=torch.int64)


def saved(cache: Any, spec: kvx.CacheSpec) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        kvx.save(Path(folder) / "c.kvx", cache, spec)
        return bytes(torch.cat([b.flatten() for b in kvx.load(Path(folder) / "c.kvx").buffers]).tolist())


def entries(backend: str) -> dict[str, list[Entry]]:
    generator = torch.Generator().manual_seed(0)
    sparse = test_attention_sparse.Made(
        ONE, "cpu", generator, dim=64, rope_dim=16, window="bf16", entries="bf16", heads=2, rows=4, ring=16, window_tokens=8
    )
    scores = test_index_scores.Made(
        ONE,
        kvx.RowCodec(INDEX, 128),
        "cpu",
        generator,
        heads=2,
        rows=4,
    )
    compressed = test_compress.Made(ONE, "running", 4, kvx.RowCodec("bf16", 64, 16), "cpu", generator, rows=4).finish(16)
    pointers = [tuple(randn(2, 12, 16, seed=i + 9 * n) for n in range(2)) for i in range(2)]
    b = {"backend": backend}
    q = randn(2, 4, 16)
    rows = {"positions": torch.tensor([3, 0, 7]), **angles()}
    qkv = randn(3, (4 + 2 + 2) * 16)
    k, v = randn(3, 2, 16), randn(3, 2, 16, seed=5)
    coded = kvx.allocate(CODED)
    kvx.write(coded.cache, randn(20, 2, 16), randn(20, 2, 16, seed=5), slot_mapping=torch.arange(20), spec=CODED, **coded.scales())
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    attend = {"cache": caches(SPEC), "table": table(), "spec": SPEC, "sinks": randn(4, dtype=torch.float32), **b}
    return {
        "write": [
            plain(kvx.write, ("cache",), cache=caches(SPEC), k=k, v=v, slot_mapping=slots(), spec=SPEC, **b),
            plain(
                kvx.write,
                ("cache", "k_scale", "v_scale"),
                cache=coded.cache,
                k=k,
                v=v,
                slot_mapping=slots(),
                spec=CODED,
                **coded.scales(),
                **b,
            ),
        ],
        "gather": [
            plain(kvx.gather, cache=caches(SPEC), table=table(), spec=SPEC, **b),
            plain(kvx.gather, cache=coded.cache, table=table(), spec=CODED, **coded.scales(), **b),
            plain(
                kvx.gather,
                ("out",),
                cache=caches(SPEC),
                table=table(),
                spec=SPEC,
                max_seq_len=8,
                out=(randn(2, 8, 2, 16), randn(2, 8, 2, 16)),
                **b,
            ),
        ],
        "gather_sequence": [
            plain(
                kvx.gather_sequence,
                loose=("blocks",),
                cache=caches(SPEC),
                blocks=torch.tensor([3, 1]),
                num_tokens=7,
                spec=SPEC,
                **b,
            )
        ],
        "amax": [
            plain(kvx.amax, loose=("x",), x=k, per="head", **b),
            plain(kvx.amax, loose=("x",), x=k, per="block", slot_mapping=slots(), num_blocks=5, block_size=4, **b),
        ],
        "append_batched": [
            plain(
                lambda pairs, **more: kvx.append_batched(kvx.cache_pointers(pairs), **more),
                ("pairs",),
                pairs=pointers,
                k=randn(2, 2, 16),
                v=randn(2, 2, 16, seed=5),
                slot_mapping=torch.tensor([3, 14]),
                **b,
            )
        ],
        "append_swa": [
            plain(
                kvx.append_swa,
                ("window", "positions"),
                ("x",),
                window=sparse.window,
                positions=sparse.positions,
                x=randn(4, 64),
                step=sparse.step,
                weight=randn(64),
                **angles(),
                **b,
            )
        ],
        "attention_decode": [
            plain(kvx.attention_decode, loose=("q",), q=q, **attend),
            plain(kvx.attention_decode, ("out", "lse"), q=q, out=randn(2, 4, 16), lse=randn(2, 4, dtype=torch.float32), **attend),
        ],
        "attention_decode_batched": [
            plain(
                lambda pairs, **more: kvx.attention_decode_batched(more.pop("q"), kvx.cache_pointers(pairs), **more),
                loose=("q",),
                pairs=pointers,
                q=q,
                seq_lens=torch.tensor([7, 3], dtype=torch.int32),
                **b,
            )
        ],
        "attention_mla": [
            plain(kvx.attention_mla, loose=("q",), q=randn(2, 4, 576), cache=caches(MLA), table=table(), spec=MLA, scale=0.1, **b)
        ],
        "attention_plan": [
            asks(
                lambda **more: kvx.attention_plan(workspace=None, **more), q=q, **{n: x for n, x in attend.items() if n != "sinks"}
            )
        ],
        "attention_workspace_bytes": [
            asks(kvx.attention_workspace_bytes, q=q, **{n: x for n, x in attend.items() if n != "sinks"})
        ],
        "attention_varlen": [plain(kvx.attention_varlen, loose=("q",), q=randn(3, 4, 16), cu_seqlens=cu, **attend)],
        "attention_sparse": [
            plain(
                kvx.attention_sparse,
                loose=("q", "fresh", "entries", "block_table"),
                q=sparse.q,
                window=sparse.window,
                positions=sparse.positions,
                step=sparse.step,
                window_tokens=8,
                fresh=sparse.fresh,
                entries=sparse.entries,
                block_table=sparse.block_table,
                ratio=4,
                sinks=randn(2, dtype=torch.float32),
                **b,
            )
        ],
        "attention_sparse_workspace_bytes": [
            asks(
                kvx.attention_sparse_workspace_bytes,
                q=sparse.q,
                window=sparse.window,
                positions=sparse.positions,
                step=sparse.step,
                window_tokens=8,
                fresh=sparse.fresh,
                entries=sparse.entries,
                block_table=sparse.block_table,
                ratio=4,
            )
        ],
        "bind": [
            plain(
                lambda plan, dst, src, **more: kvx.bind(plan, src, dst, **more).run(),
                ("dst",),
                plan=kvx.plan(WHOLE, OTHER),
                dst=[torch.zeros(5, 2, 2, 2, 4, 16, dtype=torch.bfloat16)],
                src=whole(),
                **b,
            )
        ],
        "convert": [
            plain(
                kvx.convert,
                ("dst",),
                plan=kvx.plan(WHOLE, OTHER),
                dst=[torch.zeros(5, 2, 2, 2, 4, 16, dtype=torch.bfloat16)],
                src=whole(),
                **b,
            ),
            plain(
                kvx.convert,
                ("dst",),
                plan=kvx.plan(WHOLE, OTHER),
                dst=[torch.zeros(5, 2, 2, 2, 4, 16, dtype=torch.bfloat16)],
                src=whole(),
                src_blocks=torch.tensor([[4, 1]]),
                dst_blocks=torch.tensor([[0, 2]]),
                seq_lens=torch.tensor([6]),
                **b,
            ),
        ],
        "digest": [plain(kvx.digest, cache=whole(), spec=WHOLE, **b)],
        "save": [plain(saved, cache=whole(), spec=WHOLE)],
        "views": [plain(lambda cache, spec: [x.clone() for x in kvx.views(cache, spec)], cache=caches(SPEC), spec=SPEC)],
        "layer_views": [
            plain(
                lambda buffers, spec: [p.first.clone() for layer in kvx.layer_views(buffers, spec) for p in layer],
                buffers=whole(),
                spec=WHOLE,
            )
        ],
        "describe": [plain(lambda tensors: str(kvx.describe(tensors, WHOLE.layout)), tensors=whole())],
        "convert_cache": [
            plain(
                lambda tensors: kvx.convert_cache(tensors, "flashinfer.stacked.nhd", "flashinfer.stacked.hnd").buffers,
                tensors=[randn(5, 2, 4, 2, 16) for _ in range(2)],
            )
        ],
        "cache_pointers": [plain(lambda caches: kvx.cache_pointers(caches).spec.manifest_text, caches=pointers)],
        "cache_table": [
            plain(
                lambda pairs, **more: kvx.cache_table(kvx.cache_pointers(pairs), **more).seq_lens,
                loose=("seq_lens",),
                pairs=pointers,
                seq_lens=torch.tensor([7, 3], dtype=torch.int32),
            )
        ],
        "chosen_backend": [
            asks(lambda cache, **more: kvx.chosen_backend("write", cache, **more), cache=caches(SPEC), spec=SPEC, **b)
        ],
        "compress": [
            plain(
                kvx.compress,
                ("tail", "entries"),
                ("entries", "block_table"),
                tail=compressed.tail,
                kv=compressed.kv,
                score=compressed.score,
                entries=compressed.entries,
                block_table=compressed.block_table,
                step=compressed.step,
                bias=compressed.more["bias"],
                weight=compressed.more["weight"],
                **angles(),
                **b,
            )
        ],
        "copy_blocks": [
            plain(kvx.copy_blocks, ("cache",), ("pairs",), cache=caches(SPEC), pairs=torch.tensor([[0, 1], [4, 2]]), spec=SPEC, **b)
        ],
        "cu_seqlens": [plain(kvx.cu_seqlens, loose=("seq_lens",), seq_lens=torch.tensor([3, 4], dtype=torch.int32))],
        "index_scores": [
            plain(
                kvx.index_scores,
                loose=("keys", "block_table"),
                q=scores.q,
                weights=scores.weights,
                keys=scores.keys,
                block_table=scores.block_table,
                step=scores.step,
                ratio=4,
                **b,
            )
        ],
        "merge_attention": [
            plain(
                kvx.merge_attention,
                loose=("outs",),
                outs=randn(3, 2, 4, 16),
                lses=randn(3, 2, 4, dtype=torch.float32),
                sinks=randn(4, dtype=torch.float32),
                **b,
            )
        ],
        "qk_norm_rope": [plain(kvx.qk_norm_rope, loose=("cos", "sin"), x=randn(3, 4, 16), weight=randn(16), **rows, **b)],
        "qkv_norm_rope": [
            plain(
                kvx.qkv_norm_rope,
                loose=("cos", "sin"),
                qkv=qkv,
                num_heads=4,
                num_kv_heads=2,
                head_dim=16,
                q_weight=randn(16),
                k_weight=randn(16),
                **rows,
                **b,
            )
        ],
        "qkv_norm_rope_append": [
            plain(
                kvx.qkv_norm_rope_append,
                ("cache", "q_out"),
                ("cos", "sin"),
                q_out=randn(3, 4, 16),
                cache=caches(SPEC),
                qkv=qkv,
                slot_mapping=slots(),
                spec=SPEC,
                q_weight=randn(16),
                k_weight=randn(16),
                **rows,
                **b,
            )
        ],
        "scale_from_amax": [
            plain(kvx.scale_from_amax, loose=("amax",), amax=randn(4, dtype=torch.float32).abs(), format="int8_per_head")
        ],
        "slot_mapping": [
            plain(
                kvx.slot_mapping,
                loose=("block_table",),
                block_table=table().block_table,
                positions=torch.tensor([0, 5, 2]),
                seq_ids=torch.tensor([0, 0, 1]),
                block_size=4,
            )
        ],
        "to_page_csr": [
            plain(
                lambda **t: list(kvx.to_page_csr(kvx.PackedTable(**t), 4).tensors),
                block_table=table().block_table,
                seq_lens=table().seq_lens,
            )
        ],
        "to_ragged": [
            plain(
                lambda **t: list(kvx.to_ragged(kvx.PackedTable(**t), 4).tensors),
                block_table=table().block_table,
                seq_lens=table().seq_lens,
            )
        ],
        "topk": [
            plain(
                kvx.topk,
                loose=("scores",),
                scores=randn(3, 20, dtype=torch.float32),
                k=4,
                lengths=torch.tensor([20, 9, 3], dtype=torch.int32),
                **b,
            )
        ],
        "transpose_heads": [plain(kvx.transpose_heads, loose=("x",), x=randn(3, 2, 4, 16), **b)],
    }
