"""kvx bench write|append|attention|gather|convert|digest|amax|call|cache|step|generate: checks, times, writes a result file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kvx.bench import amax as amax_bench
from kvx.bench import append as append_bench
from kvx.bench import attention as attention_bench
from kvx.bench import cache as cache_bench
from kvx.bench import call as call_bench
from kvx.bench import convert as convert_bench
from kvx.bench import digest as digest_bench
from kvx.bench import gather as gather_bench
from kvx.bench import generate as generate_bench
from kvx.bench import harness
from kvx.bench import step as step_bench
from kvx.bench import write as write_bench
from kvx.cli.generate import QUESTIONS, SYSTEM, dtype_of
from kvx.ops import backend as backends

app = typer.Typer(no_args_is_help=True, help="Check an op against its definition, then time it beside torch and a plain copy.")
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Out = Annotated[Path, typer.Option(help="folder of the result file")]
Only = Annotated[str, typer.Option(help="run only the cases whose line contains this text")]
RESULTS = Path("bench/results")


def _run(name: str, device: str, out: Path, only: str) -> None:
    reason = backends.reason_missing(device) if device in ("cpu", "cuda") else "devices are cpu and cuda"
    if reason is not None:
        raise typer.BadParameter(f"{device}: {reason}", param_hint="--device")
    bench = {
        "write": write_bench,
        "gather": gather_bench,
        "amax": amax_bench,
        "convert": convert_bench,
        "digest": digest_bench,
        "append": append_bench,
        "attention": attention_bench,
    }[name]
    typer.echo(harness.headline(device))
    kind = getattr(bench, "CEILING", "copy")
    ceiling = harness.read_ceiling_gbps(device) if kind == "read" else harness.copy_ceiling_gbps(device)
    typer.echo(f" {kind} ceiling {ceiling / 1e3:.3f} TB/s" + (" (bytes read + bytes written)" if kind == "copy" else ""))
    rows = []
    for case in bench.cases(device):
        if only and only not in " ".join(f"{k}={v}" for k, v in case.label.items()):
            continue
        row = bench.run(case, device, ceiling)
        rows.append(row)
        typer.echo(str(row))
    if not only:
        typer.echo(f"saved {harness.save(name, device, rows, out, ceiling, kind)}")


@app.command()
def write(device: Device = "cpu", out: Out = RESULTS, only: Only = "") -> None:
    """K and V of a batch into scattered blocks."""
    _run("write", device, out, only)


@app.command()
def append(device: Device = "cpu", out: Out = RESULTS, only: Only = "") -> None:
    """A fused QKV normed, rotated and put into scattered blocks."""
    _run("append", device, out, only)


@app.command()
def attention(device: Device = "cpu", out: Out = RESULTS, only: Only = "") -> None:
    """Queries over keys and values in scattered blocks."""
    _run("attention", device, out, only)


@app.command()
def gather(device: Device = "cpu", out: Out = RESULTS, only: Only = "") -> None:
    """Whole sequences out of scattered blocks."""
    _run("gather", device, out, only)


@app.command()
def convert(device: Device = "cpu", out: Out = RESULTS, only: Only = "") -> None:
    """Whole caches from one engine's bytes to another's."""
    _run("convert", device, out, only)


@app.command()
def digest(device: Device = "cpu", out: Out = RESULTS, only: Only = "") -> None:
    """The content digest of whole caches."""
    _run("digest", device, out, only)


@app.command()
def amax(device: Device = "cpu", out: Out = RESULTS, only: Only = "") -> None:
    """Largest magnitudes of a batch."""
    _run("amax", device, out, only)


@app.command()
def call(out: Out = RESULTS) -> None:
    """What one Python call costs over the kernel itself."""
    typer.echo(harness.headline("cpu"))
    result = call_bench.measure()
    typer.echo(call_bench.show(result))
    _save("call", result, out)


@app.command()
def cache(out: Out = RESULTS) -> None:
    """What a paged cache's decisions cost on the host, beside vLLM's where it is installed."""
    typer.echo(harness.headline("cpu"))
    result = cache_bench.measure()
    typer.echo(cache_bench.show(result))
    _save("cache", result, out)


@app.command()
def step(out: Out = RESULTS) -> None:
    """A decode step of a model of 8 billion weights on a GPU, beside the time its bytes need."""
    reason = backends.reason_missing("cuda")
    if reason is not None:
        raise typer.BadParameter(reason, param_hint="kvx bench step")
    typer.echo(harness.headline("cuda"))
    result = step_bench.measure()
    typer.echo(step_bench.show(result))
    _save("step", result, out, "cuda")


@app.command()
def generate(
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="f32, bf16, f16; auto: f32 on a CPU, else bf16")] = "auto",
    repeats: Annotated[int, typer.Option(help="runs of each; the median counts")] = 3,
    out: Out = RESULTS,
) -> None:
    """Eight texts of a real model together, beside transformers' generate on the same weights."""
    typer.echo(harness.headline(device))
    cases = {"questions after one system prompt": (QUESTIONS, SYSTEM), "questions alone": (QUESTIONS, "")}
    result = generate_bench.measure(cases, dtype=dtype_of(dtype, device), device=device, repeats=repeats)
    typer.echo(generate_bench.show(result))
    _save("generate", result, out, device)


def _save(name: str, result: dict[str, Any], out: Path, device: str = "cpu") -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{datetime.now(UTC):%Y-%m-%d}-{name}-{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    typer.echo(f"saved {path}")
