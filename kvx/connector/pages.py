"""Pages of an engine as blocks of bytes: what a tier keeps where nobody but the same engine is to read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvx.connector.tier_stack import TierStack
from kvx.errors import BadArgument
from kvx.tiers import BlockKind, DiskTier, HostTier, Tier, TierOption
from kvx.tiers.directory import read_manifest

# Host tiers of this process, by what they are for: an engine's manager and worker are two objects.
_HOST: dict[tuple[int, str], HostTier] = {}


class Pages:
    """All pages that one block id has in a group: a piece of each tensor."""

    def __init__(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        self._tensors = list(tensors)  # ([num_blocks, page bytes or more] int8, bytes of a page that are used)
        self.num_bytes = sum(size for _, size in tensors)

    def read(self, block: int) -> Tensor:
        return torch.cat([t[block, :size] for t, size in self._tensors]).view(torch.uint8).cpu()

    def write(self, block: int, data: Tensor) -> None:
        parts = data.split([size for _, size in self._tensors])
        for (t, size), part in zip(self._tensors, parts, strict=True):
            t[block, :size].copy_(part.view(torch.int8))


class PageTiers:
    """The tiers of every rank and group. Workers make them, since they know how large a page is; the manager finds them."""

    def __init__(self, tiers: Sequence[TierOption], facts: Mapping[str, str], *, num_ranks: int, group_ids: Sequence[int]) -> None:
        if remote := next((option for option in tiers if option.address), None):
            raise BadArgument(
                f"tier {remote.kind}:{remote.address}: pages are found by the folder that a worker made, so they go to host:SIZE "
                "or disk:DIR. vLLM's connector (KvxConnector) and KvxTier take other stores."
            )
        self._tiers, self._facts, self._num_ranks = list(tiers), dict(facts), num_ranks
        self._group_ids = list(group_ids)  # the engine's numbers of the groups that are offloaded
        self._found: dict[tuple[int, int], TierStack] = {}

    def make(self, rank: int, group: int, num_bytes: int) -> TierStack:
        """`group` counts the groups that are offloaded."""
        kind = BlockKind(self._named(rank, group), (num_bytes,))
        tiers: list[Tier] = []
        for option in self._tiers:
            setting = option.share(1, self._num_ranks * len(self._group_ids))
            if setting.path is not None:
                tiers.append(DiskTier(self._folder(setting.path, rank, group), kind, setting.capacity_bytes))
            else:
                at = setting.capacity_bytes, self._digest(rank, group)
                tiers.append(_HOST.setdefault(at, HostTier(kind, setting.capacity_bytes, pin_memory=True)))
        return TierStack(kind, tiers)

    def is_there(self, group_id: int, key: bytes) -> bool:
        return all(stack is not None and all(stack.has([key])) for stack in self._ranks(group_id))

    def is_whole(self, group_id: int, key: bytes) -> bool:
        """Every rank's block can be read."""
        return all(stack is not None and stack.beginning([key]) == 1 for stack in self._ranks(group_id))

    def _ranks(self, group_id: int) -> list[TierStack | None]:
        group = self._group_ids.index(group_id)
        return [self._find(rank, group) for rank in range(self._num_ranks)]

    def _find(self, rank: int, group: int) -> TierStack | None:
        """What a worker made, of this process or another. None: there is none yet."""
        if (rank, group) not in self._found:
            tiers: list[Tier] = []
            for setting in self._tiers:
                if setting.path is not None:
                    folder = self._folder(setting.path, rank, group)
                    kind = read_manifest(folder)
                    if kind is None:
                        return None
                    tiers.append(DiskTier(folder, kind, setting.capacity_bytes))
                elif (tier := _HOST.get((setting.capacity_bytes, self._digest(rank, group)))) is not None:
                    tiers.append(tier)
            if not tiers:
                return None
            self._found[rank, group] = TierStack(tiers[0].kind, tiers)
        return self._found[rank, group]

    def _named(self, rank: int, group: int) -> dict[str, str | int]:
        return {**self._facts, "rank": rank, "group": group}

    def _digest(self, rank: int, group: int) -> str:
        text = json.dumps(self._named(rank, group), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _folder(self, path: Path, rank: int, group: int) -> Path:
        return path / self._digest(rank, group)
