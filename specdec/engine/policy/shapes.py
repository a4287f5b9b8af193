"""Shapes of blocks that are worth telling apart, among which the engine chooses."""

from typing import Literal

from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.model.core import Drafter

MAX_TREE_ROWS = 2048
"""Rows of all requests of a step up to which their drafts may form trees. With 256 requests trees
of 7 are the embedded model's fastest shape on an H100; larger ones take long to capture.
"""

MIN_SHARED = 8
"""Requests from which on a step may share out rows: among few there is little to choose from."""

_LENGTHS = (0, 1, 3, 7, 15, 31, 63)


def checked_draft_tokens(asked: int | Literal["auto"] | None, drafter: Drafter | None) -> int:
    """Most drafts per step: what is asked for, or the drafter's own number, which is the largest
    where the engine chooses.

    Raises:
        InvalidInputError: the drafter cannot give that many.
    """
    most = drafter.max_draft_tokens if drafter else 0
    if asked is None and drafter:
        return drafter.usual_draft_tokens or most
    if asked is None or asked == "auto":
        return most
    if asked > most:
        way_out = (
            f"choose 1 to {most}, or 0 for plain decoding"
            if drafter
            else "name a drafter, or leave it out"
        )
        raise InvalidInputError(
            f"num_draft_tokens is {asked} and the drafter gives at most {most}; {way_out}"
        )
    return asked


def ladder(most: int) -> tuple[int, ...]:
    """Values of k worth telling apart. With the anchor, most of them fill the tiles that kernels
    work in.

    >>> ladder(15), ladder(8), ladder(1), ladder(0)
    ((0, 1, 3, 7, 15), (0, 1, 3, 7, 8), (0, 1), (0,))
    """
    return (*(k for k in _LENGTHS if k < most), most)


def tree_shape(drafts: int, most: int, *, forward_for_each: bool = False) -> BlockShape:
    """A tree of so many drafts for up to `most` positions; a flat one where each takes a forward.

    >>> [tree_shape(n, 7, forward_for_each=True).depth for n in (1, 3, 7, 15, 31, 63)]
    [1, 2, 4, 6, 7, 7]
    """
    flat = max(1, 2 * drafts.bit_length() - 2)
    return BlockShape(drafts, min(most, flat if forward_for_each else drafts))


def shapes(most: int, *, trees: int, forward_for_each: bool = False) -> tuple[BlockShape, ...]:
    """Shapes worth telling apart: chains of up to `most` drafts, trees of up to `trees` drafts.

    >>> [str(shape) for shape in shapes(3, trees=31)]
    ['0', '1', '3', 'tree 3', 'tree 7', 'tree 15', 'tree 31']
    """
    drafts = (n for n in _LENGTHS if 1 < n <= trees and most)
    made = (tree_shape(n, most, forward_for_each=forward_for_each) for n in drafts)
    return (*map(BlockShape, ladder(most)), *made)


def shared_shapes(most: int, *, trees: bool, forward_for_each: bool = False) -> list[BlockShape]:
    """Shapes with a budget: larger blocks than those that are worth verifying whole.

    >>> [str(shape) for shape in shared_shapes(9, trees=False)]
    ['1 of 7', '2 of 7', '3 of 7', '5 of 9']
    """
    made = []
    for drafts, budget in ((7, 1.0), (7, 2.0), (7, 3.0), (15, 5.0)):
        whole = BlockShape(min(drafts, most))
        if trees:
            whole = tree_shape(drafts, most, forward_for_each=forward_for_each)
        made += [whole._replace(budget=budget)] if budget < whole.drafts else []
    return made


def may_have(shape: BlockShape, num_reqs: int) -> bool:
    """Whether steps of so many requests may have a shape that is chosen."""
    if shape.budget:
        return num_reqs >= MIN_SHARED
    return not shape.is_tree or num_reqs * shape.rows <= MAX_TREE_ROWS
