"""The command; see the package."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.checks import amd_first_day
from tests.checks.amd_first_day.gpu import find_gpus
from tests.checks.amd_first_day.record import counts, machine, read, write
from tests.checks.amd_first_day.run import Launch, command_of, launch, run_step
from tests.checks.amd_first_day.steps import Step, all_steps


def main(argv: list[str] | None = None) -> int:
    """Runs what is left to run; 0 when no step has failed, 1 when some have, 2 without a GPU, 3
    when the GPU has gone, 130 when interrupted.
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
        help="run these again; 'failed' means all that have neither passed nor been refused",
    )
    add("--data", metavar="FILE", help="GSM8K's questions, in place of the hub's: a JSONL file")
    add(
        "--limit",
        type=int,
        default=200,
        metavar="N",
        help="questions of GSM8K (default %(default)s)",
    )
    add("--model", metavar="NAME", help="a real target to measure, a folder or a hub name")
    add("--drafter", metavar="NAME", help="and its published drafter")
    add("--list", action="store_true", help="show the steps and their commands")
    add(
        "--rehearse",
        action="store_true",
        help="on a CPU, at tiny sizes, with an emulation of AITER; the figures mean nothing",
    )
    args = parser.parse_args(argv)
    folder = args.out.resolve()
    data = None if args.rehearse else args.data
    if (args.model is None) != (args.drafter is None):
        parser.error("--model and --drafter go together: name both, or neither")
    pair = (args.model, args.drafter) if args.model and not args.rehearse else None
    steps = all_steps(folder, tiny=folder / "tiny", data=data, limit=args.limit, pair=pair)
    start = launch
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
    gpus = find_gpus() if not args.rehearse else None
    if gpus is not None and not gpus.number:
        print(
            f"no GPU to check: {gpus.why_none} (--rehearse runs the steps without one)",
            file=sys.stderr,
        )
        return 2
    for step in [step for step in steps if gpus is not None and step.gpus > gpus.number]:
        print(f"left out: {step.name}, which takes {step.gpus} GPUs")
        steps.remove(step)
    folder.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        rehearsal.prepare(folder / "tiny")
    return _run(
        [step for step in steps if not args.only or step.name in args.only],
        folder,
        args.again,
        start,
        needs_gpu=not args.rehearse,
    )


def _check_names(names: list[str], steps: list[Step], parser: argparse.ArgumentParser) -> None:
    known = ["failed", *(step.name for step in steps)]
    for name in names:
        if name not in known:
            parser.error(f"no step is called {name!r} (known: {', '.join(known)})")


def _run(
    steps: list[Step], folder: Path, again: list[str], start: Launch, *, needs_gpu: bool
) -> int:
    """Runs the steps that have no entry yet, or another command's, or are to be run again."""
    about, done = machine(), read(folder / "result.json")
    for number, step in enumerate(steps, 1):
        known = done.get(step.name)
        repeat = step.name in again or (
            known is not None
            and "failed" in again
            and known["verdict"] not in ("passed", "refused")
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
        gone = ""
        if needs_gpu and done[step.name]["verdict"] not in ("passed", "refused"):
            gone = find_gpus().why_none
        if gone:
            done[step.name]["verdict"] += f", and the GPU has gone: {gone}"
        print(f"{done[step.name]['verdict']}, {done[step.name]['seconds']} s", flush=True)
        write(folder, about, done)
        if gone:
            print(
                "what follows would say nothing of this GPU: reset it, or the machine; the same"
                " command then goes on behind this step"
            )
            return 3
    return _conclude([done[step.name] for step in steps], folder)


def _conclude(entries: list[dict[str, Any]], folder: Path) -> int:
    print(f"\n{counts(entries)} Please open an issue with {folder / 'page.md'} as its text,")
    print(f"and attach {folder / 'result.json'}.")
    return int(any(entry["verdict"] not in ("passed", "refused") for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
