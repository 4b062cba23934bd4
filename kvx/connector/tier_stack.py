"""The tiers of one part and one rank, fastest first, as one: what is put goes to all, what is found in a slower one goes up.

A directory holds blocks of one kind, so each kind has a folder of its own under the one the user names: the digest of its manifest.
Tensor parallel ranks, models, formats and block sizes are other kinds, and so never meet.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

from kvx.tiers import Block, BlockKind, HostTier, Tier, TierError, TierOption
from kvx.tiers.block import Take, hand_on

# Host memory by size and kind: an engine's scheduler and worker are two objects, and see one tier where they share a process.
_HOST: weakref.WeakValueDictionary[tuple[int, bytes], HostTier] = weakref.WeakValueDictionary()


def open_tier(setting: TierOption, kind: BlockKind) -> Tier:
    if not setting.is_host:
        return setting.open(kind)
    tier = _HOST.get((setting.capacity_bytes, kind.digest))
    if tier is None:
        tier = _HOST[setting.capacity_bytes, kind.digest] = HostTier(kind, setting.capacity_bytes, pin_memory=True)
    return tier


class TierStack:
    def __init__(self, kind: BlockKind, tiers: Sequence[Tier]) -> None:
        self.kind, self.tiers = kind, list(tiers)

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which are in every tier."""
        found = [tier.has_now(names) for tier in self.tiers]
        return [all(answers) for answers in zip(*found, strict=True)]

    def has_any(self, names: Sequence[bytes]) -> list[bool]:
        """Which are in some tier."""
        found = [tier.has_now(names) for tier in self.tiers]
        return [any(answers) for answers in zip(*found, strict=True)]

    def put(self, names: Sequence[bytes], blocks: Sequence[Block]) -> None:
        """When it returns or raises, no tier reads the blocks any more: a caller may fill them with others."""
        puts: list[Future[list[bool]]] = []
        try:
            for tier in self.tiers:
                puts.append(tier.put(names, blocks))
        finally:
            wait(puts)
        for done in puts:
            done.result()

    def get(self, names: Sequence[bytes], into: Sequence[Block] | None = None) -> list[Block | None]:
        """Read and checked; None is a miss. Read only. `into` is memory for those that do not lie in memory already."""
        found: list[Block | None] = [None] * len(names)
        for n, tier in enumerate(self.tiers):
            missing = [i for i, block in enumerate(found) if block is None]
            if not missing:
                break
            came = []
            room = None if into is None or isinstance(tier, HostTier) else [into[i] for i in missing]
            for i, block in zip(missing, tier.get_now([names[i] for i in missing], room), strict=True):
                found[i] = block
                if block is not None:
                    came.append((names[i], block))
            for faster in self.tiers[:n] if came else []:
                with suppress(TierError):  # one that is full has less, and is asked again next time
                    faster.put_now([name for name, _ in came], [block for _, block in came])
        return found

    def read(self, names: Sequence[bytes], take: Take) -> list[bool]:
        """get() piece by piece (`Tier.read_now`). False is a miss."""
        if len(self.tiers) == 1:
            return self.tiers[0].read_now(names, take)
        found = self.get(names)
        for n, block in enumerate(found):
            if block is not None:
                hand_on(n, block, take)
        return [block is not None for block in found]

    def beginning(self, names: Sequence[bytes]) -> int:
        """How many of the first are there and whole. They are read, so that a damaged one is a miss before anybody counts on it."""
        for start in range(0, len(names), 64):
            found = self.get(names[start : start + 64])
            if None in found:
                return start + found.index(None)
        return len(names)
