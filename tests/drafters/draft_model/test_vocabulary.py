"""Which tokens two tokenizers have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from drafters.draft_model.vocabulary import common_tokens
from specdec.base.errors import CheckpointError


@dataclass
class Words:
    """A tokenizer of these words."""

    vocab: Mapping[str, int]
    added_tokens_encoder: Mapping[str, int] = field(default_factory=dict)

    def get_vocab(self) -> Mapping[str, int]:
        return {**self.vocab, **self.added_tokens_encoder}


ABC = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("target", "draft", "count"),
    [
        (Words(ABC), Words(ABC), 3),
        (Words(ABC), Words({"a": 0, "b": 1}), 2),
        (Words({"a": 0}), Words(ABC), 1),
        (Words(ABC, {"<end>": 3}), Words(ABC, {"<end>": 3, "<tool>": 4}), 4),
        (Words(ABC, {"<end>": 3}), Words(ABC, {"<stop>": 3}), 3),
        (Words(ABC, {"<x>": 3, "<end>": 4}), Words(ABC, {"<y>": 3, "<end>": 4}), 5),
        (Words(ABC, {"<end>": 3}), Words({**ABC, "d": 3}), 3),
    ],
)
def test_common_tokens(target: Words, draft: Words, count: int) -> None:
    """Padding and added tokens may differ."""
    assert common_tokens(target, draft) == count


def test_another_vocabulary() -> None:
    said = (
        "2 of 3 tokens are others than the target's: 1 is 'c' here and 'b' there; choose a draft"
        " model"
    )
    with pytest.raises(CheckpointError, match=said):
        common_tokens(Words(ABC), Words({"a": 0, "c": 1, "b": 2}))
