"""Chains and trees over a head's edges: scores by hand, DDTree's heap, drawn drafts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.dflash.coupling import Coupling
from drafters.dflash.drafts import Drafts, Slots
from drafters.dflash2.selector import SelectorConfig
from drafters.dspark.markov import MarkovConfig
from drafters.head import HeadConfig, HeadSizes
from specdec.base.blocks import BlockShape
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput
from specdec.sampling.noise import Purpose, gumbel, stream
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingTensors
from tests.drafters.heads import (
    ANCHORS,
    LENGTHS,
    PaperMarkov,
    backbone,
    head_tensors,
    headed,
    with_head,
)
from tests.drafters.tiny import VOCAB
from tests.helpers.guards import no_host_sync
from tests.helpers.tree_oracle import heap_tree
from tests.specdec.engine import test_acceptance as acceptance
from tests.specdec.engine import toy_target

HEADS: dict[str, HeadConfig] = {
    "vanilla": MarkovConfig(8, has_confidence=True),
    "gated": MarkovConfig(8, "gated", draft_top_k=6),
    "rnn": MarkovConfig(8, "rnn"),
    "rnn of few": MarkovConfig(8, "rnn", draft_top_k=6),
    "selector": SelectorConfig(8, 6),
}


def correction(
    head: HeadConfig, tensors: dict[str, Tensor], paper: Any, hidden: Tensor, previous: int
) -> Tensor:
    """[V] of the next slot, by the published formulas."""
    if isinstance(head, MarkovConfig):
        return paper.correction(hidden, previous)
    own = {name.removeprefix("candidate_selector."): tensor for name, tensor in tensors.items()}
    left = own["predecessor_codebook"][previous] * (own["hidden_projection.weight"] @ hidden)
    return own["successor_codebook"] @ left


def edges_by_hand(
    config: Any, request: int, depth: int, count: int
) -> tuple[list[list[int]], list[list[list[float]]]]:
    """Candidates of slots, best first, and `logprobs_of` along the best chain."""
    hidden, logits = backbone(config, request)
    tensors, log_q = head_tensors(config), logits.log_softmax(-1)
    columns = log_q.topk(count).indices.tolist()
    table, chain, chosen = [], [ANCHORS[request]], 0
    for slot in range(depth):
        rows = []
        for parent in range(count):
            paper = (
                PaperMarkov(config.head, tensors) if isinstance(config.head, MarkovConfig) else None
            )
            for earlier in range(slot):
                correction(config.head, tensors, paper, hidden[earlier], chain[earlier])
            before = columns[slot - 1][parent] if slot else ANCHORS[request]
            added = correction(config.head, tensors, paper, hidden[slot], before)[columns[slot]]
            unary = log_q[slot, columns[slot]]
            rows.append(((unary + added).log_softmax(0) + unary.logsumexp(0)).tolist())
        table.append(rows)
        chosen = max(range(count), key=rows[chosen if slot else 0].__getitem__)
        chain.append(columns[slot][chosen])
    return columns, table


@pytest.mark.parametrize("kind", HEADS)
def test_trees_over_edges(kind: str, tmp_path: Path) -> None:
    """The heap's tree over edges by hand, its tokens and forecast; nothing waits."""
    config = with_head(HEADS[kind], sample_from_anchor="rnn" in kind)
    drafter, rig = headed(tmp_path / "drafter", config)
    drafter.forecasts = True
    batch = replace(rig.batch(ANCHORS, LENGTHS, 7), shape=BlockShape(12, tree_depth=5))
    with no_host_sync(), torch.inference_mode():
        draft = drafter.propose(batch)
    assert draft.tree is not None and draft.forecast is not None
    for request in range(2):
        columns, table = edges_by_hand(config, request, 5, 12)
        nodes = heap_tree(table, 12)
        assert draft.tree.parents[request].tolist() == [node.parent for node in nodes]
        assert draft.token_ids[request].tolist() == [
            columns[len(node.path) - 1][node.path[-1]] for node in nodes
        ]
        assert draft.forecast[request].item() == pytest.approx(
            sum(math.exp(node.score) for node in nodes), rel=1e-4
        )


@pytest.mark.parametrize("kind", ["gated", "rnn of few", "selector"])
def test_chains_over_edges(kind: str, tmp_path: Path) -> None:
    """The best candidate behind the one before; its probabilities are the forecast."""
    config = with_head(HEADS[kind], sample_from_anchor="rnn" in kind)
    drafter, rig = headed(tmp_path / "drafter", config)
    batch = rig.batch(ANCHORS, LENGTHS, 6)
    with no_host_sync(), torch.inference_mode():
        plain = drafter.propose(batch)
    drafter.forecasts = True
    draft = drafter.propose(batch)
    assert (
        plain.forecast is None
        and draft.forecast is not None
        and torch.equal(plain.token_ids, draft.token_ids)
    )
    for request in range(2):
        columns, table = edges_by_hand(config, request, 6, 6)
        ranks, likely, promised = [0], 0.0, 0.0
        for slot in range(6):
            row = table[slot][ranks[-1]]
            ranks.append(max(range(6), key=row.__getitem__))
            likely += row[ranks[-1]]
            promised += math.exp(likely)
        assert draft.token_ids[request].tolist() == [
            columns[slot][rank] for slot, rank in enumerate(ranks[1:])
        ]
        assert draft.forecast[request].item() == pytest.approx(promised, rel=1e-4)


def only_compared(logits: Tensor, added: Tensor) -> Tensor:
    """Corrections of the 6 likeliest tokens, together as likely as before; of no others."""
    compared = logits.topk(6).indices
    gained = (logits + added)[compared].logsumexp(0) - logits[compared].logsumexp(0)
    return torch.zeros_like(added).index_copy(0, compared, added[compared] - gained)


@pytest.mark.parametrize("kind", ["vanilla", "selector"])
def test_coupled_drafts(kind: str, tmp_path: Path) -> None:
    """What the target would choose with its noise from corrected, weighted logits."""
    # of log q and of the noise, by slot
    trust, believed = torch.linspace(0.1, 1.1, 7), torch.linspace(1.2, 0.3, 7)
    coupling = Coupling((1.0,), (tuple(trust.tolist()),), (tuple(believed.tolist()),))
    temperature, config = 12.0, with_head(HEADS[kind], coupling=coupling)
    drafter, rig = headed(tmp_path / "drafter", config, draft_sampling="coupled")
    batch = rig.batch(ANCHORS, LENGTHS, 6, temperature)
    with no_host_sync(), torch.inference_mode():
        draft = drafter.propose(batch)
    noise = gumbel(stream(batch.sampling.seeds, batch.positions(7)[:, 1:], Purpose.SAMPLE), VOCAB)
    tensors, uncoupled = head_tensors(config), []
    for request in range(2):
        hidden, logits = backbone(config, request)
        paper = PaperMarkov(config.head, tensors) if isinstance(config.head, MarkovConfig) else None
        previous, expected, greedy = ANCHORS[request], [], []
        for slot in range(6):
            scores = (
                trust[slot] * logits[slot] / temperature + believed[slot] * noise[request, slot]
            )
            added = (
                correction(HEADS[kind], tensors, paper, hidden[slot], previous)
                * trust[slot]
                / temperature
            )
            allowed = scores.topk(6).indices if kind == "selector" else torch.arange(VOCAB)
            if kind == "selector":
                added = (
                    only_compared(logits[slot], added / trust[slot] * temperature)
                    * trust[slot]
                    / temperature
                )
            greedy.append(
                int(
                    allowed[
                        (scores + added - believed[slot] * noise[request, slot])[allowed].argmax()
                    ]
                )
            )
            previous = int(allowed[(scores + added)[allowed].argmax()])
            expected.append(previous)
        assert draft.token_ids[request].tolist() == expected
        uncoupled.append(greedy)
    assert draft.probs is None and uncoupled != draft.token_ids.tolist(), (
        "the noise decides nothing here"
    )


@pytest.mark.parametrize(
    ("config", "candidates"),
    [
        (MarkovConfig(3), None),
        (MarkovConfig(3, draft_top_k=3), 3),
        (MarkovConfig(3, "rnn", draft_top_k=3), 3),
    ],
)
def test_drawn_drafts_leave_the_targets_distribution(
    config: MarkovConfig, candidates: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of three tokens over several steps, with filters: q is the draws'."""
    size = toy_target.V
    torch.manual_seed(4)
    model = torch.nn.Module()
    for name, module in config.modules(HeadSizes(size, size, size)).items():
        model.add_module(name, module.requires_grad_(False))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.5)
    drafts = Drafts("probabilistic", head=config.head(model, lambda tokens: tokens))
    hidden, logits = torch.randn(2, toy_target.K, size)
    params = SamplingParams(temperature=0.8, top_p=0.9)
    sampling = toy_target.sampling_for([params], 20_000)

    def propose(
        form: str,
        anchors: Tensor,
        positions: Tensor,
        seeds: Tensor,
        k: int,
        num_drafts: Tensor | None,
    ) -> DraftOutput:
        count = len(anchors)
        batch = batch_of(anchors, positions, sampling, k)
        draft = drafts.of(
            batch, Slots(hidden[:k].expand(count, -1, -1), logits[:k].expand(count, -1, -1))
        )
        assert draft.probs is not None and (draft.candidate_ids is None) == (candidates is None)
        assert draft.probs.shape == (count, k, candidates or size)
        return draft

    monkeypatch.setattr(acceptance, "propose", propose)
    output, _ = acceptance.decode("by edges", sampling, steps=3)
    assert acceptance.p_value(output, params, 3) > 1e-6


def batch_of(anchors: Tensor, positions: Tensor, sampling: SamplingTensors, k: int) -> DecodeBatch:
    """As far as drafting from given logits looks at it."""
    return DecodeBatch(
        slots=torch.arange(len(anchors)),
        anchors=anchors,
        seq_lens=positions,
        block_table=torch.zeros(len(anchors), 1, dtype=torch.int32),
        shape=BlockShape(k),
        max_seq_len=2**20,
        block_size=16,
        max_model_len=2**20,
        sampling=sampling,
    )
