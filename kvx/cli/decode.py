"""kvx decode: the half of a generation that writes the answer. The prompt's K and V come from a file, or from `kvx prefill`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvx.cli.convert import layout_of
from kvx.cli.generate import dtype_of
from kvx.cli.held import gather, hold, plans
from kvx.cli.options import check_positive, refuse_ignored
from kvx.cli.prefill import (
    DEVICE,
    Blocks,
    BlockSize,
    Device,
    Dtype,
    KvFormat,
    Layout,
    Model,
    Name,
    Raw,
    SecretFile,
    System,
    Tp,
    WireName,
    check_side,
    encode,
    load_engine,
    name_with_weights,
)
from kvx.errors import BadArgument, KvxError
from kvx.handover import Handover, from_manifest, load
from kvx.runner import Params, small_model
from kvx.runner.handover import resume
from kvx.spec import from_json
from kvx.wires.address import host_and_port
from kvx.wires.choose import check_wire, puller_from
from kvx.wires.secret import HOME, Secret, read_secret
from kvx.wires.wire import Deadline, WireError


@dataclass(frozen=True)
class Moved:
    """What came, and how long it took."""

    bytes: int
    pull_ms: float
    prefill_ms: float = 0.0  # of the other side
    wait_ms: float = 0.0  # from the question to the answer

    @property
    def gbps(self) -> float:
        return self.bytes / self.pull_ms / 1e6 if self.pull_ms else 0.0


def decode(
    context: typer.Context,
    from_: Annotated[
        str, typer.Option("--from", help="HOST:PORT of a `kvx prefill --listen`, or the folder that `kvx prefill --out` wrote.")
    ],
    prompt: Annotated[str, typer.Option(help="The prompt. Default with a folder: the prompt that it was made from.")] = "",
    model: Model = None,
    name: Name = "",
    system: System = "",
    raw: Raw = False,
    kv_format: KvFormat = "auto",
    dtype: Dtype = "auto",
    device: Device = DEVICE,
    block_size: BlockSize = 32,
    layout: Layout = "",
    tp: Tp = 1,
    blocks: Blocks = 256,
    wire: WireName = "nixl",
    secret_file: SecretFile = HOME,
    timeout_s: Annotated[float, typer.Option(help="Maximum seconds from the request until all K and V have arrived.")] = 30.0,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens in the answer.")] = 48,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Also prefill the prompt here, and compare the two answers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode from K and V that another process has prefilled."""
    params = Params(max_tokens=max_tokens, ignore_eos=ignore_eos)
    is_folder = Path(from_).is_dir()
    secret: Secret | None = None
    if is_folder:
        refuse_ignored(context, "it applies only to a prefill server at HOST:PORT", "wire", "timeout_s", "secret_file")
        if not prompt:
            refuse_ignored(context, "it applies only to a --prompt", "system", "raw")
    else:
        check_peer(from_, prompt, wire, timeout_s)
        secret = read_secret(secret_file)
    model, dtype, layout = model or small_model(), dtype_of(dtype, device), layout_of(layout)
    config = check_side(model, dtype, kv_format, layout=layout, tp=tp, block_size=block_size)
    name = name or name_with_weights(model, config)
    read = read_folder(from_, name) if is_folder else None
    engine = load_engine(model, dtype=dtype, kv_format=kv_format, device=device, num_blocks=blocks, block_size=block_size)
    ids = encode(engine, prompt, system, raw) if prompt else None
    if read is not None:
        handover, moved = read
    else:
        assert ids is not None
        assert secret is not None
        typer.echo(f"requesting K and V from the prefill server at {from_}, waiting {timeout_s:g} s at most", err=True)
        handover, moved = fetch(wire, from_, secret, ids, name, timeout_s)
    # As this side holds it; its engine computes in one process, so the ranks are gathered again, and checked again.
    mine = handover.convert(block_size=block_size, format=engine.cache.groups[0].spec.of_kv.format)
    handover = gather(hold(mine, layout=layout, tp_size=tp))
    answer = resume(engine, handover, ids, params, model=name)[0]
    alone: Sequence[int] | None = None
    if check:
        engine.reset()
        alone = engine.generate([ids or handover.tokens.tolist()], params)[0][0].tokens
    report = _report(answer.tokens, answer.text, answer.num_cached, handover, moved, alone)
    typer.echo(json.dumps(report, indent=2) if as_json else _text(report))


def check_peer(address: str, prompt: str, wire: str, timeout_s: float) -> None:
    """Raise where a prefill at this address cannot be asked."""
    try:
        host_and_port(address)
    except BadArgument:
        what = "is a file" if Path(address).exists() else "does not exist"
        raise typer.BadParameter(
            f"{address} {what}, and is not HOST:PORT, like 127.0.0.1:5600. Give a folder of `kvx prefill --out`, or the address "
            "of a `kvx prefill --listen`",
            param_hint="--from",
        ) from None
    if not prompt:
        raise typer.BadParameter(f"the prefill server at {address} needs a prompt", param_hint="--prompt")
    check_positive("--timeout-s", timeout_s)
    check_wire(wire, address, is_listening=False)


def read_folder(folder: str, model: str) -> tuple[Handover, Moved]:
    begin = time.perf_counter()
    try:
        handover = load(folder, model=model)
    except KvxError as error:
        if folder in str(error):
            raise
        raise type(error)(f"{folder}: {error} Name another folder, or make it again: `kvx prefill --out`.") from None
    return handover, Moved(handover.num_bytes, (time.perf_counter() - begin) * 1e3)


def fetch(wire: str, address: str, secret: Secret, tokens: Sequence[int], model: str, timeout_s: float) -> tuple[Handover, Moved]:
    """Ask a prefill for these tokens, and pull what it offers: whole and checked, or an error within `timeout_s`."""
    deadline, begin = Deadline(timeout_s), time.perf_counter()
    with puller_from(wire, address, secret, deadline) as puller:
        offer = puller.ask({"model": model, "tokens": list(tokens)}, deadline)
        asked = time.perf_counter()
        try:
            handover = from_manifest(offer.about["handover"])
            specs = [[from_json(text) for text in part] for part in offer.about["specs"]]
            prefill_ms = float(offer.about["prefill_s"]) * 1e3
            handover.require(model=model)
            if handover.tokens.tolist() != list(tokens):
                raise WireError("the offer is of other tokens than were asked for.")
            parts = [(p.buffers, way) for p, way in zip(handover.parts, plans(handover, specs), strict=True)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, KvxError):
                raise
            raise WireError(f"the offer is not understood: {type(error).__name__} {error}.") from error
        start = time.perf_counter()
        size = puller.pull(offer, parts, deadline)
        moved = Moved(size, (time.perf_counter() - start) * 1e3, prefill_ms, (asked - begin) * 1e3)
        puller.done(offer, deadline)
        handover.check()
    return handover, moved


def _report(
    tokens: Sequence[int], text: str, num_cached: int, handover: Handover, moved: Moved, alone: Sequence[int] | None
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "text": text,
        "tokens": list(tokens),
        "handed_over": num_cached,
        "prompt_tokens": handover.num_tokens,
        "moved": {**{k: round(v, 3) for k, v in asdict(moved).items()}, "GB/s": round(moved.gbps, 3)},
    }
    if alone is not None:
        same = next((n for n, (a, b) in enumerate(zip(tokens, alone, strict=False)) if a != b), min(len(tokens), len(alone)))
        report |= {"is_same": list(tokens) == list(alone), "same_tokens": same, "alone": list(alone)}
    return report


def _text(report: dict[str, Any]) -> str:
    m = report["moved"]
    lines = [
        report["text"],
        "",
        f"{report['handed_over']} of {report['prompt_tokens']} prompt tokens were not computed here: "
        f"{m['bytes'] / 1e6:.2f} MB of K and V arrived in {m['pull_ms']:.1f} ms, {m['GB/s']:.2f} GB/s.",
    ]
    if "is_same" in report:
        n, of = report["same_tokens"], len(report["alone"])
        lines.append(f"All {of} tokens equal those of a local prefill." if report["is_same"] else
                     f"The first {n} of {of} tokens equal those of a local prefill; then they differ.")  # fmt: skip
    return "\n".join(lines)
