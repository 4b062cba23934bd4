"""Numbers <-> bytes in readable torch. native/format.h is the same arithmetic in C."""

from kvx.quant.numbers import decode, encode
from kvx.quant.scales import load_scale, round_scale, scale_from_amax

__all__ = ["decode", "encode", "load_scale", "round_scale", "scale_from_amax"]
