"""Layers that see all tokens: every block stays until its sequence is released."""

from __future__ import annotations

from dataclasses import dataclass

from kvx.cache.kinds.kind import GroupKind


@dataclass(frozen=True)
class Full(GroupKind):
    pass
