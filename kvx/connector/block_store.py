"""Blocks of one kind in an engine's tiers, and what else the store has of the same tokens: read in one call, converted in another.

An engine's memory is read and written by the caller's own thread alone, never by one that waits for the store: a call that is
given up may still run, and by then the engine has handed its memory to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvx.connector.store_kinds import Family, OtherKinds
from kvx.connector.store_names import Alias, Scheme
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.errors import BadArgument
from kvx.handover import NEUTRAL, NEUTRAL_LATENT
from kvx.handover.memory import has_scales
from kvx.layout.plan import Plan, plan
from kvx.ops.move.convert import convert
from kvx.spec import CacheSpec, Spec, StateSpec
from kvx.tiers import Block, BlockKind, HostTier, TierOption
from kvx.tiers.memory import HostMemory

CANONICAL = "canonical"
NEUTRAL_APART = "block | head layer token (kv dim)"  # of K and V with rows of two widths


@dataclass(frozen=True)
class StoredBlock:
    """A block out of the store, in memory of the store's."""

    blocks: tuple[tuple[Block, ...], ...]  # of each shard the blocks that it lies in: one, or those of an alias
    family: Family | None = None  # None: it is of the reader's own kind
    alias: Alias | None = None


class BlockStore:
    def __init__(
        self,
        options: Sequence[TierOption],
        kind: BlockKind,
        scheme: Scheme,
        *,
        spec: Spec | None = None,  # of a block as it is kept; None: blocks go whole
        wanted: Spec | None = None,  # what the engine has; None: blocks of other kinds are not looked for
    ) -> None:
        self.kind, self.spec = kind, spec
        self.stack = TierStack(kind, [open_tier(option, kind) for option in options])
        host = next((tier for tier in self.stack.tiers if isinstance(tier, HostTier)), None)
        self._memory = HostMemory(kind) if host is None else host.memory
        self._scheme = scheme
        self._others = None if wanted is None else OtherKinds(options, kind, wanted, scheme)
        self._plans: dict[tuple[int, Spec, bool], Plan] = {}

    # --- which are there ---------------------------------------------------------------------------------------------------

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which blocks can be had, of whatever kind. They are not read."""
        found = self.stack.has_any(names)
        for ask in self._elsewhere():
            missing = [n for n, has in enumerate(found) if not has]
            for n, has in zip(missing, ask([names[n] for n in missing]) if missing else (), strict=True):
                found[n] = has
        return found

    def _elsewhere(self) -> list[Callable[[list[bytes]], list[bool]]]:
        if self._others is None:
            return []
        return [*(f.has for f in self._others.families(self._scheme)), self._has_alias]

    def _has_alias(self, names: list[bytes]) -> list[bool]:
        return [any(all(f.has(there)) for there, _, f in self._led(name)) for name in names]

    def _led(self, name: bytes) -> list[tuple[tuple[bytes, ...], Alias, Family]]:
        """Names of blocks that hold what is wanted under this one, as far as records say: of a state the one that it ends with."""
        assert self._others is not None
        found = []
        for alias, scheme, family in self._others.alias(name):
            names: tuple[bytes | None, ...] = alias.names
            if isinstance(self.spec, StateSpec):
                names = (alias.end_name(self._scheme.block_size, scheme.block_size),)
            if None not in names:
                found.append((tuple(n for n in names if n is not None), alias, family))
        return found

    # --- out of the engine's memory into the store -------------------------------------------------------------------------

    def copy_from(self, spec: Spec, buffers: Sequence[Tensor], ids: Sequence[int]) -> list[Block]:
        """Blocks of the engine's memory, which this spec describes, as the store keeps them."""
        blocks = self._memory.take(len(ids))
        if ids:
            self._convert_into(blocks, spec, buffers, ids)
        return blocks

    def _convert_into(self, blocks: Sequence[Block], spec: Spec, buffers: Sequence[Tensor], ids: Sequence[int]) -> None:
        into = [block.buffers[0] for block in blocks]
        convert(list(buffers), into, plan=self._plan(len(ids), spec, False), src_blocks=ids, dst_blocks=list(range(len(ids))))

    def put(self, names: Sequence[bytes], blocks: Sequence[Block]) -> list[bool]:
        """On this thread: those of the tiers may all wait for a disk that hangs."""
        for tier in self.stack.tiers:
            tier.put_now(names, blocks)
        return [True] * len(names)

    # --- out of the store into the engine's memory -------------------------------------------------------------------------

    def fetch(self, names: Sequence[bytes], into: Sequence[Block] | None = None) -> list[StoredBlock | None]:
        """Read and checked, into memory of the store's; blocks of the reader's own kind into what it lends, where it does."""
        found: list[StoredBlock | None] = [
            None if block is None else StoredBlock(((block,),))
            for block in self.stack.get(names, into or self._memory.take(len(names)))
        ]  # fmt: skip
        if self._others is None or None not in found:
            return found
        for family in self._others.families(self._scheme):
            missing = [n for n, block in enumerate(found) if block is None]
            for n, blocks in zip(missing, family.get([names[n] for n in missing]) if missing else (), strict=True):
                found[n] = None if blocks is None else StoredBlock(tuple((block,) for block in blocks), family)
        return [self._fetch_alias(name) if block is None else block for name, block in zip(names, found, strict=True)]

    def _fetch_alias(self, name: bytes) -> StoredBlock | None:
        for names, alias, family in self._led(name):
            found = family.get(names)
            if None not in found:
                shards = tuple(zip(*(blocks for blocks in found if blocks is not None), strict=True))
                return StoredBlock(shards, family, None if isinstance(self.spec, StateSpec) else alias)
        return None

    def copy_into(self, spec: Spec, buffers: Sequence[Tensor], ids: Sequence[int], found: Sequence[StoredBlock | None]) -> None:
        """Into blocks of the engine's memory, which this spec describes. Those of one kind go together."""
        together: dict[Family | None, list[tuple[StoredBlock, int]]] = {}
        for here, n in zip(found, ids, strict=True):
            if here is not None and here.alias is None:
                together.setdefault(here.family, []).append((here, n))
            elif here is not None and here.family is not None and here.alias is not None:
                src, dst = here.alias.tables(spec.block_size, here.family.scheme.block_size)
                blocks = [block.buffers[0] for shard in here.blocks for block in shard]
                p = here.family.plan(len(here.alias.names), spec)
                convert(blocks, list(buffers), plan=p, src_blocks=src, dst_blocks=[n if page == 0 else page for page in dst])
        for family, several in together.items():
            shards = range(len(several[0][0].blocks))
            blocks = [here.blocks[shard][0].buffers[0] for shard in shards for here, _ in several]
            p = self._plan(len(several), spec, True) if family is None else family.plan(len(several), spec)
            convert(blocks, list(buffers), plan=p, src_blocks=list(range(len(several))), dst_blocks=[n for _, n in several])

    def _plan(self, count: int, spec: Spec, is_load: bool) -> Plan:
        key = count, spec, is_load
        if key not in self._plans:
            assert self.spec is not None
            kept = self.spec.replaced(num_blocks=count)
            layers = kept.layer_start, kept.layer_start + kept.num_layers  # the engine's memory may have more, not filled
            self._plans[key] = plan(kept, spec, layers=layers) if is_load else plan(spec, kept, layers=layers)
        return self._plans[key]

    def close(self) -> None:
        for tier in self.stack.tiers:
            if not isinstance(tier, HostTier):  # which others of this process may share
                tier.close()
        if self._others is not None:
            self._others.close()


def kept_spec(spec: Spec | None, layout: str, format: str) -> Spec | None:
    """How the store keeps what the engine has as `spec`, by the user's `layout` and `format`; None of blocks that go whole.

    States have the engine's numbers, whatever the format.
    """
    if layout not in ("", CANONICAL):
        raise BadArgument(f'extra config: layout is {layout!r}; it must be "canonical", or "" for blocks as the engine has them.')
    if isinstance(spec, StateSpec):
        return spec.replaced(layout=spec.block_layout, block_bytes=0) if layout == CANONICAL else spec
    if not isinstance(spec, CacheSpec):
        return None
    if layout == CANONICAL or format:
        layout = NEUTRAL if len(spec.planes) == 2 else NEUTRAL_LATENT
        if spec.v_head_dim:
            layout = NEUTRAL_APART
        spec = spec.replaced(layout=layout, format=format or spec.format)
    if has_scales(spec):
        raise BadArgument(
            f"extra config: format {format!r} has scales apart from the rows; a block is one run in the store. Use one with inline "
            'scales ("fp8_e4m3_per_token_head_inline"), or none.'
        )
    return spec
