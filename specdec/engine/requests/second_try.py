"""A second try for requests whose logits were not finite.

A masked key weighs 0, and 0 times NaN is NaN. So the row of a rejected draft, or what the last
owner of a block has left in it, may spoil a sound request, as a backend's kernels have it. Such a
request is prefilled again, into wiped blocks, and goes on without drafts for some steps, twice as
many each time. It ends where that gives no further token. Other steps cost nothing more.
"""

import logging
from collections.abc import Sequence

from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk, Scheduler
from specdec.kv_cache import BlockPool, PagedKVCache

logger = logging.getLogger(__name__)

MAX_PLAIN = 64
"""Steps without drafts after a try at most: they are those of all requests beside it, too."""


class SecondTries:
    """Takes back the blocks of requests whose logits were not finite, and knows who decodes without
    drafts.

    Args:
        scheduler, pool, kv_cache: of the engine.
    """

    def __init__(self, scheduler: Scheduler, pool: BlockPool, kv_cache: PagedKVCache) -> None:
        self._scheduler, self._pool, self._kv_cache = scheduler, pool, kv_cache
        self._plain: dict[Request, int] = {}  # steps without drafts that are left
        self._warned = False

    def reset(self) -> None:
        """Forgets all requests."""
        self._plain.clear()

    def forget(self, request: Request) -> None:
        """Forgets one that has ended."""
        self._plain.pop(request, None)

    def send_back(self, request: Request) -> bool:
        """Lets a request begin again from the tokens that it has; False where that was tried from
        here, or cannot help.
        """
        known = len(request.output_token_ids)
        if request.tried_at == known or request.bad_input:
            return False
        if not known:  # these came from the same forward
            request.num_scored = 0
            request.prompt_logprobs.clear()
            request.prompt_top_logprobs.clear()
        request.num_tries, request.tried_at, request.error = request.num_tries + 1, known, None
        self._plain[request] = min(2**request.num_tries, MAX_PLAIN)
        blocks = list(request.block_ids)
        self.take_back(blocks, self._scheduler.send_back(request))
        if not self._warned:
            self._warned = True
            logger.warning(
                "logits of a request were NaN or infinite after %d tokens; it is computed again and"
                " goes on without drafts"
                " for a while, as all such do from now on",
                known,
            )
        return True

    def take_back(self, blocks: Sequence[int], freed: Sequence[int]) -> None:
        """Wipes those of a request's blocks that nobody holds, and offers none: a masked NaN is NaN
        to their next owner, too.
        """
        self._pool.discard(blocks)
        self._kv_cache.scrub(freed)

    def admitted(self, chunks: Sequence[Chunk]) -> None:
        """Wipes the blocks of requests that begin again, before their prefill."""
        for chunk in chunks:
            if chunk.admitted and chunk.request.num_tries:
                self._kv_cache.scrub(chunk.request.block_ids)

    def concern(self, requests: Sequence[Request]) -> bool:
        """Whether a step of these requests has no drafts."""
        return bool(self._plain) and any(request in self._plain for request in requests)

    def launched(self, requests: Sequence[Request]) -> None:
        """Counts a step without drafts."""
        for request in requests if self._plain else ():
            if request in self._plain:
                self._plain[request] -= 1
                if not self._plain[request]:
                    del self._plain[request]
