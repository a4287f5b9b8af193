"""All ranks of a group go on from rank 0's choice of tokens.

Ranks have the same logits to the bit, and choose tokens from them in the same way; so they agree,
unless a library adds up in no fixed order. Then one rank's next collective would not be another's,
and all would wait for ever. So the outcome of every step is rank 0's: a few hundred bytes, sent
from device to device, in a captured step as well.
"""

import os
from dataclasses import replace

import torch
from torch import Tensor

from specdec.model.core import AcceptOutput
from specdec.parallel.collectives import broadcast
from specdec.parallel.group import Group

VARIABLE = "SPECDEC_AGREEMENT"
"""Environment variable; 0 leaves every rank its own outcome, to measure what the exchange takes."""


def same(values: Tensor, group: Group | None) -> Tensor:
    """`values` [...] as rank 0 has them: which rows a step has, say, without which no rank's sums
    would be of the same rows.
    """
    return values if os.environ.get(VARIABLE) == "0" else broadcast(values, group)


def agreed(accepted: AcceptOutput, group: Group | None) -> AcceptOutput:
    """A step's outcome as rank 0 has it; log-probabilities, on which nothing depends, stay each
    rank's own.
    """
    if group is None or os.environ.get(VARIABLE) == "0":
        return accepted
    whole = accepted.finite.long()
    parts = [accepted.num_accepted, accepted.next_anchors, whole, accepted.token_ids]
    parts += [] if accepted.path is None else [accepted.path]
    # One part behind the other, so that each is contiguous, as kernels read them.
    flat = same(torch.cat([part.flatten() for part in parts]), group)
    sizes = [part.numel() for part in parts]
    said = [one.view(part.shape) for one, part in zip(flat.split(sizes), parts, strict=True)]
    num_accepted, next_anchors, finite, token_ids, *path = said
    return replace(
        accepted,
        num_accepted=num_accepted,
        next_anchors=next_anchors,
        finite=finite > 0,
        token_ids=token_ids,
        path=path[0] if path else None,
    )
