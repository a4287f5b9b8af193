"""Times whole steps of the engine on this machine's GPU, and compares its memory with the forecast:
`python -m tests.checks.step`.

Targets and DFlash drafters have random weights, so nearly no draft is accepted: what counts is how
long a step takes, by the wall clock, captured where graphs are the default, results read one step
late as in any generation. For the shape of each target: one and 32 requests, a long context, plain
and with 1, 3, 7 and 15 drafts. With `--pair TARGET DRAFTER` the step of these two, in chains and
trees: how long it takes, how much of that drafting takes alone, and how many kernels it has.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType

from drafters.dflash.dummy import dummy_config, dummy_drafter
from specdec.attention.backend import AttentionSpec
from specdec.attention.selector import select_backend
from specdec.base.blocks import BlockShape
from specdec.base.config import EngineConfig
from specdec.device.device import resolve_device
from specdec.engine.capture.capture import CudaCapture
from specdec.engine.capture.prefill_graphs import max_prefill_rows
from specdec.engine.engine import SpecEngine
from specdec.engine.memory import graph_bytes
from specdec.engine.requests.request import Status
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.checks.random_targets import SHAPES, random_verifier
from tests.helpers.card import BLOCK

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
"""To rehearse with, where there is no GPU."""


def check_step(name: str, attention: str, device: torch.device) -> dict[str, float]:
    """Lines for whole steps of the engine: one or 32 requests, plain and with drafts, also at a
    long context.

    Returns:
        Milliseconds per step by title.
    """
    tiny = name == "tiny"
    shape = TINY if tiny else SHAPES[name]
    spec = AttentionSpec(
        device,
        torch.bfloat16,
        shape["num_attention_heads"],
        shape["num_key_value_heads"],
        shape["head_dim"],
        BLOCK,
        non_causal=True,
    )
    verifier = random_verifier(shape, select_backend(attention, spec))
    found: dict[str, float] = {}
    for drafts in (0, 15) if tiny else (0, 1, 3, 7, 15):
        first = 0.0
        for num_reqs, context in ((2, 32),) if tiny else ((1, 1024), (32, 1024), (1, 32768)):
            if context > 1024 and drafts in (1, 3, 7):
                continue
            own = dummy_config(SimpleNamespace(**shape))
            drafter = dummy_drafter(own, verifier) if drafts else None
            config = EngineConfig(
                max_num_seqs=num_reqs,
                max_model_len=context + 1024,
                max_prefill_tokens=4096,
                num_draft_tokens=drafts or None,
            )
            with Peak(device) as peak:
                engine = SpecEngine(verifier, drafter, config)
                milliseconds = step_time(engine, num_reqs, context, steps=2 if tiny else 40)
                cache = sum(tensor.nbytes for layer in engine.kv_cache.layers for tensor in layer)
                for_graphs = graph_bytes(
                    verifier, num_reqs * (drafts + 1), max_prefill_rows(verifier, num_reqs)
                )
            first = first or milliseconds
            title = f"{name}, {num_reqs} x {context:,}, {drafts} drafts"
            found[title] = milliseconds
            memory = peak.line(cache + for_graphs)
            print(
                f"{title:<46}{milliseconds:>8.2f} ms per step, {milliseconds / first:.2f} of the"
                f" first{memory}",
                flush=True,
            )
            del engine, drafter
    return found


def check_pair(
    target: str, drafter: str, device: torch.device, batches: Sequence[int], context: int
) -> dict[str, float]:
    """Lines for the steps of a target and a drafter that are loaded by name; see `check_step`."""
    decoder = SpecDecoder.from_pretrained(target, drafter=drafter, device=str(device))
    verifier, loaded, found = decoder.verifier, decoder.engine.drafter, dict[str, float]()
    decoder.close()
    del decoder
    assert loaded is not None, "a drafter is named"
    chains = [
        EngineConfig(num_draft_tokens=k) for k in (0, 1, 3, 5, 7) if k <= loaded.max_draft_tokens
    ]
    for num_reqs in batches:
        plain = 0.0
        for config in [*chains, *(EngineConfig(tree_nodes=n) for n in (7, 15, 31))]:
            sizes: dict[str, Any] = {
                "max_num_seqs": num_reqs,
                "max_model_len": context + 1024,
                "max_prefill_tokens": 4096,
            }
            used = None if config.num_draft_tokens == 0 else loaded
            engine = SpecEngine(verifier, used, replace(config, **sizes))
            steps, shape = 40 if device.type == "cuda" else 2, engine.planner.shapes[0]
            milliseconds = step_time(engine, num_reqs, context, steps=steps)
            plain = plain or milliseconds
            title = (
                f"{num_reqs} x {context:,}, {'' if shape.is_tree else 'chain '}{shape}, depth"
                f" {shape.depth}"
            )
            found[title] = milliseconds
            line = (
                f"{title:<32}{milliseconds:>8.2f} ms per step, {milliseconds / plain:.2f} of the"
                f" plain one"
            )
            if shape.drafts:
                drafting = draft_time(engine, shape)
                line += f"; drafting {drafting:.2f} ms, {drafting / shape.depth:.3f} for each depth"
            print(f"{line}{num_kernels(engine)}", flush=True)
            del engine
    return found


def draft_time(engine: SpecEngine, shape: BlockShape) -> float:
    """Milliseconds of drafting alone for the requests of an engine, captured where steps are."""
    state, device = engine.slots, engine.verifier.device
    selection = state.select(engine.scheduler.decoding)
    slots = state.slot_indices(selection.requests)
    bound = state.max_seq_len(selection, shape.drafts)

    def launch() -> None:
        sampling = state.sampling.select(slots, selection.plan)
        engine.runner.draft(
            state.gather(
                slots, sampling, shape=shape, context="now", max_seq_len=bound, min_seq_len=0
            )
        )

    again = launch
    with torch.inference_mode():
        if device.type == "cuda":
            state.extend_block_tables(selection.requests)
            again = CudaCapture(device).capture(launch, "draft")
        again()
        wait(device)
        repeats, started = 40 if device.type == "cuda" else 2, time.perf_counter()
        for _ in range(repeats):
            again()
        wait(device)
    return (time.perf_counter() - started) / repeats * 1e3


def num_kernels(engine: SpecEngine) -> str:
    """The kernels of a step, in words; nothing on a CPU."""
    if engine.verifier.device.type != "cuda":
        return ""
    engine.step()
    wait(engine.verifier.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            engine.step()
        wait(engine.verifier.device)
    kernels = sum(event.device_type == DeviceType.CUDA for event in profiler.events())
    return f"; {kernels / 4:.0f} kernels per step"


class Peak:
    """Most memory of a GPU that was in use within it, beside what was before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._loaded, self._most = device, 0, 0

    def __enter__(self) -> "Peak":
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._loaded = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self._most = torch.cuda.max_memory_allocated()

    def line(self, predicted: int) -> str:
        """The peak beside the prediction; nothing on a CPU."""
        if not self._most:
            return ""
        return (
            f"; peak {self._most / 2**30:.1f} GiB, {self._most / (self._loaded + predicted):.2f}"
            f" of the prediction"
        )


def step_time(engine: SpecEngine, num_reqs: int, context: int, steps: int = 40) -> float:
    """Milliseconds per step, wall clock, results read one step late as in any generation."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_reqs):
        prompt = torch.randint(
            2, engine.verifier.vocab_size, (context,), generator=generator
        ).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=1000, ignore_eos=True))
    while engine.scheduler.waiting or any(
        request.status is not Status.RUNNING for request in engine.scheduler.working
    ):
        engine.step()
    for _ in range(10):
        engine.step()
    wait(engine.verifier.device)
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wait(engine.verifier.device)
    return (time.perf_counter() - started) / steps * 1e3


def wait(device: torch.device) -> None:
    """Waits until a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """All shapes, the largest first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--attention", default="triton_fa", help="backend (default %(default)s)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=list(SHAPES),
        choices=[*SHAPES, "tiny"],
        help="(default: all but tiny)",
    )
    parser.add_argument("--device", default="cuda", help="(default %(default)s)")
    parser.add_argument(
        "--pair",
        nargs=2,
        metavar=("TARGET", "DRAFTER"),
        help="names as of `specdec bench`, in place of shapes",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=[1, 8, 32],
        help="of the pair (default %(default)s)",
    )
    parser.add_argument(
        "--context", type=int, default=512, help="of the pair, in tokens (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="write milliseconds by title as JSON")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("no CUDA or ROCm device here")
        return 2
    device = resolve_device(args.device)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, torch"
        f" {torch.__version__}, {args.attention}"
    )
    found: dict[str, float] = {}
    if args.pair:
        found = check_pair(args.pair[0], args.pair[1], device, args.batches, args.context)
    for name in () if args.pair else args.shapes:
        found |= check_step(name, args.attention, device)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
