"""kvx llama: a llama-server's slots in a directory, with checkpoints along their prompts. By its own HTTP calls and files.

A restored slot of a hybrid or sliding-window model cannot go back to a shorter prefix. So checkpoints are kept where prompts may
part, and a new prompt gets the deepest one that it begins with.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvx.adapters.llama_cpp.checkpoints import at_checkpoint, read_checkpoints, with_masked_cell, write_checkpoints
from kvx.adapters.llama_cpp.memory import Memory, read_memory, write_memory
from kvx.adapters.llama_cpp.server import LlamaServer
from kvx.adapters.llama_cpp.slot_file import read_slot_file, write_slot_file
from kvx.adapters.llama_cpp.slot_store import SavedSlot, SlotStore
from kvx.cli.options import check_folder, make_folder
from kvx.errors import BadArgument, Incompatible, InternalError
from kvx.runner.gguf_file import GgufFile
from kvx.spec.byte_size import parse_bytes

app = typer.Typer(no_args_is_help=True, help="Save and restore a llama-server's slots, with checkpoints along their prompts.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The server's --slot-save-path; checkpoints are kept there.")]
Address = Annotated[str, typer.Option("--server", help="Where llama-server listens.")]
Slot = Annotated[int, typer.Option(min=0, help="The slot's number.")]
Prompt = Annotated[str, typer.Option(help="A file with the prompt's text, as sent to /completion; - reads stdin.")]
Messages = Annotated[str, typer.Option(help="A JSON file with messages, as sent to /v1/chat/completions.")]
TokenIds = Annotated[str, typer.Option("--tokens", help="A JSON file with token ids.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the server to respond.")]
_HERE = "http://127.0.0.1:8080"


@app.command()
def save(
    folder: Folder,
    server: Address = _HERE,
    slot: Slot = 0,
    prompt: Prompt = "",
    messages: Messages = "",
    tokens: TokenIds = "",
    every: Annotated[int, typer.Option(min=1, help="With a prompt: tokens from one checkpoint to the next.")] = 512,
    timeout: Timeout = 600,
) -> None:
    """Save a slot with the checkpoints that the server made of it. With a prompt: compute it first, with checkpoints on the way."""
    llama = LlamaServer(server, timeout_s=timeout)
    model = llama.model(lambda path: GgufFile(path).metadata)
    make_folder("DIR", folder)
    store = SlotStore(folder, is_made=True)
    ids = _prompt(llama, prompt, messages, tokens)
    begin, kept = time.perf_counter(), []
    # The last one stands before the last token: the same prompt, asked again, has one to compute.
    stops = [*range(every, len(ids) - 1, every), max(1, len(ids) - 1)] if ids is not None else [0]
    for stop in stops:
        if ids is not None:
            llama.compute(ids[:stop], slot)
        file = read_slot_file(llama.save_slot(slot, store.temporary()))
        if not len(file.tokens):
            raise BadArgument(f"slot {slot} of {server} has no tokens. Ask the server something first, or give --prompt.")
        memory, taken = read_memory(file.state, version=file.version)
        if ids is not None and file.tokens.tolist() != ids[:stop]:
            raise Incompatible(
                f"slot {slot} has other tokens than the {stop} that were computed: another client uses it. Choose a "
                "slot of your own."
            )
        made = read_checkpoints(file.state[taken:], version=file.version)
        for point in sorted(made, key=lambda c: c.num_tokens) if ids is None else ():
            kept.append(store.put(at_checkpoint(memory, point), file.tokens[: point.num_tokens], model))
        kept.append(store.put(memory, file.tokens, model))
    took = (time.perf_counter() - begin) * 1e3
    for entry, is_new in kept:
        typer.echo(f"{entry.name}  {entry.num_tokens:,} tokens" + (f", {_size(entry.bytes)}" if is_new else ", there already"))
    new = [e for e, is_new in kept if is_new]
    what = f"{_count(len(new), 'new checkpoint')}, {_size(sum(e.bytes for e in new))}"
    typer.echo(f"{what}, in {took:.0f} ms: {model.name}, K/V {kept[-1][0].types}")


@app.command("list")
def list_(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the checkpoints in a directory."""
    entries = SlotStore(folder).entries()
    if as_json:
        rows = [
            {
                "name": e.name,
                "model": e.model.name,
                "n_ctx": e.model.n_ctx,
                "types": e.types,
                "tokens": e.num_tokens,
                "first": e.first,
                "after": e.parent,
                "bytes": e.bytes,
                "digest": e.digest,
                "saved": e.saved_s,
                "used": e.used_s,
            }
            for e in entries
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "tokens", "positions", "K/V", "size", "model", "used", "after"):
        table.add_column(name, justify="right" if name in ("tokens", "size") else "left", no_wrap=True)
    now = time.time()
    for e in entries:
        where = f"{e.first:,} to {e.num_tokens - 1:,}"
        ago = _ago(now - e.used_s)
        table.add_row(e.name[:12], f"{e.num_tokens:,}", where, e.types, _size(e.bytes), e.model.name, ago, e.parent[:12] or "-")
    Console(width=120, soft_wrap=True).print(table)
    typer.echo(f"{_count(len(entries), 'checkpoint')}, {_size(sum(e.bytes for e in entries))}")


@app.command()
def restore(
    folder: Folder,
    server: Address = _HERE,
    slot: Slot = 0,
    prompt: Prompt = "",
    messages: Messages = "",
    tokens: TokenIds = "",
    timeout: Timeout = 600,
) -> None:
    """Restore the longest saved prefix of a prompt into a slot. Then send the prompt with this id_slot."""
    check_folder("DIR", folder)
    store, llama = SlotStore(folder), LlamaServer(server, timeout_s=timeout)
    ids = _prompt(llama, prompt, messages, tokens)
    if ids is None:
        raise typer.BadParameter("which prompt? Give --prompt, --messages or --tokens", param_hint="--prompt")
    model, entries = llama.model(), store.entries()
    found = store.match(ids, model)
    if found is None:
        _say_none(entries, model.identity, model.name, len(ids))
        raise typer.Exit(1)
    entry, count = found
    begin = time.perf_counter()
    memory, known = store.get(entry, entries)
    if count < entry.num_tokens:
        memory, known = memory.cut(count), known[:count]
    how = _restore(llama, store, slot, memory, known.tolist())
    store.touch(entry, entries)
    took = (time.perf_counter() - begin) * 1e3
    typer.echo(f"slot {slot} has {count:,} of {len(ids):,} tokens, {entry.name[:12]}{how}, in {took:.0f} ms")
    typer.echo(f"{len(ids) - count:,} are left to compute. Send the prompt with id_slot {slot}.")


@app.command()
def prune(
    folder: Folder,
    keep: Annotated[
        str, typer.Option(help="Maximum size to keep, such as 20GB; the least recently used checkpoints are removed first.")
    ] = "",
    older_than: Annotated[str, typer.Option(help="Remove checkpoints not used for this long: 30m, 12h, 7d.")] = "",
    damaged: Annotated[bool, typer.Option("--damaged", help="Remove checkpoints that `kvx llama verify` finds damaged.")] = False,
) -> None:
    """Remove checkpoints, and files that killed processes left behind."""
    keep_bytes = parse_bytes(keep, "--keep") if keep else None
    older_s = _seconds(older_than) if older_than else None
    gone = SlotStore(folder).prune(keep_bytes=keep_bytes, older_s=older_s, damaged=damaged)
    left = SlotStore(folder).entries()
    typer.echo(
        f"removed {_count(len(gone), 'checkpoint')}, {_size(sum(e.bytes for e in gone))}; "
        f"{_count(len(left), 'checkpoint')} left, {_size(sum(e.bytes for e in left))}"
    )


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of checkpoints.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    to: Annotated[str, typer.Option("--to", help="K/V type: f32, f16, bf16, q8_0, q4_0; or K's and V's: q8_0/q4_0.")],
    head_dim: Annotated[
        int, typer.Option(min=0, help="Head dimension, for a model whose file could not be read when it was saved.")
    ] = 0,
) -> None:
    """Convert all checkpoints to another K/V type. `restore` converts on its own when the server uses another type."""
    k, _, v = to.partition("/")
    store = SlotStore(folder)
    if target.resolve() == folder.resolve():
        raise typer.BadParameter(f"{target} is DIR itself. Name another", param_hint="OUT")
    make_folder("OUT", target)
    made = list(store.convert_to(SlotStore(target, is_made=True), k, v or k, head_dim))
    before = sum(e.bytes for e in store.entries())
    typer.echo(f"{_count(len(made), 'checkpoint')} in {to}: {_size(before)} are {_size(sum(e.bytes for e in made))} in {target}")


@app.command()
def verify(folder: Folder) -> None:
    """Check every checkpoint against its digest. Exit code 1 when one is damaged."""
    store = SlotStore(folder)
    problems = store.problems()
    for _, problem in problems:
        typer.echo(problem, err=True)
    count = store.num_checkpoints
    typer.echo(f"{count - len(problems)} of {count} checkpoints are as they were written")
    raise typer.Exit(1 if problems else 0)


def _restore(llama: LlamaServer, store: SlotStore, slot: int, memory: Memory, known: list[int]) -> str:
    """Into the slot, converted where the server keeps K and V otherwise. What was done to it, in words."""

    def send(memory: Memory) -> None:
        whole, points = with_masked_cell(memory)
        data = write_slot_file(known, write_memory(whole) + write_checkpoints(points), version=memory.version)
        count = llama.restore_slot(slot, store.temporary(), data)
        if count != len(known):
            raise InternalError(f"the server restored {count} tokens of {len(known)}. Its slot is of no use: ask it without.")

    try:
        send(memory)
        return ""
    except Incompatible as refused:
        # It may keep K and V in other types: one token says how.
        llama.compute(known[:1], slot)
        file = read_slot_file(llama.save_slot(slot, store.temporary()))
        theirs, _ = read_memory(file.state, version=file.version)
        memory.require_fit("kvx llama restore", theirs)
        if theirs.version == memory.version and [c.kind for c in theirs.caches] == [c.kind for c in memory.caches]:
            raise refused
        before = memory.kind
        memory = Memory(theirs.version, memory.to([c.kind for c in theirs.caches]).caches, memory.recurrent)
        send(memory)
        now = memory.kind
        return f", converted from {before.name} to {now.name}" if before and now and before.name != now.name else ", rearranged"


def _prompt(llama: LlamaServer, prompt: str, messages: str, tokens: str) -> list[int] | None:
    """Token ids of whichever was given; None without any."""
    given = [name for name, value in (("--prompt", prompt), ("--messages", messages), ("--tokens", tokens)) if value]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} say the prompt. Give one of them", param_hint=given[1])
    if not given:
        return None
    path = prompt or messages or tokens
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        facts: Any = json.loads(text) if not prompt else None
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint=given[0]) from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not {'text' if prompt else 'JSON'}: {error}", param_hint=given[0]) from None
    if messages:
        facts = facts.get("messages") if isinstance(facts, dict) else facts
        if not isinstance(facts, list):
            raise typer.BadParameter(f"{path} has no list of messages", param_hint="--messages")
        text = llama.render(facts)
    if tokens and not (isinstance(facts, list) and all(type(t) is int for t in facts)):
        raise typer.BadParameter(f"{path} is no list of token ids", param_hint="--tokens")
    ids: list[int] = list(facts) if tokens else llama.tokenize(text)
    if len(ids) < 2:
        raise typer.BadParameter(f"{path} has {len(ids)} tokens; there are two or more", param_hint=given[0])
    return ids


def _say_none(entries: list[SavedSlot], identity: str, name: str, count: int) -> None:
    others = sorted({e.model.name for e in entries if e.model.identity != identity})
    ours = [e for e in entries if e.model.identity == identity]
    if others and not ours:
        typer.echo(
            f"no checkpoint of {name}: the directory has {', '.join(others)}. Another model's K and V are never used.", err=True
        )
    else:
        typer.echo(
            f"none of {len(ours)} checkpoints of {name} is a beginning of these {count:,} tokens. Nothing was restored.", err=True
        )


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r}; it must be a number and s, m, h, d or w, like 12h or 7d", param_hint="--older-than")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


def _count(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _size(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def _ago(seconds: float) -> str:
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.0f} {unit} ago"
    return "now"
