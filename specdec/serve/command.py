"""`specdec serve`: an HTTP server with OpenAI's routes."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from contextlib import ExitStack, closing
from dataclasses import replace

from specdec.base.cores import usable_cores
from specdec.base.errors import InvalidInputError
from specdec.base.registry import PARTS, drafter_name, resolve
from specdec.cli import options
from specdec.cli.fields import add_options, from_options
from specdec.serve.config import ServeConfig, fronts_for

_EXAMPLES = """\
examples:
  specdec serve --model Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --max-num-seqs 64
  SPECDEC_API_KEY=secret specdec serve --host 0.0.0.0 --port 30000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.epilog = _EXAMPLES
    options.model_options(parser)
    options.engine_options(parser)
    add_options(parser.add_argument_group("server"), ServeConfig)


def run(args: argparse.Namespace) -> int:
    """Runs `specdec serve`; 0 after it was told to end, 1 after the engine died.

    Raises:
        SpecDecError: an option or the model is wrong, or a package is missing.
    """
    try:
        from specdec.serve.learning.learner import Learner
        from specdec.serve.processes.fronts import Fronts
        from specdec.serve.processes.setup import Setup
        from specdec.serve.server import listen, take_connections
        from specdec.session.link.channel import Facts
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("specdec", "torch", "transformers"):
            raise
        from specdec.base.packages import install_command

        what = f"specdec serve needs {error.name}, which is not installed"
        raise InvalidInputError(f"{what}; run: {install_command('serve')}") from error
    logging.basicConfig(format="specdec: %(message)s", level=logging.WARNING, stream=sys.stderr)
    from specdec.base.checkpoint.hub import unpinned
    from specdec.cli.progress import Phases

    config, engine = ServeConfig(**from_options(ServeConfig, args)), options.engine_config(args)
    if config.front_processes is None:
        count = fronts_for(engine.max_num_seqs, usable_cores())
        config = replace(config, front_processes=count)
        if count > 1:
            why = f"for {engine.max_num_seqs} requests at once and {usable_cores()} cores"
            options.say(f"{count} front processes, {why}; --front-processes takes another number")
    sock = listen(config)  # a port that is taken is told before a model is loaded
    others = os.environ.get("RANK", "0") != "0"  # the leading rank serves
    count = 0 if others else config.num_fronts
    with closing(Fronts(count, sock, config)) as fronts, ExitStack() as left:
        drafter = drafter_name(args.drafter, args.model)
        learner = None
        if config.learn_from_requests is not None and not others:
            init = config.learn_device and resolve(PARTS, "learn", "part")(drafter)
            learner = left.enter_context(closing(Learner(config, args.model, init)))
        with closing(options.load_decoder(args, args.drafter, engine)) as decoder:
            decoder.get_ready(Phases())
            setup = Setup(Facts.of(decoder), config, unpinned(args.model), drafter)
            url = take_connections(sock)
            if sampled := dict(decoder.verifier.defaults.sampled):
                says = ", ".join(f"{name} {value:g}" for name, value in sampled.items())
                whence = "as the model's generation_config.json says"
                options.say(f"requests that do not say have {says}, {whence}")
            if learner is not None:
                options.say(learner.line)
            if line := setup.short_cache:
                options.say(line)
            if line := setup.said_of_tools(decoder.tokenizer):
                options.say(line)
            where = f"{setup.names[0]} with drafter {drafter} at {url}/v1"
            gc.collect()
            gc.freeze()  # what stays is not looked through again
            dead = fronts.serve(decoder, setup, lambda: options.say(where), learner)
    return int(dead)
