"""Recurrent states that are not what they are said to be: python -m tests.fuzz.state_damage --trials 1000

Each kind of damage, on each way that a state goes: its digest, a cache file, a tier on disk; and beside K and V a handover in
memory, in a folder, in ranks' shards, kept and found in tiers, and written into a cache.
States are of random sizes and types with random bits. Of every trial the same is asked: the damage shows, by another digest, by one
of KVX's errors, or by a block that a tier does not hand out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import kvx
from kvx import handover
from kvx.cache.kinds import State as StateKind
from kvx.handover import NEUTRAL, Handover, Part, find, from_manifest, join, keep, names
from kvx.handover.paged_cache import write_sequence
from kvx.layout.state_rows import STATE_ROWS, state_row
from kvx.ops.move.digest import Digest
from kvx.spec import PlaneSpec, StateSpec, state_plane
from kvx.tiers import BlockKind, DiskTier

MODEL = "kvx:" + "0123456789abcdef" * 2
KV_LAYER = 9  # beside those of the state


@dataclass
class State:
    """What there is, and what is said of it."""

    spec: StateSpec  # one block, in the layout of handovers and tiers
    buffers: list[torch.Tensor]
    tokens: list[int]  # that it has seen
    is_missing: bool = False  # from its handover

    def says(self, other: State) -> bool:
        """Whether the same is said of both."""
        return (self.spec, self.tokens, self.is_missing) == (other.spec, other.tokens, other.is_missing)

    def copy(self) -> State:
        return State(self.spec, [t.clone() for t in self.buffers], list(self.tokens))


def random_state(r: random.Random, *, is_square: bool = False) -> State:
    heads, dim, size = r.choice([2, 4]), r.choice([2, 4, 6]), r.choice([2, 4, 8])
    dim = size if is_square else dim
    shares = ((heads * size, size), (heads * size, size), (heads * dim, dim))
    types = r.choice([("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f16")])
    planes = (
        state_plane("conv", types[0], channel=sum(n for n, _ in shares), tap=r.randint(2, 4), shares=shares),
        state_plane(r.choice(["delta", "ssm"]), types[1], head=heads, row=dim, column=size),
    )
    made = StateSpec(1, planes, num_layers=r.randint(1, 3), model=MODEL)
    made = replace(made, layout=made.block_layout)
    generator = torch.Generator().manual_seed(r.randrange(2**60))
    buffers = [torch.randint(0, 256, t.shape, dtype=torch.uint8, generator=generator) for t in kvx.allocate_buffers(made)]
    return State(made, buffers, [r.randrange(1000) for _ in range(r.randint(2, 40))])


def plane_of(state: State, r: random.Random, name: str = "") -> torch.Tensor:
    """A view of one layer's plane, [...its axes]; the matrix, unless it is named."""
    views = r.choice(kvx.layer_views(state.buffers, state.spec))
    found = next(v for v in views if (v.plane == name if name else v.plane != "conv"))
    return found.first if isinstance(found.tensor, list) else found.tensor[0]


# ---- damage: each changes the state, its content or what is said of it


def flipped_bit(r: random.Random, s: State) -> None:
    t = r.choice(s.buffers)
    t[r.randrange(len(t))] ^= 1 << r.randrange(8)


def swapped(t: torch.Tensor, a: slice | int, b: slice | int) -> None:
    first = t[a].clone()
    t[a] = t[b]
    t[b] = first


def swapped_heads(r: random.Random, s: State) -> None:
    t = plane_of(s, r)
    swapped(t, *r.sample(range(t.shape[0]), 2))


def swapped_segments(r: random.Random, s: State) -> None:
    """q where k should be: in the bytes, or in what is said of them."""
    conv = s.spec.planes[0]
    (a, n, unit), (b, _, _), last = conv.shares
    if r.random() < 0.5:
        swapped(plane_of(s, r, "conv"), slice(a, a + n), slice(b, b + n))
    else:
        s.spec = replace(s.spec, planes=(replace(conv, shares=((b, n, unit), (a, n, unit), last)), s.spec.planes[1]))


def transposed(r: random.Random, s: State) -> None:
    """Value by key where key by value should be: of square matrices in the bytes, of all in what is said of them."""
    t, matrix = plane_of(s, r), s.spec.planes[1]
    if t.shape[-1] == t.shape[-2] and r.random() < 0.5:
        head = t[r.randrange(t.shape[0])]
        head.copy_(head.T.clone())
        return
    sizes = matrix.sizes
    axes = (("head", sizes["head"]), ("column", sizes["column"]), ("row", sizes["row"]))
    if r.random() < 0.5:
        axes = (("head", sizes["head"]), ("row", sizes["column"]), ("column", sizes["row"]))
        if sizes["row"] == sizes["column"]:
            axes = (("head", sizes["head"]), ("column", sizes["row"]), ("row", sizes["row"]))
    said = replace(s.spec, planes=(s.spec.planes[0], replace(matrix, axes=axes)), layout="")
    s.spec = replace(said, layout=said.block_layout)


def off_by_one(r: random.Random, s: State) -> None:
    """A state of a token more or less."""
    if r.random() < 0.5:
        s.tokens.append(r.randrange(1000))
    else:
        s.tokens.pop()


def another_type(r: random.Random, s: State) -> None:
    """bf16 for f16, or the elements of f32 as twice as many of bf16."""
    n = r.randrange(2)
    plane = s.spec.planes[n]
    if str(plane.format) == "f32":
        axes = (*plane.axes[:-1], (plane.row_axis, 2 * plane.row_elements))
        changed: PlaneSpec = replace(plane, axes=axes, format=kvx.spec.Format.named(r.choice(["bf16", "f16"])))
    else:
        changed = replace(plane, format=kvx.spec.Format.named({"bf16": "f16", "f16": "bf16"}[str(plane.format)]))
    planes = tuple(changed if i == n else p for i, p in enumerate(s.spec.planes))
    s.spec = replace(s.spec, planes=planes)


def missing_part(r: random.Random, s: State) -> None:
    """K and V alone."""
    s.is_missing = True


DAMAGE = {f.__name__: f for f in (flipped_bit, swapped_heads, swapped_segments, transposed, off_by_one, another_type, missing_part)}


# ---- ways: each raises one of KVX's errors, or says True where the damage shows


def by_digest(r: random.Random, good: State, bad: State, folder: Path) -> bool:
    """The position is counted where the block stands at its column: so many tokens, less one, before it. In every row's layout."""
    found = []
    row = state_row(r.choice(list(STATE_ROWS)))
    for s in (good, bad):
        try:
            there = row.spec(s.spec.planes, num_blocks=1, num_layers=s.spec.num_layers)
        except kvx.BadArgument:  # not aligned in that engine's pages
            there = s.spec
        buffers = kvx.allocate_buffers(there)
        kvx.convert(s.buffers, buffers, plan=kvx.plan(s.spec, there))
        found.append(kvx.digest(buffers, there, blocks=[-1] * (len(s.tokens) - 1) + [0]))
    return found[0] != found[1]


def by_file(r: random.Random, good: State, bad: State, folder: Path) -> bool:
    """Damaged bytes under a good heading; or a file of the other, where this one is expected."""
    path = folder / "state.kvx"
    said, other = (replace(s.spec, positions=(len(s.tokens),)) for s in (good, bad))
    if said == other:
        kvx.save(path, good.buffers, said)
        content = b"".join(bytes(t.numpy()) for t in bad.buffers)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - len(content)] + content)
    else:
        kvx.save(path, bad.buffers, other)
    kvx.load(path, expect=said)
    return False


def kv_part(num_tokens: int, block_size: int) -> Part:
    """K and V of a layer of the same model."""
    spec = kvx.CacheSpec(
        -(-num_tokens // block_size), block_size, 2, 4, layout=NEUTRAL, format="bf16", num_layers=1, model=MODEL
    )  # fmt: skip
    made = kvx.allocate_buffers(spec)
    for n, t in enumerate(made):
        t.fill_(n + 1)
    made = [t.view(torch.bfloat16).view(2, 1, 2, block_size, 4) for t in made]
    made[-1][..., num_tokens - (spec.num_blocks - 1) * block_size :, :] = 0  # where no token stands
    return Part(spec, (KV_LAYER,), 0, 0, tuple(t.view(torch.uint8).flatten() for t in made)).sealed(num_tokens)


def handed_over(s: State, *, position: int = 0, block_size: int = 0, content: Digest | None = None) -> Handover:
    """K and V of a layer, and the state, which is said to stand after its tokens unless told; under another's seal if given."""
    n = len(s.tokens)
    kv = kv_part(n, block_size or n)
    if s.is_missing:
        return Handover(s.tokens, (kv,))
    spec = replace(s.spec, positions=(position or n,))
    part = Part(spec, tuple(range(s.spec.num_layers)), 0, 0, tuple(s.buffers))
    return Handover(s.tokens, (kv, part.sealed(n) if content is None else replace(part, content=content)))


def edited_manifest(good: State, bad: State) -> str:
    """What the other's manifest says, under the good one's seals: whoever edits a manifest cannot know those that go with it."""
    body, was = (json.loads(handed_over(s).to_json()) for s in (bad, good))
    body["seals"] = was["seals"][: len(body["seals"])]
    del body["digest"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})


def by_handover(r: random.Random, good: State, bad: State, folder: Path) -> bool:
    """Changed bytes under the manifest, or bytes as they were under an edited one."""
    if good.says(bad):
        kv = handed_over(good).parts[0].buffers
        from_manifest(handed_over(good).to_json(), [kv, bad.buffers]).check()
    else:
        held = [handed_over(bad).parts[0].buffers, good.buffers]
        from_manifest(edited_manifest(good, bad), held[: 1 if bad.is_missing else 2]).check()
    return False


def by_folder(r: random.Random, good: State, bad: State, folder: Path) -> bool:
    """The same of a saved one."""
    a, b = folder / "good", folder / "bad"
    handover.save(a, handed_over(good))
    if good.says(bad):
        handover.save(b, handed_over(bad))
        (a / "part1.safetensors").write_bytes((b / "part1.safetensors").read_bytes())
    elif bad.is_missing and r.random() < 0.5:
        (a / "part1.safetensors").unlink()
    else:
        (a / "handover.json").write_text(edited_manifest(good, bad))
    handover.load(a, model=MODEL)
    return False


def by_tier(r: random.Random, good: State, bad: State, folder: Path) -> bool:
    """Blocks are asked for by the name of their tokens, and kept under a manifest; what lies on disk may change."""
    kinds, keys = [BlockKind.of(s.spec) for s in (good, bad)], [names(s.tokens, 1, MODEL)[-1] for s in (good, bad)]
    with DiskTier(folder / "tier", kinds[0], 1 << 20) as tier:
        if kinds[0].text != kinds[1].text:
            tier.put([keys[0]], [kinds[1].block(bad.buffers)]).result()  # refused by the field that differs
            return False
        tier.put([keys[1]], [kinds[0].block(good.buffers)]).result()
        if keys[0] == keys[1]:
            path = next(p for p in (folder / "tier").rglob("*") if p.is_file() and bytes(good.buffers[0].numpy()) in p.read_bytes())
            data, was, now = path.read_bytes(), bytes(good.buffers[0].numpy()), bytes(bad.buffers[0].numpy())
            path.write_bytes(data.replace(was, now))
        return tier.get([keys[0]]).result()[0] is None


def by_join(r: random.Random, good: State, bad: State, folder: Path) -> bool:
    """One of two ranks' shards is that of the damaged, under a seal of its own."""
    ours, theirs = (handed_over(s).shard(2) for s in (good, bad))
    said = [[[*s.tokens, *((p.spec, p.content) for p in s.parts)] for s in shards] for shards in (ours, theirs)]
    changed = [n for n, (a, b) in enumerate(zip(*said, strict=True)) if a != b]
    for n in r.sample(changed, min(1, len(changed))):
        ours[n] = Handover(theirs[n].tokens, theirs[n].parts, ours[n].whole[: len(theirs[n].parts)])
    join(ours)
    return False


def by_find(r: random.Random, good: State, bad: State, folder: Path) -> bool:
    """Kept in tiers on disk, one for K and V and one for the state, and found by the tokens: it stands where a block ends."""
    n, layers = len(good.tokens), tuple(range(good.spec.num_layers))
    whole = handed_over(good)
    tiers = [DiskTier(folder / str(i), BlockKind.of(p.spec), 1 << 22) for i, p in enumerate(whole.parts)]
    with tiers[0], tiers[1]:
        if not good.says(bad):
            keep(handed_over(bad, block_size=n), tiers)
            return False
        keep(whole, tiers)
        path = next(p for p in (folder / "1").rglob("*") if p.is_file() and bytes(good.buffers[0].numpy()) in p.read_bytes())
        path.write_bytes(path.read_bytes().replace(bytes(good.buffers[0].numpy()), bytes(bad.buffers[0].numpy())))
        return find(good.tokens, tiers, parts=[((KV_LAYER,), 0), (layers, 0)]) is None


def by_cache(r: random.Random, good: State, bad: State, folder: Path) -> bool:
    """Into a cache that goes on from there. What is said of the state may have a seal of its own; its bytes have the good one's."""
    kv = kvx.CacheSpec(64, 4, 2, 4, format="bf16")
    row = state_row(r.choice(["transformers", "sglang", "llama_cpp"]))
    spec = row.spec(good.spec.planes, num_blocks=3)
    groups = [
        kvx.LayerGroup("kv", (KV_LAYER,), kv),
        kvx.LayerGroup("states", tuple(range(good.spec.num_layers)), spec, kind=StateKind(snapshot_every=1)),
    ]
    cache = kvx.PagedCache(groups, max_seqs=1, max_seq_len=64)
    seq = cache.admit([*good.tokens, 5])
    content = handed_over(good).parts[1].content if good.says(bad) else None
    try:
        write_sequence(cache, seq, handed_over(bad, position=len(good.tokens), content=content), model=MODEL)
    finally:
        cache.check()
        assert seq.length == 0 or good.says(bad), "nothing changes where it is refused"
    return False


WAYS: dict[str, Callable[[random.Random, State, State, Path], bool]] = {
    "digest": by_digest, "file": by_file, "handover": by_handover, "folder": by_folder, "tier": by_tier, "join": by_join,
    "find": by_find, "cache": by_cache,
}  # fmt: skip
NO_HANDOVER = ("digest", "file", "tier")  # a state alone: no part of it can be missing


def ways_of(damage: str) -> list[str]:
    return [way for way in WAYS if damage != "missing_part" or way not in NO_HANDOVER]


def trial(damage: str, way: str, number: int) -> str:
    """How it showed. AssertionError where it did not."""
    r = random.Random(f"{damage} {way} {number}")
    while True:
        good = random_state(r, is_square=r.random() < 0.5)
        bad = good.copy()
        try:
            DAMAGE[damage](r, bad)
        except kvx.BadArgument:
            return "refused: no such spec"
        same = all(torch.equal(a, b) for a, b in zip(good.buffers, bad.buffers, strict=True))
        if not same or not good.says(bad):
            break
    with tempfile.TemporaryDirectory() as folder:
        try:
            shows = WAYS[way](r, good, bad, Path(folder))
        except kvx.KvxError as error:
            return type(error).__name__
    assert shows, f"{damage} by {way}, trial {number}: nobody saw it; {good.spec}"
    return "another digest" if way == "digest" else "not handed out"


def control(way: str, number: int) -> None:
    """What was not damaged is taken."""
    r = random.Random(number)
    good = random_state(r)
    with tempfile.TemporaryDirectory() as folder:
        assert not WAYS[way](r, good, good.copy(), Path(folder))


def run(trials: int, first: int = 0) -> dict[str, Counter[str]]:
    """So many of each damage on each way, and of none."""
    numbers = range(first, first + trials)
    for way in WAYS:
        for n in numbers:
            control(way, n)
    return {damage: Counter(f"{way}: {trial(damage, way, n)}" for way in ways_of(damage) for n in numbers) for damage in DAMAGE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    for damage, counts in run(given.trials, given.seed).items():
        print(f"{damage}: {sum(counts.values())} of {given.trials * len(ways_of(damage))} seen; {dict(sorted(counts.items()))}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
