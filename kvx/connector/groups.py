"""An engine's groups of layers, and the parts of a handover that they make.

A group has one block table. A part is all layers that see the same: those with a full view, or those of one window. An engine may
spread a part's layers over several groups, and keep any number of them in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvx.errors import Unsupported
from kvx.handover import NEUTRAL, NEUTRAL_LATENT
from kvx.layout.place import buffer_sizes, num_cache_buffers
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind


@dataclass(frozen=True)
class Group:
    """Layers with one block table."""

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


@dataclass(frozen=True)
class PartGroups:
    """The groups that hold the layers of one part."""

    groups: tuple[Group, ...]
    layers: tuple[int, ...]  # of the model, in order
    window: int

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
            format=format or one.format,
            num_layers=len(self.layers),
            head_start=0 if one.is_latent else head_start,  # every rank has the whole latent row
            model=model,
        )
        if sum(count for count, _ in buffer_sizes(spec)) > num_cache_buffers(spec):
            raise Unsupported(
                f"KvxConnector: format {format!r} has scales apart from the rows; a block is one run in a tier. "
                f'Use one with inline scales ("fp8_e4m3_per_token_head_inline"), or none.'
            )
        return spec

    def kind(self, spec: CacheSpec, num_parts: int) -> BlockKind:
        """Of its blocks. Where a model has several parts, whose blocks may look alike, the manifest says which one it is."""
        kind = BlockKind.of(spec)
        if num_parts == 1:
            return kind
        which: dict[str, str | int] = {"layers": ",".join(map(str, self.layers)), "window": self.window}
        return BlockKind({**kind.manifest, **which}, kind.buffer_bytes)


@dataclass(frozen=True)
class Segment:
    """A run of layers of one group as a cache of its own."""

    group: Group
    layers: tuple[int, ...]  # of the model
    spec: CacheSpec  # layer_start counts within the part
    first: int  # among the group's layers
    is_whole: bool  # one buffer from the first tensor on holds all of them, layers inside blocks; False: a buffer a layer

    @property
    def pieces(self) -> int:
        """Blocks of the tensor in one block of the engine's tables: kernels may take smaller ones."""
        return self.group.block_size // self.spec.block_size


def parts_of(groups: Sequence[Group]) -> list[PartGroups]:
    """Those that see all tokens first, then by window."""
    kinds: dict[tuple[int, bool, int, int, int], list[Group]] = {}
    for g in groups:
        kinds.setdefault((g.window, g.is_latent, g.num_kv_heads, g.head_dim, g.v_head_dim), []).append(g)
    parts = []
    for key in sorted(kinds):
        same = kinds[key]
        if len({(g.block_size, g.format) for g in same}) > 1:
            raise Unsupported(
                f"KvxConnector: groups of one kind of layers have blocks of {sorted({g.block_size for g in same})} tokens in "
                f"{sorted({g.format for g in same})}; they have one block size and one type."
            )
        layers = sorted(n for g in same for n in g.layers)
        parts.append(PartGroups(tuple(same), tuple(layers), key[0]))
    every = [n for p in parts for n in p.layers]
    if len(set(every)) != len(every):
        raise Unsupported(f"KvxConnector: layers {sorted(n for n in set(every) if every.count(n) > 1)} have several caches each.")
    return parts
