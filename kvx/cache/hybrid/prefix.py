"""HybridPrefix: requests that begin as earlier ones did share their blocks, and go on from a checkpoint of the rest.

Blocks of entries are found by content, as any cache's. A window is not in blocks: what stood in a request's ring is gone when the
ring has moved on, and another request's must never be read. So where a block ends a checkpoint may be kept: the window, and the
overlap.

    policy "full"       a checkpoint wherever a block ends
    policy p            every p tokens
    policy "zero"       none

A request goes on from the last checkpoint before the end of what it shares. Without one it computes tokens again: from as far back
as windows reach through all layers ("exact"), or one window ("bounded", an approximation). Either way tokens computed again do not
write entries that are there. What comes after a bounded replay is near and not the same, so nobody else is given it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvx.cache.guard import whole
from kvx.cache.hybrid.cache import HybridCache, Request
from kvx.cache.hybrid.state import RequestState, put_slot, take_state
from kvx.cache.prefix import Extras, PrefixCache, check_extra, checked_extras
from kvx.errors import BadArgument


class Resumed(NamedTuple):
    request: Request
    start: int  # tokens from here on are to be computed
    shared: int  # entries of tokens before this are there, and are not written
    is_exact: bool  # windows at `shared` will be as if all tokens had been computed


class HybridPrefix:
    def __init__(
        self,
        cache: HybridCache,
        *,
        policy: str | int = "full",
        replay: str = "exact",
        salt: bytes = b"",
        max_checkpoints: int = 256,
    ) -> None:
        block = cache.schema.block_tokens
        if replay not in ("exact", "bounded"):
            raise BadArgument(f'HybridPrefix: replay is {replay!r}; it is "exact" or "bounded".')
        if policy not in ("full", "zero") and (not isinstance(policy, int) or policy < 1 or policy % block):
            raise BadArgument(f'HybridPrefix: policy is {policy!r}; it is "full", "zero", or a multiple of {block} tokens.')
        if not any(layer.has_entries for layer in cache.schema.layers):
            raise BadArgument("HybridPrefix: no layer of the schema has entries; there are no blocks to share.")
        self.cache, self.policy, self.replay = cache, policy, replay
        self.names = PrefixCache([cache.allocator], block, salt=salt)
        self.checkpoints: OrderedDict[bytes, RequestState] = OrderedDict()  # by the name of the block before; oldest use first
        self._max_checkpoints = max_checkpoints
        self._guard = cache._guard

    def admit(self, tokens: Sequence[int], *, extra: bytes = b"", extras: Extras = ()) -> Resumed:
        """A request that begins with these tokens. At least the last of them is left to compute.

        `extra` is what the content hangs on besides the tokens, such as a LoRA's id; `extras` what does from a token on, as
        (position, bytes): the hash of an image whose placeholders begin there.
        """
        check_extra("admit", extra)
        begun, root = checked_extras("admit", extras, len(tokens)), self.names.root(extra)
        hashes = self.names.chain(_as_hashed(tokens[:-1]), root, begun)
        request, guard = None, self.cache._guard
        try:
            with guard.lock:
                if guard.is_torn:
                    guard.mend()
                request = self.cache.admit_request()
                request.root, request.extras = root, begun
                resumed = self._resume(request, hashes)
            return resumed
        except BaseException:  # nobody has the request
            if request is not None:
                guard.is_torn = request.is_released = True
                self.cache._mend_now()
            raise

    def _resume(self, request: Request, hashes: list[bytes]) -> Resumed:
        block, schema = self.cache.schema.block_tokens, self.cache.schema
        count, held = self.names.match_checked(hashes, (0,))
        if not count:
            return Resumed(request, 0, 0, True)
        self.cache.share_blocks(request, held[0], count * block)
        request.names = hashes[:count]
        at = next((n for n in range(count, 0, -1) if hashes[n - 1] in self.checkpoints), 0)
        if at:
            self.checkpoints.move_to_end(hashes[at - 1])
            put_slot(self.cache, request, self.checkpoints[hashes[at - 1]])
            request.length = at * block
        else:
            # Tokens near the start lack what they should have seen of their window, and the next layer gets that from them.
            reach = schema.reach if self.replay == "exact" else max(layer.window for layer in schema.layers)
            request.length = max(0, count * block - reach)
        request.draft_start = request.length
        request.is_exact = at > 0 or self.replay == "exact" or request.length == 0
        return Resumed(request, request.length, count * block, request.is_exact)

    @whole
    def commit(self, request: Request, tokens: Sequence[int], *, extras: Extras = ()) -> None:
        """The request's tokens so far are computed: name its full blocks, and keep a checkpoint if one is due here.

        `extras` are of tokens that came since, as admit() takes them: what begins there and is not in their ids.
        """
        self.cache.check_live("commit", request)
        block, hashes = self.cache.schema.block_tokens, request.names
        named, full = len(hashes), request.length // block
        if len(tokens) < full * block:
            raise BadArgument(
                f"commit(): {len(tokens)} tokens are given; {request} has {full} full blocks of {block}. Nothing changed."
            )
        if new := [entry for entry in extras if entry not in request.extras]:  # a block that has its name was named without them
            request.extras = sorted([*request.extras, *checked_extras("commit", new, len(tokens), first=named * block)])
        if not request.is_exact:
            return
        if full > named:
            parent = hashes[-1] if hashes else request.root or self.names.root()
            hashes = hashes + self.names.chain(
                _as_hashed(tokens[named * block : full * block]), parent, request.extras, named * block
            )
            self.names.put_checked(0, hashes[named:], self.cache.block_ids(request)[named:full].copy())
            request.names = hashes
        if not full or request.length < request.num_shared:  # while tokens are computed again, windows are not whole
            return
        every = block if self.policy == "full" else self.policy
        if isinstance(every, int) and request.length % every == 0 and request.length == full * block:
            self.checkpoints[hashes[full - 1]] = take_state(self.cache, request, entries=False)
            self.checkpoints.move_to_end(hashes[full - 1])
            if len(self.checkpoints) > self._max_checkpoints:
                self.checkpoints.popitem(last=False)


def _as_hashed(tokens: Sequence[int]) -> bytes:
    return np.ascontiguousarray(tokens, "<i4").tobytes()
