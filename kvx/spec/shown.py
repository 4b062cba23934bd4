"""What an object says of itself: a line in a terminal, a small table in a notebook. Never the content of a tensor."""

from __future__ import annotations

from html import escape


class Shown:
    """Gives `__repr__` and `_repr_html_` to a class that lists its facts."""

    def shown(self) -> dict[str, str]:
        """A few words each: sizes, use, where."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {value}' for name, value in self.shown().items())})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.shown().items())
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"
