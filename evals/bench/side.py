"""One way of decoding within a part of a sweep, its passes, and its row in a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evals.bench import answers
from evals.certainty import intervals
from evals.divergence import first_divergence
from evals.peers.peer import Peer
from evals.prompt_sets import PromptSet
from evals.runner import Pass
from evals.speed import Speed
from specdec.base.metrics import mean_tau, pooled


@dataclass(slots=True, kw_only=True)
class Side:
    """A drafter, plain decoding, or a peer.

    Attributes:
        drafter: its name.
        k: drafts of its steps.
        peer: the system that decodes in place of ours.
        passes: the timed ones.
        hits: the pass behind prefix-cache hits, where it was asked for.
        time_split: see `evals.speed.time_split`.
        choice: what shapes of steps were chosen by, see `BlockChoice.estimates`.
    """

    drafter: str
    k: int | str = 0
    peer: Peer | None = None
    passes: list[Pass] = field(default_factory=list)
    hits: Pass | None = None
    time_split: dict[str, float] | None = None
    choice: list[dict[str, Any]] | None = None

    @property
    def speed(self) -> Speed:
        """Speed of its passes."""
        return Speed([one.num_tokens for one in self.passes], [one.seconds for one in self.passes])

    def row(self, plain: Side, prompts: PromptSet, *, raw: bool) -> dict[str, Any]:
        """Figures of the side beside plain decoding; acceptance is that of its first timed pass.

        Args:
            plain: the side that ratios refer to.
            prompts, raw: what the passes were asked, see `evals.runner.run_set`.
        """
        first = self.passes[0].answers
        columns = answers.columns_of(first, prompts.answered(raw=raw))
        tasks = answers.by_task(self.passes, plain.passes, prompts, raw=raw)
        stats = [answer.stats for answer in first]
        differing = [
            index
            for index, (one, other) in enumerate(zip(plain.passes[0].answers, first, strict=True))
            if first_divergence(one.token_ids, other.token_ids) is not None
        ]
        return {
            "drafter": self.drafter,
            "k": self.k,
            "peer": self.peer.version if self.peer else None,
            "num_answers": len(first),
            "speed": self.speed.to_dict(),
            "ratio": self.speed.ratio(plain.speed),
            "acceptance": None
            if self.peer
            else pooled(stats).to_dict()
            | {"mean_tau": mean_tau(stats)}
            | intervals(columns, columns["item"])
            | {"by_context": answers.by_context(first), "by_output": answers.by_output(first)},
            "peer_tau": self.peer.tau if self.peer else None,
            "tau_per_answer": [] if self.peer else [one.tau for one in stats],
            "answers": columns,
            "tasks": tasks,
            "task_mean": answers.task_mean(tasks, columns, prompts),
            "latency": answers.latency(self.passes),
            "differing_answers": differing,
            "time_split": self.time_split,
            "choice": self.choice,
            "behind_hits": self.hits and answers.behind_hits(self.hits.answers, first),
        }
