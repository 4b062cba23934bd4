"""kvx bench write, append, ..., wires (`kvx bench --help` lists them): each checks, times, and saves where it is told.

`kvx bench compare` and `kvx bench table` read what was saved (bench_tables.py).
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvx.bench import accuracy as accuracy_bench
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
from kvx.bench import hybrid as hybrid_bench
from kvx.bench import lmcache as lmcache_bench
from kvx.bench import sglang as sglang_bench
from kvx.bench import step as step_bench
from kvx.bench import tiers as tiers_bench
from kvx.bench import vllm as vllm_bench
from kvx.bench import wires as wires_bench
from kvx.bench import write as write_bench
from kvx.cli import bench_tables
from kvx.cli.generate import QUESTIONS, SYSTEM, dtype_of
from kvx.cli.options import check_device, check_folder, check_positive, make_folder
from kvx.errors import BadArgument
from kvx.ops import backend as backends

app = typer.Typer(
    no_args_is_help=True,
    help="Benchmarks: each one checks its results first, then measures, and compares with torch and a plain copy.",
)
app.command()(bench_tables.compare)
app.command()(bench_tables.table)
Device = Annotated[str, typer.Option(help="Device: cpu or cuda.")]
Out = Annotated[Path | None, typer.Option(help="Folder to save the result in, as JSON. Without it nothing is saved.")]
Only = Annotated[str, typer.Option(help="Run only the cases whose line contains this text.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout instead of saving it; progress goes to stderr.")
]

ONE_DEVICE = ("accuracy", "call", "lmcache", "sglang", "step", "vllm", "wires")  # that have no --device


def _run(name: str, device: str, out: Path | None, only: str, as_json: bool) -> None:
    """A bench of cases: each is a line as soon as it is measured."""
    check_device(device)
    if only and out is not None and not as_json:
        raise typer.BadParameter(
            "with --only a part of the cases is measured, and that is not saved as a result", param_hint="--out"
        )
    if out is not None and not as_json:
        make_folder("--out", out)
    bench = {
        "write": write_bench,
        "gather": gather_bench,
        "amax": amax_bench,
        "convert": convert_bench,
        "digest": digest_bench,
        "append": append_bench,
        "attention": attention_bench,
        "hybrid": hybrid_bench,
    }[name]
    say = partial(typer.echo, err=as_json)
    say(harness.headline(device))
    ceilings = {}
    for kind in getattr(bench, "CEILINGS", ("copy",)):  # a case of a bench that has both says which is its
        ceilings[kind] = harness.read_ceiling_gbps(device) if kind == "read" else harness.copy_ceiling_gbps(device)
        say(f" {kind} ceiling {ceilings[kind] / 1e3:.3f} TB/s" + (" (bytes read + bytes written)" if kind == "copy" else ""))
    rows: list[Any] = []
    try:
        for case in bench.cases(device):
            if only and only not in f"{getattr(case, 'op', name)} " + " ".join(f"{k}={v}" for k, v in case.label.items()):
                continue
            row = bench.run(case, device, ceilings[getattr(case, "ceiling", next(iter(ceilings)))])
            rows.append(row)
            say(str(row))
    except BaseException:  # Ctrl-C too: what took minutes to measure is not lost
        if rows and not only and (out is not None or as_json):
            _hand_over(harness.result(name, device, rows, ceilings), device, out, as_json, is_part=True)
        raise
    if as_json or not only:
        _hand_over(harness.result(name, device, rows, ceilings), device, out, as_json)


def _measure(bench: Any, device: str, out: Path | None, as_json: bool, /, **options: Any) -> None:
    """A bench that is measured as a whole."""
    if out is not None and not as_json:
        make_folder("--out", out)
    say = partial(typer.echo, err=as_json)
    say(harness.headline(device))
    result = bench.measure(**options)
    if text := bench.show(result):
        say(text)
    _hand_over(result, device, out, as_json)


def _hand_over(result: dict[str, Any], device: str, out: Path | None, as_json: bool, is_part: bool = False) -> None:
    """`is_part`: of a bench that was stopped; its file has another name."""
    made = {
        "bench": result["bench"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"kvx bench {result['bench']}" + ("" if result["bench"] in ONE_DEVICE else f" --device {device}"),
    }
    text = json.dumps(made | result | ({"is_part": True} if is_part else {}), indent=1)
    if as_json:
        typer.echo(text)
        return
    if out is None:
        typer.echo("not saved; --out FOLDER saves the result there")
        return
    path = out / f"{datetime.now(UTC):%Y-%m-%d}-{result['bench']}-{device}{'-part' if is_part else ''}.json"
    try:
        path.write_text(text + "\n")
    except OSError as error:  # what was measured is not lost with it
        typer.echo(text)
        raise BadArgument(f"kvx bench: {path} cannot be written: {error.strerror}. The result is on stdout.") from None
    typer.echo(f"saved {path}")


@app.command()
def write(device: Device = "cpu", out: Out = None, only: Only = "", as_json: Json = False) -> None:
    """Write K and V of a batch into scattered blocks."""
    _run("write", device, out, only, as_json)


@app.command()
def append(device: Device = "cpu", out: Out = None, only: Only = "", as_json: Json = False) -> None:
    """Fused QK norm, rotary embedding and append into scattered blocks."""
    _run("append", device, out, only, as_json)


@app.command()
def attention(device: Device = "cpu", out: Out = None, only: Only = "", as_json: Json = False) -> None:
    """Paged attention: decode, prefill and MLA over scattered blocks."""
    _run("attention", device, out, only, as_json)


@app.command()
def hybrid(device: Device = "cpu", out: Out = None, only: Only = "", as_json: Json = False) -> None:
    """The ops of DeepSeek-V4's hybrid cache: append, compress, index scores, top-k, sparse attention."""
    _run("hybrid", device, out, only, as_json)


@app.command()
def gather(device: Device = "cpu", out: Out = None, only: Only = "", as_json: Json = False) -> None:
    """Gather whole sequences from scattered blocks."""
    _run("gather", device, out, only, as_json)


@app.command()
def convert(device: Device = "cpu", out: Out = None, only: Only = "", as_json: Json = False) -> None:
    """Convert whole caches from one engine's layout to another's."""
    _run("convert", device, out, only, as_json)


@app.command()
def digest(device: Device = "cpu", out: Out = None, only: Only = "", as_json: Json = False) -> None:
    """Compute the content digest of whole caches."""
    _run("digest", device, out, only, as_json)


@app.command()
def amax(device: Device = "cpu", out: Out = None, only: Only = "", as_json: Json = False) -> None:
    """Compute the largest magnitude (amax) of a batch, per tensor and per head."""
    _run("amax", device, out, only, as_json)


@app.command()
def call(out: Out = None, as_json: Json = False) -> None:
    """Overhead of one Python call over the kernel itself."""
    _measure(call_bench, "cpu", out, as_json)


@app.command()
def cache(device: Device = "cpu", out: Out = None, as_json: Json = False) -> None:
    """CPU time of block allocation and prefix lookup, beside vLLM's KVCacheManager where vLLM is installed."""
    check_device(device)
    _measure(cache_bench, device, out, as_json, device=device)


@app.command()
def step(out: Out = None, as_json: Json = False) -> None:
    """A decode step of an 8B model on a GPU, beside the time its memory traffic takes at peak bandwidth."""
    reason = backends.reason_missing("cuda")
    if reason is not None:
        raise typer.BadParameter(reason, param_hint="kvx bench step")
    _measure(step_bench, "cuda", out, as_json)


@app.command()
def tiers(
    device: Device = "cpu",
    folder: Annotated[Path | None, typer.Option(help="Folder of the disk tier. Default: a temporary one.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Offload blocks to tiers and load them back, with and without conversion."""
    check_device(device)
    check_folder("--folder", folder)
    _measure(tiers_bench, device, out, as_json, device=device, folder=folder, say=partial(typer.echo, err=as_json))


@app.command()
def sglang(
    folder: Annotated[Path | None, typer.Option(help="on the disk that is measured; default: a temporary one")] = None,
    repeats: Annotated[int, typer.Option(help="runs of each; the median counts")] = 7,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Pages of SGLang's host pools to a disk and back, beside SGLang's own file backend. Needs SGLang."""
    check_folder("--folder", folder)
    check_positive("--repeats", repeats)
    _measure(sglang_bench, "cpu", out, as_json, folder=folder, repeats=repeats, say=partial(typer.echo, err=as_json))


@app.command()
def vllm(
    folder: Annotated[Path | None, typer.Option(help="on the disk that is measured; default: a temporary one")] = None,
    repeats: Annotated[int, typer.Option(help="runs of each; the median counts")] = 7,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Chunks of vLLM's host memory to a disk and back, beside vLLM's own fs tier. Needs vLLM."""
    check_folder("--folder", folder)
    check_positive("--repeats", repeats)
    _measure(vllm_bench, "cpu", out, as_json, folder=folder, repeats=repeats, say=partial(typer.echo, err=as_json))


@app.command()
def lmcache(
    folder: Annotated[Path | None, typer.Option(help="on the disk that is measured; default: a temporary one")] = None,
    repeats: Annotated[int, typer.Option(help="runs of each; the median counts")] = 7,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """LMCache's chunks to a disk and back, beside LMCache's own local disk backend. Needs LMCache."""
    check_folder("--folder", folder)
    check_positive("--repeats", repeats)
    _measure(lmcache_bench, "cpu", out, as_json, folder=folder, repeats=repeats, say=partial(typer.echo, err=as_json))


@app.command()
def generate(
    device: Device = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Type of weights and activations: f32, bf16, f16; auto: f32 on a CPU, else bf16.")
    ] = "auto",
    repeats: Annotated[int, typer.Option(help="Number of runs of each case; the median is reported.")] = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Generate eight texts in one batch, beside transformers' generate on the same weights."""
    check_device(device)
    check_positive("--repeats", repeats)
    cases = {"questions after one system prompt": (QUESTIONS, SYSTEM), "questions alone": (QUESTIONS, "")}
    options = {"cases": cases, "dtype": dtype_of(dtype, device), "device": device, "repeats": repeats}
    _measure(generate_bench, device, out, as_json, **options)


@app.command()
def accuracy(out: Out = None, as_json: Json = False) -> None:
    """How much a KV format changes a real model's predictions: perplexity, agreement and KL divergence."""
    _measure(accuracy_bench, "cpu", out, as_json, say=partial(typer.echo, err=as_json))


@app.command()
def wires(
    blocks: Annotated[int, typer.Option(help="Number of 1 MiB blocks to move; a multiple of 8.")] = 128,
    repeats: Annotated[int, typer.Option(help="Number of runs of each case; the median is reported.")] = 7,
    folder: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure. Default: the system's temporary folder.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Send blocks over NIXL and Mooncake and to disk, with and without conversion."""
    check_folder("--folder", folder)
    options = {"num_blocks": blocks, "repeats": repeats, "folder": folder, "say": partial(typer.echo, err=as_json)}
    _measure(wires_bench, "cpu", out, as_json, **options)
