"""PrefixCache: blocks found by what they hold. A block's name is a hash of its tokens and of all tokens before it.

    h[-1] = H(salt, extra)        extra: what else the content hangs on, such as a LoRA's id
    h[i]  = H(h[i - 1], tokens of block i as little-endian int32)

What begins inside a sequence, such as an image under placeholder ids, is said with the position of its first token. In the block
that has it, and so in all after, H(h[i - 1], position, extra) stands in place of h[i - 1].

Which blocks live and which are evicted is the allocators' business: this is the index beside them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvx.cache.backing import Backing, Finder
from kvx.cache.blocks import BlockAllocator, BlockIds
from kvx.cache.guard import Guard, whole
from kvx.cache.kinds import GroupKind, kind_of
from kvx.cache.names import BlockHash, naming
from kvx.cache.sequence import Sequence as Request
from kvx.errors import BadArgument, InternalError, a_type

Kinds = Sequence[GroupKind | int]  # of each group; a number is the window of one, 0: none
Extras = Sequence[tuple[int, bytes]]  # (position of the first token, what it is), in order


class Event(NamedTuple):
    """What happened to the content of some blocks in one call: for an index kept elsewhere, as a router does."""

    kind: str  # "stored", "removed" (by clear) or "evicted"; to listeners also "mended", and "loading" to those of requests
    group: int
    hashes: Sequence[BlockHash]
    blocks: Sequence[int]  # one a hash


class Stretch(NamedTuple):
    """Of a sequence: the blocks among which some were stored, and what their names are made of."""

    names: Sequence[BlockHash]  # one after the other
    tokens: bytes  # of all of them, as they are hashed
    parent: BlockHash  # the name before the first; b"": it begins the sequence
    first: int  # the position of the first token
    extra: bytes
    extras: Extras


Listener = Callable[[Event, Stretch | None], None]
# Of a sequence: "admitted", "brought" (it has what its backing had), "forked", "released" or "preempted".
RequestListener = Callable[[str, Request], None]


@dataclass
class PrefixStats:
    queries: int = 0
    hits: int = 0  # queries that found a block or more
    tokens_asked: int = 0
    tokens_hit: int = 0
    tokens_brought: int = 0  # more, with what a backing brought back
    stored: int = 0  # blocks
    evicted: int = 0


class PrefixCache:
    """The index of stored blocks, one part for each layer group. A group's block is the same tokens as the others'."""

    def __init__(
        self,
        allocators: Sequence[BlockAllocator],  # one a layer group; told here to report what they evict
        block_size: int,
        *,
        salt: bytes = b"",  # caches of different salts never find each other's blocks
        hash_name: str = "blake2b",
        max_events: int = 0,  # kept of the past; 0: none
    ) -> None:
        self.block_size = block_size
        self.hash_name = hash_name
        self.salt = salt
        self.stats = PrefixStats()
        self.events: deque[Event] = deque(maxlen=max_events)  # the oldest are dropped; take them with popleft()
        self.has_listeners = False  # whether it is worth while to say of what stretch stored blocks are
        self._listeners: tuple[Listener, ...] = (self._keep_event,) if max_events else ()
        self.hears_requests = False  # whether anyone listens to what becomes of sequences
        self._request_listeners: tuple[tuple[Listener, RequestListener], ...] = ()
        self.backing: Backing | None = None  # is offered what is evicted
        self.finder: Finder | None = None  # is told what will be looked for there
        self._allocators = tuple(allocators)
        self._naming = naming(hash_name)
        self._block_of: list[dict[BlockHash, int]] = [{} for _ in allocators]
        # Block -> hash, of the blocks whose content is kept; what stands at others is of the past.
        self._names: list[list[BlockHash]] = [[b""] * a.num_blocks for a in allocators]
        self._pins: list[Counter[int]] = [Counter() for _ in allocators]
        self._guard = allocators[0].guard if allocators else Guard()
        self._guard.mended_by(self._mend)
        for group, allocator in enumerate(allocators):
            allocator.on_evict = self._evicted(group)
            allocator.find_kept, allocator.pins = partial(self._kept_blocks, group), partial(self.pinned, group)
            allocator.join(self._guard)

    def root(self, extra: bytes = b"") -> BlockHash:
        """The hash before the first block."""
        check_extra("root", extra)
        return self._naming.root(self.salt, extra)

    def hashes(self, tokens: NDArray[np.int32], extra: bytes = b"", parent: BlockHash | None = None) -> list[BlockHash]:
        """Of every full block of `tokens`. They follow the block named `parent`, or begin a sequence."""
        data = np.ascontiguousarray(tokens, "<i4").tobytes()
        return self.chain(data, self.root(extra) if parent is None else parent)

    def chain(self, data: bytes, parent: BlockHash, extras: Extras = (), first: int = 0) -> list[BlockHash]:
        """hashes() of tokens as they are hashed: little-endian int32. `first` is the position of the first of them."""
        hash_, chain, digest_bytes = self._naming
        if len(parent) != digest_bytes:
            raise BadArgument(f"chain(): parent has {len(parent)} bytes; a {self.hash_name} name has {digest_bytes}.")
        if extras:
            end = first + len(data) // (4 * self.block_size) * self.block_size
            begun = [entry for entry in extras if first <= entry[0] < end]
            if begun:
                return self._chain_with(data, parent, begun, first)
        if len(data) == self.block_size * 4:  # a decode step's: too little for a call of the library
            return [hash_(parent + data)]
        return chain(data, parent, self.block_size)

    def _chain_with(self, data: bytes, parent: BlockHash, begun: Extras, first: int) -> list[BlockHash]:
        """chain() where something begins in some of the blocks: one of those after the other, and what is between them at once."""
        step, hash_, names, done = 4 * self.block_size, self._naming.hash, list[BlockHash](), 0
        for block, here in groupby(begun, lambda entry: (entry[0] - first) // self.block_size):
            names += self.chain(data[done * step : block * step], parent)
            parent = names[-1] if names else parent
            for at, extra in here:
                parent = hash_(_begun(parent, at, extra))
            parent, done = hash_(parent + data[block * step : (block + 1) * step]), block + 1
            names.append(parent)
        return names + self.chain(data[done * step :], parent)

    @whole
    def lookup(self, hashes: Sequence[BlockHash], kinds: Kinds) -> int:
        """How many of these blocks are there: the longest beginning after which every group can go on.

        A group that sees all tokens needs all of its blocks, one with a window those that the next token can see, a state the
        snapshot that stands there. `kinds` has one a group; a number is a window, 0 none.
        """
        n, _ = self.find(hashes, self._kinds("lookup", kinds))
        self.count(len(hashes), n)
        return n

    def count(self, asked: int, found: int) -> None:
        """One more query, for `stats`."""
        stats, size = self.stats, self.block_size
        stats.queries += 1
        stats.tokens_asked += asked * size
        if found:
            stats.hits += 1
            stats.tokens_hit += found * size

    def take(self, hashes: Sequence[BlockHash], n: int, kinds: Kinds) -> list[BlockIds]:
        """Each group's ids of the first `n` blocks, which lookup found, with a reference more. -1 where a group needs none."""
        return self._given("take", hashes, kinds, n)[1]

    def match(self, hashes: Sequence[BlockHash], kinds: Kinds) -> tuple[int, list[BlockIds]]:
        """lookup, then take what it found."""
        return self._given("match", hashes, kinds)

    def _given(self, call: str, hashes: Sequence[BlockHash], given: Kinds, want: int | None = None) -> tuple[int, list[BlockIds]]:
        """match of the first `want` of these hashes; None: of all, as many as there are. What nobody gets is not held."""
        kinds = self._kinds(call, given)
        guard = self._guard
        held: list[BlockIds] = []
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                n, found = self.find(hashes[:want], kinds)
                if want is None:
                    self.count(len(hashes), n)
                elif want != n:
                    raise BadArgument(f"{call}(): n is {want}; of these hashes {n} are there. lookup() tells how many.")
                if n or want is not None:
                    self.hold_checked(found, n, kinds, held)
            return n, held
        except BadArgument:
            raise
        except BaseException:
            guard.is_torn = True
            with guard.lock:
                for ids, allocator in zip(held, self._allocators, strict=False):
                    allocator.take_back(ids[ids >= 0])
                guard.mend()
            raise

    def find(self, hashes: Sequence[BlockHash], kinds: Sequence[GroupKind]) -> tuple[int, list[BlockIds]]:
        """How many blocks are there, and each group's ids of at least as many; -1 where it has none. For owners, under the lock."""
        n, found, sees_all = len(hashes), [], True
        for index, kind in zip(self._block_of, kinds, strict=True):
            is_whole = not (kind.gives_back or kind.has_state)
            if is_whole and n and hashes[0] not in index:
                return 0, []
            ids = np.fromiter(map(index.get, hashes[:n], repeat(-1)), np.int32, n)
            if is_whole:
                missing = ids < 0
                if np.count_nonzero(missing):
                    n = int(missing.argmax())
            sees_all &= is_whole
            found.append(ids)
        if sees_all or not n:
            return n, found
        # fits[m]: the groups that need some of their blocks can go on after m of them.
        fits, lengths = np.ones(n + 1, np.bool_), np.arange(n + 1)
        for ids, kind in zip(found, kinds, strict=True):
            if kind.gives_back or kind.has_state:
                missing_at = np.where(ids[:n] < 0, lengths[:n], -1)
                run = lengths - 1 - np.concatenate(([-1], np.maximum.accumulate(missing_at)))  # blocks in a row that end at m
                fits &= run >= lengths - kind.first_needed(lengths, self.block_size)
        return int(np.flatnonzero(fits)[-1]), found

    def hold_checked(self, found: Sequence[BlockIds], n: int, kinds: Sequence[GroupKind], held: list[BlockIds]) -> None:
        """Each group's ids of the first `n` blocks into `held`, with a reference more. For owners, as they found them."""
        for found_ids, kind, allocator in zip(found, kinds, self._allocators, strict=True):
            ids = found_ids[:n]
            first = kind.first_needed(n, self.block_size)
            ids[:first] = -1
            allocator.retain_checked(ids[first:])
            held.append(ids)

    def ids(self, group: int, hashes: Sequence[BlockHash]) -> BlockIds:
        """A group's block of each name; -1 where it has none."""
        return np.fromiter(map(self._block_of[group].get, hashes, repeat(-1)), np.int32, len(hashes))

    @whole
    def named(self, group: int) -> tuple[list[BlockHash], BlockIds]:
        """Every name of a group, and its block."""
        index = self._block_of[group]
        return list(index), np.fromiter(index.values(), np.int32, len(index))

    @whole
    def put(self, group: int, hashes: Sequence[BlockHash], ids: BlockIds) -> None:
        """The content of these used blocks is whole. A name that is there already keeps its first block."""
        self._check_group("put", group)
        allocator = self._allocators[group]
        blocks, repeats = allocator.checked("put", ids)
        if len(blocks) != len(hashes) or repeats is not None or len(set(hashes)) != len(hashes):
            raise BadArgument(f"put(): {len(hashes)} names for {len(blocks)} blocks; each block has one name, each once.")
        size = self._naming.digest_bytes
        if any(not isinstance(h, bytes) or len(h) != size for h in hashes):
            raise BadArgument(f"put(): names are bytes, {size} of {self.hash_name}; hashes() makes them.")
        bad = allocator.counts()[blocks] == 0
        if bad.any():
            raise BadArgument(f"put(): block {int(blocks[bad][0])} is not in use. Nothing changed.")
        self.put_checked(group, hashes, blocks)

    def _check_group(self, call: str, group: int) -> None:
        if not isinstance(group, int) or not 0 <= group < len(self._allocators):
            raise BadArgument(f"{call}(): group is {group!r}; there are {len(self._allocators)}, from 0 on.")

    def _kinds(self, call: str, kinds: Kinds) -> list[GroupKind]:
        if len(kinds) != len(self._allocators):
            raise BadArgument(
                f"{call}(): {len(kinds)} kinds; there are {len(self._allocators)} groups, and each has one, or a window (0: none)."
            )
        return [kind if isinstance(kind, GroupKind) else kind_of(kind) for kind in kinds]

    def put_checked(self, group: int, hashes: Sequence[BlockHash], ids: BlockIds, stretch: Stretch | None = None) -> None:
        """put for an owner, which holds the guard's lock."""
        index, blocks, allocator = self._block_of[group], ids.tolist(), self._allocators[group]
        settled = list(map(index.setdefault, hashes, blocks))
        if settled != blocks:  # some names have a block already
            new = [b == s for b, s in zip(blocks, settled, strict=True)]
            hashes, ids = [h for h, is_new in zip(hashes, new, strict=True) if is_new], ids[new]
        before = allocator.keep_checked(ids)
        if np.count_nonzero(before):  # stored by another sequence with the same blocks: a fork
            hashes, ids = [h for h, was in zip(hashes, before.tolist(), strict=True) if not was], ids[~before]
        if len(blocks) != len(ids):
            blocks = ids.tolist()
        if blocks:
            names = self._names[group]
            for b, h in zip(blocks, hashes, strict=True):
                names[b] = h
            self.stats.stored += len(blocks)
            if self._listeners:
                self._tell(Event("stored", group, hashes, blocks), stretch)

    def put_one(self, group: int, h: BlockHash, block: int, stretch: Stretch | None = None) -> None:
        """put_checked of one block: what a sequence does every block_size tokens."""
        allocator = self._allocators[group]
        if self._block_of[group].setdefault(h, block) == block and allocator.keep_one(block):
            self._names[group][block] = h
            self.stats.stored += 1
            if self._listeners:
                self._tell(Event("stored", group, (h,), (block,)), stretch)

    def _evicted(self, group: int) -> Callable[[BlockIds], None]:
        def forget(ids: BlockIds) -> None:
            if self.backing is not None:
                self.backing.offer(group, [self._names[group][b] for b in ids.tolist()], ids)
            self.stats.evicted += len(ids)
            self._drop("evicted", group, ids)

        return forget

    def _drop(self, kind: str, group: int, ids: BlockIds) -> None:
        index, names, blocks = self._block_of[group], self._names[group], ids.tolist()
        hashes = [names[b] for b in blocks]
        if self._listeners:
            self._tell(Event(kind, group, hashes, blocks))
        if len(hashes) == 1:
            del index[hashes[0]]
        else:
            deque(map(index.pop, hashes), maxlen=0)  # in one call, so that Ctrl-C comes before or after

    @whole
    def listen(self, on_event: Listener, on_request: RequestListener | None = None) -> None:
        """Call this too from now on, with every event and of what stretch the stored are, where that is known.

        It is called under the cache's lock: it must not wait, nor call the cache. "mended" says that a call was broken off, and
        that events of it may be missing; it has no blocks. `on_request` is called with what becomes of sequences; who gives it also
        hears of blocks that a backing is about to fill, "loading".
        """
        self._listeners, self.has_listeners = (*self._listeners, on_event), True
        if on_request is not None:
            self._request_listeners, self.hears_requests = (*self._request_listeners, (on_event, on_request)), True

    @whole
    def unlisten(self, on_event: Listener) -> None:
        self._listeners = tuple(call for call in self._listeners if call != on_event)
        self._request_listeners = tuple(both for both in self._request_listeners if both[0] != on_event)
        self.has_listeners = any(call != self._keep_event for call in self._listeners)
        self.hears_requests = bool(self._request_listeners)

    def stretch(self, seq: Request, first: int, end: int) -> Stretch:
        """Blocks `first` to `end` of a sequence, whose names are known."""
        bs = self.block_size
        tokens = np.ascontiguousarray(seq.token_row[first * bs : end * bs], "<i4").tobytes()
        parent = seq.hashes[first - 1] if first else b""
        return Stretch(seq.hashes[first:end], tokens, parent, first * bs, seq.extra, tuple(seq.extras))

    def _tell(self, event: Event, stretch: Stretch | None = None) -> None:
        for call in self._listeners:
            call(event, stretch)

    def tell_request(self, kind: str, seq: Request) -> None:
        """For its owner, where hears_requests says that somebody listens."""
        for _, call in self._request_listeners:
            call(kind, seq)

    def tell_loading(self, group: int, hashes: Sequence[BlockHash], ids: BlockIds) -> None:
        """For its owner, likewise: a backing fills these blocks now."""
        for call, _ in self._request_listeners:
            call(Event("loading", group, hashes, ids.tolist()), None)

    def _keep_event(self, event: Event, stretch: Stretch | None) -> None:
        if event.kind != "mended":
            self.events.append(event)

    @whole
    def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Hold these blocks, wherever they are stored, until `unpin`: they count as used. How many, over the groups."""
        parts = [[b for b in map(index.get, dict.fromkeys(hashes)) if b is not None] for index in self._block_of]
        self._set_pins([pins + Counter(blocks) for pins, blocks in zip(self._pins, parts, strict=True)])
        return sum(map(len, parts))

    @whole
    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """Undo one `pin` of these; names that were not pinned are refused, and then nothing changes."""
        parts = []
        for index, pins in zip(self._block_of, self._pins, strict=True):
            parts.append([b for b in map(index.get, dict.fromkeys(hashes)) if b is not None and b in pins])
        for h in hashes:
            if not any(index.get(h, -1) in pins for index, pins in zip(self._block_of, self._pins, strict=True)):
                raise BadArgument(f"unpin(): {_hex(h)} is not pinned. Nothing was unpinned.")
        self._set_pins([pins - Counter(blocks) for pins, blocks in zip(self._pins, parts, strict=True)])

    def _set_pins(self, pins: list[Counter[int]]) -> None:
        """Of all groups; references follow."""
        before = self._pins
        refs = [allocator.counts() for allocator in self._allocators]
        try:
            for old, new, allocator in zip(before, pins, self._allocators, strict=True):
                more, less = new - old, old - new
                allocator.retain_checked(np.array(list(more), np.int32), np.array(list(more.values()), np.int64))
                allocator.release_checked(np.array(list(less), np.int32), np.array(list(less.values()), np.int64))
                allocator.num_pinned = len(new)
            self._pins = pins
        except BaseException:  # references that no owner counts have to be put back
            self._pins = before
            for allocator, counts in zip(self._allocators, refs, strict=True):
                allocator.put_back(counts)
            raise

    @property
    def num_blocks(self) -> int:
        """Blocks that have a name, over the groups."""
        return sum(map(len, self._block_of))

    @whole
    def clear(self) -> None:
        """Forget every name. Idle blocks become free; used ones go on, pins end."""
        self._set_pins([Counter() for _ in self._allocators])
        for group, allocator in enumerate(self._allocators):
            ids = np.array(list(self._block_of[group].values()), np.int32)
            self._drop("removed", group, ids)
            allocator.forget_checked(ids)

    def _kept_blocks(self, group: int) -> BlockIds:
        index = self._block_of[group]
        return np.fromiter(index.values(), np.int32, len(index))

    def _mend(self) -> None:
        """What follows from names and pins; allocators ask for the kept blocks."""
        for index, names, pins, allocator in zip(self._block_of, self._names, self._pins, self._allocators, strict=True):
            for h, block in index.items():
                names[block] = h
            allocator.num_pinned = len(pins)
        if self._listeners:
            self._tell(Event("mended", 0, (), ()))

    def pinned(self, group: int) -> dict[int, int]:
        """Block -> how often it is pinned."""
        return dict(self._pins[group])

    def check(self) -> None:
        """Recompute what can be; InternalError names the first thing that does not agree."""
        with self._guard.lock:
            if self._guard.is_torn:
                self._guard.mend()
            self.check_names()

    def check_names(self) -> None:
        """check for an owner, which holds the guard's lock."""
        for group, allocator in enumerate(self._allocators):
            index, names = self._block_of[group], self._names[group]
            kept = [b for b in range(allocator.num_blocks) if allocator.is_kept(b)]
            if {names[b]: b for b in kept} != index:
                raise InternalError(
                    f"PrefixCache.check(): group {group}: {len(kept)} blocks are kept, {len(index)} names known; not each other's."
                )
            if allocator.num_pinned != len(self._pins[group]):
                raise InternalError(f"PrefixCache.check(): group {group}: num_pinned is {allocator.num_pinned}.")
            allocator.check_counts()


def _hex(name: object) -> str:
    return name.hex() if isinstance(name, bytes) else repr(name)


def check_extra(call: str, extra: object) -> None:
    if not isinstance(extra, bytes):
        raise BadArgument(
            f"{call}(): extra is {str(extra)[:100]!r}, {a_type(extra)}; it must be bytes: a LoRA's id, the hash of an image."
        )


def checked_extras(call: str, extras: Extras, num_tokens: int, first: int = 0) -> list[tuple[int, bytes]]:
    """In the order of their positions, which are among the tokens from `first` on."""
    found = []
    for entry in extras:
        if not isinstance(entry, tuple) or len(entry) != 2 or type(entry[0]) is not int:
            raise BadArgument(f"{call}(): extras has {str(entry)[:100]}; it must be (position of a token, bytes) for each.")
        check_extra(call, entry[1])
        if not first <= entry[0] < num_tokens:
            raise BadArgument(f"{call}(): extras has one at token {entry[0]}; tokens {first} to {num_tokens - 1} can have one.")
        found.append(entry)
    return sorted(found)


def _begun(parent: BlockHash, at: int, extra: bytes) -> bytes:
    """What is hashed where something begins. Its length is no multiple of 4; that of a name and tokens is: they never meet."""
    data = parent + at.to_bytes(8, "little") + len(extra).to_bytes(8, "little") + extra
    return data + bytes(-len(data) % 4) + b"\1"
