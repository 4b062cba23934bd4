"""A process's memory as a remote tier: an arena of block slots that peers read and write through NIXL, and the directory of it.

A thread answers their messages; it never touches the blocks. nixl_tier.py is the other side. All who have the secret share the
arena: each can read and write any slot, and the checksum that travels with a block tells who reads it that somebody did. A server
for any kind of blocks (`kvx store`) has an arena for each, made when a peer first asks for it.
"""

from __future__ import annotations

import threading
from base64 import b64encode
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from kvx.errors import BadArgument, Incompatible, KvxError
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


@dataclass(frozen=True, eq=False)
class SlotArena:
    """The blocks of one kind."""

    slots: SlotDirectory
    memory: torch.Tensor  # [slots, block bytes], registered
    metadata: str  # what a peer must know to read and write it


class NixlServer:
    """At most `capacity_bytes` of blocks for whoever has the secret. Stops when closed."""

    def __init__(
        self,
        host: str,  # where it listens, and nowhere else
        port: int,
        kind: BlockKind | None,  # None: of any that names its model; each gets what the first peer that has it asks, if it is left
        capacity_bytes: int,
        *,
        secret: Secret,
        lease_s: float = 10.0,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        if kind is not None:
            _check_kind(kind)
            blocks_in("NixlServer", capacity_bytes, kind.num_bytes)
        self.kind, self.capacity_bytes, self._lease_s = kind, capacity_bytes, lease_s
        self.arenas: dict[tuple[str, str], SlotArena] = {}  # by the kind, and the group of layers
        self._open: dict[int, SlotArena] = {}  # that each peer works with
        self._leases: dict[int, set[int]] = {}  # of each peer
        self._listener = Listener(host, port, secret, idle_s=QUIET_S, max_clients=max_clients)
        try:
            self._agent = NixlAgent(devices=devices_of(self._listener.host))
            if kind is not None:
                self._arena(kind, "", capacity_bytes)
        except BaseException:
            self._listener.close()
            raise
        self._lock = threading.Lock()  # between the thread and whoever looks at `arenas`
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="NixlServer", daemon=True)
        self._thread.start()

    @property
    def num_blocks(self) -> int:
        with self._lock:
            return sum(len(arena.slots) for arena in self.arenas.values())

    @property
    def num_leases(self) -> int:
        """Peers' transfers that are not over."""
        with self._lock:
            return sum(arena.slots.num_leases for arena in self.arenas.values())

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
                    arena = self._open.pop(client.number, None)
                    for lease in self._leases.pop(client.number, ()):
                        assert arena is not None
                        arena.slots.end(lease)

    def _answer(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._lock:
                if body.get("op") == "open":
                    return self._opened(client, body)
                arena = self._open.get(client.number)
                if arena is None:
                    raise WireError("this peer has not said which blocks it works with.")
                return self._do(arena.slots, str(body.get("op")), body, self._leases.setdefault(client.number, set()))
        except KvxError as error:
            return {"error": str(error), "is_other_kind": isinstance(error, Incompatible)}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return {"error": f"the message is not understood: {type(error).__name__} {error}"}

    def _opened(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        kind, group = kind_from_text(body["kind"]), str(body.get("group", ""))
        if self.kind is not None:
            self.kind.require_same(kind, "NixlServer")
            group = ""
        if client.number in self._open:
            raise WireError("this peer works with blocks of one kind; it connects once for each.")
        arena = self._arena(kind, group, int(body.get("num_bytes", 0)))
        self._open[client.number] = arena
        return {"address": arena.memory.data_ptr(), "num_slots": arena.slots.num_slots, "metadata": arena.metadata}

    def _arena(self, kind: BlockKind, group: str, num_bytes: int) -> SlotArena:
        """Made where it is not there: of so many bytes, or of those that are left."""
        at = kind.text, group
        if at not in self.arenas:
            _check_kind(kind)
            left = self.capacity_bytes - sum(arena.memory.numel() for arena in self.arenas.values())
            size = min(num_bytes, left)
            if size < kind.num_bytes:
                raise BadArgument(
                    f"NixlServer: a block takes {kind.num_bytes} bytes; {num_bytes} were asked for, and {left} of "
                    f"{self.capacity_bytes} are left, after {len(self.arenas)} other kinds of blocks. Ask for more, or start a "
                    "larger server."
                )
            slots = SlotDirectory(blocks_in("NixlServer", size, kind.num_bytes), lease_s=self._lease_s)
            memory = torch.zeros(slots.num_slots, kind.num_bytes, dtype=torch.uint8)
            metadata = b64encode(self._agent.metadata(self._agent.register([memory]))).decode()
            self.arenas[at] = SlotArena(slots, memory, metadata)
        return self.arenas[at]

    def _do(self, slots: SlotDirectory, op: str, body: dict[str, Any], leases: set[int]) -> dict[str, Any]:
        keys = [bytes.fromhex(k) for k in body.get("keys", [])]
        match op:
            case "get":
                self._check_leases(slots, leases)
                lease, found = slots.read(keys)
                leases |= {lease} - {0}
                return {"lease": lease, "slots": [e and e.slot for e in found], "sums": [e and e.checksum for e in found]}
            case "put":
                self._check_leases(slots, leases)
                lease, places = slots.reserve(keys)
                leases |= {lease} - {0}
                evicted, slots.evicted = [key.hex() for key in slots.evicted], []
                return {"lease": lease, "slots": places, "evicted": evicted}
            case "commit":
                self._take_lease(leases, body["lease"])
                return {"kept": slots.commit(body["lease"], {int(s): str(c) for s, c in body["sums"].items()})}
            case "end":
                self._take_lease(leases, body["lease"])
                slots.end(body["lease"])
                return {}
            case "has":
                return {"flags": [key in slots for key in keys]}
            case "drop":
                return {"flags": [slots.drop(key) for key in keys]}
            case "count":
                return {"count": len(slots)}
        raise ValueError(op)

    def _check_leases(self, slots: SlotDirectory, leases: set[int]) -> None:
        leases.intersection_update(slots.leases)  # those that ran out are nobody's
        if len(leases) >= MAX_LEASES:
            raise WireError(f"this peer has {MAX_LEASES} transfers that are not over, as many as may be. End some.")

    def _take_lease(self, leases: set[int], lease: object) -> None:
        """A lease is ended by whoever got it."""
        if type(lease) is not int or lease not in leases:
            raise WireError(f"lease {lease} is not this peer's: its blocks were discarded.")
        leases.discard(lease)


def _check_kind(kind: BlockKind) -> None:
    check_kind("NixlServer", kind)
    require_identity("NixlServer", kind.manifest.get("model"))
