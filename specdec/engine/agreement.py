"""All ranks of a group go on from rank 0's choice of tokens.

Ranks have the same logits to the bit, and choose tokens from them in the same way; so they agree, unless a library adds up in no
fixed order. Then one rank's next collective would not be another's, and all would wait for ever. So the outcome of every step is
rank 0's: a few hundred bytes, sent from device to device, in a captured step as well.
"""

import os
from dataclasses import replace

import torch

from specdec.model.core import AcceptOutput
from specdec.parallel.collectives import broadcast
from specdec.parallel.group import Group

VARIABLE = "SPECDEC_AGREEMENT"
"""Environment variable; 0 leaves every rank its own outcome, to measure what the exchange takes."""


def agreed(accepted: AcceptOutput, group: Group | None) -> AcceptOutput:
    """A step's outcome as rank 0 has it; log-probabilities, on which nothing depends, stay each rank's own."""
    if group is None or os.environ.get(VARIABLE) == "0":
        return accepted
    columns = [accepted.num_accepted[:, None], accepted.next_anchors[:, None], accepted.finite.long()[:, None], accepted.token_ids]
    columns += [] if accepted.path is None else [accepted.path]
    table = broadcast(torch.cat(columns, dim=1), group)
    width = accepted.token_ids.shape[1]
    return replace(
        accepted,
        num_accepted=table[:, 0],
        next_anchors=table[:, 1],
        finite=table[:, 2] > 0,
        token_ids=table[:, 3 : 3 + width],
        path=None if accepted.path is None else table[:, 3 + width :],
    )
