"""Aliases by hand: who has the tokens says under which names a store has them, for an engine that tells its store hashes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvx.connector.store_kinds import is_plain
from kvx.connector.store_names import NAMES, Scheme, alias_kind, aliases, spec_of, write_alias
from kvx.errors import BadArgument
from kvx.tiers import DiskTier, TierOption
from kvx.tiers.directory import read_manifest
from kvx.tiers.option import DISK_BYTES


def link_pages(
    folder: str | Path,  # of the store: what "disk:..." names
    mine: Scheme,  # whose pages are led from
    pages: Sequence[bytes],  # their names, from the first token on
    *,
    model: str,
    names_of: Callable[[Scheme], Sequence[bytes] | None],  # the same tokens' names in another scheme; None: it cannot be told
) -> int:
    """Lead these names to blocks that the store has of the same tokens. How many pages from the first on can now be found."""
    folder, covered = Path(folder), set[bytes]()
    if not folder.is_dir():
        raise BadArgument(f"link(): {folder} is no folder; it must be the directory of a store, as in disk:DIR.")
    for scheme, tiers in _schemes(folder, model).items():
        names = None if scheme == mine else names_of(scheme)
        if names is None:
            continue
        there = [any(tier.has_now([name])[0] for tier in tiers) for name in names]
        names = names[: there.index(False)] if False in there else names
        records = aliases(pages, mine.block_size, names, scheme.block_size)
        kind = alias_kind(model, mine, scheme)
        with TierOption("disk", DISK_BYTES, folder).open(kind) as tier:
            tier.put(list(records), [write_alias(kind, alias) for alias in records.values()]).result()
        covered |= set(records)
    return next((n for n, page in enumerate(pages) if page not in covered), len(pages))


def _schemes(folder: Path, model: str) -> dict[Scheme, list[DiskTier]]:
    """Blocks of K and V of this model, by whose names they have and how large they are."""
    found: dict[Scheme, list[DiskTier]] = {}
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        kind = read_manifest(each)
        spec = None if kind is None else spec_of(kind)
        if kind is None or spec is None or not is_plain(each, kind) or spec[0].model != model:
            continue
        tier = DiskTier(each, kind, DISK_BYTES, threads=1)
        found.setdefault(Scheme(str(kind.manifest.get(NAMES, "")), spec[0].block_size), []).append(tier)
    return found
