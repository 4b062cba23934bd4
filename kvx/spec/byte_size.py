"""Numbers of bytes as people write and read them: 2GB, 74.5 GiB, 80000000000."""

from __future__ import annotations

import re

from kvx.errors import BadArgument

UNITS: dict[str, int] = {"": 1, "B": 1}
UNITS |= {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", 1)}
UNITS |= {f"{letter}IB": 1024**i for i, letter in enumerate("KMGT", 1)}
_LEAST = 10**6  # of a number without a unit, to be taken for bytes: nobody means a memory of 80 bytes


def byte_text(count: int) -> str:
    """With three digits: 12.6 MB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.3g} {unit}"
    return f"{count} B"


def parse_bytes(text: str | int, what: str) -> int:
    """`what` has this size, for the error. Numbers are bytes."""
    if isinstance(text, int) and not isinstance(text, bool):
        text = f"{text}B" if text >= 0 else str(text)
    if not isinstance(text, str):
        raise BadArgument(f'{what} is {str(text)[:100]}; it takes a number of bytes, or text like "80GB".')
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise BadArgument(f'{what} is "{text}"; it takes a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, like 80GB.')
    if not match[2] and 0 < float(match[1]) < _LEAST:
        raise BadArgument(f'{what} is "{text}", a number without a unit. {match[1]} GB? Write {match[1]}GB; {match[1]}B is bytes.')
    whole, _, part = match[1].partition(".")
    scale: int = 10 ** len(part)
    return int(whole + part) * UNITS[match[2].upper()] // scale
