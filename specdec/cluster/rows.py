"""What travels between the driver and the engines, as JSON text: lists of any length, and no types
of a table format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdec.base.errors import SpecDecError
from specdec.sampling.params import SamplingDefaults, SamplingParams
from specdec.session.outputs import GenerationResult


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation to be answered.

    Attributes:
        key: names it in a journal; no two rows of a run share one.
        prompt: text, token ids or chat messages.
        sampling: how to decode every turn.
        follow_ups: what the user says next, each behind an answer; only after chat messages.
        said: names of `sampling` that no default of the checkpoint changes, as in a server; None
            where none changes anything.
    """

    key: str
    prompt: str | Sequence[int] | Sequence[dict[str, str]]
    sampling: SamplingParams
    follow_ups: tuple[str, ...] = ()
    said: tuple[str, ...] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Row:
        given = json.loads(text)
        return cls(
            given["key"],
            given["prompt"],
            SamplingParams.from_plain(given["sampling"]),
            tuple(given["follow_ups"]),
            None if given["said"] is None else tuple(given["said"]),
        )

    def completed(self, defaults: SamplingDefaults, most: int) -> SamplingParams:
        """The row's sampling with what the checkpoint says, where that counts.

        Args:
            defaults: of the checkpoint.
            most: tokens of prompt and output together.

        >>> row = Row("k", [5, 6], SamplingParams(top_p=0.5), said=("top_p", "max_tokens"))
        >>> made = row.completed(SamplingDefaults(sampled=(("top_p", 0.9), ("top_k", 7))), 512)
        >>> made.top_p, made.top_k
        (0.5, 7)
        """
        if self.said is None:
            return self.sampling
        values: dict[str, Any] = {
            name: value for name, value in defaults.sampled if name not in self.said
        }
        if not self.sampling.ignore_eos:
            values["stop_token_ids"] = (*self.sampling.stop_token_ids, *defaults.served_ends)
        if "max_tokens" not in self.said:
            values["max_tokens"] = max(1, most - len(self.prompt))
        return replace(self.sampling, **values)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a row.

    Attributes:
        key: of the row.
        results: one per turn; the last one has an `error` where the row could not be served.
        seconds: for which its engine was busy since the answer before it, or since it was idle; the
            sum over all answers is the time of all engines together.
        origin: settings of its engine, see `specdec.cluster.origin`; the same for all of a run.
        node: address of the machine.
    """

    key: str
    results: list[GenerationResult]
    seconds: float
    origin: dict[str, Any]
    node: str

    @property
    def error(self) -> str | None:
        """Why the row could not be served, in one line."""
        return self.results[-1].error

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """The answer of a line.

        Raises:
            SpecDecError: the line is `refusal_to_json`'s.
        """
        given = json.loads(text)
        if "refusal" in given:
            raise SpecDecError(given["refusal"])
        results = [GenerationResult.from_dict(one) for one in given["results"]]
        return cls(**{**given, "results": results})

    @property
    def record(self) -> dict[str, Any]:
        """What a journal keeps of it."""
        return {"results": [asdict(result) for result in self.results], "seconds": self.seconds}


def refusal_to_json(error: SpecDecError) -> str:
    """The line of an engine that cannot be made."""
    return json.dumps({"refusal": str(error)})
