"""Specs: geometry, layout and format of a cache; everything but addresses. Pure data."""

from kvx.spec.cache_spec import CacheSpec, PlaneSpec, Share, Spec
from kvx.spec.dtypes import DTYPES, DType
from kvx.spec.formats import ALL_FORMATS, FORMATS, ROW_FORMATS, Format, Granularity, RowRule
from kvx.spec.from_manifest import from_json, spec_from_json
from kvx.spec.manifest import digest, to_json
from kvx.spec.state_spec import StateSpec, state_plane

__all__ = [
    "ALL_FORMATS",
    "DTYPES",
    "FORMATS",
    "ROW_FORMATS",
    "CacheSpec",
    "DType",
    "Format",
    "Granularity",
    "PlaneSpec",
    "RowRule",
    "Share",
    "Spec",
    "StateSpec",
    "digest",
    "from_json",
    "spec_from_json",
    "state_plane",
    "to_json",
]
