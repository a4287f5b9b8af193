"""`specdec bench --ray`: the same sweep, answered by the engines of a cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from evals.bench.bench import Bench, longest_of
from evals.bench.config import BenchConfig, SideKind
from evals.bench.side import Side
from evals.prompt_sets import PromptSet
from evals.report.provenance import provenance
from evals.report.report import new_report
from evals.report.sides import PLAIN, side_name
from evals.roofline import measured_bandwidth
from evals.runner import Answer, Pass
from specdec.base.errors import SpecDecError
from specdec.base.journal import Journal, made
from specdec.cluster.config import EngineSpec
from specdec.cluster.origin import machine_of, origin
from specdec.cluster.pool import Pool
from specdec.cluster.rows import Row
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from specdec.session.provenance import command_line

Progress = Callable[[str, int, int], None]
"""Called with what is running, and how many of how many conversations are done."""


class Plan(NamedTuple):
    """What one machine finds out for all: whether the sweep can be run, and with what."""

    drafters: list[str]
    longest: list[int]
    bandwidth: float
    provenance: dict[str, Any]
    machine: dict[str, Any]


def make_plan(decoder: SpecDecoder, config: BenchConfig) -> Plan:
    """Checks a sweep with the target and every drafter.

    Raises:
        SpecDecError: see `Bench`.
    """
    drafters = list(Bench(decoder, config).drafters)
    return Plan(
        drafters,
        [longest_of(decoder, one, config) for one in config.sets],
        measured_bandwidth(decoder.verifier.device),
        provenance(decoder, drafters),
        machine_of(origin(decoder)),
    )


@dataclass(slots=True, kw_only=True)
class _Side(Side):
    """One that engines of `spec` decode. Seconds are those of all engines together."""

    spec: EngineSpec


class ClusterBench:
    """A sweep whose conversations are spread over engines. Speeds are those of one engine.

    Args:
        pool: its spec names the target, and no drafter.
        config: what is measured, without peers.
        path: journal of finished conversations; None keeps none.
        progress: follows every pass.

    Raises:
        SpecDecError: see `make_plan`, `Pool` and `Journal`.
    """

    def __init__(
        self,
        pool: Pool,
        config: BenchConfig,
        *,
        path: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._pool, self._config, self._progress = pool, config, progress
        self._plan = pool.call(make_plan, config)
        settings = {"model": pool.spec.model} | self._plan.machine
        self._journal = Journal(path, settings, command="bench")

    def run(self) -> Iterator[dict[str, Any]]:
        """Measures cell by cell, as `Bench.run` does; every pass makes its engines anew."""
        config, engines = self._config, self._pool.config.engines
        origin = self._plan.provenance | {"command": command_line()}
        report = new_report("specdec-bench", origin, config.settings | {"num_engines": engines})
        report |= {"bandwidth": self._plan.bandwidth, "rows": []}
        sets = zip(config.sets, self._plan.longest, strict=True)
        cells = list(product(sets, config.temperatures, config.concurrencies))
        for number, ((prompts, longest), temperature, concurrency) in enumerate(cells, start=1):
            sampling = config.sampling(temperature)
            sides = self._sides(longest, concurrency, sampling)
            for repeat, side in product(range(config.repeats), sides):
                name = side_name(side.drafter, side.k, len(side.drafter))
                title = f"{prompts.name} T={temperature:g} c={concurrency} {name}"
                title += f" {repeat + 1}/{config.repeats}"
                side.passes.append(self._pass(side, prompts, sampling, repeat, title))
            key = {"prompt_set": prompts.name, "temperature": temperature}
            key["concurrency"] = concurrency
            rows = (side.row(sides[0], prompts, key, raw=config.raw) for side in sides)
            report["rows"] += rows
            report["complete"] = number == len(cells)
            yield report

    def _sides(self, longest: int, concurrency: int, sampling: SamplingParams) -> list[_Side]:
        config = self._config
        spec = replace(self._pool.spec, warm_up=sampling if config.warmup else None)
        sides = []
        for drafter, kind in ((PLAIN, SideKind()), *product(self._plan.drafters, config.kinds)):
            engine = config.engine(concurrency, longest, kind)
            own = replace(spec, drafter=drafter, engine=engine)
            sides.append(_Side(drafter=drafter, spec=own))
        return sides

    def _pass(
        self, side: _Side, prompts: PromptSet, sampling: SamplingParams, repeat: int, title: str
    ) -> Pass:
        raw, rows = self._config.raw, list[Row]()
        for index, item in enumerate(prompts.items):
            first: Any = item.turns[0] if raw else [{"role": "user", "content": item.turns[0]}]
            own = replace(sampling, seed=(sampling.seed or 0) + index)
            parts = json.dumps([prompts.sha256, index, raw, repr(own), asdict(side.spec), repeat])
            key = hashlib.sha256(parts.encode()).hexdigest()[:32]
            rows.append(Row(key, first, own, () if raw else item.turns[1:]))
        wrong = []
        missing = [row for row in rows if self._journal.get(row.key) is None]
        item_of = {row.key: item.item_id for row, item in zip(rows, prompts.items, strict=True)}
        answers_of = replace(self._pool, spec=side.spec).answers(missing, self._plan.machine)
        for done, answer in enumerate(answers_of, start=1 + len(rows) - len(missing)):
            if answer.error is None:
                self._journal.add(answer.key, answer.record | {"k": answer.origin["k"]})
            else:
                wrong.append(f"{prompts.name} {item_of[answer.key]}: {answer.error}")
            if self._progress:
                self._progress(title, done, len(rows))
        if wrong:  # after all others, which the journal now has
            raise SpecDecError(wrong[0] + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""))
        kept = [found for row in rows if (found := self._journal.read(row.key, _kept))]
        side.k = kept[0][2]
        turns_of = [turns for turns, _, _ in kept]
        numbers = range(prompts.num_turns)
        results = [turns[n] for n in numbers for turns in turns_of if n < len(turns)]
        answers = [Answer(one.prompt_token_ids, one.token_ids, one.stats) for one in results]
        return Pass(answers, sum(seconds for _, seconds, _ in kept))


def _kept(record: dict[str, Any]) -> tuple[list[GenerationResult], float, int | str]:
    """Turns, seconds of an engine, and its k."""
    results = [made(GenerationResult, one) for one in record["results"]]
    return results, float(record["seconds"]), record["k"]
