"""Warm-up covers what a run launches: afterwards nothing is captured or compiled, and no request
can tell.
"""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec.device.device
from drafters.draft_model.drafter import DraftModel
from specdec.attention.aiter import fa as rocm_aiter_fa
from specdec.attention.aiter.fa import RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.engine.capture import buckets, prefill_graphs
from specdec.engine.capture.buckets import batch_bucket, length_bucket
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.capture.prefill_graphs import PrefillGraphs
from specdec.engine.capture.warmup import warm_up_shapes
from specdec.engine.engine import SpecEngine
from specdec.model.batch import DecodeBatch
from specdec.sampling.params import SamplingParams
from tests.helpers.aiter_emulation import Machine, install
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.recorder import Recorder
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts
from tests.specdec.engine.capture.test_graphs import DRAFTERS, Case, beginnings, run

_FLOAT32 = (torch.float32,)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=1)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of these tests are short; so are the buckets, that there may be several."""
    monkeypatch.setattr(buckets, "_SHORTEST", 16)
    monkeypatch.setattr(prefill_graphs, "MIN_ROWS", 8)


def new_engine(case: Case, drafter: str, *, capture: bool, **changes: Any) -> SpecEngine:
    """For five requests of up to 72 tokens, with a stand-in for graphs or without."""
    config = {
        "num_draft_tokens": None,
        "max_num_seqs": 5,
        "max_model_len": 72,
        "max_prefill_tokens": 24,
        "pipeline_depth": 1,
    }
    engine = tiny_engine(case.verifier, DRAFTERS[drafter](case), **{**config, **changes})
    if capture:
        steady_len = case.verifier.attention.steady_len
        engine.runner.graphs = StepGraphs(
            Recorder(), engine.slots, engine.runner.step_table, steady_len=steady_len
        )
        engine.runner.prefill_graphs = PrefillGraphs(
            Recorder(),
            engine.slots,
            engine.runner.prefill_step,
            dtype=case.verifier.dtype,
            max_rows=64,
        )
    return engine


def warm(engine: SpecEngine, sampling: SamplingParams | None = None) -> None:
    for shape in warm_up_shapes(engine, sampling):
        shape.run()


def captured(engine: SpecEngine) -> set[Any]:
    runner = engine.runner
    assert runner.graphs and runner.prefill_graphs
    return {*runner.graphs.graphs, *runner.prefill_graphs.graphs}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "changes"),
    [
        ("plain", {"max_num_seqs": 1}),
        ("dflash", {"max_num_seqs": 2}),
        ("ngram", {"num_draft_tokens": "auto", "max_num_seqs": 3}),
    ],
)
def test_nothing_is_captured_afterwards(case: Case, drafter: str, changes: dict[str, Any]) -> None:
    """And the outputs are those of an engine that was never warmed up."""
    engine = new_engine(case, drafter, capture=True, **changes)
    warm(engine)
    before = captured(engine)
    requests = run(engine, list(case.outputs))
    assert captured(engine) == before
    assert [r.output_token_ids for r in requests] == beginnings(case, requests)
    cold = new_engine(case, drafter, capture=True, **changes)
    run(cold, list(case.outputs))
    assert len(captured(cold)) > 0 and captured(cold) <= before


@pytest.mark.slow
def test_prefills_that_a_draft_model_leaves_unread_are_captured(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As are those that it reads; both serve later."""
    model = paged_verifier(plain_model("qwen3"))
    drafter = DraftModel(model, case.verifier, max_draft_tokens=1)
    monkeypatch.setitem(DRAFTERS, "draft model", lambda case: drafter)
    engine = new_engine(case, "draft model", capture=True, num_draft_tokens="auto")
    warm(engine)
    before, served = captured(engine), list[bool]()
    turns, prefill = cycle([True, False]), engine.runner.prefill_graphs
    assert engine.planner.choice and prefill
    monkeypatch.setattr(engine.planner.choice, "pays", lambda *_, **__: next(turns))
    obtain = prefill.obtain

    def noted(shape: Any, capture: Any) -> Any:
        served.append(shape.reads)
        return obtain(shape, capture)

    monkeypatch.setattr(prefill, "obtain", noted)
    requests = run(engine, list(case.outputs))
    assert captured(engine) == before and {*served} == {True, False}
    assert [r.output_token_ids for r in requests] == beginnings(case, requests)


def test_steady_steps_are_captured_apart(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of requests that are all long enough, and those of others, at every bound where both
    occur.
    """
    monkeypatch.setattr(case.verifier.attention, "steady_len", 21)
    engine = new_engine(case, "plain", capture=True, max_num_seqs=3)
    warm(engine)
    before = captured(engine)
    run(engine, list(case.outputs))
    assert captured(engine) == before
    ran = new_engine(case, "plain", capture=True, max_num_seqs=3)
    run(ran, list(case.outputs))
    assert ran.runner.graphs and {shape.min_seq_len for shape in ran.runner.graphs.graphs} == {
        0,
        21,
    }


@pytest.mark.slow
def test_sampling_is_part_of_a_shape(case: Case) -> None:
    """Warmed up as requests will be decoded, nothing is captured; otherwise it would be."""
    engine = new_engine(case, "ngram", capture=True, max_num_seqs=2)
    warm(engine, SAMPLED)
    before = captured(engine)
    for prompt in case.outputs:
        engine.add_request(list(prompt), SAMPLED)
    finish(engine)
    assert captured(engine) == before
    engine.add_request([3, 4, 5])
    for _ in range(2):
        engine.step()
    assert len(captured(engine)) == len(before) + 1


@pytest.mark.parametrize("drafter", ["plain", "dflash"])
def test_eager_steps_of_every_size(case: Case, drafter: str) -> None:
    """Batch, k and length of every step of a run have been launched before, up to the bucket that
    they fall in.
    """

    def steps(engine: SpecEngine) -> set[tuple[int, int, int]]:
        found, launch = set(), engine.runner.step

        def noted(batch: DecodeBatch) -> Any:
            found.add(
                (
                    batch_bucket(batch.num_reqs),
                    batch.k,
                    length_bucket(batch.max_seq_len, engine.slots.longest),
                )
            )
            return launch(batch)

        engine.runner.step = noted  # type: ignore[method-assign]
        return found

    engine = new_engine(case, drafter, capture=False)
    warmed = steps(engine)
    warm(engine)
    ran = steps(engine)
    requests = run(engine, list(case.outputs))
    assert ran and ran <= warmed
    assert [r.output_token_ids for r in requests] == beginnings(case, requests)
    if drafter == "dflash":
        assert {k for _, k, _ in ran} > {engine.num_draft_tokens}, "last steps have fewer"


def test_long_sequences_are_warmed_up_every_16k(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AITER compiles a kernel for each further 16,384 keys where steps are eager; a captured step
    has the bucket's.
    """
    monkeypatch.setattr("specdec.engine.capture.warmup.KEYS_PER_KERNEL", 20)

    def bounds(engine: SpecEngine) -> set[str]:
        return {
            shape.title.split("up to ")[1]
            for shape in warm_up_shapes(engine)
            if shape.title.startswith("decode")
        }

    longest = new_engine(case, "plain", capture=False).slots.longest
    assert bounds(new_engine(case, "plain", capture=True)) == {
        f"{n} tokens" for n in (16, 32, 64, longest)
    }
    assert bounds(new_engine(case, "plain", capture=False)) == {
        f"{n} tokens" for n in (16, 20, 32, 40, 60, 64, longest)
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", [RocmAiterFaBackend, RocmAiterFaShuffleBackend])
def test_aiter_compiles_nothing_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: Any
) -> None:
    """On the emulation, which knows what is compiled when."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    monkeypatch.setattr(rocm_aiter_fa, "DTYPES", (*rocm_aiter_fa.DTYPES, *_FLOAT32))
    machine = install(monkeypatch, tmp_path, Machine(allow_float32=True))
    verifier = paged_verifier(plain_model("llama", head_dim=64), block_size=16, backend=backend)
    drafter = random_dflash(verifier, head_dim=16, seed=1)
    warmed = tiny_engine(
        verifier,
        drafter,
        max_num_seqs=5,
        max_prefill_tokens=24,
        max_model_len=72,
        num_draft_tokens=None,
    )
    warm(warmed)
    compiled, called = set(machine.compiled), machine.names()
    machine.compiled.clear()
    machine.calls.clear()
    for index, prompt in enumerate(random_prompts(8)):
        # so that batches of every size occur
        warmed.add_request(prompt, SamplingParams(max_tokens=8 + 2 * index))
    finish(warmed)
    assert machine.compiled and machine.compiled <= compiled
    assert machine.names() <= called
