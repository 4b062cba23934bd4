"""Which caches the conformance vectors are of: small ones of engines' rows, random ones, and ones that are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import lcm, prod
from typing import Any

from kvx.errors import KvxError
from kvx.layout.axes import Layout
from kvx.layout.drawing import fitting_spec
from kvx.layout.engine_row import EngineRow
from kvx.spec.cache_spec import CacheSpec, PlaneSpec
from kvx.spec.formats import FORMATS
from kvx.spec.state_spec import StateSpec, state_plane

SEED = 24
MOST_ELEMENTS = 12_000  # of a plane

# Each is refused by another sentence, or at another place.
_WRONG = """
layer
layer | block tokn head dim
layer | block token head
layer | block token head dim dim
layer | | block token head dim
layer | block (token head dim
layer | block token) head dim
token | block head dim
layer | block ((token) head) dim
block () token head dim
block (layer token) head dim
block token head dim/8
block token head dim/8 dim%4
block token head dim/0 dim%0
block/2 block%2 token head dim
layer layer block token head dim
block kv kv token head dim
block block token head dim
token head dim
block token head dim+1
block (dim token) head
block token (kv dim/2) head dim%2
block token head dim channel
kv kv[K: | block token head dim; V: | block token head dim]
kv[K: | block token head dim]
kv[V: | block token head dim; K: | block token head dim]
layer kv[K: token head dim; V: token head dim]
kv[K: | block token head dim; V: block token head dim]
kv[K: | block kv token head dim; V: | block token head dim]
token kv[K: | block head dim; V: | block head dim]
kv[K: layer | block token head dim; V: | block token head dim]
plane[Conv: block channel tap]
plane[conv: | block channel tap; conv: | block channel tap]
plane[k: | block channel tap]
kv[K: | block token head dim; V: | block token head dim] dim
block token head dim/12345678901 dim%12345678901
<img src=x onerror=alert(1)> block token head dim
bl\u00f6ck token head dim
layer | block token head dim |
| block token head dim kv[
plane[
BLOCK token head dim
"""


def small_spec(row: EngineRow) -> CacheSpec:
    """Few of everything, no two sizes alike where that can be, and whole packs of every split."""
    return fitting_spec(Layout.parse(row.layout), num_blocks=3, num_kv_heads=row.num_kv_heads or 2)


def state_planes(kind: str) -> list[PlaneSpec]:
    return [state_plane("conv", "bf16", channel=12, tap=3), state_plane(kind, "f32", head=2, row=4, column=6)]


def random_spec(r: random.Random, number: int) -> CacheSpec:
    """Every format in its turn; layouts until one can hold it."""
    names = list(FORMATS)
    while True:
        form = names[number % len(names)]
        group = max(FORMATS[form].group_size, 1)
        sizes: dict[str, Any] = {
            "num_layers": r.randint(1, 3), "num_blocks": r.randint(1, 4), "block_size": r.choice([1, 2, 3, 4, 8, 16]),
            "num_kv_heads": r.choice([1, 2, 3, 4]), "head_dim": lcm(group, r.choice([4, 8, 16, 32])),
        }  # fmt: skip
        if r.random() < 0.2:
            sizes["v_head_dim"] = lcm(group, r.choice([4, 8, 16, 64]))
        v_format = r.choice(names) if r.random() < 0.15 else ""
        if prod(size for name, size in sizes.items() if name != "v_head_dim") > MOST_ELEMENTS:
            continue
        try:
            spec = CacheSpec(layout=random_layout(r), format=form, v_format=v_format, **sizes)
            if r.random() < 0.3:
                padded = max(spec.content_bytes(i) for i in range(spec.num_planes)) + r.choice([8, 16, 64])
                spec = spec.replaced(block_bytes=-(-padded // 8) * 8)
        except KvxError:
            continue  # a split that does not divide, axes that cannot stand so, or a format they cannot hold
        return spec


def random_state(r: random.Random) -> StateSpec:
    heads, rows, columns = r.randint(1, 3), r.choice([2, 4]), r.choice([4, 8])
    planes = {"conv": ["channel", "tap"], "delta": ["head", "row", "column"]}
    while True:
        parts = []
        for name, axes in planes.items():
            order = r.sample(axes, len(axes))
            if r.random() < 0.3:
                order[-1] += f"+{r.randint(1, 2)}" if order[-1] != "head" else ""
            parts.append((name, " ".join(order)))
        bar = r.random() < 0.5
        r.shuffle(parts)
        inner = "; ".join(f"{name}: {'| block ' if bar else ''}{axes}" for name, axes in parts)
        outside = r.choice(["layer "] if bar else ["layer | block ", "block layer ", "block | layer ", "layer block "])
        try:
            return StateSpec(
                r.randint(1, 3),
                (
                    state_plane("conv", r.choice(["bf16", "f32"]), channel=r.choice([4, 8]), tap=r.choice([2, 4])),
                    state_plane("delta", "f32", head=heads, row=rows, column=columns),
                ),
                layout=f"{outside}plane[{inner}]",
                num_layers=r.randint(1, 3),
            )
        except KvxError:
            continue


def random_layout(r: random.Random) -> str:
    """A string of K and V, most of them ones that can be read."""
    if r.random() < 0.25:  # K and V with orders of their own, in buffers or areas
        bar = r.random() < 0.5
        outside = ["layer"] if bar else r.choice([["layer", "|", "block"], ["layer", "|", "block", "head"], ["block", "layer"]])
        rest = [name for name in ("block", "token", "head", "dim") if name not in outside]
        k, v = (" ".join(_split(r.sample(rest, len(rest)), r)) for _ in range(2))
        return f"{' '.join(outside)} kv[K: {'| ' if bar else ''}{k}; V: {'| ' if bar else ''}{v}]"
    names = ["layer", "block", "kv", "token", "head", "dim"]
    if r.random() < 0.15:
        names.remove("kv")
    axes = r.sample(names, len(names))
    if r.random() < 0.5:  # rows in one piece
        axes.remove("dim")
        axes.append("dim")
    left = [name for name in axes if name in ("layer", "kv", "block") and r.random() < 0.4]
    inside = _fused(_split([name for name in axes if name not in left], r), r)
    return (" ".join(left) + " | " if left else "") + " ".join(inside)


def _split(axes: list[str], r: random.Random) -> list[str]:
    """Now and then an axis in two parts, anywhere."""
    if r.random() < 0.6:
        return axes
    name = r.choice([axis for axis in axes if axis in ("token", "head", "dim")])
    factor = r.choice(["2", "4", "8", "x"]) if name == "dim" else r.choice(["2", "4"])
    rest = [axis for axis in axes if axis != name]
    for part in r.sample((f"{name}/{factor}", f"{name}%{factor}"), 2):
        rest.insert(r.randint(0, len(rest)), part)
    return rest


def _fused(axes: list[str], r: random.Random) -> list[str]:
    at = r.randrange(len(axes))
    end = at + r.choice([1, 2, 3])
    if r.random() < 0.5 or end > len(axes) or "layer" in axes[at:end]:
        return axes
    return [*axes[:at], f"({' '.join(axes[at:end])})", *axes[end:]]


# ---- what is refused


def wrong_strings() -> list[str]:
    """Strings of which most cannot be read: of each kind of mistake one, and random ones with a mistake in them."""
    r = random.Random(SEED)
    texts = ["", "block\ttoken  head\ndim/", "a" * 1001, *_WRONG.strip().splitlines()]
    return list(dict.fromkeys([*texts, *(_damaged(random_layout(r), r) for _ in range(200))]))


def _damaged(text: str, r: random.Random) -> str:
    """A word left out, said twice, or changed by a character."""
    words, at = text.split(" "), r.randrange(1000)
    at, kind = at % len(words), r.randrange(4)
    if kind == 0:
        del words[at]
    elif kind == 1:
        words.insert(r.randrange(len(words)), words[at])
    else:
        here = r.randrange(len(words[at]) + 1)
        words[at] = words[at][:here] + r.choice("()|/%x8[];:+?") + words[at][here + (kind == 2) :]
    return " ".join(words)


def wrong_specs() -> Iterator[dict[str, Any]]:
    """Fields of a CacheSpec, most of which disagree. Their layouts can be read."""
    r = random.Random(SEED + 1)
    names = list(FORMATS)
    while True:
        spec = {
            "layout": random_layout(r), "format": r.choice(names), "v_format": r.choice(names) if r.random() < 0.3 else "",
            "num_layers": r.randint(1, 2), "num_blocks": r.randint(1, 3), "block_size": r.choice([1, 3, 4, 6, 16]),
            "num_kv_heads": r.randint(1, 4), "head_dim": r.choice([3, 4, 12, 16, 32, 128]),
            "v_head_dim": r.choice([0, 0, 8, 5, 64]), "block_bytes": r.choice([0, 0, 0, 4, 6, 4096, 100_000]),
        }  # fmt: skip
        try:
            Layout.parse(str(spec["layout"]))
        except KvxError:
            continue
        yield spec
