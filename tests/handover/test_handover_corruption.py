"""What must never be read as if it were whole: each kind of damage, 1,000 random trials of random shapes, 1,000 found.

Contents that are swapped differ. The error's kind is counted too: a sentence that names what is wrong, and no crash.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvx
from kvx.handover import Handover, from_manifest, join, load, save
from kvx.layout.buffers import bytes_of
from kvx.layout.place import num_cache_buffers
from kvx.spec import from_json, to_json
from tests.handover import caches

TRIALS = 1000
FORMATS = ("bf16", "f32", "fp8_e4m3_per_token_head_inline", "int8_per_token_head", "fp8_e4m3_per_head", "nvfp4", "int8")


def pool(rng: random.Random, count: int = 40, **fixed) -> list[Handover]:
    """Handovers of many shapes, no two of one content."""
    made = []
    for _ in range(count):
        fields = {
            "heads": rng.choice((2, 4)),
            "layers": rng.choice((2, 3)),
            "format": rng.choice(FORMATS),
            "block_size": rng.choice((1, 3, 4, 8)),
            "window": rng.choice((0, 0, 6, 11)),
            "num_tokens": rng.randrange(9, 30),
            **fixed,
        }
        made.append(caches.small(rng, **fields))
    return made


def count(trial: Callable[[], None]) -> Counter[str]:
    """The kinds of errors of so many trials. One that raises nothing fails."""
    kinds: Counter[str] = Counter()
    for n in range(TRIALS):
        try:
            trial()
        except kvx.KvxError as error:
            kinds[type(error).__name__] += len(str(error)) > 20  # a sentence
            continue
        raise AssertionError(f"trial {n} of {TRIALS} was read as if it were whole; found before it: {dict(kinds)}")
    assert kinds.total() == TRIALS
    return kinds


def with_bytes(h: Handover) -> Handover:
    """The same with buffers of its own."""
    return from_manifest(h.to_json(), [[t.clone() for t in p.buffers] for p in h.parts])


def blocks_of(h: Handover) -> list[torch.Tensor]:
    part = h.parts[0]
    return list(part.buffers[: num_cache_buffers(part.spec)])


def exchange(block: torch.Tensor, index_a: tuple, index_b: tuple, shape: list[int]) -> None:
    view = block.view(*shape, -1)
    a, b = view[index_a].clone(), view[index_b].clone()
    view[index_a], view[index_b] = b, a


def flip(data: torch.Tensor, bit: int) -> None:
    data[bit // 8] ^= 1 << bit % 8


def test_one_flipped_bit_of_the_content():
    rng = random.Random(1)
    whole = pool(rng) + pool(rng, 10, planes=1, heads=1)

    def trial() -> None:
        h = with_bytes(rng.choice(whole))
        buffers = [bytes_of(t) for t in h.parts[0].buffers]
        bit = rng.randrange(8 * sum(t.numel() for t in buffers))  # of rows that stand for no token, and of scales, too
        for t in buffers:
            if bit < 8 * t.numel():
                flip(t, bit)
                break
            bit -= 8 * t.numel()
        h.check()

    assert count(trial) == {"Damaged": TRIALS}


def test_one_flipped_bit_of_the_manifest():
    rng = random.Random(2)
    whole = pool(rng)

    def trial() -> None:
        h = rng.choice(whole)
        text = bytearray(h.to_json().encode())
        text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        from_manifest(text.decode("latin-1"), [p.buffers for p in h.parts]).check()

    kinds = count(trial)
    assert set(kinds) <= {"Damaged", "BadArgument", "Incompatible"}
    assert kinds["Damaged"] > TRIALS / 2  # where it is still JSON, the digest tells


def test_one_flipped_bit_of_a_file(tmp_path):
    rng = random.Random(3)
    for n, h in enumerate(pool(rng, 10, num_tokens=11)):
        save(tmp_path / str(n), h)

    def trial() -> None:
        folder = tmp_path / str(rng.randrange(10))
        file = rng.choice(sorted(folder.iterdir()))
        at, bit = rng.randrange(file.stat().st_size), 1 << rng.randrange(8)
        change(file, at, bit)
        try:
            load(folder)
        finally:
            change(file, at, bit)

    assert set(count(trial)) <= {"Damaged", "BadArgument", "Incompatible"}
    for n in range(10):
        load(tmp_path / str(n))


def change(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0] ^ bit
        f.seek(at)
        f.write(bytes([byte]))


def test_two_heads_swapped():
    rng = random.Random(4)
    whole = pool(rng)

    def trial() -> None:
        h = with_bytes(rng.choice(whole))
        a, b = rng.sample(range(h.spec.num_kv_heads), 2)
        for block in blocks_of(h):
            exchange(block, (a,), (b,), [h.spec.num_kv_heads])
        h.check()

    assert count(trial) == {"Damaged": TRIALS}


def test_two_layers_swapped():
    rng = random.Random(5)
    whole = pool(rng)

    def trial() -> None:
        h = with_bytes(rng.choice(whole))
        a, b = rng.sample(range(h.spec.num_layers), 2)
        for block in blocks_of(h):
            exchange(block, (slice(None), a), (slice(None), b), [h.spec.num_kv_heads, h.spec.num_layers])
        h.check()

    assert count(trial) == {"Damaged": TRIALS}


def test_k_and_v_exchanged():
    rng = random.Random(6)
    whole = pool(rng)

    def trial() -> None:
        h = with_bytes(rng.choice(whole))
        shape = [h.spec.num_kv_heads * h.spec.num_layers, 2]
        rows = rng.choice((slice(None), rng.randrange(shape[0])))  # of all heads and layers, or of one
        for block in blocks_of(h):
            exchange(block, (rows, 0), (rows, 1), shape)
        h.check()

    assert count(trial) == {"Damaged": TRIALS}


def test_wrong_rank():
    """A shard's bytes under another rank's manifest."""
    rng = random.Random(7)
    whole = [h.shard(rng.choice((2, h.spec.num_kv_heads))) for h in pool(rng)]

    def trial() -> None:
        a, b = rng.sample(rng.choice(whole), 2)
        from_manifest(a.to_json(), [p.buffers for p in b.parts]).check()

    assert count(trial) == {"Damaged": TRIALS}


def test_one_rank_twice():
    """In place of another; from shard(), and exported rank by rank."""
    rng = random.Random(8)
    whole = [h.shard(rng.choice((2, h.spec.num_kv_heads))) for h in pool(rng)]

    def trial() -> None:
        shards = list(rng.choice(whole))
        a, b = rng.sample(range(len(shards)), 2)
        shards[a] = shards[b]
        if rng.random() < 0.5:
            shards = [Handover(s.tokens, s.parts) for s in shards]  # without the whole's digest
        join(shards)

    kinds = count(trial)
    assert kinds["Damaged"] > TRIALS / 3
    assert kinds["Incompatible"] > TRIALS / 3
    assert len(kinds) == 2


def test_wrong_order_of_blocks():
    rng = random.Random(9)
    whole = [h for h in pool(rng, 60, window=0) if h.spec.num_blocks > 1]

    def trial() -> None:
        h = with_bytes(rng.choice(whole))
        a, b = rng.sample(blocks_of(h), 2)
        held = a.clone()
        a.copy_(b)
        b.copy_(held)
        h.check()

    assert count(trial) == {"Damaged": TRIALS}


def test_manifest_of_another_handover():
    """Of the same shape: an earlier one of the same sequence, or another sequence's."""
    rng = random.Random(10)
    pairs = []
    for _ in range(40):
        shape = {"num_tokens": rng.randrange(5, 30), "format": rng.choice(FORMATS), "window": rng.choice((0, 6))}
        seed = rng.random()
        tokens_alone = [caches.small(random.Random(seed), **shape), caches.small(random.Random(seed), **shape)]
        tokens_alone[1] = Handover((tokens_alone[1].tokens + 1) % 1000, tokens_alone[1].parts)
        assert tokens_alone[0].parts[0].content == tokens_alone[1].parts[0].content
        pairs += [[*tokens_alone[:1], caches.small(rng, **shape)], tokens_alone]

    def trial() -> None:
        a, b = rng.sample(rng.choice(pairs), 2)
        if a.parts[0].content == b.parts[0].content:  # only the tokens differ: a stale list of them with all else made anew
            text = resealed(a, tokens=b.tokens.tolist())
            from_manifest(text, [p.buffers for p in a.parts]).check()
        from_manifest(a.to_json(), [p.buffers for p in b.parts]).check()

    assert count(trial) == {"Damaged": TRIALS}


def resealed(h: Handover, **fields) -> str:
    """Its manifest with fields changed, and the manifest's digest made anew."""
    body = json.loads(h.to_json())
    del body["digest"]
    body.update(fields)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})


def edited(h: Handover, rng: random.Random) -> dict:
    """One field that says something else, everything that says it again changed along with it."""
    body = json.loads(h.to_json())
    part, tokens = body["parts"][0], body["tokens"]
    spec = from_json(part["manifest"])

    def respec(**changed) -> None:
        part["manifest"] = to_json(replace(spec, **changed))

    def token() -> None:
        tokens[rng.randrange(len(tokens))] += 1

    def swapped_tokens() -> None:
        tokens.reverse() if tokens != tokens[::-1] else token()

    def fewer() -> None:
        tokens.pop()
        respec(num_blocks=max(1, -(-len(tokens) // spec.block_size) - part["first_block"]))

    def moved_block() -> None:
        part["first_block"] += 1
        part["first_token"] += spec.block_size
        part["window"] = part["window"] or 1
        tokens.extend([1] * spec.block_size)

    def seal() -> None:
        body["seals"] = [f"{rng.getrandbits(128):032x}"]

    rng.choice([
        token,
        swapped_tokens,
        fewer,
        moved_block,
        seal,
        lambda: respec(model="other"),
        lambda: respec(head_start=spec.head_start + 1),
        lambda: respec(num_blocks=spec.num_blocks + 1),
        lambda: respec(v_format="f16" if spec.format == "bf16" else "bf16"),
        lambda: respec(format={"bf16": "f16", "f32": "f32"}.get(spec.format, "bf16"), num_kv_heads=spec.num_kv_heads + 1),
        lambda: part.update(layers=[n + 1 for n in part["layers"]]),
        lambda: part.update(layers=[2 * n for n in part["layers"]]),
        lambda: part.update(window=part["window"] + 1 if part["window"] else 1000),
        lambda: part.update(first_token=max(0, part["first_token"] - 1) if part["first_token"] % spec.block_size else -1),
        lambda: body.update(whole=[f"{rng.getrandbits(128):032x}"]),
    ])()  # fmt: skip
    return body


def test_edited_manifest_whose_digest_was_made_anew():
    rng = random.Random(11)
    whole = pool(rng)

    def trial() -> None:
        h = rng.choice(whole)
        body = edited(h, rng)
        del body["digest"]
        from_manifest(resealed(h, **body), [p.buffers for p in h.parts]).check()

    kinds = count(trial)
    assert kinds["Damaged"] > TRIALS / 3
    assert set(kinds) <= {"Damaged", "BadArgument", "Incompatible"}


def test_truncated_file(tmp_path):
    rng = random.Random(12)
    for n, h in enumerate(pool(rng, 10, num_tokens=11)):
        save(tmp_path / str(n), h)

    def trial() -> None:
        folder = tmp_path / str(rng.randrange(10))
        file = rng.choice(sorted(folder.iterdir()))
        data = file.read_bytes()
        end = rng.randrange(len(data))
        os.truncate(file, end)
        try:
            load(folder)
        finally:
            with file.open("ab") as f:
                f.write(data[end:])

    assert set(count(trial)) <= {"Damaged", "BadArgument", "Incompatible"}


def test_the_sentences():
    """Which part, which layers and heads, and what to do."""
    h = with_bytes(caches.small(random.Random(0)))
    with pytest.raises(kvx.Damaged, match=r"the manifest's digest is .* its fields make .* Ask for it again"):
        from_manifest(h.to_json().replace('"window": 0', '"window": 1'))
    first = h.shard(2)[:1]
    with pytest.raises(kvx.Damaged, match=r"heads 0 to 1 make content .* A shard is missing"):
        join(first)
    flip(bytes_of(h.parts[0].buffers[0]), 3)
    with pytest.raises(kvx.Damaged, match=r"part 0 \(layers 0, 1, 2, heads 0 to 3\) has content .* Ask for it again"):
        h.check()
