"""`specdec eval`: tasks of lm-eval, plain and speculative."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.base.errors import InvalidInputError
from specdec.base.packages import install_command
from specdec.base.registry import drafter_name
from specdec.base.writing import check_apart, check_writable, make_folder, write_text
from specdec.cli import options
from specdec.cli.fields import adding, from_options, whole_number

if TYPE_CHECKING:
    from evals.system import System
    from specdec.session.decoder import SpecDecoder

_EXAMPLES = """\
examples:
  specdec eval --tasks bundled --limit 10
  specdec eval --tasks gsm8k --limit 40 --data gsm8k=folder/of/its/jsonl/files --out run
  specdec eval --tasks gsm8k --chat --max-num-seqs 32 --drafter path/to/drafter -k 7 \\
    --out run --html run/report.html

The same command after a kill goes on where it stopped, given --out. docs/evaluation.md documents
the report.
"""


_HARNESS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--num_fewshot", "num_fewshot", {"type": whole_number}),
    ("--apply_chat_template", "chat", {"action": "store_true"}),
    ("--system_instruction", "system", {}),
    ("--log_samples", "log_samples", {"action": "store_true"}),
    ("--output_path", "out", {}),
    ("--batch_size", "max_num_seqs", {"type": whole_number}),
    ("--gen_kwargs", "gen_kwargs", {}),
)
"""Options as lm-eval spells them, which no help shows, with what they stand for."""


_TASK_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Options of sampling that hold in place of the task's own; greedy where neither names any."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec eval`."""
    parser.usage = "%(prog)s --tasks NAME ... [options]"
    parser.epilog = _EXAMPLES
    add, number, switch = adding(parser.add_argument_group("tasks"))
    add("--tasks", nargs="+", metavar="NAME", help="tasks of lm-eval, or bundled")
    files = {"nargs": "+", "action": "extend", "default": [], "metavar": "TASK=PATH"}
    add("--data", help="JSONL file, or a folder with one per split", **files)
    number("--limit", help="only the first N samples of every task")
    number("--num-fewshot", help="examples in the prompt (default: the task's own number)")
    switch("--chat", help="use the chat template, with few-shot examples as turns")
    add("--system", metavar="TEXT", help="system message, with --chat")
    what = "token, or its id, that ends the thinking: answers begin behind it"
    add("--think-end-token", metavar="TOKEN", help=what)
    peers = "models of lm-eval beside ours: hf, vllm, or NAME:FOLDER"
    add("--peer", nargs="+", default=[], metavar="NAME", help=peers)
    for option, name, how in _HARNESS:
        add(option, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)

    options.model_options(parser)
    old = {"max_num_seqs": "--batch-size", "max_model_len": "--max-length"}
    options.engine_options(parser, options.MEASURED, old=old)
    options.sampling_options(
        parser,
        ("max_tokens", "seed", *_TASK_SAMPLING),
        defaults={"max_tokens": None, "seed": 0} | dict.fromkeys(_TASK_SAMPLING),
        old={"max_tokens": "--max-gen-toks"},
    )

    options.ray_options(parser)

    add, _, switch = adding(parser.add_argument_group("output"))
    add("--out", metavar="FOLDER", help="report.json, and finished samples to resume from")
    switch("--log-samples", help="write lm-eval's record of every sample, too; needs --out")
    add("--html", metavar="FILE", help="write a page with plots that opens without a network")


def run(args: argparse.Namespace) -> int:
    """Runs `specdec eval`.

    Raises:
        SpecDecError: an option, a task, a file or a model is wrong.
    """
    args.tasks = [name for names in args.tasks or () for name in names.split(",") if name]
    if not args.tasks:
        raise InvalidInputError("no task given; name some with --tasks, such as gsm8k or bundled")
    if args.drafter == "none" or args.num_draft_tokens == 0:
        what = "plain decoding is always evaluated"
        raise InvalidInputError(f"{what}; leave out --drafter none and -k 0")
    if args.log_samples and not args.out:
        raise InvalidInputError("--log-samples needs a folder to write to; name it with --out")
    if args.system is not None and not args.chat:
        raise InvalidInputError("--system needs the chat template; add --chat")
    if args.peer and args.ray is not None:
        raise InvalidInputError("peers run in this process; leave out --peer or --ray")
    if find_spec("lm_eval") is None:
        what = "specdec eval needs lm-eval, which is not installed"
        raise InvalidInputError(f"{what}; run: {install_command('eval')}")

    from evals.prompt_sets import parse_data
    from evals.report.html import check_page, html_report
    from evals.report.table import format_report

    data = parse_data(args.data, args.tasks, "--tasks")
    folder = make_folder(args.out) if args.out else None
    check_page(args.html)
    if folder is not None:
        names = ("report.json", "plain.jsonl", "speculative.jsonl")
        check_writable(*(folder / name for name in names))
    check_apart([args.html], data.values())
    from evals.accuracy.evaluation import EvalConfig, evaluate

    drafter = drafter_name(args.drafter, args.model)
    system, origin = _system(args, drafter)
    others = {"data": data, "gen_kwargs": _gen_kwargs(args), "peers": tuple(args.peer)}
    config = EvalConfig(**from_options(EvalConfig, args) | others, folder=folder)
    try:
        report = evaluate(system, drafter, config, origin)
    except KeyboardInterrupt:
        if folder:
            text = f"\nspecdec: finished samples are kept in {folder}"
            print(f"{text}; the same command goes on from there", file=sys.stderr)
        raise
    if args.html:  # first: standard output may be closed
        write_text(Path(args.html), html_report(report))
    print(format_report(report))
    return 0


def _system(args: argparse.Namespace, drafter: str) -> tuple[System, dict[str, Any]]:
    """What answers, and where its figures come from."""
    from evals.report.provenance import provenance
    from evals.system import ClusterSystem, LocalSystem
    from specdec.session.provenance import command_line

    options.cluster_config(args)
    if args.ray is None:
        decoder = options.load_decoder(args, args.drafter, options.engine_config(args))
        return LocalSystem(decoder), provenance(decoder, [drafter])
    pool = options.load_pool(args, args.drafter, options.engine_config(args))
    found, origin = pool.call(_provenance_and_origin, drafter)
    run_by = {"command": command_line(), "num_engines": pool.config.engines}
    return ClusterSystem(pool, options.prompt_reader(args), origin), found | run_by


def _provenance_and_origin(
    decoder: SpecDecoder, drafter: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    from evals.report.provenance import provenance
    from specdec.cluster.origin import origin

    return provenance(decoder, [drafter]), origin(decoder)


def _gen_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Generation arguments in lm-eval's words, those of its own option among them.

    >>> _gen_kwargs(argparse.Namespace(max_tokens=64, temperature=0.7, top_k=20))
    {'max_gen_toks': 64, 'temperature': 0.7, 'top_k': 20, 'do_sample': True}
    """
    given: dict[str, Any] = {}
    if getattr(args, "gen_kwargs", None):
        from evals.accuracy.lm_eval_arguments import parsed_arguments

        given |= parsed_arguments(args.gen_kwargs)
    if args.max_tokens is not None:
        given["max_gen_toks"] = args.max_tokens
    asked = {name: getattr(args, name, None) for name in _TASK_SAMPLING}
    given |= {name: value for name, value in asked.items() if value is not None}
    if args.temperature is not None:
        given["do_sample"] = args.temperature > 0
    return given
