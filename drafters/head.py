"""What a head adds to DFlash's parallel drafting: the token before a draft has a say in it.

The backbone gives every slot of a block its hidden state and logits, whatever the other slots hold.
A head corrects these logits by a product of low rank,
`logit[child] + <left[parent], right[child]>`: `left` is computed from the token before, the slot's
hidden state and, in some heads, from all tokens before; `right` is a table. DSpark's Markov heads,
DFlash 2's selector and Domino all are of this form. `drafters.dflash.drafts` draws chains and trees
with it; plain DFlash has no head. XPress's, a `Refiner`, knows the whole block, and corrects all of
its slots at once. LiLiCorr's is another one, a `Lattice`.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class HeadSizes(NamedTuple):
    """What a head takes over from its backbone.

    Attributes:
        hidden_size: H.
        vocab_size: V, tokens of the target, which come before a draft.
        draft_vocab_size: tokens that can be drafted, V unless the drafter's vocabulary is reduced.
        block_size: positions of a block, the anchor's included.
        rms_norm_eps: of norms.
        joins_taps: whether the target's features become one state for all layers.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int = 0
    rms_norm_eps: float = 1e-6
    joins_taps: bool = True


class Head:
    """A head with its weights, in training as in drafting.

    Attributes:
        has_state: `left` depends on more tokens than the one before, in order.
        first_slot: the first slot whose logits are corrected; 0 is the one behind the anchor.
        num_candidates: tokens of a slot, those of the highest logits, that are corrected for a
            chain; None corrects the whole vocabulary.
        compares_candidates: corrections were learned among these candidates alone: then they
            compare these tokens with each other, and say nothing of others.
    """

    has_state = False
    first_slot = 0
    num_candidates: int | None = None
    compares_candidates = False

    @property
    def right(self) -> Tensor:
        """[draft_vocab_size, r]."""
        raise NotImplementedError

    @property
    def gathered_bytes(self) -> int:
        """Bytes of tables of which drafting reads a few rows alone."""
        return 0

    def left(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The left side of a slot's correction.

        Args:
            hidden: [..., H], final hidden states of slots.
            previous: int64 [...], tokens of the target that come before; the anchor before the
                first slot. Its axes and those of `hidden` are broadcast.
            state: [..., S] as the slot before left it; in the first slot that of `Refiner.start`,
                or None, and None for a head without one.

        Returns:
            [..., r], and the state [..., S] for the next slot, None for a head without one.
        """
        raise NotImplementedError

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """float32 [...], the probability that a slot's draft is accepted if those before it are;
        None where nothing was trained to tell it. Arguments are those of `left`.
        """
        return None


class Refiner(Head):
    """A head of which a pass corrects all slots of a block, each behind all tokens before it. A
    chain takes a few passes, each behind what the one before drafted (Jacobi): pass p settles
    slot p, and often many more. As many passes as slots draft what slot by slot would.

    The state that `left` leaves is smaller than that of the slot before.

    Attributes:
        num_passes: of a chain.
    """

    has_state = True
    num_passes: int

    def start(self, rows: Tensor, before: Tensor) -> Tensor:
        """The state [..., S] before the first slot, which knows the whole block.

        Args:
            rows: [..., B, H], final hidden states of its rows, that of the anchor the first.
            before: int64 [...], tokens of the target before the anchors.
        """
        raise NotImplementedError

    def sides(self, start: Tensor, previous: Tensor) -> Tensor:
        """The left sides [..., K, r] of the first K slots at once, as `left` has them.

        Args:
            start: [..., S] of `start`.
            previous: int64 [..., K], the anchor and the tokens of the slots but the last.
        """
        raise NotImplementedError


class Lattice:
    """A head that scores its candidates in pairs, each behind each of the slot before, instead of
    correcting logits; in training as in drafting.

    Attributes:
        num_candidates: tokens of a slot that it compares, those of the highest logits.
    """

    gathered_bytes = 0
    num_candidates: int

    def table(self, hidden: Tensor, token_ids: Tensor, scores: Tensor, context: Tensor) -> Tensor:
        """Scores of all pairs, which a softmax over the last axis makes probabilities.

        Args:
            hidden: [n, K, H], final hidden states of slots.
            token_ids: int64 [n, K, C], their candidates, the likeliest first, C of them or fewer.
            scores: float32 [n, K, C], log-probabilities of these.
            context: [n, H], what the target's features of the token before the anchor are to the
                draft layers (`DFlashModel.context_state`); zeros where there are none.

        Returns:
            float32 [n, K, C, C], by the candidate before and the candidate; in the first slot all
            of the former are the anchor.
        """
        raise NotImplementedError

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """None: nothing tells whether a draft is accepted but its own probability."""
        return None


class HeadConfig:
    """What `config.json` says about a head.

    Attributes:
        algorithm: what a drafter with it is called, as in `drafters.algorithms`.
    """

    algorithm: ClassVar[str]

    def check(self, sizes: HeadSizes, *, sample_from_anchor: bool) -> None:
        """Refuses a backbone that does not suit it; by default none.

        Raises:
            CheckpointError: it does not.
        """

    def modules(self, sizes: HeadSizes) -> Mapping[str, nn.Module]:
        """The head's weights, as a model's children, by the name before theirs."""
        raise NotImplementedError

    def head(self, model: nn.Module, embed: Callable[[Tensor], Tensor]) -> Head | Lattice:
        """The head of a model that has these modules.

        Args:
            model: on its device and in its type.
            embed: scaled input embeddings [..., H] of tokens of the target, int64 [...].
        """
        raise NotImplementedError

    def json(self) -> dict[str, Any]:
        """As `config.json` holds it, next to what it says about the backbone."""
        raise NotImplementedError


def left_sides(head: Head, hidden: Tensor, previous: Tensor, start: Tensor | None = None) -> Tensor:
    """The left sides [..., K, r] of all slots behind known tokens, as in training.

    Args:
        head: the head.
        hidden: [..., K, H].
        previous: int64 [..., K], the anchor and the tokens of the slots but the last.
        start: [..., S] of `Refiner.start`; None for another head.
    """
    if isinstance(head, Refiner):
        assert start is not None, "a refiner is given the whole block"
        return head.sides(start, previous)
    if not head.has_state:
        return head.left(hidden, previous, None)[0]
    sides, state = [], None
    for slot in range(hidden.shape[-2]):
        left, state = head.left(hidden[..., slot, :], previous[..., slot], state)
        sides.append(left)
    return torch.stack(sides, dim=-2)
