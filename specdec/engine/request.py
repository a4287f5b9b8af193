"""One sequence on the host, from its prompt to its last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from specdec.grammar.progress import GrammarProgress
from specdec.kv_cache import Snapshot
from specdec.sampling.logprobs import Top
from specdec.sampling_params import SamplingParams


class Status(Enum):
    """Where a request stands; it moves down, and from RUNNING or PREFILLING back to WAITING when it is preempted."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on the host.

    Set by the caller: `request_id`, `prompt_token_ids`, `sampling`, `seed`, `max_total_len` (prompt and output together), `long`
    (see `specdec.batch.ForwardInput.long`), `grammar` (of an output that has one, until the request ends).
    Set by the engine as results arrive: `output_token_ids`, all log-probabilities, `finish_reason`, `error`, the step counts.
    Set by the scheduler and the engine between steps: `status`, `slot`, `block_ids`, `num_scored`, `num_prefilled`, `snapshot`,
    `num_cached_tokens`, `num_deferred`, `num_kv_tokens`, `in_flight`, `first_token_unread`.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    max_total_len: int
    long: bool = False
    on_tokens: Callable[[Request, list[int]], int | None] | None = None
    """Called with the tokens about to be added; returns how many to keep when a stop string ends among them, else None."""

    grammar: GrammarProgress | None = None
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Top] = field(default_factory=list)  # one per output token
    prompt_logprobs: list[float] = field(default_factory=list)  # from the second prompt token on, as the next
    prompt_top_logprobs: list[Top] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_drafted: list[int] = field(default_factory=list)  # per verify step: positions for which drafts were offered
    num_accepted: list[int] = field(default_factory=list)  # per verify step: drafts kept, after stop conditions
    num_emitted: list[int] = field(default_factory=list)  # per verify step: tokens output
    tree_sizes: list[int] = field(default_factory=list)  # per verify step: drafts of its tree, 0 for a chain
    parts: list[int] = field(default_factory=list)  # per verify step: which part of a composition drafted
    num_by_rank: Counter[int] = field(default_factory=Counter)  # drafts of trees that were kept, by their rank

    status: Status = Status.WAITING
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_scored: int = 0  # prompt rows whose log-probabilities are launched; these need not be computed again
    num_prefilled: int = 0  # tokens whose KV the prefill has written or found in the cache
    snapshot: Snapshot | None = None  # recurrent states that its prefill goes on from
    num_cached_tokens: int | None = None  # of those, the tokens found in the cache when it was first admitted
    num_deferred: int = 0  # last steps whose context the drafter has put off
    num_kv_tokens: int = 0  # L, as far as results have been read
    in_flight: list[int] = field(default_factory=list)  # most drafts that each launched step whose result is unread can keep
    first_token_unread: bool = False  # the prefill has sampled the first anchor, and its result is unread

    @property
    def num_to_score(self) -> int:
        """Prompt rows whose log-probabilities are yet to be launched; the last row chooses the first output token."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt_token_ids) - 1 - self.num_scored

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
        return self.num_kv_tokens + sum(self.in_flight) + len(self.in_flight)

    @property
    def num_left(self) -> int:
        """Output tokens still allowed after the anchor, as far as results have been read."""
        return self.max_total_len - len(self.prompt_token_ids) - len(self.output_token_ids) - self.first_token_unread
