"""Drafters whose logits are no numbers cost time, and change no output."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.composed.drafter import BoundComposed, ComposedDrafter
from drafters.dflash.drafts import Drafts, Slots
from drafters.dflash2.selector import SelectorConfig
from drafters.domino.gru import DominoConfig
from drafters.draft_model.drafter import DraftModel
from drafters.dspark.markov import MarkovConfig
from drafters.lilicorr.lattice import LatticeConfig
from drafters.sequential.drafts import TokenByToken
from drafters.suffix.drafter import SuffixDrafter
from drafters.xpress.refiner import XPressConfig
from specdec.engine.engine import SpecEngine
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, DraftOutput, Verifier
from specdec.sampling.params import SamplingParams
from tests.drafters.eagle3.heads import random_eagle3
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash

K = 5
VALUES = {"nan": math.nan, "-nan": -math.nan, "inf": math.inf, "-inf": -math.inf}
PROMPTS = [[5, 6, 5, 6, 5], [8, 9]]
WAYS = [
    SamplingParams(max_tokens=7),
    SamplingParams(max_tokens=7, temperature=0.9, seed=3, top_k=20),
]

DRAFTERS: dict[str, Callable[[Verifier], Drafter]] = {
    "dflash": lambda verifier: random_dflash(verifier, block_size=K + 1),
    "markov": lambda verifier: random_dflash(
        verifier, block_size=K + 1, head=MarkovConfig(4, "rnn", has_confidence=True)
    ),
    "markov of few": lambda verifier: random_dflash(
        verifier, block_size=K + 1, head=MarkovConfig(4, draft_top_k=8)
    ),
    "selector": lambda verifier: random_dflash(
        verifier, block_size=K + 1, head=SelectorConfig(4, 8)
    ),
    "domino": lambda verifier: random_dflash(verifier, block_size=K + 1, head=DominoConfig(3, 4)),
    "lattice": lambda verifier: random_dflash(
        verifier, block_size=K + 1, head=LatticeConfig(16, 8, num_heads=2, factor_dim=4)
    ),
    "refiner": lambda verifier: random_dflash(verifier, block_size=K + 1, head=XPressConfig(4)),
    "eagle3": lambda verifier: random_eagle3(verifier, K),
    "draft_model": lambda verifier: DraftModel(
        paged_verifier(plain_model("qwen3", 5)), verifier, max_draft_tokens=K
    ),
    "suffix+dflash": lambda verifier: ComposedDrafter(
        [
            SuffixDrafter(max_draft_tokens=K, pool_tokens=64),
            random_dflash(verifier, block_size=K + 1),
        ]
    ),
}
CASES: list[tuple[dict[str, Any], bool]] = [
    ({"num_draft_tokens": None}, True),
    ({"tree_nodes": 12}, True),
    ({"tree_nodes": 12}, False),
]
"""Shapes of blocks, and whether all logits are spoiled or those of two columns."""


@cache
def target() -> Verifier:
    assert VOCAB % 64, "columns past the vocabulary are what could be taken"
    return paged_verifier(plain_model("llama"))


def written(drafter: Drafter | None, **options: Any) -> tuple[SpecEngine, list[list[int]]]:
    engine = tiny_engine(target(), drafter, max_num_seqs=3, **options)
    return engine, finish(
        engine, *(engine.add_request(prompt, way) for way in WAYS for prompt in PROMPTS)
    )


@cache
def plain() -> list[list[int]]:
    return written(None, num_draft_tokens=0)[1]


def spoil(monkeypatch: pytest.MonkeyPatch, value: float, whole: bool) -> None:
    """All logits of drafts are `value`, or those of a column in the midst and the last."""
    of, guess, choose = Drafts.of, TokenByToken._guess, TokenByToken._choose
    columns = slice(None) if whole else [7, -1]

    def spoiled(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., columns] = value
        return logits

    def filled(states: Tensor | None) -> Any:
        return torch.full_like(states, value) if whole and states is not None else states

    def of_block(self: Drafts, batch: DecodeBatch, slots: Slots) -> DraftOutput:
        return of(
            self, batch, Slots(filled(slots.hidden), spoiled(slots.logits), filled(slots.context))
        )

    monkeypatch.setattr(Drafts, "of", of_block)
    for name, method in (("_guess", guess), ("_choose", choose)):

        def of_rows(self: TokenByToken, *args: Any, method: Any = method, **named: Any) -> object:
            network, logits = self.network, self.network.logits
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    network, "logits", lambda hidden: spoiled(logits(hidden)), raising=False
                )
                return method(self, *args, **named)

        monkeypatch.setattr(TokenByToken, name, of_rows)


OTHERS = [("selector", "inf"), ("eagle3", "-inf"), ("suffix+dflash", "nan")]


@pytest.mark.parametrize(("name", "value"), [*((name, "-nan") for name in DRAFTERS), *OTHERS])
def test_logits_that_are_no_numbers(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either sign, in all columns or two, greedily and sampling, in chains and trees."""
    drafter = DRAFTERS[name](target())
    for options, whole in CASES:
        with monkeypatch.context() as patch:
            spoil(patch, VALUES[value], whole)
            engine, texts = written(drafter, **options)
        assert texts == plain(), (options, whole)
        bound = engine.runner.drafter
        if isinstance(bound, BoundComposed):
            assert bound.calibration._sums.isfinite().all(), (
                "what is no number would never be forgotten"
            )
