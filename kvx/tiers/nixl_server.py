"""A process's memory as a remote tier: an arena of block slots that peers read and write through NIXL, and the directory of it.

A thread answers their messages; it never touches the blocks. nixl_tier.py is the other side. All who have the secret share the
arena: each can read and write any slot, and the checksum that travels with a block tells who reads it that somebody did.
"""

from __future__ import annotations

import threading
from base64 import b64encode
from types import TracebackType
from typing import Any, Self

import torch

from kvx.errors import Incompatible, KvxError
from kvx.identity import require_identity
from kvx.tiers.block import BlockKind, check_kind, kind_from_text
from kvx.tiers.remote_slots import SlotDirectory
from kvx.tiers.tier import blocks_in
from kvx.wires.address import devices_of
from kvx.wires.listener import MAX_CLIENTS, Client, Listener
from kvx.wires.nixl.agent import NixlAgent
from kvx.wires.secret import Secret
from kvx.wires.wire import WireError

QUIET_S = 86400.0  # a tier that asks nothing for so long is hung up on; one that is gone, much sooner
MAX_LEASES = 64  # of one peer at a time
IDLE_S = 0.002  # between two looks for messages while nobody is at work
BUSY_S = 0.0001  # while a peer transfers: looking is what moves the bytes on links that need both sides


class NixlServer:
    """At most `capacity_bytes` of blocks of one kind for whoever has the secret. Stops when closed."""

    def __init__(
        self,
        host: str,  # where it listens, and nowhere else
        port: int,
        kind: BlockKind,
        capacity_bytes: int,
        *,
        secret: Secret,
        lease_s: float = 10.0,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        check_kind("NixlServer", kind)
        require_identity("NixlServer", kind.manifest.get("model"))
        self.kind = kind
        self.slots = SlotDirectory(blocks_in("NixlServer", capacity_bytes, kind.num_bytes), lease_s=lease_s)
        self.arena = torch.zeros(self.slots.num_slots, kind.num_bytes, dtype=torch.uint8)
        self._leases: dict[int, set[int]] = {}  # of each peer
        self._listener = Listener(host, port, secret, idle_s=QUIET_S, max_clients=max_clients)
        try:
            self._agent = NixlAgent(devices=devices_of(self._listener.host))
            self._metadata = b64encode(self._agent.metadata(self._agent.register([self.arena]))).decode()
        except BaseException:
            self._listener.close()
            raise
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
        self._listener.close()
        self._agent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._is_closed:
            self._agent.progress()
            for client, body in self._listener.events(BUSY_S if self.num_leases else IDLE_S):
                if body is not None:
                    client.answer(self._answer(client, body))
                    continue
                with self._lock:
                    for lease in self._leases.pop(client.number, ()):
                        self.slots.end(lease)

    def _answer(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._lock:
                return self._do(str(body.get("op")), body, self._leases.setdefault(client.number, set()))
        except KvxError as error:
            return {"error": str(error), "is_other_kind": isinstance(error, Incompatible)}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return {"error": f"the message is not understood: {type(error).__name__} {error}"}

    def _do(self, op: str, body: dict[str, Any], leases: set[int]) -> dict[str, Any]:
        keys = [bytes.fromhex(k) for k in body.get("keys", [])]
        match op:
            case "open":
                self.kind.require_same(kind_from_text(body["kind"]), "NixlServer")
                return {"address": self.arena.data_ptr(), "num_slots": self.slots.num_slots, "metadata": self._metadata}
            case "get":
                self._check_leases(leases)
                lease, found = self.slots.read(keys)
                leases |= {lease} - {0}
                return {"lease": lease, "slots": [e and e.slot for e in found], "sums": [e and e.checksum for e in found]}
            case "put":
                self._check_leases(leases)
                lease, slots = self.slots.reserve(keys)
                leases |= {lease} - {0}
                evicted, self.slots.evicted = [key.hex() for key in self.slots.evicted], []
                return {"lease": lease, "slots": slots, "evicted": evicted}
            case "commit":
                self._take_lease(leases, body["lease"])
                return {"kept": self.slots.commit(body["lease"], {int(s): str(c) for s, c in body["sums"].items()})}
            case "end":
                self._take_lease(leases, body["lease"])
                self.slots.end(body["lease"])
                return {}
            case "has":
                return {"flags": [key in self.slots for key in keys]}
            case "drop":
                return {"flags": [self.slots.drop(key) for key in keys]}
            case "count":
                return {"count": len(self.slots)}
        raise ValueError(op)

    def _check_leases(self, leases: set[int]) -> None:
        leases.intersection_update(self.slots.leases)  # those that ran out are nobody's
        if len(leases) >= MAX_LEASES:
            raise WireError(f"this peer has {MAX_LEASES} transfers that are not over, as many as may be. End some.")

    def _take_lease(self, leases: set[int], lease: object) -> None:
        """A lease is ended by whoever got it."""
        if type(lease) is not int or lease not in leases:
            raise WireError(f"lease {lease} is not this peer's: its blocks were discarded.")
        leases.discard(lease)
