"""kvx generate: prompts answered together on one paged cache, by a real model."""

from __future__ import annotations

import json
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from kvx.cli.live import JsonView, LiveView, PlainView, View
from kvx.cli.options import refuse_ignored
from kvx.errors import BadArgument
from kvx.runner import Engine, Params, small_model
from kvx.runner.open import has_tokenizer
from kvx.view import BrowserView, Recording, attach
from kvx.view import record as record_to
from kvx.view.server import PORT

SYSTEM = (
    "You are a helpful assistant in a museum of science. Visitors of all ages ask you short questions. Answer in one or two plain "
    "sentences that a child of ten can follow. Be exact: give a number or a name where it helps, and say that you do not know "
    "rather than guess. Use no lists, no headings and no jargon. Be friendly, never talk down, and do not repeat the question. "
    "When a question is about something dangerous, say what to do to stay safe."
)
FULL = "length: the cache is full"  # why an answer ended before --max-tokens
QUESTIONS = (
    "Why is the sky blue?",
    "What is a black hole?",
    "How do birds fly?",
    "Why do we have seasons?",
    "What are stars made of?",
    "How deep is the ocean?",
    "Why does ice float on water?",
    "What is the speed of light?",
)


@dataclass
class GenerateRun:
    """What the summary is made of."""

    model: str
    dtype: str
    max_tokens: int
    answers: list[dict[str, Any]]
    begin: float
    load_s: float = 0.0
    first_text_s: float | None = None  # from when loading began: imports come before
    is_interrupted: bool = False
    note: str = ""  # what of the request cannot be had
    stats: dict[str, Any] = field(default_factory=dict)


def generate(
    context: typer.Context,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable. Default: eight short questions.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder with safetensors, or a .gguf file. Default: SmolLM2-135M-Instruct.")
    ] = None,
    system: Annotated[str, typer.Option(help="System message before every prompt.")] = SYSTEM,
    raw: Annotated[bool, typer.Option("--raw", help="Use prompts as they are: no chat template, no --system.")] = False,
    kv_format: Annotated[str, typer.Option(help="KV cache format: auto (the model's type), f32, bf16, f16, int8, fp8.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Type of weights and activations: f32, bf16, f16; auto: f32 on a CPU, else bf16.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 48,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of tokens whose probabilities sum to this.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this string; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False,
    n: Annotated[int, typer.Option("--n", help="Number of answers per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    blocks: Annotated[int, typer.Option(help="Number of cache blocks, 16 tokens each. Give few to see requests preempted.")] = 512,
    batch_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens per step; longer prompts are prefilled in chunks.")
    ] = 512,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="Where evicted blocks are offloaded: host:2GB, disk:DIR:50GB, nixl:HOST:PORT:20GB or "
            "mooncake:HOST:PORT; repeatable, fastest first."
        ),
    ] = None,
    tier_format: Annotated[
        str, typer.Option(help="Format of blocks in tiers: auto (as in the cache), f32, bf16, f16, int8, fp8.")
    ] = "auto",
    tier_model: Annotated[
        str, typer.Option(help="Name of these weights in tiers, shared with other engines. Default: computed from the files.")
    ] = "",
    events: Annotated[
        str, typer.Option(help="Publish which blocks the cache has, as vLLM's KV events over ZMQ, like tcp://127.0.0.1:5557.")
    ] = "",
    events_replay: Annotated[
        str, typer.Option(help="Where subscribers ask for events they missed, like tcp://127.0.0.1:5558.")
    ] = "",
    record: Annotated[
        Path | None, typer.Option(help="Write what the cache does to this file, which `kvx view FILE` replays.")
    ] = None,
    in_browser: Annotated[
        bool, typer.Option("--view", help="Show what the cache does in a browser: serve a page, and /metrics for Prometheus.")
    ] = False,
    view_port: Annotated[int, typer.Option(help="Port of --view; 0: any that is free.")] = PORT,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Turn prefix caching off.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate text for several prompts in one batch, and show the state of the KV cache while it runs."""
    if not tier:
        refuse_ignored(context, "it applies only to a --tier", "tier_format", "tier_model")
    if not in_browser:
        refuse_ignored(context, "it applies only to --view", "view_port")
    if not events:
        refuse_ignored(context, "it applies only to --events", "events_replay")
    elif no_prefix:
        raise BadArgument("--events reports blocks by their hashes, which --no-prefix turns off. Give only one of the two.")
    run = GenerateRun(str(model or "SmolLM2-135M-Instruct"), dtype_of(dtype, device), max_tokens, [], time.perf_counter())
    params = Params(max_tokens, temperature, top_k, top_p, tuple(stop or ()), seed, n, ignore_eos)
    questions = list(prompt) if prompt else list(QUESTIONS)
    if model is not None and (model / "config.json").is_file() and not has_tokenizer(model):
        raise BadArgument(f"--model: {model} has no tokenizer (tokenizer.json or the like). kvx.runner.Engine takes token ids.")
    console = Console(highlight=False)
    view: View = JsonView() if as_json else LiveView(console) if console.is_terminal else PlainView(console)
    with ExitStack() as stack:
        with view:
            engine = Engine.load(
                model or small_model(), dtype=run.dtype, kv_format=kv_format, device=device, num_blocks=blocks,
                max_batch_tokens=batch_tokens, prefix=not no_prefix, tiers=tier or (), tier_format=tier_format,
                tier_model=tier_model, progress=view.loading,
            )  # fmt: skip
            with engine, _told(engine, events, events_replay):
                seen = _see(engine, record, view_port if in_browser else None, Path(run.model).name, stack)
                url = f"{seen.url}#live" if isinstance(seen, BrowserView) else ""
                run.load_s = time.perf_counter() - run.begin
                ids = [_encode(engine, q, system, raw) for q in questions]
                run.answers = [
                    {"prompt": q, "index": i, "text": "", "tokens": [], "finish": ""} for q in questions for i in range(n)
                ]
                run.note = _room(engine, ids, max_tokens)
                if url:
                    (Console(stderr=True) if as_json else console).print(f"See the cache at {url}", highlight=False, soft_wrap=True)
                view.start(engine, run.answers, run.note)
                _answer(engine, ids, params, run, view)
        run.stats = engine.stats()
        view.finish(run.answers)
        if as_json:
            typer.echo(json.dumps(_as_json(run), indent=2))
        else:
            console.print("\n" + summary(run), soft_wrap=True)
        if seen is not None and seen.error:
            typer.echo(f"The cache was not looked at to the end: {seen.error}", err=True)
        if url and console.is_terminal and not run.is_interrupted:
            _stay(url)
    if run.is_interrupted:
        raise typer.Exit(130)


def _see(engine: Engine, record: Path | None, port: int | None, title: str, stack: ExitStack) -> BrowserView | Recording | None:
    """What --view (at a port) and --record want, until the stack is left."""
    if port is None:
        return None if record is None else stack.enter_context(record_to(engine.cache, record, title=title))
    view = stack.enter_context(attach(engine.cache, port=port, title=title))
    if record is not None:
        view.record(record)
    return view


def _stay(url: str) -> None:
    """The page is served until Ctrl-C: whoever opened it late sees how it ended."""
    typer.echo(f"The page stays at {url} until Ctrl-C.")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo()


def _told(engine: Engine, events: str, replay: str) -> AbstractContextManager[object]:
    """What routers are told while it lasts, if anything."""
    if not events:
        return nullcontext()
    from kvx.wires.events import publish

    tiers = None if engine.tiers is None else engine.tiers.backing
    return publish(engine.cache, events, replay=replay, tiers=tiers)


def dtype_of(dtype: str, device: str) -> str:
    return dtype if dtype != "auto" else "f32" if device == "cpu" else "bf16"


def _encode(engine: Engine, question: str, system: str, raw: bool) -> list[int]:
    assert engine.tokenizer is not None, "looked for before the model was loaded"
    return engine.tokenizer.encode(question) if raw else engine.tokenizer.chat(question, system)


def _room(engine: Engine, ids: list[list[int]], max_tokens: int) -> str:
    """A sentence where answers cannot get as long as they may, said before anything is computed."""
    room, s = engine.max_seq_len - max(len(i) for i in ids), engine.stats()
    if room >= max_tokens:
        return ""
    own = engine.model.config.max_seq_len
    more = (
        f"--blocks {-(-min(own, engine.max_seq_len - room + max_tokens) // s['block_size'])} gives more"
        if engine.max_seq_len < own
        else "that is the model's maximum"
    )
    return (
        f"--max-tokens {max_tokens} does not fit: the context is {engine.max_seq_len} tokens ({s['num_blocks']} blocks of "
        f"{s['block_size']}), and the longest prompt leaves room for {max(0, room)}. Answers end there ({FULL}); {more}."
    )


def _answer(engine: Engine, ids: list[list[int]], params: Params, run: GenerateRun, view: View) -> None:
    """Until all is said, or Ctrl-C."""
    try:
        for piece in engine.stream(ids, params):
            answer = run.answers[piece.request * params.n + piece.index]
            answer["text"] += piece.text
            answer["tokens"].append(piece.token)
            answer["finish"] = piece.finish
            if piece.finish == "length" and len(answer["tokens"]) < params.max_tokens:
                answer["finish"] = FULL
            if run.first_text_s is None and piece.text:
                run.first_text_s = time.perf_counter() - run.begin
            view.show(answer)
    except KeyboardInterrupt:
        run.is_interrupted = True


def _as_json(run: GenerateRun) -> dict[str, Any]:
    return {
        "model": run.model,
        "dtype": run.dtype,
        "kv_format": run.stats["kv_format"],
        "is_interrupted": run.is_interrupted,
        "note": run.note,
        "load_s": round(run.load_s, 3),
        "first_text_s": None if run.first_text_s is None else round(run.first_text_s, 3),
        "tokens_per_s": round(_rate(run), 2),
        "answers": run.answers,
        "stats": run.stats,
    }


def _rate(run: GenerateRun) -> float:
    return run.stats["generated_tokens"] / run.stats["busy_s"] if run.stats["busy_s"] else 0.0


def summary(run: GenerateRun) -> str:
    """What was done, and what reuse and format saved."""
    s = run.stats
    peak = s["peak_blocks"] * s["block_size"]
    here, plain = s["kv_bytes_per_token"], s["unquantised_bytes_per_token"]
    done = sum(bool(a["finish"]) for a in run.answers)
    share = s["reused_tokens"] / s["prompt_tokens"] if s["prompt_tokens"] else 0.0
    lines = [
        f"{'Stopped. ' if run.is_interrupted else ''}{done} of {len(run.answers)} answers, {s['generated_tokens']} tokens in "
        f"{s['busy_s']:.1f} s: {_rate(run):.0f} tokens/s"
        + (f"; first text {run.first_text_s:.1f} s after loading began." if run.first_text_s is not None else "."),
        f"Prefix cache hits: {s['reused_tokens']} of {s['prompt_tokens']} prompt tokens ({share:.0%}) were in the cache already: "
        f"they were not recomputed, and {s['reused_tokens'] * here / 1e6:.1f} MB of KV were not stored twice.",
        f"KV format {s['kv_format']}: {here:,} bytes per token"
        + (
            f" instead of {plain:,} in {run.dtype}, {1 - here / plain:.0%} less"
            if here != plain
            else "; --kv-format int8 or fp8 needs less"
        )
        + f". Peak use: {s['peak_blocks']} of {s['num_blocks']} blocks, {peak * here / 1e6:.1f} MB"
        + (f" instead of {peak * plain / 1e6:.1f} MB." if here != plain else "."),
    ]
    if s["tiers"]:
        lines += _tier_lines(s, s["tiers"])
    if s["preemptions"]:
        again = "its KV loaded from tiers or recomputed" if s["tiers"] else "its KV recomputed"
        lines.append(
            f"{s['preemptions']} preemptions: the cache ran out of blocks, so the newest request was stopped and {again} later. "
            "A larger --blocks avoids this."
        )
    cut = sum(a["finish"] == FULL for a in run.answers)
    if cut:
        lines.append(
            f"{cut} of the answers ended before --max-tokens {run.max_tokens}: with the prompt they fill the context of "
            f"{s['max_seq_len']} tokens ({s['num_blocks']} blocks of {s['block_size']})."
        )
    return "\n".join(lines)


def _tier_lines(s: dict[str, Any], t: dict[str, Any]) -> list[str]:
    came = ", ".join(f"{n} blocks from {kind}" for kind, n in t["hits"])
    text = (
        f"Tiers, in {t['format']}: {s['brought_tokens']} tokens loaded instead of recomputed ({came}); {t['offloaded']} blocks "
        f"offloaded, {t['offloaded_bytes'] / 1e6:.1f} MB."
    )
    lost = t["dropped"] + t["failed"]
    return [text, *([f"{lost} blocks were not offloaded. {t['error']}".rstrip()] if lost else [])]
