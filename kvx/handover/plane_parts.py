"""Parts that are not K and V, but entries or states: whether two specs store the same, and a part as other specs have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvx.errors import BadArgument
from kvx.handover.memory import new_buffers
from kvx.handover.part import Part
from kvx.layout.plan import plan
from kvx.ops.move.convert import convert
from kvx.spec import Format, PlaneSpec, Spec, StateSpec


def differing_plane(mine: StateSpec, theirs: Spec, *, whole: bool) -> str:
    """A sentence on the first plane that differs in its axes, its format or, where the whole of it is meant, in its share of a
    sharded axis; "" where none does. A plane's layout may be any."""
    here, there = ([p.name for p in spec.planes] for spec in (mine, theirs))
    if here != there:
        return f"planes are {', '.join(there)} there, {', '.join(here)} here"
    for a, b in zip(mine.planes, theirs.planes, strict=True):
        if str(a.format) != str(b.format):
            return f"plane {a.name} is {_form(b)} there, {_form(a)} here; handover.convert(state_format=...) changes it"
        if a != b if whole else _form(a, a.shard_axis) != _form(b, b.shard_axis):
            return f"plane {a.name} is {_form(b)} there, {_form(a)} here" + (
                f"; shares are {_shares(b)} there, {_shares(a)} here" if _form(a) == _form(b) else ""
            )
    return ""


def _form(plane: PlaneSpec, but: str = "") -> str:
    return f"{plane.name} {plane.format.name} {' x '.join(axis if axis == but else f'{axis} {n}' for axis, n in plane.axes)}"


def _shares(plane: PlaneSpec) -> str:
    return ", ".join(f"{plane.shard_axis} {s.first} to {s.first + s.size - 1}" for s in plane.shares)


def moved_planes(p: Part, specs: tuple[Spec, ...]) -> list[Part]:
    """A part of planes as these have it, sealed: shards of it, or other formats."""
    made = [replace(p, spec=s, buffers=new_buffers(s)) for s in specs]
    for m in made:  # ranks may have the same rows: each is read by itself
        ids = list(range(p.spec.num_blocks))
        convert(list(p.buffers), list(m.buffers), plan=plan(p.spec, m.spec, partial=True), src_blocks=ids, dst_blocks=ids)
    return [m.sealed(0) for m in made]


def in_format(p: Part, format: str | Mapping[str, str]) -> Part:
    """A state's part in another format: one for all of its planes, or by their names."""
    spec = p.spec
    assert isinstance(spec, StateSpec)
    names = [plane.name for plane in spec.planes]
    formats = dict(format) if isinstance(format, Mapping) else dict.fromkeys(names, format)
    planes = [replace(x, format=Format.named(formats.get(x.name) or x.format.name)) for x in spec.planes]
    other = spec.replaced(planes=tuple(planes))
    return p if other == spec else moved_planes(p, (other,))[0]


def check_state_format(call: str, parts: tuple[Part, ...], format: str | Mapping[str, str]) -> None:
    """BadArgument where it names no plane of a state."""
    known = sorted({plane.name for p in parts if isinstance(p.spec, StateSpec) for plane in p.spec.planes})
    if not isinstance(format, str | Mapping) or (isinstance(format, Mapping) and set(format) - set(known)):
        raise BadArgument(
            f"{call}(): state_format is {str(format)[:200]}; "
            f"it must be a format, or formats by planes: {', '.join(known) or 'none'}."
        )
    if format and not known:
        raise BadArgument(f"{call}(): state_format is {str(format)[:100]}; the handover has no states.")
