"""KvxTier: KVX's tiers as a secondary tier of vLLM's own offloading, behind its host memory. Needs vLLM 0.32.

    kv_connector="OffloadingConnector", kv_connector_extra_config={"spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 8_000_000_000, "secondary_tiers": [{"type": "KvxTier",
            "module_path": "kvx.adapters.vllm.secondary_tier", "tiers": ["disk:/var/kv:200GB"], "model": "qwen3-8b"}]}

Chunks go as they lie in vLLM's host memory, under vLLM's hashes: vLLM alone finds them again, with the same layout and ranks. All
calls are of vLLM's scheduler, so none waits: kvx/connector/chunk_jobs.py does the work on threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import vllm
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvx.adapters.vllm.page_facts import chunk_facts, require_model
from kvx.adapters.vllm.tiering import read_spans
from kvx.connector.chunk_jobs import ChunkJobs
from kvx.connector.chunk_store import ChunkGroup, ChunkStore
from kvx.connector.settings import Settings
from kvx.errors import BadArgument
from kvx.tiers import BlockKind

LOGGER = logging.getLogger("vllm.kvx")  # under vLLM's own, whose lines are shown


class KvxTier(SecondaryTierManager):
    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **told: Any,  # what stands beside "type" and "module_path"
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = Settings.read(told, ours=("timeout_s", "threads", "enable_kv_events", "locality"))
        if settings.format or settings.block_size:
            raise BadArgument("KvxTier: format and block_size are vLLM's own; chunks are kept as they lie. Leave them out.")
        config = offloading_spec.config
        require_model("KvxTier", settings.model, config)
        self.locality = Locality(told["locality"]) if told.get("locality") else None
        has_events = bool(told.get("enable_kv_events")) and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if has_events else None
        rows = np.asarray(primary_kv_view).view(np.uint8)
        groups = _groups(offloading_spec, settings.model, rows.shape[1])
        timeout_s = told.get("timeout_s", 5.0)
        store = ChunkStore(groups, settings.tiers, logger=LOGGER)
        self._jobs = ChunkJobs(rows, store, timeout_s=timeout_s, threads=told.get("threads", 8), logger=LOGGER)
        store.open(timeout_s)
        self._is_lasting = any(not option.is_host for option in settings.tiers)
        self._is_seed_checked = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        is_there = self._jobs.lookups.look(key, req_context.req_id)
        return LookupResult.RETRY if is_there is None else LookupResult.HIT if is_there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs.submit(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs.submit(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids, is_load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for job in self._jobs.finished():
            some = None if job.is_whole or not job.is_load else [OffloadKey(key) for key in job.keys if key in job.moved]
            results.append(JobResult(job.job_id, job.is_whole, some, transfer_time=job.seconds, transfer_bytes=job.num_bytes))
            if self._events is not None and not job.is_load and job.moved:
                keys = [OffloadKey(key) for key in job.keys if key in job.moved]
                self._events.append(OffloadingEvent(keys, self.medium, removed=False, locality=self.locality))
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, None if self._events is None else []
        return events or ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._check_seed()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._jobs.lookups.forget(req_context.req_id)

    def drain_jobs(self) -> None:
        self._jobs.drain()

    def shutdown(self) -> None:
        self._jobs.close()

    def _check_seed(self) -> None:
        """vLLM makes it after its tiers, so it is looked at with the first request."""
        if self._is_seed_checked:
            return
        self._is_seed_checked = True
        fixed = (os.environ.get("PYTHONHASHSEED"), kv_cache_utils.DEFAULT_NONE_HASH_SEED)
        if self._is_lasting and kv_cache_utils.get_none_hash_seed() not in fixed:
            LOGGER.warning(
                "KVX: vLLM begins its block hashes with a random number, as --prefix-caching-hash-algo xxhash has it. Nothing "
                "that is kept now is found after a restart, or by another server. Set PYTHONHASHSEED to one value for all, or use "
                "sha256."
            )


def _groups(spec: Any, model: str, row_bytes: int) -> dict[int, ChunkGroup]:
    config = spec.config
    spans = read_spans(spec)
    if spans is None:
        # Behind the ranks' parts a row is filled up to a page of the system's.
        used = spec.cpu_page_size_per_worker * (1 if spec.replicated_layout else config.parallel.world_size)
        spans = [((0, min(used, row_bytes)),)] * len(config.groups)
        if len(config.groups) > 1:
            LOGGER.info("KVX: groups are kept with their padding. With spec_name KvxTieringSpec they are kept without.")
    version = ".".join(vllm.__version__.split(".")[:2])
    made = {}
    for group, mine in zip(config.groups, spans, strict=True):
        assert all(start >= 0 and start + size <= row_bytes for start, size in mine)
        facts = chunk_facts(
            config, model, group=group.group_id, spans=mine, device=current_platform.device_type, version=version
        )  # fmt: skip
        made[group.group_id] = ChunkGroup(BlockKind(facts, (sum(size for _, size in mine),)), mine)
    return made
