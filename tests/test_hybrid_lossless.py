"""Targets whose layers keep a state per request: what drafts, neighbors, preemption and reuse could
do to it.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig
from specdec.engine import build
from specdec.engine.engine import SpecEngine
from specdec.kv_cache import StateCache
from specdec.layers.recurrence.recurrence import RecurrentRows
from specdec.model.batch import ForwardInput
from specdec.model.core import Verifier
from tests.helpers.engines import run_all, tiny_engine
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_models import paged_verifier, plain_greedy, plain_model, random_prompts

MAX_TOKENS = 24
Outputs = dict[tuple[int, ...], list[int]]


CASES = [
    ("qwen3_5", 0),
    ("nemotron_h", 1),
    ("falcon_h1", 5),
    ("kimi_linear", 3),
    ("zamba2_adapted", 3),
]
"""The delta rule, Mamba-2, that beside attention, a decay per key channel beside latents, and
blocks that layers share, with seeds whose answers are long."""

KINDS = [name for name, _ in CASES]


@pytest.fixture(scope="module", params=CASES, ids=KINDS)
def case(request: pytest.FixtureRequest) -> tuple[Verifier, Outputs]:
    """A target and what transformers' `generate` makes of its prompts."""
    name, first = request.param
    for seed in range(first, first + 20):  # releases of torch draw other weights
        model = plain_model(name, seed)
        outputs = {
            tuple(prompt): plain_greedy(model, prompt, MAX_TOKENS) for prompt in random_prompts(4)
        }
        if all(len(set(output)) > 10 for output in outputs.values()):
            return paged_verifier(model), outputs
    raise AssertionError("answers that repeat themselves would prove little")


def engine_for(
    case: tuple[Verifier, Outputs], k: int, wrong_at: list[set[int]], **changes: Any
) -> SpecEngine:
    verifier, outputs = case
    drafter = ScriptedDrafter(outputs, k, wrong_at) if k else None
    options = {"max_num_seqs": 3, "max_prefill_tokens": 13, "num_draft_tokens": None, **changes}
    return tiny_engine(verifier, drafter, **{"cache_bytes": 2**23, **options})


def run(
    engine: SpecEngine, prompts: list[list[int]], max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    outputs = run_all(engine, prompts, max_tokens=max_tokens)
    assert engine.pool.num_used == 0
    return outputs


@pytest.mark.parametrize(("k", "depth"), [(1, 0), (3, 1), (7, 0), (15, 1)])
def test_drafts_wrong_at_each_position(case: tuple[Verifier, Outputs], k: int, depth: int) -> None:
    """Catches rejected rows that stay in a state, and accepted ones that never come into it."""
    wrong_at = [{position % k} for position in (0, 1, k // 2, k - 1)]
    engine = engine_for(case, k, wrong_at, pipeline_depth=depth)
    assert run(engine, [list(prompt) for prompt in case[1]]) == list(case[1].values())


def test_k_differs_from_step_to_step(
    case: tuple[Verifier, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a step without drafts that forgets what the step before it has accepted."""
    engine = engine_for(case, 7, [{2}, {5}, {0}, set()], num_draft_tokens="auto")
    assert engine.planner.choice is not None
    ks: Iterator[int] = iter([0, 3, 7, 0, 0, 1, 7, 3, 0, 7] * 100)
    monkeypatch.setattr(
        engine.planner.choice, "choose", lambda *args, **options: BlockShape(next(ks))
    )
    assert run(engine, [list(prompt) for prompt in case[1]]) == list(case[1].values())


@pytest.mark.parametrize("case", CASES[:1], ids=KINDS[:1], indirect=True)
@pytest.mark.parametrize("broken", ["rollback", "replay"])
def test_these_tests_can_fail(
    case: tuple[Verifier, Outputs], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """With every row taken in, or none but the first of a step, outputs are wrong where drafts were
    rejected, or accepted.
    """
    of, pending = RecurrentRows.of, RecurrentRows.pending

    def keep_all(
        slots: Any, metadata: Any, *, max_pending: int, final: bool, counts: Any = None
    ) -> RecurrentRows:
        return of(slots, metadata, max_pending=max_pending, final=True, counts=counts)

    def none_pending(self: RecurrentRows, lengths: torch.Tensor) -> torch.Tensor:
        return pending(self, lengths).clamp(max=1)

    if broken == "rollback":
        monkeypatch.setattr(RecurrentRows, "of", keep_all)
    else:
        monkeypatch.setattr(RecurrentRows, "pending", none_pending)
    prompts = [list(prompt) for prompt in case[1]]
    right = [
        given == expected
        for given, expected in zip(
            run(engine_for(case, 3, [{1}]), prompts), case[1].values(), strict=True
        )
    ]
    assert not any(right)


def test_a_preempted_request_begins_anew(case: tuple[Verifier, Outputs]) -> None:
    """Catches a state that goes on where the request before it, or it before it was sent back, had
    left its slot.
    """
    verifier, outputs = case
    bytes_per_token = sum(spec.bytes_per_token(torch.float32) for spec in verifier.kv_specs)
    engine = engine_for(case, 3, [{1}, set()])
    states = sum(
        t.nbytes
        for cache in engine.kv_cache.layers
        if isinstance(cache, StateCache)
        for t in cache[:2]
    )
    cache = CacheConfig(memory_bytes=states + 26 * 4 * bytes_per_token)
    engine = engine_for(case, 3, [{1}, set()], cache=cache, max_prefill_tokens=64)
    assert run(engine, [list(prompt) for prompt in outputs]) == list(outputs.values())
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("case", "prefix_caching"),
    [*((case, True) for case in CASES), (CASES[0], False)],
    ids=[*KINDS, "off"],
    indirect=["case"],
)
def test_prompts_that_begin_alike(
    case: tuple[Verifier, Outputs], monkeypatch: pytest.MonkeyPatch, prefix_caching: bool
) -> None:
    """Catches a state taken over at another place than its keys and values, and a snapshot that a
    step has changed.
    """
    verifier, outputs = case
    monkeypatch.setattr(build, "SNAPSHOT_TOKENS", 8)
    longest = max(outputs, key=len)
    prompts = [
        list(longest),
        list(longest),
        [*longest[:-3], 5, 9],
        list(longest),
        [*longest[:17], 8],
    ]
    fresh = [run(engine_for(case, 0, []), [prompt], 8)[0] for prompt in prompts]
    cache = CacheConfig(memory_bytes=2**23, prefix_caching=prefix_caching)
    engine = engine_for(case, 0, [], cache=cache, max_num_seqs=2)
    computed: list[int] = []
    forward = verifier.forward

    def counting(rows: ForwardInput, *rest: Any) -> Any:
        computed.append(rows.metadata.num_tokens)
        return forward(rows, *rest)

    monkeypatch.setattr(verifier, "forward", counting)
    assert [run(engine, [prompt], 8)[0] for prompt in prompts] == fresh
    decoded = sum(len(tokens) - 1 for tokens in fresh)
    assert (sum(computed) - decoded < sum(map(len, prompts))) is prefix_caching


@pytest.mark.parametrize("case", CASES[:1], ids=KINDS[:1], indirect=True)
def test_what_a_budget_must_pay_for(case: tuple[Verifier, Outputs]) -> None:
    """Catches states that the memory budget knows nothing of."""
    from specdec.base.errors import CapacityError

    with pytest.raises(
        CapacityError,
        match=r"beside 7 states of [\d,]+ bytes; give it at least [\d,]+ bytes or decode fewer",
    ):
        engine_for(case, 0, [], cache=CacheConfig(memory_bytes=2**15))
