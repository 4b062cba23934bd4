"""PagedCache: storage, blocks, tables and prefixes of a model's KV cache, and the calls an engine makes on it.

    seq = cache.admit(tokens)          # finds what is cached of them; nothing is allocated
    cache.extend(seq, n)               # room for the next n of them
    batch = cache.plan([(seq, n)])     # slots, tables and lengths of a step
    ...                                # per layer: kvx.write or kvx.qkv_norm_rope_append, kvx.attention_varlen
    cache.commit(seq)                  # what was written may be found by others
    cache.release(seq)

The decisions are made on the host, in numpy, for whole sequences at once. Nothing here computes attention.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx.cache.admitted import Admitted
from kvx.cache.backing import Backing, Finder
from kvx.cache.batch import Batch, BatchBuffers
from kvx.cache.blocks import BlockAllocator
from kvx.cache.group_table import GroupTable
from kvx.cache.groups import AnyLayer, Layer, LayerGroup, PlanesLayer, check_groups
from kvx.cache.guard import Guard, whole
from kvx.cache.kinds import Full, Latent, State
from kvx.cache.prefix import Extras, PrefixCache, PrefixStats, Stretch, check_extra, checked_extras
from kvx.cache.resuming import Resuming
from kvx.cache.sequence import Sequence
from kvx.cache.state_table import StateTable
from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument, OutOfBlocks, a_type
from kvx.layout.device_memory import check_device, check_fits
from kvx.spec.byte_size import byte_text
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.shown import Shown

Tokens = Listing[int] | NDArray[Any] | Tensor


@dataclass(frozen=True)
class GroupStats:
    name: str
    num_blocks: int
    num_free: int
    num_idle: int
    num_used: int
    num_pinned: int
    block_bytes: int  # of one block, in all of the group's layers


@dataclass(frozen=True)
class CacheStats:
    num_seqs: int
    num_tokens: int  # in the cache, counted once for each sequence that has them
    groups: tuple[GroupStats, ...]
    prefix: PrefixStats | None

    @property
    def used_bytes(self) -> int:
        return sum(g.num_used * g.block_bytes for g in self.groups)


class PagedCache(Shown):
    """The owner of blocks: one layer group or more, each with its storage."""

    def __init__(
        self,
        groups: Listing[LayerGroup],
        *,
        max_seqs: int,  # sequences at once, and of a batch
        max_seq_len: int,
        device: str | torch.device = "cpu",
        max_tokens: int = 0,  # of a batch; 0: max_seq_len, or max_seqs if that is more
        prefix: bool = True,  # find and keep blocks by their content
        salt: bytes = b"",
        hash_name: str = "blake2b",
        max_events: int = 0,  # of prefix.events; 0: none are kept
        backend: str = "auto",  # of the copies made here
        block_size: int = 0,  # tokens of a block, where no group's spec says it: of states, and of entries
    ) -> None:
        self.groups = check_groups(groups)
        for name, value, least in (("max_seqs", max_seqs, 1), ("max_seq_len", max_seq_len, 1), ("max_tokens", max_tokens, 0)):
            if not isinstance(value, int) or value < least:
                raise BadArgument(f"PagedCache(): {name} is {value!r}; it must be {least} or more.")
        self.block_size = block_size or next((g.block_size for g in self.groups if g.block_size), 0)
        if type(self.block_size) is not int or self.block_size < 1:
            raise BadArgument(
                f"PagedCache(): block_size is {block_size!r}, and no group says how many tokens a block has; it must be 1 or more."
                if not self.block_size
                else f"PagedCache(): block_size is {block_size!r}; it must be 1 or more."
            )
        other = next((g for g in self.groups if g.block_size not in (0, self.block_size)), None)
        if other is not None:
            raise BadArgument(
                f"PagedCache(): block_size is {block_size}; blocks of group {other.name!r} have {other.block_size} tokens."
            )
        self.max_seqs, self.max_seq_len = max_seqs, max_seq_len
        self.max_tokens = max_tokens or max(max_seq_len, max_seqs)
        self.max_blocks = -(-max_seq_len // self.block_size)  # of a sequence
        check_device("PagedCache()", device)
        self.device = torch.device(device)
        if self.device.type == "meta":
            raise BadArgument('PagedCache(): device is "meta", which holds no bytes; kvx.size() tells what a cache takes.')
        check_fits("PagedCache()", self.groups[0].spec.num_blocks, sum(g.num_bytes for g in self.groups), self.device)
        self._guard = Guard()
        shape = max_seqs, self.max_blocks, self.block_size
        self._tables = [
            (StateTable if g.blocks_of.has_state else GroupTable)(g, i, shape, device, backend, self._guard)
            for i, g in enumerate(self.groups)
        ]
        self.allocators: tuple[BlockAllocator, ...] = tuple(t.allocator for t in self._tables)
        self.kinds = tuple(t.kind for t in self._tables)
        self.taker: Sequence | None = None  # whose call takes blocks now, or did last: for whom others are evicted
        self._admitted = Admitted(self, max_seqs, max_seq_len, self._tables)
        self._resuming = Resuming(self._tables, max_seqs, self._guard)
        self._late = [t for t in self._tables if t.kind.is_ahead]  # their blocks come with entries, not with tokens
        for i, allocator in enumerate(self.allocators):
            allocator.count_refs = partial(self._admitted.count_refs, i)
        only = self._tables[0]
        is_plain = isinstance(only.kind, Full | Latent) and not only.kind.gives_back
        self._only_group = only if len(self._tables) == 1 and is_plain else None
        self.prefix: PrefixCache | None = None
        if prefix:
            self.prefix = PrefixCache(self.allocators, self.block_size, salt=salt, hash_name=hash_name, max_events=max_events)
        self._guard.mended_by(self._admitted.mend)
        self._layers = {i: layer for t in self._tables for i, layer in t.layers.items() if isinstance(layer, Layer)}
        self._buffers = BatchBuffers(self._tables, max_seqs, self.max_tokens, self.device)

    # --- one sequence -----------------------------------------------------------------------------------------------------

    def admit(
        self,
        tokens: Tokens,
        *,
        extra: bytes = b"",
        extras: Extras = (),
        snapshot_at: Listing[int] = (),
        is_brought_back: bool = True,
        out: list[Sequence] | None = None,
    ) -> Sequence:
        """A sequence of these tokens. Its length is what the prefix cache had of them, never all: the last is left to compute.

        Nothing else is allocated, but for what a backing brings back; False leaves that to bring_back(). `extra` is what the
        content hangs on besides the tokens, such as a LoRA's id; `extras` what does so from a token on, as (position, bytes): the
        hash of an image whose placeholders begin there. `snapshot_at` is after how many tokens states are to be kept besides what
        their kind says, such as the end of a system prompt: at the end of the last block before it. OutOfBlocks where max_seqs are
        admitted already.

        `out` is a list that gets the sequence too, before the call returns. Pass it if your program continues after Ctrl-C: once
        torch.compile has run, Ctrl-C may come between the call's end and the assignment of its result. Then release what is in
        `out` and not yet released.
        """
        ids = token_ids("admit()", tokens)
        n = len(ids)
        if n > self.max_seq_len:
            raise BadArgument(f"admit(): {n} tokens; max_seq_len is {self.max_seq_len}. Cut the prompt, or make the cache longer.")
        check_extra("admit", extra)
        begun = checked_extras("admit", extras, n) if extras else []
        asked = () if isinstance(snapshot_at, tuple) and not snapshot_at else self._asked("admit", snapshot_at)
        root = b"" if self.prefix is None else self.prefix.root(extra)
        guard, made = self._guard, _list("admit", out)
        first = len(made)
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                seq = self._admitted.new("admit", made)
                seq.extra, seq.extras, seq.snapshot_at, seq.snapshot_end = extra, begun, asked, self._snapshot_end(n)
                seq.token_row[:n] = ids
                seq.num_tokens = n
                if self.prefix is not None:
                    self.taker = seq
                    self._resuming.find(seq, self.prefix, root)
                    if self.prefix.backing is None:
                        self._resuming.run_ahead(seq, self.prefix)
                    elif is_brought_back:
                        self._resuming.bring_back(seq, self.prefix, self.prefix.backing)
                        self._resuming.run_ahead(seq, self.prefix)
                    if self.prefix.hears_requests:
                        self.prefix.tell_request("admitted", seq)
            return seq
        except BaseException:
            for seq in made[first:]:  # nobody has it. Without a call: a second Ctrl-C may come as soon as something is called
                guard.is_torn, seq.cache = True, None
            self._mend_torn()
            raise

    def _mend_torn(self) -> None:
        with self._guard.lock:
            if self._guard.is_torn:
                self._guard.mend()

    def attach(self, backing: Backing | None, *, finder: Finder | None = None) -> None:
        """Offer it what is evicted from now on, and ask it for more of every prefix. None: no more.

        `finder` is told of every prefix before, so that it can get what the backing lacks.
        """
        if self.prefix is None:
            raise BadArgument("attach(): this cache has no names for its blocks. Make it with prefix=True.")
        self.prefix.backing, self.prefix.finder = backing, finder

    @whole
    def bring_back(self, seq: Sequence) -> int:
        """Tokens that a sequence just admitted gets from the backing, and from this cache after them: its length grows by as many.

        What it has no room for, or is damaged, stays to be computed.
        """
        self._check_live("bring_back", seq)
        if seq.num_ahead and seq.length == seq.num_cached:  # brought back when it was admitted
            return 0
        if seq.length != seq.num_stored:
            raise BadArgument(f"bring_back(): {seq} has tokens of its own; call it after admit() and before extend().")
        if self.prefix is None or self.prefix.backing is None:
            return 0
        self.taker = seq
        count = self._resuming.bring_back(seq, self.prefix, self.prefix.backing)
        self._resuming.run_ahead(seq, self.prefix)
        if self.prefix.hears_requests:
            self.prefix.tell_request("brought", seq)
        return count * self.block_size

    @whole
    def append(self, seq: Sequence, tokens: Tokens, *, extra: bytes = b"") -> None:
        """More known tokens, without room for them yet. `extra` is what begins with them and is not in their ids: an image."""
        self._check_live("append", seq)
        ids = token_ids("append()", tokens)
        end = seq.num_tokens + len(ids)
        self._check_length("append", seq, end)
        self._begin("append", seq, end - len(ids), end, extra)
        seq.token_row[seq.num_tokens : end] = ids
        seq.snapshot_end = self._snapshot_end(end)
        seq.num_tokens = end

    def until_snapshot(self, seq: Sequence, n: int) -> int:
        """Of its next `n` tokens, as many as one step may compute: it ends where a snapshot of a state is to stand, if any does.

        commit() after that step leaves it. Without states it is `n`.
        """
        self._check_live("until_snapshot", seq)
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
            raise BadArgument(f"until_snapshot(): n is {n!r}; it must be a number of tokens, 0 or more.")
        n = int(n)
        if self.prefix is None or not seq.is_exact:
            return n
        for kind in self.kinds:
            if isinstance(kind, State) and (due := kind.next_due(seq.length // self.block_size, seq.snapshots)):
                n = min(n, due * self.block_size - seq.length)
        return n

    def _asked(self, call: str, snapshot_at: Listing[int]) -> tuple[int, ...]:
        """In blocks."""
        try:
            snapshot_at = list(snapshot_at)
        except TypeError:
            raise BadArgument(f"{call}(): snapshot_at is {snapshot_at!r}; it must be a list of numbers of tokens.") from None
        for at in snapshot_at:
            if isinstance(at, bool) or not isinstance(at, int | np.integer) or not 0 <= at <= self.max_seq_len:
                raise BadArgument(f"{call}(): snapshot_at has {at!r}; it has numbers of tokens, 0 to {self.max_seq_len}.")
        return tuple(sorted({int(at) // self.block_size for at in snapshot_at} - {0}))

    def _snapshot_end(self, num_tokens: int) -> int:
        """Where a prompt of so many tokens is found again, in blocks, if states are to be kept there; else 0."""
        is_kept = any(isinstance(kind, State) and kind.snapshot_at_end for kind in self.kinds)
        return max(0, num_tokens - 1) // self.block_size if is_kept else 0

    def extend(self, seq: Sequence, n: int | Tokens, *, extra: bytes = b"") -> None:
        """Room for `n` more of its tokens, or for these new ones, in every group. OutOfBlocks changes nothing.

        `extra` is what begins with new tokens and is not in their ids, as append() takes it.

        New tokens follow those in the cache: all known ones have room by then. Without a prefix cache a count may go past the
        known tokens; their ids are 0. A last block that others read is copied first; blocks behind windows are given back.
        """
        if extra != b"":
            return self._extend(seq, n, extra)
        try:
            length = seq.length
        except AttributeError:
            self._check_live("extend", seq)
            raise
        # The two calls of a decode step, without numpy's functions where the last block has room.
        if type(n) is int:
            if 0 <= n <= seq.limit - length and n <= seq.num_tokens - length and seq.cache is self:
                seq.length = length + n
                return
        elif type(n) is list and len(n) == 1 and length == seq.num_tokens and seq.cache is self:
            token = n[0]
            # What begins at this token is of an extend that was broken off: _begin() drops it.
            if type(token) is int and 0 <= token < 2**31 and (not seq.extras or seq.extras[-1][0] < length):
                if length < seq.limit:
                    seq.token_row[length] = token
                    seq.num_tokens = seq.length = length + 1
                    return
                if self._only_group is not None and length % self.block_size == 0 and length < self.max_seq_len:
                    self._next_block(seq, token, self._only_group)
                    return
        self._extend(seq, n)

    @whole
    def _extend(self, seq: Sequence, n: int | Tokens, extra: bytes = b"") -> None:
        self._check_live("extend", seq)
        if isinstance(n, bool):
            raise BadArgument(f"extend(): n is {n}; it must be a count, or token ids.")
        if isinstance(n, int | np.integer):
            if extra != b"":
                raise BadArgument("extend(): extra belongs to new tokens; n is a count. Give their ids, or give it to append().")
            if n < 0:
                raise BadArgument(f"extend(): n is {n}; it must be 0 or more. truncate() makes a sequence shorter.")
            end = seq.length + int(n)
            self._check_length("extend", seq, end)
            if end > seq.num_tokens and self.prefix is not None:
                raise BadArgument(
                    f"extend(): {n} tokens more make {end}; {seq.num_tokens} are known. Give the new tokens' ids, "
                    "or make the cache with prefix=False."
                )
            if end > seq.num_tokens:
                seq.token_row[seq.num_tokens : end] = 0
            self._grow(seq, end)
            return
        ids = token_ids("extend()", n)
        if seq.length != seq.num_tokens and len(ids):
            raise BadArgument(
                f"extend(): {seq.num_tokens - seq.length} known tokens have no room yet; extend by their count first, or append()."
            )
        end = seq.length + len(ids)
        self._check_length("extend", seq, end)
        before = seq.extras
        self._begin("extend", seq, end - len(ids), end, extra)
        seq.token_row[seq.num_tokens : end] = ids
        try:
            self._grow(seq, end)
        except OutOfBlocks:
            seq.extras = before
            raise

    def _next_block(self, seq: Sequence, token: int, group: GroupTable) -> None:
        """extend by one token, into the next block of the only group: a decode step has no time for more."""
        guard, length = self._guard, seq.length
        end, limit = length + 1, min(length + self.block_size, self.max_seq_len)
        with guard.lock:
            if guard.is_torn:
                guard.mend()
            try:
                self.taker = seq
                seq.token_row[length] = token
                group.table[seq.row, length // self.block_size] = group.allocator.allocate_one("extend")
                seq.num_tokens, seq.length, seq.limit = end, end, limit
            except OutOfBlocks:
                raise
            except BaseException:
                guard.is_torn = True
                guard.mend()
                raise

    def _begin(self, call: str, seq: Sequence, at: int, end: int, extra: bytes) -> None:
        """The tokens from `at` on begin with this. Said before they are counted, so that Ctrl-C cannot leave them without it."""
        check_extra(call, extra)
        if seq.extras or extra:  # what stands at `at` is of a call that was broken off
            seq.extras = [begun for begun in seq.extras if begun[0] < at] + ([(at, extra)] if extra and end > at else [])

    @whole
    def extend_all(self, work: Listing[tuple[Sequence, int]]) -> None:
        """Room for the next `n` tokens of each of these sequences, or for none of them: OutOfBlocks changes nothing."""
        self._extend_all("extend_all", work)

    def _extend_all(self, call: str, work: Listing[tuple[Sequence, int]]) -> list[_Standing]:
        """What they were before."""
        if len({id(seq) for seq, _ in work}) != len(work):
            raise BadArgument(f"{call}(): a sequence is there twice. Nothing changed.")
        ends = []
        for seq, n in work:
            if type(seq) is not Sequence or seq.cache is not self:
                self._check_live(call, seq)
            if (type(n) is not int and (isinstance(n, bool) or not isinstance(n, int | np.integer))) or n < 0:
                raise BadArgument(f"{call}(): {seq} with {n!r} tokens more; that is a whole number, 0 or more. Nothing changed.")
            end = seq.length + int(n)
            self._check_length(call, seq, end)
            if end > seq.num_tokens and self.prefix is not None:
                raise BadArgument(
                    f"{call}(): {n} tokens more make {end}; {seq.num_tokens} of {seq} are known. Give the new tokens' ids to "
                    "append() first, or make the cache with prefix=False. Nothing changed."
                )
            ends.append((seq, end))
        before = [_Standing(seq, seq.num_tokens, seq.length, seq.limit) for seq, _ in work]
        try:
            for seq, end in ends:
                if end > seq.num_tokens:
                    seq.token_row[seq.num_tokens : end] = 0
            self._grow_all(call, ends)
        except BaseException:
            self._stand_again(before)
            raise
        return before

    def _stand_again(self, before: Listing[_Standing]) -> None:
        """As if nothing had been given: the guard counts the blocks again after this."""
        for seq, num_tokens, length, limit in before:
            seq.num_tokens, seq.length, seq.limit = num_tokens, length, limit

    def _grow(self, seq: Sequence, end: int) -> None:
        """_grow_all of one, which is what an engine calls most: the same, without what several need."""
        if end == seq.length:
            return
        growths = []
        for table in self._tables:
            growth, allocator = table.growth(seq, end), table.allocator
            if growth.need > allocator.num_available and growth.need > allocator.num_available + table.num_left_behind(seq):
                raise allocator.out_of_blocks(growth.need, "extend")
            growths.append(growth)
        limit, num_tokens = self._limit(seq, end), max(seq.num_tokens, end)
        self.taker = seq
        for table, growth in zip(self._tables, growths, strict=True):
            table.grow(seq, growth)
        seq.num_tokens, seq.length, seq.limit = num_tokens, end, limit

    def _limit(self, seq: Sequence, end: int) -> int:
        """Up to where a sequence of this length may go on without asking."""
        limit = min(-(-end // self.block_size) * self.block_size, self.max_seq_len)
        for table in self._late:  # the next token may need a block that is not there yet
            limit = max(end, min(limit, table.num_blocks(seq, end) * self.block_size))
        return limit

    def _grow_all(self, call: str, ends: Listing[tuple[Sequence, int]]) -> None:
        """Blocks up to each `end`. First every group is asked, then each is changed: so OutOfBlocks leaves all as it was.

        The new length is the last that changes: what is in the table behind the old one is nobody's until then.
        """
        growths = []
        for table in self._tables:
            mine, allocator = table.growths(ends), table.allocator
            need = sum(growth.need for growth in mine)
            if need > allocator.num_available:
                behind = sum(table.num_left_behind(seq) for seq, _ in ends)
                if need > allocator.num_available + behind:
                    raise allocator.out_of_blocks(need, call)
            growths.append((mine, need))
        for table, (mine, need) in zip(self._tables, growths, strict=True):
            if len(ends) > 1 and table.gives_back:  # what is given back may be what another takes
                for seq, _ in ends:
                    table.leave_behind(seq, min(table.num_blocks(seq, seq.length), table.first_block(seq.length)))
            for (seq, _), growth in zip(ends, mine, strict=True):
                need -= growth.need
                self.taker = seq
                table.grow(seq, growth, need)
        for seq, end in ends:
            limit, num_tokens = self._limit(seq, end), max(seq.num_tokens, end)
            seq.num_tokens, seq.length, seq.limit = num_tokens, end, limit

    def commit(self, seq: Sequence) -> None:
        """The K and V of all its `length` tokens are written, or will be before anything reads them on this stream.

        Full blocks get names, by which later sequences find them.
        """
        bs = self.block_size
        if type(seq) is not Sequence or seq.cache is not self:
            self._check_live("commit", seq)
        if seq.length - seq.num_stored < bs:
            return
        if self.prefix is None:
            seq.num_stored = seq.length // bs * bs
            return
        guard = self._guard
        with guard.lock:
            if guard.is_torn:
                guard.mend()
            try:
                self._store(seq, self.prefix)
            except BaseException:
                guard.is_torn = True
                guard.mend()
                raise

    @whole
    def adopt(self, seq: Sequence, first_tokens: Listing[int]) -> None:
        """commit for blocks that someone else wrote, in group i from token first_tokens[i] on.

        A block that a window's edge runs through is good for this sequence, which sees its end alone, and gets no name: another
        might see its beginning.
        """
        self._check_live("adopt", seq)
        if len(first_tokens) != len(self.groups):
            raise BadArgument(f"adopt(): {len(first_tokens)} first tokens for {len(self.groups)} groups.")
        if self.prefix is None:
            seq.num_stored = seq.length // self.block_size * self.block_size
        elif seq.length - seq.num_stored >= self.block_size:
            self._store(seq, self.prefix, first_tokens)

    def _store(self, seq: Sequence, prefix: PrefixCache, first_tokens: Listing[int] = ()) -> None:
        """Name its full blocks, in group i from token first_tokens[i] on."""
        hashes, bs = seq.hashes, self.block_size
        done, full = seq.num_stored // bs, seq.length // bs
        if len(hashes) < full:
            parent = hashes[-1] if hashes else seq.root
            first = len(hashes) * bs
            hashes += prefix.chain(seq.token_row[first : full * bs].tobytes(), parent, seq.extras, first)
        if self._only_group is not None and full == done + 1 and not first_tokens:  # what a decode step does
            stretch = prefix.stretch(seq, done, full) if prefix.has_listeners else None
            prefix.put_one(0, hashes[done], int(self._only_group.table[seq.row, done]), stretch)
            seq.num_stored = full * bs
            return
        if not seq.is_exact:
            return
        for table in self._tables:
            least = max(done, -(-first_tokens[table.index] // bs)) if first_tokens else done
            first, ids = table.nameable(seq, least)
            stretch = prefix.stretch(seq, first, first + len(ids)) if prefix.has_listeners and len(ids) else None
            if len(ids) == 1:
                prefix.put_one(table.index, hashes[first], int(ids[0]), stretch)
            elif len(ids):
                prefix.put_checked(table.index, hashes[first : first + len(ids)], ids, stretch)
        seq.num_stored = max(seq.num_stored, full * bs)

    def fork(self, seq: Sequence, *, out: list[Sequence] | None = None) -> Sequence:
        """Another sequence with the same tokens and blocks. The first to write into a shared last block gets a copy of it.

        `out` is a list that gets it too, as in admit().
        """
        guard, made = self._guard, _list("fork", out)
        first = len(made)
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                self._check_live("fork", seq)
                other = self._admitted.new("fork", made)
                self._share(seq, other)
                if self.prefix is not None and self.prefix.hears_requests:
                    self.prefix.tell_request("forked", other)
            return other
        except BaseException:
            for other in made[first:]:  # nobody has it
                guard.is_torn, other.cache = True, None
            self._mend_torn()
            raise

    def _share(self, seq: Sequence, other: Sequence) -> None:
        """All that `seq` has, for a new one."""
        other.token_row[: seq.num_tokens] = seq.tokens
        other.starts, other.hashes, other.root = list(seq.starts), list(seq.hashes), seq.root
        other.extra = seq.extra
        other.num_ahead, other.is_exact, other.whole_from = seq.num_ahead, seq.is_exact, seq.whole_from
        for table in self._tables:
            table.table[other.row] = table.table[seq.row]
            table.allocator.retain_checked(table.held(seq))
        other.num_tokens, other.length, other.num_cached = seq.num_tokens, seq.length, seq.num_cached
        other.num_stored, other.extras = seq.num_stored, list(seq.extras)
        other.snapshot_at, other.snapshot_end = seq.snapshot_at, seq.snapshot_end
        seq.limit = other.limit = seq.length

    @whole
    def truncate(self, seq: Sequence, length: int) -> None:
        """Its first `length` tokens stay, in the cache and known; the others are forgotten and their blocks given back.

        Where windows have given back what the next token would see, it is refused: a roll-back may go as far as the last
        extend's beginning.
        """
        self._check_live("truncate", seq)
        if not isinstance(length, int | np.integer) or not 0 <= length <= seq.length:
            raise BadArgument(f"truncate(): length is {length!r}; the sequence has {seq.length}. It is 0 to that.")
        length = int(length)
        for table in self._tables:
            if why := table.why_not_cut(seq, length):
                raise BadArgument(f"truncate(): {why}. Release it, and admit its tokens again.")
        self._truncate(seq, length)

    def _truncate(self, seq: Sequence, length: int) -> None:
        bs = self.block_size
        ahead = min(seq.num_ahead, length // bs)
        left = [(table, *table.cut(seq, length, ahead)) for table in self._tables]
        starts = [min(seq.starts[t.index], t.kind.num_blocks(length, bs)) for t in self._tables]
        cached, stored, hashes = min(seq.num_cached, length), min(seq.num_stored, length // bs * bs), seq.hashes[: length // bs]
        extras = [begun for begun in seq.extras if begun[0] < length]
        whole_from, is_exact = (seq.whole_from, seq.is_exact) if length else (0, True)
        seq.length = seq.num_tokens = seq.limit = length  # extend asks whose the last block is
        seq.num_cached, seq.num_stored, seq.hashes, seq.starts, seq.num_ahead = cached, stored, hashes, starts, ahead
        seq.whole_from, seq.is_exact, seq.extras = whole_from, is_exact, extras
        seq.snapshot_at = tuple(n for n in seq.snapshot_at if n * bs <= length)
        seq.snapshot_end = min(seq.snapshot_end, self._snapshot_end(length))
        for table, start, blocks in left:
            table.let_go(seq, start, blocks)

    @whole
    def abandon(self, seq: Sequence, length: int, num_tokens: int) -> None:
        """Undo an extend whose tokens were never written: as long as before, or where a state has moved on, of no length."""
        self._check_live("abandon", seq)
        has_states = any(t.kind.has_state for t in self._tables)
        tokens, extras = seq.token_row[:num_tokens].copy(), [begun for begun in seq.extras if begun[0] < num_tokens]
        asked = seq.snapshot_at, seq.snapshot_end
        self._truncate(seq, 0 if has_states else min(length, seq.length))
        seq.token_row[:num_tokens] = tokens
        seq.extras = extras  # before the tokens are counted: blocks of them without it would have the names of others
        seq.snapshot_at, seq.snapshot_end = asked
        seq.num_tokens = max(seq.num_tokens, num_tokens)

    @whole
    def release(self, seq: Sequence, *, is_preempted: bool = False) -> None:
        """Give back its blocks and its place. Blocks with names stay to be found until their room is needed.

        `is_preempted` says to who looks that it did not end by itself: others needed the blocks.
        """
        self._check_live("release", seq)
        if self.prefix is not None and self.prefix.hears_requests:
            self.prefix.tell_request("preempted" if is_preempted else "released", seq)
        seq.cache = None
        for table in self._tables:
            table.allocator.release_checked(table.held(seq))
        self._admitted.leave(seq)

    def blocks(self, seq: Sequence, group: int = 0) -> NDArray[np.int32]:
        """Its block ids in a group, in order; -1 behind the window. Of states: the one it is in."""
        self._check_live("blocks", seq)
        if not isinstance(group, int) or not 0 <= group < len(self._tables):
            raise BadArgument(f"blocks(): group is {group!r}; the cache has {len(self._tables)}, from 0 on.")
        table = self._tables[group]
        return table.table[seq.row, : table.num_blocks(seq, seq.length)].copy()

    # --- a batch ----------------------------------------------------------------------------------------------------------

    @whole
    def plan(self, work: Listing[tuple[Sequence, int]], *, pad_seqs: int = 0, pad_tokens: int = 0) -> Batch:
        """A step in which the last `n` tokens of each sequence are queries: its K and V are written, then attended.

        The batch is views of buffers that never move: good until the next plan. Padding fills it up to a captured graph's size.
        """
        for seq, n in work:
            if type(seq) is not Sequence or seq.cache is not self:
                self._check_live("plan", seq)
            if not isinstance(n, int | np.integer) or not 0 < n <= seq.length:
                raise BadArgument(f"plan(): {n!r} queries of {seq}; they must be 1 to its length. extend() comes first.")
            if n > 1 and self._only_group is None:
                self._check_queries(seq, n)
        return self._buffers.fill(work, self._admitted.tokens, pad_seqs, pad_tokens)

    def _check_queries(self, seq: Sequence, n: int) -> None:
        """Every query has a block in every group to be written to."""
        block = (seq.length - n) // self.block_size
        for table, first in zip(self._tables, seq.starts, strict=True):
            if block < first and not table.kind.has_state:
                raise BadArgument(
                    f"plan(): {n} queries of {seq} begin in block {block}; group {table.group.name!r} (window "
                    f"{table.kind.window}) gave back those before {first}. Plan what extend() made room for last."
                )

    def layer(self, i: int) -> Layer:
        """The handle of the model's layer `i`: its K and V."""
        try:
            return self._layers[i]
        except (KeyError, TypeError):
            raise BadArgument(f"layer(): no group has K and V of layer {i!r}; they have {sorted(self._layers)}.") from None

    def planes(self, i: int, group: int) -> PlanesLayer:
        """The handle of layer `i` in a group whose blocks hold other planes than K and V: a state."""
        has_group = isinstance(group, int) and 0 <= group < len(self._tables)
        found = self._tables[group].layers.get(i) if has_group else None
        if not isinstance(found, PlanesLayer):
            names = [repr(t.group.name) for t in self._tables if not isinstance(t.group.spec, CacheSpec)]
            raise BadArgument(
                f"planes(): group {group!r} has no planes of layer {i!r}. Groups of others than K and V: "
                f"{', '.join(names) or 'none'}."
            )
        return found

    def unwritten(self, layer: int, plane: str, block: int, length: int) -> list[tuple[int, int]]:
        """Bytes of a block's plane that a sequence of this length has written nothing to, from and to: block is its number there.

        What knows how a plane's bytes are filled says so; here all of them are.
        """
        return []

    # --- all of it --------------------------------------------------------------------------------------------------------

    @whole
    def room(self, seq: Sequence | None = None) -> int:
        """Tokens that fit now, in one extend of `seq` or of a new sequence: free and idle blocks of the tightest group."""
        if seq is None:
            if not self._admitted.free_rows:
                return 0
            rooms = [t.allocator.num_available * (2**31 if t.kind.has_state else self.block_size) for t in self._tables]
            return min(self.max_seq_len, *rooms)
        self._check_live("room", seq)
        return min(self.max_seq_len - seq.length, *(table.room(seq) for table in self._tables))

    @property
    def num_seqs(self) -> int:
        """Sequences that are admitted and not released."""
        return len(self._admitted.live)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Those admitted and not released, oldest first."""
        return tuple(self._admitted.live.values())

    @whole
    def stretches(self) -> list[Stretch]:
        """Of each sequence that has names of blocks, what they are made of."""
        return [self.prefix.stretch(s, 0, len(s.hashes)) for s in self._admitted.live.values() if self.prefix and s.hashes]

    @property
    def memory_bytes(self) -> int:
        """Of all layers' tensors, scales included."""
        return sum(_num_bytes(layer) for table in self._tables for layer in table.layers.values())

    @whole
    def stats(self) -> CacheStats:
        """Blocks and bytes of each group, and what prefixes found."""
        groups = []
        for table in self._tables:
            a, total = table.allocator, sum(map(_num_bytes, table.layers.values()))
            per_block = total // max(1, a.num_blocks)
            groups.append(GroupStats(a.name, a.num_blocks, a.num_free, a.num_idle, a.num_used, a.num_pinned, per_block))
        tokens = sum(s.length for s in self._admitted.live.values())
        return CacheStats(len(self._admitted.live), tokens, tuple(groups), self.prefix.stats if self.prefix else None)

    def shown(self) -> dict[str, str]:
        stats = self.stats()
        groups = {
            f"group {g.name!r}": f"{g.num_used} of {g.num_blocks} blocks used, {g.num_idle} kept for prefixes, {g.num_free} free, "
            f"{byte_text(g.num_blocks * g.block_bytes)}" + f", {g.num_pinned} pinned" * bool(g.num_pinned)
            for g in stats.groups
        }
        found = {} if stats.prefix is None else {"prefix cache": _hits(stats.prefix)}
        sequences = f"{stats.num_seqs} of {self.max_seqs}, {stats.num_tokens:,} tokens, at most {self.max_seq_len:,} each"
        return {"sequences": sequences, "block size": f"{self.block_size} tokens", **groups, **found, "device": str(self.device)}

    def check(self) -> None:
        """Recount every block, name and row; InternalError names the first thing that does not agree."""
        with self._guard.lock:
            self._mend_torn()
            self._admitted.check(self.prefix)

    def _check_live(self, call: str, seq: Sequence) -> None:
        if not isinstance(seq, Sequence):
            raise BadArgument(f"{call}(): {seq!r} is no sequence; admit() gives one. Nothing changed.")
        if seq.cache is not self:
            why = "was released" if seq.cache is None else "is of another cache"
            raise BadArgument(f"{call}(): {seq} {why}. Nothing changed.")

    def _check_length(self, call: str, seq: Sequence, end: int) -> None:
        if end > self.max_seq_len:
            raise BadArgument(f"{call}(): {seq} would have {end} tokens; max_seq_len is {self.max_seq_len}. Nothing changed.")


def _list(call: str, out: list[Sequence] | None) -> list[Sequence]:
    if out is not None and not isinstance(out, list):
        raise BadArgument(f"{call}(): out is {a_type(out)}; it must be a list, which gets the new sequence. Nothing changed.")
    return [] if out is None else out


def _hits(stats: PrefixStats) -> str:
    share = f" ({stats.tokens_hit / stats.tokens_asked:.0%})" if stats.tokens_asked else ""
    return f"{stats.tokens_hit:,} of {stats.tokens_asked:,} prompt tokens found{share}"


class _Standing(NamedTuple):
    """Of a sequence, before a call that may be broken off."""

    seq: Sequence
    num_tokens: int
    length: int
    limit: int


def _num_bytes(layer: AnyLayer) -> int:
    return sum(t.numel() * t.element_size() for t in layer.tensors)
