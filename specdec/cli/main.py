"""The `specdec` command: finds the verb, runs it, and turns what goes wrong into one line and an exit status.

Verbs live in modules of their own, which `specdec.registry.COMMANDS` names. Such a module has `add_arguments(parser)` beside the
function that runs it, and imports torch and transformers only inside that function, so that `--help` answers at once.
"""

import argparse
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from specdec import __version__
from specdec.errors import InvalidInputError, SpecDecError
from specdec.registry import COMMANDS, resolve

VERBS = {
    "generate": "complete prompts, or compare the speed with plain decoding",
    "eval": "score tasks of lm-eval with and without drafts",
    "bench": "measure acceptance and speed over prompt sets",
    "profile": "show which kernels a decoding step spends its time in, and write a trace",
    "train": "train a drafter on the target's own answers",
    "doctor": "show the device, what is installed, and which attention backends work",
}
"""What `specdec --help` lists, one line each; every verb has its function in `COMMANDS`."""

EXIT_OK = 0
EXIT_FAILED = 1  # part of the work failed
EXIT_USAGE = 2  # an argument, a file or a model is wrong
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `specdec` with `argv` (default: the arguments of the process) and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?", not a traceback
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except SpecDecError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print(f"specdec: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("specdec: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more. Without this the interpreter would complain once it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


class Parser(argparse.ArgumentParser):
    """Reports mistakes as `InvalidInputError`, and takes prompts before, between and after the options."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, formatter_class=_help_formatter, **options)

    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message}; see {self.prog} --help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses the arguments of the verb.

        Raises:
            InvalidInputError: an option is unknown (the message names the nearest one) or its value is malformed.
        """
        namespace, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            raise InvalidInputError(f"unknown option {name}; {hint}")
        return namespace


def whole_number(text: str) -> int:
    """Argument type: an integer; its range is checked where it is used."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """Argument type: a number; its range is checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def byte_size(text: str) -> int:
    """Argument type: a size in bytes, in binary units.

    >>> byte_size("1000"), byte_size("512M"), byte_size("1.5GiB")
    (1000, 536870912, 1610612736)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or a number with K, M, G or T as in 512M")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        _overview().print_help(sys.stderr)
        return EXIT_USAGE
    verb = arguments[0]
    try:
        if verb.startswith("-"):
            _overview().parse(arguments)
            raise InvalidInputError("no command given; see specdec --help")
        run = resolve({name: COMMANDS[name] for name in VERBS}, verb, "command")
        parser = Parser(f"specdec {verb}", description=f"{VERBS[verb].capitalize()}.")
        import_module(COMMANDS[verb].partition(":")[0]).add_arguments(parser)
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        namespace = parser.parse(arguments[1:])
    except SystemExit:  # argparse has printed --help or --version
        return EXIT_OK
    status: int = run(namespace)
    return status


def _overview() -> Parser:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    parser = Parser(
        "specdec",
        usage="specdec COMMAND ...",
        description="Speculative decoding: exactly the output of the target model, sooner.",
        epilog="\n".join(["commands:", *lines, "", "specdec COMMAND --help lists the options of a command."]),
    )
    parser.add_argument("--version", action="version", version=f"specdec {__version__}", help="show the version and exit")
    return parser


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30)
