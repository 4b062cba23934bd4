"""kvx layouts: the engines' layouts as a table, or one of them drawn, byte by byte, for a cache small enough to see."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from itertools import chain, product
from math import lcm
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvx.errors import BadArgument
from kvx.layout import ENGINES, EngineRow, Layout, PlaneLayout, engine
from kvx.layout.engines import engine_rows
from kvx.layout.place import Place, buffer_bytes, places
from kvx.spec.cache_spec import CacheSpec

AXES = ("layer", "block", "kv", "head", "token", "dim")  # in the order of a label: L0 B1 K h0 t2 d0
LETTERS = {"layer": "L", "block": "B", "head": "h", "token": "t", "dim": "d"}
LINE_CELLS = 8
HEAD_LINES, TAIL_LINES = 12, 4  # of an allocation that has more than both


class GridCell(NamedTuple):
    """A run of bytes along one axis."""

    byte: int
    kv: int
    head: int
    labels: dict[str, str]  # of each axis: "L0", "K", "d0-7"


def layouts(
    name: Annotated[
        str,
        typer.Argument(
            help="The layout to draw: a name from the list, such as vllm.0.23, or a layout string, such as "
            '"layer | block kv token head dim". Without it all layouts are listed.'
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The registry as JSON: all rows, or those of NAME.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="The JSON Schema of the registry.")] = False,
    vectors: Annotated[
        bool, typer.Option("--vectors", help="Conformance vectors for other implementations, as JSON, into the file NAME if given.")
    ] = False,
) -> None:
    """List the KV cache layouts of engines, or draw one of them byte by byte. With --json, the registry for other tools."""
    if as_json + schema + vectors > 1:
        raise BadArgument("layouts(): --json, --schema and --vectors are three files; ask for one of them.")
    if vectors:
        return _write_vectors(name)
    if as_json or schema:
        return _print_registry(name, schema)
    console = Console(highlight=False)
    if name:
        for line in draw(_row(name)):
            console.print(line, soft_wrap=True)
    elif console.is_terminal:
        table = Table(title=f"{len(ENGINES)} layouts; `kvx layouts NAME` draws one", title_justify="left")
        for column in ("name", "layout", "versions"):
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for row in ENGINES.values():
            table.add_row(*(Text(x) for x in (row.name, row.layout, f"{row.engine} {row.versions}")))
        console.print(table)
    else:  # for grep and awk: a line a row, no frame, no folding
        rows = [(row.name, row.layout, f"{row.engine} {row.versions}") for row in ENGINES.values()]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        for row_name, layout, versions in rows:
            typer.echo(f"{row_name:{widths[0]}}  {layout:{widths[1]}}  {versions}")


def _write_vectors(file: str) -> None:
    from kvx.layout.vectors import to_text
    from kvx.layout.vectors import vectors as make

    found = make()
    if not file or file == "-":
        return typer.echo(to_text(found), nl=False)
    Path(file).write_text(to_text(found), encoding="utf-8")
    kinds = ", ".join(f"{len(cases):,} {kind}" for kind, cases in found.items() if isinstance(cases, list))
    typer.echo(f"Wrote {file}: {kinds}.")


def _print_registry(name: str, only_schema: bool) -> None:
    from kvx.layout import registry

    if only_schema:
        return typer.echo(registry.SCHEMA.read_text(encoding="utf-8"), nl=False)
    found = registry.registry()
    if name:
        wanted = {row.name for row in engine_rows(name)}
        found["engines"] = [row for row in found["engines"] if row["name"] in wanted]
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False))


def _row(name: str) -> EngineRow:
    """An engine's, or one made for a layout that was typed."""
    if name.strip().upper() in ("NHD", "HND") or any(axis in name.split() for axis in AXES) or "|" in name:
        layout = Layout.parse(name)
        return EngineRow(layout.text, "", layout.text, "")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        row = engine(name)
    for warning in said:
        typer.echo(str(warning.message), err=True)
    return row


def tiny(row: EngineRow) -> CacheSpec:
    """Two of everything and four tokens; where axes are split, one of everything and a few packs."""
    layout = Layout.parse(row.layout)
    sizes, count = {"token": 4, "dim": 4}, 2
    for name in sizes:
        packs = [8 if f == "x" else int(f) for plane in layout.planes.values() if (f := plane.split_of(name))]  # x: bf16 below
        if packs:
            pack, count = lcm(*packs), 1
            sizes[name] = pack if pack > 8 else 2 * pack
    return row.spec(
        num_layers=count if layout.has_layer else 1,
        num_blocks=count,
        block_size=sizes["token"],
        num_kv_heads=row.num_kv_heads or count,
        head_dim=sizes["dim"],
    )


def draw(row: EngineRow) -> Iterator[Text]:
    spec, layout = tiny(row), Layout.parse(row.layout)
    sizes, left = buffer_bytes(spec), [axis.name for axis in layout.left]
    if row.name in ENGINES:
        yield Text.assemble((row.name, "bold"), f"  {row.engine} {row.versions}")
        yield Text(f"  layout      {row.layout}")
    else:
        yield Text(row.layout, "bold")
    for field in ("block_size", "dtypes", "notes"):
        if getattr(row, field):
            yield Text(f"  {field:10}  {getattr(row, field)}")
    yield Text(
        f"\nexample: {_count(spec.num_layers, 'layer')}, {_count(spec.num_blocks, 'block')} of {spec.block_size} tokens, "
        f"{_count(spec.num_kv_heads, 'head')}, head_dim {spec.head_dim}, {spec.format}: "
        f"{_count(len(sizes), 'allocation')}, {sum(sizes)} bytes"
    )
    for name, place, plane in zip("KV" if spec.num_planes == 2 else (" ",), places(spec), layout.planes.values(), strict=True):
        yield Text(f"  {name}  {_view(place, plane)}")
    for buffer, cells in enumerate(_cells(spec)):
        which = [cells[0].labels[axis] for axis in left]
        yield Text.assemble("\n", ("| ", "bold"), f"{' '.join([*which, ''])}{sizes[buffer]} bytes")
        yield from _lines(cells, set(left))


def _view(place: Place, plane: PlaneLayout) -> str:
    """Shape and strides of K or V inside an allocation."""
    axes = ", ".join(str(axis) for axis in plane.order if axis.name != "kv")
    shape, strides = zip(*((d.size, d.stride) for d in place.digits if d.stride), strict=True)
    return f"[{axes}] shape {list(shape)} strides {list(strides)} bytes, from byte {place.offset}"


def _cells(spec: CacheSpec) -> list[list[GridCell]]:
    """Of each buffer, in the order of bytes: neighbours that differ by one step of one axis are one cell."""
    units: list[list[tuple[int, ...]]] = [[] for _ in buffer_bytes(spec)]
    for kv, place in enumerate(places(spec)):
        counts = (spec.num_layers, spec.num_blocks, 1, spec.num_kv_heads, spec.block_size, spec.plane(kv).row_units)
        for layer, block, _, head, token, dim in product(*map(range, counts)):
            buffer, byte = place.locate(layer=layer, block=block, head=head, token=token, dim=dim)
            units[buffer].append((byte, layer, block, kv, head, token, dim))
    return [[_cell(spec, run) for run in _runs(sorted(buffer))] for buffer in units]


def _runs(units: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    run, axis = [units[0]], -1
    for unit in units[1:]:
        steps = [b - a for a, b in zip(run[-1][1:], unit[1:], strict=True)]
        moved = [i for i, step in enumerate(steps) if step]
        if len(moved) == 1 and steps[moved[0]] == 1 and AXES[moved[0]] in ("token", "dim") and axis in (-1, moved[0]):
            run, axis = [*run, unit], moved[0]
        else:
            yield run
            run, axis = [unit], -1
    yield run


def _cell(spec: CacheSpec, run: list[tuple[int, ...]]) -> GridCell:
    first, last = (dict(zip(AXES, unit[1:], strict=True)) for unit in (run[0], run[-1]))
    labels = {}
    for axis in AXES:
        if axis == "kv":
            labels[axis] = "KV"[first[axis]] if spec.num_planes == 2 else ""
        elif axis == "head" and spec.num_kv_heads == 1:
            labels[axis] = ""
        elif axis == "dim" and last[axis] - first[axis] + 1 == spec.plane(first["kv"]).row_units:
            labels[axis] = ""  # a whole row
        else:
            labels[axis] = f"{LETTERS[axis]}{first[axis]}" + (f"-{last[axis]}" if last[axis] > first[axis] else "")
    return GridCell(run[0][0], first["kv"], first["head"], labels)


def _lines(cells: list[GridCell], outside: set[str]) -> Iterator[Text]:
    """Eight cells a line; what they have in common stands in front of them."""
    shown = [axis for axis in AXES if axis not in outside]
    lines = [cells[i : i + LINE_CELLS] for i in range(0, len(cells), LINE_CELLS)]
    fronts, words = [], []
    for line in lines:
        common = [axis for axis in shown if len({cell.labels[axis] for cell in line}) == 1]
        fronts.append(_label(line[0], common))
        words.append([_label(cell, [axis for axis in shown if axis not in common]) for cell in line])
    front_width, width = len(max(fronts, key=len)), len(max(chain(*words), key=len))
    for n, line in enumerate(lines):
        if len(lines) > HEAD_LINES + TAIL_LINES and HEAD_LINES <= n < len(lines) - TAIL_LINES:
            if n == HEAD_LINES:
                yield Text(f"         ... {len(lines) - HEAD_LINES - TAIL_LINES} lines more")
            continue
        text = Text(f"  {line[0].byte:5}  ").append(f"{fronts[n]:{front_width}}", "dim")
        for cell, word in zip(line, words[n], strict=True):
            text.append("   ").append(f"{word:{width}}", ("magenta" if cell.kv else "cyan") + " bold" * (cell.head % 2))
        text.rstrip()
        yield text


def _label(cell: GridCell, axes: list[str]) -> str:
    return " ".join(cell.labels[axis] for axis in axes if cell.labels[axis])


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
