"""A connector that loses blocks: one rank's copy of a load's third goes between the scheduler's count and the worker's read."""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed import get_world_group

from kvx.adapters.vllm.connector import KvxConnector

_RANK = "KVX_TEST_LOSING_RANK"  # which one loses


class LosingConnector(KvxConnector):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if get_world_group().rank_in_group == int(os.environ[_RANK]):
            for job in self._metadata().loads:
                for mover in self._movers:
                    (was_there,) = mover.stack.tiers[0].drop([job.names[2]]).result()
                    print("KVX-TEST lost block 2:", was_there, flush=True)
        super().start_load_kv(forward_context, **kwargs)
