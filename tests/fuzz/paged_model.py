"""What the blocks of a PagedCache must hold, from tokens alone: rows of K and V, and states that are a recurrence over them.

A Text is a beginning of tokens, with what they hang on besides (a LoRA, an image). Its row is a number that every token before it
changes; its state is a vector of integers s' = (31 s + x) mod m, one lane for each element that the groups of states store. Both
are exact in the planes' formats, so that a state which is stale, shared or one token off is another number in every lane.
"""

from __future__ import annotations

from itertools import pairwise
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

import kvx
from kvx.cache.groups import PlanesLayer
from kvx.spec import StateSpec

Array = NDArray[np.float32]
Numbers = NDArray[np.int64]
LARGEST = {np.dtype(np.float32): 16_777_000, np.dtype(np.float16): 2_000}  # below it every integer is exact
GARBAGE = -77.0  # in blocks that nobody has, and rows that nobody wrote


class Text:
    """`number` is the last token with all that it hangs on besides those before it."""

    __slots__ = ("extra", "further", "lora", "name", "number", "row", "state", "token")

    def __init__(self, lora: bytes, token: int, extra: bytes, row: int, state: Numbers) -> None:
        self.lora, self.token, self.extra, self.row, self.state = lora, token, extra, row, state
        self.number = 7 * token + 1 + sum(crc32(e) % 9973 + 1 for e in (extra, lora) if e)
        self.name = b""  # of the block that ends with it, once a sequence had it
        self.further: dict[tuple[int, bytes], Text] = {}


class Group:
    """A layer group's memory: arrays [num_blocks, ...], which are the cache's own tensors."""

    def __init__(self, cache: kvx.PagedCache, index: int, first_lane: int) -> None:
        group = cache.groups[index]
        self.index, self.has_state, self.window = index, isinstance(group.spec, StateSpec), group.window
        self.arrays: list[Array] = []
        self.layers: list[int] = []  # of each array; V's are negative
        for member in group.members:
            for i in member.layers:
                for sign, tensor in enumerate(_tensors(cache, index, i)):
                    found = tensor.numpy()
                    shape = (len(found), -1) if self.has_state else (len(found), cache.block_size, -1)
                    self.arrays.append(found.reshape(shape))
                    assert np.shares_memory(found, self.arrays[-1])
                    self.layers.append(-i - 1 if sign else i + 1)
        ends = np.cumsum([first_lane, *(a.shape[1] for a in self.arrays if self.has_state)])
        self.lanes = [slice(int(a), int(b)) for a, b in pairwise(ends)]  # of the state that each array has
        self.all_lanes = slice(first_lane, int(ends[-1]))

    def fill_garbage(self, blocks: NDArray[np.int64]) -> None:
        for array in self.arrays:
            array[blocks] = GARBAGE

    def read(self, block: int) -> list[Array]:
        return [array[block].copy() for array in self.arrays]

    def write(self, block: int, content: list[Array]) -> None:
        for array, part in zip(self.arrays, content, strict=True):
            array[block] = part

    def state(self, block: int) -> Numbers:
        return np.concatenate([array[block] for array in self.arrays]).astype(np.int64)

    def put_state(self, block: int, state: Numbers) -> None:
        for array, lanes in zip(self.arrays, self.lanes, strict=True):
            array[block] = state[lanes.start - self.all_lanes.start : lanes.stop - self.all_lanes.start]

    def put_rows(self, slots: NDArray[np.int64], rows: Numbers) -> None:
        for array, layer in zip(self.arrays, self.layers, strict=True):
            array.reshape(-1, array.shape[2])[slots] = (rows * (1 if layer > 0 else -1) + layer)[:, None]

    def assert_rows(self, slots: NDArray[np.int64], rows: Numbers, whose: object) -> None:
        for array, layer in zip(self.arrays, self.layers, strict=True):
            want = (rows * (1 if layer > 0 else -1) + layer)[:, None]
            found = array.reshape(-1, array.shape[2])[slots]
            assert (found == want).all(), f"group {self.index}, {whose}: rows are {found.tolist()}, and are {want[:, 0].tolist()}"

    def assert_states(self, blocks: NDArray[np.int64], states: Numbers, whose: object) -> None:
        for array, lanes in zip(self.arrays, self.lanes, strict=True):
            found, want = array[blocks], states[:, lanes]
            assert (found == want).all(), f"group {self.index}, {whose}: states are {found.tolist()}, and are {want.tolist()}"


def _tensors(cache: kvx.PagedCache, group: int, layer: int):  # type: ignore[no-untyped-def]
    handle = cache._tables[group].layers[layer]
    return list(handle.planes.values()) if isinstance(handle, PlanesLayer) else list(handle.cache)


class Contents:
    """The memory of a cache, and what each beginning of tokens makes of it."""

    def __init__(self, cache: kvx.PagedCache) -> None:
        self.cache, self.block_size = cache, cache.block_size
        self.groups: list[Group] = []
        lanes = 0
        for i in range(len(cache.groups)):
            self.groups.append(Group(cache, i, lanes))
            lanes = self.groups[-1].all_lanes.stop
        self.modulus = np.zeros(lanes, np.int64)
        for g in self.groups:
            for array, part in zip(g.arrays, g.lanes, strict=g.has_state):
                self.modulus[part] = LARGEST[array.dtype]
        self.lane = 2 * np.arange(lanes, dtype=np.int64) + 1
        self._roots: dict[bytes, Text] = {}
        # Of names that a sequence had: the text that ends with the block, its rows and its state.
        self.texts: dict[bytes, Text] = {}
        self.rows: dict[bytes, Numbers] = {}

    def root(self, lora: bytes) -> Text:
        return self._roots.setdefault(lora, Text(lora, 0, b"", 7, np.zeros(len(self.lane), np.int64)))

    def after(self, text: Text, token: int, extra: bytes) -> Text:
        found = text.further.get((token, extra))
        if found is None:
            found = text.further[token, extra] = Text(text.lora, token, extra, 0, text.state)
            found.state = self.step(text.state, found.number, slice(None))
            found.row = (31 * text.row + found.number) % 16_776_000
        return found

    def step(self, state: Numbers, number: int, lanes: slice) -> Numbers:
        """The recurrence: what a layer makes of a state and the next token."""
        return (31 * state + number * self.lane[lanes]) % self.modulus[lanes]

    def learn(self, name: bytes, path: list[Text], end: int) -> None:
        """A block of this name ends after `end` of these tokens. One name is one text, and one text has one name."""
        text = path[end]
        text.name = text.name or name
        assert self.texts.setdefault(name, text) is text, f"two texts have the name {name.hex()}"
        assert text.name == name, f"a text has the names {text.name.hex()} and {name.hex()}"
        if name not in self.rows:
            self.rows[name] = np.array([t.row for t in path[end - self.block_size + 1 : end + 1]])

    def assert_named(self, group: Group, names: list[bytes], blocks: NDArray[np.int32]) -> None:
        """These blocks hold what their names say."""
        if not names:
            return
        at = blocks.astype(np.int64)
        if group.has_state:
            group.assert_states(at, np.array([self.texts[n].state for n in names]), "blocks with names")
        else:
            slots = (at[:, None] * self.block_size + np.arange(self.block_size)).ravel()
            group.assert_rows(slots, np.concatenate([self.rows[n] for n in names]), "blocks with names")

    def first_seen(self, group: Group, length: int) -> int:
        """The first token that the one at position `length` sees."""
        return max(0, length - group.window + 1) if group.window else 0

    def deepest(self, names: list[bytes], has: list[set[bytes]]) -> int:
        """Of a text's blocks, in order: after how many every group can go on, where group i has the blocks of has[i]."""
        for n in range(len(names), 0, -1):
            firsts = [n - 1 if g.has_state else self.first_seen(g, n * self.block_size) // self.block_size for g in self.groups]
            if all(there.issuperset(names[first:n]) for first, there in zip(firsts, has, strict=True)):
                return n
        return 0
