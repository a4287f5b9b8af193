"""One way of decoding within a part of a sweep, its passes, and its row in a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evals.bench import answers
from evals.certainty import intervals
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

    def row(
        self, plain: Side, prompts: PromptSet, key: dict[str, Any], *, raw: bool
    ) -> dict[str, Any]:
        """Figures of the side beside plain decoding; acceptance is that of its first timed pass.

        Args:
            plain: the side that ratios refer to.
            prompts, raw: what the passes were asked, see `evals.runner.run_set`.
            key: what tells the part of the sweep.
        """
        first = self.passes[0].answers
        columns = answers.columns_of(first, prompts.answered(raw=raw))
        tasks = answers.by_task(self.passes, plain.passes, prompts, raw=raw)
        stats = [answer.stats for answer in first]
        pairs = enumerate(zip(plain.passes[0].answers, first, strict=True))
        differing = [index for index, (one, own) in pairs if one.token_ids != own.token_ids]
        acceptance = None
        if not self.peer:
            acceptance = pooled(stats).to_dict() | {"mean_tau": mean_tau(stats)}
            acceptance |= intervals(columns, columns["item"])
            acceptance["by_context"] = answers.by_context(first)
            acceptance["by_output"] = answers.by_output(first)
        return key | {
            "drafter": self.drafter,
            "k": self.k,
            "peer": self.peer.version if self.peer else None,
            "num_answers": len(first),
            "speed": self.speed.to_dict(),
            "ratio": self.speed.ratio(plain.speed),
            "acceptance": acceptance,
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
            "roofline": None,
            "tree_step": None,
        }
