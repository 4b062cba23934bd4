"""What a mover did: counts, and events as they happen."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple


class MoverEvent(NamedTuple):
    kind: str  # "offloaded", "onboarded", "promoted", "handed down", "dropped" (lost on the way down) or "failed"
    names: tuple[bytes, ...]
    detail: str = ""


@dataclass
class MoverStats:
    """Counts of blocks since the mover was made, and of their bytes as the tiers keep them."""

    offloaded: int = 0
    offloaded_bytes: int = 0
    onboarded: int = 0
    onboarded_bytes: int = 0
    promoted: int = 0  # of those onboarded, kept by a faster tier from now on
    handed_down: int = 0
    dropped: int = 0  # evicted by a tier, and lost: too many were on their way down, or the next tier could not keep it
    missed: int = 0  # asked for, and not there: evicted meanwhile, or damaged
    failed: int = 0  # not offloaded, because a tier could not keep it
    hits: list[int] = field(default_factory=list)  # blocks that came from each tier; others were between two

    def __add__(self, other: MoverStats) -> MoverStats:
        """Of two layer groups."""
        total = MoverStats(hits=[a + b for a, b in zip(self.hits, other.hits, strict=True)])
        for name in (f.name for f in fields(self) if f.name != "hits"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total
