"""The picture of docs/state.md: what a state, a snapshot and a hit are. Lengths and blocks are those of a real PagedCache.

make picture        writes docs/state.svg
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple
from xml.sax.saxutils import escape

import kvx
from kvx.cache.kinds import State
from kvx.cache.sequence import Sequence
from kvx.spec.state_spec import StateSpec, state_plane
from tests.test_imports import ROOT

PICTURE = ROOT / "docs" / "state.svg"
BLOCK, PROMPT = 16, 72
LEFT, TOP, TOKEN, HIGH = 290, 64, 6, 24  # pixels: of the margins, a token and a box
INK, KV, STATE, FOUND, NONE = "#333333", "#1b6ca8", "#b3541e", "#2e7d4f", "#999999"


class Row(NamedTuple):
    """A request: what it found, what it computed, and where its states are."""

    title: str
    says: str
    found: int  # tokens
    end: int  # its length now
    shared: tuple[int, ...]  # block ids of K and V that it found
    own: tuple[int, ...]
    snapshots: tuple[tuple[int, int], ...]  # (position, block) that it left
    running: int  # the block of its state
    begun_in: int  # the snapshot that it went on from; -1: none


def rows() -> list[Row]:
    kv = kvx.CacheSpec(24, BLOCK, 1, 8, format="f32")
    states = StateSpec(8, (state_plane("ssm", "f32", head=1, row=2, column=2),))
    groups = [kvx.LayerGroup("full", (0,), kv), kvx.LayerGroup("states", (1,), states, kind=State())]
    cache = kvx.PagedCache(groups, max_seqs=4, max_seq_len=256)
    prompt = list(range(PROMPT))
    other = [*prompt[:54], *range(100, 118)]
    return [
        _run(cache, prompt, "A: a prompt of 72 tokens", "no hit; a step ends at 64 and takes a snapshot there"),
        _run(cache, prompt, "B: the same prompt", "hit at 64: K and V of 4 blocks, and a snapshot at that position"),
        _run(
            cache, other, "C: its first 54, then others", "K and V of 48 tokens are cached, but no snapshot: computed from 0", (48,)
        ),
        _run(cache, [*other[:54], *range(200, 218)], "D: the same 54 tokens", "hit at 48: C was admitted with snapshot_at=(48,)"),
    ]


def _run(cache: kvx.PagedCache, tokens: list[int], title: str, says: str, snapshot_at: tuple[int, ...] = ()) -> Row:
    seq: Sequence = cache.admit(tokens, snapshot_at=snapshot_at)
    found, begun_in = seq.length, int(cache.blocks(seq, 1)[0]) if seq.length else -1
    shared, left = tuple(cache.blocks(seq).tolist()), []
    while seq.length < len(tokens):
        cache.extend(seq, cache.until_snapshot(seq, len(tokens) - seq.length))
        cache.commit(seq)
        if seq.length < len(tokens):
            left.append((seq.length, int(cache.blocks(seq, 1)[0])))
    own = tuple(cache.blocks(seq).tolist()[len(shared) :])
    return Row(title, says, found, seq.length, shared, own, tuple(left), int(cache.blocks(seq, 1)[0]), begun_in)


def svg() -> str:
    drawn = rows()
    width, height = LEFT + 80 * TOKEN + 120, TOP + len(drawn) * 92 + 48
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" fill="{INK}">tokens of a request, in blocks of {BLOCK}</text>',
    ]
    for at in range(0, 81, BLOCK):
        x = LEFT + at * TOKEN
        out.append(f'<text x="{x}" y="44" fill="{NONE}" text-anchor="middle">{at}</text>')
        out.append(f'<path d="M{x} 50V{height - 44}" stroke="#e4e4e0"/>')
    for n, row in enumerate(drawn):
        out += _row(row, TOP + n * 92)
    return "\n".join([*out, *_legend(height - 22), "</svg>"]) + "\n"


def _row(row: Row, y: int) -> list[str]:
    out = [
        f'<text x="12" y="{y + 16}" font-weight="bold" fill="{INK}">{escape(row.title)}</text>',
        f'<text x="{LEFT}" y="{y + 74}" font-size="11" fill="{INK}">{escape(row.says)}</text>',
        f'<text x="{LEFT - 12}" y="{y + 16}" text-anchor="end" fill="{KV}">K and V</text>',
        f'<text x="{LEFT - 12}" y="{y + 48}" text-anchor="end" fill="{STATE}">state</text>',
    ]
    for i, block in enumerate((*row.shared, *row.own)):
        first, last = i * BLOCK, min((i + 1) * BLOCK, row.end)
        fill = "#e3f1e8" if i < len(row.shared) else "#e4eef6"
        stroke = FOUND if i < len(row.shared) else KV
        out.append(
            f'<rect x="{LEFT + first * TOKEN + 1}" y="{y}" width="{(last - first) * TOKEN - 2}" height="{HIGH}" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )
        out.append(
            f'<text x="{LEFT + (first + last) * TOKEN // 2}" y="{y + 16}" text-anchor="middle" fill="{stroke}">{block}</text>'
        )
    stops = [row.found, *(at for at, _ in row.snapshots), row.end]
    for a, b in pairwise(stops):  # each line a step, or several
        begin, end = LEFT + a * TOKEN + (14 if a else 0), LEFT + b * TOKEN - 14
        out.append(f'<path d="M{begin} {y + 44}H{end}" stroke="{STATE}" stroke-width="1.5"/>')
    if row.found:
        out += _state(LEFT + row.found * TOKEN, y + 44, row.begun_in, FOUND, is_snapshot=True)
    for at, block in row.snapshots:
        out += _state(LEFT + at * TOKEN, y + 44, block, STATE, is_snapshot=True)
    return out + _state(LEFT + row.end * TOKEN, y + 44, row.running, STATE, is_snapshot=False)


def _state(x: int, y: int, block: int, colour: str, *, is_snapshot: bool) -> list[str]:
    """A snapshot is a square, the running block a circle; the number is the block's."""
    shape = (
        f'<rect x="{x - 12}" y="{y - 12}" width="24" height="24" fill="#ffffff" stroke="{colour}" stroke-width="2"/>'
        if is_snapshot
        else f'<circle cx="{x}" cy="{y}" r="13" fill="{colour}"/>'
    )
    ink = colour if is_snapshot else "#ffffff"
    return [shape, f'<text x="{x}" y="{y + 4}" text-anchor="middle" fill="{ink}">{block}</text>']


def _legend(y: int) -> list[str]:
    words = (
        (12, "number: a block's id", INK),
        (150, "blue: computed and written here", KV),
        (350, "green: cached by another request", FOUND),
        (570, "square: snapshot; circle: the state a request updates", STATE),
    )
    return [f'<text x="{x}" y="{y}" font-size="11" fill="{colour}">{escape(text)}</text>' for x, text, colour in words]


if __name__ == "__main__":
    PICTURE.write_text(svg())
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")
