"""`specdec profile`: a table of kernels and a trace of decoding steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.base.registry import drafter_name
from specdec.base.writing import check_writable
from specdec.cli import options
from specdec.cli.fields import adding
from specdec.cli.summary import describe_drafts

_EXAMPLES = """\
examples:
  specdec profile
  specdec profile --drafter path/to/drafter --max-num-seqs 8 --context 1024 --trace trace.json

The batch is made of the bundled problems, each repeated up to --context tokens. Open the trace with
chrome://tracing or https://ui.perfetto.dev.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec profile`."""
    parser.usage = "%(prog)s [options]"
    parser.epilog = _EXAMPLES
    options.model_options(parser)
    names = [name for name in options.MEASURED if name != "draft_sampling"]
    old = {"max_num_seqs": "--concurrency"}
    options.engine_options(parser, names, defaults={"max_num_seqs": 1}, old=old)
    add, number, _ = adding(parser.add_argument_group("measurement"))
    number("--context", default=256, help="tokens of every prompt (default %(default)s)")
    number("--steps", default=20, help="steps measured (default %(default)s)")
    add("--trace", metavar="FILE", help="write the trace as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs `specdec profile`.

    Raises:
        SpecDecError: an option, a file or a model is wrong.
    """
    from evals.profile.profile import format_profile, profile_steps
    from evals.prompt_sets import load_prompt_set

    check_writable(args.trace)
    decoder = options.load_decoder(args, args.drafter, options.engine_config(args))
    items = load_prompt_set("bundled").items
    prompts = [
        _filled(decoder.tokenize(items[i % len(items)].turns[0]), args.context)
        for i in range(args.max_num_seqs)
    ]
    trace = Path(args.trace) if args.trace else None
    print(describe_drafts(decoder, drafter_name(args.drafter, args.model)))
    print(format_profile(profile_steps(decoder, prompts, steps=args.steps, trace=trace)))
    return 0


def _filled(tokens: list[int], length: int) -> list[int]:
    """The tokens, repeated up to `length`.

    >>> _filled([1, 2, 3], 5)
    [1, 2, 3, 1, 2]
    """
    return (tokens * (length // len(tokens) + 1))[:length]
