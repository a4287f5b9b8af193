"""The command; see the package."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.checks import amd_first_day
from tests.checks.amd_first_day.record import machine, read, write
from tests.checks.amd_first_day.run import Launch, command_of, launch, run_step
from tests.checks.amd_first_day.steps import Step, all_steps


def main(argv: list[str] | None = None) -> int:
    """Runs what is left to run; 0 when every step has passed, 1 when some have not, 130 when
    interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.amd_first_day", description=amd_first_day.__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("amd_first_day"),
        metavar="FOLDER",
        help="for results (default %(default)s)",
    )
    add("--only", nargs="+", default=[], metavar="NAME", help="these steps alone")
    add(
        "--again",
        nargs="+",
        default=[],
        metavar="NAME",
        help="run these again; 'failed' means all that have not passed",
    )
    add("--data", metavar="FILE", help="GSM8K's questions, in place of the hub's: a JSONL file")
    add(
        "--limit",
        type=int,
        default=200,
        metavar="N",
        help="questions of GSM8K (default %(default)s)",
    )
    add("--list", action="store_true", help="show the steps and their commands")
    add(
        "--rehearse",
        action="store_true",
        help="on a CPU, at tiny sizes, with an emulation of AITER; the figures mean nothing",
    )
    args = parser.parse_args(argv)
    folder = args.out.resolve()
    data = None if args.rehearse else args.data
    steps, start = all_steps(folder, tiny=folder / "tiny", data=data, limit=args.limit), launch
    if args.rehearse:
        from tests.checks.amd_first_day import rehearsal

        steps, start = rehearsal.smaller(steps), rehearsal.launch
    _check_names([*args.only, *args.again], steps, parser)
    if args.list:
        width = max(len(step.name) for step in steps)
        print(
            "\n".join(
                f"{step.name:<{width}}{step.minutes:>4g} min  {command_of(step)}" for step in steps
            )
        )
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        rehearsal.prepare(folder / "tiny")
    return _run(
        [step for step in steps if not args.only or step.name in args.only],
        folder,
        args.again,
        start,
    )


def _check_names(names: list[str], steps: list[Step], parser: argparse.ArgumentParser) -> None:
    known = ["failed", *(step.name for step in steps)]
    for name in names:
        if name not in known:
            parser.error(f"no step is called {name!r} (known: {', '.join(known)})")


def _run(steps: list[Step], folder: Path, again: list[str], start: Launch) -> int:
    """Runs the steps that have no entry yet, or another command's, or are to be run again."""
    about, done = machine(), read(folder / "result.json")
    for number, step in enumerate(steps, 1):
        known = done.get(step.name)
        repeat = step.name in again or (
            known is not None and "failed" in again and known["verdict"] != "passed"
        )
        print(f"[{number:>2} of {len(steps)}] {step.name}: {step.title} ... ", end="", flush=True)
        if known is not None and known["command"] == command_of(step) and not repeat:
            print(f"{known['verdict']} before")
            continue
        try:
            done[step.name] = run_step(step, folder, start)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here")
            return 130
        print(f"{done[step.name]['verdict']}, {done[step.name]['seconds']} s", flush=True)
        write(folder, about, done)
    return _conclude([done[step.name] for step in steps], folder)


def _conclude(entries: list[dict[str, Any]], folder: Path) -> int:
    passed = sum(entry["verdict"] == "passed" for entry in entries)
    print(
        f"\n{passed} of {len(entries)} steps passed. Please open an issue with {folder / 'page.md'}"
        f" as its text,"
    )
    print(f"and attach {folder / 'result.json'}.")
    return int(passed < len(entries))


if __name__ == "__main__":
    sys.exit(main())
