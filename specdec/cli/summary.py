"""What is said of a run in a few words: its drafts, its speed, the time of its phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.base.metrics import pooled

if TYPE_CHECKING:
    from specdec.engine.policy.timing import StepTimer
    from specdec.session.decoder import SpecDecoder
    from specdec.session.outputs import GenerationResult


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "prompt"), counted(1200, "token")
    ('1 prompt', '1,200 tokens')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def describe_drafts(decoder: SpecDecoder, drafter: str) -> str:
    """The drafter and the shape of its drafts in a few words."""
    shapes = decoder.engine.planner.shapes
    chains = [shape.drafts for shape in shapes if not shape.is_tree]
    trees = [shape.drafts for shape in shapes if shape.is_tree]
    at_most = "up to " if len(shapes) > 1 else ""
    parts = [f"k {at_most or '= '}{max(chains)}"] if any(chains) else []
    parts += [f"trees of {at_most}{max(trees)} drafts"] if trees else []
    return f"drafter {drafter}, {', '.join(parts)}" if parts else "no drafts"


def format_timing(timer: StepTimer) -> str:
    """Table of the phases of a step: seconds in all, milliseconds per decode step, and share."""
    from specdec.engine.policy.timing import MODEL_PHASES, PHASES

    total = sum(timer.totals.values())
    own = sum(seconds for name, seconds in timer.totals.items() if name not in MODEL_PHASES)

    def row(name: str, seconds: float) -> str:
        per_step = 1000 * seconds / max(timer.num_steps, 1)
        percent = 100 * seconds / total if total else 0
        return f"  {name:<13}{seconds:>9.3f}{per_step:>14.3f}{percent:>9.1f}%"

    lines = [f"  {'phase':<13}{'seconds':>9}{'ms per step':>14}{'share':>10}"]
    lines += (row(name, timer.totals[name]) for name in sorted(timer.totals, key=PHASES.index))
    lines.append(row("total", total) + f"   {counted(timer.num_steps, 'step')}")
    lines.append(row("engine's own", own) + f"   all but {', '.join(MODEL_PHASES)}")
    if timer.steps_by_shape:
        lines.append(f"  drafts offered: {_by_shape(timer)}")
    return "\n".join(lines)


def _by_shape(timer: StepTimer) -> str:
    shapes = sorted(timer.steps_by_shape.items())
    return ", ".join(f"{shape} in {counted(count, 'step')}" for shape, count in shapes)


def format_summary(by_index: dict[int, GenerationResult], seconds: float, drafts: str) -> str:
    """One line about a finished command: tokens, seconds, tau, and what was cut."""
    results = list(by_index.values())
    stats = pooled(result.stats for result in results)
    tokens = sum(len(result.token_ids) for result in results)
    parts = [f"{counted(tokens, 'token')} in {seconds:.2f} s"]
    if len(results) > 1:
        parts.insert(0, counted(len(results), "prompt"))
    if stats.num_steps:
        parts.append(f"{stats.tau:.2f} tokens per verify step ({drafts})")
    num_cut = sum(result.finish_reason == "length" for result in results)
    if num_cut:
        parts.append(
            "cut at the length limit" if len(results) == 1 else f"{num_cut} cut at the length limit"
        )
    logprobs = [value for result in results for value in result.logprobs or ()]
    if logprobs:
        total = sum(logprobs)
        parts.append(f"log-probability {total:.3f}, {total / len(logprobs):.3f} per token")
    return ", ".join(parts)
