"""`specdec eval`: tasks of lm-eval, plain and speculative."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evals.bench.command import parse_files
from specdec.cli.generate import DRAFTER_HELP
from specdec.cli.main import byte_size, number, whole_number
from specdec.errors import InvalidInputError
from specdec.files import check_writable, make_folder, write_text
from specdec.registry import drafter_name

_EXAMPLES = """\
examples:
  specdec eval --tasks bundled --limit 10
  specdec eval --tasks gsm8k --limit 40 --data gsm8k=folder/with/train.jsonl/and/test.jsonl --out run
  specdec eval --tasks gsm8k --chat --batch-size 32 --drafter path/to/drafter -k 7 --out run --html run/report.html

The same command after a kill goes on where it stopped, given --out. docs/evaluation.md documents the report.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec eval`."""
    parser.usage = "%(prog)s --tasks NAME ... [options]"
    parser.epilog = _EXAMPLES
    add = parser.add_argument_group("tasks").add_argument
    add("--tasks", nargs="+", metavar="NAME", help="tasks of lm-eval, or bundled")
    add("--data", action="append", default=[], metavar="TASK=PATH", help="JSONL file, or a folder with one per split")
    add("--limit", type=whole_number, metavar="N", help="only the first N samples of every task")
    add("--num-fewshot", type=whole_number, metavar="N", help="examples in the prompt (default: the task's own number)")
    add("--chat", action="store_true", help="use the chat template, with few-shot examples as turns")
    add("--system", metavar="TEXT", help="system message, with --chat")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="embedded", metavar="NAME", help="embedded (default), a folder, or a hub name")
    add("--drafter", default="auto", metavar="NAME", help=DRAFTER_HELP)
    add("-k", "--num-draft-tokens", type=whole_number, metavar="N", help="drafts per step (default: the drafter's own number)")
    add("--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N")
    add("--dtype", default="auto", metavar="NAME", help="auto (default), float32, bfloat16 or float16")
    add("--attention", default="auto", metavar="NAME", help="attention backend, or auto (default)")
    add("--batch-size", type=whole_number, default=16, metavar="N", help="samples decoded at once (default %(default)s)")
    add("--max-length", type=whole_number, metavar="N", help="most tokens of prompt and output (default: the model's limit)")
    add("--kv-memory", type=byte_size, metavar="SIZE", help="memory for the KV cache of each side, such as 512M or 2G")
    add("--kv-dtype", default="auto", metavar="NAME", help="auto (default), or fp8 for an 8-bit cache on backends that have one")

    add = parser.add_argument_group("decoding, over what the tasks say").add_argument
    add("--max-gen-toks", type=whole_number, metavar="N", help="most new tokens")
    add("--temperature", type=number, metavar="T", help="0 decodes greedily")
    add("--seed", type=whole_number, default=0, metavar="N", help="for temperatures above 0 (default %(default)s)")

    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="FOLDER", help="report.json, and finished samples to resume from")
    add("--log-samples", action="store_true", help="write lm-eval's record of every sample, too; needs --out")
    add("--html", metavar="FILE", help="write a page with plots that opens without a network")


def run(args: argparse.Namespace) -> int:
    """Runs `specdec eval`.

    Raises:
        SpecDecError: an option, a task, a file or a model is wrong.
    """
    if not args.tasks:
        raise InvalidInputError("no task given; name some with --tasks, such as gsm8k or bundled")
    if args.drafter == "none" or args.num_draft_tokens == 0:
        raise InvalidInputError("plain decoding is always evaluated; leave out --drafter none and -k 0")
    if args.log_samples and not args.out:
        raise InvalidInputError("--log-samples needs a folder to write to; name it with --out")
    if args.system is not None and not args.chat:
        raise InvalidInputError("--system needs the chat template; add --chat")
    if find_spec("lm_eval") is None:
        raise InvalidInputError("specdec eval needs lm-eval, which is not installed; run: pip install 'specdec[eval]'")
    data = parse_files(args.data)
    unused = [name for name in data if name not in args.tasks]
    if unused:
        raise InvalidInputError(f"--data names {unused[0]!r}, which is not among --tasks {' '.join(args.tasks)}; add it there")

    from transformers.utils import logging

    from evals.report.html import check_plotting, html_report
    from evals.report.table import format_report

    check_writable(args.html)
    if args.html:
        check_plotting()
    folder = make_folder(args.out) if args.out else None
    if not sys.stderr.isatty():
        logging.disable_progress_bar()

    from evals.accuracy.evaluation import EvalConfig, evaluate
    from evals.report.provenance import provenance
    from specdec.config import CacheConfig, EngineConfig
    from specdec.decoder import SpecDecoder

    decoder = SpecDecoder.from_pretrained(
        args.model,
        drafter=args.drafter,
        device=args.device,
        dtype=args.dtype,
        attention=args.attention,
        kv_dtype=args.kv_dtype,
        engine=EngineConfig(
            max_num_seqs=args.batch_size,
            max_model_len=args.max_length,
            num_draft_tokens=args.num_draft_tokens,
            cache=CacheConfig(memory_bytes=args.kv_memory),
        ),
    )
    drafter = drafter_name(args.drafter, args.model)
    config = EvalConfig(
        tasks=tuple(args.tasks),
        data=data,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        chat=args.chat,
        system=args.system,
        gen_kwargs=_gen_kwargs(args),
        seed=args.seed,
        log_samples=args.log_samples,
        folder=folder,
    )
    try:
        report = evaluate(decoder, drafter, config, provenance(decoder, [drafter]))
    except KeyboardInterrupt:
        if folder:
            print(f"\nspecdec: finished samples are kept in {folder}; the same command goes on from there", file=sys.stderr)
        raise
    print(format_report(report))
    if args.html:
        write_text(Path(args.html), html_report(report))
    return 0


def _gen_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Generation arguments in lm-eval's words.

    >>> _gen_kwargs(argparse.Namespace(max_gen_toks=64, temperature=0.7))
    {'max_gen_toks': 64, 'temperature': 0.7, 'do_sample': True}
    """
    given: dict[str, Any] = {}
    if args.max_gen_toks is not None:
        given["max_gen_toks"] = args.max_gen_toks
    if args.temperature is not None:
        given |= {"temperature": args.temperature, "do_sample": args.temperature > 0}
    return given
