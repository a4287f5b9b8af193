"""`/metrics`: the totals, and the engine as it is now, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from specdec.base.metrics import at_least
from specdec.serve.front import Front
from specdec.serve.state.totals import Histogram, Totals

CONTENT_TYPE = CONTENT_TYPE_LATEST

_Family = CounterMetricFamily | GaugeMetricFamily

DRAFTS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47)
"""Bounds of drafts of a request in a step."""

HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request to its first token, of streams.",
    "inter_token_latency_seconds": "Between the steps that add to an output, of streams.",
    "request_time_per_output_token_seconds": "Mean of an output after its first token, of streams.",
    "e2e_request_latency_seconds": "From a request to its end.",
    "request_prompt_tokens": "Prompt tokens of each output that has ended.",
    "request_generation_tokens": "Tokens of each output that has ended.",
}
"""What they are of, by name."""


class Metrics(Collector):
    """Makes the metrics anew each time they are asked for.

    Args:
        prefixes: of all names, such as specdec; each gives the whole set.
    """

    def __init__(self, front: Front, prefixes: Sequence[str]) -> None:
        self._front, self._prefixes = front, prefixes
        self._labels = {"model_name": front.names[0], "engine": "0"}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not looked at beforehand."""
        return []

    def collect(self) -> Iterator[Metric]:
        totals = self._front.count()
        for prefix in self._prefixes:
            yield from self._counters(prefix, totals)
            yield from self._gauges(prefix)
            yield from self._weights(prefix)
            yield from self._histograms(prefix, totals)

    def _counters(self, prefix: str, totals: Totals) -> Iterator[Metric]:
        numbers = self._front.engine.numbers
        for name, value, text in (
            ("prefix_cache_queries", numbers.queried, "Tokens looked for in the prefix cache."),
            ("prefix_cache_hits", numbers.found, "Tokens found there."),
            ("prompt_tokens", totals.prompt_tokens, "Prompt tokens of outputs that have begun."),
            ("generation_tokens", totals.output_tokens, "Output tokens."),
            ("spec_decode_num_drafts", totals.drafts, "Verify steps that had drafts."),
            ("spec_decode_num_draft_tokens", totals.draft_tokens, "Drafts verified."),
            ("spec_decode_num_accepted_tokens", sum(totals.accepted), "Drafts accepted."),
            ("num_preemptions", numbers.preemptions, "Requests preempted."),
        ):
            yield self._one(CounterMetricFamily, f"{prefix}:{name}", text, value)
        of_position, of_slot = enumerate(totals.accepted), enumerate(at_least(totals.verified))
        by_place = "Drafts verified by their place among those of a request, the likeliest first."
        for name, values, label, text in (
            ("accepted_tokens_per_pos", of_position, "position", "Drafts accepted by position."),
            ("draft_tokens_per_slot", of_slot, "slot", by_place),
        ):
            name = f"{prefix}:spec_decode_num_{name}"
            yield self._by(CounterMetricFamily, name, text, label, values)
        name, text = f"{prefix}:request_success", "Outputs ended, by reason."
        ended = totals.finished.items()
        yield self._by(CounterMetricFamily, name, text, "finished_reason", ended)

    def _gauges(self, prefix: str) -> Iterator[Metric]:
        numbers = self._front.engine.numbers
        usage = numbers.blocks_used / self._front.engine.facts.num_blocks
        for name, value, text in (
            ("num_requests_running", numbers.running, "Outputs in work."),
            ("num_requests_waiting", self._front.num_waiting, "Outputs that wait for a place."),
            ("kv_cache_usage_perc", usage, "Share of the cache's blocks in use, from 0 to 1."),
        ):
            yield self._one(GaugeMetricFamily, f"{prefix}:{name}", text, value)

    def _weights(self, prefix: str) -> Iterator[Metric]:
        """What other weights of the drafter have changed, and what came of learning."""
        name, taus = f"{prefix}:drafter_tau", list(self._front.taus.items())
        text = (
            "Tokens per verify step by the drafter's weights, those before their last change too."
        )
        yield self._by(GaugeMetricFamily, name, text, "weights", taus)
        if (learned := self._front.learned) is None:
            return
        name, taus = f"{prefix}:learning_tau", [(one, learned[one]) for one in ("before", "after")]
        text = "Tau on held-out requests of the last training, by weights before and after it."
        yield self._by(GaugeMetricFamily, name, text, "weights", taus)
        name, text = f"{prefix}:learning_rounds", "Trainings on served requests, by outcome."
        yield self._by(CounterMetricFamily, name, text, "outcome", learned["rounds"].items())

    def _histograms(self, prefix: str, totals: Totals) -> Iterator[Metric]:
        of_streams = totals.first_token, totals.between_tokens, totals.per_token
        every = *of_streams, totals.whole, totals.request_prompt, totals.request_output
        for (name, text), counted in zip(HISTOGRAMS.items(), every, strict=True):
            yield self._histogram(f"{prefix}:{name}", text, _buckets(counted), counted.sum)
        steps, text = totals.verified or [0], "Drafts verified of a request in a step."
        buckets = [(str(bound), float(sum(steps[: bound + 1]))) for bound in DRAFTS]
        buckets.append(("+Inf", float(sum(steps))))
        name = f"{prefix}:spec_decode_request_draft_tokens"
        yield self._histogram(name, text, buckets, totals.draft_tokens)

    def _one(self, kind: type[_Family], name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(
        self,
        kind: type[_Family],
        name: str,
        text: str,
        label: str,
        values: Iterable[tuple[object, float]],
    ) -> Metric:
        family = kind(name, text, labels=[*self._labels, label])
        for one, value in values:
            family.add_metric([*self._labels.values(), str(one)], value)
        return family

    def _histogram(
        self, name: str, text: str, buckets: list[tuple[str, float]], total: float
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=total)
        return family


def _buckets(counted: Histogram) -> list[tuple[str, float]]:
    """Counts up to each bound, the infinite one last."""
    bounds = [*(f"{bound:g}" for bound in counted.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counted.counts)), strict=True))
