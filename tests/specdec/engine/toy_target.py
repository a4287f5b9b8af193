"""A toy target, a table of logits per previous token, and drafts for it."""

import torch
from torch import Tensor

from specdec.model.core import DraftOutput
from specdec.sampling.edits import Edits
from specdec.sampling.noise import Purpose, of_step, uniform
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sample_from
from specdec.sampling.tensors import SamplingTensors
from tests.specdec.sampling.test_sampler import tensors

V, K, C = 6, 3, 3


FORMS = ("point mass", "dense", "top-k supported")


START = 10  # position of the first anchor


GENERATOR = torch.Generator().manual_seed(0)


TARGET = 1.5 * torch.randn(V, V, generator=GENERATOR)


DRAFT_LOGITS = TARGET + torch.randn(V, V, generator=GENERATOR)


DENSE = DRAFT_LOGITS.softmax(-1)


CANDIDATES = DRAFT_LOGITS.topk(C).indices


CANDIDATE_PROBS = DRAFT_LOGITS.topk(C).values.softmax(-1)


def sampling_for(params: list[SamplingParams], repeat: int = 1) -> SamplingTensors:
    """Request `i` of `len(params) * repeat` has seed `i` and setting `i % len(params)`; penalties
    have seen nothing yet.
    """
    one, count = tensors(params), len(params) * repeat
    ints = one.ints.repeat(1, repeat)
    ints[1], ints[2] = torch.arange(count), START
    sampling = SamplingTensors(one.plan, one.floats.repeat(1, repeat), ints)
    if one.plan.penalized:
        sampling.seen = torch.zeros(count, V).bool()
    if one.plan.counted:
        sampling.counts = torch.zeros(count, V, dtype=torch.int32)
    if one.plan.edits:
        every, edits = torch.arange(len(params)), Edits.none(len(params), torch.device("cpu"))
        edits.put(every, params, [START] * len(params))
        sampling.edits = edits.select(every.repeat(repeat), one.plan.edits)
    return sampling


def propose(
    form: str, anchors: Tensor, positions: Tensor, seeds: Tensor, k: int, num_drafts: Tensor | None
) -> DraftOutput:
    """Drafts one token after the other; `positions` int64 [num_reqs] are those of the anchors."""
    tokens = [anchors]
    for i in range(1, k + 1):
        if form == "point mass":
            tokens.append(DRAFT_LOGITS[tokens[-1]].argmax(-1))
            continue
        u = uniform(seeds, of_step(positions, k)[:, i - 1 : i], Purpose.DRAFT).squeeze(1)
        if form == "dense":
            tokens.append(sample_from(DENSE[tokens[-1]], u))
        else:
            choice = sample_from(CANDIDATE_PROBS[tokens[-1]], u)
            tokens.append(CANDIDATES[tokens[-1]].gather(1, choice[:, None]).squeeze(1))
    previous = torch.stack(tokens[:-1], 1) if k else anchors[:, None][:, :0]
    return DraftOutput(
        token_ids=torch.stack(tokens, 1)[:, 1:],
        num_drafts=num_drafts,
        probs={
            "point mass": None,
            "dense": DENSE[previous],
            "top-k supported": CANDIDATE_PROBS[previous],
        }[form],
        candidate_ids=CANDIDATES[previous] if form == "top-k supported" else None,
    )
