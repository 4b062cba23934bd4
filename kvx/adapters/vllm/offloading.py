"""KvxOffloadingSpec: KVX's tiers behind vLLM's own OffloadingConnector, on the pages that vLLM hands out. Needs vLLM 0.32.

    kv_connector="OffloadingConnector", kv_connector_extra_config={"spec_name": "KvxOffloadingSpec",
        "spec_module_path": "kvx.adapters.vllm.offloading", "tiers": ["disk:/var/kv"]}

Bytes go as they lie in vLLM's pages, under vLLM's names, so vLLM alone finds them again, and only with the same layout and ranks.
Whoever wants other engines to find them takes the connector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
    get_offload_group_idx,
)

from kvx.adapters.vllm import facts
from kvx.adapters.vllm.page_facts import page_facts, require_model
from kvx.connector.pages import Pages, PageTiers
from kvx.connector.settings import Settings
from kvx.errors import InternalError, Unsupported
from kvx.tiers import TierError


@dataclass
class KvxKeys(LoadStoreSpec):
    """Names of blocks, in the order of vLLM's block ids."""

    keys: list[bytes]


class KvxOffloadingSpec(OffloadingSpec):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.cache.blocks_per_chunk != 1 or config.canonical_layout:
            raise Unsupported(
                f"KvxOffloadingSpec: blocks_per_chunk is {config.cache.blocks_per_chunk}, "
                f"canonical_layout {config.canonical_layout}. "
                "A block of vLLM's is a block in the tiers, as it lies: leave both out."
            )
        settings = Settings.read({k: v for k, v in config.extra_config.items() if k != "block_size"}, foreign=facts.EXTRA_CONFIG)
        require_model("KvxOffloadingSpec", settings.model, config)
        p = config.parallel
        self.stacks = PageTiers(
            settings.tiers,
            page_facts(config, settings.model),
            num_ranks=p.world_size,
            group_ids=[g.group_id for g in config.groups],
        )

    def get_manager(self) -> OffloadingManager:
        return _Manager(self.stacks)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        tensors = [t.tensor for t in kv_caches.tensors]
        groups = [Pages([(tensors[r.tensor_idx], r.page_size_bytes) for r in refs]) for refs in kv_caches.group_data_refs]
        return _Worker(self.stacks, groups, self.config.parallel.rank)


class _Manager(OffloadingManager):
    """Knows nothing itself: the tiers are the truth."""

    def __init__(self, stacks: PageTiers) -> None:
        self._stacks = stacks

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # Read, not only looked for: vLLM has no way back from a load that fails.
        return LookupResult.HIT if self._stacks.is_whole(get_offload_group_idx(key), key) else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return KvxKeys(list(keys))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        new = [k for k in keys if not self._stacks.is_there(get_offload_group_idx(k), k)]
        return PrepareStoreOutput(new, KvxKeys(list(new)), [])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class _Worker(OffloadingWorker):
    """Jobs are done when they are submitted."""

    def __init__(self, stacks: PageTiers, groups: list[Pages], rank: int) -> None:
        self._groups = groups
        self._tiers = [stacks.make(rank, n, pages.num_bytes) for n, pages in enumerate(groups)]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        moved = 0
        for group, block, key in self._each(src_spec, dst_spec):
            stack = self._tiers[group]
            try:
                stack.put([key], [stack.kind.block([self._groups[group].read(block)])])
            except TierError:  # a full disk: the block is a miss later
                continue
            moved += self._groups[group].num_bytes
        return self._finish(job_id, moved)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        moved = 0
        for group, block, key in self._each(dst_spec, src_spec):
            (found,) = self._tiers[group].get([key])
            if found is None:
                raise InternalError(
                    f"KvxOffloadingSpec: block {key.hex()} left the tiers between being found and being read. Give them more room."
                )
            self._groups[group].write(block, found.buffers[0])
            moved += self._groups[group].num_bytes
        return self._finish(job_id, moved)

    def _each(self, spec: GPULoadStoreSpec, keys: LoadStoreSpec) -> Iterator[tuple[int, int, bytes]]:
        """(group, block, key)"""
        assert isinstance(keys, KvxKeys)
        groups = [n for n, size in enumerate(spec.group_sizes) for _ in range(size)]
        return zip(groups, spec.block_ids.tolist(), keys.keys, strict=True)

    def _finish(self, job_id: int, moved: int) -> bool:
        self._done.append(TransferResult(job_id, True, transfer_size=moved))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """None is ever under way."""
