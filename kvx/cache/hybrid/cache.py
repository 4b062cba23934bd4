"""HybridCache: a PagedCache of DeepSeek-V4's layers. Its states are windows and tails, its blocks hold compressed entries.

Sequences are admitted, found, forked, released, kept in tiers and handed over as any PagedCache's. What is added here is the step:
the tensors that kernels take, made once, so that a captured graph finds them where they were; and drafts, which are taken back.

A sequence's slot is the block of its state: the same in every layer. Blocks are given out by `prepare_forward`, before a step, so
that nothing is allocated while it runs; what a step computes only fills them.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvx.cache.guard import whole
from kvx.cache.hybrid.drafts import AcceptedTokens
from kvx.cache.hybrid.handle import LayerHandle, LayerViews
from kvx.cache.hybrid.schema import HybridSchema
from kvx.cache.hybrid.store import LayerStore, groups_of
from kvx.cache.kinds import State
from kvx.cache.paged import PagedCache
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument
from kvx.ops import backend as backends
from kvx.ops.entry.step import Step

_STATES, _ENTRIES = 0, 1  # groups


class _TakenBack(NamedTuple):
    seq: Sequence
    length: int  # that stays
    start: int  # of the step


class HybridCache(PagedCache):
    """Its calls may come from several threads, and Ctrl-C in one leaves it whole (kvx/cache/guard.py); a step is one thread's."""

    def __init__(
        self,
        schema: HybridSchema,
        *,
        num_blocks: int,
        max_seqs: int,
        max_seq_len: int,
        device: str | torch.device = "cpu",
        prefix: bool = False,  # find and keep blocks by their content: then the ids of tokens are given before they are computed
        num_snapshots: int = 0,  # states that are kept beside the sequences' own
        snapshot_every: int = 1,  # blocks of tokens between them; 0: none
        replay: str = "exact",  # where there is none: "exact" computes all again that windows reach, "bounded" one window
        salt: bytes = b"",
        model: str = "",  # whose cache it is, for tiers and handovers
    ) -> None:
        if replay not in ("exact", "bounded"):
            raise BadArgument(f'HybridCache: replay is {replay!r}; it must be "exact" or "bounded".')
        for name, value, least in (("max_seqs", max_seqs, 1), ("max_seq_len", max_seq_len, 1), ("num_snapshots", num_snapshots, 0)):
            if not isinstance(value, int) or value < least:
                raise BadArgument(f"HybridCache: {name} is {value!r}; it must be {least} or more.")
        self.schema = schema
        is_exact = replay == "exact"
        reach = schema.reach if is_exact else max(layer.window for layer in schema.layers)
        max_cut = schema.max_drafts + 1 if schema.max_drafts else 0
        states = State(
            snapshot_every, snapshot_at_end=False, replay=reach, is_replay_exact=is_exact, max_cut=max_cut, on_new=self._begin_slot
        )
        num_states = max_seqs + num_snapshots
        super().__init__(
            groups_of(schema, num_blocks, num_states, states, model), max_seqs=max_seqs, max_seq_len=max_seq_len, device=device,
            prefix=prefix, salt=salt, block_size=schema.block_tokens,
        )  # fmt: skip
        self.layers: list[LayerStore] = []
        for i, layer in enumerate(schema.layers):
            pages = self.planes(i, _ENTRIES) if layer.has_entries else None
            owner = self.layers[layer.owner] if layer.owner >= 0 else None
            self.layers.append(LayerStore.make(layer, schema, self.planes(i, _STATES), pages, owner))
        # Entry b of a slot's row: the block of tokens [b * block_tokens, ...). What is behind a sequence's blocks is anything.
        self._host_table = torch.full((num_states, self.max_blocks), -1, dtype=torch.int32)
        self.block_table = self._host_table.to(self.device, copy=True)
        self._host_shared = torch.zeros(num_states, dtype=torch.int32)
        self.num_shared = self._host_shared.to(self.device, copy=True)
        # slots, ends and starts of the step in one piece: one copy for each step.
        self._host_step = torch.zeros(3 * max_seqs + 1, dtype=torch.int32)
        self._step_ints = self._host_step.to(self.device, copy=True)
        ints, n = self._step_ints, max_seqs
        self.step = Step(ints[:n], ints[n : 2 * n + 1], ints[2 * n + 1 :])  # of prepare_forward
        self._views = [LayerViews.make(store, self.block_table, self.num_shared) for store in self.layers]
        # By a sequence's id: its last step's first token, and its length since. While it has that, its tokens can be taken back.
        self._draft_steps: dict[int, tuple[int, int]] = {}
        self._taking_back: Listing[_TakenBack] = ()  # drafts: half of it done would be wrong
        self._guard.mended_by(self._finish_taking_back)
        self._set_step([], [], [])

    def _begin_slot(self, slot: int, is_copy: bool) -> None:
        for store in self.layers:
            if is_copy:
                store.reset_drafts(slot)
            else:
                store.reset(slot)

    # --- a step -----------------------------------------------------------------------------------------------------------

    @whole
    def prepare_forward(self, work: Listing[tuple[Sequence, int]]) -> Step:
        """The next tokens of these sequences will be computed: give them their blocks. OutOfBlocks changes nothing.

        The step has a place for each of max_seqs sequences: these in their order, then slots of -1. Its tensors are the same ones
        at every call, with other contents: nothing is allocated on the device, and a captured step can be replayed.
        """
        before = self._extend_all("prepare_forward", work)
        try:
            for seq, _ in work:
                self._send_table(seq)
            starts, drafts = [was.length for was in before], self.schema.max_drafts
            self._set_step([self.slot(seq) for seq, _ in work], [n for _, n in work], starts)
            for (seq, n), start in zip(work, starts, strict=True):
                self._draft_steps[seq.id] = (start if drafts and n <= drafts + 1 else seq.length, seq.length)
        except BaseException:
            self._stand_again(before)
            raise
        return self.step

    def acquire(self, layer: int, step: Step | None = None, *, backend: str = "auto") -> LayerHandle:
        """The layer during a step; None: the one prepared last. Nothing is allocated on the device."""
        if not isinstance(layer, int) or not 0 <= layer < len(self._views):
            raise BadArgument(f"acquire(): layer is {layer!r}; the schema has {len(self._views)}, from 0 on.")
        return LayerHandle(self._views[layer], self.step if step is None else step, backend)

    def slot(self, seq: Sequence) -> int:
        """Of its windows and tails; -1 before its first step."""
        self._check_live("slot", seq)
        held = self._tables[_STATES].held(seq)
        return int(held[0]) if len(held) else -1

    def block_ids(self, seq: Sequence) -> Tensor:
        """[num_blocks] int32 on the host: of its entries."""
        return torch.from_numpy(self.blocks(seq, _ENTRIES)) if len(self._tables) > _ENTRIES else torch.zeros(0, dtype=torch.int32)

    def _send_table(self, seq: Sequence) -> None:
        """What kernels read of a sequence, where it changed: its blocks, and the tokens whose entries are not written again."""
        slot, shared = self.slot(seq), seq.num_ahead * self.block_size
        if slot < 0:
            return
        if len(self._tables) > _ENTRIES:
            table = self._tables[_ENTRIES]
            n = table.num_blocks(seq, seq.length)
            host, mine = self._host_table[slot, :n], table.table[seq.row, :n]
            changed = np.flatnonzero(host.numpy() != mine)
            if len(changed):
                first, end = int(changed[0]), int(changed[-1]) + 1
                # The host's copy last: what Ctrl-C kept from the device is then sent again.
                self.block_table[slot, first:end].copy_(torch.from_numpy(mine[first:end].copy()), non_blocking=True)
                host[first:end].copy_(torch.from_numpy(mine[first:end]))
        if int(self._host_shared[slot]) != shared:
            self.num_shared[slot : slot + 1].fill_(shared)
            self._host_shared[slot] = shared

    def _set_step(self, slots: Listing[int], counts: Listing[int], starts: Listing[int]) -> None:
        # From memory that is not pinned: the driver has read it when the copy returns, so the next step may write it.
        ints, n, room = self._host_step.numpy(), len(slots), self.max_seqs
        ints[:room], ints[2 * room + 1 :] = -1, 0
        ints[:n], ints[2 * room + 1 : 2 * room + 1 + n] = slots, starts
        ends = ints[room : 2 * room + 1]
        ends[0], ends[1 : n + 1] = 0, np.cumsum(np.asarray(counts, np.int32))
        ends[n + 1 :] = ends[n]
        self._step_ints.copy_(self._host_step, non_blocking=True)

    @whole
    def release(self, seq: Sequence, *, is_preempted: bool = False) -> None:
        super().release(seq, is_preempted=is_preempted)
        self._draft_steps.pop(seq.id, None)

    # --- drafts -----------------------------------------------------------------------------------------------------------

    def truncate(self, seq: Sequence, length: int) -> None:
        """Its first `length` tokens stay. A state goes back as far as the last step's beginning, where that was one of drafts."""
        self._check_live("truncate", seq)
        if isinstance(length, int | np.integer) and length in (0, seq.length):  # known tokens that have no room yet are forgotten
            super().truncate(seq, length)
        else:
            self.take_back([(seq, length)])

    @whole
    def take_back(self, work: Listing[tuple[Sequence, int]], *, backend: str = "auto") -> None:
        """Take back the tokens behind these lengths: drafts of the last step that were not accepted.

        A schema with max_drafts has room for it: a step of at most max_drafts + 1 tokens can be taken back, whole or in part.
        """
        backend = backends.choose("take_back", backend, self.block_table)
        if len({id(seq) for seq, _ in work}) != len(work):
            raise BadArgument("take_back(): a sequence is there twice. Nothing changed.")
        for seq, length in work:
            self._check_live("take_back", seq)
            if isinstance(length, bool) or not isinstance(length, int | np.integer):
                raise BadArgument(f"take_back(): {seq} to {length!r}; that is a whole number of tokens. Nothing changed.")
        work = [(seq, int(length)) for seq, length in work if length != seq.length]
        for seq, length in work:
            named = max(seq.num_stored, seq.num_ahead * self.block_size) if self.prefix is not None else 0
            # A state that a fork has too stays as it is.
            is_shared = self._tables[_STATES].is_last_shared(seq)
            first = seq.length if is_shared else self._draft_start(seq)
            if not max(first, named) <= length <= seq.length:
                raise BadArgument(
                    f"take_back(): {seq} to {length}; tokens from {first} on can be taken back (max_drafts is "
                    f"{self.schema.max_drafts}), and {named} are named. Nothing changed."
                )
        if work:
            # From here on it happens: what is broken off is done again, which gives the same.
            self._taking_back = [_TakenBack(seq, length, self._draft_start(seq)) for seq, length in work]
            try:
                self._take_back(self._taking_back, backend)
            except Exception:  # no interrupt: it would fail again, and every call after it
                self._taking_back = ()
                for seq, _ in work:
                    self._spoil(seq)
                raise

    def _draft_start(self, seq: Sequence) -> int:
        """Tokens from here on can be taken back: of the last step, where nothing came after it."""
        start, end = self._draft_steps.get(seq.id, (seq.length, seq.length))
        return start if seq.length == end else seq.length

    def _take_back(self, work: Listing[_TakenBack], backend: str) -> None:
        slots, starts = [self.slot(each.seq) for each in work], [each.start for each in work]
        limits = np.full(len(self.block_table), np.iinfo(np.int32).max, np.int32)
        limits[slots] = [each.length for each in work]
        lengths = torch.from_numpy(limits).to(self.device)
        counts = [each.length - each.start for each in work]
        accepted = AcceptedTokens.of(slots, starts, counts, self.device)
        for store in self.layers:
            store.window.truncate(lengths)
            for drafts, pages in ((store.drafts, store.entries), (store.index_drafts, store.index)):
                if drafts is not None and pages is not None:
                    drafts.take_back(accepted, pages, self.block_table, backend=backend)
        for seq, length, start in work:
            if seq.length != length:
                self._truncate(seq, length)
            self._draft_steps[seq.id] = start, length
        self._taking_back = ()

    def _spoil(self, seq: Sequence) -> None:
        """Its windows and tails are half taken back: nobody goes on from them, or is given them."""
        self._truncate(seq, 0)

    def _finish_taking_back(self) -> None:
        if self._taking_back:
            self._take_back(self._taking_back, backends.choose("take_back", "auto", self.block_table))

    def unwritten(self, layer: int, plane: str, block: int, length: int) -> list[tuple[int, int]]:
        store = self.layers[layer]
        pages = store.entries if plane == "entries" else store.index
        assert pages is not None
        codec, rows = pages.codec, pages.rows
        used = min(rows, max(0, store.schema.entries(length) - block * rows))
        data, size = rows * codec.data_bytes, pages.pages.shape[1]
        return [(used * codec.data_bytes, data), (data + used * codec.scale_bytes, size)]

    # --- all of it --------------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Of all layers: schema.memory_bytes(num_blocks, max_seqs + num_snapshots).allocated, and with drafts one more tail of
        each, for sequences that are skipped. Tables come beside it: 4 bytes for each state and block of max_seq_len, and with
        drafts for each tail."""
        drafts = sum(t.numel() * t.element_size() for store in self.layers for t in store.draft_tensors)
        return super().memory_bytes + drafts
