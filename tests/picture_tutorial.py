"""The picture of docs/tutorial.md: a block table names blocks of the pool, and the bytes of a block in two layouts. Slots and byte
offsets are those that KVX computes.

make picture        writes docs/tutorial.svg
"""

from __future__ import annotations

import torch

import kvx
from kvx.layout.views import layer_views
from tests.test_imports import ROOT

PICTURE = ROOT / "docs" / "tutorial.svg"
TABLE, LENGTH, BLOCK, POOL = (7, 3), 6, 4, 9  # two blocks of four tokens, the second half full
HEADS, DIM = 2, 4
LAYOUTS = (
    ("kv | block token head dim", "NHD: K and V apart, tokens outside heads"),
    ("block head token (kv dim)", "HND, fused: heads outside tokens, V behind its K"),
)
INK, GREY, K, V = "#333333", "#8a8a8a", "#1b6ca8", "#b3541e"
FILL = {K: "#e4eef6", V: "#f9ebe2"}
WIDTH, LEFT, CELL = 760, 24, 74


def slots() -> list[int]:
    block_table = torch.tensor([TABLE], dtype=torch.int32)
    return kvx.slot_mapping(block_table, torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.int64), BLOCK).tolist()


def rows(layout: str) -> list[tuple[str, int, int, int]]:
    """(K or V, token, head, byte) of the rows of block 7 in one allocation, by their bytes; of K and V apart, K's."""
    spec = kvx.CacheSpec(POOL, BLOCK, HEADS, DIM, layout=layout)
    found = []
    for name, plane in zip("KV", layer_views(kvx.allocate_buffers(spec), spec)[0], strict=True):
        block = plane.first[TABLE[0]]  # [token, head, dim]
        if plane.buffer == 0:
            start = TABLE[0] * plane.first.stride(0) * 2
            at = [(t, h, block[t, h].storage_offset() * 2 - start) for t in range(BLOCK) for h in range(HEADS)]
            found += [(name, t, h, byte) for t, h, byte in at]
    return sorted(found, key=lambda row: row[3])


def svg() -> str:
    height = 470
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        _text(LEFT, 30, f"block table of a sequence of {LENGTH} tokens", bold=True),
        _text(LEFT, 120, f"the cache: {POOL} blocks of {BLOCK} tokens", bold=True),
    ]
    for n, block in enumerate(TABLE):
        x = LEFT + n * CELL
        out += [_box(x, 42, CELL - 6, 30, K), _text(x + CELL / 2 - 3, 62, str(block), middle=True)]
        target = LEFT + block * CELL + CELL / 2 - 3
        out.append(
            f'<path d="M{x + CELL / 2 - 3} 74C{x + CELL / 2} 105 {target} 92 {target} 132" fill="none" stroke="{INK}" '
            'marker-end="url(#a)"/>'
        )
    at = slots()
    for block in range(POOL):
        x, mine = LEFT + block * CELL, block in TABLE
        out += [
            _box(x, 134, CELL - 6, 62, K if mine else GREY),
            _text(x + 6, 150, f"block {block}", colour=INK if mine else GREY, size=11),
        ]
        for row in range(BLOCK):
            slot = block * BLOCK + row
            if slot in at:
                out += [
                    _box(x + 5 + row * 15, 158, 13, 30, K),
                    _text(x + 11.5 + row * 15, 177, str(at.index(slot)), middle=True, size=11),
                ]
    out.append(
        _text(
            LEFT, 216, f"numbers: the position of a token; its slot is block x {BLOCK} + row: " + ", ".join(map(str, at)), size=12
        )
    )
    for n, (layout, says) in enumerate(LAYOUTS):
        out += _layout(layout, says, 256 + n * 110)
    return "\n".join([*out, "</svg>"]) + "\n"


def _layout(layout: str, says: str, y: int) -> list[str]:
    found = rows(layout)
    step = (WIDTH - 2 * LEFT) / (BLOCK * HEADS * 2)
    out = [
        _text(LEFT, y, f"block {TABLE[0]} in memory, “{layout}”, from its first byte", bold=True),
        _text(LEFT, y + 18, says, size=12),
    ]
    for n, (name, token, head, byte) in enumerate(found):
        colour = K if name == "K" else V
        out += [
            _box(LEFT + n * step, y + 28, step - 3, 32, colour),
            _text(LEFT + (n + 0.5) * step - 1.5, y + 41, f"{name}{token}", middle=True, size=11, colour=colour),
        ]
        out += [
            _text(LEFT + (n + 0.5) * step - 1.5, y + 54, f"h{head}", middle=True, size=10, colour=colour),
            _text(LEFT + n * step, y + 74, str(byte), size=9, colour=GREY),
        ]
    if len(found) < BLOCK * HEADS * 2:
        out.append(_text(LEFT + len(found) * step + 10, y + 48, "V the same, in an allocation of its own", size=12, colour=V))
    return out


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"'
    return f'<rect {shape} fill="{FILL.get(colour, "#f4f4f2")}" stroke="{colour}"/>'


def _text(x: float, y: float, words: str, *, bold: bool = False, middle: bool = False, size: int = 13, colour: str = INK) -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if middle else "")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{style}>{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg())
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")
