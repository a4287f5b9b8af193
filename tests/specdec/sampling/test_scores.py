"""Bias, least length and penalties against plain arithmetic, at every row of chains and trees."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from specdec.base.blocks import DraftTree
from specdec.sampling.edits import Edits
from specdec.sampling.params import SamplingParams
from specdec.sampling.scores import lowered, lowered_in_cache, scored
from specdec.sampling.tensors import SamplingTensors

V, PROMPT, OUTPUT, ROWS = 24, 4, 3, 4
PARAMS = [
    SamplingParams(),
    SamplingParams(logit_bias=((1, 2.5), (7, -3.0))),
    SamplingParams(min_tokens=5, stop_token_ids=(2, 9)),
    SamplingParams(
        logit_bias=((2, 9.0),), min_tokens=6, stop_token_ids=(2,), repetition_penalty=1.4
    ),
    SamplingParams(presence_penalty=0.7),
    SamplingParams(frequency_penalty=-0.4, repetition_penalty=0.8),
    SamplingParams(
        frequency_penalty=0.9,
        presence_penalty=-0.2,
        logit_bias=((3, 1.0),),
        min_tokens=4,
        stop_token_ids=(1, 3, 5),
    ),
]


def reference(params: SamplingParams, path: list[int], logits: Tensor) -> Tensor:
    """Scores [V] behind a path of prompt and output, by Transformers' processors, and by counting
    for what it does not have.
    """
    chain = LogitsProcessorList()
    if params.logit_bias:
        chain.append(
            SequenceBiasLogitsProcessor({(token,): value for token, value in params.logit_bias})
        )
    if params.min_tokens:
        ends = list(params.stop_token_ids)
        chain.append(
            MinNewTokensLengthLogitsProcessor(PROMPT, params.min_tokens, ends, device="cpu")
        )
    if params.penalized:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores: Tensor = chain(torch.tensor([path]), logits[None].clone())[0]
    for token, count in Counter(path[PROMPT:]).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def test_a_penalty_is_the_same_row_by_row() -> None:
    """Bit for bit, above 1 and below, of zeros and infinities too."""
    torch.manual_seed(0)
    scores = torch.randn(5, 4, V)
    scores[:, :, :4] = torch.tensor([0.0, -0.0, float("inf"), float("-inf")])
    seen, fed = torch.rand(5, V) < 0.4, torch.randint(0, V, (5, 4, 4))
    seen[:, :4] = True
    penalties = torch.tensor([1.0, 1.3, 0.7, 1e30, 1e-30])
    assert torch.equal(
        lowered_in_cache(scores, seen, penalties, fed), lowered(scores, seen, penalties, fed)
    )


def state(histories: Tensor) -> SamplingTensors:
    """What the slots know of requests whose anchor is the last of their tokens."""
    count = len(PARAMS)
    before, every = histories[:, :-1], torch.arange(count)
    sampling = SamplingTensors.of(PARAMS, range(count), firsts=[PROMPT] * count)
    sampling.seen = torch.zeros(count, V, dtype=torch.bool).scatter(1, before, True)
    output = before[:, PROMPT:]
    sampling.counts = torch.zeros(count, V, dtype=torch.int32).scatter_add(
        1, output, torch.ones_like(output, dtype=torch.int32)
    )
    edits = Edits.none(count, torch.device("cpu"))
    edits.put(every, PARAMS, [PROMPT] * count)
    sampling.edits = edits.select(every, sampling.plan.edits)
    return sampling


@pytest.mark.parametrize("parents", [None, [0, 0, 1]], ids=["chain", "tree"])
@pytest.mark.parametrize("known", [1, PROMPT, PROMPT + 1, PROMPT + OUTPUT])
def test_every_row_is_as_plain_decoding_would_have_it(
    parents: list[int] | None, known: int
) -> None:
    """Catches prompt tokens that are counted, drafts of other branches, ends that open too early or
    late, and a wrong order.
    """
    generator = torch.Generator().manual_seed(known)
    histories = torch.randint(6, (len(PARAMS), max(known, PROMPT)), generator=generator)
    logits = 3 * torch.randn(len(PARAMS), ROWS, V, generator=generator)
    drafts = torch.randint(6, (len(PARAMS), ROWS - 1), generator=generator)
    tokens = torch.cat([histories[:, -1:], drafts], dim=1)
    paths = (
        [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
        if parents is None
        else [[0], [0, 1], [0, 2], [0, 1, 3]]
    )
    tree = None
    if parents is not None:
        bits = torch.tensor([1, 2, 1 | 4]).expand(len(PARAMS), -1)
        tree = DraftTree(
            torch.tensor([parents] * len(PARAMS)),
            torch.tensor([[1, 1, 2]] * len(PARAMS)),
            bits,
            bits,
        )
    depths = torch.tensor([len(path) - 1 for path in paths])
    positions = (histories.shape[1] - 1 + depths).expand(len(PARAMS), -1)
    untouched = logits.clone()
    found = scored(logits, state(histories), tokens, positions, tree)
    assert torch.equal(logits, untouched) and found.dtype == torch.float32
    for i, params in enumerate(PARAMS):
        for j, path in enumerate(paths):
            whole = [*histories[i].tolist(), *tokens[i, path[1:]].tolist()]
            torch.testing.assert_close(
                found[i, j], reference(params, whole, logits[i, j]), rtol=1e-6, atol=1e-6
            )
    assert torch.equal(found[0], logits[0]), (
        "a request that asks for nothing keeps its logits bit for bit"
    )


def test_a_slot_forgets_the_edits_of_its_last_request() -> None:
    edits, slots = Edits.none(3, torch.device("cpu")), torch.tensor([2, 0])
    edits.put(slots, [PARAMS[1], PARAMS[6]], [4, 4])
    edits.put(slots, [PARAMS[0], PARAMS[2]], [4, 9])
    logits = torch.zeros(3, 1, V)
    changed = (
        edits.select(torch.arange(3), 4).apply(logits, torch.tensor([[13], [13], [13]])) - logits
    )
    assert changed.nonzero().tolist() == [[0, 0, 2], [0, 0, 9]], (
        "until position 14 the ends of the request that is there now"
    )
