"""What KVX raises. Every message says which call, what it got, what it takes and what to do next."""


def a_type(value: object) -> str:
    """Its type with an article, for a message: "an int", "a str", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name[0] in "aeioAEIO" or name.startswith("nd") else f"a {name}"


class KvxError(Exception):
    """The root of every error KVX raises on purpose."""


class BadArgument(KvxError, ValueError):
    """A shape, type, stride or field that is malformed or disagrees with another. C: INVALID_ARGUMENT."""


class Unsupported(KvxError, NotImplementedError):
    """Well formed, but this build, backend or machine cannot do it. C: UNSUPPORTED."""


class OutOfRange(KvxError, IndexError):
    """A slot, block id or length outside the cache. On the host nothing was written. C: OUT_OF_RANGE."""


class Incompatible(KvxError):
    """Another major version of the ABI, or a manifest of something else. C: INCOMPATIBLE."""


class Damaged(KvxError):
    """Content that is not what its digest says: a flipped bit, two heads swapped, blocks in another order, another block's file.

    It was not used.
    """


class TierError(KvxError, OSError):
    """A tier could not keep a block: the disk is full, a folder cannot be written. What was kept before is as it was."""


class InternalError(KvxError, RuntimeError):
    """The device runtime failed. C: INTERNAL_ERROR."""


class OutOfBlocks(KvxError):
    """A cache has no room for what was asked, and is as it was before. `group` is the layer group that is full."""

    def __init__(self, message: str, *, needed: int = 0, free: int = 0, idle: int = 0, pinned: int = 0, group: str = "") -> None:
        super().__init__(message)
        self.needed = needed  # blocks
        self.free = free
        self.idle = idle  # unused, kept for reuse; taken when free ones run out, so they count as room
        self.pinned = pinned  # used because somebody pinned them
        self.group = group


class LayoutError(BadArgument):
    """A layout string that cannot be read; the message points at the character."""


class KvxWarning(UserWarning):
    """Something that KVX does slower or otherwise than one may think, said once."""
