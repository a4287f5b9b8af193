"""`specdec profile`: a table of kernels and a trace of decoding steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.cli.generate import DRAFTER_HELP, describe_drafts
from specdec.cli.main import whole_number
from specdec.files import check_writable
from specdec.registry import drafter_name

_EXAMPLES = """\
examples:
  specdec profile
  specdec profile --drafter path/to/drafter --concurrency 8 --context 1024 --trace trace.json

The batch is made of the bundled problems, each repeated up to --context tokens. Open the trace with chrome://tracing or
https://ui.perfetto.dev.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec profile`."""
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--model", default="embedded", metavar="NAME", help="embedded (default), a folder, or a hub name")
    add("--drafter", default="auto", metavar="NAME", help=DRAFTER_HELP + "; none decodes plainly")
    add("-k", "--num-draft-tokens", type=whole_number, metavar="N", help="drafts per step (default: the drafter's own)")
    add("--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N")
    add("--dtype", default="auto", metavar="NAME", help="auto (default), float32, bfloat16 or float16")
    add("--attention", default="auto", metavar="NAME", help="attention backend, or auto (default)")
    add(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        help="capture decode steps as graphs (default: on CUDA)",
    )
    add("--concurrency", type=whole_number, default=1, metavar="N", help="conversations at once (default 1)")
    add("--context", type=whole_number, default=256, metavar="N", help="tokens of every prompt (default %(default)s)")
    add("--steps", type=whole_number, default=20, metavar="N", help="steps measured (default %(default)s)")
    add("--trace", metavar="FILE", help="write the trace as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs `specdec profile`.

    Raises:
        SpecDecError: an option, a file or a model is wrong.
    """
    from evals.profile.profile import format_profile, profile_steps
    from evals.prompt_sets import load_prompt_set
    from specdec.config import EngineConfig
    from specdec.decoder import SpecDecoder

    check_writable(args.trace)
    decoder = SpecDecoder.from_pretrained(
        args.model,
        drafter=args.drafter,
        device=args.device,
        dtype=args.dtype,
        attention=args.attention,
        engine=EngineConfig(max_num_seqs=args.concurrency, num_draft_tokens=args.num_draft_tokens, graphs=args.graphs),
    )
    items = load_prompt_set("bundled").items
    prompts = [_filled(decoder.tokenize(items[i % len(items)].turns[0]), args.context) for i in range(args.concurrency)]
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
