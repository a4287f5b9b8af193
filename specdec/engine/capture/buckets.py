"""Sizes that a measurement or a captured graph serves: a batch or a length counts as the next one
up.
"""

from bisect import bisect_left

from specdec.base.sizes import power_of_two

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes for which steps are captured; a larger batch runs without a graph."""

_SHORTEST = 512  # tokens; shorter sequences cost about the same


def batch_bucket(num_reqs: int) -> int:
    """The smallest of `BATCH_SIZES` that holds `num_reqs` requests; beyond the largest, the next
    power of two.

    >>> batch_bucket(1), batch_bucket(5), batch_bucket(512), batch_bucket(513)
    (1, 8, 512, 1024)
    """
    index = bisect_left(BATCH_SIZES, num_reqs)
    return BATCH_SIZES[index] if index < len(BATCH_SIZES) else power_of_two(num_reqs)


def length_bucket(num_tokens: int, longest: int) -> int:
    """Bound of the sequence lengths that share a graph: a power of two, at most `longest`.

    >>> length_bucket(7, 4096), length_bucket(257, 4096), length_bucket(3000, 3500)
    (512, 512, 3500)
    """
    return min(max(_SHORTEST, power_of_two(num_tokens)), longest)


def batches(most: int) -> list[int]:
    """Numbers of requests, one for each bucket of batches of at most `most`.

    >>> batches(5), batches(600)[-2:]
    ([1, 2, 4, 5], [512, 600])
    """
    return [*(size for size in BATCH_SIZES if size < most), most]


def lengths(longest: int) -> list[int]:
    """Every bound that `length_bucket` gives.

    >>> lengths(3500), lengths(100)
    ([512, 1024, 2048, 3500], [100])
    """
    return sorted({length_bucket(2**n, longest) for n in range(power_of_two(longest).bit_length())})
