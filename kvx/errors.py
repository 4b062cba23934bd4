"""What KVX raises. Every message says which call, what it got, what it takes and what to do next."""


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


class InternalError(KvxError, RuntimeError):
    """The device runtime failed. C: INTERNAL_ERROR."""


class LayoutError(BadArgument):
    """A layout string that cannot be read; the message points at the character."""


class KvxWarning(UserWarning):
    """Something KVX could not do the fast way, said once."""
