"""Caches in files: safetensors, with the spec and a seal in the metadata. Any reader sees the tensors; KVX
also knows what they are.

header.py is what stands before the bytes, seal.py whether they are those that were written, cache_file.py opens and makes files.
"""

from kvx.files.cache_file import CacheFile, NewFile, create, is_cache_file, load, save, shard_paths, sync_folder
from kvx.files.seal import SealCheck, digest_blocks, part_ranges

__all__ = [
    "CacheFile",
    "NewFile",
    "SealCheck",
    "create",
    "digest_blocks",
    "is_cache_file",
    "load",
    "part_ranges",
    "save",
    "shard_paths",
    "sync_folder",
]
