"""Sizes that memory is kept for: few enough that most requests find one that has been made."""


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`; 0 for 0.

    >>> [power_of_two(n) for n in (0, 1, 3, 4, 5)]
    [0, 1, 4, 4, 8]
    """
    return 1 << (number - 1).bit_length() if number else 0
