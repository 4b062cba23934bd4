"""The files of one cache: one, or one for each rank."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as counting
from itertools import takewhile
from pathlib import Path

from kvx.errors import BadArgument, Incompatible
from kvx.files import CacheFile, load, shard_paths
from kvx.spec import CacheSpec

_SAME = ("model", "num_blocks", "block_size", "head_dim", "format")


@dataclass(frozen=True)
class Shards:
    files: list[CacheFile]  # by rank; mapped, not checked yet
    whole: CacheSpec  # of the cache they are parts of. Its blocks are not padded: how much is said of allocations

    @staticmethod
    def open(call: str, paths: Sequence[Path]) -> Shards:
        opened = [load(path, verify=False) for path in paths]
        first = opened[0]
        for other in opened[1:]:
            for name in (*_SAME, "v_head_dim", "v_format", "num_planes"):
                a, b = _field(first.spec.of_kv, name), _field(other.spec.of_kv, name)
                if a != b:
                    raise Incompatible(f"{call}: {other.path} has {name} {b!r}; {first.path} has {a!r}. They are not of one cache.")
        held: dict[tuple[int, ...], CacheFile] = {}
        for file in opened:
            same = held.setdefault(_piece(file.spec.of_kv), file)
            if same.content and file.content and same.content != file.content:
                raise Incompatible(
                    f"{call}: {same.path} and {file.path} are of the same heads, and were written with other content."
                )
        return Shards(opened, _whole(call, first.spec.of_kv, list(held)))

    @property
    def parts(self) -> list[CacheFile]:
        """Those that make the whole: of several ranks that hold the same heads, the first."""
        return list({_piece(f.spec.of_kv): f for f in reversed(self.files)}.values())[::-1]

    def require_seals(self, call: str, otherwise: str) -> None:
        for file in self.files:
            if not file.parts:
                raise BadArgument(
                    f"{call}: {file.path} has no seal: it was written without a digest of its content, so nothing can be checked. "
                    f"{otherwise}"
                )


def find_paths(call: str, path: str, count: int = 0) -> list[Path]:
    """A file; or, where {rank} stands for the rank, all there are: from 0 on, without a gap. `count`: how many there should be."""
    if "{rank}" not in path:
        return list(shard_paths(path, count or 1))
    there = _ranks(path)
    count = count or max(there, default=-1) + 1
    if not there or there != set(range(count)):
        odd = min(there ^ set(range(count)), default=0)
        what = f"rank {odd} is missing" if odd < count else f"there is rank {odd} too, and {count} were asked for"
        raise BadArgument(f"{call}: {path}: {what if there else 'there is no such file for any rank'}. {{rank}} counts from 0.")
    return list(shard_paths(path, count))


def _ranks(path: str) -> set[int]:
    """All whose file is there; of folders named by rank, those from 0 on."""
    folder, name = Path(path).parent, Path(path).name
    if "{rank}" in str(folder):
        return set(takewhile(lambda n: Path(path.replace("{rank}", str(n))).is_file(), counting()))
    pattern = re.compile("([0-9]{1,6})".join(map(re.escape, name.split("{rank}", 1))).replace(re.escape("{rank}"), r"\1"))
    names = os.listdir(folder) if folder.is_dir() else []
    found = {int(match[1]) for n in names if (match := pattern.fullmatch(n))}
    return {n for n in found if Path(path.replace("{rank}", str(n))).is_file()}


def _field(spec: CacheSpec, name: str) -> object:
    if name in ("v_head_dim", "v_format"):
        return getattr(spec, name) or getattr(spec, name.removeprefix("v_"))
    return getattr(spec, name)


def _piece(spec: CacheSpec) -> tuple[int, ...]:
    return spec.layer_start, spec.num_layers, spec.head_start, spec.num_kv_heads


def _whole(call: str, spec: CacheSpec, pieces: list[tuple[int, ...]]) -> CacheSpec:
    """BadArgument where a rank is missing: every head of every layer is in a file."""
    layer, head = (min(p[i] for p in pieces) for i in (0, 2))
    layers, heads = max(p[0] + p[1] for p in pieces) - layer, max(p[2] + p[3] for p in pieces) - head
    if sum(p[1] * p[3] for p in pieces) != layers * heads:
        listed = ", ".join(f"heads {h} to {h + m - 1} of layers {a} to {a + n - 1}" for a, n, h, m in sorted(pieces)[:8])
        raise BadArgument(f"{call}: the files have {listed}: no whole cache. A rank is missing, or heads are in two files.")
    return replace(spec, num_kv_heads=heads, head_start=head, num_layers=layers, layer_start=layer, block_bytes=0)
