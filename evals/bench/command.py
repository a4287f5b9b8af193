"""`specdec bench`: measure, compare two reports, or draw one."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.bench import shapes
from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.files import user_path
from specdec.base.writing import check_apart, check_writable, place_of, write_text
from specdec.cli import options
from specdec.cli.fields import adding, check_read, from_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from evals.bench.cluster import Progress
    from evals.bench.config import BenchConfig
    from evals.report.report import Report
    from evals.runner import OnStep
    from specdec.engine.requests.request import Request

_EXAMPLES = """\
examples:
  specdec bench
  specdec bench --sets gsm8k mine --data gsm8k=test.jsonl mine=asked.jsonl --limit 40 \\
      --drafter smollm2-dflash ngram -k 4 8
  specdec bench --max-num-seqs 1 8 32 --temperature 0 1 --out report.json --html report.html
  specdec bench --peer transformers transformers-lookup llama.cpp
  specdec bench --dummy-weights qwen3-8b --max-num-seqs 1 32 --prompt-tokens 1024 16384 \\
      --max-tokens 64 --peer vllm
  specdec bench --dummy-weights qwen3-8b --synthetic-acceptance 6.5 -k 15 --max-num-seqs 1 8 32 \\
      --prompt-tokens 256 --max-tokens 64 --peer vllm
  specdec bench compare before.json after.json
  specdec bench show report.json --html report.html
  specdec bench show first.json second.json --format latex

Sets: bundled (comes with the package), gsm8k, math500, humaneval, mbpp, mt-bench (from the hub),
code, editing, translation, summaries, questions, retrieval (made from the manual of the Python that
runs), or any JSONL file with --data.
docs/evaluation.md says what is measured and how, and documents the report.
"""


_SHAPES_ALONE = ("dummy_weights", "prompt_tokens", "verify_rows", "synthetic_acceptance")
_DRAFTERS_ALONE = ("synthetic_spread", "divide_drafter")
_OF_SHAPES = (
    "attention", "block_size", "device", "drafter", "dtype", "graphs", "kv_dtype", "max_num_seqs",
    "max_tokens", "num_draft_tokens", "out", "peer", "prefill_dtype", "repeats", "seed",
    "tree_nodes", "warmup", "weights",
)  # fmt: skip
"""What options of random weights, of a drafter of such, and others that they read are called."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec bench`."""
    parser.usage = "%(prog)s [compare A.json [B.json] | show A.json ...] [options]"
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "action",
        nargs="*",
        metavar="ACTION",
        help="compare two reports, or the drafters of one; show one, or several as one table with"
        " --format; without it, measure",
    )

    add, number, switch = adding(parser.add_argument_group("what to ask"))
    names = {"nargs": "+", "default": ["bundled"], "metavar": "NAME"}
    add("--sets", help="prompt sets (default bundled)", **names)
    files = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME=FILE"}
    add("--data", help="read set NAME from a JSONL file", **files)
    number("--limit", help="only the first N rows of every set")
    what = "only the first N rows of every category of a set, such as MT-Bench's"
    number("--per-category", help=what)
    switch("--raw", help="continue the prompts as they are, without the chat template")

    options.model_options(parser, several=("drafter",))
    options.engine_options(
        parser,
        options.MEASURED,
        several=("num_draft_tokens", "tree_nodes", "verify_budget", "max_num_seqs"),
        defaults={"max_num_seqs": 1},
        old={"max_num_seqs": "--concurrency"},
    )
    options.sampling_options(
        parser,
        ("max_tokens", "temperature", "top_k", "top_p", "seed"),
        several=("temperature",),
        defaults={"seed": 0},
    )

    add, number, switch = adding(parser.add_argument_group("measurement"))
    number("--repeats", default=3, help="timed passes of every side (default %(default)s)")
    number("--warmup", default=1, help="untimed passes before them (default %(default)s)")
    what = "ask every prompt once more, from the prefix cache, and print tau of that, too"
    switch("--behind-hits", help=what)
    peers = "transformers, transformers-lookup, llama.cpp[:FILE], vllm[:DRAFTER]"
    what = f"other systems in the same run: {peers}"
    add("--peer", nargs="+", default=[], metavar="NAME", help=what)

    group = parser.add_argument_group(
        "a shape without weights",
        "Times prefill and steps of a model with random weights, on prompts of random tokens;"
        " --max-tokens is the number of timed steps. No prompt set, drafter or sampling takes part."
        " --weights fp8 or int4 quantizes.",
    )
    add, number, _ = adding(group)
    add(
        "--dummy-weights",
        metavar="CONFIG",
        help="a config.json, a folder with one, or a shape that comes with the package: "
        + ", ".join(shapes.names()),
    )
    what = "lengths of the prompts; all but the first are measured with one request (default 1024)"
    number("--prompt-tokens", nargs="+", default=[1024], help=what)
    what = "rows per request of a step that verifies a chain of N - 1 drafts, made without cost;"
    what = f"{what} 1 leaves it out (default 8); --tree adds trees"
    number("--verify-rows", nargs="+", default=[8], help=what)
    add(
        "--synthetic-acceptance",
        nargs="+",
        type=float,
        metavar="L",
        help="measure tokens/s with a DFlash drafter of random weights, accepting as many drafts as"
        " make L tokens per step; several numbers are the rates at which the first 1, 2, ... drafts"
        " are accepted. --drafter names its config.json, -k the number of drafts",
    )
    what = "requests have means evenly spread from L - S to L + S (default 0: all have L)"
    add("--synthetic-spread", type=float, default=0.0, metavar="S", help=what)
    add(
        "--divide-drafter",
        action=argparse.BooleanOptionalAction,
        help="give each of torchrun's ranks a part of that drafter, or all of it (default: what is"
        " expected to be faster)",
    )

    options.ray_options(parser)

    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="FILE", help="write the report as JSON, after every part of the sweep")
    add("--html", metavar="FILE", help="write a page with plots that opens without a network")
    add(
        "--format",
        choices=("text", "markdown", "latex"),
        default="text",
        help="print figures as text, or a table of drafters by task (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `specdec bench`.

    Raises:
        SpecDecError: an option, a file or a model is wrong.
        KeyboardInterrupt: interrupted; what was measured is printed and written before.
    """
    action, *files = args.action or ["measure"]
    most = {"measure": 0, "compare": 2, "show": 1 if args.format == "text" else 99}
    if action not in most:
        what = f"unknown action {action!r}"
        raise InvalidInputError(f"{what} (known: compare, show; none to measure)")
    if not bool(most[action]) <= len(files) <= most[action]:
        some = {"measure": "no", "compare": "1 or 2", "show": "1"}[action]
        what = f"{action} takes {some} report files, not {len(files)}"
        raise InvalidInputError(f"{what}; see specdec bench --help")
    _check_options(args, action)
    read = [*files, args.dummy_weights or "", *(pair.partition("=")[2] for pair in args.data)]
    check_apart([args.out, args.html], filter(None, read))
    if action == "measure" and args.dummy_weights is not None:
        from evals.bench.dummy_command import measure_dummy

        return measure_dummy(args)
    if action == "measure":
        return _measure(args)
    from evals.report.html import check_page
    from evals.report.report import of_files, read_report

    if action == "compare":
        from evals.report.compare import compare_reports

        # The first sets the kind, so that a bench report and one of eval are refused as a pair.
        one = read_report(user_path(files[0]))
        other = read_report(user_path(files[1]), one["schema"]) if files[1:] else None
        with of_files(*files):
            text = compare_reports(one, other)
        print(text)
        return 0
    check_page(args.html)
    reports = [(file, read_report(user_path(file))) for file in files]
    if args.html and len(reports) > 1:
        raise InvalidInputError("a page shows one report; leave out --html, or the other reports")
    with of_files(*files):
        return _finish(reports, args)


def _check_options(args: argparse.Namespace, action: str) -> None:
    """Refuses options that this action, or the measurement that is asked for, does not look at."""
    check = partial(check_read, args, add_arguments)
    if action != "measure":
        shown = ("html", "format") if action == "show" else ()
        check(shown.__contains__, f"beside bench {action}; leave it out")
    elif args.dummy_weights is None:
        way = "without --dummy-weights; add that, or leave it out"
        check(lambda name: name not in (*_SHAPES_ALONE, *_DRAFTERS_ALONE), way)
    else:
        if not args.synthetic_acceptance:
            way = "of random weights without --synthetic-acceptance; add that, or leave it out"
            drafters = (*_DRAFTERS_ALONE, "drafter", "num_draft_tokens")
            check(lambda name: name not in drafters, way)
        read = (*_SHAPES_ALONE, *_DRAFTERS_ALONE, *_OF_SHAPES)
        check(read.__contains__, "beside --dummy-weights; leave it out")


def _measure(args: argparse.Namespace) -> int:
    from evals.bench.bench import Bench
    from evals.bench.cluster import ClusterBench
    from evals.report.html import check_page
    from evals.report.provenance import provenance
    from evals.report.report import write_report

    check_writable(args.out)
    check_page(args.html)
    config = bench_config(args)
    if config.behind_hits and args.ray is not None:
        raise InvalidInputError("--behind-hits asks one engine; leave out --ray")
    options.cluster_config(args)
    # Only the target is used, so the cache of this decoder is made as small as can be.
    smallest = EngineConfig(max_num_seqs=1, max_model_len=2)
    reports: Iterator[Report]
    if args.ray is None:
        base = options.load_decoder(args, None, smallest)
        bench = Bench(base, config, progress=_progress)
        reports = bench.run(provenance(base, list(bench.drafters)))
    else:
        if config.peers:
            what = "peers are measured beside one engine of this process"
            raise InvalidInputError(f"{what}; leave out --peer or --ray")
        path = _answers_file(args.out)
        reports = ClusterBench(
            options.load_pool(args, None, smallest), config, path=path, progress=_cluster_progress()
        ).run()
    report: Report | None = None
    try:
        for report in reports:
            if args.out:
                write_report(report, Path(args.out))
    except KeyboardInterrupt:
        if report is not None:
            print("\nspecdec: interrupted; this is what was measured until then", file=sys.stderr)
            _finish([("", report)], args)
        raise
    assert report is not None, "a sweep has at least one part"
    return _finish([("", report)], args)


def _answers_file(out: str | None) -> Path | None:
    """Where answers are kept beside a report; nowhere beside a device."""
    if out is None or place_of(Path(out)).is_stream:
        return None
    path = Path(out).with_suffix(".answers.jsonl")
    check_writable(path)
    return path


def bench_config(args: argparse.Namespace) -> BenchConfig:
    """The options as the API takes them; reads the prompt sets."""
    from evals.bench.config import BenchConfig
    from evals.prompt_sets import load_prompt_set, parse_data

    files = parse_data(args.data, args.sets, "--sets")
    how: Any = {"files": files, "limit": args.limit, "per_category": args.per_category}
    sets = (load_prompt_set(name, **how) for name in args.sets)
    return BenchConfig(
        sets=tuple(sets),
        drafters=tuple(args.drafter),
        num_draft_tokens=tuple(args.num_draft_tokens),
        trees=tuple(nodes for nodes in args.tree_nodes if nodes is not None),
        budgets=tuple(budget for budget in args.verify_budget if budget is not None),
        temperatures=tuple(args.temperature),
        concurrencies=tuple(args.max_num_seqs),
        peers=tuple(args.peer),
        **from_options(BenchConfig, args),
    )


def _finish(reports: Sequence[tuple[str, Report]], args: argparse.Namespace) -> int:
    """Prints reports, each with its file's name, and draws the page of one."""
    from evals.report.paper import paper
    from evals.report.table import format_report

    text = format_report(reports[0][1]) if args.format == "text" else paper(reports, args.format)
    if args.html:  # first: standard output may be closed
        from evals.report.html import html_report

        write_text(Path(args.html), html_report(reports[0][1]))
    print(text)
    return 0


def _progress(title: str, num_items: int) -> OnStep:
    """A bar for one turn of a pass: finished conversations, tau so far, tokens per second."""
    import time

    from specdec.cli.progress import ProgressBar
    from specdec.engine.requests.request import Status

    bar, started = ProgressBar(title, num_items), time.perf_counter()

    def follow(requests: list[Request]) -> None:
        done = sum(request.status is Status.FINISHED for request in requests)
        if done < num_items and not bar.due:
            return
        steps = sum(len(request.num_emitted) for request in requests)
        tau = sum(sum(request.num_emitted) for request in requests) / steps if steps else 0.0
        tokens = sum(len(request.output_token_ids) for request in requests)
        draw = bar.show if done < num_items else bar.finish
        draw(done, f"tau {tau:.2f}  {tokens / (time.perf_counter() - started):.1f} tokens/s")

    return follow


def _cluster_progress() -> Progress:
    """A bar for every pass: finished conversations."""
    from specdec.cli.progress import ProgressBar

    bars: dict[str, ProgressBar] = {}

    def follow(title: str, done: int, total: int) -> None:
        if title not in bars:
            bars[title] = ProgressBar(title, total)
        bar = bars[title]
        if done == total:
            bars.pop(title).finish(done, "")
        elif bar.due:
            bar.show(done, "")

    return follow
