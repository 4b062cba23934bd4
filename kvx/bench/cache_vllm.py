"""The work of bench/cache.py on vLLM's KVCacheManager (as in 0.32). Imported only where vLLM is installed."""

from __future__ import annotations

from itertools import count
from time import perf_counter
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvx.bench import cache as ours

_NAMES = {"sha256": "sha256", "xxh3_128": "xxhash"}  # its own encoding of tokens and parent, then the same function


class Vllm:
    VERSION = vllm.__version__

    def __init__(self, hash_name: str) -> None:
        self._ids = count()
        self._hasher: Any = None
        if hash_name:
            function = get_hash_fn_by_name(_NAMES[hash_name])
            init_none_hash(function)
            self._hasher = get_request_block_hasher(ours.BLOCK_SIZE, function)
        spec = FullAttentionSpec(block_size=ours.BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(ours.NUM_BLOCKS, [], [KVCacheGroupSpec(["0"], spec)])
        self.manager = KVCacheManager(
            config, max_model_len=8192, scheduler_block_size=ours.BLOCK_SIZE, hash_block_size=ours.BLOCK_SIZE,
            enable_caching=bool(hash_name),
        )  # fmt: skip

    def _request(self, prompt: list[int]) -> Any:
        """Without hashes yet: what else a Request is made of is not timed."""
        return Request(str(next(self._ids)), prompt, SamplingParams(max_tokens=ours.NEW), None)

    def _prefill(self, request: Any) -> None:
        request._block_hasher = self._hasher
        request.update_block_hashes()
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
        request.num_computed_tokens = request.num_tokens

    def _decode(self, request: Any) -> None:
        for token in range(ours.NEW):
            request.append_output_token_ids(token)
            self.manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1

    def request(self, prompt: list[int]) -> float:
        request = self._request(prompt)
        start = perf_counter()
        self._prefill(request)
        self._decode(request)
        self.manager.free(request)
        return perf_counter() - start

    def decode(self, prompt: list[int]) -> float:
        request = self._request(prompt)
        self._prefill(request)
        start = perf_counter()
        self._decode(request)
        seconds = perf_counter() - start
        self.manager.free(request)
        return seconds

    def lookup(self, prompt: list[int]) -> float:
        request = self._request(prompt)
        start = perf_counter()
        request._block_hasher = self._hasher
        request.update_block_hashes()
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, 1, hit, blocks)  # holds them; ours holds in the lookup
        seconds = perf_counter() - start
        if hit != ours.LOOKUP:
            self.manager.free(request)
            self._prefill(request)
        self.manager.free(request)
        return seconds

    def lookup_hashed(self, prompt: list[int]) -> float:
        request = self._request(prompt)
        request._block_hasher = self._hasher
        request.update_block_hashes()
        start = perf_counter()
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, 1, hit, blocks)
        seconds = perf_counter() - start
        assert hit == ours.LOOKUP
        self.manager.free(request)
        return seconds
