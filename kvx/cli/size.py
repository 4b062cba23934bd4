"""kvx size: what a model's KV cache costs, and what fits in a memory, before anything is allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvx.cli.size_hybrid import hybrid_facts
from kvx.cli.size_plot import draw
from kvx.errors import BadArgument
from kvx.spec import byte_size
from kvx.spec.engine_size import EngineSize, engine_sizes
from kvx.spec.models import MODELS
from kvx.spec.size import STATE_FORMATS, STATES, Size, size_formats
from kvx.spec.size import size as size_of

_ONCE = ("model", "tp", "block_size", "model_type", "is_checked", "notes")  # the same for every format
NUMBER = re.compile(r"[0-9.,]+( [KMGT]iB| B|%)?|any")  # such columns stand to the right


def size(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A known model's name, a Transformers config.json, or its folder. Without it the known models are listed."
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help='KV cache format; repeatable. "all" shows every format that the model supports.'),
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory for the cache on one rank: 80GB, 74.5GiB.")] = "80GB",
    context: Annotated[
        str, typer.Option(help="Maximum tokens per request, prompt and answer together: 8192, 128K, 1M (K is 1024).")
    ] = "8192",
    requests: Annotated[int, typer.Option(help="Number of concurrent requests.")] = 1,
    shared_prefix: Annotated[
        int, typer.Option(help="Length of a prefix shared by all requests; its full blocks are counted once.")
    ] = 0,
    tp: Annotated[int, typer.Option(help="Tensor parallel size; all figures are per rank.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens per block. 0 means 16, or 128 for DeepSeek-V4.")] = 0,
    index_format: Annotated[
        str, typer.Option(help="Format of the indexer's keys (DeepSeek V3.2 and V4). Default: the model's own.")
    ] = "",
    state: Annotated[
        str,
        typer.Option(
            help="How the compressors of DeepSeek-V4 keep unfinished entries. ring: every token of the entry, as engines do. "
            "tight: the minimum, running sums."
        ),
    ] = STATES[0],
    state_format: Annotated[
        str, typer.Option(help=f"Format of recurrent states: {', '.join(STATE_FORMATS)}. Default: as in Transformers.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Plot the number of requests that fit against context length, to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Size a KV cache: bytes per token and per request, how many requests and tokens fit, and what each engine allocates."""
    if model is None:
        return _show_models(as_json)
    memory_bytes, tokens = parse_bytes(memory), parse_tokens(context)
    names = (
        [n for f in formats for n in (size_formats(model, every=True) if f == "all" else [f])] if formats else size_formats(model)
    )
    options: dict[str, Any] = {"tp": tp, "block_size": block_size, "index_format": index_format, "state": state}
    options["state_format"] = state_format
    sizes = [size_of(model, name, **options) for name in dict.fromkeys(names)]
    facts = [_facts(s, memory_bytes, tokens, requests, shared_prefix) for s in sizes]
    engines: list[tuple[EngineSize, ...]] = [()] * len(sizes)
    if len(sizes[0].groups) > 1 or sizes[0].groups[0].planes:  # where all layers keep the same, an engine takes what is counted
        mine: dict[str, Any] = {"context": tokens, "tp": tp, "block_size": block_size, "state_format": state_format}
        engines = [engine_sizes(model, s.format, **mine) for s in sizes]
        facts = [f | {"engines": [e.to_dict() for e in of]} if of else f for f, of in zip(facts, engines, strict=True)]
    is_hybrid = any(g.ring_tokens for g in sizes[0].groups) and "fp8_ds_mla" in size_formats(model)  # DeepSeek-V4 alone
    hybrid = hybrid_facts(model, tokens) if is_hybrid else []
    if plot is not None:
        draw(plot, sizes, memory, memory_bytes, shared_prefix)
    if as_json:
        asked = {"model": sizes[0].model, "tp": tp, "block_size": sizes[0].block_size, "context": tokens, "requests": requests}
        asked |= {"model_type": sizes[0].model_type, "is_checked": sizes[0].is_checked, "notes": sizes[0].notes}
        asked |= {"shared_prefix": shared_prefix, "memory_bytes": memory_bytes}
        typer.echo(json.dumps({**asked, "sizes": facts, **({"hybrid": hybrid} if hybrid else {})}, indent=1))
        return
    _show_layers(sizes[0])
    for line in _remarks(sizes[0]):
        typer.echo(line)
    if len(sizes[0].groups) > 1:
        _show_groups(sizes, tokens)
    _show_sizes(sizes, facts, f"{memory} for the cache", tokens, requests, shared_prefix)
    if engines[0]:
        _show_engines(engines[0], sizes[0].format, tokens)
    if hybrid:
        _show_hybrid(hybrid, tokens)
    if plot is not None:
        typer.echo(f"plot: {plot}")


def parse_bytes(text: str) -> int:
    """Of `80GB`, `74.5 GiB` or `1000000`."""
    return byte_size.parse_bytes(text, "size: memory")


def parse_tokens(text: str) -> int:
    """Of `8192`, `128K` or `1M`: contexts are counted in powers of two."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([KM]?)", text.strip().upper())
    if match is None:
        raise BadArgument(f'size: context is "{text}"; it takes a number of tokens, like 8192, 128K or 1M (of 1024).')
    return int(match[1]) * {"": 1, "K": 1024, "M": 1024**2}[match[2]]


def _facts(s: Size, memory_bytes: int, context: int, requests: int, shared_prefix: int) -> dict[str, Any]:
    fit = s.fit_requests(memory_bytes, context, shared_prefix)
    return {
        **{key: value for key, value in s.to_dict().items() if key not in _ONCE},
        "request_bytes": s.request_bytes(context),
        "total_bytes": s.total_bytes(context, requests, shared_prefix),
        "requests_fit": fit,
        "tokens_fit": fit * context,
        "longest_context": s.fit_context(memory_bytes, requests, shared_prefix),  # null: any
    }


def _show_layers(s: Size) -> None:
    rows = []
    for g in s.groups:
        kept = f"{'chunk of' if g.is_chunked else 'last'} {g.window:,} tokens" if g.window else "all tokens"
        if g.ring_tokens:
            kept = f"last {g.ring_tokens:,} tokens" + (f", 1 entry per {g.ratio}" if g.ratio > 1 else "")
        if g.planes:  # of any number of tokens
            kept = f"{kept}, and one state" if g.block_bytes else "one state"
        rows.append((g.name, str(g.num_layers), g.stores, kept))
    _show(f"{s.model}: what each kind of layer stores", ("kind", "layers", "stored", "kept per request"), rows)


def _remarks(s: Size) -> list[str]:
    """What a reader must know before trusting the numbers."""
    unchecked = (
        f"unchecked: model_type {s.model_type} was not compared with a real cache; its config is read like that of any decoder "
        "with these fields"
    )
    return [f"  {line}." for line in (*([] if s.is_checked else [unchecked]), *s.notes)]


def _show_groups(sizes: Sequence[Size], context: int) -> None:
    """A line for each format and kind of layer. With a window, each further token of a long request takes 0 bytes."""
    rows = []
    for s in sizes:
        for g in s.groups:
            request = g.private_bytes(-(-context // s.block_size))
            grows = 0 if g.max_blocks else g.token_bytes
            rows.append((s.format, g.name, _number(grows / g.num_layers), _number(grows), _human(g.fixed_bytes), _human(request)))
    columns = ("format", "kind", "bytes/token per layer", "bytes/token", "fixed", "per request")
    _show("memory by kind of layer", columns, rows)


def _show_sizes(
    sizes: Sequence[Size], facts: list[dict[str, Any]], memory: str, context: int, requests: int, shared_prefix: int
) -> None:
    first, is_many, has_index = sizes[0], requests > 1, bool(sizes[0].index_format)
    columns = (
        *("format", *(["index keys"] if has_index else []), "bytes/token", "fixed", "per request"),
        *([f"{requests:,} requests"] if is_many else []),
        *("requests fit", "tokens fit", f"longest of {requests:,} requests" if is_many else "longest request"),
    )
    rows = [
        (
            *(s.format, *([s.index_format] if has_index else []), _number(s.token_bytes), _human(s.fixed_bytes)),
            _human(f["request_bytes"]),
            *([_human(f["total_bytes"])] if is_many else []),
            *(f"{f['requests_fit']:,}", f"{f['tokens_fit']:,}"),
            "any" if f["longest_context"] is None else f"{f['longest_context']:,}",
        )
        for s, f in zip(sizes, facts, strict=True)
    ]
    shared = f" ({shared_prefix:,} of them shared)" if shared_prefix else ""
    ranks = f" on each of {first.tp} ranks" if first.tp > 1 else ""
    _show(f"requests of {context:,} tokens{shared} in blocks of {first.block_size}, with {memory}{ranks}", columns, rows)


def _show_engines(engines: Sequence[EngineSize], format: str, context: int) -> None:
    """A line for each engine and setting; under them, what each does."""
    has_states = any(e.state_bytes for e in engines)
    rows = [
        (
            *(e.engine, e.setting or "-", f"{e.block_size:,}" if e.block_size else "-", _number(round(e.token_bytes, 2))),
            *([e.state_format or "-", _human(e.state_bytes)] if has_states else []),
            *(_human(e.request_bytes), f"{e.padding:.2%}"),
        )
        for e in engines
    ]
    columns = (
        *("engine", "setting", "block size", "bytes/token", *(["state format", "states"] if has_states else [])),
        *("per request", "overhead"),
    )
    _show(f"what engines allocate for a request of {context:,} tokens in {format}", columns, rows)
    for e in engines:
        if e.note:
            typer.echo(f"  {e.engine}{f', {e.setting}' if e.setting else ''}: {e.note}.")


def _show_hybrid(facts: Sequence[dict[str, Any]], context: int) -> None:
    rows = [
        (
            str(f["block_size"]),
            *(_number(round(f[name], 2)) for name in ("token_bytes", "token_bytes_allocated")),
            f"{f['padding']:.2%}",
            *(_human(f[name]) for name in ("fixed_bytes", "fixed_bytes_allocated", "request_bytes_allocated")),
        )
        for f in facts
    ]
    columns = ("block size", "bytes/token", "allocated/token", "padding", "fixed", "fixed, allocated", "per request, allocated")
    _show(f"kvx.cache.hybrid with {facts[0]['rows']} rows and mxfp4 index keys, a request of {context:,} tokens", columns, rows)


def _number(n: float) -> str:
    return f"{n:,.12g}"


def _human(n: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if n >= 1024**power:
            return f"{n / 1024**power:.2f} {unit}"
    return f"{n} B" if n else "0"


def _show_models(as_json: bool) -> None:
    sizes = [size_of(name) for name in MODELS]
    if as_json:
        typer.echo(
            json.dumps([{"model": s.model, "token_bytes": s.token_bytes, "fixed_bytes": s.fixed_bytes} for s in sizes], indent=1)
        )
        return
    layers = (", ".join(f"{g.num_layers} {g.name}" for g in s.groups) for s in sizes)
    rows = [(s.model, text, _number(s.token_bytes), _human(s.fixed_bytes)) for s, text in zip(sizes, layers, strict=True)]
    columns = ("model", "layers", "bytes/token", "fixed")
    _show("known models in bf16: bytes per token, and the fixed size per request (windows, states)", columns, rows)


def _show(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table on a terminal; elsewhere the same rows as plain lines, for grep and awk."""
    console = Console(highlight=False)
    is_number = [all(NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(columns))]
    if console.is_terminal:
        table = Table(title=title, title_justify="left")
        for column, right in zip(columns, is_number, strict=True):
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(x) for x in row))
        console.print(table)
        return
    typer.echo(title)
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = (f"{x:>{w}}" if right else f"{x:{w}}" for x, w, right in zip(line, widths, is_number, strict=True))
        typer.echo("  " + "  ".join(cells).rstrip())
