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


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """First position at which two outputs differ, the end of the shorter one included; None when
    they are the same.

    >>> [first_divergence(*pair) for pair in (([5, 6], [5, 6]), ([5, 6], [5, 9]), ([5], [5, 6]))]
    [None, 1, 1]
    """
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def explain_divergence(
    decoder: SpecDecoder,
    index: int,
    position: int,
    prompt: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
) -> Divergence:
    """What the target made of the tokens before `position`, where the two outputs part."""
    logits = decoder.next_token_logits([*prompt, *plain[:position]])
    largest, second = logits.topk(2).values.tolist()
    _, exponent = math.frexp(largest)
    return Divergence(
        index=index,
        position=position,
        plain_token_id=plain[position] if position < len(plain) else None,
        speculative_token_id=speculative[position] if position < len(speculative) else None,
        margin=largest - second,
        resolution=math.ldexp(torch.finfo(decoder.verifier.dtype).eps, exponent - 1),
    )
