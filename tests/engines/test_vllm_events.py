"""KV events read by vLLM's own decoder: a router that follows a PagedCache and its tiers has the same blocks as they have."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvx
from kvx.cache.kinds import Full, Sliding, State
from kvx.tiers import CacheTiers
from kvx.wires.events import publish
from kvx.wires.events.publisher import END
from kvx.wires.wire import WireError
from tests.wires.test_events import KINDS, SPEC, Follower, answered, make, names_of

msgspec = pytest.importorskip("msgspec", reason="the package msgspec is not installed here; `make engines` installs it with vLLM")
zmq = pytest.importorskip("zmq", reason="the package pyzmq is not installed here; `make engines` installs it with vLLM")
ANY = "tcp://127.0.0.1:0"
WAIT_S = 120.0  # a busy machine takes long; what never comes is told from what comes late by no shorter time


class Subscriber:
    """As a router has it: a SUB socket, vLLM's decoder, and the replay of what it missed."""

    def __init__(self, publisher, topic=b""):
        from vllm.distributed.kv_events import KVEventBatch

        self.decoder, self.context = msgspec.msgpack.Decoder(KVEventBatch), zmq.Context()
        self.follower, self.publisher = Follower(), publisher
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.connect(publisher.address)
        self.next, self.events, self.replayed, self.topics = 0, [], [], set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.destroy(linger=0)

    def take(self, number, payload):
        batch = self.decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        assert abs(batch.ts - time.time()) < 60
        self.events += batch.events
        self.follower.follow(msgspec.to_builtins(batch.events, builtin_types=(bytes,)))
        self.next = number + 1

    def replay(self):
        """All from the next one on."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.publisher.replay)
        dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while dealer.poll(WAIT_S * 1000):
            _, topic, number, payload = dealer.recv_multipart()
            if number == END:
                assert (topic, payload) == (b"", b"")
                dealer.close()
                return
            self.replayed.append(int.from_bytes(number, "big"))
            self.take(self.replayed[-1], payload)
        raise AssertionError("no end of the replay")

    def read(self, until):
        """Follow the stream until this is so."""
        end = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < end, f"told: {self.follower.names()}"
            if self.sub.poll(50):
                topic, number, payload = self.sub.recv_multipart()
                self.topics.add(topic)
                assert len(number) == 8
                n = int.from_bytes(number, "big")
                if n > self.next and self.publisher.replay:
                    self.replay()
                if n >= self.next:
                    self.take(n, payload)
            elif self.publisher.replay and self.next < self.publisher.num_batches:
                self.replay()


def write(cache, rng, n=40, clear=0.03):
    for _ in range(n):
        answered(cache, [rng.randrange(2)] * rng.randrange(1, 20) + [rng.randrange(3)] * rng.randrange(12))
        if rng.random() < clear:
            cache.prefix.clear()
        time.sleep(rng.choice([0, 0.005]))


@KINDS
def test_a_subscriber_follows_to_what_the_cache_has(kinds):
    cache = make(kinds)
    with publish(cache, ANY, replay=ANY, topic="kv@pod@small") as publisher, Subscriber(publisher, b"kv@") as subscriber:
        write(cache, random.Random(1))
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
        write(cache, random.Random(2))
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
        assert not publisher.error
        answered(cache, [9] * 9)
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
    assert subscriber.topics == {b"kv@pod@small"}
    stored = [e for e in subscriber.events if type(e).__name__ == "BlockStored"]
    assert {(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored} == {
        (n, {Full: "full_attention", Sliding: "sliding_window", State: "mamba"}[type(kind)], kind.window or None)
        for n, kind in enumerate(kinds)
    }
    assert {e.medium for e in stored} == {"GPU"}
    for here in subscriber.follower.blocks.values():
        for name, (parent, tokens) in here.items():
            assert cache.prefix.hashes(np.array(tokens, np.int32), parent=parent) == [name]


def test_bytes_are_those_that_vllm_writes():
    from vllm.distributed import kv_events as theirs

    from kvx.wires.events.residency import CLEARED

    cache = make((Full(), Sliding(6)))
    with publish(cache, ANY, replay=ANY) as publisher, Subscriber(publisher) as subscriber:
        answered(cache, list(range(9)), extra=b"lora")
        cache.prefix.clear()
        answered(cache, list(range(40)))
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
        for event in subscriber.events:
            plain = msgspec.to_builtins(event, builtin_types=(bytes,))
            assert msgspec.msgpack.encode(plain) == msgspec.msgpack.encode(event)
        batch = theirs.KVEventBatch(ts=1.0, events=[theirs.AllBlocksCleared()], data_parallel_rank=0)
        assert msgspec.msgpack.encode(batch) == msgspec.msgpack.encode([1.0, [CLEARED], 0])
        removed = theirs.BlockRemoved(block_hashes=[b"a"], medium="GPU", group_idx=1)
        assert msgspec.msgpack.encode(removed) == msgspec.msgpack.encode(
            {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU", "group_idx": 1}
        )


def test_order_eviction_and_clear():
    cache = make(num_blocks=4)
    with publish(cache, ANY, replay=ANY) as publisher, Subscriber(publisher) as subscriber:

        def told():
            subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
            subscriber.read(lambda: subscriber.next == publisher.num_batches)

        def seen():
            kinds = [(type(e).__name__, len(getattr(e, "block_hashes", ()))) for e in subscriber.events]
            subscriber.events.clear()
            return kinds

        answered(cache, list(range(16)))
        told()
        assert seen() == [("AllBlocksCleared", 0), ("BlockStored", 4)]
        answered(cache, list(range(100, 108)))
        told()
        assert sorted(seen()) == [("BlockRemoved", 2), ("BlockStored", 2)]
        cache.prefix.clear()
        told()
        assert seen() == [("AllBlocksCleared", 0)]


def test_a_subscriber_that_comes_late_gets_what_is_summed_up(monkeypatch):
    monkeypatch.setattr("kvx.wires.events.publisher.MAX_HISTORY_BLOCKS", 30)
    cache = make((Full(), Sliding(6)))
    with publish(cache, ANY, replay=ANY) as publisher:
        for seed in range(4):
            write(cache, random.Random(seed))
        with Subscriber(publisher) as subscriber:
            subscriber.replay()
            assert subscriber.replayed[0] > 0, "the first batches are one by now"
            assert type(subscriber.events[0]).__name__ == "AllBlocksCleared"
            write(cache, random.Random(9))
            subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
            assert subscriber.replayed == sorted(set(subscriber.replayed))
        with Subscriber(publisher) as other:  # one that missed a few alone
            other.next, other.follower.follow = publisher.num_batches - 1, list
            other.replay()
            assert other.replayed == [publisher.num_batches - 1]


def test_tiers_are_told_too_and_bad_questions_are_not_answered(tmp_path):
    cache = make((Full(), Sliding(6)), num_blocks=8)
    with (
        CacheTiers(cache, host=f"{20 * SPEC.cache_bytes // 12}B", disk=f"{tmp_path}/kv:120KB") as tiers,
        publish(cache, ANY, replay=ANY, tiers=tiers) as publisher,
        Subscriber(publisher) as subscriber,
    ):
        bad = subscriber.context.socket(zmq.DEALER)
        bad.connect(publisher.replay)
        for frames in ([b""], [b"", b"x"], [b"a", b"b", b"c", b"d"], [b"", b"1" * 100]):
            bad.send_multipart(frames)
        for n in range(12):
            answered(cache, list(range(100 * n, 100 * n + 30)))
        for mover in tiers.movers:
            mover.settle()
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache, tiers))
        for n in range(12):
            answered(cache, list(range(100 * n, 100 * n + 30)))
        for mover in tiers.movers:
            mover.settle()
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache, tiers))
        assert {medium for _, medium in subscriber.follower.names()} == {"GPU", "CPU", "STORAGE"}
        removed = {e.medium for e in subscriber.events if type(e).__name__ == "BlockRemoved"}
        assert removed == {"GPU", "CPU", "STORAGE"}
        tiers.tiers_of(0)[0][0].drop(tiers.tiers_of(0)[0][0].names()).result()
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache, tiers))
        assert all(tokens for here in subscriber.follower.blocks.values() for _, tokens in here.values())
        assert not publisher.error
        assert not bad.poll(100)


def test_a_queue_that_overflows_is_made_up_for():
    cache = make(num_blocks=200)
    with publish(cache, ANY, replay=ANY, max_pending=1) as publisher, Subscriber(publisher) as subscriber:
        subscriber.read(lambda: subscriber.next == publisher.num_batches > 0)
        for n in range(50):
            answered(cache, list(range(10 * n, 10 * n + 9)))
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
        assert publisher.num_overflows > 0
        assert type(subscriber.events[1]).__name__ == "BlockStored", "without a gap, and without a second beginning"


def test_what_is_there_already_is_told_with_the_tokens_that_are_known():
    cache = make()
    seq = cache.admit(list(range(9)))
    cache.extend(seq, 9)
    cache.commit(seq)
    answered(cache, list(range(100, 109)))
    with publish(cache, ANY, replay=ANY) as publisher, Subscriber(publisher) as subscriber:
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
        tokens = sorted(tokens for _, tokens in subscriber.follower.blocks[0, "GPU"].values())
        assert tokens == [(), (), (0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_subscriber_that_died_or_never_reads_stops_nobody():
    cache = make(num_blocks=64)
    with publish(cache, ANY, replay=ANY) as publisher:
        with Subscriber(publisher) as dead:
            dead.read(lambda: dead.next > 0)
        host, port = publisher.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))):  # connects, and says nothing
            stuck = Subscriber(publisher)

            def go_on():
                for n in range(300):
                    answered(cache, list(range(n, n + 30)))
                publisher.close()

            # On a thread, since who waits for such a subscriber waits for ever.
            writer = threading.Thread(target=go_on, daemon=True)
            writer.start()
            writer.join(WAIT_S)
            assert not writer.is_alive()
            stuck.__exit__()
    publisher.close()  # once more is nothing
    answered(cache, list(range(30)))
    cache.check()


def test_close_tells_what_is_left_and_leaves_nothing_behind():
    threads, cache = threading.active_count(), make()
    for _ in range(3):
        publisher = publish(cache, ANY)
        with Subscriber(publisher) as subscriber:
            time.sleep(0.3)  # without a replay, a subscriber has what comes after it has joined
            cache.prefix.clear()
            answered(cache, list(range(20)))
            publisher.close()
            subscriber.read(lambda: subscriber.follower.names() == names_of(cache))
        assert not cache.prefix.has_listeners
    assert threading.active_count() == threads


def test_an_interrupted_call_is_made_up_for():
    cache = make()
    with publish(cache, ANY, replay=ANY) as publisher, Subscriber(publisher) as subscriber:
        told = publisher._told_by_cache
        cache.prefix.unlisten(told)
        answered(cache, list(range(9)))  # as if Ctrl-C had come before the event was put
        cache.prefix.listen(told)
        cache._guard.is_torn = True
        cache.room()
        subscriber.read(lambda: subscriber.follower.names() == names_of(cache))


def test_a_publisher_may_connect_to_a_router_that_listens():
    from vllm.distributed.kv_events import KVEventBatch

    context, cache = zmq.Context(), make()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    with publish(cache, f"tcp://127.0.0.1:{port}", connect=True) as publisher:
        assert publisher.address == f"tcp://127.0.0.1:{port}"
        end, n = time.monotonic() + WAIT_S, 0
        while not sub.poll(50):  # what is told before it is connected is lost
            assert time.monotonic() < end, "nothing came"
            answered(cache, [n] * 9)
            n += 1
        _, _, payload = sub.recv_multipart()
        assert msgspec.msgpack.Decoder(KVEventBatch).decode(payload).events
    context.destroy(linger=0)


def test_addresses_are_refused_in_words():
    cache = make()
    for wrong in ("5557", "127.0.0.1:5557", "tcp://:5557", "http://127.0.0.1:1", "inproc://x"):
        with pytest.raises(kvx.BadArgument, match=re.escape(repr(wrong))):
            publish(cache, wrong)
        with pytest.raises(kvx.BadArgument, match="replay"):
            publish(cache, ANY, replay=wrong)
    with publish(cache, ANY) as publisher, pytest.raises(WireError, match=f"cannot listen at {publisher.address}"):
        publish(cache, publisher.address)
    assert not cache.prefix.has_listeners


def test_generate_tells_what_its_cache_has(small_model_copies):
    from vllm.distributed.kv_events import KVEventBatch

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        address, replay = (f"tcp://127.0.0.1:{s.getsockname()[1]}" for s in (one, two))
    context, decoder, batches = zmq.Context(), msgspec.msgpack.Decoder(KVEventBatch), {}
    sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(address)
    dealer.connect(replay)
    command = [sys.executable, "-m", "kvx", "generate", "--events", address, "--events-replay", replay, "--json"]
    with subprocess.Popen([*command, "--prompt", "Why?", "--max-tokens", "48", "--ignore-eos"], stdout=subprocess.PIPE) as process:
        while process.poll() is None:  # it joins when something is told already, and asks for what was before
            if sub.poll(100):
                number, payload = sub.recv_multipart()[1:]
                batches[number] = payload
                dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            while dealer.poll(0):
                _, _, number, payload = dealer.recv_multipart()
                batches[number] = payload
        assert process.returncode == 0
        said = json.loads(process.stdout.read())
    while sub.poll(200):
        number, payload = sub.recv_multipart()[1:]
        batches[number] = payload
    context.destroy(linger=0)
    batches.pop(END)
    assert sorted(batches) == [n.to_bytes(8, "big") for n in range(len(batches))]
    events = [event for _, payload in sorted(batches.items()) for event in decoder.decode(payload).events]
    assert type(events[0]).__name__ == "AllBlocksCleared"
    tokens = [token for event in events[1:] for token in event.token_ids]
    assert len(tokens) == (said["stats"]["prompt_tokens"] + 47) // 16 * 16, "all but the last token are in the cache"
    assert tokens[-16:] == said["answers"][0]["tokens"][-16 - (said["stats"]["prompt_tokens"] + 47) % 16 - 1 :][:16]


def test_the_code_of_the_docs_runs():
    text = (Path(__file__).resolve().parents[2] / "docs/cache.md").read_text()
    (code,) = [b for b in re.findall(r"```python[^\n]*\n(.*?)```", text, re.S) if "kvx.wires.events" in b]
    exec(compile(code, "docs/cache.md", "exec"), {})
