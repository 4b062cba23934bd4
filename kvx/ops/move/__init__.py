"""Bytes from one cache to another, or inside one: conversions, digests, copies of blocks. native/move has the kernels."""
