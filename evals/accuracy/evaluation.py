"""`specdec eval`: tasks of lm-eval, plain and speculative, and how their samples agree."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.accuracy.lm_eval_sample import Sample
from evals.certainty import rights, wilson
from evals.divergence import Parting, parting_of
from evals.report.report import Report, new_report, write_report
from evals.speed import Speed
from evals.system import LocalSystem, System
from specdec.base.journal import Journal
from specdec.base.metrics import mean_tau, pooled
from specdec.base.writing import write_text

if TYPE_CHECKING:
    from evals.accuracy.lm_eval_tasks import Tasks


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What is evaluated.

    Attributes:
        tasks: names of lm-eval, or "bundled".
        data: local files by task; see `evals.accuracy.lm_eval_tasks.Tasks`.
        limit: samples per task; None takes all.
        num_fewshot: examples in the prompt; None takes the task's own number.
        chat: wrap prompts in the chat template, few-shot examples as turns of a conversation.
        system: system message, with `chat`.
        think_end_token: see `evals.accuracy.lm_eval_model.SpecdecLM`.
        gen_kwargs: generation arguments over the task's own.
        seed: for sampled answers.
        log_samples: keep lm-eval's record of every sample.
        peers: models of lm-eval that answer as well, see `evals.accuracy.lm_eval_peers`.
        folder: where report, journals of both sides and samples go; None writes nothing.
    """

    tasks: tuple[str, ...]
    data: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    system: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    log_samples: bool = False
    folder: Path | None = None
    peers: tuple[str, ...] = ()
    think_end_token: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What belongs in the report."""
        names = ("limit", "num_fewshot", "chat", "system", "seed", "peers", "think_end_token")
        stated = {name: getattr(self, name) for name in names}
        stated |= {"tasks": list(self.tasks), "data": dict(self.data)}
        return stated | {"gen_kwargs": dict(self.gen_kwargs)}


def evaluate(system: System, drafter: str, config: EvalConfig, origin: dict[str, Any]) -> Report:
    """Evaluates plain and speculative decoding one after the other and compares them.

    With a folder, every finished sample is stored at once; a run that died goes on there.

    Raises:
        SpecDecError: an unknown task, bad data, too large a limit, or not the journals' settings.
    """
    from evals.accuracy.lm_eval_model import SpecdecLM
    from evals.accuracy.lm_eval_peers import check_peers, harness_peer
    from evals.accuracy.lm_eval_tasks import Tasks

    check_peers(config.peers)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it comments every setting
    with tempfile.TemporaryDirectory() as scratch:
        tasks = Tasks(
            config.tasks,
            data=config.data,
            limit=config.limit,
            folder=Path(scratch),
            num_fewshot=config.num_fewshot,
        )
        sides = {"plain": system.plain(), "speculative": system}
        results, samples = {}, {}
        for name, side in sides.items():
            path = config.folder / f"{name}.jsonl" if config.folder else None
            journal = Journal(path, _journal_settings(side, drafter, origin))
            options: Any = {"seed": config.seed, "think_end_token": config.think_end_token}
            lm = SpecdecLM(system=side, journal=journal, title=name, warms_up=True, **options)
            results[name] = _results(lm, tasks, config, name)
            samples[name] = lm.samples
        for name in config.peers:
            assert isinstance(system, LocalSystem), "the command refuses peers of a cluster"
            peer = harness_peer(name, system, config.think_end_token)
            results[name] = _results(peer, tasks, config, name.partition(":")[0])
            del peer
    settings = config.settings | {"drafter": drafter, "k": system.settings["k"]}
    report = new_report("specdec-eval", origin, settings)
    names = results["plain"]["results"]
    report["tasks"] = [_task(system, task, results, samples) for task in names]
    report["complete"] = True
    if config.folder:
        write_report(report, config.folder / "report.json")
    return report


def _results(lm: Any, tasks: Tasks, config: EvalConfig, side: str) -> dict[str, Any]:
    """What lm-eval makes of a side's answers."""
    results = tasks.evaluate(
        lm,
        apply_chat_template=config.chat,
        fewshot_as_multiturn=config.chat,
        system_instruction=config.system,
        gen_kwargs=dict(config.gen_kwargs) or None,
        log_samples=True,  # which answers are right, that is
    )
    if config.log_samples and config.folder:
        _write_samples(results, config.folder, side)
    return results


def _journal_settings(side: System, drafter: str, provenance: dict[str, Any]) -> dict[str, Any]:
    """What an answer depends on beside prompt and sampling; torch's version decides rounding."""
    target = provenance["target"]
    return {
        "target": [target["name"], *target["sha256"].values()],
        "drafter": drafter if side.settings["k"] else "none",
        **side.settings,
        "dtype": provenance["dtype"],
        "device": provenance["device"],
        "torch": provenance["versions"]["torch"],
        **side.reader.stated,
    }


def _task(
    system: System,
    task: str,
    results: Mapping[str, Mapping[str, Any]],
    samples: Mapping[str, list[Sample]],
) -> dict[str, Any]:
    own = {name: [one for one in side if one.task == task] for name, side in samples.items()}
    speeds = {name: _speed(side) for name, side in own.items()}
    pairs = list(zip(own["plain"], own["speculative"], strict=True))
    metrics = {name: _metrics(side, task) for name, side in results.items()}
    found: dict[str, Any] = {"task": task, "num_samples": len(pairs)}
    found["sha256"] = _hash_of_questions(results["plain"]["samples"][task])
    for name, side in own.items():
        found[name] = {
            "metrics": metrics[name],
            "num_tokens": speeds[name].num_tokens[0],
            "seconds": speeds[name].seconds[0],
            "tokens_per_second": speeds[name].median,
            "acceptance": _acceptance(side) if name == "speculative" else None,
        }
    found["ratio"] = speeds["speculative"].ratio(speeds["plain"])
    found["peers"] = {name: {"metrics": one} for name, one in metrics.items() if name not in own}
    differing = [(plain, other) for plain, other in pairs if plain.text != other.text]
    return found | {"differences": _differences(system, differing)}


def _hash_of_questions(records: Sequence[Mapping[str, Any]]) -> str:
    """Hash of what was asked, in order; two reports with the same one may be paired.

    Args:
        records: of lm-eval, one for each sample and filter.
    """
    asked = {record["doc_id"]: record["doc_hash"] for record in records}
    return hashlib.sha256("".join(asked.values()).encode()).hexdigest()


def _speed(samples: list[Sample]) -> Speed:
    tokens = sum(len(sample.token_ids) for sample in samples)
    return Speed([tokens], [sum(sample.seconds for sample in samples)])


def _acceptance(samples: list[Sample]) -> dict[str, Any]:
    stats = [sample.stats for sample in samples]
    per_request = [one.tau for one in stats]
    return pooled(stats).to_dict() | {"mean_tau": mean_tau(stats), "tau_per_request": per_request}


def _metrics(results: Mapping[str, Any], task: str) -> dict[str, dict[str, Any]]:
    """Metrics of a side by "metric,filter": value and standard error, and where answers are right
    or wrong a 95 % interval and which are right (`evals.certainty.rights`).
    """
    right = rights(results["samples"][task])
    own = results["results"][task]
    found: dict[str, dict[str, Any]] = {}
    for name, value in own.items():
        metric, comma, chosen = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            stderr = own.get(f"{metric}_stderr,{chosen}")
            known = right.get(name)
            found[name] = {
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                "interval": None if known is None else wilson(known.count("1"), len(known)),
                "right": known,
            }
    return found


def _differences(system: System, pairs: list[tuple[Sample, Sample]]) -> list[dict[str, Any]]:
    """Where two answers to one prompt part; margins of greedy ones, where ties explain it."""
    found: list[dict[str, Any]] = []
    partings: list[Parting] = []
    unknown = dict.fromkeys(("plain_token", "speculative_token", "margin", "resolution"))
    for index, (plain, other) in enumerate(pairs):
        parting = parting_of(index, plain.prompt_token_ids, plain.token_ids, other.token_ids)
        position = parting and parting.position
        found.append({"doc_id": plain.doc_id, "position": position, **unknown})
        partings += [parting] if parting and plain.greedy else []
    for one in system.explain(partings):
        for name in ("plain_token", "speculative_token"):
            if (token_id := getattr(one, f"{name}_id")) is not None:
                found[one.index][name] = system.reader.tokenizer.decode([token_id])
        found[one.index] |= {"margin": one.margin, "resolution": one.resolution}
    return found


def _write_samples(results: dict[str, Any], folder: Path, side: str) -> None:
    for task, records in results["samples"].items():
        lines = (json.dumps(record, default=str, ensure_ascii=False) + "\n" for record in records)
        write_text(folder / f"samples_{task}_{side}.jsonl", "".join(lines))
