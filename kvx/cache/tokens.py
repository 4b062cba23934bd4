"""Token ids, taken exactly: what is no row of whole numbers is refused and never rounded, since names are made of them."""

from __future__ import annotations

import struct
from operator import index

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvx.errors import BadArgument

_MOST = 2**31 - 1


def token_ids(call: str, tokens: ArrayLike | Tensor, *, least: int = 0) -> NDArray[np.int32]:
    """`least` ids or more, from a list, an array or a tensor: a copy of its own that nobody changes. `call` begins errors."""
    if isinstance(tokens, list | tuple):
        try:  # twice as fast as numpy's own way from a list
            data = struct.pack(f"<{len(tokens)}i", *tokens)
        except (struct.error, TypeError):
            at = next(i for i, token in enumerate(tokens) if not _is_int32(token))
            raise _no_id(call, at, tokens[at]) from None
        if tokens and isinstance(tokens[0], bool):
            raise _no_id(call, 0, tokens[0])
    else:
        data = _int32_of(call, tokens).tobytes()
    ids = np.frombuffer(data, "<i4")
    if not data[3::4].isascii():  # the highest bit of each: a tenth of what numpy's min() takes for the few of a step
        at = int(np.argmax(ids < 0))
        raise _no_id(call, at, ids[at])
    if len(ids) < least:
        raise BadArgument(f"{call}: there are {len(ids)} tokens; tokens are one row of int32 ids, {least} or more.")
    return ids


def _int32_of(call: str, tokens: ArrayLike | Tensor) -> NDArray[np.int32]:
    """An array or a tensor as int32, if all of it fits."""
    if isinstance(tokens, Tensor) and tokens.is_meta:
        raise BadArgument(f"{call}: tokens are a meta tensor, which holds no ids.")
    try:
        ids = np.asarray(tokens.numpy(force=True) if isinstance(tokens, Tensor) else tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadArgument(f"{call}: tokens cannot be read as one row of int32 ids: {str(error)[:100]}.") from error
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise BadArgument(
            f"{call}: tokens are {ids.dtype} of shape {list(ids.shape)}; they must be one row of int32 ids, of 0 to {_MOST}."
        )
    if ids.dtype == np.int32:
        return ids
    if ids.size and (ids.min() < 0 or ids.max() > _MOST):
        at = int(np.argmax((ids < 0) | (ids > _MOST)))
        raise _no_id(call, at, ids[at])
    return ids.astype(np.int32)


def _is_int32(token: object) -> bool:
    try:
        return -_MOST - 1 <= index(token) <= _MOST  # type: ignore[arg-type]
    except TypeError:
        return False


def _no_id(call: str, at: int, token: object) -> BadArgument:
    if isinstance(token, int) and token.bit_length() > 64:  # Python writes out no number of over 4300 digits
        said = f"a number of {token.bit_length()} bits"
    else:
        said = str(token) if isinstance(token, np.integer) else repr(token)
    return BadArgument(f"{call}: tokens[{at}] is {said[:100]}; ids are 0 to {_MOST}: tokens are one row of int32 ids.")
