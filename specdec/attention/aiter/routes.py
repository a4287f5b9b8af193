"""Routes: which kernel takes a group of requests. The first route of a list that fits is taken; the
list prints as a table.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from specdec.attention.aiter.groups import Group, Phase

Kernel = Callable[..., Tensor]


def always(*_: Any) -> bool:
    """The condition of a route that takes whatever is left of its phase."""
    return True


class Route(NamedTuple):
    """One line of a table.

    Attributes:
        phase: of the group.
        when: the condition in words.
        fits: the condition, asked about the group and what the list's owner knows besides.
        kernel: what computes the group's rows.
    """

    phase: Phase
    when: str
    fits: Callable[..., bool]
    kernel: Kernel


def choose(routes: Sequence[Route], group: Group, *facts: Any) -> Kernel:
    """The kernel of the first route that fits."""
    return next(
        route.kernel for route in routes if route.phase == group.phase and route.fits(group, *facts)
    )


def table(routes: Sequence[Route]) -> str:
    """The routes in words, a line each."""
    width = max(len(route.when) for route in routes)
    head = ("phase", "when", "kernel")
    lines = [head, *((r.phase, r.when or "any", r.kernel.__name__) for r in routes)]
    return "\n".join(f"{phase:<8} {when:<{width}}  {kernel}" for phase, when, kernel in lines)
