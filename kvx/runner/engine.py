"""Engine: prompts in, texts out, many at once, on one cache.

engine = Engine.load("model.gguf", kv_format="int8")
for piece in engine.stream(["Why is the sky blue?"], Params(max_tokens=32)):
    print(piece.text, end="")
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from kvx.cache.guard import Guard, whole
from kvx.cache.paged import PagedCache
from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument, a_type
from kvx.runner.decoder import Decoder
from kvx.runner.device import check_device, check_fits
from kvx.runner.gemm import gemm_dtype
from kvx.runner.graph import DecodeGraphs
from kvx.runner.identity import identity
from kvx.runner.model import DTYPES, Model, kv_format_of, layer_groups
from kvx.runner.open import open_model
from kvx.runner.request import Completion, Params, Piece
from kvx.runner.sample import sample
from kvx.runner.schedule import Scheduler, Work
from kvx.runner.tiers import EngineTiers
from kvx.runner.tokens import TextStream, Tokenizer
from kvx.runner.weights import Progress, load_weights
from kvx.spec.cache_spec import CacheSpec
from kvx.tiers import TierOption

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: tuple[int, ...]
    finish: str  # stop: end of text or a stop string; length: max_tokens or the context; cancelled
    num_cached: int  # prompt tokens that were in the cache already


class Engine:
    """Where it has tiers, use it in a `with`, or close() it: that keeps what the next process finds again.

    Its calls may come from several threads: one is served after the other. Ctrl-C in a step drops all requests, and the next call
    works.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        max_batch_tokens: int = 0,
        use_graphs: bool = True,  # where there is a GPU, and the model can be captured: kvx.runner's own
        tiers: EngineTiers | None = None,  # of the model's cache; closed with the engine
    ) -> None:
        if not isinstance(getattr(model, "cache", None), PagedCache):
            raise BadArgument(
                f"Engine(): model is {a_type(model)} without a PagedCache; it must be a Decoder, which runs over one. A "
                "transformers model becomes one by kvx.adapters.transformers.PagedModel(model, cache); Engine.load(path) makes one."
            )
        self.model, self.cache, self.tokenizer, self.tiers = model, model.cache, tokenizer, tiers
        self.scheduler = Scheduler(self.cache, max_batch_tokens or self.cache.max_tokens, names_early=model.is_one_pass)
        has_graphs = use_graphs and DecodeGraphs.work_on(self.cache.device)
        self._graphs = DecodeGraphs(model) if has_graphs and isinstance(model, Model) else None
        eos = () if tokenizer is None or tokenizer.eos_id is None else (tokenizer.eos_id,)
        self.eos_ids = frozenset((*model.config.eos_ids, *eos))
        # A sequence that has the cache to itself must fit. A state takes one block, whatever its length.
        kv = [a.num_blocks for a, kind in zip(self.cache.allocators, self.cache.kinds, strict=True) if not kind.has_state]
        self.max_seq_len = min(self.cache.max_seq_len, model.config.max_seq_len, *(n * self.cache.block_size for n in kv))
        self.num_generated = 0
        self.busy_s = 0.0  # in steps
        self._texts: dict[tuple[int, int], TextStream] = {}
        self._next_request = 0
        self._cancelled: set[int] = set()  # requests that are still to be dropped
        self._is_stepping = self._is_step_broken = False
        self._guard = Guard()
        self._guard.mended_by(self._mend)

    @staticmethod
    def load(
        path: str | Path,  # a folder with config.json and *.safetensors, or a .gguf file
        *,
        dtype: str = "f32",  # f32, bf16 or f16
        kv_format: str = "auto",  # auto: the model's type; f32, bf16, f16, int8, fp8, or another that needs no calibration
        device: str = "cpu",
        num_blocks: int = 512,
        block_size: int = 16,
        max_seqs: int = 32,
        max_seq_len: int = 0,  # 0: the model's, or what the blocks hold if that is less
        max_batch_tokens: int = 512,  # of a step: longer prompts are computed in parts
        prefix: bool = True,
        use_graphs: bool = True,
        tiers: Sequence[str | TierOption] = (),  # TierOption.parse: host:2GB, disk:DIR, ...; fastest first: where evicted blocks go
        tier_format: str = "auto",  # of blocks there; auto: the cache's, so that what comes back is what went
        tier_model: str = "",  # these weights' name in the tiers, shared with other engines; "": made of the weight files
        progress: Progress = lambda done, total: None,
    ) -> Engine:
        if not isinstance(path, str | Path):
            raise BadArgument(
                f"Engine.load(): path is {path!r}; it must be a folder with config.json and *.safetensors, or a .gguf file."
            )
        if dtype not in DTYPES:
            raise BadArgument(f'Engine.load(): dtype is "{dtype}"; it must be {", ".join(DTYPES)}.')
        for name, value in (("num_blocks", num_blocks), ("max_seqs", max_seqs), ("max_batch_tokens", max_batch_tokens)):
            if not isinstance(value, int) or value < 1:
                raise BadArgument(f"Engine.load(): {name} is {value!r}; it must be 1 or more.")
        check_device(device)
        options = [t if isinstance(t, TierOption) else TierOption.parse(t) for t in tiers]
        if options and not prefix:
            raise BadArgument("Engine.load(): tiers find blocks by their names, which prefix=False leaves out.")
        kind, kv = DTYPES[dtype], kv_format_of(kv_format, dtype)
        tier_kv = kv if tier_format == "auto" else kv_format_of(tier_format, dtype)
        source = open_model(Path(path))
        if max_seq_len > source.config.max_seq_len:
            raise BadArgument(
                f"Engine.load(): max_seq_len is {max_seq_len}; the model's own context is {source.config.max_seq_len} tokens."
            )
        tokenizer = source.tokenizer()
        name = (tier_model or identity(source.path, source.config, dtype)) if options else ""
        if options and kv != dtype:  # computed over rounded K and V: not what engines with the model's own type have
            name += f"-{kv}"
        groups = layer_groups(source.config, num_blocks=num_blocks, block_size=block_size, kv_format=kv)
        check_fits(groups, device)
        cache = PagedCache(
            groups,
            max_seqs=max_seqs,
            max_seq_len=max_seq_len or min(source.config.max_seq_len, num_blocks * block_size),
            max_tokens=max(max_batch_tokens, max_seqs),
            device=device,
            prefix=prefix,
            salt=name.encode(),
        )
        with ExitStack() as stack:
            opened = EngineTiers(cache, options, format=tier_kv, model=name) if options else None
            if opened is not None:
                stack.callback(opened.close)
            # Last, because it takes longest: what is wrong is said before.
            weights = load_weights(
                source.tensors, source.config, dtype=kind, gemm_dtype=gemm_dtype(kind, device), device=device, progress=progress
            )
            model = Model(source.config, weights, cache, kind)
            engine = Engine(model, tokenizer, max_batch_tokens=max_batch_tokens, use_graphs=use_graphs, tiers=opened)
            stack.pop_all()
        return engine

    # --- requests ---------------------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: Params | None = None) -> int:
        """A request's number. Nothing is computed yet."""
        return self.add_completions(prompt, params or Params())[0].request

    @property
    def guard(self) -> Guard:
        """Of the engine: whoever adds to it from outside holds its lock."""
        return self._guard

    def add_completions(self, prompt: Prompt, params: Params, *, mine: set[int] | None = None) -> list[Completion]:
        """Its answers, which steps fill. `mine` gets the request's number first, so that the caller can cancel it after Ctrl-C."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise BadArgument("add(): the model has no tokenizer; give the prompt as token ids.")
            prompt = self.tokenizer.encode(prompt)
        elif params.stop and self.tokenizer is None:
            raise BadArgument("add(): stop strings need a tokenizer, and the model has none.")
        ids: list[int] = token_ids("add()", prompt, least=1).tolist()
        if len(ids) >= self.max_seq_len:
            more = "" if self.max_seq_len >= self.model.config.max_seq_len else ", or give the cache more blocks"
            raise BadArgument(
                f"add(): the prompt has {len(ids)} tokens, and an answer needs one more; the context is {self.max_seq_len} "
                f"({self.cache.allocators[0].num_blocks} blocks of {self.cache.block_size}; the model's own is "
                f"{self.model.config.max_seq_len}). Shorten it{more}."
            )
        if max(ids) >= self.model.config.vocab_size:
            raise BadArgument(
                f"add(): token ids are {min(ids)} to {max(ids)}; the model has 0 to {self.model.config.vocab_size - 1}."
            )
        if max(params.snapshot_at, default=0) > len(ids):
            raise BadArgument(
                f"add(): snapshot_at is {params.snapshot_at}, and the prompt has {len(ids)} tokens; it names some of them."
            )
        limit = min(self.max_seq_len, len(ids) + params.max_tokens)
        guard, number = self._guard, -1
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                number, self._next_request = self._next_request, self._next_request + 1
                if mine is not None:
                    mine.add(number)
                answers = [Completion(number, i, list(ids), len(ids), params, limit) for i in range(params.n)]
                answers[0].siblings = answers[1:]
                if self.tokenizer is not None:
                    self._texts |= {(number, c.index): TextStream(self.tokenizer) for c in answers}
                self.scheduler.waiting.append(answers[0])
            return answers
        except BaseException:  # nobody has its number
            self._cancelled |= {number}
            guard.is_torn = True
            self._mend_now()
            raise

    def cancel(self, request: int) -> bool:
        """End a request wherever it is: its blocks are given back, and others go on. False: it was answered already.

        Its answers have finish "cancelled". From another thread it waits for the step that is being computed; in a signal's handler
        it is noted, and the call that the signal came into, or the next step, does it.
        """
        if not isinstance(request, int) or not 0 <= request < self._next_request:
            raise BadArgument(f"cancel(): request is {request!r}; add() has given numbers up to {self._next_request - 1}.")
        if self._guard.is_mine():  # in the middle of a call on this thread, which may be putting things right
            return self._note_cancelled(request)
        return self._cancel(request)

    @whole
    def _cancel(self, request: int) -> bool:
        is_there = self._note_cancelled(request)
        self._drop_cancelled()
        return is_there

    def _note_cancelled(self, request: int) -> bool:
        self._cancelled.add(request)
        return any(c.request == request for c in (*self.scheduler.running, *self.scheduler.waiting))

    def _drop_cancelled(self) -> None:
        gone = set(self._cancelled)
        self.scheduler.drop(lambda c: c.request in gone)
        for key in [k for k in self._texts if k[0] in gone]:
            self._texts.pop(key, None)
        self._cancelled -= gone  # another thread may have added more

    def _mend_now(self) -> None:
        with self._guard.lock:
            if not self._is_stepping:
                self._guard.mend()

    def _mend(self) -> None:
        """After a call that was broken off: all is dropped if it was a step, else what was cancelled."""
        if self._is_step_broken:
            self.scheduler.reset()
            self._texts.clear()
        self.scheduler.drop(lambda c: bool(c.finish))
        self.scheduler.drop_begun()
        self._drop_cancelled()
        self._is_step_broken = False

    def stream(self, prompts: Sequence[Prompt], params: Params | None = None) -> Iterator[Piece]:
        """Pieces of all answers as they come. Leaving the loop early cancels these prompts' requests."""
        mine: set[int] = set()
        try:
            for prompt in prompts:
                self.add_completions(prompt, params or Params(), mine=mine)
            while not self.scheduler.is_idle:
                yield from self.step()
        finally:
            self._cancelled |= mine  # first: Ctrl-C may come as soon as something is called, and then the next call drops them
            self._guard.is_torn = True
            self._mend_now()

    def generate(self, prompts: Sequence[Prompt], params: Params | None = None) -> list[list[Answer]]:
        """For each prompt its n answers."""
        requests: list[list[Completion]] = []
        mine: set[int] = set()
        try:
            for prompt in prompts:
                requests.append(self.add_completions(prompt, params or Params(), mine=mine))
            while not all(c.finish for group in requests for c in group):
                self.step()
        except BaseException:
            self._cancelled |= mine
            self._guard.is_torn = True
            self._mend_now()
            raise
        return [[Answer(c.text, tuple(c.generated), c.finish, max(0, c.num_cached)) for c in group] for group in requests]

    # --- one step ---------------------------------------------------------------------------------------------------------

    def step(self) -> list[Piece]:
        """Compute what fits into one step; nothing where no request is left."""
        guard, is_inside = self._guard, False
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                is_inside = self._is_stepping = True
                if self._cancelled:
                    self._drop_cancelled()
                pieces = [] if self.scheduler.is_idle else self._step()
                self._is_stepping = False
                if self._cancelled:
                    self._drop_cancelled()
            return pieces
        except BaseException:  # Ctrl-C too: what this step named in the prefix cache may not have been written
            if is_inside:
                guard.is_torn = self._is_step_broken = True
                self._is_stepping = False
                self._mend_now()
            raise

    def _step(self) -> list[Piece]:
        begin = time.perf_counter()
        work = self.scheduler.step()
        logits = self._forward(work)
        self.scheduler.commit(work)
        rows, answers = [], []
        for row, w in enumerate(work):
            if w.is_last:
                branches = self.scheduler.branch(w.completion)
                rows += [row] * len(branches)
                answers += branches
        pieces = []
        if answers:
            picked = logits if rows == list(range(len(work))) else logits[torch.tensor(rows, device=logits.device)]
            tokens = sample(picked, [c.draw() for c in answers]).tolist()
            pieces = [self._accept(c, t) for c, t in zip(answers, tokens, strict=True)]
        self.busy_s += time.perf_counter() - begin
        return pieces

    def _forward(self, work: list[Work]) -> torch.Tensor:
        step = [(w.completion.seq, w.num_tokens) for w in work if w.completion.seq is not None]
        if self._graphs is not None and all(n == 1 for _, n in step):
            return self._graphs.forward(step)
        return self.model.forward(self.cache.plan(step))

    def _accept(self, c: Completion, token: int) -> Piece:
        c.tokens.append(token)
        self.num_generated += 1
        is_eos = token in self.eos_ids and not c.params.ignore_eos
        if is_eos:
            c.finish = "stop"
        elif len(c.tokens) >= c.limit:
            c.finish = "length"
        text, stream = "", self._texts.get((c.request, c.index))
        if stream is not None:
            text = "" if is_eos else stream.push(token)
            if c.finish:
                text += stream.finish()
            text = c.push(text, is_last=bool(c.finish))
        if c.finish:
            self._texts.pop((c.request, c.index), None)
            self.scheduler.finish(c)
        return Piece(c.request, c.index, token, text, c.finish)

    def reset(self) -> None:
        """Cancel all requests, and forget what the cache holds of them."""
        with self._guard.lock:
            self._guard.is_torn = self._is_step_broken = True
            self._guard.mend()

    def close(self) -> None:
        """Keep in lasting tiers what they do not have yet, and close all tiers. The engine goes on without them."""
        with self._guard.lock:
            if self.tiers is not None:
                self.tiers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- what it did ------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts so far, and the bytes that K and V of a token and states of a sequence take."""
        counts, groups = self.scheduler.counts, self.cache.groups
        kv = [(g.spec, len(g.layers)) for g in groups if isinstance(g.spec, CacheSpec)]
        plain = sum(s.num_kv_heads * sum(p.head_dim for p in s.kv) * n for s, n in kv) * self.model.dtype.itemsize
        return {
            **asdict(counts),
            "generated_tokens": self.num_generated,
            "busy_s": self.busy_s,
            "kv_format": kv[0][0].format if kv else "",
            "kv_bytes_per_token": sum(s.token_bytes * n for s, n in kv),
            "state_bytes_per_sequence": sum(g.num_bytes // g.spec.num_blocks for g in groups if g.blocks_of.has_state),
            "unquantised_bytes_per_token": plain,
            "num_blocks": self.cache.allocators[0].num_blocks,
            "block_size": self.cache.block_size,
            "max_seq_len": self.max_seq_len,
            "graph_replays": 0 if self._graphs is None else self._graphs.replays,
            "tiers": None if self.tiers is None else self.tiers.stats(),
        }
