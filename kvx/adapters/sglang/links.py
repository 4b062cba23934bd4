"""Aliases for SGLang: who has the tokens says under which names a store has them. SGLang tells its storage hashes alone."""

from __future__ import annotations

from pathlib import Path

from numpy.typing import ArrayLike

from kvx.adapters.sglang.names import SGLANG, page_names
from kvx.connector.store_kinds import is_plain
from kvx.connector.store_names import NAMES, Scheme, alias_kind, aliases, spec_of, write_alias
from kvx.errors import BadArgument
from kvx.handover import names as rule_names
from kvx.tiers import DiskTier, TierOption
from kvx.tiers.directory import read_manifest
from kvx.tiers.option import DISK_BYTES


def link(
    tokens: ArrayLike,
    folder: str | Path,  # of the store: what "disk:..." names
    *,
    model: str,
    page_size: int,  # of the SGLang that is to find them
    extra_key: str | None = None,
    cache_salt: str | None = None,
) -> int:
    """Lead SGLang's names of these tokens to blocks that the store has of them, whoever wrote them and in whatever size.

    How many pages from the first on it can now find. Only blocks that are there are led to; write more, and link again.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadArgument(f"link(): {folder} is no folder; it must be the directory of a store, as in disk:DIR.")
    pages = page_names(tokens, page_size, extra_key=extra_key, cache_salt=cache_salt)
    mine, covered = Scheme(SGLANG, page_size), set()
    for scheme, tiers in _schemes(folder, model).items():
        if scheme == mine:
            continue
        if scheme.names == SGLANG:
            names = page_names(tokens, scheme.block_size, extra_key=extra_key, cache_salt=cache_salt)
        elif extra_key is None and cache_salt is None:
            names = rule_names(tokens, scheme.block_size, model)
        else:  # the rule's names of a text under a key or a salt are those of its writer, who says them
            continue
        there = [any(tier.has_now([name])[0] for tier in tiers) for name in names]
        names = names[: there.index(False)] if False in there else names
        records = aliases(pages, page_size, names, scheme.block_size)
        kind = alias_kind(model, mine, scheme)
        option = TierOption("disk", DISK_BYTES, folder)
        with option.open(kind) as tier:
            tier.put(list(records), [write_alias(kind, alias) for alias in records.values()]).result()
        covered |= set(records)
    return next((n for n, page in enumerate(pages) if page not in covered), len(pages))


def _schemes(folder: Path, model: str) -> dict[Scheme, list[DiskTier]]:
    """Blocks of K and V of this model, by whose names they have and how large they are."""
    found: dict[Scheme, list[DiskTier]] = {}
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        kind = read_manifest(each)
        spec = None if kind is None else spec_of(kind)
        if kind is None or spec is None or not is_plain(each, kind):
            continue
        if spec[0].model != model or kind.manifest.get(NAMES, "") not in ("", SGLANG):
            continue
        tier = DiskTier(each, kind, DISK_BYTES, threads=1)
        found.setdefault(Scheme(str(kind.manifest.get(NAMES, "")), spec[0].block_size), []).append(tier)
    return found
