"""kvx inspect: what this build can do, or what a spec or a tensor file holds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import kvx
from kvx.errors import BadArgument, KvxError
from kvx.files import is_cache_file
from kvx.layout.axes import Layout
from kvx.layout.engines import ENGINES
from kvx.layout.place import buffer_sizes
from kvx.layout.planes import cache_shapes
from kvx.ops import backend as backends
from kvx.ops import library, native
from kvx.ops.attention.kernels import (
    HEAD_SIZES,
    HOPPER,
    LATENT_DIMS,
    LATENT_RECORD,
    MOST_F32_ROWS,
    QUERIES,
    Listed,
    attention_kernel,
    listed_kernels,
)
from kvx.ops.registry import OPS
from kvx.ops.support import BACKENDS
from kvx.spec import ALL_FORMATS

TAKES = "a spec (.json), a cache file, or tensors (.pt, .npy, .safetensors)"
# What changes behaviour without an argument: for building and debugging only.
ENVIRONMENT = {
    "KVX_CUDA": "build: AUTO, ON (fail without nvcc) or OFF",
    "KVX_REQUIRE_CUDA": "build: 1 = fail without nvcc",
    "KVX_CUDA_ARCHS": "build: architectures, e.g. 90a or 80;90a;120+PTX",
    "KVX_STATIC": "build: ON = also libkvx.a",
    "CUDA_HOME, CUDA_PATH": "build: where the CUDA toolkit is",
    "KVX_SIMD": "debug: plain, avx2, avx512, avx512vnni or avx512bf16 disables wider instruction sets, plain those for SHA-256 too",
    "KVX_GPU": "debug: portable = attention on a Hopper GPU runs the kernels that other GPUs run",
    "OMP_NUM_THREADS": "run: maximum number of CPU threads per call",
}


def build_facts() -> dict[str, Any]:
    """The build, as data: what `kvx inspect --json` prints."""
    info = library.build_info()
    return {
        "kvx": kvx.__version__,
        "abi": info.abi if info else None,
        "library": library.library_path() if info else None,
        "simd": info.simd if info else None,
        "threads": info.max_threads if info else None,
        "cuda_archs": info.cuda_archs if info and info.has_cuda else None,
        "cuda_devices": info.cuda_devices if info else 0,
        "torch": torch.__version__,
        "dlpack_exchange": native.IS_EXCHANGED,
        "backends": {name: backends.reason_missing(name) or "yes" for name in BACKENDS},
        "ops": {op: {name: bool(backends.supports(op, None, name)) for name in BACKENDS} for op in OPS},
    }


def spec_facts(spec: kvx.CacheSpec) -> dict[str, Any]:
    names = (
        "num_layers",
        "num_blocks",
        "block_size",
        "num_kv_heads",
        "head_dim",
        "layout",
        "format",
        "layer_start",
        "head_start",
        "model",
        "block_bytes",
    )
    reason = Layout.parse(spec.layout).unsupported_by_ops
    layer = f"convert only: the layout {reason}" if reason else ""
    layer = layer or next((f"convert only: {p.format}" for p in spec.planes if p.format.element.is_moved_only), "")
    return {
        **{n: getattr(spec, n) for n in names},
        "v_head_dim": spec.planes[-1].head_dim,
        "v_format": spec.planes[-1].format.name,
        "buffers": _buffers(spec),
        "tensors of a layer": layer or [list(s) for s in cache_shapes(spec)],
        "scales": {p.name: list(s) if (s := spec.scale_shape(i)) is not None else None for i, p in enumerate(spec.planes)},
        "bytes_per_token": spec.token_bytes * spec.num_layers,
        "bytes_per_token_and_layer": spec.token_bytes,
        "bytes": spec.cache_bytes,
        "digest": kvx.spec.digest(spec),
    }


def _buffers(spec: kvx.CacheSpec) -> list[str]:
    """A line a size. Where K's and V's differ they come by turns, as often as there are layers, or blocks."""
    by_size: dict[int, int] = {}
    for count, size in buffer_sizes(spec):
        by_size[size] = by_size.get(size, 0) + count
    return [f"{count:,} x {size:,} bytes" for size, count in by_size.items()]


def tensor_facts(path: Path) -> list[dict[str, Any]]:
    """Tensors of a .pt, .npy or .safetensors file: shape, type, and what stands out in the values."""
    try:
        if not path.stat().st_size:
            raise BadArgument(f"inspect: {path} is empty. It takes {TAKES}.")
        return [_describe(name, t) for name, t in _tensors(path).items()]
    except BadArgument:
        raise
    except Exception as error:  # each of three libraries has errors of its own
        raise BadArgument(f"inspect: {path} cannot be read: {_reason(path, error)}. It takes {TAKES}.") from None


def _reason(path: Path, error: Exception) -> str:
    """In a sentence. torch's own advice for a pickle it refuses, to run whatever is in it, is not passed on."""
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return "it is no file of tensors alone, is cut short, or would run code when it is opened, and was not opened"
    first = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{first[:200]}" if path.suffix != ".pt" else f"{first[:200]}. It is cut short or damaged"


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".npy":
        import numpy

        return {path.stem: torch.from_numpy(numpy.load(path, allow_pickle=False))}
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise BadArgument("inspect: reading .safetensors needs the safetensors package: pip install safetensors.") from None
        return dict(load_file(path))
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    items = loaded.items() if isinstance(loaded, dict) else enumerate(loaded if isinstance(loaded, (list, tuple)) else [loaded])
    return {str(name): t for name, t in items if isinstance(t, torch.Tensor)}


def _describe(name: str, t: torch.Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": name,
        "shape": list(t.shape),
        "stride": list(t.stride()),
        "dtype": str(t.dtype).removeprefix("torch."),
    }
    facts["bytes"] = t.numel() * t.element_size()
    if t.is_floating_point() and t.numel():
        x = t.float()
        finite = x[torch.isfinite(x)]
        facts |= {
            "nan": int(x.isnan().sum()),
            "inf": int(x.isinf().sum()),
            "amax": float(finite.abs().max()) if finite.numel() else None,
        }
        facts["zero_share"] = round(float((x == 0).float().mean()), 4)
    return facts


def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(help=f"What to describe: {TAKES}. Default: this build."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    env: Annotated[bool, typer.Option("--env", help="List the environment variables KVX reads.")] = False,
    support: Annotated[
        bool, typer.Option("--support", help="List which backends run each op, which specs it takes, and why others are refused.")
    ] = False,
    formats: Annotated[bool, typer.Option("--formats", help="List every format with its exact arithmetic.")] = False,
) -> None:
    """Show this build, or describe a cache spec or a tensor file."""
    listed = next((name for name, is_asked in (("--env", env), ("--support", support), ("--formats", formats)) if is_asked), "")
    if listed and path is not None:
        raise BadArgument(
            f"inspect: {listed} lists what this build has and takes no path; {path} was given. Leave one of them out."
        )
    if env:
        return _show("environment", ("variable", "meaning"), ENVIRONMENT.items(), dict(ENVIRONMENT), as_json)
    if support:
        return _show_support(as_json)
    if formats:
        rows = [
            (
                f.name,
                f"{f.element} x {f.granularity.name.lower()}",
                str(f.scale or "-"),
                f.scale_place,
                f.element.arithmetic,
            )
            for f in ALL_FORMATS.values()
        ]
        return _show(
            "formats",
            ("format", "element x scale per", "scale type", "scales stored", "how an element x is written"),
            rows,
            [list(r) for r in rows],
            as_json,
        )
    if path is None:
        return _show_build(build_facts(), as_json)
    if not path.exists():
        raise BadArgument(f"inspect: {path} does not exist.")
    if path.is_dir():
        raise BadArgument(f"inspect: {path} is a folder. Name a file: {TAKES}.")
    if not path.is_file():
        raise BadArgument(f"inspect: {path} is no regular file. It takes {TAKES}.")
    if path.suffix == ".json":
        facts = spec_facts(kvx.from_json(_text(path)))
        return _show(str(path), ("field", "value"), [(k, str(v)) for k, v in facts.items()], facts, as_json)
    if is_cache_file(path):  # which says more than its tensors do, and why it cannot be read
        file = kvx.load(path, verify=False)
        facts = {**spec_facts(file.spec.of_kv), "content digest": file.content or "not kept: it has no seal"}
        return _show(str(path), ("field", "value"), [(k, str(v)) for k, v in facts.items()], facts, as_json)
    rows_ = tensor_facts(path)
    if not rows_:
        raise BadArgument(f"inspect: there are no tensors in {path}. It takes {TAKES}.")
    columns = ("name", "shape", "stride", "dtype", "bytes", "nan", "inf", "amax", "zero_share")
    return _show(str(path), columns, [tuple(str(r.get(c, "")) for c in columns) for r in rows_], rows_, as_json)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > 1 << 22:
            raise BadArgument(f"inspect: {path} has {path.stat().st_size:,} bytes; a spec is JSON of a few hundred.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"inspect: {path} cannot be read: {error}. A spec is JSON, as kvx.to_json() writes it.") from None


def _show(title: str, columns: Any, rows: Any, data: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(data, indent=1))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(x) for x in row))
    Console().print(table)


def _show_support(as_json: bool) -> None:
    """Ops by backend; then, for those that read a spec, the formats and engines' layouts they do not take, with the reason."""
    rows = [(op, *("yes" if backends.supports(op, None, b) else "no" for b in BACKENDS), t.specs) for op, t in OPS.items()]
    refused = [(what, op, str(answer)) for what, op, answer in _refusals()]
    if as_json:
        missing = {b: backends.reason_missing(b) for b in BACKENDS}
        data = {"ops": [dict(zip(("op", *BACKENDS, "specs"), r, strict=True)) for r in rows], "missing": missing}
        data["attention on cuda by head size"] = [
            {**x._asdict(), "decode": str(x.decode), "prefill": str(x.prefill)} for x in listed_kernels()
        ]
        data["attention on cuda"] = [dict(zip(("format", "decode", "prefill"), r, strict=True)) for r in _kernels()]
        data["attention_mla on cuda"] = [dict(zip(("latent", "hopper", "other"), r, strict=True)) for r in _latent_kernels()]
        typer.echo(
            json.dumps({**data, "refused": [dict(zip(("what", "op", "reason"), r, strict=True)) for r in refused]}, indent=1)
        )
        return
    _show("ops", ("op", *BACKENDS, "specs"), rows, None, False)
    title = "attention on cuda, head_dim 128, Hopper; % of read: of the bandwidth of reading the same bytes, on an H200; "
    title += "% of 790 TFLOP/s: of what its tensor cores reach, with prompts of 4,096 tokens"
    _show(title, ("format", "decode", "prefill"), _kernels(), None, False)
    sizes = " ".join(f"{k}" if k == v else f"{k}/{v}" for k, v in HEAD_SIZES)
    title = f"attention on cuda, Hopper: which head_dim of {sizes} have a fast kernel, by the dtype of queries. Other prompts, and "
    title += "all prompts on other GPUs, run on the portable kernel if rows have up to 256 elements that fit 16 bits. Everything "
    title += f"else runs on the general kernel, also queries in f32 with more than {MOST_F32_ROWS} query rows per KV head."
    columns = [f"{kind}, {q}" for kind in ("decode", "prefill") for q in QUERIES]
    _show(title, ("KV format", *columns), _by_head_size(), None, False)
    title = f"attention_mla on cuda: a latent of {LATENT_DIMS[0]} and a rotary part of {LATENT_DIMS[1]} elements, queries in bf16"
    _show(title, ("latent", "Hopper", "other GPUs, here sm_80"), _latent_kernels(), None, False)
    _show("not supported on any backend", ("what", "ops", "why, and what to do"), _joined(refused), None, False)
    for name in BACKENDS:
        if (why := backends.reason_missing(name)) is not None:
            typer.echo(f"{name}: {why}.")


def _kernels() -> list[tuple[str, str, str]]:
    """A format's kernels, for few query rows and for many."""
    specs = [kvx.CacheSpec(4, 16, 2, 128, format=f.name) for f in kvx.FORMATS.values() if not f.element.is_moved_only]
    return [(s.format, str(attention_kernel(s, "decode")), str(attention_kernel(s, "prefill"))) for s in specs]


def _latent_kernels() -> list[tuple[str, str, str]]:
    """A latent's format and its kernels: of each that has a fast one, and of one that has none."""
    dim, rotary = LATENT_DIMS
    specs = [
        kvx.CacheSpec(4, 64, 1, dim, v_head_dim=rotary, layout="block token (head kv dim)", format=f, v_format=v)
        for f, v in (("bf16", "bf16"), (LATENT_RECORD, "bf16"), ("f16", "f16"))
    ]

    def kernel(spec: kvx.CacheSpec, arch: int) -> str:
        return str(attention_kernel(spec, "mla", queries="bf16", arch=arch))

    return [(s.format, kernel(s, HOPPER), kernel(s, 80)) for s in specs]


def _by_head_size() -> list[tuple[str, ...]]:
    """In rows of which listed sizes a format has fast kernels, by the dtype of queries; formats that are alike side by side."""
    of: dict[str, dict[str, list[Listed]]] = {}
    for x in listed_kernels():
        of.setdefault(x.format, {}).setdefault(x.queries, []).append(x)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, by_queries in of.items():
        cells = tuple(_fast_sizes(by_queries[q], kind) for kind in ("decode", "prefill") for q in QUERIES)
        alike.setdefault(cells, []).append(name)
    return [(", ".join(names), *cells) for cells, names in alike.items()]


def _fast_sizes(listed: list[Listed], kind: str) -> str:
    sizes = {(x.head_dim, x.v_head_dim): getattr(x, kind).is_fast for x in listed}
    if len(set(sizes.values())) == 1:
        return "all" if all(sizes.values()) else "none"
    most = max(max(size) for size, is_fast in sizes.items() if is_fast)
    if any(not is_fast and max(size) <= most for size, is_fast in sizes.items()):
        return " ".join(f"{k}/{v}" for (k, v), is_fast in sizes.items() if is_fast)
    return f"up to {most}"


def _refusals() -> Iterator[tuple[str, str, kvx.Support]]:
    # One head, as attention_mla asks; rows that every format's groups divide.
    geometry: dict[str, Any] = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 1, "head_dim": 128}
    specs = {f"format {name}": kvx.CacheSpec(**geometry, format=name) for name in kvx.FORMATS}
    for name, row in ENGINES.items():
        with suppress(KvxError):  # a row of another geometry
            specs[f"layout of {name}"] = kvx.CacheSpec(**geometry, layout=row.layout, format="bf16")
    for what, spec in specs.items():
        for op in OPS:
            answer = backends.supports(op, spec, "torch")
            if not answer:
                yield what, op, answer


def _joined(refused: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """One row a thing and reason, its ops side by side."""
    by: dict[tuple[str, str], list[str]] = {}
    for what, op, why in refused:
        by.setdefault((what, why), []).append(op)
    return [(what, " ".join(ops), why) for (what, why), ops in by.items()]


def _show_build(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    plain = [(k, str(v)) for k, v in facts.items() if k not in ("backends", "ops")]
    _show(f"kvx {facts['kvx']}", ("build", ""), plain, None, False)
    rows = [(op, *("yes" if facts["ops"][op][b] else "no" for b in BACKENDS)) for op in OPS]
    _show("ops", ("op", *BACKENDS), rows, None, False)
    for name, why in facts["backends"].items():
        if why != "yes":
            typer.echo(f"{name}: {why}.")
