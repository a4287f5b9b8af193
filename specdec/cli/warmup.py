"""`specdec warmup`: compiles what a configuration needs, before a request waits for it."""

from __future__ import annotations

import argparse
import time

from specdec.cli import options

SLOW = 1.0
"""Seconds from which a shape is named: something was compiled for it."""

_EPILOG = """\
Give the options that `specdec generate` or a server will have. What is compiled stays in the caches
of AITER and Triton on disk, so one run is enough for each configuration, until one of them, torch
or the driver changes. Interrupted, the same command goes on with what is left.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.epilog = _EPILOG
    options.model_options(parser)
    options.engine_options(parser)
    options.sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Runs `specdec warmup`; 0 when every shape could be launched, 1 when some failed.

    Raises:
        SpecDecError: an option or the model is wrong.
        KeyboardInterrupt: interrupted, after a line that says how far it came.
    """
    from specdec.cli.progress import ProgressBar
    from specdec.engine.capture.warmup import launch_shape, warm_up_shapes

    decoder = options.load_decoder(args, args.drafter, options.engine_config(args))
    sampling = options.sampling_params(args)
    shapes = warm_up_shapes(decoder.engine, sampling)
    bar, started, num_failed = ProgressBar("warm-up", len(shapes)), time.perf_counter(), 0
    for index, shape in enumerate(shapes):
        bar.show(index, shape.title)
        before = time.perf_counter()
        try:
            launch_shape(decoder.engine, sampling, index)
        except KeyboardInterrupt:
            bar.close()
            done = f"{index} of {len(shapes)} shapes are warm"
            options.say(f"{done}; the same command goes on from there")
            raise
        except Exception as error:  # whatever a compiler or a kernel raises: the others may work
            num_failed += 1
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            bar.say(f"  failed: {shape.title}: {reason}")
            continue
        seconds = time.perf_counter() - before
        if seconds >= SLOW:
            bar.say(f"  {seconds:6.1f} s  {shape.title}")
    bar.finish(len(shapes), "")
    warm = len(shapes) - num_failed
    print(f"{warm} of {len(shapes)} shapes are warm, after {time.perf_counter() - started:.1f} s")
    return int(num_failed > 0)
