"""The emulation of AITER's routing of experts: right where it answers, and an error elsewhere."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.aiter_emulation import Machine
from tests.helpers.aiter_emulation_case import Attempt, Load, Misuse, check_misuse
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync


def route(
    logits: Tensor, bias: Tensor | None, groups: int, kept: int, topk: int, softmax: bool
) -> list[dict[int, Tensor]]:
    """Weights before scaling by expert of every token, one token at a time, in the type of
    `logits`.
    """
    rows = []
    for token in logits:
        scores = token.softmax(0) if softmax else token.sigmoid()
        choice = scores + (bias.to(token.dtype) if bias is not None else 0)
        members = [
            list(range(g * len(token) // groups, (g + 1) * len(token) // groups))
            for g in range(groups)
        ]
        depth = 2 if bias is not None else 1
        order = sorted(
            range(groups),
            key=lambda g: (
                -sum(sorted((float(choice[e]) for e in members[g]), reverse=True)[:depth]),
                g,
            ),
        )
        allowed = [e for g in order[:kept] for e in members[g]]
        rows.append({e: scores[e] for e in sorted(allowed, key=lambda e: -float(choice[e]))[:topk]})
    return rows


@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize("kind", ["biased", "softmax groups", "sigmoid groups", "softmax"])
def test_routing(load: Load, kind: str, renorm: bool) -> None:
    """Experts and weights as sets per token, also when every biased score is negative."""
    aiter, _ = load()
    torch.manual_seed(4)
    logits, bias = torch.randn(9, 16).bfloat16(), (torch.randn(16) - 3).bfloat16()
    weights, ids = torch.full((9, 3), torch.nan), torch.zeros(9, 3, dtype=torch.int32)
    factor = 2.5 if "groups" in kind or kind == "biased" else 1.0
    softmax = kind.startswith("softmax")
    with no_host_sync():
        if kind == "biased":
            aiter.biased_grouped_topk(logits, bias, weights, ids, 4, 2, renorm, factor)
        elif "groups" in kind:
            aiter.grouped_topk(logits, weights, ids, 4, 2, renorm, softmax, factor)
        else:
            aiter.topk_softmax(weights, ids, torch.zeros_like(ids), logits, renorm)
    groups = (4, 2) if "groups" in kind or kind == "biased" else (1, 1)
    runs = []
    for dtype in (torch.float32, torch.float64):
        rows = route(logits.to(dtype), bias if kind == "biased" else None, *groups, 3, softmax)
        assert [set(row) for row in rows] == [set(row) for row in ids.tolist()]
        wanted = torch.stack(
            [
                torch.stack([row[e] for e in own])
                for row, own in zip(rows, ids.tolist(), strict=True)
            ]
        )
        runs.append(wanted * factor / (wanted.sum(-1, keepdim=True) if renorm else 1))
    assert_as_exact(weights, *runs)


def _route(
    bias: torch.dtype = torch.bfloat16,
    groups: int = 4,
    kept: int = 2,
    ids: torch.dtype = torch.int32,
    topk: int = 3,
) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        weights, chosen = torch.zeros(9, topk), torch.zeros(9, topk, dtype=ids)
        aiter.biased_grouped_topk(
            torch.randn(9, 16).bfloat16(),
            torch.zeros(16, dtype=bias),
            weights,
            chosen,
            groups,
            kept,
            True,
        )

    return attempt


MISUSES: dict[str, Misuse] = {
    "bias of another type": Misuse(_route(bias=torch.float32), "reads the bias"),
    "3 groups": Misuse(_route(groups=3), "3 groups"),
    "5 of 4 groups": Misuse(_route(kept=5), "5 of 4 groups"),
    "int64 ids": Misuse(_route(ids=torch.int64), "int32 ids"),
    "more experts than the groups hold": Misuse(_route(topk=9), "9 experts from 2 groups"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(load: Load, name: str) -> None:
    """Every limit the backends have to respect."""
    check_misuse(load, MISUSES[name])
