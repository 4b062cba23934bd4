"""Blocks in a peer's memory, read and written through NIXL. nixl_server.py is the peer.

Every call ends within `timeout_s`. A peer that is gone or late is a miss of get and a TierError of put; the next connects anew.
"""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from kvx.errors import BadArgument, Incompatible, TierError, Unsupported
from kvx.layout.plan import ByteRun
from kvx.tiers.block import Block, BlockKind
from kvx.tiers.block_file import CHECKSUMS, checksum
from kvx.tiers.tier import Tier, TierEvent
from kvx.wires.address import devices_of
from kvx.wires.channel import Channel, connect
from kvx.wires.nixl.agent import NixlAgent, Remote
from kvx.wires.secret import Secret
from kvx.wires.wire import Deadline, WireError

WHO = "NixlServer"
AGAIN_S = 10.0  # an engine that lost its peer asks for it again after so long


class ArenaAsk(NamedTuple):
    """Of a server that takes blocks of any kind: how much memory for this one, and whose blocks where some look alike."""

    num_bytes: int
    group: str = ""


@dataclass
class _Link:
    channel: Channel
    agent: NixlAgent
    staging: torch.Tensor  # [blocks, block bytes], registered. A transfer that was given up may still write here, never elsewhere
    remote: Remote

    def ask(self, message: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        answer = self.channel.ask(message, deadline, "the peer")
        if "error" in answer:
            raise (Incompatible if answer.get("is_other_kind") else TierError)(str(answer["error"]))
        return answer


class NixlTier(Tier):
    is_lasting = is_shared = True  # in the peer
    is_remote = True

    def __init__(
        self,
        host: str,
        port: int,
        kind: BlockKind,
        *,
        secret: Secret,  # that the peer has, too
        ask: ArenaAsk | None = None,  # None: the peer has memory for this kind
        timeout_s: float = 5.0,  # of a call's part that moves at most `staging_blocks`
        retry_s: float = 1.0,  # after a failure, calls fail at once for so long
        staging_blocks: int = 16,
        max_pending: int = 64,
        on_event: Callable[[TierEvent], None] | None = None,
    ) -> None:
        if timeout_s <= 0 or staging_blocks < 1:
            raise BadArgument(f"NixlTier: timeout_s is {timeout_s}, staging_blocks {staging_blocks}; both are more than 0.")
        # One thread: the staging memory is its own.
        super().__init__(kind, threads=1, max_pending=max_pending, on_event=on_event)
        self.host, self.port, self._secret, self._ask = host, port, secret, ask
        self.timeout_s, self.retry_s, self.staging_blocks = timeout_s, retry_s, staging_blocks
        self._link: _Link | None = None
        self._down_until_s = 0.0
        self._lock = threading.Lock()
        try:
            with self._talk():  # a peer of another kind is said at once
                pass
        except BaseException:
            self._pool.shutdown()
            raise

    @property
    def num_blocks(self) -> int:
        """Of all who use the peer. 0 where it cannot be reached."""
        try:
            with self._talk() as (link, deadline):
                return int(link.ask({"op": "count"}, deadline)["count"])
        except TierError:
            return 0

    def has(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Which are there, without reading them: get() may still refuse one. None where the peer cannot be reached."""
        return self._submit("has", partial(self._flags, "has"), self._checked("has", keys))

    def has_now(self, keys: Sequence[bytes]) -> list[bool]:
        """One question for all."""
        return self._flags("has", self._checked("has_now", keys))

    def close(self) -> None:
        super().close()
        with self._lock:
            self._lose()

    # ---- batches, in parts that the staging memory holds

    def _put(self, keys: list[bytes], blocks: list[Block]) -> list[bool]:
        new: list[bool] = []
        while (n := len(new)) < len(keys):
            part = slice(n, n + self.staging_blocks)
            try:
                new += self._put_part(keys[part], blocks[part])
            except OSError as error:
                self._tell("failed", keys[n], str(error), errors=1)
                raise TierError(f"put(): block {n} of {len(keys)}, {keys[n].hex()}: {error} Earlier ones were stored.") from error
        return new

    def _get(self, keys: list[bytes], into: list[Block | None]) -> list[Block | None]:
        found: list[Block | None] = []
        for n in range(0, len(keys), self.staging_blocks):
            part = slice(n, n + self.staging_blocks)
            try:
                found += self._get_part(keys[part], into[part])
            except (OSError, Unsupported) as error:
                self._tell("failed", keys[n], str(error), errors=1)
                found += [None] * len(keys[part])
        hits = sum(b is not None for b in found)
        self._count(hits=hits, misses=len(keys) - hits, bytes_out=hits * self.kind.num_bytes)
        return found

    def _drop(self, keys: list[bytes]) -> list[bool]:
        dropped = self._flags("drop", keys)
        for key, was_there in zip(keys, dropped, strict=True):
            if was_there:
                self._tell("dropped", key)
        return dropped

    def _put_part(self, keys: list[bytes], blocks: list[Block]) -> list[bool]:
        """Of the first blocks, as many as the peer has slots for at once: one or more."""
        size = self.kind.num_bytes
        with self._talk() as (link, deadline):
            answer = link.ask({"op": "put", "keys": [k.hex() for k in keys]}, deadline)
            slots: list[int] = answer["slots"]
            slots = slots[: slots.index(-2)] if -2 in slots else slots
            if not slots:
                raise TierError("the peer has no room: others hold all of its slots.")
            sums: dict[int, str] = {}
            for n, slot in enumerate(slots):
                if slot >= 0:
                    torch.cat(blocks[n].buffers, out=link.staging[n])
                    sums[slot] = _sum_of(link.staging[n])
            runs = [ByteRun(0, n * size, 0, slot * size, size) for n, slot in enumerate(slots) if slot >= 0]
            link.agent.write([link.staging], link.remote, runs, deadline)
            kept = link.ask({"op": "commit", "lease": answer["lease"], "sums": sums}, deadline)["kept"] if sums else []
            evicted = [bytes.fromhex(k) for k in answer["evicted"]]
        for key in evicted:
            self._tell("evicted", key, evicted=1)
        new = [slot in kept for slot in slots]
        for key, is_new in zip(keys, new, strict=False):
            if is_new:
                self._tell("stored", key, stored=1, bytes_in=size)
        return new

    def _get_part(self, keys: list[bytes], into: list[Block | None]) -> list[Block | None]:
        size = self.kind.num_bytes
        with self._talk() as (link, deadline):
            answer = link.ask({"op": "get", "keys": [k.hex() for k in keys]}, deadline)
            slots: list[int | None] = answer["slots"]
            sums: list[str] = answer["sums"]
            runs = [ByteRun(0, slot * size, 0, n * size, size) for n, slot in enumerate(slots) if slot is not None]
            link.agent.read([link.staging], link.remote, runs, deadline)
            if runs:
                link.ask({"op": "end", "lease": answer["lease"]}, deadline)
            damaged = [n for n, slot in enumerate(slots) if slot is not None and _sum_of(link.staging[n], sums[n]) != sums[n]]
            if damaged:
                link.ask({"op": "drop", "keys": [keys[n].hex() for n in damaged]}, deadline)
            found = [
                None if slot is None or n in damaged else self._filled(to or self.kind.empty(), link.staging[n])
                for n, (slot, to) in enumerate(zip(slots, into, strict=True))
            ]
        for n in damaged:
            self._tell("refused", keys[n], "its bytes are not those that were written: the checksum differs.", refused=1)
        return found

    def _filled(self, block: Block, row: torch.Tensor) -> Block:
        at = 0
        for t in block.buffers:
            t.copy_(row[at : at + t.numel()])
            at += t.numel()
        return block

    def _flags(self, op: str, keys: list[bytes]) -> list[bool]:
        try:
            with self._talk() as (link, deadline):
                return [bool(x) for x in link.ask({"op": op, "keys": [k.hex() for k in keys]}, deadline)["flags"]]
        except TierError as error:
            for key in keys[:1]:
                self._tell("failed", key, str(error), errors=1)
            return [False] * len(keys)

    def _store(self, key: bytes, block: Block) -> bool:
        return self._put_part([key], [block])[0]

    def _fetch(self, key: bytes, into: Block | None) -> Block | None:
        return self._get_part([key], [into])[0]

    def _holds(self, key: bytes) -> bool:
        return self._flags("has", [key])[0]

    def _remove(self, key: bytes) -> bool:
        return self._flags("drop", [key])[0]

    # ---- the link

    @contextmanager
    def _talk(self) -> Iterator[tuple[_Link, Deadline]]:
        """The link, for one exchange. Whatever goes wrong on it, it is thrown away with its memory, and the next one is new."""
        with self._lock:
            if time.monotonic() < self._down_until_s:
                raise WireError(f"the peer at {self.host}:{self.port} failed less than {self.retry_s:g} s ago.")
            deadline = Deadline(self.timeout_s)
            try:
                yield self._connected(deadline), deadline
            except (WireError, KeyError, TypeError, ValueError, IndexError) as error:
                self._lose()
                self._down_until_s = time.monotonic() + self.retry_s
                if isinstance(error, TierError):
                    raise
                raise WireError(f"the peer's answer is not understood: {type(error).__name__} {error}.") from error

    def _connected(self, deadline: Deadline) -> _Link:
        if self._link is None:
            channel = connect(self.host, self.port, self._secret, deadline, who=WHO)
            agent: NixlAgent | None = None
            try:
                agent = NixlAgent(devices=devices_of(channel.my_host))
                staging = torch.zeros(self.staging_blocks, self.kind.num_bytes, dtype=torch.uint8)
                agent.register([staging])
                link = _Link(channel, agent, staging, Remote("", ()))
                answer = link.ask({"op": "open", "kind": self.kind.text, **(self._ask or ArenaAsk(0))._asdict()}, deadline)
                link.remote = Remote(agent.add_peer(b64decode(answer["metadata"], validate=True)), (int(answer["address"]),))
            except BaseException:
                if agent is not None:
                    agent.close()
                channel.close()
                raise
            self._link = link
        return self._link

    def _lose(self) -> None:
        if self._link is not None:
            self._link.agent.close()  # before its staging memory is free
            self._link.channel.close()
            self._link = None


def _sum_of(row: torch.Tensor, like: str = "") -> str:
    """The checksum of a block's bytes, with its number; as another's, where one is given."""
    number = int(like.split(":")[0]) if like else max(CHECKSUMS)
    return f"{number}:{checksum(number, [row.numpy().data]).hex()}"
