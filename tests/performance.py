"""docs/performance.md, the table of docs/formats.md and the chart of README.md, written from the files of bench/results/.

    make picture        writes them; tests/test_performance.py compares

A table has a row for each measured case. What all of its cases have in common is said once above it, and every cell has one fact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvx.cli.bench import ONE_DEVICE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE, FORMATS = ROOT / "docs" / "performance.md", ROOT / "docs" / "formats.md"

# What cases call their sizes -> what a reader does.
NAMES = {
    "src": "from", "dst": "to", "block": "tokens per block", "blocks": "blocks", "tp": "tensor parallel", "dim": "head_dim",
    "to": "destination", "length": "tokens per sequence", "batch": "sequences", "slots": "order of slots", "heads": "heads",
    "kind": "kind", "io": "input", "rows": "row format", "rotary": "rotary dim", "norm": "QK norm", "rope": "RoPE",
    "per": "amax per", "states": "model", "keys": "key format", "q": "queries", "page": "keys per page",
    "selected": "selected rows", "ratio": "tokens per entry", "tail": "compressor",
}  # fmt: skip
PEERS = {
    "torch": "torch", "gather": "torch: gathering the cache", "flash": "torch SDPA (flash), on contiguous KV",
    "cudnn": "torch SDPA (cuDNN), on contiguous KV", "sdpa": "torch SDPA, on contiguous KV", "flashinfer": "FlashInfer 0.7.2",
    "flashinfer 0.7.2.post1 append_paged_kv_cache, us": "FlashInfer 0.7.2",
}  # fmt: skip
VALUES = {"to": {"same": "same device", "host": "pinned host memory"}, "norm": {True: "yes", False: "no"}}


@dataclass(frozen=True)
class Case:
    """One measured case of a result file."""

    op: str
    sizes: dict[str, Any]
    us: float
    share: float | None = None
    ceiling: str = "copy"
    peers: dict[str, float] = field(default_factory=dict)  # microseconds


@dataclass(frozen=True)
class Result:
    """One result file, as tables need it."""

    path: Path
    command: str
    machine: str
    cases: list[Case]
    data: dict[str, Any] = field(default_factory=dict)

    def cases_with(self, size: str, is_there: bool) -> Result:
        """Of a file with cases of two kinds, those that have this size, or those that do not."""
        return replace(self, cases=[c for c in self.cases if (size in c.sizes) == is_there])

    @property
    def link(self) -> str:
        return f"[{self.path.name}](../bench/results/{self.path.name})"


def newest(name: str, beside: str = "") -> Path:
    """The latest file of that name; names begin with a date. `beside`: the latest with times of this peer."""
    found = sorted(p for p in RESULTS.iterdir() if re.fullmatch(rf"\d{{4}}-\d\d-\d\d-{re.escape(name)}", p.name))
    found = [p for p in found if beside in p.read_text()]
    assert found, f"bench/results has no DATE-{name}{f' beside {beside}' if beside else ''}"
    return found[-1]


def read(name: str, beside: str = "") -> Result:
    """A result that `kvx bench` saved as JSON."""
    path = newest(name, beside)
    data = json.loads(path.read_text())
    m = data["machine"]
    where = m["gpu"] or f"{m['cpu']}, {m['threads']} threads, {m['simd']}"
    bench, device = data["bench"], "cuda" if m["gpu"] else "cpu"
    command = f"kvx bench {bench}" + ("" if bench in ONE_DEVICE else f" --device {device}")
    cases = [_case(row) for row in data.get("rows", ()) if isinstance(row.get("case"), dict)]
    return Result(path, command, f"{where}, torch {m['torch']}, kvx {m['commit']}", cases, data)


def _case(row: dict[str, Any]) -> Case:
    others = {name: t["median_us"] if isinstance(t, dict) else float(t) for name, t in row["others"].items() if name in PEERS}
    if row["torch"] is not None:
        others = {"torch": row["torch"]["median_us"], **others}
    kind = row.get("ceiling", "copy")
    return Case(row["op"], row["case"], row["ours"]["median_us"], row[f"share_of_{kind}"], kind, others)


def read_text(name: str, command: str, after: str = "") -> Result:
    """A result kept as the lines that the command printed; those after a line `after`."""
    path = newest(name)
    text = path.read_text().partition(f"\n{after}\n")[2] if after else path.read_text()
    machine = next(line for line in text.splitlines() if " · torch " in line)
    where, torch, commit = machine.split(" · ")[:3]
    cases = [c for line in text.splitlines() if (c := _case_of_line(line)) is not None]
    return Result(path, command, f"{where}, {torch}, {commit}", cases)


def _case_of_line(line: str) -> Case | None:
    head, *parts = line.split("|")
    words = head.split()
    if len(words) < 2 or not all("=" in w for w in words[1:]) or not parts:
        return None
    times = [re.match(r" *(?:(\w[\w ]*?) )?([\d.]+) us", part) for part in parts]
    share = next((re.search(r"(\d+)% of (\w+)", p) for p in parts if " of " in p), None)
    assert times[0] is not None
    peers = {m[1]: float(m[2]) for m in times[1:] if m is not None and m[1]}
    sizes = dict(w.split("=", 1) for w in words[1:])
    return Case(words[0], sizes, float(times[0][2]), float(share[1]) / 100 if share else None, share[2] if share else "copy", peers)


# ---- text


def time_text(us: float) -> str:
    if us < 10:
        return f"{us:.2f} us"
    if us < 1e3:
        return f"{us:.1f} us" if us < 100 else f"{us:.0f} us"
    return f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def percent(share: float) -> str:
    return f"{share:.0%}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def value_text(name: str, value: Any) -> str:
    value = VALUES.get(name, {}).get(value, value)
    return (
        f"{value:,}"
        if isinstance(value, int) or (isinstance(value, str) and value.isdigit() and (value := int(value)))
        else str(value)
    )


def _flops(tera: float) -> str:
    return f"{tera:.0f}" if tera >= 10 else f"{tera:.2g}"


def cases_table(cases: Sequence[Case], with_share: bool = True, without: str = "") -> list[str]:
    """Sizes that differ are columns; those that do not are a sentence above."""
    names = list(dict.fromkeys(name for case in cases for name in case.sizes))
    fixed = [n for n in names if len({str(c.sizes.get(n)) for c in cases}) == 1 and n not in ("tflops", without)]
    moving = [n for n in names if n not in (*fixed, "tflops", without)]
    peers = [p for p in PEERS if any(p in c.peers for c in cases)]
    titles = list(dict.fromkeys(PEERS[p] for p in peers))
    has_flops = any("tflops" in c.sizes for c in cases)
    kinds = {c.ceiling for c in cases if c.share is not None}
    share = f"share of peak {kinds.pop()} bandwidth" if len(kinds) == 1 else "share of peak bandwidth"
    head = (
        [NAMES.get(n, n) for n in moving] + ["kvx"] + ([share] if with_share else []) + (["TFLOP/s"] if has_flops else []) + titles
    )
    rows = []
    for c in cases:
        row = [value_text(n, c.sizes[n]) if n in c.sizes else "" for n in moving] + [time_text(c.us)]
        row += ([percent(c.share)] if c.share is not None else [""]) if with_share else []
        row += [_flops(float(c.sizes["tflops"])) if "tflops" in c.sizes else ""] if has_flops else []
        row += [next((time_text(c.peers[p]) for p in peers if PEERS[p] == t and p in c.peers), "") for t in titles]
        rows.append(row)
    same = ", ".join(f"{NAMES.get(n, n)} {value_text(n, cases[0].sizes[n])}" for n in fixed)
    return [*([f"In every row: {same}.", ""] if same else []), *table(head, rows)]


def source(result: Result, note: str = "") -> list[str]:
    lines = [f"Command: `{result.command}`. Machine: {result.machine}. Result: {result.link}."]
    return [*lines, *([note] if note else []), ""]


# ---- sections


def ops_section(title: str, result: Result, note: str = "", *, by: str = "", with_share: bool = True) -> Iterator[str]:
    """All cases of a result; with `by`, a table for each value of that size, or of the op itself."""
    yield from [f"## {title}", "", *source(result, note)]
    groups: dict[str, list[Case]] = {}
    for case in result.cases:
        groups.setdefault(case.op if by == "op" else str(case.sizes.get(by, "")) if by else "", []).append(case)
    for name, cases in groups.items():
        if by:
            yield from [f"### {title}: {name}", ""]
        yield from cases_table(cases, with_share and not (by == "kind" and name == "prefill"), without=by)


def tiers_section() -> Iterator[str]:
    result = read("tiers-cuda.json")
    yield from ["## Offload to host memory and disk", "", *source(result, _TIERS)]
    rows = []
    for r in result.data["rows"]:
        ours, plain, size = r["ours"], r["plain"], r["bytes"]
        rows.append(
            [
                r["tier"], r["way"], r["format"], str(r["block_size"]), time_text(ours["median_us"]), time_text(ours["p10_us"]),
                f"{r['tokens'] / ours['median_us'] * 1e3:,.0f} k", f"{size / ours['median_us'] / 1e3:.1f} GB/s",
                f"{size / plain['median_us'] / 1e3:.1f} GB/s", percent(plain["median_us"] / ours["median_us"]), percent(r["share"]),
            ]
        )  # fmt: skip
    head = [
        "tier",
        "direction",
        "format in the tier",
        "tokens per block",
        "median",
        "best",
        "tokens per second",
        "bandwidth",
        "plain copy",
    ]
    yield from table([*head, "median share of the plain copy", "best share of the plain copy"], rows)


def step_section() -> Iterator[str]:
    result = read("step-cuda.json")
    yield from ["## A decode step of an 8B model", "", *source(result, _STEP)]
    rows = []
    for r in result.data["rows"]:
        step, gemm, by_torch, attention = (r[k]["median_us"] for k in ("whole", "gemm", "torch_gemm", "attention"))
        weights, kv = (r[k] / r["ceiling_gbps"] / 1e3 for k in ("weight_bytes", "kv_bytes"))
        ms = [f"{us / 1e3:.2f} ms" for us in (step, gemm, by_torch, attention, step - gemm - attention, weights + kv)]
        rows.append([r["kv_format"], *ms, percent(weights / gemm), percent(kv / attention), percent((weights + kv) / step)])
    head = [
        "KV format",
        "step",
        "GEMMs with SiLU",
        "GEMMs alone, by torch",
        "attention",
        "norms, append",
        "lower bound: its memory traffic at peak bandwidth",
    ]
    yield from table([*head, "GEMMs: share of peak", "attention: share of peak", "step: share of peak"], rows)


def generate_section() -> Iterator[str]:
    result = read("generate-cpu.json")
    note = f"{result.data['model']}, {result.data['dtype']}, eight answers of 48 tokens in one batch."
    yield from ["## Text generation", "", *source(result, note)]
    rows = []
    for r in result.data["rows"]:
        rates = [f"{r['new_tokens'] / r[who]['median_us'] * 1e6:.0f} tokens/s" for who in ("ours", "transformers")]
        rows.append([r["case"], str(r["prompt_tokens"]), str(r["reused_tokens"]), *rates, f"{r['ratio']:.2f}x"])
    yield from table(["prompts", "prompt tokens", "found in the prefix cache", "kvx", "transformers' generate", "speed-up"], rows)


def cache_section() -> Iterator[str]:
    result = read("cache-cpu.json")
    yield from ["## Block allocation and prefix lookup on the host", "", *source(result)]
    rows = []
    for r in result.data["rows"]:
        ratio = f"{r['vllm']['median_us'] / r['ours']['median_us']:.1f}x"
        times = [time_text(r[who]["median_us"]) for who in ("ours", "vllm")]
        rows.append([_CACHE_CASES[r["case"]], r["hash"] or "no prefix cache", *times, ratio])
    yield from table(["work", "block hash", "kvx", f"vLLM {result.data['vllm']} `KVCacheManager`", "speed-up"], rows)


def call_section() -> Iterator[str]:
    result = read("call-cpu.json")
    yield from [
        "## One Python call",
        "",
        *source(result, "`kvx.write` of one token and `kvx.convert` of small caches on the host, including all checks."),
    ]
    d = result.data
    rows = [
        ["`kvx.write` from Python", time_text(d["python_call"]["median_us"])],
        ["the same C call through ctypes", time_text(d["c_call_through_ctypes"]["median_us"])],
        ["an empty ctypes call", time_text(d["empty_ctypes_call"]["median_us"])],
        ["`kvx.write` minus the kernel itself", time_text(d["overhead_us"])],
    ]
    for r in d["convert"]:
        what = f"`kvx.convert` of {r['ids']:,} block{'s' if r['ids'] > 1 else ''}, {r['buffers']} buffers"
        rows += [
            [f"{what}, {ids} ids", time_text(r[key]["median_us"])] for key, ids in (("new_ids", "other"), ("same_ids", "the same"))
        ]
    yield from table(["call", "median"], rows)


def wires_section() -> Iterator[str]:
    result = read("wires-cpu.json")
    yield from ["## Between processes", "", *source(result, _WIRES)]
    rows = []
    for r in result.data["rows"]:
        path, _, change = r["path"].partition(", ")
        raw, ours = sorted(r["raw_s"])[len(r["raw_s"]) // 2], sorted(r["converted_s"])[len(r["converted_s"]) // 2]
        rows.append(
            [
                path,
                change,
                f"{r['bytes'] / 1e6:.0f} MB",
                f"{ours * 1e3:.0f} ms",
                f"{r['raw_bytes'] / 1e6:.0f} MB",
                f"{raw * 1e3:.0f} ms",
            ]
        )
    yield from table(["transport", "conversion", "bytes moved", "kvx, converted", "bytes moved unconverted", "unconverted"], rows)


_CACHE_CASES = {
    "request of 2048 tokens + 64": "a request: prompt of 2,048 tokens, 64 decode steps",
    "one of its tokens": "one decode step of this request",
    "lookup of 4096 tokens": "prefix lookup of 4,096 tokens",
    "the same, its hashes known": "the same, with the block hashes already computed",
}
CONVERT = "kvx bench convert --device cuda"
_CONVERT = (
    "The blocks are scattered; 128 blocks of 16 tokens in 80 layers of bf16 are 671 MB. `stack` and `universal` are layouts of "
    "Dynamo; `packed` stores K in packs of 8 elements and V transposed."
)
_TIERS = "KV of 32 layers, 8 heads x 128, converted to another layout as it is moved: 4.3 GB to pinned host memory, 0.5 GB to disk."
_WRITE = (
    "The torch column is two `index_copy_` calls. In [a run beside FlashInfer 0.7.2](../bench/results/2026-11-15-write-cuda.json) "
    "its append took 37.4 us for 16,384 tokens of bf16 in NHD and 142 us for 65,536, and KVX beside it 36.5 us and 139 us."
)
_STEP = (
    "The shapes of Qwen3-8B with bf16 weights, 64 sequences of 2,048 tokens; the whole step is one CUDA graph. "
    "int8 and fp8 have one scale per token and head."
)
_WIRES = "Two processes on one machine send 2,048 tokens of KV, which are converted on two cores during the transfer."
_INTRO = """\
# Performance

<!-- Written by `make picture` (tests/performance.py) from bench/results/; edit those, not this page. -->

Every number on this page comes from a result file in [bench/results](../bench/results), which records the machine,
the versions and the commit. Every benchmark compares its results with the reference implementation in torch before it measures.

- Times are medians. On a GPU, the L2 cache is cold and launch overhead is not included: calls run in CUDA graphs over
  rotating buffers.
- "Share of peak bandwidth" is the bytes that a call reads and writes per second, divided by the bandwidth of a plain copy
  (or a plain read) of a large buffer, measured in the same run. A share above 100 % is faster than this copy.
- "heads 64/8" means 64 query heads and 8 KV heads. NHD and HND are the order of tokens and heads in a block; "fused" means that
  the K and V of a token and head are stored side by side.
- torch SDPA needs contiguous K and V, so a paged cache has to be gathered first. The SDPA columns do not include this time; it
  is in the column "torch: gathering the cache".
- `plan()` calls, of KVX and of FlashInfer, are not included in the times.
- `kvx bench attention --out FOLDER` saves a result of your machine, `kvx bench table FOLDER` shows it beside the peers that were
  measured with it, and `kvx bench compare OLD NEW` says what became faster or slower.
"""


def performance_page() -> str:
    lines = [*_INTRO.splitlines(), ""]
    gpu = [
        ops_section("Convert on an H200", read("convert-cuda.json"), _CONVERT),
        ops_section("Convert recurrent states on an H200", read_text("convert-states-cuda.txt", f"{CONVERT} --only states=")),
        ops_section("Write on an H200", read("write-cuda.json"), _WRITE),
        ops_section("Gather on an H200", read("gather-cuda.json"), "The torch column is `index_select`."),
        ops_section("Norm, rotary embedding and append on an H200", read("append-cuda.json"), "The torch column is eager torch."),
        ops_section("Attention on an H200", read("attention-cuda.json"), by="kind"),
        ops_section(
            "Attention compared with FlashInfer, an earlier run",
            read_text("attention-flashinfer-cuda.txt", "kvx bench attention --device cuda"),
            "This run includes FlashInfer's prefill.", by="kind",
        ),
        ops_section("Digest on an H200", read_text("digest-cuda.txt", "kvx bench digest --device cuda", after="now:")),
        ops_section("amax on an H200", read("amax-cuda.json")),
        ops_section("DeepSeek-V4's hybrid cache on an H200", read("hybrid-cuda.json"), by="op"),
        step_section(),
        tiers_section(),
    ]  # fmt: skip
    cpu = [
        ops_section("Convert on a CPU", read("convert-cpu.json").cases_with("states", False)),
        ops_section("Convert recurrent states on a CPU", read("convert-cpu.json").cases_with("states", True)),
        ops_section("Write on a CPU", read("write-cpu.json"), "The torch column is two `index_copy_` calls."),
        ops_section("Gather on a CPU", read("gather-cpu.json"), "The torch column is `index_select`."),
        ops_section("Attention on an Arm CPU", read("attention-cpu.json"), by="kind"),
        ops_section("Attention on an x86 CPU with AMX", read("attention-cpu-x86.json"), by="kind"),
        ops_section("Attention on an x86 CPU with AVX-512 VNNI, two cores", read("attention-cpu-avx512.json"), by="kind"),
        ops_section("Digest on a CPU", read("digest-cpu.json")),
        ops_section("amax on a CPU", read("amax-cpu.json")),
        generate_section(),
        cache_section(),
        call_section(),
        wires_section(),
    ]
    for section in (*gpu, *cpu):
        lines += section
    return "\n".join(lines).rstrip() + "\n"


# ---- docs/formats.md

MARK = "<!-- accuracy: written by `make picture` -->"


def accuracy_table() -> str:
    result = read("accuracy-cpu.json")
    rows = []
    bf16 = next(r["bytes_per_token"] for r in result.data["rows"] if r["format"] == "bf16")
    for r in result.data["rows"]:
        rows.append(
            [
                f"`{r['format']}`", f"{r['bytes_per_token']:,}", percent(r["bytes_per_token"] / bf16), f"{r['perplexity']:.2f}",
                f"{r['same_top_token']:.1%}", f"{r['kl_divergence']:.1e}" if r["kl_divergence"] else "0",
            ]
        )  # fmt: skip
    head = ["format", "bytes per token", "size relative to bf16", "perplexity", "same top token as f32", "KL divergence from f32"]
    note = f"{result.data['model']}, weights and activations in {result.data['dtype']}, {result.data['num_tokens']} tokens of text."
    return "\n".join([*source(result, note), *table(head, rows)])


def formats_page() -> str:
    """docs/formats.md with its table made anew."""
    before, _, after = FORMATS.read_text().split(MARK)
    return f"{before}{MARK}\n{accuracy_table()}{MARK}{after}"


if __name__ == "__main__":
    for path, text in ((PAGE, performance_page()), (FORMATS, formats_page())):
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
