"""What the answers of a side's passes say: tau with its interval, in all and by task, by the length
of the context and of the answer, and the latency of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evals.certainty import interval, intervals, mean_of_tasks
from evals.prompt_sets import PromptSet
from evals.runner import Answer, Pass
from evals.speed import Speed
from specdec.base.metrics import AcceptanceStats, mean_tau, pooled

CONTEXT = 128
OUTPUT = 32
"""Tokens of the shortest contexts and answers that `by_length` puts together."""


def columns_of(answers: Sequence[Answer], items: Sequence[int]) -> dict[str, list[int]]:
    """A pass as a report has it, one entry for each answer."""
    return {
        "item": list(items),
        "num_tokens": [len(answer.token_ids) for answer in answers],
        "num_emitted": [sum(answer.stats.num_emitted) for answer in answers],
        "num_verified": [sum(answer.stats.num_verified) for answer in answers],
        "num_steps": [answer.stats.num_steps for answer in answers],
    }


def by_task(
    passes: Sequence[Pass], plain: Sequence[Pass], prompts: PromptSet, *, raw: bool
) -> list[dict[str, Any]]:
    """Figures of every task of a set; none where its items have no categories.

    Speeds are of one request: tokens of answers by seconds of requests, each from its place on.
    """
    tasks, items = prompts.tasks, prompts.answered(raw=raw)
    names = [name for name in dict.fromkeys(tasks) if name is not None]
    columns = columns_of(passes[0].answers, items)
    found = []
    for name in names:
        own = [place for place, item in enumerate(items) if tasks[item] == name]
        stats = [passes[0].answers[place].stats for place in own]
        known = any(one.num_steps for one in stats)  # a peer tells nothing of its steps
        speed, base = (_speed(some, own) for some in (passes, plain))
        found.append(
            {
                "task": name,
                "num_items": tasks.count(name),
                "num_answers": len(own),
                "tau": pooled(stats).tau if known else None,
                "mean_tau": mean_tau(stats) if known else None,
                **intervals(columns, {items[place] for place in own}),
                "tokens_per_second": speed and speed.to_dict()["tokens_per_second"],
                "ratio": speed.ratio(base) if speed and base else None,
            }
        )
    return found


def task_mean(
    tasks: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[int]], prompts: PromptSet
) -> dict[str, Any] | None:
    """The mean of tasks' figures, each task weighing the same; None for fewer than two tasks."""
    if len(tasks) < 2:
        return None
    means: dict[str, float | None] = {}
    for name in ("tau", "mean_tau", "ratio"):
        values = [one[name] for one in tasks]
        means[name] = None if None in values else float(np.mean(values))
    return means | {"tau_interval": interval(mean_of_tasks(columns, prompts.tasks))}


def _speed(passes: Sequence[Pass], places: Sequence[int]) -> Speed | None:
    tokens, seconds = [], []
    for one in passes:
        answers = [one.answers[place] for place in places]
        known = [answer.latency.last for answer in answers if answer.latency]
        if len(known) < len(answers):
            return None
        tokens.append(sum(len(answer.token_ids) for answer in answers))
        seconds.append(sum(known))
    return Speed(tokens, seconds)


def latency(passes: Sequence[Pass]) -> dict[str, Any] | None:
    """The median of all passes' requests, and the tenth that fared worst: tokens per second,
    milliseconds per later token, and to the first one; or None.
    """
    known = [(one, one.latency) for each in passes for one in each.answers if one.latency]
    if not known:
        return None
    speeds = [len(answer.token_ids) / one.last for answer, one in known]
    times = [(one.last - one.first, len(answer.token_ids) - 1) for answer, one in known]
    later = [1e3 * seconds / tokens for seconds, tokens in times if tokens > 0]
    first = [1e3 * one.first for _, one in known]

    def of(values: Sequence[float], worst: float) -> dict[str, float] | None:
        if not values:
            return None
        median, tenth = np.quantile(values, (0.5, worst))
        return {"median": float(median), "worst_tenth": float(tenth)}

    return {
        "request_tokens_per_second": of(speeds, 0.1),
        "ms_per_token": of(later, 0.9),
        "first_token_ms": of(first, 0.9),
    }


def behind_hits(hits: Sequence[Answer], cold: Sequence[Answer]) -> dict[str, Any]:
    """Answers to prompts in the prefix cache, beside those to the same prompts that were not."""
    stats = [one.stats for one in hits]
    pairs = enumerate(zip(hits, cold, strict=True))
    differing = [index for index, (one, own) in pairs if one.token_ids != own.token_ids]
    return {
        "num_prompt_tokens": sum(len(one.prompt_token_ids) for one in hits),
        "num_cached_tokens": sum(one.num_cached_tokens for one in hits),
        "tau": pooled(stats).tau,
        "mean_tau": mean_tau(stats),
        "by_context": by_context(hits),
        "differing_answers": differing,
    }


def by_context(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Tau by the tokens that were there before a step, prompt included."""
    return by_length([(one.stats, len(one.prompt_token_ids)) for one in answers], CONTEXT)


def by_output(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Tau by the output tokens that were there before a step."""
    return by_length([(one.stats, 0) for one in answers], OUTPUT)


def by_length(answers: Sequence[tuple[AcceptanceStats, int]], least: int) -> list[dict[str, Any]]:
    """Verify steps by the tokens that were there before them, in ranges that double.

    Args:
        answers: steps of each, and tokens before its first output token, which is no step's.
        least: end of the first range.

    Returns:
        Ranges with steps: `start` (included), `end` (not), `num_steps`, `tau`.

    >>> stats = AcceptanceStats([3, 3, 3], [2, 3, 1], [3, 4, 2])
    >>> [(one["start"], one["end"], one["tau"]) for one in by_length([(stats, 2)], 4)]
    [(0, 4, 3.0), (4, 8, 4.0), (8, 16, 2.0)]
    """
    ranges: dict[int, list[int]] = {}
    for stats, before in answers:
        tokens = before + 1
        for emitted in stats.num_emitted:
            ranges.setdefault((tokens // least).bit_length(), []).append(emitted)
            tokens += emitted
    return [
        {
            "start": least * 2 ** (number - 1) if number else 0,
            "end": least * 2**number,
            "num_steps": len(some),
            "tau": sum(some) / len(some),
        }
        for number, some in sorted(ranges.items())
    ]
