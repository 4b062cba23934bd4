"""Slot files: what `POST /slots/N?action=save` and `llama_state_seq_save_file` write. Tokens, then the sequence's state.

    u32 'ggsq', u32 version, u32 words, words x i32, state

The words are the token ids. llama-server packs them since 2026-08: -1, 1, count, ids, 0 media chunks. Media are refused.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvx.adapters.llama_cpp.kinds import VERSIONS
from kvx.errors import BadArgument, Incompatible, Unsupported

MAGIC = 0x67677371
_PACKED, _PACKED_VERSION = -1, 1


class SlotFile(NamedTuple):
    version: int
    tokens: NDArray[np.int32]
    state: memoryview
    is_packed: bool


def read_slot_file(
    file: bytes | str | Path,  # its bytes, or where it is
) -> SlotFile:
    data = _bytes_of(file)
    if len(data) < 12:
        raise BadArgument(f"read_slot_file(): {len(data)} bytes; a slot file has 12 before its tokens. It was cut off.")
    magic, version, words = struct.unpack_from("<III", data)
    if magic != MAGIC:
        raise BadArgument(f"read_slot_file(): begins with {magic:#010x}; a slot file begins with {MAGIC:#010x}, 'ggsq'.")
    if version not in VERSIONS:
        raise Incompatible(f"read_slot_file(): version is {version}; KVX reads {', '.join(map(str, VERSIONS))}. It was not read.")
    if words * 4 > len(data) - 12:
        raise BadArgument(f"read_slot_file(): {words} words of tokens in {len(data) - 12} bytes. It was cut off.")
    ids = np.frombuffer(data, "<i4", words, 12)
    is_packed = bool(words) and ids[0] == _PACKED
    if is_packed:
        ids = _unpacked(ids)
    return SlotFile(version, ids.astype(np.int32), memoryview(data)[12 + words * 4 :], is_packed)


def write_slot_file(tokens: ArrayLike, state: bytes, *, version: int = VERSIONS[-1], is_packed: bool = True) -> bytes:
    ids = np.asarray(tokens, "<i4")
    words = np.concatenate([[_PACKED, _PACKED_VERSION, len(ids)], ids, [0]]).astype("<i4") if is_packed else ids
    return struct.pack("<III", MAGIC, version, len(words)) + words.tobytes() + state


def _bytes_of(file: bytes | str | Path) -> bytes:
    if isinstance(file, str | Path):
        try:
            return Path(file).read_bytes()
        except OSError as error:
            raise BadArgument(
                f"read_slot_file(): {file} cannot be read: {error.strerror}. Name a slot file that was saved."
            ) from None
    if not isinstance(file, bytes | bytearray | memoryview):
        raise BadArgument(f"read_slot_file(): it got {type(file).__name__}; it takes a slot file's bytes, or its path.")
    return bytes(file)


def _unpacked(words: NDArray[np.int32]) -> NDArray[np.int32]:
    version, count = (int(words[1]), int(words[2])) if len(words) > 3 else (-1, -1)
    if version != _PACKED_VERSION:
        raise Incompatible(f"read_slot_file(): its tokens are packed in version {version}; KVX reads {_PACKED_VERSION}.")
    if not 0 <= count <= len(words) - 4:
        raise BadArgument(f"read_slot_file(): {count} tokens in {len(words) - 4} words. It was cut off.")
    if words[3 + count] or len(words) != count + 4:
        raise Unsupported(f"read_slot_file(): {words[3 + count]} media chunks stand among the tokens; text alone is handed over.")
    return words[3 : 3 + count]
