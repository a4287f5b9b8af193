"""The tokens that a target and its draft model have in common."""

from typing import Any

from specdec.base.errors import CheckpointError


def common_tokens(target: Any, draft: Any) -> int:
    """How many ids, from 0 on, hold all tokens that both tokenizers have under the same id.

    Added tokens may differ: one that the other side lacks is never drafted, or accepted.

    Raises:
        CheckpointError: an ordinary token has another id: drafts would say something else.
    """
    theirs, ours = (
        {id_: token for token, id_ in one.get_vocab().items()} for one in (target, draft)
    )
    added = {*target.added_tokens_encoder, *draft.added_tokens_encoder}
    shared = theirs.keys() & ours.keys()
    differing = sorted(
        id_ for id_ in shared if theirs[id_] != ours[id_] and not {theirs[id_], ours[id_]} & added
    )
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"{len(differing):,} of {len(shared):,} tokens are others than the target's: {first} is"
            f" {ours[first]!r} here and {theirs[first]!r} there; choose a draft model with the"
            " target's tokenizer, as its smaller relatives have"
        )
    return 1 + max((id_ for id_ in shared if theirs[id_] == ours[id_]), default=-1)
