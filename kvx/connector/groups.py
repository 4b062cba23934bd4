"""An engine's groups of layers, and the parts of a handover that they make.

A group has one block table. A part is all layers that see the same: those with a full view, those of one window or chunk, or those
that keep the same states. An engine may spread a part's layers over several groups, and keep any number of them in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvx.errors import Unsupported
from kvx.handover import NEUTRAL, NEUTRAL_LATENT, part_kind
from kvx.layout.place import buffer_sizes, num_cache_buffers
from kvx.spec import CacheSpec, PlaneSpec, Spec, StateSpec
from kvx.tiers import BlockKind


@dataclass(frozen=True)
class Group:
    """Layers with one block table. Of states, `planes` says what a block holds, and heads and rows are 0."""

    index: int  # in the engine's order, which block tables have too
    layer_names: tuple[str, ...]
    layers: tuple[int, ...]  # of the model, in the same order
    block_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int  # 0: as K
    format: str
    window: int
    is_latent: bool
    is_chunked: bool = False  # the window starts anew every `window` tokens, in place of sliding
    tier_format: str = ""  # of blocks in the tiers, where the engine's format has scales apart from the rows; "": as the engine's
    planes: tuple[PlaneSpec, ...] = ()  # of a state, all ranks' together
    keeps_states: bool = False  # the state at a block's end stays where it is when the request goes on; else there is one place

    def first_seen(self, num_tokens: int) -> int:
        """The first token that the one after so many sees, at the beginning of a block: those before have no memory any more."""
        if not self.window:
            return 0
        first = num_tokens // self.window * self.window if self.is_chunked else max(0, num_tokens + 1 - self.window)
        return first // self.block_size * self.block_size


@dataclass(frozen=True)
class PartGroups:
    """The groups that hold the layers of one part."""

    groups: tuple[Group, ...]
    layers: tuple[int, ...]  # of the model, in order
    window: int
    layer_start: int = 0  # of a pipeline's stage: its first layer

    @property
    def is_state(self) -> bool:
        return bool(self.groups[0].planes)

    def stage(self, first: int, end: int) -> PartGroups:
        """What a stage of a pipeline has of a part with all layers of the model: those from `first` to before `end`."""
        return replace(self, layers=tuple(range(first, end)), layer_start=first)

    def state_spec(self, *, model: str, num_ranks: int = 1, rank: int = 0) -> StateSpec:
        """A rank's state in a tier: its planes as engines that have the tokens keep them, layer after layer."""
        spec = StateSpec(1, self.groups[0].planes, num_layers=len(self.layers), model=model).shard(num_ranks, rank)
        return spec.replaced(layout=spec.block_layout)

    def tier_spec(self, *, block_size: int, model: str, format: str = "", head_start: int = 0) -> CacheSpec:
        """One block of it in a tier."""
        one = self.groups[0]
        spec = CacheSpec(
            num_blocks=1,
            block_size=block_size,
            num_kv_heads=one.num_kv_heads,
            head_dim=one.head_dim,
            v_head_dim=one.v_head_dim,
            layout=NEUTRAL_LATENT if one.is_latent else NEUTRAL,
            format=format or one.tier_format or one.format,
            num_layers=len(self.layers),
            layer_start=self.layer_start,
            head_start=0 if one.is_latent else head_start,  # every rank has the whole latent row
            model=model,
        )
        if sum(count for count, _ in buffer_sizes(spec)) > num_cache_buffers(spec):
            raise Unsupported(
                f"KvxConnector: format {format!r} has scales apart from the rows; a block is one run in a tier. "
                f'Use one with inline scales ("fp8_e4m3_per_token_head_inline"), or none.'
            )
        return spec

    def kind(self, spec: Spec, num_parts: int) -> BlockKind:
        """Of its blocks. Where a model has several parts, whose blocks may look alike, the manifest says which one it is."""
        kind, one = part_kind(spec, self.layers, self.window) if num_parts > 1 else BlockKind.of(spec), self.groups[0]
        more: dict[str, str | int] = {"rounded": one.format} if one.tier_format else {}  # numbers that are not the model's own
        more |= {"is_chunked": 1} if one.is_chunked and num_parts > 1 else {}
        return BlockKind({**kind.manifest, **more}, kind.buffer_bytes) if more else kind


@dataclass(frozen=True)
class Segment:
    """A run of layers of one group as a cache of its own."""

    group: Group
    layers: tuple[int, ...]  # of the model
    spec: Spec  # layer_start counts within the part
    first: int  # among the group's layers
    is_whole: bool  # one buffer from the first tensor on holds all of them, layers inside blocks; False: a buffer a layer

    @property
    def pieces(self) -> int:
        """Blocks of the tensor in one block of the engine's tables: kernels may take smaller ones."""
        return self.group.block_size // self.spec.block_size


def parts_of(groups: Sequence[Group]) -> list[PartGroups]:
    """Those that see all tokens first, then by window, then states."""
    kinds: dict[tuple[tuple[int, ...], tuple[PlaneSpec, ...]], list[Group]] = {}
    for g in groups:
        rows = g.window, g.is_latent, g.num_kv_heads, g.head_dim, g.v_head_dim, g.is_chunked
        kinds.setdefault((rows, g.planes), []).append(g)
    parts = []
    for _, same in sorted(kinds.items(), key=lambda kind: (bool(kind[0][1]), kind[0][0], kind[1][0].index)):
        if len({(g.block_size, g.format) for g in same}) > 1:
            raise Unsupported(
                f"KvxConnector: groups of one kind of layers have blocks of {sorted({g.block_size for g in same})} tokens in "
                f"{sorted({g.format for g in same})}; they have one block size and one type."
            )
        parts.append(PartGroups(tuple(same), tuple(sorted(n for g in same for n in g.layers)), same[0].window))
    for are_states in (False, True):  # a layer may have K, V and a state
        every = [n for p in parts if p.is_state == are_states for n in p.layers]
        if len(set(every)) != len(every):
            twice = sorted(n for n in set(every) if every.count(n) > 1)
            raise Unsupported(f"KvxConnector: layers {twice} have several caches each.")
    return parts
