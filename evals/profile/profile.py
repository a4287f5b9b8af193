"""Where the time of a decoding step goes, kernel by kernel, as torch's profiler sees it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from evals.report.grid import align
from evals.report.sides import drafts_name
from evals.roofline import measured_bandwidth, step_bytes, synchronize
from evals.runner import num_captured
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.base.writing import check_writable, write_atomically
from specdec.engine.requests.request import Request, Status
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.session import Session


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Calls and own time, in microseconds, of one kernel or operator per step."""

    name: str
    calls: float
    microseconds: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Figures of decoding steps, prefill left out.

    Attributes:
        num_reqs: conversations in the batch.
        k: most drafts per step.
        context: tokens of the longest conversation when the measurement began.
        step_ms: milliseconds of each step, without the profiler, as steps follow one another.
        busy_ms: milliseconds per step in which a kernel ran, as profiled; None on a CPU.
        bandwidth: bytes per second that the device reads.
        step_bytes: bytes that a step has to read.
        kernels: the longest first; GPU kernels on an accelerator, operators on a CPU.
    """

    num_reqs: int
    k: int | str
    context: int
    step_ms: list[float]
    busy_ms: float | None
    bandwidth: float
    step_bytes: int
    kernels: list[KernelTime]


def profile_steps(
    decoder: SpecDecoder,
    prompts: Sequence[list[int]],
    *,
    steps: int = 20,
    warmup: int = 10,
    trace: Path | None = None,
) -> StepProfile:
    """Profiles decoding steps of a full batch.

    Args:
        decoder: its engine has to take all prompts at once.
        prompts: token ids, one list per conversation.
        steps: steps timed without the profiler, then as many under it.
        warmup: steps between the prefill and them. If one is captured later, all begins again.
        trace: where to write the trace, to be opened with chrome://tracing or Perfetto.

    Raises:
        InvalidInputError: more prompts than decode at once, too few steps, or no place for a trace.
        CapacityError: prompt and steps do not fit, or an output ended before the measurement.
    """
    engine = decoder.engine
    if len(prompts) > engine.config.max_num_seqs:
        raise InvalidInputError(
            f"{len(prompts)} prompts are to run at once and max_num_seqs is"
            f" {engine.config.max_num_seqs}; raise it or give fewer"
        )
    if steps < 1 or warmup < 0:
        what = f"steps is {steps} and warmup {warmup}"
        raise InvalidInputError(f"{what}; measure at least 1 step after 0 or more")
    check_writable(trace)
    window = _measure(decoder, prompts, steps, warmup)
    # every pass knows more graphs, so that in the end none is left to capture
    while window.num_captures:
        window = _measure(decoder, prompts, steps, warmup)
    if trace is not None:
        write_atomically(trace, lambda path: window.profiler.export_chrome_trace(str(path)))
    on_device = decoder.verifier.device.type == "cuda"
    k, context = engine.planner.shapes[-1].drafts, window.context
    return StepProfile(
        num_reqs=len(prompts),
        k=engine.k,
        context=context,
        step_ms=window.step_ms,
        busy_ms=_busy_us(window.profiler.events()) / steps / 1e3 if on_device else None,
        bandwidth=measured_bandwidth(decoder.verifier.device),
        step_bytes=step_bytes(engine, k=k, num_reqs=len(prompts), context=context),
        kernels=_kernels(window.profiler.key_averages(), steps, on_device=on_device),
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """One pass; steps captured as graphs while it was timed (`num_captures`) spoil every figure."""

    context: int
    step_ms: list[float]
    profiler: profile
    num_captures: int


def _measure(decoder: SpecDecoder, prompts: Sequence[list[int]], steps: int, warm: int) -> _Window:
    """Decodes `prompts` from their beginning: warm-up, timed steps, steps under the profiler.

    Raises:
        CapacityError: see `profile_steps`.
    """
    engine, session = decoder.engine, decoder.session
    # Enough that nobody finishes early, whatever is accepted, also not those who decode while the
    # others are still prefilled; one step more is in flight when results are read late.
    prefill_steps = -(-sum(map(len, prompts)) // engine.scheduler.max_prefill_tokens)
    most = (prefill_steps + warm + 2 * steps + 3) * (engine.num_draft_tokens + 1)
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    handles = [session.submit(one, sampling, incremental=False, text=False) for one in prompts]
    requests = [handle.request for handle in handles]
    try:
        while any(request.status is not Status.RUNNING for request in requests):
            session.step()
            _check_unfinished(requests)
        for _ in range(warm):
            session.step()
        context = max(request.kv_tokens_bound for request in requests)
        captured = num_captured(engine)
        step_ms = [seconds * 1e3 for seconds in _timed_steps(session, steps)]
        activities = [ProfilerActivity.CPU]
        if engine.verifier.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            for _ in range(steps):
                session.step()
            synchronize(engine.verifier.device)
        _check_unfinished(requests)
    finally:
        for handle in handles:
            handle.cancel()
    return _Window(context, step_ms, profiler, num_captured(engine) - captured)


def format_profile(result: StepProfile, *, most: int = 25) -> str:
    """The figures as text, with the `most` longest kernels."""
    total = sum(kernel.microseconds for kernel in result.kernels)
    kind = "operator" if result.busy_ms is None else "kernel"
    rows = [(kind, "calls/step", "us/step", "share")]
    for kernel in result.kernels[:most]:
        share = kernel.microseconds / total if total else 0.0
        rows.append(
            (
                _short(kernel.name),
                f"{kernel.calls:.1f}",
                f"{kernel.microseconds:.1f}",
                f"{100 * share:.1f}%",
            )
        )
    floor = 1e3 * result.step_bytes / result.bandwidth
    left_out = len(result.kernels) - most
    idle = ""
    if result.busy_ms is not None:
        share = 100 * _idle_share(result.busy_ms, result.step_ms)
        idle = f"; the GPU is idle {share:.1f}% of the time"
    return "\n".join(
        [
            f"{result.num_reqs} at once, {drafts_name(result.k)}, context {result.context}:"
            f" {median(result.step_ms):.2f} ms per step (median of {len(result.step_ms)},"
            f" {min(result.step_ms):.2f} to {max(result.step_ms):.2f}){idle}",
            f"reading the step's {result.step_bytes / 1e6:,.0f} MB alone would take {floor:.2f} ms"
            f" at the {result.bandwidth / 1e9:,.0f} GB/s that this device shows",
            "",
            *align(rows, left=(0,)),
            *([f"and {left_out} shorter ones"] if left_out > 0 else []),
        ]
    )


def _check_unfinished(requests: Sequence[Request]) -> None:
    """A smaller batch must not be taken for the one that was asked for.

    Raises:
        CapacityError: a request has finished, which only the model's length makes it do.
    """
    for request in requests:
        if request.status is Status.FINISHED:
            raise CapacityError(
                f"a conversation of {len(request.prompt_token_ids)} tokens came to its end"
                f" ({request.finish_reason}) after {len(request.output_token_ids)} more, before the"
                " measurement did; take shorter prompts or fewer at once"
            )


def _timed_steps(session: Session, steps: int) -> list[float]:
    """Seconds between the ends of calls: an accelerator's wait for the step before their own."""
    synchronize(session.engine.verifier.device)
    session.step()
    ends = [time.perf_counter()]
    for _ in range(steps):
        session.step()
        ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends)]


def _kernels(averages: Iterable[Any], steps: int, *, on_device: bool) -> list[KernelTime]:
    """Own time per step by name; on an accelerator that of kernels alone, not of operators."""
    found = []
    for entry in averages:
        if on_device and entry.device_type != DeviceType.CUDA:
            continue
        microseconds = entry.self_device_time_total if on_device else entry.self_cpu_time_total
        if microseconds > 0:
            found.append(KernelTime(entry.key, entry.count / steps, microseconds / steps))
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def _busy_us(events: Iterable[Any]) -> float:
    """Microseconds in which at least one kernel ran."""
    return covered(
        sorted(
            (e.time_range.start, e.time_range.end)
            for e in events
            if e.device_type == DeviceType.CUDA
        )
    )


def _idle_share(busy_ms: float, step_ms: Sequence[float]) -> float:
    """Share of a step without a kernel; profiled steps would be too long."""
    return max(0.0, 1 - busy_ms / median(step_ms))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of what sorted `spans` cover together.

    >>> covered([(0, 2), (1, 3), (5, 10)])
    8.0
    """
    busy, reached = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def _short(name: str, width: int = 72) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
