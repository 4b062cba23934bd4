"""LMCache's memory objects as caches of KVX: the one place that knows their formats. LMCache is not imported.

A chunk of K and V lies in the store as LMCache has it, in one run. Objects whose bytes KVX has no words for (several groups of
layers in one, fp8 without scales, states of an engine that is not told) go whole, with a manifest that only the same object has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvx.connector.block_store import CANONICAL, BlockStore, StoredBlock, kept_spec
from kvx.connector.store_names import BLOCK_SIZE, Scheme, named_kind
from kvx.errors import BadArgument
from kvx.handover.model_parts import ModelPart
from kvx.layout.engines import ENGINES
from kvx.layout.state_rows import state_row
from kvx.spec import CacheSpec, Spec, StateSpec
from kvx.tiers import Block, BlockKind, TierOption

FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
WHOLE = -1  # in place of a layer: the chunk has all of them
STATE_ROWS_OF_PAGES = ("vllm.sd", "vllm.ds")
# LMCache's MemoryFormat to a row of docs/layouts.md.
_FUSED = "layer token head (kv dim)"
_ROWS = {"KV_2LTD": "lmcache.2ltd", "KV_T2D": "lmcache.t2d", "KV_2TD": "lmcache.2td", "KV_MLA_FMT": "lmcache.mla"}


@dataclass(frozen=True)
class Worker:
    """Where a process stands among those that share a model out. LMCache does not say whether they share layers or heads."""

    rank: int = 0
    size: int = 1
    num_kv_heads: int = 0  # of the whole model: they share heads. 0: not said


@dataclass(frozen=True)
class ChunkForm:
    """What LMCache says of an object's memory."""

    shapes: tuple[tuple[int, ...], ...]  # of each group of layers in it
    dtypes: tuple[torch.dtype, ...]
    format: str  # the name of its MemoryFormat
    layer: int = WHOLE  # layer by layer: which

    @property
    def num_bytes(self) -> int:
        sizes = (torch.Size(s).numel() * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))
        return sum(sizes)

    def axes(self) -> tuple[int, int, int] | None:
        """Layers, tokens, and elements of a row; None of several groups, and of a shape that is not its format's."""
        shape = self.shapes[0] if len(self.shapes) == 1 else ()
        match self.format, len(shape):
            case ("KV_2LTD", 4) if shape[0] == 2:
                return shape[1], shape[2], shape[3]
            case ("KV_MLA_FMT", 4) if shape[0] == 1:
                return shape[1], shape[2], shape[3]
            case "KV_MLA_FMT", 3:
                return shape[0], shape[1], shape[2]
            case ("KV_T2D", 3) if shape[1] == 2:
                return 1, shape[0], shape[2]
            case ("KV_2TD", 3) if shape[0] == 2:
                return 1, shape[1], shape[2]
            case "KV_MLA_FMT", 2:
                return 1, shape[0], shape[1]
        return None


def read_chunk(
    form: ChunkForm, *, model: str, chunk_size: int, head_dim: int, worker: Worker
) -> tuple[CacheSpec | None, dict[str, str | int]]:
    """The spec of one such chunk, None where it goes whole, and what else must be equal to read it."""
    axes, dtype = form.axes(), form.dtypes[0]
    is_fused = is_fused_row(form, head_dim, worker.num_kv_heads, worker.size)
    is_latent = form.format == "KV_MLA_FMT" and not is_fused
    is_known = axes is not None and dtype in FORMATS and axes[1] == chunk_size and head_dim > 0
    if not is_known or axes is None or axes[2] % head_dim or (is_latent and axes[2] != head_dim):
        text = " ".join(f"{list(s)} {d}".replace("torch.", "") for s, d in zip(form.shapes, form.dtypes, strict=True))
        whole: dict[str, str | int] = {"object": text, "memory_format": form.format}
        if form.layer != WHOLE:
            whole["layer"] = form.layer
        return None, whole | _of_rank(worker)
    layers, tokens, row = axes
    heads = row // head_dim // (2 if is_fused else 1)
    facts, head_start = _heads(heads, is_latent, worker)
    layout = _FUSED if is_fused else ENGINES[_ROWS[form.format]].layout.replace("(head dim)", "head dim")
    layout = "block | " + layout.replace("layer block |", "layer").removeprefix("block | ")
    spec = CacheSpec(
        num_blocks=1, block_size=tokens, num_kv_heads=heads, head_dim=head_dim, layout=layout, format=FORMATS[dtype],
        num_layers=layers, layer_start=max(form.layer, 0), head_start=head_start, model=model,
    )  # fmt: skip
    return spec, facts


def is_fused_row(form: ChunkForm, head_dim: int, num_kv_heads: int, num_ranks: int) -> bool:
    """Whether a chunk of one plane has K and V of each head side by side, as LMCache's server takes them from vLLM 0.26 on on GPUs.

    It looks like a latent, or like SGLang's K without V: only who knows the number of heads can tell.
    """
    axes = form.axes()
    if form.format != "KV_MLA_FMT" or axes is None or num_kv_heads < 1:
        return False
    return axes[2] == 2 * head_dim * max(1, num_kv_heads // num_ranks)


def part_of(form: ChunkForm, parts: Sequence[ModelPart], num_ranks: int) -> ModelPart | None:
    """The part of a model whose K and V such chunks hold; None where none has these sizes, or several have, or they are states."""
    axes, has_one_plane = form.axes(), form.format == "KV_MLA_FMT"
    if axes is None:
        return None
    layers, _, row = axes

    def holds(p: ModelPart) -> bool:
        if p.is_latent:
            return has_one_plane and row == p.head_dim
        if has_one_plane:
            return is_fused_row(form, p.head_dim, p.num_kv_heads, num_ranks)
        return row == p.head_dim * max(1, p.num_kv_heads // num_ranks)

    found = [p for p in parts if not p.planes and not p.v_head_dim and len(p.layers) == layers and holds(p)]
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class EngineStates:
    """How the engine before LMCache keeps states: LMCache sees pages of bytes."""

    row: str  # of docs/layouts.md: the order of axes
    conv: str  # the format of convolutions
    matrix: str  # of recurrent matrices

    @classmethod
    def read(cls, told: Any) -> EngineStates:
        known = {f.name for f in fields(cls)}
        if not isinstance(told, Mapping) or set(told) != known or told["row"] not in STATE_ROWS_OF_PAGES:
            raise BadArgument(
                f"extra config: states is {told!r}; it must say how the engine keeps them, such as "
                f'{{"row": "vllm.sd", "conv": "bf16", "matrix": "f32"}}. Rows are {", ".join(STATE_ROWS_OF_PAGES)}.'
            )
        wrong = next((told[name] for name in ("conv", "matrix") if told[name] not in FORMATS.values()), None)
        if wrong is not None:
            raise BadArgument(f"extra config: states says {wrong!r}; formats are {', '.join(FORMATS.values())}.")
        return cls(**told)


def read_states(
    form: ChunkForm, parts: Sequence[ModelPart], told: EngineStates, *, model: str, worker: Worker
) -> tuple[StateSpec, ModelPart] | None:
    """The spec of an object that holds one state: of each layer a page, whose end is padding. None where it is no such object."""
    found, shape = [p for p in parts if p.planes], form.shapes[0]
    if len(form.shapes) != 1 or len(shape) != 4 or shape[0] != 1 or len(found) != 1 or shape[1] != len(found[0].layers):
        return None
    planes = tuple(p.spec(told.conv, told.matrix) for p in found[0].planes)
    mine = StateSpec(1, planes, num_layers=shape[1], model=model).shard(worker.size, worker.rank)
    page, content = form.num_bytes // shape[1], mine.block_content_bytes // shape[1]
    if page < content:
        raise BadArgument(
            f"extra config: by config and states a layer's state has {content} bytes; LMCache's objects {list(shape)} have {page}. "
            "Leave states out, and they are found by LMCache alone."
        )
    layout = state_row(told.row).layout(mine.planes).replace("layer | block", "layer block")
    return mine.replaced(layout=layout, block_bytes=page if page > content else 0), found[0]


def _heads(heads: int, is_latent: bool, worker: Worker) -> tuple[dict[str, str | int], int]:
    total = worker.num_kv_heads
    if worker.size == 1:
        return {}, 0
    if not total:
        return _of_rank(worker), 0
    if is_latent:  # every rank has all of it
        return {}, 0
    if heads != max(1, total // worker.size):
        raise BadArgument(
            f"extra config: num_kv_heads is {total}; worker {worker.rank} of {worker.size} has {heads} of them. It is the KV heads "
            "of the whole model, where workers share heads (tensor parallel). Leave it out where they share layers: chunks are "
            "then found by the same worker alone."
        )
    return {}, worker.rank * total // worker.size


def _of_rank(worker: Worker) -> dict[str, str | int]:
    return {"worker": f"{worker.rank}/{worker.size}"} if worker.size > 1 else {}


class LmcacheStore(BlockStore):
    """Chunks of one form in the store."""

    def __init__(
        self,
        form: ChunkForm,
        options: Sequence[TierOption],
        described: tuple[Spec | None, dict[str, str | int]],  # by `read_chunk` or `read_states`
        *,
        model: str,
        names: str,  # what the kind says of LMCache's names
        chunk_size: int,
        layout: str = "",  # "canonical", or "" as LMCache has a chunk
        format: str = "",  # "": as LMCache's
    ) -> None:
        self.form, (self.chunk_spec, facts) = form, described
        self._is_state = isinstance(self.chunk_spec, StateSpec)  # kept without the padding of the engine's pages
        spec = kept_spec(self.chunk_spec, CANONICAL if self._is_state else layout, format)
        kind = BlockKind({"model": model}, (form.num_bytes,)) if spec is None else BlockKind.of(spec)
        facts = facts | ({BLOCK_SIZE: chunk_size} if self._is_state else {})
        scheme = Scheme(names, 1 if self.chunk_spec is None else chunk_size)
        super().__init__(options, named_kind(kind, names, **facts), scheme, spec=spec, wanted=self.chunk_spec)

    def lent(self, memory: Sequence[Tensor]) -> list[Block] | None:
        """Chunks as they lie in LMCache's memory, for who holds it; None where the store keeps them otherwise."""
        for each in memory:
            self._require(each)
        return [self.kind.block([each]) for each in memory] if self.spec == self.chunk_spec else None

    def stage(self, memory: Sequence[Tensor]) -> list[Block]:
        """Copies of chunks, each a run of bytes, as the store keeps them."""
        for each in memory:
            self._require(each)
        if self._is_state:
            assert self.chunk_spec is not None
            return [block for each in memory for block in self.copy_from(self.chunk_spec, [each], [0])]
        if self.chunk_spec is not None:
            return self.copy_from(self.chunk_spec.replaced(num_blocks=max(1, len(memory))), memory, range(len(memory)))
        blocks = self._memory.take(len(memory))
        for block, each in zip(blocks, memory, strict=True):
            block.buffers[0].copy_(each)
        return blocks

    def stager(self, memory: Sequence[Tensor], *, is_lent: bool = False) -> Callable[[list[int]], list[Block]]:
        def stage(wanted: list[int]) -> list[Block]:
            some = [memory[n] for n in wanted]
            return self.lent(some) or self.stage(some) if is_lent else self.stage(some)

        return stage

    def load(self, found: Sequence[StoredBlock], memory: Sequence[Tensor]) -> None:
        """Into chunks of LMCache's, each a run of bytes, unless they were read there."""
        elsewhere = [(here, each) for here, each in zip(found, memory, strict=True) if not _is_there(here, each)]
        for _, each in elsewhere:
            self._require(each)
        if self.chunk_spec is None:
            for here, each in elsewhere:
                each.copy_(here.blocks[0][0].buffers[0])
        elif self._is_state:
            for here, each in elsewhere:
                self.copy_into(self.chunk_spec, [each], [0], [here])
        elif elsewhere:
            spec, into = self.chunk_spec.replaced(num_blocks=len(elsewhere)), [each for _, each in elsewhere]
            self.copy_into(spec, into, range(len(into)), [here for here, _ in elsewhere])

    def _require(self, memory: Tensor) -> None:
        if memory.dtype != torch.uint8 or memory.numel() != self.form.num_bytes:
            raise BadArgument(f"a chunk has {memory.numel()} bytes; one of {list(self.form.shapes[0])} has {self.form.num_bytes}.")


def _is_there(found: StoredBlock, memory: Tensor) -> bool:
    return found.family is None and found.blocks[0][0].buffers[0].data_ptr() == memory.data_ptr()


def memory_of(obj: Any) -> Tensor:
    """The bytes of an object of LMCache's, all of its groups."""
    flat: Tensor = obj.raw_data[: obj.get_size()].view(torch.uint8)
    return flat
