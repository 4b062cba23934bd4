"""An engine's tiers: what --tier says, opened on the engine's cache.

Blocks are kept in the neutral layout, by names that begin with the model: what kvx.handover.find reads. A directory is a store that
other engines share: what they wrote of a prompt, in whatever blocks, is found as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from kvx.adapters.store import share
from kvx.cache.paged import PagedCache
from kvx.errors import BadArgument
from kvx.handover.part import neutral
from kvx.spec.formats import FORMATS
from kvx.tiers import BlockKind, CacheTiers, TierError, TierOption, open_tiers


def kept_format(name: str) -> str:
    """A format whose scales stand in the rows, as a block in one run has them."""
    if FORMATS[name].scale is None or FORMATS[name].is_inline:
        return name
    if f"{name}_inline" in FORMATS:
        return f"{name}_inline"
    raise BadArgument(f'tiers keep no "{name}": its scales stand apart from the rows. f32, bf16, f16, int8 and fp8 can be kept.')


class EngineTiers:
    """Open tiers on a cache. close() keeps for the next process what it would find again."""

    def __init__(self, cache: PagedCache, options: Sequence[TierOption], *, format: str, model: str) -> None:
        self.options, self.format = tuple(options), kept_format(format)
        self.error = ""  # why something could not be saved
        self._is_closed = False
        kept = [
            replace(
                neutral(g.spec.of_kv, num_blocks=1, block_size=cache.block_size, format=self.format, model=model),
                num_layers=len(g.layers),
            )
            for g in cache.groups
        ]
        with ExitStack() as stack:
            kinds, names = [BlockKind.of(k) for k in kept], [g.name for g in cache.groups]
            groups = open_tiers(options, kinds, names, pin_memory=cache.device.type == "cuda")
            for tier in (tier for mine in groups for tier in mine):
                stack.enter_context(tier)
            self.backing = stack.enter_context(CacheTiers(cache, groups, kept=kept))
            stack.enter_context(share(self.backing))
            self._opened = stack.pop_all()

    def stats(self) -> dict[str, Any]:
        stats = asdict(self.backing.stats)
        hits = stats.pop("hits")
        stats["failed"] += self.backing.num_lost
        return {
            **stats,
            "error": self.error or self.backing.error,
            "format": self.format,
            "hits": [[o.kind, n] for o, n in zip(self.options, hits, strict=True)],
        }

    def close(self) -> None:
        """Put what lasting tiers do not have yet into them, then close all. Once."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.backing.save()
        except TierError as error:
            self.error = str(error)
        finally:
            self._opened.close()
