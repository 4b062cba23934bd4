"""Ops: what moves bytes. One word an op: ops/x.py (definition), native/cpu/x.cpp, native/cuda/x.cu, tests/ops/test_x.py."""
