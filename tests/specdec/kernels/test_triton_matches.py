"""Suffix decoding on kernels against plain torch; where they run, see
`tests.helpers.triton_interpreter`.
"""

from typing import Any, NamedTuple

import pytest
import torch

from drafters.suffix import choice, matches
from drafters.suffix.matches import NOTHING, Limits, Texts
from drafters.suffix.search import KERNEL, best_chain, check_matches, search
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from drafters.suffix import triton_choice, triton_matches  # noqa: E402


class Case(NamedTuple):
    """What to search, and how."""

    seq_lens: tuple[int, ...]
    pool: int
    limits: Limits
    alphabet: int = 3


CASES = (
    Case((0, 1, 5, 70, 99), 61, Limits(16, longest=16, compared=4, shortest=1, depth=9)),
    Case((0, 1, 5, 70, 99), 0, Limits(16, longest=16, compared=4, shortest=1, depth=9)),
    Case((3, 98, 40), 200, Limits(64, longest=64, compared=4, shortest=3, depth=64), alphabet=2),
    Case((60, 30), 61, Limits(1, longest=5, compared=5, shortest=2, depth=3)),
    Case((30, 31, 32, 33), 31, Limits(7, longest=9, compared=4, shortest=1, depth=5), alphabet=1),
    Case((0, 1, 2, 9), 0, Limits(20, longest=6, compared=2, shortest=1, depth=4), alphabet=1),
    Case((90, 99), 1, Limits(33, longest=64, compared=64, shortest=1, depth=1), alphabet=2),
)


def texts_of(case: Case) -> Texts:
    """Random ones of few different tokens; rows out of order, behind each text tokens that are none
    of its own.
    """
    generator = torch.Generator().manual_seed(case.pool + case.limits.occurrences)
    history = torch.randint(
        case.alphabet, (len(case.seq_lens) + 2, 113), dtype=torch.int32, generator=generator
    )
    slots = torch.randperm(len(history), generator=generator)[: len(case.seq_lens)]
    pool = None
    if case.pool:
        pool = torch.randint(case.alphabet, (case.pool,), dtype=torch.int32, generator=generator)
        pool[torch.rand(case.pool, generator=generator) < 0.05] = NOTHING
        pool[-1] = NOTHING
    return Texts(pool, history, slots, torch.tensor(case.seq_lens), max(case.seq_lens) + 1)


def on_device(texts: Texts) -> Texts:
    """The same where kernels run."""
    history, slots, seq_lens = (tensor.to(DEVICE) for tensor in texts[1:4])
    return Texts(
        None if texts.pool is None else texts.pool.to(DEVICE),
        history,
        slots,
        seq_lens,
        texts.max_seq_len,
    )


@pytest.fixture(params=[16, 128])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are smaller than what is asked for, and ones that span the border between past
    texts and the own one.
    """
    monkeypatch.setattr(triton_matches, "CHUNK", request.param)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_torch(case: Case) -> None:
    """The same matches in the same order, what followed them, and which of them to draft."""
    assert KERNEL.runs_on(DEVICE)
    texts, (count, longest, _, _, depth) = texts_of(case), case.limits
    expected, found = matches.search(texts, case.limits), search(on_device(texts), case.limits)
    assert torch.equal(found.lengths.cpu(), expected.lengths)
    continuations = expected.continuations
    assert torch.equal(found.continuations.cpu(), continuations)
    # Some are left out, as where an earlier look found more; without a match nothing is said,
    # whatever they hold.
    ready = [tensor.to(DEVICE) for tensor in expected]
    for some, steps in ((count, depth), (max(1, count // 2), max(1, depth - 1))):
        chain = best_chain(ready[0][:, :some, :steps], ready[1][:, :some], longest)
        plain = choice.best_chain(
            expected.continuations[:, :some, :steps], expected.lengths[:, :some], longest
        )
        for ours, theirs in zip(chain, plain, strict=True):
            assert torch.equal(ours.cpu(), theirs)


def test_cases_have_what_they_are_for() -> None:
    """Fewer matches than asked for, all of them, none, and ones that are followed back; texts that
    end in time and that go on.
    """
    seen = []
    for case in CASES:
        continuations, lengths, _ = matches.search(texts_of(case), case.limits)
        ended = continuations[..., -1] < 0
        few, all_there, none = (
            (lengths[:, 0] > 0) & (lengths[:, -1] == 0),
            lengths[:, -1] > 0,
            lengths[:, 0] == 0,
        )
        followed = lengths > case.limits.compared
        longest, between = (
            followed & (lengths == case.limits.longest),
            followed & (lengths < case.limits.longest),
        )
        kinds = (
            few,
            all_there,
            none,
            longest,
            between,
            (lengths > 0) & ended,
            (lengths > 0) & ~ended,
        )
        seen.append(torch.stack([kind.any() for kind in kinds]))
    assert torch.stack(seen).any(dim=0).all()


def test_no_more_programs_than_one_can_look_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long texts a program's chunk is longer; the pool's last columns and the text's first are
    in one.
    """
    monkeypatch.setattr(triton_matches, "CHUNK", 16)
    monkeypatch.setattr(triton_matches, "MAX_CHUNKS", 3)
    test_as_torch(CASES[0])


def test_more_than_the_kernels_keep() -> None:
    """Is searched for by plain torch."""
    found = search(on_device(texts_of(CASES[0])), CASES[0].limits._replace(occurrences=65))
    assert found.lengths.shape == (5, 65) and best_chain(
        found.continuations, found.lengths, 16
    ).token_ids.shape == (5, 9)


def test_the_check_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, and fails where a kernel is off."""
    found = check_matches(DEVICE)
    assert found.error <= found.bound
    for module, name in (
        (triton_matches, "search"),
        (triton_choice, "best_chain"),
        (triton_choice, "weigh"),
    ):
        right = getattr(module, name)

        def wrong(*arguments: Any, right: Any = right, **options: Any) -> tuple[torch.Tensor, ...]:
            return tuple(found + 1 for found in right(*arguments, **options))

        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            found = check_matches(DEVICE)
            assert found.error > found.bound
