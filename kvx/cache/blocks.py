"""BlockAllocator: which blocks are free, idle or used. It knows ids only: neither what lies in a block nor whose it is.

free --allocate--> used --release--> free      (content of no value)
                    |  ^
             release|  |retain
                    v  |
                    idle --allocate--> used    (content kept by `keep`; evicted least recently used first)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvx.cache.guard import Guard, whole
from kvx.errors import BadArgument, InternalError, OutOfBlocks

BlockIds = NDArray[np.int32]

# Ids are int32, as tables have them. Here they index arrays again and again, which numpy does five times faster by integers of
# its own size: a call makes them so once (`at`). np.count_nonzero is a quarter of .any() or .all().


class BlockAllocator:
    """Blocks 0 to num_blocks - 1. Every call is O(1) a block, and a handful of numpy calls whatever their number.

    Calls whose names end in _one or _checked are for owners, which hold the guard's lock.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        on_evict: Callable[[BlockIds], None] | None = None,
        name: str = "",
        guard: Guard | None = None,  # of the cache that it is part of
    ) -> None:
        if not isinstance(num_blocks, int | np.integer) or not 0 <= num_blocks < 2**31:
            raise BadArgument(f"BlockAllocator(): num_blocks is {num_blocks!r}; it must be 0 to {2**31 - 1}.")
        self._guard = guard or Guard()
        self._guard.mended_by(self._mend)
        # Who knows better, when a call was broken off: an owner its references, a PrefixCache which blocks have names.
        self.count_refs: Callable[[], NDArray[np.int64]] | None = None
        self.find_kept: Callable[[], BlockIds] | None = None
        self.pins: Callable[[], dict[int, int]] = dict  # block -> how often a PrefixCache has pinned it: an owner counts those too
        self.num_blocks = num_blocks
        self.on_evict = on_evict  # told the ids whose content is about to be lost
        self.name = name  # of the layer group, for errors
        self.num_pinned = 0  # blocks that are used because somebody pinned them; kept by PrefixCache, for errors
        self._refs = np.zeros(num_blocks, np.int32)
        self._kept = np.zeros(num_blocks, np.bool_)
        self._num_kept = 0
        # Ids go out from the end: low ones first.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        # Idle blocks, oldest first, in _queue[_head:_tail]. A block that is taken back leaves its entry behind: an entry counts
        # only where _place says so. With room for twice the blocks, tidying up costs O(1) an entry.
        self._queue = np.empty(2 * num_blocks, np.int32)
        self._place = np.full(num_blocks, -1, np.int64)
        self._head = self._tail = self._num_idle = 0
        self._scratch = np.empty(num_blocks, np.int64)

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return self._num_free

    @property
    def num_idle(self) -> int:
        """Blocks that nobody uses and whose content is kept; they are taken when no block is free."""
        return self._num_idle

    @property
    def num_used(self) -> int:
        """Blocks that somebody uses."""
        return self.num_blocks - self._num_free - self._num_idle

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and idle."""
        return self._num_free + self._num_idle

    def allocate(self, n: int) -> BlockIds:
        """`n` blocks with one reference each: free ones first, then idle ones, oldest first. OutOfBlocks changes nothing."""
        if not isinstance(n, int | np.integer) or n < 0:
            raise BadArgument(f"allocate(): n is {n!r}; it must be 0 or more.")
        guard, ids = self._guard, None
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                if n > self._num_free + self._num_idle:
                    raise self.out_of_blocks(n)
                ids = self.allocate_checked(int(n))
            return ids
        except OutOfBlocks:
            raise
        except BaseException:  # nobody has the ids
            guard.is_torn = True
            with guard.lock:
                if ids is not None:
                    self._refs[ids] = 0
                guard.mend()
            raise

    def allocate_checked(self, n: int) -> BlockIds:
        """allocate of as many as can be had."""
        first = max(0, self._num_free - n)
        ids = self._free[first : self._num_free][::-1].copy()
        if len(ids) < n:
            evicted = self._evict(n - len(ids))
            ids = np.concatenate((ids, evicted)) if len(ids) else evicted
        at = ids.astype(np.intp)
        self._num_free = first
        self._refs[at] = 1
        return ids

    def allocate_one(self, call: str = "allocate") -> int:
        """allocate_checked(1) as an int: a sequence that grows into its next block asks for this."""
        if self._num_free:
            self._num_free -= 1
            block = int(self._free[self._num_free])
        elif self._num_idle:
            block = self._evict_one()
        else:
            raise self.out_of_blocks(1, call)
        self._refs[block] = 1
        return block

    def out_of_blocks(self, n: int, call: str = "allocate") -> OutOfBlocks:
        where = f" in group {self.name!r}" if self.name else ""
        return OutOfBlocks(
            f"{call}(): need {n} blocks, {self.num_available} can be had{where}: {self._num_free} free and {self._num_idle} idle, "
            f"of {self.num_blocks}; {self.num_used} in use, {self.num_pinned} of them pinned. Release a sequence, or unpin.",
            needed=n, free=self._num_free, idle=self._num_idle, pinned=self.num_pinned, group=self.name,
        )  # fmt: skip

    def _evict(self, n: int) -> BlockIds:
        """The `n` oldest idle blocks; there are as many."""
        found: list[BlockIds] = []
        missing, head = n, self._head
        while missing:
            end = min(self._tail, head + missing)
            live = self._live_entries(head, end)
            found.append(live)
            missing -= len(live)
            head = end
        ids = np.concatenate(found) if len(found) > 1 else found[0]
        if self.on_evict is not None:
            self.on_evict(ids)  # before any change: an interrupt in there leaves all as it was
        self._head = head
        at = ids.astype(np.intp)
        self._place[at] = -1
        self._kept[at] = False
        self._num_kept -= n
        self._num_idle -= n
        return ids

    def evict_used(self, block: int) -> None:
        """Give up the content of a used block that is kept, as if it were evicted: its only user writes to it now."""
        if self.on_evict is not None:
            self.on_evict(np.array([block], np.int32))
        self._kept[block] = False
        self._num_kept -= 1

    def _live_entries(self, start: int, end: int) -> BlockIds:
        """The idle blocks of a part of the queue, as a copy."""
        entries = self._queue[start:end].copy()
        live = self._place[entries.astype(np.intp)] == np.arange(start, end)
        return entries if np.count_nonzero(live) == len(entries) else entries[live]

    def _evict_one(self) -> int:
        """_evict(1)[0] without numpy's calls, each of which costs as much as all of this."""
        head, queue, place = self._head, self._queue, self._place
        while place[queue[head]] != head:
            head += 1
        block = int(queue[head])
        if self.on_evict is not None:
            self.on_evict(queue[head : head + 1])
        self._head = head + 1
        place[block] = -1
        self._kept[block] = False
        self._num_kept -= 1
        self._num_idle -= 1
        return block

    @whole
    def retain(self, ids: Sequence[int] | BlockIds) -> None:
        """One more reference each; idle ones become used again. Refused as a whole where one is free or foreign."""
        blocks, repeats = self.checked("retain", ids)
        bad = (self._refs[blocks] == 0) & (self._place[blocks] < 0)
        if bad.any():
            raise BadArgument(f"retain(): block {int(blocks[bad][0])} is free: it has no content to keep. Allocate it.")
        self.retain_checked(*(repeats or (blocks,)))

    def retain_checked(self, ids: BlockIds, counts: int | NDArray[np.int64] = 1) -> BlockIds:
        """retain, so often each, of ids known to be different, and used or idle: the same ids."""
        at = ids.astype(np.intp)
        if self._num_idle:
            idle = at[self._place[at] >= 0]
            if len(idle):
                self._place[idle] = -1
                self._num_idle -= len(idle)
        self._refs[at] += counts
        return ids

    @whole
    def release(self, ids: Sequence[int] | BlockIds) -> None:
        """One reference less each; at none a block is idle if its content is kept, else free.

        The later of the ids are evicted before the earlier: a chain is of no use without its head. Refused as a whole where an
        id is foreign, or released more often than it is used.
        """
        blocks, repeats = self.checked("release", ids)
        unique, counts = (blocks, 1) if repeats is None else repeats
        bad = self._refs[unique] < counts
        if bad.any():
            block = int(unique[bad][0])
            raise BadArgument(
                f"release(): block {block} has {int(self._refs[block])} references; it is released more often. Nothing changed."
            )
        if repeats is not None:
            order = np.sort(np.unique(blocks[::-1], return_index=True)[1])  # each at its last place
            blocks = blocks[::-1][order][::-1]
            counts = repeats[1][np.searchsorted(unique, blocks)]
        self.release_checked(blocks, counts)

    def release_checked(self, ids: BlockIds, counts: int | NDArray[np.int64] = 1) -> None:
        """release, so often each, of ids known to be different and in use. They may be a view: none is kept."""
        at = ids.astype(np.intp)
        left = self._refs[at] - counts
        self._refs[at] = left
        gone = at[left == 0] if np.count_nonzero(left) else at
        if self._num_kept:
            kept = self._kept[gone]
            if np.count_nonzero(kept) == len(gone):
                self._push_idle(gone[::-1])
                return
            self._push_idle(gone[kept][::-1])
            gone = gone[~kept]
        self._push_free(gone)

    def _push_free(self, ids: BlockIds | NDArray[np.intp]) -> None:
        end = self._num_free + len(ids)
        self._free[self._num_free : end] = ids[::-1]
        self._num_free = end

    def _push_idle(self, ids: NDArray[np.intp]) -> None:
        if self._tail + len(ids) > len(self._queue):
            live = self._live_entries(self._head, self._tail)
            self._queue[: len(live)] = live
            self._head, self._tail = 0, len(live)
            self._place[live] = np.arange(len(live))
        end = self._tail + len(ids)
        self._queue[self._tail : end] = ids
        self._place[ids] = np.arange(self._tail, end)
        self._tail = end
        self._num_idle += len(ids)

    @whole
    def keep(self, ids: Sequence[int] | BlockIds) -> None:
        """The content of these used or idle blocks is worth keeping when nobody uses them."""
        blocks, repeats = self.checked("keep", ids)
        bad = (self._refs[blocks] == 0) & (self._place[blocks] < 0)
        if bad.any():
            raise BadArgument(f"keep(): block {int(blocks[bad][0])} is free: it has no content.")
        self.keep_checked(blocks if repeats is None else repeats[0])

    def keep_checked(self, ids: BlockIds) -> NDArray[np.bool_]:
        """keep of ids known to be different, and used or idle. Which of them were kept before."""
        at = ids.astype(np.intp)
        before = self._kept[at]
        self._num_kept += len(ids) - int(np.count_nonzero(before))
        self._kept[at] = True
        return before

    def keep_one(self, block: int) -> bool:
        """keep_checked of one, as an int. False: it was kept already."""
        if self._kept[block]:
            return False
        self._kept[block] = True
        self._num_kept += 1
        return True

    @whole
    def forget(self, ids: Sequence[int] | BlockIds) -> None:
        """Their content is of no value any more; idle ones become free."""
        blocks, repeats = self.checked("forget", ids)
        self.forget_checked(blocks if repeats is None else repeats[0])

    def forget_checked(self, blocks: BlockIds) -> None:
        """forget of ids known to be different."""
        self._num_kept -= int(np.count_nonzero(self._kept[blocks]))
        self._kept[blocks] = False
        idle = blocks[self._place[blocks] >= 0]
        self._place[idle] = -1
        self._num_idle -= len(idle)
        self._push_free(idle)

    def refs(self, block: int) -> int:
        """How many use this block."""
        return int(self._refs[self._one("refs", block)])

    def is_kept(self, block: int) -> bool:
        return bool(self._kept[self._one("is_kept", block)])

    def _one(self, call: str, block: int) -> int:
        if not isinstance(block, int | np.integer) or not 0 <= block < self.num_blocks:
            raise BadArgument(f"{call}(): block {block!r} is foreign; there are {self.num_blocks}.")
        return int(block)

    def is_shared(self, block: int) -> bool:
        """Others read this block, now or perhaps later: it must not be written to."""
        return bool(self._refs[block] != 1 or self._kept[block])

    def is_idle(self, ids: BlockIds) -> NDArray[np.bool_]:
        """Which of these nobody uses; an id of -1 is none."""
        return (ids >= 0) & (self._place[ids] >= 0)

    def idle(self) -> NDArray[np.bool_]:
        """Of every block: whether nobody uses it and its content is kept."""
        return self._place >= 0

    def num_single(self, ids: BlockIds) -> int:
        """How many of these would be given back by release."""
        return int(np.count_nonzero(self._refs[ids] == 1))

    def counts(self) -> NDArray[np.int32]:
        """A copy of every block's references."""
        return self._refs.copy()

    def put_back(self, counts: NDArray[np.int32]) -> None:
        """References as they were, after a call that was broken off; the guard mends the rest."""
        self._refs = counts

    def take_back(self, ids: BlockIds) -> None:
        """One reference less of blocks that nobody got, after a call that was broken off; the guard mends the rest."""
        self._refs[ids] -= 1

    @property
    def guard(self) -> Guard:
        return self._guard

    def join(self, guard: Guard) -> None:
        """This one's lock is another's from now on."""
        self._guard = self._guard.join(guard)

    def checked(self, call: str, ids: Sequence[int] | BlockIds) -> tuple[BlockIds, tuple[BlockIds, NDArray[np.int64]] | None]:
        """The ids as an array, and where some repeat, each once with its count."""
        try:
            given = np.asarray(ids)
        except (TypeError, ValueError) as error:
            raise BadArgument(f"{call}(): ids are {ids!r}; they must be a list of block ids.") from error
        if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
            raise BadArgument(f"{call}(): ids are {given.dtype} of shape {list(given.shape)}; they must be a list of block ids.")
        if given.size and not (given.min() >= 0 and given.max() < self.num_blocks):
            bad = given[(given < 0) | (given >= self.num_blocks)]
            raise BadArgument(f"{call}(): block {int(bad[0])} is foreign; there are {self.num_blocks}, from 0 on. Nothing changed.")
        blocks = given.astype(np.int32, copy=False)
        order = np.arange(len(blocks))
        self._scratch[blocks] = order
        if (self._scratch[blocks] == order).all():
            return blocks, None
        unique, counts = np.unique(blocks, return_counts=True)
        return blocks, (unique, counts)

    def _mend(self) -> None:
        """Everything that follows from references and kept blocks, anew. The order of idle blocks stays, as far as it is known."""
        refs = self._refs if self.count_refs is None else self.count_refs().astype(np.int32)
        kept = self._kept.copy()
        if self.find_kept is not None:
            kept[:] = False
            kept[self.find_kept()] = True
        idle, free = np.flatnonzero(kept & (refs == 0)), np.flatnonzero(~kept & (refs == 0))
        idle = idle[np.argsort(self._place[idle], kind="stable")]
        place = np.full(self.num_blocks, -1, np.int64)
        place[idle] = np.arange(len(idle))
        self._free[: len(free)] = free[::-1]
        self._queue[: len(idle)] = idle
        num_kept, num_free, num_idle = int(np.count_nonzero(kept)), len(free), len(idle)
        self._refs, self._kept, self._place = refs, kept, place
        self._num_kept, self._num_free, self._num_idle = num_kept, num_free, num_idle
        self._head, self._tail = 0, num_idle

    def check(self) -> None:
        """Recompute everything; InternalError names the first thing that does not agree."""
        with self._guard.lock:
            if self._guard.is_torn:
                self._guard.mend()
            self.check_counts()

    def check_counts(self) -> None:
        """check for an owner, which holds the guard's lock."""
        free, live = self._free[: self._num_free], self._live_entries(self._head, self._tail)
        state = np.bincount(free, minlength=self.num_blocks) + np.bincount(live, minlength=self.num_blocks) + (self._refs > 0)
        num_kept, num_placed = np.count_nonzero(self._kept), np.count_nonzero(self._place >= 0)
        wrong = ""
        if self._refs.min(initial=0) < 0:
            wrong = "a block has negative references"
        elif len(live) != self._num_idle:
            wrong = f"{len(live)} blocks are idle; num_idle says {self._num_idle}"
        elif num_placed != len(live):
            wrong = "a block says that it is idle and is not in the queue"
        elif np.count_nonzero(state != 1):
            block = int(np.argmax(state != 1))
            wrong = f"block {block} is in {int(state[block])} states"
        elif np.count_nonzero(self._kept[live]) != len(live):
            wrong = "an idle block has no content worth keeping"
        elif np.count_nonzero(self._kept[free]):
            wrong = "a free block has content worth keeping"
        elif num_kept != self._num_kept:
            wrong = f"{num_kept} blocks are kept; the count says {self._num_kept}"
        if wrong:
            raise InternalError(f"BlockAllocator.check(): {wrong}.")
