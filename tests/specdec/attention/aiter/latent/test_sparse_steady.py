"""Steady decoding of a model with an indexer: once every request has `topk` tokens, no step runs
AITER's planner.

Captured steps are recorded and replayed as in `tests.helpers.recorder`, calls of
AITER included.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from drafters.ngram import NGramDrafter
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.base.blocks import BlockShape
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.engine import SpecEngine
from specdec.engine.launch import Launch
from specdec.engine.policy.timing import StepClock
from specdec.engine.requests.request import Request
from specdec.engine.selection import Selection
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.aiter_emulation import Machine
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.recorder import Recorder
from tests.helpers.rocm import Install
from tests.helpers.tiny_configs import TOPK
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts
from tests.specdec.attention.aiter.latent.test_sparse_generation import (
    INDEX_HEAD_DIM,
    RoundedReference,
)

MAX_TOKENS = 8
PROMPTS = [
    [*prompt[:length], 0]
    for prompt, length in zip(random_prompts(9, longest=80)[-4:], (13, 14, 2, 12), strict=True)
]
"""The third is short of `TOPK` tokens for several steps; the others grow into a second block."""


@pytest.fixture
def rocm(rocm: Install) -> Install:
    """In float32, on small latents."""
    return partial(rocm, tiny=True)


class AiterRecorder(Recorder):
    """Records AITER's calls among the operations; work of a kind is launched once before it is
    recorded, as on a device.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.kinds = machine, set[Hashable]()
        self._patch: AbstractContextManager[pytest.MonkeyPatch] | None = None

    def __enter__(self) -> Any:
        self._patch = pytest.MonkeyPatch.context()
        patch = self._patch.__enter__()
        patch.setattr(Tensor, "is_cuda", True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        self.machine.watch = self._note
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self._patch is not None
        self._patch.__exit__(*error)
        self.machine.watch = None

    def _note(self, function: Callable[..., Any], arguments: dict[str, Any], result: Any) -> None:
        given = {
            x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if isinstance(x, Tensor)
        }
        outputs = enumerate(tree_leaves(result))
        fresh = [
            (i, x)
            for i, x in outputs
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given
        ]
        self._tape.append((function, (), arguments, fresh))

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        """See `Capture.capture`."""
        first, self.kinds = kind not in self.kinds, self.kinds | {kind}
        if first:
            return super().capture(launch, kind)
        calls = iter((lambda: None, launch))  # nothing in place of the launch before
        return super().capture(lambda: next(calls)(), kind)


def steps_of(engine: SpecEngine, machine: Machine) -> list[tuple[int, int, int]]:
    """Runs everything: of each decode step the rows, the fewest tokens in the cache, and the calls
    of AITER's planner in it.
    """
    steps: list[tuple[int, int, int]] = []
    graphs = engine.runner.graphs
    decode = engine.runner.decode

    def planned() -> int:
        return sum(call.name == "get_mla_metadata_v1" for call in machine.calls)

    def watched(launch: Launch, clock: StepClock) -> None:
        least, before = launch.selection.shortest, planned()
        captured = graphs.num_captured if graphs else 0
        decode(launch, clock)
        if graphs is None or graphs.num_captured == captured:  # a capture is launched besides
            steps.append((len(launch.requests) * launch.shape.rows, least, planned() - before))

    if graphs is not None:
        # No step without its graph.
        engine.slots.decode_batch = None  # type: ignore[assignment, method-assign]
    engine.runner.decode = watched  # type: ignore[method-assign]
    finish(engine)
    return steps


def make(verifier: Verifier, k: int, machine: Machine | None, *, blocks: int = 60) -> SpecEngine:
    """An engine with all prompts queued; with a machine, every step is captured."""
    memory = blocks * 16 * sum(spec.bytes_per_token(verifier.dtype) for spec in verifier.kv_specs)
    engine = tiny_engine(
        verifier,
        NGramDrafter(max_draft_tokens=k) if k else None,
        max_num_seqs=3,
        max_prefill_tokens=13,
        cache_bytes=memory,
        num_draft_tokens=k,
    )
    if machine is not None:
        steady_len = verifier.attention.steady_len
        engine.runner.graphs = StepGraphs(
            AiterRecorder(machine), engine.slots, engine.runner.step_table, steady_len=steady_len
        )
    return engine


def queue(engine: SpecEngine) -> list[Request]:
    return [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def model() -> Any:
    return plain_model("deepseek_v32", index_head_dim=INDEX_HEAD_DIM)


@pytest.fixture(scope="module")
def want(model: Any) -> list[list[int]]:
    """What the oracle with the same rounding generates."""
    engine = make(paged_verifier(model, 16, backend=RoundedReference), 0, None)
    requests = queue(engine)
    return finish(engine, *requests)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("k", "blocks"), [(0, 60), (3, 60), (0, 4)])
def test_steady_steps_run_no_planner(
    rocm: Install, model: Any, want: list[list[int]], k: int, blocks: int, captured: bool
) -> None:
    """While requests join, leave, are preempted and come back, of which one begins short: a step
    with a request short of tokens plans, any other only when the first of its number of rows, and
    every token is right."""
    machine = rocm(num_compute_units=8)
    verifier = paged_verifier(model, 16, backend=RocmAiterMlaSparseBackend)
    assert verifier.attention.steady_len == TOPK - 1
    engine = make(verifier, k, machine if captured else None, blocks=blocks)
    requests = queue(engine)
    steps, seen = steps_of(engine, machine), set[int]()
    assert [request.output_token_ids for request in requests] == want
    assert (engine.scheduler.num_preemptions > 0) == (blocks == 4)
    for rows, least, planned in steps:
        steady = least >= TOPK - 1
        assert planned == (0 if steady and (captured or rows in seen) else 1), (rows, least)
        seen |= {rows} if steady else set()
    assert sum(least >= TOPK - 1 for _, least, _ in steps) > 4
    assert any(least < TOPK - 1 for _, least, _ in steps)


def test_shapes_tell_steady_steps_apart(rocm: Install, model: Any) -> None:
    """A graph that plans nothing must not serve a batch with a short request,
    however it is padded.
    """
    machine = rocm()
    engine = make(paged_verifier(model, 16, backend=RocmAiterMlaSparseBackend), 0, machine)
    requests = queue(engine)[-1:]
    graphs = engine.runner.graphs
    assert graphs is not None
    request = requests[0]
    with torch.inference_mode():
        for tokens, steady in ((0, 0), (TOPK - 2, 0), (TOPK - 1, TOPK - 1), (40, TOPK - 1)):
            request.num_kv_tokens = tokens
            graphs.prepare(Selection([request]), BlockShape(0))
            assert list(graphs.graphs)[-1].min_seq_len == steady
    assert graphs.num_captured == 2
