"""The owner of blocks: which are used, what they hold, and the tables of a step. docs/cache.md."""

from kvx.cache.batch import Batch
from kvx.cache.blocks import BlockAllocator
from kvx.cache.groups import Layer, LayerGroup
from kvx.cache.paged import CacheStats, GroupStats, PagedCache
from kvx.cache.prefix import PrefixCache, PrefixStats
from kvx.cache.sequence import Sequence

__all__ = [
    "Batch",
    "BlockAllocator",
    "CacheStats",
    "GroupStats",
    "Layer",
    "LayerGroup",
    "PagedCache",
    "PrefixCache",
    "PrefixStats",
    "Sequence",
]
