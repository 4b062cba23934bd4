"""Conformance vectors of plans: two caches and their ranks, and what `kvx.plan` says: explain()'s text and the first runs of bytes.

`kvx layouts --vectors` writes them; the page's planner (kvx/page/static/planner.js) is held to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from kvx.errors import KvxError
from kvx.layout.engines import ENGINES
from kvx.layout.plan import plan
from kvx.layout.vector_cases import SEED, random_layout
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.formats import FORMATS

_RUNS = 48  # of a case
_FIELDS = ("layout", "num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "v_head_dim", "format", "v_format")


def plan_vectors(count: int = 150) -> list[dict[str, Any]]:
    """So many pairs of engine rows and as many of random layouts, with 1 to 8 ranks on either side, those that are refused too."""
    return [*islice(_cases(_engine_pair), count), *islice(_cases(_random_pair), count)]


def _cases(make: Any) -> Iterator[dict[str, Any]]:
    r = random.Random(f"{SEED} {make.__name__}")
    while True:
        sides = make(r)
        try:
            src, dst = (CacheSpec(**fields) for fields in sides)
        except KvxError:
            continue  # a layout that cannot hold these sizes
        tps = [r.choice((1, 1, 2, 4, 8)) for _ in range(2)]
        ranks = [r.randrange(tps[1])] if r.random() < 0.2 else None  # the destination has one rank only
        yield _vector(src, dst, tps, ranks)


def _engine_pair(r: random.Random) -> list[dict[str, Any]]:
    sizes = {
        "num_layers": r.randint(1, 3),
        "num_blocks": 3,
        "num_kv_heads": r.choice((1, 2, 4, 8)),
        "head_dim": r.choice((16, 32, 128)),
    }
    block = r.choice((4, 8, 16, 32))
    rows = r.sample(list(ENGINES.values()), 2)
    return [{"layout": row.layout, "block_size": block, "format": r.choice(("bf16", "bf16", "fp8_e4m3")), **sizes} for row in rows]


def _random_pair(r: random.Random) -> list[dict[str, Any]]:
    sizes = {
        "num_layers": r.randint(1, 3),
        "num_blocks": 4,
        "num_kv_heads": r.choice((1, 2, 3, 4, 8)),
        "head_dim": r.choice((8, 32, 128)),
    }
    first, blocks = r.choice(list(FORMATS)), r.choice((2, 4, 16))
    sizes["v_head_dim"] = r.choice((0, 0, 0, 16))
    other = r.choice((first, first, first, first.removesuffix("_inline"), r.choice(list(FORMATS))))
    return [
        {"layout": random_layout(r), "block_size": r.choice((blocks, blocks, 2 * blocks)), "format": form, **sizes}
        for form in (first, other)
    ]


def _vector(src: CacheSpec, dst: CacheSpec, tps: list[int], ranks: list[int] | None) -> dict[str, Any]:
    asked = {
        "src": {name: getattr(src, name) for name in _FIELDS}, "src_tp": tps[0],
        "dst": {name: getattr(dst, name) for name in _FIELDS}, "dst_tp": tps[1], "dst_ranks": ranks,
    }  # fmt: skip
    try:
        shards = [src.shard(tps[0], i) for i in range(tps[0])], [dst.shard(tps[1], i) for i in (ranks or range(tps[1]))]
        found = plan(*shards, partial=ranks is not None)
    except KvxError as error:
        return {**asked, "refused": str(error)}
    try:
        runs = [list(run[:5]) for run in islice(found.runs([0], [0]), _RUNS)]
    except KvxError:  # block sizes or formats differ
        runs = []
    return {**asked, "explain": found.explain(1), "runs": runs}
