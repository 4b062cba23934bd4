"""Where blocks go when they leave the device: host memory, a directory. One protocol, tier.py; the way there, mover.py."""

from kvx.errors import TierError
from kvx.tiers.block import Block, BlockKind, block_spec
from kvx.tiers.cache_tiers import CacheTiers, kept_specs
from kvx.tiers.disk import DiskTier
from kvx.tiers.host import HostTier
from kvx.tiers.mover import Mover
from kvx.tiers.mover_stats import MoverEvent, MoverStats
from kvx.tiers.option import TierOption, open_tiers
from kvx.tiers.packs import PackTier
from kvx.tiers.tier import Tier, TierEvent, TierStats

__all__ = [
    "Block",
    "BlockKind",
    "CacheTiers",
    "DiskTier",
    "HostTier",
    "Mover",
    "MoverEvent",
    "MoverStats",
    "PackTier",
    "Tier",
    "TierError",
    "TierEvent",
    "TierOption",
    "TierStats",
    "block_spec",
    "kept_specs",
    "open_tiers",
]
