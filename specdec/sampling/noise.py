"""Random numbers as functions of (request seed, position, purpose), some of the token too.

A request's output therefore does not depend on its neighbors, on preemption, or, where the target's
choices are compared with the drafts, on whether drafts were used at all. The numbers of a position
are used once per purpose. Where a rejected part of a block may have depended on them, they are
those of the step instead (`of_step`).
"""

from collections import OrderedDict
from enum import IntEnum
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from specdec.base.blocks import MAX_NODES


class Purpose(IntEnum):
    """Independent random streams of one position."""

    SAMPLE = 0  # the target's own token
    ACCEPT = 1  # the acceptance test of a draft
    DRAFT = 2  # the drafter's token


def _signed(bits: int, size: int = 64) -> int:
    """The integer of `size` bits with these bits."""
    return bits - 2**size if bits >= 2 ** (size - 1) else bits


# SplitMix64's increment and factors; then a token's, of 32 bits.
_STEP = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_TOKEN_STEP = _signed(0x9E3779B1, 32)
_TOKEN_FACTORS = (0x7FEB352D, _signed(0x846CA68B, 32))
_LARGEST = 1 - 2.0**-24  # float32 below 1

REMEMBERED = 2**22
"""How many variables a CPU keeps, about 16 MiB, of small vocabularies fewer; 0 keeps none."""
_MAX_ROWS = 256
# float32 [V] by bits and V, the oldest first
_remembered: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
_lock = Lock()


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # `>>` copies the sign bit; the hash wants zeros.
    size = bits.element_size() * 8
    return (bits >> count) & ((1 << (size - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """Bijective 64-bit finalizer: input bits flip each output bit with probability near 1/2."""
    bits = (bits ^ _shift_right(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shift_right(bits, 27)) * _FACTORS[1]
    return bits ^ _shift_right(bits, 31)


def stream(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """64 random bits for each position.

    Each request walks its own SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014), from its
    hashed seed and addressed directly. Products wrap around, as they should.

    Args:
        seeds: int64 [num_reqs].
        positions: int64 [num_reqs, n], positions of the tokens that the bits decide.

    Returns:
        int64 [num_reqs, n].
    """
    counter = positions * len(Purpose) + (int(purpose) + 1)
    return _mix(_mix(seeds)[:, None] + counter * _STEP)


def of_step(anchors: Tensor, count: int) -> Tensor:
    """int64 [num_reqs, count], in place of positions, for what a later step must not draw again.

    The step after a rejection drafts and judges some of the same positions anew. Where the old
    drafts, or their tests, had a part in what was rejected, their numbers are no longer random;
    those of another anchor are others.

    Args:
        anchors: int64 [num_reqs], positions of the step's anchors.
        count: at most `MAX_NODES`.
    """
    return anchors[:, None] * MAX_NODES + torch.arange(count, device=anchors.device)


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """One random number for each position; arguments as in `stream`.

    Returns:
        float64 [num_reqs, n] in [0, 1), multiples of 2**-53.
    """
    return _shift_right(stream(seeds, positions, purpose), 11).double() * 2.0**-53


def gumbel(bits: Tensor, tokens: int | Tensor) -> Tensor:
    """A Gumbel variable for each token: the largest sum of log-probability and noise is a sample.

    A token's own 31 bits come from a 32-bit finalizer with the lower half of its position's bits
    added before, and the upper half in the middle. They make the exponential variable E = -log(1 -
    v), whose small values, the winners, are then finely spaced.

    Args:
        bits: int64 [...], of `stream`.
        tokens: V, for all those of a vocabulary, or which, int64 [V] or [..., V].

    Returns:
        float32 [..., V], -log(E), between -2.9 and 22.2.
    """
    of_tokens = (
        _token_bits(tokens, bits.device) if isinstance(tokens, int) else tokens.int() * _TOKEN_STEP
    )
    x = of_tokens + bits.int()[..., None]
    # every operation in place: on a CPU fetching memory takes longer than computing
    shifted = torch.empty_like(x)

    def fold(count: int) -> Tensor:
        torch.bitwise_right_shift(x, count, out=shifted)
        return x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - count)) - 1))

    fold(16).mul_(_TOKEN_FACTORS[0]).bitwise_xor_((bits >> 32).int()[..., None])
    fold(15).mul_(_TOKEN_FACTORS[1])
    fold(16).bitwise_right_shift_(1).bitwise_and_(2**31 - 1)
    v = torch.add(x, 0.5, out=shifted.view(torch.float32)).mul_(-(2.0**-31)).clamp_(min=-_LARGEST)
    return v.log1p_().neg_().log_().neg_()


def gumbel_again(bits: Tensor, tokens: int | Tensor) -> Tensor:
    """`gumbel`, of bits int64 [n], for which a CPU remembers what it computed last.

    A target draws with the noise that its drafter knew, and the next step drafts anew for the
    positions behind a rejected draft. On a CPU the noise of a vocabulary takes several times as
    long as the rest of choosing a token.
    """
    if bits.device.type != "cpu" or not isinstance(tokens, int) or not REMEMBERED:
        return gumbel(bits, tokens)
    keys = [(number, tokens) for number in bits.tolist()]
    with _lock:
        rows = {key: _remembered[key] for key in keys if key in _remembered}
    missing = [place for place, key in enumerate(keys) if key not in rows]
    if missing:
        rows |= zip((keys[place] for place in missing), gumbel(bits[missing], tokens), strict=True)
    with _lock:
        for key in keys:
            _remembered[key] = rows[key]
            _remembered.move_to_end(key)
        while len(_remembered) > max(1, min(_MAX_ROWS, REMEMBERED // tokens)):
            _remembered.popitem(last=False)
    return torch.stack([rows[key] for key in keys])


@lru_cache(maxsize=16)
def _token_bits(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(vocab_size, dtype=torch.int32, device=device) * _TOKEN_STEP
