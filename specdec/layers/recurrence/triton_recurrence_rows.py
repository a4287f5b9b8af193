"""What the kernels of recurrent layers are given, and what they hand to each other."""

from typing import NamedTuple, Protocol

import triton
import triton.language as tl
from torch import Tensor


class Layer(Protocol):
    """A layer's recurrence: `specdec.layers.recurrence.recurrence.Recurrence`, which lies above."""

    @property
    def num_key_heads(self) -> int: ...
    @property
    def num_value_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def kernel(self) -> Tensor: ...
    @property
    def kernel_bias(self) -> Tensor | None: ...
    @property
    def rate(self) -> Tensor: ...
    @property
    def time_bias(self) -> Tensor: ...
    @property
    def rule(self) -> str: ...
    @property
    def beta_scale(self) -> float: ...
    @property
    def time_limits(self) -> tuple[float, float]: ...
    @property
    def skip(self) -> Tensor | None: ...
    @property
    def decays(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def taps(self) -> int: ...


class Rows(Protocol):
    """Whose rows a forward has: `specdec.layers.recurrence.recurrence.RecurrentRows`, which lies
    above.
    """

    @property
    def slots(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def counts(self) -> Tensor: ...
    @property
    def first_rows(self) -> Tensor: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_pending(self) -> int: ...
    @property
    def final(self) -> bool: ...


class Prepared(NamedTuple):
    """What states take in. Rows of request r begin at `first_rows[r] + r * max_pending`, pending
    ones first.
    """

    # [T + num_reqs * max_pending, channels] in the model's type, convolved: queries, keys, values
    channels: Tensor
    # float32 [rows, 2 * key heads]: of queries, then keys; unused where the rule is "plain"
    factors: Tensor
    # float32 [rows, value heads * decays + value heads]: logarithms of the decays, then betas
    gates: Tensor


@triton.jit
def pending_rows(
    lengths: tl.tensor, slot: tl.tensor, start: tl.tensor, max_pending: tl.tensor
) -> tl.tensor:
    """Accepted rows that the state of a slot has not taken in,
    as `RecurrentRows.pending` has them.
    """
    waiting = tl.minimum(tl.maximum(start - tl.load(lengths + slot), 0), max_pending)
    return tl.where(start == 0, 0, waiting).to(tl.int32)
