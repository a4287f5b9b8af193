"""One sequence on the host, from its prompt to its last token."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from specdec.base.errors import SpecDecError, one_line
from specdec.grammar.progress import GrammarProgress
from specdec.grammar.thinking import ThinkingProgress
from specdec.kv_cache import Snapshot
from specdec.sampling.logprobs import Top
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingPlan

logger = logging.getLogger(__name__)


class Status(Enum):
    """Where a request stands; it moves down, and from RUNNING or PREFILLING back to WAITING when it
    is preempted.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on the host.

    Set by the caller: `request_id`, `prompt_token_ids`, `sampling`, `seed`, `max_total_len` (prompt
    and output together), `stop_ids` (tokens that end the output), `rope_len` (see
    `specdec.model.batch.ForwardInput.rope_lens`), `grammar` (of an output that
    has one, until the request ends).
    Set by the engine as results arrive: `output_token_ids`, all log-probabilities, `finish_reason`,
    `error`, `steps`. Set by the scheduler and the engine between steps: `status`, `slot`,
    `block_ids`, `num_scored`, `num_prefilled`, `snapshot`, `parts_at`, `num_cached_tokens`,
    `offers_from`, `num_deferred`, `num_read`, `unread`, `num_kv_tokens`, `num_in_flight`,
    `num_tries`, `tried_at`, `num_unread`.

    Every step goes through hundreds of these, so what it looks at are plain numbers.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    max_total_len: int
    stop_ids: frozenset[int] = frozenset()
    rope_len: int = 0
    on_tokens: Callable[[Request, list[int]], int | None] | None = None
    """Called with the tokens about to be added; returns how many to keep when a stop string ends
    among them, else None.
    """

    grammar: GrammarProgress | ThinkingProgress | None = None
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Top] = field(default_factory=list)  # one per output token
    # from the second prompt token on, as the next
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[Top] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    bad_input: bool = False  # the error is who asked's
    # five numbers per verify step, those of `num_drafted` and what follows it
    steps: list[int] = field(default_factory=list)
    # drafts of trees that were kept, by their rank
    num_by_rank: Counter[int] = field(default_factory=Counter)

    status: Status = Status.WAITING
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    # prompt rows whose log-probabilities are launched; these need not be computed again
    num_scored: int = 0
    num_prefilled: int = 0  # tokens whose KV the prefill has written or found in the cache
    snapshot: Snapshot | None = None  # recurrent states that its prefill goes on from
    # tokens that it has in common with what was computed before, though no states were kept there
    parts_at: int = 0
    # of those, the tokens found in the cache when it was first admitted
    num_cached_tokens: int | None = None
    num_deferred: int = 0  # last steps whose context the drafter has put off
    num_read: int = 0  # tokens whose context the drafter has cached, at least
    unread: bool = False  # it lacks more than what it has put off
    # L from which on a block may be full that is not yet offered to other requests
    offers_from: int = 0
    num_kv_tokens: int = 0  # L, as far as results have been read
    num_in_flight: int = 0  # tokens that launched steps whose results are unread add at most
    # after logits that were not finite, see `specdec.engine.requests.second_try`
    num_tries: int = 0
    tried_at: int = -1  # output tokens that were known at the last of them
    # launches whose result is unread, each of at least one token: the prefill's last one, and steps
    num_unread: int = 0
    max_output_tokens: int = field(init=False)
    plan: SamplingPlan = field(init=False)  # what its sampling needs

    def __post_init__(self) -> None:
        self.max_output_tokens = self.max_total_len - len(self.prompt_token_ids)
        self.plan = SamplingPlan.of([self.sampling])

    def fail(self, error: BaseException) -> None:
        """Notes what was raised for it, and whose fault that is; the engine ends it, and no other,
        at the next results.
        """
        self.bad_input = isinstance(error, SpecDecError)
        self.error = (
            one_line(error, 1000)
            if self.bad_input
            else f"the request failed in the engine: {one_line(error)}"
        )
        if not self.bad_input:
            logger.error("request %d failed", self.request_id, exc_info=error)

    @property
    def num_drafted(self) -> list[int]:
        """Per verify step the positions for which drafts were offered."""
        return self.steps[0::5]

    @property
    def num_accepted(self) -> list[int]:
        """Per verify step the drafts kept, after stop conditions."""
        return self.steps[1::5]

    @property
    def num_emitted(self) -> list[int]:
        """Per verify step the tokens output."""
        return self.steps[2::5]

    @property
    def tree_sizes(self) -> list[int]:
        """Per verify step the drafts of its tree, 0 for a chain."""
        return self.steps[3::5]

    @property
    def parts(self) -> list[int]:
        """Per verify step which part of a composition drafted."""
        return self.steps[4::5]

    @property
    def num_to_score(self) -> int:
        """Prompt rows whose log-probabilities are yet to be launched; the last row chooses the
        first output token.
        """
        if self.sampling.prompt_logprobs is None:
            return 0
        return len(self.prompt_token_ids) - 1 - self.num_scored

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def may_start(self) -> bool:
        """Whether its grammar, if it has one, is compiled."""
        return self.grammar is None or self.grammar.ready

    @property
    def num_tokens(self) -> int:
        """How many these are."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def kv_tokens_bound(self) -> int:
        """Upper bound of L on the device, which may be ahead of what the host has read."""
        return self.num_kv_tokens + self.num_in_flight

    @property
    def first_token_unread(self) -> bool:
        """Whether the prefill has chosen the first anchor, and its result is unread."""
        return self.num_unread > 0 and not self.output_token_ids

    @property
    def num_left(self) -> int:
        """Output tokens still allowed after the anchor, as far as results have been read."""
        return self.max_output_tokens - len(self.output_token_ids) - self.first_token_unread
