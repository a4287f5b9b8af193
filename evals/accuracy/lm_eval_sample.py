"""One generated answer of an evaluation: what it is known by, and how the journal keeps it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from evals.system import Timed
from specdec.base.journal import made
from specdec.base.metrics import AcceptanceStats, pooled
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated answer.

    Attributes:
        task, doc_id: whose it is.
        prompt_token_ids, token_ids, text: as in `GenerationResult`.
        greedy: whether it was decoded greedily.
        seconds: time since the sample before it was finished; their sum is the time of decoding.
        stats: verify steps.
    """

    task: str
    doc_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    greedy: bool
    seconds: float
    stats: AcceptanceStats


def key_of(request: Instance, sampling: SamplingParams) -> str:
    """What a sample's answer depends on, beside the model."""
    parts = [request.task_name, request.doc_id, request.args[0], repr(sampling)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def record_of(answer: Timed) -> dict[str, Any]:
    """What the journal keeps of an answer."""
    result = answer.result
    named = {name: getattr(result, name) for name in ("prompt_token_ids", "token_ids", "text")}
    return named | {"seconds": answer.seconds} | asdict(result.stats)


def sample_of(request: Instance, sampling: SamplingParams, record: Mapping[str, Any]) -> Sample:
    """The sample whose answer left this record.

    Raises:
        LookupError, TypeError, ValueError: see `specdec.base.journal.made`.
    """
    own = {name: record[name] for name in ("prompt_token_ids", "token_ids", "text", "seconds")}
    # Journals of before trees lack some.
    stats = {one.name: record[one.name] for one in fields(AcceptanceStats) if one.name in record}
    greedy = sampling.temperature == 0
    asked = {"task": request.task_name or "", "doc_id": request.doc_id or 0, "greedy": greedy}
    return made(Sample, asked | own | {"stats": stats})


def note(samples: Iterable[Sample]) -> str:
    """What a progress bar says of them."""
    every = list(samples)
    seconds = sum(sample.seconds for sample in every)
    tokens = sum(len(sample.token_ids) for sample in every)
    return (
        f"tau {pooled(sample.stats for sample in every).tau:.2f} "
        f" {tokens / seconds if seconds else 0:.1f} tokens/s"
    )
