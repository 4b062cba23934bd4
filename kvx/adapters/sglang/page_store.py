"""The pages of one host pool in the store. Memory of the pool is read and written by the caller's own thread alone, never by one
that waits for the store: a call that is given up may still run, and by then the engine has handed its pages to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvx.adapters.sglang.names import SGLANG
from kvx.adapters.sglang.pools import HostPool
from kvx.connector.store_kinds import Family, OtherKinds
from kvx.connector.store_names import Alias, Scheme, named_kind
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.errors import BadArgument
from kvx.handover import NEUTRAL, NEUTRAL_LATENT
from kvx.handover.memory import has_scales
from kvx.layout.plan import Plan, plan
from kvx.ops.move.convert import convert
from kvx.spec import CacheSpec
from kvx.tiers import Block, BlockKind, HostTier, TierOption
from kvx.tiers.memory import HostMemory

CANONICAL = "canonical"
NEUTRAL_APART = "block | head layer token (kv dim)"  # of K and V with rows of two widths


@dataclass(frozen=True)
class StoredPage:
    """A page out of the store, in memory of the store's."""

    blocks: tuple[tuple[Block, ...], ...]  # of each shard the blocks that it lies in: one, or those of an alias
    family: Family | None = None  # None: it is of the reader's own kind
    alias: Alias | None = None


class PageStore:
    def __init__(
        self,
        pool: HostPool,
        options: Sequence[TierOption],
        *,
        model: str,
        layout: str = "",  # "canonical", or "" as the pool has its pages
        format: str = "",  # "": as the pool's
    ) -> None:
        self.pool = pool
        self.spec = _kept_spec(pool, layout, format)
        kind = BlockKind({"model": model}, (pool.page_bytes,)) if self.spec is None else BlockKind.of(self.spec)
        self.kind = named_kind(kind, SGLANG, **pool.facts)
        self.stack = TierStack(self.kind, [open_tier(option, self.kind) for option in options])
        host = next((tier for tier in self.stack.tiers if isinstance(tier, HostTier)), None)
        self._memory = HostMemory(self.kind) if host is None else host.memory
        self._scheme = Scheme(SGLANG, pool.page_size)
        self._others = None
        if pool.spec is not None:
            self._others = OtherKinds(options, self.kind, pool.spec, self._scheme)
        self._plans: dict[tuple[int, CacheSpec, bool], Plan] = {}

    # --- which are there ---------------------------------------------------------------------------------------------------

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which pages can be had, of whatever kind. They are not read."""
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
        assert self._others is not None
        return [any(all(f.has(alias.names)) for alias, f in self._others.alias(name)) for name in names]

    # --- out of the pool into the store ------------------------------------------------------------------------------------

    def stage(self, pages: Sequence[int]) -> list[Block]:
        """Copies of these pages as the store keeps them."""
        blocks = self._memory.take(len(pages))
        if self.pool.spec is None:
            for block, page in zip(blocks, pages, strict=True):
                block.buffers[0].copy_(_flat(self.pool.pool.get_data_page(page, flat=True)))
        elif pages:
            self._from(self.pool.spec, self.pool.buffers, self.pool.blocks(pages), blocks)
        return blocks

    def stage_flat(self, pages: Sequence[Tensor]) -> list[Block]:
        """Of pages as SGLang's own `get_data_page` gives them."""
        blocks = self._memory.take(len(pages))
        for block, page in zip(blocks, map(_flat, pages), strict=True):
            if page.numel() != self.pool.page_bytes:
                raise BadArgument(
                    f"a page has {page.numel()} bytes; one of the pool {self.pool.name!r} has {self.pool.page_bytes}."
                )
            if self.pool.page_spec in (None, self.spec):
                block.buffers[0].copy_(page)
            else:
                assert self.pool.page_spec is not None
                self._from(self.pool.page_spec, [page], [0], [block])
        return blocks

    def _from(self, spec: CacheSpec, buffers: Sequence[Tensor], ids: Sequence[int], blocks: Sequence[Block]) -> None:
        into = [block.buffers[0] for block in blocks]
        convert(list(buffers), into, plan=self._plan(len(ids), spec, False), src_blocks=ids, dst_blocks=list(range(len(ids))))

    def put(self, names: Sequence[bytes], blocks: Sequence[Block]) -> list[bool]:
        """On this thread: those of the tiers may all wait for a disk that hangs."""
        for tier in self.stack.tiers:
            tier.put_now(names, blocks)
        return [True] * len(names)

    # --- out of the store into the pool ------------------------------------------------------------------------------------

    def fetch(self, names: Sequence[bytes]) -> list[StoredPage | None]:
        """Read and checked, into memory of the store's."""
        found: list[StoredPage | None] = [
            None if block is None else StoredPage(((block,),)) for block in self.stack.get(names, self._memory.take(len(names)))
        ]
        if self._others is None or None not in found:
            return found
        for family in self._others.families(self._scheme):
            missing = [n for n, page in enumerate(found) if page is None]
            for n, blocks in zip(missing, family.get([names[n] for n in missing]) if missing else (), strict=True):
                found[n] = None if blocks is None else StoredPage(tuple((block,) for block in blocks), family)
        return [self._fetch_alias(name) if page is None else page for name, page in zip(names, found, strict=True)]

    def _fetch_alias(self, name: bytes) -> StoredPage | None:
        assert self._others is not None
        for alias, family in self._others.alias(name):
            found = family.get(alias.names)
            if None not in found:
                return StoredPage(tuple(zip(*(blocks for blocks in found if blocks is not None), strict=True)), family, alias)
        return None

    def load(self, found: Sequence[StoredPage | None], pages: Sequence[int]) -> list[bool]:
        """Into these pages of the pool."""
        if self.pool.spec is None:
            for page, here in zip(pages, found, strict=True):
                if here is not None:
                    self.pool.pool.set_from_flat_data_page(page, here.blocks[0][0].buffers[0].view(self._page_dtype()))
        else:
            self._into(self.pool.spec, self.pool.buffers, self.pool.blocks(pages), found)
        return [here is not None for here in found]

    def load_flat(self, found: StoredPage, page: Tensor) -> None:
        """Into a page as SGLang's own `set_from_flat_data_page` takes it."""
        flat = _flat(page, is_written=True)
        if flat.numel() != self.pool.page_bytes:
            raise BadArgument(f"a page has room for {flat.numel()} bytes; one of the pool has {self.pool.page_bytes}.")
        if self.pool.page_spec is None:
            flat.copy_(found.blocks[0][0].buffers[0])
        else:
            self._into(self.pool.page_spec, [flat], [0], [found])

    def _into(self, spec: CacheSpec, buffers: Sequence[Tensor], ids: Sequence[int], found: Sequence[StoredPage | None]) -> None:
        """Those of one kind go together."""
        together: dict[Family | None, list[tuple[StoredPage, int]]] = {}
        for here, n in zip(found, ids, strict=True):
            if here is not None and here.alias is None:
                together.setdefault(here.family, []).append((here, n))
            elif here is not None and here.family is not None and here.alias is not None:
                src, dst = here.alias.tables(spec.block_size, here.family.scheme.block_size)
                blocks = [block.buffers[0] for shard in here.blocks for block in shard]
                p = here.family.plan(len(here.alias.names), spec)
                convert(blocks, list(buffers), plan=p, src_blocks=src, dst_blocks=[n if page == 0 else page for page in dst])
        for family, pages in together.items():
            shards = range(len(pages[0][0].blocks))
            blocks = [here.blocks[shard][0].buffers[0] for shard in shards for here, _ in pages]
            p = self._plan(len(pages), spec, True) if family is None else family.plan(len(pages), spec)
            convert(blocks, list(buffers), plan=p, src_blocks=list(range(len(pages))), dst_blocks=[n for _, n in pages])

    def _plan(self, count: int, spec: CacheSpec, is_load: bool) -> Plan:
        key = count, spec, is_load
        if key not in self._plans:
            assert self.spec is not None
            kept = self.spec.replaced(num_blocks=count)
            self._plans[key] = plan(kept, spec) if is_load else plan(spec, kept)
        return self._plans[key]

    def _page_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.pool.pool.get_dummy_flat_data_page().dtype
        return dtype

    def close(self) -> None:
        for tier in self.stack.tiers:
            if not isinstance(tier, HostTier):  # which others of this process may share
                tier.close()
        if self._others is not None:
            self._others.close()


def _kept_spec(pool: HostPool, layout: str, format: str) -> CacheSpec | None:
    """Of one block in the store; None of pages that go whole."""
    if layout not in ("", CANONICAL):
        raise BadArgument(f'extra config: layout is {layout!r}; it must be "canonical", or "" for pages as the pool has them.')
    if pool.page_spec is None:
        return None
    spec = pool.page_spec
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


def _flat(page: Tensor, *, is_written: bool = False) -> Tensor:
    if is_written and not page.is_contiguous():
        raise BadArgument(f"a page to be written is {list(page.shape)} with strides {list(page.stride())}; it must be contiguous.")
    return page.contiguous().view(torch.uint8).reshape(-1)
