"""What the user says of the store in LMCache's config: the same names in both of its modes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvx.adapters.lmcache.chunks import ChunkForm, LmcacheStore
from kvx.connector.settings import Settings
from kvx.errors import BadArgument
from kvx.spec import Spec

_OURS = ("timeout_s", "layout", "num_kv_heads")


@dataclass(frozen=True)
class StoreConfig:
    settings: Settings
    timeout_s: float
    layout: str
    num_kv_heads: int  # of the whole model; 0: not said

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, ours: Collection[str] = ()) -> StoreConfig:
        settings = Settings.read(extra, ours=(*_OURS, *ours))
        if not settings.model:
            raise BadArgument(
                'extra config: "model" is not given; it is a name that only these weights have, since others find their K and V by '
                'it: kvx.weights_identity(folder, dtype="bf16") makes one of the weight files.'
            )
        if settings.block_size:
            raise BadArgument("extra config: block_size is LMCache's own, chunk_size; it keeps whole chunks.")
        return cls(settings, extra.get("timeout_s", 5.0), str(extra.get("layout") or ""), number(extra, "num_kv_heads"))

    def open(
        self,
        form: ChunkForm,
        described: tuple[Spec | None, dict[str, str | int]],  # by `read_chunk` or `read_states`
        *,
        names: str,
        chunk_size: int,
        shares: int = 1,  # into how many the capacity is shared out, for workers and layers have a folder each
    ) -> LmcacheStore:
        tiers = [option.share(1, shares) for option in self.settings.tiers]
        how = {"layout": self.layout, "format": self.settings.format}
        return LmcacheStore(form, tiers, described, model=self.settings.model, names=names, chunk_size=chunk_size, **how)


def number(extra: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = extra.get(name, default)
    if type(value) is not int or value < 0:
        raise BadArgument(f"extra config: {name} is {value!r}; it must be a whole number.")
    return value
