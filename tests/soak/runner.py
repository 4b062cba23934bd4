"""A runner's engines for as long as you say: arrivals, cancels, preemption, Ctrl-C at any moment, a host and a disk tier.

    python -m tests.soak.runner --seconds 1800

One process has two engines, one of a small random model and one of SmolLM2, whose caches have room for a few requests, and serves
them in turns. Another sends it SIGINT at any moment, which breaks off a call of the engine, and SIGUSR1, whose handler cancels a
request; a thread cancels others. Each answer is compared with what that prompt alone was answered at the start: greedy, token for
token, up to where two tokens were nearly as likely (sums in another order may tip those). When all is answered every block is free
or cached, and the process has as many descriptors and as much memory as when it was warm.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tests.soak.trial import HUNG_S, LONGER_S, SAID_S, Child, Flat, arguments, files_and_memory, finish, take_ctrl_c

R = TypeVar("R")
MARGIN = 0.01  # between the best and the next best logit, in which what is summed in another order cannot change the answer
PACE = {"random": 0.4, "SmolLM2": 1.0}  # of Ctrl-C: so that some requests are answered in between
FEWEST = 4  # tokens of an answer that is worth asking for
SHOWN = ("answers", "Ctrl-C", "preemptions", "cancelled", "brought_tokens")  # without which a trial shows nothing
REOPEN = 6  # rounds, about, after which an engine is closed and another made on what it left


# --- the process that serves ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    tokens: list[int]
    answer: tuple[int, ...]  # alone
    finish: str  # of the whole answer

    def wanted(self, max_tokens: int) -> tuple[tuple[int, ...], str]:
        return self.answer[:max_tokens], self.finish if max_tokens >= len(self.answer) else "length"


@dataclass
class Asked:
    """A request, and what was heard of each of its answers."""

    question: Question
    max_tokens: int
    pieces: dict[int, list[int]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)


class Model:
    """A model's weights, questions, and engines on them one after the other."""

    def __init__(self, name: str, base: Any, prompts: list[list[int]], *, max_tokens: int, num_blocks: int, block_size: int,
                 max_seqs: int, tiers: list[str], round_s: float) -> None:  # fmt: skip
        self.name, self.base, self.round_s = name, base, round_s
        self._cache = {"num_blocks": num_blocks, "block_size": block_size}
        self._max_seqs, self._tiers = max_seqs, tiers
        self.questions = [q for p in prompts if len((q := alone(base, p, max_tokens)).answer) >= FEWEST]
        if len(self.questions) < 4:
            sys.exit(f"{name}: only {len(self.questions)} of {len(prompts)} prompts have an answer to compare with")

    def open(self) -> Any:
        import torch

        from kvx import PagedCache
        from kvx.runner import Engine
        from kvx.runner.model import Model as Decoder
        from kvx.runner.model import layer_groups
        from kvx.runner.tiers import EngineTiers
        from kvx.tiers import TierOption

        model = self.base.model
        cache = PagedCache(layer_groups(model.config, kv_format="f32", **self._cache), max_seqs=self._max_seqs, max_tokens=64,
                           max_seq_len=self._cache["num_blocks"] * self._cache["block_size"])  # fmt: skip
        tiers = EngineTiers(cache, [TierOption.parse(t) for t in self._tiers], format="f32", model=f"{self.name}-soak")
        engine = Engine(Decoder(model.config, model.weights, cache, torch.float32), self.base.tokenizer,
                        max_batch_tokens=48, tiers=tiers)  # fmt: skip
        engine.scheduler.reserve_blocks = 0  # requests are admitted early and preempted often
        return engine


def alone(base: Any, prompt: list[int], max_tokens: int) -> Question:
    """The answer up to where the model is nearly undecided."""
    from kvx.runner import Params

    base.reset()
    forward, gaps = base._forward, []

    def watched(work: Any) -> Any:
        logits = forward(work)
        best = logits[-1].float().topk(2).values
        gaps.append(float(best[0] - best[1]))
        return logits

    base._forward = watched
    try:
        answer = base.generate([prompt], Params(max_tokens=max_tokens))[0][0]
    finally:
        base._forward = forward
    assert len(gaps) == len(answer.tokens), "a prompt is computed in one step, and each token in one"
    sure = next((i for i, gap in enumerate(gaps) if gap < MARGIN), len(gaps))
    return Question(prompt, answer.tokens[:sure], answer.finish if sure == len(gaps) else "length")


def small_random(folder: Path, rng: random.Random) -> Model:
    from kvx.runner import Engine
    from tests.runner import test_families

    test_families.transformers.utils.logging.disable_progress_bar()
    test_families.make("llama", folder / "llama")
    starts = [[rng.randrange(3, 128) for _ in range(n)] for n in (24, 13, 8, 0)]
    prompts = [[*rng.choice(starts), *(rng.randrange(3, 128) for _ in range(rng.randint(1, 30)))] for _ in range(30)]
    base = Engine.load(folder / "llama", num_blocks=64, block_size=4, max_batch_tokens=128)
    return Model("random", base, prompts, max_tokens=40, num_blocks=40, block_size=4, max_seqs=10, round_s=3.0,
                 tiers=["host:80KB", f"disk:{folder / 'random'}:400KB"])  # fmt: skip


def smollm2(folder: Path, rng: random.Random) -> Model:
    from kvx.runner import Engine, small_model
    from tests.runner import smollm

    base = Engine.load(small_model(), num_blocks=32, max_batch_tokens=512)
    assert base.tokenizer is not None
    starts = [smollm.SYSTEM, "Be brief.", ""]
    prompts = [base.tokenizer.chat(q, rng.choice(starts)) for q in rng.sample(smollm.QUESTIONS, 10)]
    return Model("SmolLM2", base, prompts, max_tokens=24, num_blocks=10, block_size=16, max_seqs=6, round_s=8.0,
                 tiers=["host:30MB", f"disk:{folder / 'smollm2'}:60MB"])  # fmt: skip


class Server:
    """Serves one engine; says what is wrong."""

    def __init__(self, model: Model, rng: random.Random, say: Callable[[], None]) -> None:
        self.model, self.rng, self.say = model, rng, say
        self.engine = model.open()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.live: dict[int, Asked] = {}
        self.cancelled: set[int] = set()  # that cancel() was called for, by whom ever
        self.cancel_lock = threading.Lock()  # held by a thread that cancels, until it has said so
        self._armed = 0  # Ctrl-Cs that may still break off this call

    # --- signals ----------------------------------------------------------------------------------------------------------

    def ctrl_c(self, number: int, frame: FrameType | None) -> None:
        if self._armed:  # else it came between two calls, which is not the engine's business
            self._armed -= 1
            self.counts["Ctrl-C"] += 1
            raise KeyboardInterrupt

    def cancel_in_handler(self, number: int, frame: FrameType | None) -> None:
        if self._armed and (live := list(self.live)):
            self._cancel(random.choice(live), "cancelled by a signal's handler")

    def _call(self, call: Callable[[], R]) -> tuple[bool, R | None]:
        """Whether Ctrl-C did not break it off, and its result. The second of two may come while the first is handled."""
        try:
            try:
                self._armed = 1 + (self.rng.random() < 0.3)
                result = call()
                self._armed = 0
                return True, result
            except KeyboardInterrupt:
                self._armed = 0
        except KeyboardInterrupt:
            self._armed = 0
        return False, None

    # --- requests ---------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        from kvx.runner import Params

        question = self.rng.choice(self.model.questions)
        asked = Asked(question, self.rng.randint(1, len(question.answer)))
        n = self.rng.choice((1, 1, 1, 2))
        asked.left = set(range(n))
        is_done, number = self._call(lambda: self.engine.add(question.tokens, Params(max_tokens=asked.max_tokens, n=n)))
        if is_done and number is not None:
            self.live[number] = asked
            self.counts["requests"] += 1

    def _cancel(self, number: int, how: str) -> None:
        self.cancelled.add(number)
        self.counts[how] += self.engine.cancel(number)

    def cancel_one(self, rng: random.Random) -> None:
        """From another thread."""
        with self.cancel_lock:
            if live := list(self.live):
                self._cancel(rng.choice(live), "cancelled by a thread")

    def _step(self) -> None:
        gone = set(self.cancelled)
        is_done, pieces = self._call(self.engine.step)
        for piece in pieces or ():
            asked = self.live.get(piece.request)
            if asked is None or piece.request in gone:
                self.wrong.append(f"request {piece.request} goes on after its end (cancelled: {piece.request in gone})")
                continue
            said = asked.pieces.setdefault(piece.index, [])
            said.append(piece.token)
            want, finish = asked.question.wanted(asked.max_tokens)
            if tuple(said) != want[: len(said)] or piece.finish != (finish if len(said) == len(want) else ""):
                self.wrong.append(f"answer {said} ({piece.finish!r}) to {asked.question.tokens}; alone it is {want} ({finish!r})")
            if piece.finish:
                asked.left.discard(piece.index)
                self.counts["answers"] += 1
                if not asked.left:
                    del self.live[piece.request]
        if not is_done:  # what it had computed may be lost: whoever asked hears no more
            for number in list(self.live):
                while not self._call(lambda number=number: self.engine.cancel(number))[0]:  # type: ignore[misc]
                    pass
            self.counts["broken off"] += len(self.live)
            self.live.clear()
        with self.cancel_lock:
            for number in self.cancelled & self.live.keys():
                del self.live[number]
            self.cancelled.clear()
            if self.engine.scheduler.is_idle and self.live:
                self.wrong.append(f"requests {list(self.live)} were never answered, and nothing is left to do")
                self.live.clear()

    def _generate(self) -> None:
        """The calls that wait for their answers, and one that is left early."""
        from kvx.runner import Params

        asked = self.rng.sample(self.model.questions, 3)
        most = self.rng.randint(1, min(8, *(len(q.answer) for q in asked)))

        def first_pieces() -> None:
            pieces: Iterator[Any] = self.engine.stream([q.tokens for q in asked], Params(max_tokens=most))
            for _ in range(self.rng.randint(1, 4)):
                next(pieces, None)
            pieces.close()  # type: ignore[attr-defined]

        self._call(first_pieces)
        is_done, answers = self._call(lambda: self.engine.generate([q.tokens for q in asked], Params(max_tokens=most)))
        if is_done and answers is not None:
            got = [(a[0].tokens, a[0].finish) for a in answers]
            if got != [q.wanted(most) for q in asked]:
                self.wrong.append(f"generate() answered {got}; alone they are {[q.wanted(most) for q in asked]}")
            self.counts["answers"] += len(asked)

    def round(self, seconds: float, is_over: threading.Event) -> None:
        """Arrivals for so long, then until all is answered; then nothing may be left."""
        rng, end_s = self.rng, time.monotonic() + seconds
        rate = rng.choice((0.1, 0.4, 0.9))
        while (is_open := time.monotonic() < end_s and not is_over.is_set()) or self.live:
            while is_open and len(self.live) < 2 * self.engine.cache.max_seqs and rng.random() < rate:
                self._ask()
            if rng.random() < 0.02 and self.live:
                self._cancel(rng.choice(list(self.live)), "cancelled")
            self._step()
            self.say()
            if self.wrong:
                return
        self._generate()
        self._at_rest()
        if rng.random() < 1 / REOPEN:
            self._reopen()

    def _at_rest(self) -> None:
        engine, cache = self.engine, self.engine.cache
        engine.step()  # clears up what a Ctrl-C at the very end of a call left to do
        left = {"scheduler": not engine.scheduler.is_idle, "texts": engine._texts, "cancels": engine._cancelled,
                "sequences": cache.num_seqs, "blocks": [a.num_used for a in cache.allocators if a.num_used]}  # fmt: skip
        self.wrong += [f"at rest: {name} left: {what}" for name, what in left.items() if what]
        cache.check()
        for mover in engine.tiers.backing.movers:
            mover.settle()
            for tier in mover.tiers:
                if tier.stats.refused or tier.stats.errors:
                    self.wrong.append(f"{type(tier).__name__}: {tier.stats}")
                most = getattr(tier, "capacity_blocks", None)
                if most is not None and tier.num_blocks > most:
                    self.wrong.append(f"{type(tier).__name__} has {tier.num_blocks} blocks, and room for {most}")
        stats = engine.stats()["tiers"]
        if stats["failed"] or stats["error"]:
            self.wrong.append(f"tiers: {stats}")
        self._count()
        self.counts["rests"] += 1

    def _reopen(self) -> None:
        """Another engine on the same disk: it finds what the first left there."""
        self.close()
        self.engine = self.model.open()
        self.counts["engines closed and made anew"] += 1

    def _count(self) -> None:
        counts = self.engine.scheduler.counts
        for name in ("preemptions", "brought_tokens", "reused_tokens", "steps"):
            self.counts[name] += getattr(counts, name)
            setattr(counts, name, 0)

    def close(self) -> None:
        """Also where that is broken off, no thread of an engine outlives it."""
        movers = self.engine.tiers.backing.movers
        pools = [mover._landing for mover in movers] + [tier._pool for mover in movers for tier in mover.tiers]
        threads = [thread for pool in pools for thread in pool._threads]
        self._call(self.engine.close)
        self.engine.close()
        del movers, pools, self.engine
        gc.collect()
        for thread in threads:
            thread.join(HUNG_S / 4)
        if alive := [thread.name for thread in threads if thread.is_alive()]:
            self.wrong.append(f"threads of a closed engine live on: {alive}")


def serve(folder: Path, seconds: float, seed: int, which: str) -> None:
    rng = random.Random(seed)
    makers = {"random": [small_random], "smollm2": [smollm2], "both": [small_random, smollm2]}[which]
    said_s, is_over = 0.0, threading.Event()
    flat: list[int] = []

    def say(*, is_now: bool = False) -> None:
        nonlocal said_s, flat
        if not is_now and time.monotonic() - said_s < 1:
            return
        said_s = time.monotonic()
        wrong = [f"{s.model.name}: {w}" for s in servers for w in s.wrong][:5]
        said = {"turn": now.model.name, "counts": {s.model.name: s.counts for s in servers}, "wrong": wrong, "rest": flat}
        print(json.dumps(said), flush=True)
        flat = []

    servers: list[Server] = []
    servers += [Server(make(folder, rng), rng, say) for make in makers]
    now = servers[0]
    signal.signal(signal.SIGINT, lambda number, frame: now.ctrl_c(number, frame))
    signal.signal(signal.SIGUSR1, lambda number, frame: now.cancel_in_handler(number, frame))
    signal.signal(signal.SIGTERM, lambda number, frame: is_over.set())

    def cancel_now_and_then() -> None:
        mine = random.Random(seed + 1)
        while not is_over.wait(mine.uniform(0, 1.5)):
            now.cancel_one(mine)

    threading.Thread(target=cancel_now_and_then, daemon=True).start()
    say(is_now=True)
    end_s = time.monotonic() + seconds

    def seconds_left() -> float:
        left = end_s - time.monotonic()
        is_shown = all(s.counts[what] for s in servers for what in SHOWN)
        return 0.0 if is_over.is_set() or any(s.wrong for s in servers) else left if is_shown else left + LONGER_S

    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda n: 0)  # of glibc: memory that was freed is given back before it is seen
    try:
        while (left := seconds_left()) > 0:
            for now in servers:
                say(is_now=True)
                now.round(min(left, now.model.round_s) * rng.uniform(0.3, 1), is_over)
            gc.collect()
            trim(0)
            flat = list(files_and_memory(os.getpid()))
            say(is_now=True)
        for server in servers:
            server.close()
    except Exception:  # of the engine, or of this trial
        now.wrong.append(traceback.format_exc())
    is_over.set()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # as Python ends it would die of them
    say(is_now=True)


# --- the process that disturbs it -------------------------------------------------------------------------------------------


def soak(seconds: float, seed: int, which: str) -> tuple[dict[str, object], list[str]]:
    rng, wrong = random.Random(seed), []
    counts: dict[str, dict[str, int]] = {}
    flat = Flat(more_files=2, more_bytes=64 << 20)
    said_s, is_stopped, turn = time.monotonic(), False, ""

    def heard(line: str) -> None:
        nonlocal counts, turn
        said = json.loads(line)
        counts, turn = said["counts"], said["turn"]
        wrong.extend(said["wrong"])
        if said["rest"]:
            flat.see(*said["rest"], is_warm=time.monotonic() - child.begun_s > min(300, seconds / 2))

    with tempfile.TemporaryDirectory() as folder:
        child = Child("tests.soak.runner", "serve", folder, str(seconds), str(seed), which, on_line=heard)
        try:
            child.wait_begun()
            while child.status is None and not child.is_hung:
                short, middling, long = rng.uniform(0, 0.005), rng.uniform(0.05, 1), rng.uniform(1, 6)
                gap_s, before = rng.choices((short, middling, long), (2, 3, 3))[0], turn
                until_s = time.monotonic() + gap_s * PACE.get(turn, 1.0)
                while (left := until_s - time.monotonic()) > 0 and turn == before:
                    time.sleep(min(left, 0.05))
                child.send(signal.SIGUSR1 if rng.random() < 0.3 else signal.SIGINT)
                if time.monotonic() - said_s > SAID_S:
                    said_s = time.monotonic()
                    print(f"runner, {(said_s - child.begun_s) / 60:.1f} min: {counts}; {flat}", flush=True)
        except KeyboardInterrupt:
            is_stopped = True
            print("runner: stopped", flush=True)
            child.send(signal.SIGTERM)
            while child.status is None and not child.is_hung:
                time.sleep(0.1)
        finally:
            if child.status is None:
                wrong.append(f"the engine made no step for {HUNG_S:.0f} s")
            status = child.end(signal.SIGABRT)
            if status and not (is_stopped and status == -signal.SIGTERM and not child.has_begun):
                wrong.append(f"the process that serves ended with status {status}")
    rows: dict[str, object] = {"time": f"{max(0.0, time.monotonic() - child.begun_s) / 60:.1f} min"}
    for what in dict.fromkeys(what for c in counts.values() for what in c):
        rows[what] = ", ".join(f"{c.get(what, 0)} {name}" for name, c in counts.items())
    if not wrong and not is_stopped:
        wrong += [f"{name}: no {what}: the trial shows nothing" for name, c in counts.items() for what in SHOWN if not c.get(what)]
    return rows | flat.rows(), list(dict.fromkeys(wrong)) + flat.wrong()


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "serve":
        serve(Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        return
    parser = arguments(__doc__, seconds=60.0)
    parser.add_argument("--model", choices=("random", "smollm2", "both"), default="both", help="both: in turns, in one process")
    options = parser.parse_args()
    take_ctrl_c()
    rows, wrong = soak(options.seconds, options.seed, options.model)
    finish("runner", rows, wrong, options.seed)


if __name__ == "__main__":
    main()
