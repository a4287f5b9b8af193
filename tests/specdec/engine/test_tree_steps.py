"""The engine's edges with draft trees: ends within a path, limits, preemption, penalties,
log-probabilities, NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpecDecoder
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.model.batch import DecodeBatch, ForwardInput
from specdec.model.core import DraftOutput, Verifier, VerifyOutput
from specdec.sampling.params import SamplingParams
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.scripted_trees import FIRST, BoundTrees, ScriptedTrees
from tests.helpers.tiny_models import random_dflash, tiny_tokenizer
from tests.helpers.tree_engine import DRAFTS, MAX_TOKENS, SAMPLINGS, TREES, TreeCase, finish, tokens
from tests.specdec.engine.policy.test_choice_in_engine import TargetClock


@pytest.fixture(scope="module")
def case() -> TreeCase:
    return TreeCase()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_as_plain_decoding(case: TreeCase, sampling: str, depth: int) -> None:
    """Tokens and log-probabilities, with penalties and filters, and drafts accepted as the script
    says.
    """
    requests = case.run(case.scripted(sampling, pipeline_depth=depth), **SAMPLINGS[sampling])
    assert tokens(requests) == tokens(case.plain[sampling])
    for request, plain in zip(requests, case.plain[sampling], strict=True):
        assert request.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        ends = [
            (FIRST * case.prompts.index(request.prompt_token_ids) + n) % (DRAFTS + 1)
            for n in range(len(request.num_accepted) - 1)
        ]
        paths = ScriptedTrees(case.outputs, TREES).paths[
            case.prompts.index(request.prompt_token_ids)
        ]
        assert request.num_accepted[:-1] == [len(paths[end]) - 1 for end in ends]


def test_mixed_batch(case: TreeCase) -> None:
    """Greedy, penalized, sampled and filtered requests side by side."""
    names = list(SAMPLINGS)
    outputs = {
        tuple(prompt): case.outputs_of(name)[tuple(prompt)]
        for name, prompt in zip(names, case.prompts, strict=True)
    }
    engine = case.engine(ScriptedTrees(outputs, TREES), pipeline_depth=1)
    requests = [
        engine.add_request(
            prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **SAMPLINGS[name])
        )
        for seed, (name, prompt) in enumerate(zip(names, case.prompts, strict=True))
    ]
    assert tokens(finish(engine, *requests)) == list(outputs.values())
    assert sum(sum(request.num_accepted) for request in requests) > 20


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_token_within_a_path(case: TreeCase, depth: int) -> None:
    """The output ends with it wherever it falls; the surplus is never seen."""
    engine = case.scripted(pipeline_depth=depth)
    for prompt, whole in case.outputs.items():
        for stop in sorted(set(whole))[::3]:
            (request,) = finish(
                engine,
                engine.add_request(
                    list(prompt), SamplingParams(MAX_TOKENS, stop_token_ids=(stop,))
                ),
            )
            assert (
                request.output_token_ids == whole[: whole.index(stop) + 1]
                and request.finish_reason == "stop"
            )
            assert sum(request.num_emitted) == len(request.output_token_ids) - 1


@pytest.mark.parametrize("depth", [0, 1])
def test_limits_within_a_path(case: TreeCase, depth: int) -> None:
    """Neither one token more nor less than were asked for, or than the model is long."""
    for most in (1, 2, 3, 5, 8):
        requests = case.run(case.scripted(pipeline_depth=depth), max_tokens=most)
        assert tokens(requests) == [whole[:most] for whole in case.outputs.values()]
        longest = max(map(len, case.prompts)) + most
        requests = case.run(case.scripted(pipeline_depth=depth, max_model_len=longest))
        expected = [whole[: longest - len(prompt)] for prompt, whole in case.outputs.items()]
        assert tokens(requests) == expected
        assert requests[0].finish_reason == "length"


def test_a_stop_string_within_a_path(case: TreeCase) -> None:
    """Text and tokens end where those of plain decoding do."""
    tokenizer, config = (
        tiny_tokenizer(),
        EngineConfig(num_draft_tokens=None, cache=CacheConfig(memory_bytes=2**22)),
    )
    plain = SpecDecoder(case.verifier, tokenizer, None, config)
    drafter = ScriptedTrees(case.outputs, TREES)
    drafted = SpecDecoder(case.verifier, tokenizer, drafter, replace(config, tree_nodes=DRAFTS))
    for prompt, whole in list(case.outputs.items())[:2]:
        text = tokenizer.decode(whole)
        for start in range(3, len(text) - 3, 4):
            stop = SamplingParams(max_tokens=MAX_TOKENS, stop=(text[start : start + 3],))
            want, got = plain.generate(list(prompt), stop), drafted.generate(list(prompt), stop)
            assert (got.text, got.token_ids, got.finish_reason) == (
                want.text,
                want.token_ids,
                want.finish_reason,
            )
            assert got.finish_reason == "stop"


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption(case: TreeCase, depth: int) -> None:
    """A cache far too small: requests lose their slots and blocks amid their trees, and come back
    in others.
    """
    bytes_per_block = 4 * sum(
        spec.bytes_per_token(torch.float32) for spec in case.verifier.kv_specs
    )
    engine = case.scripted(
        pipeline_depth=depth, cache=CacheConfig(memory_bytes=36 * bytes_per_block)
    )
    assert tokens(case.run(engine)) == list(case.outputs.values())
    assert engine.scheduler.num_preemptions > 0


def test_prefixes_are_reused_after_trees(case: TreeCase) -> None:
    """A conversation that goes on from its own output, and prompts that begin alike, find what was
    left there.
    """
    engine, plain = case.scripted(), case.engine(None)
    drafter = engine.drafter
    assert isinstance(drafter, ScriptedTrees)
    for prompt, whole in case.outputs.items():
        finish(engine, engine.add_request(list(prompt), SamplingParams(MAX_TOKENS)))
        for longer in ([*prompt, *whole[:11]], [*prompt, *whole[:17], 5, 9], list(prompt)):
            (expected,) = tokens(finish(plain, plain.add_request(longer, SamplingParams(12))))
            drafter.outputs = {tuple(longer): expected}
            (request,) = finish(engine, engine.add_request(longer, SamplingParams(12)))
            assert request.output_token_ids == expected and sum(request.num_accepted) > 0
        drafter.outputs = case.outputs


def test_drafts_that_do_not_count(case: TreeCase) -> None:
    """The first few of a tree are offered; the right ones behind them are not taken, and nobody
    says they were offered.
    """
    engine = case.scripted()
    assert engine.runner.drafter is not None
    propose = engine.runner.drafter.propose

    def short(batch: DecodeBatch) -> DraftOutput:
        return replace(propose(batch), num_drafts=batch.slots * 4)

    engine.runner.drafter.propose = short  # type: ignore[method-assign]
    requests = case.run(engine)
    assert tokens(requests) == list(case.outputs.values())
    depths = [
        [len(path) - 1 for path in paths] for paths in ScriptedTrees(case.outputs, TREES).paths
    ]
    for index, request in enumerate(requests):
        assert set(request.num_drafted) == {max(depths[index][: 4 * index + 1])}
        assert all(
            kept <= offered
            for kept, offered in zip(request.num_accepted, request.num_drafted, strict=True)
        )


@contextmanager
def poisoned(verifier: Verifier, slot_bound: Any) -> Iterator[list[int]]:
    """Makes logits, keys and values NaN in rows of a tree that `slot_bound(batch rows)` names."""
    forward = verifier.forward

    def forward_with_nan(rows: ForwardInput, caches: Any, aux: Any = ()) -> VerifyOutput:
        output = forward(rows, caches, aux)
        if rows.metadata.tree is None:
            return output
        bad = slot_bound(rows)
        for layer in caches:
            for side in layer:
                side.view(-1, *side.shape[2:])[rows.metadata.slot_mapping[bad]] = torch.nan
        return VerifyOutput(output.logits.masked_fill(bad[:, None], torch.nan), output.aux_hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "forward", forward_with_nan)
        yield []


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("on_the_path", [False, True])
def test_nan(case: TreeCase, on_the_path: bool, depth: int) -> None:
    """Beside the path it harms nobody; on it the request is decoded again without drafts, and its
    neighbors go on.
    """
    engine = case.scripted(pipeline_depth=depth)
    bound = engine.runner.drafter
    assert isinstance(bound, BoundTrees)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in case.prompts
    ]
    victim = requests[1]
    first_bad = len(victim.prompt_token_ids) + 9

    def bad(rows: ForwardInput) -> Tensor:
        slots, width = rows.slots, DRAFTS + 1
        assert slots is not None
        drafter = bound.drafter
        found = torch.zeros(len(slots), width, dtype=torch.bool)
        for i, slot in enumerate(slots.tolist()):
            path = drafter.paths[int(bound.shape[slot])][
                drafter.ends[(int(bound.steps[slot]) - 1) % len(drafter.ends)]
            ]
            for row in range(width):
                found[i, row] = slot == victim.slot if on_the_path else row not in path
        return found.flatten() & (
            rows.position_ids >= first_bad if on_the_path else rows.position_ids >= 0
        )

    with poisoned(case.verifier, bad):
        finish(engine)
    assert bool(victim.num_tries) == on_the_path and victim.error is None
    if on_the_path:
        assert all(torch.isfinite(side).all() for layer in engine.kv_cache.layers for side in layer)
    for request in requests:
        assert request.output_token_ids == case.outputs[tuple(request.prompt_token_ids)]


def test_what_is_refused(case: TreeCase) -> None:
    """Trees of drafters that make chains, of probabilistic drafts, without a drafter, and with a
    number of drafts.
    """
    with pytest.raises(
        InvalidInputError,
        match=r"^tree_nodes is 14, but the drafter makes chains; leave it out for chains$",
    ):
        case.engine(ScriptedDrafter(case.outputs, 3))
    with pytest.raises(
        InvalidInputError,
        match=r"^tree_nodes is 14, but probabilistic drafts form chains; leave it out",
    ):
        case.engine(random_dflash(case.verifier), draft_sampling="probabilistic")
    with pytest.raises(
        InvalidInputError, match=r"^tree_nodes is 14, but there is no drafter; leave it out"
    ):
        case.engine(None, tree_nodes=14)
    with pytest.raises(InvalidInputError, match=r"a block is a tree or a chain"):
        EngineConfig(tree_nodes=14, num_draft_tokens=3)
    with pytest.raises(InvalidInputError, match=r"tree_nodes is 65; it must be 0 \(chains\) to 64"):
        EngineConfig(tree_nodes=65)
    open_choice = case.engine(
        random_dflash(case.verifier),
        draft_sampling="probabilistic",
        num_draft_tokens="auto",
        tree_nodes=None,
    )
    assert not any(shape.is_tree for shape in open_choice.planner.shapes)


@pytest.mark.parametrize("drafts", [2, 17, 64])
def test_a_drafter_of_one_position(case: TreeCase, drafts: int) -> None:
    """Its trees are stars, of up to 64 tokens."""
    drafter = random_dflash(case.verifier, block_size=2)
    requests = case.run(case.engine(drafter, tree_nodes=drafts), max_tokens=8)
    assert tokens(requests) == [output[:8] for output in case.outputs.values()]
    assert drafts < 64 or sum(sum(request.num_accepted) for request in requests) > 5, (
        "of 97 tokens it tries 64"
    )


@pytest.mark.parametrize(
    ("per_row", "end", "mostly"), [(0.01, 6, BlockShape(3, 3)), (3.0, 1, BlockShape(0))], ids=str
)
def test_the_choice_is_made_by_what_decodes_fastest(
    case: TreeCase, monkeypatch: pytest.MonkeyPatch, per_row: float, end: int, mostly: BlockShape
) -> None:
    """Chains that are wrong at once, and trees that are right to their sixth draft or their first:
    taken where rows cost little.

    On a CPU no tree has more drafts than the longest chain, of 6 here.
    """
    star = [0] * 63
    drafter = ScriptedTrees(case.outputs, [[*range(6), 0, *star[7:]]], ends=[end])
    drafter.wrong_at = [{0}]
    engine = case.engine(drafter, num_draft_tokens="auto", tree_nodes=None)
    clock = TargetClock(case.verifier, monkeypatch, per_row)
    engine.clock = engine.results._clock = clock  # type: ignore[assignment]
    for _ in range(12):
        assert tokens(case.run(engine)) == list(case.outputs.values())
    engine.timer.reset()
    case.run(engine)
    assert engine.timer.steps_by_shape.most_common(1)[0][0] == mostly
