"""What the engine's host work costs per request and step: `python -m tests.checks.host`.

Microseconds of the processor's time in `Session.step` and in reading what it brings, divided by the
requests of the step. What a GPU would do, the captured step, is done by the processor here for a
target that is a mere table, and its time is left out. Each figure is the median of several runs of
steps, for requests at different places of their cache blocks.
"""

import argparse
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from drafters.ngram import NGramDrafter
from specdec.base.config import DEFAULT_BLOCK_SIZE, CacheConfig, EngineConfig
from specdec.engine.capture.captured import capture_steps
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Status
from specdec.model.batch import ForwardInput
from specdec.model.core import Verifier, VerifyOutput
from specdec.sampling.params import SamplingParams
from specdec.session.handle import Handle, Stream
from specdec.session.session import Session
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model, tiny_tokenizer

RUN = 8
"""Steps of a run."""

SILENT: dict[str, Any] = {"incremental": False, "text": False}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "greedy, read at the end": (0, {}, SILENT),
    "sampled": (0, {"temperature": 0.8, "top_p": 0.9}, SILENT),
    "7 drafts": (7, {}, SILENT),
    "7 drafts, sampled": (7, {"temperature": 0.8, "top_p": 0.9}, SILENT),
    "log-probabilities": (0, {"top_logprobs": 2}, SILENT),
    "64 tokens each": (0, {"max_tokens": 64}, SILENT),
    "tokens as they come": (0, {}, {"text": False}),
    "text as it comes": (0, {}, {}),
    "stop strings": (0, {"stop": ("\n\n", "~~~~~~")}, SILENT),
}
"""Drafts per step, changes of `SamplingParams`, and how `Session.submit` is asked, by title. Who
ends is followed by another.
"""


class Apart:
    """Keeps the time of device work apart. As a `Capture` it repeats what it is given.

    Attributes:
        seconds: of device work so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, whose time is noted."""

        def run(*args: Any) -> Any:
            started = time.thread_time()
            outcome = work(*args)
            self.seconds += time.thread_time() - started
            return outcome

        return run

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        """See `Capture.capture`."""
        return self.timed(launch)


def table_verifier() -> Verifier:
    """A tiny target whose logits depend on the last token alone, so that steps leave the
    processor's caches to the host.
    """
    verifier = paged_verifier(plain_model("llama", num_hidden_layers=1), DEFAULT_BLOCK_SIZE)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def forward(rows: ForwardInput, *_: Any) -> VerifyOutput:
        return VerifyOutput(
            table[rows.token_ids if rows.logit_rows is None else rows.token_ids[rows.logit_rows]]
        )

    verifier.forward = forward  # type: ignore[method-assign, assignment]
    return verifier


def microseconds(verifier: Verifier, num_reqs: int, title: str, runs: int) -> float:
    """Of the host per request and step, in the case of that title."""
    drafts, params, how = CASES[title]
    steps = RUN * runs
    config = EngineConfig(
        max_num_seqs=num_reqs,
        max_model_len=2 * DEFAULT_BLOCK_SIZE + (drafts + 1) * (steps + 16),
        max_prefill_tokens=4096,
        num_draft_tokens=drafts,
        pipeline_depth=1,
        cache=CacheConfig(memory_bytes=2**29),
    )
    engine = SpecEngine(verifier, NGramDrafter(max_draft_tokens=drafts) if drafts else None, config)
    device = Apart()
    capture_steps(engine.runner, engine.slots, device, 0, required=True)
    runner = engine.runner
    # Larger batches have no graph.
    runner.step_table = device.timed(runner.step_table)  # type: ignore[method-assign]
    runner.prefill_step = device.timed(runner.prefill_step)  # type: ignore[method-assign]
    session = Session(engine, tiny_tokenizer(), max_queue=num_reqs)
    stream, generator = Stream(session), torch.Generator().manual_seed(0)
    sampling = SamplingParams(**{"max_tokens": config.max_model_len, "ignore_eos": True} | params)
    handles: dict[int, Handle] = {}

    def submit(index: int, most: int = sampling.max_tokens) -> None:
        prompt = torch.randint(
            3, VOCAB, (4 + index % DEFAULT_BLOCK_SIZE,), generator=generator
        ).tolist()
        handles[index] = session.submit(
            prompt, replace(sampling, max_tokens=most), index=index, stream=stream, **how
        )

    def step() -> None:
        session.step()
        while stream.ready:
            chunk = next(stream)
            if chunk.result is not None:
                submit(chunk.index)

    for index in range(num_reqs):  # of short outputs, some end in every step
        submit(index, sampling.max_tokens if sampling.max_tokens > 64 else 24 + index % 64)
    while engine.scheduler.waiting or any(
        request.status is not Status.RUNNING for request in engine.scheduler.working
    ):
        step()
    for _ in range(4):
        step()
    times = []
    for _ in range(runs):
        started, before = time.thread_time(), device.seconds
        for _ in range(RUN):
            step()
        times.append(time.thread_time() - started - (device.seconds - before))
    session.close()
    return median(times) / RUN / num_reqs * 1e6


def main() -> int:
    """A line per case."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.host", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[64, 256, 1024],
        metavar="N",
        help="decoded at once",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=list(CASES),
        metavar="TITLE",
        help=f"of {list(CASES)}",
    )
    parser.add_argument(
        "--runs", type=int, default=8, help=f"runs of {RUN} steps (default %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    verifier = table_verifier()
    print(
        f"microseconds per request and step, Python {sys.version.split()[0]}, torch"
        f" {torch.__version__}"
    )
    print(f"{'requests':<26}" + "".join(f"{number:>9,}" for number in args.requests))
    for title in args.cases:
        print(f"{title:<26}", end="", flush=True)
        for number in args.requests:
            print(f"{microseconds(verifier, number, title, args.runs):>9.2f}", end="", flush=True)
        print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
