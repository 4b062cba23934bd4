"""KV events: which blocks a cache and its tiers have, told to routers in the form of vLLM's KV events over ZMQ.

residency.py knows which block is where, and says what changed as records; history.py keeps them for who comes late; publisher.py
has the sockets.
"""

from kvx.wires.events.publisher import Publisher, publish

__all__ = ["Publisher", "publish"]
