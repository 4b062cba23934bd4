"""Ops: what moves bytes. move/, append/, attention/ and entry/ have the ops, as native/ has their kernels; here is what they share.

One word an op: x.py in its family is its definition, x.cpp and x.cu in native/ compute it, tests/ops/test_x.py compares them.
"""
