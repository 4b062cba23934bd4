"""What may not change: plans, digests and manifests of every engine's row, and files of each kind as a release before wrote them.

    python -m tests.golden.make_frozen        writes tests/golden/frozen.json, and tests/golden/frozen/ where it is missing

Plans are what clients in C keep, digests are in manifests of files everywhere, and files outlive the library that wrote them.
Run it anew only when a version of a format changes, and say so in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import kvx
from kvx.handover import NEUTRAL as HANDOVER
from kvx.handover import Handover, Part
from kvx.handover import save as save_handover
from kvx.layout.engines import ENGINES
from kvx.tiers import BlockKind, DiskTier

HERE = Path(__file__).parent
FORMATS = ("bf16", "fp8_e4m3_per_token_head", "int8_per_token_head_inline", "nvfp4", "fp8_e4m3_per_head")
NEUTRAL = {2: "layer kv | block token head dim", 1: "layer | block token head dim"}
SPEC = kvx.CacheSpec(3, 4, 2, 16, num_layers=2, layout="layer | block kv token head dim", model="frozen")
NAME = bytes(range(16))


def specs() -> Iterator[tuple[str, kvx.CacheSpec]]:
    """Every row in every format that it takes."""
    for name in sorted(ENGINES):
        row = ENGINES[name]
        for fmt in FORMATS:
            try:
                heads = row.num_kv_heads or 4
                yield (
                    f"{name} {fmt}",
                    row.spec(num_layers=3, num_blocks=4, block_size=32, head_dim=64, format=fmt, num_kv_heads=heads),
                )
            except kvx.KvxError:
                continue


def frozen(spec: kvx.CacheSpec) -> str:
    """Short hashes of what a spec makes: its manifest, plans to and from a neutral cache of other blocks, digest of some bytes."""
    other = replace(spec, layout=NEUTRAL[spec.num_planes], block_size=16, num_blocks=8, block_bytes=0)
    made = {"manifest": spec.manifest_text.encode()}
    for name, a, b in (("there", spec, [other]), ("back", other, [spec]), ("ranks", spec, ranks(other))):
        try:
            made[name] = kvx.plan(a, b).to_bytes()
        except kvx.KvxError as error:
            made[name] = str(error).encode()
    buffers = filled(spec)
    made["digest"] = str(kvx.digest(buffers, spec)).encode()
    return " ".join(f"{name} {hashlib.blake2b(x, digest_size=6).hexdigest()}" for name, x in made.items())


def ranks(spec: kvx.CacheSpec) -> list[kvx.CacheSpec]:
    return [spec.shard(2, r) for r in range(2)]


def filled(spec: kvx.CacheSpec) -> list[torch.Tensor]:
    """Bytes that are numbers in every type: no two neighbours alike."""
    out = kvx.allocate_buffers(spec)
    for n, t in enumerate(out):
        raw = t.view(torch.uint8).flatten()
        raw.copy_((torch.arange(raw.numel()) * 37 + n * 11) % 61)
    return out


def write_files(folder: Path) -> None:
    """A cache file, a handover and a disk tier of one block."""
    folder.mkdir()
    buffers = filled(SPEC)
    kvx.save(folder / "cache.kvx", buffers, SPEC)
    neutral = replace(SPEC, layout=HANDOVER)
    part = Part(neutral, (0, 1), 0, 0, tuple(filled(neutral))).sealed(12)
    save_handover(folder / "handover", Handover(np.arange(12, dtype=np.int32), (part,)))
    one = replace(SPEC, num_blocks=1)
    kind = BlockKind.of(one)
    with DiskTier(folder / "tier", kind, 1 << 20) as tier:
        assert tier.put_now([NAME], [kind.block(filled(one))]) == [True]


def main() -> None:
    text = {name: frozen(spec) for name, spec in specs()}
    (HERE / "frozen.json").write_text(json.dumps(text, indent=0, sort_keys=True) + "\n")
    if not (HERE / "frozen").exists():
        write_files(HERE / "frozen")
    print(f"{len(text)} specs")


if __name__ == "__main__":
    main()
