"""Ops: what moves bytes. One word an op: ops/x.py is its definition, x.cpp and x.cu in a folder of native/, tests/ops/test_x.py."""
