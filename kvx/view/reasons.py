"""Why a prefix ended where it did: what was ever stored, as a tree of blocks, and a new request's tokens held against it.

    root --tokens--> block --tokens--> block ...      a root for each salt and extra; a block for each name

It is told what a cache's listeners are told, in the same order, and asks the cache nothing. So it may lag behind: a reason is that
of the moment at which the request was admitted. Blocks that nobody has any more are remembered, up to a number.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvx.cache.kinds import GroupKind
from kvx.cache.names import BlockHash
from kvx.cache.prefix import Extras, Stretch

MOST_DEPARTED = 1 << 16  # blocks that no group has any more, and that are still known

# What may be said, and how docs/live.md explains it.
KINDS = {
    "all": "Every full block of the prompt was found, but for its last token, which is always computed.",
    "differs": "The prompt differs from every stored one at this token.",
    "extra": "The same tokens are stored under another extra: another LoRA, another image.",
    "salt": "The same tokens are stored under another salt.",
    "evicted": "The next block was stored, and evicted since.",
    "window": "Layers with a window, or a state, have none of the blocks they need to go on further.",
    "never": "Nothing that goes on like this was stored.",
    "cleared": "The next block was stored, and the prefix cache was cleared since.",
    "short": "The prompt has no full block besides its last token.",
    "fork": "It was forked: it shares all blocks of another sequence.",
    "off": "The cache keeps no prefixes.",
    "unknown": "Events were lost, or came before anyone looked.",
}


@dataclass(frozen=True)
class Reason:
    """`at` is the position of the first token that was not found."""

    kind: str  # of KINDS
    at: int
    text: str  # the sentence
    token: int | None = None  # of "differs": the id that the prompt has there
    stored: int | None = None  # and that of the stored prompt which goes along with it longest
    t: float | None = None  # of "evicted": when, in seconds
    taker: int | None = None  # and for which sequence
    group: str = ""  # of "evicted" and "window": which layers

    def to_json(self) -> dict[str, Any]:
        """What it has."""
        found = {name: value for name, value in self.__dict__.items() if value is not None and value != ""}
        return found if self.t is None else {**found, "t": round(self.t, 4)}


class Gone(NamedTuple):
    t: float
    taker: int  # the sequence that got the block; -1: not known
    is_cleared: bool


class Asked(NamedTuple):
    """A request, as it was admitted."""

    names: Sequence[BlockHash]  # of every block that might have been found
    found: int  # of them
    tokens: bytes  # of the block after those, as they are hashed
    root: BlockHash
    extra: bytes
    extras: Extras


@dataclass
class _Children:
    """What was stored after a block, or after a root: by its tokens, and in their order, where the nearest are neighbours."""

    names: dict[bytes, list[BlockHash]] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)

    def add(self, tokens: bytes, name: BlockHash) -> None:
        same = self.names.get(tokens)
        if same is None:
            self.names[tokens] = [name]
            insort(self.order, tokens)
        elif name not in same:
            same.append(name)

    def drop(self, tokens: bytes, name: BlockHash) -> None:
        same = self.names.get(tokens, [])
        if name in same:
            same.remove(name)
            if not same:
                del self.names[tokens]
                del self.order[bisect_left(self.order, tokens)]

    def nearest(self, tokens: bytes) -> tuple[int, bytes]:
        """How many tokens the longest common beginning has, and with which child."""
        i = bisect_left(self.order, tokens)
        both = [(_common(tokens, other), other) for other in self.order[max(0, i - 1) : i + 1]]
        return max(both, default=(0, b""))


@dataclass
class _Root:
    number: int
    extra: bytes
    after: _Children = field(default_factory=_Children)


@dataclass(slots=True)
class Node:
    """A block that was stored: its place in the tree, and where it is."""

    number: int
    parent: BlockHash  # b"": it is not known
    tokens: bytes  # b"": not known
    extras: tuple[tuple[int, bytes], ...]  # what begins in it
    touched: float  # when it was stored, or found last
    groups: int = 0  # bits of those that have it
    root: _Root | None = None  # of the first block of a prompt
    after: _Children | None = None
    gone: dict[int, Gone] | None = None  # of groups that had it


class PrefixTree:
    """Not thread-safe: one thread is told, and asks."""

    def __init__(self, block_size: int, kinds: Sequence[GroupKind], group_names: Sequence[str]) -> None:
        self.block_size, self._kinds, self._group_names = block_size, tuple(kinds), tuple(group_names)
        self._whole = [g for g, k in enumerate(kinds) if not (k.gives_back or k.has_state)]
        self._part = [g for g, k in enumerate(kinds) if k.gives_back or k.has_state]
        self.nodes: dict[BlockHash, Node] = {}
        self.roots: dict[BlockHash, _Root] = {}
        self._departed: OrderedDict[BlockHash, None] = OrderedDict()
        self._next = 0

    # --- what it is told ----------------------------------------------------------------------------------------------------

    def learn(self, stretch: Stretch, root: BlockHash, t: float) -> list[tuple[int, int, int]]:
        """What these names are made of. New nodes as runs of a chain: (first number, how many, the parent's number or -1)."""
        size, bs, runs = 4 * self.block_size, self.block_size, list[tuple[int, int, int]]()
        parent, joins = stretch.parent, False
        for i, name in enumerate(stretch.names):
            node = self.nodes.get(name)
            if node is None or not node.tokens:
                begin = stretch.first + i * bs
                extras = tuple((at, e) for at, e in stretch.extras if begin <= at < begin + bs)
                tokens = stretch.tokens[i * size : (i + 1) * size]
                if node is None:
                    node = self._new(name, parent, tokens, extras, t)
                    above = self.nodes.get(parent)
                    if joins:
                        runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
                    else:
                        runs.append((node.number, 1, -1 if above is None else above.number))
                    joins = True
                else:
                    node.parent, node.tokens, node.extras, joins = parent, tokens, extras, False
                self._join(name, node, root if begin == 0 else b"", stretch.extra)
            else:
                joins = False
            parent = name
        return runs

    def _new(self, name: BlockHash, parent: BlockHash, tokens: bytes, extras: tuple[tuple[int, bytes], ...], t: float) -> Node:
        node = self.nodes[name] = Node(self._next, parent, tokens, extras, t)
        self._next += 1
        self._departed[name] = None  # until a group has it
        return node

    def _join(self, name: BlockHash, node: Node, root: BlockHash, extra: bytes) -> None:
        """Under its parent."""
        if root:
            node.root = self.roots.setdefault(root, _Root(len(self.roots), extra))
            node.root.after.add(node.tokens, name)
        elif (above := self.nodes.get(node.parent)) is not None:
            above.after = above.after or _Children()
            above.after.add(node.tokens, name)

    def store(self, group: int, names: Iterable[BlockHash], t: float) -> list[int]:
        """A group has these now. Their numbers."""
        numbers = []
        for name in names:
            node = self.nodes.get(name) or self._new(name, b"", b"", (), t)
            node.groups |= 1 << group
            node.touched = t
            if node.gone is not None:
                node.gone.pop(group, None)
            self._departed.pop(name, None)
            numbers.append(node.number)
        return numbers

    def lose(self, group: int, names: Iterable[BlockHash], gone: Gone) -> tuple[list[int], list[float]]:
        """A group has lost these. Their numbers, and how long ago each was stored or found last."""
        numbers, ages = [], []
        for name in names:
            node = self.nodes.get(name)
            if node is None:
                continue
            node.groups &= ~(1 << group)
            node.gone = {**(node.gone or {}), group: gone}
            numbers.append(node.number)
            ages.append(max(0.0, gone.t - node.touched))
            if not node.groups:
                self._departed[name] = None
        return numbers, ages

    def forget(self) -> list[int]:
        """The oldest of those that nobody has, where they are too many. Their numbers."""
        numbers = []
        while len(self._departed) > MOST_DEPARTED:
            name, _ = self._departed.popitem(last=False)
            node = self.nodes.pop(name)
            numbers.append(node.number)
            if node.root is not None:
                node.root.after.drop(node.tokens, name)
            elif (above := self.nodes.get(node.parent)) is not None and above.after is not None:
                above.after.drop(node.tokens, name)
        return numbers

    def touch(self, names: Iterable[BlockHash], t: float) -> float | None:
        """A request found these: how long the last of them had not been used. None: it found none."""
        age = None
        for name in names:
            node = self.nodes.get(name)
            if node is not None:
                age, node.touched = max(0.0, t - node.touched), t
        return age

    # --- what it is asked ---------------------------------------------------------------------------------------------------

    def why(self, asked: Asked) -> Reason:
        """Why no more than `found` blocks were found."""
        bs, n = self.block_size, asked.found
        if not asked.names:
            return Reason("short", 0, f"The prompt has no full block of {bs} tokens besides its last token.")
        if n >= len(asked.names):
            return Reason("all", n * bs, f"All {n} full blocks were found.")
        if self._part and (there := self._num_whole(asked.names)) > n:
            return self._short_of_part(asked, there)
        node = self.nodes.get(asked.names[n])
        if node is None or not (node.groups or node.gone):
            return self._never_stored(asked)
        for g in (*self._whole, *self._part):
            if node.gone is not None and g in node.gone:
                return self._lost(n * bs, g, node.gone[g])
        if self._part:
            return self._short_of_part(asked, n + 1)
        return Reason("unknown", n * bs, f"Not known: events were lost, or the block at token {n * bs} came before anyone looked.")

    def _num_whole(self, names: Sequence[BlockHash]) -> int:
        """How many of the first blocks are there in every group that needs all of them."""
        for n, name in enumerate(names):
            node = self.nodes.get(name)
            if node is None or any(not node.groups >> g & 1 for g in self._whole):
                return n
        return len(names)

    def _lost(self, at: int, group: int, gone: Gone) -> Reason:
        where = f" in group {self._group_names[group]!r}" if len(self._kinds) > 1 else ""
        if gone.is_cleared:
            return Reason("cleared", at, f"The block at token {at} was stored, and the prefix cache was cleared since.", t=gone.t)
        whom = f" for sequence {gone.taker}" if gone.taker >= 0 else ""
        text = f"The block at token {at} was evicted{where} at {gone.t:.3f} s{whom}."
        taker = gone.taker if gone.taker >= 0 else None
        return Reason("evicted", at, text, t=gone.t, taker=taker, group=self._group_names[group] if where else "")

    def _short_of_part(self, asked: Asked, there: int) -> Reason:
        """Groups that see all tokens could go on after `there` blocks: why another could not."""
        n, bs = asked.found, self.block_size
        for g in self._part:
            kind = self._kinds[g]
            for name in asked.names[int(kind.first_needed(there, bs)) : there]:
                node = self.nodes.get(name)
                if node is not None and node.groups >> g & 1:
                    continue
                if node is not None and node.gone is not None and g in node.gone:
                    return self._lost(n * bs, g, node.gone[g])
                what = (
                    "no snapshot of its state" if kind.has_state else f"not all blocks that its window of {kind.window} tokens sees"
                )
                text = f"Group {self._group_names[g]!r} has {what} at token {there * bs}, to which other groups could go on."
                return Reason("window", n * bs, text, group=self._group_names[g])
        return Reason("unknown", n * bs, f"Not known: events were lost, or the block at token {n * bs} came before anyone looked.")

    def _never_stored(self, asked: Asked) -> Reason:
        n, bs = asked.found, self.block_size
        at = n * bs
        if n:
            above = self.nodes.get(asked.names[n - 1])
            after = above.after if above is not None else None
        else:
            root = self.roots.get(asked.root)
            after = root.after if root is not None else None
        same = [] if after is None else [name for name in after.names.get(asked.tokens, ()) if name != asked.names[n]]
        if same:  # another name of the same tokens: something else begins in them
            other = self.nodes[same[0]]
            begun = [p for p, _ in (*asked.extras, *other.extras) if at <= p < at + bs]
            place = min(begun, default=at)
            return Reason("extra", place, f"The same tokens are stored with another extra, or none, at token {place}.")
        if not n:
            for name, root in self.roots.items():
                if name != asked.root and asked.tokens in root.after.names:
                    kind = "salt" if root.extra == asked.extra else "extra"
                    what = f"another {kind} ({_shown(root.extra)})" if kind == "extra" else "another salt"
                    mine = f"; this request's is {_shown(asked.extra)}" if kind == "extra" else ""
                    return Reason(kind, 0, f"The same tokens are stored under {what}{mine}.")
        if after is None or not after.order or asked.tokens in after.names:
            return Reason(
                "never", at, f"Nothing was stored after token {at}." if n else "Nothing was stored yet that begins like this."
            )
        common, nearest = after.nearest(asked.tokens)
        if not n and not common:
            return Reason("never", 0, "No stored prompt begins with this token.")
        token, stored = (int.from_bytes(t[4 * common : 4 * common + 4], "little", signed=True) for t in (asked.tokens, nearest))
        text = f"Token {at + common} is {token}; the closest stored prompt has {stored} there."
        return Reason("differs", at + common, text, token=token, stored=stored)


def _common(a: bytes, b: bytes) -> int:
    """Tokens at the beginning that two blocks share."""
    size = min(len(a), len(b)) // 4
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[: 4 * middle] == b[: 4 * middle] else (low, middle - 1)
    return low


def _shown(extra: bytes) -> str:
    """An extra is any bytes: a name, or a hash."""
    if not extra:
        return "none"
    text = extra.decode("ascii", "replace")
    return repr(text) if text.isprintable() and "�" not in text and len(text) <= 40 else f"0x{extra[:8].hex()}"
