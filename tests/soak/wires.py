"""Prefill and decode over NIXL for as long as you say, with clients that die, say half a word, know no secret or never pull.

    python -m tests.soak.wires --seconds 1800
    python -m tests.soak.wires --clients 10000 --quiet       # polite ones only, one after the other

A process answers as `kvx prefill --listen` does, with made-up K and V in place of a model's. Others ask it and compare every byte;
one of them is killed now and then, at any moment. Meanwhile connections are opened that prove nothing. A line a minute; at the end
the server must have as many descriptors and as much memory as when it was warm. Status 1, and why, where anything was wrong.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvx
from kvx.cli import prefill
from kvx.cli.decode import fetch
from kvx.handover import NEUTRAL, Handover, Source, export_blocks
from kvx.wires import channel
from kvx.wires.channel import connect
from kvx.wires.choose import offers_at
from kvx.wires.secret import Secret, read_or_make_secret, read_secret
from kvx.wires.wire import Deadline, WireError
from tests.soak.trial import HUNG_S, SAID_S, Child, Flat, arguments, files_and_memory, finish, take_ctrl_c

MODEL, BLOCK_SIZE, TIMEOUT_S, LEASE_S = "soak", 16, 30.0, 10.0
BUSY = ("Ask again", "as many as may be")  # what a server may say to a client that did nothing wrong
LATE = ("was not done within", "took the offer back", "did not answer within")  # on a machine that has more to do: said in time
MORE_FILES, MORE_BYTES = 4, 48 << 20  # at the end, over when it was warm


def made_of(tokens: list[int]) -> Handover:
    """What a model would make of them: bytes that follow from the tokens alone."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    spec = kvx.CacheSpec(num_blocks, BLOCK_SIZE, 3, 64, num_layers=4, layout=NEUTRAL, format="f32", model=MODEL)
    seed = int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=7).digest(), "big")
    generator = torch.Generator().manual_seed(seed)
    buffers = [t.view(torch.uint8).random_(0, 120, generator=generator) for t in kvx.allocate_buffers(spec)]
    return export_blocks(np.array(tokens), [Source(buffers, spec, range(num_blocks))])


class _Cache:
    allocators: tuple[()] = ()


class _Engine:
    cache = _Cache()


def serve(address: str, secret_file: str) -> None:
    prefill.export_sequence = lambda engine, tokens, model: made_of(tokens)
    server: Any = prefill.Server(_Engine(), MODEL, layout="layer kv | block token head dim", tp_size=3)  # type: ignore[arg-type]
    with offers_at("nixl", address, read_secret(Path(secret_file)), lease_s=LEASE_S, max_bytes=1 << 30) as offers:
        print("ready", flush=True)
        while True:
            for _ in server.look(offers):
                pass


def ask(address: str, secret_file: str, seed: int) -> None:
    """One client after the other. A line for each."""
    rng, secret = random.Random(seed), read_secret(Path(secret_file))
    print("begun", flush=True)
    while True:
        tokens = [rng.randrange(1 << 20) for _ in range(rng.choice((1, 5, 64, 300)))]
        try:
            got, _ = fetch("nixl", address, secret, tokens, MODEL, TIMEOUT_S)
            pairs = zip(got.parts[0].buffers, made_of(tokens).parts[0].buffers, strict=True)
            said = "right" if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs) else "wrong"
        except kvx.Damaged as error:
            said = f"wrong {error}"
        except kvx.KvxError as error:
            found = [what for what, texts in (("busy", BUSY), ("late", LATE)) if any(text in str(error) for text in texts)]
            said = found[0] if found else f"failed {type(error).__name__} {error}"
        print(said, flush=True)


class Worker(Child):
    """A child that asks, and how its clients ended."""

    def __init__(self, counts: Counter[str], address: str, secret_file: str, seed: int, life_s: float) -> None:
        self._counts, self._life_s = counts, life_s
        super().__init__("tests.soak.wires", "ask", address, secret_file, str(seed), on_line=self._heard)

    def _heard(self, line: str) -> None:
        what = line.split(" ")[0]
        if what != "begun":
            self._counts[what] += 1
        if what in ("wrong", "failed"):
            print(line, flush=True)

    @property
    def is_old(self) -> bool:
        return self.has_begun and time.monotonic() > self.begun_s + self._life_s


class Nuisance:
    """Connections that ask for nothing good, from this process: none of them needs NIXL."""

    def __init__(self, port: int, secret: Secret, rng: random.Random, counts: Counter[str]) -> None:
        self.port, self.secret, self.rng, self.counts = port, secret, rng, counts
        self._held: list[Any] = []
        self._ways = (self.half_open, self.garbage, self.wrong_secret, self.half_frame, self.never_pulls, self.gone_while_asking,
                      self.bad_tokens)  # fmt: skip

    def once(self) -> None:
        way = self.rng.choice(self._ways)
        self.counts[way.__name__] += 1
        with suppress(OSError):  # hung up on, as it should be (WireError is one, too)
            way()
        while len(self._held) > 40:
            self._held.pop(0).close()

    def close(self) -> None:
        while self._held:
            self._held.pop().close()

    def _raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def _proved(self) -> channel.Channel:
        return connect("127.0.0.1", self.port, self.secret, Deadline(5), who="server")

    def half_open(self) -> None:
        link = self._raw()
        link.send(b"\x16\x03\x01\x02\x00\x01"[: self.rng.randrange(7)])
        self._held.append(link)

    def garbage(self) -> None:
        with self._raw() as link:
            link.send(self.rng.randbytes(self.rng.randrange(1, 2000)))

    def wrong_secret(self) -> None:
        with suppress(WireError):
            connect("127.0.0.1", self.port, Secret(os.urandom(32)), Deadline(5), who="server").close()
            self.counts["let in"] += 1

    def half_frame(self) -> None:
        one = self._proved()
        one._link.send(b"\x00\x00\x10\x00half")
        self._held.append(one)

    def never_pulls(self) -> None:
        one = self._proved()
        one.send({"about": {"model": MODEL, "tokens": [1] * 300}}, Deadline(5))
        self._held.append(one)

    def gone_while_asking(self) -> None:
        one = self._proved()
        one.send({"about": {"model": MODEL, "tokens": [1] * 300}}, Deadline(5))
        one.close()

    def bad_tokens(self) -> None:
        one = self._proved()
        if "tokens[0]" not in str(one.ask({"about": {"model": MODEL, "tokens": [1.5]}}, Deadline(5)).get("error")):
            self.counts["bad tokens taken"] += 1
        one.close()


class Trial:
    def __init__(self, num_workers: int, is_quiet: bool, seed: int) -> None:
        self.num_workers, self.is_quiet, self.rng = num_workers, is_quiet, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.flat = Flat(MORE_FILES, MORE_BYTES)
        self.begin, self.is_stopped = time.monotonic(), False

    def run(self, seconds: float, num_clients: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.secret_file = Path(folder) / "secret"
            secret, _ = read_or_make_secret(self.secret_file)
            with socket.create_server(("127.0.0.1", 0)) as s:
                self.port = int(s.getsockname()[1])
            self.server = Child("tests.soak.wires", "serve", f"127.0.0.1:{self.port}", str(self.secret_file))
            nuisance = Nuisance(self.port, secret, self.rng, self.others)
            self.workers: list[Worker] = []
            try:
                if not self.server.wait_begun():
                    self.wrong.append("the server did not start")
                    return
                self.workers += [self._worker(n) for n in range(self.num_workers)]
                for worker in self.workers:
                    worker.wait_begun()
                self.begin = time.monotonic()
                self._serve(seconds, num_clients, nuisance)
            except KeyboardInterrupt:
                self.is_stopped = True
                print("wires: stopped", flush=True)
            finally:
                for worker in self.workers:
                    worker.end()
                nuisance.close()
                if self.server.status is None and not self.wrong and not self.is_stopped:
                    self._at_rest(secret)
                self.server.end()

    def _worker(self, n: int) -> Worker:
        """The last one lives on."""
        life_s = math.inf if self.is_quiet or n == self.num_workers - 1 else self.rng.uniform(0, 30)
        return Worker(self.counts, f"127.0.0.1:{self.port}", str(self.secret_file), self.rng.randrange(1 << 30), life_s)

    def _serve(self, seconds: float, num_clients: int, nuisance: Nuisance) -> None:
        said_s = seen_s = self.begin
        is_disturbed = False
        while (now := time.monotonic()) - self.begin < seconds and not (num_clients and self.counts["right"] >= num_clients):
            if self.server.status is not None:
                self.wrong.append(f"the server ended with status {self.server.status}")
                return
            if now - seen_s > 1:
                seen_s, is_warm = now, now - self.begin > min(300, seconds / 2)
                files, memory = files_and_memory(self.server.pid)
                # Those that others hold open are not there at the end; memory that they once took may be kept.
                self.flat.see(self.flat.warm[0] if is_disturbed and not is_warm else files, memory, is_warm=is_warm)
            is_disturbed = is_disturbed or now - self.begin > seconds / 4 or self.counts["right"] > 20
            if not self.is_quiet and is_disturbed:
                nuisance.once()
                for n, one in enumerate(self.workers):
                    if one.is_old:
                        one.end()
                        self.workers[n] = self._worker(n)
                        self.counts["killed"] += 1
            if any(w.is_hung for w in self.workers):
                self.wrong.append(f"a client said nothing for {HUNG_S:.0f} s")
                return
            if now - said_s > SAID_S:
                said_s, minutes = now, (now - self.begin) / 60
                print(f"wires, {minutes:.1f} min: {dict(self.counts)}, {self.others.total()} others; {self.flat}", flush=True)
            time.sleep(self.rng.uniform(0, 0.1))

    def _at_rest(self, secret: Secret) -> None:
        time.sleep(LEASE_S + 12)  # leases, and what is kept for READs on their way
        self.flat.see(*files_and_memory(self.server.pid), is_warm=True)
        status = connect("127.0.0.1", self.port, secret, Deadline(5), who="server")
        about = status.ask({"about": {"ask": "status"}}, Deadline(5))["about"]
        status.close()
        if about["offers"]:
            self.wrong.append(f"{about['offers']} offers stay")


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("serve", "ask"):
        if sys.argv[1] == "serve":
            serve(*sys.argv[2:4])
        else:
            ask(*sys.argv[2:4], int(sys.argv[4]))
        return
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=0, help="end when so many were answered rightly; 0: after --seconds")
    parser.add_argument("--workers", type=int, default=2, help="processes that ask, each one client after the other")
    parser.add_argument("--quiet", action="store_true", help="nobody is killed and nobody misbehaves")
    options = parser.parse_args()
    if not options.seconds and not options.clients:
        parser.error("give --seconds or --clients")
    take_ctrl_c()
    trial = Trial(options.workers, options.quiet, options.seed)
    trial.run(options.seconds or 86400.0, options.clients)
    c, others = trial.counts, trial.others
    rows = {
        "time": f"{(time.monotonic() - trial.begin) / 60:.1f} min",
        "clients": f"{c['right']} answered, every byte right; {c['busy']} were told to ask again, {c['late']} that it is late",
        "clients killed": c["killed"],
        **{f"others: {what.replace('_', ' ')}": n for what, n in others.items()},
        **trial.flat.rows(),
    }
    wrong = trial.wrong + trial.flat.wrong()
    wrong += [f"{c[what]} clients: {what}" for what in ("wrong", "failed") if c[what]]
    wrong += [f"{others[what]}: {what}" for what in ("let in", "bad tokens taken") if others[what]]
    if not c["right"] and not trial.is_stopped:
        wrong.append("no client was answered")
    finish("prefill and decode over NIXL", rows, wrong, options.seed)


if __name__ == "__main__":
    main()
