"""Rows into a cache and out of it, and what happens to them on the way: write, gather, norm, rotation. Kernels: native/append."""
