"""MLA: a token's block has one latent row, out of which K and V are both read. With a window it slides as others do."""

from __future__ import annotations

from dataclasses import dataclass

from kvx.cache.kinds.kind import Blocks, GroupKind
from kvx.cache.kinds.sliding import first_seen
from kvx.spec.cache_spec import CacheSpec, Spec


@dataclass(frozen=True)
class Latent(GroupKind):
    window: int = 0
    is_latent = True

    @property
    def gives_back(self) -> bool:  # type: ignore[override]
        return self.window > 0

    def first_block(self, length: Blocks, block_size: int) -> Blocks:
        return first_seen(length, self.window) // block_size if self.window else length * 0

    def check(self, spec: Spec) -> str | None:
        if isinstance(spec, CacheSpec) and spec.num_kv_heads != 1:
            return f"is_latent with {spec.num_kv_heads} KV heads; a latent has one."
        return super().check(spec)
