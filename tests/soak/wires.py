"""Prefill and decode over NIXL for as long as you say, with clients that die, say half a word, know no secret or never pull.

    python -m tests.soak.wires --seconds 1800
    python -m tests.soak.wires --clients 10000 --quiet       # polite ones only, one after the other

A process answers as `kvx prefill --listen` does, with made-up K and V in place of a model's. Others ask it and compare every byte;
one of them is killed now and then, at any moment. Meanwhile connections are opened that prove nothing. A line a minute; at the end
the server must have as many descriptors and as much memory as when it was warm. Status 1, and why, where anything was wrong.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
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

MODEL, BLOCK_SIZE, TIMEOUT_S, LEASE_S = "soak", 16, 30.0, 10.0
HUNG_S = 60.0  # a worker that says nothing for so long
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


class Worker:
    """A child that asks, and how its clients ended."""

    def __init__(self, counts: Counter[str], address: str, secret_file: str, seed: int, life_s: float) -> None:
        self._counts = counts
        self.process = _child("ask", address, secret_file, str(seed))
        self.heard_s = time.monotonic() + 120  # it has yet to begin
        self.has_begun = False
        self.life_s = life_s
        self.end_s = 0.0  # once it has begun
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what = line.split(" ")[0].strip()
            if what != "begun":
                self._counts[what] += 1
            if not self.has_begun:
                self.has_begun, self.end_s = True, time.monotonic() + self.life_s
            self.heard_s = time.monotonic()
            if what in ("wrong", "failed"):
                print(line.strip(), flush=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()


def _child(*args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tests.soak.wires", *args], stdout=subprocess.PIPE, text=True, env=env)


class Nuisance:
    """Connections that ask for nothing good, from this process: none of them needs NIXL."""

    def __init__(self, port: int, secret: Secret, rng: random.Random) -> None:
        self.port, self.secret, self.rng = port, secret, rng
        self.counts: Counter[str] = Counter()
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


def files_and_memory(pid: int) -> tuple[int, int]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def soak(seconds: float, num_clients: int, num_workers: int, is_quiet: bool) -> list[str]:
    """What was wrong."""
    wrong: list[str] = []
    seed = int.from_bytes(os.urandom(4), "big")
    rng, counts, kills = random.Random(seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        secret_file = Path(folder) / "secret"
        secret, _ = read_or_make_secret(secret_file)
        with socket.create_server(("127.0.0.1", 0)) as s:
            port = int(s.getsockname()[1])
        address = f"127.0.0.1:{port}"
        server = _child("serve", address, str(secret_file))
        atexit.register(server.kill)  # also where this is interrupted
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            return ["the server did not start"]
        nuisance = Nuisance(port, secret, rng)

        def worker(n: int) -> Worker:
            """The last one lives on."""
            life_s = math.inf if is_quiet or n == num_workers - 1 else rng.uniform(0, 30)
            return Worker(counts, address, str(secret_file), rng.randrange(1 << 30), life_s)

        workers = [worker(n) for n in range(num_workers)]
        while not all(w.has_begun for w in workers) and all(w.process.poll() is None for w in workers):
            time.sleep(0.1)
        begin = said_s = time.monotonic()
        warm = (0, 0)

        def line() -> str:
            files, memory = files_and_memory(server.pid)
            minutes = (time.monotonic() - begin) / 60
            others = f"{nuisance.counts.total()} others, {nuisance.counts['let in']} of them let in"
            return (f"{minutes:.1f} min: {dict(counts)}, {kills} killed, {others}; {files} descriptors, {memory >> 20} MB "
                    f"(warm: {warm[0]}, {warm[1] >> 20}); seed {seed}")  # fmt: skip

        try:
            while (now := time.monotonic()) - begin < seconds and not (num_clients and counts["right"] >= num_clients):
                if server.poll() is not None:
                    wrong.append(f"the server ended with status {server.returncode}")
                    break
                if not warm[0] and (now - begin > seconds / 2 or counts["right"] > 50):
                    warm = files_and_memory(server.pid)
                if not is_quiet and warm[0]:
                    nuisance.once()
                    for n, one in enumerate(workers):
                        if one.has_begun and now > one.end_s:
                            one.kill()
                            workers[n] = worker(n)
                            kills += 1
                hung = [w for w in workers if now - w.heard_s > HUNG_S]
                if hung:
                    wrong.append(f"a client said nothing for {HUNG_S:.0f} s")
                    break
                if now - said_s > 60:
                    said_s = now
                    print(line(), flush=True)
                time.sleep(rng.uniform(0, 0.1))
        finally:
            for one in workers:
                one.kill()
            nuisance.close()
        if server.poll() is None:
            time.sleep(LEASE_S + 12)  # leases, and what is kept for READs on their way
            print(line(), flush=True)
            files, memory = files_and_memory(server.pid)
            if files > warm[0] + MORE_FILES:
                wrong.append(f"{files} descriptors; {warm[0]} when it was warm")
            if memory > warm[1] + MORE_BYTES:
                wrong.append(f"{memory >> 20} MB; {warm[1] >> 20} when it was warm")
            with suppress(KeyError):
                status = connect("127.0.0.1", port, secret, Deadline(5), who="server")
                about = status.ask({"about": {"ask": "status"}}, Deadline(5))["about"]
                status.close()
                if about["offers"]:
                    wrong.append(f"{about['offers']} offers stay")
        server.kill()
        server.wait()
    wrong += [f"{counts[what]} clients: {what}" for what in ("wrong", "failed") if counts[what]]
    wrong += [f"{nuisance.counts[what]}: {what}" for what in ("let in", "bad tokens taken") if nuisance.counts[what]]
    if not counts["right"]:
        wrong.append("no client was answered")
    return wrong


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("serve", "ask"):
        if sys.argv[1] == "serve":
            serve(*sys.argv[2:4])
        else:
            ask(*sys.argv[2:4], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long; 0: until --clients are answered")
    parser.add_argument("--clients", type=int, default=0, help="end when so many were answered rightly; 0: after --seconds")
    parser.add_argument("--workers", type=int, default=2, help="processes that ask, each one client after the other")
    parser.add_argument("--quiet", action="store_true", help="nobody is killed and nobody misbehaves")
    options = parser.parse_args()
    if not options.seconds and not options.clients:
        parser.error("give --seconds or --clients")
    wrong = soak(options.seconds or 86400.0, options.clients, options.workers, options.quiet)
    print("\n".join(wrong) if wrong else "nothing was wrong, nothing hung, nothing was kept", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
