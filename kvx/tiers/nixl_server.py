"""A process's memory as a remote tier: an arena of block slots that peers read and write through NIXL, and the directory of it.

A thread answers their messages; it never touches the blocks. nixl_tier.py is the other side.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from kvx.errors import Incompatible, KvxError
from kvx.identity import require_identity
from kvx.tiers.block import BlockKind, check_kind, kind_from_text
from kvx.tiers.remote_slots import Slots
from kvx.tiers.tier import blocks_in
from kvx.wires.nixl.agent import NixlAgent, agent_name
from kvx.wires.wire import WireError

IDLE_S = 0.002  # between two looks for messages while nobody is at work
BUSY_S = 0.0001  # while a peer transfers: looking is what moves the bytes on links that need both sides


class NixlServer:
    """At most `capacity_bytes` of blocks of one kind for whoever connects to `port`. Stops when closed."""

    def __init__(self, port: int, kind: BlockKind, capacity_bytes: int, *, lease_s: float = 10.0) -> None:
        check_kind("NixlServer", kind)
        require_identity("NixlServer", kind.manifest.get("model"))
        self.kind = kind
        self.slots = Slots(blocks_in("NixlServer", capacity_bytes, kind.num_bytes), lease_s=lease_s)
        self.arena = torch.zeros(self.slots.num_slots, kind.num_bytes, dtype=torch.uint8)
        self._agent = NixlAgent(agent_name(port), listen_port=port)
        self._agent.register([self.arena])
        self._lock = threading.Lock()  # between the thread and whoever looks at `slots`
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="NixlServer", daemon=True)
        self._thread.start()

    @property
    def num_blocks(self) -> int:
        with self._lock:
            return len(self.slots)

    @property
    def num_leases(self) -> int:
        """Peers' transfers that are not over."""
        with self._lock:
            return self.slots.num_leases

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._agent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _serve(self) -> None:
        waiting: list[tuple[str, dict[str, Any], float]] = []  # from peers whose metadata is still on its way
        while not self._is_closed:
            with suppress(WireError):
                waiting += [(peer, body, time.monotonic()) for peer, body in self._agent.notifications()]
            late = time.monotonic() - self.slots.lease_s
            ready = [w for w in waiting if self._agent.knows(w[0])]
            waiting = [w for w in waiting if w not in ready and w[2] > late]
            for peer, body, _ in ready:
                with suppress(WireError):  # a peer that is gone needs no answer
                    self._answer(peer, body)
            time.sleep(BUSY_S if ready or self.num_leases else IDLE_S)

    def _answer(self, peer: str, body: dict[str, Any]) -> None:
        try:
            with self._lock:
                answer = self._do(str(body.get("op")), body)
        except KvxError as error:
            answer = {"error": str(error), "is_other_kind": isinstance(error, Incompatible)}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            answer = {"error": f"the message is not understood: {type(error).__name__} {error}"}
        if "id" in body:
            self._agent.notify(peer, {**answer, "re": body["id"]})

    def _do(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        keys = [bytes.fromhex(k) for k in body.get("keys", [])]
        match op:
            case "open":
                self.kind.require_same(kind_from_text(body["kind"]), "NixlServer")
                return {"address": self.arena.data_ptr(), "num_slots": self.slots.num_slots}
            case "get":
                lease, found = self.slots.read(keys)
                return {"lease": lease, "slots": [e and e.slot for e in found], "sums": [e and e.checksum for e in found]}
            case "put":
                lease, slots = self.slots.reserve(keys)
                evicted, self.slots.evicted = [key.hex() for key in self.slots.evicted], []
                return {"lease": lease, "slots": slots, "evicted": evicted}
            case "commit":
                return {"kept": self.slots.commit(int(body["lease"]), {int(s): str(c) for s, c in body["sums"].items()})}
            case "end":
                self.slots.end(int(body["lease"]))
                return {}
            case "has":
                return {"flags": [key in self.slots for key in keys]}
            case "drop":
                return {"flags": [self.slots.drop(key) for key in keys]}
            case "count":
                return {"count": len(self.slots)}
        raise ValueError(op)
