"""Acceptance token for token: which drafts stay, neighbors, penalties, no wait for the device."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.engine.acceptance import accept
from specdec.model.core import AcceptOutput, DraftOutput
from specdec.sampling.edits import Edits
from specdec.sampling.noise import Purpose, of_step, uniform
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sample, sample_from
from specdec.sampling.tensors import SamplingTensors
from tests.helpers.guards import HostSyncError, no_host_sync
from tests.specdec.engine.toy_target import (
    FORMS,
    START,
    TARGET,
    K,
    V,
    propose,
    sampling_for,
)
from tests.specdec.sampling.test_sampler import transformers_probs


def one_step(
    form: str, sampling: SamplingTensors, k: int = K, num_drafts: Tensor | None = None
) -> tuple[Tensor, DraftOutput, AcceptOutput]:
    """Verified tokens, drafts and outcome of one step from different anchors."""
    anchors = sampling.seeds // len(MIXED) % V
    draft = propose(form, anchors, torch.full_like(anchors, START), sampling.seeds, k, num_drafts)
    tokens = torch.cat([anchors[:, None], draft.token_ids], 1)
    return (
        tokens,
        draft,
        accept(
            tokens, TARGET[tokens], draft, sampling, START + torch.arange(k + 1).expand_as(tokens)
        ),
    )


def chain(length: int) -> list[int]:
    tokens = [0]
    for _ in range(length):
        tokens.append(int(TARGET[tokens[-1]].argmax()))
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("right", range(K + 1))
@pytest.mark.parametrize("limit", [None, 0, 1, K])
def test_drafts_stay_up_to_the_first_wrong_one_or_the_limit(
    form: str, temperature: float, right: int, limit: int | None
) -> None:
    """Catches an off-by-one at every position; `right == K` is a draft that is always right."""
    truth = chain(K + 1)
    drafts = torch.tensor([truth[1 : right + 1] + [(t + 1) % V for t in truth[right + 1 : K + 1]]])
    tokens = torch.cat([torch.tensor([[0]]), drafts], 1)
    one_hot = torch.nn.functional.one_hot(drafts, V).float()
    draft = DraftOutput(drafts, None if limit is None else torch.tensor([limit]))
    if form == "dense":
        draft.probs = one_hot
    elif form == "top-k supported":
        draft.candidate_ids = torch.stack([drafts, (drafts + 2) % V], -1)
        draft.probs = torch.tensor([1.0, 0.0]).expand(1, K, 2)
    sampling = sampling_for([SamplingParams(temperature=temperature)])
    result = accept(tokens, TARGET[tokens], draft, sampling, START + torch.arange(K + 1)[None])
    count = right if limit is None else min(right, limit)
    assert result.num_accepted.tolist() == [count]
    assert result.token_ids[0, : count + 1].tolist() == truth[1 : count + 2]
    assert result.next_anchors.tolist() == [truth[count + 1]]
    assert result.token_ids.shape == (1, K + 1) and result.finite.all() and result.logprobs is None


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_identical_distributions_keep_every_draft_and_the_last_token_is_that_of_plain_decoding(
    num_drafts: int,
) -> None:
    """Catches a bonus token drawn with the numbers of another position, or from a residual."""
    sampling = sampling_for([SamplingParams(temperature=1.0)], 500)
    table = TARGET.softmax(-1)
    anchors = sampling.seeds % V
    positions = START + torch.arange(2).expand(500, 2)
    drafts = sample_from(
        table[anchors][:, None],
        uniform(sampling.seeds, of_step(positions[:, 0], positions.shape[1] - 1), Purpose.DRAFT),
    )
    tokens = torch.cat([anchors[:, None], drafts], 1)
    draft = DraftOutput(drafts, torch.full((500,), num_drafts), probs=table[anchors][:, None])
    result = accept(tokens, TARGET[tokens], draft, sampling, positions)
    assert (result.num_accepted == num_drafts).all()
    u = uniform(sampling.seeds, positions + 1, Purpose.SAMPLE)[:, num_drafts]
    assert torch.equal(result.next_anchors, sample_from(table[tokens[:, num_drafts]], u))


@pytest.mark.parametrize("form", ["dense", "top-k supported"])
@pytest.mark.parametrize("q", [1.0, torch.nan])
def test_without_a_residual_the_target_decides(form: str, q: float) -> None:
    """Catches a residual of mass 0 (p and q agree where p was rejected by rounding) or NaN that
    yields a meaningless token.
    """
    sampling = sampling_for([SamplingParams(temperature=1.0)], 500)
    tokens = torch.cat([sampling.seeds[:, None] % V, torch.full((500, 1), 2)], 1)
    logits = TARGET[tokens]
    logits[..., 2] = -torch.inf  # the draft is impossible, so that it is rejected
    positions = START + torch.arange(2).expand(500, 2)
    draft = DraftOutput(tokens[:, 1:], probs=torch.full((500, 1, V), q))
    if form == "top-k supported":
        draft = replace(draft, candidate_ids=torch.arange(V).expand(500, 1, V))
    result = accept(tokens, logits, draft, sampling, positions)
    assert (result.num_accepted == 0).all() and result.finite.all()
    u = uniform(sampling.seeds, positions + 1, Purpose.SAMPLE)[:, 0]
    assert torch.equal(result.next_anchors, sample_from(logits[:, 0].softmax(-1), u))


MIXED = [
    SamplingParams(logprobs=True),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.7, min_p=0.1),
    SamplingParams(temperature=0.9, repetition_penalty=1.5),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(
        temperature=0.8,
        logit_bias=((1, 3.0), (2, -2.0)),
        frequency_penalty=0.5,
        presence_penalty=0.5,
        top_logprobs=2,
    ),
    SamplingParams(min_tokens=3, stop_token_ids=(0, 1), logit_bias=((1, 9.0), (4, 9.0))),
]


def rows(sampling: SamplingTensors, index: Tensor) -> SamplingTensors:
    seen, counts = (None if x is None else x[index] for x in (sampling.seen, sampling.counts))
    edits = (
        None
        if sampling.edits is None
        else Edits(*(getattr(sampling.edits, name)[index] for name in Edits.__slots__))
    )
    return replace(
        sampling,
        floats=sampling.floats[:, index],
        ints=sampling.ints[:, index],
        seen=seen,
        counts=counts,
        edits=edits,
    )


def pick(draft: DraftOutput, index: Tensor) -> DraftOutput:
    fields = (draft.token_ids, draft.num_drafts, draft.probs, draft.candidate_ids)
    return DraftOutput(*(None if x is None else x[index] for x in fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_results_do_not_depend_on_neighbors(form: str) -> None:
    """Catches anything shared between rows: permuting a mixed batch permutes its results, and each
    request alone gets the same.
    """
    sampling = sampling_for(MIXED, 10)
    count = len(sampling.seeds)
    tokens, draft, together = one_step(form, sampling, num_drafts=torch.arange(count) % (K + 1))
    positions = START + torch.arange(K + 1).expand_as(tokens)

    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    shuffled = accept(
        tokens[order], TARGET[tokens[order]], pick(draft, order), rows(sampling, order), positions
    )
    for name in ("token_ids", "num_accepted", "next_anchors", "finite"):
        assert torch.equal(getattr(shuffled, name), getattr(together, name)[order]), name
    for one, other in zip(shuffled.logprobs or (), together.logprobs or (), strict=True):
        assert torch.equal(one, other[order])

    for i in range(count):
        one = torch.tensor([i])
        alone = sampling_for([replace(MIXED[i % len(MIXED)], logprobs=True)])
        alone.ints[1] = one
        result = accept(tokens[one], TARGET[tokens[one]], pick(draft, one), alone, positions[one])
        end = int(together.num_accepted[i]) + 1
        assert result.num_accepted.item() + 1 == end
        assert torch.equal(result.token_ids[0, :end], together.token_ids[i, :end])
        assert result.logprobs is not None and together.logprobs is not None
        assert torch.equal(result.logprobs.values[0, :end], together.logprobs.values[i, :end])


@pytest.mark.parametrize(
    ("bad", "where"),
    [(torch.nan, slice(None)), (torch.nan, 2), (torch.inf, 2), (-torch.inf, slice(None))],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("params", [[SamplingParams()], MIXED], ids=["greedy", "mixed"])
def test_logits_that_are_not_finite_are_reported_and_stay_with_their_request(
    form: str, bad: float, where: int | slice, params: list[SamplingParams]
) -> None:
    """Catches invalid ids, a missed or a needless report, and damage to neighbors, with the bad row
    at every position.
    """
    sampling = sampling_for(params, 36)
    tokens, draft, clean = one_step(form, sampling)
    positions = START + torch.arange(K + 1).expand_as(tokens)
    victim = torch.rand(len(tokens), generator=torch.Generator().manual_seed(1)) < 0.5
    for row in range(K + 1):
        logits = TARGET[tokens]
        logits[victim, row, where] = bad
        result = accept(tokens, logits, draft, sampling, positions)
        assert result.token_ids.min() >= 0 and result.token_ids.max() < V
        if form == "point mass":
            assert torch.equal(result.finite, ~(victim & (row <= result.num_accepted)))
            assert result.finite[clean.num_accepted < row].all()
        else:  # a block is judged as a whole, up to where the target cannot follow
            assert (
                not result.finite[victim & (row <= result.num_accepted)].any()
                and result.finite[~victim].all()
            )
        untouched = result.finite
        assert (untouched & victim).any() or row == 0, (
            "the case must occur: a bad row behind a rejection"
        )
        assert torch.equal(result.num_accepted[untouched], clean.num_accepted[untouched])
        assert torch.equal(result.next_anchors[untouched], clean.next_anchors[untouched])


def test_masked_tokens_are_finite() -> None:
    """Catches a report about logits of -inf that merely forbid a token, such as those of a padded
    vocabulary.
    """
    for params in ([SamplingParams()], MIXED):
        sampling = sampling_for(params)
        tokens = torch.zeros(len(params), 1).long()
        logits = TARGET[tokens].clone()
        logits[..., 1:4] = -torch.inf
        result = accept(tokens, logits, None, sampling, tokens)
        assert result.finite.all()
        assert not torch.isin(result.token_ids, torch.tensor([1, 2, 3])).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repetition_penalty_counts_the_drafts_at_each_position(temperature: float) -> None:
    """Catches a penalty that misses a draft, or sees a later one: step by step, the choices are
    those of Transformers.
    """
    params = SamplingParams(temperature=temperature, repetition_penalty=1.8)
    count = 300
    sampling = sampling_for([params], count)
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(V, (count, 2), generator=generator)
    assert sampling.seen is not None
    sampling.seen.scatter_(1, prompt[:, :1], True)
    history, anchors = prompt, prompt[:, 1:]
    expected = []
    for i in range(K + 1):
        probs = transformers_probs(params, history, TARGET[history[:, -1]])
        # what is drawn from these logits once they are processed
        draw = sampling_for([SamplingParams(temperature=1.0)], count)
        scores = probs.log()[:, None] if temperature else probs[:, None]
        expected.append(
            sample(
                scores, draw if temperature else sampling, torch.full((count, 1), START + i + 1)
            )[0].squeeze(1)
        )
        history = torch.cat([history, expected[-1][:, None]], 1)
    truth = torch.stack(expected, 1)
    for wrong in range(K + 1):  # the draft at this index is wrong; at K none is
        drafts = truth[:, :K].clone()
        drafts[:, wrong:] = (drafts[:, wrong:] + 1) % V
        tokens = torch.cat([anchors, drafts], 1)
        result = accept(
            tokens, TARGET[tokens], None, sampling, START + torch.arange(K + 1).expand_as(tokens)
        )
        assert (result.num_accepted == wrong).all()
        assert torch.equal(result.token_ids[:, : wrong + 1], truth[:, : wrong + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_logprobs_are_those_of_the_unprocessed_logits(form: str, dtype: torch.dtype) -> None:
    """Catches log-probabilities after temperature or penalty, in the model's dtype, or of the
    drafts instead of the output.
    """
    params = [replace(p, logprobs=True) for p in MIXED]
    sampling = sampling_for(params, 20)
    tokens, draft, _ = one_step(form, sampling)
    logits = TARGET[tokens].to(dtype)
    result = accept(tokens, logits, draft, sampling, START + torch.arange(K + 1).expand_as(tokens))
    expected = logits.double().log_softmax(-1).gather(-1, result.token_ids[..., None]).squeeze(-1)
    assert result.logprobs is not None and result.logprobs.values.dtype == torch.float32
    assert (result.logprobs.values - expected).abs().max() < 1e-5


class Recorder(TorchDispatchMode):
    """Notes every operation with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.overloadpacket.__name__, args, result))
        return result


@pytest.mark.parametrize(
    "read", [Tensor.item, Tensor.nonzero, lambda x: x[x > 0], lambda x: 0 if x else 1, torch.unique]
)
def test_the_guard_against_waiting_notices(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(HostSyncError), no_host_sync():
        read(torch.ones(1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize(
    "params", [[SamplingParams(logprobs=True)], MIXED], ids=["greedy", "mixed"]
)
def test_the_host_never_waits(form: str, k: int, params: list[SamplingParams]) -> None:
    """Catches reads of device values and shapes that depend on them; tensors without data (`meta`)
    leave no way to cheat.
    """
    sampling = sampling_for(params, 3)
    tokens, draft, expected = one_step(
        form, sampling, k, torch.full((len(sampling.seeds),), min(k, 2))
    )
    logits = TARGET[tokens]
    positions = START + torch.arange(k + 1).expand_as(tokens)
    with no_host_sync():
        result = accept(tokens, logits, draft, sampling, positions)
    assert torch.equal(result.token_ids, expected.token_ids)

    def meta(x: Any) -> Any:
        return (
            type(x)(**{f: meta(getattr(x, f)) for f in x.__slots__})
            if getattr(x, "__slots__", ())
            else as_meta(x)
        )

    def as_meta(x: Any) -> Any:
        return x.to("meta") if isinstance(x, Tensor) else x

    planned = accept(
        as_meta(tokens), as_meta(logits), meta(draft), meta(sampling), as_meta(positions)
    )
    names = ("token_ids", "num_accepted", "next_anchors", "finite")
    pairs = [(getattr(planned, name), getattr(result, name)) for name in names]
    for a, b in [*pairs, *zip(planned.logprobs or (), result.logprobs or (), strict=True)]:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_all_greedy_makes_no_float_copy_of_the_logits() -> None:
    """Catches a cast of [num_reqs, k + 1, V] logits on the path that needs only their maxima."""
    sampling = sampling_for([SamplingParams()], 4)
    tokens = torch.zeros(4, K + 1).long()
    logits = TARGET[tokens].bfloat16()
    with Recorder() as recorder:
        result = accept(tokens, logits, None, sampling, tokens)
    assert (result.token_ids == logits.argmax(-1)).all()
    assert not [
        name
        for name, _, x in recorder.calls
        if isinstance(x, Tensor) and x.shape == logits.shape and x.is_floating_point()
    ]


def test_a_cpu_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an import of Triton where its kernels cannot run; it may be missing there."""
    for module in ("triton", "specdec.kernels.triton_argmax"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises
    tokens = torch.zeros(1, K + 1).long()
    assert torch.equal(
        accept(tokens, TARGET[tokens], None, sampling_for([SamplingParams()]), tokens).token_ids,
        TARGET[tokens].argmax(-1),
    )
