"""What falls from a faster tier: whatever a listener does, those who wait are woken."""

from __future__ import annotations

import threading

from kvx.tiers import BlockKind, HostTier
from kvx.tiers.demotion import DemotionQueue

KIND = BlockKind({"model": "m"}, (64,))


def test_a_listener_that_raises_does_not_leave_others_waiting():
    told = []

    def listener(event):
        raise ValueError("a listener of the slow tier")

    with HostTier(KIND, 6400, on_event=listener) as slow:
        queue = DemotionQueue(8, lambda kind, demotion, why: told.append((kind, demotion.key)))
        for key in (b"a", b"b"):
            queue.push(key, KIND.empty(), slow)
        waiting = threading.Thread(target=queue.drain, daemon=True)
        waiting.start()
        waiting.join(5)
        assert not waiting.is_alive()
        queue.close()
    assert [key for _, key in told] == [b"a", b"b"]
