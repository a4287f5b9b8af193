"""Token-by-token drafts in an engine are those of a network that reads the text anew."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters.choice import MAX_CANDIDATES
from drafters.composed.drafter import ComposedDrafter
from drafters.sequential.drafter import MAX_DEFERRED, BoundSequential, SequentialDrafter
from drafters.sequential.growth import num_beams
from drafters.sequential.network import Rows
from specdec.attention.backend import AttentionMetadata
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig
from specdec.engine.engine import SpecEngine
from specdec.kv_cache import prefix_hashes
from specdec.model.batch import DecodeBatch, ForwardInput, PrefillBatch
from specdec.model.core import DraftOutput, Verifier, VerifyOutput
from specdec.sampling.noise import Purpose, gumbel, stream
from specdec.sampling.params import SamplingParams
from tests.drafters.sequential.toy import HIDDEN, TAPS, case, check_drafts, noted_run, plain_logits
from tests.helpers.scripted import BoundScript, ScriptedDrafter
from tests.helpers.tiny_models import random_prompts

K = 4
KINDS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "tokens": {"features": False},
    "pairs at once": {"parallel": True},
    "window": {"window": 5},
    "reduced": {"reduced": True},
}
PATTERN = [K, 0, 0, 3, K, *[0] * (MAX_DEFERRED + 5), K, 1, 0, K, K]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_are_those_of_the_whole_text(kind: str, depth: int) -> None:
    """Unlike lengths, chunks, rejected drafts; catches shifts and missing rows."""
    model, verifier, network = case(**KINDS[kind])
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    _, _, noted = noted_run(verifier, drafter, random_prompts(5), pipeline_depth=depth)
    check_drafts(model, network, noted, least=40)


@pytest.mark.parametrize("kind", ["pairs", "tokens"])
def test_context_that_was_put_off_is_made_up_for(kind: str) -> None:
    """Steps without drafts between others, more of them than may be put off."""
    model, verifier, network = case(**KINDS[kind])
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    _, _, noted = noted_run(
        verifier,
        drafter,
        random_prompts(3),
        num_draft_tokens="auto",
        shapes=PATTERN,
        sampling=sampling,
    )
    assert {len(one.drafts) for one in noted} >= {1, 3, K}
    check_drafts(model, network, noted, least=20)


@pytest.mark.parametrize("kind", ["pairs", "tokens"])
def test_accepted_drafts_leave_rows_as_they_should_be(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts right up to each depth; catches rows that stay, or are missing."""
    model, verifier, network = case(**KINDS[kind])
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    prompts = random_prompts(3)
    _, plain, _ = noted_run(verifier, drafter, prompts)
    texts = {tuple(request.prompt_token_ids): request.token_ids for request in plain}
    offered, calls = BoundSequential._choose, [0]

    def right(
        self: BoundSequential, batch: Any, hidden: torch.Tensor, first: int, count: int
    ) -> Any:
        """In place of a draft the right token, up to a depth that grows from step to step."""
        chosen = offered(self, batch, hidden, first, count)
        calls[0] += first == 0
        if first >= calls[0] % (K + 1):
            return chosen
        by_slot = {request.slot: request for request in engines[0].scheduler.working}
        rows = zip(
            batch.slots.tolist(),
            batch.seq_lens.tolist(),
            chosen.token_ids[:, 0].tolist(),
            strict=True,
        )
        tokens = [
            [_at(texts[tuple(by_slot[s].prompt_token_ids)], n + first + 1, draft)]
            for s, n, draft in rows
        ]
        return chosen._replace(token_ids=torch.tensor(tokens))

    engines: list[SpecEngine] = []
    monkeypatch.setattr(BoundSequential, "_choose", right)
    _, requests, noted = noted_run(verifier, drafter, prompts, prepare=engines.append)
    assert {count for request in requests for count in request.num_emitted} >= {1, 2, K, K + 1}
    assert [request.token_ids for request in requests] == list(texts.values())
    check_drafts(model, network, noted, least=5)


class SureDrafter(ScriptedDrafter):
    """One that always expects all its drafts to be accepted."""

    def bind(self, verifier: Verifier, caches: Any, **run: Any) -> BoundScript:
        return SureScript(self, verifier, run["max_num_seqs"], run["max_len"])


class SureScript(BoundScript):
    def propose(self, batch: DecodeBatch) -> DraftOutput:
        output = super().propose(batch)
        return replace(output, forecast=torch.full((batch.num_reqs,), 11.0))


def _at(text: list[int], position: int, otherwise: int) -> int:
    return text[position] if position < len(text) else otherwise


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [("pairs", 7), ("pairs", 40), ("tokens", 7), ("tokens", 40), ("pairs at once", 40)],
)
def test_trees_leave_rows_as_they_should_be(kind: str, nodes: int) -> None:
    """Paths that end in another token than the network's; their rows are made anew."""
    model, verifier, network = case(**KINDS[kind])
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    _, requests, noted = noted_run(
        verifier,
        drafter,
        random_prompts(3),
        sampling=sampling,
        tree_nodes=nodes,
        num_draft_tokens="auto",
    )
    emitted = [count for request in requests for count in request.num_emitted]
    by_request = {(one.request.request_id, one.length): one for one in noted}
    others = 0
    for one in noted:  # accepted, and not what the chain has
        token = one.request.token_ids[one.length + 1 : one.length + 2]
        others += (
            one.request.request_id,
            one.length + 1,
        ) not in by_request and token != one.drafts[:1]
    assert others > 5 and max(emitted) > 1
    check_drafts(model, network, noted, least=20)


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("pairs", 0.8), ("tokens", 0.0), ("window", 0.0), ("reduced", 0.8)],
)
def test_trees_grow_behind_the_likeliest_paths_of_each_level(kind: str, temperature: float) -> None:
    """Paths and scores, given the noise, are those of a network that reads all text anew."""
    model, verifier, network = case(**KINDS[kind])
    drafter, nodes = SequentialDrafter(network, verifier, max_draft_tokens=K), 40
    beams, steps = num_beams(BlockShape(nodes, K)), list[tuple[Any, int, DraftOutput, int]]()

    def note(engine: SpecEngine) -> None:
        bound: Any = engine.runner.drafter
        propose, bound.forecasts = bound.propose, True

        def noting(batch: DecodeBatch) -> DraftOutput:
            output = propose(batch)
            by_slot = {request.slot: request for request in engine.scheduler.working}
            for place, (slot, length) in enumerate(
                zip(batch.slots.tolist(), batch.seq_lens.tolist(), strict=True)
            ):
                steps.append((by_slot[slot], length, output, place))
            return output

        bound.propose = noting

    options: dict[str, Any] = {"tree_nodes": nodes, "num_draft_tokens": "auto", "pipeline_depth": 1}
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=1, temperature=temperature)
    _, requests, _ = noted_run(
        verifier, drafter, random_prompts(3), prepare=note, sampling=sampling, **options
    )
    assert beams == 8 and max(max(request.num_emitted) for request in requests) > 1
    checked = deepest = 0
    for request, length, output, place in steps[::5]:
        text = request.token_ids[: length + 1]
        if len(text) <= length:
            continue
        aux = None
        if network.aux_layer_ids:
            states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            aux = torch.cat([states[tap + 1][0] for tap in network.aux_layer_ids], dim=-1)
        known = dict[tuple[int, ...], float]()
        level: dict[tuple[int, ...], float] = {(): 0.0}
        for depth in range(K):
            followers = dict[tuple[int, ...], float]()
            bits = stream(torch.tensor([1]), torch.tensor([[length + 1 + depth]]), Purpose.SAMPLE)
            for path, total in sorted(level.items(), key=lambda item: -item[1])[:beams]:
                logits = plain_logits(network, text, aux, [*path, 0])[-1]
                tokens = (
                    torch.arange(len(logits)) if network.target_ids is None else network.target_ids
                )
                if temperature:
                    logits = logits / temperature + gumbel(bits, verifier.vocab_size)[0, 0, tokens]
                scores = logits.log_softmax(-1).tolist()
                followers |= {
                    (*path, token): total + score
                    for token, score in zip(tokens.tolist(), scores, strict=True)
                }
            level = dict(sorted(followers.items(), key=lambda item: -item[1])[:MAX_CANDIDATES])
            known |= level
        assert output.tree is not None and output.scores is not None
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(
            output.tree.parents[place].tolist(), output.token_ids[place].tolist(), strict=True
        ):
            paths.append((*paths[parent], token))
        expected = torch.tensor(sorted(known.values(), reverse=True)[:nodes])
        torch.testing.assert_close(output.scores[place], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            torch.tensor([known[path] for path in paths[1:]]), expected, rtol=1e-4, atol=1e-4
        )
        first = [
            row for row, rank in enumerate(output.tree.ranks[place].tolist(), start=1) if rank == 0
        ]
        assert all(
            known[paths[row]] == max(known[path] for path in known if path[:-1] == paths[row][:-1])
            for row in first
        )
        deepest = max(deepest, *map(len, paths))
        checked += 1
    assert checked >= 8 and deepest == K


@pytest.mark.parametrize("kind", ["pairs", "tokens"])
def test_drafts_of_another_drafter_leave_rows_as_they_should_be(kind: str) -> None:
    """In a composition, whose other part drafts more tokens than this one may."""
    model, verifier, network = case(**KINDS[kind])
    prompts = random_prompts(3)
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    _, plain, _ = noted_run(
        verifier, drafter, prompts, sampling=SamplingParams(max_tokens=60, ignore_eos=True)
    )
    outputs = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain}
    composed = ComposedDrafter([drafter, SureDrafter(outputs, 11, [{3}, {7}, set()])])
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    _, requests, noted = noted_run(verifier, composed, prompts, sampling=sampling)
    assert [request.output_token_ids for request in requests] == [
        output[:50] for output in outputs.values()
    ]
    assert [max(request.num_emitted) for request in requests] == [4, 8, 12]
    check_drafts(model, network, noted, least=20)


@pytest.mark.parametrize("kind", ["pairs", "tokens"])
def test_reused_prefixes_have_their_rows(kind: str) -> None:
    """Prompts that part at a block's border; catches a pair of another prompt."""
    model, verifier, network = case(**KINDS[kind])
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    shared = [11, 12, 13, 14, 15, 16, 17, 18]
    prompts = [
        [*shared, *tail]
        for tail in (
            [30, 31, 32, 33, 34],
            *([token, 50] for token in range(30, 42)),
            [30, 31, 32, 33, 35],
        )
    ]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    engine, requests, noted = noted_run(
        verifier, drafter, prompts, sampling=sampling, max_num_seqs=1
    )
    check_drafts(model, network, noted, least=20)
    cache = CacheConfig(memory_bytes=2**22, prefix_caching=False)
    _, alone, _ = noted_run(
        verifier, drafter, prompts, sampling=sampling, max_num_seqs=1, cache=cache
    )
    assert [request.token_ids for request in requests] == [request.token_ids for request in alone]
    # Blocks are reused as far as the token after them is the same.
    tokens = [30, 31, 32, 33, 34]
    assert (
        len(engine.pool.match(prefix_hashes([*shared, *tokens], 4, ahead=drafter.tokens_ahead)))
        == 3
    )


@pytest.mark.parametrize("kind", ["pairs", "tokens"])
def test_preempted_requests_draft_as_before(kind: str) -> None:
    """A cache that holds too few blocks for all."""
    model, verifier, network = case(**KINDS[kind])
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    specs = [*verifier.kv_specs, *drafter.kv_specs]
    memory = 4 * 30 * sum(spec.bytes_per_token(torch.float32) for spec in specs)
    engine, _, noted = noted_run(
        verifier, drafter, random_prompts(5), cache=CacheConfig(memory_bytes=memory)
    )
    assert engine.scheduler.num_preemptions > 0
    check_drafts(model, network, noted, least=20)


def test_drafts_at_the_end_of_the_model_are_like_any_others() -> None:
    """Positions past the longest text are clamped, and nothing else changes."""
    model, verifier, network = case()
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    _, requests, noted = noted_run(
        verifier, drafter, random_prompts(3, longest=20), max_model_len=30
    )
    assert any(len(request.token_ids) == 30 for request in requests)
    check_drafts(model, network, [one for one in noted if one.length + K < 30])


def test_padding_requests_of_a_prefill_touch_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that only pads has no last row; catches that of the request before."""
    _, verifier, network = case()
    drafter = SequentialDrafter(network, verifier, max_draft_tokens=K)
    bound = drafter.bind(verifier, [], max_num_seqs=3, max_len=64, draft_sampling="greedy")
    assert isinstance(bound, BoundSequential)
    seen: list[Rows] = []
    monkeypatch.setattr(network, "forward", lambda rows, caches, wanted: seen.append(rows))
    table = torch.zeros(3, 16, dtype=torch.int32)
    lengths, counts = torch.tensor([4, 4, 4], dtype=torch.int32), torch.tensor([3, 4, 0])
    metadata = AttentionMetadata.uniform(
        4, lengths, table, torch.zeros(12, dtype=torch.long), max_seq_len=4
    )
    tokens, features = torch.arange(10, 22), torch.randn(12, len(TAPS) * HIDDEN)
    rows = ForwardInput(tokens, torch.arange(4).repeat(3), metadata, row_counts=counts)
    bound.prefill(
        PrefillBatch(rows, torch.arange(3), torch.tensor([50, 60, 0])),
        VerifyOutput(torch.zeros(0), features),
    )
    assert seen[0].token_ids[[2, 7]].tolist() == [50, 60] and seen[0].token_ids[:2].tolist() == [
        11,
        12,
    ]
    assert bound._due[:2].tolist() == [2, 3]
    torch.testing.assert_close(bound._features[1, 3], network.condense(features[7:8])[0])
