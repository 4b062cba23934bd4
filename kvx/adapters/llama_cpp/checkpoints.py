"""Context checkpoints: what llama-server keeps of the layers that cannot go back, and appends to its slot files since 2026-10.

    u32 'SCKP', u32 1, u32 count, then for each:
      u64 tokens, i32 first and last position
      u64 bytes, state        of flags 1: the window's K/V, or the recurrent state
      u64 bytes, u64 bytes    of a draft model, and of speculation: each with its bytes behind

With them a slot that was restored can go back to where they stand.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvx.adapters.llama_cpp.memory import Memory, join_rows, read_memory, write_memory
from kvx.errors import BadArgument, Incompatible

_MAGIC, _VERSION = 0x504B4353, 1
_HEAD, _ENTRY, _SIZE = struct.Struct("<III"), struct.Struct("<Qii"), struct.Struct("<Q")


class Checkpoint(NamedTuple):
    num_tokens: int
    memory: Memory  # the layers that cannot go back


def read_checkpoints(data: bytes | memoryview, *, version: int) -> list[Checkpoint]:
    """Of what stands behind a slot file's state: none, or the appendix."""
    view = memoryview(data)
    if not len(view):
        return []
    try:
        magic, own, count = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise BadArgument(
                f"read_slot_file(): {len(view)} bytes behind the state begin with {magic:#x}; they are no checkpoints."
            )
        if own != _VERSION:
            raise Incompatible(f"read_slot_file(): checkpoints of version {own}; KVX reads {_VERSION}. They were not read.")
        out, at = [], _HEAD.size
        for _ in range(count):
            tokens, _, _ = _ENTRY.unpack_from(view, at)
            at += _ENTRY.size
            sizes = []
            for _ in range(3):  # the state, a draft's, a speculation's
                (size,) = _SIZE.unpack_from(view, at)
                at += _SIZE.size
                if size > len(view) - at:
                    raise BadArgument(f"read_slot_file(): a checkpoint of {size} bytes where {len(view) - at} are. It was cut off.")
                sizes.append((at, size))
                at += size
            begin, size = sizes[0]
            out.append(Checkpoint(int(tokens), read_memory(view[begin : begin + size], version=version)[0]))
    except struct.error:
        raise BadArgument(f"read_slot_file(): its checkpoints end after {len(view)} bytes. It was cut off.") from None
    if at != len(view):
        raise BadArgument(f"read_slot_file(): {len(view) - at} bytes stand behind its checkpoints.")
    return out


def write_checkpoints(checkpoints: Sequence[Checkpoint]) -> bytes:
    out = [_HEAD.pack(_MAGIC, _VERSION, len(checkpoints))] if checkpoints else []
    for tokens, memory in checkpoints:
        state = write_memory(memory, is_file=False)
        first = 0 if memory.caches else tokens - 1  # of windows the server says 0: nothing before is needed
        out += [_ENTRY.pack(tokens, first, tokens - 1), _SIZE.pack(len(state)), state, _SIZE.pack(0), _SIZE.pack(0)]
    return b"".join(out)


def at_checkpoint(whole: Memory, checkpoint: Checkpoint) -> Memory:
    """The memory as it was then: the rows up to there of the layers that see all, and the checkpoint's own."""
    part = checkpoint.memory
    rest = part.caches if len(whole.caches) > 1 else ()
    first = whole.rows(0, checkpoint.num_tokens).caches[:1] if whole.caches else ()
    return Memory(whole.version, (*first, *rest), part.recurrent)


def with_masked_cell(memory: Memory) -> tuple[Memory, list[Checkpoint]]:
    """What a server needs to go on from a window: it looks for one cell more than it saved, and else computes all anew.

    That cell is outside of every later window and is never looked at. Where the window still reaches the beginning there is none
    before it; a checkpoint is what the server takes then, and the last token is computed again.
    """
    if len(memory.caches) < 2:
        return memory, []
    window = memory.caches[1]
    if window.positions[0] == 0:
        rest = Memory(memory.version, (window,), memory.recurrent)
        return memory, [Checkpoint(memory.num_tokens, rest)] if memory.version >= 4 else []
    before = window.take([0])
    before = replace(before, positions=before.positions - 1)
    joined = join_rows([Memory(memory.version, (c,)) for c in (before, window)]).caches[0]
    return replace(memory, caches=(memory.caches[0], joined, *memory.caches[2:])), []
