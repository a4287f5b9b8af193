"""Masks of the rows of a block: those of plain matching along every path, and permissive where
nobody asks.
"""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("xgrammar")

from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.grammar.progress import GrammarProgress
from specdec.sampling.masks import TokenMasks, mask_logits
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, [EOS])
PADDED = GrammarCompiler(TOKENIZER, 128, [EOS])


def ids(text: str) -> list[int]:
    return [EOS if char == "$" else int(TOKENIZER.convert_tokens_to_ids(char)) for char in text]


def allowed(mask: torch.Tensor) -> str:
    """Characters that a row allows, $ for the end; * for all."""
    tokens = [token for token in range(VOCAB) if int(mask[token // 32]) >> token % 32 & 1]
    return (
        "*"
        if bool((mask == -1).all())
        else "".join("$" if token == EOS else TOKENIZER.decode([token]) for token in tokens)
    )


def masks_of(
    progress: GrammarProgress, drafts: str, parents: Sequence[int] | None = None
) -> list[str]:
    masks = torch.zeros(len(drafts) + 1, -(-VOCAB // 32), dtype=torch.int32)
    progress.fill(masks, ids(drafts), parents)
    return [allowed(row) for row in masks]


@pytest.mark.parametrize(
    ("rules", "read", "drafts", "parents", "expected", "dead"),
    [
        ("ab|cd", "", "", None, ["ac"], []),
        ("ab|cd", "", "ab", None, ["ac", "b", "$"], []),
        ("ab|cd", "a", "b$xx", None, ["b", "$", "*", "*", "*"], []),  # behind the end
        ("ab|cd", "", "axb", None, ["ac", "b", "*", "*"], []),  # behind a draft that is refused
        ("ab|cd", "", "acbdx", [0, 0, 1, 2, 0], ["ac", "b", "d", "$", "$", "*"], []),
        ("ab|cd", "", "xaxb", [0, 0, 1, 2], ["ac", "*", "b", "*", "$"], []),
        ("a~", "", "ab", None, ["a", "", "*"], [1]),
        ("~", "", "", None, [""], [0]),
        ("~", "", "a", None, ["", "*"], [0]),
    ],
)
def test_rows(
    rules: str,
    read: str,
    drafts: str,
    parents: list[int] | None,
    expected: list[str],
    dead: list[int],
) -> None:
    progress = COMPILER.start(Grammar.regex(rules))
    assert progress.advance(ids(read))
    for _ in range(2):  # drafts leave no trace
        assert masks_of(progress, drafts, parents) == expected
        assert progress.dead_ends == set(dead)


def test_drafts_that_are_no_tokens() -> None:
    """A padded vocabulary, or whatever a drafter gives: refused as others are."""
    progress = COMPILER.start(Grammar.regex("ab"))
    masks = torch.zeros(3, -(-VOCAB // 32), dtype=torch.int32)
    progress.fill(masks, [VOCAB + 200, 5])
    assert [allowed(row) for row in masks] == ["a", "*", "*"] and not progress.dead_ends


def test_special_tokens_are_no_text() -> None:
    """<s> fits into any string that is long enough,
    and would be lost when the output is decoded.
    """
    progress = COMPILER.start(Grammar.regex(".+"))
    assert not any(progress.advance([token]) for token in TOKENIZER.all_special_ids)
    masks = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32)
    progress.fill(masks)
    assert not any(
        int(masks[0, token // 32]) >> token % 32 & 1 for token in TOKENIZER.all_special_ids
    )
    assert progress.advance(ids("<s>"))  # character by character


def test_what_is_read_has_to_fit() -> None:
    progress = COMPILER.start(Grammar.regex("ab+"))
    assert (
        progress.advance(ids("ab"))
        and not progress.advance(ids("c"))
        and progress.advance(ids("b"))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits(dtype: torch.dtype) -> None:
    """Masked are those of requests with a place, each by its own masks; the last word of a row is
    cut.
    """
    logits = torch.randn(3, 2, 45, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = torch.randint(
        -(2**31), 2**31, (2, 2, 2), generator=torch.Generator().manual_seed(1)
    ).int()
    masked = logits.clone()
    mask_logits(masked, TokenMasks(words, torch.tensor([1, -1, 0])))
    for request, place in enumerate([1, None, 0]):
        for row in range(2):
            for token in range(45):
                refused = (
                    place is not None and not int(words[place, row, token // 32]) >> token % 32 & 1
                )
                expected = -torch.inf if refused else logits[request, row, token]
                assert masked[request, row, token] == expected


@pytest.mark.parametrize(
    ("drafts", "alternatives", "expected"),
    [
        ("abc", ["xx", "xx", "xx"], "abc"),
        ("xbx", ["ya", "xx", "xc"], "abc"),
        ("xbx", ["za", "xx", "ab"], "abx"),  # none fits the last slot
        ("xxx", ["bc", "ab", "ab"], "xxx"),
        ("abcx$x", ["xx", "xx", "xx", "$a", "ab", "ab"], "abc$$x"),  # behind the end
    ],
)
def test_mended(
    drafts: str, alternatives: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a trace; the first that fits is taken. Nothing is said of tokens without a text,
    which drafters may propose.
    """
    progress = PADDED.start(Grammar.regex("abc"))
    for _ in range(2):
        special = [*(token for token in TOKENIZER.all_special_ids if token != EOS), VOCAB, 127]
        assert progress.constrained(
            ids(drafts), [[*special, *ids(others)] for others in alternatives]
        ) == ids(expected)
    assert masks_of(progress, "") == ["a"]
    assert capfd.readouterr() == ("", "")
