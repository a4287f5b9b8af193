"""Models that are left out of a step: when, and that nothing but speed depends on it."""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from drafters.composed.drafter import BoundComposed, ComposedDrafter
from drafters.composed.gate import ENOUGH, MAX_SKIPPED, Gate
from drafters.suffix.drafter import SuffixDrafter
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput, Verifier
from specdec.sampling.params import SamplingParams
from tests.drafters.sequential.toy import toy_drafter
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts

KIND = (1, 8, False)


def taught(gains: dict[float, float], *, models: float, rest: float) -> Gate:
    """One that knows what models take, and what they add by the others' forecast."""
    gate = Gate()
    gate.took(KIND, rest, models)
    for _ in range(2 * ENOUGH):
        for forecast, gain in gains.items():
            gate.observe([forecast], [gain])
    return gate


def test_models_pay_while_they_add_more_than_they_take() -> None:
    """Half as long again for a step has to give half as many tokens again, of the batch."""
    gate = taught({0.0: 0.6, 3.0: 1.9, 7.0: 4.1}, models=0.5, rest=1.0)
    assert [gate.pays(KIND, [forecast]) for forecast in (0.0, 3.0, 7.0)] == [True, False, True]
    assert gate.pays(KIND, [0.0, 3.0]) is False  # 2.5 of 5
    assert gate.pays(KIND, [0.0, 3.0, 7.0])  # 6.6 of 13
    gate.took(KIND, 1.0, 3.0)
    assert not gate.pays(KIND, [0.0])


def test_what_is_not_known_is_asked() -> None:
    """Another kind of step, a forecast that has not occurred, too few observations."""
    gate = taught({0.0: 0.0}, models=0.5, rest=1.0)
    assert not gate.pays(KIND, [0.0])
    assert (
        gate.pays((2, 8, False), [0.0, 0.0])
        and gate.pays((1, 4, False), [0.0])
        and gate.pays((1, 8, True), [0.0])
    )
    assert gate.pays(KIND, [9.0]) and gate.pays(KIND, [0.0, 9.0])
    for _ in range(ENOUGH - 1):
        gate.observe([9.0], [0.0])
    assert gate.pays(KIND, [9.0])


def test_models_are_asked_again_now_and_then() -> None:
    """And come back when they have become better."""
    gate = taught({0.0: 0.0}, models=0.5, rest=1.0)
    answers = [gate.pays(KIND, [0.0]) for _ in range(3 * (MAX_SKIPPED + 1))]
    assert answers == [*[False] * MAX_SKIPPED, True] * 3
    for _ in range(200):
        gate.observe([0.0], [2.0])
    assert gate.pays(KIND, [0.0])


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return paged_verifier(plain_model("llama"))


def run(
    verifier: Verifier,
    pays: Callable[..., bool],
    sampling: SamplingParams,
    make: Any = random_dflash,
    **options: Any,
) -> tuple[list[list[int]], dict[tuple[int, int], list[int]], set[int]]:
    """Outputs, what the model drafted by slot and position, and who drafted."""
    drafter = ComposedDrafter([SuffixDrafter(max_draft_tokens=4, pool_tokens=0), make(verifier)])
    engine = tiny_engine(
        verifier, drafter, **{"max_num_seqs": 3, "num_draft_tokens": None, **options}
    )
    bound: Any = engine.runner.drafter
    assert isinstance(bound, BoundComposed)
    bound.gate.pays = pays  # type: ignore[method-assign]
    drafted: dict[tuple[int, int], list[int]] = {}
    model: Any = bound.parts[1]
    propose = model.propose

    def noting(batch: DecodeBatch) -> DraftOutput:
        output = propose(batch)
        for slot, length, tokens in zip(
            batch.slots.tolist(), batch.seq_lens.tolist(), output.token_ids.tolist(), strict=True
        ):
            drafted[slot, length] = tokens
        return output

    model.propose = noting
    requests = [
        engine.add_request([*prompt, *prompt], sampling) for prompt in random_prompts(3, longest=20)
    ]
    return (
        finish(engine, *requests),
        drafted,
        {part for one in requests for part in one.parts},
    )


SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chains": ({}, {}),
    "chains, sampled": (SAMPLED, {}),
    "trees": (SAMPLED, {"num_draft_tokens": "auto", "tree_nodes": 12}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_output_and_no_later_draft_depends_on_it(verifier: Verifier, name: str) -> None:
    """A model left out of most steps drafts, when it does, what it would have anyway."""
    sampled, options = CASES[name]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **sampled)
    always, every, _ = run(verifier, lambda *_: True, sampling, **options)
    pattern = cycle([False, False, True, False])
    some, few, parts = run(verifier, lambda *_: next(pattern), sampling, **options)
    assert some == always
    both = few.keys() & every.keys()
    assert len(both) >= 10 and parts == {0, 1}
    assert all(few[key] == every[key] for key in both)


def test_who_is_never_left_out(verifier: Verifier) -> None:
    """A drafter that writes late, and any on a device that the host would wait for."""

    def refuse(kind: Any, forecasts: Sequence[float]) -> bool:
        raise AssertionError("nobody asks")

    run(verifier, refuse, SamplingParams(max_tokens=8), make=toy_drafter)
    drafter = ComposedDrafter([SuffixDrafter(max_draft_tokens=4), random_dflash(verifier)])
    engine = tiny_engine(verifier, drafter, num_draft_tokens=None)
    bound: Any = engine.runner.drafter
    assert engine.runner.host_may_look
    engine.runner.host_may_look, bound.gate.pays = False, refuse
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=8))
    finish(engine)


def test_it_learns_while_decoding(verifier: Verifier) -> None:
    """Of a random model few steps remain; the target's tokens are copies."""
    asked: list[int] = []
    drafter = ComposedDrafter([SuffixDrafter(max_draft_tokens=4), random_dflash(verifier)])
    engine = tiny_engine(verifier, drafter, num_draft_tokens=None, max_num_seqs=1)
    bound: Any = engine.runner.drafter
    observe = bound.gate.observe

    def counted(forecasts: Sequence[float], gains: Sequence[float]) -> None:
        asked.append(1)
        observe(forecasts, gains)

    bound.gate.observe = counted
    # What steps take is told: no choice by the time of this machine is asserted.
    took = bound.gate.took
    bound.gate.took = lambda kind, rest, models: took(kind, 1.0, None if models is None else 0.4)
    torch.manual_seed(0)
    request = engine.add_request(
        [*range(20, 30)] * 3, SamplingParams(max_tokens=150, ignore_eos=True)
    )
    finish(engine)
    steps = len(request.num_emitted)
    assert steps > 60 and len(asked) < steps / 2
