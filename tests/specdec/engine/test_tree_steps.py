"""The engine's edges with draft trees: ends within a path, limits, preemption, penalties, log-probabilities, NaN, graphs, waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.ngram import NGramDrafter
from specdec import SpecDecoder
from specdec.blocks import DraftTree
from specdec.config import CacheConfig, EngineConfig, SamplingParams
from specdec.core import AcceptOutput, DecodeBatch, Drafter, DraftOutput, ForwardInput, Verifier, VerifyOutput
from specdec.engine import acceptance, step
from specdec.engine.engine import SpecEngine
from specdec.engine.graphs import StepGraphs
from specdec.engine.request import Request
from specdec.engine.step import StepRunner
from specdec.errors import InvalidInputError
from specdec.sampling.sampler import penalized
from specdec.sampling.tensors import SamplingTensors
from tests.helpers.guards import no_host_sync
from tests.helpers.scripted_trees import BoundTrees, ScriptedTrees
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts, tiny_tokenizer
from tests.helpers.trees import Parents, random_trees
from tests.specdec.engine.test_graphs import Recorder, refuse

MAX_TOKENS, DRAFTS = 30, 14
Outputs = dict[tuple[int, ...], list[int]]
TREES: list[Parents] = random_trees(4, DRAFTS)

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalized": {"repetition_penalty": 1.8},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "logprobs": True},
}


class Case:
    """A target, prompts, and what plain decoding makes of them."""

    def __init__(self) -> None:
        self.verifier = paged_verifier(plain_model("llama"))
        self.prompts = random_prompts(4, seed=9)
        self.plain = {name: self.run(None, **sampling) for name, sampling in SAMPLINGS.items()}
        self.outputs = self.outputs_of("greedy")

    def outputs_of(self, sampling: str) -> Outputs:
        """By prompt."""
        return {tuple(request.prompt_token_ids): request.output_token_ids for request in self.plain[sampling]}

    def engine(self, drafter: Drafter | None, **changes: Any) -> SpecEngine:
        trees = {"tree_nodes": DRAFTS} if drafter else {}
        cache = CacheConfig(memory_bytes=2**22)
        return SpecEngine(
            self.verifier,
            drafter,
            EngineConfig(**{"max_num_seqs": 4, "num_draft_tokens": None, "cache": cache, **trees, **changes}),
        )

    def scripted(self, sampling: str = "greedy", **changes: Any) -> SpecEngine:
        """An engine whose drafter knows what `sampling` writes."""
        return self.engine(ScriptedTrees(self.outputs_of(sampling), TREES), **changes)

    def run(self, engine: SpecEngine | None, **sampling: Any) -> list[Request]:
        """All prompts, each with a seed of its own; without an engine plain."""
        engine = engine or self.engine(None)
        options = [{"max_tokens": MAX_TOKENS, "seed": seed, **sampling} for seed in range(len(self.prompts))]
        requests = [engine.add_request(prompt, SamplingParams(**each)) for prompt, each in zip(self.prompts, options, strict=True)]
        return finish(engine, *requests)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def finish(engine: SpecEngine, *requests: Request) -> list[Request]:
    while engine.has_work:
        engine.step()
    assert engine.pool.num_used == 0
    return list(requests)


def tokens(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_as_plain_decoding(case: Case, sampling: str, depth: int) -> None:
    """Tokens and log-probabilities, with penalties and filters, and drafts accepted as the script says."""
    requests = case.run(case.scripted(sampling, pipeline_depth=depth), **SAMPLINGS[sampling])
    assert tokens(requests) == tokens(case.plain[sampling])
    for request, plain in zip(requests, case.plain[sampling], strict=True):
        assert request.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        ends = [(5 * case.prompts.index(request.prompt_token_ids) + n) % (DRAFTS + 1) for n in range(len(request.num_accepted) - 1)]
        paths = ScriptedTrees(case.outputs, TREES).paths[case.prompts.index(request.prompt_token_ids)]
        assert request.num_accepted[:-1] == [len(paths[end]) - 1 for end in ends]


def test_mixed_batch(case: Case) -> None:
    """Greedy, penalized, sampled and filtered requests side by side."""
    names = list(SAMPLINGS)
    outputs = {tuple(prompt): case.outputs_of(name)[tuple(prompt)] for name, prompt in zip(names, case.prompts, strict=True)}
    engine = case.engine(ScriptedTrees(outputs, TREES), pipeline_depth=1)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **SAMPLINGS[name]))
        for seed, (name, prompt) in enumerate(zip(names, case.prompts, strict=True))
    ]
    assert tokens(finish(engine, *requests)) == list(outputs.values())
    assert sum(sum(request.num_accepted) for request in requests) > 20


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_token_within_a_path(case: Case, depth: int) -> None:
    """The output ends with it wherever it falls; the surplus is never seen."""
    engine = case.scripted(pipeline_depth=depth)
    for prompt, whole in case.outputs.items():
        for stop in sorted(set(whole))[::3]:
            (request,) = finish(engine, engine.add_request(list(prompt), SamplingParams(MAX_TOKENS, stop_token_ids=(stop,))))
            assert request.output_token_ids == whole[: whole.index(stop) + 1] and request.finish_reason == "stop"
            assert sum(request.num_emitted) == len(request.output_token_ids) - 1


@pytest.mark.parametrize("depth", [0, 1])
def test_limits_within_a_path(case: Case, depth: int) -> None:
    """Neither one token more nor less than were asked for, or than the model is long."""
    for most in (1, 2, 3, 5, 8):
        requests = case.run(case.scripted(pipeline_depth=depth), max_tokens=most)
        assert tokens(requests) == [whole[:most] for whole in case.outputs.values()]
        longest = max(map(len, case.prompts)) + most
        requests = case.run(case.scripted(pipeline_depth=depth, max_model_len=longest))
        expected = [whole[: longest - len(prompt)] for prompt, whole in case.outputs.items()]
        assert tokens(requests) == expected
        assert requests[0].finish_reason == "length"


def test_a_stop_string_within_a_path(case: Case) -> None:
    """Text and tokens end where those of plain decoding do."""
    tokenizer, config = tiny_tokenizer(), EngineConfig(num_draft_tokens=None, cache=CacheConfig(memory_bytes=2**22))
    plain = SpecDecoder(case.verifier, tokenizer, None, config)
    drafter = ScriptedTrees(case.outputs, TREES)
    drafted = SpecDecoder(case.verifier, tokenizer, drafter, replace(config, tree_nodes=DRAFTS))
    for prompt, whole in list(case.outputs.items())[:2]:
        text = tokenizer.decode(whole)
        for start in range(3, len(text) - 3, 4):
            stop = SamplingParams(max_tokens=MAX_TOKENS, stop=(text[start : start + 3],))
            want, got = plain.generate(list(prompt), stop), drafted.generate(list(prompt), stop)
            assert (got.text, got.token_ids, got.finish_reason) == (want.text, want.token_ids, want.finish_reason)
            assert got.finish_reason == "stop"


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption(case: Case, depth: int) -> None:
    """A cache far too small: requests lose their slots and blocks amid their trees, and come back in others."""
    bytes_per_block = 4 * sum(spec.bytes_per_token(torch.float32) for spec in case.verifier.kv_specs)
    engine = case.scripted(pipeline_depth=depth, cache=CacheConfig(memory_bytes=36 * bytes_per_block))
    assert tokens(case.run(engine)) == list(case.outputs.values())
    assert engine.scheduler.num_preemptions > 0


def test_prefixes_are_reused_after_trees(case: Case) -> None:
    """A conversation that goes on from its own output, and prompts that begin alike, find what was left there."""
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


def test_drafts_that_do_not_count(case: Case) -> None:
    """The first few of a tree are offered; the right ones behind them are not taken, and nobody says they were offered."""
    engine = case.scripted()
    assert engine.runner.drafter is not None
    propose = engine.runner.drafter.propose

    def short(batch: DecodeBatch) -> DraftOutput:
        return replace(propose(batch), num_drafts=batch.slots * 4)

    engine.runner.drafter.propose = short  # type: ignore[method-assign]
    requests = case.run(engine)
    assert tokens(requests) == list(case.outputs.values())
    depths = [[len(path) - 1 for path in paths] for paths in ScriptedTrees(case.outputs, TREES).paths]
    for index, request in enumerate(requests):
        assert set(request.num_drafted) == {max(depths[index][: 4 * index + 1])}
        assert all(kept <= offered for kept, offered in zip(request.num_accepted, request.num_drafted, strict=True))


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
def test_nan(case: Case, on_the_path: bool, depth: int) -> None:
    """Beside the path it harms nobody; on it the request ends with what came before, and its neighbors go on."""
    engine = case.scripted(pipeline_depth=depth)
    bound = engine.runner.drafter
    assert isinstance(bound, BoundTrees)
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in case.prompts]
    victim = requests[1]
    first_bad = len(victim.prompt_token_ids) + 9

    def bad(rows: ForwardInput) -> Tensor:
        slots, width = rows.slots, DRAFTS + 1
        assert slots is not None
        drafter = bound.drafter
        found = torch.zeros(len(slots), width, dtype=torch.bool)
        for i, slot in enumerate(slots.tolist()):
            path = drafter.paths[int(bound.shape[slot])][drafter.ends[(int(bound.steps[slot]) - 1) % len(drafter.ends)]]
            for row in range(width):
                found[i, row] = slot == victim.slot if on_the_path else row not in path
        return found.flatten() & (rows.position_ids >= first_bad if on_the_path else rows.position_ids >= 0)

    with poisoned(case.verifier, bad):
        finish(engine)
    if on_the_path:
        assert victim.finish_reason == "error" and victim.error is not None and "NaN" in victim.error
        whole = case.outputs[tuple(victim.prompt_token_ids)]
        assert victim.output_token_ids == whole[: len(victim.output_token_ids)] and len(victim.output_token_ids) <= 10
        assert all(torch.isfinite(side).all() for layer in engine.kv_cache.layers for side in layer)
        requests.remove(victim)
    for request in requests:
        assert request.output_token_ids == case.outputs[tuple(request.prompt_token_ids)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_step_never_waits(case: Case, sampling: str) -> None:
    """Draft, verify, accept, moves and commit under the guard, of scripted trees and of DFlash's; coupled chains, too."""
    drafters = [ScriptedTrees(case.outputs_of(sampling), TREES), random_dflash(case.verifier), random_dflash(case.verifier)]
    for drafter, changes in zip(drafters, ({}, {}, {"tree_nodes": 0}), strict=True):
        engine = case.engine(drafter, pipeline_depth=1, draft_sampling="coupled", **changes)
        launch, launches = engine.runner.step, list[bool]()

        def guarded(batch: DecodeBatch, launch: Any = launch, launches: list[bool] = launches) -> Any:
            launches.append(batch.shape.is_tree)
            with no_host_sync():
                return launch(batch)

        engine.runner.step = guarded  # type: ignore[method-assign]
        options = {**SAMPLINGS[sampling], "max_tokens": 12}
        assert tokens(case.run(engine, **options)) == [output[:12] for output in tokens(case.plain[sampling])]
        assert set(launches) == {not changes}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["scripted", "dflash", "coupled chain"])
def test_captured_equals_eager(case: Case, drafter: str, sampling: str) -> None:
    """Recorded operations replayed, without any Python of a step, in a batch that is padded; results read one step late."""
    made = ScriptedTrees(case.outputs_of(sampling), TREES) if drafter == "scripted" else random_dflash(case.verifier)
    engine = case.engine(made, pipeline_depth=1, max_num_seqs=3, **({"tree_nodes": 0} if drafter == "coupled chain" else {}))
    engine.runner.graphs = StepGraphs(recorder := Recorder(), engine.slots, engine.runner.step_table)
    engine.slots.decode_batch = refuse  # type: ignore[assignment, method-assign]
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS - 2 * seed, seed=seed, **SAMPLINGS[sampling]))
        for seed, prompt in enumerate(case.prompts)
    ]
    finish(engine, *requests)
    expected = [output[: MAX_TOKENS - 2 * seed] for seed, output in enumerate(tokens(case.plain[sampling]))]
    assert tokens(requests) == expected
    assert recorder.num_replays == engine.timer.num_steps > 3
    assert 4 in {shape.num_reqs for shape in engine.runner.graphs.graphs}, "three requests and one that pads"


def test_a_path_leaves_the_context_of_a_chain(case: Case) -> None:
    """What DFlash would draft next does not depend on how the text came about: token by token, or along paths of trees."""

    def proposals(ends: list[int] | None) -> dict[tuple[int, int], list[int]]:
        engine = case.engine(random_dflash(case.verifier, block_size=DRAFTS + 1))
        bound, found = engine.runner.drafter, dict[tuple[int, int], list[int]]()
        script = ScriptedTrees(case.outputs, TREES, ends)
        scripted = BoundTrees(script, case.verifier, engine.slots.num_slots, engine.slots.longest)
        assert bound is not None
        propose, begin = bound.propose, bound.begin

        def instead(batch: DecodeBatch) -> DraftOutput:
            own = propose(batch)
            for slot, length, row in zip(batch.slots.tolist(), batch.seq_lens.tolist(), own.token_ids.tolist(), strict=True):
                found[slot, length] = row
            return scripted.propose(batch)

        bound.propose, bound.begin = instead, scripted.begin  # type: ignore[method-assign]
        assert begin(0, []) is None  # DFlash has nothing to do there
        assert tokens(case.run(engine)) == list(case.outputs.values())
        return found

    token_by_token, along_paths = proposals([0]), proposals(None)
    common = token_by_token.keys() & along_paths.keys()
    assert len(common) > 20 and len(along_paths) < 0.6 * len(token_by_token)
    assert [along_paths[key] for key in common] == [token_by_token[key] for key in common]


def by_rows(fed: Tensor, logits: Tensor, draft: Any, sampling: Any, positions: Tensor, depth: int | None = None) -> AcceptOutput:
    """Acceptance with the noise of rows in place of positions."""
    return acceptance.accept(fed, logits, draft, sampling, positions[:, :1] + torch.arange(positions.shape[1]), depth)


def of_rows_before(logits: Tensor, sampling: SamplingTensors, fed: Tensor, tree: DraftTree | None) -> Tensor:
    """The penalty of a chain."""
    return penalized(logits, sampling, fed)


BREAKS = [("penalized", acceptance, "penalized", of_rows_before), ("sampled", step, "accept", by_rows)]


@pytest.mark.parametrize(("sampling", "module", "name", "broken"), BREAKS, ids=["penalty", "noise"])
def test_what_follows_rows_would_be_noticed(
    case: Case, sampling: str, module: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A penalty that counts the rows before, noise of a row: each spoils outputs."""
    monkeypatch.setattr(module, name, broken)
    requests = case.run(case.scripted(sampling), **SAMPLINGS[sampling])
    assert tokens(requests) != tokens(case.plain[sampling])


def test_features_left_in_place_would_be_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows of a block in place of the path's."""
    follow = StepRunner._follow

    def unmoved(self: StepRunner, batch: DecodeBatch, path: Tensor, fed: Tensor, verify: VerifyOutput) -> Any:
        moved, _ = follow(self, batch, path, fed, verify)
        assert verify.aux_hidden is not None
        hidden = verify.aux_hidden.view(*fed.shape, -1)[:, : path.shape[1]].flatten(0, 1)
        return moved, VerifyOutput(verify.logits, hidden)

    monkeypatch.setattr(StepRunner, "_follow", unmoved)
    with pytest.raises(AssertionError):
        test_a_path_leaves_the_context_of_a_chain(case)


def test_what_is_refused(case: Case) -> None:
    """Trees of drafters that make chains, of probabilistic drafts, without a drafter, and with a number of drafts."""
    with pytest.raises(InvalidInputError, match=r"^tree_nodes is 14, but the drafter makes chains; leave it out for chains$"):
        case.engine(NGramDrafter(max_draft_tokens=3))
    with pytest.raises(InvalidInputError, match=r"^tree_nodes is 14, but probabilistic drafts form chains; leave it out"):
        case.engine(random_dflash(case.verifier), draft_sampling="probabilistic")
    with pytest.raises(InvalidInputError, match=r"^tree_nodes is 14, but there is no drafter; leave it out"):
        case.engine(None, tree_nodes=14)
    with pytest.raises(InvalidInputError, match=r"a block is a tree or a chain"):
        EngineConfig(tree_nodes=14, num_draft_tokens=3)
    with pytest.raises(InvalidInputError, match=r"tree_nodes is 65; it must be 0 \(chains\) to 64"):
        EngineConfig(tree_nodes=65)
    open_choice = case.engine(
        random_dflash(case.verifier), draft_sampling="probabilistic", num_draft_tokens="auto", tree_nodes=None
    )
    assert not any(shape.is_tree for shape in open_choice.shapes)


@pytest.mark.parametrize("drafts", [2, 17, 64])
def test_a_drafter_of_one_position(case: Case, drafts: int) -> None:
    """Its trees are stars, of up to 64 tokens."""
    drafter = random_dflash(case.verifier, block_size=2)
    requests = case.run(case.engine(drafter, tree_nodes=drafts), max_tokens=8)
    assert tokens(requests) == [output[:8] for output in case.outputs.values()]
    assert drafts < 64 or sum(sum(request.num_accepted) for request in requests) > 5, "of 97 tokens it tries 64"
