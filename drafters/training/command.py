"""`specdec train`: answers, training and the check against the engine."""

import argparse
import os
import sys
from pathlib import Path

from drafters.training.config import BENCH_ALONE, TrainConfig, add_flags, build_config
from specdec.base.errors import InvalidInputError
from specdec.base.registry import PARTS, resolve
from specdec.base.writing import make_folder
from specdec.cli.fields import whole_number
from specdec.cli.options import ray_option, say_gpu

STAGES = ("answers", "train", "finish")
LEARN = "learn"

_EXAMPLES = """\
examples:
  specdec train --out run --prompts questions.jsonl --variations 4 --max-minutes 20
  specdec train --out run --model path/or/hub-name --self-prompts 20000 --temperatures 0 0.7
  specdec train answers --config run.toml
  torchrun --nproc-per-node 2 -m specdec train train --config run.toml
  specdec train --config run.toml --ray --workers 8
  specdec train finish --config run.toml
  specdec train --out run --init eagle3/head --answers-from own.jsonl --unroll 7
  specdec train --out run --init mtp --model NAME --answers-from own.jsonl --unroll 3
  specdec train learn --out round --init smollm2-dflash --answers-from kept
  specdec train bench qwen3-8b --max-length 2048 --batch-size 8 16 --anchors 64 256 --compile

Stages: answers (the target answers the prompts, and may write some itself), train, finish (export,
and compare tau with the engine's); all without a name. learn goes on with a drafter on requests
that a server has kept. bench times a step of the trainer at a shape, with random weights.
A killed run goes on with the same command. docs/training.md is the guide.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec train`."""
    parser.usage = "%(prog)s [STAGE ...] --out FOLDER [options]"
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "stages",
        nargs="*",
        metavar="STAGE",
        help="answers, train, finish (default: all three); or learn; or bench SHAPE",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML or JSON file with the options below as keys; flags win",
    )
    add_flags(parser)
    alone = {
        "shortest": "sequences have N to max-length tokens (default: max-length)",
        "cards": "say what each of N cards would hold, by arithmetic, and run nothing",
    }
    for name in BENCH_ALONE:
        text = f"bench alone: {alone[name]}"
        parser.add_argument(
            f"--{name}", type=whole_number, metavar="N", default=argparse.SUPPRESS, help=text
        )
    group = parser.add_argument_group("cluster")
    ray_option(group, "train in processes of a Ray cluster that all see the run's folder")
    parser.add_argument(
        "--workers",
        type=whole_number,
        metavar="N",
        help="how many with --ray (default: the cluster's GPUs, or 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `specdec train`; 0 when stages are complete, 1 when they were stopped as asked.

    Raises:
        SpecDecError: see `drafters.training.stages.run_stages`.
    """
    if args.stages[:1] in (["bench"], [LEARN]) and (args.ray, args.workers) != (None, None):
        what = f"specdec train {args.stages[0]} runs in this process"
        raise InvalidInputError(f"{what}; leave out --ray and --workers")
    if args.stages[:1] == ["bench"]:
        measured: int = resolve(PARTS, "train bench", "part")(args)
        return measured
    for name in vars(args).keys() & set(BENCH_ALONE):
        raise InvalidInputError(f"--{name} is for specdec train bench alone")
    if args.stages == [LEARN]:
        return _learn(args)
    config: TrainConfig = build_config(vars(args), args.config)
    stages = tuple(args.stages) or STAGES
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise InvalidInputError(f"unknown stage {unknown[0]!r} (known: {', '.join(STAGES)})")
    if args.workers is not None and (args.ray is None or args.workers < 1):
        raise InvalidInputError(f"workers is {args.workers}; give 1 or more, together with --ray")
    ordered = tuple(stage for stage in STAGES if stage in stages)
    make_folder(config.folder)
    try:
        there = args.ray is not None
        done = _run_there(ordered, config, args) if there else _run_here(ordered, config)
        return 0 if done else 1
    except KeyboardInterrupt:
        text = f"\nspecdec: what is finished is kept in {config.folder}"
        print(f"{text}; the same command goes on from there", file=sys.stderr)
        raise


def _run_here(stages: tuple[str, ...], config: TrainConfig) -> bool:
    from drafters.training.stages import run_stages

    if os.environ.get("RANK", "0") == "0":  # once, of all processes
        say_gpu(config.device)
    return run_stages(stages, config)


def _learn(args: argparse.Namespace) -> int:
    from drafters.training.learning.round import learn

    recipe = Path(__file__).with_name("recipes") / "learn.toml"
    config = build_config(vars(args), args.config, recipe)
    make_folder(config.folder)
    say_gpu(config.device)
    return 0 if learn(config) else 1


def _run_there(stages: tuple[str, ...], config: TrainConfig, args: argparse.Namespace) -> bool:
    from drafters.training.stages import run_stages
    from specdec.cluster.train import run_workers

    shared = tuple(stage for stage in stages if stage != "finish")
    return all(
        run_workers(args.ray, run_stages, some, config, workers=workers, folder=config.folder)
        for some, workers in ((shared, args.workers), (stages[len(shared) :], 1))
        if some
    )
