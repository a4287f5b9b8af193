"""Drafts copied from the request's own text: what followed the last tokens before.

Prompt lookup decoding (Saxena, 2023): suffix decoding (`drafters.suffix`) without past outputs,
which takes the latest of the longest matches.
"""

from pathlib import Path

from drafters.suffix.drafter import LONGEST, SuffixDrafter
from specdec.base.errors import InvalidInputError
from specdec.model.core import Verifier


class NGramDrafter(SuffixDrafter):
    """Copies what followed the last n-gram the last time it occurred, or in a tree the last times;
    see `specdec.model.core.Drafter`.

    Args:
        max_draft_tokens: largest k.
        prompt_lookup_max: longest n-gram compared; longer matches first, then later ones.
        prompt_lookup_min: shortest match that counts.

    Raises:
        InvalidInputError: a number out of range.
    """

    def __init__(
        self, *, max_draft_tokens: int = 8, prompt_lookup_max: int = 4, prompt_lookup_min: int = 1
    ) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max <= LONGEST:
            raise InvalidInputError(
                f"prompt_lookup_min is {prompt_lookup_min} and prompt_lookup_max"
                f" {prompt_lookup_max}; they must be ordered, from 1 to {LONGEST}"
            )
        super().__init__(
            max_draft_tokens=max_draft_tokens,
            longest=prompt_lookup_max,
            shortest=prompt_lookup_min,
            occurrences=1,
            pool_tokens=0,
        )
        self.compared = prompt_lookup_max


def load_ngram(path: str | Path | None = None, *, verifier: Verifier) -> NGramDrafter:
    """The n-gram drafter with its defaults.

    Raises:
        InvalidInputError: a path, for there is no checkpoint to read.
    """
    if path is not None:
        raise InvalidInputError(f"the ngram drafter has no checkpoint; leave out {str(path)!r}")
    return NGramDrafter()
