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

DRAFTS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47)
"""Bounds of drafts of a request in a step."""


class Metrics(Collector):
    """Makes the metrics anew each time they are asked for.

    Args:
        front: knows the totals.
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
            family = CounterMetricFamily(f"{prefix}:{name}", text, labels=list(self._labels))
            yield self._one(family, value)
        name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
        text = "Drafts accepted by position."
        yield self._by(
            CounterMetricFamily(name, text, labels=[*self._labels, "position"]),
            enumerate(totals.accepted),
        )
        name, text = (
            f"{prefix}:spec_decode_num_draft_tokens_per_slot",
            "Drafts verified by their place among those of a request, the likeliest first.",
        )
        yield self._by(
            CounterMetricFamily(name, text, labels=[*self._labels, "slot"]),
            enumerate(at_least(totals.verified)),
        )
        name, text = f"{prefix}:request_success", "Outputs ended, by reason."
        yield self._by(
            CounterMetricFamily(name, text, labels=[*self._labels, "finished_reason"]),
            totals.finished.items(),
        )

    def _gauges(self, prefix: str) -> Iterator[Metric]:
        numbers = self._front.engine.numbers
        usage = numbers.blocks_used / self._front.engine.facts.num_blocks
        for name, value, text in (
            ("num_requests_running", numbers.running, "Outputs in work."),
            ("num_requests_waiting", self._front.num_waiting, "Outputs that wait for a place."),
            ("kv_cache_usage_perc", usage, "Share of the cache's blocks in use, from 0 to 1."),
        ):
            family = GaugeMetricFamily(f"{prefix}:{name}", text, labels=list(self._labels))
            yield self._one(family, value)

    def _weights(self, prefix: str) -> Iterator[Metric]:
        """What other weights of the drafter have changed, and what came of learning."""
        text = (
            "Tokens per verify step by the drafter's weights, those before their last change too."
        )
        name, labels = f"{prefix}:drafter_tau", [*self._labels, "weights"]
        yield self._by(GaugeMetricFamily(name, text, labels=labels), self._front.taus.items())
        if (learned := self._front.learned) is None:
            return
        text = "Tau on held-out requests of the last training, by weights before and after it."
        taus = [(weights, learned[weights]) for weights in ("before", "after")]
        yield self._by(GaugeMetricFamily(f"{prefix}:learning_tau", text, labels=labels), taus)
        name, text = f"{prefix}:learning_rounds", "Trainings on served requests, by outcome."
        family = CounterMetricFamily(name, text, labels=[*self._labels, "outcome"])
        yield self._by(family, learned["rounds"].items())

    def _histograms(self, prefix: str, totals: Totals) -> Iterator[Metric]:
        for name, counted, text in (
            (
                "time_to_first_token_seconds",
                totals.first_token,
                "From a request to its first token, of streams.",
            ),
            (
                "inter_token_latency_seconds",
                totals.between_tokens,
                "Between the steps that add to an output, of streams.",
            ),
            (
                "request_time_per_output_token_seconds",
                totals.per_token,
                "Mean of an output after its first token, of streams.",
            ),
            ("e2e_request_latency_seconds", totals.whole, "From a request to its end."),
            (
                "request_prompt_tokens",
                totals.request_prompt,
                "Prompt tokens of each output that has ended.",
            ),
            (
                "request_generation_tokens",
                totals.request_output,
                "Tokens of each output that has ended.",
            ),
        ):
            family = HistogramMetricFamily(f"{prefix}:{name}", text, labels=list(self._labels))
            family.add_metric(
                list(self._labels.values()), buckets=_buckets(counted), sum_value=counted.sum
            )
            yield family

        name, text = (
            f"{prefix}:spec_decode_request_draft_tokens",
            "Drafts verified of a request in a step.",
        )
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        steps = totals.verified or [0]
        family.add_metric(
            list(self._labels.values()),
            buckets=[
                *((str(bound), float(sum(steps[: bound + 1]))) for bound in DRAFTS),
                ("+Inf", float(sum(steps))),
            ],
            sum_value=totals.draft_tokens,
        )
        yield family

    def _one(self, family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(
        self,
        family: CounterMetricFamily | GaugeMetricFamily,
        values: Iterable[tuple[object, float]],
    ) -> Metric:
        for label, value in values:
            family.add_metric([*self._labels.values(), str(label)], value)
        return family


def _buckets(counted: Histogram) -> list[tuple[str, float]]:
    """Counts up to each bound, the infinite one last."""
    bounds = [*(f"{bound:g}" for bound in counted.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counted.counts)), strict=True))
