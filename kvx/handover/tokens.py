"""Token ids, taken exactly: what is no row of whole numbers is refused and never rounded, since names are made of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvx.errors import BadArgument


def token_ids(call: str, tokens: ArrayLike, *, least: int = 1) -> NDArray[np.int32]:
    """A copy of its own that nobody changes."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadArgument(f"{call}: tokens are no row of ids: {str(error)[:100]}.") from None
    if ids.ndim != 1 or len(ids) < least or (len(ids) and ids.dtype.kind not in "iu"):
        raise BadArgument(
            f"{call}: tokens are {list(ids.shape)} {ids.dtype}; they are a row of ids, {least} or more, whole numbers of 0 to "
            f"{2**31 - 1}."
        )
    if len(ids) and (ids.min() < 0 or ids.max() >= 2**31):
        at = int(np.argmax((ids < 0) | (ids >= 2**31)))
        raise BadArgument(f"{call}: tokens[{at}] is {ids[at]}; tokens are a row of ids, whole numbers of 0 to {2**31 - 1}.")
    own = ids.astype(np.int32)
    own.flags.writeable = False
    return own
