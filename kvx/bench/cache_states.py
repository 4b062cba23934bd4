"""What states cost a paged cache, and what their snapshots save: rows of `kvx bench cache`.

    trace     200 requests with shared prompts, one after the other: what is found again and what is computed, for each policy
    step      the calls of a decode step of 64 sequences on the host, beside a cache without states
    copies    a state of Qwen3-Next's size copied in all its layers, and what that is of a step at the default policy

A step reads and writes the state of every sequence, and reads the weights that it computes with. The share is of the time that
those bytes need at the speed of a plain copy, which no step is faster than; of the states alone it is larger than it can be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter, thread_time
from typing import Any

import torch

import kvx
from kvx.bench.harness import Timing, copy_ceiling_gbps, summarise, time_host
from kvx.cache.groups import PlanesLayer
from kvx.cache.guard import Guard
from kvx.cache.kinds import State
from kvx.cache.state_table import StateTable
from kvx.spec import StateSpec, state_plane
from kvx.spec.layer_specs import layer_specs

MODEL, LAYERS = "Qwen3-Next-80B-A3B", 36  # with a convolution of 8,192 channels and 32 matrices of 128 by 128
ACTIVE_BYTES = 2 * 3_000_000_000  # weights that a token is computed with, in bf16
SEQS, BLOCK, CHUNK = 64, 16, 2048
# What is kept of states: every n blocks, at a prompt's end, where the caller says that others begin alike.
POLICIES: dict[str, State | None] = {
    "no states: the most there is": None,
    "no snapshots": State(0, snapshot_at_end=False),
    "every block": State(1, snapshot_at_end=False),
    "every 8 blocks": State(8, snapshot_at_end=False),
    "every 32 blocks": State(32, snapshot_at_end=False),
    "at a prompt's end": State(0),
    "default": State(),
    "default, and where asked": State(),
}
STEPS = ("no states: the most there is", "default", "every block")
MANY, FEW = 16_384, 65  # states of a trace: more than any policy takes, and one that runs with room for 64 snapshots


# --- a trace --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceRequest:
    prompt: list[int]
    answer: list[int]
    asked: tuple[int, ...]  # where what it shares with others ends


def trace(num_requests: int = 200, seed: int = 0) -> list[TraceRequest]:
    """Chats on three system prompts, some with examples before the first question; a turn's prompt has all turns before it."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> list[int]:
        return [rng.randrange(100_000) for _ in range(rng.randint(low, high))]

    systems = [text(200, 400), text(1000, 1500), text(3000, 4000)]
    shots = [(system, text(400, 1600)) for system in systems for _ in range(2)]
    chats: list[tuple[list[int], tuple[int, ...]]] = []
    found: list[TraceRequest] = []
    while len(found) < num_requests:
        if not chats or rng.random() < 0.35:
            system, examples = rng.choice(shots)
            ends: tuple[int, ...] = (len(system),)
            if rng.random() < 0.5:
                ends = (*ends, len(system) + len(examples))
            chats.append(([*system, *examples][: ends[-1]], ends))
        n = rng.randrange(max(0, len(chats) - 12), len(chats))  # those that are still talked to
        before, ends = chats[n]
        request = TraceRequest([*before, *text(15, 200)], text(40, 400), ends)
        chats[n] = ([*request.prompt, *request.answer], ends)
        if len(chats[n][0]) > 7000:
            del chats[n]
        found.append(request)
    return found


@dataclass(frozen=True)
class PolicyRow:
    policy: str
    states: int  # blocks of states: that of the running sequence, and room for snapshots. 0: the cache has none
    requests: int
    hits: int  # requests of which something was found
    prompt_tokens: int
    computed_tokens: int  # of prompts
    snapshots: int  # taken
    kept: int  # at once, at most
    state_bytes: int  # of one

    def __str__(self) -> str:
        room = f", room for {self.states - 1}" if self.states == FEW else ""
        text = f" cache trace {self.policy + room:<40} | hits {self.hits:3d} of {self.requests} | computed "
        text += (
            f"{self.computed_tokens:7,} of {self.prompt_tokens:,} prompt tokens ({self.computed_tokens / self.prompt_tokens:4.0%})"
        )
        if not self.states:
            return text
        return f"{text} | {self.snapshots:5d} snapshots, at most {self.kept} at once: {self.kept * self.state_bytes / 1e9:.1f} GB"


def run_trace(policy: str, requests: list[TraceRequest], num_states: int) -> PolicyRow:
    """One after the other on a cache that has room for all K and V."""
    kind = POLICIES[policy]
    cache = _cache(kind, num_states, 1, num_blocks=80_000, max_seqs=1)
    computed = hits = kept = 0
    for request in requests:
        asked = request.asked if policy == "default, and where asked" else ()
        seq = cache.admit(request.prompt, snapshot_at=asked)
        hits += seq.length > 0
        computed += len(request.prompt) - seq.length
        while seq.length < seq.num_tokens:
            cache.extend(seq, cache.until_snapshot(seq, min(CHUNK, seq.num_tokens - seq.length)))
            cache.commit(seq)
        for token in request.answer:
            cache.extend(seq, [token])
            cache.commit(seq)
        cache.release(seq)
        if kind is not None and cache.prefix is not None:
            kept = max(kept, len(cache.prefix.named(1)[0]))
    cache.check()
    assert cache.prefix is not None
    stored = sum(len(event.blocks) for event in cache.prefix.events if event.kind == "stored" and event.group == 1)
    tokens = sum(len(r.prompt) for r in requests)
    states = num_states if kind is not None else 0
    return PolicyRow(
        policy, states, len(requests), hits, tokens, computed, stored, kept, _state_spec(1).block_content_bytes * LAYERS
    )


# --- the calls of a step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeCallsRow:
    policy: str
    admit: Timing  # of a prompt of 2,048 tokens that is not there
    extend: Timing  # each of 64 sequences by a token
    plan: Timing
    commit: Timing

    def __str__(self) -> str:
        parts = (f"{name} {getattr(self, name).median_us:6.1f}" for name in ("admit", "extend", "plan", "commit"))
        total = sum(t.median_us for t in (self.extend, self.plan, self.commit))
        return f" cache step {self.policy:<41} | {' | '.join(parts)} us | {total:6.1f} us per step of {SEQS}"


def run_step(policy: str, device: str, steps: int = 512) -> DecodeCallsRow:
    """Sequences begin their blocks in different steps. A sample is the mean of 16 of them, so that each begins a block in it.

    It is the thread's own time: a machine may be busy with others.
    """
    cache = _cache(POLICIES[policy], 2 * SEQS, LAYERS, num_blocks=SEQS * 160, max_seqs=SEQS + 1, device=device)
    rng = random.Random(0)
    prompts = [[rng.randrange(100_000) for _ in range(2048)] for _ in range(SEQS)]
    admitted = []
    for prompt in prompts:
        start = thread_time()
        seq = cache.admit(prompt)
        admitted.append((thread_time() - start) * 1e6)
        cache.release(seq)
    seqs = [cache.admit(rng.choices(range(100_000), k=64 + 7 * n)) for n in range(SEQS)]
    for seq in seqs:
        cache.extend(seq, seq.num_tokens)
        cache.commit(seq)
    times: list[list[float]] = [[], [], []]

    def extend() -> None:
        for seq in seqs:
            cache.extend(seq, [7])

    def plan() -> None:
        cache.plan([(seq, 1) for seq in seqs])

    def commit() -> None:
        for seq in seqs:
            cache.commit(seq)

    calls = (extend, plan, commit)
    for _ in range(steps // BLOCK):
        sums = [0.0] * len(calls)
        for _ in range(BLOCK):
            for n, call in enumerate(calls):
                start = thread_time()
                call()
                sums[n] += thread_time() - start
        for mine, seconds in zip(times, sums, strict=True):
            mine.append(seconds * 1e6 / BLOCK)
    cache.check()
    return DecodeCallsRow(policy, summarise(admitted), *map(summarise, times))


# --- the copies of a step -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateCopyRow:
    state_bytes: int  # of one sequence, in all layers
    ours: Timing  # of one copy: the device's time, or the host's where that is the device
    apart: Timing  # the same, plane by plane
    host: Timing  # until the call returns
    copies_per_step: float  # at the default policy, as 64 sequences decode
    ceiling_gbps: float

    @property
    def step_us(self) -> tuple[float, float]:
        """What a step needs at least: for its states alone, and with the weights."""
        states = 2 * SEQS * self.state_bytes
        return states / self.ceiling_gbps / 1e3, (states + ACTIVE_BYTES) / self.ceiling_gbps / 1e3

    def __str__(self) -> str:
        us, (alone, both) = self.ours.median_us * self.copies_per_step, self.step_us
        rate = 2 * self.state_bytes / self.ours.median_us / 1e3
        return (
            f" cache copies {MODEL}, {self.state_bytes / 1e6:.1f} MB per state | {self.ours.median_us:.1f} us a copy "
            f"({self.ours.p10_us:.1f}-{self.ours.p90_us:.1f}), {rate / self.ceiling_gbps:.0%} of copy | plane by plane "
            f"{self.apart.median_us:.1f} us | host {self.host.median_us:.1f} us\n"
            f"   a step of {SEQS} at the default policy: {self.copies_per_step:.3f} copies, {us:.1f} us: {us / both:.2%} of the "
            f"{both:.0f} us that its states and {ACTIVE_BYTES / 1e9:.0f} GB of weights need, {us / alone:.2%} of the "
            f"{alone:.0f} us of its states alone"
        )


def run_copies(device: str) -> StateCopyRow:
    """Eight states, 618 MB: more than caches hold. The weights and the other sequences need not be there."""
    num_blocks = 8
    spec = _state_spec(num_blocks)
    group = kvx.LayerGroup("states", tuple(range(LAYERS)), spec, kind=State())
    table = StateTable(group, 0, (1, 1, BLOCK), device, "auto", Guard())
    layers = [layer for layer in table.layers.values() if isinstance(layer, PlanesLayer)]
    planes = [plane for layer in layers for plane in layer.planes.values()]
    for n, plane in enumerate(planes):
        plane.copy_(torch.arange(num_blocks).reshape(-1, *[1] * (plane.dim() - 1)).expand_as(plane) + n)

    def apart(source: int, destination: int) -> None:
        for plane in planes:
            plane[destination].copy_(plane[source])

    table.copy_block(1, 2)
    apart(1, 3)
    for plane in planes:  # checked, then timed
        if not torch.equal(plane[1], plane[2]) or not torch.equal(plane[3], plane[2]):
            raise kvx.KvxError("kvx bench cache: a copied state is not the state it was copied from.")
    ours, host = _timed(table.copy_block, num_blocks, device)
    others, _ = _timed(apart, num_blocks, device)
    per_step = SEQS / (State().snapshot_every * BLOCK)
    return StateCopyRow(spec.block_content_bytes * LAYERS, ours, others, host, per_step, copy_ceiling_gbps(device))


def _timed(copy: Callable[[int, int], None], num_blocks: int, device: str) -> tuple[Timing, Timing]:
    """Of one copy, from block to block: on the device, and until the call returns."""
    turns = iter(range(10**9))

    def call() -> None:
        n = next(turns)
        copy(n % num_blocks, (n + 1) % num_blocks)

    if device != "cuda":
        found = time_host(call)
        return found, found
    on_device, on_host = [], []
    for n in range(40):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begin = perf_counter()
        call()
        on_host.append((perf_counter() - begin) * 1e6)
        end.record()
        end.synchronize()
        on_device.append(start.elapsed_time(end) * 1e3)
        if n < 10:  # warm
            on_device.clear()
            on_host.clear()
    return summarise(on_device), summarise(on_host)


# --- caches ---------------------------------------------------------------------------------------------------------------


def _state_spec(num_blocks: int) -> StateSpec:
    found = next(s.state for s in layer_specs(MODEL) if s.state is not None)
    return StateSpec(num_blocks, found.planes)


def _cache(
    kind: State | None, num_states: int, layers: int, *, num_blocks: int, max_seqs: int, device: str = "cpu"
) -> kvx.PagedCache:
    """With K and V of one layer and states of `layers`, as small as can be: decisions do not hang on their sizes."""
    groups = [kvx.LayerGroup("full", (0,), kvx.CacheSpec(num_blocks, BLOCK, 1, 1, format="f32"))]
    if kind is not None:
        planes = (state_plane("conv", "bf16", channel=4, tap=1), state_plane("delta", "f32", head=1, row=1, column=2))
        groups.append(kvx.LayerGroup("states", tuple(range(1, 1 + layers)), StateSpec(num_states, planes), kind=kind))
    return kvx.PagedCache(groups, max_seqs=max_seqs, max_seq_len=8192, device=device, max_events=1_000_000)


def measure(device: str, requests: int = 200, steps: int = 512) -> dict[str, list[dict[str, Any]]]:
    """Rows by their kind. The trace is of decisions alone, and the same on every device."""
    found: dict[str, list[Any]] = {"step": [run_step(policy, device, steps) for policy in STEPS], "copies": [run_copies(device)]}
    if device == "cpu":
        asked, with_states = trace(requests), [policy for policy, kind in POLICIES.items() if kind is not None]
        found["trace"] = [run_trace(policy, asked, MANY) for policy in POLICIES]
        found["trace"] += [run_trace(policy, asked, FEW) for policy in with_states]
    return {kind: [asdict(row) for row in mine] for kind, mine in found.items()}


def show(result: dict[str, list[dict[str, Any]]]) -> list[str]:
    makers: dict[str, Callable[..., object]] = {"trace": PolicyRow, "step": DecodeCallsRow, "copies": StateCopyRow}
    lines = []
    for kind, maker in makers.items():
        for row in result.get(kind, ()):
            lines.append(str(maker(**{name: Timing(**v) if isinstance(v, dict) else v for name, v in row.items()})))
    return lines
