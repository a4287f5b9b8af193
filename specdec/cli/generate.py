"""`specdec generate`: prompts in, results out as text or JSON, in the order of the prompts."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from specdec.cli.main import byte_size, number, whole_number
from specdec.cli.prompts import model_inputs, read_prompts
from specdec.cli.result_writer import ResultWriter
from specdec.config import CacheConfig, EngineConfig, SamplingParams
from specdec.errors import InvalidInputError
from specdec.metrics import pooled
from specdec.registry import COMMANDS, drafter_name, resolve

if TYPE_CHECKING:
    from specdec.decoder import GenerationResult, SpecDecoder
    from specdec.engine.timing import StepTimer

_EXAMPLES = """\
examples:
  specdec generate "What is speculative decoding?" --stream
  specdec generate --file questions.jsonl --json > answers.jsonl
  specdec generate "Count to twenty." --compare --repeats 3
  git diff | specdec generate --system "Write a commit message."
"""

DRAFTER_HELP = "auto (default: embedded for the embedded model, else ngram), embedded, ngram, or a checkpoint's folder or hub name"

_PHASES = ("schedule", "prefill", "draft", "verify", "accept", "context", "collect")
"""Order of the timing table; phases it does not know come last."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec generate`."""
    engine, params = EngineConfig(), SamplingParams()
    parser.usage = "%(prog)s [PROMPT ...] [--file FILE] [options]"
    parser.epilog = _EXAMPLES

    add = parser.add_argument_group("prompts").add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to answer; - reads standard input")
    add("--file", metavar="FILE", help="one prompt per line; a .jsonl line has a prompt, messages or question field")
    add("--system", metavar="TEXT", help="system message before every prompt")
    add("--raw", action="store_true", help="continue the prompts as they are, without the chat template")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="embedded", metavar="NAME", help="embedded (default), a folder, or a hub name")
    add("--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N")
    add("--dtype", default="auto", metavar="NAME", help="auto (default), float32, bfloat16 or float16")
    add("--attention", default="auto", metavar="NAME", help="attention backend, or auto (default)")
    add(
        "--max-num-seqs",
        type=whole_number,
        default=engine.max_num_seqs,
        metavar="N",
        help="prompts decoded at once (default %(default)s)",
    )
    add("--kv-memory", type=byte_size, metavar="SIZE", help="memory for the KV cache, such as 512M or 2G")
    add(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        help="capture decode steps as graphs (default: on CUDA)",
    )
    add("--kv-dtype", default="auto", metavar="NAME", help="auto (default), or fp8 for an 8-bit cache on backends that have one")

    add = parser.add_argument_group("speculation").add_argument
    add("--drafter", default="auto", metavar="NAME", help=DRAFTER_HELP + "; none decodes plainly")
    add("-k", "--num-draft-tokens", type=whole_number, metavar="N", help="drafts in every step (default: chosen step by step)")
    add(
        "--draft-sampling",
        default=engine.draft_sampling,
        metavar="HOW",
        help="greedy (default) or probabilistic; for temperatures above 0",
    )

    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=whole_number, default=params.max_tokens, metavar="N", help="most new tokens (default %(default)s)")
    add("--temperature", type=number, default=params.temperature, metavar="T", help="0 (default) decodes greedily")
    add("--top-k", type=whole_number, default=params.top_k, metavar="N", help="keep the N likeliest tokens; 0 (default) is off")
    add(
        "--top-p", type=number, default=params.top_p, metavar="P", help="keep the likeliest tokens that reach P; 1 (default) is off"
    )
    add(
        "--min-p",
        type=number,
        default=params.min_p,
        metavar="P",
        help="drop tokens below P times the likeliest; 0 (default) is off",
    )
    add("--repetition-penalty", type=number, default=params.repetition_penalty, metavar="R", help="1 (default) is off")
    add("--seed", type=whole_number, metavar="N", help="repeats a sampled output (default: random)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the output before TEXT; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after end-of-sequence tokens")

    add = parser.add_argument_group("output").add_argument
    add("--stream", action="store_true", help="show the text while it is decoded")
    add("--json", action="store_true", help="print one JSON object per prompt")
    add("--logprobs", action="store_true", help="report log-probabilities, per token with --json")
    add("--timing", action="store_true", help="show where the time of a step goes; slows an accelerator down")
    add("--compare", action="store_true", help="measure the speed with and without drafts, and compare the outputs")
    add("--repeats", type=whole_number, metavar="N", help="timed runs of each side for --compare (default 1)")


def run(args: argparse.Namespace) -> int:
    """Runs `specdec generate`; 0 when every prompt was served, 1 when some failed.

    Raises:
        SpecDecError: an option, a file or the model is wrong; nothing was generated.
    """
    _check_combination(args)
    if args.compare:
        status: int = resolve(COMMANDS, "compare", "command")(args)
        return status
    prompts, sampling = read_prompts(args.prompts, args.file), sampling_params(args)
    decoder = load_decoder(args)
    inputs = model_inputs(prompts, decoder.tokenizer, raw=args.raw, system=args.system)
    writer = ResultWriter(prompts, as_json=args.json, live=args.stream)
    started = time.perf_counter()
    # One input alone raises what is wrong with it; among several, it fails without stopping the others.
    writer.write(decoder.stream(inputs if len(inputs) > 1 else inputs[0], sampling))
    seconds = time.perf_counter() - started
    if not args.json:
        gap = "\n" if sys.stdout.isatty() else ""
        drafts = describe_drafts(decoder, drafter_name(args.drafter, args.model))
        print(gap + _summary(writer.results, seconds, drafts), file=sys.stderr)
    if args.timing:
        print("\n" + format_timing(decoder.engine.timer), file=sys.stderr)
    return 1 if writer.num_failed else 0


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling options as the API takes them."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )


def load_decoder(args: argparse.Namespace) -> SpecDecoder:
    """The target and the drafter that the options name."""
    engine = EngineConfig(
        max_num_seqs=args.max_num_seqs,
        num_draft_tokens="auto" if args.num_draft_tokens is None else args.num_draft_tokens,
        draft_sampling=args.draft_sampling,
        graphs=args.graphs,
        timing=args.timing,
        cache=CacheConfig(memory_bytes=args.kv_memory),
    )
    from transformers.utils import logging

    from specdec.decoder import SpecDecoder

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # it would fill a log file with carriage returns
    return SpecDecoder.from_pretrained(
        args.model,
        drafter=args.drafter,
        device=args.device,
        dtype=args.dtype,
        attention=args.attention,
        kv_dtype=args.kv_dtype,
        engine=engine,
    )


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "prompt"), counted(1200, "token")
    ('1 prompt', '1,200 tokens')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def describe_drafts(decoder: SpecDecoder, drafter: str) -> str:
    """The drafter and k in a few words.

    Args:
        decoder: gives k.
        drafter: its name, see `specdec.registry.drafter_name`.
    """
    k = decoder.engine.num_draft_tokens
    return f"drafter {drafter}, {'k up to' if decoder.engine.draft_length else 'k ='} {k}" if k else "no drafts"


def format_timing(timer: StepTimer) -> str:
    """Table of the phases of a step: seconds in all, milliseconds per decode step, and share."""
    from specdec.engine.timing import MODEL_PHASES

    total = sum(timer.totals.values())
    own = sum(seconds for name, seconds in timer.totals.items() if name not in MODEL_PHASES)

    def row(name: str, seconds: float) -> str:
        per_step = 1000 * seconds / max(timer.num_steps, 1)
        return f"  {name:<13}{seconds:>9.3f}{per_step:>14.3f}{100 * seconds / total if total else 0:>9.1f}%"

    return "\n".join(
        [
            f"  {'phase':<13}{'seconds':>9}{'ms per step':>14}{'share':>10}",
            *(row(name, timer.totals[name]) for name in sorted(timer.totals, key=_place_in_step)),
            row("total", total) + f"   {counted(timer.num_steps, 'step')}",
            row("engine's own", own) + f"   all but {', '.join(MODEL_PHASES)}",
            *([f"  drafts offered: {_by_k(timer)}"] if timer.steps_by_k else []),
        ]
    )


def _by_k(timer: StepTimer) -> str:
    return ", ".join(f"{k} in {counted(count, 'step')}" for k, count in sorted(timer.steps_by_k.items()))


def _place_in_step(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


def _check_combination(args: argparse.Namespace) -> None:
    if args.json and args.stream:
        raise InvalidInputError("--stream shows text and --json prints objects; drop one of them")
    if args.repeats is not None and not args.compare:
        raise InvalidInputError("--repeats is about --compare; add --compare or drop --repeats")
    if args.compare and args.timing:
        raise InvalidInputError("--timing would distort the speeds of --compare; run it on its own")
    if args.compare and (args.drafter == "none" or args.num_draft_tokens == 0):
        option = "--drafter none" if args.drafter == "none" else "-k 0"
        raise InvalidInputError(f"--compare needs drafts to compare with; drop {option}")


def _summary(by_index: dict[int, GenerationResult], seconds: float, drafts: str) -> str:
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
        parts.append("cut at the length limit" if len(results) == 1 else f"{num_cut} cut at the length limit")
    logprobs = [value for result in results for value in result.logprobs or ()]
    if logprobs:
        parts.append(f"log-probability {sum(logprobs):.3f}, {sum(logprobs) / len(logprobs):.3f} per token")
    return ", ".join(parts)
