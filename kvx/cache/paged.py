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

import struct
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx.cache.backing import Backing, bring_back
from kvx.cache.batch import Batch, BatchBuffers
from kvx.cache.blocks import BlockAllocator
from kvx.cache.groups import GroupState, Layer, LayerGroup, check_groups
from kvx.cache.guard import Guard, whole
from kvx.cache.integrity import check_cache, count_refs, mend_sequences
from kvx.cache.names import BlockHash
from kvx.cache.prefix import Extras, PrefixCache, PrefixStats, check_extra, checked_extras
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument, OutOfBlocks
from kvx.layout.device_memory import check_fits

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


class PagedCache:
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
    ) -> None:
        self.groups = check_groups(groups)
        for name, value, least in (("max_seqs", max_seqs, 1), ("max_seq_len", max_seq_len, 1), ("max_tokens", max_tokens, 0)):
            if not isinstance(value, int) or value < least:
                raise BadArgument(f"PagedCache(): {name} is {value!r}; it is {least} or more.")
        self.block_size = self.groups[0].spec.block_size
        self.max_seqs, self.max_seq_len = max_seqs, max_seq_len
        self.max_tokens = max_tokens or max(max_seq_len, max_seqs)
        self.max_blocks = -(-max_seq_len // self.block_size)  # of a sequence
        self.device = torch.device(device)
        if self.device.type == "meta":
            raise BadArgument('PagedCache(): device is "meta", which holds no bytes; kvx.size() tells what a cache takes.')
        check_fits("PagedCache()", self.groups[0].spec.num_blocks, sum(g.num_bytes for g in self.groups), self.device)
        self._guard = Guard()
        self._groups = [
            GroupState(g, i, max_seqs, self.max_blocks, device, backend, self._guard) for i, g in enumerate(self.groups)
        ]
        self.allocators: tuple[BlockAllocator, ...] = tuple(g.allocator for g in self._groups)
        for i, allocator in enumerate(self.allocators):
            allocator.count_refs = partial(count_refs, self, i)
        self.windows = tuple(g.window for g in self.groups)
        self._only_group = self._groups[0] if len(self._groups) == 1 and not self.windows[0] else None
        self.prefix: PrefixCache | None = None
        if prefix:
            self.prefix = PrefixCache(self.allocators, self.block_size, salt=salt, hash_name=hash_name, max_events=max_events)
        self._layers = {i: layer for g in self._groups for i, layer in g.layers.items()}
        self._tokens = np.zeros((max_seqs, max_seq_len), np.int32)  # pages of it exist once they are written to
        self._rows = list(range(max_seqs - 1, -1, -1))  # free rows of tokens and tables
        self._live: dict[int, Sequence] = {}
        self._next_id = 0
        self._guard.mended_by(partial(mend_sequences, self))
        self._buffers = BatchBuffers(len(self.groups), max_seqs, self.max_blocks, self.max_tokens, self.block_size, self.device)

    # --- one sequence -----------------------------------------------------------------------------------------------------

    def admit(self, tokens: Tokens, *, extra: bytes = b"", extras: Extras = (), is_brought_back: bool = True) -> Sequence:
        """A sequence of these tokens. Its length is what the prefix cache had of them, never all: the last is left to compute.

        Nothing else is allocated, but for what a backing brings back; False leaves that to bring_back(). `extra` is what the
        content hangs on besides the tokens, such as a LoRA's id; `extras` what does so from a token on, as (position, bytes): the
        hash of an image whose placeholders begin there. OutOfBlocks where max_seqs are admitted already.
        """
        ids = _token_ids("admit", tokens)
        n = len(ids)
        if n > self.max_seq_len:
            raise BadArgument(f"admit(): {n} tokens; max_seq_len is {self.max_seq_len}. Cut the prompt, or make the cache longer.")
        check_extra("admit", extra)
        begun = checked_extras("admit", extras, n) if extras else []
        root = b"" if self.prefix is None else self.prefix.root(extra)
        guard, seq = self._guard, None
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                seq = self._new_sequence("admit")
                seq._extras = begun
                seq._tokens[:n] = ids
                seq.num_tokens = n
                if self.prefix is not None:
                    self._find_prefix(seq, self.prefix, root)
                    if self.prefix.backing is not None and is_brought_back:
                        bring_back(self, self.prefix, self.prefix.backing, seq)
            return seq
        except BaseException:  # nobody has the sequence
            if seq is not None:
                guard.is_torn, seq._cache = True, None
                self._mend()
            raise

    def _mend(self) -> None:
        with self._guard.lock:
            self._guard.mend()

    def attach(self, backing: Backing | None) -> None:
        """Offer it what is evicted from now on, and ask it for more of every prefix. None: no more."""
        if self.prefix is None:
            raise BadArgument("attach(): this cache has no names for its blocks. Make it with prefix=True.")
        self.prefix.backing = backing

    @whole
    def bring_back(self, seq: Sequence) -> int:
        """Tokens that a sequence just admitted gets from the backing, and from this cache after them: its length grows by as many.

        What it has no room for, or is damaged, stays to be computed.
        """
        self._check_live("bring_back", seq)
        if seq.length != seq._num_stored:
            raise BadArgument(f"bring_back(): {seq} has tokens of its own; it is called after admit(), before extend().")
        if self.prefix is None or self.prefix.backing is None:
            return 0
        return bring_back(self, self.prefix, self.prefix.backing, seq) * self.block_size

    def _hold_after(self, seq: Sequence, group: int, first: int, ids: NDArray[np.int32]) -> None:
        """A group's blocks after the sequence's own, of which a window sees those from `first` on."""
        g, have = self._groups[group], seq.length // self.block_size
        end = first + len(ids)
        self._leave_behind(seq, group, min(have, g.first_block(end * self.block_size)))
        g.table[seq._row, have:first] = -1
        g.table[seq._row, first:end] = ids
        if first > have:
            seq._first[group] = first

    def _new_sequence(self, call: str) -> Sequence:
        if not self._rows:
            raise OutOfBlocks(f"{call}(): all {self.max_seqs} sequences are in use (max_seqs). Release one first.")
        row = self._rows[-1]
        seq = Sequence(self, self._next_id, row, self._tokens[row], len(self._groups))
        self._next_id += 1
        del self._rows[-1]
        self._live[seq.id] = seq
        return seq

    def _find_prefix(self, seq: Sequence, prefix: PrefixCache, root: BlockHash) -> None:
        seq._root = root
        full = max(0, seq.num_tokens - 1) // self.block_size
        if not full:
            return
        data = seq._tokens[: full * self.block_size].tobytes()
        seq._hashes = prefix.chain(data, seq._root, seq._extras)
        n, found = prefix.match_checked(seq._hashes, self.windows)
        if not n:
            return
        for i, (group, ids) in enumerate(zip(self._groups, found, strict=True)):
            group.table[seq._row, :n] = ids
            seq._first[i] = group.first_block(n * self.block_size)
        seq.length = seq.num_cached = seq._limit = seq._num_stored = n * self.block_size

    @whole
    def append(self, seq: Sequence, tokens: Tokens, *, extra: bytes = b"") -> None:
        """More known tokens, without room for them yet. `extra` is what begins with them and is not in their ids: an image."""
        self._check_live("append", seq)
        ids = _token_ids("append", tokens)
        end = seq.num_tokens + len(ids)
        self._check_length("append", seq, end)
        self._begin("append", seq, end - len(ids), end, extra)
        seq._tokens[seq.num_tokens : end] = ids
        seq.num_tokens = end

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
            if 0 <= n <= seq._limit - length and n <= seq.num_tokens - length and seq._cache is self:
                seq.length = length + n
                return
        elif type(n) is list and len(n) == 1 and length == seq.num_tokens and seq._cache is self:
            token = n[0]
            if type(token) is int and 0 <= token < 2**31:
                if length < seq._limit:
                    seq._tokens[length] = token
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
            raise BadArgument(f"extend(): n is {n}; it is a count, or token ids.")
        if isinstance(n, int | np.integer):
            if extra != b"":
                raise BadArgument("extend(): extra belongs to new tokens; n is a count. Give their ids, or give it to append().")
            if n < 0:
                raise BadArgument(f"extend(): n is {n}; it is 0 or more. truncate() makes a sequence shorter.")
            end = seq.length + int(n)
            self._check_length("extend", seq, end)
            if end > seq.num_tokens and self.prefix is not None:
                raise BadArgument(
                    f"extend(): {n} tokens more make {end}; {seq.num_tokens} are known. Give the new tokens' ids, "
                    "or make the cache with prefix=False."
                )
            if end > seq.num_tokens:
                seq._tokens[seq.num_tokens : end] = 0
            self._grow(seq, end)
            return
        ids = _token_ids("extend", n)
        if seq.length != seq.num_tokens and len(ids):
            raise BadArgument(
                f"extend(): {seq.num_tokens - seq.length} known tokens have no room yet; extend by their count first, or append()."
            )
        end = seq.length + len(ids)
        self._check_length("extend", seq, end)
        self._begin("extend", seq, end - len(ids), end, extra)
        seq._tokens[seq.num_tokens : end] = ids
        self._grow(seq, end)

    def _next_block(self, seq: Sequence, token: int, group: GroupState) -> None:
        """extend by one token, into the next block of the only group: a decode step has no time for more."""
        guard, length = self._guard, seq.length
        end, limit = length + 1, min(length + self.block_size, self.max_seq_len)
        with guard.lock:
            if guard.is_torn:
                guard.mend()
            try:
                seq._tokens[length] = token
                group.table[seq._row, length // self.block_size] = group.allocator.allocate_one("extend")
                seq.num_tokens, seq.length, seq._limit = end, end, limit
            except OutOfBlocks:
                raise
            except BaseException:
                guard.is_torn = True
                guard.mend()
                raise

    def _begin(self, call: str, seq: Sequence, at: int, end: int, extra: bytes) -> None:
        """The tokens from `at` on begin with this. Said before they are counted, so that Ctrl-C cannot leave them without it."""
        check_extra(call, extra)
        if seq._extras or extra:  # what stands at `at` is of a call that was broken off
            seq._extras = [begun for begun in seq._extras if begun[0] < at] + ([(at, extra)] if extra and end > at else [])

    def _grow(self, seq: Sequence, end: int) -> None:
        """Blocks up to `end`. First every group is asked, then each is changed: so OutOfBlocks leaves all as it was.

        The new length is the last that changes: what is in the table behind the old one is nobody's until then.
        """
        length, row, bs = seq.length, seq._row, self.block_size
        num_tokens = max(seq.num_tokens, end)
        if end == length:
            return
        have, want = -(-length // bs), -(-end // bs)
        copies: list[bool] = []
        for i, g in enumerate(self._groups):
            # Writing goes on in the last block, unless it is full.
            copy = bool(length % bs) and length == seq._limit and g.allocator.is_shared(int(g.table[row, have - 1]))
            need, allocator = want - have + copy, g.allocator
            if need > allocator.num_available:
                behind = g.table[row, seq._first[i] : max(seq._first[i], min(have, g.first_block(length)))]
                if need > allocator.num_available + allocator.num_single(behind):
                    raise allocator.out_of_blocks(need, "extend")
            copies.append(copy)
        limit = min(want * bs, self.max_seq_len)
        for i, (g, copy) in enumerate(zip(self._groups, copies, strict=True)):
            if g.window:
                self._leave_behind(seq, i, min(have, g.first_block(length)))
            if copy:
                source = g.table[row, have - 1 : have].copy()
                block = g.allocator.allocate_one()
                g.copy_block(int(source[0]), block)
                g.table[row, have - 1] = block
                g.allocator.release_checked(source)
            if want == have + 1:
                g.table[row, have] = g.allocator.allocate_one()
            elif want > have:
                g.table[row, have:want] = g.allocator.allocate_checked(want - have)
        seq.num_tokens, seq.length, seq._limit = num_tokens, end, limit

    def _leave_behind(self, seq: Sequence, group: int, first: int) -> None:
        """Give back a group's blocks before `first`."""
        start = seq._first[group]
        if first > start:
            g = self._groups[group]
            left = g.table[seq._row, start:first].copy()
            seq._first[group] = first
            g.table[seq._row, start:first] = -1
            g.allocator.release_checked(left)

    def commit(self, seq: Sequence) -> None:
        """The K and V of all its `length` tokens are written, or will be before anything reads them on this stream.

        Full blocks get names, by which later sequences find them.
        """
        bs = self.block_size
        if type(seq) is not Sequence or seq._cache is not self:
            self._check_live("commit", seq)
        if seq.length - seq._num_stored < bs:
            return
        if self.prefix is None:
            seq._num_stored = seq.length // bs * bs
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

    def _store(self, seq: Sequence, prefix: PrefixCache) -> None:
        """Name its full blocks."""
        hashes, bs, row = seq._hashes, self.block_size, seq._row
        done, full = seq._num_stored // bs, seq.length // bs
        if len(hashes) < full:
            parent = hashes[-1] if hashes else seq._root
            first = len(hashes) * bs
            hashes += prefix.chain(seq._tokens[first : full * bs].tobytes(), parent, seq._extras, first)
        for i, g in enumerate(self._groups):
            first = max(done, seq._first[i])
            if first + 1 == full:
                prefix.put_one(i, hashes[first], int(g.table[row, first]))
            elif first < full:
                prefix.put_checked(i, hashes[first:full], g.table[row, first:full])
        seq._num_stored = full * bs

    def fork(self, seq: Sequence) -> Sequence:
        """Another sequence with the same tokens and blocks. The first to write into a shared last block gets a copy of it."""
        guard, other = self._guard, None
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                self._check_live("fork", seq)
                other = self._new_sequence("fork")
                self._share(seq, other)
            return other
        except BaseException:  # nobody has the sequence
            if other is not None:
                guard.is_torn, other._cache = True, None
                self._mend()
            raise

    def _share(self, seq: Sequence, other: Sequence) -> None:
        """All that `seq` has, for a new one."""
        blocks = -(-seq.length // self.block_size)
        other._tokens[: seq.num_tokens] = seq.tokens
        other._first, other._hashes, other._root = list(seq._first), list(seq._hashes), seq._root
        for g, first in zip(self._groups, seq._first, strict=True):
            held = g.table[seq._row, :blocks]
            g.table[other._row, :blocks] = held
            g.allocator.retain_checked(held[first:])
        other.num_tokens, other.length, other.num_cached = seq.num_tokens, seq.length, seq.num_cached
        other._num_stored, other._extras = seq._num_stored, list(seq._extras)
        seq._limit = other._limit = seq.length

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
        bs = self.block_size
        for g, first in zip(self._groups, seq._first, strict=True):
            if g.first_block(length) < first and length:
                raise BadArgument(
                    f"truncate(): at length {length} group {g.group.name!r} (window {g.window}) sees from block "
                    f"{g.first_block(length)} on; blocks before {first} were given back. Release it, and admit its tokens again."
                )
        keep, have = -(-length // bs), -(-seq.length // bs)
        starts = [max(keep, first) for first in seq._first]
        left = [g.table[seq._row, start:have].copy() for g, start in zip(self._groups, starts, strict=True)]
        cached, stored, hashes = min(seq.num_cached, length), min(seq._num_stored, length // bs * bs), seq._hashes[: length // bs]
        first_blocks = [min(first, keep) for first in seq._first]
        seq.length = seq.num_tokens = seq._limit = length  # extend asks whose the last block is
        seq.num_cached, seq._num_stored, seq._hashes, seq._first = cached, stored, hashes, first_blocks
        if seq._extras:
            seq._extras = [begun for begun in seq._extras if begun[0] < length]
        for g, start, blocks in zip(self._groups, starts, left, strict=True):
            if start < have:
                g.table[seq._row, start:have] = -1
                g.allocator.release_checked(blocks)

    @whole
    def release(self, seq: Sequence) -> None:
        """Give back its blocks and its place. Blocks with names stay to be found until their room is needed."""
        self._check_live("release", seq)
        blocks, row = -(-seq.length // self.block_size), seq._row
        seq._cache = None
        for g, first in zip(self._groups, seq._first, strict=True):
            g.allocator.release_checked(g.table[row, first:blocks])
        del self._live[seq.id]
        self._rows.append(row)

    def blocks(self, seq: Sequence, group: int = 0) -> NDArray[np.int32]:
        """Its block ids in a group, in order; -1 behind the window."""
        self._check_live("blocks", seq)
        if not isinstance(group, int) or not 0 <= group < len(self._groups):
            raise BadArgument(f"blocks(): group is {group!r}; the cache has {len(self._groups)}, from 0 on.")
        return self._groups[group].table[seq._row, : -(-seq.length // self.block_size)].copy()

    # --- a batch ----------------------------------------------------------------------------------------------------------

    @whole
    def plan(self, work: Listing[tuple[Sequence, int]], *, pad_seqs: int = 0, pad_tokens: int = 0) -> Batch:
        """A step in which the last `n` tokens of each sequence are queries: its K and V are written, then attended.

        The batch is views of buffers that never move: good until the next plan. Padding fills it up to a captured graph's size.
        """
        for seq, n in work:
            if type(seq) is not Sequence or seq._cache is not self:
                self._check_live("plan", seq)
            if not isinstance(n, int | np.integer) or not 0 < n <= seq.length:
                raise BadArgument(f"plan(): {n!r} queries of {seq}; they are 1 to its length. extend() comes first.")
            if n > 1 and self._only_group is None:
                self._check_queries(seq, n)
        return self._buffers.fill(work, self._tokens, self._groups, pad_seqs, pad_tokens)

    def _check_queries(self, seq: Sequence, n: int) -> None:
        """Every query has a block in every group to be written to."""
        for g, first in zip(self._groups, seq._first, strict=True):
            if (seq.length - n) // self.block_size < first:
                raise BadArgument(
                    f"plan(): {n} queries of {seq} begin in block {(seq.length - n) // self.block_size}; group {g.group.name!r} "
                    f"(window {g.window}) gave back those before {first}. Plan what extend() made room for last."
                )

    def layer(self, i: int) -> Layer:
        """The handle of the model's layer `i`."""
        try:
            return self._layers[i]
        except (KeyError, TypeError):
            raise BadArgument(f"layer(): no group has layer {i!r}; they have {sorted(self._layers)}.") from None

    # --- all of it --------------------------------------------------------------------------------------------------------

    @whole
    def room(self, seq: Sequence | None = None) -> int:
        """Tokens that fit now, in one extend of `seq` or of a new sequence: free and idle blocks of the tightest group."""
        bs = self.block_size
        if seq is None:
            if not self._rows:
                return 0
            return min(self.max_seq_len, *(a.num_available * bs for a in self.allocators))
        self._check_live("room", seq)
        have, inside = -(-seq.length // bs), -seq.length % bs
        fits = self.max_seq_len - seq.length
        for i, g in enumerate(self._groups):
            first = max(seq._first[i], min(have, g.first_block(seq.length)))
            blocks = g.allocator.num_available + g.allocator.num_single(g.table[seq._row, seq._first[i] : first])
            if inside and seq.length == seq._limit and g.allocator.is_shared(int(g.table[seq._row, have - 1])):
                blocks -= 1  # the copy
            fits = min(fits, blocks * bs + inside if blocks >= 0 else 0)
        return fits

    @property
    def num_seqs(self) -> int:
        return len(self._live)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Those admitted and not released, oldest first."""
        return tuple(self._live.values())

    @property
    def memory_bytes(self) -> int:
        """Of all layers' tensors, scales included."""
        return sum(t.numel() * t.element_size() for layer in self._layers.values() for t in layer.tensors)

    @whole
    def stats(self) -> CacheStats:
        groups = []
        for g in self._groups:
            a, total = g.allocator, sum(t.numel() * t.element_size() for layer in g.layers.values() for t in layer.tensors)
            per_block = total // max(1, a.num_blocks)
            groups.append(GroupStats(a.name, a.num_blocks, a.num_free, a.num_idle, a.num_used, a.num_pinned, per_block))
        tokens = sum(s.length for s in self._live.values())
        return CacheStats(len(self._live), tokens, tuple(groups), self.prefix.stats if self.prefix else None)

    def check(self) -> None:
        """Recount every block, name and row; InternalError names the first thing that does not agree."""
        with self._guard.lock:
            if self._guard.is_torn:
                self._guard.mend()
            check_cache(self)

    def _check_live(self, call: str, seq: Sequence) -> None:
        if not isinstance(seq, Sequence):
            raise BadArgument(f"{call}(): {seq!r} is no sequence; admit() gives one. Nothing changed.")
        if seq._cache is not self:
            why = "was released" if seq._cache is None else "is of another cache"
            raise BadArgument(f"{call}(): {seq} {why}. Nothing changed.")

    def _check_length(self, call: str, seq: Sequence, end: int) -> None:
        if end > self.max_seq_len:
            raise BadArgument(f"{call}(): {seq} would have {end} tokens; max_seq_len is {self.max_seq_len}. Nothing changed.")


def _token_ids(call: str, tokens: Tokens) -> NDArray[np.int32]:
    """Token ids as int32, from a list, an array or a tensor."""
    if isinstance(tokens, list):
        try:  # twice as fast as numpy's own way from a list
            data = struct.pack(f"<{len(tokens)}i", *tokens)
        except (struct.error, TypeError) as error:
            raise BadArgument(f"{call}(): tokens cannot be read as int32 ids: {error}.") from error
        ids = np.frombuffer(data, "<i4")
        if _has_negative(data):
            raise _negative(call, ids)
        return ids
    if isinstance(tokens, Tensor) and tokens.is_meta:
        raise BadArgument(f"{call}(): tokens are a meta tensor, which holds no ids.")
    try:
        ids = np.asarray(tokens.numpy(force=True) if isinstance(tokens, Tensor) else tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadArgument(f"{call}(): tokens cannot be read as int32 ids: {error}.") from error
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise BadArgument(f"{call}(): tokens are {ids.dtype} of shape {list(ids.shape)}; they are one row of integers.")
    if ids.dtype != np.int32:
        if ids.size and ids.max() >= 2**31:
            raise BadArgument(f"{call}(): token ids reach {int(ids.max())}; they are int32.")
        if ids.size and ids.min() < 0:
            raise _negative(call, ids)
        return ids.astype(np.int32)
    if _has_negative(ids.tobytes()):
        raise _negative(call, ids)
    return ids


def _has_negative(ids: bytes) -> bool:
    """Of int32, low byte first: the highest bit of each. A tenth of what numpy's min() takes for the few of a step."""
    return not ids[3::4].isascii()


def _negative(call: str, ids: NDArray[Any]) -> BadArgument:
    at = int(np.argmax(ids < 0))
    return BadArgument(f"{call}(): tokens[{at}] is {ids[at]}; ids are 0 to {2**31 - 1}.")
