"""The `specdec` command: finds a verb, runs it, makes errors a line and an exit status.

`specdec.base.registry.VERBS` says where each verb lives.
"""

import argparse
import atexit
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.files import reason_of
from specdec.base.packages import require_ours
from specdec.base.registry import VERBS, unknown_name
from specdec.base.version import __version__
from specdec.base.writing import NO_ROOM

_SMALLER = (
    "--max-num-seqs", "--max-model-len", "--kv-memory", "--batch-size", "--anchors", "--loss-rows",
)  # fmt: skip
"""Options that save memory by smaller values, as far as a command has them."""

_OF_OUTPUT = NO_ROOM | {errno.EBADF, errno.EIO}
"""Why standard output may not be written."""

_NOTES = ("specdec.attention.selector", "specdec.device.self_check")
"""Modules whose lines at INFO a user sees."""

EXIT_OK = 0
EXIT_FAILED = 1  # part of the work failed
EXIT_USAGE = 2  # an argument, a file or a model is wrong
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

_ended: list[int] = []  # the status of this process's command, once it is known


def command() -> NoReturn:
    """`main` as a process of its own, which ends with it."""
    _ended.append(main())
    sys.exit(_ended[0])


@atexit.register  # before all that is imported later, so that it is called behind that
def _leave() -> None:
    """Ends an interrupted command without destructors, which would abort libraries' threads."""
    if EXIT_INTERRUPTED in _ended:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(EXIT_INTERRUPTED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `specdec` with `argv` (default: those of the process) and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    _show_notes()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal that lacks a character shows "?", not a traceback
        sys.stdout.reconfigure(errors="replace")
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except SpecDecError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        _complain(f"error: {error}")
        return EXIT_USAGE
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        if "--debug" in arguments:
            traceback.print_exc()
        _complain(f"error: out of memory ({_first_line(error)}); {_less_memory(arguments[0])}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # nobody reads any more
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _OF_OUTPUT or error.filename is not None:
            raise
        _drop_output()
        way_out = "make room" if error.errno in NO_ROOM else "send it elsewhere"
        reason = f"cannot write standard output: {reason_of(error)}"
        _complain(f"error: {reason}; {way_out} and run again")
        return EXIT_USAGE


def _open_closed_streams() -> None:
    """Opens standard streams that the caller has closed, lest the next file takes their place."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It stays open as long as the process.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _show_notes() -> None:
    """Sends warnings of the library to standard error, and once what it chose and compiles."""
    logging.basicConfig(format="specdec: %(message)s", level=logging.WARNING, stream=sys.stderr)
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        known = record.getMessage() in said
        said.add(record.getMessage())
        return not known

    for name in _NOTES:
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).filters[:] = [is_new]


def _complain(text: str) -> None:
    """A last line for the user; where it cannot be written, the exit status says enough."""
    with suppress(OSError):
        print(f"specdec: {text}", file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Sends what is left to nowhere; the interpreter would complain once it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _out_of_memory(error: Exception) -> bool:
    """Whether Python, the CPU's allocator or an accelerator's says that memory is at its end."""
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "can't allocate memory" in str(error)
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__


_MAY_BE_EMPTY = ("ACTION", "JSON", "PROMPT", "TEXT")


class Parser(argparse.ArgumentParser):
    """Reports mistakes as `InvalidInputError`, and takes prompts anywhere between the options."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, formatter_class=_help_formatter, **options)

    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message}; see {self.prog} --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """What argparse makes of an option's values, none of which may be empty but a text."""
        metavar = action.metavar or "TEXT"
        if "" in arg_strings and metavar not in _MAY_BE_EMPTY:
            if not action.option_strings:
                raise InvalidInputError(f"{metavar} is empty; give one")
            what = f"{action.option_strings[-1]} is empty; give {metavar}"
            raise InvalidInputError(what if action.required else f"{what}, or leave it out")
        return super()._get_values(action, arg_strings)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses the arguments of the verb.

        Raises:
            InvalidInputError: an unknown option (the message names the nearest), or a wrong value.
        """
        namespace, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            raise InvalidInputError(f"unknown option {name}; {hint}")
        return namespace


def _parser_of(name: str) -> tuple[Any, Parser]:
    """The module of a command, and what parses its arguments."""
    verb = next((verb for verb in VERBS if verb.name == name), None)
    if verb is None:
        raise unknown_name([verb.name for verb in VERBS], name, "command")
    parser = Parser(f"specdec {name}", description=f"{verb.summary[:1].upper()}{verb.summary[1:]}.")
    require_ours(verb.home.partition(".")[0])
    home = import_module(verb.home)
    home.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return home, parser


def _less_memory(name: str) -> str:
    """What a command can be given to take less memory."""
    known = _parser_of(name)[1]._option_string_actions
    ways = [f"a smaller {option}" for option in _SMALLER if option in known]
    ways += ["a larger --accumulation"] if "--accumulation" in known else []
    return f"give {', '.join([*ways, 'or a smaller model'])}"


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        _overview().print_help(sys.stderr)
        return EXIT_USAGE
    name = arguments[0]
    _check_torchrun()
    try:
        if name.startswith("-"):
            _overview().parse(arguments)
            raise InvalidInputError("no command given; see specdec --help")
        home, parser = _parser_of(name)
        namespace = parser.parse(arguments[1:])
    except SystemExit:  # argparse has printed --help or --version
        return EXIT_OK
    if getattr(namespace, "revision", None) is not None:
        _pin(namespace)
    # whose ranks all measure
    if hasattr(namespace, "tensor_parallel") and not getattr(namespace, "dummy_weights", None):
        _join_torchrun(namespace)
    status: int = home.run(namespace)
    return status


def _pin(namespace: argparse.Namespace) -> None:
    """Puts the target's revision behind its name.

    Raises:
        InvalidInputError: there is no such name.
    """
    if not hasattr(namespace, "model"):
        return  # which a config file may name
    if namespace.model is None:
        raise InvalidInputError("--revision is about the target; name it with --model")
    from specdec.base.checkpoint.hub import pinned

    namespace.model, namespace.revision = pinned(namespace.model, namespace.revision), None


def _check_torchrun() -> None:
    """Takes empty variables of `torchrun` for missing ones, as all that reads them does.

    Raises:
        InvalidInputError: one of a rank is no number.
    """
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if name in os.environ}
    for name, text in given.items():
        if not text:
            del os.environ[name]
        elif (
            given.get("RANK")
            and given.get("WORLD_SIZE")
            and not (text.isascii() and text.isdigit())
        ):
            what = f"{name} is {text!r}; torchrun sets it to a number, so start with torchrun"
            raise InvalidInputError(f"{what}, or unset it")


def _join_torchrun(namespace: argparse.Namespace) -> None:
    """Under `torchrun` only rank 0 runs the command; this ends the other processes with it."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    from specdec.device.device import resolve_device
    from specdec.parallel.processes.launch import follow_torchrun

    namespace.tensor_parallel = follow_torchrun(
        namespace.tensor_parallel, resolve_device(namespace.device)
    )


def _overview() -> Parser:
    width = max(len(verb.name) for verb in VERBS)
    lines = ["commands:", *(f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS)]
    lines += ["", "specdec COMMAND --help lists the options of a command."]
    parser = Parser("specdec", usage="specdec COMMAND ...", epilog="\n".join(lines))
    parser.description = "Speculative decoding: exactly the output of the target model, sooner."
    parser.add_argument(
        "--version",
        action="version",
        version=f"specdec {__version__}",
        help="show the version and exit",
    )
    return parser


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30)
