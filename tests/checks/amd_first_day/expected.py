"""Figures that were told of, beside those that a run measures, each with its source, so that a
reader sees at once what is off.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

OURS = "docs/performance.md"
VLLM = "https://github.com/vllm-project/vllm/pull"

Figures = Mapping[str, Any]
"""What the steps have left, by their names."""


class Expectation(NamedTuple):
    """One figure.

    Attributes:
        what: it is.
        expected: as its source tells it, with the machine.
        source: where it stands.
        steps: that measure it.
        measured: from their figures, in words.
    """

    what: str
    expected: str
    source: str
    steps: tuple[str, ...]
    measured: Callable[[Figures], str]


def _ratio(name: str) -> Callable[[Figures], str]:
    """Speed of the best drafter of a bench, to plain decoding."""

    def measured(figures: Figures) -> str:
        ratios = [row["ratio"] for row in figures[name]["rows"] if row["ratio"] is not None]
        return f"{max(ratios):.2f}x"

    return measured


def _change(before: str, after: str, title: str) -> Callable[[Figures], str]:
    """By how much milliseconds of the same title differ, all that begin so."""

    def measured(figures: Figures) -> str:
        one, other = figures[before], figures[after]
        both = [key for key in one if key in other and key.startswith(title)]
        return ", ".join(f"{other[key] / one[key] - 1:+.1%} ({key})" for key in both)

    return measured


def _wrong(name: str) -> Callable[[Figures], str]:
    """Calls that are not right."""
    return lambda figures: str(sum(one["verdict"] != "right" for one in figures[name]))


EMBEDDED = {1: "4.46x (H100)", 8: "2.63x (H100)", 32: "1.85x (H100)", 256: "1.71x (H200)"}
REAL = {1: "2.09x (Qwen3-8B, GSM8K, MI300X)", 16: "up to 3.86x (the same)"}
"""Speed with drafts to plain decoding, by requests at once."""

EXPECTATIONS = (
    Expectation(
        "attention calls that are wrong", "0", "the definition", ("kernels",), _wrong("kernels")
    ),
    Expectation(
        "latent attention that is wrong", "0", "the definition", ("latent",), _wrong("latent")
    ),
    *(
        Expectation(
            f"embedded model, {n} at once", told, OURS, (f"bench-{n}",), _ratio(f"bench-{n}")
        )
        for n, told in EMBEDDED.items()
    ),
    *(
        Expectation(
            f"a real target, {n} at once",
            told,
            f"{VLLM}/39703",
            (f"real-{n}",),
            _ratio(f"real-{n}"),
        )
        for n, told in REAL.items()
    ),
    Expectation(
        "decoding on the shuffled layout, to the plain one",
        "-0.5 % to -12 % (CDNA)",
        f"{VLLM}/32914",
        ("layout-plain", "layout-shuffled"),
        _change("layout-plain", "layout-shuffled", "decode step"),
    ),
    Expectation(
        "first tokens with prompts in 8 bits, to 16",
        "-14.8 % (gfx950)",
        f"{VLLM}/42509",
        ("prefill-16-bit", "prefill-8-bit"),
        _change("prefill-16-bit", "prefill-8-bit", "first token"),
    ),
)


def table(steps: Mapping[str, Any]) -> list[str]:
    """Markdown, a line for every figure whose steps have passed."""
    figures = {
        name: step["figures"]
        for name, step in steps.items()
        if step["verdict"] == "passed" and step.get("figures")
    }
    lines = [
        f"| {one.what} | {one.expected} | {_told(one, figures)} | {_link(one.source)} |"
        for one in EXPECTATIONS
        if set(one.steps) <= figures.keys()
    ]
    head = ["| figure | told of | measured here | source |", "|---|---|---|---|"]
    return [*head, *lines] if lines else []


def _told(one: Expectation, figures: Figures) -> str:
    try:
        return one.measured(figures)
    except (KeyError, TypeError, ValueError) as error:
        return f"the step's figures have another form: {type(error).__name__} {error}"


def _link(source: str) -> str:
    """A source as a page shows it.

    >>> _link("https://example.org/a/pull/12"), _link("docs/a.md")
    ('[12](https://example.org/a/pull/12)', 'docs/a.md')
    """
    number = re.search(r"/(\d+)$", source)
    return f"[{number[1]}]({source})" if number else source
