"""KvxConnector: vLLM's hooks on KVX's tiers. Prefixes that any engine saved are loaded before a forward, full blocks saved after.

Loaded by kv_connector_module_path="kvx.adapters.vllm.connector"; the extra config is kvx/connector/settings.py's.
Needs vLLM 0.26 to 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvx.adapters.engine_names import namer_of
from kvx.adapters.vllm import facts
from kvx.adapters.vllm.groups import FP8, read_groups, require_block_size
from kvx.adapters.vllm.layout import read_group
from kvx.adapters.vllm.packing import find_packing
from kvx.adapters.vllm.stages import Stages, agreement
from kvx.adapters.vllm.states import ORDERS, read_states
from kvx.connector.groups import Group, PartGroups, parts_of
from kvx.connector.jobs import NULL, Job
from kvx.connector.lost import Lost, LostLoads
from kvx.connector.neighbours import Neighbours
from kvx.connector.scheduler import SchedulerSide
from kvx.connector.settings import Settings
from kvx.connector.shared_host import SharedHost
from kvx.connector.states import StateMover
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.connector.worker import PartMover, runs_of
from kvx.errors import InternalError, Unsupported
from kvx.spec import CacheSpec, Spec, StateSpec
from kvx.tiers import BlockKind, TierError, TierOption

logger = init_logger("vllm.kvx")


@dataclass
class KvxMetadata(KVConnectorMetadata):
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    begun: list[list[int]] = field(default_factory=list)  # where there are loads, tables of the requests that begin in this step
    heard: frozenset[int] = frozenset()  # blocks that did not come, of which the scheduler knows since the last step


class KvxConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        facts.require_known(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self.settings = Settings.read(transfer.kv_connector_extra_config, foreign=facts.EXTRA_CONFIG)
        cache_dtype = str(vllm_config.cache_config.cache_dtype)
        found = [facts.group_facts(g, cache_dtype) for g in kv_cache_config.kv_cache_groups]
        self.groups: list[Group] = read_groups(found, facts.model_facts(vllm_config, found))
        self.parts: list[PartGroups] = parts_of(self.groups)
        self._stages = Stages(vllm_config, self.parts)
        self._has_states = any(part.is_state for part in self.parts)
        self.block_size = self.settings.block_size or self._own_block_size()
        require_block_size(self.block_size, self.groups)
        # Host memory too: this process may have had another model in it, whose blocks are still there.
        self.model = self.settings.model or facts.identity_of(vllm_config)
        self._shared: SharedHost | None = None
        self._tiers = self._shared_tiers()
        self._loads, self._saves = transfer.is_kv_consumer, transfer.is_kv_producer
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduler: SchedulerSide | None = None
        self._movers: list[PartMover | StateMover] = []
        self._lost = LostLoads(
            engine_size=self.groups[0].block_size,
            tier_size=self.block_size,
            agree=agreement(vllm_config),
            is_all_or_none=self._is_decode_only(),
            logger=logger,
        )
        if role == KVConnectorRole.SCHEDULER:
            shards = [[(p, self._tier_spec(p, r)) for p in self._stages.of(part) for r in range(ranks)] for part in self.parts]
            stacks = [[self._stack(p, spec) for p, spec in every] for every in shards]
            self._scheduler = SchedulerSide(
                self.parts, stacks, block_size=self.block_size, model=self.model, is_decode_only=self._is_decode_only(),
                neighbours=[
                    [self._neighbours(stack, spec) for stack, (_, spec) in zip(stacks[n], every, strict=True)]
                    for n, every in enumerate(shards)
                ],
            )  # fmt: skip
            if self._is_decode_only():
                logger.warning(
                    "KVX loads latents only where one token of a prompt is left to compute: vLLM has turned chunked prefill off "
                    "for this MLA backend, which computes several new tokens otherwise after a cache than without one"
                )

    def _is_decode_only(self) -> bool:
        """vLLM 0.32 turns chunked prefill and prefix caching off for an MLA backend that cannot go on after a cache: no AMX."""
        return any(g.is_latent for g in self.groups) and not self._vllm_config.scheduler_config.enable_chunked_prefill

    def _own_block_size(self) -> int:
        """vLLM's smallest block of tokens; where it has states alone, without prefix caching, the one it was given."""
        sizes = [g.block_size for g in self.groups if not g.planes or g.keeps_states]
        return min(sizes) if sizes else int(self._vllm_config.cache_config.block_size)

    def _tier_spec(self, part: PartGroups, rank: int) -> Spec:
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        if part.is_state:
            return part.state_spec(model=self.model, num_ranks=ranks, rank=rank)
        heads = self._vllm_config.model_config.get_total_num_kv_heads()
        start = facts.head_start(rank, ranks, heads, part.groups[0].num_kv_heads)
        return part.tier_spec(block_size=self.block_size, model=self.model, format=self.settings.format, head_start=start)

    def _stack(self, part: PartGroups, spec: Spec) -> TierStack:
        kind = part.kind(spec, len(self.parts))
        whole = sum(BlockKind.of(self._tier_spec(p, 0)).num_bytes for every in self.parts for p in self._stages.of(every))
        return TierStack(kind, [open_tier(t.share(kind.num_bytes, whole), kind) for t in self._tiers])

    def _neighbours(self, stack: TierStack, spec: Spec) -> Neighbours:
        """What SGLang and LMCache wrote, and vLLM with other blocks and ranks. A folder of another kind shares no capacity."""
        return Neighbours(self._tiers, stack, spec, namer_of=namer_of, block_size=self.block_size, logger=logger)

    def _shared_tiers(self) -> list[TierOption]:
        """As the user gave them. Host memory is a process's own: where workers are in others, all share a directory in memory."""
        tiers, parallel = list(self.settings.tiers), self._vllm_config.parallel_config
        backend = parallel.distributed_executor_backend
        if backend == "uni" or not any(t.is_host for t in tiers):
            return tiers
        if backend != "mp" or getattr(parallel, "nnodes", 1) > 1:
            raise Unsupported(
                f"KvxConnector: a host tier, and workers that may be on other machines ({backend}): the scheduler does not see "
                "their memory. Give a directory that all of them see: disk:DIR."
            )
        room = sum(t.capacity_bytes for t in tiers if t.is_host)
        self._shared = SharedHost(str(self._vllm_config.kv_transfer_config.engine_id), room)
        return [t if not t.is_host else self._shared.option(t.capacity_bytes) for t in tiers]

    def shutdown(self) -> None:
        if self._shared is not None:
            self._shared.close()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: a save that is lost is a miss

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        rank = get_tensor_model_parallel_rank()
        for part in map(self._stages.here, self.parts):
            spec = self._tier_spec(part, rank)
            if isinstance(spec, StateSpec):
                self._movers.append(self._state_mover(part, spec, kv_caches))
                continue
            assert isinstance(spec, CacheSpec)
            segments = [s for g in part.groups for s in self._segments(g, part, kv_caches)]
            runs = runs_of(segments, kv_caches, self._scales(part))
            self._movers.append(PartMover(part, spec, self._stack(part, spec), runs))
            one = segments[0].spec
            logger.info(
                "KVX reads %d layers, window %d, as %r in blocks of %d; keeps them in blocks of %d %s as model %r",
                len(part.layers), part.window, one.layout, one.block_size, spec.block_size, spec.format, self.model,
            )  # fmt: skip

    def _scales(self, part: PartGroups) -> dict[str, tuple[float, float]] | None:
        if part.groups[0].format not in FP8:
            return None
        return {name: scales for g in part.groups for name, scales in facts.layer_scales(g, self._vllm_config).items()}

    def _state_mover(self, part: PartGroups, spec: StateSpec, caches: dict[str, Tensor]) -> StateMover:
        order = ORDERS[_is_channel_first()]
        segments = []
        for g in part.groups:
            tensors = [facts.tensor_facts(t) for t in facts.layer_tensors(g, caches)]
            segments += read_states(g, tensors, part, spec, num_blocks=self._kv_cache_config.num_blocks, order=order)
        logger.info(
            "KVX reads states of %d layers as %r; keeps them where a step ends at the end of %d tokens, as model %r",
            len(part.layers), segments[0].spec.layout, self.block_size, self.model,
        )  # fmt: skip
        return StateMover(part, spec, self._stack(part, spec), runs_of(segments, caches))

    def _segments(self, group: Group, part: PartGroups, caches: dict[str, Tensor]) -> list[Any]:
        tensors = facts.layer_tensors(group, caches)
        is_cpu = tensors[0].device.type == "cpu"
        if is_cpu and group.format in FP8:
            raise Unsupported(
                f"KvxConnector: {group.format} on a CPU: how vLLM's CPU backend packs its blocks was not checked. It was not read. "
                "kv_cache_dtype=auto was, and fp8 on a GPU by its shapes."
            )
        chosen = getattr(getattr(self._vllm_config, "attention_config", None), "backend", None)
        has_amx_rows = torch.cpu._is_amx_tile_supported() and getattr(chosen, "name", "") != "CPU_MLA"
        if is_cpu and group.is_latent and has_amx_rows:
            raise Unsupported(
                "KvxConnector: MLA on a CPU with AMX writes its latents with an op of its own; how they lie then was not checked. "
                "It was not read. The attention backend CPU_MLA was."
            )
        return read_group(
            group,
            [facts.tensor_facts(t) for t in tensors],
            part.layers,
            num_blocks=self._kv_cache_config.num_blocks,
            layout=self._layout_name(),
            packing=find_packing(group, _cpu_writer(self._vllm_config, group)) if is_cpu and not group.is_latent else "",
        )

    def _layout_name(self) -> str:
        name = getattr(self._kv_cache_config, "kv_cache_layout", None)
        if name is None:  # to 0.27
            try:
                from vllm.v1.attention.backends.utils import get_kv_cache_layout
            except ImportError:
                return ""
            name = get_kv_cache_layout()
        return str(getattr(name, "name", name) or "")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._metadata()
        self._lost.heard(step.heard)
        for lost in self._lost.load(step.loads, self._load, tables=step.begun):
            self._require_recovery(lost)  # after all ranks agreed: it stops all of them, or none

    def _load(self, job: Job) -> list[int]:
        return [place for mover in self._movers for place in mover.load(job)]

    def _require_recovery(self, lost: Lost) -> None:
        """InternalError where vLLM would go on with wrong K and V."""
        why = ""
        if len(self.groups) > 1 or self._has_states:
            why = "cannot be told of them in a model of several groups"
        elif facts.computes_again(self._vllm_config) and NULL in lost.job.blocks[0]:
            why = "cannot compute them again: what they see is behind the window"
        if why:
            raise InternalError(
                f"KvxConnector: blocks of request {lost.job.request} left the tiers between being found and being read, from token "
                f"{lost.first} of {lost.job.end} on, and vLLM {why}. Give the tiers more room."
            )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._lost.take_failed()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded when start_load_kv returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A block has all layers, so it is saved when the last is done."""

    def wait_for_save(self) -> None:
        for job in self._metadata().saves:
            if self._lost.is_wrong(job):
                continue
            for mover in self._movers:
                try:
                    mover.save(job)
                except TierError as error:  # a full disk is no reason to stop answering
                    logger.warning("KVX did not keep blocks of request %s: %s", job.request, error)

    def _metadata(self) -> KvxMetadata:
        found = self._connector_metadata
        return found if isinstance(found, KvxMetadata) else KvxMetadata()

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        side = self._side()
        if not facts.has_plain_tokens(request):
            return 0, False
        side.add(request.request_id, request.all_token_ids)
        return (side.matched(request.request_id, num_computed_tokens) if self._loads else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._side().allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvxMetadata:
        side = self._side()
        made = KvxMetadata(heard=side.begin_step())
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        entries = [(r.req_id, r.block_ids, True, r.num_computed_tokens) for r in new]
        # Blocks of states change places in a table; from 0.32 on vLLM tells it whole.
        now = getattr(scheduler_output, "kv_connector_block_state", None) if self._has_states else None
        for n, request in enumerate(cached.req_ids):
            whole = None if now is None else now.get_block_ids(request)
            blocks, is_whole = whole or cached.new_block_ids[n], whole is not None or request in cached.resumed_req_ids
            entries.append((request, blocks, is_whole, cached.num_computed_tokens[n]))
        for request, blocks, is_whole, computed in entries:
            count = scheduler_output.num_scheduled_tokens[request]
            work = side.scheduled(request, blocks, is_whole=is_whole, num_computed=computed, num_new=count)
            made.loads += [work.load] if work.load else []
            made.saves += [work.save] if work.save and self._saves else []
        if made.loads:
            begun = {r.req_id for r in new} | cached.resumed_req_ids
            made.begun = [list(blocks[0]) for request, blocks, _, _ in entries if request in begun]
        return made

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self._side().lost(connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        self._side().drop(request.request_id)
        return False, None  # what was computed is saved by now

    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "the scheduler's calls come to the scheduler's connector"
        return self._scheduler


def _is_channel_first() -> bool:
    """Of a convolution's state: VLLM_SSM_CONV_STATE_LAYOUT=DS."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def _cpu_writer(config: Any, group: Group) -> Any:
    """vLLM's own op that puts rows into a CPU cache, with the instructions it would choose."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(config.model_config.dtype, group.block_size, group.head_dim)

    def write(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        blocks, heads, size, _ = cache.shape
        keys, values = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")

    return write
