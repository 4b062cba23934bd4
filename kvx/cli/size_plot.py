"""The picture of `kvx size --plot`: requests that fit against their context, a line for formats of the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from kvx.errors import BadArgument
from kvx.spec.size import Size

_STYLES, _MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v", "P", "X")


def draw(path: Path, sizes: Sequence[Size], memory: str, memory_bytes: int, shared_prefix: int) -> None:
    """From a thousand tokens to where the smallest format fits a single request."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadArgument("size: --plot needs matplotlib: pip install matplotlib.") from None
    longest = max(s.fit_context(memory_bytes) or 2**20 for s in sizes)  # also where any length fits
    contexts = [1024]
    while contexts[-1] <= shared_prefix:
        contexts = [contexts[-1] * 2]
    while contexts[-1] * 2 <= longest and len(contexts) < 24:
        contexts.append(contexts[-1] * 2)
    if not any(s.fit_requests(memory_bytes, contexts[0], shared_prefix) for s in sizes):
        raise BadArgument(f"size: --plot: no request of {contexts[0]:,} tokens fits in {memory}, so there is nothing to draw.")
    lines = _lines(sizes, contexts, memory_bytes, shared_prefix)
    # Beside the axes where it is long: over them it would cover what it names.
    is_beside = len(lines) > 6 or max(len(names) for names in lines.values()) > 1
    figure = Figure(figsize=(11 if is_beside else 8, max(5, 0.34 * len(lines))), layout="constrained")  # not pyplot: no window
    axes = figure.subplots()
    for n, (points, names) in enumerate(lines.items()):
        look: dict[str, Any] = {"color": f"C{n % 10}", "linestyle": _STYLES[n // 10 % len(_STYLES)]}
        look |= {"marker": _MARKERS[n % len(_MARKERS)], "markersize": 4}
        axes.plot([c for c, _ in points], [fit for _, fit in points], label="\n".join(wrap(", ".join(names), 58)), **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{c >> 20}M" if c >= 1 << 20 else f"{c >> 10}k" for c in contexts])
    ranks = f", each of {sizes[0].tp} ranks" if sizes[0].tp > 1 else ""
    axes.set(title=f"{sizes[0].model}: requests that fit in {memory} of cache{ranks}", xlabel="context, tokens", ylabel="requests")
    axes.grid(True, alpha=0.3)
    if is_beside:
        figure.legend(loc="outside right center", fontsize=8, labelspacing=0.7, frameon=False)
    else:
        axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder; no such kind of picture
        raise BadArgument(f"size: --plot {path}: {error}.") from None


def _lines(
    sizes: Sequence[Size], contexts: Sequence[int], memory_bytes: int, shared_prefix: int
) -> dict[tuple[tuple[int, int], ...], list[str]]:
    """Points by which a line goes, most requests first, and the formats of which it is: those of the same bytes have one."""
    lines: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for s in sizes:
        points = tuple((c, fit) for c in contexts if (fit := s.fit_requests(memory_bytes, c, shared_prefix)))
        lines.setdefault(points, []).append(s.format)
    return dict(sorted(lines.items(), key=lambda line: -sum(fit for _, fit in line[0])))
