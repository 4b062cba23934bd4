"""KvxTieringSpec: vLLM's TieringOffloadingSpec, which also runs where there is no GPU, and says what of a chunk is padding.

    kv_connector="OffloadingConnector", kv_connector_extra_config={"spec_name": "KvxTieringSpec",
        "spec_module_path": "kvx.adapters.vllm.tiering", "cpu_bytes_to_use": 8_000_000_000, "secondary_tiers": [...]}

On a GPU its worker is vLLM's own. Needs vLLM 0.32.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvx.errors import Unsupported

Spans = tuple[tuple[int, int], ...]


class KvxTieringSpec(TieringOffloadingSpec):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._worker: OffloadingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            told = self.extra_config.get("secondary_tiers") or []
            if any(tier.get("type") == "KvxTier" for tier in told) and not self.config.canonical_layout:
                _tell_spans(self, kv_caches)
            if current_platform.is_cpu():
                self._worker = self._host_worker(kv_caches)
        return super().get_worker(kv_caches) if self._worker is None else self._worker

    def _host_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.config.canonical_layout:
            raise Unsupported("KvxTieringSpec: canonical_layout is true, which runs on GPUs alone. Leave it out.")
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return HostWorker(kv_caches, region, self.blocks_per_chunk)
        except Exception:
            region.cleanup()
            raise


class HostWorker(OffloadingWorker):
    """Copies between vLLM's pages and its shared region, both in host memory. A job is done when it is submitted."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._pages = [t.tensor.view(torch.int8) for t in kv_caches.tensors]  # [blocks, page bytes]
        # The views are made in the order of the tensors: each takes the place in a row behind the one before.
        views = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in kv_caches.tensors]
        self._chunks = [v.unflatten(1, (blocks_per_chunk, -1)) for v in views]  # [chunks, blocks of a chunk, page bytes]
        self._groups = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._move(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._move(job_id, dst_spec, src_spec, is_load=True)

    def _move(self, job_id: int, pages: GPULoadStoreSpec, chunks: LoadStoreSpec, *, is_load: bool) -> bool:
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        begin, moved, at, first = perf_counter(), 0, 0, 0
        blocks, rows = torch.from_numpy(pages.block_ids).long(), torch.from_numpy(chunks.block_ids).long()
        for refs, count, index in zip(self._groups, pages.group_sizes, pages.block_indices, strict=True):
            if not count:
                continue
            # Of the first chunk and the last only some blocks may be meant: `index` is where the first block stands in its request.
            places = torch.arange(count) + index % self._per_chunk
            here, row = blocks[at : at + count], rows[first + places // self._per_chunk]
            for tensor, size in refs:
                inside = (row, places % self._per_chunk, slice(size))
                if is_load:
                    self._pages[tensor][here, :size] = self._chunks[tensor][inside]
                else:
                    self._chunks[tensor][inside] = self._pages[tensor][here, :size]
                moved += count * size
            at += count
            first += int(places[-1]) // self._per_chunk + 1
        self._done.append(TransferResult(job_id, True, transfer_size=moved, transfer_time=perf_counter() - begin))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """None is ever under way."""

    def shutdown(self) -> None:
        self._chunks.clear()  # or the region could not be unmapped
        self._region.cleanup()


# --- what of a chunk is padding --------------------------------------------------------------------------------------------
# vLLM tells a secondary tier how large a chunk is, and its worker how much of a page each group uses. So the worker, which vLLM
# makes first, leaves a note beside the shared region, which the tier reads and removes.


def _tell_spans(spec: KvxTieringSpec, kv_caches: CanonicalKVCaches) -> None:
    rank = 0 if spec.replicated_layout else spec.config.parallel.rank
    starts, at = [], rank * spec.cpu_page_size_per_worker
    for tensor in kv_caches.tensors:
        starts.append(at)
        at += tensor.page_size_bytes * spec.blocks_per_chunk
    groups = []
    for refs in kv_caches.group_data_refs:
        spans = [
            (starts[ref.tensor_idx] + n * kv_caches.tensors[ref.tensor_idx].page_size_bytes, ref.page_size_bytes)
            for ref in refs
            for n in range(spec.blocks_per_chunk)
        ]
        groups.append(joined(spans))
    path = _note(spec.config.engine_id, rank)
    with suppress(FileNotFoundError):
        path.unlink()
    with suppress(FileExistsError):  # of a rank that writes the same
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            json.dump(groups, file)


def read_spans(spec: Any) -> list[Spans] | None:
    """Of each group, which bytes of a chunk are in use. None: nobody said."""
    ranks = 1 if spec.replicated_layout else spec.config.parallel.world_size
    groups: list[list[tuple[int, int]]] = [[] for _ in spec.config.groups]
    for rank in range(ranks):
        path = _note(spec.config.engine_id, rank)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():  # everybody may write there
                    return None
                told = json.load(file)
            path.unlink()
        except FileNotFoundError:
            return None
        for spans, mine in zip(groups, told, strict=True):
            spans += [(int(start), int(size)) for start, size in mine]
    return [joined(spans) for spans in groups]


def joined(spans: list[tuple[int, int]]) -> Spans:
    """In order, and those that touch or overlap as one: layers of a group may share bytes."""
    found: list[tuple[int, int]] = []
    for start, size in sorted(spans):
        if found and start <= sum(found[-1]):
            first = found[-1][0]
            found[-1] = first, max(sum(found[-1]), start + size) - first
        else:
            found.append((start, size))
    return tuple(found)


def _note(engine_id: str, rank: int) -> Path:
    return Path(f"/dev/shm/vllm_offload_{engine_id}.kvx{rank}.json")
