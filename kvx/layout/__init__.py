"""Layouts: the order of axes in memory, and where allocations end."""

from kvx.layout.axes import HND, NHD, Axis, Layout, PlaneLayout, hnd_packed
from kvx.layout.engine_row import EngineRow
from kvx.layout.engines import ENGINES, engine

__all__ = ["ENGINES", "HND", "NHD", "Axis", "EngineRow", "Layout", "PlaneLayout", "engine", "hnd_packed"]
