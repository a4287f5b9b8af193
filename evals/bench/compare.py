"""`specdec generate --compare`: the same prompts with and without drafts, side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from textwrap import wrap
from typing import Any

from evals.divergence import Divergence, explain_divergence, parting_of
from evals.report.table import steps_of_shapes
from evals.speed import Speed
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import AcceptanceStats, mean_tau, pooled
from specdec.base.registry import drafter_name
from specdec.cli.options import engine_config, load_decoder, sampling_params
from specdec.cli.prompts import model_inputs, read_prompts
from specdec.cli.result_writer import ResultWriter
from specdec.cli.summary import counted, describe_drafts
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult, StreamChunk
from specdec.session.provenance import dtype_name, origin_of_run

WARMUP_TOKENS = 16
BAR_WIDTH = 32

MIN_STEPS = 5
"""Steps below which a rate of acceptance is not shown."""

Show = Callable[[str, Iterator[StreamChunk]], list[GenerationResult]]
"""Shows one run, "plain" or "speculative", from its chunks, and returns its results in order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plain and speculative decoding of the same prompts.

    Attributes:
        sampling: how both decoded, the seed included.
        plain, speculative: speed of the timed runs.
        stats: verify steps of the first speculative run, one entry per prompt.
        divergences: prompts whose outputs differ, where they first do; None when not compared:
            probabilistic drafts keep the distribution of sampled tokens only.
    """

    sampling: SamplingParams
    plain: Speed
    speculative: Speed
    stats: list[AcceptanceStats]
    divergences: list[Divergence] | None

    def to_dict(self) -> dict[str, Any]:
        """All figures for a JSON report."""
        parted = None
        if self.divergences is not None:
            parted = [asdict(one) for one in self.divergences]
        return {
            "sampling": asdict(self.sampling),
            "plain": self.plain.to_dict(),
            "speculative": self.speculative.to_dict(),
            "ratio": self.speculative.ratio(self.plain),
            "acceptance": pooled(self.stats).to_dict() | {"mean_tau": mean_tau(self.stats)},
            "identical": None if parted is None else not parted,
            "divergences": parted,
        }


def compare(
    decoder: SpecDecoder,
    inputs: Sequence[Any],
    sampling: SamplingParams,
    *,
    repeats: int = 1,
    show: Show | None = None,
) -> Comparison:
    """Decodes `inputs` with `decoder` and with its plain twin, in turn, `repeats` times each.

    Both are warmed up on the same prompts, found in their prefix caches: decoding is timed. Drafts
    are copied from no run before.

    Args:
        inputs: prompts as `SpecDecoder.generate` takes them.
        sampling: how to decode; without a seed, both sides use seed 0.
        repeats: timed runs of each side.
        show: shows the first run of each side while it goes on; showing is part of the time.

    Raises:
        InvalidInputError: `repeats` is below 1, or a prompt failed.
    """
    if repeats < 1:
        raise InvalidInputError(f"repeats is {repeats}; it must be at least 1")
    if sampling.seed is None:
        sampling = replace(sampling, seed=0)
    sides = {"plain": decoder.plain(), "speculative": decoder}
    for side in sides.values():
        _generate(side, inputs, sampling.at_most(WARMUP_TOKENS))

    runs: dict[str, list[list[GenerationResult]]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, side in sides.items():
            if side.engine.runner.drafter:
                side.engine.runner.drafter.forget()
            started = time.perf_counter()
            if show is not None and repeat == 0:
                results = show(name, side.stream(list(inputs), sampling))
            else:
                results = _generate(side, inputs, sampling)
            seconds[name].append(time.perf_counter() - started)
            runs[name].append(results)

    divergences = None
    if sampling.temperature == 0 or decoder.engine.config.draft_sampling != "probabilistic":
        divergences = _divergences(decoder, runs["plain"], runs["speculative"])
    plain, speculative = (_speed(runs[name], seconds[name]) for name in sides)
    stats = [result.stats for result in runs["speculative"][0]]
    return Comparison(sampling, plain, speculative, stats, divergences)


def run(args: argparse.Namespace) -> int:
    """Runs `specdec generate --compare` and prints its report."""
    sampling, engine = sampling_params(args), engine_config(args)
    prompts = read_prompts(args.prompts, args.file, sampling, args.model)
    for prompt in prompts:
        if prompt.request is not None or prompt.error is not None:
            why = prompt.error or "a batch file's requests are not alike; drop --compare"
            raise InvalidInputError(f"{prompt.source}: {why}")
    own = next((prompt for prompt in prompts if prompt.asked), None)
    if own is not None:
        name = next(iter(own.asked))
        what = f"--compare decodes all prompts alike and {own.source} has its own {name}"
        raise InvalidInputError(f"{what}; give it as an option")
    decoder = load_decoder(args, args.drafter, engine)
    inputs = model_inputs(prompts, decoder.tokenizer, raw=args.raw, system=args.system)

    seconds: dict[str, float] = {}

    def show(name: str, chunks: Iterator[StreamChunk]) -> list[GenerationResult]:
        print(f"{name}\n{'-' * len(name)}")
        writer, started = ResultWriter(prompts, live=True), time.perf_counter()
        writer.write(chunks)
        seconds[name] = time.perf_counter() - started
        print(f"({_how_long(seconds)})\n", flush=True)
        return [writer.results[index] for index in range(len(prompts))]

    repeats = 1 if args.repeats is None else args.repeats
    shown = show if args.stream else None
    comparison = compare(decoder, inputs, sampling, repeats=repeats, show=shown)
    if args.json:
        print(json.dumps(_provenance(decoder, args) | comparison.to_dict(), indent=2))
    else:
        drafter = drafter_name(args.drafter, args.model)
        print(format_comparison(comparison, decoder, drafter=drafter))
    return 0


def _how_long(seconds: Mapping[str, float]) -> str:
    """What is said below a text that was shown.

    >>> _how_long({"plain": 3.0}), _how_long({"plain": 3.0, "speculative": 1.5})
    ('3.0 seconds', '1.5 seconds, 2.0 times as fast as plain decoding')
    """
    last = list(seconds.values())[-1]
    factor = seconds["plain"] / last if len(seconds) > 1 and last > 0 else 1.0
    faster = f", {factor:.1f} times as fast as plain decoding" if factor >= 1.05 else ""
    return f"{last:.1f} seconds{faster}"


def format_comparison(comparison: Comparison, decoder: SpecDecoder, *, drafter: str) -> str:
    """The report as text, at most 80 columns wide apart from names."""
    verifier, sampling, stats = decoder.verifier, comparison.sampling, pooled(comparison.stats)
    how = f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    how = "greedy" if sampling.temperature == 0 else how
    lines = [
        f"model {verifier.name} on {verifier.device}, {dtype_name(verifier.dtype)};"
        f" {describe_drafts(decoder, drafter)}",
        f"{counted(len(comparison.stats), 'prompt')}, {how}, at most"
        f" {counted(sampling.max_tokens, 'token')} each",
        "",
        *_speed_table(comparison),
        "",
        f"  {'tau':<13}{stats.tau:>9.2f}   tokens per step of the target (plain decoding: 1)",
    ]
    if len(comparison.stats) > 1:
        mean = f"  {'':<13}{mean_tau(comparison.stats):>9.2f}"
        lines.append(f"{mean}   mean over the prompts; above, over all steps")
    lines += ["", *_output_lines(comparison, decoder)]
    if stats.num_steps:
        lines += ["", "  tokens put out per verify step"]
        lines += _histogram(stats.histogram, stats.num_steps)
    if stats.num_offered:
        lines += ["", *_offered(stats), *_rates(stats), *_ranks(stats)]
    return "\n".join(lines)


def _generate(
    decoder: SpecDecoder, inputs: Sequence[Any], sampling: SamplingParams
) -> list[GenerationResult]:
    results = decoder.generate(list(inputs), sampling)
    assert isinstance(results, list)
    return results


def _speed(runs: list[list[GenerationResult]], seconds: list[float]) -> Speed:
    for results in runs:
        for index, result in enumerate(results):
            if result.error is not None:
                raise InvalidInputError(
                    f"prompt {index + 1} failed, so there is nothing to compare: {result.error}"
                )
    return Speed([sum(len(one.token_ids) for one in results) for results in runs], seconds)


def _divergences(
    decoder: SpecDecoder,
    plain_runs: list[list[GenerationResult]],
    speculative_runs: list[list[GenerationResult]],
) -> list[Divergence]:
    found: dict[int, Divergence] = {}
    for plain_run, speculative_run in zip(plain_runs, speculative_runs, strict=True):
        for index, (plain, speculative) in enumerate(zip(plain_run, speculative_run, strict=True)):
            prompt, other = plain.prompt_token_ids, speculative.token_ids
            parting = parting_of(index, prompt, plain.token_ids, other)
            if parting is not None and index not in found:
                found[index] = explain_divergence(decoder, parting)
    return [found[index] for index in sorted(found)]


def _speed_table(comparison: Comparison) -> list[str]:
    repeated = len(comparison.plain.seconds) > 1
    head = f"  {'':<13}{'tokens/s':>9}{'tokens':>10}{'seconds':>10}"
    lines = [head + ("   range of tokens/s" if repeated else "")]
    for name, speed in (("plain", comparison.plain), ("speculative", comparison.speculative)):
        slowest, fastest = speed.spread
        seconds = median(speed.seconds)
        line = f"  {name:<13}{speed.median:>9.1f}{speed.num_tokens[0]:>10,}{seconds:>10.2f}"
        lines.append(line + (f"   {slowest:.1f} to {fastest:.1f}" if repeated else ""))
    ratio = comparison.speculative.ratio(comparison.plain)
    note = f"   median of {len(comparison.plain.seconds)} runs each" if repeated else ""
    return [*lines, f"  {'ratio':<13}{'none' if ratio is None else f'{ratio:.2f}x':>9}{note}"]


def _output_lines(comparison: Comparison, decoder: SpecDecoder) -> list[str]:
    if comparison.divergences is None:
        why = "probabilistic drafts keep the distribution, not the tokens"
        return [f"  {'output':<13}not compared: {why}"]
    num_prompts = len(comparison.stats)
    if not comparison.divergences:
        return [f"  {'output':<13}identical" + (" for every prompt" if num_prompts > 1 else "")]
    all_of = counted(num_prompts, "prompt")
    lines = [f"  {'output':<13}differs for {len(comparison.divergences)} of {all_of}"]
    dtype = dtype_name(decoder.verifier.dtype)
    for one in comparison.divergences:
        plain = _token(decoder, one.plain_token_id)
        speculative = _token(decoder, one.speculative_token_id)
        apart = "equal"
        if one.margin:
            apart = f"{one.margin:.4g} apart, where {dtype} resolves {one.resolution:.4g}"
        lines += [
            f"    prompt {one.index + 1}, output token {one.position + 1}: plain {plain},"
            f" speculative {speculative}",
        ]
        if comparison.sampling.temperature == 0:  # where ties explain it
            lines.append(f"      the target's two largest logits there are {apart}")
    return lines


def _histogram(counts: list[int], num_steps: int) -> list[str]:
    rows = [(tokens, count) for tokens, count in enumerate(counts) if tokens > 0 or count > 0]
    return [
        f"  {tokens:>4}  {_bar(count / max(counts))}{100 * count / num_steps:>7.1f}%{count:>9,}"
        for tokens, count in rows
    ]


def _offered(stats: AcceptanceStats) -> list[str]:
    """In how many steps each number of drafts was offered, and whether they formed a tree."""
    text = "drafts offered: " + steps_of_shapes(stats.steps_by_shape)
    return wrap(text, 80, initial_indent="  ", subsequent_indent="    ")


def _rates(stats: AcceptanceStats) -> list[str]:
    """Acceptance by position and the steps it is taken from, where these are enough."""
    shown = [steps for steps in stats.num_offered if steps >= MIN_STEPS]
    title = "  drafts accepted, by position, and the steps that offered one there"
    lines = ["", title] if shown else []
    lines += _bars(zip(stats.acceptance_rate, shown, strict=False))
    if len(shown) < len(stats.num_offered):
        lines.append(
            f"  (from position {len(shown) + 1} on, fewer than {MIN_STEPS} steps offered a draft)"
        )
    return lines


def _ranks(stats: AcceptanceStats) -> list[str]:
    """What the accepted drafts of trees were among the candidates of their positions."""
    if not stats.num_by_rank:
        return []
    title = "  accepted drafts of trees, by rank among the candidates of their position"
    return ["", title, *_bars(zip(stats.share_by_rank, stats.num_by_rank, strict=True))]


def _bars(counted: Iterable[tuple[float, int]]) -> Iterator[str]:
    """A line for each share, from 1, with its count."""
    for place, (share, count) in enumerate(counted, start=1):
        yield f"  {place:>4}  {_bar(share)}{100 * share:>7.1f}%{count:>9,}"


def _bar(fraction: float) -> str:
    """A bar of `fraction` of the full width, in eighths of a character if the terminal has them."""
    if "utf" not in (sys.stdout.encoding or "").lower():
        return ("#" * round(fraction * BAR_WIDTH)).ljust(BAR_WIDTH)
    full, eighths = divmod(round(fraction * BAR_WIDTH * 8), 8)
    return ("█" * full + (chr(0x2590 - eighths) if eighths else "")).ljust(BAR_WIDTH)


def _token(decoder: SpecDecoder, token_id: int | None) -> str:
    if token_id is None:
        return "has ended"
    return f"{decoder.tokenizer.decode([token_id])!r} ({token_id})"


def _provenance(decoder: SpecDecoder, args: argparse.Namespace) -> dict[str, Any]:
    return origin_of_run(decoder.verifier, decoder.reader) | {
        "model": decoder.verifier.name,
        "drafter": drafter_name(args.drafter, args.model),
        "num_draft_tokens": decoder.engine.k,
    }
