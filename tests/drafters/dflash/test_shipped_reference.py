"""The shipped drafter's backbone in the public `dflash` package: the same tokens and accepted
counts as in our engine.

The package knows no Markov head. `python -m tests.checks.dflash` does the same on more prompts.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.shipped import shipped_drafter_path
from evals.prompt_sets import load_prompt_set
from specdec.session.decoder import SpecDecoder
from tests.checks.dflash import (
    Generation,
    Tally,
    as_the_package_knows_it,
    check,
    compare,
    our_decoder,
    public_drafter,
)

pytest.importorskip("dflash.model")

TOKENS = 24
CHATS = {item.item_id: item.turns[0] for item in load_prompt_set("bundled").items[:2]}


@pytest.fixture(scope="module")
def backbone() -> Iterator[Path]:
    with as_the_package_knows_it(shipped_drafter_path()) as folder:
        assert folder != shipped_drafter_path()
        yield folder


@pytest.fixture(scope="module")
def public(backbone: Path) -> Any:
    return public_drafter(backbone)


@pytest.fixture(scope="module")
def decoder(backbone: Path) -> SpecDecoder:
    return our_decoder(str(backbone))


@pytest.mark.slow
def test_the_public_package_accepts_the_same(decoder: SpecDecoder, public: Any) -> None:
    """Catches a checkpoint that only we read rightly, and drafts unlike the public loop's."""
    tally, summary = check(decoder, public, CHATS, TOKENS)
    assert (tally.differing, tally.equal) == (0, tally.steps), summary
    assert tally.steps >= 2 * TOKENS // 8, summary


@pytest.mark.slow
def test_the_check_notices_shifted_taps(
    decoder: SpecDecoder,
    public: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a check that finds all equal: shifted taps on one side must differ."""
    monkeypatch.setattr(
        public, "target_layer_ids", [layer + 1 for layer in public.target_layer_ids]
    )
    first = dict(list(CHATS.items())[:1])
    tally, summary = check(decoder, public, first, TOKENS // 2)
    assert tally.equal < tally.steps, summary
    assert tally.wrong, summary
    printed = capsys.readouterr().out
    assert "drafts accepted here" in printed
    assert "WRONG" in printed
    assert " token " not in printed


@pytest.mark.parametrize(
    ("ours", "gap", "counts", "printed"),
    [
        (Generation([5, 6, 7, 8, 9], [2, 2]), 1.0, (2, 2, 0, 0), ""),
        (
            Generation([5, 6, 7, 8, 9], [1, 1, 2]),
            1e-5,
            (2, 1, 1, 0),
            "after 1 tokens 0 drafts accepted here, 1 there",
        ),
        (
            Generation([5, 6, 7, 8, 9], [1, 1, 2]),
            1e-2,
            (2, 1, 1, 1),
            "(logits apart 1.0e-02): WRONG",
        ),
        (
            Generation([5, 6, 7, 1, 9], [2, 2]),
            1e-5,
            (1, 1, 1, 0),
            "token 3 is 1 here, 8 there (logits apart 1.0e-05): near-tie",
        ),
        (
            Generation([5, 6, 7, 1, 9], [2, 2]),
            1e-2,
            (1, 1, 1, 1),
            "token 3 is 1 here, 8 there (logits apart 1.0e-02): WRONG",
        ),
        (
            Generation([5, 6, 7], [2]),
            1e-5,
            (1, 1, 1, 1),
            "3 tokens here, 5 there (logits apart inf): WRONG",
        ),
    ],
    ids=["equal", "count near-tie", "count", "token near-tie", "token", "length"],
)
def test_what_counts_as_a_difference(
    ours: Generation,
    gap: float,
    counts: tuple[int, ...],
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches an excused difference, steps compared after one, and a failing tie."""
    theirs = Generation([5, 6, 7, 8, 9], [2, 2], [[gap] * 3] * 2)
    logits = torch.zeros(1, 1, 10)
    logits[..., 8] = gap
    tally = Tally()
    compare("x", [0], ours, theirs, lambda ids, **kwargs: SimpleNamespace(logits=logits), tally)
    assert (tally.steps, tally.equal, tally.differing, tally.wrong) == counts
    assert printed in (text := capsys.readouterr().out)
    assert bool(text) == bool(printed)
