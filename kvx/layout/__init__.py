"""Layouts: the order of axes in memory, and where allocations end."""

from kvx.layout.axes import HND, NHD, Axis, Layout, PlaneLayout, hnd_packed

__all__ = ["HND", "NHD", "Axis", "Layout", "PlaneLayout", "hnd_packed"]
