"""KvxTier on a disk without room: vLLM loads it by this module's name in place of the real one."""

from __future__ import annotations

import errno

from kvx.adapters.vllm.secondary_tier import KvxTier
from kvx.tiers import block_io, packs


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


block_io.write_direct = block_io.write_block = packs.write_pack = _full
__all__ = ["KvxTier"]
