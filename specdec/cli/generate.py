"""`specdec generate`: prompts in, results out as text or JSON, in the order of the prompts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from specdec.base.errors import InvalidInputError
from specdec.base.packages import require_ours
from specdec.base.registry import PARTS, resolve
from specdec.base.writing import check_writable
from specdec.cli import options
from specdec.cli.answers import ClusterAnswers, LocalAnswers
from specdec.cli.fields import adding
from specdec.cli.prompts import Prompt, read_prompts
from specdec.cli.result_writer import BatchWriter, ResultWriter
from specdec.cli.summary import format_summary, format_timing

_EXAMPLES = """\
examples:
  specdec generate "What is speculative decoding?" --stream
  specdec generate --file questions.jsonl --json > answers.jsonl
  specdec generate "Count to twenty." --compare --repeats 3
  specdec generate --file questions.jsonl --json --out kept.jsonl --ray
  git diff | specdec generate --system "Write a commit message."
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [PROMPT ...] [--file FILE] [options]"
    parser.epilog = _EXAMPLES

    add, _, switch = adding(parser.add_argument_group("prompts"))
    add("prompts", nargs="*", metavar="PROMPT", help="text to answer; - reads standard input")
    add(
        "--file",
        metavar="FILE",
        help="one prompt per line; a .jsonl line has a prompt, messages or question, and may say"
        " how it is decoded, or is a request of OpenAI's batch files",
    )
    add("--system", metavar="TEXT", help="system message before every prompt")
    switch("--raw", help="continue the prompts as they are, without the chat template")
    what = "text that the output will be like, such as a file to be edited"
    add("--prediction", metavar="FILE", help=f"{what}; drafts are copied from it")

    options.model_options(parser)
    options.engine_options(parser)
    options.sampling_options(parser)
    old: Any = {"dest": "num_draft_tokens", "action": "store_const"}  # of an earlier version
    old |= {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--adaptive", const="auto", **old)
    parser.add_argument("--no-adaptive", const=None, **old)

    options.ray_options(parser)

    add, number, switch = adding(parser.add_argument_group("output"))
    what = "keep every finished answer there; the same command after a kill goes on with"
    add("--out", metavar="FILE", help=f"{what} what is left")
    switch("--stream", help="show the text while it is decoded")
    switch("--json", help="print one JSON object per prompt")
    switch("--compare", help="measure the speed with and without drafts, and compare the outputs")
    number("--repeats", help="timed runs of each side for --compare (default 1)")


def run(args: argparse.Namespace) -> int:
    """Runs `specdec generate`; 0 when every prompt was served, 1 when some failed.

    Raises:
        SpecDecError: an option, a file or the model is wrong; nothing was generated.
    """
    _check_combination(args)
    if args.compare:
        require_ours("evals")
        status: int = resolve(PARTS, "compare", "part")(args)
        return status
    check_writable(args.out)
    sampling, engine = options.sampling_params(args), options.engine_config(args)
    prompts = read_prompts(args.prompts, args.file, sampling, args.model)
    in_batch = prompts[0].request is not None
    if in_batch:
        _check_batch(args)
    _say_carried(prompts, as_json=args.json)
    options.cluster_config(args)
    where = LocalAnswers if args.ray is None else ClusterAnswers
    source = where(args, prompts, sampling, engine)
    writer: ResultWriter | BatchWriter
    if in_batch:
        writer = BatchWriter(prompts, source.key, source.reader)
    else:
        writer = ResultWriter(prompts, as_json=args.json, live=args.stream)
    started = time.perf_counter()
    writer.write(source)
    seconds = time.perf_counter() - started
    if not (args.json or in_batch):
        gap = "\n" if sys.stdout.isatty() else ""
        print(gap + format_summary(writer.results, seconds, source.drafts), file=sys.stderr)
    if args.timing and source.timer is not None:
        print("\n" + format_timing(source.timer), file=sys.stderr)
    return 1 if writer.num_failed else 0


def _say_carried(prompts: Sequence[Prompt], *, as_json: bool) -> None:
    """One line about fields of a file that change no answer."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.carried)
    if names:
        way = "are left out, and carried along with --json"
        way = "are carried along to the answers" if as_json else way
        options.say(f"fields that change no answer {way}: {', '.join(names)}")


def _check_batch(args: argparse.Namespace) -> None:
    """Raises what would change the prompts of a batch file, or how its answers are printed."""
    for name in ("stream", "compare", "raw", "system"):
        if getattr(args, name):
            what = f"{args.file!r} is a batch file, whose requests and answers are OpenAI's"
            raise InvalidInputError(f"{what}; drop --{name}")


def _check_combination(args: argparse.Namespace) -> None:
    if args.json and args.stream:
        raise InvalidInputError("--stream shows text and --json prints objects; drop one of them")
    given = [name for name in ("stream", "timing", "compare") if getattr(args, name)]
    if args.ray is not None and given:
        raise InvalidInputError(
            f"--{given[0]} looks at one engine of this process; drop it or --ray"
        )
    if args.out is not None and (args.stream or args.compare):
        raise InvalidInputError("--out keeps whole answers; drop it, or --stream and --compare")
    if args.repeats is not None and not args.compare:
        raise InvalidInputError("--repeats is about --compare; add --compare or drop --repeats")
    if args.compare and args.timing:
        raise InvalidInputError("--timing would distort the speeds of --compare; run it on its own")
    if args.compare and (args.drafter == "none" or args.num_draft_tokens == 0):
        option = "--drafter none" if args.drafter == "none" else "-k 0"
        raise InvalidInputError(f"--compare needs drafts to compare with; drop {option}")
