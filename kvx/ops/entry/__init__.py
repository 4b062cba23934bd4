"""Compressed entries of hybrid caches (DeepSeek-V4): tails, compression, scores, top-k, windows. Kernels: native/entry."""
