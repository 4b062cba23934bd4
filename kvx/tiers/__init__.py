"""Where blocks go when they leave the device: host memory, a directory. One protocol, tier.py."""

from kvx.tiers.block import Block, BlockKind, block_spec
from kvx.tiers.disk import DiskTier
from kvx.tiers.host import HostTier
from kvx.tiers.tier import Tier, TierError, TierEvent, TierStats

__all__ = ["Block", "BlockKind", "DiskTier", "HostTier", "Tier", "TierError", "TierEvent", "TierStats", "block_spec"]
