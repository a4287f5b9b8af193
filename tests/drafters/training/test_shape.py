"""Which token fills the rows that a new drafter predicts."""

from types import SimpleNamespace

import pytest
from transformers import AddedToken

from drafters.training.shape import choose_mask_token
from specdec.base.errors import InvalidInputError
from tests.helpers.tiny_models import piece_tokenizer

PIECES = ["<pad>", "<s>", "</s>", *(f"w{row}" for row in range(3, 20))]


def chosen(pieces: list[str], vocab_size: int, *special: str, asked: int | None = None) -> int:
    """The mask of a target with so many embeddings, whose texts end with token 2."""
    tokenizer = piece_tokenizer(pieces)
    tokenizer.add_tokens([AddedToken(one, special=True) for one in special], special_tokens=True)
    target = SimpleNamespace(vocab_size=vocab_size, eos_token_ids=(2,))
    return choose_mask_token(asked, tokenizer, target)


def test_a_row_without_a_token_comes_first() -> None:
    """As does one that a converter to GGUF has filled: it names every row of a table."""
    size = len(piece_tokenizer(PIECES))
    fillers = [f"[PAD{row}]" for row in range(size + 1, size + 4)]
    assert chosen(PIECES, size + 4, "<|spare|>") == size + 1
    assert chosen([*PIECES, "last", *fillers], size + 4) == size + 1
    assert chosen([*PIECES, "last", *fillers], size + 4, asked=size + 2) == size + 2


def test_a_special_token_comes_next() -> None:
    size = len(piece_tokenizer(PIECES))
    assert chosen(PIECES, size + 1, "<|spare|>") == size


def test_a_word_is_no_filler() -> None:
    """Nor is a filler's name at another row."""
    pieces = [*PIECES, "[PAD0]", "[PAD]"]
    with pytest.raises(InvalidInputError, match="no token to spare for the mask"):
        chosen(pieces, len(piece_tokenizer(pieces)))
