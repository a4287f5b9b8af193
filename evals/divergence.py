"""Where two outputs for one prompt part, and how close the target was to choosing otherwise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.session.decoder import SpecDecoder


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the two outputs of one prompt part.

    Attributes:
        index: which prompt, counted from 0.
        position: first output token that differs, counted from 0.
        plain_token_id, speculative_token_id: what stands there; None where that output has ended.
        margin: the target's largest logit there less its second largest, both unprocessed.
        resolution: distance of neighboring numbers of the target's dtype at the size of that logit.
    """

    index: int
    position: int
    plain_token_id: int | None
    speculative_token_id: int | None
    margin: float
    resolution: float


@dataclass(frozen=True, slots=True)
class Parting:
    """Two greedy outputs of prompt number `index`, and where they part."""

    index: int
    position: int
    prompt: list[int]
    plain: list[int]
    speculative: list[int]


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """First position at which two outputs differ, or the shorter one ends; None for the same.

    >>> [first_divergence(*pair) for pair in (([5, 6], [5, 6]), ([5, 6], [5, 9]), ([5], [5, 6]))]
    [None, 1, 1]
    """
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def parting_of(index: int, prompt: list[int], plain: list[int], other: list[int]) -> Parting | None:
    """Where two outputs part; None when they are the same."""
    position = first_divergence(plain, other)
    return None if position is None else Parting(index, position, prompt, plain, other)


def explain_divergence(decoder: SpecDecoder, parting: Parting) -> Divergence:
    """What the target made of the tokens before the two outputs part."""
    position = parting.position
    logits = decoder.next_token_logits([*parting.prompt, *parting.plain[:position]])
    largest, second = logits.topk(2).values.tolist()
    _, exponent = math.frexp(largest)
    resolution = math.ldexp(torch.finfo(decoder.verifier.dtype).eps, exponent - 1)
    sides, at = (parting.plain, parting.speculative), parting.position
    plain, speculative = (side[at] if at < len(side) else None for side in sides)
    margin = largest - second
    return Divergence(parting.index, position, plain, speculative, margin, resolution)
