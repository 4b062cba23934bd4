"""kvx prefill: the half of a generation that reads the prompt. Its K and V go to a folder, or over a wire to whoever asks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvx.cli.convert import layout_of
from kvx.cli.generate import dtype_of
from kvx.cli.held import check_held, hold
from kvx.cli.options import check_new_folder, check_positive, refuse_ignored
from kvx.errors import BadArgument, Incompatible, InternalError, KvxError
from kvx.handover import save
from kvx.runner import Engine, small_model
from kvx.runner.config import ModelConfig
from kvx.runner.handover import export_sequence
from kvx.runner.identity import identity
from kvx.runner.model import DTYPES, kv_format_of
from kvx.runner.open import open_model
from kvx.spec import to_json
from kvx.wires.choose import check_wire, offers_at
from kvx.wires.nixl.offer import LEAST_PIECE_BYTES
from kvx.wires.offer import OfferRequest, Offers
from kvx.wires.secret import HOME, read_or_make_secret
from kvx.wires.wire import WireError

IDLE_S = 0.002  # between two looks for questions
BUSY_S = 0.0001  # while somebody pulls: looking is what moves the bytes on links that need both sides

Model = Annotated[Path | None, typer.Option(help="Folder with safetensors, or a .gguf file. Default: SmolLM2-135M-Instruct.")]
Name = Annotated[str, typer.Option(help=(
    "Name of the model, which must be the same for prefill and decode. Default: geometry and a digest of the weights. If you set "
    "a name, make sure that both sides have the same weights."))]  # fmt: skip
Raw = Annotated[bool, typer.Option("--raw", help="Use the prompt as it is: no chat template, no --system.")]
System = Annotated[str, typer.Option(help="System message before the prompt.")]
KvFormat = Annotated[str, typer.Option(help="Format of this side's cache: auto (the model's type), f32, bf16, f16, int8, fp8.")]
Dtype = Annotated[str, typer.Option(help="Type of weights and activations: f32, bf16, f16; auto: f32 on a CPU, else bf16.")]
Device = Annotated[str, typer.Option(help="Device: cpu or cuda.")]
Layout = Annotated[
    str, typer.Option(help="Layout of this side's blocks: a name from `kvx layouts`, or a layout string. Default: KVX's own.")
]
Tp = Annotated[int, typer.Option(help="Tensor parallel size: number of ranks that this side's blocks are sharded over, by heads.")]
BlockSize = Annotated[int, typer.Option(help="Tokens per block on this side.")]
Blocks = Annotated[int, typer.Option(help="Number of blocks in this side's cache.")]
WireName = Annotated[str, typer.Option(help="Library that moves the bytes: nixl or mooncake.")]
SecretFile = Annotated[Path, typer.Option(help=(
    "File with the secret that prefill and decode share, readable only by its owner. `kvx prefill --listen` creates it if it is "
    "missing; copy it to the other machine."))]  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prefill(
    context: typer.Context,
    listen: Annotated[str, typer.Option(help="Serve `kvx decode --from HOST:PORT` on this HOST:PORT only, until Ctrl-C. With "
                                             "--wire mooncake: the HOST:PORT of its master.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the K and V of --prompt to this new folder, and exit.")] = None,
    prompt: Annotated[str, typer.Option(help="With --out: the prompt.")] = "",
    model: Model = None,
    name: Name = "",
    system: System = "",
    raw: Raw = False,
    kv_format: KvFormat = "auto",
    dtype: Dtype = "auto",
    device: Device = DEVICE,
    block_size: BlockSize = 16,
    layout: Layout = "",
    tp: Tp = 1,
    blocks: Blocks = 512,
    wire: WireName = "nixl",
    secret_file: SecretFile = HOME,
    lease_s: Annotated[float, typer.Option(help="With --listen: seconds that a client has to fetch K and V until they are "
                                                "freed.")] = 30.0,
    offer_gb: Annotated[float, typer.Option(show_default=False, help="With --listen: maximum GB of K and V waiting to be fetched; "
                                            "requests beyond it are refused. Default: 4 over NIXL, 0.5 over Mooncake.")] = 0.0,
    requests: Annotated[int, typer.Option(help="With --listen: exit after this many requests; 0: never.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:  # fmt: skip
    """Prefill prompts and hand over their K and V: to a folder, or to `kvx decode` in another process or on another machine.

    With --listen both sides prove that they have the same --secret-file.
    docs/wires.md says what this protects, and what it does not.
    """
    if bool(listen) == bool(out):
        raise typer.BadParameter("give one of --listen HOST:PORT and --out FOLDER", param_hint="--listen / --out")
    if out is not None:
        if not prompt:
            raise typer.BadParameter("--out needs a prompt", param_hint="--prompt")
        refuse_ignored(context, "it applies only to --listen: a folder holds neutral blocks of one rank", "layout", "tp")
        refuse_ignored(context, "it applies only to --listen", "wire", "secret_file", "lease_s", "offer_gb", "requests")
        check_new_folder("--out", out)
    else:
        why = "it applies only to --out: with --listen the prompts come from `kvx decode`"
        refuse_ignored(context, why, "prompt", "system", "raw")
        check_positive("--lease-s", lease_s)
        if offer_gb < 0 or not math.isfinite(offer_gb):
            raise typer.BadParameter(f"{offer_gb:g}; it must be more than 0, or 0 for the default", param_hint="--offer-gb")
        if requests < 0:
            raise typer.BadParameter(f"{requests}; it must be 0 or more", param_hint="--requests")
        check_wire(wire, listen, is_listening=True)
    model, dtype, layout = model or small_model(), dtype_of(dtype, device), layout_of(layout)
    least = LEAST_PIECE_BYTES if listen and wire == "nixl" else 0
    config = check_side(model, dtype, kv_format, layout=layout, tp=tp, block_size=block_size, least_piece_bytes=least)
    secret, is_new = read_or_make_secret(secret_file) if listen else (None, False)
    if is_new:
        typer.echo(f"made the secret {secret_file.expanduser()}; a decode on another machine needs a copy of it", err=True)
    engine = load_engine(model, dtype=dtype, kv_format=kv_format, device=device, num_blocks=blocks, block_size=block_size)
    name = name or name_with_weights(model, config)
    if out is not None:
        begin = time.perf_counter()
        handover = export_sequence(engine, encode(engine, prompt, system, raw), model=name)
        save(out, handover)
        say(as_json, {"path": str(out), "tokens": handover.num_tokens, "bytes": handover.num_bytes,
                      "seconds": round(time.perf_counter() - begin, 3)},
            f"{handover.num_tokens} tokens of {name}, {handover.num_bytes / 1e6:.1f} MB: {out}")  # fmt: skip
        return
    assert secret is not None
    server = Server(engine, name, layout=layout, tp_size=tp)
    with offers_at(wire, listen, secret, lease_s=lease_s, max_bytes=int(offer_gb * 1e9)) as offers:
        say(as_json, {"listening": listen, "model": name, "secret_file": str(secret_file.expanduser())},
            f"serving {name} on {listen} over {wire}; clients need the secret in {secret_file.expanduser()}")  # fmt: skip
        while not requests or server.num_done < requests or offers.num_offers:
            for fields, text in server.look(offers):
                say(as_json, fields, text)


def check_side(
    model: Path, dtype: str, kv_format: str, *, layout: str, tp: int, block_size: int, least_piece_bytes: int = 0
) -> ModelConfig:
    """What is wrong with how this side holds blocks is said before its weights are read, which takes long."""
    config = open_model(model).config
    if dtype in DTYPES:  # if not, Engine.load() says so
        check_held(
            config, layout=layout, tp_size=tp, block_size=block_size, format=kv_format_of(kv_format, dtype),
            least_piece_bytes=least_piece_bytes,
        )  # fmt: skip
    return config


def name_with_weights(model: Path, config: ModelConfig) -> str:
    """Other weights of the same shape have another. Not the type that computes: a prefill in bf16 may serve a decode in f32."""
    return identity(open_model(model).path, config, "").rstrip("-")


def load_engine(model: Path, **options: Any) -> Engine:
    typer.echo(f"loading {model.name}", err=True)
    return Engine.load(model, **options)


class Server:
    """Answers questions one after the other. Whatever is wrong with one, the next is answered."""

    def __init__(self, engine: Engine, name: str, *, layout: str, tp_size: int) -> None:
        self.engine, self.name, self.layout, self.tp_size = engine, name, layout, tp_size
        self.num_done = 0

    def look(self, offers: Offers) -> Iterator[tuple[dict[str, Any], str]]:
        """Answer who asked since, and wait a moment. What to say about each."""
        for request in offers.requests():
            yield self.answer(offers, request)
        time.sleep(BUSY_S if offers.num_offers else IDLE_S)

    def answer(self, offers: Offers, request: OfferRequest) -> tuple[dict[str, Any], str]:
        """What to say about it."""
        if not request.is_wanted:
            return {"gone": True}, "the client disconnected: nothing was computed"
        if request.about.get("ask") == "status":
            with suppress(WireError):  # who asked is gone
                offers.answer(request, self.status(offers))
            return {"status": True}, "answered a status request"
        self.num_done += 1
        begin = time.perf_counter()
        try:
            held = hold(self._handover(request.about), layout=self.layout, tp_size=self.tp_size)
            about = {
                "handover": held.handover.to_json(),
                "specs": [[to_json(s) for s in part] for part in held.specs],
                "prefill_s": time.perf_counter() - begin,
            }
            offers.offer(request, about, [t for part in held.buffers for t in part])
        except (KvxError, RuntimeError, MemoryError) as error:  # a device that is full, too
            with suppress(WireError):  # who asked is gone, too
                offers.refuse(request, error if isinstance(error, KvxError) else InternalError(f"prefill: {error}"))
            return {"refused": str(error)}, f"refused: {error}"
        n, seconds = held.handover.num_tokens, time.perf_counter() - begin
        fields = {"tokens": n, "bytes": held.num_bytes, "seconds": round(seconds, 3)}
        return fields, f"{n} tokens, {held.num_bytes / 1e6:.1f} MB offered after {seconds:.2f} s"

    def status(self, offers: Offers) -> dict[str, Any]:
        """What is in use: nothing, when all is done."""
        used = sum(a.num_used for a in self.engine.cache.allocators)
        return {"used_blocks": used, "offers": offers.num_offers, "done": self.num_done}

    def _handover(self, about: dict[str, Any]) -> Any:
        if about.get("model") != self.name:
            raise Incompatible(
                f"prefill: this server's model is {self.name!r}; the request was for {str(about.get('model'))[:200]!r}. "
                "Their weights differ, or only one side was given a --name. Nothing was computed."
            )
        return export_sequence(self.engine, _tokens(about.get("tokens")), model=self.name)


def _tokens(tokens: object) -> list[int]:
    """As they came: what only looks like ids (1.0, true, [1]) is refused, since int() would make another prompt of it."""
    if not isinstance(tokens, list):
        raise BadArgument(f"prefill: tokens is {_shown(tokens)}; it must be a list of token ids.")
    for n, token in enumerate(tokens):
        if type(token) is not int:
            raise BadArgument(f"prefill: tokens[{n}] is {_shown(token)}; token ids are whole numbers.")
    return tokens


def _shown(value: object) -> str:
    text = json.dumps(value)
    return f"{text if len(text) < 50 else text[:50] + '...'} ({type(value).__name__})"


def encode(engine: Engine, prompt: str, system: str, raw: bool) -> list[int]:
    if engine.tokenizer is None:
        raise typer.BadParameter("the model's folder has no tokenizer", param_hint="--model")
    return engine.tokenizer.encode(prompt) if raw else engine.tokenizer.chat(prompt, system)


def say(as_json: bool, fields: dict[str, Any], text: str) -> None:
    print(json.dumps(fields) if as_json else text, flush=True)
