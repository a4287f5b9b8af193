"""What ranks use only where all of them could make it, and found it right."""

import logging
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")

logger = logging.getLogger(__name__)


def made_by_all(
    make: Callable[[], Made],
    is_right: Callable[[Made], bool],
    least: Callable[[int], int],
    instead: str,
) -> Made | None:
    """What `make` gives on this rank; None on all ranks where it failed on one, or was not right
    there, which the log says.

    Args:
        make: fails with the errors of memory that devices do not share, or a torch that knows none.
        is_right: whether its sums have the bits of those in the order of ranks. All ranks are
            asked, or none.
        least: the smallest of all ranks' numbers.
        instead: what the ranks do without it.
    """
    made, reason = None, "another rank could not"
    try:
        made = make()
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
    if least(made is not None):
        assert made is not None
        if least(is_right(made)):
            return made
        reason = "its sums are not those in the order of ranks"
    logger.warning("%s: %s", instead, reason)
    return None
