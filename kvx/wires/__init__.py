"""Bytes between processes and machines. No protocol of our own: NIXL and Mooncake, each where it is installed.

offer.py is what both do for a handover: one process offers buffers, another pulls them. choose.py picks one by name.
events/ moves no blocks: it tells routers over ZMQ which there are.
"""
