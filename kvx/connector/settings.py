"""What the user says in an engine's extra config: which tiers, whose KV, and how it is kept there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvx.errors import BadArgument
from kvx.tiers import TierOption

_KNOWN = ("tiers", "model", "block_size", "format")


@dataclass(frozen=True)
class Settings:
    """What an engine's connector is told, such as vLLM's `kv_connector_extra_config`."""

    tiers: tuple[TierOption, ...]  # fastest first
    model: str = ""  # the model that K and V belong to; "": a name computed from the weight files
    block_size: int = 0  # tokens of a block in the tiers; 0: as the engine's
    format: str = ""  # of blocks in the tiers; "": as the engine's

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, foreign: Collection[str] = (), ours: Collection[str] = ()) -> Settings:
        """`foreign`: names that are the engine's own and stand in the same dict. `ours`: those that its adapter reads."""
        unknown = [name for name in extra if name not in (*_KNOWN, *foreign, *ours)]
        if unknown:
            raise BadArgument(f"extra config: {unknown[0]!r} is not known; there are {', '.join((*_KNOWN, *ours))}.")
        tiers = extra.get("tiers") or ()
        if isinstance(tiers, str) or not tiers:
            raise BadArgument(
                f'extra config: tiers is {tiers!r}; it must be a list of them: "tiers": ["host:1GB", "disk:/var/kv"].'
            )
        block_size = extra.get("block_size") or 0
        if type(block_size) is not int or block_size < 0:
            raise BadArgument(f"extra config: block_size is {block_size!r}; it must be a number of tokens.")
        parsed = tuple(TierOption.parse(str(t)) for t in tiers)
        return cls(parsed, str(extra.get("model") or ""), block_size, str(extra.get("format") or ""))
