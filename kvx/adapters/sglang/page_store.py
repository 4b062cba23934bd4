"""The pages of one host pool in the store: by index, or as flat copies. kvx/connector/block_store.py does the work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvx.adapters.sglang.names import SGLANG
from kvx.adapters.sglang.pools import HostPool
from kvx.connector.block_store import BlockStore, StoredBlock, kept_spec
from kvx.connector.store_names import BLOCK_SIZE, Scheme, named_kind
from kvx.errors import BadArgument
from kvx.spec import StateSpec
from kvx.tiers import Block, BlockKind, TierOption


class PageStore(BlockStore):
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
        spec = kept_spec(pool.kept_spec, layout, format)
        kind = BlockKind({"model": model}, (pool.page_bytes,)) if spec is None else BlockKind.of(spec)
        facts = pool.facts | ({BLOCK_SIZE: pool.tokens} if isinstance(spec, StateSpec) else {})
        super().__init__(options, named_kind(kind, SGLANG, **facts), Scheme(SGLANG, pool.tokens), spec=spec, wanted=pool.kept_spec)

    # --- out of the pool into the store ------------------------------------------------------------------------------------

    def stage(self, pages: Sequence[int]) -> list[Block]:
        """Copies of these pages as the store keeps them."""
        if self.pool.spec is not None:
            return self.copy_from(self.pool.spec, self.pool.buffers, self.pool.blocks(pages))
        return self.stage_flat([self.pool.pool.get_data_page(page, flat=True) for page in pages])

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
                self._convert_into([block], self.pool.page_spec, [page], [0])
        return blocks

    # --- out of the store into the pool ------------------------------------------------------------------------------------

    def load(self, found: Sequence[StoredBlock | None], pages: Sequence[int]) -> list[bool]:
        """Into these pages of the pool."""
        if self.pool.spec is not None:
            self.copy_into(self.pool.spec, self.pool.buffers, self.pool.blocks(pages), found)
            return [here is not None for here in found]
        for page, here in zip(pages, found, strict=True):
            if here is not None:
                flat = here.blocks[0][0].buffers[0]
                if here.family is not None or self.spec != self.pool.page_spec:
                    flat = torch.empty(self.pool.page_bytes, dtype=torch.uint8)
                    self.load_flat(here, flat)
                self.pool.pool.set_from_flat_data_page(page, flat.view(self._page_dtype()))
        return [here is not None for here in found]

    def load_flat(self, found: StoredBlock, page: Tensor) -> None:
        """Into a page as SGLang's own `set_from_flat_data_page` takes it."""
        flat = _flat(page, is_written=True)
        if flat.numel() != self.pool.page_bytes:
            raise BadArgument(f"a page has room for {flat.numel()} bytes; one of the pool has {self.pool.page_bytes}.")
        if self.pool.page_spec is None:
            flat.copy_(found.blocks[0][0].buffers[0])
        else:
            self.copy_into(self.pool.page_spec, [flat], [0], [found])

    def _page_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.pool.pool.get_dummy_flat_data_page().dtype
        return dtype


def _flat(page: Tensor, *, is_written: bool = False) -> Tensor:
    if is_written and not page.is_contiguous():
        raise BadArgument(f"a page to be written is {list(page.shape)} with strides {list(page.stride())}; it must be contiguous.")
    return page.contiguous().view(torch.uint8).reshape(-1)
